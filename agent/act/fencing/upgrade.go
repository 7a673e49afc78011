package fencing

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/nvml"
)

// UpgradeWatch watches for an upgrade of the driver.
type UpgradeWatch struct {
	act.Env

	Driver  nvml.Driver
	Fencing *Fencing

	since time.Time // since when labels say that an upgrade is under way
}

// Forget drops what was computed from earlier times of the clock.
func (u *UpgradeWatch) Forget(time.Time) { u.since = time.Time{} }

// Observe finds out whether the driver is being upgraded, and waits for the end of the upgrade. Only labels of operands count: the driver manager
// writes no others.
func (u *UpgradeWatch) Observe(seen *state.Observed) error {
	node := seen.Node
	seen.Marks.Complete = true
	// If the operand was paused before, by the agent or another tool, the driver manager appends its value behind an underscore.
	i := slices.IndexFunc(u.Settings.Operands, func(key string) bool { return strings.HasSuffix(node.Labels[key], fence.PausedForDriverUpgrade) })
	if i < 0 {
		return nil
	}
	key := u.Settings.Operands[i]
	seen.Marks.Upgrade = fmt.Sprintf("label %s=%s", key, node.Labels[key])
	since := u.since
	if since.IsZero() {
		since = u.Clock.Stamp()
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonDriverNotLoaded, For: outcome.ForDriver, After: outcome.DriverRetry, Since: since,
		Message: fmt.Sprintf("the driver is being upgraded (%s); changes nothing until that is over", seen.Marks.Upgrade),
	}
	until := since.Add(u.Settings.Timeouts.DriverUpgrade)
	if u.Clock.Now().Before(until) {
		wait.Until, wait.Then = until, "see why it is not over"
		return wait
	}
	wait.Advice = fmt.Sprintf("the driver's upgrade takes longer than %s: see the pod of the driver or of its manager on this node; if no upgrade is running: "+
		"kubectl label node %s %s=true --overwrite", u.Settings.Timeouts.DriverUpgrade, u.Node, key)
	return wait
}

// ReleaseDriver closes the driver while it is being upgraded: the kernel does not unload a driver that a process has open.
func (u *UpgradeWatch) ReleaseDriver(ctx context.Context, seen *state.Observed) error {
	switch {
	case !seen.Marks.Complete:
		return nil
	case seen.Marks.Upgrade == "":
		u.since = time.Time{}
		return nil
	case u.since.IsZero():
		u.since = u.Clock.Stamp()
	}
	call, cancel := context.WithTimeout(ctx, u.Settings.Timeouts.DriverCall)
	defer cancel()
	return u.Driver.Release(call)
}

// ReleaseNode releases the node during the driver's upgrade, which may never end: any user who may write labels can set that label. The journal keeps
// the rest to restore, and the agent restarts the change after the upgrade. The cordon stays if another tool relies on it, or if a user has requested
// to keep it.
func (u *UpgradeWatch) ReleaseNode(ctx context.Context, seen *state.Observed) {
	if seen.Marks.Upgrade == "" { // also if the observation ended before it read the node
		return
	}
	others := seen.Tools(func(m fence.Marker) bool { return m.Cordons && m.Tool != fence.ToolDriverManager })
	if _, kept := seen.Node.Annotations[config.AnnotationKeepCordoned]; kept || len(others) > 0 {
		return
	}
	var err error
	uncordon := seen.Node.Spec.Unschedulable && !seen.ForeignCordon()
	switch {
	case seen.Journal != nil && seen.Journal.KeepsPodsAway():
		err = u.Fencing.LeaveJournal(ctx, seen, seen.GivingBack(), *seen.Journal)
	case seen.Journal == nil && (seen.Marks.Fenced || uncordon):
		err = u.Nodes.Patch(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) { return u.Fence.Lift(node, uncordon) })
	default:
		return
	}
	if err != nil {
		u.Log.Warn("releasing the node while the driver is being upgraded", zap.Error(err))
		return
	}
	u.Events.Node(u.Node, events.ReleasedForUpgrade(seen.Marks.Upgrade))
}
