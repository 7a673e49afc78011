package deviceplugin

import (
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// setLabel is how often the agent has set the config manager's label to one key in one change.
type setLabel struct {
	operation, key string
	times          int
}

func (s *setLabel) set(operation, key string) {
	if s.operation != operation || s.key != key {
		*s = setLabel{operation: operation, key: key}
	}
	s.times++
}

// mostSets is how often the agent sets the label in one change. Somebody may have changed it at that very moment; whoever sets it back again is a
// program, which would go on for ever.
const mostSets = 2

// longestWriter bounds what a message quotes of the node, as labels and names of programs.
const longestWriter = 100

// isSetBack reports whether the agent has set the label for this change, and it says something else.
func (dp *Plugin) isSetBack(seen state.Observed, want state.Desired) bool {
	key := want.Plugin.Text
	return dp.label.operation == seen.Operation() && dp.label.key == key && seen.Node.Labels[seen.Plugin.Manager.Label] != key
}

// setBack ends the change if something sets the config manager's label back each time. On the way back the agent tries again, ever less often.
func (dp *Plugin) setBack(seen state.Observed, want state.Desired) error {
	m, key := seen.Plugin.Manager, want.Plugin.Text
	if !dp.isSetBack(seen, want) || dp.label.times < mostSets {
		return nil
	}
	message := fmt.Sprintf("label %s was set back to %q each of the %d times that the agent had set it to %q for %s: %s must leave it; a MachineSet must not have it among "+
		"its labels (deploy/AUTOSCALERS.md)", m.Label, legible.Message(seen.Node.Labels[m.Label], longestWriter), dp.label.times, key, want.PluginAskedBy(), labeler(seen.Node, m.Label))
	if want.Undo {
		dp.label.times = 0
		return errors.New(message)
	}
	return &api.Failure{Wish: want.Fingerprint, Reason: config.ReasonStepHadNoEffect, Message: message}
}

// labeler names who has set the label, by managedFields.
func labeler(node *corev1.Node, label string) string {
	managers := fence.Labelers(node, label)
	if len(managers) == 0 {
		return "something"
	}
	return legible.Message(strings.Join(managers, ", "), longestWriter) + ", which has it by managedFields,"
}
