package verify

import (
	"maps"
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/nvml"
)

// outdatedFor is how long a device plugin may withhold a well GPU, advertise gone devices or lack its ResourceSlices before its restart: the first time, the
// second, and each time after that. Kubelet deletes the slices of a driver half a minute after its socket has gone, and a driver publishes them again within
// another half. A plugin that was starting during a reload of the driver was seen never to advertise a GPU again. The same times pause restarts
// after an error that a GPU has recovered from. A program can make such errors as often as it likes, and each restart of the plugin withholds all of
// the node's devices from new pods for seconds.
var outdatedFor = [...]time.Duration{time.Minute, 10 * time.Minute, time.Hour}

// forgetAfter is how long the plugin has to be up to date until the next time counts as the first.
const forgetAfter = time.Hour

// outdated is since when, and how often, the device plugin has not advertised the current GPUs.
type outdated struct {
	since         time.Time // zero while it is up to date
	gone          bool      // it advertises devices that are gone, or is ready and has lost its ResourceSlices
	restartBefore time.Time // a plugin that started earlier needs a restart
	restartedAt   time.Time // when that last happened
	times         int       // how often that happened
	lastSeen      time.Time // when the plugin was last outdated

	uncured *journal.Uncured // nil for none; the host's record has that of the last pass
}

// follow records whether the device plugin withholds a well GPU, or advertises gone devices: a user has cut the GPUs by hand, or a change lost its
// journal with the node object. It records the same of a driver that has lost its ResourceSlices. Gone devices and lost slices count only with a request:
// without one the agent disturbs no plugin, whoever cuts the GPUs. In the middle of a change the plugin advertises what it can see, and is restarted anyway.
func (w *outdated) follow(seen *state.Observed, want state.Desired, now time.Time) {
	if now.Sub(w.lastSeen) >= forgetAfter {
		w.times = 0
	}
	gone := offer.Gone(seen)
	w.uncured = lastUncured(seen, gone)
	w.gone = len(gone) > 0 && asksForGPUs(want) || want.Geometry && offer.LostSlices(seen)
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
		w.tryToCure(gone, now)
		w.restart(now)
	}
}

// lastUncured returns what the host's record has, unless these devices, which are gone and advertised, are none.
func lastUncured(seen *state.Observed, gone []string) *journal.Uncured {
	if len(gone) == 0 && len(offer.Of(seen).Offered()) > 0 {
		return nil
	}
	return seen.Record.Learnt.Uncured
}

// tryToCure notes that the plugin is to be restarted for these devices.
func (w *outdated) tryToCure(gone []string, now time.Time) {
	if len(gone) > 0 && (w.uncured == nil || !slices.Equal(gone, w.uncured.Devices)) {
		w.uncured = &journal.Uncured{Devices: gone, Since: now}
	}
}

// asksForGPUs reports whether a label requests a geometry or a config of the device plugin: only then the agent restarts one that advertises gone
// devices.
func asksForGPUs(want state.Desired) bool { return len(want.Targets) > 0 || want.Plugin != nil }

// restart notes a restart of the plugin.
func (w *outdated) restart(now time.Time) {
	w.restartedAt, w.lastSeen, w.since = now, now, now
	w.times++
}

// pauses reports whether the last restart is too recent for another one after a new error.
func (w *outdated) pauses(now time.Time) bool {
	return w.times > 0 && now.Sub(w.restartedAt) < outdatedFor[min(w.times, len(outdatedFor))-1]
}

// RestartBefore returns times: a device plugin that started before needs a restart now, if it withholds that recovered GPU, or if it advertises gone
// devices.
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

// Uncured returns the devices for which the device plugin was to be restarted, and which it still advertises; nil for none.
func (v *Verifier) Uncured() *journal.Uncured { return v.outdated.uncured }

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
