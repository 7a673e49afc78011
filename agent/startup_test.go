package agent_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// taintAsRegistered gives the node the taint of one that has just been registered.
func (w *world) taintAsRegistered() {
	w.t.Helper()
	w.edit(func(n *corev1.Node) {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: config.TaintNotReady, Effect: corev1.TaintEffectNoSchedule})
	})
}

func (w *world) keepsPodsAway() bool {
	n := w.node()
	return n.Spec.Unschedulable || len(n.Spec.Taints) > 0
}

// Promise 9: no pod comes to a fresh node before its capacity is verified, although the device plugin does.
func TestAFreshNodeIsOpenedWhenItsCapacityIsVerified(t *testing.T) {
	t.Parallel()
	for _, requested := range []string{"all-balanced", "all-disabled"} { // a new node is as the second asks already
		t.Run(requested, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.taintAsRegistered()
				w.label(requested)
				w.passes("an open node", func() bool { return !w.keepsPodsAway() })
				opened, offered := w.gpus.String(), w.node().Status.Allocatable
				w.reach(requested)
				if diff := cmp.Diff(w.gpus.String(), opened); diff != "" {
					t.Errorf("the GPUs when the node was opened (-later +then):\n%s", diff)
				}
				if diff := cmp.Diff(w.node().Status.Allocatable, offered); diff != "" || len(offered) == 0 {
					t.Errorf("the capacity when the node was opened (-later +then):\n%s", diff)
				}
			})
		})
	}
}

func TestAFreshNodeOfWhichNothingIsAskedIsOpened(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.taintAsRegistered()
		w.settle(config.ReasonNotRequested)
		w.expectGivenBack()
	})
}

// secondStartup is a startup taint that the settings may name.
const secondStartup = "startup-taint.cluster-autoscaler.kubernetes.io/gpuslice"

// registered are the startup taints of a node that was registered with every kind of them.
var registered = []corev1.Taint{
	{Key: config.TaintNotReady, Effect: corev1.TaintEffectNoSchedule},
	{Key: secondStartup, Value: "pool-a", Effect: corev1.TaintEffectNoExecute},
	{Key: secondStartup, Effect: corev1.TaintEffectPreferNoSchedule},
}

// registerWith registers the node with these taints, and the agent with the second key, or without.
func registerWith(t *testing.T, known bool, taints ...corev1.Taint) *world {
	t.Helper()
	w := newWorld(t, h100)
	w.edit(func(n *corev1.Node) { n.Spec.Taints = append(n.Spec.Taints, taints...) })
	w.setSecondStartup(known)
	return w
}

// setSecondStartup restarts the agent with settings that name the second key, or no more.
func (w *world) setSecondStartup(second bool) {
	w.settings.StartupTaint = ""
	if second {
		w.settings.StartupTaint = secondStartup
	}
	w.restart()
}

// expectTaints fails the test if the node has other taints than these, or a cordon.
func (w *world) expectTaints(taints ...corev1.Taint) {
	w.t.Helper()
	n := w.node()
	less := func(a, b corev1.Taint) bool { return a.ToString() < b.ToString() }
	if diff := cmp.Diff(taints, n.Spec.Taints, cmpopts.SortSlices(less), cmpopts.EquateEmpty()); diff != "" || n.Spec.Unschedulable {
		w.t.Errorf("unschedulable is %t, taints (-want +has):\n%s", n.Spec.Unschedulable, diff)
	}
}

