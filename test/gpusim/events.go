package gpusim

import (
	"cmp"
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
	EventStorm        uint64 = 0x200
	EventRetired      uint64 = 0x400
	EventRetireFailed uint64 = 0x800
	EventPoison       uint64 = 0x1000
	EventFatalPoison  uint64 = 0x2000
	EventUnavailable  uint64 = 0x4000
	EventAction       uint64 = 0x8000
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

// eventIntervalInside is the same for drivers inside a test's process. A change by the test itself ends the wait at
// once. In a test where a day passes within a second, the wait would look a million times.
const eventIntervalInside = 10 * time.Second

// keptEvents is how many events a node remembers. A waiter that falls behind further misses some, as on hardware.
const keptEvents = 64

// emit reports an event of a GPU, on one of its instances or on all of it.
func (s *state) emit(gpuIndex int, kind, data uint64, at *instance) {
	e := Event{Serial: s.next(), GPU: gpuIndex, Type: kind, Data: data, GI: NoInstance, CI: NoInstance}
	if s.generation() < withGIOfEvents {
		at = nil
	}
	if at != nil {
		e.GI = at.ID
		if len(at.Compute) == 1 {
			e.CI = at.Compute[0].ID
		}
	}
	s.Events = append(s.Events, e)
	if extra := len(s.Events) - keptEvents; extra > 0 {
		s.Events = slices.Delete(s.Events, 0, extra)
	}
}

// EventSet collects events of the GPUs registered with it, of each from then on. It is useless once the driver is
// loaded again.
type EventSet struct {
	library *Library
	loads   int // of the driver, when it was made

	mu         sync.Mutex
	last       uint64
	registered map[int]registration // by GPU
}

// registration is what a set collects of a GPU.
type registration struct {
	types uint64
	since uint64 // number of the last event before
}

// NewEventSet makes an empty set.
func (l *Library) NewEventSet() (*EventSet, Return) {
	set := &EventSet{library: l, registered: map[int]registration{}}
	r := l.read(RegisterEvents, noGPU, func(s *state) Return {
		set.loads = s.Loads
		return Success
	})
	return set, r
}

// Register adds event types of a GPU. If the driver does not know one of them, the result is NotSupported and none is
// added.
func (l *Library) Register(d Device, types uint64, set *EventSet) Return {
	return l.onDeviceOf(RegisterEvents, d, func(s *state, g *gpu, _ *instance, c *compute) Return {
		switch {
		case c != nil:
			return InvalidArgument
		case types&^s.eventTypes(g) != 0:
			return NotSupported
		}
		set.mu.Lock()
		defer set.mu.Unlock()
		was := set.registered[d.gpu]
		if was.types == 0 {
			was.since = s.Counter
		}
		was.types |= types
		set.registered[d.gpu] = was
		return Success
	})
}

// Wait gives the next event, or Timeout after d.
func (set *EventSet) Wait(d time.Duration) (Event, Return) {
	return set.wait(context.Background(), d)
}

// wait is Wait, but also returns Timeout when ctx ends.
func (set *EventSet) wait(ctx context.Context, d time.Duration) (e Event, r Return) {
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	interval := cmp.Or(set.library.pollEvery, eventInterval)
	poll := time.NewTimer(interval)
	defer poll.Stop()
	for {
		changed := set.library.store.change()
		r = set.library.read(EventSetWait, noGPU, func(s *state) Return {
			e, r = set.take(s)
			return r
		})
		if r != Timeout {
			return e, r
		}
		poll.Reset(interval)
		select {
		case <-changed:
		case <-poll.C:
		case <-deadline.C:
			return Event{}, Timeout
		case <-ctx.Done():
			return Event{}, Timeout
		case <-set.library.store.closed:
			return Event{}, Uninitialized
		}
	}
}

// take gives the next event. Without one, a GPU that is lost ends the wait at once.
func (set *EventSet) take(s *state) (Event, Return) {
	if s.Loads != set.loads {
		return Event{}, Uninitialized
	}
	set.mu.Lock()
	defer set.mu.Unlock()
	for _, e := range s.Events {
		at := set.registered[e.GPU]
		if e.Serial > set.last && e.Serial > at.since && at.types&e.Type != 0 {
			set.last = e.Serial
			return e, Success
		}
	}
	for n := range set.registered {
		if s.GPUs[n].Health.Lost {
			return Event{}, GPUIsLost
		}
	}
	return Event{}, Timeout
}

// Handle is the GPU that the event is about.
func (e Event) Handle() Device { return Device{gpu: e.GPU} }
