// Package verify verifies the capacity: it compares kubelet's devices with the hardware and the desired sharing, and a change waits until two
// observations agree.
package verify

import (
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
)

// Verifier verifies the capacity of one node.
type Verifier struct {
	act.Env

	DevicePlugin *deviceplugin.Plugin

	agreement capacity.Agreement
	outdated  outdated
	began     time.Time   // when the present wait for capacity began; zero if there is none
	late      []types.UID // UIDs of the device plugin's pods that were there after half of the wait; each is restarted once
}

// Forget drops what was computed from earlier times of the clock.
func (v *Verifier) Forget(now time.Time) {
	v.agreement.Forget(now)
	v.outdated.forget()
	v.began = time.Time{}
}

// Follow records the pass's observation, once the pass has its target: how many observations in a row agree, and whether the device plugin is
// outdated.
func (v *Verifier) Follow(seen *state.Observed, want state.Desired) {
	if n := seen.Capacity.Agreement.Agreed; !v.began.IsZero() && n > v.agreement.Agreed && n <= plan.VerifiedAfter {
		v.Log.Info("hardware, kubelet and node agree", zap.Int("look", n), zap.Int("of", plan.VerifiedAfter), zap.String("operation", seen.Operation()))
	}
	v.agreement = seen.Capacity.Agreement
	v.outdated.follow(seen, want, v.Clock.Now())
}

// Restart makes the agent verify the capacity again.
func (v *Verifier) Restart() { v.agreement.Agreed = 0 }

// Pause restarts the wait for capacity: time without a view of the node does not count.
func (v *Verifier) Pause() { v.began = time.Time{} }

// End ends the wait for capacity.
func (v *Verifier) End() { v.began, v.late = time.Time{}, nil }

// featurePatience is how long the agent waits for the labels of GPU feature discovery: that program runs each minute, and node feature discovery
// copies its labels to the node. Pods may select nodes by these labels, but they verify nothing.
const featurePatience = 90 * time.Second

// Compare compares the capacity with the pass's target, and says how many observations in a row agree with this one. Only Follow records that.
func (v *Verifier) Compare(seen *state.Observed, want state.Desired) {
	now := v.Clock.Now()
	c := offer.Compare(seen, want, offer.Of(seen).Strategy(v.Settings.MIGStrategy, want.Plugin))
	c.Agreement = v.agreement
	if v.awaitsFeatures(&c, seen.Journal != nil) { // they verify nothing, so the first observation counts without them
		c.Missing = c.Stale
		c.Agreement.CountFirst(now)
	} else {
		c.Agreement.Count(len(c.Missing) == 0, now)
	}
	seen.Capacity = c
	seen.Capacity.Late = v.lateNow(seen, want)
}

// awaitsFeatures reports whether the change under way, with the right capacity, waits for the labels of GPU feature discovery: for up to
// featurePatience.
func (v *Verifier) awaitsFeatures(c *state.Capacity, underway bool) bool {
	since := &c.Agreement.StaleSince
	switch {
	case !underway || len(c.Stale) == 0:
		*since = time.Time{}
		return false
	case len(c.Missing) > 0:
		return false
	case since.IsZero():
		*since = v.Clock.Now()
	}
	return v.Clock.Since(*since) < min(featurePatience, v.Settings.Timeouts.Capacity/2)
}

// LastObservationDue reports whether the observation that begins now may be the last that verifies the capacity. The agent releases the node after
// it, so it has to read the API server.
func (v *Verifier) LastObservationDue() bool {
	return !v.began.IsZero() && v.agreement.Agreed == plan.VerifiedAfter-1 && v.agreement.StaleSince.IsZero() && v.agreement.Left(v.Clock.Now()) <= 0
}

// Rest returns how much of the pause after a pass is left: it ends when the next observation of a capacity that was right counts.
func (v *Verifier) Rest(pause time.Duration) time.Duration {
	left := v.agreement.Left(v.Clock.Now())
	if v.began.IsZero() || v.agreement.Agreed != plan.VerifiedAfter-1 || left <= 0 {
		return pause
	}
	return min(pause, left)
}
