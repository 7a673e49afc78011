package drain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// requestTimeout bounds one request for an eviction. The API server itself retries for up to ten seconds while others
// change the same PodDisruptionBudget.
const requestTimeout = 15 * time.Second

// firstDelay grows twofold from answer to answer and stops below longestDelay: a PodDisruptionBudget is free again when
// a replacement pod is ready, which takes seconds at best and often minutes.
const (
	firstDelay   = time.Second
	longestDelay = 25 * time.Second // with the pass that asks, a pod leaves within 30 seconds after its budget opens
	delayJitter  = 0.25             // random share of the delay, so that the agents of many nodes do not retry in step
)

// State says how far the eviction of a pod has come.
type State string

// The states of a pod that is to leave.
const (
	Requested   State = "Requested"   // the API server accepted the eviction; in a dry run: it would
	Deleted     State = "Deleted"     // the API server accepted its deletion, after the deadline
	Gone        State = "Gone"        // the API server no longer knows the pod
	Terminating State = "Terminating" // kubelet is ending it
	Waiting     State = "Waiting"     // a rule, or the policy, lets it end by itself, or has it asked until it goes
	Queued      State = "Queued"      // other pods have to leave before it
	Blocked     State = "Blocked"     // a PodDisruptionBudget or a webhook keeps it
	Refused     State = "Refused"     // the policy forbids its eviction, or its DaemonSet would recreate it
	Failed      State = "Failed"      // any other cause, which Message names
)

// isStuck reports whether a pod of this state stays unless its budget, its policy or its cause changes.
func (s State) isStuck() bool { return s == Blocked || s == Refused || s == Failed }

// Verdict is the result of requesting the eviction of a pod.
type Verdict struct {
	Pod      holders.Pod
	State    State
	PDB      string    // namespace/name of the PodDisruptionBudget that blocks; several are joined by ", "
	Awaits   string    // namespace/name of a pod that PDB lacks, since it has not started: mostly the successor of one that was evicted
	Webhook  string    // the admission webhook that denies its eviction
	Asked    bool      // a budget or a webhook keeps it while it is Waiting, and may let it go at any moment
	By       string    // field of the settings that decided, "drain.rules[0]"; empty if none did
	Allow    []Choice  // choices that refuse it, which a user may allow for one change
	Message  string    // for users: "PDB web/api: needs 2 healthy pods and has 2; retried until 04:02Z"
	Since    time.Time // of the first such verdict in a row (Blocked, Refused or Failed); zero for the other states
	RetryAt  time.Time // time of the next request to the API server; zero if there is none to come
	Deadline time.Time // until when the pod may stay; zero if there is no deadline, or it is gone
	Overdue  bool      // the pod is there past its deadline, and Evict does nothing more
	Late     bool      // the pod is terminating, and past its grace: Message says what keeps it

	keeps   keeps  // why PDB keeps it and others
	unready bool   // another policy of PDB for unready pods would let it leave
	denial  string // of Webhook
	lacks   bool   // PDB only lacks healthy pods, which may change at any moment for other reasons than this pod
	said    string // Message without what withDeadline adds
	until   string // that
}

// Evictor evicts pods through the API server, and remembers its requests and their times. Only one goroutine may use it.
type Evictor struct {
	client kube.Interface
	clock  clock.PassiveClock
	log    *zap.Logger

	evictions map[types.UID]*attempt // by Evict
	dryRuns   map[types.UID]*attempt // by DryRun
	blind     time.Time              // until when it does not search successors again, as it lacks the right
}

// attempt is the memory of a pod between calls. It may be lost at any time: the agent then sends one request too many.
type attempt struct {
	verdict Verdict // without the fields that withDeadline adds
	at      time.Time
	backoff wait.Backoff
	labels  map[string]string // that the pod had: a budget selects by them
}

// NewEvictor returns an Evictor that acts through client.
func NewEvictor(client kube.Interface, clock clock.PassiveClock, log *zap.Logger) *Evictor {
	return &Evictor{client: client, clock: clock, log: log}
}

