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

func (w *world) saysThatSomethingElseChangesGPU0() {
	w.t.Helper()
	c := w.condition()
	for _, want := range []string{"GPU 0", "something else", "last at 2000-01-01", "kubectl label node gpu-1 nvidia.com/mig.config-"} {
		if c.Status != corev1.ConditionFalse || c.Reason != string(config.ReasonStepHadNoEffect) || !strings.Contains(c.Message, want) {
			w.t.Errorf("the node is %s, %s: %s; want %q in it", c.Status, c.Reason, c.Message, want)
		}
	}
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
				w.saysThatSomethingElseChangesGPU0()
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

// What loses instances without another program is answered at once, however often, and also while the agent pauses since another program had changed GPUs.
func TestWhatNoProgramHasChangedIsRestoredAtOnce(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(w *world){
		"reboots": func(w *world) { w.reboot() },
		"the driver is loaded again": func(w *world) {
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
		"the label is wrong for a moment": func(w *world) {
			w.label("nonsense")
			w.settle(config.ReasonUnknownConfig)
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
				for range 7 {
					w.answered(w.recut())
				}
				w.recut()
				w.spend(time.Minute)
				w.saysThatSomethingElseChangesGPU0()
				lose(w)
				if took := w.answered(time.Now()); took > time.Minute {
					t.Errorf("after changes by another program, cut after %s", took)
				}
			})
		})
	}
}

// handMade is a node whose GPU 0 is cut by hand, with a pod on it, on which no agent has ever been. It has the labels before the agent comes.
func handMade(t *testing.T, labels map[string]string) *world {
	t.Helper()
	w := newWorld(t, h100)
	w.disk.text = nil
	gpu := w.snapshot()[0]
	if err := w.gpus.Driver().SetMode(t.Context(), gpu.UUID, true); err != nil {
		t.Fatal(err)
	}
	if err := w.gpus.Driver().Create(t.Context(), gpu.UUID, nvml.Placed{Profile: "3g.40gb", Span: nvml.Span{Start: 4, Size: 4}}); err != nil {
		t.Fatal(err)
	}
	for label, value := range labels {
		w.set(label, value)
	}
	w.turn()
	w.pod("holder", w.snapshot()[0].Instances[0].Devices[0].UUID)
	return w
}

// expectUntouched fails the test unless the node is as it was found, and says why it stays so.
func (w *world) expectUntouched(words ...string) {
	w.t.Helper()
	c := w.condition()
	if c.Status != corev1.ConditionFalse || c.Reason != string(config.ReasonOlderRequest) {
		w.t.Errorf("the node is %s, %s: %s", c.Status, c.Reason, c.Message)
	}
	for _, word := range words {
		if !strings.Contains(c.Message, word) {
			w.t.Errorf("the node says %q, want %q in it", c.Message, word)
		}
	}
	if got := w.snapshot()[0].Geometry().String(); !strings.Contains(got, "3g.40gb") || !w.runs("holder") || w.node().Spec.Unschedulable {
		w.t.Errorf("GPU 0 has %s, the pod runs: %t, the node is cordoned: %t", got, w.runs("holder"), w.node().Spec.Unschedulable)
	}
}

func TestALabelThatIsOlderThanTheFirstAgentTakesNothing(t *testing.T) {
	t.Parallel()
	const was = "all-1g.10gb"
	of := map[string]string{config.LabelMIGConfig: was, config.LabelMIGConfigState: "success"}
	for name, sign := range map[string]func(w *world){
		"another value":   func(w *world) { w.label("all-2g.20gb"); w.pass(); w.label(was) },
		"removed and set": func(w *world) { w.unset(config.LabelMIGConfig); w.pass(); w.label(was) },
		"forced":          func(w *world) { w.annotate(config.AnnotationForce, config.ForceNow) },
		"applied": func(w *world) {
			w.annotate(config.AnnotationAllowEviction, config.Allowance(config.LabelMIGConfig, was))
		},
		"applied with its options": func(w *world) {
			w.annotate(config.AnnotationAllowEviction, config.Allowance(config.LabelMIGConfig, was, config.FieldEmptyDir))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := handMade(t, of)
				for range 3 {
					w.spend(10 * time.Minute)
					w.expectUntouched("label nvidia.com/mig.config=all-1g.10gb was there before the agent", "GPU 0 has 3g.40gb", "evict team/holder",
						"kubectl gpuslice apply gpu-1 --mig-config all-1g.10gb", "kubectl label node gpu-1 nvidia.com/mig.config-")
					w.restart() // the record keeps the decision
				}
				sign(w)
				w.reach(was)
				if w.runs("holder") {
					t.Error("the pod has stayed")
				}
				w.answered(w.recut()) // from now on the request is the agent's own
			})
		})
	}
}

// What users asked of another program before the agent came is no sign.
func TestAnnotationsThatAreOlderThanTheFirstAgentAllowNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.annotate(config.AnnotationForce, config.ForceNow)
		w.annotate(config.AnnotationAllowEviction, config.Allowance(config.LabelMIGConfig, "all-1g.10gb", config.FieldEmptyDir))
		older := handMade(t, map[string]string{config.LabelMIGConfig: "all-1g.10gb"})
		older.edit(func(n *corev1.Node) { n.Annotations = w.node().Annotations })
		older.spend(time.Hour)
		older.expectUntouched()
		for _, key := range []string{config.AnnotationForce, config.AnnotationAllowEviction} {
			if value, there := older.node().Annotations[key]; there {
				t.Errorf("annotation %s is still there: %q", key, value)
			}
		}
		older.annotate(config.AnnotationForce, config.ForceNow) // the same words, but said to this agent
		older.reach("all-1g.10gb")
	})
}

