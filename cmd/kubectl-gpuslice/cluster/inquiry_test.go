package cluster_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// asked is a node as the API server keeps it: each write has a version, and one that is of another version is a conflict. Its agent takes a while to answer.
type asked struct {
	*agenttest.World
	asks int // writes that set a request
}

const (
	patience = 5 * time.Second
	takes    = 300 * time.Millisecond // an agent's answer
	theirs   = config.LabelProfile + "=theirs"
	taken    = "another user has asked its agent something at the same time; ask again"
)

// write changes the node's annotations; an empty text removes one.
func (w *asked) write(texts map[string]string) {
	w.T.Helper()
	w.Edit("gpu-1", func(n *corev1.Node) {
		for key, text := range texts {
			if n.Annotations[key] = text; text == "" {
				delete(n.Annotations, key)
			}
		}
		version(n)
	})
}

func version(n *corev1.Node) {
	last, _ := strconv.Atoi(n.ResourceVersion)
	n.ResourceVersion = strconv.Itoa(last + 1)
}

// patched is the API server.
func (w *asked) patched(a k8stesting.Action) (bool, runtime.Object, error) {
	var patch struct {
		Metadata struct {
			ResourceVersion string
			Annotations     map[string]*string
		}
	}
	action, is := a.(k8stesting.PatchAction)
	if !is {
		return false, nil, nil
	}
	if err := json.Unmarshal(action.GetPatch(), &patch); err != nil {
		return true, nil, err
	}
	object, err := w.Client.Tracker().Get(a.GetResource(), "", "gpu-1")
	if err != nil {
		return true, nil, err
	}
	node, is := object.(*corev1.Node)
	if !is {
		return true, nil, errors.New("no node")
	}
	n := node.DeepCopy()
	if v := patch.Metadata.ResourceVersion; v != "" && v != n.ResourceVersion {
		return true, nil, apierrors.NewConflict(schema.GroupResource{Resource: "nodes"}, "gpu-1", errors.New("it has changed"))
	}
	for key, text := range patch.Metadata.Annotations {
		if delete(n.Annotations, key); text != nil {
			n.Annotations[key] = *text
		}
	}
	if patch.Metadata.Annotations[config.AnnotationPreview] != nil {
		w.asks++
	}
	version(n)
	return true, n, w.Client.Tracker().Update(a.GetResource(), n, "")
}

// agent answers each request that it finds.
func (w *asked) agent(stopped func() bool) {
	for !stopped() {
		request, there := w.Node("gpu-1").Annotations[config.AnnotationPreview]
		<-time.After(takes)
		now := w.Node("gpu-1").Annotations
		if _, answered := now[config.AnnotationPlan]; there && !answered && now[config.AnnotationPreview] == request && !stopped() {
			w.write(map[string]string{config.AnnotationPlan: answer(request)})
		}
	}
}

func answer(request string) string { return `{"for":"` + request + `","runs":"now"}` }

// inquiry is what came of one.
type inquiry struct {
	*cluster.Inquiry
	err error
}

// inquire begins an inquiry.
func (w *asked) inquire(ctx context.Context, n *corev1.Node, request string) <-chan inquiry {
	out := make(chan inquiry, 1)
	go func() {
		q, err := cluster.Inquire(ctx, clientset.Of(w.Client), []corev1.Node{*n}, cluster.Of(request), patience, &cli.Printer{W: io.Discard})
		out <- inquiry{q, err}
	}()
	return out
}

func inAskedWorld(t *testing.T, test func(w *asked)) {
	t.Helper()
	utilruntime.ErrorHandlers = nil // they pause by a time of the whole process
	agenttest.InWorld(t, nil, func(world *agenttest.World) {
		w := &asked{World: world}
		w.Client.PrependReactor("patch", "nodes", w.patched)
		w.write(nil)
		test(w)
	}, agenttest.GPU("gpu-1"))
}

