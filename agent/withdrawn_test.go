package agent_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
)

// managedConfigs are configs of the device plugin that its config manager gives it, each by a key of this name.
var managedConfigs = map[string]string{
	"whole":     "version: v1\nflags: {migStrategy: none}\n",
	"two":       "version: v1\nflags: {migStrategy: none}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n",
	"four":      "version: v1\nflags: {migStrategy: none}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
	"renamed":   "version: v1\nflags: {migStrategy: none}\nsharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
	"single":    "version: v1\nflags: {migStrategy: single}\n",
	"mixed":     "version: v1\nflags: {migStrategy: mixed}\n",
	"mixed-two": "version: v1\nflags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]}}\n",
}

// withdrawal is a change of the device plugin's config that its config manager makes before the agent observes it.
type withdrawal struct {
	from, to string   // keys of managedConfigs
	mig      string   // how the GPUs are cut; empty for not at all
	leave    []string // pods by what they were given: "gpu.shared::0" has the first replica of the first device
	stay     []string
}

var withdrawals = map[string]withdrawal{
	"another name of the resource":   {from: "renamed", to: "whole", leave: []string{"gpu.shared::0", "gpu.shared::3"}},
	"replicas where none were":       {from: "whole", to: "two", leave: []string{"gpu"}},
	"replicas by another name":       {from: "whole", to: "renamed", leave: []string{"gpu"}},
	"fewer replicas":                 {from: "four", to: "two", leave: []string{"gpu::2", "gpu::3"}, stay: []string{"gpu::0", "gpu::1"}},
	"no replicas":                    {from: "four", to: "whole", leave: []string{"gpu::0", "gpu::1"}},
	"more replicas":                  {from: "two", to: "four", stay: []string{"gpu::0", "gpu::1"}},
	"MIG devices as GPUs":            {from: "mixed", to: "single", mig: "all-1g.10gb", leave: []string{"mig-1g.10gb"}},
	"MIG devices by their profile":   {from: "single", to: "mixed", mig: "all-1g.10gb", leave: []string{"gpu"}},
	"MIG devices that become shared": {from: "mixed", to: "mixed-two", mig: "all-1g.10gb", leave: []string{"mig-1g.10gb"}},
	"MIG devices shared no more":     {from: "mixed-two", to: "mixed", mig: "all-1g.10gb", leave: []string{"mig-1g.10gb::0", "mig-1g.10gb::1"}},
}

// ways are those in which a config manager gets another config: each begins with the first, and returns what gives it the second, and which key the
// node's label names then.
var ways = map[string]func(w *world, c withdrawal) (change func(), before, after string){
	"by the label": func(w *world, c withdrawal) (func(), string, string) {
		w.set(config.LabelDevicePluginConfig, c.from)
		return func() { w.set(config.LabelDevicePluginConfig, c.to) }, c.from, c.to
	},
	"by the operator's default": func(w *world, c withdrawal) (func(), string, string) {
		w.setManagedDefault(c.from)
		return func() { w.setManagedDefault(c.to) }, "", ""
	},
	"by the edit of a key": func(w *world, c withdrawal) (func(), string, string) {
		w.setManagedKey("edited", c.from)
		w.set(config.LabelDevicePluginConfig, "edited")
		return func() { w.setManagedKey("edited", c.to) }, "edited", "edited"
	},
}

// asks returns what is asked for with this key, or without one.
func (w withdrawal) asks(key string) string {
	geometry := w.mig
	if geometry == "" && key == "" {
		geometry = "all-disabled"
	}
	return strings.Trim(geometry+" + "+key, " +")
}

// setManagedDefault makes one of managedConfigs the config manager's default.
func (w *world) setManagedDefault(name string) {
	w.t.Helper()
	w.setManagedKey("default", name)
	c, err := deviceplugin.Parse([]byte(managedConfigs[name]))
	if err != nil {
		w.t.Fatal(err)
	}
	w.set(config.LabelMIGStrategy, string(c.MIGStrategy)) // by GPU feature discovery
}

// setManagedKey gives a key of the config manager's ConfigMap the text of one of managedConfigs.
func (w *world) setManagedKey(key, name string) {
	w.t.Helper()
	keys := w.pluginConfigs()
	keys[key] = managedConfigs[name]
	w.setPluginConfigs("kube-system", "plugin-configs", keys)
}

// managedWorld is a node of two GPUs whose device plugin has a config manager, which knows managedConfigs.
func managedWorld(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, h100)
	w.deployConfigManager()
	for name := range managedConfigs {
		w.setManagedKey(name, name)
	}
	return w
}

