package show

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Diagnosis writes a diagnosis: the facts, the causes, and the outcome last, next to the prompt that comes back.
func Diagnosis(of api.Diagnosis) string {
	d := diagnosis{of}
	p := &page{now: d.At}
	p.section("Node", d.node(p))
	p.section("Cordon", d.cordon(p)...)
	p.section("Agent", d.agent(p)...)
	p.section("To restore", d.pendingRestore(p)...)
	p.section("Left", d.Left...)
	p.section("Others", d.others(p)...)
	p.section("Taints", d.taints(p)...)
	p.section("Pods", d.pods()...)
	p.section("Processes", d.processes()...)
	p.section("Operands", d.operands()...)
	p.section("GPUs", d.gpus()...)
	if d.Owner != api.OwnerNone {
		p.section("Owner", string(d.Owner))
	}
	p.section("Capacity", d.capacity()...)
	p.section("Failed", d.failed()...)
	p.section("Not seen", d.Unseen...)
	p.causes(d.Causes)
	p.line("")
	p.line(sentence(d.Outcome.Text))
	return strings.Join(p.lines, "\n") + "\n"
}

// diagnosis is one that is being written.
type diagnosis struct{ api.Diagnosis }

// page is a text in sections.
type page struct {
	now   time.Time
	lines []string
}

// margin is the width of the column that names the sections.
const margin = len("Processes") + 2

// line adds a line. A diagnosis may come from an annotation, which any user who can write the node can write: a line feed in a name must not make
// a line of its own.
func (p *page) line(text string) {
	said := strings.TrimLeft(text, " ")
	p.lines = append(p.lines, text[:len(text)-len(said)]+sanitize.Message(said, sanitize.Longest))
}

// section writes lines next to the name; nothing if there are no lines.
func (p *page) section(name string, lines ...string) {
	for i, l := range lines {
		if i > 0 {
			name = ""
		}
		p.line(fmt.Sprintf("%-*s%s", margin, name, l))
	}
}

// since writes a moment for the end of a sentence; empty if it is not known.
func (p *page) since(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return fmt.Sprintf(" since %s (%s)", t.UTC().Format(time.RFC3339), duration.HumanDuration(p.now.Sub(t)))
}

func (p *page) ago(t time.Time) string { return duration.HumanDuration(p.now.Sub(t)) + " ago" }

func (p *page) causes(causes []api.Finding) {
	if len(causes) == 0 {
		return
	}
	p.line("")
	p.line("Causes")
	for i, f := range causes {
		p.line(fmt.Sprintf("%3d  %s: %s", i+1, f.Cause, f.Evidence))
		p.line("     the agent " + f.Agent)
		if f.You != "" {
			p.line("     you: " + f.You)
		}
		if f.Command != "" {
			p.line("       $ " + f.Command)
		}
	}
}

func (d diagnosis) node(p *page) string {
	text := cmp.Or(d.Node, "(could not be read)") + ", " + d.At.UTC().Format(time.RFC3339)
	switch {
	case d.Node == "":
	case d.Kubelet.Ready != corev1.ConditionTrue:
		text += ", Ready is " + string(d.Kubelet.Ready) + p.since(d.Kubelet.Since) + ": " + d.Kubelet.Says
	default:
		text += ", Ready"
	}
	if d.Kubelet.Silent != "" {
		text += "; " + d.Kubelet.Silent
	}
	return text
}

func (d diagnosis) cordon(p *page) []string {
	switch {
	case d.Node == "":
		return nil
	case d.Cordon == nil:
		return []string{"none"}
	}
	c := d.Cordon
	text := "by " + cmp.Or(c.By, "an unknown user or tool")
	if c.Ours {
		text = "ours"
	}
	text += p.since(c.Since)
	if c.Kept {
		text += ", to be kept"
	}
	return []string{text}
}

