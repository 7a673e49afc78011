package cdi_test

import (
	"context"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/nvml/aside"
	"github.com/gpuslice/gpuslice/nvml/cdi"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// The folder of the specs is the host's, and may be behind a mount that does not answer.
func TestSpecsBehindAMountThatDoesNotAnswerAreLeftAlone(t *testing.T) {
	mounted := stalledfs.Mount(t, "nvidia.yaml")
	s := cdi.New(cdi.Options{Dirs: []string{mounted.Dir}})
	if _, err := s.Stale(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	asked := mounted.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if _, err := s.Stale(ctx, nil); !aside.Hangs(err) || !strings.Contains(err.Error(), mounted.Dir) {
		t.Errorf("looking: %v", err)
	}
	if err := s.Write(t.Context(), nil); !aside.Hangs(err) {
		t.Errorf("writing: %v", err)
	}
}
