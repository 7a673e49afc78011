package lib_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// Promise 14. The driver's root is the host's, and may be behind a mount that does not answer. It is left alone at the deadline, wherever
// the call stands: where the library is looked for, or in the dynamic loader, which opens it.
func TestADriverBehindAMountThatDoesNotAnswerIsLeftAlone(t *testing.T) {
	const library = "usr/lib64/libnvidia-ml.so.1"
	for name, options := range map[string]func(root string) lib.Options{
		"while it is looked for": func(root string) lib.Options { return lib.Options{DriverRoot: root} },
		"while it is opened":     func(root string) lib.Options { return lib.Options{Library: filepath.Join(root, library)} },
	} {
		t.Run(name, func(t *testing.T) {
			mounted := stalledfs.Mount(t, library)
			asked := mounted.Stall()
			bounded, give := context.WithTimeout(t.Context(), 5*time.Minute) // for what must not wait at all, on a machine with much to do
			defer give()
			ctx, cancel := context.WithCancel(bounded)
			defer cancel()
			go func() {
				<-asked
				cancel()
			}()
			d := lib.Open(options(mounted.Dir))
			_, err := d.Snapshot(ctx)
			expectError(t, err, nvml.ErrUnresponsive, "context canceled; it hangs at "+mounted.Dir)
			// These return only because the call before is still out: their context ends much later.
			_, err = d.Snapshot(bounded)
			expectError(t, err, nvml.ErrUnresponsive, "an earlier call has not returned; it hangs at "+mounted.Dir)
			expectError(t, d.Release(bounded), nvml.ErrUnresponsive, mounted.Dir)
			mounted.Answer()
			eventually(t, func() bool { // there is no library in the file
				_, err = d.Snapshot(bounded)
				return err != nil && !errors.Is(err, nvml.ErrUnresponsive)
			})
			expectError(t, err, nvml.ErrNoDriver, "opening NVIDIA's library")
		})
	}
}
