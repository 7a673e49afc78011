// Package outcome has the errors that tell the loop when to observe again, and the form of their messages.
//
// Users read a message in kubectl describe node. It says each thing once: first what to do, then why, then since when and what comes next, and last how to
// cancel. It names GPUs by their index. It names a disruption budget once, with the first of the pods that it keeps, and counts the others; the status has
// all of them.
package outcome

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// longestWait bounds what the agent waits for, so that the message has room for since when, how long, and what a user can do.
const longestWait = 512 // characters

// Waiting means that something else has to happen first. The loop observes again after After, or when it is woken.
type Waiting struct {
	Reason   config.Reason
	Message  string // what the agent waits for
	After    time.Duration
	Since    time.Time // since when it waits, if that is known
	Until    time.Time // the deadline; zero if there is none
	Then     string    // what the agent does at the deadline
	Advice   string    // what a user has to do; the message begins with it
	Named    bool      // Advice names the requested config
	Else     string    // what holds until then, and how a user ends it; the message ends with it
	Blockers []string  // what is in the way, one by one, for tools
	Planned  time.Time // when the change begins, in the zone of its window, if the agent waits for a window
	For      For       // for other code; Reason and Message are for users
}

// For is what a wait is for, as far as other code depends on it.
type For int

// The waits that other code depends on.
const (
	ForAnything     For = iota
	ForDriver           // without the driver the agent does not know the state of the GPUs
	ForDevicePlugin     // no device plugin runs here
	ForUser             // only a user can end it
	ForReboot
	ForRoom  // users have to let pods go
	ForSlot  // for a slot of the pool: the node keeps its place in the queue
	ForStep  // for the work of a step, which ends by itself or at the deadline
	ForRetry // a step or an observation has failed, and is tried again
)

// Error says all of it, with times of day instead of durations: the agent would have to keep writing a message that changes by itself to the node.
func (w *Waiting) Error() string {
	since, then := "", ""
	if !w.Since.IsZero() {
		since = "since " + Moment(w.Since)
	}
	if !w.Until.IsZero() {
		then = "at " + Moment(w.Until) + " " + w.Then
	}
	return Clauses(w.Advice, sanitize.Message(w.Message, longestWait), since, then, w.Else)
}

// Clauses joins the clauses of a message that are not empty. The first says what to do.
func Clauses(clauses ...string) string {
	return strings.Join(slices.DeleteFunc(clauses, func(c string) bool { return c == "" }), "; ")
}

// Moment writes a time for a condition.
func Moment(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

// Zoned writes a time in the window's time zone, and in UTC.
func Zoned(t time.Time) string {
	if _, offset := t.Zone(); offset == 0 {
		return t.UTC().Format("Mon 2006-01-02 15:04:05Z")
	}
	return t.Format("Mon 2006-01-02 15:04:05 MST (") + t.UTC().Format("Mon 15:04:05Z") + ")"
}

// Stalled means that the agent does nothing more until its input changes: a label, a ConfigMap, a GPU.
type Stalled struct {
	Reason  config.Reason
	Message string
	Journal string // why this agent cannot read the node's journal; empty if it stalls for another cause
	// NoHandover: the agent cannot give the device plugin a config.
	NoHandover bool
	Unread     bool // a file of the administrator could not be read
	// Cause is the mistake in the config itself; only the message also names the label or setting that requests it. Nil if the config is not the cause.
	Cause error
}

// Error is the message.
func (s *Stalled) Error() string { return s.Message }

// Unwrap is the cause.
func (s *Stalled) Unwrap() error { return s.Cause }

// ErrPlanAgain means that a step has only amended the journal. The next pass begins at once and plans by it; the agent reports nothing as done.
var ErrPlanAgain = errors.New("the journal is amended")

// NoHolderError says that a GPU is in use, although the agent finds no process that holds it.
type NoHolderError struct{ Err error }

// Error is the text of the cause.
func (e *NoHolderError) Error() string { return e.Err.Error() }

// Unwrap is the cause.
func (e *NoHolderError) Unwrap() error { return e.Err }

// UnseenError says what the agent could not observe in this pass. It decides nothing from that, and does not end a running change.
type UnseenError struct{ Err error }

// Error is the text of the cause.
func (e *UnseenError) Error() string { return e.Err.Error() }

// Unwrap is the cause.
func (e *UnseenError) Unwrap() error { return e.Err }

// IsUnseen reports whether the error is an *UnseenError.
func IsUnseen(err error) bool {
	_, is := errors.AsType[*UnseenError](err)
	return is
}
