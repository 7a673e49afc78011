package hostfile_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/agent/state/hostfile"
)

const (
	name    = "file.json"
	longest = 16
)

// in returns a file in a folder that is not there yet.
func in(t *testing.T) *hostfile.File {
	t.Helper()
	return hostfile.In(filepath.Join(t.TempDir(), "gpuslice", "agent"), name, longest)
}

// write writes the file, which must succeed.
func write(t *testing.T, f *hostfile.File, text string) {
	t.Helper()
	if err := f.Write(t.Context(), []byte(text)); err != nil {
		t.Fatal(err)
	}
}

// holds fails the test unless the folder has these files, each with its text.
func holds(t *testing.T, dir string, want map[string]string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, e := range entries {
		got[e.Name()] = true
		if text, err := os.ReadFile(filepath.Join(dir, e.Name())); err != nil || string(text) != want[e.Name()] {
			t.Errorf("%s is %q, want %q: %v", e.Name(), text, want[e.Name()], err)
		}
	}
	for file := range want {
		if !got[file] {
			t.Errorf("%s is not there", file)
		}
	}
}

// Promises 7 and 16: what one process writes the next one reads, whole, and no file takes more memory than its bound.
func TestAFileIsReadAsItWasWritten(t *testing.T) {
	t.Parallel()
	f := in(t)
	if data, err := f.Read(t.Context()); data != nil || err != nil {
		t.Errorf("before the first write it is %q: %v", data, err)
	}
	for _, text := range []string{"{}", "", strings.Repeat("x", longest), "shorter"} { // without a former file, and over one
		write(t, f, text)
		data, err := hostfile.In(filepath.Dir(f.Path()), name, longest).Read(t.Context())
		if err != nil || data == nil || string(data) != text {
			t.Errorf("%q is read as %q: %v", text, data, err)
		}
		holds(t, filepath.Dir(f.Path()), map[string]string{name: text})
	}
	for path, mode := range map[string]os.FileMode{f.Path(): 0o600, filepath.Dir(f.Path()): 0o700 | os.ModeDir} {
		if info, err := os.Stat(path); err != nil || info.Mode() != mode {
			t.Errorf("%s has mode %v, want %v: %v", path, info.Mode(), mode, err)
		}
	}
	write(t, f, strings.Repeat("x", 9*longest))
	if data, err := f.Read(t.Context()); err != nil || len(data) != longest+1 { // one more than fits, by which the reader knows
		t.Errorf("of a file that is too long %d bytes are read: %v", len(data), err)
	}
}

// Promise 15: only root can have written what is read. And kubelet makes the folder of a hostPath with 0755, which a write closes.
func TestAFileThatOthersCouldHaveWrittenIsNotRead(t *testing.T) {
	t.Parallel()
	for what, spoil := range map[string]func(t *testing.T, path string) error{
		"symbolic link": func(t *testing.T, path string) error {
			t.Helper()
			elsewhere := filepath.Join(t.TempDir(), name)
			return errors.Join(os.Rename(path, elsewhere), os.Symlink(elsewhere, path))
		},
		"mode 0620":     func(_ *testing.T, path string) error { return os.Chmod(path, 0o620) },
		"mode 0602":     func(_ *testing.T, path string) error { return os.Chmod(path, 0o602) },
		"has mode 0770": func(_ *testing.T, path string) error { return os.Chmod(filepath.Dir(path), 0o770) },
		"2 names":       func(_ *testing.T, path string) error { return os.Link(path, path+".other") },
		"another type": func(_ *testing.T, path string) error {
			return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600))
		},
		"user 65534": func(_ *testing.T, path string) error { return os.Chown(path, 65534, 0) },
		"not a directory": func(_ *testing.T, path string) error {
			dir := filepath.Dir(path)
			return errors.Join(os.Rename(dir, dir+".other"), os.Symlink(dir+".other", dir))
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			if what == "user 65534" && os.Geteuid() != 0 {
				t.Skip("only root can give a file away")
			}
			f := in(t)
			write(t, f, "{}")
			if err := spoil(t, f.Path()); err != nil {
				t.Fatal(err)
			}
			if data, err := f.Read(t.Context()); data != nil || !errors.Is(err, hostfile.ErrUnsafe) || !strings.Contains(err.Error(), what) {
				t.Errorf("read %q: %v", data, err)
			}
		})
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, hostfile.In(dir, name, longest), "{}")
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the folder has mode %v: %v", info.Mode(), err)
	}
}

