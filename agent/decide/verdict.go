package decide

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/window"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// ruling is what the gate says of a change.
type ruling int

const (
	unrestricted ruling = iota // the change waits for no window
	undisturbing               // no pod is disturbed
	windowOpen                 // a window is open for long enough
	held                       // a user holds the node
	older                      // the request is older than the first agent on this node, and the change would take something
	contested                  // another program keeps changing the GPUs
	unreadable                 // the maintenance file cannot be read
	windowClosed               // no window is open for long enough
)

// verdict is what the gate says of a change at one moment. The texts of its wait, its postponement and its preview are made from it.
type verdict struct {
	ruling  ruling
	begun   bool           // there is something to restore: the change is postponed where one that has not begun would wait
	opening window.Opening // if windows decide: the open one; for a change that has begun, and no open window, the last one
	within  bool           // the opening is open
	begins  time.Time      // if windows decide: when the change may begin, in the zone of the window; zero if it never may
	takes   duration
}

// judge returns whether a change may begin or go on. It always allows steps that disturb no pod, roll-backs, and changes past the point of no return.
func judge(seen *state.Observed, want state.Desired, steps []plan.Step, now time.Time) verdict {
	v := verdict{begun: seen.DisruptionStarted(), takes: estimate(seen)}
	needsWindow, unasked := needsWindow(seen, want, steps), judgeUnasked(seen, want, steps, now)
	switch {
	case want.Undo:
		v.ruling = unrestricted
	case isHeld(seen) && startsChange(seen, want, steps):
		v.ruling, v.begun = held, seen.Journal != nil // the journal is for another target: that change is given up even if it has disturbed nothing
	case unasked != unrestricted:
		v.ruling = unasked
	case !needsWindow && !plan.Has(steps, plan.Evict):
		v.ruling = undisturbing
	case !needsWindow || forced(seen, want) || pastPointOfNoReturn(seen, want, steps):
		v.ruling = unrestricted
	case seen.Pool.Err != nil:
		v.ruling = unreadable
	default:
		v.judgeByWindows(seen, want, now)
	}
	return v
}

// judgeUnasked judges a change that no user has asked this agent for: its label is older than the agent, or another program has changed the GPUs. It is
// unrestricted for any other change, and for one that has begun.
func judgeUnasked(seen *state.Observed, want state.Desired, steps []plan.Step, now time.Time) ruling {
	switch {
	case seen.Journal != nil:
		return unrestricted
	case takes(seen, steps) && len(seen.OlderLabels(want)) > 0:
		return older
	case !seen.Forces(want) && !foreignUntil(seen, want, steps, now).IsZero():
		return contested
	}
	return unrestricted
}

// isHeld reports whether the annotation holds the node: it does without a value, too.
func isHeld(seen *state.Observed) bool {
	_, is := seen.Node.Annotations[config.AnnotationHold]
	return is
}

// hold is the annotation that holds the node, with its text if it has one.
func hold(seen *state.Observed) string {
	if text := seen.Node.Annotations[config.AnnotationHold]; text != "" {
		return fmt.Sprintf("annotation %s (%q)", config.AnnotationHold, text)
	}
	return "annotation " + config.AnnotationHold
}

// startsChange reports whether the steps begin a change. Steps that only restore something or verify the capacity begin none.
func startsChange(seen *state.Observed, want state.Desired, steps []plan.Step) bool {
	if seen.Journal != nil && !seen.Other(want) || steps[0].Kind == plan.Adopt {
		return false
	}
	return plan.Any(steps, func(t plan.Traits) bool { return t.Begins })
}

// takes reports whether the steps destroy an instance or evict a pod. Pods of DaemonSets that only keep a GPU's files open do not count: a new node may have
// them. While kubelet does not answer, any pod may hold a GPU, and preflight waits.
func takes(seen *state.Observed, steps []plan.Step) bool {
	return slices.ContainsFunc(steps, func(s plan.Step) bool {
		if s.Kind != plan.Evict {
			return s.Kind == plan.Destroy
		}
		pods := seen.Drained(s.Pods)
		others := slices.DeleteFunc(slices.Clone(pods), func(p holders.Pod) bool { return p.Daemon && only(p, holders.Source.IsOpenFile) })
		return seen.Kubelet.Err == nil && (len(others) > 0 || len(pods) == 0)
	})
}

// judgeByWindows lets the windows decide. A change that has begun is postponed if its window has closed, or closes before the change can be done. The
// agent has then evicted some pods in vain, but touching a GPU outside of the window would be worse.
func (v *verdict) judgeByWindows(seen *state.Observed, want state.Desired, now time.Time) {
	schedule := Schedule(seen, want)
	v.begins = beginsAt(seen, want, now)
	v.opening, v.within = schedule.At(now)
	may := !v.begins.IsZero() && !v.begins.After(now)
	if v.begun {
		may = v.within && remaining(v.opening, now) >= v.takes.AfterFirstTouch
	}
	switch {
	case may && v.opening.End.IsZero():
		v.ruling = unrestricted
	case may:
		v.ruling = windowOpen
	default:
		v.ruling = windowClosed
	}
	if v.begun && !v.within {
		v.opening, _ = schedule.Prev(now)
	}
}

// needsWindow reports whether the steps disturb any pod: one that runs, or one that would get a GPU before they end. A node with its startup taint runs no
// workload, and a GPU that a reboot has cleared of its instances serves none.
func needsWindow(seen *state.Observed, want state.Desired, steps []plan.Step) bool {
	// As long as kubelet does not answer, any pod may hold a GPU, and preflight waits.
	fresh := len(seen.Marks.Startup) > 0 && (seen.Kubelet.Err != nil || !plan.Has(steps, plan.Evict)) || len(seen.Journal.Startup()) > 0
	if fresh || seen.Restores(want) && !plan.Has(steps, plan.Evict) && !plan.Has(steps, plan.Heal) {
		return false
	}
	return plan.Disrupts(steps) || plan.Has(steps, plan.Fence)
}

// forced reports whether a user has said, with the annotation, that this change needs no window.
func forced(seen *state.Observed, want state.Desired) bool {
	return seen.Journal != nil && seen.Journal.Forced && !seen.Other(want) && !seen.Edited(want) || seen.Forces(want)
}

// pastPointOfNoReturn reports whether the change has already touched a GPU or the plugin's config, and no user has edited the target since. It is false if
// the agent has released the node in between, and the remaining steps evict pods that have come since.
func pastPointOfNoReturn(seen *state.Observed, want state.Desired, steps []plan.Step) bool {
	return seen.HardwareOrPluginTouched() && !seen.Other(want) && !seen.Edited(want) && (seen.DisruptionStarted() || !plan.Has(steps, plan.Evict))
}
