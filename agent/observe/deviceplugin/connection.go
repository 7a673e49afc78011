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
	// connectionPause is the pause between two observations of the plugin's sockets in a change, whose verification takes longer than that: see capacity.VerifyInterval.
	connectionPause = time.Second
	// connectionPauseAtRest is that pause while no change is under way, since the observation goes through the table of all processes.
	connectionPauseAtRest = time.Minute
)

// unconnected says which devices kubelet gives out of a plugin that does not serve it; empty if it serves all, or if that cannot be seen.
//
// Kubelet 1.37 loses a plugin for good that registers again before kubelet has seen its former connection end, as after SIGHUP on a busy node: it refuses
// each registration as "already connected" from then on, and keeps giving out what the former connection offered. Each pod that gets that fails.
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
	return fmt.Sprintf("kubelet gives out devices for which pod %s listens on no socket, so that pods which get them fail: %s", pod, sanitize.Listed(lost))
}

// listening returns a pod of the device plugin that runs, and the sockets that all of them listen on; no pod if that cannot be seen.
func (dp *Plugin) listening(ctx context.Context, seen *state.Observed) (pod string, sockets []string) {
	for i := range seen.DevicePlugin.Pods {
		p := &seen.DevicePlugin.Pods[i]
		call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
		of, err := dp.Processes.Listeners(call, p.UID, Command)
		cancel()
		switch {
		case errors.Is(err, holders.ErrNoProcess): // it does not run yet, or no more
		case err != nil:
			dp.Log.Debug("whether the device plugin serves kubelet is not known", zap.Error(err))
			return "", nil
		default:
			pod, sockets = p.Namespace+"/"+p.Name, append(sockets, of...)
		}
	}
	return pod, sockets
}

// pluginSocket begins the names of the sockets of NVIDIA's plugin: it has nvidia-gpu.sock for nvidia.com/gpu, since v0.17 at least.
const pluginSocket = "nvidia-"

// unserved returns the resources for which there is no socket. A plugin whose sockets have other names than those of NVIDIA's serves all.
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
