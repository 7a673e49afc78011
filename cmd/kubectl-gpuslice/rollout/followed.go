package rollout

import (
	"cmp"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/config"
)

// answerTime is how long an agent may take to notice a label, which it does by a watch. The command reports a longer silence.
const answerTime = 2 * time.Minute

// stage is whether the command still waits for a node.
type stage int

const (
	pending stage = iota
	converged
	failed
	deleted
)

// followed is a node that the command waits for.
type followed struct {
	cluster.Identity
	target cluster.Target
	asked  bool           // this command has set the label, which was not there before
	first  cluster.Report // what the agent had written by then
	last   cluster.Report
	heard  time.Time // when the agent last wrote anything, or the wait began
	most   int       // the most steps that were ever left
	ahead  time.Time // since when the condition has been newer than the status; zero if it is not

	stage    stage
	phase    api.Phase
	reason   config.Reason
	message  string
	blockers []string
	percent  int
	until    time.Time       // when something happens by itself; zero if that is not known
	then     string          // what
	cordon   *api.CordonSeen // by a user or another tool
}

// waitFor begins to wait for the node. The caller has set the label.
func waitFor(n *corev1.Node, w cluster.Target, asked bool, now time.Time) *followed {
	f := &followed{Identity: cluster.Identify(n), target: w, asked: asked, first: cluster.ReportOf(n), heard: now}
	f.message = "waiting for its agent to see the label"
	if f.first.None() {
		f.message = "no agent has ever reported on this node"
	}
	f.see(n, now)
	return f
}

// see takes a new state of the node.
func (f *followed) see(n *corev1.Node, now time.Time) {
	if f.stage != pending || f.Outdated(n) {
		return
	}
	t := cluster.ReportOf(n)
	before := f.last
	f.last, f.cordon = t, cluster.CordonOf(n)
	if !t.Same(before) {
		f.heard = now
	}
	if message := f.withdrawn(n); message != "" {
		f.end(failed, "", message)
		return
	}
	// A user may have removed the label and set it again so fast that the agent has not seen it: then its next report counts.
	fresh := !f.asked || !t.Same(f.first)
	switch {
	case !fresh:
	case t.Condition.Reason == string(config.ReasonJournalUnreadable): // it touches nothing, nor the status: the condition is all that it writes
		f.end(failed, config.ReasonJournalUnreadable, t.Condition.Message)
	case t.Answers(n):
		f.judge(t, before, now)
	case t.Condition.Reason != string(t.Status.Reason) && !t.SameCondition(f.first):
		f.heedCondition(t, before, now)
	}
}

// withdrawn says which label now requests another config.
func (f *followed) withdrawn(n *corev1.Node) string {
	now, there := n.Labels[f.target.Label]
	profile := n.Labels[config.LabelProfile]
	switch {
	case !there:
		return fmt.Sprintf("label %s was removed by another user or tool", f.target.Label)
	case now != f.target.Name:
		return fmt.Sprintf("label %s is %q now: another user or tool has changed it", f.target.Label, now)
	case f.target.Label != config.LabelProfile && profile != "":
		return fmt.Sprintf("label %s=%s, which wins, was set by another user or tool", config.LabelProfile, profile)
	default:
		return ""
	}
}

// judge takes a status that answers what the labels ask for, which is the request, and may be more.
func (f *followed) judge(t, before cluster.Report, now time.Time) {
	s := t.Status
	if t.Agrees() {
		f.ahead = time.Time{}
	}
	switch {
	case t.Agrees() && s.Phase == api.PhaseIdle && t.Condition.Status == corev1.ConditionTrue: // it is about the request, which is reached
		f.percent = 100
		f.end(converged, s.Reason, t.Condition.Message)
	case t.Agrees() && s.Phase == api.PhaseStalled:
		f.end(failed, s.Reason, t.Condition.Message)
	case t.Agrees():
		f.progress(s)
		f.report(s.Phase, s.Reason, t.Condition.Message, s.Blockers)
		if f.until, f.then = s.Until, s.Then; f.until.IsZero() && !s.Next.IsZero() {
			f.until, f.then = s.Next, "the change begins"
		}
	default:
		f.heedCondition(t, before, now)
	}
}

