// Package pluginfile is the config file of NVIDIA's device plugin on this host, and what the agent keeps beside it. The folder is the
// host's: it may be full, and behind a mount that does not answer. It knows nothing of what the file says.
package pluginfile

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

// What stands beside the file.
const (
	toldSuffix   = ".told"   // who was told to read it
	nextSuffix   = ".next"   // what it shall say, so that there is room for it
	formerSuffix = ".former" // what it said, for the way back
)

// longest is as much as a ConfigMap can hold, and more than a config of a plugin has.
const longest = 1 << 20

// File is the config file. Each of its calls ends with its context, also where the folder does not answer: the error is then an
// *aside.AbandonedError.
type File struct {
	path string // as this process sees it
	name string // as people on the host do
	lane aside.Lane
}

// New is the file at the path, which is called by the name in errors.
func New(path, name string) *File { return &File{path: filepath.Clean(path), name: name} }

// Content is the file at one look.
type Content struct {
	Text    string
	Exists  bool
	Written time.Time            // the last time
	Told    map[types.UID]string // who was told to read it, and what it said then; it can be lost
}

// NoRoomError says that nothing can be written to the folder before people make room.
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

// Read looks at the file, and at who was told to read it. A file that is not there is no error.
func (f *File) Read(ctx context.Context) (Content, error) {
	return aside.Do(ctx, &f.lane, "reading "+f.name, func(_ context.Context, at aside.At) (Content, error) {
		at(f.name)
		out := Content{Told: f.notifiedPods()}
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
	told := map[types.UID]string{}
	text, err := aside.Bounded(f.path+toldSuffix, longest)
	if err != nil || json.Unmarshal(text, &told) != nil || told == nil {
		return map[types.UID]string{}
	}
	return told
}

// Tell keeps who was told to read the file.
func (f *File) Tell(ctx context.Context, told map[types.UID]string) error {
	text, err := json.Marshal(told)
	if err != nil {
		return fmt.Errorf("encoding who was told to read %s: %w", f.name, err)
	}
	return f.run(ctx, "noting who was told to read ", func() error { return renameio.WriteFile(f.path+toldSuffix, text, 0o644) })
}

// Prepare makes sure that the text can be written later, and what the file says now again after that, however full the folder is by
// then: both are kept beside the file. The error may be a *NoRoomError.
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
		// Whoever replaces the file leaves what it said under the other name.
		if err := os.Link(f.path, f.path+formerSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
}

// Write has the file say the text, as a whole or not at all, and be written at that time. The error may be a *NoRoomError.
func (f *File) Write(ctx context.Context, text string, at time.Time) error {
	return f.run(ctx, "writing ", func() error {
		if err := f.makeFolder(); err != nil {
			return err
		}
		for _, kept := range []string{nextSuffix, formerSuffix} {
			if !f.keptTextIs(kept, text) {
				continue
			}
			// By it is known who has started before, also where clocks of files are coarse.
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

// Tidy takes away what Prepare has kept.
func (f *File) Tidy(ctx context.Context) error {
	return f.run(ctx, "tidying beside ", func() error {
		return errors.Join(remove(f.path+nextSuffix), remove(f.path+formerSuffix))
	})
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
	return os.MkdirAll(filepath.Dir(f.path), 0o755) //nolint:gosec // the plugin reads it, as any user
}

// keptTextIs reports whether what is kept beside the file is the text.
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
