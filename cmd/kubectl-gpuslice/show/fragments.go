package show

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/text"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// fragmented is what advise --explain and --defrag print.
type fragmented struct {
	Nodes []nodeFragments `json:"nodes"`
	Notes []string        `json:"notes,omitempty"`

	pool bool // of all nodes together
}

// nodeFragments are those of a node, with the commands.
type nodeFragments struct {
	judge.Fragments
	Commands map[string]string `json:"commands,omitempty"` // by profile, for those of which the node has none free
	Notes    []string          `json:"notes,omitempty"`    // on each of the commands
}

// fragments explains the free slices of nodes.
func (a *advice) fragments(ctx context.Context, client kube.Interface) (*fragmented, error) {
	c, err := judge.ReadFor(ctx, client, func(p *corev1.Pod) bool { return p.Spec.NodeName != "" })
	if err != nil {
		return nil, err
	}
	nodes, err := a.pick(c.Nodes)
	if err != nil {
		return nil, err
	}
	var seen, others advised
	q := judge.Question{Cluster: c, All: true, Now: a.now, Status: func(n *corev1.Node) (api.Status, string) {
		if !slices.Contains(nodes, n) {
			return others.statusOf(a.now)(n)
		}
		return seen.statusOf(a.now)(n)
	}}
	for i := range c.Pods {
		if isPending(&c.Pods[i]) {
			q.Pending = append(q.Pending, c.Pods[i])
		}
	}
	out := &fragmented{pool: a.defrag}
	var unknown []string // why, of nodes that no other note names
	for i, f := range judge.Explain(q, nodes) {
		one := nodeFragments{Fragments: f, Commands: map[string]string{}}
		one.sanitize()
		for _, p := range one.Profiles {
			m := adviceFor{Move: judge.Move{Node: f.Node, Request: p.Request}}
			if m.command(nodes[i]); m.Command != "" && len(p.Cuts) > 0 {
				one.Commands[p.Profile], one.Notes = m.Command, bounded(m.about)
			}
		}
		if f.Unknown != "" && a.defrag && !slices.Contains(slices.Concat(seen.silent, seen.blind), f.Node) {
			unknown = append(unknown, fmt.Sprintf("%s (%s)", one.Node, one.Unknown))
		}
		out.Nodes = append(out.Nodes, one)
	}
	seen.noteAgents(a.now)
	if len(unknown) > 0 {
		seen.note("nothing is known of these nodes: %s", sanitize.Listed(unknown))
	}
	out.Notes = seen.Notes
	return out, nil
}

// sanitize makes the texts fit to be shown: any user who can write a node can write its status.
func (f *nodeFragments) sanitize() {
	f.Node, f.Unknown = sanitize.Cut(f.Node, longestPod), sanitize.Message(f.Unknown, sanitize.Longest)
	for i := range f.GPUs {
		g := &f.GPUs[i]
		g.Largest, g.Instances, g.Pods = sanitize.Cut(g.Largest, cluster.LongestWord), drawable(g.Instances), names(g.Pods)
	}
	for i := range f.Profiles {
		r := &f.Profiles[i]
		r.Profile, r.Leave, r.Cuts = sanitize.Cut(r.Profile, cluster.LongestWord), names(r.Leave), drawableCuts(r.Cuts)
	}
}

