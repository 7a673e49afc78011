package aside_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/nvml/aside"
)

func TestACallGivesWhatItReturns(t *testing.T) {
	var lane aside.Lane
	wrong := errors.New("wrong")
	got, err := aside.Do(t.Context(), &lane, "counting", func(context.Context, aside.At) (int, error) { return 3, wrong })
	if got != 3 || !errors.Is(err, wrong) || aside.Hangs(err) {
		t.Errorf("got %d, %v", got, err)
	}
}

// Promise 14: Never hang.
func TestACallThatHangsIsAbandonedAndNoneFollowsItUntilItEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lane, other aside.Lane
		answer := make(chan struct{})
		calls := 0
		stuck := func(_ context.Context, at aside.At) error {
			calls++
			at("/mnt/gone/file")
			<-answer
			return nil
		}
		short := func() context.Context {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			t.Cleanup(cancel)
			return ctx
		}
		began := time.Now()
		err := aside.Run(short(), &lane, "reading one", stuck)
		if !aside.Hangs(err) || !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != time.Second {
			t.Errorf("after %s, got %v", time.Since(began), err)
		}
		if want := "reading one hangs at /mnt/gone/file: context deadline exceeded"; err == nil || err.Error() != want {
			t.Errorf("got %q, want %q", err, want)
		}
		began = time.Now()
		for range 3 { // they fail at once
			err = aside.Run(short(), &lane, "reading two", stuck)
			if want := "reading two is postponed: an earlier try, reading one, hangs at /mnt/gone/file"; err == nil || err.Error() != want {
				t.Errorf("got %q, want %q", err, want)
			}
		}
		if took := time.Since(began); took != 0 || calls != 1 {
			t.Errorf("%d calls run, after %s", calls, took)
		}
		if err := aside.Run(short(), &other, "reading elsewhere", func(context.Context, aside.At) error { return nil }); err != nil {
			t.Errorf("another lane: %v", err)
		}
		close(answer)
		synctest.Wait()
		if err := aside.Run(short(), &lane, "reading three", func(context.Context, aside.At) error { return nil }); err != nil {
			t.Errorf("after it has ended: %v", err)
		}
	})
}

func TestACallWaitsForItsTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lane aside.Lane
		slow := func(context.Context, aside.At) error { <-time.After(time.Second); return nil }
		ended := make(chan error, 2)
		began := time.Now()
		for range 2 {
			go func() { ended <- aside.Run(t.Context(), &lane, "sleeping", slow) }()
		}
		for range 2 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
		if took := time.Since(began); took != 2*time.Second {
			t.Errorf("two took %s", took)
		}
		// Who waits for one that only runs gets no error that says it hangs, and gives up by its own deadline.
		go func() { ended <- aside.Run(t.Context(), &lane, "sleeping", slow) }()
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if err := aside.Run(ctx, &lane, "hurrying", slow); !errors.Is(err, context.DeadlineExceeded) || strings.Contains(err.Error(), "earlier") {
			t.Errorf("got %v", err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestOnlyRegularFilesAreReadAndNoLongOnes(t *testing.T) {
	dir := t.TempDir()
	file, pipe := filepath.Join(dir, "file"), filepath.Join(dir, "pipe")
	if err := errors.Join(os.WriteFile(file, []byte("12345"), 0o600), unix.Mkfifo(pipe, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path  string
		limit int64
		want  error
	}{
		{file, 5, nil},
		{file, 4, aside.ErrTooLong},
		{pipe, 5, aside.ErrNoFile},
		{"/dev/zero", 5, aside.ErrNoFile},
		{dir, 5, unix.EISDIR},
		{file + "-none", 5, fs.ErrNotExist},
	} {
		var lane aside.Lane
		text, err := aside.ReadFile(t.Context(), &lane, c.path, c.limit)
		if !errors.Is(err, c.want) || c.want == nil && string(text) != "12345" {
			t.Errorf("%s, at most %d bytes: %q, %v; want %v", c.path, c.limit, text, err, c.want)
		}
	}
}
