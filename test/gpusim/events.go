package gpusim

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Event types of NVML.
const (
	EventSingleBitECC uint64 = 0x1
	EventDoubleBitECC uint64 = 0x2
	EventXid          uint64 = 0x8
)

// Event is news about a GPU.
type Event struct {
	Serial uint64 `json:"serial"`
	GPU    int    `json:"gpu"`
	Type   uint64 `json:"type"`
	Data   uint64 `json:"data,omitempty"` // the number of an Xid
	GI     int    `json:"gi"`             // NoInstance if it is about the whole GPU
	CI     int    `json:"ci"`
}

// eventInterval is how often a wait for events looks for those that other processes have caused. The agent and the device plugin of
// each node wait all the time, and there are tests with fifty nodes.
const eventInterval = 100 * time.Millisecond

// keptEvents is how many events a node remembers. A waiter that falls behind further misses some, as on hardware.
const keptEvents = 64

func (s *state) emit(e Event) {
	e.Serial = s.next()
	s.Events = append(s.Events, e)
	if extra := len(s.Events) - keptEvents; extra > 0 {
		s.Events = slices.Delete(s.Events, 0, extra)
	}
}

// EventSet collects events of the GPUs that are registered with it, from its creation on.
type EventSet struct {
	library *Library

	mu    sync.Mutex
	last  uint64
	types map[int]uint64 // by GPU
}

// NewEventSet makes an empty set.
func (l *Library) NewEventSet() (*EventSet, Return) {
	set := &EventSet{library: l, types: map[int]uint64{}}
	r := l.read(RegisterEvents, noGPU, func(s *state) Return {
		set.last = s.Counter
		return Success
	})
	return set, r
}

// Register adds event types of a GPU. Types that the GPU does not have are NotSupported.
func (l *Library) Register(d Device, types uint64, set *EventSet) Return {
	return l.onGPU(RegisterEvents, d, func(g *gpu) Return {
		if types&^g.model().EventTypes != 0 {
			return NotSupported
		}
		set.mu.Lock()
		defer set.mu.Unlock()
		set.types[d.gpu] |= types
		return Success
	})
}

// Wait gives the next event, or Timeout after d.
func (set *EventSet) Wait(d time.Duration) (Event, Return) {
	return set.wait(context.Background(), d)
}

// wait is Wait that gives Timeout when ctx ends, too.
func (set *EventSet) wait(ctx context.Context, d time.Duration) (e Event, r Return) {
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	for {
		changed := set.library.store.change()
		r = set.library.read(EventSetWait, noGPU, func(s *state) Return {
			var ok bool
			if e, ok = set.take(s); !ok {
				return Timeout
			}
			return Success
		})
		if r != Timeout {
			return e, r
		}
		look := time.NewTimer(eventInterval)
		select {
		case <-changed:
		case <-look.C:
		case <-deadline.C:
			look.Stop()
			return Event{}, Timeout
		case <-ctx.Done():
			look.Stop()
			return Event{}, Timeout
		case <-set.library.store.closed:
			look.Stop()
			return Event{}, Uninitialized
		}
		look.Stop()
	}
}

func (set *EventSet) take(s *state) (Event, bool) {
	set.mu.Lock()
	defer set.mu.Unlock()
	for _, e := range s.Events {
		if e.Serial > set.last && set.types[e.GPU]&e.Type != 0 {
			set.last = e.Serial
			return e, true
		}
	}
	return Event{}, false
}

// Handle is the GPU that the event is about.
func (e Event) Handle() Device { return Device{gpu: e.GPU} }
