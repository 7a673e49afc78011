package deviceplugin_test

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/nvml/aside"
	"github.com/gpuslice/gpuslice/test/fullfs"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

const shown = "/etc/plugin/config.yaml"

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func says(t *testing.T, f *deviceplugin.File, want string) deviceplugin.Content {
	t.Helper()
	got, err := f.Read(t.Context())
	if err != nil || got.Text != want || !got.Exists {
		t.Fatalf("it says %q, exists %t, error %v; want %q", got.Text, got.Exists, err, want)
	}
	return got
}

func TestAFileThatIsNotThereIsNoError(t *testing.T) {
	got, err := deviceplugin.NewFile(filepath.Join(t.TempDir(), "no", "config.yaml"), shown).Read(t.Context())
	if err != nil || got.Exists || got.Text != "" || got.Notified == nil {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestWhatIsWrittenIsReadWithItsTimeAndTheNotifiedPods(t *testing.T) {
	f := deviceplugin.NewFile(filepath.Join(t.TempDir(), "below", "config.yaml"), shown)
	at := time.Date(2026, 3, 1, 2, 0, 0, 0, time.UTC)
	must(t, f.Write(t.Context(), "one", at))
	must(t, f.NoteNotified(t.Context(), map[types.UID]string{"pod": "hash"}))
	if got := says(t, f, "one"); !got.Written.Equal(at) || !maps.Equal(got.Notified, map[types.UID]string{"pod": "hash"}) {
		t.Errorf("written %s, notified %v", got.Written, got.Notified)
	}
}

// The agent must find out before it evicts pods that a folder is full, and name the folder.
func TestAFullFolderIsNamed(t *testing.T) {
	dir := fullfs.Folder(t)
	f := deviceplugin.NewFile(filepath.Join(dir, "config.yaml"), shown)
	must(t, f.Write(t.Context(), "one", time.Now()))
	fullfs.Fill(t, dir)
	for what, call := range map[string]func() error{
		"making room": func() error { return f.Prepare(t.Context(), "two") },
		"trying":      func() error { return f.Try(t.Context(), "two") },
		"writing":     func() error { return f.Write(t.Context(), "two", time.Now()) },
		"noting":      func() error { return f.NoteNotified(t.Context(), map[types.UID]string{"pod": "hash"}) },
	} {
		full, is := errors.AsType[*deviceplugin.NoRoomError](call())
		if !is || full.Folder != "/etc/plugin" || !strings.Contains(full.Error(), "/etc/plugin") || !errors.Is(full, unix.ENOSPC) {
			t.Errorf("%s: %v", what, full)
		}
	}
	says(t, f, "one")
}

// A preview asks whether there is room, and changes nothing.
func TestATryLeavesTheFolderAsItWas(t *testing.T) {
	dir := t.TempDir()
	f := deviceplugin.NewFile(filepath.Join(dir, "there", "config.yaml"), shown)
	must(t, f.Try(t.Context(), "one"))
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	must(t, f.Write(t.Context(), "one", time.Now()))
	must(t, f.Try(t.Context(), "two"))
	says(t, f, "one")
	if left, err := os.ReadDir(filepath.Join(dir, "there")); err != nil || len(left) != 1 {
		t.Errorf("left %v, %v", left, err)
	}
}

// If a program fills the folder in the middle of a change, that neither ends the change nor keeps the node.
func TestWhatWasPreparedIsWrittenThereAndBackInAFullFolder(t *testing.T) {
	dir := fullfs.Folder(t)
	f := deviceplugin.NewFile(filepath.Join(dir, "config.yaml"), shown)
	must(t, f.Write(t.Context(), "one", time.Now()))
	must(t, f.Prepare(t.Context(), "two"))
	must(t, f.Prepare(t.Context(), "two")) // a restarted agent prepares again
	fullfs.Fill(t, dir)
	must(t, f.Prepare(t.Context(), "two"))
	at := time.Date(2026, 3, 1, 2, 0, 0, 0, time.UTC)
	must(t, f.Write(t.Context(), "two", at))
	if got := says(t, f, "two"); !got.Written.Equal(at) {
		t.Errorf("written %s, want %s", got.Written, at)
	}
	must(t, f.Write(t.Context(), "one", at.Add(time.Minute)))
	if got := says(t, f, "one"); !got.Written.Equal(at.Add(time.Minute)) {
		t.Errorf("written %s", got.Written)
	}
	must(t, f.Tidy(t.Context()))
	left, err := filepath.Glob(filepath.Join(dir, "config.yaml.*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// Another program may have written the file since.
func TestWhatIsKeptIsTakenForWhatItSaysAlone(t *testing.T) {
	f := deviceplugin.NewFile(filepath.Join(t.TempDir(), "config.yaml"), shown)
	must(t, f.Write(t.Context(), "one", time.Now()))
	must(t, f.Prepare(t.Context(), "two"))
	must(t, f.Write(t.Context(), "three", time.Now()))
	says(t, f, "three")
	must(t, f.Write(t.Context(), "one", time.Now()))
	says(t, f, "one")
}

func TestAPipeInPlaceOfTheFileIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	must(t, unix.Mkfifo(path, 0o600))
	if _, err := deviceplugin.NewFile(path, shown).Read(t.Context()); !errors.Is(err, aside.ErrNoFile) {
		t.Error(err)
	}
}

func TestAFolderThatDoesNotAnswerEndsNoCallButTheirOwn(t *testing.T) {
	mounted := stalledfs.Mount(t, "config.yaml")
	f := deviceplugin.NewFile(filepath.Join(mounted.Dir, "config.yaml"), shown)
	says(t, f, "")
	asked := mounted.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if _, err := f.Read(ctx); !aside.Hangs(err) || !strings.Contains(err.Error(), shown) {
		t.Errorf("reading: %v", err)
	}
	for what, call := range map[string]func() error{
		"making room": func() error { return f.Prepare(t.Context(), "two") },
		"writing":     func() error { return f.Write(t.Context(), "two", time.Now()) },
		"noting":      func() error { return f.NoteNotified(t.Context(), nil) },
		"tidying":     func() error { return f.Tidy(t.Context()) },
	} {
		if err := call(); !aside.Hangs(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	mounted.Answer()
	for _, err := f.Read(t.Context()); err != nil; _, err = f.Read(t.Context()) { // until the call that hung has ended
		if !aside.Hangs(err) {
			t.Fatal(err)
		}
		runtime.Gosched()
	}
}

func TestTheNotesBesideTheFileAreRemovedAndTheFileStays(t *testing.T) {
	dir := t.TempDir()
	f := deviceplugin.NewFile(filepath.Join(dir, "config.yaml"), shown)
	ctx := t.Context()
	if removed, err := f.Notes().Remove(ctx); removed || err != nil {
		t.Errorf("of an empty folder: removed is %t, %v", removed, err)
	}
	if err := errors.Join(f.Write(ctx, "a: 1\n", time.Now()), f.Prepare(ctx, "a: 2\n"), f.NoteNotified(ctx, map[types.UID]string{"uid": "hash"})); err != nil {
		t.Fatal(err)
	}
	if removed, err := f.Notes().Remove(ctx); !removed || err != nil {
		t.Errorf("removed is %t, %v", removed, err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || left[0].Name() != "config.yaml" {
		t.Errorf("left are %v: %v", left, err)
	}
}
