// Package state is one observation of a node, and what its labels request: the data for the agent's decisions, and what follows from that data alone. It
// uses no client, clock or driver. Package agent fills it in observe.go: first in observe; once a plan says which devices it takes, planned adds who holds
// them.
package state

import (
	"cmp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Observed is one observation of everything that the agent needs to decide, in sections.
type Observed struct {
	Node         *corev1.Node
	Marks        Marks
	Boot         Boot
	Journal      *journal.Journal
	Record       Record
	Files        Files
	Pool         Pool
	GPUs         []nvml.GPU
	Recovered    map[nvml.UUID]time.Time // for each healthy GPU: restart a device plugin that started earlier and withholds it
	Outdated     time.Time               // restart a device plugin that started earlier and advertises devices that are gone; zero if none
	Early        []types.UID             // pods of what offers the GPUs that were there right after this process last changed what they read at their start
	Sick         plan.Sick
	Specs        []string // CDI specs that do not describe the present GPU instances
	Reboots      plan.Reboots
	Pods         []corev1.Pod // all pods of the node
	Kubelet      Kubelet
	DRA          DRA
	Owner        Owner // who allocates the GPUs, from the fields above and DevicePlugin
	DevicePlugin DevicePlugin
	Plugin       PluginConfig // of the device plugin; read only if the request depends on it, or a change has replaced it
	Pauses       []fence.Operand
	Leftovers    Leftovers
	Holders      Holders
	Units        []plan.Unit // units of the host that may have to stop, or to start again
	Started      Started
	Capacity     Capacity
	Complete     bool // the agent has seen all of it; otherwise the observation ended early with an error
}

// Marks is what the agent and other tools have written on the node object.
type Marks struct {
	Tools  []fence.Marker
	Fenced bool
	// Lost: the node shows a change by an agent, and the host's record of it is lost. See LostChange.
	Lost    bool
	Startup []corev1.Taint // taints of a node that has just been registered: they keep pods away
	// Returned: another program keeps putting these taints back, and the agent leaves them there.
	Returned bool
	Upgrade  string // label that says that the driver is being upgraded
	// Complete: the observation did not end before this section.
	Complete bool
}

// Boot is the host's boot, as its kernel reports it.
type Boot struct {
	ID  string // empty if it is not known
	Err error  // why it is not
}

// Record is what the host's record says besides the journal.
type Record struct {
	journal.Known

	Pending ToRestore         // what a lost journal leaves to restore on the host
	Dropped map[string]string // units that the agent has stopped and does not start, and why
}

// Files are the administrator's files.
type Files struct {
	Configs  *ConfigMapFile // MIG configs, nil if none are configured
	Profiles *ConfigMapFile // profiles, nil if none are configured
}

// Pool is the node's pool, and when the agent may disturb its nodes.
type Pool struct {
	maintenance.Pool
	File maintenance.Maintenance
	Err  error // why the maintenance file cannot be read; the agent then begins no change
	Slot Slot
	// Claim is the operation that this process has taken a slot for; empty if it has taken none.
	Claim string
}

// HasLimit reports whether the node is in a pool that limits how many nodes are unavailable, or that pauses after failures.
func (p Pool) HasLimit() bool { return p.Name != "" }

// ChoosePool sets the node's pool. The node's labels choose it, unless a change disturbs the node: it keeps the pool of its slot until it ends. A change
// that only waits for a slot follows the labels, since the former pool no longer lists the node. The pool keeps its name, and with it its slot, while
// the agent cannot read the maintenance file.
func (s *Observed) ChoosePool() {
	s.Pool.Pool = s.Pool.File.For(s.Node)
	if began := s.Record.Learnt.Pool; began != nil && s.Journal != nil && s.Journal.Disturbs() {
		s.Pool.Pool = s.Pool.File.Named(began.Name, began.Selector)
	}
}

// HoldsSlot reports whether the slot belongs to the change that is under way or about to begin. Before a change has begun, a slot that an earlier process or
// another node's agent has taken does not count: the agent requests it again.
func (s *Observed) HoldsSlot() bool {
	operation := cmp.Or(s.Operation(), s.Pool.Claim)
	return s.Pool.Slot.Held && operation != "" && s.Pool.Slot.Operation == operation
}

// Slot is what the Lease of a pool says of a node.
type Slot struct {
	Held      bool   // the node has a slot
	Operation string // the change that it has the slot for
	Waiting   bool   // the node is in the queue
	Paused    string // why the pool is paused; empty if it is not
}

// Kubelet is what kubelet reports.
type Kubelet struct {
	Offered  capacity.Resources // devices that kubelet may allocate
	Assigned holders.Assignments
	Err      error // kubelet does not answer: the agent does not know which pod has which device
}

// OffersGPUs reports whether kubelet has GPUs, or parts of them, to allocate.
func (k Kubelet) OffersGPUs() bool { return len(capacity.Offered(k.Offered)) > 0 }

// DevicePlugin are the pods of NVIDIA's programs that advertise GPUs.
type DevicePlugin struct {
	Pods       []corev1.Pod
	MPSDaemons []corev1.Pod
	Rivals     string // why the agent does not know which of the pods counts; empty if it does
	// Unconnected says that kubelet allocates devices of a plugin that does not serve it; empty if it serves it, or if the agent cannot tell.
	Unconnected string
	// ObeysLabel: a config manager gives the plugin the config that config.LabelDevicePluginConfig names, whatever the other labels say.
	ObeysLabel bool
	Unpicked   string // existing configs of the device plugin, on a node with labels that request none
	Advice     string // what a user can do if there is no pod
}

// Leftovers is what an agent or another tool has left on the node.
type Leftovers struct {
	Orphan     Orphan
	MIGManager bool          // a mig-manager runs here
	Adopts     bool          // the agent restores what a mig-manager has left
	AdoptsIn   time.Duration // a mig-manager has left something, and the agent restores it after this time
}

// Holders are the pods and processes that hold GPUs, or parts of them.
type Holders struct {
	Pods         []holders.Pod    // pods with a GPU or a part of one
	Processes    []holders.Client // processes that hold a device which the plan takes; searched only if it takes one
	Err          error            // the agent cannot read the host's process table, so it does not know the holders
	OfLibrary    []holders.Pod    // pods without a GPU that keep the library open, and that the agent can evict
	BeforeReboot []holders.Pod    // pods that have to leave before a reboot
}

// Capacity says how hardware, kubelet and node agree: with each other until the goal of the pass is known, then also with that goal.
type Capacity struct {
	Missing   []string           // how they disagree
	Verified  bool               // they agree, whatever the labels request
	Strategy  config.MIGStrategy // the one that the device plugin is to run with
	Stale     []string           // labels of GPU feature discovery that show another sharing than the desired one
	Agreement capacity.Agreement // the agreeing observations in a row, with this one
	Withdrawn []Withdrawn        // pods that hold devices which are no longer theirs
	Late      []types.UID        // pods of the device plugin that have been late for half of the wait for capacity
}

// ConfigMapFile is one key of a ConfigMap, as found.
type ConfigMapFile struct {
	Name   string // "ConfigMap namespace/name, key config.yaml"
	Data   []byte
	Absent bool  // there is no such ConfigMap, which is legal: it is optional
	Err    error // the agent may not read it, or it has no such key
}

// ExplicitStrategy is the MIG strategy in the plugin's arguments or environment; empty if they set none. While the agent keeps the plugin away during a
// change, it is the one in the journal.
func (s *Observed) ExplicitStrategy() config.MIGStrategy {
	for _, pod := range s.DevicePlugin.Pods {
		if strategy := StrategyOf(pod); strategy != "" {
			return strategy
		}
	}
	if s.Journal != nil {
		return s.Journal.Strategy
	}
	return ""
}

// StrategyOf is the MIG strategy in the plugin's arguments or environment. Arguments override the environment, and both override the config file.
func StrategyOf(pod corev1.Pod) config.MIGStrategy {
	return config.MIGStrategy(optionOf(pod, "--mig-strategy", "MIG_STRATEGY"))
}

// ReadsConfig reports whether a flag or variable of the plugin's pod names a config file, wherever that is.
func ReadsConfig(pod corev1.Pod) bool { return optionOf(pod, "--config-file", "CONFIG_FILE") != "" }

// optionOf returns the value of a flag of the plugin, or of its environment variable.
func optionOf(pod corev1.Pod, flag, variable string) (value string) {
	for _, c := range pod.Spec.Containers {
		all := slices.Concat(c.Command, c.Args)
		for i, arg := range all {
			if value, ok := strings.CutPrefix(arg, flag+"="); ok {
				return value
			}
			if arg == flag && i+1 < len(all) {
				return all[i+1]
			}
		}
		for _, e := range c.Env {
			if e.Name == variable && e.Value != "" {
				value = e.Value
			}
		}
	}
	return value
}

// PlannedPod is the pod as a step names it.
func PlannedPod(p holders.Pod) plan.Pod {
	return plan.Pod{
		Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Devices: p.Devices, Known: p.DevicesKnown, Claims: p.DeviceClaims,
		PassesCordon: passesCordon(p) && !holders.Tolerates(p.Tolerations, FenceTaint()),
	}
}

// PassesFence reports whether a successor of the pod may start behind the fence.
func PassesFence(p holders.Pod) bool {
	return passesCordon(p) && holders.Tolerates(p.Tolerations, FenceTaint())
}

func passesCordon(p holders.Pod) bool {
	return p.Daemon || holders.Tolerates(p.Tolerations, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule})
}

