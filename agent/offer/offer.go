// Package offer is what offers the node's GPUs to pods: NVIDIA's device plugin through kubelet, or NVIDIA's DRA driver by ResourceSlices. Both answer the
// same questions, through one interface. Each answer follows from the observation alone, without client, clock or NVML.
//
// It is for these two programs. Who owns the GPUs is decided in owner.go, and what a third program would write has to be observed, as slices are.
package offer

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Offer is what offers the node's GPUs.
type Offer interface {
	// Name names it in sentences.
	Name() string
	// Pods returns its pods on the node. They read how the GPUs are cut when they start.
	Pods() []corev1.Pod
	// Absent says why the node lacks a device plugin that the agent could restart, and what a user can do; empty if it lacks none.
	Absent() (why, advice string)
	// Strategy returns how it presents MIG devices under the desired config; set is the strategy of the settings.
	Strategy(set config.MIGStrategy, want *state.DesiredPlugin) config.MIGStrategy
	// RunsUnder returns the MIG strategy under which it runs, judged by what it offers, if that differs from the one that the agent assumes; else empty.
	RunsUnder() config.MIGStrategy
	// Offered returns the GPUs, and the parts of them, that pods can get.
	Offered() capacity.Resources
	// Allocatable returns how many of the resource the scheduler may allocate.
	Allocatable(resource string) int
	// Known reports whether Offered can be known, and compared with the GPUs.
	Known() bool
	// Missing says how its offer and the GPUs disagree. Stands is all that it offers once it has read its config; nil if that is not known.
	Missing(want *state.DesiredPlugin, under config.MIGStrategy) (missing []string, stands capacity.Resources)
	// unhealthy names the devices that it lists, but keeps from pods.
	unhealthy() []string
	// Withholds reports whether it has found a device of the GPU unhealthy, and keeps that from pods.
	Withholds(gpu nvml.GPU, under config.MIGStrategy) bool
	// Withdrawn returns the pods that hold what it offers to others, or to no one. Stands is what Missing returns.
	Withdrawn(stands capacity.Resources, want state.Desired) []state.Withdrawn
	// ListsParts reports whether it never offers a cut GPU as a whole.
	ListsParts() bool
	// Closable returns the devices of each GPU that DeviceTaintRules can close; nil if they can close none.
	Closable() map[nvml.UUID][]string
	// Text writes what Offered returns for users to check.
	Text(want state.Desired) string
	// After writes what it offers once the GPUs are so, as Text does; empty if that is not known. Under is the MIG strategy by then.
	After(gpus []nvml.GPU, want *state.DesiredPlugin, under config.MIGStrategy) string
	// advice says what a user can do about an offer that does not agree with the GPUs.
	advice() string
	// Notes says what users have to know about a change of the GPUs from before to after.
	Notes(before, after []nvml.GPU) []string

	// operand adds what the planner has to know about one of its pods.
	operand(o plan.Operand, pod *corev1.Pod) plan.Operand
}

// Of returns what offers the GPUs of the observed node. It is the device plugin where nothing does yet.
func Of(seen *state.Observed) Offer {
	if seen.Owner.ByClaims() {
		return driver{seen}
	}
	return plugin{seen}
}

// Advice says what a user can do about an offer that does not agree with the GPUs. A lost GPU may be the cause, whatever a log says.
func Advice(seen *state.Observed) string {
	for _, gpu := range seen.GPUs {
		if gpu.Lost {
			return fmt.Sprintf("GPU %d does not answer: do first what condition %s says; then %s", gpu.Index, config.ConditionGPUUnhealthy, Of(seen).advice())
		}
	}
	return Of(seen).advice()
}

// CompareHardware compares the offer with the GPUs and with the node object, whatever the labels request. Under is the MIG strategy.
func CompareHardware(seen *state.Observed, under config.MIGStrategy) state.Capacity {
	missing, _ := missingOf(seen, nil, under)
	return state.Capacity{Missing: missing, Verified: len(missing) == 0, Strategy: under}
}