// A process of the agent that was killed in a write leaves a file, which the next one removes. A folder is of others.
func TestWhatAKilledProcessHasLeftOfAWriteIsRemoved(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	kept := filepath.Join(dir, "."+name+"-kept")
	left, others := filepath.Join(dir, "."+name+"12345"), filepath.Join(dir, ".other.json12345")
	if err := errors.Join(
		os.WriteFile(left, []byte("half a"), 0o600), os.WriteFile(others, []byte("theirs"), 0o600),
		os.Mkdir(kept, 0o700), os.WriteFile(filepath.Join(kept, "something"), nil, 0o600),
	); err != nil {
		t.Fatal(err)
	}
	write(t, hostfile.In(dir, name, longest), "{}")
	holds(t, kept, map[string]string{"something": ""})
	if err := os.RemoveAll(kept); err != nil {
		t.Fatal(err)
	}
	holds(t, dir, map[string]string{name: "{}", filepath.Base(others): "theirs"})
}

// What takes a file away says whether it was there, and where it is now; the folder stays.
func TestAFileIsSetAsideAndRemoved(t *testing.T) {
	t.Parallel()
	f := in(t)
	dir := filepath.Dir(f.Path())
	if _, err := f.SetAside(t.Context(), "aside.json"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("setting aside what is not there: %v", err)
	}
	if removed, err := f.Remove(t.Context()); removed || err != nil {
		t.Errorf("removing what is not there: %v, %v", removed, err)
	}
	for _, text := range []string{"first", "second"} { // over one that was set aside before, too
		write(t, f, text)
		if path, err := f.SetAside(t.Context(), "aside.json"); err != nil || path != filepath.Join(dir, "aside.json") {
			t.Errorf("set aside as %s: %v", path, err)
		}
		holds(t, dir, map[string]string{"aside.json": text})
	}
	write(t, f, "third")
	if removed, err := f.Remove(t.Context()); !removed || err != nil {
		t.Errorf("removing: %v, %v", removed, err)
	}
	holds(t, dir, map[string]string{"aside.json": "second"})
}

// A preview tries a write: it changes nothing, and says what the write would say.
func TestATryLeavesNothing(t *testing.T) {
	t.Parallel()
	f := in(t)
	dir := filepath.Dir(f.Path())
	if err := os.Mkdir(filepath.Dir(dir), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := f.Try(t.Context(), []byte("new")); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is there: %v", err)
	}
	write(t, f, "old")
	if err := f.Try(t.Context(), []byte("new")); err != nil {
		t.Error(err)
	}
	holds(t, dir, map[string]string{name: "old"})
	if err := os.Chmod(dir, 0o702); err != nil {
		t.Fatal(err)
	}
	if err := f.Try(t.Context(), []byte("new")); !errors.Is(err, hostfile.ErrUnsafe) {
		t.Errorf("where others can write: %v", err)
	}
}

// Promise 14: a disk that hangs blocks no caller, and a write that it does later comes before those that were not begun.
func TestADiskThatHangsIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := in(t)
		mended := make(chan struct{})
		f.Work = func(do func()) { <-mended; do() }
		began := time.Now()
		if err := f.Write(t.Context(), []byte("first")); !errors.Is(err, hostfile.ErrSilent) {
			t.Errorf("the first write: %v", err)
		}
		if took := time.Since(began); took == 0 || took > 30*time.Second {
			t.Errorf("it took %s", took)
		}
		began = time.Now()
		for what, call := range map[string]func() error{
			"write":   func() error { return f.Write(t.Context(), []byte("second")) },
			"try":     func() error { return f.Try(t.Context(), []byte("second")) },
			"read":    func() error { _, err := f.Read(t.Context()); return err },
			"remove":  func() error { _, err := f.Remove(t.Context()); return err },
			"set off": func() error { _, err := f.SetAside(t.Context(), "aside.json"); return err },
		} {
			if err := call(); !errors.Is(err, hostfile.ErrSilent) {
				t.Errorf("%s beside a call that hangs: %v", what, err)
			}
		}
		if took := time.Since(began); took > 0 {
			t.Errorf("the calls beside it took %s", took)
		}
		close(mended)
		synctest.Wait()
		holds(t, filepath.Dir(f.Path()), map[string]string{name: "first"})
		write(t, f, "second")
	})
}
