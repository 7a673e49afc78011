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
	// earlyPause is the pause until the agent notifies an early plugin again. It doubles each time: a plugin takes some seconds to advertise many
	// GPUs, and a notification makes it start over.
	earlyPause = 5 * time.Second
	// mostNotified is how often the agent notifies an early plugin. After that the plugin's own retry serves as well.
	mostNotified = 3
	// handlesHangup is how long a plugin has to run until the agent notifies it. SIGHUP ends a program that does not handle it yet, and kubelet
	// rounds the start to whole seconds.
	handlesHangup = 2 * time.Second
)

// Command is the program of the device plugin.
const Command = "nvidia-device-plugin"

// early is a plugin that read of MPS before MPS's control daemon was ready. It advertises nothing, and tries again after half a minute. It happens if
// a config manager notifies the plugin at once, or the plugin's pod starts before the daemon's. The zero value means no such plugin.
type early struct {
	began      time.Time // when it was first seen to advertise nothing
	missed     bool      // it was so while the daemon was not ready
	ready      time.Time // since when the plugin advertises nothing although the daemon is ready
	notified   int       // how often the agent has notified it
	notifiedAt time.Time // when it did last
}

// observeEarly sets whether the agent has to notify the plugin of MPS once more, and whether it still waits for MPS.
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

// offersShared reports whether kubelet has any device that the plugin advertises by this sharing.
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
