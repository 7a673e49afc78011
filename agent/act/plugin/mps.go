package plugin

import (
	"context"
	"slices"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// notifyFirst returns which pods have to read the config now, of those that have not. A plugin that reads of MPS before the control daemon is ready
// advertises nothing, and retries after half a minute: it reads last. The error is a wait for the control daemon, nil if there is none.
func (h *Handover) notifyFirst(ctx context.Context, in act.Input, unnotified []types.UID) ([]types.UID, error) {
	plugins, others := h.readersByRole(in.Seen)
	if in.Want.Plugin == nil || in.Want.Plugin.Sharing.Strategy != catalog.SharingMPS || len(others) == 0 || !slices.ContainsFunc(unnotified, isIn(plugins)) {
		return unnotified, nil
	}
	began := h.Retries.Began(in.Step())
	until := began.Add(min(deviceplugin.MPSPatience, h.Settings.Timeouts.Capacity/2))
	first := slices.DeleteFunc(slices.Clone(unnotified), isIn(plugins))
	// A control daemon that has just got a SIGHUP still has the file.
	ready := len(first) == 0 && h.Clock.Since(h.notifiedFirst) >= deviceplugin.Retry && h.MPSReady(ctx, in.Seen)
	if len(first) > 0 {
		h.notifiedFirst = h.Clock.Now()
	}
	if ready || !h.Clock.Now().Before(until) {
		return unnotified, nil
	}
	return first, &outcome.Waiting{
		Reason: config.ReasonConfiguringPlugin, For: outcome.ForStep, After: deviceplugin.Retry, Since: began, Blockers: offer.MissingMPS(in.Seen),
		Message: "waiting for the MPS control daemon: " + sanitize.Listed(offer.MissingMPS(in.Seen)), Until: until, Then: "the device plugin gets its config anyway",
	}
}

// readersByRole returns the device plugin's pods that read the config file, and the other readers.
func (h *Handover) readersByRole(seen *state.Observed) (plugins, others []types.UID) {
	for _, pod := range seen.Plugin.Readers {
		if slices.ContainsFunc(seen.DevicePlugin.Pods, func(p corev1.Pod) bool { return p.UID == pod.UID }) {
			plugins = append(plugins, pod.UID)
		} else {
			others = append(others, pod.UID)
		}
	}
	return plugins, others
}

func isIn(pods []types.UID) func(types.UID) bool {
	return func(pod types.UID) bool { return slices.Contains(pods, pod) }
}

// notifyEarly makes an early plugin read its config. A failure is not an error, since the plugin retries by itself later.
func (h *Handover) notifyEarly(ctx context.Context, seen *state.Observed) {
	call, cancel := context.WithTimeout(ctx, h.Settings.Timeouts.DriverCall)
	defer cancel()
	h.NoteEarlyNotified()
	notified, err := h.Processes.Hangup(call, h.EarlyPods(seen), []string{deviceplugin.Command})
	if err != nil {
		h.Log.Warn("notifying the device plugin that the MPS control daemon is ready: it retries by itself", zap.Error(err))
	}
	for _, c := range notified {
		h.Log.Info("notified the device plugin that the MPS control daemon is ready", zap.Int("pid", c.PID))
	}
}