// Compare compares the offer with the desired state, as far as that is known. It also finds the pods that hold devices which others may get.
func Compare(seen *state.Observed, want state.Desired, under config.MIGStrategy) state.Capacity {
	out := state.Capacity{Verified: seen.Capacity.Verified, Strategy: under}
	var stands capacity.Resources
	out.Missing, stands = missingOf(seen, want.Plugin, under)
	out.Missing = append(out.Missing, modesNotOffered(seen, want.Targets)...)
	// If the config is not known, the offer stands only if it agrees with hardware and node.
	if stands != nil || len(out.Missing) == 0 {
		out.Withdrawn = Of(seen).Withdrawn(stands, want)
		out.Missing = append(out.Missing, withdrawnTexts(seen, out.Withdrawn)...)
	}
	if sharing := want.Plugin.SharingKnown(); sharing != nil {
		out.Stale = capacity.StaleFeatures(capacity.Expected(seen.GPUs, under), *sharing, seen.Node.Labels)
	}
	return out
}

func missingOf(seen *state.Observed, want *state.DesiredPlugin, under config.MIGStrategy) (missing []string, stands capacity.Resources) {
	if seen.Kubelet.Err != nil {
		return []string{seen.Kubelet.Err.Error()}, nil
	}
	return Of(seen).Missing(want, under)
}

// OffersGone reports whether MIG devices are offered that no longer exist, or as a whole a GPU in MIG mode: the pod read the GPUs before they were cut. A
// plugin that runs under another MIG strategy offers whole GPUs too, so that these count only where its strategy is known. Nothing counts while a GPU
// is lost, or where another program cuts the GPUs.
func OffersGone(seen *state.Observed) bool { return len(gone(seen)) > 0 }

// goneDevice is what OffersGone is about.
type goneDevice struct {
	name  string
	whole nvml.UUID // the GPU that is offered as a whole; empty for a MIG device
}

func gone(seen *state.Observed) (out []goneDevice) {
	if seen.Kubelet.Err != nil || !seen.Owner.MayCut() || slices.ContainsFunc(seen.GPUs, func(g nvml.GPU) bool { return g.Lost }) {
		return nil
	}
	exists, isCut := map[string]bool{}, map[string]bool{}
	for _, g := range seen.GPUs {
		isCut[string(g.UUID)] = g.Enabled
		for _, i := range g.Instances {
			for _, d := range i.Devices {
				exists[d.UUID] = true
			}
		}
	}
	o := Of(seen)
	parts := o.ListsParts()
	for _, ids := range capacity.Offered(o.Offered()) {
		for _, id := range capacity.Physical(ids) {
			switch {
			case strings.HasPrefix(id, plan.MIGDeviceID) && !exists[id]:
				out = append(out, goneDevice{name: seen.DeviceName(id)})
			case parts && isCut[id]:
				out = append(out, goneDevice{seen.DeviceName(id) + " as a whole, which is cut", nvml.UUID(id)})
			}
		}
	}
	slices.SortFunc(out, func(a, b goneDevice) int { return strings.Compare(a.name, b.name) })
	return slices.Compact(out)
}

// Gone names what OffersGone is about, sorted.
func Gone(seen *state.Observed) (names []string) {
	for _, d := range gone(seen) {
		names = append(names, d.name)
	}
	return names
}

// Uncured names what OffersGone is about if the pods of the offer have been restarted for that. It leaves out GPUs that the desired state makes whole.
func Uncured(seen *state.Observed, want state.Desired) (names []string) {
	pods, last := Of(seen).Pods(), seen.Record.Learnt.Uncured
	if len(pods) == 0 || last == nil || slices.ContainsFunc(pods, func(p corev1.Pod) bool {
		began, runs := startOf(&p)
		return !runs || began.Before(last.Since)
	}) {
		return nil
	}
	for _, d := range gone(seen) {
		target, asked := want.Targets[d.whole]
		if slices.Contains(last.Devices, d.name) && !(asked && !target.MIG) {
			names = append(names, d.name)
		}
	}
	return names
}

// WithholdsWell reports whether a healthy GPU is kept from pods.
func WithholdsWell(seen *state.Observed) bool {
	o := Of(seen)
	return slices.ContainsFunc(seen.GPUs, func(g nvml.GPU) bool {
		_, well := seen.Recovered[g.UUID]
		return well && o.Withholds(g, seen.Capacity.Strategy)
	})
}

