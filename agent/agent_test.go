package agent_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

const h100 = "gpus:\n- model: H100-80GB\n  count: 2\n"

// expectGPUs fails the test unless the GPUs are as they were.
func (w *world) expectGPUs(before string) {
	w.t.Helper()
	if diff := cmp.Diff(before, w.gpus.String()); diff != "" {
		w.t.Errorf("the GPUs are not as they were (-before +after); the node says %s: %s\n%s", w.reason(), w.condition().Message, diff)
	}
}

// Promise 8: after each pass another agent process goes on, which knows nothing.
func TestAnAgentThatForgetsEverythingAfterEachPassConverges(t *testing.T) {
	t.Parallel()
	for name, operands := range map[string]map[string]string{
		"beside a plugin": {},
		"beside operands": {config.LabelDevicePlugin: "true", labelDCGM: "true", labelExporter: "true", labelGFD: "false"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.deployOperands(operands)
				w.label("all-balanced")
				w.passes("verified capacity", func() bool {
					w.restartUnlessVerifying()
					return w.done("all-balanced")()
				})
				w.expectGivenBack()
				if diff := cmp.Diff(operands, w.operandLabels()); diff != "" {
					t.Errorf("labels (-before +after):\n%s", diff)
				}
			})
		})
	}
}

// Promise 10.
func TestAHardwareFailureBringsBackWhatWas(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.label("all-3g.40gb")
		w.settle(config.ReasonConverged)
		before := w.gpus.String()
		if err := w.gpus.Fail(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Unknown, Times: 10}); err != nil {
			t.Fatal(err)
		}
		w.label("all-1g.10gb")
		c := w.settle(config.ReasonHardwareFailure)
		w.expectGivenBack()
		w.expectGPUs(before)
		if state := w.node().Labels[config.LabelMIGConfigState]; state != string(config.StateFailed) {
			t.Errorf("state label is %q, want failed", state)
		}
		if !strings.Contains(c.Message, "set it again") {
			t.Errorf("the message does not say how to try again: %s", c.Message)
		}

		// The next agent process does not disturb the node again for the same request.
		w.restart()
		calls := w.gpus.Calls()
		for range 10 {
			w.turn()
			<-time.After(w.agent.Pass(t.Context()))
		}
		if diff := cmp.Diff(calls, w.gpus.Calls()); diff != "" {
			t.Errorf("the failed request was tried again (-before +after):\n%s", diff)
		}

		// Nor does it when the driver has been away since.
		if err := w.gpus.Fail(gpusim.Init, gpusim.Fault{Return: gpusim.DriverNotLoaded, Times: 4}); err != nil {
			t.Fatal(err)
		}
		w.restart()
		w.untilReason(config.ReasonDriverNotLoaded)
		w.settle(config.ReasonHardwareFailure)
		if diff := cmp.Diff(calls, w.gpus.Calls()); diff != "" {
			t.Errorf("the failed request was tried again after the driver came back (-before +after):\n%s", diff)
		}

		// It tries the request again once a user has withdrawn it and set it again.
		w.label("")
		w.settle(config.ReasonNotRequested)
		w.label("all-1g.10gb")
		w.settle(config.ReasonConverged)
		w.expectGivenBack()
	})
}

// Promises 9 and 10: a plugin that shows nothing is no success.
func TestCapacityThatNeverComesIsUndone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.label("all-disabled")
		w.settle(config.ReasonConverged)
		before := w.gpus.String()
		w.pluginBroken = true
		w.label("all-1g.10gb")
		w.passes("undo", func() bool {
			return strings.Contains(w.node().Annotations[config.AnnotationJournal], `"undo"`)
		})
		w.pluginBroken = false
		w.settle(config.ReasonCapacityMismatch)
		w.expectGivenBack()
		w.expectGPUs(before)
	})
}

func TestANewLabelInTheMiddleIsFollowedFromWhereTheNodeIs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.startChange("all-balanced")
		w.label("all-3g.40gb")
		w.passes("the other config", func() bool {
			if w.reason() == config.ReasonRollingBack {
				t.Fatal("the change is undone first")
			}
			return w.done("all-3g.40gb")()
		})
		w.expectGivenBack()
	})
}

func TestNonsenseInTheMiddleIsUndone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		before := w.gpus.String()
		w.startChange("all-balanced")
		w.label("nonsense")
		w.settle(config.ReasonUnknownConfig)
		w.expectGivenBack()
		w.expectGPUs(before)
	})
}

// Promise 6. Users ask first which user or tool has cordoned a node, and since when.
func TestACordonFromBeforeStays(t *testing.T) {
	t.Parallel()
	for name, attributed := range map[string]bool{"and has no owner": false, "and its owner is named": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				if attributed {
					w.fillManagedFields()
				}
				w.cordon(true)
				w.patched(func(patch string) error {
					if strings.Contains(patch, `"unschedulable":null`) || strings.Contains(patch, `"unschedulable":false`) {
						t.Errorf("the cordon is lifted: %s", patch)
					}
					return nil
				})
				w.label("all-balanced")
				c := w.settle(config.ReasonConverged)
				if named := strings.Contains(c.Message, "cordoned by "+administrator+" since 2000-01-01"); named != attributed {
					t.Errorf("the message says whose the cordon is: %t: %s", named, c.Message)
				}
				if !w.node().Spec.Unschedulable {
					t.Error("the cordon was lifted")
				}
			})
		})
	}
}

