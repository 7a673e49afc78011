package health

import (
	"context"

	"github.com/gpuslice/gpuslice/nvml"
)

// Through wraps the driver, so that the Monitor knows the agent's own changes: while a GPU is cut or reset, and shortly after, it may look
// lost or missing.
func (m *Monitor) Through(d nvml.Driver) nvml.Driver { return driver{Driver: d, monitor: m} }

type driver struct {
	nvml.Driver
	monitor *Monitor
}

// during notes that a change of the GPU is under way until it is done.
func (d driver) during(gpu nvml.UUID, change func() error) error {
	m := d.monitor
	m.mu.Lock()
	g := m.node.GPU(gpu)
	if g == nil {
		m.mu.Unlock()
		return change()
	}
	g.BeginChange()
	m.mu.Unlock()
	err := change()
	m.mu.Lock()
	defer m.mu.Unlock()
	g.EndChange(m.Clock.Now())
	return err
}

// SetMode implements nvml.Driver.
func (d driver) SetMode(ctx context.Context, gpu nvml.UUID, on bool) error {
	m := d.monitor
	m.mu.Lock()
	if g := m.node.GPU(gpu); g != nil {
		g.AwaitMIGMode()
	}
	m.mu.Unlock()
	return d.during(gpu, func() error { return d.Driver.SetMode(ctx, gpu, on) })
}

// Create implements nvml.Driver.
func (d driver) Create(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	return d.during(gpu, func() error { return d.Driver.Create(ctx, gpu, p) })
}

// Destroy implements nvml.Driver.
func (d driver) Destroy(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	return d.during(gpu, func() error { return d.Driver.Destroy(ctx, gpu, p) })
}

// CreatePart implements nvml.Driver.
func (d driver) CreatePart(ctx context.Context, gpu nvml.UUID, p nvml.Placed, part nvml.Part) error {
	return d.during(gpu, func() error { return d.Driver.CreatePart(ctx, gpu, p, part) })
}

// DestroyPart implements nvml.Driver.
func (d driver) DestroyPart(ctx context.Context, gpu nvml.UUID, p nvml.Placed, part nvml.Part) error {
	return d.during(gpu, func() error { return d.Driver.DestroyPart(ctx, gpu, p, part) })
}

// Reset implements nvml.Driver. A reset clears what Xids have left. For a GPU that is not well, the record has the reset before it begins: if
// resets kill the agent, the next one counts them.
func (d driver) Reset(ctx context.Context, gpu nvml.UUID) error {
	m := d.monitor
	if m.beginReset(gpu) {
		m.save(ctx, m.reported())
	}
	err := d.during(gpu, func() error { return d.Driver.Reset(ctx, gpu) })
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.node.GPU(gpu)
	switch {
	case g == nil:
	case err != nil:
		g.CancelReset() // it is tried again, or given up
	default:
		if len(g.Findings()) > 0 {
			g.EndReset(m.Clock.Now())
		}
		g.NoteReset()
	}
	return err
}

// beginReset notes that the agent resets a GPU because it is not well. It returns false for any other reset.
func (m *Monitor) beginReset(gpu nvml.UUID) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.toReset()[gpu] {
		return false
	}
	m.node.GPU(gpu).BeginReset(m.Clock.Now())
	return true
}

// reported is the key of the verdict that was last reported.
func (m *Monitor) reported() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reportedKey
}
