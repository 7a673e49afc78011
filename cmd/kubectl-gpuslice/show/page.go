package show

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
)

// page has what the text has, and draws the proposals too.
func (out *advised) page(p output.Paper) string {
	var parts []output.Markup
	switch n := len(out.Moves); {
	case out.none != "":
		parts = append(parts, output.Element("p", "", output.Say(out.none)))
	case n > mostBlocks:
		parts = append(parts, out.overview(p))
	default:
		for i := range out.Moves {
			parts = append(parts, out.Moves[i].section(p))
		}
	}
	return output.Page("Why are pods pending", p, append(parts, output.Noted(out.Notes))...)
}

// section has all of one pod.
func (m *adviceFor) section(p output.Paper) output.Markup {
	var facts, drawn output.Markup
	add := func(heading output.Markup, what string) {
		if what != "" {
			facts += output.Element("dt", "", heading) + output.Element("dd", "", output.Say(what))
		}
	}
	add("requests", m.requested(p))
	add("reason", m.Reason)
	add("the scheduler says", m.Scheduler)
	add("has to leave", output.Names(m.Leave))
	for _, b := range m.Budgets {
		add("but", b)
	}
	for _, n := range m.Notes {
		add("note", n)
	}
	if !m.Begins.IsZero() {
		add("may begin", begins(m.Begins, p))
	}
	for i := range m.Cuts {
		drawn += output.CutFigure(gpuOf(m.Node, &m.Cuts[i]), &m.Cuts[i], true)
	}
	heading := output.Element("h2", "", output.Say(m.Pod), " ", output.Inline("span", "verdict "+output.Shade(m.colour()), output.Say(string(m.Verdict))))
	return output.Element("section", "", "\n", heading, output.Element("dl", "", "\n", facts), drawn, output.Pasted(m.Command))
}

// overview has a line for each pod, then what serves them, and who waits for what.
func (out *advised) overview(p output.Paper) output.Markup {
	said := grid(out.Moves, adviceColumns, mostRows, p) + output.Element("p", "dim", "Name up to 3 pods to see why, and what changes.")
	if len(out.Proposals) > 0 {
		said += output.Element("h2", "", "Proposal")
	}
	for _, one := range out.Proposals[:min(len(out.Proposals), mostSums)] {
		said += output.Element("h3", "", output.Say(one.serves(p)))
		for i := range one.Cuts {
			said += output.CutFigure(gpuOf(one.Node, &one.Cuts[i]), &one.Cuts[i], true)
		}
		said += output.Noted(one.Notes) + output.Pasted(one.Command)
	}
	said += more(len(out.Proposals) - mostSums)
	if len(out.Waiting) > 0 {
		said += output.Element("h2", "", "Who waits for what") + grid(out.Waiting, waitingColumns, mostSums, p)
	}
	return said
}

// page explains nodes one by one, or what they could have together.
func (out *fragmented) page(p output.Paper) string {
	var parts []output.Markup
	if out.pool {
		for _, b := range out.best() {
			said := output.Element("h2", "", output.Say(profileName(b.profile))) + output.Element("p", "", output.Say(b.says()))
			for i := range b.cuts() {
				said += output.CutFigure(gpuOf(b.on.Node, &b.room.Cuts[i]), &b.room.Cuts[i], true)
			}
			if b.command() != "" {
				said += output.Noted(b.on.Notes)
			}
			parts = append(parts, output.Element("section", "", "\n", said, output.Pasted(b.command())))
		}
		if len(parts) == 0 {
			parts = append(parts, output.Element("p", "", noneCut))
		}
		return output.Page("What one more device takes", p, append(parts, output.Noted(out.Notes))...)
	}
	for i := range out.Nodes[:min(len(out.Nodes), mostRows)] {
		parts = append(parts, out.Nodes[i].section(p))
	}
	return output.Page("What free slices can be used for", p, append(parts, more(len(out.Nodes)-mostRows), output.Noted(out.Notes))...)
}

// section draws a node's GPUs, and says what its free slices can be used for.
func (f *nodeFragments) section(p output.Paper) output.Markup {
	said := output.Element("h2", "", output.Say(f.Node))
	for _, line := range f.summary() {
		said += output.Element("p", "", output.Say(line))
	}
	for i := range f.GPUs[:min(len(f.GPUs), mostGPUs)] {
		g := &f.GPUs[i]
		cells := output.CellsOf(g.Instances, g.Pods, g.Slices)
		said += output.Element("figure", "", output.Element("figcaption", "", output.Say(saysOf(g))), output.Element("div", "row", output.Bar(g.Slices, cells)))
	}
	if f.Unknown == "" {
		said += grid(f.Profiles, roomColumns, mostRows, p)
	}
	return output.Element("section", "", "\n", said)
}

