// Package state is one look at a node, and what its labels ask for: the data that decisions are made by, and what follows from
// that alone. It has no client, no clock and no driver. The observers of package
// agent fill it, each section once in a pass.
package state

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/fleet"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/nodekeys"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Observed is one look at everything that decisions are made by, in sections. Each section is filled by one function, named after it.
type Observed struct {
	Node         *corev1.Node
	Marks        Marks
	Boot         Boot
	Journal      *journal.Journal
	Record       Record
	Files        Files
	Pool         Pool
	GPUs         []nvml.GPU
	Recovered    map[nvml.UUID]time.Time // when something was last wrong with a GPU that is well again
	Specs        []string                // CDI specs that describe other GPU instances than there are
	Reboots      plan.Reboots
	Pods         []corev1.Pod // all pods of the node
	Kubelet      Kubelet
	DevicePlugin DevicePlugin
	Plugin       PluginConfig // of the device plugin; looked at only where anything is asked of it, or owed to it
	Pauses       []fence.Operand
	Leftovers    Leftovers
	Holders      Holders
	Units        []plan.Unit // of the host that may have to stop, or to start again
	Started      Started
	Capacity     Capacity
	Complete     bool // all of it was seen; otherwise the look ended early with an error
}

// Marks is what the agent and other tools have written on the node object.
type Marks struct {
	Tools   []fence.Marker
	Fenced  bool
	Startup *corev1.Taint // of a node that has just been registered: it keeps pods away
	Upgrade string        // label that says that the driver is being upgraded
	// Complete: the look has not ended before it.
	Complete bool
}

// Boot is the host's boot, by its kernel.
type Boot struct {
	ID  string // empty if it is not known
	Err error  // why it is not
}

// Record is what the host's record says, beside the journal.
type Record struct {
	Forged    bool       // the node has a journal that this host's agent did not write for it
	Status    api.Status // the last that the agent wrote, with what the record has of it
	Learnt    hostrecord.Learnt
	Published nodekeys.Keys     // labels and taints that a profile of ours has put on the node
	Owed      Owed              // to the host, by a journal that was lost
	Dropped   map[string]string // units that were stopped and are not started, and why
}

// Files are the administrator's files.
type Files struct {
	Configs  *ConfigMapFile // MIG configs, nil if none are configured
	Profiles *ConfigMapFile // our own catalog, nil if none is configured
}

// Pool is the node's pool, and when its nodes may be disturbed.
type Pool struct {
	config.Pool
	File config.Maintenance
	Err  error // why the maintenance file cannot be read, which keeps the node from any change
	Slot fleet.State
}

// Kubelet is what kubelet says.
type Kubelet struct {
	Offered  capacity.Resources // what it would give out
	Assigned holders.Assignments
	Err      error // it does not answer: which pod has which device is not known
}

// DevicePlugin are the pods of NVIDIA's programs that offer GPUs.
type DevicePlugin struct {
	Pods       []corev1.Pod
	MPSDaemons []corev1.Pod
	Rivals     string // why it is not known which of the pods counts; empty if it is
	Unpicked   string // which configs there are that nothing asks for, where nothing is asked for
}

// Leftovers is what an agent, or another tool, has left on the node.
type Leftovers struct {
	Orphan     Orphan
	MIGManager bool          // a mig-manager runs here
	Adopts     bool          // what one has left is ours to clear away
	AdoptsIn   time.Duration // what one has left is on the node, and ours to take on only then
}

// Holders are those who hold GPUs, or parts of them.
type Holders struct {
	Pods         []holders.Pod    // with a GPU or a part of one
	Processes    []holders.Client // that hold what goes; looked for only when something does
	Err          error            // the host's process table cannot be looked at: who holds what goes is not known
	OfLibrary    []holders.Pod    // pods without a GPU that keep the library open and can be sent away
	BeforeReboot []holders.Pod    // pods that have to leave before a reboot
}

// Capacity is how hardware, kubelet and node agree.
type Capacity struct {
	Missing  []string       // how they disagree
	Proven   bool           // they did not, whatever is asked for
	Proof    capacity.Proof // with this look, if it is the one that is decided by
	Strategy config.MIGStrategy
}

// ConfigMapFile is one key of a ConfigMap, as found.
type ConfigMapFile struct {
	Name   string // "ConfigMap namespace/name, key config.yaml"
	Data   []byte
	Absent bool  // there is no such ConfigMap, which is legal: it is optional
	Err    error // it may not be read, or has no such key
}

