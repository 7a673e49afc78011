package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/mattn/go-runewidth"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/cli"
)

// mostListed blockers are named in a table; the condition has them all.
const mostListed = 2

// paper is what a view is written on.
type paper struct {
	width  int // columns; 0 if there is no end
	colour bool
	now    time.Time
}

// paint colours a text, where there is colour.
func (p paper) paint(what string, with ...text.Color) string {
	if !p.colour || what == "" {
		return what
	}
	return text.Colors(with).Sprint(what)
}

// column is one of the table.
type column struct {
	name string
	wide bool // only with -o wide
	fold bool // goes below the node where the table is wider than the terminal
	of   func(v *nodeView, p paper) string
}

var columns = []column{
	{name: "node", of: func(v *nodeView, _ paper) string { return v.Node }},
	{name: "asked for", of: func(v *nodeView, _ paper) string { return v.AskedFor }},
	{name: "phase", of: func(v *nodeView, _ paper) string { return string(v.Phase) }},
	{name: "reason", of: func(v *nodeView, _ paper) string {
		if !v.Agent {
			return "no agent"
		}
		return string(v.Reason)
	}},
	{name: "since", of: func(v *nodeView, p paper) string { return age(v.Since, p.now) }},
	{name: "heard", wide: true, fold: true, of: func(v *nodeView, p paper) string { return age(v.Heard, p.now) }},
	{name: "health", wide: true, fold: true, of: func(v *nodeView, _ paper) string {
		if v.Health == nil {
			return ""
		}
		return cmp.Or(v.unhealthy(), "well")
	}},
	{name: "gpus", wide: true, fold: true, of: func(v *nodeView, _ paper) string {
		switch n := v.instances(); {
		case len(v.GPUs) == 0:
			return ""
		case n == 0:
			return cli.Counted(len(v.GPUs), "GPU")
		default:
			return fmt.Sprintf("%s, %s", cli.Counted(len(v.GPUs), "GPU"), cli.Counted(n, "instance"))
		}
	}},
	{name: "capacity", fold: true, of: func(v *nodeView, _ paper) string { return v.Capacity }},
	{name: "blockers", fold: true, of: blockers},
}

func age(since, now time.Time) string {
	if since.IsZero() {
		return ""
	}
	return duration.HumanDuration(max(0, now.Sub(since)))
}

// blockers are what is in the way, the gravest first.
func blockers(v *nodeView, _ paper) string {
	listed := v.Blockers
	if more := len(listed) - mostListed; more > 0 {
		listed = append(listed[:mostListed:mostListed], "and "+cli.Counted(more, "other"))
	}
	if !v.Begins.IsZero() {
		listed = append([]string{"begins at " + v.Begins.Format("2006-01-02 15:04:05Z")}, listed...)
	}
	if v.Held != nil {
		listed = append([]string{"held: " + *v.Held}, listed...)
	}
	if what := v.unhealthy(); what != "" {
		listed = append([]string{"GPU health: " + what}, listed...)
	}
	return strings.Join(listed, "; ")
}

// tabulate writes a line for each node. Where that is wider than the paper, the last columns go below each node, in lines of their own.
func tabulate(views []nodeView, wide bool, p paper) string {
	shown := slices.DeleteFunc(slices.Clone(columns), func(c column) bool { return c.wide && !wide })
	var folded []column
	lines := rows(views, shown, p)
	for p.width > 0 && widest(lines) > p.width {
		last := len(shown) - 1
		if !shown[last].fold {
			break
		}
		folded = append([]column{shown[last]}, folded...)
		shown = shown[:last]
		lines = rows(views, shown, p)
	}
	out := []string{p.cut(lines[0])}
	for i, v := range views {
		out = append(out, p.cut(lines[i+1]))
		for _, c := range folded {
			if cell := c.of(&v, p); cell != "" {
				out = append(out, p.block("  "+c.name+": ", cell)...)
			}
		}
	}
	return strings.Join(out, "\n")
}

// rows are the lines of a table, its header first.
func rows(views []nodeView, shown []column, p paper) []string {
	w := table.NewWriter()
	w.SetStyle(table.StyleLight)
	w.Style().Options = table.OptionsNoBordersAndSeparators
	w.Style().Format.Header = text.FormatUpper
	w.Style().Box.PaddingLeft, w.Style().Box.PaddingRight = "", "   "
	header := table.Row{}
	for _, c := range shown {
		header = append(header, c.name)
	}
	w.AppendHeader(header)
	for i := range views {
		row := table.Row{}
		for _, c := range shown {
			cell := c.of(&views[i], p)
			if c.name == "reason" || c.name == "phase" {
				cell = p.paint(cell, views[i].colour())
			}
			row = append(row, cell)
		}
		w.AppendRow(row)
	}
	lines := strings.Split(w.Render(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return lines
}

// colour tells at a glance whether somebody has to look.
func (v nodeView) colour() text.Color {
	switch {
	case v.Phase == api.PhaseStalled || v.Phase == api.PhaseRollingBack:
		return text.FgRed
	case v.Ready == corev1.ConditionTrue:
		return text.FgGreen
	case !v.Agent:
		return text.FgHiBlack
	default:
		return text.FgYellow
	}
}

func widest(lines []string) int {
	n := 0
	for _, l := range lines {
		n = max(n, text.StringWidthWithoutEscSequences(l))
	}
	return n
}

// block is a text of several lines of the paper's width, the first after a heading, the others below its beginning. A word that is longer
// than a line is cut.
func (p paper) block(heading, what string) []string {
	if p.width == 0 {
		return []string{heading + what}
	}
	lines := strings.Split(wrapped(heading, what, p.width), "\n")
	for i := range lines {
		lines[i] = runewidth.Truncate(lines[i], p.width, "…")
	}
	return lines
}
