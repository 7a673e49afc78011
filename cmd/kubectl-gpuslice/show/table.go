package show

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
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
)

// mostListed is how many blockers a table names; the condition has them all.
const mostListed = 2

// column is a column of a table.
type column[T any] struct {
	name    string
	wide    bool // only with -o wide
	folds   bool // goes below the row if the table is wider than the terminal
	shrinks int  // characters to which it is cut before other columns go below; 0 if it is not cut
	of      func(v *T, p output.Paper) string
	colour  func(v *T) text.Color // may be nil
}

// cell returns the text of the row in the column, in its colour.
func (c column[T]) cell(v *T, p output.Paper) string {
	said := c.of(v, p)
	if c.colour == nil {
		return said
	}
	return p.Paint(said, c.colour(v))
}

// below returns the cell in lines of its own.
func (c column[T]) below(v *T, p output.Paper) []string {
	said := c.of(v, p)
	if said == "" {
		return nil
	}
	heading := "  " + c.name + ": "
	lines := p.Block(heading, said)
	for i, line := range lines {
		if c.colour != nil && len(line) > len(heading) {
			lines[i] = line[:len(heading)] + p.Paint(line[len(heading):], c.colour(v))
		}
	}
	return lines
}

var nodeColumns = []column[nodeView]{
	{name: "node", of: func(v *nodeView, _ output.Paper) string { return v.Node }},
	{name: "asked for", folds: true, of: func(v *nodeView, _ output.Paper) string { return v.AskedFor }},
	{name: "phase", folds: true, of: func(v *nodeView, _ output.Paper) string { return string(v.Phase) }, colour: (*nodeView).colour},
	{name: "reason", folds: true, of: reason, colour: (*nodeView).colour},
	{name: "since", folds: true, of: func(v *nodeView, p output.Paper) string {
		if v.Silent || v.NotSeen { // it is that of the reason that was
			return ""
		}
		return age(v.Since, p.Now)
	}},
	{name: "heard", wide: true, folds: true, of: func(v *nodeView, p output.Paper) string { return age(v.Heard, p.Now) }},
	{name: "health", wide: true, folds: true, of: func(v *nodeView, _ output.Paper) string {
		if v.Health == nil {
			return ""
		}
		return cmp.Or(v.unhealthy(), "well")
	}},
	{name: "gpus", wide: true, folds: true, of: func(v *nodeView, _ output.Paper) string {
		if len(v.GPUs) == 0 {
			return ""
		}
		missing, lost := v.absent()
		out := cli.Counted(len(v.GPUs)-missing-lost, "GPU")
		if n := v.instances(); n > 0 {
			out += ", " + cli.Counted(n, "instance")
		}
		if missing > 0 {
			out += fmt.Sprintf(", %d missing", missing)
		}
		if lost > 0 {
			out += fmt.Sprintf(", %d lost", lost)
		}
		return out
	}},
	{name: "capacity", folds: true, of: capacity},
	{name: "blockers", folds: true, of: blockers},
}

// capacity is what kubelet advertises, and who allocates the GPUs where NVIDIA's DRA driver has a part in it.
func capacity(v *nodeView, _ output.Paper) string {
	if v.Owner == api.OwnerNone || v.Capacity == "" {
		return cmp.Or(string(v.Owner), v.Capacity)
	}
	return v.Capacity + " (" + string(v.Owner) + ")"
}

// In place of a reason, for a node without an answer to its request.
const (
	agentSilent = "AgentSilent" // the agent does not run, or cannot write
	notSeenYet  = "NotSeenYet"  // the agent has not answered the labels' present request
)

// reason is the reason of the agent's report, and who else keeps pods off the node. If the report answers another request, it says so instead.
func reason(v *nodeView, p output.Paper) string {
	said := string(v.Reason)
	switch {
	case !v.Agent:
		said = "no agent"
	case v.Silent:
		said = fmt.Sprintf("%s (%s)", agentSilent, age(v.Heard, p.Now))
	case v.NotSeen:
		said = notSeenYet
	}
	if v.Cordon == nil {
		return said
	}
	return said + ", " + cluster.Cordoned(v.Cordon, p.Now)
}

