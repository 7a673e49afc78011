package show

import (
	"cmp"
	_ "embed"
	"fmt"
	"html"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// formatHTML is a page without links to other files.
const formatHTML = "html"

// mostInBar is the number of characters of a name, and of names in an eighth of a bar.
const mostInBar = 40

//go:embed page.css
var pageStyle markup

// markup is HTML that is safe to show. The compiler lets no text become markup but by say: names and messages come from whoever writes objects of the cluster.
// html/template would do that too, and links every method of every type into the program, a quarter of its size.
type markup string

// say returns the text as markup. It escapes what is not printable, too.
func say(what string) markup { return markup(html.EscapeString(sanitize.Text(what))) }

// element returns an element on a line of its own. Its class may be empty.
func element(name, class markup, inside ...markup) markup {
	return inline(name, class, inside...) + "\n"
}

func inline(name, class markup, inside ...markup) markup {
	return opening(name, class, "") + joined(inside) + "</" + name + ">"
}

// opening is the start of an element. Its class and its other attribute may be empty.
func opening(name, class, attribute markup) markup {
	out := "<" + name
	if class != "" {
		out += ` class="` + class + `"`
	}
	if attribute != "" {
		out += " " + attribute
	}
	return out + ">"
}

// number is a number in a style.
func number(n int) markup { return markup(strconv.Itoa(n)) }

func joined(all []markup) markup {
	var b strings.Builder
	for _, m := range all {
		b.WriteString(string(m))
	}
	return markup(b.String())
}

// page returns the whole page. Its policy lets a browser load nothing and run nothing, should markup of others ever get into it.
func page(title markup, p paper, parts ...markup) string {
	head := markup(`<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"/>
<meta name="referrer" content="no-referrer"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
`)
	head += element("title", "", title) + element("style", "", "\n", pageStyle)
	body := element("h1", "", title) + element("p", "time", "kubectl gpuslice, ", say(p.now.UTC().Format("2006-01-02 15:04:05Z"))) + joined(parts)
	return string("<!DOCTYPE html>\n<html lang=\"en\">\n" + element("head", "", "\n", head) + element("body", "", "\n", element("main", "", "\n", body)) + "</html>\n")
}

// page has what the text has, and draws the proposals too.
func (out *advised) page(p paper) string {
	var parts []markup
	switch n := len(out.Moves); {
	case out.none != "":
		parts = append(parts, element("p", "", say(out.none)))
	case n > mostBlocks:
		parts = append(parts, out.overview(p))
	default:
		for i := range out.Moves {
			parts = append(parts, out.Moves[i].section(p))
		}
	}
	return page("Why are pods pending", p, append(parts, noted(out.Notes))...)
}

// section has all of one pod.
func (m *adviceFor) section(p paper) markup {
	var facts, drawn markup
	add := func(heading markup, what string) {
		if what != "" {
			facts += element("dt", "", heading) + element("dd", "", say(what))
		}
	}
	add("requests", m.requested(p))
	add("reason", m.Reason)
	add("the scheduler says", m.Scheduler)
	add("has to leave", listedNames(m.Leave))
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
		drawn += cutFigure(m.Node, &m.Cuts[i])
	}
	heading := element("h2", "", say(m.Pod), " ", inline("span", "verdict "+shade(m.colour()), say(string(m.Verdict))))
	return element("section", "", "\n", heading, element("dl", "", "\n", facts), drawn, pasted(m.Command))
}

// overview has a line for each pod, then what serves them, and who waits for what.
func (out *advised) overview(p paper) markup {
	said := grid(out.Moves, adviceColumns, mostRows, p) + element("p", "dim", "Name up to 3 pods to see why, and what changes.")
	if len(out.Proposals) > 0 {
		said += element("h2", "", "Proposal")
	}
	for _, one := range out.Proposals[:min(len(out.Proposals), mostSums)] {
		said += element("h3", "", say(one.serves(p)))
		for i := range one.Cuts {
			said += cutFigure(one.Node, &one.Cuts[i])
		}
		said += noted(one.Notes) + pasted(one.Command)
	}
	said += more(len(out.Proposals) - mostSums)
	if len(out.Waiting) > 0 {
		said += element("h2", "", "Who waits for what") + grid(out.Waiting, waitingColumns, mostSums, p)
	}
	return said
}

// page explains nodes one by one, or what they could have together.
func (out *fragmented) page(p paper) string {
	var parts []markup
	if out.pool {
		for _, b := range out.best() {
			said := element("h2", "", say(profileName(b.profile))) + element("p", "", say(b.says()))
			for i := range b.cuts() {
				said += cutFigure(b.on.Node, &b.room.Cuts[i])
			}
			if b.command() != "" {
				said += noted(b.on.Notes)
			}
			parts = append(parts, element("section", "", "\n", said, pasted(b.command())))
		}
		if len(parts) == 0 {
			parts = append(parts, element("p", "", noneCut))
		}
		return page("What one more device takes", p, append(parts, noted(out.Notes))...)
	}
	for i := range out.Nodes[:min(len(out.Nodes), mostRows)] {
		parts = append(parts, out.Nodes[i].section(p))
	}
	return page("What free slices can be used for", p, append(parts, more(len(out.Nodes)-mostRows), noted(out.Notes))...)
}

