package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/drain/managed"
)

// firstOnly are configs of an administrator's file that leave all GPUs but the first alone.
var firstOnly = map[string]catalog.MIGConfig{
	"first-1g": {{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
	"first-3g": {{Indices: []int{0}, MIG: true, Devices: map[string]int{"3g.40gb": 2}}},
}

// A user who removes the journal by hand may forget the taint.
func TestATaintThatNoJournalBelongsToIsTakenAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.edit(func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: config.TaintRepartitioning, Effect: corev1.TaintEffectNoSchedule}}
		})
		w.settle(config.ReasonNotRequested)
		w.expectGivenBack()
	})
}

func TestAJournalThatIsRemovedByHandInTheMiddleDoesNotKeepTheNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.startChange("all-1g.10gb")
		w.unannotate(config.AnnotationJournal)
		w.reach("all-1g.10gb")
	})
}

// Promise 6.
func TestACordonFromBeforeThatIsLiftedInTheMiddleIsNotPutBack(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		until func(w *world) bool
		then  string
	}{
		{"while the GPUs change", func(w *world) bool { return len(w.snapshot()[0].Instances) == 1 }, "all-1g.10gb"},
		{"while the capacity is awaited, before another request", func(w *world) bool {
			return w.reason() == config.ReasonAwaitingCapacity && len(w.node().Spec.Taints) == 0
		}, "all-3g.40gb"},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.cordon(true)
				w.label("all-1g.10gb")
				w.passes("the middle", func() bool { return row.until(w) })
				w.cordon(false)
				w.converge(row.then)
			})
		})
	}
}

// Promise 6.
func TestACordonThatAUserTakesOverInTheMiddleStays(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.fillManagedFields()
		w.startChange("all-1g.10gb")
		for _, want := range []struct {
			who string
			on  bool
		}{{config.FieldManager, true}, {"", false}, {administrator, true}} {
			w.cordon(want.on)
			if who, _, on := managed.Cordoner(w.node()); who != want.who || on != want.on {
				t.Fatalf("cordoned %t by %q, want %t by %q", on, who, want.on, want.who)
			}
		}
		w.settle(config.ReasonConverged)
		if !w.node().Spec.Unschedulable {
			t.Error("the administrator's cordon was lifted")
		}
		w.cordon(false)
		w.expectGivenBack()
	})
}

// replacePlugin starts another pod of the device plugin in place of the former, whatever taints there are.
func (w *world) replacePlugin() {
	w.t.Helper()
	for _, p := range w.podsIn("kube-system") {
		if err := w.client.Tracker().Delete(podResource, p.Namespace, p.Name); err != nil {
			w.t.Fatal(err)
		}
	}
	w.startPlugin(corev1.Toleration{Operator: corev1.TolerationOpExists})
}

// Promise 9. Such a plugin tolerates the fence, and has read the GPUs as they were.
func TestAPluginThatIsReplacedInTheMiddleIsRestarted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-1g.10gb")
		w.label("all-3g.40gb")
		w.untilCordoned()
		w.holdDevice(w.gpus.MIGDevice(0, 0), 4711)
		w.untilReason(config.ReasonGPUInUse)
		w.replacePlugin()
		w.spend(10 * time.Second)
		w.releaseDevice(4711)
		w.reach("all-3g.40gb")
	})
}

// The deadline is for pods of users. If only a plugin's restart is left then, the agent does not undo the change.
func TestAPluginMayEndAfterTheDeadlineForPods(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.Timeouts.Drain = 2 * time.Minute
		w.restart()
		w.converge("all-1g.10gb")
		w.grace = 30 * time.Second
		w.label("all-3g.40gb")
		w.untilCordoned()
		w.holdDevice(w.gpus.MIGDevice(1, 0), 4711)
		began := time.Now()
		w.spend(w.settings.Timeouts.Drain - 10*time.Second)
		w.releaseDevice(4711)
		w.reach("all-3g.40gb")
		if took := time.Since(began); took < w.settings.Timeouts.Drain {
			t.Errorf("the change took %s and never met the deadline", took)
		}
	})
}

func TestALabelThatIsSetBackWhileCapacityIsAwaitedIsFollowed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-1g.10gb")
		before := w.podsStarted
		w.label("all-enabled") // destroys alone
		w.passes("a new plugin that has nothing to offer", func() bool {
			return w.reason() == config.ReasonAwaitingCapacity && w.podsStarted > before && len(w.offered) == 0
		})
		w.converge("all-1g.10gb") // creates alone
	})
}

// Promise 9. One process makes many changes.
func TestThePluginHasItsTimeInEachChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		for _, name := range []string{"all-1g.10gb", "all-3g.40gb"} {
			w.startChange(name)
			w.pluginBroken = true
			w.passes("a plugin with nothing to offer", func() bool {
				return w.reason() == config.ReasonAwaitingCapacity && len(w.offered) == 0
			})
			w.spend(w.settings.Timeouts.Capacity - time.Minute)
			w.pluginBroken = false
			w.offered = w.devices()
			w.reach(name)
		}
	})
}