// ExplicitStrategy is the MIG strategy of the plugin's arguments or environment; empty if they say none. While the plugin is away in the middle
// of a change, it is the one that the journal holds.
func (s Observed) ExplicitStrategy() config.MIGStrategy {
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

// StrategyOf is the MIG strategy of the plugin's arguments or environment, which win over its config file in this order.
func StrategyOf(pod corev1.Pod) config.MIGStrategy {
	var env config.MIGStrategy
	for _, c := range pod.Spec.Containers {
		for i, arg := range slices.Concat(c.Command, c.Args) {
			all := slices.Concat(c.Command, c.Args)
			if value, ok := strings.CutPrefix(arg, migStrategyFlag+"="); ok {
				return config.MIGStrategy(value)
			}
			if arg == migStrategyFlag && i+1 < len(all) {
				return config.MIGStrategy(all[i+1])
			}
		}
		for _, e := range c.Env {
			if e.Name == envMIGStrategy && e.Value != "" {
				env = config.MIGStrategy(e.Value)
			}
		}
	}
	return env
}

// How the plugin is told its MIG strategy.
const (
	migStrategyFlag = "--mig-strategy"
	envMIGStrategy  = "MIG_STRATEGY"
)

// OperandLabels are the labels that operands are paused by: those of the settings first, then those that an agent has left or the journal holds.
func (s Observed) OperandLabels(ofSettings []string) []string {
	out := slices.Clone(ofSettings)
	left := slices.Sorted(maps.Keys(s.Leftovers.Orphan.Labels))
	if s.Journal != nil {
		left = append(left, slices.Sorted(maps.Keys(s.Journal.Paused))...)
	}
	for _, label := range left {
		if !slices.Contains(out, label) {
			out = append(out, label)
		}
	}
	return out
}

// PlannedOperands are the operands that go by a label of the node, and the device plugin's pods.
func (s Observed) PlannedOperands() (pauses []plan.Pause, plugins []plan.Operand) {
	byLabel := map[string]bool{}
	for _, o := range s.Pauses {
		p := plan.Pause{Label: o.Label, Plugin: o.Label == config.LabelDevicePlugin, Paused: s.pausedHere(o)}
		if !p.Paused && (o.State != fence.OperandRunning || keepsClaims(o)) {
			continue
		}
		for _, pod := range o.Pods {
			p.Pods = append(p.Pods, PlannedPod(pod))
			byLabel[string(pod.UID)] = true
		}
		pauses = append(pauses, p)
	}
	for _, p := range s.DevicePlugin.Pods {
		plugins = append(plugins, plan.Operand{
			Pod:     plan.Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID)},
			Stale:   s.Journal != nil && s.Journal.RanBefore(string(p.UID)),
			Returns: holders.Tolerates(p.Spec.Tolerations, FenceTaint()),
			ByLabel: byLabel[string(p.UID)], Withholds: s.withholds(&p),
		})
	}
	return pauses, plugins
}

// PlannedPod is the pod as a step names it.
func PlannedPod(p holders.Pod) plan.Pod {
	return plan.Pod{Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Devices: p.Devices, Known: p.DevicesKnown}
}

// Failed is the failure that is known of the wish: while it is being undone from the journal, after that from the status.
func (s Observed) Failed(want Desired) *api.Failure {
	if s.GivenUp(want) {
		return s.Journal.Undo
	}
	if f := s.Record.Status.Failed; f != nil && f.Wish == want.Fingerprint && !f.Later {
		return f
	}
	return nil
}

// Kept is the failure that the status must go on telling: the one that is known of the wish, or, while nobody knows what
// is wished because the catalog cannot be read, the last one.
func (s Observed) Kept(want Desired) *api.Failure {
	if f := s.Failed(want); f != nil && !f.Later {
		return f
	}
	if want.Name != "" && want.Fingerprint == "" {
		return s.Record.Status.Failed
	}
	return nil
}

// ForeignCordon reports whether the node is cordoned by somebody else. Who has cordoned it is in managedFields; where
// those are stripped, a cordon under our own taint is ours, unless the journal says that it was there before.
func (s Observed) ForeignCordon() bool {
	if !s.Node.Spec.Unschedulable {
		return false
	}
	who, _, ok := fence.Cordoner(s.Node)
	switch {
	case ok && who != "":
		return who != nodewrite.FieldManager
	case s.Journal != nil && s.Journal.Cordoned:
		return s.Journal.WasUnschedulable
	default:
		return !s.Marks.Fenced
	}
}

// GivenUp reports whether what is asked for is what the journal says cannot be done.
func (s Observed) GivenUp(want Desired) bool {
	return s.Journal != nil && s.Journal.Undo != nil && s.Journal.Undo.Wish == want.Fingerprint
}

// Other reports whether the journal is about another target than the one that is asked for.
func (s Observed) Other(want Desired) bool {
	return s.Journal != nil && !want.Undo && s.Journal.Target != want.Name
}

// Edited reports whether the journal is about what the target's name meant before somebody has edited it. A journal of an agent that
// did not note it is not.
func (s Observed) Edited(want Desired) bool {
	return s.Journal != nil && !want.Undo && !s.Other(want) && s.Journal.Wish != "" && want.Fingerprint != "" && s.Journal.Wish != want.Fingerprint
}

// Operation identifies the change that is under way, across restarts of the agent; empty if there is none.
func (s Observed) Operation() string {
	if s.Journal == nil {
		return ""
	}
	return s.Journal.Operation
}

// Blockers is what keeps the capacity from being proven, in one text.
func (s Observed) Blockers() string { return strings.Join(s.Capacity.Missing, "; ") }

// Since is when the reason began: now, unless it was told before.
func (s Observed) Since(reason config.Reason, now time.Time) time.Time {
	if s.Record.Status.Reason == reason && !s.Record.Status.Since.IsZero() {
		return s.Record.Status.Since
	}
	return now
}

// GPU is the one with the UUID, if it was seen.
func (s Observed) GPU(uuid nvml.UUID) (nvml.GPU, bool) {
	for _, gpu := range s.GPUs {
		if gpu.UUID == uuid {
			return gpu, true
		}
	}
	return nvml.GPU{}, false
}