// HasOutdatedPod reports whether the agent has to restart a pod of the offer, so that it offers the present GPUs. Under is the MIG strategy.
func HasOutdatedPod(seen *state.Observed, under config.MIGStrategy) bool {
	o := Of(seen)
	return slices.ContainsFunc(o.Pods(), func(p corev1.Pod) bool { return isOutdated(seen, o, &p, under) })
}

// isOutdated reports whether the pod needs a restart: it started before a GPU recovered, and withholds that GPU. NVIDIA's device plugin and DRA driver report
// a GPU that has had an error as unhealthy until they start again. A pod that keeps offering devices that no longer exist is outdated, too, and one that has
// lost its ResourceSlices.
func isOutdated(seen *state.Observed, o Offer, pod *corev1.Pod, under config.MIGStrategy) bool {
	began, runs := startOf(pod)
	if !runs || seen.Kubelet.Err != nil {
		return false
	}
	if began.Before(seen.Outdated) && (OffersGone(seen) || LostSlices(seen)) {
		return true
	}
	if !seen.Owner.MayCut() {
		return false
	}
	return slices.ContainsFunc(seen.GPUs, func(g nvml.GPU) bool {
		at, has := seen.Recovered[g.UUID]
		return has && began.Before(at) && o.Withholds(g, under)
	})
}

// startOf returns when the first of the pod's running containers started; false if none runs, or the pod is ending.
func startOf(pod *corev1.Pod) (began time.Time, runs bool) {
	for _, c := range pod.Status.ContainerStatuses {
		if r := c.State.Running; r != nil && (!runs || r.StartedAt.Time.Before(began)) {
			began, runs = r.StartedAt.Time, true
		}
	}
	return began, runs && pod.DeletionTimestamp == nil
}

// Operands returns the operands that a label of the node deploys, and the pods of what offers the GPUs.
func Operands(seen *state.Observed) (pauses []plan.Pause, pods []plan.Operand) {
	byLabel := map[string]bool{}
	for _, o := range seen.Pauses {
		p := plan.Pause{Label: o.Label, Plugin: o.Label == config.LabelDevicePlugin, Paused: seen.PausedHere(o)}
		if !p.Paused && (o.State != fence.OperandRunning || isDRADriver(seen, o)) {
			continue
		}
		for _, pod := range o.Pods {
			p.Pods = append(p.Pods, state.PlannedPod(pod))
			byLabel[string(pod.UID)] = true
		}
		pauses = append(pauses, p)
	}
	o := Of(seen)
	for _, p := range o.Pods() {
		pods = append(pods, o.operand(plan.Operand{
			Pod:     plan.Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Ending: p.DeletionTimestamp != nil},
			Stale:   seen.Journal != nil && seen.Journal.RanBefore(string(p.UID)),
			Early:   seen.Journal != nil && slices.Contains(seen.Early, p.UID),
			Returns: holders.Tolerates(p.Spec.Tolerations, state.FenceTaint()),
			ByLabel: byLabel[string(p.UID)], Outdated: isOutdated(seen, o, &p, seen.Capacity.Strategy),
		}, &p))
	}
	return pauses, pods
}

// manyDevices is how many MIG devices kept a program of NVIDIA from starting: three on each of eight H200s. With two on each it started.
const manyDevices = 24

// tooMany names the programs of NVIDIA's that do not start where there are many MIG devices, if the change makes a node such a one.
func tooMany(before, after []nvml.GPU) []string {
	devices := func(gpus []nvml.GPU) (n int) {
		for _, g := range gpus {
			for _, i := range g.Instances {
				n += len(i.Placed.Devices())
			}
		}
		return n
	}
	n := devices(after)
	if n < manyDevices || n <= devices(before) {
		return nil
	}
	return []string{fmt.Sprintf("after it, the node has %d MIG devices: on nodes with %d and more, NVIDIA's dcgm-exporter has not started (NVIDIA/gpu-operator#2482), and with 56 "+
		"GPU feature discovery has timed out (#2155); the change does not wait for them; if they fail, request larger instances, or see deploy/README.md, "+
		"Many MIG devices", n, manyDevices)}
}
