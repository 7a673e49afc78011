package state_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
)

// Without a journal that the agent believes, and without managedFields, marks of a change say whose a cordon is.
func TestWhoseCordonItIsOnANodeWithoutManagedFields(t *testing.T) {
	t.Parallel()
	first := journal.Known{First: true}
	for name, row := range map[string]struct {
		annotations map[string]string
		reason      config.Reason // of the agent's condition
		fenced      bool
		record      journal.Known
		foreign     bool
	}{
		"no mark, no record": {record: first, foreign: true},
		"no mark":            {foreign: true},
		"the fence's taint":  {fenced: true},
		"a journal that the record does not know":     {record: journal.Known{StrangeJournal: true}},
		"our reason for Slurm, no record":             {annotations: map[string]string{config.AnnotationCordonReason: "gpuslice: change to x"}, record: first},
		"our reason for Slurm, and a record":          {annotations: map[string]string{config.AnnotationCordonReason: "gpuslice: change to x"}, foreign: true},
		"another's reason for Slurm, no record":       {annotations: map[string]string{config.AnnotationCordonReason: "rack 7"}, record: first, foreign: true},
		"what administrators tell autoscalers":        {annotations: map[string]string{config.AnnotationScaleDownDisabled: "true", config.AnnotationDoNotDisrupt: "true"}, record: first, foreign: true},
		"the condition in a change, no record":        {reason: config.ReasonRepartitioning, record: first},
		"the condition in a change, and a record":     {reason: config.ReasonFencing, foreign: true},
		"the condition before the fence, no record":   {reason: config.ReasonAwaitingWindow, record: first, foreign: true},
		"the condition of an older label, no record":  {reason: config.ReasonOlderRequest, record: first, foreign: true},
		"the condition of a node at rest, no record":  {reason: config.ReasonConverged, record: first, foreign: true},
		"the condition of a blocked drain, no record": {reason: config.ReasonEvictionBlocked, record: first, foreign: true},
	} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: row.annotations}, Spec: corev1.NodeSpec{Unschedulable: true}}
		if row.reason != "" {
			node.Status.Conditions = []corev1.NodeCondition{{Type: config.ConditionGPUPartitionReady, Reason: string(row.reason)}}
		}
		seen := state.Observed{Node: node, Marks: state.Marks{Fenced: row.fenced, Lost: state.LostChange(node, row.record)}}
		if got := seen.ForeignCordon(); got != row.foreign {
			t.Errorf("%s: another's cordon: %t, want %t", name, got, row.foreign)
		}
	}
}
