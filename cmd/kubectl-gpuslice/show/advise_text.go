package show

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/nvml/picture"
)

// Bounds of what people see; programs get all.
const (
	mostBlocks  = 3   // pods that have a block each
	mostRows    = 200 // of the table
	mostLeaving = 10  // names of one list
	mostSums    = 32  // proposals, and lines of who waits
)

// text returns the advice in the format of the flag.
func (out *advised) text(format string, p paper) (string, error) {
	switch format {
	case formatJSON, formatYAML:
		return forPrograms(format, out)
	case formatHTML:
		return out.page(p.sheet()), nil
	}
	p.width = cmp.Or(p.width, paperWidth)
	var parts []string
	switch n := len(out.Moves); {
	case out.none != "":
		parts = append(parts, strings.Join(p.block("", out.none), "\n"))
	case n > mostBlocks:
		parts = append(parts, out.table(p))
	default:
		for i := range out.Moves {
			parts = append(parts, strings.Join(out.Moves[i].block(p), "\n"))
		}
	}
	var notes []string
	for _, note := range out.Notes {
		notes = append(notes, p.block("note: ", note)...)
	}
	if len(notes) > 0 {
		parts = append(parts, strings.Join(notes, "\n"))
	}
	return strings.Join(parts, "\n\n") + "\n", nil
}

// forPrograms returns what programs read, as JSON or YAML.
func forPrograms(format string, of any) (string, error) {
	if format == formatYAML {
		said, err := yaml.Marshal(of)
		return string(said), err
	}
	said, err := json.MarshalIndent(of, "", "  ")
	return string(said) + "\n", err
}

// block says all of one pod.
func (m *adviceFor) block(p paper) []string {
	out := []string{p.cut(p.paint(m.Pod, text.Bold) + "  " + p.paint(string(m.Verdict), m.colour()))}
	add := func(heading, what string) { // what others have written stands behind a heading: no line of it looks like a command
		if what != "" {
			out = append(out, p.block(indent+heading, what)...)
		}
	}
	add("requests: ", m.requested(p))
	add("reason: ", m.Reason)
	add("the scheduler says: ", m.Scheduler)
	for i := range m.Cuts {
		out = append(out, drawCut(m.Node, &m.Cuts[i], p)...)
	}
	add("has to leave: ", listedNames(m.Leave))
	for _, b := range m.Budgets {
		add("but: ", b)
	}
	for _, n := range m.Notes {
		add("note: ", n)
	}
	if !m.Begins.IsZero() {
		add("", "may begin "+begins(m.Begins, p))
	}
	if m.Command != "" { // never cut: the user pastes it
		out = append(out, indent+"$ "+m.Command)
	}
	return out
}

// requested says what the pod requests, and for how long it has waited.
func (m *adviceFor) requested(p paper) string {
	requests := strings.Join(m.Requests, ", ")
	if since := age(m.Since, p.now); since != "" && requests != "" {
		requests += ", for " + since
	}
	return requests
}

func begins(at time.Time, p paper) string {
	return "at " + at.UTC().Format("2006-01-02 15:04:05Z") + ", in " + age(p.now, at)
}

// drawCut draws a GPU before and after a change, with the pods that have its instances.
func drawCut(node string, c *judge.Cut, p paper) []string {
	out := p.block(indent, fmt.Sprintf("GPU %d of %s", c.GPU, node))
	return append(out, drawSlices(indent+"before ", c.Slices, c.Before, p), drawSlices(indent+"after  ", c.Slices, c.After, p))
}

// drawSlices draws the memory slices of a GPU on a line, with the pods that have its instances; nil is MIG off.
func drawSlices(heading string, slots int, instances []judge.Instance, p paper) string {
	width := p.width
	p.width -= len(heading) - len(indent)
	slots = max(1, min(slots, mostSlices))
	cells := []picture.Cell{{At: 0, Size: slots, Names: []string{"MIG off"}}}
	if instances != nil {
		cells = nil
	}
	for _, i := range instances {
		profile, _, _ := strings.Cut(i.Is, "@")
		short, _, _ := strings.Cut(profile, ".")
		names := []string{profile, short}
		if len(i.Pods) > 0 {
			names = append([]string{profile + " " + strings.Join(i.Pods, ", ")}, names...)
		}
		cells = append(cells, picture.Cell{At: i.At, Size: i.Size, Names: names})
	}
	return text.Snip(heading+picture.Slices(slots, cells, p.drawn()), width, "…")
}

