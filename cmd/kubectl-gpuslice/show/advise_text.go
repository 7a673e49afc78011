package show

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
)

// Bounds of what people see; programs get all.
const (
	mostBlocks = 3   // pods that have a block each
	mostRows   = 200 // of the table
	mostSums   = 32  // proposals, and lines of who waits
)

// text returns the advice in the format of the flag.
func (out *advised) text(format string, p output.Paper) (string, error) {
	switch format {
	case output.JSON, output.YAML:
		return output.ForPrograms(format, out)
	case output.HTML:
		return out.page(p.Sheet()), nil
	}
	p.Whole, p.Width = p.Width == 0, cmp.Or(p.Width, output.PaperWidth)
	var parts []string
	switch n := len(out.Moves); {
	case out.none != "":
		parts = append(parts, strings.Join(p.Block("", out.none), "\n"))
	case n > mostBlocks:
		parts = append(parts, out.table(p))
	default:
		for i := range out.Moves {
			parts = append(parts, strings.Join(out.Moves[i].block(p), "\n"))
		}
	}
	var notes []string
	for _, note := range out.Notes {
		notes = append(notes, p.Block("note: ", note)...)
	}
	if len(notes) > 0 {
		parts = append(parts, strings.Join(notes, "\n"))
	}
	return strings.Join(parts, "\n\n") + "\n", nil
}

// block says all of one pod.
func (m *adviceFor) block(p output.Paper) []string {
	out := []string{p.Cut(p.Paint(m.Pod, text.Bold) + "  " + p.Paint(string(m.Verdict), m.colour()))}
	add := func(heading, what string) { // what others have written stands behind a heading: no line of it looks like a command
		if what != "" {
			out = append(out, p.Block(output.Indent+heading, what)...)
		}
	}
	add("requests: ", m.requested(p))
	add("reason: ", m.Reason)
	add("the scheduler says: ", m.Scheduler)
	for i := range m.Cuts {
		out = append(out, output.DrawCut(gpuOf(m.Node, &m.Cuts[i]), &m.Cuts[i], p)...)
	}
	add("has to leave: ", output.Names(m.Leave))
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
		out = append(out, output.Indent+"$ "+m.Command)
	}
	return out
}

// gpuOf names the GPU that a change is about.
func gpuOf(node string, c *judge.Cut) string { return fmt.Sprintf("GPU %d of %s", c.GPU, node) }

// requested says what the pod requests, and for how long it has waited.
func (m *adviceFor) requested(p output.Paper) string {
	requests := strings.Join(m.Requests, ", ")
	if since := age(m.Since, p.Now); since != "" && requests != "" {
		requests += ", for " + since
	}
	return requests
}

func begins(at time.Time, p output.Paper) string {
	return "at " + at.UTC().Format("2006-01-02 15:04:05Z") + ", in " + age(p.Now, at)
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
	{name: "pod", shrinks: leastPodName, of: func(m *adviceFor, _ output.Paper) string { return m.Pod }},
	{name: "since", folds: true, of: func(m *adviceFor, p output.Paper) string { return age(m.Since, p.Now) }},
	{name: "requests", folds: true, of: func(m *adviceFor, _ output.Paper) string { return strings.Join(m.Requests, ", ") }},
	{name: "verdict", folds: true, of: func(m *adviceFor, _ output.Paper) string { return string(m.Verdict) }, colour: (*adviceFor).colour},
	{name: "node", folds: true, of: func(m *adviceFor, _ output.Paper) string { return m.Node }},
}

// table has a line for each pod, then what serves them, and who waits for what.
func (out *advised) table(p output.Paper) string {
	lines := []string{tabulate(out.Moves[:min(len(out.Moves), mostRows)], adviceColumns, false, p)}
	if more := len(out.Moves) - mostRows; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more: -o %s has them all", more, output.JSON))
	}
	lines = append(lines, p.Block("", "name up to 3 pods to see why, and what changes")...)
	if len(out.Proposals) > 0 {
		lines = append(lines, "", p.Paint("proposal", text.Bold))
	}
	for _, one := range out.Proposals[:min(len(out.Proposals), mostSums)] {
		lines = append(lines, p.Block(output.Indent, one.serves(p))...)
		for _, note := range one.Notes {
			lines = append(lines, p.Block(output.Indent+"note: ", note)...)
		}
		lines = append(lines, output.Indent+"$ "+one.Command)
	}
	if more := len(out.Proposals) - mostSums; more > 0 {
		lines = append(lines, fmt.Sprintf("%sand changes of %d more: -o %s has them all", output.Indent, more, output.JSON))
	}
	if len(out.Waiting) > 0 {
		lines = append(lines, "", tabulate(out.Waiting[:min(len(out.Waiting), mostSums)], waitingColumns, false, p))
	}
	if more := len(out.Waiting) - mostSums; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more: -o %s has them all", more, output.JSON))
	}
	return strings.Join(lines, "\n")
}

// serves says what the change gives and takes.
func (one *proposal) serves(p output.Paper) string {
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
