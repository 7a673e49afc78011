package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// evictionsTimeout bounds one round of eviction requests. The API server may take 10 s for one when many fight over a
// disruption budget.
const evictionsTimeout = time.Minute

// evict asks pods to leave and says which are still there. It never returns nil: only the next look can tell that they
// are gone.
func (a *Agent) evict(ctx context.Context, seen observed, want desired, steps []plan.Step) error {
	step := steps[0]
	if len(steps) > 1 && steps[1].Kind == plan.Reboot {
		if err := a.mayReboot(ctx, seen, want); err != nil {
			return err
		}
	}
	if step.Kind == plan.Evict {
		if err := a.requireHoldersKnown(seen, want, step); err != nil {
			return err
		}
	}
	// Each request has a deadline of its own; this one keeps a slow API server from holding up the loop for all pods.
	all, cancel := context.WithTimeout(ctx, evictionsTimeout)
	defer cancel()
	policy, since := a.policy(seen, step, want)
	verdicts := a.evictor.Evict(all, seen.drained(step.Pods), policy, since)
	a.blockedBy(verdicts)
	for _, v := range verdicts {
		a.tellPod(seen, want, v)
	}
	if late := slices.IndexFunc(verdicts, func(v drain.Verdict) bool { return v.Overdue }); late >= 0 {
		return &api.Failure{
			Wish: want.fingerprint, Reason: config.ReasonEvictionBlocked,
			Message: fmt.Sprintf("pods still there at the deadline, %s: %s",
				outcome.Moment(verdicts[late].Deadline), listed(describe(verdicts))),
		}
	}
	return a.awaitPods(seen, want, policy, verdicts)
}

// awaitPods says which pods are still there, and why.
func (a *Agent) awaitPods(seen observed, want desired, policy drain.Policy, verdicts []drain.Verdict) *outcome.Waiting {
	wait := &outcome.Waiting{
		Reason: config.ReasonEvicting, After: evictionRetry, Blockers: describe(verdicts),
		Message: "waiting for pods to leave: " + listed(describe(verdicts)),
	}
	if seen.journal != nil {
		wait.Since = seen.journal.Started
	}
	for _, v := range verdicts {
		if left := v.RetryAt.Sub(a.clock.Now()); !v.RetryAt.IsZero() && left > 0 {
			wait.After = min(wait.After, left)
		}
		if v.Deadline.After(wait.Until) {
			wait.Until, wait.Then = v.Deadline, seen.then(want)
			if policy.Delete && v.State != drain.Deleted && v.State != drain.Terminating {
				wait.Then = "pods that are still there are deleted, as drain.afterDeadline says"
			}
		}
	}
	if blocked := blockedOf(verdicts); len(blocked) > 0 {
		wait.Reason, wait.For, wait.Message = config.ReasonEvictionBlocked, outcome.ForRoom, listed(blocked)
		wait.Advice = "make room in the budget, or delete the pod, to go on at once; " + callOff(want)
	}
	if want.undo { // what was before stands on what they hold
		wait.Since = seen.since(wait.Reason, a.now())
		wait.Advice = "there is no deadline on the way back, and no pod is deleted: see what keeps it with kubectl describe pod, or delete it yourself"
	}
	return wait
}

// most is how many of a kind people are shown: a node may have hundreds of pods, and each in the way is a line to read. Tools find
// more of them in the status.
const most = 8

// listed joins what is in the way, and counts what is not shown.
func listed(texts []string) string {
	if more := len(texts) - most; more > 0 {
		return fmt.Sprintf("%s; and %d more", strings.Join(texts[:most], "; "), more)
	}
	return strings.Join(texts, "; ")
}

// callOff says how people end the change.
func callOff(want desired) string {
	if want.undo || want.label == "" {
		return "the change is being undone already"
	}
	return "to call the change off, remove the label " + want.label
}

// policy is by which rules pods are made to leave, and since when their deadlines count. Operands are replaced or come back by
// themselves, and on the way back what stands has to go: no rule is for either, and on the way back there is no deadline.
func (a *Agent) policy(seen observed, step plan.Step, want desired) (p drain.Policy, since time.Time) {
	switch {
	case want.undo:
	case step.Kind == plan.Evict:
		p = drainPolicy(a.settingsFor(want))
	case step.Kind == plan.PauseOperands && seen.journal != nil:
		p.Deadline = a.deadline(seen, want, step).Sub(seen.journal.Started)
	}
	if seen.kubelet.err != nil {
		p.KubeletSilent = seen.kubelet.err.Error()
	}
	p.ClaimDriverAway = !seen.claimDriver()
	if seen.journal != nil {
		since = seen.journal.Started
	}
	return p, since
}

// tellPod records on the pod, and on the node, that it has to leave.
func (a *Agent) tellPod(seen observed, want desired, v drain.Verdict) {
	did := map[drain.State]string{drain.Requested: "evicting", drain.Deleted: "deleting, as drain.afterDeadline says,"}[v.State]
	if did == "" {
		return
	}
	a.eventf(seen.node, corev1.EventTypeNormal, config.ReasonEvicting, "%s pod %s for the change to %s", did, v.Pod, want.name)
	if v.Pod.UID != "" && v.Pod.Name != "" {
		a.podEventf(types.NamespacedName{Namespace: v.Pod.Namespace, Name: v.Pod.Name}, v.Pod.UID, corev1.EventTypeNormal, config.ReasonEvicting,
			"%s this pod: its GPU on node %s is repartitioned for %s", did, a.node, want.name)
	}
}

