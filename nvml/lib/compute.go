package lib

import (
	"context"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
)

// computeModes are the compute modes as the library numbers them. The one that is missing lets one thread in, and no driver
// has it any more.
var computeModes = map[nvml.ComputeMode]nv.ComputeMode{
	nvml.ComputeDefault:          nv.COMPUTEMODE_DEFAULT,
	nvml.ComputeProhibited:       nv.COMPUTEMODE_PROHIBITED,
	nvml.ComputeExclusiveProcess: nv.COMPUTEMODE_EXCLUSIVE_PROCESS,
}

// computeMode reads a GPU's compute mode; empty is one that the driver does not tell.
//
// A GPU in MIG mode is not asked: its mode cannot be but the default, drivers up to 580 say so, and those since want to be
// asked about a MIG device instead.
func (s *session) computeMode(d device, m mode) (nvml.ComputeMode, error) {
	if m.current || !s.has("nvmlDeviceGetComputeMode") {
		return "", nil
	}
	found, ret := twice(d.GetComputeMode)
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
			return fault(op, gpu, nvml.ErrNotSupported, "there is no such mode")
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
			return fault(op, gpu, nvml.ErrNotSupported, "the GPU is in MIG mode")
		}
		// A change that is none is not asked for: a virtual machine may forbid to set what it lets be read.
		before, err := s.computeMode(dev, m)
		if err != nil || before == want {
			return err
		}
		if !s.has("nvmlDeviceSetComputeMode") {
			return check(op, gpu, nv.ERROR_FUNCTION_NOT_FOUND)
		}
		err = check(op, gpu, dev.SetComputeMode(number))
		if isUnsupported(err) && before != "" { // and yet it can be read: the mode is not given back if that is believed
			err = check(op, gpu, dev.SetComputeMode(number))
		}
		return err
	})
}
