package cdi

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// kernel is the driver's folder with the capabilities of the existing instances. /proc/driver is the same in every container that does not cover it.
const kernel = "/proc/driver/nvidia/capabilities"

// kernelDevices are the MIG devices that the kernel lists.
type kernelDevices struct {
	devices int
	nodes   map[int]fs.FileMode // modes of the device files of their capabilities, by minor number
}

// readKernel reads the kernel's list. It is empty if this process cannot see the list.
func readKernel() (kernelDevices, error) {
	out := kernelDevices{nodes: map[int]fs.FileMode{}}
	compute, err := filepath.Glob(kernel + "/gpu*/mig/gi*/ci*/access")
	if err != nil {
		return out, fmt.Errorf("listing %s: %w", kernel, err)
	}
	for _, ci := range compute {
		gi := filepath.Join(filepath.Dir(filepath.Dir(ci)), "access")
		err := errors.Join(out.add(ci), out.add(gi))
		if errors.Is(err, fs.ErrNotExist) { // it is just being destroyed
			continue
		}
		if err != nil {
			return out, err
		}
		out.devices++
	}
	return out, nil
}

func (k kernelDevices) add(access string) error {
	text, err := os.ReadFile(access)
	if err != nil {
		return fmt.Errorf("reading a capability: %w", err)
	}
	fields := map[string]int{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		if n, err := strconv.Atoi(strings.TrimSpace(value)); err == nil {
			fields[name] = n
		}
	}
	minor, ok := fields["DeviceFileMinor"]
	if !ok {
		return fmt.Errorf("reading capability %s: no DeviceFileMinor in it", access)
	}
	k.nodes[minor] = fs.FileMode(fields["DeviceFileMode"]) & fs.ModePerm //nolint:gosec // cut to the nine bits of permissions
	return nil
}

// nodes lists the minor numbers of the capabilities that the node has device files of.
func (s *Specs) nodes() (map[int]bool, error) {
	if _, err := os.Lstat(filepath.Join(s.devRoot, "dev", "nvidiactl")); err != nil {
		return nil, fmt.Errorf("%w: %s must hold the node's own /dev, and NVIDIA's driver must be loaded", err, s.devRoot)
	}
	entries, err := os.ReadDir(s.capsDir())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listing the device files of capabilities: %w", err)
	}
	out := map[int]bool{}
	for _, e := range entries {
		if number, ok := strings.CutPrefix(e.Name(), "nvidia-cap"); ok {
			if minor, err := strconv.Atoi(number); err == nil {
				out[minor] = true
			}
		}
	}
	return out, nil
}

func (s *Specs) capsDir() string { return filepath.Join(s.devRoot, "dev", "nvidia-caps") }

// makeNodes makes the device files of existing instances. The driver's library makes them only for itself, and in a
// container only in that container's own /dev. Device files of instances that are gone do no harm: makeNodes leaves them, as nvidia-smi does.
func (s *Specs) makeNodes() error {
	now, err := readKernel()
	if err != nil || len(now.nodes) == 0 {
		return err
	}
	have, err := s.nodes()
	if err != nil {
		return err
	}
	major := uint32(0)
	for minor, mode := range now.nodes {
		if have[minor] {
			continue
		}
		if major == 0 {
			if major, err = majorOf("nvidia-caps"); err != nil {
				return err
			}
			if err := os.MkdirAll(s.capsDir(), 0o755); err != nil { //nolint:gosec // containers of every user look into it
				return fmt.Errorf("making device files of capabilities: %w", err)
			}
		}
		path := filepath.Join(s.capsDir(), fmt.Sprintf("nvidia-cap%d", minor))
		//nolint:gosec // minor numbers are small
		err := mknod(path, unix.S_IFCHR|uint32(mode), int(unix.Mkdev(major, uint32(minor))))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("making device file %s: %w: run nvidia-smi on the node, which makes it too", path, err)
		}
	}
	return nil
}

// mknod is replaced in tests, since only root outside of containers can make device files.
var mknod = unix.Mknod

// majorOf finds the major number of a character device, which the kernel hands out again at each start.
func majorOf(device string) (uint32, error) {
	const path = "/proc/devices"
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("looking for the major number of %s: %w", device, err)
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) == 2 && fields[1] == device {
			if n, err := strconv.ParseUint(fields[0], 10, 32); err == nil {
				return uint32(n), nil
			}
		}
	}
	return 0, fmt.Errorf("looking for the major number of %s: it is not in %s, is NVIDIA's driver loaded?", device, path)
}