// Evict evicts pods as the policy says, and returns one verdict for each in the same order. Since is when the node was
// fenced; without it, or without Policy.Deadline, there is no deadline.
//
// It requests evictions through policy/v1, with the pods' own grace: first the ordinary pods, then the critical ones, last those of DaemonSets. From
// its deadline on, Evict deletes a pod that the API server still does not evict, if the policy says so. For an overdue pod it sends dry runs only,
// which say what holds the pod: no pod may leave for a change that is about to be given up.
//
// The eviction of a pod that the policy has asked is requested again and again until its deadline, and nothing cuts its work off before. A pod that may
// end by itself leaves earlier if a budget that has kept it lets it go, other than by more healthy pods: who has budgets opened for a drain means it so.
//
// It never waits for a pod to leave. Soon after a request, it returns the last verdict again without a new request. The delay grows from 1 to 25
// seconds, and is never shorter than the API server demands. Evict remembers the pods of its last call only.
//
// Callers list the pods again before each call. A verdict of Blocked is about the name: a replaced pod can count as blocked as long as its budget is
// used up.
func (e *Evictor) Evict(ctx context.Context, pods []holders.Pod, policy Policy, since time.Time) []Verdict {
	policy.Granted = policy.Grant(pods, since)
	r := round{Evictor: e, now: e.clock.Now(), policy: policy, since: since, lastAttempts: e.evictions, nextAttempts: map[types.UID]*attempt{}}
	e.evictions = r.nextAttempts
	out := make([]Verdict, len(pods))
	for t := range tiers {
		left := r.earlierTierLeft
		for i, pod := range pods {
			if policy.tierOf(pod) == t {
				out[i] = r.verdict(ctx, pod)
				left = left || out[i].State != Gone
			}
		}
		r.earlierTierLeft = left
	}
	return out
}

// DryRun asks the API server for each pod whether it would evict it now, changing nothing: Requested is yes. It judges each pod alone: all pods of
// one PodDisruptionBudget may be Requested though they can only leave one by one. A pod that may end by itself first is Waiting, without a request.
// Each call sends new requests; RetryAt says when a further call is worthwhile.
func (e *Evictor) DryRun(ctx context.Context, pods []holders.Pod, policy Policy) []Verdict {
	r := round{Evictor: e, now: e.clock.Now(), policy: policy, dryRun: true, lastAttempts: e.dryRuns, nextAttempts: map[types.UID]*attempt{}}
	e.dryRuns = r.nextAttempts
	out := make([]Verdict, 0, len(pods))
	for _, pod := range pods {
		out = append(out, r.verdict(ctx, pod))
	}
	return out
}

// round is one call of Evict or DryRun.
type round struct {
	*Evictor
	now             time.Time
	policy          Policy
	since           time.Time // when the node was fenced
	dryRun          bool
	earlierTierLeft bool                                      // a pod of an earlier tier is still there
	lastAttempts    map[types.UID]*attempt                    // of the call before
	nextAttempts    map[types.UID]*attempt                    // for the next call
	budgets         map[string][]policyv1.PodDisruptionBudget // by namespace, read when first needed
	successors      map[string]awaited                        // by budget, read when first needed
	noAnswer        error                                     // of the first request that the API server did not answer; nil so far
}

// dueForDeletion reports whether the pod is to be deleted if eviction fails.
func (r *round) dueForDeletion(t terms) bool {
	return r.policy.Delete && !t.deadline.IsZero() && !r.now.Before(t.deadline)
}

func (r *round) overdue(t terms) bool { return !t.end.IsZero() && !r.now.Before(t.end) }

