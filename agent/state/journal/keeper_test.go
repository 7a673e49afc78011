package journal_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/state/journal"
)

// store is a disk that refuses writes while refuses is set.
type store struct {
	has     *journal.Record
	unread  error
	refuses error
	writes  int // also those that it refuses
	aside   int
}

func (s *store) Read(context.Context) (*journal.Record, error) { return s.has, s.unread }

func (s *store) Write(_ context.Context, r journal.Record) error {
	s.writes++
	if s.refuses != nil {
		return s.refuses
	}
	s.has, s.unread = &r, nil
	return nil
}

func (s *store) Try(context.Context, journal.Record) error { return s.refuses }

func (s *store) SetAside(context.Context) (string, error) {
	s.aside++
	return "aside", nil
}

var errFull = errors.New("the disk is full")

// keeper is one that has read the store.
func keeper(t *testing.T, s *store) *journal.Keeper {
	t.Helper()
	k := &journal.Keeper{Store: s, Log: zap.NewNop()}
	if err := k.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	return k
}

// Promise 8: only what the disk holds is restored by an agent that starts after this one was killed.
func TestTheDiskCoversWhatTheNextAgentRestores(t *testing.T) {
	now := time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	for name, row := range map[string]struct {
		change func(*journal.Record)
		want   bool
	}{
		"the same":              {func(*journal.Record) {}, true},
		"no journal":            {func(r *journal.Record) { r.Journal = "" }, true},
		"a journal to come":     {func(r *journal.Record) { r.Journal, r.Next = r.Next[0], nil }, true},
		"another journal":       {func(r *journal.Record) { r.Journal = `{"version":3}` }, false},
		"another node":          {func(r *journal.Record) { r.UID = "another" }, false},
		"another boot":          {func(r *journal.Record) { r.Host.Boot = "next" }, false},
		"one more unit":         {func(r *journal.Record) { r.Host.Stopped = append(r.Host.Stopped, "nvsm.service") }, false},
		"one more GPU":          {func(r *journal.Record) { r.Host.Persistent = append(r.Host.Persistent, "GPU-2") }, false},
		"no unit":               {func(r *journal.Record) { r.Host.Stopped = nil }, true},
		"GPUs without a reset":  {func(r *journal.Record) { r.Learnt.NoReset = nil }, false},
		"a fact for the future": {func(r *journal.Record) { r.Learnt.Verified = "def" }, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := &store{}
			k := keeper(t, s)
			if err := k.Write(t.Context(), full(), now); err != nil {
				t.Fatal(err)
			}
			s.refuses = errFull
			next := full()
			row.change(&next)
			k.Keep(t.Context(), next, now)
			if got := k.DiskCoversRestores(); got != row.want {
				t.Errorf("the disk covers it: %t, want %t", got, row.want)
			}
		})
	}
}

func TestARecordThatCouldNotBeWrittenIsWrittenLater(t *testing.T) {
	now := time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	s := &store{}
	k := keeper(t, s)
	first, second := full(), full()
	first.Node, second.Node = "first", "second"
	if err := k.Write(t.Context(), first, now); err != nil {
		t.Fatal(err)
	}
	s.refuses = errFull
	if err := k.Write(t.Context(), second, now); !errors.Is(err, errFull) || k.Now().Node != "first" {
		t.Errorf("a step that waits for the write gets %v, and the record is %q", err, k.Now().Node)
	}
	k.Keep(t.Context(), second, now.Add(journal.Retry-1))
	if s.writes != 2 || k.Now().Node != "second" {
		t.Errorf("within the pause: %d writes, the record is %q", s.writes, k.Now().Node)
	}
	s.refuses = nil
	if err := k.Flush(t.Context(), now); err != nil || s.has.Node != "second" || s.writes != 3 {
		t.Errorf("%d writes, the disk has %q: %v", s.writes, s.has.Node, err)
	}
	k.Keep(t.Context(), second, now.Add(time.Hour))
	if err := k.Flush(t.Context(), now.Add(time.Hour)); err != nil || s.writes != 3 {
		t.Errorf("a record that the disk has is written again: %d writes, %v", s.writes, err)
	}
}

// A newer agent's record is set aside only by the first write, and only if it has nothing to restore.
func TestARecordOfANewerAgentIsSetAsideByTheFirstWrite(t *testing.T) {
	pending := &journal.Keeper{Store: &store{unread: &journal.NewerError{Version: 9, ToRestore: []string{"start of a.service"}}}, Log: zap.NewNop()}
	var newer *journal.NewerError
	if err := pending.Load(t.Context()); !errors.As(err, &newer) {
		t.Errorf("one with something to restore is read: %v", err)
	}
	s := &store{unread: &journal.NewerError{Version: 9}}
	k := keeper(t, s)
	if s.aside != 0 {
		t.Error("it is set aside before a write")
	}
	for range 2 {
		if err := k.Write(t.Context(), full(), time.Time{}); err != nil {
			t.Fatal(err)
		}
	}
	if s.aside != 1 || s.writes != 2 {
		t.Errorf("it is set aside %d times by %d writes", s.aside, s.writes)
	}
	want := full()
	want.ToRestore = s.has.ToRestore // from the journal's text
	if diff := cmp.Diff(want, *s.has); diff != "" {
		t.Errorf("written (-want +got):\n%s", diff)
	}
}