// silences names the agents that are silent, in lines for below the table; empty if none is.
func silences(views []nodeView, p output.Paper) string {
	var silent []string
	heard := p.Now
	for i := range views {
		if v := &views[i]; v.Silent {
			silent = append(silent, v.Node)
			if v.Heard.Before(heard) {
				heard = v.Heard
			}
		}
	}
	line := cluster.SilentAgents(silent, age(heard, p.Now))
	if line == "" {
		return ""
	}
	lines := p.Block("", line)
	for i := range lines {
		lines[i] = p.Paint(lines[i], text.FgRed)
	}
	return strings.Join(lines, "\n")
}

func age(since, now time.Time) string {
	if since.IsZero() {
		return ""
	}
	return duration.HumanDuration(max(0, now.Sub(since)))
}

// blockers lists what is in the way, the gravest first.
func blockers(v *nodeView, _ output.Paper) string {
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

// tabulate writes a line for each row. If that is wider than the paper, it cuts long names, and if that is not enough, it writes the last columns
// below each row, in lines of their own.
func tabulate[T any](all []T, columns []column[T], wide bool, p output.Paper) string {
	shown := shownOf(columns, wide)
	var folded []column[T]
	lines := rows(all, shown, p, 0)
	for p.Width > 0 && widest(lines) > p.Width {
		if narrow := rows(all, shown, p, widest(lines)-p.Width); widest(narrow) <= p.Width && !p.Whole {
			lines = narrow
			break
		}
		last := len(shown) - 1
		if !shown[last].folds {
			break
		}
		folded = append([]column[T]{shown[last]}, folded...)
		shown = shown[:last]
		lines = rows(all, shown, p, 0)
	}
	out := []string{p.Cut(lines[0])}
	for i := range all {
		out = append(out, p.Cut(lines[i+1]))
		for _, c := range folded {
			out = append(out, c.below(&all[i], p)...)
		}
	}
	return strings.Join(out, "\n")
}

// shownOf are the columns of the format.
func shownOf[T any](columns []column[T], wide bool) []column[T] {
	return slices.DeleteFunc(slices.Clone(columns), func(c column[T]) bool { return c.wide && !wide })
}

// rows returns the lines of a table, its header first. Excess is by how many characters the table has to be narrower than it would be.
func rows[T any](all []T, shown []column[T], p output.Paper, excess int) []string {
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
	for i := range all {
		row := table.Row{}
		for _, c := range shown {
			row = append(row, c.cell(&all[i], p))
		}
		w.AppendRow(row)
	}
	if excess > 0 {
		w.SetColumnConfigs(narrower(all, shown, p, excess))
	}
	lines := strings.Split(w.Render(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return lines
}

// narrower cuts the columns that shrink, so that the table is narrower by excess characters, if that is possible.
func narrower[T any](all []T, shown []column[T], p output.Paper, excess int) []table.ColumnConfig {
	var out []table.ColumnConfig
	for i, c := range shown {
		if c.shrinks == 0 {
			continue
		}
		width := 0
		for n := range all {
			width = max(width, runewidth.StringWidth(c.of(&all[n], p)))
		}
		out = append(out, table.ColumnConfig{Number: i + 1, WidthMax: max(c.shrinks, width-excess), WidthMaxEnforcer: output.Shortened})
	}
	return out
}

// colour shows at a glance whether a user has to act.
func (v *nodeView) colour() text.Color {
	switch {
	case v.Silent:
		return text.FgRed
	case v.NotSeen:
		return text.FgYellow
	case v.Phase == api.PhaseStalled || v.Phase == api.PhaseRollingBack:
		return text.FgRed
	case v.Ready == corev1.ConditionTrue && v.Cordon == nil:
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
