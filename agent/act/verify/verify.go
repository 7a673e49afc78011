// Package verify proves the capacity: it compares what kubelet offers with the hardware and with the desired sharing, and a change waits until
// two observations agree.
package verify

import (
	"time"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
)

// Verifier proves the capacity of one node.
type Verifier struct {
	act.Env

	DevicePlugin *deviceplugin.Plugin

	proof    capacity.Proof
	outdated outdated
	began    time.Time // when the present wait for capacity began; zero if there is none
	late     []string  // UIDs of the device plugin's pods that were there after half of the wait; each is restarted once
}

// Forget drops what was computed from earlier times of the clock.
func (p *Verifier) Forget(now time.Time) {
	p.proof.Forget(now)
	p.outdated.forget()
	p.began = time.Time{}
}

// Follow takes over what the pass has seen, once it knows what it works towards: how many observations in a row agree, and whether the device plugin
// offers the GPUs as they are.
func (p *Verifier) Follow(seen *state.Observed, want state.Desired) {
	p.proof = seen.Capacity.Proof
	p.outdated.follow(seen, want, p.Clock.Now())
}

// Restart makes the agent prove the capacity again.
func (p *Verifier) Restart() { p.proof.Agreed = 0 }

// Pause makes the wait for capacity begin again: time in which the agent cannot see the node does not count.
func (p *Verifier) Pause() { p.began = time.Time{} }

// End ends the wait for capacity.
func (p *Verifier) End() { p.began, p.late = time.Time{}, nil }

// featurePatience is how long the agent waits for the labels of GPU feature discovery: that program runs each minute, and node feature discovery
// copies what it finds to the node. Pods may select nodes by these labels, but they prove nothing.
const featurePatience = 90 * time.Second

// Compare compares the capacity with what the pass works towards, and says how many observations in a row agree with this one. Only Follow counts it.
func (p *Verifier) Compare(seen *state.Observed, want state.Desired) {
	now := p.Clock.Now()
	c := seen.Compare(want, seen.MIGStrategy(p.Settings.MIGStrategy, want.Plugin))
	c.Proof = p.proof
	if p.awaitsFeatures(&c, seen.Journal != nil) { // they prove nothing, so the first observation counts without them
		c.Missing = c.Stale
		c.Proof.CountFirst(now)
	} else {
		c.Proof.Count(len(c.Missing) == 0, now)
	}
	seen.Capacity = c
}

// awaitsFeatures reports whether the change under way waits for the labels of GPU feature discovery, once the capacity is right: for up to
// featurePatience.
func (p *Verifier) awaitsFeatures(c *state.Capacity, underway bool) bool {
	since := &c.Proof.StaleSince
	switch {
	case !underway || len(c.Stale) == 0:
		*since = time.Time{}
		return false
	case len(c.Missing) > 0:
		return false
	case since.IsZero():
		*since = p.Clock.Now()
	}
	return p.Clock.Since(*since) < min(featurePatience, p.Settings.Timeouts.Capacity/2)
}

// LastObservationDue reports whether the observation that begins now may be the last of a proof. The agent gives the node back by what it sees then, so that
// observation has to read the API server.
func (p *Verifier) LastObservationDue() bool {
	return !p.began.IsZero() && p.proof.Agreed == plan.Proof-1 && p.proof.StaleSince.IsZero() && p.proof.Left(p.Clock.Now()) <= 0
}

// Rest returns how much of the pause after a pass is left: it ends when the next observation of a capacity that was right counts.
func (p *Verifier) Rest(pause time.Duration) time.Duration {
	left := p.proof.Left(p.Clock.Now())
	if p.began.IsZero() || p.proof.Agreed != plan.Proof-1 || left <= 0 {
		return pause
	}
	return min(pause, left)
}
