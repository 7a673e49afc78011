package agent_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// awaitRecovered runs AwaitRecovered, as a process beside the agent's does.
func (w *world) awaitRecovered(ctx context.Context) (ended chan error, seen *int) {
	ended, seen = make(chan error, 1), new(int)
	go func() {
		ended <- agent.New(w.optionsFor(&w.host)).AwaitRecovered(ctx, func(*corev1.Node) { *seen++ })
	}()
	synctest.Wait()
	return ended, seen
}

func TestAwaitRecoveredReturnsWhenTheNodeIsGivenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.startChange("all-1g.10gb")
		ended, seen := w.awaitRecovered(t.Context())
		w.reach("all-1g.10gb")
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if *seen < 5 {
			t.Errorf("%d changes of the node were seen, which is less than the steps", *seen)
		}
	})
}

func TestAwaitRecoveredInVainReturnsWhatIsToBeRestored(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.startChange("all-1g.10gb")
		late := errors.New("too late")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, late)
		defer cancel()
		ended, _ := w.awaitRecovered(ctx)
		if err := <-ended; !errors.Is(err, late) || !strings.Contains(err.Error(), "all-1g.10gb") {
			t.Errorf("got %v, want what is to be restored for all-1g.10gb", err)
		}
	})
}

// A parked change keeps no pod away. The command does not wait for cordons of users and other tools.
func TestAwaitRecoveredReturnsAtOnceIfNothingIsToBeRestored(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		models  string
		provoke func(w *world)
	}{
		{"a node at rest", h100, func(*world) {}},
		{"a change that is parked", passthrough, func(w *world) { w.label("all-balanced"); w.untilParked(); w.spend(time.Minute) }},
		{"an administrator's cordon", h100, func(w *world) { w.fillManagedFields(); w.cordon(true) }},
		{"a cordon that people keep", h100, func(w *world) {
			w.fillManagedFields()
			w.annotate(config.AnnotationKeepCordoned, "")
			w.label("all-enabled")
			w.settle(config.ReasonConverged)
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, row.models)
				row.provoke(w)
				ended, _ := w.awaitRecovered(t.Context())
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestAJournalThatCannotBeReadIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.annotate(config.AnnotationJournal, `{"version":99}`)
		w.disk.text = []byte(`{"version":1,"node":"` + nodeName + `","uid":"node-uid","journal":"{\"version\":99}"}`)
		ended, _ := w.awaitRecovered(t.Context())
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "version 99") {
			t.Errorf("got %v, want that the journal cannot be read", err)
		}
	})
}

// Only if the user asks for it, and only labels that mig-manager has paused.
func TestWhatMIGManagerHasLeftIsRestored(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		provoke func(w *world)
		want    []string
		value   string
		err     string
	}{
		{"its label", func(w *world) { w.set(labelDCGM, "paused-for-mig-change") }, []string{labelDCGM}, "true", ""},
		{"no one's pause", func(w *world) { w.set(labelDCGM, "paused-by-hand") }, nil, "paused-by-hand", ""},
		{"our own pause", func(w *world) { w.set(labelDCGM, fence.PausedValue) }, nil, fence.PausedValue, ""},
		{"its label while it runs", func(w *world) {
			w.set(labelDCGM, "paused-for-mig-change")
			w.pod("mig-manager", "", func(p *corev1.Pod) {
				p.Labels, p.OwnerReferences = map[string]string{"app": "nvidia-mig-manager"}, ofDaemonSet("mig-manager")
			})
		}, nil, "paused-for-mig-change", "mig-manager runs on this node"},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				row.provoke(w)
				got, err := w.agent.Restore(t.Context())
				if diff := cmp.Diff(row.want, got); diff != "" {
					t.Errorf("restored (-want +got):\n%s", diff)
				}
				if (err != nil) != (row.err != "") || err != nil && !strings.Contains(err.Error(), row.err) {
					t.Errorf("got %v, want %q", err, row.err)
				}
				if value := w.node().Labels[labelDCGM]; value != row.value {
					t.Errorf("the label is %q, want %q", value, row.value)
				}
			})
		})
	}
}
