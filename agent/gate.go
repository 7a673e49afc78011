package agent

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// observeMaintenance reads what the maintenance file says of the node. One that cannot be read closes it.
func (a *Agent) observeMaintenance(ctx context.Context, seen *observed) error {
	file, err := a.configMap(ctx, a.settings.Maintenance)
	if err != nil {
		return err
	}
	seen.pool.err = file.read(func(data []byte) (err error) {
		seen.pool.file, err = config.ParseMaintenance(data)
		return err
	})
	seen.pool.Pool = seen.pool.file.For(seen.node)
	a.observeSlot(ctx, seen)
	return nil
}

// gate says why the first step may not be taken now: a *Waiting before anything is disturbed, and a *Failure that puts the change
// off after that. It writes nothing. Steps that disturb nobody, roll-backs, and changes past the point of no return are always allowed.
func (a *Agent) gate(seen observed, want desired, steps []plan.Step) error {
	switch {
	case want.undo:
		return nil
	case seen.held() != "" && seen.startsChange(want, steps):
		return seen.onHold(want, a.now())
	case seen.forced(want) || !needsWindow(seen, want, steps) || seen.pastPointOfNoReturn(want, steps):
		return nil
	case seen.pool.err != nil && seen.disruptionStarted():
		return seen.putOff(want, config.ReasonInvalidMaintenance, fmt.Sprintf("the maintenance file cannot be read any more: %v", seen.pool.err))
	case seen.pool.err != nil:
		return &outcome.Waiting{
			Reason: config.ReasonInvalidMaintenance, After: a.settings.Retry.Longest, Since: seen.since(config.ReasonInvalidMaintenance, a.now()),
			Message: fmt.Sprintf("nothing is begun before it is known when this node may be disturbed: %v", seen.pool.err),
			Advice:  "mend the file, or take the ConfigMap away to have no windows",
		}
	case seen.disruptionStarted():
		return a.mayGoOn(seen, want)
	default:
		return a.mayBegin(seen, want)
	}
}

// needsWindow reports whether the steps disturb anybody: a pod that runs, or one that would get a GPU meanwhile. A node with its startup taint runs
// no workload, and a GPU whose instances a reboot removed serves none.
func needsWindow(seen observed, want desired, steps []plan.Step) bool {
	// As long as kubelet is silent, everybody may be on it, and preflight waits.
	fresh := seen.marks.startup != nil && (seen.kubelet.err != nil || !plan.Has(steps, plan.Evict)) || seen.journal != nil && seen.journal.Startup != nil
	if fresh || seen.restores(want) && !plan.Has(steps, plan.Evict) {
		return false
	}
	return plan.Disrupts(steps) || plan.Has(steps, plan.Fence)
}

// restores reports whether the node was as is asked before, or had instances that a reboot has taken: to wait for a window with nothing
// to offer serves nobody.
func (s observed) restores(want desired) bool {
	if want.fingerprint == "" {
		return false
	}
	bare := s.record.status.Cut != "" && s.boot.id != "" && s.record.status.Cut != s.boot.id && !hasInstances(s.gpus)
	return s.record.status.Proven == want.fingerprint || bare
}

func hasInstances(gpus []nvml.GPU) bool {
	return slices.ContainsFunc(gpus, func(gpu nvml.GPU) bool { return len(gpu.Instances) > 0 })
}

// touched reports whether a GPU, or the device plugin's config, is not as it was when the change began. From there on the way to the
// end is as short as the way back.
func (s observed) touched() bool {
	if s.journal == nil {
		return false
	}
	for _, was := range s.journal.Previous {
		if gpu, ok := s.gpu(was.GPU); ok && !gpu.Lost && !was.Matches(gpu) {
			return true
		}
	}
	former := s.journal.Plugin
	switch {
	case !s.journal.ChangesPlugin():
		return false
	case former.Absent: // Text is what a file would say that is not there
		return s.plugin.exists
	default:
		return s.plugin.text != former.Text
	}
}

// pastPointOfNoReturn reports whether a GPU or the plugin's config is already on the way to the target, nobody has edited the target since, and
// the rest of the steps evicts nobody who came after the node was given back.
func (s observed) pastPointOfNoReturn(want desired, steps []plan.Step) bool {
	return s.touched() && !s.other(want) && !s.edited(want) && (s.disruptionStarted() || !plan.Has(steps, plan.Evict))
}

// held is what people have written to keep the node from changes; empty if they have not.
func (s observed) held() string {
	text, is := s.node.Annotations[config.AnnotationHold]
	if is && text == "" {
		return "true"
	}
	return text
}

// startsChange reports whether the steps begin a change. Clearing away what was left, and proving what is there, begins none.
func (s observed) startsChange(want desired, steps []plan.Step) bool {
	if s.journal != nil && !s.other(want) || steps[0].Kind == plan.Adopt {
		return false
	}
	return plan.Any(steps, func(t plan.Traits) bool { return t.Begins })
}

// onHold is what a hold means: what was not begun waits, and what was begun for something else is given back.
func (s observed) onHold(want desired, now time.Time) error {
	if s.journal != nil {
		return s.putOff(want, config.ReasonHeld, fmt.Sprintf("annotation %s says %q, and what was begun was for %s", config.AnnotationHold, s.held(), s.journal.Target))
	}
	return &outcome.Waiting{
		Reason: config.ReasonHeld, After: evictionRetry, Since: s.since(config.ReasonHeld, now),
		Message: fmt.Sprintf("nothing is begun while annotation %s is on the node, which says %q", config.AnnotationHold, s.held()),
		Advice:  fmt.Sprintf("to go on: kubectl annotate node %s %s-", s.node.Name, config.AnnotationHold),
	}
}

// putOff ends a change before a GPU is touched, to try it again when it may be.
func (s observed) putOff(want desired, reason config.Reason, why string) *api.Failure {
	return &api.Failure{Wish: want.fingerprint, Reason: reason, Message: why + "; the change is put off", Later: true}
}

// forced reports whether people have said that this change needs no window.
func (s observed) forced(want desired) bool {
	return s.journal != nil && s.journal.Forced && !s.other(want) && !s.edited(want) || s.forces(want) && !want.undo
}

// noteForced has the journal of the change that is under way say that it needs no window, as people have said since it was begun. Their
// word is good for one change: it goes when the journal has it.
func (a *Agent) noteForced(ctx context.Context, seen *observed, want desired) error {
	if seen.journal == nil || seen.other(want) || want.undo || !seen.forces(want) || seen.journal.Forced && !seen.edited(want) {
		return nil
	}
	j := *seen.journal
	j.Forced = true
	node, err := a.recorded(ctx, *seen, j, func(node *corev1.Node, text string) ([]byte, error) {
		return a.fence.Record(node, text, config.AnnotationForce)
	})
	if err != nil {
		return fmt.Errorf("noting that the change needs no window, as annotation %s says: %w", config.AnnotationForce, err)
	}
	seen.node, seen.journal = node, &j
	return nil
}

// forces reports whether the annotation means the change to what is asked for.
func (s observed) forces(want desired) bool {
	switch value := s.node.Annotations[config.AnnotationForce]; value {
	case "":
		return false
	case config.ForceNow:
		return true
	default:
		return value == want.fingerprint || value == s.operation()
	}
}
