package lib

import (
	"errors"
	"fmt"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
)

// errMismatch is an ErrNoDriver until Driver.judge has found out more.
var errMismatch = fmt.Errorf("%w: its kernel module and its library are of different versions", nvml.ErrNoDriver)

// check turns a result code into an error with the operation, the GPU, and the error that callers test for. Success is nil. Result codes are errors
// themselves in go-nvml, success included: none may leave this package.
func check(op string, gpu nvml.UUID, ret nv.Return) error {
	if ret == nv.SUCCESS {
		return nil
	}
	return &nvml.Error{Op: op, GPU: gpu, Code: name(ret), Err: cause(ret)}
}

// cause returns the error that callers test for, or nil for other codes.
func cause(ret nv.Return) error {
	switch ret {
	case nv.ERROR_IN_USE:
		return nvml.ErrInUse
	case nv.ERROR_NOT_SUPPORTED, nv.ERROR_FUNCTION_NOT_FOUND:
		return nvml.ErrNotSupported
	case nv.ERROR_NOT_FOUND, nv.ERROR_GPU_NOT_FOUND:
		return nvml.ErrNotFound
	case nv.ERROR_INSUFFICIENT_RESOURCES: // also the answer for a place that is taken
		return nvml.ErrNoRoom
	case nv.ERROR_RESET_REQUIRED:
		return nvml.ErrResetRequired
	case nv.ERROR_GPU_IS_LOST:
		return nvml.ErrLost
	case nv.ERROR_NO_PERMISSION:
		return nvml.ErrPermission
	case nv.ERROR_UNINITIALIZED, nv.ERROR_DRIVER_NOT_LOADED, nv.ERROR_LIBRARY_NOT_FOUND:
		return nvml.ErrNoDriver
	case nv.ERROR_LIB_RM_VERSION_MISMATCH:
		return errMismatch
	default:
		return nil
	}
}

// name gives the code as nvml.h spells it. The library's own texts differ between versions and do not help in a search.
func name(ret nv.Return) string {
	if int(ret) < len(names) {
		return names[ret]
	}
	if ret == nv.ERROR_UNKNOWN {
		return "ERROR_UNKNOWN"
	}
	return fmt.Sprintf("ERROR_%d", int(ret))
}

// names are the result codes by their number, which nvml.h promises never to change.
var names = [...]string{
	"SUCCESS", "ERROR_UNINITIALIZED", "ERROR_INVALID_ARGUMENT", "ERROR_NOT_SUPPORTED", "ERROR_NO_PERMISSION",
	"ERROR_ALREADY_INITIALIZED", "ERROR_NOT_FOUND", "ERROR_INSUFFICIENT_SIZE", "ERROR_INSUFFICIENT_POWER",
	"ERROR_DRIVER_NOT_LOADED", "ERROR_TIMEOUT", "ERROR_IRQ_ISSUE", "ERROR_LIBRARY_NOT_FOUND", "ERROR_FUNCTION_NOT_FOUND",
	"ERROR_CORRUPTED_INFOROM", "ERROR_GPU_IS_LOST", "ERROR_RESET_REQUIRED", "ERROR_OPERATING_SYSTEM",
	"ERROR_LIB_RM_VERSION_MISMATCH", "ERROR_IN_USE", "ERROR_MEMORY", "ERROR_NO_DATA", "ERROR_VGPU_ECC_NOT_SUPPORTED",
	"ERROR_INSUFFICIENT_RESOURCES", "ERROR_FREQ_NOT_SUPPORTED", "ERROR_ARGUMENT_VERSION_MISMATCH", "ERROR_DEPRECATED",
	"ERROR_NOT_READY", "ERROR_GPU_NOT_FOUND", "ERROR_INVALID_STATE", "ERROR_RESET_TYPE_NOT_SUPPORTED",
}

// newError makes an error that has no result code.
func newError(op string, gpu nvml.UUID, cause error, format string, args ...any) error {
	return &nvml.Error{Op: op, GPU: gpu, Err: fmt.Errorf("%w: %s", cause, fmt.Sprintf(format, args...))}
}

// isUnsupported reports whether the GPU or the driver does not have the feature, rather than that the call failed.
func isUnsupported(err error) bool { return errors.Is(err, nvml.ErrNotSupported) }

// isAbsent reports whether the library says that there is no such thing: as INVALID_ARGUMENT of one that is newer than the
// driver.
func isAbsent(ret nv.Return) bool {
	return ret == nv.ERROR_NOT_SUPPORTED || ret == nv.ERROR_INVALID_ARGUMENT
}

// isNotProvided reports whether the library says that the GPU has no such thing, or has no such function itself.
func isNotProvided(ret nv.Return) bool { return isAbsent(ret) || ret == nv.ERROR_FUNCTION_NOT_FOUND }

// askTwice asks again if the answer is that there is no such thing. It is for values that callers remember for longer than one observation: a profile
// that the library once left out would hide its instances, and a mode would not be restored.
func askTwice[T any](ask func() (T, nv.Return)) (T, nv.Return) {
	out, ret := ask()
	if isAbsent(ret) {
		return ask()
	}
	return out, ret
}