// listedNames joins the first names, and counts the rest.
func listedNames(all []string) string {
	out := strings.Join(all[:min(len(all), mostLeaving)], ", ")
	if more := len(all) - mostLeaving; more > 0 {
		out += fmt.Sprintf(" and %d more", more)
	}
	return out
}

// colour shows at a glance what has to happen.
func (m *adviceFor) colour() text.Color {
	switch {
	case m.Verdict == judge.WillFit:
		return text.FgGreen
	case m.Verdict == judge.NotKnown:
		return text.FgHiBlack
	case m.none():
		return text.FgRed
	default:
		return text.FgYellow
	}
}

var adviceColumns = []column[adviceFor]{
	{name: "pod", shrinks: leastPodName, of: func(m *adviceFor, _ paper) string { return m.Pod }},
	{name: "since", folds: true, of: func(m *adviceFor, p paper) string { return age(m.Since, p.now) }},
	{name: "requests", folds: true, of: func(m *adviceFor, _ paper) string { return strings.Join(m.Requests, ", ") }},
	{name: "verdict", folds: true, of: func(m *adviceFor, _ paper) string { return string(m.Verdict) }, colour: (*adviceFor).colour},
	{name: "node", folds: true, of: func(m *adviceFor, _ paper) string { return m.Node }},
}

var waitingColumns = []column[waiting]{
	{name: "waited for", of: func(w *waiting, _ paper) string { return w.Resource }},
	{name: "namespace", folds: true, of: func(w *waiting, _ paper) string { return w.Namespace }},
	{name: "pods", folds: true, of: func(w *waiting, _ paper) string { return fmt.Sprint(w.Pods) }},
	{name: "oldest", folds: true, of: func(w *waiting, p paper) string { return age(w.Oldest, p.now) }},
}

// table has a line for each pod, then what serves them, and who waits for what.
func (out *advised) table(p paper) string {
	lines := []string{tabulate(out.Moves[:min(len(out.Moves), mostRows)], adviceColumns, false, p)}
	if more := len(out.Moves) - mostRows; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more: -o %s has them all", more, formatJSON))
	}
	lines = append(lines, p.block("", "name up to 3 pods to see why, and what changes")...)
	if len(out.Proposals) > 0 {
		lines = append(lines, "", p.paint("proposal", text.Bold))
	}
	for _, one := range out.Proposals[:min(len(out.Proposals), mostSums)] {
		lines = append(lines, p.block(indent, one.serves(p))...)
		for _, note := range one.Notes {
			lines = append(lines, p.block(indent+"note: ", note)...)
		}
		lines = append(lines, indent+"$ "+one.Command)
	}
	if more := len(out.Proposals) - mostSums; more > 0 {
		lines = append(lines, fmt.Sprintf("%sand changes of %d more: -o %s has them all", indent, more, formatJSON))
	}
	if len(out.Waiting) > 0 {
		lines = append(lines, "", tabulate(out.Waiting[:min(len(out.Waiting), mostSums)], waitingColumns, false, p))
	}
	if more := len(out.Waiting) - mostSums; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more: -o %s has them all", more, formatJSON))
	}
	return strings.Join(lines, "\n")
}

// serves says what the change gives and takes.
func (one *proposal) serves(p paper) string {
	leave := "no pod has to leave"
	if one.Leave > 0 {
		leave = cli.Counted(one.Leave, "pod") + " would have to leave, with " + cli.Counted(one.Lost, "memory slice")
	}
	if !one.Begins.IsZero() {
		leave += "; may begin " + begins(one.Begins, p)
	}
	serves := cli.Counted(one.Pods, "pod")
	if one.Others > 0 {
		serves += fmt.Sprintf(", and %d not shown here", one.Others)
	}
	return fmt.Sprintf("%s: serves %s; %s", one.Node, serves, leave)
}