func (d diagnosis) agent(p *page) []string {
	text := "does not run on this machine"
	if d.Agent.Runs {
		text = "runs"
	}
	if d.Agent.Reason == "" {
		return []string{text}
	}
	return []string{
		fmt.Sprintf("%s; said %s, %s:", text, p.ago(d.Agent.Wrote), d.Agent.Reason),
		d.Agent.Message,
	}
}

func (d diagnosis) pendingRestore(p *page) []string {
	o := d.PendingRestore
	switch {
	case o == nil:
		return nil
	case o.Unreadable != "":
		return []string{o.Unreadable}
	}
	what := "what was left on the node"
	if o.Target != "" {
		what = "change to " + o.Target
	}
	out := []string{what + p.since(o.Since) + phase(o.Phase), "operation " + o.Operation}
	if !o.Deadline.IsZero() {
		out = append(out, fmt.Sprintf("pods have until %s (%s left)", o.Deadline.UTC().Format(time.RFC3339), duration.HumanDuration(o.Deadline.Sub(d.At))))
	}
	if o.Undo != nil {
		out = append(out, fmt.Sprintf("given up, %s: %s", o.Undo.Reason, o.Undo.Message))
	}
	switch {
	case o.Cordon && o.WasCordoned:
		out = append(out, "taint; the node was cordoned before")
	case o.Cordon && !slices.ContainsFunc(d.Taints, func(t api.TaintSeen) bool { return t.Key == config.TaintRepartitioning }):
		out = append(out, "cordon")
	case o.Cordon:
		out = append(out, "cordon and taint")
	}
	for _, label := range slices.Sorted(maps.Keys(o.Paused)) {
		out = append(out, fmt.Sprintf("label %s=%s", label, o.Paused[label]))
	}
	for _, unit := range o.Stopped {
		out = append(out, "unit "+unit+", which was running")
	}
	for _, b := range o.Before {
		out = append(out, "if it fails: "+geometryText(b))
	}
	return out
}

func phase(p api.Phase) string {
	if p == "" {
		return ""
	}
	return ", " + string(p)
}

// geometryText writes how a GPU is cut: "GPU 0: 1g.10gb@0 3g.40gb@4".
func geometryText(s api.StatusGPU) string {
	name := fmt.Sprintf("GPU %d", s.Index)
	if s.Index < 0 {
		name = "GPU " + string(s.UUID) + ", which is not seen"
	}
	switch {
	case s.Lost:
		return name + ": not known"
	case !s.MIG:
		return name + ": MIG off"
	case s.Geometry == "":
		return name + ": MIG on, no instances"
	default:
		return name + ": " + s.Geometry
	}
}

func (d diagnosis) others(p *page) []string {
	var out []string
	for _, t := range d.Others {
		text := t.Tool + p.since(t.Since) + ": " + t.Sign
		switch {
		case t.Planned:
			text += " (announced)"
		case t.Cordons:
			text += " (it cordons)"
		}
		out = append(out, text)
	}
	return out
}

func (d diagnosis) taints(p *page) []string {
	var out []string
	for _, t := range d.Taints {
		out = append(out, fmt.Sprintf("%s:%s%s, %s", t.Key, t.Effect, p.since(t.Since), t.Means))
	}
	return out
}

// pods lists the pods that have to leave or are stuck, and counts the others.
func (d diagnosis) pods() []string {
	var out []string
	stay := 0
	for _, pod := range d.Pods {
		if !pod.Leaves && pod.State == "" {
			if !pod.Operand { // the steps have it, if it has to go
				stay++
			}
			continue
		}
		text := pod.Namespace + "/" + pod.Name
		if pod.Leaves {
			text += ", has to leave"
		}
		if len(pod.Devices) > 0 {
			text += ", holds " + strings.Join(pod.Devices, ", ")
		}
		if len(pod.FoundBy) > 0 {
			text += " (by " + strings.Join(pod.FoundBy, ", ") + ")"
		}
		out = append(out, text)
		if pod.State != "" {
			state := "  " + pod.State
			if pod.Message != "" {
				state += ": " + pod.Message
			}
			out = append(out, state)
		}
	}
	more := ""
	if len(out) > 0 {
		more = " more"
	}
	switch {
	case stay == 1:
		out = append(out, "1"+more+" holds a GPU, and stays")
	case stay > 1:
		out = append(out, fmt.Sprintf("%d%s hold GPUs, and stay", stay, more))
	}
	return out
}

