// Package evict evicts pods from the node. It asks first whether they may be evicted, follows the rules of the settings and of the profile,
// and reports which pods are still there and why.
package evict

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// Evictions evicts pods of one node.
type Evictions struct {
	act.Env

	Evictor *drain.Evictor
	Journal *journal.Writer
	Wakes   *watch.Sources
	Retries *decide.Retries
	Metrics *metrics.Metrics
}

// Evictable asks the API server in a dry run, for each pod that the steps evict, whether it may be evicted now. It asks for operands, which
// return by themselves, only if all others may go, and returns those of them that would stay.
func (e *Evictions) Evictable(ctx context.Context, in act.Input) []drain.Verdict {
	all, cancel := context.WithTimeout(ctx, evictionsTimeout)
	defer cancel()
	var out []drain.Verdict
	for _, s := range in.Steps {
		switch has := s.Traits(); {
		case !has.DryRun || s.Label != "":
		case !has.ComesBack:
			out = append(out, e.dryRun(all, in, s)...)
		case len(stuck(out)) == 0:
			out = append(out, stuck(e.dryRun(all, in, s))...)
		}
	}
	return out
}

func (e *Evictions) dryRun(ctx context.Context, in act.Input, s plan.Step) []drain.Verdict {
	return e.Evictor.DryRun(ctx, in.Seen.Drained(s.Pods), e.policy(in.Seen, s, in.Want))
}

// Drainable returns a wait if a pod that the steps evict would stay.
func (e *Evictions) Drainable(ctx context.Context, in act.Input) error {
	verdicts := e.Evictable(ctx, in)
	e.Wakes.BlockedBy(verdicts)
	blocked := append(stuck(verdicts), late(verdicts)...)
	if len(blocked) == 0 {
		return nil
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonEvictionBlocked, For: outcome.ForRoom, After: outcome.EvictionRetry, Blockers: describe(blocked),
		Message: sanitize.Listed(drain.Summary(blocked, time.Time{})), Since: in.Seen.Since(config.ReasonEvictionBlocked, e.Clock.Stamp()),
		Else: "changes nothing until then; " + cancelAdvice(in.Want),
	}
	if onlyKept(blocked) {
		wait.Else += "; to request it behind the cordon, write a drain rule with action ask"
	}
	e.allow(wait, in.Want, verdicts)
	return wait
}

// Patience is how long the agent would wait for pods to leave before it gives the change up. It is 0 if no pod has to leave, or the agent then
// deletes the rest.
func (e *Evictions) Patience(seen *state.Observed, want state.Desired, steps []plan.Step) time.Duration {
	policy := decide.From(e.Settings.With(want.Drain))
	if policy.Delete || !plan.Has(steps, plan.Evict) {
		return 0
	}
	return policy.Patience(leaving(seen, steps), e.Clock.Stamp())
}

// Asked says which pods that the steps evict would be asked behind the cordon, and until when, without a request: "asked behind the cordon, up to 8h …".
func (e *Evictions) Asked(seen *state.Observed, want state.Desired, steps []plan.Step) []string {
	policy, pods := decide.From(e.Settings.With(want.Drain)), map[string][]string{}
	for _, pod := range leaving(seen, steps) {
		if text, is := policy.Asked(pod, e.Clock.Stamp()); is && !want.Undo {
			pods[text] = append(pods[text], pod.String())
		}
	}
	var out []string
	for _, text := range slices.Sorted(maps.Keys(pods)) {
		out = append(out, sanitize.Names(pods[text])+": "+text)
	}
	return out
}

// leaving returns the pods that have to leave since they hold what changes.
func leaving(seen *state.Observed, steps []plan.Step) []holders.Pod {
	var out []holders.Pod
	for _, s := range steps {
		if s.Kind == plan.Evict {
			out = append(out, seen.Drained(s.Pods)...)
		}
	}
	return out
}

// onlyKept reports whether only budgets and webhooks keep the pods.
func onlyKept(blocked []drain.Verdict) bool {
	return !slices.ContainsFunc(blocked, func(v drain.Verdict) bool { return v.State != drain.Blocked })
}

// evictionsTimeout bounds one round of eviction requests. The API server may take 10 s for one when many fight over a
// disruption budget.
const evictionsTimeout = time.Minute

// Evict evicts the pods of a step, as EvictPods does.
func (e *Evictions) Evict(ctx context.Context, in act.Input) error {
	if in.Step().Kind == plan.Evict {
		if err := e.RequireHoldersKnown(in.Seen, in.Want, in.Step()); err != nil {
			return err
		}
	}
	return e.EvictPods(ctx, in, in.Step().Pods)
}

// EvictPods evicts pods for a step and returns which are still there. It never returns nil: only the next observation can show that they
// are gone.
func (e *Evictions) EvictPods(ctx context.Context, in act.Input, pods []plan.Pod) error {
	verdicts, policy := e.request(ctx, in, pods)
	for _, v := range verdicts {
		e.report(in.Want, v)
	}
	if late := slices.IndexFunc(verdicts, func(v drain.Verdict) bool { return v.Overdue }); late >= 0 {
		return &api.Failure{
			Fingerprint: in.Want.Fingerprint, Reason: config.ReasonEvictionBlocked,
			Message: fmt.Sprintf("pods still there at the deadline, %s: %s",
				outcome.Moment(verdicts[late].Deadline), sanitize.Listed(drain.Summary(verdicts, verdicts[late].Deadline))),
		}
	}
	return e.await(in.Seen, in.Want, policy, verdicts)
}