// section draws a node's GPUs, and says what its free slices can be used for.
func (f *nodeFragments) section(p paper) markup {
	said := element("h2", "", say(f.Node))
	for _, line := range f.summary() {
		said += element("p", "", say(line))
	}
	for i := range f.GPUs[:min(len(f.GPUs), mostGPUs)] {
		g := &f.GPUs[i]
		cells := cellsOf(g.Instances, g.Pods, g.Slices)
		said += element("figure", "", element("figcaption", "", say(saysOf(g))), element("div", "row", bar(g.Slices, cells)))
	}
	if f.Unknown == "" {
		said += grid(f.Profiles, roomColumns, mostRows, p)
	}
	return element("section", "", "\n", said)
}

// statusPage has the table of nodes, and draws the GPUs of those that the user has named.
func statusPage(views []nodeView, drawn bool, p paper) string {
	parts := []markup{grid(views, nodeColumns, mostRows, p)}
	if line := silences(views, p); line != "" {
		parts = append(parts, element("p", "bad", say(line)))
	}
	for i := range views[:min(len(views), mostRows)] {
		if v := &views[i]; drawn && v.Agent {
			parts = append(parts, v.section(p))
		}
	}
	return page("Nodes and their GPUs", p, parts...)
}

// section draws a node's GPUs, with the pods that use them.
func (v *nodeView) section(p paper) markup {
	said := element("h2", "", say(v.Node))
	if v.unhealthy() != "" {
		said += element("p", "bad", "health: ", say(v.unhealthy()+": "+v.Health.Message))
	}
	for _, remark := range v.remarks() {
		said += element("p", "", "pods: ", say(remark))
	}
	if len(v.GPUs) == 0 {
		said += element("p", "", notReported)
	}
	for i := range v.GPUs {
		g := &v.GPUs[i]
		cut := g.MIG && g.Slices > 0 && !g.Lost
		head := say(g.name(cut))
		if state := g.state(v.healthKnown()); state != "" {
			head += ", " + inline("span", shade(g.Health.colour()), say(state))
		}
		said += element("h3", "", head)
		for _, line := range g.healthLines(p) {
			said += element("p", "", say(strings.TrimPrefix(line, indent)))
		}
		if !g.Missing && (!g.Lost || len(g.Pods) > 0) {
			said += v.Pods.figure(g, cut)
		}
	}
	return element("section", "", "\n", said)
}

// figure draws a GPU that is there.
func (v podsView) figure(g *gpuView, cut bool) markup {
	if !cut {
		return element("div", "row", bar(1, []cell{{size: 1, kind: kindOf(g.Pods), name: "whole GPU", pods: v.users(g.Pods)}}))
	}
	if len(g.Instances) == 0 && g.Geometry != "" { // the status has no room for instances
		return element("p", "", say(g.Geometry))
	}
	var cells []cell
	for _, i := range g.Instances {
		c := cell{at: i.At, size: i.Size, kind: kindOf(i.Pods), name: fmt.Sprintf("%s #%d", i.Is, i.ID), pods: v.usersOf(i)}
		if i.Unhealthy != "" {
			c.kind, c.mark = "goes", say(string(i.Unhealthy))
		}
		cells = append(cells, c)
	}
	said := element("div", "row", bar(g.Slices, cells))
	if g.Fits != "" {
		said += element("p", "", say(g.room()))
	}
	if len(g.Pods) > 0 {
		said += element("p", "", "on the whole of it: ", say(listedNames(g.Pods)))
	}
	return said
}

// cutFigure draws a GPU before and after a change. What changes has a word, and a border of its own.
func cutFigure(node string, c *judge.Cut) markup {
	before, after := cellsOf(c.Before, nil, c.Slices), cellsOf(c.After, nil, c.Slices)
	has := func(all []judge.Instance, is string) bool {
		return slices.ContainsFunc(all, func(i judge.Instance) bool { return i.Is == is })
	}
	stays := func(pod string) bool {
		return slices.ContainsFunc(c.After, func(i judge.Instance) bool { return slices.Contains(i.Pods, pod) })
	}
	for n, i := range c.Before {
		switch {
		case slices.ContainsFunc(i.Pods, func(pod string) bool { return !stays(pod) }):
			before[n].kind, before[n].mark = "goes", "has to leave"
		case !has(c.After, i.Is):
			before[n].kind, before[n].mark = "goes", "goes"
		}
	}
	for n, i := range c.After {
		if !has(c.Before, i.Is) {
			after[n].kind, after[n].mark = "new", "new"
		}
	}
	row := func(when markup, cells []cell) markup {
		return element("div", "row", inline("span", "when", when), bar(c.Slices, cells))
	}
	return element("figure", "", "\n", element("figcaption", "", say(fmt.Sprintf("GPU %d of %s", c.GPU, node))), row("before", before), row("after", after))
}

