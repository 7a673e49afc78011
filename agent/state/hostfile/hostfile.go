// Package hostfile keeps files of the agent on the host that only root can write. Each call has a deadline, since the disk may hang.
package hostfile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
)

// patience is how long a working disk may take: behind a busy writer, an fsync takes seconds.
const patience = 10 * time.Second

// Errors of calls on the disk.
var (
	// ErrSilent means that the disk has not answered in time. It may still do a write later.
	ErrSilent = errors.New("the disk does not answer")
	// ErrUnsafe means that not only the agent's user could have written the file.
	ErrUnsafe = errors.New("others than root can write it")
)

// File is a file of the host. Its methods are for one goroutine at a time; each returns at its deadline, whatever the disk does.
type File struct {
	dir, name string
	longest   int           // bytes
	busy      chan struct{} // holds a token while a call works on the disk, even if its caller no longer waits
	swept     bool          // the remains of a write of a killed process are removed

	// Work runs the work on the disk; tests of a disk that hangs replace it.
	Work func(func())
}

// In returns the file of that name in the directory; the first Write creates both. Read reads at most longest+1 bytes.
func In(dir, name string, longest int) *File {
	return &File{dir: filepath.Clean(dir), name: name, longest: longest, busy: make(chan struct{}, 1), Work: func(f func()) { f() }}
}

// Path returns the path of the file.
func (f *File) Path() string { return filepath.Join(f.dir, f.name) }

// Read returns the content of the file, at most one byte more than longest, or nil if there is no file. The error matches
// ErrUnsafe or ErrSilent, or is the file system's.
func (f *File) Read(ctx context.Context) ([]byte, error) { return within(ctx, f, f.read) }

// Write replaces the file as a whole, and returns when the disk has it. The error matches ErrUnsafe or ErrSilent, or is the file
// system's. The former content is then still there; after ErrSilent it may be either.
func (f *File) Write(ctx context.Context, data []byte) error {
	_, err := within(ctx, f, func() (struct{}, error) { return struct{}{}, f.write(data) })
	return err
}

// Try returns why Write could not write the data. It writes a temporary file with the data, and removes it again.
func (f *File) Try(ctx context.Context, data []byte) error {
	_, err := within(ctx, f, func() (struct{}, error) { return struct{}{}, f.try(data) })
	return err
}

// SetAside moves the file to another name in its directory, and returns the path. It replaces a file of that name.
func (f *File) SetAside(ctx context.Context, name string) (string, error) {
	aside := filepath.Join(f.dir, name)
	_, err := within(ctx, f, func() (struct{}, error) {
		err := os.Rename(f.Path(), aside)
		if err == nil {
			err = f.sync()
		}
		return struct{}{}, err
	})
	return aside, err
}

// Remove removes the file, if it is there, and reports whether it was. The directory stays: it may be a mount.
func (f *File) Remove(ctx context.Context) (bool, error) {
	return within(ctx, f, func() (bool, error) {
		err := os.Remove(f.Path())
		if errors.Is(err, fs.ErrNotExist) {
			return false, nil
		}
		if err == nil {
			err = f.sync()
		}
		return err == nil, err
	})
}

// within does the work on the disk, and waits for it up to the deadline. While a call hangs, it begins no other: otherwise an
// earlier write could come after a later one.
func within[T any](ctx context.Context, f *File, work func() (T, error)) (T, error) {
	var none T
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case f.busy <- struct{}{}:
	default:
		return none, fmt.Errorf("%w: an earlier call has not returned", ErrSilent)
	}
	type answer struct {
		value T
		err   error
	}
	done := make(chan answer, 1)
	go f.Work(func() {
		value, err := work()
		<-f.busy
		done <- answer{value, err}
	})
	select {
	case a := <-done:
		return a.value, a.err
	case <-ctx.Done():
		return none, fmt.Errorf("%w: %w", ErrSilent, ctx.Err())
	}
}

