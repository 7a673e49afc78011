// Package aside runs calls that may hang, each in its own goroutine, and abandons them at their deadline. Most are reads of files behind a mount that
// no longer answers. The kernel does not end such a call, so a caller can only abandon it. It knows nothing of the calls' subjects.
//
// It stands below nvml, which is ground to all others: each program part that waits for a device, a file or a bus abandons its calls by this package.
package aside

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// Lane runs calls of one kind, one at a time: as long as one hangs there, none follows it, so that hanging calls
// never pile up. A call that hangs in one lane does not hold up another. The zero Lane is ready; it must not be copied after use.
type Lane struct {
	mu      sync.Mutex
	running *call
}

// call is one that has begun and not ended.
type call struct {
	what  string
	ended chan struct{} // closed when it has

	mu        sync.Mutex
	at        string // the path or name that it touches, as far as it says
	abandoned bool
}

// At takes the name of the file or service that a call is about to touch, for the error of a caller that abandons it.
type At func(what string)

// AbandonedError is the error of a call that did not end before its context did, and of each one that was to follow while
// that call hangs. It unwraps to the error of the context where that has ended.
type AbandonedError struct {
	What    string // the caller's operation, as a gerund
	Hanging string // the call that hangs, if it is an earlier one
	At      string // the path or name that the hanging call touches, if it has said so
	Cause   error  // of the context; nil if an earlier call hangs
}

// Error says where the call hangs.
func (e *AbandonedError) Error() string {
	text := e.What + " hangs"
	if e.Hanging != "" {
		text = fmt.Sprintf("%s is postponed: an earlier try, %s, hangs", e.What, e.Hanging)
	}
	if e.At != "" {
		text += " at " + e.At
	}
	if e.Cause != nil {
		text += ": " + e.Cause.Error()
	}
	return text
}

// Unwrap gives the error of the context, or nothing.
func (e *AbandonedError) Unwrap() error { return e.Cause }

// Hangs reports whether the error is of an abandoned call, or of a call postponed for one.
func Hangs(err error) bool {
	_, is := errors.AsType[*AbandonedError](err)
	return is
}

// Do runs f in the lane and returns its results. What names the call in errors: "reading the device plugin's config".
//
// Once ctx ends Do returns an *AbandonedError at once, also in the middle of f. The lane stays taken until f returns, so f must not write to memory
// that its caller still uses. While an abandoned f hangs, Do of other callers fails at once; while f merely runs, they wait for their turn, as long
// as their own context lasts.
func Do[T any](ctx context.Context, lane *Lane, what string, f func(ctx context.Context, at At) (T, error)) (T, error) {
	var none T
	c, err := lane.enter(ctx, what)
	if err != nil {
		return none, err
	}
	type result struct {
		value T
		err   error
	}
	results := make(chan result, 1) // the caller may have given up by then
	go func() {
		defer lane.leave(c)
		value, err := f(ctx, c.isAt)
		results <- result{value, err}
	}()
	select {
	case r := <-results:
		return r.value, r.err
	case <-ctx.Done():
		return none, &AbandonedError{What: what, At: c.abandon(), Cause: ctx.Err()}
	}
}

// enter takes the lane.
func (l *Lane) enter(ctx context.Context, what string) (*call, error) {
	for {
		l.mu.Lock()
		earlier := l.running
		if earlier == nil && ctx.Err() == nil {
			c := &call{what: what, ended: make(chan struct{})}
			l.running = c
			l.mu.Unlock()
			return c, nil
		}
		l.mu.Unlock()
		if earlier != nil {
			if at, abandoned := earlier.hangs(); abandoned {
				return nil, &AbandonedError{What: what, Hanging: earlier.what, At: at, Cause: ctx.Err()}
			}
		}
		if ctx.Err() != nil {
			return nil, &AbandonedError{What: what, Cause: ctx.Err()}
		}
		select {
		case <-earlier.ended:
		case <-ctx.Done():
		}
	}
}

func (l *Lane) leave(c *call) {
	l.mu.Lock()
	l.running = nil
	l.mu.Unlock()
	close(c.ended)
}

func (c *call) isAt(what string) {
	c.mu.Lock()
	c.at = what
	c.mu.Unlock()
}

func (c *call) abandon() (at string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.abandoned = true
	return c.at
}

func (c *call) hangs() (at string, abandoned bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at, c.abandoned
}

// Run is Do for a call that returns only an error.
func Run(ctx context.Context, lane *Lane, what string, f func(ctx context.Context, at At) error) error {
	_, err := Do(ctx, lane, what, func(ctx context.Context, at At) (struct{}, error) { return struct{}{}, f(ctx, at) })
	return err
}

// ReadFile reads a regular file of at most limit bytes in the lane. A longer one, and any other kind of file, is an
// error: reading a pipe may wait, and reading a device may have any effect. A missing file is fs.ErrNotExist.
func ReadFile(ctx context.Context, lane *Lane, path string, limit int64) ([]byte, error) {
	return Do(ctx, lane, "reading "+path, func(context.Context, At) ([]byte, error) { return Bounded(path, limit) })
}

// Bounded is ReadFile of a file that cannot hang, as those of procfs cannot, or in a call that is aside already.
func Bounded(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(filepath.Clean(path), os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe that no one writes to opens at once
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case info.Mode().IsDir():
		return nil, &fs.PathError{Op: "read", Path: path, Err: unix.EISDIR}
	case !info.Mode().IsRegular():
		return nil, &fs.PathError{Op: "read", Path: path, Err: ErrNoFile}
	}
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(text)) > limit {
		return nil, &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("%w than %d bytes", ErrTooLong, limit)}
	}
	return text, nil
}

// Errors of reading a file.
var (
	ErrNoFile  = errors.New("it is a pipe, socket or device, and no file")
	ErrTooLong = errors.New("it is longer")
)
