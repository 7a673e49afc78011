package agent_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// podWithClaim runs a pod that has the device by a claim, which the scheduler has made for an extended resource: nothing in its spec is of NVIDIA's.
func (w *world) podWithClaim(name, device string, change ...func(*corev1.Pod)) {
	w.t.Helper()
	w.allocate(name, device)
	w.podOfClaim(name, device, change...)
}

// allocate has the scheduler make and allocate the claim of a pod.
func (w *world) allocate(name, device string, change ...func(*resourcev1.DeviceRequestAllocationResult)) {
	w.t.Helper()
	claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name + "-gpu"}}
	claim.Status.Allocation = &resourcev1.AllocationResult{}
	claim.Status.Allocation.Devices.Results = []resourcev1.DeviceRequestAllocationResult{{Driver: holders.ClaimDriver, Pool: nodeName, Device: device}}
	for _, c := range change {
		c(&claim.Status.Allocation.Devices.Results[0])
	}
	claim.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: types.UID(name)}}
	if _, err := w.client.ResourceV1().ResourceClaims("team").Create(w.t.Context(), claim, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// podOfClaim runs the pod of such a claim.
func (w *world) podOfClaim(name, device string, change ...func(*corev1.Pod)) {
	w.t.Helper()
	w.pod(name, holders.ClaimDriver+"/"+nodeName+"/"+device, append([]func(*corev1.Pod){func(p *corev1.Pod) {
		p.Annotations["resource"] = "claim " + name + "-gpu"
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"deviceclass.resource.kubernetes.io/gpu.nvidia.com": resource.MustParse("1")}
		p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: name + "-gpu"}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{runsSince(metav1.Now())}
	}}, change...)...)
}

// bound is a pod that the scheduler has bound, and whose claim kubelet cannot prepare.
func bound(p *corev1.Pod) {
	delete(p.Annotations, "device")
	p.Status.Phase, p.Status.ContainerStatuses = corev1.PodPending, nil
}

// cutInSeven is a node of NVIDIA's DRA driver, whose GPUs are cut in seven, with pod "of-0" by a claim.
func cutInSeven(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, h100)
	w.noPlugin, w.draDriver = true, true
	w.spend(time.Minute)
	w.converge("all-1g.10gb")
	w.podWithClaim("of-0", "gpu-0-mig-1g10gb-0")
	return w
}

// uncutUnderPods is a node of NVIDIA's DRA driver, whose GPUs were cut in seven when pods "of-0" and "of-1" got a part of each, and pod "late" another
// one of GPU 0, which kubelet has not prepared. GPU 0 was uncut by hand since, and the driver started again.
func uncutUnderPods(t *testing.T) *world {
	t.Helper()
	w := cutInSeven(t)
	w.podWithClaim("of-1", "gpu-1-mig-1g10gb-0")
	w.podWithClaim("late", "gpu-0-mig-1g10gb-1", bound)
	w.unset(config.LabelMIGConfig)
	w.settle(config.ReasonNotRequested)
	w.uncutGPU0()
	w.setConfigs(gpu0Whole)
	w.restartDRADriver()
	return w
}

// uncutGPU0 destroys the instances of GPU 0 by hand, and turns its MIG mode off.
func (w *world) uncutGPU0() {
	w.t.Helper()
	gpu := w.snapshot()[0]
	for _, i := range gpu.Instances {
		if err := w.gpus.Driver().Destroy(w.t.Context(), gpu.UUID, i.Placed); err != nil {
			w.t.Fatal(err)
		}
	}
	if err := w.gpus.Driver().SetMode(w.t.Context(), gpu.UUID, false); err != nil {
		w.t.Fatal(err)
	}
}

// gpu0Whole has config "second": GPU 0 whole, and GPU 1 in seven.
var gpu0Whole = map[string]catalog.MIGConfig{"second": {{Indices: []int{0}}, {Indices: []int{1}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}}}

// expectGoneNamed fails the test unless the node is False, and says which pods have what the driver offers no more, and of no other pod.
func (w *world) expectGoneNamed(words ...string) {
	w.t.Helper()
	c := w.condition()
	for _, want := range append(words,
		"pod team/late has gpu-0-mig-1g10gb-1 by claim late-gpu, which NVIDIA's DRA driver no longer advertises",
		"pod team/of-0 has gpu-0-mig-1g10gb-0 by claim of-0-gpu, which NVIDIA's DRA driver no longer advertises") {
		if !strings.Contains(c.Message, want) {
			w.t.Errorf("want %q in %s", want, c.Message)
		}
	}
	if c.Status != corev1.ConditionFalse || strings.Contains(c.Message, "team/of-1") || strings.Contains(c.Message, "device plugin") {
		w.t.Errorf("the node says %s %s: %s", c.Status, c.Reason, c.Message)
	}
}