// pick returns the nodes that the user names or selects. Without names and selector it returns all nodes with an agent's report.
func (a *advice) pick(all []corev1.Node) (out []*corev1.Node, err error) {
	selector, err := labels.Parse(a.selector)
	if err != nil {
		return nil, fmt.Errorf("reading the selector %q: %w", a.selector, err)
	}
	named := map[string]bool{}
	for _, name := range a.names {
		named[strings.TrimPrefix(name, "node/")] = true
	}
	for i := range all {
		n := &all[i]
		switch {
		case len(named) > 0 && !named[n.Name], !selector.Matches(labels.Set(n.Labels)):
		case len(named) > 0 || a.selector != "" || !cluster.ReportOf(n).None():
			out = append(out, n)
			delete(named, n.Name)
		}
		if len(named) == 0 && len(a.names) > 0 {
			break
		}
	}
	if len(named) > 0 {
		return nil, fmt.Errorf("there is no node %s; see kubectl get nodes", sanitize.Listed(slices.Sorted(maps.Keys(named))))
	}
	if len(out) == 0 {
		return nil, errors.New("no agent has ever reported on any of these nodes")
	}
	slices.SortFunc(out, func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// text returns it in the format of the flag.
func (out *fragmented) text(format string, p output.Paper) (string, error) {
	switch format {
	case output.JSON, output.YAML:
		return output.ForPrograms(format, out)
	case output.HTML:
		return out.page(p.Sheet()), nil
	}
	p.Whole, p.Width = p.Width == 0, cmp.Or(p.Width, output.PaperWidth)
	var parts []string
	if out.pool {
		parts = append(parts, strings.Join(out.smallest(p), "\n"))
	} else {
		for i := range out.Nodes {
			parts = append(parts, strings.Join(out.Nodes[i].explain(p), "\n"))
		}
	}
	for _, note := range out.Notes {
		parts = append(parts, strings.Join(p.Block("note: ", note), "\n"))
	}
	return strings.Join(parts, "\n\n") + "\n", nil
}

// verdict is always nil: an explanation has no exit code of its own.
func (out *fragmented) verdict() error { return nil }

// explain draws a node's GPUs, and says what its free slices can be used for.
func (f *nodeFragments) explain(p output.Paper) []string {
	out := []string{p.Cut(p.Paint(f.Node, text.Bold))}
	if f.Unknown != "" {
		return append(out, p.Block(output.Indent, f.Unknown)...)
	}
	for _, line := range f.summary() {
		out = append(out, p.Block(output.Indent, line)...)
	}
	for i := range f.GPUs {
		g := &f.GPUs[i]
		out = append(out, p.Block(output.Indent, saysOf(g))...)
		if g.Instances != nil {
			out = append(out, output.DrawSlices(output.Indent, g.Slices, g.Instances, p))
		}
	}
	return append(out, "", tabulate(f.Profiles, roomColumns, false, p))
}

// summary says what is free on the node, or why that is not known.
func (f *nodeFragments) summary() []string {
	if f.Unknown != "" {
		return []string{f.Unknown}
	}
	free, all, lost := 0, 0, 0
	for _, g := range f.GPUs {
		free, all, lost = free+g.Free, all+g.Slices, lost+g.Lost
	}
	said := []string{fmt.Sprintf("memory slices: %d of %d free", free, all)}
	if lost > 0 {
		said[0] += fmt.Sprintf("; %d of these would be left over if each GPU had the largest instance that fits", lost)
	}
	if f.Dynamic {
		said = append(said, "NVIDIA's DRA driver cuts these GPUs for claims")
	}
	return said
}

// saysOf says what of a GPU is free, and what fits.
func saysOf(g *judge.Shares) string {
	fits := "nothing more fits"
	switch {
	case len(g.Pods) > 0:
		fits = output.Names(g.Pods) + " has all of it"
	case g.Largest != "":
		fits = "the largest instance that fits is " + g.Largest
	}
	return fmt.Sprintf("GPU %d: %d of %d free; %s", g.GPU, g.Free, g.Slices, fits)
}

var roomColumns = []column[judge.HasRoom]{
	{name: "profile", of: func(r *judge.HasRoom, _ output.Paper) string { return profileName(r.Profile) }},
	{name: "free", of: func(r *judge.HasRoom, _ output.Paper) string { return fmt.Sprint(r.Idle) }},
	{name: "possible", of: func(r *judge.HasRoom, _ output.Paper) string { return fmt.Sprint(r.Possible) }},
	{name: "for one would have to leave", folds: true, of: func(r *judge.HasRoom, _ output.Paper) string { return leavers(r) }},
}

// leavers are the fewest pods that would have to leave for one device.
func leavers(r *judge.HasRoom) string {
	if len(r.Leave) == 0 {
		return ""
	}
	return fmt.Sprintf("%s (%s)", output.Names(r.Leave), cli.Counted(r.Lost, "slice"))
}

func profileName(name string) string {
	if name == demand.Whole {
		return "whole GPU"
	}
	return name
}

// bestRoom is where the nodes together could have one more device of a profile at the least cost.
type bestRoom struct {
	profile string
	free    int
	room    *judge.HasRoom // nil if none could be made
	on      *nodeFragments
}

// best finds that for each profile, in the order of the nodes.
func (out *fragmented) best() []*bestRoom {
	var all []*bestRoom
	by := map[string]*bestRoom{}
	for i := range out.Nodes {
		f := &out.Nodes[i]
		for n := range f.Profiles {
			r := &f.Profiles[n]
			b := by[r.Profile]
			if b == nil {
				b = &bestRoom{profile: r.Profile}
				by[r.Profile], all = b, append(all, b)
			}
			b.free += r.Idle
			can := r.Possible > 0 || len(r.Leave) > 0
			if can && (b.room == nil || cmp.Or(cmp.Compare(len(r.Leave), len(b.room.Leave)), cmp.Compare(r.Lost, b.room.Lost)) < 0) {
				b.room, b.on = r, f
			}
		}
	}
	return all
}

// noneCut is where best is empty.
const noneCut = "no agent has reported GPUs of these nodes that can be cut"

// smallest says for each profile what one more device takes.
func (out *fragmented) smallest(p output.Paper) (lines []string) {
	for _, b := range out.best() {
		lines = append(lines, p.Paint(profileName(b.profile), text.Bold))
		lines = append(lines, p.Block(output.Indent, b.says())...)
		for i := range b.cuts() {
			lines = append(lines, output.DrawCut(gpuOf(b.on.Node, &b.room.Cuts[i]), &b.room.Cuts[i], p)...)
		}
		if command := b.command(); command != "" {
			for _, note := range b.on.Notes {
				lines = append(lines, p.Block(output.Indent+"note: ", note)...)
			}
			lines = append(lines, output.Indent+"$ "+command)
		}
	}
	if len(lines) == 0 {
		return p.Block("", noneCut)
	}
	return lines
}

// says says what one more device of the profile takes.
func (b *bestRoom) says() string {
	switch r := b.room; {
	case b.free > 0:
		return fmt.Sprintf("%d free", b.free)
	case r == nil:
		return "none could be made"
	case len(r.Leave) > 0:
		return fmt.Sprintf("on node %s, if %s would leave: %s", b.on.Node, cli.Counted(len(r.Leave), "pod"), leavers(r))
	default:
		return "a change of node " + b.on.Node + " makes one, and no pod has to leave"
	}
}

// cuts are the changes that make one; none where one is free.
func (b *bestRoom) cuts() []judge.Cut {
	if b.free > 0 || b.room == nil {
		return nil
	}
	return b.room.Cuts
}

// command asks for these changes; empty if there are none, or no label can spell them.
func (b *bestRoom) command() string {
	if b.free > 0 || b.room == nil {
		return ""
	}
	return b.on.Commands[b.profile]
}