// verdict judges one pod, and remembers the verdict for the next call.
func (r *round) verdict(ctx context.Context, pod holders.Pod) Verdict {
	t := r.policy.terms(pod, r.since, r.now)
	before := r.lastAttempts[pod.UID]
	if before != nil && !r.dryRun && !pod.Terminating && r.stillValid(before, pod, t) {
		r.nextAttempts[pod.UID] = before
		v := before.verdict
		v.Pod = pod
		return r.withDeadline(v, t)
	}
	v, retryAfter := r.judge(ctx, pod, t, before)
	v.Pod = pod
	v = r.remember(v, before, retryAfter)
	if !r.dryRun {
		r.logNews(before, v)
	}
	return r.withDeadline(v, t)
}

// stillValid reports whether it is too early for a new request. An answer from before the deadline is outdated after it, when the pod may be deleted, as
// is one for other labels of the pod, which another budget may select.
func (r *round) stillValid(before *attempt, pod holders.Pod, t terms) bool {
	stays := before.verdict.State.isStuck() || before.verdict.State == Waiting
	outdated := r.dueForDeletion(t) && stays && before.at.Before(t.deadline) ||
		before.verdict.State == Waiting && !r.now.Before(t.until) ||
		stays && !maps.Equal(before.labels, pod.Labels) && r.now.Sub(before.at) >= firstDelay
	return r.now.Before(before.verdict.RetryAt) && !outdated
}

// remember keeps the verdict for the next call, if there can be one, with the times of the first one and of the next request.
func (r *round) remember(v Verdict, before *attempt, retryAfter time.Duration) Verdict {
	if v.State == Gone || v.State == Terminating {
		return v
	}
	now := &attempt{at: r.now, labels: v.Pod.Labels, backoff: wait.Backoff{
		Duration: firstDelay, Factor: 2, Steps: 16, Jitter: delayJitter, Cap: time.Duration(float64(longestDelay) / (1 + delayJitter)),
	}}
	if before != nil {
		now.backoff = before.backoff
	}
	if v.State.isStuck() {
		v.Since = r.now
		if before != nil && !before.verdict.Since.IsZero() {
			v.Since = before.verdict.Since
		}
	}
	switch v.State {
	case Blocked, Failed, Requested, Deleted:
		// Accepted requests too: the caller's list may be older than the request, and still show the pod as running.
		v.RetryAt = r.now.Add(max(now.backoff.Step(), retryAfter))
	case Waiting:
		if v.Asked {
			v.RetryAt = r.now.Add(max(now.backoff.Step(), retryAfter))
		} else if retryAfter > 0 {
			v.RetryAt = r.now.Add(retryAfter)
		}
	case Queued, Refused, Gone, Terminating:
	}
	now.verdict = v
	r.nextAttempts[v.Pod.UID] = now
	return v
}

// withDeadline adds the fields that change with time only.
func (r *round) withDeadline(v Verdict, t terms) Verdict {
	v.said = v.Message
	if t.deadline.IsZero() || v.State == Gone {
		return v
	}
	v.Deadline, v.Overdue = t.deadline, r.overdue(t)
	if r.dueForDeletion(t) {
		v.Deadline = t.end
	}
	if v.State != Blocked && v.State != Failed {
		return v
	}
	until := r.shortTime(v.Deadline, minutes)
	switch {
	case v.Overdue:
		v.until = "; it had until " + until
	case r.dueForDeletion(t):
		v.until = "; deletion retried until " + until
	case r.policy.Delete:
		v.until = "; retried until " + until + ", then deleted"
	default:
		v.until = "; retried until " + until
	}
	v.Message += v.until
	return v
}

// minutes is the form of deadlines in messages.
const minutes = "15:04"

// logNews logs a verdict that differs from the one before.
func (e *Evictor) logNews(before *attempt, v Verdict) {
	if before != nil && before.verdict.State == v.State && before.verdict.Message == v.Message {
		return
	}
	fields := []zap.Field{zap.String("namespace", v.Pod.Namespace), zap.String("pod", v.Pod.Name), zap.String("uid", string(v.Pod.UID))}
	verdict := append(slices.Clone(fields), zap.String("state", string(v.State)), zap.String("reason", v.Message))
	switch v.State {
	case Requested:
		e.log.Info("eviction requested", fields...)
	case Deleted:
		e.log.Info("pod deleted", verdict...)
	case Blocked, Failed, Refused:
		e.log.Info("eviction refused", verdict...)
	case Waiting:
		e.log.Info("pod may stay for a time", verdict...)
	case Gone, Terminating, Queued:
		e.log.Debug("pod leaves", verdict...)
	}
}

