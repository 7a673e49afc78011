package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// upgrade is that of the driver.
type upgrade struct {
	since time.Time // since when labels say that it is under way
}

// Forget implements forgetter.
func (u *upgrade) Forget(time.Time) { u.since = time.Time{} }

// observeUpgrade looks whether the driver is being upgraded, and waits for the end of that. Only labels of operands say so: any other is no
// business of the driver manager.
func (a *Agent) observeUpgrade(seen *state.Observed) error {
	node := seen.Node
	seen.Marks.Complete = true
	// It stands behind an underscore where the operand was paused before, by us too.
	i := slices.IndexFunc(a.settings.Operands, func(key string) bool { return strings.HasSuffix(node.Labels[key], fence.PausedForDriverUpgrade) })
	if i < 0 {
		return nil
	}
	key := a.settings.Operands[i]
	seen.Marks.Upgrade = fmt.Sprintf("label %s=%s", key, node.Labels[key])
	since := a.upgrade.since
	if since.IsZero() {
		since = a.now()
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonDriverNotLoaded, For: outcome.ForDriver, After: outcome.DriverRetry, Since: since,
		Message: fmt.Sprintf("the driver is being upgraded, as %s says; nothing is done until that is over", seen.Marks.Upgrade),
	}
	until := since.Add(a.settings.Timeouts.DriverUpgrade)
	if a.clock.Now().Before(until) {
		wait.Until, wait.Then = until, "people have to look why it is not over"
		return wait
	}
	wait.Advice = fmt.Sprintf("that is longer than %s: see the pod of the driver, or of its manager, on this node; if neither upgrades it any more: "+
		"kubectl label node %s %s=true --overwrite", a.settings.Timeouts.DriverUpgrade, a.node, key)
	return wait
}

// followUpgrade lets go of the driver while it is being upgraded: the kernel does not unload one that a process has open.
func (a *Agent) followUpgrade(ctx context.Context, seen state.Observed) error {
	switch {
	case !seen.Marks.Complete:
		return nil
	case seen.Marks.Upgrade == "":
		a.upgrade.since = time.Time{}
		return nil
	case a.upgrade.since.IsZero():
		a.upgrade.since = a.now()
	}
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.DriverCall)
	defer cancel()
	return a.driver.Release(call)
}

// giveWay gives the node back while the driver is being upgraded, which may have no end: the label is anybody's who may write labels. What
// the change owes stays in the journal, and the change is begun again after the upgrade. Who else relies on the cordon keeps it, and so do
// people who have said so.
func (a *Agent) giveWay(ctx context.Context, seen state.Observed) {
	if seen.Marks.Upgrade == "" { // nor was the node seen, if the look has ended before
		return
	}
	others := seen.Tools(func(m fence.Marker) bool { return m.Cordons && m.Tool != fence.ToolDriverManager })
	if _, kept := seen.Node.Annotations[config.AnnotationKeepCordoned]; kept || len(others) > 0 {
		return
	}
	var err error
	switch who, _, cordoned := fence.Cordoner(seen.Node); {
	case seen.Journal != nil && seen.Journal.Cordoned:
		err = a.unfence(ctx, seen)
	case seen.Journal == nil && (seen.Marks.Fenced || cordoned && who == nodewrite.FieldManager):
		uncordon := cordoned && !seen.ForeignCordon()
		err = a.nodes.Patch(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) { return a.fence.Lift(node, uncordon) })
	default:
		return
	}
	if err != nil {
		a.log.Warn("giving the node back while the driver is being upgraded", zap.Error(err))
		return
	}
	a.eventf(seen.Node, corev1.EventTypeNormal, config.ReasonDriverNotLoaded,
		"node given back while the driver is being upgraded, as %s says; what was begun goes on after that", seen.Marks.Upgrade)
}

// unfence gives the node back and leaves the journal, so that nothing is forgotten.
func (a *Agent) unfence(ctx context.Context, seen state.Observed) error {
	j := *seen.Journal
	uncordon := !seen.ForeignCordon()
	j.Cordoned = false
	var startup []corev1.Taint // it was not ready before the change either
	if j.Startup != nil {
		startup = append(startup, j.Startup.Taint())
	}
	seen.Gives = true
	if _, err := a.recorded(ctx, seen, j, func(node *corev1.Node, text string) ([]byte, error) {
		return a.fence.Park(node, text, uncordon, startup...)
	}); err != nil {
		return err
	}
	a.leavePool(ctx, seen)
	return nil
}
