// Package outcome has what may come of a pass besides a step that is done: the errors by which the loop decides when to look again.
package outcome

import (
	"errors"
	"time"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/config"
)

// longestWait leaves a decision room for since when, how long, and what people can do, behind what is waited for.
const longestWait = 512 // characters

// Waiting says that something else has to happen first. The loop looks again after After, or when it is woken.
type Waiting struct {
	Reason   config.Reason
	Message  string // what is waited for
	After    time.Duration
	Since    time.Time // since when, where that is known
	Until    time.Time // how long, where that has an end
	Then     string    // what is done at the end
	Advice   string    // what people can do meanwhile
	Blockers []string  // what is in the way, one by one, for tools
	Planned  time.Time // when the change begins, in the zone of its window, where a window is waited for
	For      For       // what others decide by; Reason and Message are for people
}

// For is what a wait is for, where something follows from that.
type For int

// What others decide by.
const (
	ForAnything     For = iota
	ForDriver           // how the GPUs are cannot be told without it
	ForDevicePlugin     // none runs here that could be asked
	ForReboot
	ForRoom // people have to let pods go
	ForTurn // in the pool's line, where the node keeps its place
)

// Error says all of it, in moments and not in spans: a message that changes by itself would be written to the node again and
// again.
func (w *Waiting) Error() string {
	text := legible.Message(w.Message, longestWait)
	if !w.Since.IsZero() {
		text += "; since " + Moment(w.Since)
	}
	if !w.Until.IsZero() {
		text += "; at " + Moment(w.Until) + " " + w.Then
	}
	if w.Advice != "" {
		text += "; " + w.Advice
	}
	return text
}

// Moment writes a time as people read it in a condition.
func Moment(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

// Zoned writes a time as clocks show it where the window is, and in UTC.
func Zoned(t time.Time) string {
	if _, offset := t.Zone(); offset == 0 {
		return t.UTC().Format("Mon 2006-01-02 15:04:05Z")
	}
	return t.Format("Mon 2006-01-02 15:04:05 MST (") + t.UTC().Format("Mon 15:04:05Z") + ")"
}

// Stalled says that nothing more is done until the input changes: a label, a ConfigMap, a GPU.
type Stalled struct {
	Reason  config.Reason
	Message string
	Journal bool // there is one that this agent cannot read
	// NoHandover: there is no way to give the device plugin a config.
	NoHandover bool
}

// Error is the message.
func (s *Stalled) Error() string { return s.Message }

// UnseenError is what could not be looked at for a cause that may pass: nothing is decided by it, and what has begun is not ended.
type UnseenError struct{ Err error }

// Error is the cause's.
func (e *UnseenError) Error() string { return e.Err.Error() }

// Unwrap is the cause.
func (e *UnseenError) Unwrap() error { return e.Err }

// IsUnseen reports whether the error is one.
func IsUnseen(err error) bool {
	_, is := errors.AsType[*UnseenError](err)
	return is
}
