// Package memory watches the memory of GPUs that pods share, since neither time-slicing nor MPS keeps the pods' memory apart. It reports by the
// condition GPUMemoryPressure, by Events on pods, and by gauges.
package memory

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monitor"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// newsInterval is the least time between two reports that differ only in the pods on a GPU that stays full.
const newsInterval = time.Minute

// usage is the memory of one device that pods may share: a GPU without instances, or one instance. Instances keep their
// memory apart from each other, pods on the same instance do not.
type usage struct {
	device   string // UUID of the GPU, or of the instance's first MIG device
	gpu      nvml.UUID
	index    int    // of the GPU
	instance string // profile and place; empty for a GPU
	name     string // as messages name it
	totalMiB int
	usedMiB  int
	pods     []podUsage // pods that have the device, most memory first
}

// podUsage is the device memory of the processes of one pod.
type podUsage struct {
	pod types.NamespacedName
	uid types.UID
	mib int
}

// shared reports whether more than one pod has the device.
func (u usage) shared() bool { return len(u.pods) > 1 }

func (u usage) percent() int {
	if u.totalMiB <= 0 {
		return 0
	}
	return u.usedMiB * 100 / u.totalMiB
}

// String says how full the device is, and how much each pod holds.
func (u usage) String() string {
	var pods []string
	for _, p := range u.pods {
		pods = append(pods, fmt.Sprintf("%s %d MiB", p.pod, p.mib))
	}
	return fmt.Sprintf("%s has %d of %d MiB in use (%d%%), shared by %s", u.name, u.usedMiB, u.totalMiB, u.percent(), strings.Join(pods, ", "))
}

// usages lists the devices that pods may share, in the order of the GPUs. A pod has a device if kubelet has allocated it to the pod, or if a
// process of the pod is on it: owners are the pods by pid.
func usages(devices []monitor.Device, holders []holders.Pod, owners map[int]*corev1.Pod) []usage {
	var out []usage
	for _, d := range devices {
		u := usage{
			device: d.ID, gpu: d.GPU, index: d.Index, instance: d.Instance(), name: d.Name(), totalMiB: d.TotalMiB, usedMiB: d.UsedMiB,
		}
		out = append(out, u.withHolders(d, d.Holders(holders), owners))
	}
	return out
}

// withHolders adds the pods that have the device. If the driver does not say how much of the device is in use, the sum over its processes
// does.
func (u usage) withHolders(d monitor.Device, holders []holders.Pod, owners map[int]*corev1.Pod) usage {
	found := map[types.UID]*podUsage{}
	add := func(pod types.NamespacedName, uid types.UID, mib int) {
		if found[uid] == nil {
			found[uid] = &podUsage{pod: pod, uid: uid}
		}
		found[uid].mib += mib
	}
	for _, h := range holders {
		add(types.NamespacedName{Namespace: h.Namespace, Name: h.Name}, h.UID, 0)
	}
	sum := 0
	for _, p := range d.Processes {
		sum += p.UsedMiB
		if pod := owners[p.PID]; pod != nil {
			add(types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, pod.UID, p.UsedMiB)
		}
	}
	if u.usedMiB < 0 {
		u.usedMiB = sum
	}
	for _, p := range found {
		u.pods = append(u.pods, *p)
	}
	slices.SortFunc(u.pods, func(a, b podUsage) int {
		return cmp.Or(cmp.Compare(b.mib, a.mib), cmp.Compare(a.pod.String(), b.pod.String()))
	})
	return u
}

// Options is what a Monitor works with.
type Options struct {
	Limits   config.MemoryPressure
	Snapshot func(ctx context.Context) ([]nvml.GPU, error)
	Owners   monitor.OwnerFinder
	PodEvent func(pod types.NamespacedName, uid types.UID, e events.Event)
	Clock    clock.PassiveClock
	Former   func() []string // the devices that the agent has last reported as nearly full, by the host's record
}

// Monitor is what this process knows of the memory of shared devices. A restart loses all of it.
type Monitor struct {
	Options
	last           []usage                      // of the last observation
	nearlyFull     map[string]bool              // by device
	since          map[string]time.Time         // since when a device has been over the threshold, or, if nearly full, below the lower limit
	baseline       map[string]map[types.UID]int // MiB that each pod had when the device was last below both limits, by device
	seeded         bool                         // the report of a former process is loaded
	written        string                       // the subject of the condition that this process wrote last
	writtenAt      time.Time                    // its heartbeat
	podsOfLastPass podsOnNode
	metrics        gauges
}

// podsOnNode are the pods of the node and those with a GPU, from the last pass.
type podsOnNode struct {
	pods    []corev1.Pod
	holders []holders.Pod
}

