// Package memory watches the memory of GPUs that pods share, which no sharing keeps apart, and tells of it by condition GPUMemoryPressure, by
// Events on pods, and by metrics.
package memory

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/condition"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// newsInterval is the least time between two reports that differ only in the pods on a GPU that stays full.
const newsInterval = time.Minute

// ownersTimeout bounds the search for the pods whose processes are on the GPUs.
const ownersTimeout = 5 * time.Second

// usage is the memory of what pods may share: a GPU that is not cut, or one instance of one that is. Instances keep their
// memory apart from each other, pods on the same one do not.
type usage struct {
	device   string // UUID of the GPU, or of the instance's first MIG device
	gpu      nvml.UUID
	index    int    // of the GPU
	instance string // profile and place; empty for a GPU
	name     string // as people are told it
	totalMiB int
	usedMiB  int
	pods     []podUsage // those that have it, most memory first
}

// podUsage is what the processes of one pod hold of it.
type podUsage struct {
	pod types.NamespacedName
	uid types.UID
	mib int
}

// shared reports whether more than one pod has it.
func (u usage) shared() bool { return len(u.pods) > 1 }

func (u usage) percent() int {
	if u.totalMiB <= 0 {
		return 0
	}
	return u.usedMiB * 100 / u.totalMiB
}

// String says how full it is, and by whom.
func (u usage) String() string {
	var pods []string
	for _, p := range u.pods {
		pods = append(pods, fmt.Sprintf("%s %d MiB", p.pod, p.mib))
	}
	return fmt.Sprintf("%s has %d of %d MiB in use (%d%%), shared by %s", u.name, u.usedMiB, u.totalMiB, u.percent(), strings.Join(pods, ", "))
}

// usages lists what pods may share, in the order of the GPUs. Who has it is what kubelet has given to whom, and what the
// processes on it are of: owners are pods by pid.
func usages(gpus []nvml.GPU, holders []holders.Pod, owners map[int]*corev1.Pod) []usage {
	var out []usage
	for _, g := range gpus {
		switch {
		case g.Lost:
		case !g.Enabled:
			u := usage{device: string(g.UUID), gpu: g.UUID, index: g.Index, name: fmt.Sprintf("GPU %d (%s)", g.Index, g.UUID), totalMiB: g.MemoryMiB, usedMiB: g.UsedMiB}
			out = append(out, u.withHolders([]string{u.device}, g.Processes, holders, owners))
		default:
			for _, i := range g.Instances {
				if i.HalfMade() {
					continue
				}
				p, _ := g.Profile(i.Profile)
				u := usage{
					device: i.Devices[0].UUID, gpu: g.UUID, index: g.Index, instance: i.Placed.String(), name: fmt.Sprintf("%s of GPU %d (%s)", i.Placed, g.Index, g.UUID),
					totalMiB: p.MemoryMiB, usedMiB: i.UsedMiB,
				}
				var devices []string
				for _, d := range i.Devices {
					devices = append(devices, d.UUID)
				}
				out = append(out, u.withHolders(devices, i.Processes, holders, owners))
			}
		}
	}
	return out
}

