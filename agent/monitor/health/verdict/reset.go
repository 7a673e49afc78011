package verdict

import (
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// mostResets within resetsWithin bounds how often the agent resets a GPU: a person has to deal with one that fails again and again.
const (
	mostResets   = 3
	resetsWithin = 24 * time.Hour
)

// reset is a reset by the agent, or one that it has given up.
type reset struct {
	at   time.Time
	over bool // otherwise the agent may have been killed before
}

// ToReset returns the GPUs that the agent is to reset, by the settings.
func (n *Node) ToReset(now time.Time, when config.HealthReset) map[nvml.UUID]bool {
	if !n.DriverAnswers() {
		return nil
	}
	var out map[nvml.UUID]bool
	for _, g := range n.gpus {
		if g.uuid == "" || !g.toReset(now, when) {
			continue
		}
		if out == nil {
			out = map[nvml.UUID]bool{}
		}
		out[g.uuid] = true
	}
	return out
}

// toReset reports whether the GPU still needs a reset after settleTime, no reset was in vain, and the limit is not reached.
func (g *GPU) toReset(now time.Time, when config.HealthReset) bool {
	return g.ResetHelps(when) && g.findings[0].readingsWithout == 0 && now.Sub(g.findings[0].Since) >= settleTime && !g.resetInVain() &&
		g.resetsWithin(now) < mostResets
}

// ResetHelps reports whether the GPU needs a reset and the settings allow the agent to do it.
func (g *GPU) ResetHelps(when config.HealthReset) bool {
	if len(g.findings) == 0 || g.lost || g.missing || when != config.HealthResetCritical && when != config.HealthResetDegraded {
		return false
	}
	f := g.findings[0]
	if f.settles || f.Severity() != Critical && when != config.HealthResetDegraded {
		return false
	}
	drained := g.reading.Action.Known && g.reading.Action.Value == nvml.RecoverByDrainingP2P // not to be reset until the driver says more
	return f.Action == ActionResetGPU || f.Action == ActionDrainAndReset && !drained
}

// resetInVain reports whether the agent has reset the GPU, or given that up, since its worst finding began.
func (g *GPU) resetInVain() bool {
	at, has := g.LastReset()
	return has && len(g.findings) > 0 && !at.Before(g.findings[0].Since)
}

// LastReset returns when the agent last reset the GPU or gave that up; false if it has not.
func (g *GPU) LastReset() (time.Time, bool) {
	for _, r := range slices.Backward(g.resets) {
		if r.over {
			return r.at, true
		}
	}
	return time.Time{}, false
}

// resetsWithin counts those that were begun in the last day.
func (g *GPU) resetsWithin(now time.Time) int {
	n := 0
	for _, r := range g.resets {
		if now.Sub(r.at) < resetsWithin {
			n++
		}
	}
	return n
}

// BeginReset notes that the agent resets the GPU.
func (g *GPU) BeginReset(now time.Time) {
	g.resets = append(slices.Clone(g.resets), reset{at: now})
	g.resets = g.resets[max(0, len(g.resets)-mostResets):]
}

// CancelReset drops a reset that was begun and not done.
func (g *GPU) CancelReset() {
	if last := len(g.resets) - 1; last >= 0 && !g.resets[last].over {
		g.resets = slices.Clone(g.resets[:last])
	}
}

// EndReset notes that the agent has reset the GPU, or given that up.
func (g *GPU) EndReset(now time.Time) {
	if last := len(g.resets) - 1; last < 0 || g.resets[last].over {
		g.BeginReset(now)
	}
	g.resets = slices.Clone(g.resets)
	g.resets[len(g.resets)-1] = reset{at: now, over: true}
}

// ResetInVain returns when the agent last reset the GPU or gave that up, while the GPU is still not well; false if it has not.
func (g *GPU) ResetInVain() (time.Time, bool) {
	at, _ := g.LastReset()
	return at, g.resetInVain()
}

// ResetTooOften reports whether the agent has reached the limit of resets of the GPU within a day.
func (g *GPU) ResetTooOften(now time.Time) bool { return g.resetsWithin(now) >= mostResets }
