package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// fault is what happens to one GPU of eight. It is a row of the second table.
type fault struct {
	name     string
	sequence string // of gpusim
	harmless bool   // nothing is to be cured
}

var faults = []fault{
	{name: "Xid 79: the GPU falls off the bus", sequence: "fallen-off"},
	{name: "Xid 48: a memory error that takes the whole GPU, which needs a reset", sequence: "uncontained-ecc"},
	{name: "Xid 31: a program's own error", sequence: "application", harmless: true},
}

// watchers are who watches the GPUs of a node. The device plugin does in any case.
var watchers = []struct {
	name  string
	agent bool
}{
	{"device plugin", false},
	{"gpuslice", true},
}

const (
	sickGPU = 3
	// faultPatience is how long a fault may take to be seen, and curePatience is how long it may last before it counts as never
	// over.
	faultPatience, curePatience = 15 * time.Second, time.Minute
)

// faultRow is one watcher of one fault.
type faultRow struct {
	fault fault
	by    string
	agent bool
	runs  []course
}

// course is how one fault went, in seconds since it has begun, and since it was cured.
type course struct{ reported, fell, over, whole moment }

// moment is when something happened, if it did.
type moment struct {
	after    time.Duration
	happened bool
}

// runFault takes a fresh node through a fault and its cure.
func (st *stage) runFault(ctx context.Context, dir string, r faultRow) (c course, err error) {
	const gpus = 8
	s := scenario{name: r.fault.name, gpus: []gpusim.GPUSpec{{Model: "H100-80GB", Count: gpus}}, start: repeat(gpus, nil)}
	at, err := st.open(ctx, dir, s, operators)
	if err != nil {
		return c, err
	}
	defer func() { err = errors.Join(err, at.close(ctx)) }()
	if r.agent {
		p, err := at.startAgent(ctx, "")
		if err != nil {
			return c, err
		}
		defer func() { err = errors.Join(err, p.stop()) }()
		if m, err := at.when(ctx, time.Now(), patience, says(corev1.ConditionFalse)); err != nil || !m.happened {
			return c, fmt.Errorf("the agent says nothing of the health of the GPUs: %w", err)
		}
	}
	whole := func(o *corev1.Node) bool { return offered(o)[string(nvml.ResourceGPU)] == gpus }
	began := time.Now()
	if err := at.GPUs.Play(ctx, sickGPU, gpusim.NoInstance, r.fault.sequence); err != nil {
		return c, err
	}
	if c.fell, err = at.when(ctx, began, faultPatience, func(o *corev1.Node) bool { return !whole(o) }); err != nil {
		return c, err
	}
	if r.agent {
		if c.reported, err = at.when(ctx, began, faultPatience, says(corev1.ConditionTrue)); err != nil {
			return c, err
		}
	}
	if r.fault.harmless {
		return c, nil
	}
	if err := at.GPUs.Cure(ctx, sickGPU, r.fault.sequence); err != nil {
		return c, err
	}
	cured := time.Now()
	if r.agent {
		if c.over, err = at.when(ctx, cured, curePatience, says(corev1.ConditionFalse)); err != nil {
			return c, err
		}
	}
	c.whole, err = at.when(ctx, cured, curePatience, whole)
	return c, err
}

// says is true of a node that has the condition GPUUnhealthy with this status.
func says(status corev1.ConditionStatus) func(*corev1.Node) bool {
	return func(o *corev1.Node) bool {
		return slices.ContainsFunc(o.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == config.ConditionGPUUnhealthy && c.Status == status
		})
	}
}

// when returns the first moment after from when the condition is true of the node, if it comes within the time.
func (at *site) when(ctx context.Context, from time.Time, within time.Duration, is func(*corev1.Node) bool) (moment, error) {
	deadline := time.After(time.Until(from.Add(within)))
	for {
		_, changed := at.watch.last()
		for _, s := range at.watch.since(from) {
			if is(s.node) {
				return moment{max(0, s.at.Sub(from)), true}, nil
			}
		}
		select {
		case <-changed:
		case <-deadline:
			return moment{}, nil
		case <-ctx.Done():
			return moment{}, ctx.Err()
		}
	}
}

// faultNotes say how the second table is to be read.
const faultNotes = `Figures are medians, of one GPU of eight H100s. The stand-in kubelet reports what the device plugin says at once; a real one may take ten seconds.
The cure is a reset, and for Xid 79 a GPU that is found again without a reboot of the node, which would restart the plugin, too.

condition    from the fault until condition GPUUnhealthy is True; the device plugin has none
allocatable  from the fault until the node offers less than eight GPUs
over, whole  from the cure until the condition is False, and until the node offers eight GPUs again; never: not within a minute`

// tabulateFaults renders the second table, for a terminal or as Markdown.
func tabulateFaults(rows []faultRow, markdown bool) string {
	w := newTable("fault", "by", "condition", "allocatable", "over", "whole")
	last := ""
	for _, r := range rows {
		name := r.fault.name
		if name == last {
			name = ""
		}
		last = r.fault.name
		w.AppendRow(append(table.Row{name, r.by}, r.figures()...))
	}
	return rendered(w, faultNotes, markdown)
}

func (r faultRow) figures() table.Row {
	reported, over := r.median(func(c course) moment { return c.reported }, "none"), r.median(func(c course) moment { return c.over }, "never")
	fell, whole := r.median(func(c course) moment { return c.fell }, "none"), r.median(func(c course) moment { return c.whole }, "never")
	if !r.agent {
		reported, over = "", ""
	}
	if r.fault.harmless {
		over, whole = "", ""
	}
	return table.Row{reported, fell, over, whole}
}

// median is the middle of the runs, where what did not happen comes last.
func (r faultRow) median(of func(course) moment, otherwise string) string {
	var all []time.Duration
	for _, c := range r.runs {
		m := of(c)
		if !m.happened {
			m.after = time.Hour
		}
		all = append(all, m.after)
	}
	slices.Sort(all)
	if middle := all[len(all)/2]; middle < time.Hour {
		return seconds(middle)
	}
	return otherwise
}
