package proving

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/nvml"
)

// withheldFor is how long a device plugin may take a GPU for unhealthy that is well before it is restarted: the first time, the second, and each
// time after that. A plugin that was starting while the driver was loaded anew has been seen never to offer a GPU again.
var withheldFor = [...]time.Duration{time.Minute, 10 * time.Minute, time.Hour}

// forgetAfter is how long no GPU has to be withheld until the next time counts as the first.
const forgetAfter = time.Hour

// withheld is since when, and how often, the device plugin has taken a GPU for unhealthy that is well.
type withheld struct {
	since         time.Time // zero while it takes none for unhealthy
	restartBefore time.Time // when a GPU was last withheld for too long: a plugin that began before is to be restarted
	times         int       // how often a GPU was withheld for too long
	lastSeen      time.Time // when a GPU was last withheld
}

// follow takes over whether the device plugin withholds a GPU that is well. In the middle of a change it offers what it can see, and is restarted
// anyway.
func (w *withheld) follow(seen state.Observed, now time.Time) {
	if now.Sub(w.lastSeen) >= forgetAfter {
		w.times = 0
	}
	if seen.Journal != nil || seen.Kubelet.Err != nil || !takesDevicesForUnhealthy(seen.Node) || !withholdsWell(seen) {
		w.since = time.Time{}
		return
	}
	w.lastSeen = now
	if w.since.IsZero() {
		w.since = now
	}
	if now.Sub(w.since) >= withheldFor[min(w.times, len(withheldFor)-1)] {
		w.restartBefore, w.since = now, now
		w.times++
	}
}

// addTo adds to the look at the node that a plugin is to be restarted which began before it was last found to withhold GPUs.
func (w *withheld) addTo(seen *state.Observed) {
	for gpu, trouble := range seen.Recovered {
		if w.restartBefore.After(trouble) {
			seen.Recovered[gpu] = w.restartBefore
		}
	}
}

// forget drops what was computed from earlier times of the clock.
func (w *withheld) forget() { *w = withheld{} }

// withholdsWell reports whether kubelet does not give out all of a GPU that is well.
func withholdsWell(seen state.Observed) bool {
	for _, g := range seen.GPUs {
		if _, well := seen.Recovered[g.UUID]; well && capacity.Withheld(g, seen.Capacity.Strategy, seen.Kubelet.Offered) {
			return true
		}
	}
	return false
}

// takesDevicesForUnhealthy reports whether the device plugin has told kubelet of a device that it is unhealthy: kubelet counts such a device in the
// node's capacity, and not in what pods may have.
func takesDevicesForUnhealthy(node *corev1.Node) bool {
	for name, all := range node.Status.Capacity {
		if name != nvml.ResourceGPU && !strings.HasPrefix(string(name), nvml.ResourceGPU+".") && !strings.HasPrefix(string(name), nvml.ResourceMIGPrefix) {
			continue
		}
		if usable := node.Status.Allocatable[name]; usable.Cmp(all) < 0 {
			return true
		}
	}
	return false
}
