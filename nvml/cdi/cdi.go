// Package cdi keeps the node's CDI specs true to its GPUs. A container runtime that injects GPUs by CDI knows only the devices that a spec names.
// NVIDIA's tools write a spec when the driver is installed or the machine boots, but not when MIG instances change.
//
// Of a spec, only the devices follow from the geometry. These are generated again by NVIDIA's own library, pkg/nvcdi of
// nvidia-container-toolkit; everything else in the file (libraries, hooks, environment, entries of whole GPUs) stays as the
// node's own toolkit wrote it. That toolkit may be older than the library here: nothing may come into the file, such as a
// hook, that its programs do not know.
//
// It is a leaf: only commands and tests import it, since nvcdi needs cgo.
package cdi

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"go.uber.org/zap"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Kinds of specs that are kept up to date. NVIDIA's device plugin and DRA driver have kinds of their own, and write them
// themselves.
const (
	kindGPU        = "nvidia.com/gpu"            // by nvidia-ctk cdi generate, nvidia-cdi-refresh.service
	kindManagement = "management.nvidia.com/gpu" // by the GPU operator's toolkit: every device file of the node
)

// Options say where things are, as seen from this process.
type Options struct {
	// Dirs are where CDI specs lie; /etc/cdi and /var/run/cdi if there are none. One that does not exist is empty.
	Dirs []string
	// DriverRoot is the root of the file system that NVIDIA's driver is installed in; "/" if empty.
	DriverRoot string
	// DevRoot is the parent directory of dev with the node's device files; DriverRoot if empty. Each spec has the container runtime's path of that
	// directory.
	DevRoot string
	// Library is the path of libnvidia-ml.so.1 itself, and wins over DriverRoot.
	Library string
	// Logger gets the messages of NVIDIA's library, at debug level; nil for none.
	Logger *zap.Logger
}

// Specs are the node's CDI specs. Its methods must not run at the same time as each other, nor as those of an nvml.Driver
// other than Events.
type Specs struct {
	dirs       []string
	driverRoot string
	devRoot    string
	library    string
	log        *zap.Logger

	generating aside.Lane // of calls into NVIDIA's library
	files      aside.Lane // of calls that touch files of the host
}

// New prepares Specs. It touches neither files nor NVIDIA's library yet.
func New(o Options) *Specs {
	s := &Specs{
		dirs: o.Dirs, driverRoot: o.DriverRoot, devRoot: o.DevRoot, library: o.Library, log: o.Logger,
	}
	if len(s.dirs) == 0 {
		s.dirs = []string{"/etc/cdi", "/var/run/cdi"}
	}
	if s.driverRoot == "" {
		s.driverRoot = "/"
	}
	if s.devRoot == "" {
		s.devRoot = s.driverRoot
	}
	s.devRoot = filepath.Clean(s.devRoot)
	if s.log == nil {
		s.log = zap.NewNop()
	}
	s.log = s.log.Named("cdi")
	return s
}

// Stale returns the paths of the specs that do not describe the present GPUs; none if CDI is not in use. It only reads files. An error names each
// unreadable spec, and says what to do; the result still has the others.
//
// It returns when ctx ends, at the latest. It then abandons files behind a mount that does not answer, and the error is an *aside.AbandonedError.
//
// A lost GPU's instances are not known: specs are stale then only if they lack a device of another GPU.
func (s *Specs) Stale(ctx context.Context, gpus []nvml.GPU) ([]string, error) {
	stale, err := s.stale(ctx, gpus)
	var paths []string
	for _, f := range stale {
		paths = append(paths, f.path)
	}
	return paths, err
}

// Write brings every stale spec up to date, each by one rename over the old file, in the format and with the kinds of device names that it had. A
// spec without remaining devices gets NVIDIA's empty device "none", since one without devices is not valid. New devices are then named by index and
// by UUID, as nvidia-ctk does by default.
//
// It first creates missing device files of instances under DevRoot, as nvidia-smi does.
//
// It returns when ctx ends, at the latest. It then abandons the call into NVIDIA's library, and this and all further calls fail with
// nvml.ErrUnresponsive until that one returns. Other errors name the spec, which has not changed, and say what to do. Write does not touch correct
// specs.
func (s *Specs) Write(ctx context.Context, gpus []nvml.GPU) error {
	stale, err := s.stale(ctx, gpus)
	if len(stale) == 0 {
		return err
	}
	if made := aside.Run(ctx, &s.files, "making device files below "+s.devRoot, func(context.Context, aside.At) error { return s.makeNodes() }); made != nil {
		return errors.Join(err, made)
	}
	for _, f := range stale {
		if failed := s.rewrite(ctx, f, gpus); failed != nil {
			err = errors.Join(err, fmt.Errorf("regenerating CDI spec %s: %w", f.path, failed))
		}
	}
	return err
}

func (s *Specs) stale(ctx context.Context, gpus []nvml.GPU) ([]file, error) {
	gpus = slices.Clone(gpus)
	return aside.Do(ctx, &s.files, "looking at the CDI specs", func(ctx context.Context, at aside.At) ([]file, error) { return s.compare(ctx, at, gpus) })
}

func (s *Specs) compare(ctx context.Context, at aside.At, gpus []nvml.GPU) ([]file, error) {
	files, err := s.read(at)
	at(filepath.Join(s.devRoot, "dev"))
	var out []file
	for _, f := range files {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		fits, unreadable := s.fits(f.spec, gpus)
		switch {
		case unreadable != nil:
			err = errors.Join(err, fmt.Errorf("comparing CDI spec %s with the GPUs: %w", f.path, unreadable))
		case !fits:
			out = append(out, f)
		}
	}
	return out, err
}

func (s *Specs) rewrite(ctx context.Context, f file, gpus []nvml.GPU) error {
	devices, err := s.answer(ctx, func(at aside.At) ([]specs.Device, error) { return s.generate(f.spec, gpus, at) })
	if err != nil {
		return err
	}
	updated, err := f.withDevices(devices)
	if err != nil {
		return err
	}
	gpus = slices.Clone(gpus)
	return aside.Run(ctx, &s.files, "writing "+f.path, func(ctx context.Context, at aside.At) error {
		at(f.path)
		// The GPUs may have changed since they were observed, or NVIDIA's library may see them otherwise.
		if fits, err := s.fits(updated, gpus); err != nil || !fits {
			return errors.Join(err, fmt.Errorf("NVIDIA's library lists devices %s, which differ from the observed GPUs: try again",
				strings.Join(names(updated), ", ")))
		}
		if ctx.Err() != nil { // the caller has given up, and the GPUs may have changed
			return ctx.Err()
		}
		return f.replace(updated)
	})
}

// answer waits for a call into NVIDIA's library, but not longer than ctx. Such a call only generates: if it returns
// late, it writes nothing.
func (s *Specs) answer(ctx context.Context, call func(aside.At) ([]specs.Device, error)) ([]specs.Device, error) {
	const op = "generating CDI devices"
	if ctx.Err() != nil {
		return nil, &nvml.Error{Op: op, Err: ctx.Err()}
	}
	devices, err := aside.Do(ctx, &s.generating, op, func(_ context.Context, at aside.At) ([]specs.Device, error) { return call(at) })
	left, abandoned := errors.AsType[*aside.AbandonedError](err)
	if !abandoned {
		return devices, err
	}
	why := "an earlier call has not returned"
	if left.Hanging == "" {
		why = context.Cause(ctx).Error()
	}
	if left.At != "" {
		why += "; it hangs at " + left.At
	}
	return nil, &nvml.Error{Op: op, Err: nvml.ErrUnresponsive, Code: why}
}