func (f *File) read() ([]byte, error) {
	dir, err := f.open()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	// Without O_NONBLOCK the open of a FIFO would wait for its writer.
	fd, err := unix.Openat(int(dir.Fd()), f.name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("%w: it is a symbolic link", ErrUnsafe)
	case err != nil:
		return nil, err
	}
	file := os.NewFile(uintptr(fd), f.Path())
	defer file.Close()
	if err := safe(file, unix.S_IFREG); err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(file, int64(f.longest)+1))
}

// open opens the directory, if no other user can write to it.
func (f *File) open() (*os.File, error) {
	fd, err := unix.Open(f.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
		return nil, fmt.Errorf("%w: %s is a link or a file, not a directory", ErrUnsafe, f.dir)
	case err != nil:
		return nil, &fs.PathError{Op: "open", Path: f.dir, Err: err}
	}
	dir := os.NewFile(uintptr(fd), f.dir)
	if err := safe(dir, unix.S_IFDIR); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// safe returns an error if another user could have written the file.
func safe(file *os.File, kind uint32) error {
	var stat unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &stat); err != nil {
		return &fs.PathError{Op: "stat", Path: file.Name(), Err: err}
	}
	switch {
	case stat.Mode&unix.S_IFMT != kind:
		return fmt.Errorf("%w: %s has another type, mode %o", ErrUnsafe, file.Name(), stat.Mode)
	case int(stat.Uid) != os.Geteuid():
		return fmt.Errorf("%w: %s belongs to user %d, and the agent runs as user %d", ErrUnsafe, file.Name(), stat.Uid, os.Geteuid())
	case stat.Mode&0o022 != 0:
		return fmt.Errorf("%w: %s has mode %04o", ErrUnsafe, file.Name(), stat.Mode&0o7777)
	case kind == unix.S_IFREG && stat.Nlink != 1:
		return fmt.Errorf("%w: %s has %d names", ErrUnsafe, file.Name(), stat.Nlink)
	default:
		return nil
	}
}

func (f *File) write(data []byte) error {
	if err := os.MkdirAll(f.dir, 0o700); err != nil {
		return err
	}
	dir, err := f.open()
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := dir.Chmod(0o700); err != nil { // kubelet makes a hostPath with 0755
		return err
	}
	if err := f.sweep(); err != nil {
		return err
	}
	file, err := f.beside(data)
	if err != nil {
		return err
	}
	defer func() { _ = file.Cleanup() }()                 // after the rename there is nothing left to remove
	if err := file.CloseAtomicallyReplace(); err != nil { // which syncs it first
		return err
	}
	return dir.Sync()
}

// beside returns a temporary file with the data, which may replace the file.
func (f *File) beside(data []byte) (*renameio.PendingFile, error) {
	file, err := renameio.NewPendingFile(f.Path(), renameio.WithTempDir(f.dir), renameio.WithStaticPermissions(0o600))
	if err != nil {
		return nil, err
	}
	if _, err = file.Write(data); err != nil {
		return nil, errors.Join(err, file.Cleanup())
	}
	return file, nil
}

func (f *File) try(data []byte) error {
	if _, err := os.Lstat(f.dir); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(f.dir, 0o700); err != nil {
			return err
		}
		defer os.Remove(f.dir)
	}
	dir, err := f.open()
	if err != nil {
		return err
	}
	defer dir.Close()
	file, err := f.beside(data)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Cleanup())
}

// sweep removes the temporary files of a process that was killed in the middle of a write.
func (f *File) sweep() error {
	if f.swept {
		return nil
	}
	left, err := filepath.Glob(filepath.Join(f.dir, "."+f.name+"*"))
	for _, path := range left {
		// The agent leaves only files. A folder is not its own, and does not keep it from writing.
		if stat, failed := os.Lstat(path); failed == nil && stat.Mode().IsRegular() {
			err = errors.Join(err, os.Remove(path))
		}
	}
	f.swept = err == nil
	return err
}

func (f *File) sync() error {
	dir, err := f.open()
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}
