package show

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// mostXids is how many errors of one GPU the command shows, which is as many as an agent reports.
const mostXids = 4

// severityCritical is the severity of a GPU that pods must not use.
const severityCritical = "critical"

// gpuHealth is what is wrong with a GPU, and what its driver has reported of it.
type gpuHealth struct {
	Reason    config.Reason `json:"reason,omitempty"` // empty if nothing is wrong any more
	Severity  string        `json:"severity,omitempty"`
	Action    string        `json:"action,omitempty"`
	Since     time.Time     `json:"since,omitzero"`
	Instances []string      `json:"instances,omitempty"` // instances that are unhealthy; none is the whole GPU
	Xids      []api.XidSeen `json:"xids,omitempty"`
}

// healthOf bounds what a status says of a GPU: any user who can write the node can write the status.
func healthOf(h *api.GPUHealth) *gpuHealth {
	if h == nil {
		return nil
	}
	out := &gpuHealth{
		Reason: config.Reason(sanitize.Cut(string(h.Reason), cluster.LongestWord)), Severity: sanitize.Cut(h.Severity, cluster.LongestWord),
		Action: sanitize.Cut(h.Action, cluster.LongestWord),
		Since:  h.Since.UTC(), Xids: slices.Clone(h.Xids[:min(len(h.Xids), mostXids)]),
	}
	for _, is := range h.Instances[:min(len(h.Instances), mostInstances)] {
		out.Instances = append(out.Instances, sanitize.Cut(is, cluster.LongestWord))
	}
	return out
}

// setHealth takes the GPU's health, and marks the instances that are unhealthy.
func (g *gpuView) setHealth(h *gpuHealth) {
	g.Health = h
	for i := range g.Instances {
		instance := &g.Instances[i]
		instance.Unhealthy = ""
		if h != nil && (len(h.Instances) == 0 || slices.Contains(h.Instances, instance.Is)) {
			instance.Unhealthy = h.Reason
		}
	}
}

// state returns the health of the GPU in a word: why it is unhealthy, or that it is well, if that is known.
func (g *gpuView) state(known bool) string {
	switch {
	case g.Health != nil && g.Health.Reason != "":
		return string(g.Health.Reason)
	case g.Missing:
		return "missing"
	case known && !g.Earlier && !g.Lost:
		return "well"
	default:
		return ""
	}
}

// colour shows how bad it is.
func (h *gpuHealth) colour() text.Color {
	switch {
	case h == nil || h.Reason == "":
		return text.FgGreen
	case h.Severity == severityCritical:
		return text.FgRed
	default:
		return text.FgYellow
	}
}

// healthKnown reports whether the agent says of each GPU whether it is well. While the driver does not answer, the condition alone is new: it reports a GPU as
// unhealthy, and the status of a pass before does not say which.
func (v *nodeView) healthKnown() bool {
	switch {
	case v.Health == nil || v.Health.Unhealthy == corev1.ConditionUnknown:
		return false
	case v.Health.Unhealthy == corev1.ConditionFalse:
		return true
	default:
		return slices.ContainsFunc(v.GPUs, func(g gpuView) bool { return g.Health != nil && string(g.Health.Reason) == v.Health.Reason })
	}
}

// healthLines say what is wrong with the GPU and what the user has to do, and which errors it has had.
func (g *gpuView) healthLines(p output.Paper) []string {
	h := g.Health
	if h == nil {
		return nil
	}
	var out []string
	if h.Reason != "" {
		said := string(h.Reason)
		if h.Severity != "" {
			said += ", " + h.Severity
		}
		if !h.Since.IsZero() {
			said += ", for " + age(h.Since, p.Now)
		}
		if len(h.Instances) > 0 {
			said += ", only " + strings.Join(h.Instances, ", ")
		}
		if h.Action != "" {
			said += "; action: " + h.Action
		}
		for _, l := range p.Block(unwell, said) {
			out = append(out, p.Paint(l, h.colour()))
		}
	}
	var xids []string
	for _, x := range h.Xids {
		said := fmt.Sprintf("Xid %d%s", x.Number, g.onInstance(x.GI))
		if !x.Last.IsZero() {
			said += " " + age(x.Last, p.Now) + " ago"
		}
		xids = append(xids, said)
	}
	if len(xids) > 0 {
		out = append(out, p.Block(output.Indent+"reported: ", strings.Join(xids, ", "))...)
	}
	return out
}

func (g *gpuView) onInstance(gi int) string {
	for _, i := range g.Instances {
		if gi >= 0 && i.ID == gi {
			return " on " + i.Is
		}
	}
	return ""
}