// request evicts the pods of a step. It returns the verdicts on them, and the policy that these follow.
func (e *Evictions) request(ctx context.Context, in act.Input, pods []plan.Pod) ([]drain.Verdict, drain.Policy) {
	// Each request has its own deadline; this one keeps a slow API server from holding up the loop for all pods.
	all, cancel := context.WithTimeout(ctx, evictionsTimeout)
	defer cancel()
	var fenced time.Time
	policy := e.policy(in.Seen, in.Step(), in.Want)
	if in.Seen.Journal != nil {
		fenced = in.Seen.Journal.Started
		if in.Step().Kind == plan.PauseOperands && !in.Want.Undo {
			policy.Deadline = e.Retries.Deadline(in.Seen, in.Want, in.Step()).Sub(fenced)
		}
	}
	leave := in.Seen.Drained(pods)
	if policy.Granted = policy.Grant(leave, fenced); len(policy.Granted) > 0 { // before the first request: the pods may end soon after it, and show it no more
		e.Journal.Grant(ctx, fenced, policy.Granted)
	}
	verdicts := e.Evictor.Evict(all, leave, policy, fenced)
	e.Wakes.BlockedBy(verdicts)
	e.Metrics.Evicted(verdicts)
	return verdicts, policy
}

// await returns which pods are still there, and why.
func (e *Evictions) await(seen *state.Observed, want state.Desired, policy drain.Policy, verdicts []drain.Verdict) *outcome.Waiting {
	wait := &outcome.Waiting{
		Reason: config.ReasonEvicting, For: outcome.ForStep, After: outcome.EvictionRetry, Blockers: describe(verdicts),
	}
	if seen.Journal != nil {
		wait.Since = seen.Journal.Started
	}
	for _, v := range verdicts {
		if left := v.RetryAt.Sub(e.Clock.Now()); !v.RetryAt.IsZero() && left > 0 {
			wait.After = min(wait.After, left)
		}
		if v.Deadline.After(wait.Until) {
			wait.Until, wait.Then = v.Deadline, seen.DeadlineText(want)
			if policy.Delete && v.State != drain.Deleted && v.State != drain.Terminating {
				wait.Then = "pods that are still there are deleted, as drain.afterDeadline says"
			}
		}
	}
	wait.Message = "waiting for pods to leave: " + sanitize.Listed(drain.Summary(verdicts, wait.Until))
	if blocked := stuck(verdicts); len(blocked) > 0 {
		wait.Reason, wait.For = config.ReasonEvictionBlocked, outcome.ForRoom
		e.allow(wait, want, verdicts)
		wait.Message = sanitize.Listed(drain.Summary(blocked, wait.Until))
		wait.Else = "to continue at once, delete the pods; " + cancelAdvice(want)
		if awaitsRoom(blocked) {
			wait.Else = cancelAdvice(want) + ", and there is room here again"
		}
	}
	if want.Undo { // these pods hold devices of the former config
		wait.Since = seen.Since(wait.Reason, e.Clock.Stamp())
		wait.Advice = "see what keeps the pods by kubectl describe pod, or delete them"
		wait.Else = "an undo has no deadline and deletes no pod"
	}
	return wait
}

// cancelAdvice says how a user ends the change.
func cancelAdvice(want state.Desired) string {
	switch {
	case want.Undo:
		return "the change is being undone already"
	case want.Name == state.ResetTarget:
		return "to have no GPU reset, set health.reset to never in the settings"
	case want.Label == "":
		return "the change is being undone already"
	}
	return "to cancel, remove the label " + want.Label
}

// policy returns the rules for evicting the pods of a step. No rule holds for operands, which return by themselves, or for an undo, which has
// to remove everything.
func (e *Evictions) policy(seen *state.Observed, step plan.Step, want state.Desired) (p drain.Policy) {
	if step.Kind == plan.Evict && !want.Undo {
		p = decide.From(e.Settings.With(want.Drain))
		p.Granted = seen.Granted()
	}
	if seen.Kubelet.Err != nil {
		p.KubeletSilent = seen.Kubelet.Err.Error()
	}
	p.ClaimDriverAway = offer.DriverAway(seen)
	if seen.Marks.Fenced {
		p.Keeps = config.TaintRepartitioning
	}
	return p
}

// report records an Event on the pod, and on the node, that the pod has to leave.
func (e *Evictions) report(want state.Desired, v drain.Verdict) {
	did := map[drain.State]string{drain.Requested: "evicting", drain.Deleted: "deleting, as drain.afterDeadline says,"}[v.State]
	if did == "" {
		return
	}
	e.Events.Node(e.Node, events.Evicting(did, v.Pod.String(), want.Name))
	if v.Pod.UID != "" && v.Pod.Name != "" {
		e.Events.Pod(types.NamespacedName{Namespace: v.Pod.Namespace, Name: v.Pod.Name}, v.Pod.UID, events.EvictingThis(did, e.Node, want.Name))
	}
}