// podOnFirstDevice runs a pod that has the first device, as "gpu.shared::3" says.
func (w *world) podOnFirstDevice(as string, change ...func(*corev1.Pod)) {
	w.t.Helper()
	name, replica, shared := strings.Cut(as, "::")
	name = "nvidia.com/" + name
	ids := w.offered[name]
	if len(ids) == 0 {
		w.t.Fatalf("kubelet offers no %s: %s", name, w.advertised())
	}
	id, _, _ := strings.Cut(ids[0], "::")
	if shared {
		id += "::" + replica
	}
	if !slices.Contains(ids, id) {
		w.t.Fatalf("kubelet offers no %s: %v", id, ids)
	}
	w.pod(as, id, append([]func(*corev1.Pod){func(p *corev1.Pod) {
		metav1.SetMetaDataAnnotation(&p.ObjectMeta, "resource", name)
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(name): resource.MustParse("1")}
	}}, change...)...)
}

// podsWithWithdrawn lists the pods that hold what kubelet gives out no more.
func (w *world) podsWithWithdrawn() []string {
	var out []string
	for _, p := range w.podsIn("team") {
		if !slices.Contains(w.offered[p.Annotations["resource"]], p.Annotations["device"]) {
			out = append(out, p.Name)
		}
	}
	return out
}

// neverTrueWhileWithdrawn is passes, and fails the test if the node is True after a pass while a pod holds what kubelet gives out no more.
func (w *world) neverTrueWhileWithdrawn(what string, stop func() bool) {
	w.t.Helper()
	passed := false
	w.passes(what, func() bool {
		if held, c := w.podsWithWithdrawn(), w.condition(); passed && len(held) > 0 && c.Status == corev1.ConditionTrue {
			w.t.Fatalf("the node says True while %v hold what kubelet gives out no more: %s: %s", held, c.Reason, c.Message)
		}
		if !passed {
			passed = true
			return false
		}
		return stop()
	})
}

// Promise 19. The config manager carries out what the label says before the agent observes it, so that pods keep devices which kubelet gives to others.
func TestPodsLeaveWhatTheConfigManagerHasWithdrawn(t *testing.T) {
	t.Parallel()
	for name, c := range withdrawals {
		for way, begin := range ways {
			for _, restarted := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %s, %t", name, way, restarted), func(t *testing.T) {
					t.Parallel()
					synctest.Test(t, func(t *testing.T) {
						w := managedWorld(t)
						if c.mig != "" {
							w.label(c.mig)
						}
						change, before, after := begin(w, c)
						if geometry := c.asks(before); c.mig == "" && geometry == "all-disabled" {
							w.label(geometry)
						}
						w.reach(c.asks(before))
						for _, as := range slices.Concat(c.leave, c.stay) {
							w.podOnFirstDevice(as)
						}
						w.spend(time.Minute)
						fences := w.recordCordons()
						change()
						w.turn()
						if restarted {
							w.restart()
						}
						w.neverTrueWhileWithdrawn("the end", func() bool { return w.done(c.asks(after))() && len(w.podsWithWithdrawn()) == 0 })
						w.spend(time.Minute)
						w.expectGivenBack()
						for _, as := range c.leave {
							if w.runs(as) {
								t.Errorf("pod %s is still there", as)
							}
						}
						for _, as := range c.stay {
							if !w.runs(as) {
								t.Errorf("pod %s was evicted, whose device is given out to it as before", as)
							}
						}
						if fenced := len(*fences) > 0; fenced != (len(c.leave) > 0) {
							t.Errorf("the node was fenced: %t", fenced)
						}
					})
				})
			}
		}
	}
}

// renamedThenWhole is a node of which a pod holds the first GPU by a name that the config manager has withdrawn. No pass has seen that yet.
func renamedThenWhole(t *testing.T, change ...func(*corev1.Pod)) *world {
	t.Helper()
	w := managedWorld(t)
	w.set(config.LabelDevicePluginConfig, "renamed")
	w.reach("renamed")
	w.podOnFirstDevice("gpu.shared::0", change...)
	w.spend(time.Minute)
	return w
}

