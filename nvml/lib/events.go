package lib

import (
	"context"
	"errors"
	"fmt"
	"time"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"
	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// eventWait is how long one wait inside the library lasts: as long as it takes to notice that the listener has gone.
	eventWait = time.Second
	// eventRetry is how long after a failed wait the events are registered anew, as after a reload of the driver.
	eventRetry = 10 * time.Second
	// registerWait is how long registering may take. The context of Events is that of the listener's life, which ends no wait.
	registerWait = 30 * time.Second
)

// watched are the kinds of events that are waited for, if the GPU has them.
const watched = uint64(nv.EventTypeXidCriticalError | nv.EventTypeDoubleBitEccError)

// Events implements nvml.Driver. It waits beside the other calls, which the library allows.
func (d *Driver) Events(ctx context.Context) (<-chan nvml.Event, error) {
	set, err := d.register(ctx)
	if err != nil {
		return nil, err
	}
	found := make(chan nvml.Event)
	go d.wait(ctx, set, found)
	out := make(chan nvml.Event)
	go func() {
		// A wait that does not come back must not keep the channel open, so that it is not the one to close it.
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

var errReleased = fmt.Errorf("%w: it is being replaced, and the agent has let go of it", nvml.ErrNoDriver)

// register makes a set of the events of all GPUs.
func (d *Driver) register(ctx context.Context) (nv.EventSet, error) {
	ctx, cancel := context.WithTimeout(ctx, registerWait)
	defer cancel()
	if d.released.Load() {
		return nil, &nvml.Error{Op: "registering for events", Err: errReleased}
	}
	var set nv.EventSet
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

func (s *session) register() (nv.EventSet, error) {
	n, ret := s.lib.DeviceGetCount()
	if err := check("counting GPUs", "", ret); err != nil {
		return nil, err
	}
	set, ret := s.lib.EventSetCreate()
	if err := check("creating an event set", "", ret); err != nil {
		return nil, err
	}
	for i := range n {
		d, err := s.deviceAt(i)
		if errors.Is(err, nvml.ErrNoDriver) {
			return nil, err // with it the set is gone
		}
		if err != nil {
			continue // a lost GPU has no more news; a Snapshot tells of it
		}
		supported, ret := d.GetSupportedEventTypes()
		if ret != nv.SUCCESS || supported&watched == 0 {
			continue
		}
		if err := check("registering for events", d.uuid, d.RegisterEvents(supported&watched, set)); err != nil && !isUnsupported(err) {
			_ = set.Free() // the first error is the one to tell
			return nil, err
		}
	}
	return set, nil
}

// wait hands on events until ctx ends.
func (d *Driver) wait(ctx context.Context, set nv.EventSet, found chan<- nvml.Event) {
	for set != nil {
		ret := d.listen(ctx, set, found)
		if !errors.Is(cause(ret), nvml.ErrNoDriver) { // with the driver the set is gone, and may not be touched again
			_ = set.Free()
		}
		d.waits.Done()
		set = d.again(ctx)
	}
}

// listen hands on the events of one set until the driver is let go, ctx ends, or the library fails.
func (d *Driver) listen(ctx context.Context, set nv.EventSet, found chan<- nvml.Event) nv.Return {
	for ctx.Err() == nil && !d.released.Load() {
		e, ret := set.Wait(uint32(eventWait / time.Millisecond))
		switch ret {
		case nv.ERROR_TIMEOUT:
		case nv.SUCCESS:
			select {
			case found <- event(e):
			case <-ctx.Done():
			}
		default:
			d.log.Debug("waiting for events", zap.String("code", name(ret)))
			return ret
		}
	}
	return nv.SUCCESS
}

// again registers anew until it succeeds or ctx ends, when it gives nil.
func (d *Driver) again(ctx context.Context) nv.EventSet {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(eventRetry):
		}
		set, err := d.register(ctx)
		if err == nil {
			return set
		}
		d.log.Debug("registering for events", zap.Error(err))
	}
}

func event(e nv.EventData) nvml.Event {
	out := nvml.Event{Kind: nvml.EventECC}
	if e.EventType == nv.EventTypeXidCriticalError {
		out.Kind, out.Xid = nvml.EventXid, e.EventData
	}
	if uuid, ret := e.Device.GetUUID(); ret == nv.SUCCESS {
		out.GPU = nvml.UUID(uuid)
	}
	return out
}