// New makes a Monitor that has seen nothing.
func New(o Options) *Monitor {
	return &Monitor{Options: o, nearlyFull: map[string]bool{}, since: map[string]time.Time{}, baseline: map[string]map[types.UID]int{}}
}

// Forget drops the times, since the host's clock was set.
func (m *Monitor) Forget(time.Time) {
	clear(m.since)
	m.writtenAt = time.Time{}
}

// isDisabled reports whether the settings turn the monitor off.
func (m *Monitor) isDisabled() bool { return m.Limits.Threshold == 0 }

// adoptFormer loads what a former process has reported: the devices that were nearly full still count as such, if pods share them and they are
// not below the lower limit.
func (m *Monitor) adoptFormer(all []usage) {
	if m.seeded {
		return
	}
	m.seeded = true
	former := m.Former()
	for _, u := range all {
		m.nearlyFull[u.device] = u.shared() && u.percent() > m.Limits.Clear && slices.Contains(former, u.device)
	}
}

// Watch implements monitor.Monitor. Poll observes between the passes.
func (m *Monitor) Watch(context.Context, func()) {}

// Report adds to the status which devices are full.
func (m *Monitor) Report(s *api.Status) {
	for _, u := range m.last {
		if m.nearlyFull[u.device] {
			s.FullMemory = append(s.FullMemory, u.device)
		}
	}
}

// updateNearlyFull takes the usages of a new observation, and returns the devices that have become full.
func (m *Monitor) updateNearlyFull(now time.Time, all []usage) (filled []usage) {
	m.last = all
	full, since, before := map[string]bool{}, map[string]time.Time{}, map[string]map[types.UID]int{}
	for _, u := range all {
		was := m.nearlyFull[u.device]
		full[u.device] = was
		if m.crossesLimit(u) {
			began, known := m.since[u.device]
			if !known {
				began = now
			}
			since[u.device] = began
			// A device that pods do not share any more ends the condition at once.
			if now.Sub(began) >= m.Limits.For || was && !u.shared() {
				full[u.device] = !was
				delete(since, u.device)
			}
		}
		before[u.device] = m.baseline[u.device]
		if u.percent() <= m.Limits.Clear {
			before[u.device] = u.byPod()
		}
		if full[u.device] && !was {
			filled = append(filled, u)
		}
	}
	m.nearlyFull, m.since, m.baseline = full, since, before
	return filled
}

// crossesLimit reports whether a device that counts as full is below the lower limit, or one that does not is over the threshold.
func (m *Monitor) crossesLimit(u usage) bool {
	if m.nearlyFull[u.device] {
		return !u.shared() || u.percent() <= m.Limits.Clear
	}
	return !m.isDisabled() && u.shared() && u.percent() >= m.Limits.Threshold
}

func (u usage) byPod() map[types.UID]int {
	out := map[types.UID]int{}
	for _, p := range u.pods {
		out[p.uid] = p.mib
	}
	return out
}

// mostGrownPod returns the pod with the most growth of memory since the device was last below both limits, and the growth in MiB.
func (m *Monitor) mostGrownPod(u usage) (pod podUsage, by int) {
	by = -1
	for _, p := range u.pods {
		if more := p.mib - m.baseline[u.device][p.uid]; more > by {
			pod, by = p, more
		}
	}
	return pod, by
}

// watched reports whether pods share any device. If not, polls between two passes are not needed.
func (m *Monitor) watched() bool { return !m.isDisabled() && slices.ContainsFunc(m.last, usage.shared) }

// verdict returns the condition. Its message has numbers only while a device is full.
func (m *Monitor) verdict() (status corev1.ConditionStatus, reason config.Reason, message string) {
	var full []string
	for _, u := range m.last {
		if m.nearlyFull[u.device] {
			full = append(full, u.String())
		}
	}
	switch {
	case m.isDisabled():
		return corev1.ConditionUnknown, config.ReasonGPUMemoryUnknown, "not watched: setting memoryPressure.threshold is 0"
	case len(full) == 0:
		return corev1.ConditionFalse, config.ReasonGPUMemorySufficient, "no GPU that pods share is nearly full"
	default:
		return corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull, strings.Join(full, "; ") +
			"; sharing isolates no pod's memory: the next allocation of any of them may fail. Share it among fewer, limit their memory, or use MIG"
	}
}

