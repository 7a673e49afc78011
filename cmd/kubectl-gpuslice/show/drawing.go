package show

import (
	"fmt"
	"strings"

	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/nvml/picture"
)

// unwell marks, in place of the indent, a GPU or an instance that is not healthy.
const unwell = "! "

// draw draws a node's GPUs: the memory slices of each, the numbers of its instances, and the pods that use them.
func draw(v *nodeView, p output.Paper) string {
	var out []string
	out = append(out, p.Paint(p.Cut(v.Node), text.Bold))
	if v.Health != nil && v.unhealthy() != "" {
		for _, l := range p.Block("health: ", v.unhealthy()+": "+v.Health.Message) {
			out = append(out, p.Paint(l, text.FgRed))
		}
	}
	for _, remark := range v.remarks() {
		out = append(out, p.Block("pods: ", remark)...)
	}
	if len(v.GPUs) == 0 {
		out = append(out, notReported)
	}
	if line := v.shares(); line != "" {
		out = append(out, p.Block("in use: ", line)...)
	}
	for _, alike := range v.groups() {
		if len(alike) == 1 {
			out = append(out, v.Pods.gpu(alike[0], v.healthKnown(), p)...)
			continue
		}
		out = append(out, v.Pods.group(alike, v.healthKnown(), p)...)
	}
	return strings.Join(out, "\n")
}

// groups are the GPUs, those together that are cut alike and well. Pods and the numbers of instances may differ.
func (v *nodeView) groups() (out [][]*gpuView) {
	by := map[string]int{}
	for i := range v.GPUs {
		g := &v.GPUs[i]
		if g.Health != nil || g.Missing || g.Lost || len(g.Instances) == 0 && g.Geometry != "" {
			out = append(out, []*gpuView{g})
			continue
		}
		key := fmt.Sprintf("%q %t %t %d %q", g.Model, g.MIG, g.Earlier, g.Slices, g.Fits)
		for _, i := range g.Instances {
			key += fmt.Sprintf(" %q %d %d %t", i.Is, i.At, i.Size, i.Left)
		}
		at, known := by[key]
		if !known {
			at = len(out)
			by[key], out = at, append(out, nil)
		}
		out[at] = append(out[at], g)
	}
	return out
}

// shares says how many of the devices and their shares pods have; empty if that is not known, or no device is shared.
func (v *nodeView) shares() string {
	devices, used := 0, 0
	for i := range v.GPUs {
		all, _, pods := v.GPUs[i].devices()
		devices, used = devices+all, used+pods
	}
	if !v.Pods.Known || v.Offered <= devices || devices == 0 {
		return ""
	}
	return fmt.Sprintf("%d of %d devices and shares", used, v.Offered)
}

// devices counts the GPU's devices, those without a pod, and how often pods have one.
func (g *gpuView) devices() (all, free, pods int) {
	count := func(on []string, left bool) {
		if all, pods = all+1, pods+len(on); len(on) == 0 && !left {
			free++
		}
	}
	switch {
	case g.Missing || g.Lost:
	case !g.MIG:
		count(g.Pods, false)
	default:
		for _, i := range g.Instances {
			count(append(g.Pods[:len(g.Pods):len(g.Pods)], i.Pods...), i.Left)
		}
	}
	return all, free, pods
}

// group draws GPUs that are cut alike once, and lists who uses them.
func (v podsView) group(alike []*gpuView, known bool, p output.Paper) []string {
	first := alike[0]
	cut := first.MIG && first.Slices > 0
	numbers, all, free := []int{}, 0, 0
	for _, g := range alike {
		n, idle, _ := g.devices()
		numbers, all, free = append(numbers, g.Index), all+n, free+idle
	}
	head := first.titled("GPU "+output.Ranges(numbers), cut) + v.freeOf(all, free)
	if state := first.state(known); state != "" {
		head += ", " + state
	}
	out := p.Block("", head)
	if cut {
		names, _ := cells(first)
		out = append(out, p.Cut(output.Indent+picture.Slices(first.Slices, names, p.Drawn())))
	}
	for _, g := range alike {
		name := fmt.Sprintf("%sGPU %d ", output.Indent, g.Index)
		for _, i := range g.Instances {
			if len(i.Pods) > 0 {
				out = append(out, p.Block(fmt.Sprintf("%s#%-3d %s  ", name, i.ID, i.Is), strings.Join(i.Pods, ", "))...)
			}
		}
		if len(g.Pods) > 0 {
			out = append(out, p.Block(name+" ", strings.Join(g.Pods, ", "))...)
		}
	}
	if first.Fits != "" {
		out = append(out, p.Block(output.Indent+"room on each: ", first.room())...)
	}
	return out
}

// freeOf says how many devices no pod has; empty if that is not known.
func (v podsView) freeOf(all, free int) string {
	if !v.Known || all < 2 { // of one device the line below says it
		return ""
	}
	return fmt.Sprintf(", %d of %d free", free, all)
}

const notReported = "no agent has reported how the GPUs are cut"

// remarks say what a drawing lacks of the pods.
func (v *nodeView) remarks() (out []string) {
	switch {
	case !v.Pods.Known:
		out = append(out, "cannot tell who uses which instance: "+v.Pods.Why)
	case v.Pods.Why != "":
		out = append(out, v.Pods.Why)
	}
	if len(v.Pods.Asking) > 0 {
		out = append(out, "pods that request GPUs: "+strings.Join(v.Pods.Asking, ", "))
	}
	if len(v.Pods.Anywhere) > 0 {
		out = append(out, "hold devices that are not drawn: "+strings.Join(v.Pods.Anywhere, ", "))
	}
	return out
}

