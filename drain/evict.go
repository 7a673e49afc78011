package drain

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
)

// requestTimeout bounds one request for an eviction. The API server itself retries for up to ten seconds while others
// change the same PodDisruptionBudget.
const requestTimeout = 15 * time.Second

// firstDelay grows twofold from answer to answer and stops below longestDelay: a PodDisruptionBudget is free again when
// a replacement pod is ready, which takes seconds at best and often minutes.
const (
	firstDelay   = time.Second
	longestDelay = 30 * time.Second
	delayJitter  = 0.25 // share that is added at random, so that the pods of many nodes do not ask in step
)

// State is how far a pod is on its way out.
type State string

// The states of a pod that was asked to go.
const (
	Requested   State = "Requested"   // the API server accepted the eviction; in a dry run: it would
	Gone        State = "Gone"        // the API server knows the pod no more
	Terminating State = "Terminating" // it is on its way out
	Blocked     State = "Blocked"     // a PodDisruptionBudget does not let it go
	Failed      State = "Failed"      // anything else; Message says what
)

// Verdict is what became of the wish that a pod go.
type Verdict struct {
	Pod     Pod
	State   State
	PDB     string    // namespace/name of the PodDisruptionBudget that blocks; several are joined by ", "
	Message string    // for people: "PDB web/api: needs 2 healthy pods and has 2"
	Since   time.Time // when the pod was first refused to go (Blocked or Failed); zero if it was not
	RetryAt time.Time // before this the API server is not asked again; zero where there is nothing to ask
}

// Evictor asks the API server to evict pods, and remembers whom it asked when. It is for one goroutine.
type Evictor struct {
	client kubernetes.Interface
	clock  clock.PassiveClock
	log    *zap.Logger

	asked  map[types.UID]*attempt // by Evict
	probed map[types.UID]*attempt // by DryRun
}

// attempt is what is remembered of a pod between calls. The memory may be lost at any time: a pod is then asked for once
// too often.
type attempt struct {
	verdict Verdict
	backoff wait.Backoff
}

// NewEvictor returns an Evictor that acts through client.
func NewEvictor(client kubernetes.Interface, clock clock.PassiveClock, log *zap.Logger) *Evictor {
	return &Evictor{client: client, clock: clock, log: log}
}

// Evict asks for the eviction of each pod through policy/v1, under the pod's own grace, and returns one verdict for each
// in the same order. It never waits for a pod to go. A pod that was asked for a short while ago gets its last verdict
// again without a request; the delay grows from 1 to 30 seconds and is never below what the API server asks for.
// What is remembered is of the pods of the last call only.
//
// Callers list the pods anew before each call: a verdict of Blocked is about the name, and a pod that was replaced by
// another of the same name can be reported as blocked for as long as the budget is.
func (e *Evictor) Evict(ctx context.Context, pods []Pod, policy Policy, since time.Time) []Verdict {
	r := round{Evictor: e, now: e.clock.Now()}
	known := e.asked
	e.asked = map[types.UID]*attempt{}
	out := make([]Verdict, 0, len(pods))
	for _, pod := range pods {
		before := known[pod.UID]
		if before != nil && r.now.Before(before.verdict.RetryAt) && !pod.Terminating {
			e.asked[pod.UID] = before
			again := before.verdict
			again.Pod = pod
			out = append(out, again)
			continue
		}
		v := r.next(ctx, pod, before, e.asked)
		e.say(before, v)
		out = append(out, v)
	}
	return out
}

// DryRun asks for each pod whether it would be let go now, changing nothing: Requested is yes. Each pod is judged by
// itself; of several that share a PodDisruptionBudget all may be told yes though they can only go one by one.
// It asks anew at each call; RetryAt tells when that is worth while.
func (e *Evictor) DryRun(ctx context.Context, pods []Pod, policy Policy) []Verdict {
	r := round{Evictor: e, now: e.clock.Now(), dryRun: []string{metav1.DryRunAll}}
	known := e.probed
	e.probed = map[types.UID]*attempt{}
	out := make([]Verdict, 0, len(pods))
	for _, pod := range pods {
		out = append(out, r.next(ctx, pod, known[pod.UID], e.probed))
	}
	return out
}

// say logs an eviction, and a refusal when it is news.
func (e *Evictor) say(before *attempt, v Verdict) {
	if before != nil && before.verdict.State == v.State && before.verdict.Message == v.Message {
		return
	}
	fields := []zap.Field{zap.String("namespace", v.Pod.Namespace), zap.String("pod", v.Pod.Name), zap.String("uid", string(v.Pod.UID))}
	switch v.State {
	case Requested:
		e.log.Info("eviction requested", fields...)
	case Blocked, Failed:
		e.log.Info("eviction refused", append(fields, zap.String("state", string(v.State)), zap.String("reason", v.Message))...)
	case Gone, Terminating:
		e.log.Debug("pod leaves", append(fields, zap.String("state", string(v.State)), zap.String("reason", v.Message))...)
	}
}

// round is one call of Evict or DryRun.
type round struct {
	*Evictor
	now     time.Time
	dryRun  []string
	budgets map[string][]policyv1.PodDisruptionBudget // by namespace, read when first needed
	silent  error                                     // why the API server did not answer at all, once it did not
}

