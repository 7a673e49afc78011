package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/cmd/cli"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// refusalTime is how long apply waits for agents that refuse at once, as a name that their node does not have.
const refusalTime = 3 * time.Second

// refusals are the first reports of the agents about a wish.
type refusals struct{ nodes []*followed }

func (r *refusals) see(n *corev1.Node) {
	for _, f := range r.nodes {
		if f.name == n.Name {
			f.see(n, time.Now())
		}
	}
}

func (r *refusals) gone(name string) {
	for _, f := range r.nodes {
		if f.name == name {
			f.gone()
		}
	}
}

func (r *refusals) passed(time.Time) {}

func (r *refusals) trouble(error) {}

// settled reports whether each agent that has ever written anything has reported about the wish.
func (r *refusals) settled() (bool, error) {
	for _, f := range r.nodes {
		if f.stage == pending && f.reason == "" && !f.first.none() {
			return false, nil
		}
	}
	return true, nil
}

// refusedAtOnce names the nodes whose agents refuse the wish as soon as they see it. It is no error if agents keep silent: they may be in the
// middle of a step.
func refusedAtOnce(ctx context.Context, client kube.Interface, w wish, asked []*followed, out *cli.Printer) error {
	r := &refusals{nodes: asked}
	waiting, cancel := context.WithTimeoutCause(ctx, refusalTime, errLate)
	defer cancel()
	var names []string
	for _, f := range asked {
		names = append(names, f.name)
	}
	if err := follow(waiting, client, names, r); err != nil && !errors.Is(err, errLate) && ctx.Err() == nil {
		out.Printf("warning: %v\n", err)
		return nil
	}
	refused := 0
	for _, f := range asked {
		if f.stage == failed {
			refused++
			out.Printf("%s  %s\n", f.name, f.words())
		}
	}
	if refused == 0 {
		return nil
	}
	return fmt.Errorf("%s refused by %s", w.kind(), cli.Counted(refused, "node"))
}
