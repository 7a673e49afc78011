package main

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/workqueue"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// cleanTime bounds the removal of the requests at the end.
const cleanTime = time.Minute

// writesAtOnce is to how many nodes the command writes at a time: it asks fifty in the time of a few answers of the API server.
const writesAtOnce = 16

// inquiry is a request to agents, with their answers.
type inquiry struct {
	request string // value of config.AnnotationPreview
	nodes   []*askedNode
}

// askedNode is a node whose agent the command asks.
type askedNode struct {
	identity
	node   *corev1.Node
	answer *api.Answer
	lost   string // why there will be no answer
}

// inquire asks the agents of the nodes, and waits until all have answered, at most for patience. Then it removes its requests.
func inquire(ctx context.Context, client kube.Interface, nodes []corev1.Node, request string, patience time.Duration, out *cli.Printer) (*inquiry, error) {
	q := &inquiry{request: request}
	defer q.withdraw(context.WithoutCancel(ctx), client, out)
	if err := q.ask(ctx, client, nodes); err != nil {
		return q, err
	}
	waiting, cancel := context.WithTimeoutCause(ctx, patience, errLate)
	defer cancel()
	var names []string
	for _, a := range q.nodes {
		names = append(names, a.name)
	}
	if err := follow(waiting, client, names, q); err != nil && !errors.Is(err, errLate) {
		return q, err
	}
	return q, nil
}

// ask asks the agents of all the nodes.
func (q *inquiry) ask(ctx context.Context, client kube.Interface, nodes []corev1.Node) error {
	asked, failed := make([]*askedNode, len(nodes)), make([]error, len(nodes))
	workqueue.ParallelizeUntil(ctx, writesAtOnce, len(nodes), func(i int) { asked[i], failed[i] = ask(ctx, client, &nodes[i], q.request) })
	q.nodes = slices.DeleteFunc(asked, func(a *askedNode) bool { return a == nil })
	for _, err := range failed {
		if err != nil { // the first error is enough
			return err
		}
	}
	return ctx.Err()
}

// ask sets the request, and removes the answer to an earlier one.
func ask(ctx context.Context, client kube.Interface, n *corev1.Node, request string) (*askedNode, error) {
	after, err := write(ctx, client, n, change{annotations: map[string]*string{config.AnnotationPreview: &request, config.AnnotationPlan: nil}})
	switch {
	case apierrors.IsNotFound(err):
		return &askedNode{node: n, identity: identify(n), lost: "the node was deleted"}, nil
	case err != nil:
		return nil, err
	default:
		return &askedNode{node: after, identity: identify(after)}, nil
	}
}

// withdraw removes requests and answers.
func (q *inquiry) withdraw(ctx context.Context, client kube.Interface, out *cli.Printer) {
	ctx, cancel := context.WithTimeout(ctx, cleanTime)
	defer cancel()
	failed := make([]error, len(q.nodes))
	workqueue.ParallelizeUntil(ctx, writesAtOnce, len(q.nodes), func(i int) {
		_, failed[i] = write(ctx, client, q.nodes[i].node, change{annotations: map[string]*string{config.AnnotationPreview: nil, config.AnnotationPlan: nil}})
	})
	for i, err := range failed {
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // the node was deleted, or created again
			out.Printf("warning: %v; to take the request away: kubectl annotate node %s %s-\n", err, q.nodes[i].name, config.AnnotationPreview)
		}
	}
}

func (q *inquiry) see(n *corev1.Node) {
	for _, a := range q.nodes {
		if a.name == n.Name {
			a.see(n, q.request)
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
		a.lost = "another user has asked its agent something at the same time; ask again"
		return
	}
	var given api.Answer
	if json.Unmarshal([]byte(n.Annotations[config.AnnotationPlan]), &given) == nil && given.For == request {
		sanitizeAnswer(&given)
		a.answer = &given
	}
}

// sanitizeAnswer bounds the texts of an answer: any user who can write the node can write the annotation.
func sanitizeAnswer(a *api.Answer) {
	if a.Diagnosis != nil {
		a.Diagnosis.Outcome.Text = sanitize.Message(a.Diagnosis.Outcome.Text, sanitize.Longest)
	}
	a.Reason = config.Reason(sanitize.Cut(string(a.Reason), longestWord))
	for _, text := range []*string{&a.Refused, &a.Runs, &a.HeldUp} {
		*text = sanitize.Message(*text, sanitize.Longest)
	}
	for _, texts := range [][]string{a.Steps, a.Pods, a.Lost, a.Notes} {
		for i := range texts {
			texts[i] = sanitize.Message(texts[i], sanitize.Longest)
		}
	}
}
