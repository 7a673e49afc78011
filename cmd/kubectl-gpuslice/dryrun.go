package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/cmd/cli"
	"github.com/gpuslice/gpuslice/config"
)

const (
	// planTime is how long agents have to answer: one in the middle of a step, as a reset, does it after that.
	planTime = 30 * time.Second
	// cleanTime bounds the end, when the requests are taken away.
	cleanTime = time.Minute
)

// inquiry asks agents what they would do.
type inquiry struct {
	wish  wish
	nodes []*askedNode
}

// askedNode is a node whose agent is asked.
type askedNode struct {
	identity
	node   *corev1.Node
	answer *api.Answer
	lost   string // why there will be no answer
}

// preview prints what the wish would do to each node.
func preview(ctx context.Context, client kubernetes.Interface, nodes []corev1.Node, w wish, out *cli.Printer) error {
	q := &inquiry{wish: w}
	defer q.withdraw(context.WithoutCancel(ctx), client, out)
	for i := range nodes {
		if err := q.ask(ctx, client, &nodes[i]); err != nil {
			return interrupted(ctx, err)
		}
	}
	waiting, cancel := context.WithTimeoutCause(ctx, planTime, errLate)
	defer cancel()
	var names []string
	for _, a := range q.nodes {
		names = append(names, a.name)
	}
	if err := follow(waiting, client, names, q); err != nil && !errors.Is(err, errLate) {
		return interrupted(ctx, err)
	}
	return q.print(out)
}

func interrupted(ctx context.Context, err error) error {
	if ctx.Err() == nil {
		return err
	}
	return &cli.ExitError{Code: exitInterrupted, Err: errors.New("interrupted; nothing was labelled")}
}

// ask sets the request, and takes away an answer that an earlier one has left.
func (q *inquiry) ask(ctx context.Context, client kubernetes.Interface, n *corev1.Node) error {
	request := q.wish.String()
	after, err := write(ctx, client, n, change{annotations: map[string]*string{config.AnnotationPreview: &request, config.AnnotationPlan: nil}})
	a := &askedNode{node: n, identity: identify(n)}
	switch {
	case apierrors.IsNotFound(err):
		a.lost = "the node was deleted"
	case err != nil:
		return err
	default:
		a.node, a.identity = after, identify(after)
	}
	q.nodes = append(q.nodes, a)
	return nil
}

// withdraw takes requests and answers away.
func (q *inquiry) withdraw(ctx context.Context, client kubernetes.Interface, out *cli.Printer) {
	ctx, cancel := context.WithTimeout(ctx, cleanTime)
	defer cancel()
	for _, a := range q.nodes {
		_, err := write(ctx, client, a.node, change{annotations: map[string]*string{config.AnnotationPreview: nil, config.AnnotationPlan: nil}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // it is another node of the same name then
			out.Printf("warning: %v; to take the request away: kubectl annotate node %s %s-\n", err, a.name, config.AnnotationPreview)
		}
	}
}

func (q *inquiry) see(n *corev1.Node) {
	for _, a := range q.nodes {
		if a.name == n.Name {
			a.see(n, q.wish.String())
		}
	}
}

func (q *inquiry) gone(name string) {
	for _, a := range q.nodes {
		if a.name == name && a.answer == nil {
			a.lost = "the node was deleted"
		}
	}
}

func (q *inquiry) passed(time.Time) {}

func (q *inquiry) trouble(error) {}

func (q *inquiry) settled() (bool, error) {
	return !slices.ContainsFunc(q.nodes, func(a *askedNode) bool { return a.answer == nil && a.lost == "" }), nil
}

func (a *askedNode) see(n *corev1.Node, request string) {
	if a.answer != nil || a.lost != "" || a.outdated(n) {
		return
	}
	if n.Annotations[config.AnnotationPreview] != request {
		a.lost = "somebody else has asked its agent something at the same time; ask again"
		return
	}
	var given api.Answer
	if json.Unmarshal([]byte(n.Annotations[config.AnnotationPlan]), &given) == nil && given.For == request {
		makeLegible(&given)
		a.answer = &given
	}
}

// makeLegible bounds what is shown of an answer: others can write to the annotation too.
func makeLegible(a *api.Answer) {
	a.Refused, a.Runs = legible.Message(a.Refused, legible.Longest), legible.Message(a.Runs, legible.Longest)
	for _, texts := range [][]string{a.Steps, a.Pods} {
		for i := range texts {
			texts[i] = legible.Message(texts[i], legible.Longest)
		}
	}
}

// print writes the answers, those of nodes together that would all do the same.
func (q *inquiry) print(out *cli.Printer) error {
	var order []string
	same := map[string][]string{}
	refused, silent, changed := 0, 0, 0
	for _, a := range q.nodes {
		text := q.describe(a)
		if same[text] == nil {
			order = append(order, text)
		}
		same[text] = append(same[text], a.name)
		switch {
		case a.answer == nil:
			silent++
		case a.answer.Refused != "":
			refused++
		case len(a.answer.Steps) > 0:
			changed++
		}
	}
	for _, text := range order {
		out.Printf("%s: %s\n", strings.Join(same[text], ", "), text)
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

// describe is what one node would do.
func (q *inquiry) describe(a *askedNode) string {
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
	fmt.Fprintf(&b, "%s; %s", cli.Counted(len(a.answer.Steps)+a.answer.More, "step"), who(a.answer))
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

// who has to leave.
func who(a *api.Answer) string {
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