// judge decides about one pod, and sends the request if there is one.
func (r *round) judge(ctx context.Context, pod holders.Pod, t terms, before *attempt) (Verdict, time.Duration) {
	if v, ok := r.withoutRequest(pod, t); ok {
		if v.State == Waiting && !t.ask && !r.dryRun {
			return r.unlessOpened(ctx, pod, v, before)
		}
		return v, 0
	}
	if r.overdue(t) {
		v, retryAfter := r.ask(ctx, pod, true)
		if v.State == Requested {
			v = Verdict{State: Failed, Message: "still there, though it may be evicted now"}
		}
		return v, retryAfter
	}
	if !r.dueForDeletion(t) {
		v, retryAfter := r.ask(ctx, pod, r.dryRun)
		return r.patient(v, t), retryAfter
	}
	// Eviction comes before deletion for a late pod too: an agent that did not run for hours has not requested it before.
	last := Verdict{Message: "its own grace is longer"}
	if pod.Grace <= r.policy.DeleteGrace {
		var retryAfter time.Duration
		if last, retryAfter = r.ask(ctx, pod, false); !last.State.isStuck() || r.noAnswer != nil {
			return last, retryAfter
		}
	}
	return r.deletePod(ctx, pod, t, last), 0
}

// patient returns the verdict on a pod that is asked until its deadline, if its eviction was refused for a cause that may end until then.
func (r *round) patient(v Verdict, t terms) Verdict {
	if !t.ask || v.State != Blocked {
		return v
	}
	if r.since.IsZero() && v.Webhook != "" && t.reactor != nil && t.reactor.moves != nil && !t.reactor.moves(v.denial) {
		return v
	}
	return Verdict{State: Waiting, Asked: true, By: t.by, PDB: v.PDB, Webhook: v.Webhook, Awaits: v.Awaits, Message: r.may(t) + "; " + v.Message}
}

// may says until when a pod may stay that is asked.
func (r *round) may(t terms) string {
	if r.since.IsZero() {
		return t.upTo(r.now)
	}
	what, until := "it is asked to leave", t.until
	if t.reactor != nil {
		what = t.reactor.may
	}
	if r.now.Before(t.ends) && t.ends.Before(until) {
		until = t.ends
	}
	return fmt.Sprintf("%s until %s (%s)", what, r.shortTime(until, minutes), t.source)
}

// unlessOpened evicts a pod that may end by itself, once the budget that kept it lets it go. A budget that only lacks healthy pods does not count: it lets
// any of its pods go, and not this one for the drain. v is the verdict as long as the pod stays.
func (r *round) unlessOpened(ctx context.Context, pod holders.Pod, v Verdict, before *attempt) (Verdict, time.Duration) {
	if r.since.IsZero() || r.earlierTierLeft || r.noAnswer != nil {
		return v, 0
	}
	wasKept := before != nil && before.verdict.Asked
	answer, retryAfter := r.ask(ctx, pod, true)
	opened := answer.State == Requested && wasKept
	if opened {
		answer, retryAfter = r.ask(ctx, pod, false)
	}
	keeps := answer.State == Blocked && answer.Webhook == "" && !answer.lacks
	switch {
	case opened && answer.State == Requested, answer.State == Gone, answer.State == Terminating:
		return answer, retryAfter
	case keeps, answer.State == Failed && wasKept: // without an answer what was known counts
		v.PDB, v.Asked = answer.PDB, true
		v.Message += ", or when its budget lets it go"
		return v, retryAfter
	}
	return v, max(retryAfter, keptAgain)
}

// keptAgain is the pause until the agent asks again whether a budget keeps a pod that may end by itself. A change of the pod's labels ends it.
const keptAgain = 5 * time.Minute

