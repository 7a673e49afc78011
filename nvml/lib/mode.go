package lib

import (
	"context"
	"fmt"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/smi"
)

// mode is a GPU's MIG mode.
type mode struct {
	capable          bool
	current, pending bool
}

func (s *session) mode(d device) (mode, error) {
	if !s.has("nvmlDeviceGetMigMode") {
		return mode{}, nil
	}
	var pending int
	current, ret := askTwice(func() (current int, ret nv.Return) {
		current, pending, ret = d.GetMigMode()
		return current, ret
	})
	err := check("reading MIG mode", d.uuid, ret)
	if isUnsupported(err) {
		return mode{}, nil
	}
	return mode{capable: true, current: current == nv.DEVICE_MIG_ENABLE, pending: pending == nv.DEVICE_MIG_ENABLE}, err
}

// SetMode implements nvml.Driver.
func (d *Driver) SetMode(ctx context.Context, gpu nvml.UUID, on bool) error {
	op := "turning MIG mode off"
	if on {
		op = "turning MIG mode on"
	}
	return d.call(ctx, op, gpu, func(_ context.Context, s *session) error {
		dev, before, err := s.capable(op, gpu)
		if err != nil || before.current == on && before.pending == on {
			return err
		}
		activation, err := s.setMode(op, dev, on)
		if err != nil || activation == nv.SUCCESS {
			return err
		}
		after, err := s.mode(dev)
		switch {
		case err != nil:
			return err
		case after.current == on:
			return nil
		case after.pending == on && (activation == nv.ERROR_IN_USE || activation == nv.ERROR_RESET_REQUIRED):
			return nil
		default:
			return check(op, gpu, activation)
		}
	})
}

// Reset implements nvml.Driver. The library has no call that resets a GPU as such. Where no mode is pending, NVIDIA's program does it.
func (d *Driver) Reset(ctx context.Context, gpu nvml.UUID) error {
	const op = "resetting"
	pending := false
	err := d.call(ctx, op, gpu, func(_ context.Context, s *session) error {
		dev, err := s.device(op, gpu)
		if err != nil {
			return err
		}
		m, err := s.mode(dev)
		pending = m.current != m.pending
		return err
	})
	switch {
	case err != nil:
		return err
	case pending:
		return d.resetByMode(ctx, gpu)
	default:
		return d.resetByProgram(ctx, gpu)
	}
}

// resetByProgram has NVIDIA's program reset a GPU. This process lets go of the driver until then, since any client of the GPU keeps it from being reset:
// who reads health or waits for events finds the driver silent.
func (d *Driver) resetByProgram(ctx context.Context, gpu nvml.UUID) error {
	return d.runExclusively(ctx, "resetting", gpu, func() error {
		defer d.setPath("")
		library, err := d.find()
		if err != nil {
			return &nvml.Error{Op: "looking for NVIDIA's library", Err: err}
		}
		d.setPath(smi.Name)
		program, err := smi.Find(library)
		if err != nil {
			return &nvml.Error{Op: "resetting", GPU: gpu, Err: err}
		}
		d.resetting.Store(true)
		defer d.resetting.Store(false)
		d.letGo()
		return smi.Reset(ctx, program, library, gpu)
	})
}

// resetByMode makes a pending mode current: setting it does so, if nothing holds the GPU (nvmlDeviceSetMigMode in nvml.h: "may unbind or reset the
// device to activate the requested mode"). Where resets are not exposed, as in virtual machines with a GPU passed through, it answers that one is
// required, and only a reboot helps.
func (d *Driver) resetByMode(ctx context.Context, gpu nvml.UUID) error {
	const op = "resetting"
	return d.call(ctx, op, gpu, func(_ context.Context, s *session) error {
		dev, before, err := s.capable(op, gpu)
		if err != nil {
			return err
		}
		if before.current == before.pending {
			return nil // it has become current in between
		}
		activation, err := s.setMode(op, dev, before.pending)
		if isUnsupported(err) { // the GPU has taken this mode before; as an ErrNotSupported it would lead to a reboot
			activation, err = s.setMode(op, dev, before.pending)
		}
		if err != nil {
			return err
		}
		after, err := s.mode(dev)
		switch {
		case err != nil:
			return err
		case after.current == after.pending:
			return nil
		case activation == nv.ERROR_RESET_REQUIRED:
			return &nvml.Error{Op: op, GPU: gpu, Code: name(activation), Err: fmt.Errorf("%w: here only a reboot resets it", nvml.ErrNotSupported)}
		case activation == nv.SUCCESS:
			return newError(op, gpu, nvml.ErrInUse, "the mode is still pending")
		default:
			return check(op, gpu, activation)
		}
	})
}

// capable finds a GPU that can be cut, and its mode.
func (s *session) capable(op string, gpu nvml.UUID) (device, mode, error) {
	dev, err := s.device(op, gpu)
	if err != nil {
		return device{}, mode{}, err
	}
	m, err := s.mode(dev)
	if err != nil {
		return device{}, mode{}, err
	}
	if !m.capable {
		return device{}, mode{}, newError(op, gpu, nvml.ErrNotSupported, "the GPU has no MIG mode")
	}
	return dev, m, nil
}

// setMode requests a mode. The first of the library's two codes says whether the mode is current, the second
// whether the GPU has taken it at all.
func (s *session) setMode(op string, d device, on bool) (activation nv.Return, err error) {
	want := nv.DEVICE_MIG_DISABLE
	if on {
		want = nv.DEVICE_MIG_ENABLE
	}
	activation, ret := d.SetMigMode(want)
	return activation, check(op, d.uuid, ret)
}
