package verify

import (
	"maps"
	"time"

	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/nvml"
)

// outdatedFor is how long a device plugin may take a GPU for unhealthy that is well, or offer what is gone, before it is restarted: the first time, the
// second, and each time after that. A plugin that was starting while the driver was loaded again has been seen never to offer a GPU again. The same are the
// pauses between restarts after an error that a GPU has recovered from: a program can make such errors as often as it likes, and each restart of the
// plugin takes all devices of the node away from new pods for seconds.
var outdatedFor = [...]time.Duration{time.Minute, 10 * time.Minute, time.Hour}

// forgetAfter is how long the plugin has to offer the GPUs as they are until the next time counts as the first.
const forgetAfter = time.Hour

// outdated is since when, and how often, the device plugin has not offered the GPUs as they are.
type outdated struct {
	since         time.Time // zero while it does
	gone          bool      // it offers what is gone
	restartBefore time.Time // a plugin that began before is to be restarted
	restartedAt   time.Time // when that was last found
	times         int       // how often it was
	lastSeen      time.Time // when the plugin was last outdated
}

// follow takes over whether the device plugin withholds a GPU that is well, or offers what is gone: a user has cut the GPUs by hand, or a change lost its
// journal with the node object. The latter counts only where a label asks for something: else the agent disturbs no plugin, whoever cuts the GPUs. In the
// middle of a change the plugin offers what it can see, and is restarted anyway.
func (w *outdated) follow(seen *state.Observed, want state.Desired, now time.Time) {
	if now.Sub(w.lastSeen) >= forgetAfter {
		w.times = 0
	}
	w.gone = offer.OffersGone(seen) && asksForGPUs(want)
	if seen.Journal != nil || seen.Kubelet.Err != nil || !w.gone && !offer.WithholdsWell(seen) {
		w.since = time.Time{}
		return
	}
	if newest := newestOf(seen.Recovered); newest.After(w.restartBefore) && offer.HasOutdatedPod(seen, seen.Capacity.Strategy) { // as RestartBefore has allowed
		w.restartBefore = newest
		w.restart(now)
		return
	}
	w.lastSeen = now
	if w.since.IsZero() {
		w.since = now
	}
	if now.Sub(w.since) >= outdatedFor[min(w.times, len(outdatedFor)-1)] {
		w.restartBefore = now
		w.restart(now)
	}
}

// asksForGPUs reports whether a label asks for a geometry or a config of the device plugin, by which the agent restarts one that offers what is gone.
func asksForGPUs(want state.Desired) bool { return len(want.Targets) > 0 || want.Plugin != nil }

// restart notes that the plugin is restarted.
func (w *outdated) restart(now time.Time) {
	w.restartedAt, w.lastSeen, w.since = now, now, now
	w.times++
}

// pauses reports whether the last restart is so recent that an error since then is no reason for another.
func (w *outdated) pauses(now time.Time) bool {
	return w.times > 0 && now.Sub(w.restartedAt) < outdatedFor[min(w.times, len(outdatedFor))-1]
}

// RestartBefore says before when a device plugin must have begun to be restarted now: of each GPU that has recovered by then, one that withholds it, and
// one that offers what is gone.
func (v *Verifier) RestartBefore(recovered map[nvml.UUID]time.Time) (withholds map[nvml.UUID]time.Time, offersGone time.Time) {
	out := maps.Clone(recovered)
	for gpu, trouble := range out {
		if v.outdated.pauses(v.Clock.Now()) || v.outdated.restartBefore.After(trouble) {
			out[gpu] = v.outdated.restartBefore
		}
	}
	if v.outdated.gone {
		offersGone = v.outdated.restartBefore
	}
	return out, offersGone
}

func newestOf(recovered map[nvml.UUID]time.Time) time.Time {
	var newest time.Time
	for _, at := range recovered {
		if at.After(newest) {
			newest = at
		}
	}
	return newest
}

// forget drops what was computed from earlier times of the clock.
func (w *outdated) forget() { *w = outdated{} }
