package lib

import (
	"context"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
)

// persistent reports whether a GPU is in persistence mode. A driver that has no such mode is ErrNotSupported.
func (s *session) persistent(d device) (bool, error) {
	const op = "reading persistence mode"
	if !s.has("nvmlDeviceGetPersistenceMode") {
		return false, check(op, d.uuid, nv.ERROR_FUNCTION_NOT_FOUND)
	}
	state, ret := askTwice(d.GetPersistenceMode)
	return state == nv.FEATURE_ENABLED, check(op, d.uuid, ret)
}

// SetPersistence implements nvml.Driver.
func (d *Driver) SetPersistence(ctx context.Context, gpu nvml.UUID, on bool) error {
	op, want := "turning persistence mode off", nv.FEATURE_DISABLED
	if on {
		op, want = "turning persistence mode on", nv.FEATURE_ENABLED
	}
	return d.call(ctx, op, gpu, func(_ context.Context, s *session) error {
		dev, err := s.device(op, gpu)
		if err != nil {
			return err
		}
		// No call if the mode is so already: a virtual machine may allow reading it and forbid setting it.
		before, err := s.persistent(dev)
		if err != nil || before == on {
			return err
		}
		if !s.has("nvmlDeviceSetPersistenceMode") {
			return check(op, gpu, nv.ERROR_FUNCTION_NOT_FOUND)
		}
		err = check(op, gpu, dev.SetPersistenceMode(want))
		if isUnsupported(err) { // yet it can be read: with ErrNotSupported the mode would never be restored
			err = check(op, gpu, dev.SetPersistenceMode(want))
		}
		return err
	})
}