func (d diagnosis) processes() []string {
	var out []string
	for _, s := range d.Processes {
		out = append(out, fmt.Sprintf("%s holds %s (by %s)", s.Name, strings.Join(s.Holds, ", "), strings.Join(s.FoundBy, ", ")))
	}
	return out
}

func (d diagnosis) operands() []string {
	var out []string
	for _, o := range d.Operands {
		text := fmt.Sprintf("%s=%s, paused by %s", o.Label, o.Value, o.By)
		if o.PendingRestore {
			text += ", and to be restored"
		}
		out = append(out, text)
	}
	return out
}

func (d diagnosis) gpus() []string {
	g := d.GPUs
	var out []string
	switch {
	case g.Refused != "" && g.Asked != "":
		out = append(out, fmt.Sprintf("%s requests %s, which cannot be: %s", g.Label, g.Asked, g.Refused))
	case g.Refused != "":
		out = append(out, "no config is requested, and none would be applied: "+g.Refused)
	case g.Asked != "":
		out = append(out, fmt.Sprintf("%s requests %s", g.Label, g.Asked))
	case d.Node == "" && len(g.Now) > 0:
		out = append(out, "the request is not known")
	case d.Node != "":
		out = append(out, "no config is requested")
	}
	if g.Unasked != "" {
		out = append(out, g.Unasked)
	}
	for _, now := range g.Now {
		out = append(out, geometryText(now))
	}
	if len(g.Steps) == 0 {
		return out
	}
	out = append(out, sanitize.Counted(len(g.Steps), "step")+" left:")
	for _, s := range groupInstanceSteps(g.Steps) {
		out = append(out, "  "+s)
	}
	return out
}

// groupInstanceSteps joins steps in a row that create instances of one GPU, or destroy them, into one line: a node of eight GPUs may have
// more than a hundred.
func groupInstanceSteps(steps []string) []string {
	var out []string
	for i := 0; i < len(steps); {
		head, first, many := instanceStep(steps[i])
		n := 1
		for many && i+n < len(steps) {
			same, _, ok := instanceStep(steps[i+n])
			if !ok || same != head {
				break
			}
			n++
		}
		if n == 1 {
			out = append(out, steps[i])
		} else {
			_, last, _ := instanceStep(steps[i+n-1])
			out = append(out, fmt.Sprintf("%s %d instances, %s to %s", head, n, first, last))
		}
		i += n
	}
	return out
}

// instanceStep takes "GPU 0: create 1g.10gb@3" apart.
func instanceStep(step string) (head, instance string, ok bool) {
	at := strings.LastIndex(step, " ")
	if at < 0 || !strings.HasPrefix(step, "GPU ") || !strings.Contains(step[at:], "@") {
		return "", "", false
	}
	return step[:at], step[at+1:], true
}

func (d diagnosis) capacity() []string {
	switch {
	case len(d.Capacity) > 0:
		return d.Capacity
	case d.Node != "" && d.Kubelet.Silent == "" && len(d.GPUs.Now) > 0:
		return []string{"as the GPUs have it"}
	default:
		return nil
	}
}

func (d diagnosis) failed() []string {
	if d.Failed == nil {
		return nil
	}
	return []string{fmt.Sprintf("%s: %s", d.Failed.Reason, d.Failed.Message)}
}

// sentence begins with a capital letter and ends with a full stop.
func sentence(text string) string {
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + text[1:] + "."
}
