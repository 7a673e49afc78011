package nvml

import (
	"errors"
	"fmt"
)

// Errors that callers decide by. An *Error may wrap any of these. It names the call and the GPU.
var (
	// ErrInUse means that a process, or another client of the driver, holds the GPU or the instance.
	ErrInUse = errors.New("in use")
	// ErrNotSupported means that this GPU or driver cannot do it, now or later.
	ErrNotSupported = errors.New("not supported")
	// ErrNotFound means that the GPU is not there.
	ErrNotFound = errors.New("not found")
	// ErrNoRoom means that the place is taken, or that the GPU has not enough left for the instance.
	ErrNoRoom = errors.New("no room")
	// ErrResetRequired means that the GPU does nothing more until it is reset.
	ErrResetRequired = errors.New("reset required")
	// ErrLost means that the GPU has fallen off the bus.
	ErrLost = errors.New("GPU is lost")
	// ErrPermission means that the process may not do it.
	ErrPermission = errors.New("no permission")
	// ErrNoDriver means that NVIDIA's driver or its library is not loaded.
	ErrNoDriver = errors.New("driver not loaded")
	// ErrReplaced means that the driver was replaced by another version; its library has to be loaded by a new process.
	ErrReplaced = errors.New("driver was replaced by another version: only a new process can load its library")
	// ErrUnresponsive means that a call into the driver has not returned in time.
	ErrUnresponsive = errors.New("driver does not answer")
)

// Error is a failed call into the driver.
type Error struct {
	Op   string // the operation, as a gerund: "creating 3g.40gb@4"
	GPU  UUID   // empty for the node as a whole
	Code string // the library's own name of the result: "ERROR_IN_USE"
	Err  error  // one of the Err… values, or nil for a cause that no caller decides by
}

// Error names the operation, the GPU, and the library's answer.
func (e *Error) Error() string {
	on := ""
	if e.GPU != "" {
		on = " on " + string(e.GPU)
	}
	switch {
	case e.Err == nil:
		return fmt.Sprintf("%s%s: %s", e.Op, on, e.Code)
	case e.Code == "":
		return fmt.Sprintf("%s%s: %v", e.Op, on, e.Err)
	default:
		return fmt.Sprintf("%s%s: %v (%s)", e.Op, on, e.Err, e.Code)
	}
}

// Unwrap gives the cause to errors.Is.
func (e *Error) Unwrap() error { return e.Err }
