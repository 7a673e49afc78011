package main

import (
	"fmt"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

// row is one program in one scenario.
type row struct {
	scenario scenario
	program  measured
	runs     []result
}

// notes say how the figures are to be read.
const notes = `Figures are medians. Each run has a fresh simulated node, with the latency profile cautious, the slowest figures of any
hardware: 4 s to set the MIG mode, 1 s to destroy a GPU instance, 0.1 s for each other call that makes or destroys something, 5 s for
a reset; as long also where a call is refused or changes nothing, for which there is no figure from hardware.
The control plane, the device plugin (v0.19.3) and the DRA driver are real, the kubelet is a stand-in.

mig-parted   v0.14.4, "nvidia-mig-parted apply" by itself. There is no cluster; processes hold the instances that pods hold
             for the others. It pauses nothing, drains nothing, and looks at nothing afterwards.
mig-manager  v0.14.4, as the GPU Operator runs it where the driver is in a container. It pauses the operator's pods by labels
             and waits for four kinds of them, a second at least for each; of these only the device plugin is there. It does
             not cordon or drain: NVIDIA asks for a node without GPU workloads. It says that it is done before the device
             plugin is back.
full drain   what people do by hand, without a pause between commands: unless nvidia-mig-parted asserts that nothing is to be
             done, kubectl drain --ignore-daemonsets --delete-emptydir-data --force, a label sends the device plugin away,
             nvidia-mig-parted apply, the label brings the plugin back, kubectl uncordon. It is done with the last command.
config-manager
             v0.19.3, beside the device plugin as the plugin's chart has it. A label names a config that is in its ConfigMap, and
             it links to that and sends SIGHUP to the plugin. It does not cordon or drain, and says to no one that it is done.
by hand      on a node of NVIDIA's DRA driver (v0.5.0, static): nvidia-mig-parted apply, then kubectl delete of the driver's pod, since
             the driver reads the geometry when it starts. It is done with the last command.
gpuslice     asks kubelet who holds what, cordons the node, evicts who holds what goes, restarts the device plugin, and says
             that it is done when GPUs, kubelet and node have agreed twice, two seconds apart.

calls     of NVML functions that change something, those among them that failed; without resets, which are nvidia-smi's
resets    of GPUs, those among them that were refused; what the driver does by itself within a mode change is none
bound     what these calls and resets take, one after the other: no program that makes them is faster, since the driver's kernel
          module has one lock for them, and so those about several GPUs are taken to be serial (not measured on hardware)
done      from the label, or the start of the command, until the program says that it is done or has failed
own share done without bound
capacity  from the label until the node offers what its GPUs have, for good; looked at from outside. Under DRA: until the UUIDs in the
          driver's ResourceSlices are those of NVML
evicted   pods that held instances and left by the Eviction API
ended     pods that held instances and ended in any other way
restarts  of the device plugin, or of the DRA driver
taken     by a program that watches the label: the most memory that it had resident since it was started, without what other
          programs had that it ran, and the processor time from the label on, with theirs`

// newTable begins a table.
func newTable(header ...any) table.Writer {
	w := table.NewWriter()
	w.SetStyle(table.StyleLight)
	w.Style().Format.Header = text.FormatDefault
	w.AppendHeader(header)
	return w
}

// rendered is a table with its notes, for a terminal or as Markdown; empty if it has no row.
func rendered(w table.Writer, notes string, markdown bool) string {
	switch {
	case w.Length() == 0:
		return ""
	case markdown:
		return w.RenderMarkdown() + "\n\n```text\n" + notes + "\n```"
	}
	w.SetColumnConfigs([]table.ColumnConfig{
		{Number: 1, WidthMax: 34, WidthMaxEnforcer: text.WrapSoft},
		{Name: "outcome", WidthMax: 44, WidthMaxEnforcer: text.WrapSoft},
	})
	return w.Render() + "\n" + notes
}

// tabulate renders all rows, for a terminal or as Markdown.
func tabulate(rows []row, markdown bool) string {
	return tabulateRows(newTable("scenario", "by", "calls", "resets", "bound", "done", "own share", "capacity", "evicted", "ended", "restarts", "outcome"),
		rows, row.figures, taken(rows)+notes, markdown)
}

// tabulateRows renders rows with these figures of each.
func tabulateRows(w table.Writer, rows []row, figures func(row) table.Row, notes string, markdown bool) string {
	last := ""
	for _, r := range rows {
		name := r.scenario.name
		if name == last {
			name = ""
		} else if last != "" {
			w.AppendSeparator()
		}
		last = r.scenario.name
		w.AppendRow(append(table.Row{name, r.program.name}, figures(r)...))
	}
	return rendered(w, notes, markdown)
}

// profiledNotes say how the table by latency profile is to be read.
const profiledNotes = `No figure is of hardware. All GPUs are simulated, and idle. A scenario begins with the latency profile of its GPUs; test/gpusim/README.md has
each figure of the profiles, where it comes from, and whether it was measured, published or assumed. Programs and columns are those of the
first table.

own share  done without bound: with gpuslice fence, passes, plugin, kubelet and verification. The look-ups are in it
look-ups   handles of MIG devices that all programs of the node have taken, each 93 ms under dense and without time under the others

Not in the table are the GPU Operator's other operands, which its MIG manager pauses, starts again and validates. Of its label, others have published, on
a real GPU of 7 slices whose machine they do not name: success after 40 s, allocatable after 103 to 121 s (MIGRANT, May 2026); and of
mig-parted apply with its hooks on an A100-40GB: 25.6 s (NVIDIA/deepops#1225). Those figures are theirs.`

// tabulateProfiles renders the rows by latency profile.
func tabulateProfiles(rows []row, markdown bool) string {
	return tabulateRows(newTable("scenario", "by", "calls", "bound", "done", "own share", "capacity", "look-ups", "outcome"), rows, func(r row) table.Row {
		out := r.figures()
		const calls, bound, done, own, capacity, outcome = 0, 2, 3, 4, 5, 9
		return table.Row{
			out[calls], out[bound], out[done], out[own], out[capacity], median(r.runs, func(one result) int { return one.looked }), out[outcome],
		}
	}, profiledNotes, markdown)
}

// spentNotes say how the second table is to be read.
const spentNotes = `Where gpuslice's time went, by its log and by what the node offers:

fence and drain    from the label until its first step that changes a GPU or the device plugin's config
hardware           the calls: the bound
passes             until the end of the last step that changes a GPU, without the calls: looks at the node between the steps
plugin and kubelet until the node offers what its GPUs have
verification       until gpuslice says that it is done: two looks that agree, two seconds apart, and the node is given back`

// tabulateSpent renders where the time of gpuslice's changes went; it is empty if there were none.
func tabulateSpent(rows []row, markdown bool) string {
	w := newTable("scenario", "fence and drain", "hardware", "passes", "plugin and kubelet", "verification", "done")
	for _, r := range rows {
		if r.runs[0].spent == (spent{}) {
			continue
		}
		of := func(part func(result) time.Duration) string {
			return fmt.Sprintf("%.2f s", median(r.runs, part).Seconds())
		}
		w.AppendRow(table.Row{
			r.scenario.name,
			of(func(one result) time.Duration { return one.spent.drain }), of(func(one result) time.Duration { return one.bound }),
			of(func(one result) time.Duration { return one.spent.passes }), of(func(one result) time.Duration { return one.spent.plugin }),
			of(func(one result) time.Duration { return one.spent.verification }), of(func(one result) time.Duration { return one.said }),
		})
	}
	return rendered(w, spentNotes, markdown)
}

// taken says what each program that watches the label took at most in any of the runs.
func taken(rows []row) string {
	var names []string
	most := map[string]cost{}
	for _, r := range rows {
		for _, one := range r.runs {
			if one.cost == (cost{}) {
				continue
			}
			name := r.program.name
			if _, seen := most[name]; !seen {
				names = append(names, name)
			}
			most[name] = cost{memory: max(most[name].memory, one.cost.memory), cpu: max(most[name].cpu, one.cost.cpu)}
		}
	}
	text := ""
	for _, name := range names {
		text += fmt.Sprintf("%s has taken at most %d MiB of memory and %.2f s of processor time.\n",
			name, (most[name].memory+1023)/1024, most[name].cpu.Seconds())
	}
	return text
}

// figures are the medians of a row.
func (r row) figures() table.Row {
	out := table.Row{
		median(r.runs, result.mutations),
		median(r.runs, func(one result) int { return one.calls[gpusim.Reset] }),
		seconds(median(r.runs, func(one result) time.Duration { return one.bound })),
		secondsIfAny(median(r.runs, func(one result) time.Duration { return one.said })),
		secondsIfAny(median(r.runs, result.own)),
	}
	if r.runs[0].noNode {
		return append(out, "", "", "", "", outcomes(r.runs))
	}
	return append(out,
		seconds(median(r.runs, func(one result) time.Duration { return one.ready })),
		median(r.runs, func(one result) int { return one.evicted }),
		median(r.runs, func(one result) int { return one.ended }),
		median(r.runs, func(one result) int { return one.plugins }),
		outcomes(r.runs))
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// secondsIfAny is empty for a program that says nothing.
func secondsIfAny(d time.Duration) string {
	if d == 0 {
		return ""
	}
	return seconds(d)
}
