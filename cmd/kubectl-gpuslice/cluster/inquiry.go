package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
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
	again     func(*Asked) error
	failed    error // of again
}

// Asked is a node, and what its agent answers.
type Asked struct {
	Identity
	node    *corev1.Node // as last seen
	request string       // value of config.AnnotationPreview
	written bool         // by this command; another may have replaced it
	open    bool         // the node has the request, and an answer to it that comes now is of now
	Answer  *api.Answer
	Lost    string // why there will be no answer
}

// Of is the same request to each agent.
func Of(request string) func(*corev1.Node) string {
	return func(*corev1.Node) string { return request }
}

// Inquire asks the agents of the nodes, and waits until all have answered, at most for patience. Then it removes its requests. A request is a value of
// config.AnnotationPreview. A node has room for one: Inquire waits while another user's request is there without an answer.
func Inquire(ctx context.Context, client kube.Interface, nodes []corev1.Node, request func(*corev1.Node) string, patience time.Duration, out *cli.Printer) (*Inquiry, error) {
	q := &Inquiry{}
	defer q.withdraw(context.WithoutCancel(ctx), client, out)
	if err := q.ask(ctx, client, nodes, request); err != nil {
		q.Unwritten = true
		return q, err
	}
	waiting, cancel := context.WithTimeoutCause(ctx, patience, ErrLate)
	defer cancel()
	q.again = func(a *Asked) error { return a.ask(waiting, client) }
	var names []string
	for _, a := range q.Nodes {
		names = append(names, a.Name)
	}
	if err := Follow(waiting, client, names, q); err != nil && !errors.Is(err, ErrLate) && !errors.Is(context.Cause(waiting), ErrLate) {
		q.Unwritten = errors.Is(err, q.failed)
		return q, err
	}
	for _, a := range q.Nodes {
		if a.Answer == nil && a.Lost == "" && !a.open {
			a.Lost = "another user has asked its agent something at the same time; ask again"
		}
	}
	return q, nil
}

// ask asks the agents of all the nodes.
func (q *Inquiry) ask(ctx context.Context, client kube.Interface, nodes []corev1.Node, request func(*corev1.Node) string) error {
	for i := range nodes {
		q.Nodes = append(q.Nodes, &Asked{node: &nodes[i], Identity: Identify(&nodes[i]), request: request(&nodes[i])})
	}
	failed := make([]error, len(nodes))
	workqueue.ParallelizeUntil(ctx, writesAtOnce, len(nodes), func(i int) {
		if a := q.Nodes[i]; a.free() {
			failed[i] = a.ask(ctx, client)
		}
	})
	for _, err := range failed {
		if err != nil { // the first error is enough
			return err
		}
	}
	return ctx.Err()
}

// free reports whether the node has room for the request. One that the agent has answered is over: the user who made it has seen the answer, or was killed.
func (a *Asked) free() bool {
	_, taken := a.node.Annotations[config.AnnotationPreview]
	_, answered := a.node.Annotations[config.AnnotationPlan]
	return !taken || answered
}

// ask sets the request, and removes the answer to an earlier one. It writes nothing to a node that has changed since it was last seen, as by another
// user.
func (a *Asked) ask(ctx context.Context, client kube.Interface) error {
	after, err := Write(ctx, client, a.node, Change{
		Annotations: map[string]*string{config.AnnotationPreview: &a.request, config.AnnotationPlan: nil}, Unchanged: true,
	})
	switch {
	case apierrors.IsNotFound(err):
		a.Lost = "the node was deleted"
		return nil
	case apierrors.IsConflict(err):
		return nil
	case err != nil:
		a.written = a.written || !apierrors.IsForbidden(err) // perhaps: the answer of the API server may be what is lost
		return err
	default:
		a.node, a.Identity, a.written, a.open = after, Identify(after), true, true
		return nil
	}
}

// withdraw removes requests and answers.
func (q *Inquiry) withdraw(ctx context.Context, client kube.Interface, out *cli.Printer) {
	ctx, cancel := context.WithTimeout(ctx, cleanTime)
	defer cancel()
	failed := make([]error, len(q.Nodes))
	workqueue.ParallelizeUntil(ctx, writesAtOnce, len(q.Nodes), func(i int) {
		if q.Nodes[i].written {
			failed[i] = q.Nodes[i].withdraw(ctx, client)
		}
	})
	for i, err := range failed {
		if err != nil && !apierrors.IsNotFound(err) { // the node was deleted
			out.Printf("warning: %v; to remove the request: kubectl annotate node %s %s-\n", err, q.Nodes[i].Name, config.AnnotationPreview)
		}
	}
}

// withdraw removes the request from the node, unless it is another user's.
func (a *Asked) withdraw(ctx context.Context, client kube.Interface) error {
	uid := a.node.UID
	return retry.OnError(retry.DefaultBackoff, apierrors.IsConflict, func() error {
		request, asked := a.node.Annotations[config.AnnotationPreview]
		_, answered := a.node.Annotations[config.AnnotationPlan]
		if a.node.UID != uid || asked && request != a.request || a.Answer != nil && !answered {
			return nil // it is another node, or another user has asked, perhaps the same
		}
		_, err := Write(ctx, client, a.node, Change{Annotations: map[string]*string{config.AnnotationPreview: nil, config.AnnotationPlan: nil}, Unchanged: true})
		if !apierrors.IsConflict(err) {
			return err
		}
		now, failed := client.Nodes().Get(ctx, a.Name, metav1.GetOptions{})
		if failed != nil {
			return failed
		}
		a.node = now
		return err
	})
}

// See implements Watcher.
func (q *Inquiry) See(n *corev1.Node) {
	for _, a := range q.Nodes {
		if a.Name != n.Name || a.Answer != nil || a.Lost != "" || a.Outdated(n) {
			continue
		}
		if a.see(n); a.Answer == nil && !a.open && a.free() {
			q.failed = cmp.Or(q.failed, q.again(a))
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
	return !slices.ContainsFunc(q.Nodes, func(a *Asked) bool { return a.Answer == nil && a.Lost == "" }), q.failed
}

// see takes the answer, also one to another user's request that is the same. An answer that was there before the request is of an earlier state.
func (a *Asked) see(n *corev1.Node) {
	a.node = n
	request, asked := n.Annotations[config.AnnotationPreview]
	if !asked || request != a.request {
		a.written, a.open = false, false
		return
	}
	text, answered := n.Annotations[config.AnnotationPlan]
	a.open = a.open || !answered
	var given api.Answer
	if a.open && json.Unmarshal([]byte(text), &given) == nil && given.For == a.request {
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
