package agent_test

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml/aside"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// Promise 14. The path of the sentinel is from the settings: its file system may not answer any more.
func TestASentinelBehindAMountThatDoesNotAnswerEndsNoPassButItsOwnCall(t *testing.T) {
	t.Parallel()
	w := newWorld(t, passthrough)
	mounted := stalledfs.Mount(t, "reboot-required")
	w.settings.Reboot.Policy, w.settings.Reboot.Sentinel = config.RebootDelegate, filepath.Join(mounted.Dir, "reboot-required")
	w.restart()
	w.turn()
	asked := mounted.Stall()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.agent.Pass(ctx)
	}()
	<-asked
	cancel()
	select {
	case <-ended:
	case <-time.After(30 * time.Second):
		t.Error("the pass does not end")
		mounted.Answer()
		<-ended
	}
}

func TestASentinelThatDoesNotAnswerIsNamedAndAnsweredWhenItDoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootDelegate)
		until := make(chan struct{})
		if err := w.agent.HangSentinel(until); !aside.Hangs(err) {
			t.Fatal(err)
		}
		w.label("all-balanced")
		want := "asking for a reboot by " + w.settings.Reboot.Sentinel + " is postponed"
		reported := func() bool { return strings.Contains(w.condition().Message, want) }
		w.passes("word of the sentinel", reported)
		if n := w.node(); n.Spec.Unschedulable {
			t.Error("the node is kept for it")
		}
		close(until)
		w.passes("the request", w.asked)
		w.reboot()
		w.reach("all-balanced")
		w.passes("the request to be withdrawn", func() bool { return !w.asked() })
	})
}
