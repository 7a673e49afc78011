package cluster

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

// mostCounted bounds the counts of an answer: sums of them have to stay numbers.
const mostCounted = 1_000_000

// mostDrawn bounds the GPUs of an answer, and the instances of one. No machine has more.
const mostDrawn = 64

// writesAtOnce is to how many nodes the command writes at a time: it asks fifty in the time of a few answers of the API server.
const writesAtOnce = 16

// Inquiry is a request to agents, with their answers.
type Inquiry struct {
	Nodes     []*Asked
	Unwritten bool // an agent could not be asked, since a write to its node failed
}

// Asked is a node, and what its agent answers.
type Asked struct {
	Identity
	node    *corev1.Node
	request string // value of config.AnnotationPreview
	Answer  *api.Answer
	Lost    string // why there will be no answer
}

// Of is the same request to each agent.
func Of(request string) func(*corev1.Node) string {
	return func(*corev1.Node) string { return request }
}

// Inquire asks the agents of the nodes, and waits until all have answered, at most for patience. Then it removes its requests. A request is a value of
// config.AnnotationPreview.
func Inquire(ctx context.Context, client kube.Interface, nodes []corev1.Node, request func(*corev1.Node) string, patience time.Duration, out *cli.Printer) (*Inquiry, error) {
	q := &Inquiry{}
	defer q.withdraw(context.WithoutCancel(ctx), client, out)
	if err := q.ask(ctx, client, nodes, request); err != nil {
		q.Unwritten = true
		return q, err
	}
	waiting, cancel := context.WithTimeoutCause(ctx, patience, ErrLate)
	defer cancel()
	var names []string
	for _, a := range q.Nodes {
		names = append(names, a.Name)
	}
	if err := Follow(waiting, client, names, q); err != nil && !errors.Is(err, ErrLate) {
		return q, err
	}
	return q, nil
}

// ask asks the agents of all the nodes.
func (q *Inquiry) ask(ctx context.Context, client kube.Interface, nodes []corev1.Node, request func(*corev1.Node) string) error {
	asked, failed := make([]*Asked, len(nodes)), make([]error, len(nodes))
	workqueue.ParallelizeUntil(ctx, writesAtOnce, len(nodes), func(i int) { asked[i], failed[i] = ask(ctx, client, &nodes[i], request(&nodes[i])) })
	q.Nodes = slices.DeleteFunc(asked, func(a *Asked) bool { return a == nil })
	for _, err := range failed {
		if err != nil { // the first error is enough
			return err
		}
	}
	return ctx.Err()
}

// ask sets the request, and removes the answer to an earlier one.
func ask(ctx context.Context, client kube.Interface, n *corev1.Node, request string) (*Asked, error) {
	after, err := Write(ctx, client, n, Change{Annotations: map[string]*string{config.AnnotationPreview: &request, config.AnnotationPlan: nil}})
	switch {
	case apierrors.IsNotFound(err):
		return &Asked{node: n, Identity: Identify(n), Lost: "the node was deleted"}, nil
	case err != nil:
		return nil, err
	default:
		return &Asked{node: after, Identity: Identify(after), request: request}, nil
	}
}

// withdraw removes requests and answers.
func (q *Inquiry) withdraw(ctx context.Context, client kube.Interface, out *cli.Printer) {
	ctx, cancel := context.WithTimeout(ctx, cleanTime)
	defer cancel()
	failed := make([]error, len(q.Nodes))
	workqueue.ParallelizeUntil(ctx, writesAtOnce, len(q.Nodes), func(i int) {
		_, failed[i] = Write(ctx, client, q.Nodes[i].node, Change{Annotations: map[string]*string{config.AnnotationPreview: nil, config.AnnotationPlan: nil}})
	})
	for i, err := range failed {
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // the node was deleted, or created again
			out.Printf("warning: %v; to remove the request: kubectl annotate node %s %s-\n", err, q.Nodes[i].Name, config.AnnotationPreview)
		}
	}
}

// See implements Watcher.
func (q *Inquiry) See(n *corev1.Node) {
	for _, a := range q.Nodes {
		if a.Name == n.Name {
			a.see(n)
		}
	}
}

// Gone implements Watcher.
func (q *Inquiry) Gone(name string) {
	for _, a := range q.Nodes {
		if a.Name == name && a.Answer == nil {
			a.Lost = "the node was deleted"
		}
	}
}

// Passed implements Watcher.
func (q *Inquiry) Passed(time.Time) {}

// Trouble implements Watcher.
func (q *Inquiry) Trouble(error) {}

// Settled implements Watcher.
func (q *Inquiry) Settled() (bool, error) {
	return !slices.ContainsFunc(q.Nodes, func(a *Asked) bool { return a.Answer == nil && a.Lost == "" }), nil
}

func (a *Asked) see(n *corev1.Node) {
	if a.Answer != nil || a.Lost != "" || a.Outdated(n) {
		return
	}
	if n.Annotations[config.AnnotationPreview] != a.request {
		a.Lost = "another user has asked its agent something at the same time; ask again"
		return
	}
	var given api.Answer
	if json.Unmarshal([]byte(n.Annotations[config.AnnotationPlan]), &given) == nil && given.For == a.request {
		sanitizeAnswer(&given)
		a.Answer = &given
	}
}

// sanitizeAnswer bounds the texts and counts of an answer: any user who can write the node can write the annotation.
func sanitizeAnswer(a *api.Answer) {
	if a.Diagnosis != nil {
		a.Diagnosis.Outcome.Text = sanitize.Message(a.Diagnosis.Outcome.Text, sanitize.Longest)
	}
	a.Reason = config.Reason(sanitize.Cut(string(a.Reason), LongestWord))
	for _, text := range []*string{&a.Refused, &a.Runs, &a.HeldUp, &a.Unsure, &a.Offers} {
		*text = sanitize.Message(*text, sanitize.Longest)
	}
	for _, n := range []*int{&a.More, &a.MorePods, &a.MoreLost, &a.MoreUses} {
		*n = min(max(0, *n), mostCounted)
	}
	sanitizeRecuts(a)
	for _, texts := range [][]string{a.Steps, a.Pods, a.Lost, a.Asked, a.Notes} {
		for i := range texts {
			texts[i] = sanitize.Message(texts[i], sanitize.Longest)
		}
	}
}

// sanitizeRecuts bounds what is drawn of the GPUs.
func sanitizeRecuts(a *api.Answer) {
	a.GPUs = a.GPUs[:min(len(a.GPUs), mostDrawn)]
	for i := range a.GPUs {
		r := &a.GPUs[i]
		r.GPUs, r.Model, r.Slices = r.GPUs[:min(len(r.GPUs), mostDrawn)], sanitize.Cut(r.Model, LongestWord), min(max(0, r.Slices), mostDrawn)
		for _, l := range []*api.Layout{&r.Before, &r.After} {
			l.Instances = l.Instances[:min(len(l.Instances), mostDrawn)]
			for n := range l.Instances {
				l.Instances[n].Is = sanitize.Cut(l.Instances[n].Is, LongestWord)
			}
		}
	}
}
