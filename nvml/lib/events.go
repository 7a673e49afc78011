package lib

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"
	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// eventWait bounds one wait inside the library, and so the time until Events notices that its caller has gone.
	eventWait = time.Second
	// firstRetry is how long after a wait that has failed the events are registered again, and eventRetry how long after each try that fails, too. A
	// wait that reports a lost GPU returns at once as long as the GPU is lost: callers must pause before the next one.
	firstRetry, eventRetry = time.Second, 10 * time.Second
	// registerWait is how long registering may take. The context of Events covers the listener's life, and ends no wait.
	registerWait = 30 * time.Second
)

// kinds are the events that Events waits for, if the GPU has them, by their bit. The driver's other events are about the agent's own
// work (0x100, a change of MIG), or about clocks and power, and would only wake it.
var kinds = map[uint64]nvml.EventKind{
	nv.EventTypeXidCriticalError:      nvml.EventXid,
	nv.EventTypeDoubleBitEccError:     nvml.EventECC,
	nv.EventTypeDramRetirementEvent:   nvml.EventRetired,
	nv.EventTypeDramRetirementFailure: nvml.EventRetireFailed,
	nv.EventTypeNonFatalPoisonError:   nvml.EventPoison,
	nv.EventTypeFatalPoisonError:      nvml.EventFatalPoison,
	nv.EventTypeGpuUnavailableError:   nvml.EventUnavailable,
	nv.EventTypeGpuRecoveryAction:     nvml.EventAction,
}

// watched gives the bits of all kinds.
func watched() uint64 {
	var out uint64
	for bit := range kinds {
		out |= bit
	}
	return out
}

// eventSet is one of the library's, with the UUIDs of its GPUs: the library does not report the UUID of a lost GPU's handle.
type eventSet struct {
	nv.EventSet
	gpus map[nv.Device]nvml.UUID
}

// Events implements nvml.Driver. It waits in parallel to other calls, which the library allows.
func (d *Driver) Events(ctx context.Context) (<-chan nvml.Event, error) {
	set, err := d.register(ctx)
	if err != nil {
		return nil, err
	}
	found := make(chan nvml.Event)
	go d.wait(ctx, set, found)
	out := make(chan nvml.Event)
	go func() {
		// This goroutine closes the channel, since a wait that does not return must not keep it open.
		defer close(out)
		for {
			select {
			case <-ctx.Done():
				return
			case e := <-found:
				select {
				case out <- e:
				case <-ctx.Done():
					return
				}
			}
		}
	}()
	return out, nil
}

var errReleased = fmt.Errorf("%w: it is being replaced, and the agent has released it", nvml.ErrNoDriver)

// beingReset is why the driver is silent in the midst of a reset.
const beingReset = "a GPU is being reset"

// register makes a set of the events of all GPUs.
func (d *Driver) register(ctx context.Context) (*eventSet, error) {
	ctx, cancel := context.WithTimeout(ctx, registerWait)
	defer cancel()
	if d.resetting.Load() {
		return nil, &nvml.Error{Op: "registering for events", Code: beingReset, Err: nvml.ErrUnresponsive}
	}
	if d.released.Load() {
		return nil, &nvml.Error{Op: "registering for events", Err: errReleased}
	}
	var set *eventSet
	err := d.call(ctx, "registering for events", "", func(ctx context.Context, s *session) (err error) {
		set, err = s.register()
		switch {
		case err != nil:
		case ctx.Err() != nil: // the listener has gone
			_ = set.Free()
		default:
			d.waits.Add(1)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return set, nil
}

func (s *session) register() (*eventSet, error) {
	n, ret := s.lib.DeviceGetCount()
	if err := check("counting GPUs", "", ret); err != nil {
		return nil, err
	}
	created, ret := s.lib.EventSetCreate()
	if err := check("creating an event set", "", ret); err != nil {
		return nil, err
	}
	set := &eventSet{EventSet: created, gpus: map[nv.Device]nvml.UUID{}}
	all := watched()
	for i := range n {
		d, err := s.deviceAt(i)
		if errors.Is(err, nvml.ErrNoDriver) {
			return nil, err // with it the set is gone
		}
		if err != nil {
			continue // a lost GPU has no more news; a Snapshot reports it
		}
		supported, ret := d.GetSupportedEventTypes()
		if ret != nv.SUCCESS || supported&all == 0 { // one bit that it does not have, and none would be registered
			continue
		}
		err = check("registering for events", d.uuid, d.RegisterEvents(supported&all, set.EventSet))
		if err != nil && !isUnsupported(err) && !errors.Is(err, nvml.ErrLost) {
			_ = set.Free() // the first error counts
			return nil, err
		}
		set.gpus[d.Device] = d.uuid
	}
	return set, nil
}

// wait hands on events until ctx ends.
func (d *Driver) wait(ctx context.Context, set *eventSet, found chan<- nvml.Event) {
	for set != nil {
		ret := d.listen(ctx, set, found)
		if !errors.Is(cause(ret), nvml.ErrNoDriver) { // with the driver the set is gone, and may not be touched again
			_ = set.Free()
		}
		d.waits.Done()
		if ret == nv.ERROR_GPU_IS_LOST {
			sendEvent(ctx, found, eventOfNoGPU(nvml.EventUnavailable))
		}
		sendEvent(ctx, found, eventOfNoGPU(nvml.EventSilence))
		if set = d.registerAgain(ctx); set != nil {
			sendEvent(ctx, found, eventOfNoGPU(nvml.EventWatching))
		}
	}
}

// eventOfNoGPU makes an event about no known GPU.
func eventOfNoGPU(kind nvml.EventKind) nvml.Event {
	return nvml.Event{Kind: kind, GI: nvml.WholeGPU, CI: nvml.WholeGPU}
}

func sendEvent(ctx context.Context, found chan<- nvml.Event, e nvml.Event) {
	select {
	case found <- e:
	case <-ctx.Done():
	}
}

// listen hands on the events of one set until the driver is let go, ctx ends, or the library fails.
func (d *Driver) listen(ctx context.Context, set *eventSet, found chan<- nvml.Event) nv.Return {
	for ctx.Err() == nil && !d.released.Load() && !d.resetting.Load() {
		e, ret := set.Wait(uint32(eventWait / time.Millisecond))
		switch ret {
		case nv.ERROR_TIMEOUT: // it may come early
		case nv.SUCCESS:
			sendEvent(ctx, found, set.event(e))
		default:
			d.log.Debug("waiting for events", zap.String("code", name(ret)))
			return ret
		}
	}
	return nv.SUCCESS
}

// registerAgain registers again until it succeeds or ctx ends, when it gives nil.
func (d *Driver) registerAgain(ctx context.Context) *eventSet {
	for pause := firstRetry; ; pause = eventRetry {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		set, err := d.register(ctx)
		if err == nil {
			return set
		}
		d.log.Debug("registering for events", zap.Error(err))
	}
}

// event turns one of the library's into ours. It makes no call: a call about a GPU that is lost or hangs would end the wait.
func (s *eventSet) event(e nv.EventData) nvml.Event {
	out := nvml.Event{GPU: s.gpus[e.Device], Kind: kinds[e.EventType], GI: instanceOf(e.GpuInstanceId), CI: instanceOf(e.ComputeInstanceId)}
	if out.Kind == nvml.EventXid {
		out.Xid = e.EventData
	}
	return out
}

// instanceOf gives the number of an instance in an event; for none the library sets all bits.
func instanceOf(id uint32) int {
	if id == math.MaxUint32 {
		return nvml.WholeGPU
	}
	return int(id)
}
