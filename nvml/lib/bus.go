package lib

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// What sysfs says of NVIDIA's GPUs: the vendor, and the classes of a GPU with and without a display.
const (
	vendorNVIDIA = 0x10de
	classVGA     = 0x030000
	class3D      = 0x030200
)

// Bus is the machine's PCI bus as sysfs shows it, which takes no driver.
//
// go-nvlib reads it too, but with a database of all device names for each observation and each GPU: 1.5 MB of the program, and several times as much
// garbage.
type Bus struct {
	devices string
	lane    aside.Lane
}

var _ nvml.Bus = (*Bus)(nil)

// OpenBus reads the bus from a directory of sysfs, /sys/bus/pci/devices where it is empty.
func OpenBus(devices string) *Bus {
	return &Bus{devices: cmp.Or(devices, "/sys/bus/pci/devices")}
}

// GPUs implements nvml.Bus. It leaves out parts of a GPU that its host lends to virtual machines.
func (b *Bus) GPUs(ctx context.Context) ([]nvml.BusGPU, error) {
	return aside.Do(ctx, &b.lane, "reading the PCI bus", func(context.Context, aside.At) ([]nvml.BusGPU, error) {
		all, err := os.ReadDir(b.devices)
		if err != nil {
			return nil, err
		}
		var out []nvml.BusGPU
		for _, d := range all {
			gpu, is, err := b.gpu(d.Name())
			switch {
			case errors.Is(err, fs.ErrNotExist), err == nil && !is: // the device has left the bus since it was listed, or is no GPU
			case err != nil:
				return nil, fmt.Errorf("reading the PCI device %s: %w", d.Name(), err)
			default:
				out = append(out, gpu)
			}
		}
		return out, nil
	})
}

// gpu reads one device, and reports whether it is a GPU of NVIDIA and a whole one.
func (b *Bus) gpu(address string) (nvml.BusGPU, bool, error) {
	device := filepath.Join(b.devices, address)
	vendor, err := number(filepath.Join(device, "vendor"))
	if err != nil || vendor != vendorNVIDIA {
		return nvml.BusGPU{}, false, err
	}
	class, err := number(filepath.Join(device, "class"))
	if err != nil || class != classVGA && class != class3D {
		return nvml.BusGPU{}, false, err
	}
	if _, err := os.Lstat(filepath.Join(device, "physfn")); !errors.Is(err, fs.ErrNotExist) { // it is a part of that one
		return nvml.BusGPU{}, false, err
	}
	out := nvml.BusGPU{PCI: address}
	driver, err := os.Readlink(filepath.Join(device, "driver"))
	switch {
	case err == nil:
		out.Driver = filepath.Base(driver)
	case !errors.Is(err, fs.ErrNotExist):
		return nvml.BusGPU{}, false, err
	}
	return out, true, nil
}

// number reads a number from a file of sysfs.
func number(file string) (uint64, error) {
	const longest = 32 // bytes; a number is shorter
	text, err := aside.Bounded(file, longest)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(text)), 0, 32)
}