// requireHoldersKnown waits, up to the deadline for pods, while a source of holders fails: that counts as busy, so nobody is evicted and no GPU is
// touched. The way back waits for a silent kubelet alone, without which every pod counts as a holder.
func (a *Agent) requireHoldersKnown(seen observed, want desired, step plan.Step) error {
	busy := seen.holdersUnknown()
	if busy == nil || seen.journal == nil || want.undo && seen.kubelet.err == nil {
		return nil
	}
	reason := config.ReasonHoldersUnknown
	if seen.kubelet.err != nil {
		reason = config.ReasonKubeletUnavailable
	}
	until := a.deadline(seen, want, step)
	if step.Kind == plan.Evict { // kubelet may be away more than once in the hours in which pods may end by themselves
		until = until.Add(drainPolicy(a.settingsFor(want)).EndFor)
	}
	if a.clock.Now().After(until) && !want.undo {
		return &api.Failure{Wish: want.fingerprint, Reason: reason, Message: fmt.Sprintf("nobody was evicted %v, up to the deadline", busy)}
	}
	wait := &outcome.Waiting{
		Reason: reason, After: evictionRetry, Message: fmt.Sprintf("nobody is evicted %v", busy),
		Since: seen.journal.Started, Advice: callOff(want),
	}
	wait.Until, wait.Then = seen.atDeadline(until, want)
	return wait
}

// pauseOperands sends operands away: one by its label, or those that the fence keeps away.
func (a *Agent) pauseOperands(ctx context.Context, w work) error {
	if w.step.Label == "" {
		return a.evict(ctx, w.seen, w.want, w.steps)
	}
	return a.pauseOperand(ctx, w.seen, w.want, w.step)
}

// resumeOperands brings them back.
func (a *Agent) resumeOperands(ctx context.Context, w work) error {
	if w.step.Label == "" {
		return a.resume(ctx, w.seen)
	}
	return a.resumeOperand(ctx, w.seen, w.step)
}

// pauseOperand sends an operand away by its label, and waits for its pods. The journal has the label's former value.
func (a *Agent) pauseOperand(ctx context.Context, seen observed, want desired, step plan.Step) error {
	if seen.node.Labels[step.Label] != fence.PausedValue {
		return a.nodes.Patch(ctx, seen.node, func(node *corev1.Node) ([]byte, error) {
			return fence.SetLabels(node, map[string]string{step.Label: fence.PausedValue})
		})
	}
	pods := make([]string, len(step.Pods))
	for i, p := range step.Pods {
		pods[i] = p.Namespace + "/" + p.Name
	}
	message := fmt.Sprintf("waiting for the pods of %s to end: %s", step.Label, listed(pods))
	until := a.deadline(seen, want, step)
	if a.clock.Now().After(until) && !want.undo {
		return &api.Failure{Wish: want.fingerprint, Reason: config.ReasonPausingOperands, Message: message + ", up to the deadline"}
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonPausingOperands, After: evictionRetry, Message: message, Since: seen.journal.Started, Blockers: pods,
		Advice: "see kubectl describe pod; " + callOff(want),
	}
	wait.Until, wait.Then = seen.atDeadline(until, want)
	return wait
}

// resumeOperand gives the label of an operand its former value again.
func (a *Agent) resumeOperand(ctx context.Context, seen observed, step plan.Step) error {
	return a.nodes.Patch(ctx, seen.node, func(node *corev1.Node) ([]byte, error) {
		return fence.SetLabels(node, map[string]string{step.Label: seen.journal.Paused[step.Label]})
	})
}

// then says what is done at a deadline.
func (s observed) then(want desired) string {
	if want.undo {
		return "nothing more is waited for"
	}
	return "the change is given up: the GPUs go back to what they were, and the node is given back"
}

// atDeadline is the end of a wait, and what comes then. The way back has none.
func (s observed) atDeadline(until time.Time, want desired) (time.Time, string) {
	if want.undo || s.journal == nil {
		return time.Time{}, ""
	}
	return until, s.then(want)
}

// drained finds the observed pods that the planner named.
func (s observed) drained(pods []plan.Pod) []holders.Pod {
	var out []holders.Pod
	for _, p := range pods {
		named := func(pod holders.Pod) bool {
			return string(pod.UID) == p.UID && pod.Namespace == p.Namespace && pod.Name == p.Name
		}
		if i := slices.IndexFunc(s.holders.pods, named); i >= 0 {
			out = append(out, s.holders.pods[i])
			continue
		}
		if i := slices.IndexFunc(s.holders.beforeReboot, named); i >= 0 {
			out = append(out, s.holders.beforeReboot[i])
			continue
		}
		for i := range s.pods {
			if pod := holders.Describe(&s.pods[i]); named(pod) {
				out = append(out, pod)
			}
		}
	}
	return out
}

func blockedOf(verdicts []drain.Verdict) []string {
	var out []string
	for _, v := range verdicts {
		if v.State == drain.Blocked || v.State == drain.Failed || v.State == drain.Refused {
			out = append(out, describe([]drain.Verdict{v})...)
		}
	}
	return out
}

func describe(verdicts []drain.Verdict) []string {
	var out []string
	for _, v := range verdicts {
		text := v.Pod.String()
		if v.Message != "" {
			text += ": " + v.Message
		}
		out = append(out, text)
	}
	return out
}
