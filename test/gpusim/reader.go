package gpusim

import (
	"context"
	"fmt"

	"github.com/gpuslice/gpuslice/nvml"
)

var _ nvml.HealthReader = (*driver)(nil)

// Health implements nvml.HealthReader, as nvml/lib does.
func (d *driver) Health(ctx context.Context, thorough bool) ([]nvml.Health, error) {
	const op = "reading the health of the GPUs"
	var out []nvml.Health
	err := d.do(ctx, op, "", func() error {
		out = nil
		n, r := d.library.DeviceCount()
		if r != Success {
			return failure(op, "", r)
		}
		for i := range n {
			g, r := d.healthOf(i, thorough)
			if r == GPUIsLost {
				g, r = nvml.Health{Index: i, UUID: g.UUID, PCI: g.PCI, Lost: true}, Success
				if known, seen := d.known[i]; seen {
					g.UUID, g.PCI = known.UUID, known.PCI
				}
			}
			if r != Success {
				return failure(fmt.Sprintf("reading the health of GPU %d", i), g.UUID, r)
			}
			out = append(out, g)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func reading[T any](v T, r Return, lost *bool) nvml.Reading[T] {
	if r == Success {
		return nvml.Answered(v)
	}
	*lost = *lost || r == GPUIsLost
	return nvml.Reading[T]{Code: r.String()}
}

// fieldIDs are the fields to read, in the order of healthOf.
var fieldIDs = []uint32{3, 4, 5, 6, 29, 30, 31, 142, 143, 144, 145, 226, 227, 230}

func (d *driver) healthOf(index int, thorough bool) (nvml.Health, Return) {
	l := d.library
	g := nvml.Health{Index: index}
	h, r := l.DeviceByIndex(index)
	if r != Success {
		return g, r
	}
	uuid, r := l.UUID(h)
	if r != Success {
		return g, r
	}
	pci, r := l.PCI(h)
	if r != Success {
		return g, r
	}
	g.UUID, g.PCI = nvml.UUID(uuid), pci.Address
	known := d.known[index]
	known.UUID, known.PCI = g.UUID, g.PCI
	d.known[index] = known
	lost := false
	found, r := l.Fields(h, fieldIDs)
	if r != Success {
		found = make([]Field, len(fieldIDs))
		for i := range found {
			found[i].Return = r
		}
	}
	count := func(i int) nvml.Reading[uint64] { return reading(found[i].Value, found[i].Return, &lost) }
	flag := func(i int) nvml.Reading[bool] { return reading(found[i].Value != 0, found[i].Return, &lost) }
	g.ECC = nvml.ECC{CorrectedVolatile: count(0), UncorrectedVolatile: count(1), CorrectedAggregate: count(2), UncorrectedAggregate: count(3)}
	g.Pages = nvml.Pages{Corrected: count(4), Uncorrected: count(5), Pending: flag(6)}
	g.Rows = nvml.Rows{Corrected: count(7), Uncorrected: count(8), Pending: flag(9), Failed: flag(10)}
	g.NeedsReset, g.NeedsDrain = flag(11), flag(12)
	g.Action = reading(nvml.RecoveryAction(found[13].Value), found[13].Return, &lost)
	current, pending, r := l.ECCMode(h)
	g.ECCMode = reading(nvml.Mode{Current: current, Pending: pending}, r, &lost)
	current, pending, r = l.MIGMode(h)
	g.MIGMode = reading(nvml.Mode{Current: current, Pending: pending}, r, &lost)
	if thorough {
		d.thoroughly(h, &g, &lost)
	}
	if lost {
		return g, GPUIsLost
	}
	return g, Success
}

func (d *driver) thoroughly(h Device, g *nvml.Health, lost *bool) {
	l := d.library
	banks, r := l.RemapBanks(h)
	g.Banks = reading(nvml.Banks{Max: banks.FullBanks(), None: banks.SparelessBanks}, r, lost)
	sram, r := l.SRAMStatus(h)
	g.SRAMThreshold = reading(sram.SRAMThreshold, r, lost)
	repair, r := l.RepairStatus(h)
	g.RepairPending = reading(repair.RepairPending, r, lost)
	memory, r := l.UnrepairableMemory(h)
	g.Unrepairable = reading(memory.Unrepairable, r, lost)
	fabric, r := l.Health(h)
	f := nvml.Fabric{State: nvml.FabricState(fabric.Fabric.State)}
	f.Failed = f.State == nvml.FabricCompleted && fabric.Fabric.Status != Success
	f.Healthy = fabric.Fabric.Mask&0x3 != 1 && fabric.Fabric.Mask>>2&0x3 != 1 && fabric.Fabric.Mask>>4&0x3 != 1 && fabric.Fabric.Mask>>6&0x3 != 1
	g.Fabric = reading(f, r, lost)
}
