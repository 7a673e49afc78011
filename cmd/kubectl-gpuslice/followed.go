package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

const (
	// answerTime is how long an agent may take to notice a label, which it does by a watch. The command reports a longer silence.
	answerTime = 2 * time.Minute
	// longestWord bounds the characters of a phase or reason, of which the longest have some 20.
	longestWord = 64
)

// target is the label that the command sets, and the config that it names.
type target struct{ label, name string }

// String returns the request as kubectl label takes it.
func (t target) String() string { return t.label + "=" + t.name }

// kind names the request in messages.
func (t target) kind() string {
	switch t.label {
	case config.LabelProfile:
		return "profile " + t.name
	case config.LabelDevicePluginConfig:
		return "device plugin config " + t.name
	default:
		return "MIG config " + t.name
	}
}

// stage is whether the command still waits for a node.
type stage int

const (
	pending stage = iota
	converged
	failed
	deleted
)

// agentReport is the status and the condition that the agent has written on its node.
type agentReport struct {
	text      string // of the status annotation
	status    api.Status
	condition corev1.NodeCondition
}

func agentReportOf(n *corev1.Node) agentReport {
	t := agentReport{text: n.Annotations[config.AnnotationStatus]}
	if json.Unmarshal([]byte(t.text), &t.status) != nil { // an agent of another version has written it
		t.status = api.Status{}
	}
	for _, c := range n.Status.Conditions {
		if c.Type == config.ConditionGPUPartitionReady {
			t.condition = c
		}
	}
	t.sanitize()
	return t
}

// sanitize bounds the texts to show: any user who can write the node can write an annotation and a condition.
func (r *agentReport) sanitize() {
	s, c := &r.status, &r.condition
	s.Phase, s.Reason = api.Phase(sanitize.Cut(string(s.Phase), longestWord)), config.Reason(sanitize.Cut(string(s.Reason), longestWord))
	s.Owner = api.Owner(sanitize.Cut(string(s.Owner), longestWord))
	s.Capacity = sanitize.Message(s.Capacity, sanitize.Longest)
	for i := range s.Blockers {
		s.Blockers[i] = sanitize.Message(s.Blockers[i], sanitize.Longest)
	}
	c.Reason, c.Message = sanitize.Cut(c.Reason, longestWord), sanitize.Message(c.Message, sanitize.Longest)
}

// none reports whether no agent has ever written anything.
func (r agentReport) none() bool { return r.text == "" && r.condition.Type == "" }

func (r agentReport) same(o agentReport) bool { return r.text == o.text && r.sameCondition(o) }

func (r agentReport) sameCondition(o agentReport) bool {
	return r.condition.Reason == o.condition.Reason && r.condition.Message == o.condition.Message &&
		r.condition.LastHeartbeatTime.Equal(&o.condition.LastHeartbeatTime)
}

// labelled is all that labels ask for together: a profile alone, or a MIG config, a config of the device plugin, or both.
type labelled struct{ profile, migConfig, pluginConfig string }

// labelledOf returns what the labels of the node ask for.
func labelledOf(n *corev1.Node) (out labelled) {
	for _, w := range targetsOf(n) {
		switch w.label {
		case config.LabelProfile:
			return labelled{profile: w.name} // the others do not count
		case config.LabelMIGConfig:
			out.migConfig = w.name
		case config.LabelDevicePluginConfig:
			out.pluginConfig = w.name
		}
	}
	return out
}

// answers reports whether the status is about all that the labels of the node ask for now. The config of the device plugin may be that of the
// settings, for which there is no label.
func (r agentReport) answers(n *corev1.Node) bool {
	s, asked := r.status, labelledOf(n)
	var answered labelled
	switch s.Label {
	case config.LabelProfile:
		answered.profile = s.Desired
	case config.LabelMIGConfig:
		answered.migConfig, answered.pluginConfig, _ = strings.Cut(s.Desired, api.DesiredSeparator)
	case config.LabelDevicePluginConfig:
		answered.pluginConfig = s.Desired
	default: // nothing is asked for, as while a GPU is reset
		return asked == labelled{}
	}
	if asked.pluginConfig == "" && s.ByDefault {
		answered.pluginConfig = ""
	}
	return asked == answered
}

// Of heartbeats that a status names: no agent has a shorter or a longer one.
const (
	shortestHeartbeat = 10 * time.Second
	longestHeartbeat  = 24 * time.Hour
)

// silence is for how long the agent has said nothing, if that is longer than two and a half of its heartbeats: then it does not run, or cannot
// write. It is 0 of a node of which no agent has ever said anything.
func (r agentReport) silence(now time.Time) time.Duration {
	every, heard := time.Duration(r.status.Heartbeat), r.condition.LastHeartbeatTime.Time
	if every < shortestHeartbeat || every > longestHeartbeat {
		every = config.DefaultNodeHeartbeat
	}
	if passed := now.Sub(heard); !heard.IsZero() && passed > every*5/2 {
		return passed
	}
	return 0
}

