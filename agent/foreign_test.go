package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// destroyAll destroys the instances of the GPU, as another program does.
func (w *world) destroyAll(index int) {
	w.t.Helper()
	gpu := w.snapshot()[index]
	for _, i := range gpu.Instances {
		if err := w.gpus.Driver().Destroy(w.t.Context(), gpu.UUID, i.Placed); err != nil {
			w.t.Fatal(err)
		}
	}
	w.offered = w.devices()
}

// recut cuts GPU 0 in another way, as another program does, and returns when.
func (w *world) recut() time.Time {
	w.t.Helper()
	w.destroyAll(0)
	if err := w.gpus.Driver().Create(w.t.Context(), w.snapshot()[0].UUID, nvml.Placed{Profile: "3g.40gb", Span: nvml.Span{Start: 4, Size: 4}}); err != nil {
		w.t.Fatal(err)
	}
	w.offered = w.devices()
	return time.Now()
}

// answered lets turns pass until the node has all-1g.10gb again, and returns how long after the change the agent has cut GPU 0.
func (w *world) answered(changed time.Time) time.Duration {
	w.t.Helper()
	w.passes("GPU 0 as it was", func() bool { return len(w.snapshot()[0].Instances) == 7 })
	took := time.Since(changed)
	w.reach("all-1g.10gb")
	return took
}

func TestGPUsThatSomethingElseKeepsChangingAreCutEverLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.turn()
		w.converge("all-1g.10gb")
		events := w.restartWithEvents()
		for i, least := range []time.Duration{0, 1, 2, 4, 8, 16, 32, 60, 60} {
			least *= time.Minute
			cordons := w.recordCordons()
			changed := w.recut()
			w.pass()
			if i > 0 {
				w.restart() // the pause is in the record
				w.pass()
				c := w.condition()
				for _, want := range []string{"GPU 0", "something else", "last at 2000-01-01", "kubectl label node gpu-1 nvidia.com/mig.config-"} {
					if c.Status != corev1.ConditionFalse || c.Reason != string(config.ReasonStepHadNoEffect) || !strings.Contains(c.Message, want) {
						t.Errorf("the %d. time the node is %s, %s: %s; want %q in it", i+1, c.Status, c.Reason, c.Message, want)
					}
				}
				if len(*cordons) > 0 {
					t.Error("the node is cordoned while the agent waits")
				}
			}
			if took := w.answered(changed); took < least || took > least+5*time.Minute {
				t.Errorf("the %d. time the GPU is cut after %s, want %s", i+1, took, least)
			}
			if i == 0 && (heard(events, string(config.ReasonFencing), "something else has changed GPU 0") != 1) {
				t.Error("no Event says of the fence that no user has asked for it")
			}
		}
		events = w.restartWithEvents()
		w.recut()
		w.pass()
		if heard(events, corev1.EventTypeWarning, string(config.ReasonStepHadNoEffect), "10 times") != 1 {
			t.Error("no Event says that something else changes the GPUs")
		}
		w.converge("all-7g.80gb") // another request ends it
		w.converge("all-1g.10gb")
		if took := w.answered(w.recut()); took > time.Minute {
			t.Errorf("after a new request the GPU is cut after %s", took)
		}
		w.spend(7 * time.Hour) // so do GPUs that stay as they are
		if took := w.answered(w.recut()); took > time.Minute {
			t.Errorf("after 7 h without a change the GPU is cut after %s", took)
		}
		changed := w.recut()
		w.annotate(config.AnnotationForce, config.ForceNow)
		if took := w.answered(changed); took > 30*time.Second {
			t.Errorf("with annotation %s the GPU is cut after %s", config.AnnotationForce, took)
		}
	})
}

// What loses instances without another program is answered at once, however often.
func TestWhatNoProgramHasChangedIsRestoredAtOnce(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(w *world){
		"reboots": func(w *world) { w.reboot() },
		"the driver is loaded anew": func(w *world) {
			w.set(config.LabelDevicePlugin, "paused-for-driver-upgrade")
			w.pass()
			if err := w.gpus.Reload(); err != nil {
				w.t.Fatal(err)
			}
			w.set(config.LabelDevicePlugin, "true")
			w.offered = w.devices()
		},
		"a GPU was unhealthy, and is reset": func(w *world) {
			n := w.node()
			n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{
				Type: config.ConditionGPUUnhealthy, Status: corev1.ConditionFalse, Reason: string(config.ReasonGPUsHealthy), LastTransitionTime: metav1.NewTime(time.Now().Add(time.Second)),
			})
			if _, err := w.client.CoreV1().Nodes().UpdateStatus(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
				w.t.Fatal(err)
			}
			if err := w.gpus.Reset(0); err != nil {
				w.t.Fatal(err)
			}
			w.offered = w.devices()
		},
		"the label is set again": func(w *world) {
			w.unset(config.LabelMIGConfig)
			w.settle(config.ReasonNotRequested)
			w.destroyAll(0)
			w.label("all-1g.10gb")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.turn()
				w.converge("all-1g.10gb")
				for range 3 {
					w.spend(time.Minute)
					lose(w)
					if took := w.answered(time.Now()); took > time.Minute {
						t.Fatalf("cut after %s", took)
					}
				}
				if f := w.disk.record(t).Learnt.Foreign; f != nil {
					t.Errorf("the record says that another program has changed GPUs: %+v", f)
				}
			})
		})
	}
}