// heedCondition takes a condition that is not about the same as the status.
func (f *followed) heedCondition(t, before cluster.Report, now time.Time) {
	switch {
	case t.SameCondition(before): // it is about to follow the status
	case t.Condition.Status == corev1.ConditionUnknown: // the agent cannot observe the node, as without a driver
		f.reportCondition()
	default: // the status is about to follow, unless the agent has not seen all of the node
		f.ahead = now
	}
}

// followTime is how long a status takes to follow its condition: the agent writes one right after the other.
const followTime = 2 * time.Second

// reportCondition reports the condition, if no status has followed it.
func (f *followed) reportCondition() {
	f.ahead = time.Time{}
	f.report(api.PhaseWaiting, config.Reason(f.last.Condition.Reason), f.last.Condition.Message, nil)
}

// progress notes how much of the change is done: of the most steps that were ever left, forwards or in an undo.
func (f *followed) progress(s api.Status) {
	if s.Phase == api.PhaseRollingBack && f.phase != api.PhaseRollingBack {
		f.most = 0
	}
	f.most = max(f.most, s.Left)
	if f.most > 0 {
		f.percent = 100 * (f.most - s.Left) / f.most
	}
}

func (f *followed) report(phase api.Phase, reason config.Reason, message string, blockers []string) {
	f.phase, f.reason, f.message, f.blockers = phase, reason, message, blockers
	f.until, f.then = time.Time{}, ""
}

func (f *followed) end(s stage, reason config.Reason, message string) {
	f.stage = s
	f.report("", reason, message, nil)
}

// gone notes that the node was deleted.
func (f *followed) gone() {
	if f.stage == pending {
		f.end(deleted, "", "the node was deleted, and is not waited for")
	}
}

// passed checks whether the agent keeps silent: for longer than a heartbeat, once it has reported anything about the request. It gives up a node that
// no agent has ever reported on.
func (f *followed) passed(now time.Time) {
	if f.stage == pending && !f.ahead.IsZero() && now.Sub(f.ahead) >= followTime {
		f.reportCondition()
	}
	patience := answerTime
	if f.reason != "" {
		patience += config.Default().NodeHeartbeat
	}
	silence := now.Sub(f.heard)
	if f.stage != pending || silence < patience {
		return
	}
	message := fmt.Sprintf("no agent has answered for %s; see whether its pod runs: %s", patience.Round(time.Minute), cluster.PodsOfAgents(f.Name))
	if f.last.None() {
		f.end(failed, "", message)
		return
	}
	f.report(f.phase, f.reason, message, nil)
}

// state returns the state of the node, in a word.
func (f *followed) state() string {
	switch f.stage {
	case converged:
		return "Converged"
	case failed:
		return "Failed"
	case deleted:
		return "Deleted"
	case pending:
	}
	return cmp.Or(string(f.phase), "Asked")
}

// soFar says in a line how far the node is.
func (f *followed) soFar() string {
	switch {
	case f.stage == failed, f.stage == pending && f.reason == "":
		return f.words()
	case f.stage == pending && f.phase == api.PhaseWaiting:
		return "held up: " + f.words()
	default:
		return f.state() + ": " + f.words()
	}
}

// next says what happens by itself, and in how long; empty if that is not known.
func (f *followed) next(now time.Time) string {
	if f.until.IsZero() || f.then == "" {
		return ""
	}
	if left := f.until.Sub(now); left > 0 {
		return "in " + duration.HumanDuration(left) + ": " + f.then
	}
	return "now: " + f.then
}

// words says why, with the reason if the state does not say that.
func (f *followed) words() string {
	if f.reason == "" || string(f.reason) == f.state() {
		return f.message
	}
	return string(f.reason) + ": " + f.message
}
