package lib

import (
	"context"
	"fmt"

	"github.com/NVIDIA/go-nvlib/pkg/nvpci"
	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Bus is the machine's PCI bus as sysfs shows it, which takes no driver.
type Bus struct {
	pci  nvpci.Interface
	lane aside.Lane
}

var _ nvml.Bus = (*Bus)(nil)

// OpenBus reads the bus from a directory of sysfs, /sys/bus/pci/devices where it is empty.
func OpenBus(devices string, log *zap.Logger) *Bus {
	options := []nvpci.Option{nvpci.WithLogger(quiet{log.Named("pci")})}
	if devices != "" {
		options = append(options, nvpci.WithPCIDevicesRoot(devices))
	}
	return &Bus{pci: nvpci.New(options...)}
}

// quiet logs at debug level go-nvlib's warnings of each look about devices whose names no database has.
type quiet struct{ log *zap.Logger }

// Warningf implements nvpci's logger.
func (q quiet) Warningf(format string, args ...any) {
	q.log.Debug("reading the PCI bus", zap.String("warning", fmt.Sprintf(format, args...)))
}

// GPUs implements nvml.Bus. It leaves out parts of a GPU that its host lends to virtual machines.
func (b *Bus) GPUs(ctx context.Context) ([]nvml.BusGPU, error) {
	return aside.Do(ctx, &b.lane, "reading the PCI bus", func(context.Context, aside.At) ([]nvml.BusGPU, error) {
		found, err := b.pci.GetGPUs()
		if err != nil {
			return nil, err
		}
		var out []nvml.BusGPU
		for _, d := range found {
			if d.Vendor == nvpci.PCINvidiaVendorID && !d.SriovInfo.IsVF() {
				out = append(out, nvml.BusGPU{PCI: d.Address, Driver: d.Driver})
			}
		}
		return out, nil
	})
}