// RequireHoldersKnown waits, up to the deadline for pods, while the agent cannot find the holders of GPUs. Until it can, it neither evicts
// pods nor touches GPUs. An undo waits only for a silent kubelet, and for slices of NVIDIA's DRA driver: without slices every pod counts as a
// holder.
func (e *Evictions) RequireHoldersKnown(seen *state.Observed, want state.Desired, step plan.Step) error {
	reason, busy := offer.HoldersUnknown(seen)
	if busy == nil || seen.Journal == nil || want.Undo && seen.Kubelet.Err == nil && offer.ClaimsUnknown(seen) == nil {
		return nil
	}
	until := e.Retries.Deadline(seen, want, step)
	if step.Kind == plan.Evict { // kubelet may be silent more than once in the hours that pods have to end by themselves
		fenced, policy := seen.Journal.Started, decide.From(e.Settings.With(want.Drain))
		policy.Granted = seen.Granted()
		until = decide.Latest(until, fenced.Add(policy.Patience(seen.Drained(step.Pods), fenced)))
	}
	if e.Clock.Now().After(until) && !want.Undo {
		return &api.Failure{Fingerprint: want.Fingerprint, Reason: reason, Message: fmt.Sprintf("no pod was evicted %v, up to the deadline", busy)}
	}
	wait := &outcome.Waiting{
		Reason: reason, After: outcome.EvictionRetry, Message: fmt.Sprintf("no pod is evicted %v", busy),
		Since: seen.Journal.Started, Else: cancelAdvice(want),
	}
	wait.Until, wait.Then = seen.AtDeadline(until, want)
	return wait
}

// PauseOperand pauses an operand by its label, and waits until its pods are gone. The journal has the label's former value.
func (e *Evictions) PauseOperand(ctx context.Context, in act.Input) error {
	if in.Seen.Node.Labels[in.Step().Label] != fence.PausedValue {
		return e.Nodes.Patch(ctx, in.Seen.Node, func(node *corev1.Node) ([]byte, error) {
			return fence.SetLabels(node, map[string]string{in.Step().Label: fence.PausedValue})
		})
	}
	pods := make([]string, len(in.Step().Pods))
	for i, p := range in.Step().Pods {
		pods[i] = p.Namespace + "/" + p.Name
	}
	message := fmt.Sprintf("waiting for the pods of %s to end: %s", in.Step().Label, sanitize.Names(pods))
	until := e.Retries.Deadline(in.Seen, in.Want, in.Step())
	if e.Clock.Now().After(until) && !in.Want.Undo {
		return &api.Failure{Fingerprint: in.Want.Fingerprint, Reason: config.ReasonPausingOperands, Message: message + ", up to the deadline"}
	}
	wait := &outcome.Waiting{
		Reason: config.ReasonPausingOperands, For: outcome.ForStep, After: outcome.EvictionRetry, Message: message, Since: in.Seen.Journal.Started,
		Blockers: pods, Else: "kubectl describe pod shows what keeps them; " + cancelAdvice(in.Want),
	}
	wait.Until, wait.Then = in.Seen.AtDeadline(until, in.Want)
	return wait
}

// ResumeOperand restores the former value of an operand's label.
func (e *Evictions) ResumeOperand(ctx context.Context, in act.Input) error {
	return e.Nodes.Patch(ctx, in.Seen.Node, func(node *corev1.Node) ([]byte, error) {
		return fence.SetLabels(node, map[string]string{in.Step().Label: in.Seen.Journal.Paused[in.Step().Label]})
	})
}

// stuck returns the verdicts on pods that stay unless a user does something.
func stuck(verdicts []drain.Verdict) []drain.Verdict {
	return slices.DeleteFunc(slices.Clone(verdicts), func(v drain.Verdict) bool {
		return v.State != drain.Blocked && v.State != drain.Failed && v.State != drain.Refused
	})
}

// late returns the verdicts on pods that should have ended: something keeps them, and may do so for hours.
func late(verdicts []drain.Verdict) []drain.Verdict {
	return slices.DeleteFunc(slices.Clone(verdicts), func(v drain.Verdict) bool { return !v.Late })
}

// allow adds to the wait a command for the user who has requested the change. It lets the change evict pods that the settings refuse because
// their data would be lost.
func (e *Evictions) allow(wait *outcome.Waiting, want state.Desired, verdicts []drain.Verdict) {
	flags := drain.Flags(verdicts)
	if command := want.ApplyCommand(e.Node, flags...); len(flags) > 0 && command != "" {
		wait.Advice, wait.Named = "to let this change evict what would be lost: "+command, true
	}
}

// awaitsRoom reports whether a budget lets no pod go before another one has started.
func awaitsRoom(verdicts []drain.Verdict) bool {
	return slices.ContainsFunc(verdicts, func(v drain.Verdict) bool { return v.State == drain.Blocked && v.Awaits != "" })
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