// expectHolderNamed fails the test unless the node is False, and says that the pod holds the first GPU by the name that was withdrawn.
func (w *world) expectHolderNamed(c corev1.NodeCondition, words ...string) {
	w.t.Helper()
	const says = "pod team/gpu.shared::0 holds GPU 0 (nvidia.com/gpu.shared, replica 0), which kubelet now allocates as nvidia.com/gpu"
	for _, want := range append(words, says) {
		if c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, want) {
			w.t.Errorf("the node says %s %s: %q, want False and %q in it", c.Status, c.Reason, c.Message, want)
		}
	}
}

// Promises 5, 11, 19. A change that the config manager has begun without a drain waits as any other does, and the node says until then who holds what.
func TestWhatTheConfigManagerHasWithdrawnWaitsAsAnyChange(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		reason config.Reason
		begin  func(w *world) (lasts, ends func())
	}{
		"for the end of a hold": {config.ReasonHeld, func(w *world) (func(), func()) {
			w.annotate(config.AnnotationHold, "migration")
			return func() {}, func() { w.unannotate(config.AnnotationHold) }
		}},
		"for its window": {config.ReasonAwaitingWindow, func(w *world) (func(), func()) {
			w.setMaintenance(nights)
			w.spend(8 * time.Hour) // the night of Friday ends at four
			return func() {}, func() { w.spend(14 * time.Hour) }
		}},
		"for a budget": {config.ReasonEvictionBlocked, func(w *world) (func(), func()) {
			blocks := true
			w.budgetKeeps(func() bool { return blocks }, "gpu.shared::0")
			return func() {}, func() { blocks = false }
		}},
		"for its turn in the pool": {config.ReasonAwaitingSlot, func(w *world) (func(), func()) {
			slots, pool, other := w.pool()
			if err := slots.Take(w.t.Context(), pool, other); err != nil {
				w.t.Fatal(err)
			}
			must := func(err error) {
				if err != nil {
					w.t.Fatal(err)
				}
			}
			return func() { must(slots.Renew(w.t.Context(), pool, other)) }, func() { must(slots.Release(w.t.Context(), pool, other)) }
		}},
		"for kubelet": {config.ReasonKubeletUnavailable, func(w *world) (func(), func()) {
			w.kubeletSilent = true
			return func() {}, func() { w.kubeletSilent = false }
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := renamedThenWhole(t)
				lasts, ends := row.begin(w)
				fences := w.recordCordons()
				w.set(config.LabelDevicePluginConfig, "whole")
				for range 30 {
					w.neverTrueWhileWithdrawn("another observation", func() bool { return true })
					w.spend(time.Minute)
					lasts()
				}
				c := w.condition()
				if len(*fences) > 0 || !w.runs("gpu.shared::0") || c.Reason != string(row.reason) {
					t.Errorf("the node was fenced %d times, the pod runs: %t; %s: %s", len(*fences), w.runs("gpu.shared::0"), c.Reason, c.Message)
				}
				if !w.kubeletSilent {
					w.expectHolderNamed(c)
				}
				ends()
				w.reach("whole")
				if w.runs("gpu.shared::0") {
					t.Error("the pod is still there")
				}
			})
		})
	}
}

// Nothing is asked of the node any more, so that the agent has no request by which it could evict a pod.
func TestWhereNothingIsAskedThePodsThatHoldWhatWasWithdrawnAreNamedAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := renamedThenWhole(t)
		fences := w.recordCordons()
		w.unset(config.LabelDevicePluginConfig) // the config manager's default shares nothing
		w.neverTrueWhileWithdrawn("an observation", func() bool { return true })
		w.spend(time.Hour)
		w.expectHolderNamed(w.condition(), "delete the pods, or set a label", "without one the agent evicts none")
		d := w.diagnose(true)
		stays := func(p api.PodSeen) bool { return !p.Leaves && p.State == "" }
		if said := jsonOf(t, d); !strings.Contains(said, "kubelet allocates its devices to others") || slices.ContainsFunc(d.Pods, stays) {
			t.Errorf("recover --dry-run says of the pod:\n%s", said)
		}
		if n := w.countWrites(time.Hour); n > int(time.Hour/w.settings.NodeHeartbeat)+2 {
			t.Errorf("%d writes in an hour", n)
		}
		if len(*fences) > 0 || !w.runs("gpu.shared::0") {
			t.Errorf("the node was fenced %d times, the pod runs: %t", len(*fences), w.runs("gpu.shared::0"))
		}
		w.set(config.LabelDevicePluginConfig, "whole")
		w.reach("whole")
		if w.runs("gpu.shared::0") {
			t.Error("the label has not made the pod leave")
		}
	})
}