// A new node that the agent cannot make ready keeps its startup taints, and takes no pod in the meantime: its GPUs are not as the label asks. The node and the diagnosis say which taints
// those are.
func TestAFreshNodeThatCannotBeMadeReadyStaysTainted(t *testing.T) {
	t.Parallel()
	taints := append(slices.Clone(registered), corev1.Taint{Key: "team", Effect: corev1.TaintEffectNoSchedule})
	for name, row := range map[string]struct {
		ask  func(w *world)
		says config.Reason
	}{
		"since the request is bad": {func(w *world) { w.label("all-9g.999gb") }, config.ReasonUnknownConfig},
		"since the change fails": {func(w *world) {
			w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
			w.label("all-balanced")
		}, config.ReasonHardwareFailure},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := registerWith(t, true, taints...)
				row.ask(w)
				settled := time.Time{}
				w.passes("an hour with the reason", func() bool {
					n := w.node()
					missing := slices.ContainsFunc(taints, func(taint corev1.Taint) bool { return !slices.Contains(n.Spec.Taints, taint) })
					if missing && !n.Spec.Unschedulable { // behind the cordon of the undo the taints make way for the device plugin
						t.Fatalf("the node takes pods, with the taints %v alone", n.Spec.Taints)
					}
					if settled.IsZero() && w.reason() == row.says && !w.hasJournal() {
						settled = time.Now()
					}
					return !settled.IsZero() && time.Since(settled) > time.Hour
				})
				w.expectTaints(taints...)
				want := "; the node keeps the taints " + config.TaintNotReady + ", " + secondStartup + " until this is mended"
				if c := w.condition(); row.says == config.ReasonUnknownConfig && !strings.HasSuffix(c.Message, want) {
					t.Errorf("the message is %q, want one that ends with %q", c.Message, want)
				}
				got := map[string]bool{}
				for _, seen := range w.diagnose(true).Taints {
					got[seen.Key] = seen.Startup
				}
				if diff := cmp.Diff(map[string]bool{config.TaintNotReady: true, secondStartup: true}, got); diff != "" {
					t.Errorf("startup taints of the diagnosis (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// Promises 8 and 9: all startup taints go together, once the capacity is verified, and exactly those come back if it is not. Wherever the agent is
// killed, the next one ends the same.
func TestAFreshNodeWithStartupTaintsOfTwoKeysIsOpenedOrIsAsItWas(t *testing.T) {
	t.Parallel()
	ended := map[string]int{}
	for _, taints := range [][]corev1.Taint{registered, registered[:1], registered[1:2], registered[1:]} {
		for _, fails := range []bool{false, true} {
			for _, after := range []bool{false, true} {
				for n, more := 1, true; more; n++ {
					synctest.Test(t, func(t *testing.T) {
						w := registerWith(t, true, taints...)
						if fails {
							w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
						}
						more = false
						w.killAtWrite(n, after, &more)
						w.label("all-balanced")
						w.passesReviving("the end", func() {}, func() bool {
							reason := config.Reason(w.condition().Reason)
							return !w.hasJournal() && (reason == config.ReasonConverged || reason == config.ReasonHardwareFailure)
						})
						if w.reason() == config.ReasonHardwareFailure {
							w.expectTaints(taints...)
						} else { // also after a failure that the agent was killed before it could note
							w.expectTaints()
						}
						ended[w.condition().Reason]++
					})
				}
			}
		}
	}
	if ended[string(config.ReasonConverged)] < 20 || ended[string(config.ReasonHardwareFailure)] < 20 {
		t.Errorf("changes have ended by %v: this does not show what it should", ended)
	}
}

// The settings come to name the second key in the middle of a change, or name it no more: behind the fence, and after it was opened.
func TestNoStartupTaintIsLostWhenTheSettingsChangeInTheMiddleOfAChange(t *testing.T) {
	t.Parallel()
	for _, opened := range []bool{false, true} {
		for _, known := range []bool{false, true} {
			for _, undone := range []bool{false, true} {
				t.Run(fmt.Sprintf("opened %t, known at first %t, undone %t", opened, known, undone), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						w := registerWith(t, known, registered...)
						w.label("all-balanced")
						w.passes("the fence", func() bool {
							return w.hasJournal() && slices.ContainsFunc(w.node().Spec.Taints, func(t corev1.Taint) bool { return t.Key == config.TaintNotReady }) != opened
						})
						w.setSecondStartup(!known)
						if undone {
							w.label("all-9g.999gb") // which no node can have: back to what was
							w.settle(config.ReasonUnknownConfig)
							w.expectTaints(registered...)
							return
						}
						w.settle(config.ReasonConverged)
						w.expectTaints()
					})
				})
			}
		}
	}
}

// The agent would put the taint there and take it away, for ever.
func TestAProfileWithTheStartupTaintOfTheSettingsIsRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.StartupTaint = "example.com/fresh"
		w.profiles(onePart + "    taints: [{key: example.com/fresh, effect: NoSchedule}]\n")
		w.profile("seven")
		c := w.settle(config.ReasonInvalidCatalog)
		if want := `profile seven: taints[0].key: "example.com/fresh" is startupTaint of the settings`; !strings.Contains(c.Message, want) {
			t.Errorf("the message is %q, want %q in it", c.Message, want)
		}
		w.expectTaints()
	})
}

// Something that sets the startup taint again at each event of the node, as OpenShift's machine controller does with those of a MachineSet, fences no
// node that is as asked, and gets no answer to each of its writes. Users read that it does, and who.
func TestAStartupTaintThatIsPutBackIsTakenAwayEverMoreRarely(t *testing.T) {
	t.Parallel()
	for _, from := range []string{"a node that is as asked", "the middle of its first change"} {
		t.Run(from, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.fillManagedFields()
				switch from {
				case "the middle of its first change":
					w.taintAsRegistered()
					w.label("all-balanced")
				default:
					w.label("all-balanced")
					w.settle(config.ReasonConverged)
				}
				put, fenced, reported := w.putsStartupTaintsBack(20 * time.Minute)
				t.Logf("put %d, fenced %d, %s", put, fenced, reported)
				if put < 6 || put > 14 {
					t.Errorf("the taint was put there %d times within 20 minutes", put)
				}
				if fenced > 1 {
					t.Errorf("%d fences", fenced)
				}
				for _, want := range []string{"the startup taint " + config.TaintNotReady, "puts it back", "spec.taints", "next removal at"} {
					if !strings.Contains(reported, want) {
						t.Errorf("the message is %q, want %q in it", reported, want)
					}
				}
				c := w.settle(config.ReasonConverged) // once nothing puts it back
				w.expectTaints()
				if strings.Contains(c.Message, "is back") {
					t.Errorf("the message is %q", c.Message)
				}
			})
		})
	}
}

// putsStartupTaintsBack runs the agent for so long beside something that sets the startup taint again each time. It returns how often that was, how many
// fences the agent has raised, and the last condition that says so.
func (w *world) putsStartupTaintsBack(d time.Duration) (put, fenced int, reported string) {
	w.t.Helper()
	began := time.Now()
	for time.Since(began) < d {
		if !slices.ContainsFunc(w.node().Spec.Taints, isStartup) {
			if put++; put > 100 {
				w.t.Fatalf("the agent has answered each time, for %s by now", time.Since(began))
			}
			w.taintAsRegistered()
		}
		pending := w.hasJournal()
		w.pass()
		if !pending && w.hasJournal() {
			fenced++
		}
		if c := w.condition(); strings.Contains(c.Message, "is back") {
			reported = c.Message
		}
	}
	return put, fenced, reported
}

func isStartup(t corev1.Taint) bool { return t.Key == config.TaintNotReady }
