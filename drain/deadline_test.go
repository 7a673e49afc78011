package drain_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// silent is an API server that never answers one kind of request.
type silent struct {
	kube.Interface
	to string
}

func (s silent) Pods(namespace string) kube.Pods {
	return silentPods{s.Interface.Pods(namespace), s.to}
}

func (s silent) PodDisruptionBudgets(namespace string) kube.PodDisruptionBudgets {
	return silentBudgets{s.Interface.PodDisruptionBudgets(namespace), s.to}
}

// answers waits until the caller gives up if the server never answers such a request.
func answers(ctx context.Context, silentTo, verb string) error {
	if silentTo != verb {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

type silentPods struct {
	kube.Pods
	to string
}

func (p silentPods) EvictV1(ctx context.Context, eviction *policyv1.Eviction) error {
	if err := answers(ctx, p.to, "evict"); err != nil {
		return err
	}
	return p.Pods.EvictV1(ctx, eviction)
}

func (p silentPods) Delete(ctx context.Context, name string, o metav1.DeleteOptions) error {
	if err := answers(ctx, p.to, "delete"); err != nil {
		return err
	}
	return p.Pods.Delete(ctx, name, o)
}

func (p silentPods) Get(ctx context.Context, name string, o metav1.GetOptions) (*corev1.Pod, error) {
	if err := answers(ctx, p.to, "get"); err != nil {
		return nil, err
	}
	return p.Pods.Get(ctx, name, o)
}

type silentBudgets struct {
	kube.PodDisruptionBudgets
	to string
}

func (b silentBudgets) List(ctx context.Context, o metav1.ListOptions) (*policyv1.PodDisruptionBudgetList, error) {
	if err := answers(ctx, b.to, "list"); err != nil {
		return nil, err
	}
	return b.PodDisruptionBudgets.List(ctx, o)
}

// Promise 14. The agent gives no deadline of its own to a call of the evictor, which has many requests.
func TestNoRequestOutlastsItsDeadline(t *testing.T) {
	evict := func(ctx context.Context, e *drain.Evictor) []drain.Verdict {
		policy := drain.Policy{Deadline: time.Hour, Delete: true, DeleteGrace: 30 * time.Second}
		return e.Evict(ctx, []holders.Pod{holder("a")}, policy, noon)
	}
	conflict := apierrors.NewConflict(podResource, "a", nil)
	for name, c := range map[string]struct {
		to     string
		answer error // to an eviction
		at     time.Duration
		call   func(context.Context, *drain.Evictor) []drain.Verdict
		want   drain.State
	}{
		"an eviction": {to: "evict", call: evict, want: drain.Failed},
		"a dry run": {to: "evict", call: func(ctx context.Context, e *drain.Evictor) []drain.Verdict {
			return e.DryRun(ctx, []holders.Pod{holder("a")}, drain.Policy{})
		}, want: drain.Failed},
		"a deletion":            {to: "delete", answer: refusal(needsTwo, 0), at: time.Hour, call: evict, want: drain.Failed},
		"a look for the pod":    {to: "get", answer: conflict, call: evict, want: drain.Failed},
		"a list of the budgets": {to: "list", answer: refusal(needsTwo, 0), call: evict, want: drain.Blocked},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newServer()
				s.answer = c.answer
				e := drain.NewEvictor(silent{clientset.Of(s), c.to}, clocktesting.NewFakePassiveClock(noon.Add(c.at)), zap.NewNop())
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				began := time.Now()
				got := c.call(ctx, e)[0]
				if took := time.Since(began); took != 15*time.Second || got.State != c.want {
					t.Errorf("after %s the verdict is %s: %s; want %s after 15s", took, got.State, got.Message, c.want)
				}
			})
		})
	}
}