// The way back of such a change has no config to bring back: what the label says then stands, and who holds nothing but that stays.
func TestAChangeOfTheConfigManagerIsCalledOff(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		off  func(w *world)
		ends func(w *world)
		runs bool // the pod is still there at the end
	}{
		"the label has its former value again": {
			func(w *world) { w.set(config.LabelDevicePluginConfig, "renamed") },
			func(w *world) { w.reach("renamed") }, true,
		},
		"the label is removed": {
			func(w *world) { w.unset(config.LabelDevicePluginConfig) },
			func(w *world) {
				w.passes("the end", func() bool { return !w.hasJournal() })
				w.expectGivenBack()
				w.spend(time.Minute)
				w.expectHolderNamed(w.condition())
			},
			true,
		},
		"the node is uncordoned": {
			func(w *world) { w.cordon(false) },
			func(w *world) { w.expectHolderNamed(w.settle(config.ReasonCancelled)) }, true,
		},
		"the pod does not leave by the deadline": {
			func(w *world) { w.spend(90 * time.Minute) },
			func(w *world) { w.expectHolderNamed(w.settle(config.ReasonEvictionBlocked)) }, true,
		},
		"the pod ends by itself": {
			func(w *world) {
				if err := w.client.Tracker().Delete(podResource, "team", "gpu.shared::0"); err != nil {
					w.t.Fatal(err)
				}
			},
			func(w *world) { w.reach("whole") }, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := renamedThenWhole(t)
				blocks := false
				w.budgetKeeps(func() bool { return blocks }, "gpu.shared::0")
				w.set(config.LabelDevicePluginConfig, "whole")
				w.untilCordoned()
				blocks = true
				w.neverTrueWhileWithdrawn("a refused eviction", func() bool { return w.reason() == config.ReasonEvictionBlocked })
				w.expectHolderNamed(w.condition())
				row.off(w)
				row.ends(w)
				w.expectGivenBack()
				if w.runs("gpu.shared::0") != row.runs {
					t.Errorf("the pod runs: %t", w.runs("gpu.shared::0"))
				}
			})
		})
	}
}

// A pod that is ending is no reason to fence the node, and none to say True.
func TestAPodThatEndsAnywayIsWaitedForWithoutAFence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := renamedThenWhole(t)
		w.grace = 10 * time.Minute
		if err := w.terminate("team", "gpu.shared::0"); err != nil {
			t.Fatal(err)
		}
		fences := w.recordCordons()
		w.set(config.LabelDevicePluginConfig, "whole")
		w.neverTrueWhileWithdrawn("an observation", func() bool { return w.reason() == config.ReasonEvicting })
		w.expectHolderNamed(w.condition(), "it is ending")
		w.neverTrueWhileWithdrawn("the end", w.done("whole"))
		if w.runs("gpu.shared::0") || len(*fences) > 0 {
			t.Errorf("the pod runs: %t; the node was fenced %d times", w.runs("gpu.shared::0"), len(*fences))
		}
	})
}

// What a plugin does not offer while it starts is withdrawn from no pod, nor what it lacks for the moment in which the config manager has given it its
// default first, as NVIDIA's does since v0.18.2.
func TestAPluginThatStartsTakesNothingFromItsPods(t *testing.T) {
	t.Parallel()
	byLabel := func(t *testing.T) (*world, string) { t.Helper(); return renamedThenWhole(t), "renamed" }
	for name, row := range map[string]struct {
		begin  func(t *testing.T) (w *world, asked string)
		offers func(w *world)
	}{
		"with nothing":            {byLabel, func(w *world) { w.offered = map[string][]string{} }},
		"with the former default": {byLabel, func(w *world) { w.registerDevices(catalog.Sharing{Strategy: catalog.SharingNone}) }},
		"with another default, which the node does not show yet": {
			func(t *testing.T) (*world, string) {
				t.Helper()
				w := managedWorld(t)
				w.setManagedDefault("renamed")
				w.converge("all-disabled")
				w.podOnFirstDevice("gpu.shared::0")
				return w, "all-disabled"
			},
			func(w *world) { w.registerDevices(catalog.Sharing{Strategy: catalog.SharingNone}) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w, asked := row.begin(t)
				fences := w.recordCordons()
				for range 3 {
					w.turn()
					row.offers(w)
					if pause := w.agent.Pass(t.Context()); pause == 0 {
						t.Fatal("something was done")
					}
					if c := w.condition(); c.Status != corev1.ConditionFalse {
						t.Errorf("the node says %s %s: %s", c.Status, c.Reason, c.Message)
					}
				}
				w.reach(asked)
				if len(*fences) > 0 || !w.runs("gpu.shared::0") {
					t.Errorf("the node was fenced %d times, the pod runs: %t", len(*fences), w.runs("gpu.shared::0"))
				}
			})
		})
	}
}

