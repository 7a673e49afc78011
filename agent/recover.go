package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/managed"
	"github.com/gpuslice/gpuslice/nvml"
)

var errNodeGone = errors.New("the node was deleted")

// Recover makes passes like Run until the agent has nothing left to restore on the node. It begins no change. It is for a machine that runs no agent. It calls
// seen with the node at each observation. The error may be nvml.ErrReplaced, as for Run; if ctx ends, it says what the agent must still restore.
func (a *Agent) Recover(ctx context.Context, seen func(*corev1.Node)) error {
	wake := a.observers.wakes.Watch(ctx)
	left := pendingRestores{ours: []string{unknown}}
	for passed := false; ctx.Err() == nil; {
		pause := a.env.Settings.Retry.First
		node, err := a.readNode(ctx)
		if err == nil {
			seen(node)
			if left, err = a.pendingRestores(ctx, node); err != nil {
				return err
			}
		}
		switch {
		case err == nil && left.none() && passed:
			return errors.Join(a.clearUnhealthy(ctx, node), a.reportFinal(ctx))
		case err == nil && left.none(): // no one judges the GPUs any more
			return a.clearUnhealthy(ctx, node)
		case err == nil && len(left.ours) > 0: // with nothing of its own to restore, a pass might begin a change
			pause, passed = a.pass(context.WithoutCancel(ctx)), true
		}
		if a.driverReplaced {
			return nvml.ErrReplaced
		}
		timer := a.env.Clock.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-wake:
		case <-timer.C():
		}
		timer.Stop()
	}
	return errNotRestored(ctx, left)
}

// clearUnhealthy removes the taint and the rules that keep pods and claims from unhealthy GPUs.
func (a *Agent) clearUnhealthy(ctx context.Context, node *corev1.Node) error {
	return errors.Join(a.actors.taint.Clear(ctx, node), a.actors.rules.Clear(ctx, node.UID))
}

// pendingRestores lists what still keeps pods or operands away from the node, and what the agent must still do.
type pendingRestores struct {
	ours   []string
	others []string // another program undoes it after a change of the agent
}

// unknown is what is left to restore on a node that could not be read even once.
const unknown = "unknown, since the node could not be read"

func (r pendingRestores) none() bool { return len(r.ours)+len(r.others) == 0 }

func (r pendingRestores) String() string { return strings.Join(slices.Concat(r.ours, r.others), "; ") }

// errNotRestored is the error when ctx ends before the node is restored.
func errNotRestored(ctx context.Context, left pendingRestores) error {
	return fmt.Errorf("%w; still to be restored: %s", context.Cause(ctx), left)
}

func (a *Agent) readNode(ctx context.Context) (*corev1.Node, error) {
	api, cancel := context.WithTimeout(ctx, a.env.Settings.Timeouts.APICall)
	defer cancel()
	node, err := a.observers.client.Nodes().Get(api, a.env.Node, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("reading node %s: %w", a.env.Node, err)
	}
	return node, nil
}

// reportFinal writes the final condition once all is restored: the last pass reported its last step only.
func (a *Agent) reportFinal(ctx context.Context) error {
	seen, err := a.observe(ctx)
	if err != nil {
		return err
	}
	to, err := a.plan(ctx, seen)
	if len(to.steps) == 0 {
		a.conclude(ctx, seen, to.want, nil, err)
	}
	return nil
}

// AwaitRecovered watches the node until the agent that runs there has nothing left to restore. It calls seen with the node at each change. If ctx
// ends, the error says what that agent has not restored yet.
func (a *Agent) AwaitRecovered(ctx context.Context, seen func(*corev1.Node)) error {
	only := fields.OneTermEqualSelector("metadata.name", a.env.Node).String()
	nodes := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = only
			return a.observers.client.Nodes().List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = only
			return a.observers.client.Nodes().Watch(ctx, o)
		},
	}
	left := pendingRestores{ours: []string{unknown}}
	source := cache.ToListWatcherWithWatchListSemantics(nodes, a.observers.client)
	_, err := watchtools.UntilWithSync(ctx, source, &corev1.Node{}, nil, func(event watch.Event) (bool, error) {
		node, ok := event.Object.(*corev1.Node)
		switch {
		case !ok || node.Name != a.env.Node:
			return false, nil
		case event.Type == watch.Deleted:
			return false, errNodeGone
		}
		seen(node)
		var err error
		a.observers.record.Reread() // the running agent writes the record
		left, err = a.pendingRestores(ctx, node)
		return left.none(), err
	})
	if err != nil && ctx.Err() != nil {
		return errNotRestored(ctx, left)
	}
	return err
}

var errMIGManagerRuns = errors.New("NVIDIA's mig-manager runs on this node, and manages its labels itself")

// Restore sets the labels of operands that a mig-manager has left paused back to "true", and returns them. It is for users of gpuslice-agent recover, if the
// settings do not let the agent adopt such labels. Call it once the agent has restored everything else: operands have to stay away during a change.
func (a *Agent) Restore(ctx context.Context) ([]string, error) {
	node, err := a.readNode(ctx)
	if err != nil {
		return nil, err
	}
	pods, err := a.listPods(ctx, node.UID)
	if err != nil {
		return nil, err
	}
	labels := fence.LeftPaused(node, a.env.Settings.Operands, fence.PausedForMIGChange)
	switch {
	case len(labels) == 0:
		return nil, nil
	case state.RunsMIGManager(pods):
		return nil, errMIGManagerRuns
	}
	values := map[string]string{}
	for _, label := range labels {
		values[label] = fence.DeployedValue
	}
	return labels, a.env.Nodes.Patch(ctx, node, func(node *corev1.Node) ([]byte, error) { return fence.SetLabels(node, values) })
}

// pendingRestores returns what the agent must restore on the node. A change that waits for a reboot has released the node until then.
func (a *Agent) pendingRestores(ctx context.Context, node *corev1.Node) (pendingRestores, error) {
	seen := &state.Observed{Node: node}
	var left pendingRestores
	var err error
	if seen.Journal, seen.Record.Known, err = a.actors.journal.Read(ctx, node, ""); err != nil {
		return left, err
	}
	seen.Marks.Fenced, seen.Marks.Lost = a.env.Fence.IsRaised(node), state.LostChange(node, seen.Record.Known)
	if r := a.observers.record.Now(); seen.Journal == nil && !r.Ends {
		for _, unit := range r.Host.Stopped {
			if slices.Contains(a.env.Settings.Units, unit) {
				left.ours = append(left.ours, "start of "+unit)
			}
		}
	}
	if len(a.env.Settings.Recover.Adopt) > 0 { // the agent adopts what others have left only if no pod of theirs runs
		if seen.Pods, err = a.listPods(ctx, seen.Node.UID); err != nil {
			left.others = append(left.others, err.Error())
		}
		seen.Leftovers.Adopts = err == nil && a.observers.leftovers.Adopts(seen.Pods)
	}
	if seen.Journal != nil && !seen.Journal.Parked {
		left.ours = append(left.ours, seen.Journal.Describe())
	}
	if seen.Marks.Fenced {
		left.ours = append(left.ours, "the taint "+config.TaintRepartitioning)
	}
	if o := a.observers.leftovers.Orphan(seen); o.Exists() {
		left.ours = append(left.ours, o.String())
	}
	if !node.Spec.Unschedulable && managed.CordonTaint(node) != nil { // the taint keeps pods away until it is gone
		left.others = append(left.others, "the taint "+corev1.TaintNodeUnschedulable+", which the controller manager removes")
	}
	return left, nil
}
