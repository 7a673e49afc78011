package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
)

const (
	// connectionPause is the pause between two observations of the plugin's sockets in a change. Verification takes longer: see
	// capacity.VerifyInterval.
	connectionPause = time.Second
	// connectionPauseAtRest is that pause while no change is under way, since the observation goes through the table of all processes.
	connectionPauseAtRest = time.Minute
)

// unconnected says which devices kubelet allocates although their plugin does not serve it; empty if the plugin serves all, or if the agent cannot
// tell.
//
// Kubelet 1.37 can lose a plugin for good: if the plugin registers again before kubelet has seen the former connection end, as after SIGHUP on a busy
// node. From then on kubelet refuses each registration as "already connected", and keeps allocating the devices of the former connection. Each pod
// that gets one fails.
func (dp *Plugin) unconnected(ctx context.Context, seen *state.Observed) string {
	offered := capacity.Offered(seen.Kubelet.Offered)
	pause := connectionPause
	if seen.Journal == nil {
		pause = connectionPauseAtRest
	}
	if len(offered) == 0 || !dp.connectedAt.IsZero() && dp.Clock.Since(dp.connectedAt) < pause {
		return ""
	}
	pod, sockets := dp.listening(ctx, seen)
	lost := unserved(offered, sockets)
	if pod == "" || len(lost) == 0 {
		dp.connectedAt = dp.Clock.Now()
		return ""
	}
	return fmt.Sprintf("pod %s listens on no socket for devices that kubelet still allocates, so pods that get them fail: %s", pod, sanitize.Listed(lost))
}

// listening returns a running pod of the device plugin, and the sockets that all of its pods listen on; no pod if the agent cannot tell.
func (dp *Plugin) listening(ctx context.Context, seen *state.Observed) (pod string, sockets []string) {
	for i := range seen.DevicePlugin.Pods {
		p := &seen.DevicePlugin.Pods[i]
		call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
		of, err := dp.Processes.Listeners(call, p.UID, Command)
		cancel()
		switch {
		case errors.Is(err, holders.ErrNoProcess): // it does not run yet, or no longer
		case err != nil:
			dp.Log.Debug("cannot tell whether the device plugin serves kubelet", zap.Error(err))
			return "", nil
		default:
			pod, sockets = p.Namespace+"/"+p.Name, append(sockets, of...)
		}
	}
	return pod, sockets
}

// pluginSocket begins the names of NVIDIA's plugin's sockets: nvidia-gpu.sock for nvidia.com/gpu, since v0.17 at least.
const pluginSocket = "nvidia-"

// unserved returns the resources without a socket. If the sockets are not named as NVIDIA's, the plugin counts as serving all.
func unserved(offered capacity.Resources, sockets []string) []string {
	names := map[string]bool{}
	known := len(sockets) == 0
	for _, socket := range sockets {
		name := path.Base(socket)
		names[name] = true
		known = known || strings.HasPrefix(name, pluginSocket)
	}
	var lost []string
	for resource := range offered {
		if known && !names[pluginSocket+path.Base(resource)+".sock"] {
			lost = append(lost, resource)
		}
	}
	slices.Sort(lost)
	return lost
}
