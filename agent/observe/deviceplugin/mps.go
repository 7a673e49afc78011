package deviceplugin

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
)

const (
	// mpsCommand is the program of MPS's control daemon pod.
	mpsCommand = "mps-control-daemon"
	// mpsReady is a file that the program creates when its daemons run, and removes when it rereads its config.
	mpsReady = "/mps/.ready"
	// MPSPatience is how long the agent waits for the control daemon before it gives the plugin a config with MPS. The daemon needs a label of GPU
	// feature discovery, which node feature discovery copies within a minute. After that the plugin's own retry serves as well.
	MPSPatience = time.Minute
	// mpsBegins is how long the control daemon takes at most to be ready, for an agent that cannot see its file.
	mpsBegins = 5 * time.Second
)

// MPSReady reports whether the control daemon has all GPUs and is ready for the plugin.
func (dp *Plugin) MPSReady(ctx context.Context, seen *state.Observed) bool {
	if len(offer.MissingMPS(seen)) > 0 {
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
			dp.Log.Debug("cannot tell whether the MPS control daemon is ready", zap.Error(err))
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
