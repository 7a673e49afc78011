// Package rollout has the commands that ask agents for something, and follow what becomes of it: apply, plan, hold and recover.
package rollout

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// rollout is a request on its way to many nodes.
type rollout struct {
	target  cluster.Target
	nodes   []*followed // sorted by name
	deleted int         // nodes that were deleted before they had the label
	screen  screen
	out     *cli.Printer
	back    func(failed []string, of int) string // how to take the label back from nodes
}

// screen shows the user how far a roll-out is.
type screen interface {
	show(nodes []*followed) // at each change of any of them
	say(line string)        // once
	close()
}

// See implements cluster.Watcher.
func (r *rollout) See(n *corev1.Node) { r.with(n.Name, func(f *followed) { f.see(n, time.Now()) }) }

// Gone implements cluster.Watcher.
func (r *rollout) Gone(name string) { r.with(name, (*followed).gone) }

// Passed implements cluster.Watcher.
func (r *rollout) Passed(now time.Time) {
	for _, f := range r.nodes {
		f.passed(now)
	}
	r.screen.show(r.nodes)
}

// Trouble implements cluster.Watcher.
func (r *rollout) Trouble(err error) { r.screen.say(fmt.Sprintf("%v; trying again", err)) }

// Settled implements cluster.Watcher.
func (r *rollout) Settled() (bool, error) {
	return r.count(pending) == 0, r.out.Err
}

// with changes one of the nodes.
func (r *rollout) with(name string, change func(*followed)) {
	i, found := slices.BinarySearchFunc(r.nodes, name, func(f *followed, name string) int { return strings.Compare(f.Name, name) })
	if !found {
		return
	}
	change(r.nodes[i])
	r.screen.show(r.nodes)
}

func (r *rollout) count(s stage) int {
	n := 0
	if s == deleted {
		n = r.deleted
	}
	for _, f := range r.nodes {
		if f.stage == s {
			n++
		}
	}
	return n
}

func (r *rollout) names() []string {
	var out []string
	for _, f := range r.nodes {
		out = append(out, f.Name)
	}
	return out
}

// failures names the nodes that have failed.
func failures(nodes []*followed) []string {
	var out []string
	for _, f := range nodes {
		if f.stage == failed {
			out = append(out, f.Name)
		}
	}
	return out
}

// wait follows the nodes to the end, to the timeout if there is one, or until the user interrupts it. The roll-out goes on anyway: the agents do it.
func (r *rollout) wait(ctx context.Context, client kube.Interface, timeout time.Duration, again string) error {
	waiting := ctx
	if timeout > 0 {
		var cancel context.CancelFunc
		waiting, cancel = context.WithTimeoutCause(ctx, timeout, cluster.ErrLate)
		defer cancel()
	}
	r.screen.show(r.nodes)
	err := cluster.Follow(waiting, client, r.names(), r)
	r.screen.close()
	switch {
	case ctx.Err() != nil:
		r.summarize()
		return &cli.ExitError{Code: cli.ExitInterrupted, Err: fmt.Errorf("interrupted; the roll-out of %s goes on without this command, on %s; to see it again:\n  %s",
			r.target.Kind(), cli.Counted(r.count(pending), "node"), again)}
	case err != nil && !errors.Is(err, cluster.ErrLate):
		return err
	}
	r.summarize()
	switch names := failures(r.nodes); {
	case r.out.Err != nil:
		return r.out.Err
	case len(names) > 0:
		return fmt.Errorf("%s failed on %s; %s", r.target.Kind(), cli.Counted(len(names), "node"), r.back(names, len(r.nodes)))
	case err != nil:
		return &cli.ExitError{Code: cli.ExitTimeout, Err: fmt.Errorf("%s is not on %s after %s; the roll-out goes on; to see it again:\n  %s",
			r.target.Kind(), cli.Counted(r.count(pending), "node"), timeout, again)}
	case r.count(deleted) > 0:
		return fmt.Errorf("%s is not on %s: deleted in between", r.target.Kind(), cli.Counted(r.count(deleted), "node"))
	default:
		return nil
	}
}

// summarize names each node that does not have the config yet, with its state, and counts those that have it.
func (r *rollout) summarize() {
	for _, f := range r.nodes {
		if f.stage == failed || f.stage == pending {
			tell(r.out, "%s: %s: %s", f.Name, f.state(), f.words())
		}
	}
	text := fmt.Sprintf("%s: %d of %s converged", r.target.Kind(), r.count(converged), cli.Counted(len(r.nodes)+r.deleted, "node"))
	for _, left := range []struct {
		stage stage
		word  string
	}{{failed, "failed"}, {pending, "under way"}, {deleted, "deleted"}} {
		if n := r.count(left.stage); n > 0 {
			text += fmt.Sprintf(", %d %s", n, left.word)
		}
	}
	tell(r.out, "%s", text)
}