// statusPage has the table of nodes, and draws the GPUs of those that the user has named.
func statusPage(views []nodeView, drawn bool, p output.Paper) string {
	parts := []output.Markup{grid(views, nodeColumns, mostRows, p)}
	if line := silences(views, p); line != "" {
		parts = append(parts, output.Element("p", "bad", output.Say(line)))
	}
	for i := range views[:min(len(views), mostRows)] {
		if v := &views[i]; drawn && v.Agent {
			parts = append(parts, v.section(p))
		}
	}
	return output.Page("Nodes and their GPUs", p, parts...)
}

// section draws a node's GPUs, with the pods that use them.
func (v *nodeView) section(p output.Paper) output.Markup {
	said := output.Element("h2", "", output.Say(v.Node))
	if v.unhealthy() != "" {
		said += output.Element("p", "bad", "health: ", output.Say(v.unhealthy()+": "+v.Health.Message))
	}
	for _, remark := range v.remarks() {
		said += output.Element("p", "", "pods: ", output.Say(remark))
	}
	if len(v.GPUs) == 0 {
		said += output.Element("p", "", notReported)
	}
	for i := range v.GPUs {
		g := &v.GPUs[i]
		cut := g.MIG && g.Slices > 0 && !g.Lost
		head := output.Say(g.name(cut))
		if state := g.state(v.healthKnown()); state != "" {
			head += ", " + output.Inline("span", output.Shade(g.Health.colour()), output.Say(state))
		}
		said += output.Element("h3", "", head)
		for _, line := range g.healthLines(p) {
			said += output.Element("p", "", output.Say(strings.TrimPrefix(line, output.Indent)))
		}
		if !g.Missing && (!g.Lost || len(g.Pods) > 0) {
			said += v.Pods.figure(g, cut)
		}
	}
	return output.Element("section", "", "\n", said)
}

// figure draws a GPU that is there.
func (v podsView) figure(g *gpuView, cut bool) output.Markup {
	if !cut {
		return output.Element("div", "row", output.Bar(1, []output.Cell{{Size: 1, Kind: output.KindOf(g.Pods), Name: "whole GPU", Pods: v.users(g.Pods)}}))
	}
	if len(g.Instances) == 0 && g.Geometry != "" { // the status has no room for instances
		return output.Element("p", "", output.Say(g.Geometry))
	}
	var cells []output.Cell
	for _, i := range g.Instances {
		c := output.Cell{At: i.At, Size: i.Size, Kind: output.KindOf(i.Pods), Name: fmt.Sprintf("%s #%d", i.Is, i.ID), Pods: v.usersOf(i)}
		if i.Unhealthy != "" {
			c.Kind, c.Mark = "goes", output.Say(string(i.Unhealthy))
		}
		cells = append(cells, c)
	}
	said := output.Element("div", "row", output.Bar(g.Slices, cells))
	if g.Fits != "" {
		said += output.Element("p", "", output.Say(g.room()))
	}
	if len(g.Pods) > 0 {
		said += output.Element("p", "", "on the whole of it: ", output.Say(output.Names(g.Pods)))
	}
	return said
}

// grid is a table of so many rows at most.
func grid[T any](all []T, columns []column[T], most int, p output.Paper) output.Markup {
	columns = shownOf(columns, false)
	var head, body output.Markup
	for _, c := range columns {
		head += output.Inline("th", "", output.Say(c.name))
	}
	for i := range all[:min(len(all), most)] {
		var row output.Markup
		for _, c := range columns {
			row += c.td(&all[i], p)
		}
		body += output.Element("tr", "", row)
	}
	return output.Element("div", "table", output.Element("table", "", "\n", output.Element("thead", "", output.Element("tr", "", head)), output.Element("tbody", "", "\n", body))) + more(len(all)-most)
}

// longestShort is the number of characters of a cell that stays on one line.
const longestShort = 32

// td is the cell with the name of its column, which a narrow window shows in place of the table's head.
func (c column[T]) td(v *T, p output.Paper) output.Markup {
	text, class := c.of(v, p), output.Markup("")
	said := output.Say(text)
	if utf8.RuneCountInString(text) <= longestShort {
		class = "short"
	}
	if c.colour != nil && text != "" {
		said = output.Inline("span", output.Shade(c.colour(v)), said)
	}
	return output.Opening("td", class, `data-name="`+output.Say(c.name)+`"`) + said + "</td>"
}

func more(n int) output.Markup {
	if n <= 0 {
		return ""
	}
	return output.Element("p", "dim", output.Say(fmt.Sprintf("and %d more: -o %s has them all", n, output.JSON)))
}