// agrees reports whether condition and status are about the same: the agent writes them one after the other.
func (r agentReport) agrees() bool {
	return r.condition.Reason == string(r.status.Reason) && !r.condition.LastHeartbeatTime.Time.Before(r.status.Since.Truncate(time.Second))
}

// identity is a node as it was when this command wrote to it.
type identity struct {
	name string
	uid  types.UID
	from string // resource version: older states of the node do not count
}

func identify(n *corev1.Node) identity {
	return identity{name: n.Name, uid: n.UID, from: n.ResourceVersion}
}

// outdated reports whether n is another node, or an older state of this one: lists come from caches.
func (i identity) outdated(n *corev1.Node) bool {
	order, err := resourceversion.CompareResourceVersion(n.ResourceVersion, i.from)
	return n.UID != i.uid || err == nil && order < 0
}

// followed is a node that the command waits for.
type followed struct {
	identity
	target target
	asked  bool        // this command has set the label, which was not there before
	first  agentReport // what the agent had written by then
	last   agentReport
	heard  time.Time // when the agent last wrote anything, or the wait began
	most   int       // the most steps that were ever left
	ahead  time.Time // since when the condition has been newer than the status; zero if it is not

	stage    stage
	phase    api.Phase
	reason   config.Reason
	message  string
	blockers []string
	percent  int
}

// waitFor begins to wait for the node. The label is set by now.
func waitFor(n *corev1.Node, w target, asked bool, now time.Time) *followed {
	f := &followed{identity: identify(n), target: w, asked: asked, first: agentReportOf(n), heard: now}
	f.message = "waiting for its agent to see the label"
	if f.first.none() {
		f.message = "no agent has ever said anything of this node"
	}
	f.see(n, now)
	return f
}

// see takes a new state of the node.
func (f *followed) see(n *corev1.Node, now time.Time) {
	if f.stage != pending || f.outdated(n) {
		return
	}
	t := agentReportOf(n)
	before := f.last
	f.last = t
	if !t.same(before) {
		f.heard = now
	}
	if message := f.withdrawn(n); message != "" {
		f.end(failed, "", message)
		return
	}
	// A user may have removed the label and set it again so fast that the agent has not seen it: then its next report counts.
	fresh := !f.asked || !t.same(f.first)
	switch {
	case !fresh:
	case t.condition.Reason == string(config.ReasonJournalUnreadable): // it touches nothing, nor the status: the condition is all that it writes
		f.end(failed, config.ReasonJournalUnreadable, t.condition.Message)
	case t.answers(n):
		f.judge(t, before, now)
	case t.condition.Reason != string(t.status.Reason) && !t.sameCondition(f.first):
		f.heedCondition(t, before, now)
	}
}

// withdrawn says which label asks for another config by now.
func (f *followed) withdrawn(n *corev1.Node) string {
	now, there := n.Labels[f.target.label]
	profile := n.Labels[config.LabelProfile]
	switch {
	case !there:
		return fmt.Sprintf("label %s was removed by another user or tool", f.target.label)
	case now != f.target.name:
		return fmt.Sprintf("label %s is %q now: another user or tool has changed it", f.target.label, now)
	case f.target.label != config.LabelProfile && profile != "":
		return fmt.Sprintf("label %s=%s, which wins, was set by another user or tool", config.LabelProfile, profile)
	default:
		return ""
	}
}

// judge takes a status that answers what the labels ask for, which is the request, and may be more.
func (f *followed) judge(t, before agentReport, now time.Time) {
	s := t.status
	if t.agrees() {
		f.ahead = time.Time{}
	}
	switch {
	case t.agrees() && s.Phase == api.PhaseIdle && t.condition.Status == corev1.ConditionTrue: // it is about the request, which is reached
		f.percent = 100
		f.end(converged, s.Reason, t.condition.Message)
	case t.agrees() && s.Phase == api.PhaseStalled:
		f.end(failed, s.Reason, t.condition.Message)
	case t.agrees():
		f.progress(s)
		f.report(s.Phase, s.Reason, t.condition.Message, s.Blockers)
	default:
		f.heedCondition(t, before, now)
	}
}

// heedCondition takes a condition that is not about the same as the status.
func (f *followed) heedCondition(t, before agentReport, now time.Time) {
	switch {
	case t.sameCondition(before): // it is about to follow the status
	case t.condition.Status == corev1.ConditionUnknown: // the agent cannot observe the node, as without a driver
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
	f.report(api.PhaseWaiting, config.Reason(f.last.condition.Reason), f.last.condition.Message, nil)
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

// passed checks whether the agent keeps silent: for longer than a heartbeat, once it has reported anything about the request. It gives up a node
// on which no agent has ever written anything.
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
	message := fmt.Sprintf("no agent has answered for %s; see whether its pod runs: kubectl get pods -A -l app.kubernetes.io/name=gpuslice"+
		" --field-selector spec.nodeName=%s", patience.Round(time.Minute), f.name)
	if f.last.none() {
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

// words says why, with the reason if the state does not say that.
func (f *followed) words() string {
	if f.reason == "" || string(f.reason) == f.state() {
		return f.message
	}
	return string(f.reason) + ": " + f.message
}
