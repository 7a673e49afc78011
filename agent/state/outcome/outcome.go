// Package outcome has the errors by which the loop decides when to observe again, and the form of their messages.
//
// A message is read in kubectl describe node. It says each thing once: first what its reader has to do, then why, then since when and what comes
// next, and last how to get out of it. It names GPUs by their index, a disruption budget once with the first of the pods that it keeps, and
// counts the others; the status has all of them.
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

// Waiting says that something else has to happen first. The loop observes again after After, or when it is woken.
type Waiting struct {
	Reason   config.Reason
	Message  string // what the agent waits for
	After    time.Duration
	Since    time.Time // since when it waits, if that is known
	Until    time.Time // the deadline; zero if there is none
	Then     string    // what the agent does at the deadline
	Advice   string    // what a user has to do, which the message says first
	Named    bool      // Advice names the requested config
	Else     string    // what holds until then, and how a user ends it, which the message says last
	Blockers []string  // what is in the way, one by one, for tools
	Planned  time.Time // when the change begins, in the zone of its window, if the agent waits for a window
	For      For       // for code that decides by the wait; Reason and Message are for users
}

// For is what a wait is for, as far as other code decides by it.
type For int

// The waits by which other code decides.
const (
	ForAnything     For = iota
	ForDriver           // without the driver the agent does not know how the GPUs are
	ForDevicePlugin     // no device plugin runs here
	ForReboot
	ForRoom  // users have to let pods go
	ForSlot  // for a slot of the pool: the node keeps its place in the queue
	ForStep  // for what a step has begun, which comes to its end by itself or at the deadline
	ForRetry // a step or an observation has failed, and is tried again
)

// Error says all of it, with moments and not with durations: the agent would write a message that changes by itself to the node again and
// again.
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

// Clauses joins the clauses of a message that are not empty: what its reader has to do comes first.
func Clauses(clauses ...string) string {
	return strings.Join(slices.DeleteFunc(clauses, func(c string) bool { return c == "" }), "; ")
}

// Moment writes a time for a condition.
func Moment(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

// Zoned writes a time as clocks show it where the window is, and in UTC.
func Zoned(t time.Time) string {
	if _, offset := t.Zone(); offset == 0 {
		return t.UTC().Format("Mon 2006-01-02 15:04:05Z")
	}
	return t.Format("Mon 2006-01-02 15:04:05 MST (") + t.UTC().Format("Mon 15:04:05Z") + ")"
}

// Stalled says that the agent does nothing more until its input changes: a label, a ConfigMap, a GPU.
type Stalled struct {
	Reason  config.Reason
	Message string
	Journal string // why this agent cannot read the node's journal; empty if it stalls for another cause
	// NoHandover: the agent cannot give the device plugin a config.
	NoHandover bool
	Unread     bool // a file of the administrator could not be read
	// Cause is what is wrong with the config itself, without the label or setting that asks for it, which the message names; nil if there is no such thing.
	Cause error
}

// Error is the message.
func (s *Stalled) Error() string { return s.Message }

// Unwrap is the cause.
func (s *Stalled) Unwrap() error { return s.Cause }

// ErrPlanAgain says that a step has amended the journal and done nothing else. The next pass, at once, plans by the journal; nothing is reported as done.
var ErrPlanAgain = errors.New("the journal is amended")

// UnseenError says what the agent could not see, for a cause that may pass: it decides nothing by that, and does not end a running change.
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