// Promises 3 and 5: the agent cannot evict processes that belong to no pod, and says which it waits for, before the node is fenced.
func TestAProcessOfNoPodIsWaitedFor(t *testing.T) {
	t.Parallel()
	const session = "0::/user.slice/user-1000.slice/session-3.scope"
	for name, row := range map[string]struct {
		begin func(w *world, gpu string)
		says  string
	}{
		"which the process table names": {func(w *world, gpu string) {
			w.startGPUProcess(gpu, 4711, "python", session)
		}, "GPU 0 by pid 4711 python of session-3.scope"},
		"which the process table does not know": {func(w *world, gpu string) { w.holdDevice(gpu, 4711) }, "GPU 0 by pid 4711 (reported by NVML"},
		"on a GPU that a pod has too": {func(w *world, gpu string) {
			w.pod("holder", gpu)
			w.startGPUProcess(gpu, 4711, "python", session)
		}, "GPU 0 by pid 4711 python of session-3.scope"},
		"of a container of no pod, on a GPU that a pod has too": {func(w *world, gpu string) {
			w.pod("holder", gpu)
			w.startGPUProcess(gpu, 4711, "python", "0::/system.slice/docker-"+strings.Repeat("b", 64)+".scope")
		}, "GPU 0 by pid 4711 python (container bbbbbbbbbbbb)"},
		"of a unit that systemd does not know": {func(w *world, gpu string) {
			w.startGPUProcess(gpu, 4711, "nv-hostengine", "0::/system.slice/nvidia-dcgm.service")
		}, "GPU 0 by pid 4711 nv-hostengine of nvidia-dcgm.service"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.turn()
				row.begin(w, string(w.snapshot()[0].UUID))
				if p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "all-balanced"); err != nil || p.Reason != config.ReasonGPUInUse || !strings.Contains(p.HeldUp, row.says) {
					t.Errorf("the plan says %s: %s, %v", p.Reason, p.HeldUp, err)
				}
				held := len(w.podsIn("team"))
				cordons := w.recordCordons()
				w.label("all-balanced")
				w.untilReason(config.ReasonGPUInUse)
				w.spend(minutes)
				if c := w.condition(); len(*cordons) > 0 || w.hasJournal() || len(w.podsIn("team")) != held || !strings.Contains(c.Message, row.says) {
					t.Errorf("cordoned %d times, a journal: %t, %d of %d pods run; the node says %s", len(*cordons), w.hasJournal(), len(w.podsIn("team")), held, c.Message)
				}
				w.endGPUProcess(4711)
				w.reach("all-balanced")
			})
		})
	}
}

// Programs that end before the agent finds them in the process table have another pid each time. A tenant's can do so for ever.
func TestProcessesThatEndAtOnceKeepNoChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		gpu := string(w.snapshot()[0].UUID)
		pid := 4711
		w.holdDevice(gpu, pid)
		w.label("all-balanced")
		w.untilReason(config.ReasonGPUInUse)
		began := time.Now()
		for !w.node().Spec.Unschedulable && time.Since(began) < time.Minute {
			w.releaseDevice(pid)
			pid++
			w.holdDevice(gpu, pid)
			w.pass()
		}
		if !w.node().Spec.Unschedulable {
			t.Errorf("after %s the node says %s", time.Since(began), w.condition().Message)
		}
		w.releaseDevice(pid)
		w.reach("all-balanced")
	})
}

func TestADriverThatIsAwayIsWaitedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.label("all-balanced")
		if err := w.gpus.Fail(gpusim.Init, gpusim.Fault{Return: gpusim.DriverNotLoaded, Times: 3}); err != nil {
			t.Fatal(err)
		}
		w.restart()
		w.untilReason(config.ReasonDriverNotLoaded)
		if c := w.condition(); c.Status != corev1.ConditionUnknown {
			t.Errorf("condition is %s, want Unknown", c.Status)
		}
		w.settle(config.ReasonConverged)
	})
}

// Promise 13: a condition, taint, label and annotation of other programs stay as they are through a whole change.
func TestForeignKeysAreLeftAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		taint := corev1.Taint{Key: "nvidia.com/gpu", Effect: corev1.TaintEffectNoExecute}
		w.tolerations = []corev1.Toleration{{Key: taint.Key, Operator: corev1.TolerationOpExists}}
		condition := corev1.NodeCondition{Type: "GpuXidWatch", Status: corev1.ConditionFalse, Reason: "Fine"}
		w.edit(func(n *corev1.Node) {
			n.Labels = map[string]string{"team": "a"}
			n.Annotations = map[string]string{"note": "b"}
			n.Spec.Taints = []corev1.Taint{taint}
			n.Status.Conditions = []corev1.NodeCondition{condition}
		})
		w.label("all-balanced")
		w.passes("the end", func() bool {
			n := w.node()
			if n.Labels["team"] != "a" || n.Annotations["note"] != "b" || !slices.Contains(n.Spec.Taints, taint) || !slices.Contains(n.Status.Conditions, condition) {
				t.Fatalf("labels %v, annotations %v, taints %v, conditions %v", n.Labels, n.Annotations, n.Spec.Taints, n.Status.Conditions)
			}
			return w.done("all-balanced")()
		})
		w.expectGivenBack()
	})
}

// Promise 10: a process that comes behind the fence, and that no user ends, does not keep the node for ever.
func TestAProcessThatStaysPastTheDeadlineIsNoReasonToKeepTheNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		before := w.gpus.String()
		w.label("all-balanced")
		w.untilCordoned()
		w.holdDevice(string(w.snapshot()[1].UUID), 4711)
		began := time.Now()
		w.settle(config.ReasonGPUInUse)
		w.expectGivenBack()
		if took := time.Since(began); took < w.settings.Timeouts.Drain || took > w.settings.Timeouts.Drain+5*time.Minute {
			t.Errorf("given back after %s, want %s", took, w.settings.Timeouts.Drain)
		}
		w.releaseDevice(4711)
		w.expectGPUs(before)
	})
}
