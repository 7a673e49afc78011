// Package openfiles finds the device files of GPUs that processes have open, in a process table. It knows neither pods nor
// GPUs by more than the numbers of their device files.
//
// It trusts the kernel, and not names: a process may give a device file any name, and any file the name of a device. A file
// counts if the kernel has opened it as a character device of NVIDIA's major number. The package touches no file system that a
// server or program serves: a stat of a file on NFS or FUSE may wait for the server, for ever. So it asks the kernel about a file
// only if the mount that the file was opened on shows that this machine alone answers.
//
// It does not find
//   - a file that is mapped and closed, on its way through a socket, or registered with io_uring;
//   - a device file on a file system that another machine or a program serves (NFS, FUSE), or that a process has mounted for
//     itself: kubelet mounts no device files there, and in a user namespace the kernel opens none there;
//   - a device that is open as /dev/dri/* alone, as a desktop's.
package openfiles

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

// File is an open file: by it a process holds a GPU.
type File struct {
	GPU  int    // N of the GPU with the device file /dev/nvidiaN: its minor number
	Path string // as the process has named the file, as far as that can be printed and is short
}

// Scan is one observation of a process table.
type Scan struct {
	Root   string                   // mount point of procfs of the host's PID namespace
	At     func(what string)        // gets the name of the next process or file; may be nil
	Found  func(pid int, file File) // gets each open file that counts, as often as it is open
	Failed func(err error)          // gets each error of reading; the end of a process is none

	gpus   uint32             // major number of the GPUs' device files; 0 for NVIDIA's
	target [unix.PathMax]byte // of the link that was read last
	info   [maxInfo]byte
	caps   uint32 // major number of MIG's capabilities; 0 if the driver has none
	kcmp   bool   // pids of the table are those of this process's own PID namespace
	mounts mounts
	later  []open // files on mounts that no process had shown yet; at most mostLater
}

// open is an open file of a process.
type open struct {
	pid    int
	folder string // /proc/PID/fd, or /proc/PID/task/TID/fd
	name   string
	mount  int
}

// mostLater bounds the files that wait for their mount. Files of memory without a name are on a mount that no process shows, and a process
// may have a million open.
const mostLater = 4096

// nvidiaMajor is the major number of /dev/nvidiaN, the same on every machine (NV_MAJOR_DEVICE_NUMBER of NVIDIA's open kernel modules). The major
// number of /dev/nvidia-caps differs.
const nvidiaMajor = 195

const (
	// lastGPU is the greatest minor number that is a GPU's (NV_MINOR_DEVICE_NUMBER_REGULAR_MAX). Beyond are nvidia-modeset
	// and nvidiactl, which every client has open besides.
	lastGPU = 247
	// The minor numbers of /dev/nvidia-caps begin with MIG's config and monitor, which belong to no GPU in particular. 15 GPU instances for each GPU
	// follow, each with itself and 8 compute instances. The GPU is named by its own minor number.
	firstCapability   = 3
	capabilitiesOfGPU = 15 * (1 + 8)
	// maxInfo bounds the reading of /proc/PID/fdinfo/N. Flags and mount are in the first three lines; a program may make the
	// others long.
	maxInfo = 256
	// maxPath bounds a file's path in a message.
	maxPath = 100
)

// Run takes the observation. Its error means that it could not read the table at all, or is ctx's error. ctx ends the observation between two files.
func (s *Scan) Run(ctx context.Context) error {
	if s.At == nil {
		s.At = func(string) {}
	}
	real, err := s.isProcfs()
	if err != nil {
		return err
	}
	if real {
		if err := s.prepare(ctx); err != nil {
			return err
		}
	}
	pids, err := Numbers(s.Root)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if real {
			s.At("the open files of pid " + strconv.Itoa(pid))
			err = s.process(ctx, pid)
		} else {
			err = s.named(ctx, pid)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil && !Gone(err) {
			s.Failed(err)
		}
	}
	s.askLater(ctx)
	return ctx.Err()
}

// isProcfs reports whether a table is the kernel's.
func (s *Scan) isProcfs() (bool, error) {
	var of unix.Statfs_t
	if err := unix.Statfs(s.Root, &of); err != nil {
		return false, &fs.PathError{Op: "statfs", Path: s.Root, Err: err}
	}
	return of.Type == unix.PROC_SUPER_MAGIC, nil
}

