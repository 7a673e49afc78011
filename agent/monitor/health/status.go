package health

import (
	"fmt"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Recovered returns, for each GPU that is well, when it was last unhealthy; zero if it was not in this boot.
func (m *Monitor) Recovered() map[nvml.UUID]time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[nvml.UUID]time.Time{}
	for _, g := range m.node.GPUs() {
		if at, is := g.RecoveredFrom(m.Clock.Now()); is && m.recalled {
			out[g.UUID()] = at
		}
	}
	return out
}

// NotClosed implements monitor.Health.
func (m *Monitor) NotClosed(why map[nvml.UUID]string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.notClosed = why
	m.signal(m.changed)
}

// Critical returns the GPUs that cannot be used or trusted, by the verdict that the condition reports. The empty UUID stands for a GPU without
// a known UUID, and for a driver that hangs before it has listed any. They are unknown while the driver does not answer.
func (m *Monitor) Critical() (gpus map[nvml.UUID]bool, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, known := m.node.Judge(m.Clock.Now())
	if !known || !m.recalled {
		return nil, false
	}
	return v.CriticalGPUs(m.node.GPUs())
}

// Causes implements monitor.Health.
func (m *Monitor) Causes() []api.Finding {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.Clock.Now()
	v, known := m.node.Judge(now)
	if !known || !m.recalled {
		return nil
	}
	var out []api.Finding
	for _, g := range v.Unhealthy {
		if f := g.Findings()[0]; f.Severity() == verdict.Critical {
			out = append(out, api.Finding{
				GPU: g.UUID(), Cause: api.Cause(f.Reason), Evidence: m.evidence(g, f),
				Agent: "reports it by condition " + config.ConditionGPUUnhealthy + " until it is over", You: fmt.Sprintf("%s; action: %s", m.next(g, f, now), f.Action),
			})
		}
	}
	return out
}

// ToReset returns the GPUs that the agent is to reset: none where NVSentinel manages the node. They are unknown until the driver has answered.
func (m *Monitor) ToReset() (gpus map[nvml.UUID]bool, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	off := m.Settings.Reset != config.HealthResetCritical && m.Settings.Reset != config.HealthResetDegraded
	return m.toReset(), off || m.recalled && m.node.Observed()
}

func (m *Monitor) toReset() map[nvml.UUID]bool {
	if !m.recalled || m.nvsentinel != "" {
		return nil
	}
	return m.node.ToReset(m.Clock.Now(), m.Settings.Reset)
}

// RefuseResets notes why the agent resets no GPU of this node until a user has acted; empty if it may.
func (m *Monitor) RefuseResets(why string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refused = why
}

// NoteResetFailed notes that the agent has given up the reset of a GPU.
func (m *Monitor) NoteResetFailed(gpu nvml.UUID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if g := m.node.GPU(gpu); g != nil {
		g.EndReset(m.Clock.Now())
		m.signal(m.changed)
	}
}

// mostXidsInStatus bounds the Xids of one GPU in the status.
const mostXidsInStatus = 4

// status returns the GPU's health for tools; nil if there is nothing to report.
func (m *Monitor) status(g *verdict.GPU) *api.GPUHealth {
	findings, xids := g.Findings(), m.node.Xids(g)
	if len(findings) == 0 && len(xids) == 0 {
		return nil
	}
	out := &api.GPUHealth{}
	if reading, _ := g.Reading(); reading.Action.Known {
		out.Recovery = int(reading.Action.Value)
	}
	if len(findings) > 0 {
		f := findings[0]
		out.Reason, out.Severity, out.Action, out.Since = f.Reason, string(f.Severity()), string(f.Action), f.Since.UTC()
		for _, gi := range f.Instances {
			out.Instances = append(out.Instances, m.instanceName(g, gi))
		}
	}
	for _, x := range xids[:min(len(xids), mostXidsInStatus)] {
		// The last time is to the minute, so that the node is not written for each Xid, and never before the first.
		last := x.Last.UTC().Truncate(recordEvery)
		if last.Before(x.First) {
			last = x.First.UTC()
		}
		out.Xids = append(out.Xids, api.XidSeen{Number: x.Xid.Number, First: x.First.UTC(), Last: last, GI: x.GI, CI: x.CI})
	}
	if rows := g.Rows(); rows != nil && (rows.Corrected+rows.Uncorrected > 0 || g.RowPending() || g.RowFailed()) {
		out.Remap = &api.Remap{Corrected: rows.Corrected, Uncorrected: rows.Uncorrected, Pending: g.RowPending(), Failed: g.RowFailed()}
	}
	return out
}
