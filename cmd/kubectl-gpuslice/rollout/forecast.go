package rollout

import (
	"fmt"
	"strings"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
)

// mostSections bounds the nodes of a page; programs get all.
const mostSections = 200

// forecasts are all that plan writes in a format.
type forecasts struct {
	Nodes []forecast `json:"nodes"`
	Notes []string   `json:"notes,omitempty"` // what no verdict says of the pods that leave

	counts []string // how many would change, by what is requested
	silent []string // nodes with agents that have not answered
}

// forecast is what one node would do.
type forecast struct {
	Node    string      `json:"node"`
	Request string      `json:"request"` // a label: "nvidia.com/mig.config=all-balanced"
	Ruling  string      `json:"ruling"`  // "Begins", …
	Verdict string      `json:"verdict"` // the ruling for users, with its reason
	Answer  *api.Answer `json:"answer,omitempty"`

	ruling show.Ruling
}

func (out *forecasts) add(p *plans) {
	for _, a := range p.Nodes {
		v := p.verdict(a)
		out.Nodes = append(out.Nodes, forecast{a.Name, p.target.String(), v.Ruling.String(), v.String(), a.Answer, v.Ruling})
	}
	out.Notes, out.counts, out.silent = append(out.Notes, p.notes...), append(out.counts, p.counted()), append(out.silent, p.silentNodes()...)
}

// text returns the forecasts in the format.
func (out *forecasts) text(format string, p output.Paper) (string, error) {
	if format == output.HTML {
		return out.page(p.Sheet()), nil
	}
	return output.ForPrograms(format, out)
}

// page has a section for nodes with the same forecast.
func (out *forecasts) page(p output.Paper) string {
	var parts []output.Markup
	for _, count := range out.counts {
		parts = append(parts, output.Element("p", "", output.Say(count)))
	}
	var sections []output.Markup // without their headings
	headings := map[output.Markup]*forecast{}
	names := map[output.Markup][]string{}
	for i := range out.Nodes {
		f := &out.Nodes[i]
		s := f.section()
		if headings[s] == nil {
			headings[s], sections = f, append(sections, s)
		}
		names[s] = append(names[s], f.Node)
	}
	for _, s := range sections[:min(len(sections), mostSections)] {
		badge := output.Inline("span", "verdict "+output.Shade(colourOf(headings[s].ruling)), output.Say(headings[s].badge()))
		parts = append(parts, output.Element("section", "", "\n", output.Element("h2", "", output.Say(strings.Join(names[s], ", ")), " ", badge), s))
	}
	if more := len(sections) - mostSections; more > 0 {
		parts = append(parts, output.Element("p", "dim", output.Say(fmt.Sprintf("and %d more: -o %s has them all", more, output.JSON))))
	}
	if len(out.silent) > 0 {
		parts = append(parts, output.Element("p", "", "To see whether an agent runs there:"), output.Pasted(cluster.PodsOfAgents(out.silent...)))
	}
	return output.Page("What the nodes would do", p, append(parts, output.Noted(out.Notes))...)
}

// section has all of one node but its name.
func (f *forecast) section() output.Markup {
	facts := []output.Markup{"\n"}
	add := func(heading output.Markup, what string) {
		if what != "" {
			facts = append(facts, output.Element("dt", "", heading), output.Element("dd", "", output.Say(what)))
		}
	}
	add("for", f.Request)
	add("verdict", f.Verdict)
	if f.Answer == nil {
		return output.Element("dl", "", facts...)
	}
	var drawn output.Markup
	for i := range f.Answer.GPUs {
		drawn += recutFigure(&f.Answer.GPUs[i])
	}
	for _, said := range factsOf(f.Answer) {
		add(output.Markup(said.heading), said.text)
	}
	return output.Element("dl", "", facts...) + drawn + steps(f.Answer)
}

// recutFigure draws GPUs that are alike, before and after.
func recutFigure(r *api.Recut) output.Markup {
	if !drawable(r) {
		return output.Element("p", "", output.Say(captionOf(r)))
	}
	return output.CutFigure(captionOf(r), &judge.Cut{Slices: r.Slices, Before: instances(r.Before), After: instances(r.After)}, false)
}

// steps lists the steps in their order.
func steps(a *api.Answer) output.Markup {
	if len(a.Steps) == 0 {
		return ""
	}
	items := []output.Markup{"\n"}
	for _, step := range a.Steps {
		items = append(items, output.Element("li", "", output.Say(step)))
	}
	said := output.Element("ol", "", items...)
	if a.More > 0 {
		said += output.Element("p", "dim", output.Say(fmt.Sprintf("and %d more", a.More)))
	}
	return output.Element("h3", "", "Steps") + said
}

// badge is the ruling in a word or two.
func (f *forecast) badge() string {
	return map[show.Ruling]string{
		show.NothingToDo: "nothing to do", show.Begins: "begins", show.BeginsUnsure: "begins, and may not end", show.GivesUp: "gives up",
		show.HeldUp: "held up", show.Refused: "refused", show.NotKnown: "not known",
	}[f.ruling]
}