// prepare reads the major numbers and the host's mounts, which are the same for all processes.
func (s *Scan) prepare(ctx context.Context) error {
	if s.gpus == 0 {
		s.gpus = nvidiaMajor
	}
	devices, err := read(filepath.Join(s.Root, "devices"), 64<<10)
	if err != nil {
		return err
	}
	s.caps = majorOf("nvidia-caps", devices)
	self, err := os.Readlink(filepath.Join(s.Root, "self"))
	if err != nil {
		return err
	}
	s.kcmp = self == strconv.Itoa(os.Getpid())
	// The mounts of the host's first process show which file systems are the machine's own, and most processes have some
	// files open that they got from there, such as /dev/null.
	return s.mounts.readHost(ctx, s.Root)
}

// majorOf finds a driver among the character devices of /proc/devices.
func majorOf(driver, devices string) uint32 {
	for line := range strings.Lines(devices) {
		number, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == driver {
			if n, err := strconv.ParseUint(number, 10, 32); err == nil {
				return uint32(n)
			}
		}
		if strings.HasPrefix(line, "Block devices") {
			break
		}
	}
	return 0
}

// process reads the open files of a process, and of those of its threads that have files of their own.
func (s *Scan) process(ctx context.Context, pid int) error {
	folder := filepath.Join(s.Root, strconv.Itoa(pid))
	err := s.openFiles(ctx, pid, folder)
	if err != nil && !Gone(err) {
		return err
	}
	// Procfs counts the threads in the links of the folder. Most processes have one.
	var tasks unix.Stat_t
	if err := unix.Stat(folder+"/task", &tasks); err != nil {
		return err
	}
	const linksOfFolder, oneThread = 2, 1
	if tasks.Nlink == linksOfFolder+oneThread {
		return nil
	}
	threads, err := Numbers(folder + "/task")
	if err != nil {
		return err
	}
	for _, tid := range threads {
		if tid == pid || s.sharesFiles(pid, tid) {
			continue
		}
		if err := s.openFiles(ctx, pid, folder+"/task/"+strconv.Itoa(tid)); err != nil && !Gone(err) {
			return err
		}
	}
	return nil
}

// sharesFiles reports whether the thread has the files of its process, as nearly all have. Threads made by clone without CLONE_FILES
// have not, nor those that have called unshare; and if the first thread has ended, only the others have any. It is false if the kernel
// does not say, so that the caller reads the thread.
func (s *Scan) sharesFiles(pid, tid int) bool {
	if !s.kcmp {
		return false
	}
	const kcmpFiles = 2
	order, _, errno := unix.RawSyscall6(unix.SYS_KCMP, uintptr(pid), uintptr(tid), kcmpFiles, 0, 0, 0)
	return errno == 0 && order == 0
}

// openFiles reads the open files in the folder of a process, or of one of its threads.
func (s *Scan) openFiles(ctx context.Context, pid int, of string) error {
	d, err := os.Open(filepath.Clean(of + "/fd"))
	if err != nil {
		return err
	}
	defer d.Close()
	infos, err := os.Open(filepath.Clean(of + "/fdinfo"))
	if err != nil {
		return err
	}
	defer infos.Close()
	fds, facts := int(d.Fd()), int(infos.Fd())
	for {
		names, err := d.Readdirnames(512) // a process may have a million, and ctx may end before
		for _, name := range names {
			if err := s.file(fds, facts, open{pid: pid, folder: d.Name(), name: name}); err != nil && !Gone(err) {
				return &fs.PathError{Op: "reading", Path: d.Name() + "/" + name, Err: err}
			}
		}
		if len(s.later) >= mostLater {
			s.askLater(ctx)
			s.At("the open files of pid " + strconv.Itoa(pid))
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err = errors.Join(err, ctx.Err()); err != nil {
			return err
		}
	}
}

// readLink gives the path that the table shows for an open file, valid until the next call. It serves for messages alone.
func (s *Scan) readLink(fds int, name string) ([]byte, error) {
	// As os.Readlink, in half its time.
	n, err := unix.Readlinkat(fds, name, s.target[:])
	if errors.Is(err, unix.ENAMETOOLONG) { // Linux does not show paths of more than a page
		return []byte("/…"), nil
	}
	return s.target[:max(n, 0)], err
}

// printable makes a path fit for a message.
func printable(path []byte) string {
	text := sanitize.Name(string(path[:min(len(path), maxPath)]))
	if len(path) > maxPath {
		text += "…"
	}
	return text
}

// file reads one open file.
func (s *Scan) file(fds, infos int, f open) error {
	target, err := s.readLink(fds, f.name)
	if err != nil || len(target) == 0 || target[0] != '/' {
		return err // most open files are sockets, pipes and others without a path
	}
	flags, mount, err := s.facts(infos, f.name)
	if err != nil {
		return err
	}
	if flags&unix.O_PATH != 0 {
		return nil // with O_PATH only its name is open, which needs no right, and not the device
	}
	f.mount = mount
	switch s.mounts.of(mount, s.Root, f.pid) {
	case local:
		return s.ask(fds, f)
	case unknown:
		s.later = append(s.later, f)
	case foreign:
	}
	return nil
}

// facts returns the flags that the file was opened with, and the mount that it was opened on. Reading them touches neither.
func (s *Scan) facts(infos int, name string) (flags, mount int, err error) {
	fd, err := unix.Openat(infos, name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, 0, err
	}
	n, err := unix.Read(fd, s.info[:])
	_ = unix.Close(fd)
	if err != nil {
		return 0, 0, err
	}
	text := string(s.info[:n])
	f, err := field(text, "flags:", 8)
	if err != nil {
		return 0, 0, err
	}
	m, err := field(text, "mnt_id:", 10)
	return f, m, err
}

// field reads a number of fdinfo.
func field(text, name string, base int) (int, error) {
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(line, name); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(value), base, 64)
			return int(n), err
		}
	}
	return 0, fmt.Errorf("fdinfo says no %s", name)
}

