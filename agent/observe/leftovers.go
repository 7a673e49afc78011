package observe

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// Leftovers finds the leftovers of an earlier agent on one node.
type Leftovers struct {
	Record   *journal.Keeper
	Settings config.Settings
	Fence    fence.Fence
	Clock    *monotonic.Clock

	migManagerAt time.Time // when the agent last saw a mig-manager here
}

// Forget assumes that a mig-manager was here a moment ago: a new process does not know when it left.
func (l *Leftovers) Forget(now time.Time) { l.migManagerAt = now }

// SawMIGManager notes that a mig-manager is here.
func (l *Leftovers) SawMIGManager() { l.migManagerAt = l.Clock.Now() }

// Orphan looks for leftovers on a node without a journal. It leaves out a cordon that a user wants to keep.
func (l *Leftovers) Orphan(seen *state.Observed) state.Orphan {
	var o state.Orphan
	if seen.Journal != nil {
		return o
	}
	_, kept := seen.Node.Annotations[config.AnnotationKeepCordoned]
	o.Cordon = seen.Node.Spec.Unschedulable && !seen.ForeignCordon() && !kept
	o.Kept = l.Fence.KeptBy(seen.Node, config.FieldManager, config.FenceAnnotations())
	o.StrangeJournal, o.Host = seen.Record.StrangeJournal, seen.Record.Pending
	o.Labels = map[string]string{}
	for _, label := range fence.LeftPaused(seen.Node, l.Record.Operands(l.Settings.Operands), fence.PausedValue) {
		o.Labels[label] = fence.DeployedValue // an operand with any other value would not be paused
	}
	theirs := fence.LeftPaused(seen.Node, l.Settings.Operands, fence.PausedForMIGChange)
	if !seen.Leftovers.Adopts || len(theirs) == 0 {
		return o
	}
	if seen.Leftovers.AdoptsIn = adoptAfter - l.Clock.Since(l.migManagerAt); seen.Leftovers.AdoptsIn > 0 {
		return o
	}
	for _, label := range theirs {
		o.Labels[label] = fence.DeployedValue
	}
	return o
}

// adoptAfter is how long a mig-manager has to be gone until the agent adopts its leftovers: during a rollout, none runs for some seconds.
const adoptAfter = time.Minute

// Adopts reports whether the agent restores a mig-manager's leftovers: if its settings say so, and no mig-manager is there to do it.
func (l *Leftovers) Adopts(pods []corev1.Pod) bool {
	return slices.Contains(l.Settings.Recover.Adopt, config.AdoptMIGManager) && !state.RunsMIGManager(pods)
}
