package state

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/managed"
)

// FenceTaint keeps pods away from the node while its GPUs are changed.
func FenceTaint() corev1.Taint {
	return corev1.Taint{Key: config.TaintRepartitioning, Effect: corev1.TaintEffectNoSchedule}
}

// DisruptionStarted reports whether the change has begun to take something from pods. The agent then no longer waits for a better moment: the deadlines
// count from the fence.
func (s *Observed) DisruptionStarted() bool {
	return s.Journal != nil && (s.Journal.KeepsPodsAway() || slices.ContainsFunc(s.Pauses, s.PausedHere))
}

// ToolsAtWork names the other tools that work on the node, by their marks on it. The agent does not wait for work that a tool has only announced, nor for a
// mig-manager without a pod here, even if its labels are set.
func (s *Observed) ToolsAtWork() []string {
	return s.Tools(func(m fence.Marker) bool {
		return !m.Planned && (m.Tool != fence.ToolMIGManager || s.Leftovers.MIGManager)
	})
}

// ToolsThatCordon names the other tools that rely on the node's cordon.
func (s *Observed) ToolsThatCordon() []string {
	return s.Tools(func(m fence.Marker) bool { return m.Cordons })
}

// Tools names the tools with marks that count.
func (s *Observed) Tools(count func(fence.Marker) bool) []string {
	var out []string
	for _, m := range s.Marks.Tools {
		if count(m) {
			out = append(out, nameOf(m))
		}
	}
	return out
}

// nameOf names the tool, its sign on the node, and what ends its work.
func nameOf(m fence.Marker) string {
	text := m.Tool + ", by " + m.Sign
	if !m.Since.IsZero() && !strings.HasSuffix(m.Sign, m.Since.Format(time.RFC3339)) { // many signs say it already
		text += ", since " + outcome.Moment(m.Since)
	}
	if m.Done != "" {
		text += " (" + m.Done + ")"
	}
	return text
}

// Orphan is what a change has left on a node without a journal, as when a user has removed the journal by hand. The agent restores it anyway: the marks
// are the agent's, or those of a tool that the settings tell the agent to clean up after.
type Orphan struct {
	Cordon         bool              // the agent has cordoned the node, by managedFields or its marks
	Kept           []string          // other tools' annotations that the agent has set, by managedFields
	Labels         map[string]string // labels of paused operands, with their former values
	StrangeJournal bool              // the node has a journal that this host's agent did not write
	Host           ToRestore         // what the agent must restore on the host by its record
}

// Exists reports whether there is anything.
func (o Orphan) Exists() bool {
	return o.Cordon || o.StrangeJournal || len(o.Kept)+len(o.Labels)+len(o.Host.Stopped)+len(o.Host.Persistent) > 0
}

// String names what there is.
func (o Orphan) String() string {
	parts := append(slices.Clone(o.Kept), slices.Sorted(maps.Keys(o.Labels))...)
	if o.Cordon {
		parts = append([]string{"our cordon"}, parts...)
	}
	if o.StrangeJournal {
		parts = append(parts, "an unrecognized journal annotation, ignored")
	}
	if len(o.Host.Stopped) > 0 {
		parts = append(parts, "start of "+strings.Join(o.Host.Stopped, ", "))
	}
	if n := len(o.Host.Persistent); n > 0 {
		parts = append(parts, "persistence mode of "+sanitize.Counted(n, "GPU"))
	}
	return strings.Join(parts, ", ")
}

// Writing describes the journal write for a step towards the desired state.
func (s *Observed) Writing(want Desired, step plan.Kind) journal.Write {
	w := s.GivingBack()
	w.Fingerprint, w.GivesBack = want.Fingerprint, want.Undo || step == plan.Adopt
	return w
}

// GivingBack describes a journal write that takes nothing more.
func (s *Observed) GivingBack() journal.Write {
	return journal.Write{
		Node: s.Node, Boot: s.Boot.ID, Before: s.Journal, GivesBack: true, Disrupted: s.DisruptionStarted(),
		Since: s.Since(config.ReasonHostRecordUnavailable, time.Time{}),
	}
}

