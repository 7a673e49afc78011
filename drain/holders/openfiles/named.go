package openfiles

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// named reads a process of a simulated machine's table, which is not the kernel's: its links are only names, and lead to no file. It goes by these
// names, and touches no file.
func (s *Scan) named(ctx context.Context, pid int) error {
	process := filepath.Join(s.Root, strconv.Itoa(pid))
	if err := s.namedFiles(ctx, pid, filepath.Join(process, "fd")); err != nil {
		return err
	}
	threads, err := Numbers(filepath.Join(process, "task"))
	if err != nil {
		if Gone(err) {
			return nil
		}
		return err
	}
	for _, tid := range threads {
		if err := s.namedFiles(ctx, pid, filepath.Join(process, "task", strconv.Itoa(tid), "fd")); err != nil && !Gone(err) {
			return err
		}
	}
	return nil
}

func (s *Scan) namedFiles(ctx context.Context, pid int, folder string) error {
	d, err := os.Open(filepath.Clean(folder))
	if err != nil {
		return err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	for _, name := range names {
		target, linkErr := os.Readlink(filepath.Join(folder, name))
		if linkErr != nil && !Gone(linkErr) {
			return linkErr
		}
		if gpu, ok := gpuNamed(target); ok {
			s.Found(pid, File{GPU: gpu, Path: printable([]byte(target))})
		}
	}
	return errors.Join(err, ctx.Err())
}

// gpuNamed reads the minor number of a GPU from the name of its device file. The file may have been deleted since, for example with a replaced driver
// container, and may be below another folder, such as that container's.
func gpuNamed(target string) (gpu int, ok bool) {
	folder, name := filepath.Split(strings.TrimSuffix(target, " (deleted)"))
	if number, ok := strings.CutPrefix(name, "nvidia-cap"); ok && strings.HasSuffix(folder, "/dev/nvidia-caps/") {
		n, err := strconv.Atoi(number)
		return (n - firstCapability) / capabilitiesOfGPU, err == nil && n >= firstCapability
	}
	number, ok := strings.CutPrefix(name, "nvidia")
	n, err := strconv.Atoi(number)
	return n, ok && err == nil && n >= 0 && strings.HasSuffix(folder, "/dev/")
}