// withoutRequest returns the verdict on a pod that needs no request.
func (r *round) withoutRequest(pod holders.Pod, t terms) (Verdict, bool) {
	switch {
	case pod.Unlisted:
		return Verdict{State: Terminating, Message: runsUnlisted(pod)}, true
	case pod.Terminating:
		return Verdict{State: Terminating, Message: r.terminating(pod), Late: r.late(pod)}, true
	case pod.Mirror:
		return Verdict{State: Refused, Message: "it is a static pod, which cannot be evicted: move its manifest out of kubelet's directory on the node"}, true
	case pod.UID == "":
		// For the API server an empty UID is no precondition at all.
		return Verdict{State: Refused, Message: "its UID is unknown, so another pod of its name might be evicted"}, true
	case t.refusal != "":
		return Verdict{State: Refused, By: t.by, Allow: t.allow, Message: t.refusal}, true
	}
	if v, ok := r.mayEnd(pod, t); ok {
		return v, true
	}
	switch {
	case r.earlierTierLeft:
		return Verdict{State: Queued, Message: queued[r.policy.tierOf(pod)]}, true
	case r.noAnswer != nil:
		// One request without an answer costs requestTimeout. The others would get none either.
		return Verdict{State: Failed, Message: r.noAnswer.Error()}, true
	}
	return Verdict{}, false
}

// mayEnd returns the verdict on a pod whose own work may end first.
func (r *round) mayEnd(pod holders.Pod, t terms) (Verdict, bool) {
	busy := t.busy(pod)
	switch {
	case t.ask && busy == "":
		return Verdict{}, false
	case t.ask && (r.since.IsZero() || r.now.Before(t.until)):
		return Verdict{State: Waiting, By: t.by, Message: r.may(t) + "; " + busy}, true
	case t.ask && r.overdue(t):
		return Verdict{State: Failed, Message: busy}, true
	case t.ask:
		return Verdict{}, false
	case t.wait > 0 && t.until.IsZero():
		return Verdict{State: Waiting, By: t.by, Message: fmt.Sprintf("may end by itself for %s after the cordon (%s)", t.wait, t.source)}, true
	case r.now.Before(t.until):
		return Verdict{
			State: Waiting, By: t.by,
			Message: fmt.Sprintf("finishes by itself until %s (%s)", t.until.UTC().Format("2006-01-02T15:04Z"), t.source),
		}, true
	}
	return Verdict{}, false
}

var queued = map[tier]string{
	critical: "a critical pod: it leaves after the ordinary ones",
	daemons:  "of a DaemonSet: it leaves after all others",
}

// ask requests one eviction, or a dry run of it.
func (r *round) ask(ctx context.Context, pod holders.Pod, dryRun bool) (Verdict, time.Duration) {
	err := r.send(ctx, pod, dryRun)
	if r.unanswered(err) {
		return Verdict{State: Failed, Message: r.noAnswer.Error()}, 0
	}
	seconds, _ := apierrors.SuggestsClientDelay(err)
	return r.interpret(ctx, pod, err), time.Duration(seconds) * time.Second
}

// unanswered reports whether the API server did not answer at all, and keeps the error for the next pods.
func (r *round) unanswered(err error) bool {
	var answered apierrors.APIStatus
	if err == nil || errors.As(err, &answered) {
		return false
	}
	r.noAnswer = fmt.Errorf("asking the API server: %w", err)
	return true
}