// expectGoneDiagnosed fails the test unless recover --dry-run says so of the pods whose devices are gone, by name, and nothing of the kind of the one that has
// its device.
func (w *world) expectGoneDiagnosed(such func(api.PodSeen) bool) api.Diagnosis {
	w.t.Helper()
	d := w.diagnose(true)
	var names []string
	for _, p := range d.Pods {
		if such(p) {
			names = append(names, p.Name)
		}
	}
	if !slices.Equal(names, []string{"late", "of-0"}) || len(d.Pods) != 3 || strings.Contains(jsonOf(w.t, d), "device plugin") {
		w.t.Errorf("recover --dry-run says so of %v:\n%s", names, jsonOf(w.t, d))
	}
	return d
}

// recoverByHand has gpuslice-agent recover give the node back, on a machine where no agent runs.
func (w *world) recoverByHand() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Hour)
	defer cancel()
	if err := agent.New(w.optionsFor(&w.host)).Recover(ctx, func(*corev1.Node) { w.turn() }); err != nil {
		w.t.Errorf("recover: %v", err)
	}
}

// Promise 19, on a node of NVIDIA's DRA driver: a pod that holds what is there no more keeps the node from being True, whoever has cut the GPU.
func TestPodsWhoseDevicesAreGoneAreNamedAndLeaveWhereALabelAsks(t *testing.T) {
	t.Parallel()
	stays := func(p api.PodSeen) bool {
		return !p.Leaves && p.State == "Withdrawn" && p.Message == "NVIDIA's DRA driver no longer advertises the devices of its claims"
	}
	synctest.Test(t, func(t *testing.T) {
		w := uncutUnderPods(t)
		calls, fences := w.countChanges(nil), w.recordCordons()
		w.spend(time.Hour)
		const advice = "delete the pods, or set a label that asks for what NVIDIA's DRA driver advertises: without one the agent evicts none"
		w.expectGoneNamed(advice)
		d := w.expectGoneDiagnosed(stays)
		missing := slices.IndexFunc(d.Causes, func(f api.Finding) bool { return f.Cause == api.CauseCapacityMissing })
		if missing < 0 || d.Causes[missing].You != "delete these pods, or wait until they have ended" {
			t.Errorf("the causes are %+v", d.Causes)
		}
		w.recoverByHand()
		if len(*fences) > 0 || !w.runs("of-0") || !w.runs("late") {
			t.Errorf("where nothing is asked for, a pod was evicted, or the node fenced %d times", len(*fences))
		}

		w.profiles(`{apiVersion: gpuslice.io/v1alpha1, kind: Profiles, profiles: {named: {labels: {team: a}}}}`)
		w.profile("named") // which asks for no GPU
		w.spend(time.Hour)
		w.expectGoneNamed(advice)
		w.unset(config.LabelProfile)

		w.label("second") // as the GPUs are
		w.reach("second")
		if w.runs("of-0") || w.runs("late") || !w.runs("of-1") {
			t.Errorf("run: of-0 %t, late %t, of-1 %t", w.runs("of-0"), w.runs("late"), w.runs("of-1"))
		}
		if *calls > 0 || len(*fences) != 1 {
			t.Errorf("%d calls that change a GPU, %d fences", *calls, len(*fences))
		}
	})
}

// Promise 20. Anyone may bind a pod to this node whose claim has a device of another one. It is no device of this node that has gone: no pod has to leave.
func TestDevicesOfOtherNodesAreNotGone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := cutInSeven(t)
		fences := w.recordCordons()
		w.allocate("stray", "gpu-9", func(d *resourcev1.DeviceRequestAllocationResult) { d.Pool = "other-node" })
		w.podOfClaim("stray", "gpu-9", bound)
		w.spend(time.Hour)
		if c := w.condition(); len(*fences) > 0 || c.Status != corev1.ConditionTrue || !w.runs("stray") {
			t.Errorf("the node was fenced %d times, and says %s %s: %s", len(*fences), c.Status, c.Reason, c.Message)
		}
	})
}