// withHolders adds who has it. A driver that does not say how much is in use has said it of each process.
func (u usage) withHolders(devices []string, processes []nvml.Process, holders []holders.Pod, owners map[int]*corev1.Pod) usage {
	found := map[types.UID]*podUsage{}
	add := func(pod types.NamespacedName, uid types.UID, mib int) {
		if found[uid] == nil {
			found[uid] = &podUsage{pod: pod, uid: uid}
		}
		found[uid].mib += mib
	}
	for _, h := range holders {
		if h.UID != "" && slices.ContainsFunc(h.Devices, func(d string) bool { return slices.Contains(devices, d) }) {
			add(types.NamespacedName{Namespace: h.Namespace, Name: h.Name}, h.UID, 0)
		}
	}
	sum := 0
	for _, p := range processes {
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

// Processes are the host's.
type Processes interface {
	// Holders finds the processes that have a device.
	Holders(ctx context.Context, sought []holders.Sought) ([]holders.Client, error)
}

// Options is what a Monitor works with.
type Options struct {
	Limits    config.MemoryPressure
	Snapshot  func(ctx context.Context) ([]nvml.GPU, error)
	Processes Processes
	// ComputesForOthers reports whether the pod's processes on a GPU are those of a server, whose clients are other pods.
	ComputesForOthers func(pod *corev1.Pod) bool
	Tell              func(pod types.NamespacedName, uid types.UID, kind string, reason config.Reason, format string, args ...any) // an Event
	Clock             clock.PassiveClock
	Log               *zap.Logger
}

// Monitor is what is known of the memory of what pods share. All of it may be lost at any moment.
type Monitor struct {
	Options
	last           []usage                      // of the last look
	nearlyFull     map[string]bool              // by device
	since          map[string]time.Time         // since when a device has been over the threshold, or, if nearly full, below the lower limit
	baseline       map[string]map[types.UID]int // MiB that each pod had when the device was last below both limits, by device
	seeded         bool                         // what the node said before this process began is taken over
	podsOfLastPass podsOnNode
	metrics        metrics
}

// podsOnNode are the pods of the node and those with a GPU, as of the last look at the cluster.
type podsOnNode struct {
	pods    []corev1.Pod
	holders []holders.Pod
}

// New makes a Monitor that has seen nothing.
func New(o Options) *Monitor {
	return &Monitor{Options: o, nearlyFull: map[string]bool{}, since: map[string]time.Time{}, baseline: map[string]map[types.UID]int{}}
}

// Forget drops since when anything is so: the host's clock was set.
func (m *Monitor) Forget(time.Time) { clear(m.since) }

// isDisabled reports whether nobody wants to know.
func (m *Monitor) isDisabled() bool { return m.Limits.Threshold == 0 }

// adoptShownCondition takes over what the node has said until now: a device that is full, and not below the lower limit, stays so.
func (m *Monitor) adoptShownCondition(old *corev1.NodeCondition, all []usage) {
	if m.seeded {
		return
	}
	m.seeded = true
	for _, u := range all {
		m.nearlyFull[u.device] = old != nil && old.Status == corev1.ConditionTrue && u.shared() && u.percent() > m.Limits.Clear &&
			strings.Contains(old.Message, u.name)
	}
}

// updateNearlyFull takes a look, and lists what has become full by it.
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
			// What is shared no more is not waited for.
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

// crossesLimit reports whether a device that is full looks as if it were not, or the other way round.
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

// mostGrownPod is the pod whose memory has grown most since the device was last below both limits, and by how much.
func (m *Monitor) mostGrownPod(u usage) (pod podUsage, by int) {
	by = -1
	for _, p := range u.pods {
		if more := p.mib - m.baseline[u.device][p.uid]; more > by {
			pod, by = p, more
		}
	}
	return pod, by
}

// watched reports whether anything is shared, so that looks between those of the loop are worth their while.
func (m *Monitor) watched() bool { return !m.isDisabled() && slices.ContainsFunc(m.last, usage.shared) }

// verdict is the condition: without numbers as long as nothing is full.
func (m *Monitor) verdict() (status corev1.ConditionStatus, reason config.Reason, message string) {
	var full []string
	for _, u := range m.last {
		if m.nearlyFull[u.device] {
			full = append(full, u.String())
		}
	}
	switch {
	case m.isDisabled():
		return corev1.ConditionUnknown, config.ReasonGPUMemoryUnknown, "not watched, since memoryPressure.threshold of the settings is 0"
	case len(full) == 0:
		return corev1.ConditionFalse, config.ReasonGPUMemorySufficient, "no GPU that pods share is nearly full"
	default:
		return corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull, strings.Join(full, "; ") +
			"; sharing keeps no pod's memory apart: the next allocation of any of them may fail. Share it by fewer, limit their memory, or use MIG"
	}
}

// condition is what is to be told of it, or nothing if the node shows it already. What changes in the numbers alone is told
// with the heartbeat, so that a node is not written for every MiB; who is on a GPU that is full, at most once in newsInterval.
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
		return status, reason, message, status == corev1.ConditionTrue && now.Sub(old.LastHeartbeatTime.Time) >= newsInterval && !m.names(old.Message)
	}
}

// names reports whether the message is about what is full, and those who have it.
func (m *Monitor) names(message string) bool {
	for _, u := range m.last {
		if m.nearlyFull[u.device] != strings.Contains(message, u.name) {
			return false
		}
		for _, p := range u.pods {
			if m.nearlyFull[u.device] && !strings.Contains(message, p.pod.String()+" ") {
				return false
			}
		}
	}
	return true
}

