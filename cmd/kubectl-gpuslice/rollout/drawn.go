package rollout

import (
	"fmt"
	"reflect"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// describe says what one node would do, below the verdict on it: the GPUs before and after, what they offer, who leaves, and how long it takes.
func describe(a *api.Answer, steps bool, p output.Paper) (lines []string) {
	for i := range a.GPUs {
		lines = append(lines, drawRecut(&a.GPUs[i], p)...)
	}
	for _, f := range factsOf(a) {
		heading := ""
		if !f.speaks {
			heading = f.heading + ": "
		}
		lines = append(lines, p.Block(output.Indent+heading, f.text)...)
	}
	if !changes(a) {
		return lines
	}
	count := cli.Counted(len(a.Steps)+a.More, "step")
	if !steps {
		return append(lines, p.Block(output.Indent, count+": -v lists them")...)
	}
	lines = append(lines, output.Indent+count+":")
	for i, step := range a.Steps {
		lines = append(lines, p.Block(fmt.Sprintf("%6d  ", i+1), step)...)
	}
	if a.More > 0 {
		lines = append(lines, fmt.Sprintf("        and %d more", a.More))
	}
	return lines
}

// changes reports whether the agent has steps to take.
func changes(a *api.Answer) bool { return a != nil && len(a.Steps)+a.More > 0 }

// fact is one line about a change.
type fact struct {
	heading, text string
	speaks        bool // the text needs no heading
}

// factsOf are what a user should know of a change.
func factsOf(a *api.Answer) (out []fact) {
	add := func(heading, what string, speaks bool) {
		if what != "" {
			out = append(out, fact{heading, what, speaks})
		}
	}
	add("offers then", a.Offers, false)
	if changes(a) {
		add("pods", leavers(a), true)
		add("takes", takes(a), false)
	}
	if a.Reboot {
		add("reboot", "it takes a reboot of the node", true)
	}
	add("lost for good", lost(a), false)
	for _, what := range a.Asked {
		add("asked", what, true)
	}
	for _, what := range a.Notes {
		add("note", what, false)
	}
	return out
}

// takes says how long the change is taken to last; empty if the agent does not say.
func takes(a *api.Answer) string {
	d := show.Period(time.Duration(a.Takes))
	switch {
	case a.Takes <= 0:
		return ""
	case a.Measured:
		return d + ", the longest of the node's last changes"
	default:
		return d + " by the maintenance file's estimate: no change of the node was measured yet"
	}
}

// drawRecut draws GPUs that are alike, before and after.
func drawRecut(r *api.Recut, p output.Paper) []string {
	out := p.Block(output.Indent, captionOf(r))
	switch {
	case unchanged(r) && drawable(r):
		return append(out, output.DrawSlices(output.Indent+"stays  ", r.Slices, instances(r.Before), p))
	case drawable(r):
		return append(out, output.DrawSlices(output.Indent+"before ", r.Slices, instances(r.Before), p), output.DrawSlices(output.Indent+"after  ", r.Slices, instances(r.After), p))
	default:
		return out
	}
}

// drawable reports whether the GPUs have slices that can be drawn.
func drawable(r *api.Recut) bool { return r.Slices > 0 && !r.Before.Lost }

func unchanged(r *api.Recut) bool { return !r.AtReboot && reflect.DeepEqual(r.Before, r.After) }

// captionOf names the GPUs, and says what no drawing shows.
func captionOf(r *api.Recut) string {
	name := "GPU " + output.Ranges(r.GPUs)
	if r.Model != "" {
		name += " " + r.Model
	}
	switch {
	case r.Before.Lost:
		return name + ", fallen off the bus"
	case r.Slices == 0:
		return name + ", which cannot be cut"
	case r.AtReboot:
		return name + ", at the node's next reboot"
	default:
		return name
	}
}

// instances are those of a layout, for a drawing; nil is MIG off.
func instances(l api.Layout) []judge.Instance {
	if !l.MIG {
		return nil
	}
	out := []judge.Instance{}
	for _, i := range l.Instances {
		out = append(out, judge.Instance{Is: i.Is, At: i.At, Size: i.Size})
	}
	return out
}

// colourOf shows at a glance whether a user has to act.
func colourOf(r show.Ruling) text.Color {
	switch r {
	case show.NothingToDo, show.Begins:
		return text.FgGreen
	case show.BeginsUnsure, show.HeldUp:
		return text.FgYellow
	case show.GivesUp, show.Refused:
		return text.FgRed
	case show.NotKnown:
	}
	return text.FgHiBlack
}

// printed makes a line fit for the terminal, and colours it.
func printed(line string, p output.Paper, with ...text.Color) string {
	return p.Paint(sanitize.Lines(line), with...)
}
