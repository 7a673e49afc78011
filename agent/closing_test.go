package agent_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
)

// newDrainingWorld is a world of NVIDIA's DRA driver whose agent closes devices while pods leave. Config "seven" cuts GPU 0 again, from which pod "leaves" has
// to leave, and pod "stays" is on GPU 1.
func newDrainingWorld(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, h100)
	w.settings.Drain.Fence = config.DrainFenceDevices
	w.noPlugin, w.draDriver = true, true
	w.restart()
	w.setConfigs(map[string]catalog.MIGConfig{
		"three": {{All: true, MIG: true, Devices: map[string]int{"3g.40gb": 2}}},
		"seven": {{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}, {Indices: []int{1}, MIG: true, Devices: map[string]int{"3g.40gb": 2}}},
	})
	w.spend(time.Minute)
	w.converge("three")
	w.podWithClaim("leaves", "gpu-0-mig-3g40gb-0")
	w.podWithClaim("stays", "gpu-1-mig-3g40gb-0")
	return w
}

// drainsByRules reports whether claims are kept from GPU 0 alone, and the node takes pods.
func (w *world) drainsByRules() bool {
	w.t.Helper()
	return slices.Equal(w.closedDevices(), []string{"gpu-0-mig-3g40gb-0 gpuslice.io/repartitioning", "gpu-0-mig-3g40gb-4 gpuslice.io/repartitioning"}) && w.takesPods()
}

// takesPods reports whether neither cordon nor taint keeps pods from the node.
func (w *world) takesPods() bool {
	w.t.Helper()
	n := w.node()
	return !n.Spec.Unschedulable && len(n.Spec.Taints) == 0
}

// gpu0Changed reports whether GPU 0 is not as it was. The node is fenced then, until it is given back.
func (w *world) gpu0Changed() bool {
	w.t.Helper()
	is := w.snapshot()[0].Geometry().String() != "3g.40gb@0 3g.40gb@4"
	if is && w.hasJournal() && !w.node().Spec.Unschedulable {
		w.t.Error("a GPU is cut while the node takes pods")
	}
	return is
}

// expectNothingLeft waits until the change is done, and fails the test if anything of it is left.
func (w *world) expectNothingLeft(name string) {
	w.t.Helper()
	w.passes(name, func() bool { return w.done(name)() && len(w.closedDevices()) == 0 })
	w.expectGivenBack()
	if w.runs("leaves") || !w.runs("stays") {
		w.t.Errorf("the pod on what goes runs: %t, the other one: %t", w.runs("leaves"), w.runs("stays"))
	}
}

// The node's other GPUs are given to claims while pods leave, and the node is closed for the cut alone.
func TestOtherGPUsAreGivenToClaimsWhilePodsLeave(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newDrainingWorld(t)
		w.grace = 40 * time.Minute
		events := w.restartWithEvents()
		w.label("seven")
		w.passes("the eviction", func() bool { return w.isTerminating("leaves") })
		began := time.Now()
		if !w.drainsByRules() {
			t.Errorf("closed are %v, the node takes pods: %t", w.closedDevices(), w.takesPods())
		}
		if n := heard(events, string(config.ReasonFencing), "closed gpu-0-mig-3g40gb-0, gpu-0-mig-3g40gb-4 to claims for the change to seven"); n != 1 {
			t.Errorf("%d Events say what is closed", n)
		}
		if value := w.node().Annotations["cluster-autoscaler.kubernetes.io/scale-down-disabled"]; value != "true" {
			t.Errorf("an autoscaler may remove the node: %q", value)
		}
		w.podWithClaim("late", "gpu-1-mig-3g40gb-4")
		w.passes("the cut", func() bool { return w.gpu0Changed() || time.Since(began) < 39*time.Minute && !w.drainsByRules() })
		if left := time.Since(began); left < 39*time.Minute {
			t.Errorf("the node was closed %s after the eviction, and its pod ends after 40 minutes", left)
		}
		w.expectNothingLeft("seven")
		if !w.runs("late") {
			t.Error("a pod that came to the other GPU had to leave")
		}
	})
}

// Promise 8, with an agent that forgets everything after each pass.
func TestAnAgentThatForgetsEverythingClosesDevices(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newDrainingWorld(t)
		w.grace = 10 * time.Minute
		w.label("seven")
		drained := false
		w.passes("seven", func() bool {
			w.gpu0Changed()
			drained = drained || w.drainsByRules()
			if w.hasJournal() { // a process before that has a slot of its own
				w.restartUnlessVerifying()
			}
			return w.done("seven")() && len(w.closedDevices()) == 0
		})
		if !drained {
			t.Error("the node was closed while its pods left")
		}
		w.expectNothingLeft("seven")
	})
}

