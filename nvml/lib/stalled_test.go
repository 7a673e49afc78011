package lib_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"

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
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				<-asked
				cancel()
			}()
			d := lib.Open(options(mounted.Dir))
			_, err := d.Snapshot(ctx)
			expectError(t, err, nvml.ErrUnresponsive, "context canceled; it stands at "+mounted.Dir)
			// t.Context has no deadline: these return only because the call before is still out.
			_, err = d.Snapshot(t.Context())
			expectError(t, err, nvml.ErrUnresponsive, "an earlier call has not come back; it stands at "+mounted.Dir)
			expectError(t, d.Release(t.Context()), nvml.ErrUnresponsive, mounted.Dir)
			mounted.Answer()
			eventually(t, func() bool { // there is no library in the file
				_, err = d.Snapshot(t.Context())
				return err != nil && !errors.Is(err, nvml.ErrUnresponsive)
			})
			expectError(t, err, nvml.ErrNoDriver, "opening NVIDIA's library")
		})
	}
}
