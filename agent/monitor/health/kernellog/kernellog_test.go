package kernellog_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/monitor/health/kernellog"
	"github.com/gpuslice/gpuslice/test/receive"
)

// fakeLog is a kernel's log: it gives what is sent, one record or error with each Read.
type fakeLog struct {
	records []any // what was written before, and is read first where no one seeks the end
	new     chan any
	closed  chan struct{}
	sought  bool
}

func newFake(old ...any) *fakeLog {
	return &fakeLog{records: old, new: make(chan any, 10_000), closed: make(chan struct{})}
}

func (f *fakeLog) Read(into []byte) (int, error) {
	var next any
	if len(f.records) > 0 {
		next, f.records = f.records[0], f.records[1:]
	} else {
		select {
		case next = <-f.new:
		case <-f.closed:
			return 0, os.ErrClosed
		}
	}
	if err, is := next.(error); is {
		return 0, &os.PathError{Op: "read", Path: "/dev/kmsg", Err: err}
	}
	text, _ := next.(string)
	return copy(into, text), nil
}

func (f *fakeLog) Seek(_ int64, whence int) (int64, error) {
	if whence == io.SeekEnd {
		f.records, f.sought = nil, true
	}
	return 0, nil
}

func (f *fakeLog) Close() error {
	close(f.closed)
	return nil
}

// xidRecord is a record of the driver's with that sequence number.
func xidRecord(sequence, xid int) string {
	return fmt.Sprintf("3,%d,99,-;NVRM: Xid (PCI:0000:17:00): %d, pid=481, name=python3, Ch 00000008\n", sequence, xid)
}

// read opens the log and gives its Xids.
func read(t *testing.T, l *kernellog.Log, from *fakeLog) <-chan kernellog.Xid {
	t.Helper()
	l.OpenBy(func() (io.ReadSeekCloser, error) { return from, nil })
	out, err := l.Xids(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func next(t *testing.T, from <-chan kernellog.Xid, want uint64) {
	t.Helper()
	select {
	case x, open := <-from:
		if !open || x.Number != want {
			t.Fatalf("the next Xid is %d (open: %t), want %d", x.Number, open, want)
		}
	case <-time.After(time.Minute):
		t.Fatalf("no Xid comes, want %d", want)
	}
}

func TestOldRecordsAreNoNewsAndOverwrittenOnesNoEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := kernellog.New("", clock.RealClock{}, zaptest.NewLogger(t))
		first := newFake(xidRecord(1, 79), xidRecord(2, 79))
		out := read(t, l, first)
		first.new <- xidRecord(3, 31)
		next(t, out, 31)
		first.new <- unix.EPIPE // the kernel was faster
		first.new <- unix.EINVAL
		first.new <- "nonsense"
		first.new <- xidRecord(90, 13)
		next(t, out, 13)
		first.new <- unix.EIO
		if x, open := <-out; open {
			t.Fatalf("from a log that cannot be read comes %v", x)
		}
		// The next one begins where the other has ended.
		second := newFake(xidRecord(3, 31), xidRecord(90, 13), xidRecord(91, 48))
		next(t, read(t, l, second), 48)
		if second.sought {
			t.Error("what was written since is skipped")
		}
	})
}

// A log that is written faster than it is read costs a bounded part of a processor.
func TestReadingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		for n := range 3 * kernellog.MostRecords {
			f.new <- fmt.Sprintf("12,%d,99,-;a program writes what it likes\n", n+1)
		}
		f.new <- xidRecord(3*kernellog.MostRecords+1, 31)
		began := time.Now()
		next(t, read(t, kernellog.New("", clock.RealClock{}, zaptest.NewLogger(t)), f), 31)
		if took := time.Since(began); took != 3*time.Second {
			t.Errorf("%d records took %s, want 3s", 3*kernellog.MostRecords, took)
		}
	})
}

// The log as a file: here a pipe that keeps records apart, as the kernel's does. A reader that waits ends with its context.
func TestALogIsReadRecordByRecordFromItsFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "kmsg")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	writer, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	if _, err := unix.FcntlInt(writer.Fd(), unix.F_SETFL, unix.O_DIRECT); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	out, err := kernellog.New(path, clock.RealClock{}, zaptest.NewLogger(t)).Xids(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for n, record := range []string{"6,1,99,-;usb 1-1: new device\n SUBSYSTEM=usb\n DEVICE=c189:1\n", xidRecord(2, 31), xidRecord(3, 43)} {
		if _, err := writer.WriteString(record); err != nil {
			t.Fatal(n, err)
		}
	}
	next(t, out, 31)
	next(t, out, 43)
	stop()
	if x := receive.From(t, out); x.Number != 0 { // it is closed
		t.Errorf("after the end comes %v", x)
	}
}

func TestALogThatIsNotThereIsAnError(t *testing.T) {
	t.Parallel()
	_, err := kernellog.New(filepath.Join(t.TempDir(), "kmsg"), clock.RealClock{}, zaptest.NewLogger(t)).Xids(t.Context())
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the error is %v", err)
	}
}

// On this kernel, too: a program may not write as the kernel, and the log is read by a poller.
func TestTheKernelMarksWhatProgramsWrite(t *testing.T) {
	t.Parallel()
	log, err := os.OpenFile("/dev/kmsg", os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Skipf("no access to the kernel's log: %v", err)
	}
	defer log.Close()
	if _, err := log.Seek(0, io.SeekEnd); err != nil {
		t.Skipf("the kernel's log is another than Linux has: %v", err)
	}
	if err := log.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatalf("a read that waits cannot be ended: %v", err)
	}
	words := fmt.Sprintf("a test of gpuslice, process %d", os.Getpid())
	if _, err := log.WriteString("<3>" + words + "\n"); err != nil {
		t.Skipf("the kernel's log takes nothing: %v", err)
	}
	buffer := make([]byte, 8<<10)
	for {
		n, err := log.Read(buffer)
		if errors.Is(err, unix.EPIPE) {
			continue
		}
		if err != nil {
			t.Skipf("the kernel has not kept the record: %v", err) // it takes few from programs
		}
		priority, _, text, ok := kernellog.ParseRecord(string(buffer[:n]))
		if !ok || !strings.Contains(text, words) {
			continue
		}
		if priority>>3 == 0 {
			t.Errorf("the record of a program has the kernel's own facility: %s", buffer[:n])
		}
		return
	}
}