// Promise 9. Kubelet has been seen to forget a plugin that had registered. A full budget must not take the plugin its restart, nor what makes
// room for it its notice.
func TestAPluginThatABudgetKeepsIsRestartedWhenThereIsRoom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.startChange("all-1g.10gb")
		w.pluginBroken = true
		w.passes("a plugin with nothing to offer", func() bool {
			return w.reason() == config.ReasonAwaitingCapacity && len(w.offered) == 0
		})
		full := true
		w.client.PrependReactor("create", "pods", func(action k8stesting.Action) (bool, runtime.Object, error) {
			return full && action.GetSubresource() == "eviction", nil, apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 10)
		})
		w.spend(w.settings.Timeouts.Capacity/2 + 10*time.Second)
		if c := w.condition(); c.Reason != string(config.ReasonEvictionBlocked) || !strings.Contains(c.Message, "until") && !strings.Contains(c.Message, " at 2") {
			t.Errorf("the node says %s: %s; want that the plugin cannot be evicted, and until when that is waited for", c.Reason, c.Message)
		}
		before := w.podsStarted
		full, w.pluginBroken = false, false
		w.reach("all-1g.10gb")
		if w.podsStarted != before+1 {
			t.Errorf("%d plugins were started since there is room, want 1", w.podsStarted-before)
		}
	})
}

// Promise 10. The agent cannot prove after an undo what the plugin did not offer before the change.
func TestANodeWhosePluginNeverWorkedIsGivenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.pluginBroken = true
		w.turn()
		before := w.gpus.String()
		w.label("all-1g.10gb")
		w.settle(config.ReasonCapacityMismatch)
		w.expectGivenBack()
		if state := w.node().Labels[config.LabelMIGConfigState]; state != string(config.StateFailed) {
			t.Errorf("state label is %q, want failed", state)
		}
		w.expectGPUs(before)
	})
}

// Promise 10.
func TestAFileThatMayNoLongerBeReadDoesNotKeepTheNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.setConfigs(firstOnly)
		before := w.gpus.String()
		w.startChange("first-1g")
		w.client.PrependReactor("get", "configmaps", func(k8stesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(corev1.Resource("configmaps"), "custom", nil)
		})
		w.settle(config.ReasonInvalidCatalog)
		w.expectGivenBack()
		w.expectGPUs(before)
	})
}

// Promise 10. The agent deletes no pod for an undo, so that may take as long as a pod does: the condition says since when, and names the pod.
func TestAnUndoNamesThePodThatKeepsIt(t *testing.T) {
	t.Parallel()
	for name, keep := range map[string]func(w *world){
		"a budget": func(w *world) { w.budgetKeepsPod("late") },
		"a pod that does not end": func(w *world) {
			w.grace = 24 * time.Hour
			if err := w.terminate("team", "late"); err != nil {
				w.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.startChange("all-balanced")
				w.turn()
				w.pod("late", w.snapshot()[0].Instances[0].Devices[0].UUID)
				keep(w)
				w.label("")
				w.passes("the way back", func() bool { return strings.Contains(w.condition().Message, "team/late") })
				waits := time.Now()
				w.spend(70 * time.Minute)
				c := w.condition()
				for _, want := range []string{
					"undoing the change: ", "team/late", "; since " + waits.UTC().Format("2006-01-02 15:04"),
					"an undo has no deadline and deletes no pod", "kubectl describe pod",
				} {
					if !strings.Contains(c.Message, want) {
						t.Errorf("it does not say %q: %s", want, c.Message)
					}
				}
				if !w.runs("late") || !w.hasJournal() {
					t.Error("the way back has not waited for the pod")
				}
				w.restart()
				w.spend(minutes)
				if again := w.condition().Message; again != c.Message {
					t.Errorf("the next agent says\n%s\nand not\n%s", again, c.Message)
				}
			})
		})
	}
}

// The state label of a withdrawn request goes: the node is as it was before the request.
func TestAFailureDoesNotStayOnANodeOfWhichNothingIsAsked(t *testing.T) {
	t.Parallel()
	state := func(w *world) config.State { return config.State(w.node().Labels[config.LabelMIGConfigState]) }
	for name, row := range map[string]struct {
		fail func(w *world)
		want config.State // long after the label was removed
	}{
		"of a request that was withdrawn in the middle": {func(w *world) { w.startChange("all-balanced"); w.label("") }, ""},
		"of a request that cannot be":                   {func(w *world) { w.label("no-such-config"); w.settle(config.ReasonUnknownConfig); w.label("") }, ""},
		"of another request, which is asked for":        {func(w *world) { w.label("no-such-config"); w.settle(config.ReasonUnknownConfig) }, config.StateFailed},
		"which is no failure":                           {func(w *world) { w.converge("all-balanced"); w.label("") }, config.StateSuccess},
		"that a mig-manager reports": {func(w *world) {
			w.label("no-such-config")
			w.settle(config.ReasonUnknownConfig)
			w.pod("mig-manager", "", func(p *corev1.Pod) {
				p.Labels, p.OwnerReferences = map[string]string{"app": "nvidia-mig-manager"}, ofDaemonSet("mig-manager")
			})
			w.label("")
		}, config.StateFailed},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				row.fail(w)
				for w.node().Labels[config.LabelMIGConfig] == "" && w.reason() != config.ReasonNotRequested {
					w.turn()
					<-time.After(min(w.agent.Pass(t.Context()), time.Second))
				}
				first := config.StateFailed
				if row.want == config.StateSuccess {
					first = row.want
				}
				<-time.After(w.settings.NodeHeartbeat - time.Minute)
				w.restart() // a new process does not start the time from zero
				w.agent.Pass(t.Context())
				if got := state(w); got != first {
					t.Errorf("state label is %q after the change, want %q", got, first)
				}
				w.spend(2 * w.settings.NodeHeartbeat)
				if got := state(w); got != row.want {
					t.Errorf("state label is %q in the end, want %q", got, row.want)
				}
				w.expectGivenBack()
			})
		})
	}
}
