package journal_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/fullfs"
	"github.com/gpuslice/gpuslice/test/receive"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// full is a record with every field.
func full() journal.Record {
	return journal.Record{
		Version: journal.Version, ToRestore: []string{"start of nvidia-dcgm.service"}, Node: "gpu-1", UID: "uid", Operation: "op",
		Journal: `{"version":1}`, Next: []string{`{"version":2}`}, Ends: true,
		Host: journal.Host{Boot: "boot", Stopped: []string{"nvidia-dcgm.service"}, Persistent: []string{"GPU-1"}},
		Learnt: journal.Learnt{
			NoReset: &journal.NoReset{Boot: "boot", GPUs: []nvml.UUID{"GPU-1"}},
			Asked:   &api.AskedFor{Fingerprint: "abc", Since: time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)},
			Took:    []journal.Took{{Whole: 9, Rest: 4}}, Verified: "abc", Cut: "boot",
			Failed:     &api.Failure{Fingerprint: "def", Reason: "HardwareFailure", Message: "it broke"},
			Published:  nodekeys.Keys{Labels: map[string]string{"a": "b"}, Taints: []corev1.Taint{{Key: "gpu", Value: "mig", Effect: "NoSchedule"}}},
			Reported:   journal.Reported{Desired: "all-balanced", Phase: api.PhaseIdle, Reason: "Converged", Since: time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)},
			FullMemory: []string{"GPU-1"}, Boot: "boot", Found: map[string]string{"nvidia.com/mig.config": "all-balanced"},
			Granted: &journal.Granted{
				Since: time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC), Until: map[types.UID]time.Time{"pod": time.Date(2000, 1, 1, 8, 0, 0, 0, time.UTC)},
			},
			Foreign: &journal.Foreign{Repeats: outcome.Repeats{Times: 3, Last: time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)}, Open: true},
		},
	}
}