// Look takes a look at the GPUs as they were seen, and tells the pod that has filled one.
func (m *Monitor) Look(ctx context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod) {
	m.podsOfLastPass = podsOnNode{pods: pods, holders: with}
	all := m.usages(ctx, gpus)
	m.adoptShownCondition(condition.Find(node, config.ConditionGPUMemoryPressure), all)
	m.take(all)
}

// LookAgain takes a look between two passes, and reports whether there is something to tell of the node.
func (m *Monitor) LookAgain(ctx context.Context) bool {
	if !m.watched() {
		return false
	}
	before, _, _ := m.verdict()
	gpus, err := m.Snapshot(ctx)
	if err != nil {
		return true // the next pass finds out what
	}
	m.take(m.usages(ctx, gpus))
	after, _, _ := m.verdict()
	return after != before
}

// usages finds out whose processes are on the GPUs. Where the process table does not tell, only kubelet does.
func (m *Monitor) usages(ctx context.Context, gpus []nvml.GPU) []usage {
	var sought []holders.Sought
	for _, g := range gpus {
		sought = append(sought, holders.Sought{Device: string(g.UUID), Minor: holders.NoFiles, Reported: nvml.PIDs(g.Processes)})
		for _, i := range g.Instances {
			sought = append(sought, holders.Sought{Device: string(g.UUID), Minor: holders.NoFiles, Reported: nvml.PIDs(i.Processes)})
		}
	}
	call, cancel := context.WithTimeout(ctx, ownersTimeout)
	defer cancel()
	clients, err := m.Processes.Holders(call, sought)
	if err != nil {
		m.Log.Debug("whose memory it is that GPUs are full of is not known", zap.Error(err))
	}
	owners := holders.PodsOf(clients, m.podsOfLastPass.pods)
	maps.DeleteFunc(owners, func(_ int, pod *corev1.Pod) bool { return m.ComputesForOthers(pod) })
	return usages(gpus, m.podsOfLastPass.holders, owners)
}

func (m *Monitor) take(all []usage) {
	filled := m.updateNearlyFull(m.Clock.Now(), all)
	m.metrics.looked(m.last, m.nearlyFull)
	for _, u := range filled {
		pod, by := m.mostGrownPod(u)
		m.Tell(pod.pod, pod.uid, corev1.EventTypeWarning, config.ReasonGPUMemoryNearlyFull, "this pod has grown most, by %d MiB: %s", by, u)
	}
}

// Conditions are what is to be told of the memory, with the others that are told now. Complete means that all of the node was seen; silent
// is why the driver does not answer, or empty; beat, that what was told before is to be told again.
func (m *Monitor) Conditions(node *corev1.Node, complete bool, silent string, beat bool) []corev1.NodeCondition {
	unknown := ""
	if silent != "" {
		unknown = "the driver does not say how full the GPUs are: " + silent
		m.last = nil // a look between two passes would take hold of a driver that is being upgraded
		m.metrics.looked(nil, nil)
	}
	if !complete && unknown == "" {
		return nil
	}
	old := condition.Find(node, config.ConditionGPUMemoryPressure)
	status, reason, message, news := m.condition(old, unknown, m.Clock.Now(), beat)
	if !news {
		return nil
	}
	return []corev1.NodeCondition{condition.After(old, config.ConditionGPUMemoryPressure, status, string(reason), message, m.Clock.Now())}
}

// Uses are what pods have, most memory first.
func (m *Monitor) Uses() []api.Use {
	var out []api.Use
	for _, u := range m.last {
		for _, p := range u.pods {
			out = append(out, api.Use{
				Namespace: p.pod.Namespace, Pod: p.pod.Name, GPU: u.index, UUID: u.gpu, Instance: u.instance, Pods: len(u.pods), MemoryMiB: p.mib,
				UsedMiB: u.usedMiB, TotalMiB: u.totalMiB, Unknown: "nobody watches it",
			})
		}
	}
	slices.SortStableFunc(out, func(a, b api.Use) int { return cmp.Compare(b.MemoryMiB, a.MemoryMiB) })
	return out
}
