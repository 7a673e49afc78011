package decide

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
)

// foreignPauses are between the agent's answers to a program that changes the GPUs which the agent has verified. The agent answers the first time at once.
var foreignPauses = outcome.Pauses{First: 30 * time.Second, Longest: time.Hour}

// Foreign returns the count of foreign changes, and whether the observation changes it. The count has one more if the GPUs need steps, although the condition
// says that they are as requested, and no user has changed the request. A reboot, an upgrade and a reset do not count, and end the pause after an
// earlier foreign change. The count stays then: that the program is gone is not shown before the GPUs stay right.
func Foreign(seen *state.Observed, want state.Desired, steps []plan.Step, now time.Time) (journal.Foreign, bool) {
	learnt := seen.Record.Learnt
	var f journal.Foreign
	since := learnt.Reported.Since
	if learnt.Foreign != nil {
		f = *learnt.Foreign
	}
	if f.Open {
		since = f.Last
	}
	switch {
	case lostInstances(seen, since):
		return journal.Foreign{Repeats: f.Repeats}, f.Open
	case f.Open || seen.Journal != nil || !verified(seen, want) || len(changedGPUs(steps)) == 0 || !reportedWell(seen, want):
		return f, false
	}
	return journal.Foreign{Repeats: f.Again(now, foreignPauses), Open: true}, true
}

// lostInstances reports whether GPUs may have lost their instances without another program: by a reboot of the host since the agent has verified them, by an
// upgrade of the driver, which the condition still reports, or since a GPU has become well or unhealthy, which makes people and tools reset it.
func lostInstances(seen *state.Observed, since time.Time) bool {
	return seen.RebootedSinceVerified() || slices.ContainsFunc(seen.Node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == config.ConditionGPUPartitionReady && c.Reason == string(config.ReasonDriverNotLoaded) ||
			c.Type == config.ConditionGPUUnhealthy && c.LastTransitionTime.After(since)
	})
}

// reportedWell reports whether the agent has last reported that the GPUs are as requested, as the node still says.
func reportedWell(seen *state.Observed, want state.Desired) bool {
	last := seen.Record.Learnt.Reported
	return last.Phase == api.PhaseIdle && last.Desired == want.Name && slices.ContainsFunc(seen.Node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == config.ConditionGPUPartitionReady && c.Status == corev1.ConditionTrue
	})
}

// verified reports whether the agent has verified the desired state, and nothing else since.
func verified(seen *state.Observed, want state.Desired) bool {
	return !want.Undo && want.Fingerprint != "" && seen.Record.Learnt.Verified == want.Fingerprint
}

// changedGPUs names the GPUs that steps change for the request, which a reset for a GPU's health does not.
func changedGPUs(steps []plan.Step) []string {
	var out []string
	for _, s := range steps {
		name := fmt.Sprintf("GPU %d", s.Index)
		changes := s.Kind == plan.SetMode || s.Kind == plan.Destroy || s.Kind == plan.Create
		if changes && !slices.Contains(out, name) && !slices.ContainsFunc(steps, func(h plan.Step) bool { return h.Kind == plan.Heal && h.GPU == s.GPU }) {
			out = append(out, name)
		}
	}
	return out
}

// ForeignText says which GPUs another program has changed, for a change that answers it; empty if the change answers a user's request.
func ForeignText(seen *state.Observed, want state.Desired, steps []plan.Step) string {
	f := seen.Record.Learnt.Foreign
	if gpus := changedGPUs(steps); f != nil && f.Open && verified(seen, want) && len(gpus) > 0 {
		return "something else has changed " + strings.Join(gpus, ", ")
	}
	return ""
}

// foreignUntil returns until when the agent leaves the GPUs as another program has changed them, for at least the second time in a row; zero if it does not.
func foreignUntil(seen *state.Observed, want state.Desired, steps []plan.Step, now time.Time) time.Time {
	f := seen.Record.Learnt.Foreign
	if ForeignText(seen, want, steps) == "" || f.Times < 2 {
		return time.Time{}
	}
	return f.Until(now, foreignPauses)
}

// changedByOthers words the wait with GPUs that another program keeps changing.
func (g *Gate) changedByOthers(seen *state.Observed, want state.Desired, steps []plan.Step, now time.Time) *outcome.Waiting {
	f, until := seen.Record.Learnt.Foreign, foreignUntil(seen, want, steps, now)
	advice := "find the program that changes " + strings.Join(changedGPUs(steps), ", ")
	if name, is := seen.Node.Labels[want.Label]; is && name != "" {
		advice += fmt.Sprintf(", or leave the GPUs to it: kubectl label node %s %s-", seen.Node.Name, want.Label)
	}
	return &outcome.Waiting{
		Reason: config.ReasonStepHadNoEffect, For: outcome.ForUser, After: until.Sub(now), Advice: advice,
		Message: fmt.Sprintf("%s, which the agent had verified (last at %s, %d times)", ForeignText(seen, want, steps), outcome.Moment(f.Last), f.Times),
		Else:    fmt.Sprintf("the agent changes nothing until %s", outcome.Moment(until)),
	}
}
