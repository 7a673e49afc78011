// Package lib is the Driver over NVIDIA's management library, libnvidia-ml.so.1. It owns everything about that library: finding and opening it,
// handles and instance ids, result codes, which of its functions an older driver lacks, and calls that do not return.
//
// It is the only importer of go-nvml and go-nvlib, and needs cgo. It must not know the agent's plans.
package lib

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	nv "github.com/NVIDIA/go-nvml/pkg/nvml"
	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/driverroot"
)

const libraryName = driverroot.Library

// Options say where NVIDIA's library is. The zero value takes the one that the dynamic loader finds.
type Options struct {
	// DriverRoot is the root of the file system that NVIDIA's driver is installed in, or that the root of its container is in, as seen
	// from this process: see driverroot.Find. If it is empty or "/", the dynamic loader's own search comes first.
	DriverRoot string
	// Library is the path of the library itself, and wins over DriverRoot.
	Library string
	// Logger gets successful operations, at debug level; nil for none.
	Logger *zap.Logger
	// Wrap returns what is called in place of the library, to time its calls: nil for the library itself. Handles that it replaces must be comparable,
	// and equal where the library's are.
	Wrap func(nv.Interface) nv.Interface
}

// Driver is nvml.Driver on the hardware. A driver that is unloaded is ErrNoDriver until it is loaded again in the same version; then the next call
// finds it. One that another version replaces is ErrNoDriver during the replacement, and ErrReplaced once the new library is in place: only a new
// process can load that, see mapped.
type Driver struct {
	options Options
	log     *zap.Logger

	slot chan struct{} // holds a token while a call is in the library
	hung atomic.Bool   // that call was given up by its caller, and has not returned yet
	at   atomic.Value  // path that it is about to open, which may be behind a server that does not answer; empty if there is none

	released  atomic.Bool    // nothing may be opened before the next Snapshot
	resetting atomic.Bool    // a GPU is being reset, which a client of it would keep from being done
	waits     sync.WaitGroup // waits for events, which have the library open without the slot

	opened opened // the library's users: the session, and the readers of health and use
	health health
	usage  usage

	session *session   // nil while the library is not open; only for the holder of slot
	known   modelCache // outlives a session; only for the holder of slot
}

var _ nvml.Driver = (*Driver)(nil)

// Open prepares a Driver. It does not touch the library yet. The first call after the driver was loaded finds it; until then each call is
// ErrNoDriver.
func Open(o Options) *Driver {
	log := o.Logger
	if log == nil {
		log = zap.NewNop()
	}
	return &Driver{options: o, log: log.Named("nvml"), slot: make(chan struct{}, 1), known: modelCache{}}
}

// call runs one operation with the library open.
func (d *Driver) call(ctx context.Context, op string, gpu nvml.UUID, f func(context.Context, *session) error) error {
	return d.runExclusively(ctx, op, gpu, func() error { return d.inside(ctx, op, f) })
}

// Release implements nvml.Driver.
func (d *Driver) Release(ctx context.Context) error {
	d.released.Store(true)
	return d.runExclusively(ctx, "releasing the driver", "", func() error {
		d.letGo()
		return nil
	})
}

// letGo closes the library, for the holder of the slot. It returns when no call has it open any more.
func (d *Driver) letGo() {
	d.waits.Wait() // at most as long as one wait lasts
	if d.session != nil {
		d.session.close()
		d.session = nil
	}
	d.opened.wait() // until health and the use are read, too
}

// runExclusively runs one operation while no other runs, and returns when it is done or when ctx ends. An operation that is given up continues by
// itself, so that nothing is left half done. Until it returns every call fails at once.
func (d *Driver) runExclusively(ctx context.Context, op string, gpu nvml.UUID, f func() error) error {
	if ctx.Err() != nil {
		return &nvml.Error{Op: op, GPU: gpu, Err: ctx.Err()}
	}
	if d.hung.Load() {
		return &nvml.Error{Op: op, GPU: gpu, Err: nvml.ErrUnresponsive, Code: "an earlier call has not returned" + d.pathOfCall()}
	}
	select {
	case d.slot <- struct{}{}:
	case <-ctx.Done():
		return d.unanswered(ctx, op, gpu)
	}
	done := make(chan error, 1)
	go func() {
		// In this order: a caller that gives up between two of these lines finds the result, or its mark is removed.
		done <- f()
		d.hung.Store(false)
		<-d.slot
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	d.hung.Store(true)
	select {
	case err := <-done: // it came back in the same moment
		d.hung.Store(false)
		return err
	default:
		return d.unanswered(ctx, op, gpu)
	}
}

func (d *Driver) unanswered(ctx context.Context, op string, gpu nvml.UUID) error {
	return &nvml.Error{Op: op, GPU: gpu, Err: nvml.ErrUnresponsive, Code: context.Cause(ctx).Error() + d.pathOfCall()}
}

// setPath notes the path that the call is about to open.
func (d *Driver) setPath(path string) { d.at.Store(path) }

// pathOfCall gives, for the end of an error, the file that the call in the library opens; empty if it opens none.
func (d *Driver) pathOfCall() string {
	if path, _ := d.at.Load().(string); path != "" {
		return "; it hangs at " + path
	}
	return ""
}

// inside runs an operation for the holder of the slot.
func (d *Driver) inside(ctx context.Context, op string, f func(context.Context, *session) error) error {
	defer d.setPath("")
	if d.session == nil {
		s, err := d.open()
		if err != nil {
			return d.judge(err)
		}
		d.session = s
	}
	err := f(ctx, d.session)
	if errors.Is(err, nvml.ErrNoDriver) || d.session.useless {
		d.log.Debug("driver is gone", zap.String("during", op))
		d.session.close()
		d.session = nil
	}
	return d.judge(err)
}

// open loads and initialises the library.
func (d *Driver) open() (*session, error) {
	path, err := d.find()
	if err != nil {
		return nil, &nvml.Error{Op: "looking for NVIDIA's library", Err: err}
	}
	d.setPath(path)
	driverroot.Touch(path)
	// go-nvml binds functions once for the life of the process: the library must never be unmapped under them.
	if err := dl.New(path, dl.RTLD_LAZY|dl.RTLD_GLOBAL|dl.RTLD_NODELETE).Open(); err != nil {
		return nil, &nvml.Error{
			Op: "opening NVIDIA's library", Err: fmt.Errorf("%w: %w", nvml.ErrNoDriver, err),
			Code: name(nv.ERROR_LIBRARY_NOT_FOUND),
		}
	}
	remember(path)
	d.setPath("")
	lib, err := d.opened.open(path, d.options.Wrap)
	if err != nil {
		return nil, err
	}
	d.log.Debug("library open", zap.String("path", path))
	return &session{lib: lib, opened: &d.opened, known: d.known}, nil
}

// find gives the path of the library, or its bare name for the dynamic loader to look up.
func (d *Driver) find() (string, error) {
	o := d.options
	if o.Library != "" {
		return o.Library, nil
	}
	own := o.DriverRoot == "" || filepath.Clean(o.DriverRoot) == "/"
	if own {
		d.setPath("the dynamic loader's search for " + libraryName)
		if dl.New(libraryName, dl.RTLD_LAZY).Open() == nil {
			return libraryName, nil
		}
	}
	path, err := driverroot.Find(cmp.Or(o.DriverRoot, "/"), d.setPath)
	switch {
	case err == nil:
		return path, nil
	case own:
		return libraryName, nil
	default:
		return "", fmt.Errorf("%w: %w", nvml.ErrNoDriver, err)
	}
}
