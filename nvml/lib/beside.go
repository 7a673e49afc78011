package lib

import (
	"context"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// lookout has what reading needs in addition to the driver's own calls.
type lookout struct {
	lane    aside.Lane
	session *session       // only for who is in the lane
	known   map[int]facing // by index; only for who is in the lane
}

// facing is what a GPU was when it last answered.
type facing struct {
	uuid nvml.UUID
	pci  string
}

// beside runs f with the library open, in the lane of the lookout: it waits for the driver's own calls only if the library is not open yet.
func beside[T any](ctx context.Context, d *Driver, l *lookout, op string, f func(ctx context.Context, at aside.At) (T, error)) (T, error) {
	var none T
	out, err := aside.Do(ctx, &l.lane, op, func(ctx context.Context, at aside.At) (T, error) {
		if d.resetting.Load() {
			return none, &nvml.Error{Op: op, Code: beingReset, Err: nvml.ErrUnresponsive}
		}
		if d.released.Load() {
			return none, &nvml.Error{Op: op, Err: errReleased}
		}
		lib, open := d.opened.join()
		if !open {
			at("the initialisation of NVIDIA's library")
			if err := d.initialise(ctx); err != nil {
				return none, err
			}
			if lib, open = d.opened.join(); !open {
				return none, &nvml.Error{Op: op, Err: errReleased}
			}
		}
		defer d.opened.leave()
		if s := l.session; s == nil || s.lib != lib {
			l.session = &session{lib: lib, opened: &d.opened}
		}
		found, err := f(ctx, at)
		return found, d.judge(err)
	})
	if aside.Hangs(err) {
		return none, &nvml.Error{Op: op, Code: err.Error(), Err: nvml.ErrUnresponsive}
	}
	return out, err
}

// initialise opens the library as any call of the driver does. A cold GPU takes seconds for it, so that it has more time than a reading.
func (d *Driver) initialise(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), registerWait)
	defer cancel()
	return d.call(ctx, "opening NVIDIA's library", "", func(context.Context, *session) error { return nil })
}

// count counts the GPUs, and forgets what is known of their places if those have moved.
func (l *lookout) count() (int, error) {
	n, ret := l.session.lib.DeviceGetCount()
	if err := check("counting GPUs", "", ret); err != nil {
		return 0, err
	}
	if len(l.known) != n {
		l.known = map[int]facing{}
	}
	return n, nil
}
