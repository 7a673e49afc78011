package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/cli"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// planTime is how long agents have to answer: an agent in the middle of a step, as a reset, answers after that.
const planTime = 30 * time.Second

// plans are the agents' answers to what a wish would do.
type plans struct {
	*inquiry
	wish wish
}

// preview prints what the wish would do to each node.
func preview(ctx context.Context, client kube.Interface, nodes []corev1.Node, w wish, out *cli.Printer) error {
	q, err := inquire(ctx, client, nodes, w.String(), planTime, out)
	if err != nil {
		return interrupted(ctx, err)
	}
	p := &plans{q, w}
	p.print(out)
	fit(ctx, client, p.leaving(), out)
	return p.conclude(out)
}

// leaving returns the pods that have to leave, by their nodes.
func (q *plans) leaving() []leavingPods {
	var out []leavingPods
	for _, a := range q.nodes {
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
func (q *plans) print(out *cli.Printer) {
	var order []string
	same := map[string][]string{}
	for _, a := range q.nodes {
		text := q.describe(a)
		if same[text] == nil {
			order = append(order, text)
		}
		same[text] = append(same[text], a.name)
	}
	for _, text := range order {
		out.Printf("%s: %s\n", strings.Join(same[text], ", "), text)
	}
}

// conclude counts the answers. It is an error if a node refuses, or keeps silent.
func (q *plans) conclude(out *cli.Printer) error {
	refused, silent, changed := 0, 0, 0
	for _, a := range q.nodes {
		switch {
		case a.answer == nil:
			silent++
		case a.answer.Refused != "":
			refused++
		case len(a.answer.Steps) > 0:
			changed++
		}
	}
	out.Printf("%s: %d of %s would change; nothing was labelled\n", q.wish.kind(), changed, cli.Counted(len(q.nodes), "node"))
	switch {
	case out.Err != nil:
		return out.Err
	case refused+silent == 0:
		return nil
	default:
		return fmt.Errorf("%s refused by %s, not answered by %s", q.wish.kind(), cli.Counted(refused, "node"), cli.Counted(silent, "node"))
	}
}

// describe says what one node would do.
func (q *plans) describe(a *askedNode) string {
	switch {
	case a.lost != "":
		return a.lost
	case a.answer == nil:
		return fmt.Sprintf("no answer within %s; see whether an agent runs there: kubectl get pods -A -l app.kubernetes.io/name=gpuslice"+
			" --field-selector spec.nodeName=NODE", planTime)
	case a.answer.Refused != "":
		return "cannot be: " + a.answer.Refused
	case len(a.answer.Steps) == 0:
		return "nothing to do"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s; %s", cli.Counted(len(a.answer.Steps)+a.answer.More, "step"), leavers(a.answer))
	if a.answer.Reboot {
		b.WriteString("; it takes a reboot of the node")
	}
	if a.answer.Runs != "" {
		b.WriteString("; runs " + a.answer.Runs)
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
