package report

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Find returns the node's condition of the type, or nil.
func Find(node *corev1.Node, kind corev1.NodeConditionType) *corev1.NodeCondition {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == kind {
			return &node.Status.Conditions[i]
		}
	}
	return nil
}

// After returns the condition as of now. Old is the former one, or nil. After makes the message printable, and cuts it to the length that a condition
// may have.
func After(
	old *corev1.NodeCondition, kind corev1.NodeConditionType, status corev1.ConditionStatus, reason config.Reason, message string, now time.Time,
) corev1.NodeCondition {
	at := metav1.NewTime(now)
	c := corev1.NodeCondition{
		Type: kind, Status: status, Reason: string(reason), Message: sanitize.Message(message, sanitize.Longest), LastHeartbeatTime: at, LastTransitionTime: at,
	}
	if old != nil && old.Status == status {
		c.LastTransitionTime = old.LastTransitionTime
	}
	return c
}
