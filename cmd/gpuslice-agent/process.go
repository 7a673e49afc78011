package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/gofrs/flock"
	"go.uber.org/zap"
)

// lockRetry is the pause between two tries for the lock while another agent ends.
const lockRetry = time.Second

// processLock is the lock of this process. It is never unlocked. The variable keeps it from the garbage collector, which would close its file.
var processLock *flock.Flock

// lock waits until this is the only agent of the machine. Two would undo each other's work, as during an update of the DaemonSet, or when a user
// starts one by hand. The kernel frees the lock only when the process ends. A call into the driver that does not return outlives the loop, and keeps
// the process and its lock: so no second agent calls a hung driver.
func (o *options) lock(ctx context.Context, log *zap.Logger) error {
	if err := os.MkdirAll(filepath.Dir(o.lockFile), 0o755); err != nil { //nolint:gosec // holds nothing but the lock
		return fmt.Errorf("locking this machine: %w; mount the folder, or name another by --lock", err)
	}
	file := flock.New(o.lockFile)
	locked, err := file.TryLock()
	if err == nil && !locked {
		log.Info("waiting for another agent to end", zap.String("lock", o.lockFile))
		locked, err = file.TryLockContext(ctx, lockRetry)
	}
	switch {
	case ctx.Err() != nil:
		return errors.New("ended while waiting for another agent of this machine to end")
	case err != nil || !locked:
		return fmt.Errorf("locking %s: %w", o.lockFile, err)
	}
	processLock = file
	return nil
}

// replaceProcess replaces this process by a new one of the same program, with the same id, so that kubelet sees no restart. A process
// cannot exchange NVIDIA's library, since the dynamic loader binds its functions once. The kernel first ends all threads,
// and waits for one that is in the driver; only then does it close the lock's file, and the new program locks it again.
func replaceProcess() error {
	if err := syscall.Exec("/proc/self/exe", os.Args, os.Environ()); err != nil { //nolint:gosec // it is this very program
		return fmt.Errorf("starting again: %w", err)
	}
	return nil
}
