// Package kernellog reads NVIDIA's error numbers, Xids, from the log of the node's kernel, /dev/kmsg. The driver writes all its reports there,
// including errors that its events leave out, and the process that made each. Package verdict decides whether an Xid counts.
//
// Other programs write to the log, too: root's programs directly, and any program by its name, which drivers print. A record counts only if
// the kernel marks it as its own, and its text is read only up to the program's name.
package kernellog

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

const (
	// longestRecord is more than the kernel writes in one record.
	longestRecord = 8 << 10 // bytes
	// mostRecords are read within a second: a kernel that writes more overwrites what is not read in time.
	mostRecords = 2000
)

// Log is the kernel's log. Its methods are for one caller at a time.
type Log struct {
	path  string
	clock clock.Clock
	log   *zap.Logger
	open  func(path string) (source, error)

	started bool
	last    uint64 // sequence number of the last record that was read
}

// source is an open log. Each Read returns one record.
type source interface {
	io.ReadSeekCloser
}

// New returns the log at a path, /dev/kmsg. It opens nothing before Xids.
func New(path string, c clock.Clock, log *zap.Logger) *Log {
	return &Log{path: path, clock: c, log: log, open: openLog}
}

// openLog opens the log so that closing it ends a waiting read, and a waiting read takes no thread.
func openLog(path string) (source, error) { return os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) }

// Xids sends each Xid that the driver writes from now on, until ctx ends or the log becomes unreadable; then it closes the channel. The next
// call continues after the last record that was read. The error says why the log cannot be opened.
func (l *Log) Xids(ctx context.Context) (<-chan Xid, error) {
	from, err := l.open(l.path)
	if err != nil {
		return nil, fmt.Errorf("opening the kernel's log: %w", err)
	}
	if !l.started { // what was written before is no news
		if _, err := from.Seek(0, io.SeekEnd); err != nil && !errors.Is(err, unix.ESPIPE) {
			_ = from.Close() // the error returned says more
			return nil, fmt.Errorf("skipping the old records of the kernel's log: %w", err)
		}
	}
	l.started = true
	out := make(chan Xid)
	go func() {
		defer close(out)
		stop := context.AfterFunc(ctx, func() { _ = from.Close() }) // which ends a read that waits
		err := l.follow(ctx, from, out)
		if stop() {
			_ = from.Close() // it was only read, so the error loses nothing
		}
		if ctx.Err() == nil {
			l.log.Debug("cannot read the kernel's log any more", zap.Error(err))
		}
	}()
	return out, nil
}

// follow reads until the log cannot be read.
func (l *Log) follow(ctx context.Context, from source, out chan<- Xid) error {
	buffer := make([]byte, longestRecord)
	began, read := l.clock.Now(), 0
	for {
		n, err := from.Read(buffer)
		switch {
		case errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EINVAL): // overwritten, or longer than any: the next read returns the next one
		case err != nil:
			return err
		case n == 0:
			return io.ErrUnexpectedEOF
		default:
			if x, is := l.take(string(buffer[:n])); is {
				select {
				case <-ctx.Done():
					return ctx.Err()
				case out <- x:
				}
			}
		}
		if read++; read < mostRecords {
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-l.clock.After(time.Second - l.clock.Since(began)):
		}
		began, read = l.clock.Now(), 0
	}
}

// take notes the number of a record, and returns the Xid in it.
func (l *Log) take(record string) (Xid, bool) {
	priority, sequence, text, ok := parseRecord(record)
	if !ok || sequence <= l.last && l.last > 0 {
		return Xid{}, false
	}
	l.last = sequence
	if !ofKernel(priority) {
		return Xid{}, false
	}
	return parseXid(text)
}
