package gpusim

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// openFile is locked, shared, by every process that has the driver open, as the kernel counts the users of a module.
const openFile = "open"

// Hold notes that a process has the driver of the node in dir open, until the file is closed or the process ends.
func Hold(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, openFile), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, fmt.Errorf("opening the driver: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_SH); err != nil {
		_ = f.Close() // the lock's error says enough
		return nil, fmt.Errorf("opening the driver: %w", err)
	}
	return f, nil
}

// Held reports whether any process has the driver open, so that a kernel would not unload it. Drivers of this package
// hold nothing between two calls.
func (n *Node) Held() (bool, error) {
	f, err := Hold(n.Dir())
	if err != nil {
		return false, err
	}
	defer f.Close()
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == unix.EWOULDBLOCK { //nolint:errorlint // Flock gives the bare number
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("asking who has the driver open: %w", err)
	}
	return false, nil
}
