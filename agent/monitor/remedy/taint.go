// Package remedy does something about a GPU that is not well, beside reporting it: what the settings ask for, which by default is nothing. Where
// NVSentinel minds the health of the node's GPUs, resets are left to that. The taint is not: whoever may patch the node can set NVSentinel's labels.
package remedy

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/config"
)

// Retry is the time after which a taint is tried again that could not be written.
const Retry = 30 * time.Second

// Taint keeps new pods from the node while one of its GPUs cannot be used or trusted. It remembers nothing of what stands there: the taint is on the
// node, and so is whose it is, by its value.
type Taint struct {
	Nodes  nodewrite.Writer
	Effect config.HealthTaint
	// NodeEvent records Events on the node.
	NodeEvent func(kind string, reason config.Reason, format string, args ...any)
	Clock     *monotonic.Clock
	Log       *zap.Logger

	next    time.Time // it is not tried before
	refused bool      // an Event has said that the agent may not
}

// Forget drops what depends on times that the clock gave.
func (t *Taint) Forget(time.Time) { t.next = time.Time{} }

// Pending reports whether the taint could not be written, and is to be tried again after Retry.
func (t *Taint) Pending() bool { return !t.next.IsZero() }

// Follow has the node tainted while a GPU is critical. While that is not known the taint stays as it is, unless the settings ask for none.
func (t *Taint) Follow(ctx context.Context, node *corev1.Node, critical, known bool) {
	if t.Clock.Now().Before(t.next) {
		return
	}
	t.next = time.Time{}
	of := func(node *corev1.Node) []corev1.Taint {
		wanted := t.Effect == config.HealthTaintNoSchedule || t.Effect == config.HealthTaintPreferNoSchedule
		switch {
		case !wanted, known && !critical:
			return Without(node)
		case !known:
			return node.Spec.Taints
		default:
			return t.with(node)
		}
	}
	err := t.Nodes.Taints(ctx, node, of)
	switch {
	case err == nil:
		t.refused = false
		return
	case apierrors.IsForbidden(err) && !t.refused:
		t.refused = true
		t.NodeEvent(corev1.EventTypeWarning, config.ReasonMissingRight,
			"taint %s cannot be written: %v; install the admission policies of this version: kubectl apply -k deploy/policies", config.TaintGPUUnhealthy, err)
	}
	t.next = t.Clock.Now().Add(Retry)
	t.Log.Warn("writing taint "+config.TaintGPUUnhealthy, zap.Error(err))
}

// Clear takes the taint away whatever the GPUs are like, for a node that no agent minds any more.
func (t *Taint) Clear(ctx context.Context, node *corev1.Node) error {
	return t.Nodes.Taints(ctx, node, Without)
}

// with gives the node's taints with ours. One of ours with another effect, as of former settings, goes. A taint of another user or program with the same key
// and effect stays, and does what ours would: the API allows one of them.
func (t *Taint) with(node *corev1.Node) []corev1.Taint {
	ours := corev1.Taint{Key: config.TaintGPUUnhealthy, Value: config.ValueGPUUnhealthy, Effect: corev1.TaintEffect(t.Effect)}
	out := slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(s corev1.Taint) bool { return IsOurs(s) && s.Effect != ours.Effect })
	if !slices.ContainsFunc(out, func(s corev1.Taint) bool { return s.MatchTaint(&ours) }) {
		out = append(out, ours)
	}
	return out
}

// Without gives the node's taints without ours.
func Without(node *corev1.Node) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(node.Spec.Taints), IsOurs)
}

// IsOurs reports whether the agent has put the taint on the node. It writes no other effect than these.
func IsOurs(t corev1.Taint) bool {
	return t.Key == config.TaintGPUUnhealthy && t.Value == config.ValueGPUUnhealthy &&
		(t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectPreferNoSchedule)
}