// Each of several users at once has an answer, and none removes a request of another.
func TestSeveralUsersAskOneAfterTheOther(t *testing.T) {
	for name, requests := range map[string][]string{
		"for plans":           {config.LabelProfile + "=a", config.LabelProfile + "=b"},
		"for the same":        {config.RequestDiagnosis, config.RequestDiagnosis, config.RequestDiagnosis},
		"for all there is":    {config.LabelProfile + "=a", config.RequestDiagnosis, config.RequestTop, config.LabelProfile + "=a"},
		"for many plans each": {"a=1", "a=2", "a=3", "a=4", "a=5", "a=6"},
	} {
		t.Run(name, func(t *testing.T) {
			inAskedWorld(t, func(w *asked) {
				ctx, stop := context.WithCancel(w.T.Context())
				defer stop()
				go w.agent(func() bool { return ctx.Err() != nil })
				var all []<-chan inquiry
				for _, request := range requests {
					all = append(all, w.inquire(w.T.Context(), w.Node("gpu-1"), request))
				}
				for i, one := range all {
					q := <-one
					if q.err != nil || len(q.Nodes) != 1 || q.Nodes[0].Answer == nil || q.Nodes[0].Answer.For != requests[i] {
						w.T.Errorf("%s: %v, %+v", requests[i], q.err, q.Nodes[0])
					}
				}
				if w.asks > len(requests) {
					w.T.Errorf("%d requests for %d inquiries: they replace each other", w.asks, len(requests))
				}
				w.Untouched("gpu-1")
			})
		})
	}
}

// A node has room for one request.
func TestARequestWaitsForThatOfAnotherUser(t *testing.T) {
	const mine = config.LabelProfile + "=mine"
	seconds := func(n int) { <-time.After(time.Duration(n) * time.Second) }
	for name, row := range map[string]struct {
		before, during func(w *asked)
		interrupted    bool
		answered       bool
		lost           string
		left           string // the request on the node in the end
	}{
		"it is removed": {
			before: func(w *asked) { w.write(map[string]string{config.AnnotationPreview: theirs}) },
			during: func(w *asked) {
				seconds(3)
				w.write(map[string]string{config.AnnotationPreview: ""})
				w.Answers("gpu-1", answerOf(mine))
			}, answered: true,
		},
		"it is answered": {
			before: func(w *asked) { w.write(map[string]string{config.AnnotationPreview: theirs}) },
			during: func(w *asked) {
				seconds(3)
				w.write(map[string]string{config.AnnotationPlan: answer(theirs)})
				w.Answers("gpu-1", answerOf(mine))
			}, answered: true,
		},
		"it was answered before": {
			before: func(w *asked) {
				w.write(map[string]string{config.AnnotationPreview: theirs, config.AnnotationPlan: answer(theirs)})
			},
			during: func(w *asked) { w.Answers("gpu-1", answerOf(mine)) }, answered: true,
		},
		"it is the same": {
			before: func(w *asked) { w.write(map[string]string{config.AnnotationPreview: mine}) },
			during: func(w *asked) { w.write(map[string]string{config.AnnotationPlan: answer(mine)}) }, answered: true, left: mine,
		},
		"it comes later": {
			during: func(w *asked) {
				w.write(map[string]string{config.AnnotationPreview: theirs})
				seconds(3)
				w.write(map[string]string{config.AnnotationPreview: ""})
				w.Answers("gpu-1", answerOf(mine))
			}, answered: true,
		},
		"it stays":                         {before: func(w *asked) { w.write(map[string]string{config.AnnotationPreview: theirs}) }, lost: taken, left: theirs},
		"it comes later, and stays":        {during: func(w *asked) { w.write(map[string]string{config.AnnotationPreview: theirs}) }, lost: taken, left: theirs},
		"interrupted while the other asks": {before: func(w *asked) { w.write(map[string]string{config.AnnotationPreview: theirs}) }, interrupted: true, left: theirs},
		"interrupted":                      {interrupted: true},
		"the agent is silent":              {},
	} {
		t.Run(name, func(t *testing.T) {
			inAskedWorld(t, func(w *asked) {
				if row.before != nil {
					row.before(w)
				}
				ctx, interrupt := context.WithCancel(w.T.Context())
				defer interrupt()
				began, asking := time.Now(), w.inquire(ctx, w.Node("gpu-1"), mine)
				synctest.Wait()
				if row.during != nil {
					row.during(w)
				}
				if row.interrupted {
					interrupt()
				}
				q := <-asking
				if n := q.Nodes[0]; (q.err != nil) != row.interrupted || (n.Answer != nil) != row.answered || n.Lost != row.lost {
					w.T.Errorf("error %v, answer %+v, lost %q", q.err, n.Answer, n.Lost)
				}
				if took := time.Since(began); took > patience {
					w.T.Errorf("it took %s", took)
				}
				if left := w.Node("gpu-1").Annotations[config.AnnotationPreview]; left != row.left {
					w.T.Errorf("request %q is left, want %q", left, row.left)
				}
			})
		})
	}
}

func answerOf(request string) api.Answer { return api.Answer{For: request, Runs: "now"} }
