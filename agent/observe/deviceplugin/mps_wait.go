package deviceplugin

import (
	"context"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config/catalog"
)

const (
	// earlyPause is the pause after the agent has notified an early plugin, until it notifies the plugin again. It doubles each time: a plugin takes some
	// seconds to offer many GPUs, and begins again when it is notified before it has.
	earlyPause = 5 * time.Second
	// mostNotified is how often the agent notifies an early plugin. After that the plugin's own retry serves as well.
	mostNotified = 3
	// handlesHangup is how long a plugin has to run until the agent notifies it. SIGHUP ends a program that does not yet listen to it, and kubelet rounds
	// the start to whole seconds.
	handlesHangup = 2 * time.Second
)

// Command is the program of the device plugin.
const Command = "nvidia-device-plugin"

// early is a plugin that has read of MPS before MPS's control daemon was ready. It offers nothing, and tries again after half a minute. So it is where
// a config manager notifies the plugin at once, and where the plugin's pod starts before the daemon's. The zero value is no such plugin.
type early struct {
	began      time.Time // when it was first seen to offer nothing
	missed     bool      // it was so while the daemon was not ready
	ready      time.Time // since when the daemon is ready, and the plugin offers nothing all the same
	notified   int       // how often the agent has notified it to read its config
	notifiedAt time.Time // when it did last
}

// observeEarly sets whether the plugin is to be notified once more that it shares by MPS, and whether that is about to come.
func (dp *Plugin) observeEarly(ctx context.Context, seen *state.Observed) {
	p, e, now := &seen.Plugin, &dp.early, dp.Clock.Now()
	p.Early, p.AwaitsMPS = false, false
	if p.Current == nil || p.Current.Sharing.Strategy != catalog.SharingMPS || seen.Kubelet.Err != nil || len(seen.DevicePlugin.Pods) == 0 ||
		offersShared(p.Current.Sharing, seen.Kubelet.Offered) {
		*e = early{}
		return
	}
	if e.began.IsZero() {
		e.began = now
	}
	p.AwaitsMPS = now.Sub(e.began) < MPSPatience
	if !dp.MPSReady(ctx, seen) {
		e.missed, e.ready = true, time.Time{}
		return
	}
	if e.ready.IsZero() {
		e.ready = now
	}
	due := e.missed || now.Sub(e.ready) >= mpsBegins // an agent that has just been started does not know what was before
	paused := e.notified > 0 && now.Sub(e.notifiedAt) < earlyPause<<(e.notified-1)
	p.Early = due && !paused && e.notified < mostNotified && len(dp.EarlyPods(seen)) > 0
}

// offersShared reports whether kubelet has any device that the plugin offers by this sharing.
func offersShared(s catalog.Sharing, offered capacity.Resources) bool {
	return slices.ContainsFunc(s.Resources(), func(resource string) bool {
		name, _ := s.Offered(resource)
		return len(offered[name]) > 0
	})
}

// EarlyPods returns the plugin's pods that have read their config and have run for long enough to get a SIGHUP.
func (dp *Plugin) EarlyPods(seen *state.Observed) []types.UID {
	unnotified := seen.Plugin.UnnotifiedReaders()
	var out []types.UID
	for i := range seen.DevicePlugin.Pods {
		pod := &seen.DevicePlugin.Pods[i]
		if pod.DeletionTimestamp == nil && !slices.Contains(unnotified, pod.UID) && dp.hasRun(pod, handlesHangup) {
			out = append(out, pod.UID)
		}
	}
	return out
}

// NoteEarlyNotified notes that the plugin was notified just now to read its config.
func (dp *Plugin) NoteEarlyNotified() {
	dp.early.notified, dp.early.notifiedAt = dp.early.notified+1, dp.Clock.Now()
}

// AwaitsMPS returns the pause between two observations of a plugin that waits for MPS's control daemon; longest if it waits for none. No watch shows when the
// daemon is ready.
func AwaitsMPS(seen *state.Observed, longest time.Duration) time.Duration {
	if !seen.Plugin.AwaitsMPS {
		return longest
	}
	return min(longest, Retry)
}
