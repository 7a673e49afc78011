package deviceplugin

import (
	"fmt"
	"slices"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// longestLastWords bounds the termination message of a container in the agent's message.
const longestLastWords = 256

// endedByHangup is the exit code of a program that SIGHUP has ended. A config manager makes the plugin reread its config by SIGHUP, and a plugin that
// has only just started does not handle it yet. Kubelet restarts it, and it then reads that config.
const endedByHangup = 128 + int32(syscall.SIGHUP)

// failsAfter is how long the device plugin has to end again and again until its config is at fault. It may end once for another reason: a plugin that
// starts while a config manager replaces the file finds none.
const failsAfter = 20 * time.Second

// ending is a container of the device plugin that ends.
type ending struct {
	pod      types.UID
	since    time.Time
	restarts int32 // of the container when its end was first seen
}

// Fails returns why the device plugin does not run with its present config; empty if it does, or has not tried yet. It fails for good if kubelet has
// restarted it since, and it has ended again. Other containers of its pod do not count: a config manager ends once if it finds no plugin to signal.
func (dp *Plugin) Fails(s *state.Observed) (why string, forGood bool) {
	since := s.Plugin.Written
	if s.Journal != nil && since.IsZero() {
		since = s.Journal.Started
	}
	for _, pod := range s.DevicePlugin.Pods {
		for _, c := range pod.Status.ContainerStatuses {
			last := c.LastTerminationState.Terminated
			if !dp.endsAgain(c) || last.FinishedAt.Time.Before(since) {
				continue
			}
			if dp.ending.pod != pod.UID || dp.ending.since.Before(since) {
				dp.ending = ending{pod.UID, dp.Clock.Now(), c.RestartCount}
			}
			text := fmt.Sprintf("container %s of pod %s/%s ends again and again, with exit code %d", c.Name, pod.Namespace, pod.Name, last.ExitCode)
			if last.Message != "" {
				text += ": " + sanitize.Message(last.Message, longestLastWords)
			}
			return text, c.RestartCount > dp.ending.restarts && dp.Clock.Since(dp.ending.since) >= failsAfter
		}
	}
	return "", false
}

// endsAgain reports whether the container is the device plugin's, has ended by itself, and waits for its restart.
func (dp *Plugin) endsAgain(c corev1.ContainerStatus) bool {
	plugin, last := dp.Settings.DevicePlugin.Containers, c.LastTerminationState.Terminated
	return (len(plugin) == 0 || slices.Contains(plugin, c.Name)) && c.State.Waiting != nil && c.State.Waiting.Reason == "CrashLoopBackOff" &&
		last != nil && last.ExitCode != endedByHangup
}
