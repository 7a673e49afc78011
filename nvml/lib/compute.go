package lib

import (
	"context"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
)

// computeModes are the compute modes as the library numbers them. It leaves out the one for a single thread, which no driver
// has any more.
var computeModes = map[nvml.ComputeMode]nv.ComputeMode{
	nvml.ComputeDefault:          nv.COMPUTEMODE_DEFAULT,
	nvml.ComputeProhibited:       nv.COMPUTEMODE_PROHIBITED,
	nvml.ComputeExclusiveProcess: nv.COMPUTEMODE_EXCLUSIVE_PROCESS,
}

// computeMode reads a GPU's compute mode; empty is one that the driver does not report.
//
// It does not query a GPU in MIG mode, which always has the default. Drivers up to 580 say so, and later ones want a call about a MIG device instead.
func (s *session) computeMode(d device, m mode) (nvml.ComputeMode, error) {
	if m.current || !s.has("nvmlDeviceGetComputeMode") {
		return "", nil
	}
	found, ret := askTwice(d.GetComputeMode)
	if isNotProvided(ret) {
		return "", nil
	}
	for name, number := range computeModes {
		if number == found {
			return name, check("reading the compute mode", d.uuid, ret)
		}
	}
	return "", check("reading the compute mode", d.uuid, ret)
}

// SetComputeMode implements nvml.Driver.
func (d *Driver) SetComputeMode(ctx context.Context, gpu nvml.UUID, want nvml.ComputeMode) error {
	op := "setting the compute mode to " + string(want)
	return d.call(ctx, op, gpu, func(_ context.Context, s *session) error {
		number, known := computeModes[want]
		if !known {
			return newError(op, gpu, nvml.ErrNotSupported, "there is no such mode")
		}
		dev, err := s.device(op, gpu)
		if err != nil {
			return err
		}
		m, err := s.mode(dev)
		switch {
		case err != nil:
			return err
		case m.current && want == nvml.ComputeDefault:
			return nil
		case m.current:
			return newError(op, gpu, nvml.ErrNotSupported, "the GPU is in MIG mode")
		}
		// No call if the mode is so already: a virtual machine may allow reading it and forbid setting it.
		before, err := s.computeMode(dev, m)
		if err != nil || before == want {
			return err
		}
		if !s.has("nvmlDeviceSetComputeMode") {
			return check(op, gpu, nv.ERROR_FUNCTION_NOT_FOUND)
		}
		err = check(op, gpu, dev.SetComputeMode(number))
		if isUnsupported(err) && before != "" { // yet it can be read: with ErrNotSupported the mode would never be restored
			err = check(op, gpu, dev.SetComputeMode(number))
		}
		return err
	})
}
