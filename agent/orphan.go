package agent

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// migManagerLabel marks the pods of a k8s-mig-manager, which minds its own labels while it lives.
const migManagerLabel = "nvidia-mig-manager"

// leftovers is what is known of others who may give back what stands on the node.
type leftovers struct {
	migManagerAt time.Time // when a mig-manager was last seen here
}

// forget takes it that one was here a moment ago, which a new process cannot know.
func (l *leftovers) forget(now time.Time) { l.migManagerAt = now }

// orphan is what stands on a node that has no journal, as when somebody has removed it by hand, and is given back all the
// same: by its marks it is ours, or that of a tool whose remains we are told to adopt.
type orphan struct {
	cordon bool              // managedFields say that it is ours
	labels map[string]string // of operands that are paused, with the values that they had before
	forged bool              // a journal that this host's agent did not write
	host   owedHost          // what the host's record says
}

// is reports whether there is anything.
func (o orphan) is() bool {
	return o.cordon || o.forged || len(o.labels)+len(o.host.Stopped)+len(o.host.Persistent) > 0
}

// String names what there is.
func (o orphan) String() string {
	parts := slices.Sorted(maps.Keys(o.labels))
	if o.cordon {
		parts = append([]string{"our cordon"}, parts...)
	}
	if o.forged {
		parts = append(parts, "a journal that this host's agent did not write for this node, of which nothing is believed")
	}
	if len(o.host.Stopped) > 0 {
		parts = append(parts, "start of "+strings.Join(o.host.Stopped, ", "))
	}
	if n := len(o.host.Persistent); n > 0 {
		parts = append(parts, "persistence mode of "+legible.Counted(n, "GPU"))
	}
	return strings.Join(parts, ", ")
}

// orphanOn looks for remains on a node without a journal. A cordon that people want to keep is none.
func (a *Agent) orphanOn(seen *observed) orphan {
	var o orphan
	if seen.journal != nil {
		return o
	}
	who, _, cordoned := fence.Cordoner(seen.node)
	_, kept := seen.node.Annotations[config.AnnotationKeepCordoned]
	o.cordon = cordoned && who == nodewrite.FieldManager && !kept
	o.forged, o.host = seen.record.forged, seen.record.owed
	o.labels = map[string]string{}
	for _, label := range fence.LeftPaused(seen.node, a.record.operands(a.settings.Operands), fence.PausedValue) {
		o.labels[label] = fence.DeployedValue // no other value is paused
	}
	theirs := fence.LeftPaused(seen.node, a.settings.Operands, fence.PausedForMIGChange)
	if !seen.leftovers.adopts || len(theirs) == 0 {
		return o
	}
	if seen.leftovers.adoptsIn = adoptAfter - a.clock.Since(a.leftovers.migManagerAt); seen.leftovers.adoptsIn > 0 {
		return o
	}
	for _, label := range theirs {
		o.labels[label] = fence.DeployedValue
	}
	return o
}

// adoptAfter is how long a mig-manager has to be away until what it has left is ours: from one pod of a rollout to the next, none is
// there for some seconds.
const adoptAfter = time.Minute

// runsMIGManager reports whether a mig-manager is on the node, which then clears its own labels away. It is of a DaemonSet that exists:
// the label alone is anybody's.
func runsMIGManager(believed []corev1.Pod) bool {
	return slices.ContainsFunc(believed, func(p corev1.Pod) bool {
		_, of := holders.DaemonSetOf(&p)
		return of && p.Labels["app"] == migManagerLabel && !ended(&p)
	})
}

// adopts reports whether what a mig-manager has left is ours to clear away: where people have said so, and none is there to do it.
func (a *Agent) adopts(pods []corev1.Pod) bool {
	return slices.Contains(a.settings.Recover.Adopt, config.AdoptMIGManager) && !runsMIGManager(pods)
}

// pausedHere reports whether the operand is away by our hand, or by one whose remains we have adopted.
func (s observed) pausedHere(o fence.Operand) bool {
	if o.State == fence.OperandPaused {
		return true
	}
	_, left := s.leftovers.orphan.labels[o.Label]
	if s.journal != nil {
		_, left = s.journal.Paused[o.Label]
	}
	return left && s.leftovers.adopts && o.Value == fence.PausedForMIGChange
}

// paused reports whether the device plugin is away by its label, so that nobody offers GPUs.
func (s observed) paused() bool {
	return slices.ContainsFunc(s.pauses, func(o fence.Operand) bool {
		return o.Label == config.LabelDevicePlugin && s.pausedHere(o)
	})
}

// uncordoned reports whether somebody else has lifted a cordon that is ours.
func (s observed) uncordoned() bool {
	return s.journal != nil && s.journal.Cordoned && !s.journal.WasUnschedulable && !s.node.Spec.Unschedulable
}