// next judges one pod and remembers the verdict in memory.
func (r *round) next(ctx context.Context, pod Pod, before *attempt, memory map[types.UID]*attempt) Verdict {
	v, retryAfter := r.judge(ctx, pod)
	v.Pod = pod
	now := &attempt{backoff: wait.Backoff{
		Duration: firstDelay, Factor: 2, Steps: 16, Jitter: delayJitter, Cap: time.Duration(float64(longestDelay) / (1 + delayJitter)),
	}}
	if before != nil {
		now.backoff = before.backoff
	}
	switch v.State {
	case Gone, Terminating:
		return v
	case Blocked, Failed:
		v.Since = r.now
		if before != nil && !before.verdict.Since.IsZero() {
			v.Since = before.verdict.Since
		}
	case Requested:
		// It is remembered too: the caller's list may be older than the request, and still show the pod as running.
	}
	v.RetryAt = r.now.Add(max(now.backoff.Step(), retryAfter))
	now.verdict = v
	memory[pod.UID] = now
	return v
}

// judge asks for one pod, unless there is nothing to ask.
func (r *round) judge(ctx context.Context, pod Pod) (Verdict, time.Duration) {
	switch {
	case pod.Unlisted:
		return Verdict{State: Terminating, Message: "the API server does not list it; kubelet still has its devices in use"}, 0
	case pod.Terminating:
		return Verdict{State: Terminating, Message: r.leaving(pod)}, 0
	case pod.Mirror:
		return Verdict{State: Failed, Message: "it is a static pod, which cannot be evicted: move its manifest out of kubelet's directory on the node"}, 0
	case pod.UID == "":
		// The API server takes an empty UID for no precondition at all.
		return Verdict{State: Failed, Message: "its UID is not known, so another pod of its name might be evicted"}, 0
	case r.silent != nil:
		// One request without an answer costs requestTimeout. The others would fare no better.
		return Verdict{State: Failed, Message: r.silent.Error()}, 0
	}
	err := r.request(ctx, pod)
	var answered apierrors.APIStatus
	if err != nil && !errors.As(err, &answered) {
		r.silent = fmt.Errorf("asking the API server: %w", err)
		return Verdict{State: Failed, Message: r.silent.Error()}, 0
	}
	seconds, _ := apierrors.SuggestsClientDelay(err)
	return r.interpret(ctx, pod, err), time.Duration(seconds) * time.Second
}

// leaving says how long a terminating pod has left, or what may keep it.
func (r *round) leaving(pod Pod) string {
	// Moments, not spans: a message that changes by itself would be written to the node again and again.
	ends := pod.GraceEnds.UTC().Format(time.TimeOnly)
	switch {
	case pod.GraceEnds.IsZero():
		return "terminating"
	case r.now.Before(pod.GraceEnds):
		return fmt.Sprintf("terminating, its grace ends at %sZ", ends)
	case len(pod.Finalizers) > 0:
		return fmt.Sprintf("terminating, its grace ended at %sZ, with finalizers %q", ends, pod.Finalizers)
	default:
		return fmt.Sprintf("terminating, its grace ended at %sZ", ends)
	}
}

// request sends one eviction. The UID is a precondition: between listing and asking, a pod may be replaced by another
// of the same name, perhaps on another node, which nobody meant.
func (r *round) request(ctx context.Context, pod Pod) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	eviction := &policyv1.Eviction{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &pod.UID},
			DryRun:        r.dryRun,
		},
	}
	// Left to itself, client-go repeats a request that was answered 429 with Retry-After up to ten times and sleeps in
	// between, which for a PodDisruptionBudget that is being processed is 100 seconds. So it is told not to. A clientset
	// that is not backed by HTTP, as in tests, has no such client, and repeats nothing.
	client, ok := r.client.CoreV1().RESTClient().(*rest.RESTClient)
	if !ok || client == nil {
		return r.client.CoreV1().Pods(pod.Namespace).EvictV1(ctx, eviction)
	}
	return client.Post().Namespace(pod.Namespace).Resource("pods").Name(pod.Name).SubResource("eviction").
		MaxRetries(0).Body(eviction).Do(ctx).Error()
}

// interpret turns the API server's answer into a verdict.
func (r *round) interpret(ctx context.Context, pod Pod, err error) Verdict {
	switch {
	case err == nil:
		return Verdict{State: Requested}
	case apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse):
		return Verdict{State: Gone}
	case apierrors.IsConflict(err):
		return r.settle(ctx, pod, err)
	case apierrors.HasStatusCause(err, policyv1.DisruptionBudgetCause):
		// Mostly 429. It is 403 for a budget whose status makes no sense, or that awaits too many deletions.
		return r.blocked(ctx, pod, err)
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		// Nothing can be created in such a namespace, evictions included, and all its pods are being deleted.
		return Verdict{State: Terminating, Message: fmt.Sprintf("namespace %s is terminating and takes its pods along", pod.Namespace)}
	case apierrors.IsTooManyRequests(err):
		return Verdict{State: Failed, Message: fmt.Sprintf("the API server is busy: %v", err)}
	case apierrors.IsInternalError(err) || apierrors.ReasonForError(err) == metav1.StatusReasonUnknown:
		// A pod that several budgets match is refused with a bare 500 that names none of them.
		if len(r.matching(ctx, pod)) > 1 {
			return r.blocked(ctx, pod, err)
		}
	}
	return Verdict{State: Failed, Message: err.Error()}
}

// settle finds out what a conflict (409) means. Nearly always the precondition failed: the pod is gone, and one that
// bears its name is none of our business. But the API server also gives up with a conflict on a pod that is not ready
// and changes faster than it can be deleted, and that one is still there.
func (r *round) settle(ctx context.Context, pod Pod, conflict error) Verdict {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	found, err := r.client.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return Verdict{State: Gone}
	case err != nil:
		return Verdict{State: Failed, Message: fmt.Sprintf("%v; looking for the pod: %v", conflict, err)}
	case found.UID != pod.UID:
		return Verdict{State: Gone, Message: "another pod has its name now"}
	default:
		return Verdict{State: Failed, Message: conflict.Error()}
	}
}
