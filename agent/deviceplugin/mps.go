package deviceplugin

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
)

const (
	// mpsCommand is the program of MPS's control daemon pod.
	mpsCommand = "mps-control-daemon"
	// mpsReady is the file that it makes when its daemons run, and removes when it reads its config anew.
	mpsReady = "/mps/.ready"
	// mpsPatience is how long the plugin is not told of MPS while the control daemon is not ready. It comes by a label of GPU feature discovery, which
	// node feature discovery copies within a minute. After that the plugin's own retry serves as well.
	mpsPatience = time.Minute
	// mpsBegins is how long the control daemon takes at most to be ready, for an agent that cannot see its file.
	mpsBegins = 5 * time.Second
)

// tellFirst returns which of the pods that have not read the config are to read it now. A plugin that reads of MPS before the control daemon is
// ready offers nothing, and tries again after half a minute: it reads last. The error is a wait for the control daemon, nil if there is none.
func (dp *Plugin) tellFirst(ctx context.Context, seen state.Observed, want state.Desired, step plan.Step, untold []types.UID) ([]types.UID, error) {
	plugins, others := dp.readersByRole(seen)
	if want.Plugin == nil || want.Plugin.Sharing.Strategy != config.SharingMPS || len(others) == 0 || !slices.ContainsFunc(untold, isIn(plugins)) {
		return untold, nil
	}
	began := dp.Budget.Began(step)
	until := began.Add(min(mpsPatience, dp.Settings.Timeouts.Capacity/2))
	first := slices.DeleteFunc(slices.Clone(untold), isIn(plugins))
	// A control daemon that has just been told still has the file.
	ready := len(first) == 0 && dp.Clock.Since(dp.toldFirst) >= handoverRetry && dp.servesMPS(ctx, seen)
	if len(first) > 0 {
		dp.toldFirst = dp.Clock.Now()
	}
	if ready || !dp.Clock.Now().Before(until) {
		return untold, nil
	}
	return first, &outcome.Waiting{
		Reason: config.ReasonConfiguringPlugin, For: outcome.ForStep, After: handoverRetry, Since: began, Blockers: seen.MissingMPS(),
		Message: "waiting for the MPS control daemon: " + legible.Listed(seen.MissingMPS()), Until: until, Then: "the device plugin is told to share by it all the same",
	}
}

// readersByRole returns the pods of the device plugin that read the config file, and the other ones that do.
func (dp *Plugin) readersByRole(seen state.Observed) (plugins, others []types.UID) {
	for _, pod := range seen.Plugin.Readers {
		if slices.ContainsFunc(seen.DevicePlugin.Pods, func(p corev1.Pod) bool { return p.UID == pod.UID }) {
			plugins = append(plugins, pod.UID)
		} else {
			others = append(others, pod.UID)
		}
	}
	return plugins, others
}

// servesMPS reports whether the control daemon has all GPUs and is ready for the plugin.
func (dp *Plugin) servesMPS(ctx context.Context, seen state.Observed) bool {
	if len(seen.MissingMPS()) > 0 {
		return false
	}
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	return slices.ContainsFunc(seen.DevicePlugin.MPSDaemons, func(pod corev1.Pod) bool {
		if pod.DeletionTimestamp != nil {
			return false
		}
		ready, err := dp.Processes.FileOf(call, pod.UID, mpsCommand, mpsReady)
		if err != nil {
			dp.Log.Debug("whether the MPS control daemon is ready is not known", zap.Error(err))
			return dp.hasRun(&pod, mpsBegins)
		}
		return ready
	})
}

// hasRun reports whether all containers of the pod have run for as long.
func (dp *Plugin) hasRun(pod *corev1.Pod, long time.Duration) bool {
	return len(pod.Status.ContainerStatuses) > 0 && !slices.ContainsFunc(pod.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
		return c.State.Running == nil || dp.Clock.Since(c.State.Running.StartedAt.Time) < long
	})
}

func isIn(pods []types.UID) func(types.UID) bool {
	return func(pod types.UID) bool { return slices.Contains(pods, pod) }
}