// What a label would make the config manager do is foretold with the pods that will have to leave for it.
func TestAPlanNamesWhoLosesWhatTheConfigManagerWillWithdraw(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := renamedThenWhole(t)
		given := w.ask(config.LabelDevicePluginConfig + "=whole")
		if !strings.HasPrefix(strings.Join(given.Steps, "\n"), "take a slot of the pool\nfence: journal, cordon, taint\nevict team/gpu.shared::0") || !slices.Equal(given.Pods, []string{"team/gpu.shared::0"}) {
			t.Errorf("the steps are %q, of pods %q", given.Steps, given.Pods)
		}
		if given := w.ask(config.LabelDevicePluginConfig + "=renamed"); len(given.Pods) > 0 {
			t.Errorf("what is there already takes something from %q: %q", given.Pods, given.Steps)
		}
		w.removeRequest()
	})
}

// Promise 8. Going back gives the node what it had, and does not write over what people have asked for since.
func TestALabelThatWasSetDuringAChangeIsObeyedAfterIt(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		former string
		early  bool // people set the label before the agent has written it
	}{
		"before the agent's label": {"whole", true},
		"after the agent's label":  {"whole", false},
		"the former key is gone":   {"four", false},
		"the former key is gone, and people are before the agent's label": {"four", true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const later = "two"
				w := managedWorld(t)
				w.set(config.LabelDevicePluginConfig, row.former)
				w.reach(row.former)
				w.podOnFirstDevice(map[string]string{"whole": "gpu", "four": "gpu::3"}[row.former])
				relent := w.budgetKeepsTeam()
				w.profile("apiece")
				w.passes("the fence", func() bool { return w.hasJournal() && w.node().Spec.Unschedulable })
				if !row.early {
					relent()
					w.passes("the agent's label", func() bool {
						return strings.HasPrefix(w.node().Labels[config.LabelDevicePluginConfig], config.OwnPluginKey)
					})
				}
				if row.former == "four" {
					configs := w.pluginConfigs()
					delete(configs, "four")
					w.setPluginConfigs("kube-system", "plugin-configs", configs)
				}
				w.edit(func(n *corev1.Node) {
					delete(n.Labels, config.LabelProfile)
					n.Labels[config.LabelDevicePluginConfig] = later
				})
				relent()
				w.passesWithin(300, w.done(later))
				c := w.condition()
				if got := w.node().Labels[config.LabelDevicePluginConfig]; got != later || c.Status != corev1.ConditionTrue || w.node().Spec.Unschedulable {
					t.Errorf("people have set the label to %s, it is %q; cordoned %t; %s %s: %s", later, got, w.node().Spec.Unschedulable, c.Status, c.Reason, c.Message)
				}
			})
		})
	}
}

// Scripts wait for the state of the label of MIG configs, and take a success for what the node is now.
func TestNoSuccessStandsWhileAPodHoldsWhatWasWithdrawn(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]func(w *world){
		"the label of the plugin's config is removed": func(w *world) { w.unset(config.LabelDevicePluginConfig) },
		"it is another":           func(w *world) { w.set(config.LabelDevicePluginConfig, "whole") },
		"both labels are removed": func(w *world) { w.unset(config.LabelDevicePluginConfig); w.unset(config.LabelMIGConfig) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := managedWorld(t)
				w.label("all-disabled")
				w.set(config.LabelDevicePluginConfig, "renamed")
				w.reach("all-disabled + renamed")
				w.podOnFirstDevice("gpu.shared::0", controlled)
				w.budgetKeepsTeam()
				w.spend(time.Minute)
				then(w)
				w.turn()
				for range 30 {
					w.turn()
					pause := w.agent.Pass(t.Context())
					if c := w.condition(); c.Status != corev1.ConditionTrue && len(w.podsWithWithdrawn()) > 0 && stateOf(w.node()) == config.StateSuccess {
						t.Fatalf("success stands beside %s %s: %s", c.Status, c.Reason, c.Message)
					}
					<-time.After(pause)
				}
				if len(w.podsWithWithdrawn()) == 0 {
					t.Fatal("no pod holds what was withdrawn: this test sees nothing")
				}
			})
		})
	}
}