// Killed at each of its writes, before the API server has it or right after, an agent leaves what the next one finishes.
func TestAnAgentThatIsKilledLeavesNoRule(t *testing.T) {
	t.Parallel()
	for _, after := range []bool{false, true} {
		last := false
		for at := 0; !last; at++ {
			t.Run(fmt.Sprintf("write %d, after it %t", at, after), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newDrainingWorld(t)
					w.grace = time.Minute
					w.label("seven")
					writes, dead := 0, false
					w.client.PrependReactor("*", "*", func(a k8stesting.Action) (bool, runtime.Object, error) {
						ofRule := a.GetResource().Resource == "devicetaintrules" && a.GetVerb() != "list"
						now := !dead && (ofRule || a.Matches("patch", "nodes"))
						if now {
							writes++
						}
						now = now && writes > at
						dead = dead || now
						return dead && !(now && after), nil, errors.New("the agent is dead")
					})
					w.passes("seven", func() bool { return dead || w.done("seven")() && len(w.closedDevices()) == 0 })
					last = !dead
					w.client.ReactionChain = w.client.ReactionChain[1:]
					w.restart()
					w.expectNothingLeft("seven")
				})
			})
			if at > 100 {
				t.Fatal("it writes without an end")
			}
		}
	}
}

// However the drain ends, nothing of it is left: a node that was never cordoned, and no rule.
func TestNothingIsLeftOfADrainThatEnds(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(w *world){
		"it is cancelled":      func(w *world) { w.label("three") },
		"the label is removed": func(w *world) { w.label("") },
		"the deadline is over": func(*world) {},
		"the label is removed while no agent runs": func(w *world) {
			w.label("")
			w.restart()
		},
		"by hand": func(w *world) {
			w.label("")
			w.grace = time.Minute // the driver is started again, as at each end of a change
			w.recoverByHand()
		},
		"with the setting": func(w *world) {
			w.label("")
			w.settings.Drain.Fence = config.DrainFenceNode
			w.restart()
		},
		"by a lost journal": func(w *world) {
			w.label("")
			w.disk.text = nil
			w.edit(func(n *corev1.Node) { delete(n.Annotations, config.AnnotationJournal) })
			w.restart()
		},
		"by a driver's upgrade": func(w *world) {
			w.label("")
			w.set("nvidia.com/gpu.deploy.dcgm", "paused-for-driver-upgrade")
			w.spend(time.Minute)
			w.unset("nvidia.com/gpu.deploy.dcgm")
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newDrainingWorld(t)
				w.grace = 3 * time.Hour
				cut := w.gpus.String()
				w.patched(func(patch string) error {
					if strings.Contains(patch, "unschedulable") {
						t.Error("the node was cordoned")
					}
					return nil
				})
				w.label("seven")
				w.passes("the eviction", func() bool { return w.isTerminating("leaves") })
				if !w.drainsByRules() {
					t.Errorf("closed are %v, the node takes pods: %t", w.closedDevices(), w.takesPods())
				}
				end(w)
				w.passes("the end", func() bool { return !w.hasJournal() && len(w.closedDevices()) == 0 })
				w.spend(time.Minute)
				w.expectGivenBack()
				w.expectGPUs(cut)
			})
		})
	}
}

// Where no rule can be made, the node is fenced as without the setting, and one Event says so.
func TestTheNodeIsFencedWhereDevicesCannotBeClosed(t *testing.T) {
	t.Parallel()
	kind := resourcev1.Resource("devicetaintrules")
	for name, verb := range map[string]string{
		"absent": "*", "forbidden": "*", "only to be read": "create", "refused": "create", "failing": "*", "failing to create": "create", "a name is taken": "create",
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newDrainingWorld(t)
				w.grace = 10 * time.Minute
				var says error = apierrors.NewForbidden(kind, "", errors.New("no right"))
				reason := config.ReasonMissingRight
				switch name {
				case "absent":
					says = apierrors.NewNotFound(kind, "")
				case "refused": // by an admission webhook or policy
					says, reason = apierrors.NewInvalid(schema.GroupKind{Group: kind.Group, Kind: "DeviceTaintRule"}, "", nil), config.ReasonStepFailed
				case "failing", "failing to create":
					says, reason = apierrors.NewInternalError(errors.New("down")), config.ReasonStepFailed
				case "a name is taken":
					says, reason = apierrors.NewAlreadyExists(kind, "taken"), config.ReasonStepFailed
				}
				w.client.PrependReactor(verb, "devicetaintrules", func(a k8stesting.Action) (bool, runtime.Object, error) {
					if made, is := a.(k8stesting.CreateAction); is && name == "a name is taken" {
						rule, is := made.GetObject().(*resourcev1.DeviceTaintRule)
						return !is || *rule.Spec.DeviceSelector.Device == "gpu-0-mig-3g40gb-0", nil, says
					}
					return true, nil, says
				})
				events := w.restartWithEvents()
				w.label("seven")
				w.passes("the eviction", func() bool { return w.isTerminating("leaves") })
				if !w.node().Spec.Unschedulable {
					t.Error("the node takes pods, and no rule keeps claims from what goes")
				}
				if n := heard(events, string(reason), "drain.fence"); n != 1 {
					t.Errorf("%d Events", n)
				}
				w.client.ReactionChain = w.client.ReactionChain[1:]
				w.expectNothingLeft("seven")
			})
		})
	}
}