// Failed returns the failure of the desired change: from the journal while the agent undoes it, after that from the host's record.
func (s *Observed) Failed(want Desired) *api.Failure {
	if s.GivenUp(want) {
		return s.Journal.Undo
	}
	if f := s.Record.Learnt.Failed; f != nil && f.Fingerprint == want.Fingerprint {
		return f
	}
	return nil
}

// ReportedFailure returns the failure that the status keeps reporting: the desired change's. While the agent cannot read the catalog, and so does not know
// the desired state, it is the last one.
func (s *Observed) ReportedFailure(want Desired) *api.Failure {
	if f := s.Failed(want); f != nil && !f.Later {
		return f
	}
	if want.Name != "" && want.Fingerprint == "" {
		return s.Record.Learnt.Failed
	}
	return nil
}

// GivenUp reports whether, by the journal, the agent has given up the desired change.
func (s *Observed) GivenUp(want Desired) bool {
	return s.Journal != nil && s.Journal.Undo != nil && s.Journal.Undo.Fingerprint == want.Fingerprint
}

// Other reports whether the journal is for another target than the desired one.
func (s *Observed) Other(want Desired) bool {
	return s.Journal != nil && !want.Undo && s.Journal.Target != want.Name
}

// Edited reports whether a user has edited the target's config since the change began.
func (s *Observed) Edited(want Desired) bool {
	return s.Journal != nil && !want.Undo && !s.Other(want) && s.Journal.Fingerprint != "" && want.Fingerprint != "" && s.Journal.Fingerprint != want.Fingerprint
}

// Operation identifies the change that is under way, across restarts of the agent; empty if there is none.
func (s *Observed) Operation() string {
	if s.Journal == nil {
		return ""
	}
	return s.Journal.Operation
}

// Granted returns how long after the fence of the change under way pods may take that are asked behind it, by their UIDs; nil if none was asked.
func (s *Observed) Granted() map[types.UID]time.Duration {
	if s.Journal == nil {
		return nil
	}
	return s.Record.Learnt.Granted.Behind(s.Journal.Started)
}

// Since returns when the reason began: now, unless the agent has reported it already.
func (s *Observed) Since(reason config.Reason, now time.Time) time.Time {
	if s.Record.Learnt.Reported.Reason == reason && !s.Record.Learnt.Reported.Since.IsZero() {
		return s.Record.Learnt.Reported.Since
	}
	return now
}

// GPU returns the observed GPU with the UUID, if there is one.
func (s *Observed) GPU(uuid nvml.UUID) (nvml.GPU, bool) {
	for _, gpu := range s.GPUs {
		if gpu.UUID == uuid {
			return gpu, true
		}
	}
	return nvml.GPU{}, false
}