// Promise 3. Slices may lack a device that a GPU has: they are forged, or the driver is about to write others. No pod counts as its holder for that.
func TestSlicesThatLackADeviceEvictNoPodOfAGPUThatStays(t *testing.T) {
	t.Parallel()
	only := func(gpu string, s resourcev1.ResourceSlice) resourcev1.ResourceSlice {
		s.Spec.Devices = slices.DeleteFunc(slices.Clone(s.Spec.Devices), func(d resourcev1.Device) bool { return !strings.HasPrefix(d.Name, gpu) })
		return s
	}
	newer := func(s resourcev1.ResourceSlice) resourcev1.ResourceSlice {
		s.Name = "slice-2"
		s.Spec.Pool.Generation++
		return s
	}
	for name, forge := range map[string]func(is resourcev1.ResourceSlice) []resourcev1.ResourceSlice{
		"a newer one has one GPU alone": func(is resourcev1.ResourceSlice) []resourcev1.ResourceSlice {
			return []resourcev1.ResourceSlice{is, newer(only("gpu-0", is))}
		},
		"a newer one has no device": func(is resourcev1.ResourceSlice) []resourcev1.ResourceSlice {
			return []resourcev1.ResourceSlice{is, newer(only("none", is))}
		},
		"a newer one has all devices, by other names": func(is resourcev1.ResourceSlice) []resourcev1.ResourceSlice {
			forged := newer(is)
			forged.Spec.Devices = slices.Clone(is.Spec.Devices)
			for i := range forged.Spec.Devices {
				forged.Spec.Devices[i].Name += "-x"
			}
			return []resourcev1.ResourceSlice{is, forged}
		},
		"the driver's own one lacks a GPU": func(is resourcev1.ResourceSlice) []resourcev1.ResourceSlice {
			return []resourcev1.ResourceSlice{only("gpu-0", is)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newDrainingWorld(t)
				w.settings.Drain.Fence = config.DrainFenceNode
				w.restart()
				w.label("seven")
				w.passes("the first cut", w.gpu0Changed)
				is := w.published
				w.published = forge(is[0])
				w.spend(10 * time.Minute)
				if c := w.condition(); !w.runs("stays") || !w.hasJournal() || c.Reason != string(config.ReasonHoldersUnknown) {
					t.Errorf("the pod on GPU 1 runs: %t; the node says %s: %s", w.runs("stays"), c.Reason, c.Message)
				}
				w.published = is
				w.reach("seven")
				if !w.runs("stays") {
					t.Error("the pod on GPU 1 has left")
				}
			})
		})
	}
}

// Promise 19. Most of the time nothing asks for an observation of the API server: what is gone shows by the watches, and by one request for a pod's claim.
func TestAPodWhoseDeviceIsGoneIsSeenAtRest(t *testing.T) {
	t.Parallel()
	const late = "pod team/late has gpu-0-mig-1g10gb-1 by claim late-gpu, which NVIDIA's DRA driver no longer advertises"
	const cutAgain = "pod team/of-0 has gpu-0-mig-1g10gb-0 by claim of-0-gpu, which NVIDIA's DRA driver no longer advertises"
	for name, row := range map[string]struct {
		happens func(w *world, l *live)
		byHand  bool // nothing is asked for, and no pod leaves; else "second" is, and pod "late" leaves
		named   string
		reads   int // of claims
	}{
		"its volume binds late": {happens: func(w *world, _ *live) { w.podWithClaim("late", "gpu-0-mig-1g10gb-1", bound) }, named: late, reads: 1},
		"it is bound by hand, and its claim is reserved for it later": {happens: func(w *world, _ *live) {
			w.allocate("late", "gpu-0-mig-1g10gb-1")
			reserve := w.unreserve("late-gpu")
			w.podOfClaim("late", "gpu-0-mig-1g10gb-1", bound)
			w.spend(5 * time.Second)
			reserve()
		}, named: late, reads: 2},
		"it is bound while no agent runs": {happens: func(w *world, l *live) {
			l.stop()
			w.podWithClaim("late", "gpu-0-mig-1g10gb-1", bound)
			l.start()
		}, named: late, reads: 2}, // with that of pod of-1
		"the GPU is cut by hand, and the agent has just started": {happens: func(w *world, l *live) {
			l.stop()
			l.start()
			w.spend(10 * time.Second)
			w.uncutGPU0()
			w.restartDRADriver()
		}, byHand: true, named: cutAgain, reads: 2},
		"the GPU is cut by hand": {happens: func(w *world, _ *live) { w.uncutGPU0(); w.restartDRADriver() }, byHand: true, named: cutAgain},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := cutInSeven(t)
				w.podWithClaim("of-1", "gpu-1-mig-1g10gb-0")
				w.setConfigs(gpu0Whole)
				l := w.goLive()
				w.spend(time.Minute)
				if row.byHand {
					w.unset(config.LabelMIGConfig)
					w.settle(config.ReasonNotRequested)
				} else {
					w.converge("second")
				}
				if n := l.counts(10 * time.Minute)["GET resourceclaims"]; n > 0 {
					t.Errorf("%d reads of claims while nothing happens", n)
				}
				w.grace = 5 * time.Second
				l.countRequests()
				row.happens(w, l)
				named := false
				w.passes("a word about the pod", func() bool {
					c := w.condition()
					named = named || strings.Contains(c.Message, row.named) && c.Status == corev1.ConditionFalse
					return named && (row.byHand || !w.runs("late") && w.done("second")())
				})
				w.spend(time.Minute)
				if n := l.requests()["GET resourceclaims"]; n != row.reads {
					t.Errorf("%d reads of claims, want %d", n, row.reads)
				}
				c := w.condition()
				if !w.runs("of-1") || row.byHand && (!w.runs("of-0") || c.Status != corev1.ConditionFalse) {
					t.Errorf("pods run: of-0 %t, of-1 %t; the node says %s: %s", w.runs("of-0"), w.runs("of-1"), c.Status, c.Message)
				}
			})
		})
	}
}