// condition returns the condition to write, or false if the node shows it already. If only the numbers change, the agent writes them with the
// heartbeat, so that it does not write the node for every MiB. If the pods on a full GPU change, it writes at most once in newsInterval.
func (m *Monitor) condition(old *corev1.NodeCondition, unknown string, now time.Time, beat bool) (corev1.ConditionStatus, config.Reason, string, bool) {
	status, reason, message := m.verdict()
	if unknown != "" && !m.isDisabled() {
		status, reason, message = corev1.ConditionUnknown, config.ReasonGPUMemoryUnknown, unknown
	}
	switch {
	case old == nil:
		return status, reason, message, !m.isDisabled()
	case m.isDisabled():
		return status, reason, message, old.Reason != string(reason)
	case old.Status != status || old.Reason != string(reason) || beat:
		return status, reason, message, true
	default:
		return status, reason, message, status == corev1.ConditionTrue && now.Sub(old.LastHeartbeatTime.Time) >= newsInterval && !m.shows(old)
	}
}

// subject names the full devices and the pods that have them, sorted.
func (m *Monitor) subject() string {
	var out []string
	for _, u := range m.last {
		if !m.nearlyFull[u.device] {
			continue
		}
		var pods []string
		for _, p := range u.pods {
			pods = append(pods, string(p.uid))
		}
		slices.Sort(pods)
		out = append(out, u.device+" "+strings.Join(pods, " "))
	}
	slices.Sort(out)
	return strings.Join(out, "\n")
}

// shows reports whether the condition on the node is the one that this process wrote last, about the same devices and pods. The message does
// not show that: it is cut if many devices are full.
func (m *Monitor) shows(old *corev1.NodeCondition) bool {
	return old.LastHeartbeatTime.Unix() == m.writtenAt.Unix() && m.written == m.subject()
}

// Observe records the GPUs that the pass has observed, and writes an Event on the pod that has filled one.
func (m *Monitor) Observe(ctx context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod) {
	m.podsOfLastPass = podsOnNode{pods: pods, holders: with}
	all := m.usages(ctx, gpus)
	m.adoptFormer(all)
	m.take(all)
}

// Poll observes the GPUs between two passes, and reports whether the condition is about to change.
func (m *Monitor) Poll(ctx context.Context) bool {
	if !m.watched() {
		return false
	}
	before, _, _ := m.verdict()
	gpus, err := m.Snapshot(ctx)
	if err != nil {
		return true // the next pass finds out why
	}
	m.take(m.usages(ctx, gpus))
	after, _, _ := m.verdict()
	return after != before
}

// usages finds the pods that the processes on the GPUs belong to. If the process table cannot be read, it uses kubelet's report alone.
func (m *Monitor) usages(ctx context.Context, gpus []nvml.GPU) []usage {
	devices, reported := monitor.Devices(gpus), map[string][]int{}
	for _, d := range devices {
		reported[d.ID] = nvml.PIDs(d.Processes)
	}
	owners := m.Owners.Owners(ctx, reported, m.podsOfLastPass.pods)
	return usages(devices, m.podsOfLastPass.holders, owners)
}

func (m *Monitor) take(all []usage) {
	filled := m.updateNearlyFull(m.Clock.Now(), all)
	m.metrics.observed(m.last, m.nearlyFull)
	for _, u := range filled {
		pod, by := m.mostGrownPod(u)
		m.PodEvent(pod.pod, pod.uid, events.MemoryNearlyFull(by, u.String()))
	}
}

// Conditions returns the condition about memory, for the write of the node's conditions. Complete means that the pass has observed all of the
// node; silent says why the driver does not answer, or is empty; beat means that the heartbeat is due.
func (m *Monitor) Conditions(node *corev1.Node, complete bool, silent string, beat bool) []corev1.NodeCondition {
	unknown := ""
	if silent != "" {
		unknown = "the driver does not say how full the GPUs are: " + silent
		m.last = nil // else an observation between two passes would open a driver that is being upgraded
		m.metrics.observed(nil, nil)
	}
	if !complete && unknown == "" {
		return nil
	}
	old := report.Find(node, config.ConditionGPUMemoryPressure)
	status, reason, message, news := m.condition(old, unknown, m.Clock.Now(), beat)
	if !news {
		return nil
	}
	m.written, m.writtenAt = m.subject(), m.Clock.Now()
	return []corev1.NodeCondition{report.After(old, config.ConditionGPUMemoryPressure, status, reason, message, m.writtenAt)}
}

// Uses returns how much memory each pod has of each device, most memory first.
func (m *Monitor) Uses() []api.Use {
	var out []api.Use
	for _, u := range m.last {
		for _, p := range u.pods {
			out = append(out, api.Use{
				Namespace: p.pod.Namespace, Pod: p.pod.Name, GPU: u.index, UUID: u.gpu, Instance: u.instance, Pods: len(u.pods), MemoryMiB: p.mib,
				UsedMiB: u.usedMiB, TotalMiB: u.totalMiB, Unknown: "the agent does not measure it",
			})
		}
	}
	slices.SortStableFunc(out, func(a, b api.Use) int { return cmp.Compare(b.MemoryMiB, a.MemoryMiB) })
	return out
}
