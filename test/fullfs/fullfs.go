// Package fullfs gives a test its own file system, small enough to be filled. It knows nothing of what is written there.
package fullfs

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// Folder is the root of a file system of a few pages. It is removed with the test. Mounting it takes root: the test is
// skipped where it cannot be mounted.
func Folder(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Skipf("no file system can be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Fill leaves no room in the folder, to the last byte of each page, until it is emptied.
func Fill(t testing.TB, dir string) (empty func()) {
	t.Helper()
	path := filepath.Join(dir, "full")
	file, err := os.OpenFile(filepath.Clean(path), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = file.Write(make([]byte, 4096))
	}
	if err := errors.Join(notFull(err), file.Close()); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// notFull is an error of another kind than a full file system's.
func notFull(err error) error {
	if errors.Is(err, unix.ENOSPC) {
		return nil
	}
	return err
}