// unreserve has no pod use the claim, until the function is called.
func (w *world) unreserve(name string) (reserve func()) {
	w.t.Helper()
	claim, err := w.client.ResourceV1().ResourceClaims("team").Get(w.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	write := func(claim *resourcev1.ResourceClaim) {
		w.t.Helper()
		if err := w.client.Tracker().Update(claimResource, claim, "team"); err != nil {
			w.t.Fatal(err)
		}
	}
	other := claim.DeepCopy()
	other.Status.ReservedFor = nil
	write(other)
	return func() { write(claim) }
}

// restartDRADriver has NVIDIA's DRA driver read the GPUs again.
func (w *world) restartDRADriver() {
	w.t.Helper()
	for _, p := range w.podsIn("dra") {
		if err := w.client.Tracker().Delete(podResource, p.Namespace, p.Name); err != nil {
			w.t.Fatal(err)
		}
	}
}

// A budget keeps such a pod as any other, and so does a hold: recover says what is awaited, and gives the node back as it is.
func TestPodsWhoseDevicesAreGoneLeaveAsAnyOther(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		begin, ends func(w *world)
		reason      config.Reason
	}{
		"for the end of a hold": {
			func(w *world) { w.annotate(config.AnnotationHold, "migration") }, func(w *world) { w.unannotate(config.AnnotationHold) }, config.ReasonHeld,
		},
		"for its window": {
			func(w *world) { w.setMaintenance(nights); w.spend(8 * time.Hour) }, func(w *world) { w.spend(14 * time.Hour) }, config.ReasonAwaitingWindow,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := uncutUnderPods(t)
				row.begin(w)
				fences := w.recordCordons()
				w.label("second")
				w.spend(30 * time.Minute)
				if w.reason() != row.reason || len(*fences) > 0 || !w.runs("of-0") {
					t.Errorf("%s; the node was fenced %d times", w.reason(), len(*fences))
				}
				w.expectGoneNamed()
				row.ends(w)
				w.reach("second")
			})
		})
	}
	t.Run("for a budget, in the middle", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			w := uncutUnderPods(t)
			blocks := false
			w.budgetKeeps(func() bool { return blocks }, "of-0")
			w.label("second")
			w.untilCordoned()
			blocks = true
			w.passes("a refused eviction", func() bool { return w.reason() == config.ReasonEvictionBlocked })
			d := w.diagnose(true)
			if i := slices.IndexFunc(d.Pods, func(p api.PodSeen) bool { return p.Name == "of-0" }); i < 0 || !d.Pods[i].Leaves || !strings.Contains(d.Pods[i].Message, "budget") {
				t.Errorf("recover --dry-run says %s", jsonOf(t, d))
			}
			w.unset(config.LabelMIGConfig)
			w.recoverByHand()
			w.expectGivenBack()
			w.restart()
			w.spend(time.Minute)
			if c := w.condition(); c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, "pod team/of-0 has gpu-0-mig-1g10gb-0 by claim of-0-gpu, which NVIDIA's DRA driver no longer advertises") {
				t.Errorf("after recover the node says %s %s: %s", c.Status, c.Reason, c.Message)
			}
			if !w.runs("of-0") || !w.runs("of-1") {
				t.Error("a pod was evicted that a budget keeps, or whose device is there")
			}
		})
	})
}

