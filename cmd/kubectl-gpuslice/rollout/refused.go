package rollout

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// refusalTime is how long apply waits for agents that refuse at once, as a name that their node does not have.
const refusalTime = 3 * time.Second

// foreseeTime is how long apply waits until agents say whether they would refuse. One in the middle of a step, as a reset, answers after that.
const foreseeTime = 5 * time.Second

// refusals are the first reports of the agents about a request.
type refusals struct{ nodes []*followed }

// See implements cluster.Watcher.
func (r *refusals) See(n *corev1.Node) {
	for _, f := range r.nodes {
		if f.Name == n.Name {
			f.see(n, time.Now())
		}
	}
}

// Gone implements cluster.Watcher.
func (r *refusals) Gone(name string) {
	for _, f := range r.nodes {
		if f.Name == name {
			f.gone()
		}
	}
}

// Passed implements cluster.Watcher.
func (r *refusals) Passed(time.Time) {}

// Trouble implements cluster.Watcher.
func (r *refusals) Trouble(error) {}

// Settled reports whether each agent that has ever written anything has reported about the request.
func (r *refusals) Settled() (bool, error) {
	for _, f := range r.nodes {
		if f.stage == pending && f.reason == "" && !f.first.None() {
			return false, nil
		}
	}
	return true, nil
}

// seeAtOnce names the nodes with agents that refuse the request as soon as they see it, or wait, and says how to see what the others do. It is no error if
// agents keep silent: they may be in the middle of a step.
func (a *application) seeAtOnce(ctx context.Context, client kube.Interface, w cluster.Target, asked []*followed, out *cli.Printer) error {
	r := &refusals{nodes: asked}
	waiting, cancel := context.WithTimeoutCause(ctx, refusalTime, cluster.ErrLate)
	defer cancel()
	var names []string
	for _, f := range asked {
		names = append(names, f.Name)
	}
	if err := cluster.Follow(waiting, client, names, r); err != nil && !errors.Is(err, cluster.ErrLate) && ctx.Err() == nil {
		out.Printf("warning: %v\n", err)
		a.saysHowToSee(asked, out)
		return nil
	}
	for _, f := range asked {
		switch {
		case f.stage == failed:
			out.Printf("%s  %s\n", f.Name, f.words())
		case f.stage == pending && f.phase == api.PhaseWaiting:
			out.Printf("%s  held up: %s\n", f.Name, f.words())
		}
	}
	a.saysHowToSee(asked, out)
	refused := failures(asked)
	if len(refused) == 0 {
		return nil
	}
	return fmt.Errorf("%s refused by %s; %s", w.Kind(), cli.Counted(len(refused), "node"), a.takeBack(refused, len(asked)))
}

// saysHowToSee says how to follow the nodes that have not ended yet.
func (a *application) saysHowToSee(asked []*followed, out *cli.Printer) {
	if slices.ContainsFunc(asked, func(f *followed) bool { return f.stage == pending }) {
		out.Printf("to see what the agents do:\n  %s --wait\n", a.again)
	}
}

// foresee asks agents whether they would refuse the request, as for a misspelt name. Only they know the names that they generate for the hardware,
// and they read the catalog with their own rights. First it asks one agent of each model of GPU, and all the others only if these would refuse. It is
// an error if all would. If none answers, foresee says so.
func foresee(ctx context.Context, client kube.Interface, nodes []corev1.Node, w cluster.Target, out *cli.Printer) error {
	var refusals []*cluster.Asked
	first, others := oneOfEachModel(nodes, w)
	for _, agents := range [][]corev1.Node{first, others} {
		if len(agents) == 0 {
			continue
		}
		q, err := cluster.Inquire(ctx, client, agents, w.String(), foreseeTime, out)
		switch wouldRefuse := refusing(q); {
		case ctx.Err() != nil:
			return interrupted(ctx, err)
		case apierrors.IsForbidden(err) && q.Unwritten:
			return fmt.Errorf("%w; nothing was labelled", err)
		case err != nil:
			out.Printf("no agent has said whether it would refuse %s: %v; it is labelled nevertheless\n", w.Kind(), err)
			return nil
		case len(refusals) == 0 && answers(q) == 0:
			out.Printf("no agent has said within %s whether it would refuse %s; it is labelled nevertheless\n", foreseeTime, w.Kind())
			return nil
		case len(wouldRefuse) < answers(q):
			return nil
		default:
			refusals = append(refusals, wouldRefuse...)
		}
	}
	if len(refusals) == 0 {
		return nil
	}
	for _, a := range refusals[:min(len(refusals), mostNamed)] {
		out.Printf("%s  %s: %s\n", a.Name, a.Answer.Reason, a.Answer.Refused)
	}
	return fmt.Errorf("%s would be refused by %s, and nothing was labelled", w.Kind(), cli.Counted(len(refusals), "node"))
}

// oneOfEachModel returns a node of each model of GPU, and the other nodes. It leaves out nodes without an agent to ask, and nodes with the label
// already.
func oneOfEachModel(nodes []corev1.Node, w cluster.Target) (first, others []corev1.Node) {
	models := map[string]bool{}
	for _, n := range nodes {
		model, t := features.Of(n.Labels).Model, cluster.ReportOf(&n)
		switch {
		case n.Labels[w.Label] == w.Name, t.None(), t.Silence(time.Now()) > 0:
		case models[model]:
			others = append(others, n)
		default:
			models[model] = true
			first = append(first, n)
		}
	}
	return first, others
}

// answers counts the agents that have answered.
func answers(q *cluster.Inquiry) int {
	n := 0
	for _, a := range q.Nodes {
		if a.Answer != nil {
			n++
		}
	}
	return n
}

// refusing returns the nodes with agents that would refuse the request. An observation that failed, which may pass, has no reason.
func refusing(q *cluster.Inquiry) []*cluster.Asked {
	var out []*cluster.Asked
	for _, a := range q.Nodes {
		if a.Answer != nil && a.Answer.Refused != "" && a.Answer.Reason != "" {
			out = append(out, a)
		}
	}
	return out
}
