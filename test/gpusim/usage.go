package gpusim

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
)

// Busy lets a process compute for so many percent of the time on each device that it holds.
func (n *Node) Busy(pid, percent int) error {
	return n.update(fmt.Sprintf("changing how busy process %d is", pid), func(s *state) error {
		found := false
		for _, g := range s.GPUs {
			for _, p := range g.Processes {
				if p.PID == pid && !p.Hidden {
					p.Busy, found = percent, true
				}
			}
		}
		if !found || percent < 0 || percent > 100 {
			return errors.New("it computes on no device, or the percentage is not one")
		}
		return nil
	})
}

// Utilization is how busy a process has kept a GPU lately.
type Utilization struct {
	PID  int
	Time uint64 // of the sample, in microseconds
	SM   int    // percentage of the time
}

// ProcessUtilization are the processes that have computed on a GPU since the time, in microseconds: NotFound if none has, and NotSupported of
// a GPU in MIG mode and of a MIG device.
func (l *Library) ProcessUtilization(d Device, since uint64) (out []Utilization, r Return) {
	r = l.onDevice(GetProcessUtilization, d, func(g *gpu, _ *instance, c *compute) Return {
		if g.Current || c != nil {
			return NotSupported
		}
		now := uint64(time.Now().UnixMicro())
		for _, p := range g.processes(func(p *process) bool { return p.Busy > 0 && now > since }) {
			out = append(out, Utilization{PID: p.PID, Time: now, SM: p.Busy})
		}
		if len(out) == 0 {
			return NotFound
		}
		return Success
	})
	return out, r
}

// GPMSample is a buffer for a sample of a GPU's performance counters, as nvmlGpmSampleAlloc gives it.
type GPMSample struct {
	mu     sync.Mutex
	filled bool
	gpu    int
	gi     int
	serial uint64
	at     time.Time
	busy   int
}

// gpmInterval is the least time between two samples, by nvml.h.
const gpmInterval = 100 * time.Millisecond

// GPMSupported reports whether the GPU has performance counters: Hopper and later, with a driver from 520 on.
func (l *Library) GPMSupported(d Device) (supported bool, r Return) {
	r = l.onDeviceOf(GpmQueryDeviceSupport, d, func(s *state, g *gpu, _ *instance, _ *compute) Return {
		if s.generation() < withGPM {
			return FunctionNotFound
		}
		supported = g.model().Arch >= hopper
		return Success
	})
	return supported, r
}

// GPMSampleOf fills a sample of a GPU or of a MIG device's GPU instance.
func (l *Library) GPMSampleOf(d Device, to *GPMSample) Return {
	return l.onDeviceOf(GpmSampleGet, d, func(s *state, g *gpu, i *instance, _ *compute) Return { return to.fill(s, d.gpu, g, i) })
}

// GPMSampleOfInstance fills a sample of a GPU instance by its id. A driver's answer for a missing instance was not
// measured.
func (l *Library) GPMSampleOfInstance(d Device, id int, to *GPMSample) Return {
	return l.onDeviceOf(GpmMigSampleGet, d, func(s *state, g *gpu, _ *instance, c *compute) Return {
		at := slices.IndexFunc(g.Instances, func(i *instance) bool { return i.ID == id })
		if c != nil || at < 0 {
			return InvalidArgument
		}
		return to.fill(s, d.gpu, g, g.Instances[at])
	})
}

func (to *GPMSample) fill(s *state, index int, g *gpu, i *instance) Return {
	if r := s.has(g, withGPM, hopper); r != Success {
		return r
	}
	to.mu.Lock()
	defer to.mu.Unlock()
	to.filled, to.gpu, to.gi, to.serial, to.at = true, index, NoInstance, 0, time.Now()
	if i != nil {
		to.gi, to.serial = i.ID, i.Serial
	}
	to.busy = 0
	for _, p := range g.processes(func(*process) bool { return true }) {
		if on, _ := g.device(p.MIG); i == nil || on == i {
			to.busy = min(100, to.busy+p.Busy)
		}
	}
	return Success
}

// IsOf reports whether the sample is of a GPU instance.
func (to *GPMSample) IsOf(i GPUInstance) bool {
	to.mu.Lock()
	defer to.mu.Unlock()
	return to.filled && to.gi != NoInstance && to.gpu == i.gpu && to.serial == i.serial
}