// A100s with MIG mode off show no counters in DynamicMIG: their slices are those of the static driver. The gate of the driver's pod alone shows who cuts
// them, and while the pod is away nothing does.
func TestADRADriverThatShowsNoCountersIsKnownByItsGate(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		gate     func(*corev1.Pod)
		evidence string
	}{
		"its environment": {func(*corev1.Pod) {}, "FEATURE_GATES=DynamicMIG=true of container gpus of pod dra/driver-1"},
		"a flag": {func(p *corev1.Pod) {
			p.Spec.Containers[0].Env, p.Spec.Containers[0].Args = nil, []string{"gpu-kubelet-plugin --feature-gates=DynamicMIG=true"}
		}, "DynamicMIG=true of container gpus of pod dra/driver-1"},
		"all variables of a ConfigMap": {func(p *corev1.Pod) {
			p.Spec.Containers[0].Env, p.Spec.Containers[0].EnvFrom = nil, []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{}}}
		}, "envFrom, which this agent cannot read,"},
		"a value that cannot be read": {func(p *corev1.Pod) {
			p.Spec.Containers[0].Env[0] = corev1.EnvVar{Name: "FEATURE_GATES", ValueFrom: &corev1.EnvVarSource{}}
		}, "FEATURE_GATES, which this agent cannot read,"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "gpus: [{model: A100-80GB, count: 2}]")
				w.noPlugin = true
				calls, fences := w.countChanges(nil), w.recordCordons()
				w.startDRADriver(dynamicGate, row.gate)
				w.publish(w.driverDevices()...)
				w.label("all-1g.10gb")
				w.spend(time.Minute)
				w.expectRefused(config.ReasonForeignOwner, "it cuts the GPUs of this node itself ("+row.evidence)
				if d := w.diagnose(true); d.Owner != api.OwnerDRADynamic {
					t.Errorf("the diagnosis has the owner %q", d.Owner)
				}

				for what, away := range map[string]func(){
					"its slices stay": func() {}, "kubelet has deleted its slices": func() { w.publish() },
				} {
					if err := w.client.Tracker().Delete(podResource, "dra", "driver-1"); err != nil {
						t.Fatal(err)
					}
					away()
					w.spend(10 * time.Minute)
					if c := w.condition(); c.Status != corev1.ConditionFalse {
						t.Errorf("while the driver is away, and %s, the node says %s: %s", what, c.Reason, c.Message)
					}
					w.podsStarted = 0
					w.startDRADriver(dynamicGate, row.gate)
					w.publish(w.driverDevices()...)
					w.spend(time.Minute)
					w.expectRefused(config.ReasonForeignOwner, row.evidence)
				}
				if *calls > 0 || len(*fences) > 0 {
					t.Errorf("%d calls that change a GPU, %d fences", *calls, len(*fences))
				}
				if enabled := slices.ContainsFunc(w.snapshot(), func(g nvml.GPU) bool { return g.Enabled }); enabled {
					t.Error(fmt.Sprint("a GPU is in MIG mode: ", w.gpus))
				}
			})
		})
	}
}

// driverGone is a node whose GPUs are cut in seven, with pod "of-0" by a claim, and from which NVIDIA's DRA driver was taken since, its slices, too.
func driverGone(t *testing.T) *world {
	t.Helper()
	w := cutInSeven(t)
	w.spend(time.Minute)
	w.draDriver = false
	for _, p := range w.podsIn("dra") {
		if err := w.client.Tracker().Delete(podResource, p.Namespace, p.Name); err != nil {
			t.Fatal(err)
		}
	}
	w.publish()
	return w
}

// Pods keep what they have by claims when the driver is gone: nothing says which GPUs, so that the agent evicts none of them, and calls for no device plugin.
func TestPodsThatHaveClaimsOutlastTheDRADriver(t *testing.T) {
	t.Parallel()
	for name, plugin := range map[string]bool{"alone": false, "and a device plugin comes": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := driverGone(t)
				calls, fences := w.countChanges(nil), w.recordCordons()
				w.noPlugin = !plugin
				w.spend(10 * time.Minute)
				words := []string{"start NVIDIA's DRA driver on this node again: without it no pod that has claims can end: team/of-0", "kubectl get daemonsets -A"}
				if plugin {
					words = []string{"start NVIDIA's DRA driver on this node again, and end the pods that have claims, which cannot end without it: team/of-0", "NVIDIA's device plugin (pod kube-system/plugin-"}
				}
				w.expectRefused(config.ReasonForeignOwner, words...)
				w.label("all-balanced")
				w.spend(2 * time.Hour)
				w.expectRefused(config.ReasonForeignOwner, words...)
				if *calls > 0 || len(*fences) > 0 || !w.runs("of-0") {
					t.Errorf("%d calls that change a GPU, %d fences; of-0 runs %t", *calls, len(*fences), w.runs("of-0"))
				}
			})
		})
	}
}