// cell is a run of memory slices that belong together.
type cell struct {
	at, size   int
	kind, mark markup // the mark is a word for what becomes of it; may be empty
	name, pods string
}

// cellsOf are a GPU's instances, in their order; nil is MIG off, with the pods on all of it.
func cellsOf(instances []judge.Instance, pods []string, slots int) (out []cell) {
	if instances == nil {
		return []cell{{size: bounds(slots), kind: kindOf(pods), name: "MIG off", pods: listedNames(pods)}}
	}
	for _, i := range instances {
		profile, _, _ := strings.Cut(i.Is, "@")
		c := cell{at: i.At, size: i.Size, kind: kindOf(i.Pods), name: profile, pods: listedNames(i.Pods)}
		if len(i.Pods) == 0 {
			c.pods = "no pod"
		}
		out = append(out, c)
	}
	return out
}

func kindOf(pods []string) markup {
	if len(pods) == 0 {
		return "idle"
	}
	return "held"
}

func bounds(slots int) int { return max(1, min(slots, mostSlices)) }

// bar draws memory slices. It leaves out cells that overlap or lie outside, as picture.Slices does.
func bar(slots int, cells []cell) markup {
	slots = bounds(slots)
	slices.SortStableFunc(cells, func(a, b cell) int { return a.at - b.at })
	var inside markup
	at := 0
	free := func(to int) {
		if n := to - at; n > 0 {
			inside += across("free", at, n, number(n)+" free")
		}
	}
	for _, c := range cells {
		if c.at < at || c.size < 1 || c.size > slots-c.at {
			continue
		}
		free(c.at)
		said := inline("b", "", say(shortened(c.name, mostInBar)))
		if c.pods != "" {
			said += inline("span", "", say(shortened(c.pods, mostInBar*max(1, 8*c.size/slots))))
		}
		if c.mark != "" {
			said += inline("em", "", c.mark)
		}
		inside += across(c.kind, c.at, c.size, said)
		at = c.at + c.size
	}
	free(slots)
	return opening("div", "bar", `style="grid-template-columns:repeat(`+number(slots)+`,minmax(0,1fr))"`) + "\n" + inside + "</div>\n"
}

// across is a box that covers memory slices of a bar.
func across(class markup, at, size int, inside markup) markup {
	return opening("div", class, `style="grid-column:`+number(at+1)+"/span "+number(size)+`"`) + inside + "</div>\n"
}

// grid is a table of so many rows at most.
func grid[T any](all []T, columns []column[T], most int, p paper) markup {
	columns = shownOf(columns, false)
	var head, body markup
	for _, c := range columns {
		head += inline("th", "", say(c.name))
	}
	for i := range all[:min(len(all), most)] {
		var row markup
		for _, c := range columns {
			row += c.td(&all[i], p)
		}
		body += element("tr", "", row)
	}
	return element("div", "table", element("table", "", "\n", element("thead", "", element("tr", "", head)), element("tbody", "", "\n", body))) + more(len(all)-most)
}

// longestShort is the number of characters of a cell that stays on one line.
const longestShort = 32

// td is the cell with the name of its column, which a narrow window shows in place of the table's head.
func (c column[T]) td(v *T, p paper) markup {
	text, class := c.of(v, p), markup("")
	said := say(text)
	if utf8.RuneCountInString(text) <= longestShort {
		class = "short"
	}
	if c.colour != nil && text != "" {
		said = inline("span", shade(c.colour(v)), said)
	}
	return opening("td", class, `data-name="`+say(c.name)+`"`) + said + "</td>"
}

func more(n int) markup {
	if n <= 0 {
		return ""
	}
	return element("p", "dim", say(fmt.Sprintf("and %d more: -o %s has them all", n, formatJSON)))
}

func noted(notes []string) (said markup) {
	for _, n := range notes {
		said += element("p", "", "note: ", say(n))
	}
	return said
}

// pasted is a command that the user pastes.
func pasted(command string) markup {
	if command == "" {
		return ""
	}
	return element("pre", "", inline("code", "", say(command)))
}

var shades = map[text.Color]markup{text.FgGreen: "good", text.FgYellow: "care", text.FgRed: "bad"}

// shade is the class of a colour of the terminal.
func shade(c text.Color) markup { return cmp.Or(shades[c], "dim") }