// PausedHere reports whether the operand was paused by the agent, or by a tool that the agent cleans up after.
func (s *Observed) PausedHere(o fence.Operand) bool {
	if o.State == fence.OperandPaused {
		return true
	}
	_, left := s.Leftovers.Orphan.Labels[o.Label]
	if s.Journal != nil {
		_, left = s.Journal.Paused[o.Label]
	}
	return left && s.Leftovers.Adopts && o.Value == fence.PausedForMIGChange
}

// PluginPaused reports whether the agent has paused the device plugin by its label: no plugin advertises GPUs.
func (s *Observed) PluginPaused() bool {
	return slices.ContainsFunc(s.Pauses, func(o fence.Operand) bool {
		return o.Label == config.LabelDevicePlugin && s.PausedHere(o)
	})
}

// LostChange reports whether the node shows a change by an agent, and the host's record of it is lost. A change of GPUs that NVIDIA's DRA driver allocates
// sets no taint, so the journal, the reason that Slurm shows, and the agent's condition count. The annotations for autoscalers do not: administrators
// set the same. While the record is there it says better than the node what is under way. Any of these marks may be forged, as the taint may: whoever can
// write them can also write managedFields, by which a cordon is the agent's, and labels, which ask for a change.
func LostChange(node *corev1.Node, record journal.Known) bool {
	return record.StrangeJournal || record.First && (strings.HasPrefix(node.Annotations[config.AnnotationCordonReason], config.CordonReasonPrefix) ||
		slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == config.ConditionGPUPartitionReady && slices.Contains(inChange, config.Reason(c.Reason))
		}))
}

// inChange are the reasons that the condition has behind a fence alone. Others are given before it as well, such as EvictionBlocked and GPUInUse, or without
// one, such as AwaitingCapacity: another user's cordon must not count as the agent's for them.
var inChange = []config.Reason{
	config.ReasonFencing, config.ReasonEvicting, config.ReasonPausingOperands, config.ReasonStoppingUnits, config.ReasonRepartitioning, config.ReasonRecovering,
	config.ReasonRollingBack, config.ReasonFinishing,
}

// ForeignCordon reports whether another user or tool has cordoned the node. managedFields name the owner of a cordon. If they are stripped from the node,
// the journal says whether the cordon was there before the change. Without a journal, a cordon together with the agent's taint, or with another mark of a
// change whose record is lost, is the agent's. The agent lifts only its own cordon.
func (s *Observed) ForeignCordon() bool {
	if !s.Node.Spec.Unschedulable {
		return false
	}
	who, _, ok := managed.Cordoner(s.Node)
	switch {
	case ok && who != "":
		return who != config.FieldManager
	case s.Journal != nil && s.Journal.Cordoned:
		return s.Journal.WasUnschedulable
	default:
		return !s.Marks.Fenced && !s.Marks.Lost
	}
}

// Uncordoned reports whether another user or tool has lifted the agent's cordon.
func (s *Observed) Uncordoned() bool {
	return s.Journal != nil && s.Journal.Cordoned && !s.Journal.WasUnschedulable && !s.Node.Spec.Unschedulable
}

// MIGManagerLabel marks the pods of a k8s-mig-manager. While it runs, it restores its own labels.
const MIGManagerLabel = "nvidia-mig-manager"

// RunsMIGManager reports whether a mig-manager is on the node. Its pod must be of an existing DaemonSet: any user may set the label.
func RunsMIGManager(believed []corev1.Pod) bool {
	return slices.ContainsFunc(believed, func(p corev1.Pod) bool {
		_, of := holders.DaemonSetOf(&p)
		return of && p.Labels["app"] == MIGManagerLabel && !Ended(&p)
	})
}

// TaintKeys returns the keys of taints, each once.
func TaintKeys(taints []corev1.Taint) (keys []string) {
	for _, t := range taints {
		if !slices.Contains(keys, t.Key) {
			keys = append(keys, t.Key)
		}
	}
	return keys
}