// deletePod deletes a pod that is past its deadline. No budget prevents that. The pod gets its own grace, bounded by the policy's. The grace is never
// 0: the API server would forget a pod that still runs.
func (r *round) deletePod(ctx context.Context, pod holders.Pod, t terms, last Verdict) Verdict {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	grace := max(time.Second, min(pod.Grace, r.policy.DeleteGrace).Truncate(time.Second))
	seconds := int64(grace / time.Second)
	err := r.client.Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: &seconds, Preconditions: &metav1.Preconditions{UID: &pod.UID},
	})
	switch {
	case err == nil:
		return Verdict{State: Deleted, PDB: last.PDB, Message: fmt.Sprintf(
			"deleted with a grace of %s, since it was still there at %s: %s", grace, r.shortTime(t.deadline, minutes), last.Message)}
	case r.unanswered(err):
		return Verdict{State: Failed, Message: r.noAnswer.Error()}
	case isGone(err):
		return Verdict{State: Gone}
	case apierrors.IsConflict(err):
		return r.explainConflict(ctx, pod, err)
	default:
		return Verdict{State: Failed, PDB: last.PDB, Message: fmt.Sprintf("%s; deleting it: %v", last.Message, err)}
	}
}

// isGone reports whether the API server itself says that there is no such pod.
func isGone(err error) bool {
	return apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// send requests an eviction, several times if it fails for a cause that may pass. A 429 is not such a cause: it is the answer for a disruption
// budget. The request names the pod by its UID, so that it can be sent twice.
func (r *round) send(ctx context.Context, pod holders.Pod, dryRun bool) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	var busy error
	err := kube.Retry(ctx, func() error {
		err := r.request(ctx, pod, dryRun)
		if busy = nil; apierrors.IsTooManyRequests(err) {
			busy = err
			return nil
		}
		return err
	})
	return cmp.Or(busy, err)
}

// request sends one eviction. The UID is a precondition: between listing and asking, a pod may be replaced by another
// of the same name, perhaps on another node.
func (r *round) request(ctx context.Context, pod holders.Pod, dryRun bool) error {
	eviction := &policyv1.Eviction{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{
			Preconditions: &metav1.Preconditions{UID: &pod.UID},
		},
	}
	if dryRun {
		eviction.DeleteOptions.DryRun = []string{metav1.DryRunAll}
	}
	return r.client.Pods(pod.Namespace).EvictV1(ctx, eviction)
}

// interpret turns the API server's answer into a verdict.
func (r *round) interpret(ctx context.Context, pod holders.Pod, err error) Verdict {
	switch {
	case err == nil:
		return Verdict{State: Requested}
	case isGone(err):
		return Verdict{State: Gone}
	case apierrors.IsConflict(err):
		return r.explainConflict(ctx, pod, err)
	case apierrors.HasStatusCause(err, policyv1.DisruptionBudgetCause):
		// Mostly 429. It is 403 for a budget with an invalid status, or with too many awaited deletions.
		return r.blocked(ctx, pod, err)
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		// Nothing can be created in such a namespace, evictions included, and all its pods are being deleted.
		return Verdict{State: Terminating, Message: fmt.Sprintf("namespace %s is terminating, with its pods", pod.Namespace)}
	case denied(err):
		return deniedBy(err)
	case apierrors.IsTooManyRequests(err):
		return Verdict{State: Failed, Message: fmt.Sprintf("the API server is busy: %v", err)}
	case apierrors.IsInternalError(err) || apierrors.ReasonForError(err) == metav1.StatusReasonUnknown:
		// For a pod that several budgets match the answer is a bare 500 that names none of them.
		if len(r.matching(ctx, pod)) > 1 {
			return r.blocked(ctx, pod, err)
		}
	}
	return Verdict{State: Failed, Message: err.Error()}
}

// explainConflict finds out what a conflict (409) means. Nearly always the precondition failed: the pod is gone, and another has its
// name. But the API server also answers with a conflict for a pod that is not ready and changes faster than it can be deleted; that pod
// is still there.
func (r *round) explainConflict(ctx context.Context, pod holders.Pod, conflict error) Verdict {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	found, err := r.client.Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return Verdict{State: Gone}
	case err != nil:
		return Verdict{State: Failed, Message: fmt.Sprintf("%v; reading the pod: %v", conflict, err)}
	case found.UID != pod.UID:
		return Verdict{State: Gone, Message: "another pod has its name now"}
	default:
		return Verdict{State: Failed, Message: conflict.Error()}
	}
}
