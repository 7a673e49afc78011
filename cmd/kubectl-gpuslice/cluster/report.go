package cluster

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/managed"
)

// LongestWord bounds the characters of a phase or reason; the longest have some 20. It bounds a hold's text too, which the node's condition has as a whole.
const LongestWord = 64

// Report is the status and the condition that the agent has written on its node.
type Report struct {
	text      string // of the status annotation
	Status    api.Status
	Condition corev1.NodeCondition
}

// ReportOf reads it from the node.
func ReportOf(n *corev1.Node) Report {
	t := Report{text: n.Annotations[config.AnnotationStatus]}
	if json.Unmarshal([]byte(t.text), &t.Status) != nil { // an agent of another version has written it
		t.Status = api.Status{}
	}
	for _, c := range n.Status.Conditions {
		if c.Type == config.ConditionGPUPartitionReady {
			t.Condition = c
		}
	}
	t.sanitize()
	return t
}

// sanitize bounds the texts to show: any user who can write the node can write an annotation and a condition.
func (r *Report) sanitize() {
	s, c := &r.Status, &r.Condition
	s.Phase, s.Reason = api.Phase(sanitize.Cut(string(s.Phase), LongestWord)), config.Reason(sanitize.Cut(string(s.Reason), LongestWord))
	s.Owner = api.Owner(sanitize.Cut(string(s.Owner), LongestWord))
	s.Capacity, s.Then = sanitize.Message(s.Capacity, sanitize.Longest), sanitize.Message(s.Then, sanitize.Longest)
	for i := range s.Blockers {
		s.Blockers[i] = sanitize.Message(s.Blockers[i], sanitize.Longest)
	}
	c.Reason, c.Message = sanitize.Cut(c.Reason, LongestWord), sanitize.Message(c.Message, sanitize.Longest)
}

// None reports whether no agent has ever written anything.
func (r Report) None() bool { return r.text == "" && r.Condition.Type == "" }

// Same reports whether the agent has written nothing since o.
func (r Report) Same(o Report) bool { return r.text == o.text && r.SameCondition(o) }

// SameCondition is Same of the condition alone.
func (r Report) SameCondition(o Report) bool {
	return r.Condition.Reason == o.Condition.Reason && r.Condition.Message == o.Condition.Message &&
		r.Condition.LastHeartbeatTime.Equal(&o.Condition.LastHeartbeatTime)
}

// labelled is all that labels ask for together: a profile alone, or a MIG config, a config of the device plugin, or both.
type labelled struct{ profile, migConfig, pluginConfig string }

// labelledOf returns what the labels of the node ask for.
func labelledOf(n *corev1.Node) (out labelled) {
	for _, w := range TargetsOf(n) {
		switch w.Label {
		case config.LabelProfile:
			return labelled{profile: w.Name} // the others do not count
		case config.LabelMIGConfig:
			out.migConfig = w.Name
		case config.LabelDevicePluginConfig:
			out.pluginConfig = w.Name
		}
	}
	return out
}

// Answers reports whether the status is about all that the labels of the node ask for now. The config of the device plugin may come from the
// settings, without a label.
func (r Report) Answers(n *corev1.Node) bool {
	s, asked := r.Status, labelledOf(n)
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

// Silence is for how long the agent has said nothing, if that is longer than two and a half of its heartbeats: then it does not run, or cannot
// write. It is 0 if no agent has ever reported on the node.
func (r Report) Silence(now time.Time) time.Duration {
	every, heard := time.Duration(r.Status.Heartbeat), r.Condition.LastHeartbeatTime.Time
	if every < shortestHeartbeat || every > longestHeartbeat {
		every = config.DefaultNodeHeartbeat
	}
	if passed := now.Sub(heard); !heard.IsZero() && passed > every*5/2 {
		return passed
	}
	return 0
}

// Agrees reports whether condition and status are about the same: the agent writes them one after the other.
func (r Report) Agrees() bool {
	return r.Condition.Reason == string(r.Status.Reason) && !r.Condition.LastHeartbeatTime.Time.Before(r.Status.Since.Truncate(time.Second))
}

// AnswersAnother reports whether the agent's last report is about another request than the node's labels make. Of
// a status that cannot be read, nothing is known.
func (r Report) AnswersAnother(n *corev1.Node) bool {
	return r.Status.Phase != "" && !r.StandsAlone() && !r.Answers(n)
}

// failedObservations are the reasons of a condition that says why the agent could not observe the node, and is not Unknown.
var failedObservations = []config.Reason{config.ReasonRetrying, config.ReasonJournalUnreadable, config.ReasonHostRecordUnavailable}

// StandsAlone reports whether the condition says why the agent cannot observe the node: then no status follows it, and that on the node is of a
// pass before.
func (r Report) StandsAlone() bool {
	return r.Condition.Reason != string(r.Status.Reason) &&
		(r.Condition.Status == corev1.ConditionUnknown || slices.Contains(failedObservations, config.Reason(r.Condition.Reason)))
}

// Phase is the phase that the condition stands for: that of the status, if both are about the same. Otherwise the status is of a pass before, or has no
// room on the node; then it is empty, unless the condition shows it.
func (r Report) Phase() api.Phase {
	switch s, reason := r.Status, config.Reason(r.Condition.Reason); {
	case reason == "" || reason == s.Reason || r.StandsAlone():
		return s.PhaseBeside(reason)
	case r.Condition.Status == corev1.ConditionTrue:
		return api.PhaseIdle
	default:
		return ""
	}
}

// CordonOf returns the node's cordon, unless it is of a change that is under way; nil if there is none.
func CordonOf(n *corev1.Node) *api.CordonSeen {
	who, since, cordoned := managed.Cordoner(n)
	_, changes := n.Annotations[config.AnnotationJournal]
	if !cordoned || changes && (who == "" || who == config.FieldManager) {
		return nil
	}
	return &api.CordonSeen{By: sanitize.Cut(who, LongestWord), Ours: who == config.FieldManager, Since: since.UTC()}
}

// Cordoned says who has cordoned a node, and how long ago if that is known; a zero now is no time.
func Cordoned(c *api.CordonSeen, now time.Time) string {
	said := "cordoned"
	if c.By != "" {
		said += " by " + c.By
	}
	if !c.Since.IsZero() && !now.IsZero() {
		said += " " + duration.HumanDuration(max(0, now.Sub(c.Since)))
	}
	return said
}

// PodsOfAgents is a command that shows the pods of the agents: of one node, or of all nodes with their names.
func PodsOfAgents(nodes ...string) string {
	const all = "kubectl get pods -A -l app.kubernetes.io/name=gpuslice"
	if len(nodes) == 1 {
		return all + " --field-selector spec.nodeName=" + nodes[0]
	}
	return all + " -o wide"
}

// SilentAgents names nodes with agents that have not reported for too long, and how to find the agents; empty if there are none.
func SilentAgents(names []string, longest string) string {
	if len(names) == 0 {
		return ""
	}
	who := "the agent of " + names[0] + " has"
	if len(names) > 1 {
		who = fmt.Sprintf("%d agents, of %s, have", len(names), sanitize.Listed(names))
	}
	return fmt.Sprintf("%s said nothing for %s: %s", who, longest, PodsOfAgents(names...))
}