// GPMMetric is a value between two samples, in percent. It is NoData if the samples are too close in time; a driver's
// answer then was not measured.
func (l *Library) GPMMetric(from, to *GPMSample, id uint32) (value float64, r Return) {
	const graphics, sm = 1, 2
	r = l.read(GpmMetricsGet, noGPU, func(*state) Return {
		from.mu.Lock()
		a := [...]any{from.filled, from.gpu, from.serial}
		at := from.at
		busy := from.busy
		from.mu.Unlock()
		to.mu.Lock()
		defer to.mu.Unlock()
		switch {
		case !to.filled || a != [...]any{to.filled, to.gpu, to.serial}:
			return InvalidArgument
		case id != graphics && id != sm:
			return NotSupported
		case to.at.Sub(at) < gpmInterval:
			return NoData
		}
		value = float64(busy+to.busy) / 2
		return Success
	})
	return value, r
}

// Usage gives what processes use of the node's GPUs, as Driver does.
func (n *Node) Usage() nvml.UsageReader { return n.driver() }

var _ nvml.UsageReader = (*driver)(nil)

// Usage implements nvml.UsageReader, as nvml/lib does.
func (d *driver) Usage(ctx context.Context, sampled map[nvml.UUID][]int) ([]nvml.Usage, error) {
	const op = "reading what processes use of the GPUs"
	var out []nvml.Usage
	err := d.do(ctx, op, "", func() error {
		out = nil
		n, r := d.library.DeviceCount()
		if r != Success {
			return failure(op, "", r)
		}
		for i := range n {
			u, r := d.usageOf(i, sampled)
			if r == GPUIsLost {
				u, r = nvml.Usage{Index: i, UUID: d.known[i].UUID, Lost: true}, Success
			}
			if r != Success {
				return failure(fmt.Sprintf("reading what processes use of GPU %d", i), u.UUID, r)
			}
			out = append(out, u)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (d *driver) usageOf(index int, sampled map[nvml.UUID][]int) (nvml.Usage, Return) {
	l := d.library
	u := nvml.Usage{Index: index}
	h, r := l.DeviceByIndex(index)
	if r != Success {
		return u, r
	}
	uuid, r := l.UUID(h)
	if r != Success {
		return u, r
	}
	u.UUID = nvml.UUID(uuid)
	known := d.known[index]
	known.UUID = u.UUID
	d.known[index] = known
	if u.Enabled, _, r = l.MIGMode(h); r != Success && r != NotSupported {
		return u, r
	}
	lost := false
	found, r := l.Processes(h)
	if r != Success {
		u.Processes = reading[[]nvml.ProcessUsage](nil, r, &lost)
	} else {
		u.Processes = nvml.Answered(d.processUsages(h, found, &lost))
		d.sample(h, &u, sampled[u.UUID], &lost)
	}
	if lost {
		return u, GPUIsLost
	}
	return u, Success
}

func (d *driver) processUsages(h Device, found []Process, lost *bool) []nvml.ProcessUsage {
	busy, r := d.library.ProcessUtilization(h, 0)
	if r == NotFound {
		r = Success
	}
	var out []nvml.ProcessUsage
	for _, p := range found {
		u := nvml.ProcessUsage{PID: p.PID, GI: p.GI, UsedMiB: int(p.Used >> 20)}
		percent := 0
		for _, b := range busy {
			if b.PID == p.PID {
				percent = b.SM
			}
		}
		u.Busy = reading(float64(percent), r, lost)
		out = append(out, u)
	}
	slices.SortFunc(out, func(a, b nvml.ProcessUsage) int { return a.PID - b.PID })
	return out
}

// sample samples instances with a process, one after the other.
func (d *driver) sample(h Device, u *nvml.Usage, ids []int, lost *bool) {
	l := d.library
	if !u.Enabled || len(ids) == 0 {
		return
	}
	u.Instances = map[int]nvml.Reading[float64]{}
	for _, id := range ids {
		if !slices.ContainsFunc(u.Processes.Value, func(p nvml.ProcessUsage) bool { return p.GI == id }) {
			u.Instances[id] = nvml.Answered(0.0)
			continue
		}
		var from, to GPMSample
		supported, r := l.GPMSupported(h)
		if r == Success && !supported {
			r = NotSupported
		}
		if r == Success {
			r = l.GPMSampleOfInstance(h, id, &from)
		}
		if r == Success {
			l.store.wait(2 * gpmInterval)
			r = l.GPMSampleOfInstance(h, id, &to)
		}
		value := 0.0
		if r == Success {
			value, r = l.GPMMetric(&from, &to, 1)
		}
		u.Instances[id] = reading(value, r, lost)
	}
}
