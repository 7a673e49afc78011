package state

import (
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Restores reports whether the change brings the node back to what was last verified, or recreates instances that a reboot has removed. Such a change needs
// no window: until it is done, the node has nothing for pods. Where NVIDIA's DRA driver makes the instances, a GPU without any waits for claims.
func (s *Observed) Restores(want Desired) bool {
	if want.Fingerprint == "" {
		return false
	}
	bare := s.Owner.Kind != api.OwnerDRADynamic && s.Record.Learnt.Cut != "" && s.Boot.ID != "" && s.Record.Learnt.Cut != s.Boot.ID && !HasInstances(s.GPUs)
	return s.Record.Learnt.Verified == want.Fingerprint || bare
}

// HasInstances reports whether any GPU has MIG instances.
func HasInstances(gpus []nvml.GPU) bool {
	return slices.ContainsFunc(gpus, func(gpu nvml.GPU) bool { return len(gpu.Instances) > 0 })
}

// HardwareOrPluginTouched reports whether a GPU or the device plugin's config differs from when the change began. From then on, finishing the change takes no
// longer than undoing it.
func (s *Observed) HardwareOrPluginTouched() bool {
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
	case former.Absent: // there was no file, and Text is what a plugin without one uses
		return s.Plugin.Exists
	default:
		return s.Plugin.Text != former.Text
	}
}

// Postponed ends a change before it touches a GPU; the agent retries it when it may.
func (s *Observed) Postponed(want Desired, reason config.Reason, why string) *api.Failure {
	return &api.Failure{Fingerprint: want.Fingerprint, Reason: reason, Message: why + "; the change is postponed", Later: true}
}

// Forces reports whether the annotation is about the change to the desired state.
func (s *Observed) Forces(want Desired) bool {
	switch value := s.Annotation(config.AnnotationForce); value {
	case "":
		return false
	case config.ForceNow:
		return true
	default:
		return value == want.Fingerprint || value == s.Operation()
	}
}

// DeadlineText says what the agent does at a deadline.
func (s *Observed) DeadlineText(want Desired) string {
	if want.Undo {
		return "the agent stops waiting"
	}
	return "the change is given up and undone"
}

// AtDeadline returns the end of a wait, and what the agent does then. An undo has no deadline.
func (s *Observed) AtDeadline(until time.Time, want Desired) (time.Time, string) {
	if want.Undo || s.Journal == nil {
		return time.Time{}, ""
	}
	return until, s.DeadlineText(want)
}

// Drained finds the observed pods that the planner named.
func (s *Observed) Drained(pods []plan.Pod) []holders.Pod {
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

// AskedSince returns since when a label has requested the desired state.
func (s *Observed) AskedSince(want Desired, now time.Time) time.Time {
	if s.Record.Learnt.Asked != nil && s.Record.Learnt.Asked.Fingerprint == want.Fingerprint {
		return s.Record.Learnt.Asked.Since
	}
	return now
}
