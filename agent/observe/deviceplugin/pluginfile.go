package deviceplugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Suffixes of the files that the agent keeps next to the config file.
const (
	notifiedSuffix = ".notified" // the pods that got a SIGHUP for it
	nextSuffix     = ".next"     // its next text, which holds the room for it
	formerSuffix   = ".former"   // its former text, for an undo
)

// longest is as much as a ConfigMap can hold, and more than any config of a plugin.
const longest = 1 << 20

// File is the config file. Each of its calls ends with its context, even if the folder does not answer: the error is then an
// *aside.AbandonedError.
type File struct {
	path string // its path in this process
	name string // its path on the host, for errors
	lane aside.Lane
}

// NewFile returns the file at the path. Errors call it by the name.
func NewFile(path, name string) *File { return &File{path: filepath.Clean(path), name: name} }

// Content is the file at one observation.
type Content struct {
	Text     string
	Exists   bool
	Written  time.Time            // when it was last written
	Notified map[types.UID]string // pods that got a SIGHUP for it, with a hash of the text then; it can be lost
}

// NoRoomError says that the agent cannot write to the folder until an administrator makes room.
type NoRoomError struct {
	Folder string // as the host sees it
	Err    error
}

// Error names the folder.
func (e *NoRoomError) Error() string {
	return fmt.Sprintf("folder %s of this host is full: %v", e.Folder, e.Err)
}

// Unwrap gives the error of the file system.
func (e *NoRoomError) Unwrap() error { return e.Err }

// Read reads the file, and the note of the pods that got a SIGHUP for it. A missing file is not an error.
func (f *File) Read(ctx context.Context) (Content, error) {
	return aside.Do(ctx, &f.lane, "reading "+f.name, func(_ context.Context, at aside.At) (Content, error) {
		at(f.name)
		out := Content{Notified: f.notifiedPods()}
		text, err := aside.Bounded(f.path, longest)
		if errors.Is(err, fs.ErrNotExist) {
			return out, nil
		}
		if err != nil {
			return out, fmt.Errorf("reading %s: %w", f.name, err)
		}
		out.Text, out.Exists = string(text), true
		if info, err := os.Stat(f.path); err == nil {
			out.Written = info.ModTime()
		}
		return out, nil
	})
}

func (f *File) notifiedPods() map[types.UID]string {
	notified := map[types.UID]string{}
	text, err := aside.Bounded(f.path+notifiedSuffix, longest)
	if err != nil || json.Unmarshal(text, &notified) != nil || notified == nil {
		return map[types.UID]string{}
	}
	return notified
}

// NoteNotified notes which pods got a SIGHUP for the file.
func (f *File) NoteNotified(ctx context.Context, notified map[types.UID]string) error {
	text, err := json.Marshal(notified)
	if err != nil {
		return fmt.Errorf("encoding which pods were notified to read %s: %w", f.name, err)
	}
	return f.run(ctx, "noting which pods were notified to read ", func() error { return renameio.WriteFile(f.path+notifiedSuffix, text, 0o644) })
}

// Prepare makes sure that Write can later write the text, and then the present text again, however full the folder is: it keeps both next to the
// file. The error may be a *NoRoomError.
func (f *File) Prepare(ctx context.Context, text string) error {
	return f.run(ctx, "making room for ", func() error {
		if err := f.makeFolder(); err != nil {
			return err
		}
		if !f.keptTextIs(nextSuffix, text) {
			if err := renameio.WriteFile(f.path+nextSuffix, []byte(text), 0o644); err != nil {
				return err
			}
		}
		if err := remove(f.path + formerSuffix); err != nil {
			return err
		}
		// A program that replaces the file leaves its former text under the other name.
		if err := os.Link(f.path, f.path+formerSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
}

// Try returns why Prepare could not make room for the text, and leaves nothing there.
func (f *File) Try(ctx context.Context, text string) error {
	return f.run(ctx, "making room for ", func() error {
		dir := filepath.Dir(f.path)
		if _, err := os.Lstat(dir); f.keptTextIs(nextSuffix, text) || errors.Is(err, fs.ErrNotExist) { // Prepare makes the folder
			return nil
		}
		file, err := renameio.NewPendingFile(f.path+nextSuffix, renameio.WithTempDir(dir))
		if err != nil {
			return err
		}
		_, err = file.Write([]byte(text))
		return errors.Join(err, file.Cleanup())
	})
}

// Write replaces the file's text atomically, and sets the time of its last write to at. The error may be a *NoRoomError.
func (f *File) Write(ctx context.Context, text string, at time.Time) error {
	return f.run(ctx, "writing ", func() error {
		if err := f.makeFolder(); err != nil {
			return err
		}
		for _, kept := range []string{nextSuffix, formerSuffix} {
			if !f.keptTextIs(kept, text) {
				continue
			}
			// The agent compares this time with the start of pods; the file system's own clock may be coarse.
			if err := os.Chtimes(f.path+kept, time.Time{}, at); err != nil {
				return err
			}
			return os.Rename(f.path+kept, f.path)
		}
		if err := renameio.WriteFile(f.path, []byte(text), 0o644); err != nil {
			return err
		}
		return os.Chtimes(f.path, time.Time{}, at)
	})
}

// Tidy removes what Prepare has kept.
func (f *File) Tidy(ctx context.Context) error {
	return f.run(ctx, "removing the kept texts of ", func() error {
		return errors.Join(remove(f.path+nextSuffix), remove(f.path+formerSuffix))
	})
}

// Name returns the file's path on the host.
func (f *File) Name() string { return f.name }

// Notes are the files that the agent keeps next to the config file.
type Notes struct{ f *File }

// Notes returns those of the file.
func (f *File) Notes() Notes { return Notes{f} }

// Path returns their paths on the host, as a shell writes them.
func (n Notes) Path() string {
	return n.f.name + "{" + notifiedSuffix + "," + nextSuffix + "," + formerSuffix + "}"
}

// Remove removes them, and reports whether any was there. The config file stays.
func (n Notes) Remove(ctx context.Context) (removed bool, err error) {
	f := n.f
	err = f.run(ctx, "removing the notes of ", func() (err error) {
		for _, suffix := range []string{notifiedSuffix, nextSuffix, formerSuffix} {
			failed := os.Remove(f.path + suffix)
			switch {
			case failed == nil:
				removed = true
			case !errors.Is(failed, fs.ErrNotExist):
				err = errors.Join(err, failed)
			}
		}
		return err
	})
	return removed, err
}

func (f *File) run(ctx context.Context, what string, call func() error) error {
	return aside.Run(ctx, &f.lane, what+f.name, func(_ context.Context, at aside.At) error {
		at(f.name)
		err := call()
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
			return &NoRoomError{Folder: filepath.Dir(f.name), Err: err}
		default:
			return fmt.Errorf("%s%s: %w", what, f.name, err)
		}
	})
}

func (f *File) makeFolder() error {
	return os.MkdirAll(filepath.Dir(f.path), 0o755) //nolint:gosec // the plugin may run as any user
}

// keptTextIs reports whether the file with the suffix holds the text.
func (f *File) keptTextIs(suffix, text string) bool {
	kept, err := aside.Bounded(f.path+suffix, longest)
	return err == nil && string(kept) == text
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