// A device of a GPU that stays, and that the driver has tainted, holds up no change of another GPU: the node says so once it is open again.
func TestATaintOnAGPUThatStaysUndoesNoChange(t *testing.T) {
	t.Parallel()
	for _, before := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			w := newDrainingWorld(t)
			taint := func() {
				for _, s := range w.published {
					for i := range s.Spec.Devices {
						if d := &s.Spec.Devices[i]; strings.HasPrefix(d.Name, "gpu-1-") {
							d.Taints = []resourcev1.DeviceTaint{{Key: "gpu.nvidia.com/xid", Effect: resourcev1.DeviceTaintEffectNoSchedule}}
						}
					}
				}
			}
			if before {
				taint()
				w.spend(time.Minute)
			}
			w.label("seven")
			w.passes("the change", func() bool { taint(); return w.gpu0Changed() })
			w.passes("the release", func() bool { taint(); return !w.hasJournal() })
			w.passes("what the taint takes", func() bool { taint(); return w.reason() == config.ReasonCapacityMismatch })
			if !w.gpu0Changed() || !w.takesPods() || !w.runs("stays") {
				t.Errorf("tainted before %t: GPU 0 is changed: %t, the node takes pods: %t, the pod on GPU 1 runs: %t; the node says %s",
					before, w.gpu0Changed(), w.takesPods(), w.runs("stays"), w.condition().Message)
			}
		})
	}
}

// Where the slices and the GPUs disagree, no rule is sure to keep claims from what goes: the node is fenced.
func TestTheNodeIsFencedWhereTheSlicesDisagreeWithTheGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newDrainingWorld(t)
		w.grace = 10 * time.Minute
		gpu := w.snapshot()[1]
		if err := w.gpus.Driver().Destroy(t.Context(), gpu.UUID, gpu.Instances[1].Placed); err != nil {
			t.Fatal(err)
		}
		rules := w.countRuleRequests("create")
		w.label("seven")
		w.passes("the eviction", func() bool { return w.isTerminating("leaves") })
		if !w.node().Spec.Unschedulable || *rules > 0 {
			t.Errorf("the node is cordoned: %t, and %d devices are closed, by slices that have a device which is gone", w.node().Spec.Unschedulable, *rules)
		}
		w.expectNothingLeft("seven")
	})
}

// A rule that a user deletes is made again, and a label for what cannot be closed fences the node.
func TestWhatClosesDevicesFollowsUsersAndLabels(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newDrainingWorld(t)
		w.grace = 30 * time.Minute
		events := w.restartWithEvents()
		w.label("seven")
		w.passes("the eviction", func() bool { return w.isTerminating("leaves") })
		if err := w.client.ResourceV1().DeviceTaintRules().DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		w.spend(time.Minute)
		if !w.drainsByRules() {
			t.Errorf("a user has deleted the rules, and closed are %v", w.closedDevices())
		}
		if n := heard(events, string(config.ReasonGPUUnhealthy)); n > 0 {
			t.Errorf("%d Events say of GPUs which are well that they are not", n)
		}
		w.label("all-1g.10gb") // of both GPUs
		w.spend(time.Minute)
		if n := w.node(); !n.Spec.Unschedulable || len(w.closedDevices()) > 0 || !w.hasJournal() {
			t.Errorf("the node is cordoned: %t, and closed are %v", n.Spec.Unschedulable, w.closedDevices())
		}
		w.passes("all-1g.10gb", func() bool { return w.done("all-1g.10gb")() })
		w.expectGivenBack()
	})
}

// A preview changes nothing, and sends no Event: one about rules that may not be listed is for the agent itself to send.
func TestAPreviewSendsNoEvent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newDrainingWorld(t)
		w.grace = 40 * time.Minute
		w.label("seven")
		w.passes("the eviction", func() bool { return w.isTerminating("leaves") })
		if len(w.closedDevices()) == 0 {
			t.Fatal("no device is closed, so that no rule has to be listed")
		}
		w.client.PrependReactor("*", "devicetaintrules", func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(resourcev1.Resource("devicetaintrules"), "", errors.New("no right"))
		})
		events := w.restartWithEvents() // a process of its own, as that of gpuslice-agent plan is
		if _, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "three"); err != nil {
			t.Fatal(err)
		}
		for len(events) > 0 {
			t.Errorf("the preview has sent an Event: %s", <-events)
		}
	})
}
