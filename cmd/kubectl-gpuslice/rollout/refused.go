package rollout

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// foreseeTime is how long apply waits until agents say what they would do. One in the middle of a step, as a reset, answers after that.
const foreseeTime = 5 * time.Second

// foresee asks the agents what they would do before the nodes are labelled. Only they know the names that they generate for the hardware, and they read the
// catalog with their own rights. It is an error if all that answer would refuse, as for a misspelt name. It leaves out nodes that no agent reports on, or that
// have the label already.
func (a *application) foresee(ctx context.Context, client kube.Interface, nodes []corev1.Node, w cluster.Target, out *cli.Printer) (*plans, error) {
	p, err := a.ask(ctx, client, slices.DeleteFunc(slices.Clone(nodes), func(n corev1.Node) bool {
		t := cluster.ReportOf(&n)
		return !a.writes(&n, w) || t.None() || t.Silence(time.Now()) > 0
	}), w, foreseeTime, out)
	switch {
	case ctx.Err() != nil:
		return nil, err
	case apierrors.IsForbidden(err) && p.Unwritten:
		return nil, fmt.Errorf("%w; nothing was labelled", err)
	}
	answers := 0
	var refusals []*cluster.Asked
	for _, n := range p.Nodes {
		if n.Answer == nil {
			continue
		}
		answers++
		if p.verdict(n).Ruling == show.Refused {
			refusals = append(refusals, n)
		}
	}
	if len(refusals) == 0 || len(refusals) < answers {
		p.judge(ctx, client)
		return p, nil
	}
	var texts said
	for _, n := range refusals[:min(len(refusals), mostNamed)] {
		texts.add(n.Name, p.verdict(n).String())
	}
	texts.print(out, ": ")
	return nil, fmt.Errorf("%s would be refused by %s, and nothing was labelled", w.Kind(), cli.Counted(len(refusals), "node"))
}

// of is the verdict on a node that was not labelled yet, with what else a user should know.
func (p *plans) of(n *corev1.Node) (v show.Verdict, notes []string) {
	for _, a := range p.Nodes {
		switch {
		case a.Name == n.Name && a.Answer != nil:
			return p.verdict(a), slices.Concat(a.Answer.Asked, a.Answer.Notes)
		case a.Name == n.Name:
			return p.verdict(a), nil
		}
	}
	switch t := cluster.ReportOf(n); {
	case t.None():
		return show.Unanswered("no agent has ever reported on this node"), nil
	case t.Silence(time.Now()) > 0:
		return show.Unanswered("its agent is silent"), nil
	default:
		return show.Unanswered(p.silent), nil
	}
}
