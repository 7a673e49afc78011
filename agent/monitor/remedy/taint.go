// Package remedy acts on a GPU that is not well, as the settings request; by default it does nothing. Where NVSentinel manages the health of
// the node's GPUs, it resets none. It writes the taint anyway: whoever may patch the node can set NVSentinel's labels.
package remedy

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/config"
)

// Retry is the pause before the agent tries again to write a taint.
const Retry = 30 * time.Second

// Taint keeps new pods from the node while one of its GPUs cannot be used or trusted. It keeps no state: the taint is on the node, and its
// value names the owner.
type Taint struct {
	Nodes  nodewrite.Writer
	Effect config.HealthTaint
	// NodeEvent records Events on the node.
	NodeEvent func(events.Event)
	Clock     *monotonic.Clock
	Log       *zap.Logger

	next    time.Time // the agent does not try before
	refused bool      // an Event has said that the agent may not
}

// Forget drops what depends on times that the clock gave.
func (t *Taint) Forget(time.Time) { t.next = time.Time{} }

// Pending reports whether the taint could not be written, and is to be tried again after Retry.
func (t *Taint) Pending() bool { return !t.next.IsZero() }

// Follow taints the node while a GPU is critical. While that is unknown the taint does not change, unless the settings request none.
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
		t.NodeEvent(events.UnhealthyTaintRefused(err))
	}
	t.next = t.Clock.Now().Add(Retry)
	t.Log.Warn("writing taint "+config.TaintGPUUnhealthy, zap.Error(err))
}

// Clear removes the taint whatever the state of the GPUs, for a node that no agent manages any more.
func (t *Taint) Clear(ctx context.Context, node *corev1.Node) error {
	return t.Nodes.Taints(ctx, node, Without)
}

// with returns the node's taints with ours. It drops ours with another effect, as from former settings. A foreign taint with the same key and
// effect stays, and does what ours would: the API allows only one of them.
func (t *Taint) with(node *corev1.Node) []corev1.Taint {
	ours := corev1.Taint{Key: config.TaintGPUUnhealthy, Value: config.ValueGPUUnhealthy, Effect: corev1.TaintEffect(t.Effect)}
	out := slices.DeleteFunc(slices.Clone(node.Spec.Taints), func(s corev1.Taint) bool { return IsOurs(s) && s.Effect != ours.Effect })
	if !slices.ContainsFunc(out, func(s corev1.Taint) bool { return s.MatchTaint(&ours) }) {
		out = append(out, ours)
	}
	return out
}

// Without returns the node's taints without ours.
func Without(node *corev1.Node) []corev1.Taint {
	return slices.DeleteFunc(slices.Clone(node.Spec.Taints), IsOurs)
}

// IsOurs reports whether the agent has put the taint on the node. It writes no other effect than these.
func IsOurs(t corev1.Taint) bool {
	return t.Key == config.TaintGPUUnhealthy && t.Value == config.ValueGPUUnhealthy &&
		(t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectPreferNoSchedule)
}
