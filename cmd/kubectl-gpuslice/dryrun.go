package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// planTime is how long agents have to answer: an agent in the middle of a step, as a reset, answers after that.
const planTime = 30 * time.Second

// plans are the agents' answers to what a request would do, with what the other nodes and the budgets add to them.
type plans struct {
	*inquiry
	target  target
	givesUp map[string]string // why the change of a node would begin and not come to its end, by the node
}

// preview prints what the request would do to each node, if the change is allowed to evict what these fields are about.
func preview(ctx context.Context, client kube.Interface, nodes []corev1.Node, w target, allowed []string, out *cli.Printer) error {
	q, err := inquire(ctx, client, nodes, config.Allowance(w.label, w.name, allowed...), planTime, out)
	if err != nil {
		return interrupted(ctx, err)
	}
	p := &plans{inquiry: q, target: w}
	elsewhere := &cli.Printer{W: &strings.Builder{}}
	p.givesUp = fit(ctx, client, p.leaving(), elsewhere)
	p.print(out)
	out.Printf("%s", elsewhere.W)
	return p.conclude(out)
}

// leaving returns the pods that have to leave, by their nodes.
func (p *plans) leaving() []leavingPods {
	var out []leavingPods
	for _, a := range p.nodes {
		if a.answer != nil && len(a.answer.Pods) > 0 {
			out = append(out, leavingPods{node: a.name, pods: a.answer.Pods, more: a.answer.MorePods})
		}
	}
	return out
}

func interrupted(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return &cli.ExitError{Code: exitInterrupted, Err: errors.New("interrupted; nothing was labelled")}
}

// print writes the answers. It joins nodes with the same answer.
func (p *plans) print(out *cli.Printer) {
	var order []string
	same := map[string][]string{}
	for _, a := range p.nodes {
		text := p.describe(a)
		if same[text] == nil {
			order = append(order, text)
		}
		same[text] = append(same[text], a.name)
	}
	for _, text := range order {
		out.Printf("%s: %s\n", strings.Join(same[text], ", "), text)
	}
}

// conclude counts the answers. It is an error if a node refuses, would wait or give up, or keeps silent.
func (p *plans) conclude(out *cli.Printer) error {
	refused, held, givenUp, silent, changed := 0, 0, 0, 0, 0
	for _, a := range p.nodes {
		if a.answer != nil && len(a.answer.Steps) > 0 {
			changed++
		}
		switch {
		case a.answer == nil:
			silent++
		case a.answer.Refused != "":
			refused++
		case a.answer.HeldUp != "":
			held++
		case p.gaveUp(a) != "":
			givenUp++
		}
	}
	out.Printf("%s: %d of %s would change; nothing was labelled\n", p.target.kind(), changed, cli.Counted(len(p.nodes), "node"))
	if out.Err != nil {
		return out.Err
	}
	var parts []string
	for _, part := range []struct {
		nodes int
		text  string
	}{{refused, "would be refused by "}, {held, "would be held up on "}, {givenUp, "would be given up on "}, {silent, "is not answered by "}} {
		if part.nodes > 0 {
			parts = append(parts, part.text+cli.Counted(part.nodes, "node"))
		}
	}
	if len(parts) == 0 {
		return nil
	}
	err := fmt.Errorf("%s %s", p.target.kind(), strings.Join(parts, ", "))
	if silent > 0 {
		return err
	}
	return &cli.ExitError{Code: exitHeldUp, Err: err}
}

// gaveUp says why the change of the node would begin, and be given up in the end; empty if it would not.
func (p *plans) gaveUp(a *askedNode) string {
	if a.answer.Patience <= 0 { // the agent deletes the pods at the end
		return ""
	}
	return p.givesUp[a.name]
}

// describe says what one node would do, the verdict first.
func (p *plans) describe(a *askedNode) string {
	switch {
	case a.lost != "":
		return a.lost
	case a.answer == nil:
		return fmt.Sprintf("no answer within %s; see whether an agent runs there: kubectl get pods -A -l app.kubernetes.io/name=gpuslice"+
			" --field-selector spec.nodeName=NODE", planTime)
	}
	verdict, now := show.Verdict(a.answer)
	if why := p.gaveUp(a); now && why != "" {
		verdict = show.GivesUp(a.answer, why)
	}
	switch {
	case verdict == "":
		return "nothing to do"
	case len(a.answer.Steps) == 0:
		return verdict
	}
	var b strings.Builder
	b.WriteString(verdict)
	fmt.Fprintf(&b, "\n      %s; %s", cli.Counted(len(a.answer.Steps)+a.answer.More, "step"), leavers(a.answer))
	if a.answer.Reboot {
		b.WriteString("; it takes a reboot of the node")
	}
	if len(a.answer.Lost) > 0 {
		b.WriteString("\n      lost for good: " + strings.Join(a.answer.Lost, "; "))
		if a.answer.MoreLost > 0 {
			fmt.Fprintf(&b, " and %d more", a.answer.MoreLost)
		}
	}
	for _, note := range a.answer.Notes {
		b.WriteString("\n      after it, " + note)
	}
	for i, step := range a.answer.Steps {
		fmt.Fprintf(&b, "\n%4d  %s", i+1, step)
	}
	if a.answer.More > 0 {
		fmt.Fprintf(&b, "\n      and %d more", a.answer.More)
	}
	return b.String()
}

// leavers names the pods that have to leave.
func leavers(a *api.Answer) string {
	switch n := len(a.Pods) + a.MorePods; n {
	case 0:
		return "no pod has to leave"
	case 1:
		return "1 pod has to leave: " + a.Pods[0]
	default:
		text := fmt.Sprintf("%d pods have to leave: %s", n, strings.Join(a.Pods, ", "))
		if a.MorePods > 0 {
			text += fmt.Sprintf(" and %d more", a.MorePods)
		}
		return text
	}
}
