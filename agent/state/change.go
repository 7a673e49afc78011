package state

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/fleet"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Restores reports whether the node was as is asked before, or had instances that a reboot has taken: to wait for a window with nothing
// to offer serves nobody.
func (s Observed) Restores(want Desired) bool {
	if want.Fingerprint == "" {
		return false
	}
	bare := s.Record.Status.Cut != "" && s.Boot.ID != "" && s.Record.Status.Cut != s.Boot.ID && !HasInstances(s.GPUs)
	return s.Record.Status.Proven == want.Fingerprint || bare
}

// HasInstances reports whether any GPU is cut.
func HasInstances(gpus []nvml.GPU) bool {
	return slices.ContainsFunc(gpus, func(gpu nvml.GPU) bool { return len(gpu.Instances) > 0 })
}

// HardwareOrPluginTouched reports whether a GPU, or the device plugin's config, is not as it was when the change began. From there on the way to the
// end is as short as the way back.
func (s Observed) HardwareOrPluginTouched() bool {
	if s.Journal == nil {
		return false
	}
	for _, was := range s.Journal.Previous {
		if gpu, ok := s.GPU(was.GPU); ok && !gpu.Lost && !was.Matches(gpu) {
			return true
		}
	}
	former := s.Journal.Plugin
	switch {
	case !s.Journal.ChangesPlugin():
		return false
	case former.Absent: // its text is what a file would say that is not there
		return s.Plugin.Exists
	default:
		return s.Plugin.Text != former.Text
	}
}

// PastPointOfNoReturn reports whether a GPU or the plugin's config is already on the way to the target, nobody has edited the target since, and
// the rest of the steps evicts nobody who came after the node was given back.
func (s Observed) PastPointOfNoReturn(want Desired, steps []plan.Step) bool {
	return s.HardwareOrPluginTouched() && !s.Other(want) && !s.Edited(want) && (s.DisruptionStarted() || !plan.Has(steps, plan.Evict))
}

// HoldText is what people have written to keep the node from changes; empty if they have not.
func (s Observed) HoldText() string {
	text, is := s.Node.Annotations[config.AnnotationHold]
	if is && text == "" {
		return "true"
	}
	return text
}

// StartsChange reports whether the steps begin a change. Clearing away what was left, and proving what is there, begins none.
func (s Observed) StartsChange(want Desired, steps []plan.Step) bool {
	if s.Journal != nil && !s.Other(want) || steps[0].Kind == plan.Adopt {
		return false
	}
	return plan.Any(steps, func(t plan.Traits) bool { return t.Begins })
}

// HoldDecision is what a hold means: what was not begun waits, and what was begun for something else is given back.
func (s Observed) HoldDecision(want Desired, now time.Time) error {
	if s.Journal != nil {
		return s.Postponed(want, config.ReasonHeld, fmt.Sprintf("annotation %s says %q, and what was begun was for %s", config.AnnotationHold, s.HoldText(), s.Journal.Target))
	}
	return &outcome.Waiting{
		Reason: config.ReasonHeld, After: outcome.EvictionRetry, Since: s.Since(config.ReasonHeld, now),
		Message: fmt.Sprintf("nothing is begun while annotation %s is on the node, which says %q", config.AnnotationHold, s.HoldText()),
		Advice:  fmt.Sprintf("to go on: kubectl annotate node %s %s-", s.Node.Name, config.AnnotationHold),
	}
}

// Postponed ends a change before a GPU is touched, to try it again when it may be.
func (s Observed) Postponed(want Desired, reason config.Reason, why string) *api.Failure {
	return &api.Failure{Wish: want.Fingerprint, Reason: reason, Message: why + "; the change is put off", Later: true}
}

// Forced reports whether people have said that this change needs no window.
func (s Observed) Forced(want Desired) bool {
	return s.Journal != nil && s.Journal.Forced && !s.Other(want) && !s.Edited(want) || s.Forces(want) && !want.Undo
}

// Forces reports whether the annotation means the change to what is asked for.
func (s Observed) Forces(want Desired) bool {
	switch value := s.Node.Annotations[config.AnnotationForce]; value {
	case "":
		return false
	case config.ForceNow:
		return true
	default:
		return value == want.Fingerprint || value == s.Operation()
	}
}

// Then says what is done at a deadline.
func (s Observed) Then(want Desired) string {
	if want.Undo {
		return "nothing more is waited for"
	}
	return "the change is given up: the GPUs go back to what they were, and the node is given back"
}

// AtDeadline is the end of a wait, and what comes then. The way back has none.
func (s Observed) AtDeadline(until time.Time, want Desired) (time.Time, string) {
	if want.Undo || s.Journal == nil {
		return time.Time{}, ""
	}
	return until, s.Then(want)
}

// Drained finds the observed pods that the planner named.
func (s Observed) Drained(pods []plan.Pod) []holders.Pod {
	var out []holders.Pod
	for _, p := range pods {
		named := func(pod holders.Pod) bool {
			return string(pod.UID) == p.UID && pod.Namespace == p.Namespace && pod.Name == p.Name
		}
		if i := slices.IndexFunc(s.Holders.Pods, named); i >= 0 {
			out = append(out, s.Holders.Pods[i])
			continue
		}
		if i := slices.IndexFunc(s.Holders.BeforeReboot, named); i >= 0 {
			out = append(out, s.Holders.BeforeReboot[i])
			continue
		}
		for i := range s.Pods {
			if pod := holders.Describe(&s.Pods[i]); named(pod) {
				out = append(out, pod)
			}
		}
	}
	return out
}

// InLimitedPool reports whether the node is of a pool that can do without so many nodes only, or that pauses itself.
func (s Observed) InLimitedPool() bool { return s.Pool.Err == nil && s.Pool.Name != "" }

// PoolOf is the node's pool, as its Lease is asked for slots.
func (s Observed) PoolOf() fleet.Pool { return fleet.PoolOf(s.Pool.File, s.Pool.Pool) }

// Asked is since when the wish is asked for.
func (s Observed) Asked(want Desired, now time.Time) time.Time {
	if s.Record.Status.Asked != nil && s.Record.Status.Asked.Wish == want.Fingerprint {
		return s.Record.Status.Asked.Since
	}
	return now
}
