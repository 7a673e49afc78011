package holders_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// Promise 14. The kernel looks a socket's path up before it connects, and a file system that does not answer keeps the thread that asks.
func TestASocketOfKubeletBehindAMountThatDoesNotAnswerIsUnavailable(t *testing.T) {
	mounted := stalledfs.Mount(t, "kubelet.sock")
	kubelet := holders.DialKubelet(filepath.Join(mounted.Dir, "kubelet.sock"))
	asked := mounted.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := kubelet.Assignments(ctx)
		ended <- err
	}()
	<-asked
	cancel()
	select {
	case err := <-ended:
		if !errors.Is(err, holders.ErrKubeletUnavailable) {
			t.Errorf("error is %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the call does not end with its context")
		mounted.Answer()
		t.Log(<-ended)
		return
	}
	again, end := context.WithTimeout(t.Context(), time.Second)
	defer end()
	if _, err := kubelet.Allocatable(again); !errors.Is(err, holders.ErrKubeletUnavailable) {
		t.Errorf("the next call: %v", err)
	}
}
