package output

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/nvml/picture"
)

const (
	// MostSlices bounds what is drawn of a GPU by what others have written. No GPU has more memory slices.
	MostSlices = 64
	// mostNames is the number of names in one list.
	mostNames = 10
	// mostInBar is the number of characters of a name, and of names in an eighth of a bar.
	mostInBar = 40
)

// DrawCut draws a GPU before and after a change, with the pods that have its instances.
func DrawCut(heading string, c *judge.Cut, p Paper) []string {
	out := p.Block(Indent, heading)
	return append(out, DrawSlices(Indent+"before ", c.Slices, c.Before, p), DrawSlices(Indent+"after  ", c.Slices, c.After, p))
}

// DrawSlices draws the memory slices of a GPU on a line, with the pods that have its instances; nil is MIG off.
func DrawSlices(heading string, slots int, instances []judge.Instance, p Paper) string {
	p.Width = cmp.Or(p.Width, PaperWidth)
	width := p.Width
	p.Width -= len(heading) - len(Indent)
	slots = max(1, min(slots, MostSlices))
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
	return text.Snip(heading+picture.Slices(slots, cells, p.Drawn()), width, "…")
}

// CutFigure draws a GPU before and after a change. What changes has a word, and a border of its own. Pods says whether they are known.
func CutFigure(caption string, c *judge.Cut, pods bool) Markup {
	before, after := CellsOf(c.Before, nil, c.Slices), CellsOf(c.After, nil, c.Slices)
	for _, cells := range [][]Cell{before, after} {
		for i := range cells {
			if !pods {
				cells[i].Pods = ""
			}
		}
	}
	has := func(all []judge.Instance, is string) bool {
		return slices.ContainsFunc(all, func(i judge.Instance) bool { return i.Is == is })
	}
	stays := func(pod string) bool {
		return slices.ContainsFunc(c.After, func(i judge.Instance) bool { return slices.Contains(i.Pods, pod) })
	}
	for n, i := range c.Before {
		switch {
		case slices.ContainsFunc(i.Pods, func(pod string) bool { return !stays(pod) }):
			before[n].Kind, before[n].Mark = "goes", "has to leave"
		case !has(c.After, i.Is):
			before[n].Kind, before[n].Mark = "goes", "goes"
		}
	}
	for n, i := range c.After {
		if !has(c.Before, i.Is) {
			after[n].Kind, after[n].Mark = "new", "new"
		}
	}
	row := func(when Markup, cells []Cell) Markup {
		return Element("div", "row", Inline("span", "when", when), Bar(c.Slices, cells))
	}
	return Element("figure", "", "\n", Element("figcaption", "", Say(caption)), row("before", before), row("after", after))
}

// Cell is a run of memory slices that belong together.
type Cell struct {
	At, Size   int
	Kind, Mark Markup // Mark is a word for what becomes of it; may be empty
	Name, Pods string
}

// CellsOf are a GPU's instances, in their order; nil is MIG off, with the pods on all of it.
func CellsOf(instances []judge.Instance, pods []string, slots int) (out []Cell) {
	if instances == nil {
		return []Cell{{Size: bounds(slots), Kind: KindOf(pods), Name: "MIG off", Pods: Names(pods)}}
	}
	for _, i := range instances {
		profile, _, _ := strings.Cut(i.Is, "@")
		c := Cell{At: i.At, Size: i.Size, Kind: KindOf(i.Pods), Name: profile, Pods: Names(i.Pods)}
		if len(i.Pods) == 0 {
			c.Pods = "no pod"
		}
		out = append(out, c)
	}
	return out
}

// KindOf is the class of an instance with these pods.
func KindOf(pods []string) Markup {
	if len(pods) == 0 {
		return "idle"
	}
	return "held"
}

func bounds(slots int) int { return max(1, min(slots, MostSlices)) }

// Bar draws memory slices. It leaves out cells that overlap or lie outside, as picture.Slices does.
func Bar(slots int, cells []Cell) Markup {
	slots = bounds(slots)
	slices.SortStableFunc(cells, func(a, b Cell) int { return a.At - b.At })
	var inside Markup
	at := 0
	free := func(to int) {
		if n := to - at; n > 0 {
			inside += across("free", at, n, number(n)+" free")
		}
	}
	for _, c := range cells {
		if c.At < at || c.Size < 1 || c.Size > slots-c.At {
			continue
		}
		free(c.At)
		said := Inline("b", "", Say(Shortened(c.Name, mostInBar)))
		if c.Pods != "" {
			said += Inline("span", "", Say(Shortened(c.Pods, mostInBar*max(1, 8*c.Size/slots))))
		}
		if c.Mark != "" {
			said += Inline("em", "", c.Mark)
		}
		inside += across(c.Kind, c.At, c.Size, said)
		at = c.At + c.Size
	}
	free(slots)
	return Opening("div", "bar", `style="grid-template-columns:repeat(`+number(slots)+`,minmax(0,1fr))"`) + "\n" + inside + "</div>\n"
}

// across is a box that covers memory slices of a bar.
func across(class Markup, at, size int, inside Markup) Markup {
	return Opening("div", class, `style="grid-column:`+number(at+1)+"/span "+number(size)+`"`) + inside + "</div>\n"
}

// Names joins the first names, and counts the rest.
func Names(all []string) string {
	out := strings.Join(all[:min(len(all), mostNames)], ", ")
	if more := len(all) - mostNames; more > 0 {
		out += fmt.Sprintf(" and %d more", more)
	}
	return out
}

// Ranges writes numbers as "0-2,5".
func Ranges(all []int) string {
	all = slices.Clone(all)
	slices.Sort(all)
	var parts []string
	for i := 0; i < len(all); {
		last := i
		for last+1 < len(all) && all[last+1] == all[last]+1 {
			last++
		}
		part := fmt.Sprint(all[i])
		if last > i {
			part += fmt.Sprintf("-%d", all[last])
		}
		parts, i = append(parts, part), last+1
	}
	return strings.Join(parts, ",")
}
