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
	"github.com/gpuslice/gpuslice/config/catalog"
)

// Verifier proves the capacity of one node.
type Verifier struct {
	act.Env

	DevicePlugin *deviceplugin.Plugin

	proof    capacity.Proof
	withheld withheld
	began    time.Time // when the present wait for capacity began; zero if there is none
	late     []string  // UIDs of the device plugin's pods that were there after half of the wait; each is restarted once
}

// Forget drops what was computed from earlier times of the clock.
func (p *Verifier) Forget(now time.Time) {
	p.proof.Forget(now)
	p.withheld.forget()
	p.began = time.Time{}
}

// Follow takes over what the pass has seen: the looks that Prove has counted, and whether the device plugin withholds GPUs that are well.
func (p *Verifier) Follow(seen *state.Observed) {
	p.proof = seen.Capacity.Proof
	p.withheld.follow(seen, p.Clock.Now())
}

// Restart makes the agent prove the capacity again.
func (p *Verifier) Restart() { p.proof.Agreed = 0 }

// Pause makes the wait for capacity begin again: time in which the agent cannot see the node does not count.
func (p *Verifier) Pause() { p.began = time.Time{} }

// End ends the wait for capacity.
func (p *Verifier) End() { p.began, p.late = time.Time{}, nil }

// featurePatience is how long the agent waits for the labels of GPU feature discovery: that looks each minute, and node feature discovery
// copies what it finds to the node. Pods may select nodes by these labels, but they prove nothing.
const featurePatience = 90 * time.Second

// awaitedFeatures returns the stale labels of GPU feature discovery for which a change waits once the capacity is right, for up to featurePatience.
func (p *Verifier) awaitedFeatures(seen *state.Observed, want *state.DesiredPlugin) []string {
	if want == nil {
		return nil
	}
	stale := seen.StaleFeatures(want)
	switch {
	case seen.Journal == nil || len(stale) == 0:
		seen.Capacity.Proof.StaleSince = time.Time{}
	case len(seen.Capacity.Missing) > 0:
	case seen.Capacity.Proof.StaleSince.IsZero():
		seen.Capacity.Proof.StaleSince = p.Clock.Now()
		return stale
	case p.Clock.Since(seen.Capacity.Proof.StaleSince) < min(featurePatience, p.Settings.Timeouts.Capacity/2):
		return stale
	}
	return nil
}

// Compare compares the capacity with the hardware, and with the desired sharing, if that is known.
func (p *Verifier) Compare(seen *state.Observed, want *state.DesiredPlugin) {
	p.compare(seen, want, func(capacity.Resources) []state.Withdrawn { return nil })
}

// CompareDesired is Compare for what is asked for: it asks besides that no pod holds what kubelet gives out to others by now. Neither what was before a
// change, nor the way back to it, can promise that.
func (p *Verifier) CompareDesired(seen *state.Observed, want state.Desired) {
	p.compare(seen, want.Plugin, func(stands capacity.Resources) []state.Withdrawn { return seen.WithdrawnFrom(stands, want) })
}

func (p *Verifier) compare(seen *state.Observed, want *state.DesiredPlugin, withdrawn func(stands capacity.Resources) []state.Withdrawn) {
	seen.Capacity.Strategy, seen.Capacity.Withdrawn = p.DevicePlugin.Strategy(seen, want), nil
	var stands capacity.Resources
	switch {
	case seen.Kubelet.Err != nil:
		seen.Capacity.Missing = []string{seen.Kubelet.Err.Error()}
	case seen.DevicePlugin.Rivals != "":
		seen.Capacity.Missing = []string{seen.DevicePlugin.Rivals}
	case want != nil && want.Known:
		stands = capacity.Shared(capacity.Expected(seen.GPUs, seen.Capacity.Strategy).NamedBy(seen.Kubelet.Offered), want.Sharing)
		seen.Capacity.Missing = capacity.Mismatches(stands, seen.Kubelet.Offered, seen.Node.Status.Allocatable)
		if want.Sharing.Strategy == catalog.SharingMPS {
			seen.Capacity.Missing = append(seen.Capacity.Missing, seen.MissingMPS()...)
		}
	default:
		seen.Capacity.Missing = capacity.Disagreements(capacity.Expected(seen.GPUs, seen.Capacity.Strategy), seen.Kubelet.Offered, seen.Node.Status.Allocatable)
	}
	if seen.DevicePlugin.Unconnected != "" {
		seen.Capacity.Missing = append(seen.Capacity.Missing, seen.DevicePlugin.Unconnected)
	}
	// Where the config is not known, only what agrees with hardware and node can be what stands.
	if stands != nil && seen.DevicePlugin.Unconnected == "" || len(seen.Capacity.Missing) == 0 {
		seen.Capacity.Withdrawn = withdrawn(stands)
		seen.Capacity.Missing = append(seen.Capacity.Missing, seen.WithdrawnTexts()...)
	}
	seen.Capacity.Proof = p.proof
	p.withheld.addTo(seen, p.Clock.Now())
	if stale := p.awaitedFeatures(seen, want); len(stale) > 0 { // they prove nothing, so the first observation counts without them
		seen.Capacity.Missing = stale
		seen.Capacity.Proof.CountFirst(p.Clock.Now())
		return
	}
	seen.Capacity.Proof.Count(len(seen.Capacity.Missing) == 0, p.Clock.Now())
}

// LastObservationDue reports whether the observation that begins now may be the last of a proof. The agent gives the node back by what it sees then, so that look
// has to read the API server.
func (p *Verifier) LastObservationDue() bool {
	return !p.began.IsZero() && p.proof.Agreed == plan.Proof-1 && p.proof.StaleSince.IsZero() && p.proof.Left(p.Clock.Now()) <= 0
}

// Rest returns how much of the pause after a pass is left: it ends when the next look at a capacity that was right counts.
func (p *Verifier) Rest(pause time.Duration) time.Duration {
	left := p.proof.Left(p.Clock.Now())
	if p.began.IsZero() || p.proof.Agreed != plan.Proof-1 || left <= 0 {
		return pause
	}
	return min(pause, left)
}