// gpu draws a GPU. Known says whether the agent reports its health.
func (v podsView) gpu(g *gpuView, known bool, p output.Paper) []string {
	cut := g.MIG && g.Slices > 0 && !g.Lost
	all, free, _ := g.devices()
	lines := g.headline(cut, known, v.freeOf(all, free), p)
	lines = append(lines, g.healthLines(p)...)
	if g.Missing || g.Lost && len(g.Pods) == 0 {
		return lines
	}
	switch {
	case !cut && len(g.Pods) == 0 && v.Known:
		return append(lines, output.Indent+"free")
	case !cut:
		return append(lines, p.Block(output.Indent+"used by: ", v.users(g.Pods))...)
	}
	lines = append(lines, g.slices(p)...)
	if len(g.Instances) == 0 && g.Geometry != "" { // the status has no room for instances
		return append(lines, p.Block(output.Indent, g.Geometry)...)
	}
	lines = append(lines, v.instances(g, p)...)
	if g.Fits != "" {
		lines = append(lines, p.Block(output.Indent+"room: ", g.room())...)
	}
	if len(g.Pods) > 0 {
		lines = append(lines, p.Block(output.Indent+"on the whole of it: ", strings.Join(g.Pods, ", "))...)
	}
	return lines
}

// slices draws the instances of a GPU in MIG mode at their places; nothing if not all of them are known.
func (g *gpuView) slices(p output.Paper) []string {
	names, numbers := cells(g)
	if len(names) != len(g.Instances) || len(names) == 0 && g.Geometry != "" {
		return nil
	}
	out := []string{p.Cut(output.Indent + picture.Slices(g.Slices, names, p.Drawn()))}
	if len(numbers) > 0 {
		out = append(out, p.Paint(p.Cut(output.Indent+picture.Slices(g.Slices, numbers, p.Drawn())), text.FgHiBlack))
	}
	return out
}

// room says how many memory slices of the GPU no instance has, and the largest instance that still has a place.
func (g *gpuView) room() string {
	free := g.Slices
	for _, i := range g.Instances {
		free -= i.Size
	}
	return fmt.Sprintf("%d of %d memory slices are free; the largest instance that fits: %s", max(0, free), g.Slices, g.Fits)
}

// headline names the GPU, and reports its health.
func (g *gpuView) headline(cut, known bool, free string, p output.Paper) []string {
	head, state := g.name(cut)+free, g.state(known)
	if state == "" {
		return p.Block("", head)
	}
	lines := p.Block("", head+", "+state)
	if last := len(lines) - 1; last >= 0 {
		if head, found := strings.CutSuffix(lines[last], state); found {
			lines[last] = head + p.Paint(state, g.Health.colour())
		}
	}
	return lines
}

// name names the GPU by what is known of it, and says how it is used.
func (g *gpuView) name(cut bool) string {
	switch {
	case g.Missing && g.Index < 0:
		return "GPU at " + g.PCI
	case g.Missing:
		return fmt.Sprintf("GPU %d %s at %s", g.Index, g.UUID, g.PCI)
	case g.Lost:
		return fmt.Sprintf("GPU %d %s not known", g.Index, g.UUID)
	}
	return g.titled(fmt.Sprintf("GPU %d %s", g.Index, g.UUID), cut)
}

// titled adds the model, and how it is used.
func (g *gpuView) titled(name string, cut bool) string {
	if g.Model != "" {
		name += " " + g.Model
	}
	if cut {
		name += " MIG"
	} else {
		name += " whole"
	}
	if g.Earlier {
		name += " when last seen"
	}
	return name
}

// instances draws the instances of a GPU.
func (v podsView) instances(g *gpuView, p output.Paper) []string {
	longest := 0
	for _, i := range g.Instances {
		longest = max(longest, len([]rune(i.Is)))
	}
	var lines []string
	for _, i := range g.Instances {
		lines = append(lines, v.instance(i, longest, g.Health, p)...)
	}
	return lines
}

// instance draws an instance, with the pods that use it. It marks one that is not healthy.
func (v podsView) instance(i instanceView, longest int, health *gpuHealth, p output.Paper) []string {
	margin := output.Indent
	if i.Unhealthy != "" {
		margin = unwell
	}
	entry := p.Block(fmt.Sprintf("%s#%-3d %-*s  ", margin, i.ID, longest, i.Is), v.usersOf(i))
	for n := range entry {
		switch {
		case i.Unhealthy != "":
			entry[n] = p.Paint(entry[n], health.colour())
		case len(i.Pods) > 0:
			entry[n] = p.Paint(entry[n], text.FgCyan)
		}
	}
	return entry
}

// usersOf is users of an instance. An instance that NVIDIA's DRA driver has made, and that no claim has, is not free.
func (v podsView) usersOf(i instanceView) string {
	if v.Known && i.Left && len(i.Pods) == 0 {
		return "left over: no claim has it; the driver destroys it when it starts again"
	}
	return v.users(i.Pods)
}

// users names the pods, or says that there are none, if that is known.
func (v podsView) users(pods []string) string {
	switch {
	case len(pods) > 0:
		return strings.Join(pods, ", ")
	case v.Known:
		return "free"
	default:
		return "?"
	}
}

// cells returns the GPU's instances as cells of the drawing, by name and by number.
func cells(g *gpuView) (names, numbers []picture.Cell) {
	for _, i := range g.Instances {
		profile, _, _ := strings.Cut(i.Is, "@")
		short, _, _ := strings.Cut(profile, ".")
		names = append(names, picture.Cell{At: i.At, Size: i.Size, Names: []string{profile, short}})
		number := fmt.Sprintf("#%d", i.ID)
		numbers = append(numbers, picture.Cell{At: i.At, Size: i.Size, Names: []string{number, number[1:]}})
	}
	return names, numbers
}