func TestARecordIsReadAsItWasWritten(t *testing.T) {
	file := journal.RecordIn(filepath.Join(t.TempDir(), "gpuslice", "agent"))
	if r, err := file.Read(t.Context()); r != nil || err != nil {
		t.Fatalf("before the first write: %v, %v", r, err)
	}
	want := full()
	for range 2 { // without a former record, and over one
		if err := file.Write(t.Context(), want); err != nil {
			t.Fatal(err)
		}
		got, err := journal.RecordIn(filepath.Dir(file.Path())).Read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, *got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	for path, mode := range map[string]os.FileMode{file.Path(): 0o600, filepath.Dir(file.Path()): 0o700 | os.ModeDir} {
		if info, err := os.Stat(path); err != nil || info.Mode() != mode {
			t.Errorf("%s has mode %v, want %v (%v)", path, info.Mode(), mode, err)
		}
	}
}

func TestARecordIsParsedStrictly(t *testing.T) {
	for what, text := range map[string]string{
		"nothing":          ``,
		"no version":       `{}`,
		"half a record":    `{"version":1,"node":"gp`,
		"two records":      `{"version":1}{"version":1}`,
		"an unknown field": `{"version":1,"stop":["sshd.service"]}`,
		"another case":     `{"version":1,"Node":"gpu-1"}`,
		"one twice":        `{"version":1,"node":"a","node":"b"}`,
		"an escape":        `{"version":1,"node":"\u001b[2J"}`,
		"many units":       `{"version":1,"host":{"stopped":["a"` + strings.Repeat(`,"a"`, 300) + `]}}`,
		"a long name":      `{"version":1,"node":"` + strings.Repeat("a", 1000) + `"}`,
		"a long journal":   `{"version":1,"journal":"` + strings.Repeat("a", 300<<10) + `"}`,
		"many journals":    `{"version":1,"next":["a","b","c","d","e"]}`,
		"a negative time":  `{"version":1,"learnt":{"took":[{"whole":-1,"rest":0}]}}`,
		"a long grant":     `{"version":1,"learnt":{"granted":{"since":"2000-01-01T00:00:00Z","until":{"pod":"2002-01-01T00:00:00Z"}}}}`,
		"too long":         `{"version":1,"node":"` + strings.Repeat(" ", journal.MaxSize) + `"}`,
	} {
		if _, err := journal.ParseRecord([]byte(text)); !errors.Is(err, journal.ErrCorrupt) {
			t.Errorf("%s: error is %v", what, err)
		}
	}
}

func TestANewerRecordSaysWhatItHasToRestore(t *testing.T) {
	var newer *journal.NewerError
	_, err := journal.ParseRecord([]byte(`{"version":7,"toRestore":["start of a.service","a\u001b[2J"],"shape":{"is":"another"}}`))
	if !errors.As(err, &newer) {
		t.Fatal(err)
	}
	if diff := cmp.Diff(&journal.NewerError{Version: 7, ToRestore: []string{"start of a.service", `a\x1b[2J`}}, newer); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	file := journal.RecordIn(t.TempDir())
	if err := os.WriteFile(file.Path(), []byte(`{"version":2,"learns":"more"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := file.Read(t.Context()); !errors.As(err, &newer) || len(newer.ToRestore) > 0 {
		t.Fatal(err)
	}
	aside, err := file.SetAside(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(aside); err != nil {
		t.Error(err)
	}
	if r, err := file.Read(t.Context()); r != nil || err != nil {
		t.Errorf("then %v, %v", r, err)
	}
}

func TestWhatCouldNotBeReadAgainIsNotWritten(t *testing.T) {
	file := journal.RecordIn(t.TempDir())
	r := full()
	r.Host.Stopped = []string{"a\nb"}
	if err := file.Write(t.Context(), r); !errors.Is(err, journal.ErrCorrupt) {
		t.Error(err)
	}
	if _, err := os.Stat(file.Path()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it was written: %v", err)
	}
}

// Promise 14: a disk that stalls does not hold the agent up, and a write that it does later comes before those that were not begun.
func TestADiskThatHangsIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := journal.RecordIn(t.TempDir())
		mended := make(chan struct{})
		file.Hang(mended)
		began := time.Now()
		first, second := full(), full()
		first.Node, second.Node = "first", "second"
		if err := file.Write(t.Context(), first); !errors.Is(err, journal.ErrSilent) {
			t.Errorf("the first write: %v", err)
		}
		for range 100 {
			if err := file.Write(t.Context(), second); !errors.Is(err, journal.ErrSilent) {
				t.Errorf("the second write: %v", err)
			}
		}
		if _, err := file.Read(t.Context()); !errors.Is(err, journal.ErrSilent) {
			t.Errorf("reading: %v", err)
		}
		if took := time.Since(began); took > time.Minute {
			t.Errorf("it took %s", took)
		}
		close(mended)
		synctest.Wait()
		if r, err := file.Read(t.Context()); err != nil || r.Node != "first" {
			t.Errorf("the disk has %v, %v", r, err)
		}
		if err := file.Write(t.Context(), second); err != nil {
			t.Error(err)
		}
	})
}

func TestADiskThatRefusesKeepsTheFormerRecord(t *testing.T) {
	dir := fullfs.Folder(t)
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	file := journal.RecordIn(dir)
	if err := file.Write(t.Context(), full()); err != nil {
		t.Fatal(err)
	}
	empty := fullfs.Fill(t, dir)
	next := full()
	next.Node = "gpu-2"
	if err := file.Write(t.Context(), next); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("writing: %v", err)
	}
	if err := file.Try(t.Context(), next); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("trying: %v", err)
	}
	if r, err := file.Read(t.Context()); err != nil || r.Node != "gpu-1" {
		t.Errorf("the disk has %v, %v", r, err)
	}
	empty()
	if err := file.Write(t.Context(), next); err != nil {
		t.Errorf("writing when there is room: %v", err)
	}
	if r, err := file.Read(t.Context()); err != nil || r.Node != "gpu-2" {
		t.Errorf("then the disk has %v, %v", r, err)
	}
}

// A preview asks whether the record could be written, and changes nothing.
func TestATryLeavesTheRecordAsItWas(t *testing.T) {
	parent := t.TempDir()
	file := journal.RecordIn(filepath.Join(parent, "state"))
	next := full()
	next.Node = "gpu-2"
	if err := file.Try(t.Context(), next); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(parent); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if err := errors.Join(file.Write(t.Context(), full()), file.Try(t.Context(), next)); err != nil {
		t.Error(err)
	}
	if r, err := file.Read(t.Context()); err != nil || r.Node != "gpu-1" {
		t.Errorf("the disk has %v, %v", r, err)
	}
	if left, err := os.ReadDir(filepath.Join(parent, "state")); err != nil || len(left) != 1 {
		t.Errorf("left %v, %v", left, err)
	}
	if err := os.Chmod(filepath.Join(parent, "state"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := file.Try(t.Context(), next); !errors.Is(err, journal.ErrUnsafe) {
		t.Errorf("a folder that all may write to: %v", err)
	}
}

func FuzzRead(f *testing.F) {
	text, err := json.Marshal(full())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"version":2,"toRestore":["x"]}`))
	f.Add([]byte(`{"version":1,"next":[null],"host":null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := journal.ParseRecord(data)
		var newer *journal.NewerError
		if err != nil {
			if !errors.Is(err, journal.ErrCorrupt) && !errors.As(err, &newer) {
				t.Fatalf("of no known kind: %v", err)
			}
			return
		}
		// A record that was read can be written, and is read as the same.
		again := rewritten(t, r)
		if diff := cmp.Diff(again, rewritten(t, again)); diff != "" {
			t.Errorf("(-second +third):\n%s", diff)
		}
	})
}

// rewritten writes the record, reads it again, and returns that.
func rewritten(t *testing.T, r journal.Record) journal.Record {
	t.Helper()
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	again, err := journal.ParseRecord(text)
	if err != nil {
		t.Fatal(err)
	}
	return again
}

// written returns the text of a full record on the disk.
func written(t *testing.T) []byte {
	t.Helper()
	file := journal.RecordIn(t.TempDir())
	if err := file.Write(t.Context(), full()); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file.Path())
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// The disk of a host that loses its power may have any part of a file, or zeros where it had not written yet.
func TestARecordThatEndsAtAnyByteIsNoRecord(t *testing.T) {
	whole := written(t)
	for end := range whole {
		if r, err := journal.ParseRecord(whole[:end]); !errors.Is(err, journal.ErrCorrupt) {
			t.Errorf("of the first %d bytes of %d: %+v, %v", end, len(whole), r, err)
		}
		zeros := append(bytes.Clone(whole[:end]), make([]byte, len(whole)-end)...)
		if r, err := journal.ParseRecord(zeros); !errors.Is(err, journal.ErrCorrupt) {
			t.Errorf("zeros from byte %d on: %+v, %v", end, r, err)
		}
	}
	if r, err := journal.ParseRecord(whole); err != nil || r.Node != full().Node {
		t.Errorf("the whole record: %+v, %v", r, err)
	}
	file := journal.RecordIn(t.TempDir())
	for _, text := range [][]byte{{}, whole[:len(whole)/2]} {
		if err := os.WriteFile(file.Path(), text, 0o600); err != nil {
			t.Fatal(err)
		}
		if r, err := file.Read(t.Context()); !errors.Is(err, journal.ErrCorrupt) || r != nil {
			t.Errorf("of %d bytes on the disk: %+v, %v", len(text), r, err)
		}
	}
}

// The agent cannot notice that a flipped bit has changed a letter of a name. Such a record holds the bounds all the same, and could be
// written again.
func TestARecordOfWhichABitIsAnotherHoldsTheBounds(t *testing.T) {
	whole := written(t)
	for at := range whole {
		for bit := range 8 {
			flipped := bytes.Clone(whole)
			flipped[at] ^= 1 << bit
			r, err := journal.ParseRecord(flipped)
			if err == nil {
				again, failed := json.Marshal(r)
				if failed == nil {
					_, failed = journal.ParseRecord(again)
				}
				if failed != nil {
					t.Errorf("bit %d of byte %d: what was read could not be read again: %v", bit, at, failed)
				}
			} else if !errors.Is(err, journal.ErrCorrupt) && !errors.As(err, new(*journal.NewerError)) {
				t.Errorf("bit %d of byte %d: %v", bit, at, err)
			}
		}
	}
}

// Promise 14. The same on a real file system whose server does not answer: the kernel keeps the thread that asks.
func TestARecordBehindAMountThatDoesNotAnswerIsSilent(t *testing.T) {
	mounted := stalledfs.Mount(t, "record.json")
	file := journal.RecordIn(mounted.Dir)
	asked := mounted.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := file.Read(ctx)
		ended <- err
	}()
	<-asked
	cancel()
	if err := receive.From(t, ended); !errors.Is(err, journal.ErrSilent) || !strings.Contains(err.Error(), file.Path()) {
		t.Errorf("reading: %v", err)
	}
	// These calls return only because the call before is still waiting.
	if err := file.Write(t.Context(), full()); !errors.Is(err, journal.ErrSilent) || !strings.Contains(err.Error(), file.Path()) {
		t.Errorf("writing: %v", err)
	}
	if _, err := file.SetAside(t.Context()); !errors.Is(err, journal.ErrSilent) {
		t.Errorf("setting it aside: %v", err)
	}
	mounted.Answer()
	for _, err := file.Read(t.Context()); errors.Is(err, journal.ErrSilent); _, err = file.Read(t.Context()) { // until the call that hung has ended
		<-time.After(time.Millisecond)
	}
}