// ask asks the kernel whether an open file is a device of a GPU.
func (s *Scan) ask(fds int, f open) error {
	var is unix.Statx_t
	err := unix.Statx(fds, f.name, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE, &is)
	if err != nil {
		return err
	}
	if is.Mode&unix.S_IFMT != unix.S_IFCHR {
		return nil
	}
	if gpu, ok := s.gpuOf(is.Rdev_major, int(is.Rdev_minor)); ok {
		target, err := s.readLink(fds, f.name)
		if err != nil {
			return err
		}
		s.Found(f.pid, File{GPU: gpu, Path: printable(target)})
	}
	return nil
}

// gpuOf returns the minor number of the GPU that a character device belongs to. Some devices of NVIDIA's driver belong to no single GPU: nvidiactl
// and nvidia-uvm, which every client has open besides, nvidia-modeset, and those of NVSwitch.
func (s *Scan) gpuOf(major uint32, minor int) (gpu int, ok bool) {
	switch {
	case major == s.gpus:
		return minor, minor <= lastGPU
	case major == s.caps && major != 0:
		return (minor - firstCapability) / capabilitiesOfGPU, minor >= firstCapability
	}
	return 0, false
}

// askLater checks the files on mounts that no process had shown when the observation met them. Another process may have shown the mount since. A
// mount that no process shows was unmounted after the file was opened, or is the kernel's own. Only a stat of the file shows more, and it may hang:
// so askLater checks these files last, or when they are many, and reports each to At.
func (s *Scan) askLater(ctx context.Context) {
	for _, f := range s.later {
		if ctx.Err() != nil {
			return
		}
		if s.mounts.known[f.mount] == foreign {
			continue
		}
		s.At(f.folder + "/" + f.name)
		fds, err := unix.Open(f.folder, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = s.ask(fds, f)
			_ = unix.Close(fds)
		}
		if err != nil && !Gone(err) {
			s.Failed(&fs.PathError{Op: "reading", Path: f.folder + "/" + f.name, Err: err})
		}
	}
	s.later = s.later[:0]
}

// Numbers lists the entries of a folder of procfs that are named by a number: processes, or threads.
func Numbers(folder string) ([]int, error) {
	d, err := os.Open(filepath.Clean(folder))
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var out []int
	for _, name := range names {
		if n, err := strconv.Atoi(name); err == nil {
			out = append(out, n)
		}
	}
	return out, nil
}

// Gone reports whether the error of reading from procfs means that the process, or its file, is not there any more.
func Gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// read returns the text of a file of procfs of at most limit bytes.
func read(path string, limit int64) (string, error) {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(text)) > limit {
		err = &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("it has more than %d bytes", limit)}
	}
	return string(text), err
}

// Read returns the text of a file of procfs.
func Read(path string) (string, error) { return read(path, maxText) }

// maxText bounds the reading of /proc/PID/cgroup, the longest file that callers read whole. The kernel shows up to 4096 bytes for each hierarchy of
// cgroups, and version 1 has some 14.
const maxText = 128 << 10
