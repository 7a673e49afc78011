package idle

import (
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/nvml"
)

// slots is how many parts a window of time has. The window forgets one part at a time.
const slots = 24

// window remembers how busy something was over the last stretch of time, and up to a slot more. Its size does not depend on the length of
// that.
type window struct {
	width time.Duration // of a slot
	slots [slots + 1]slot
}

// slot is one part of a window.
type slot struct {
	number      int64   // since the beginning; 0 for one without a value
	known, busy float32 // seconds
}

func newWindow(over time.Duration) window { return window{width: max(over/slots, 1)} }

// add notes that something was busy by so many percent for d, which ended at a time since the beginning.
func (w *window) add(at, d time.Duration, percent float64) {
	number := int64(at/w.width) + 1
	s := &w.slots[number%int64(len(w.slots))]
	if s.number != number {
		*s = slot{number: number}
	}
	s.known += float32(d.Seconds())
	s.busy += float32(d.Seconds() * percent / 100)
}

// sum returns for how long before at the load is known, and for how much of that time something was busy.
func (w *window) sum(at time.Duration) (known, busy time.Duration) {
	now := int64(at/w.width) + 1
	var k, b float64
	for _, s := range w.slots {
		if s.number > 0 && s.number > now-int64(len(w.slots)) && s.number <= now {
			k, b = k+float64(s.known), b+float64(s.busy)
		}
	}
	return time.Duration(k * float64(time.Second)), time.Duration(b * float64(time.Second))
}

// key is a pod with a device.
type key struct {
	device string
	pod    types.UID
}

// history is a pod's use of a device.
type history struct {
	pod      types.NamespacedName
	gpu      nvml.UUID
	instance string // profile and place; empty for a GPU
	name     string // of the device, as the Event has it: "GPU 3 1g.10gb"

	since    time.Time // it was first seen to have it
	exactly  bool      // the observation before did not see the pod on it
	seen     time.Time // the last observation that saw it
	reported time.Time // the last Event; zero if it was busy since

	long, recent window
	unknown      string // why the load of the last observation is unknown; empty if it is known
	idle         verdict
}

// verdict says whether a pod uses its device.
type verdict int

const (
	unjudged verdict = iota
	idle
	inUse
)

// enoughKnown is for how many percent of a time the agent must know a pod's load: the driver may have been silent for a while.
const enoughKnown = 90

// judge says whether the pod has had the device for so long, and used it for less than below percent of that time.
func (h *history) judge(now time.Time, at, after time.Duration, below int) (v verdict, percent float64) {
	known, busy := h.long.sum(at)
	if now.Sub(h.since) < after || known < after*enoughKnown/100 {
		return unjudged, 0
	}
	percent = 100 * float64(busy) / float64(known)
	if percent < float64(below) {
		return idle, percent
	}
	return inUse, percent
}

// lately returns how much of the last minutes something was busy, from 0 to 1. It is unknown if more than half of them are.
func lately(w *window, at time.Duration, over time.Duration) (ratio float64, known bool) {
	counted, busy := w.sum(at)
	if counted <= 0 || counted < over/2 {
		return 0, false
	}
	return min(float64(busy)/float64(counted), 1), true
}
