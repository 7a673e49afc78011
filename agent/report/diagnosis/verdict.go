package diagnosis

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// stepTime is the longest time that one step on the hardware was measured to take: a mode change, or a reset.
const stepTime = 5 * time.Second

// outcome concludes from all causes.
func (e *Evidence) outcome(causes []api.Finding) api.Outcome {
	switch {
	case e.Node == nil:
		return api.Outcome{Verdict: api.VerdictUnknown, Text: "unknown until the API server answers"}
	case e.ours():
		return e.outcomeOfOurs(causes)
	default:
		return e.outcomeOfOthers(causes)
	}
}

// outcomeOfOurs concludes for a node if a mark of the agent keeps pods away.
func (e *Evidence) outcomeOfOurs(causes []api.Finding) api.Outcome {
	for _, f := range causes {
		if f.Waits {
			return api.Outcome{Verdict: api.VerdictWaitsForYou, Text: "waits for you: " + cmp.Or(f.You, f.Evidence)}
		}
	}
	within := e.within()
	out := api.Outcome{
		Verdict: api.VerdictGivesBack, Within: api.Duration(within),
		Text: "the agent releases this node by itself within " + duration.HumanDuration(within),
	}
	if foreign := closedByOthers(causes); foreign != "" {
		out.Text = "the agent removes its own marks within " + duration.HumanDuration(within) + ", and the node stays closed: " + foreign
	}
	return out
}

// outcomeOfOthers concludes for a node if no mark of the agent keeps pods away.
func (e *Evidence) outcomeOfOthers(causes []api.Finding) api.Outcome {
	foreign := closedByOthers(causes)
	for _, f := range causes {
		switch {
		case f.Cause == api.CauseKeepCordoned && e.cordon.Ours:
			return api.Outcome{Verdict: api.VerdictWaitsForYou, Text: "waits for you: " + f.You}
		case f.Cause == api.CauseNodeNotReady && e.KubeletSeen.Ready != "True", f.Cause == api.CauseOperandsPaused:
			foreign = cmp.Or(foreign, f.Evidence)
		default:
		}
	}
	switch {
	case e.parked():
		return api.Outcome{Verdict: api.VerdictFree, Text: e.takesPods() + ", and " + e.Journal.Target + " waits for its next reboot"}
	case foreign != "":
		return api.Outcome{Verdict: api.VerdictNotOurs, Text: "not ours: " + foreign + "; gpuslice keeps no pods from the node"}
	case e.Want.Name != "" && (len(e.Steps) > 0 || e.Refused != nil || e.NotYet != nil):
		return api.Outcome{Verdict: api.VerdictFree, Text: e.takesPods() + ", but does not match " + e.Want.Name}
	default:
		return api.Outcome{Verdict: api.VerdictFree, Text: e.takesPods() + ", and nothing is left to restore"}
	}
}

// takesPods says which pods the node takes, as far as taints decide.
func (e *Evidence) takesPods() string {
	var taints []string
	for _, t := range e.Node.Spec.Taints {
		if t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute {
			taints = append(taints, t.Key+":"+string(t.Effect))
		}
	}
	if len(taints) == 0 {
		return "the node takes pods"
	}
	return "the node takes pods that tolerate " + sanitize.Names(taints)
}

// closedByOthers names the user, tool or taint that keeps pods away.
func closedByOthers(causes []api.Finding) string {
	for _, f := range causes {
		if slices.Contains([]api.Cause{api.CauseCordonedByPerson, api.CauseCordonedByTool, api.CauseUnschedulableTaintLeft}, f.Cause) {
			return f.Evidence
		}
	}
	return ""
}

// within returns the longest time until the agent releases the node, if no step fails: until the deadline of pods and processes in the way, plus the
// steps.
func (e *Evidence) within() time.Duration {
	var total time.Duration
	if e.Journal != nil && !e.Want.Undo && (e.evicts() || len(e.Processes) > 0) {
		total += max(0, e.deadline().Sub(e.Now))
	}
	for _, s := range e.Steps {
		switch s.Traits().Wait {
		case plan.WaitNone:
		case plan.WaitDriver:
			total += stepTime
		case plan.WaitUnit:
			total += e.Settings.Timeouts.Unit
		case plan.WaitReboot:
			total += e.Settings.Timeouts.Reboot
		case plan.WaitCapacity:
			total += e.Settings.Timeouts.Capacity
		}
	}
	return max(time.Minute, total.Round(time.Second))
}