func TestALabelThatIsOlderThanTheFirstAgentIsCarriedOutWhereItTakesNothing(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(w *world){
		"a fresh node": func(*world) {},
		"a fresh node with its startup taint": func(w *world) {
			w.edit(func(n *corev1.Node) {
				n.Spec.Taints = []corev1.Taint{{Key: config.TaintNotReady, Effect: corev1.TaintEffectNoSchedule}}
			})
		},
		"free slots": func(w *world) {
			for _, gpu := range w.snapshot() {
				if err := w.gpus.Driver().SetMode(w.t.Context(), gpu.UUID, true); err != nil {
					w.t.Fatal(err)
				}
			}
			if err := w.gpus.Driver().Create(w.t.Context(), w.snapshot()[0].UUID, nvml.Placed{Profile: "1g.10gb", Span: nvml.Span{Start: 0, Size: 1}}); err != nil {
				w.t.Fatal(err)
			}
		},
		"kubelet is late": func(w *world) {
			w.kubeletSilent = true
			w.spend(time.Minute)
			if w.reason() == config.ReasonOlderRequest {
				w.t.Error("a node whose kubelet is late waits for a user")
			}
			w.kubeletSilent = false
		},
		"the record is lost where an agent had finished": func(w *world) {
			w.converge("all-7g.80gb")
			w.disk.text = nil
			w.restart()
			w.pod("holder", w.snapshot()[0].Instances[0].Devices[0].UUID)
		},
		"the record is lost in the middle of a change": func(w *world) { w.losesRecord() },
		"the record is lost in the middle of a change, by managedFields": func(w *world) {
			w.fillManagedFields()
			w.losesRecord(config.AnnotationJournal)
		},
		"the record is lost in the middle of a change, without managedFields": func(w *world) { w.losesRecord(config.AnnotationJournal) },
		"the record is lost in the middle of a change of claims":              func(w *world) { w.byClaims(); w.losesRecord() },
		"the record is lost in the middle of a change of claims, by managedFields": func(w *world) {
			w.byClaims()
			w.fillManagedFields()
			w.losesRecord(config.AnnotationJournal)
		},
		"the record is lost in the middle of a change of claims, without managedFields": func(w *world) {
			w.byClaims()
			w.losesRecord(config.AnnotationJournal)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.disk.text = nil
				w.label("all-1g.10gb")
				w.restart()
				prepare(w)
				w.label("all-1g.10gb")
				w.reach("all-1g.10gb")
				w.expectGivenBack()
			})
		})
	}
}

// byClaims lets NVIDIA's DRA driver allocate the GPUs.
func (w *world) byClaims() {
	w.t.Helper()
	w.noPlugin, w.draDriver = true, true
	w.spend(time.Minute)
}

// losesRecord loses the host's record in the middle of a change that destroys instances, and with it annotations of the node.
func (w *world) losesRecord(annotations ...string) {
	w.t.Helper()
	w.converge("all-7g.80gb")
	cut := false
	w.countChanges(func(int) { cut = true })
	w.label("all-1g.10gb")
	w.passes("the first change of a GPU", func() bool { return cut })
	w.disk.text = nil
	for _, key := range annotations {
		w.unannotate(key)
	}
	w.restart()
}

// A profile that a user sets is a new request. When it goes, the label below it is as old as before.
func TestALabelStaysOlderThanTheFirstAgentBelowAProfile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := handMade(t, map[string]string{config.LabelMIGConfig: "all-1g.10gb"})
		w.spend(time.Minute)
		w.set(config.LabelProfile, "all-3g.40gb")
		w.settle(config.ReasonConverged)
		w.pod("other", w.snapshot()[1].Instances[0].Devices[0].UUID)
		w.unset(config.LabelProfile)
		w.spend(time.Minute)
		if w.reason() != config.ReasonOlderRequest || !w.runs("other") {
			t.Errorf("the node says %s: %s", w.reason(), w.condition().Message)
		}
	})
}

// A plan says the same as the condition.
func TestAPlanSaysThatTheLabelIsOlderThanTheAgent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := handMade(t, map[string]string{config.LabelMIGConfig: "all-1g.10gb"})
		for _, met := range []bool{false, true} {
			p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "all-1g.10gb")
			if err != nil || p.Reason != config.ReasonOlderRequest || !strings.Contains(p.HeldUp, "was there before the agent") {
				t.Errorf("an agent was here: %t; the plan is held up by %s %q, error %v", met, p.Reason, p.HeldUp, err)
			}
			if got := w.ask(config.Allowance(config.LabelMIGConfig, "all-1g.10gb", config.AskedAgain)); got.HeldUp+got.Refused != "" {
				t.Errorf("an agent was here: %t; the plan for a user who asks again is %+v", met, got)
			}
			w.removeRequest()
			if p, err = w.agent.Preview(t.Context(), config.LabelMIGConfig, "all-2g.20gb"); err != nil || p.Reason == config.ReasonOlderRequest {
				t.Errorf("an agent was here: %t; the plan of another label is held up by %s %q, error %v", met, p.Reason, p.HeldUp, err)
			}
			w.spend(time.Minute)
		}
	})
}
