package lib_test

import (
	"context"
	"errors"
	"testing"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// The driver's root is the host's, and may be behind a mount that does not answer.
func TestADriverBehindAMountThatDoesNotAnswerIsLeftAlone(t *testing.T) {
	mounted := stalledfs.Mount(t, "usr/lib64/libnvidia-ml.so.1")
	asked := mounted.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	d := lib.Open(lib.Options{DriverRoot: mounted.Dir})
	if _, err := d.Snapshot(ctx); !errors.Is(err, nvml.ErrUnresponsive) {
		t.Errorf("at the deadline: %v", err)
	}
	if _, err := d.Snapshot(t.Context()); !errors.Is(err, nvml.ErrUnresponsive) {
		t.Errorf("while the first call hangs: %v", err)
	}
}
