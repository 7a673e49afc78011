package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml/aside"
	"github.com/gpuslice/gpuslice/test/stalledfs"
)

// many is more looks than the agent takes in an hour.
const many = 1000

func endless() bool { return false }

// looks lets turns pass for d, until stop is satisfied, or until there were many. It returns how many there were.
func (w *world) looks(d time.Duration, stop func() bool) int {
	w.t.Helper()
	n := 0
	for began := time.Now(); time.Since(began) < d && n < many && !stop(); n++ {
		w.turn()
		<-time.After(w.agent.Pass(w.t.Context()))
	}
	return n
}

// Kubelet makes a directory of a hostPath that does not exist.
func TestWhatStandsInTheSentinelsPlaceAsksForNoRebootAndIsNamed(t *testing.T) {
	t.Parallel()
	for name, put := range map[string]func(path string) error{
		"a directory":                  func(path string) error { return os.Mkdir(path, 0o755) },
		"a link that leads to no file": func(path string) error { return os.Symlink("/nowhere/at/all", path) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := virtual(t, config.RebootDelegate)
				path := w.settings.Reboot.Sentinel
				if err := put(path); err != nil {
					t.Fatal(err)
				}
				w.label("all-balanced")
				told := func() bool { return strings.Contains(w.condition().Message, path+" is "+name) }
				if w.looks(time.Hour, told); !told() {
					t.Errorf("the node says %s", w.condition().Message)
				}
				if n := w.looks(time.Hour, endless); n >= many {
					t.Errorf("%d looks in less than an hour; the node says %s", n, w.condition().Message)
				}
			})
		})
	}
}

func TestASentinelThatCannotBeReadIsOfOthersAndStays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootDelegate)
		if err := os.Symlink("/proc/self/mem", w.settings.Reboot.Sentinel); err != nil { // a file of which the beginning cannot be read
			t.Fatal(err)
		}
		w.label("all-balanced")
		w.parked()
		if n := w.looks(time.Hour, endless); n >= many {
			t.Errorf("%d looks in less than an hour; the node says %s", n, w.condition().Message)
		}
		w.reboot()
		w.reach("all-balanced")
		w.spend(time.Hour)
		if !w.asked() {
			t.Error("the request of others is gone")
		}
	})
}

func TestTheSentinelIsThereAsAWholeOrNotAtAll(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := virtual(t, config.RebootDelegate)
		path := w.settings.Reboot.Sentinel
		folder := filepath.Dir(path)
		half := filepath.Join(folder, "."+filepath.Base(path)+"."+config.FieldManager)
		if err := os.WriteFile(half, []byte("gpusl"), 0o600); err != nil { // an agent was killed while it wrote
			t.Fatal(err)
		}
		w.label("all-balanced")
		w.passes("the request", w.asked)
		text, err := os.ReadFile(path)
		if err != nil || !strings.HasPrefix(string(text), config.FieldManager+":") || !strings.HasSuffix(string(text), "\n") {
			t.Errorf("the request is %q, %v", text, err)
		}
		if is, err := os.Stat(path); err != nil || is.Mode().Perm()&0o444 != 0o444 {
			t.Errorf("not everybody may read the request: %v, %v", is, err)
		}
		files, err := os.ReadDir(folder)
		if err != nil || len(files) != 1 {
			t.Errorf("the folder holds %v, %v; want the request alone", files, err)
		}
		w.reboot()
		w.reach("all-balanced")
		w.passes("the request to be withdrawn", func() bool { return !w.asked() })
	})
}

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
		want := "asking for a reboot by " + w.settings.Reboot.Sentinel + " is put off"
		told := func() bool { return strings.Contains(w.condition().Message, want) }
		if w.looks(time.Hour, told); !told() {
			t.Errorf("the node says %s", w.condition().Message)
		}
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
