package plugin

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// labelWrites counts how often the agent has set the config manager's label to one key in one change.
type labelWrites struct {
	operation, key string
	times          int
}

func (l *labelWrites) add(operation, key string) {
	if l.operation != operation || l.key != key {
		*l = labelWrites{operation: operation, key: key}
	}
	l.times++
}

// mostLabelWrites is how often the agent sets the label in one change. Once a user may have changed it at that moment; the second time it is a
// program, which would set it back for ever.
const mostLabelWrites = 2

// isSetBack reports whether the agent has set the label for this change, and it has another value.
func (h *Handover) isSetBack(seen *state.Observed, want state.Desired) bool {
	key := want.Plugin.Text
	l := h.labelWrites
	return l.times > 0 && l.operation == seen.Operation() && l.key == key && seen.Node.Labels[seen.Plugin.Manager.Label] != key
}

// refuseToSetAgain ends the change if something sets the config manager's label back each time. In an undo the agent retries, ever less often.
func (h *Handover) refuseToSetAgain(seen *state.Observed, want state.Desired) error {
	m, key := seen.Plugin.Manager, want.Plugin.Text
	if !h.isSetBack(seen, want) || h.labelWrites.times < mostLabelWrites {
		return nil
	}
	message := fmt.Sprintf("label %s went back to %q each of the %d times that the agent set it to %q for %s: %s must leave it; a MachineSet must not have it among "+
		"its labels (deploy/AUTOSCALERS.md)", m.Label, seen.Node.Labels[m.Label], h.labelWrites.times, key, want.PluginAskedBy(), labeler(seen.Node, m.Label))
	if want.Undo {
		h.labelWrites.times = 0
		return errors.New(message)
	}
	return &api.Failure{Fingerprint: want.Fingerprint, Reason: config.ReasonStepHadNoEffect, Message: message}
}

// labeler names the programs that have set the label, by managedFields.
func labeler(node *corev1.Node, label string) string {
	if others := nodewrite.Others(fence.Labelers(node, label)); others != "" {
		return others + " (by managedFields)"
	}
	return "something"
}
