package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report/preview"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/picture"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// foresee draws what the config does to the GPUs of the node, as "gpuslice-agent plan --offline" does it by the same code. It
// needs no cluster and nothing that has to be built: people look at it while the rest is built.
func (o options) foresee(ctx context.Context, out *screen) (err error) {
	spec, err := o.machines()[0].spec()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "gpuslice-plan-")
	if err != nil {
		return fmt.Errorf("making a directory for the GPUs of the plan: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	sim, err := gpusim.Create(dir, spec)
	if err != nil {
		return fmt.Errorf("making the GPUs of the plan: %w", err)
	}
	defer sim.Close()
	before, err := sim.Driver().Snapshot(ctx)
	if err != nil {
		return fmt.Errorf("looking at the GPUs of the plan: %w", err)
	}
	p, err := preview.Offline{GPUs: before, Catalog: catalog.Merge(catalog.Generate(before), nil), ByClaims: o.dra}.Plan(config.LabelMIGConfig, o.config)
	if err != nil {
		return fmt.Errorf("%s cannot be: %w", o.config, err)
	}
	out.section(fmt.Sprintf("The plan: what nvidia.com/mig.config=%s will do to %s", o.config, mainNode))
	drawn(out, "now ", p.Before)
	drawn(out, "then", p.After)
	out.line("%s", inWords(p.Steps))
	return nil
}

// drawn shows GPUs, those that follow each other and look the same on one line.
func drawn(out *screen, when string, gpus []nvml.GPU) {
	for i := 0; i < len(gpus); {
		drawn := picture.GPU(gpus[i], gpus[i].Geometry())
		end := i + 1
		for end < len(gpus) && picture.GPU(gpus[end], gpus[end].Geometry()) == drawn {
			end++
		}
		which := fmt.Sprintf("GPU %d", gpus[i].Index)
		if end > i+1 {
			which = fmt.Sprintf("GPU %d-%d", gpus[i].Index, gpus[end-1].Index)
		}
		out.raw(fmt.Sprintf("  %s %-7s %s", when, which, drawn))
		i = end
	}
}

// inWords counts the steps of each kind, in the order of the plan.
func inWords(steps []plan.Step) string {
	if len(steps) == 0 {
		return "nothing to do: the GPUs are as the config asks"
	}
	var kinds []plan.Kind
	count := map[plan.Kind]int{}
	for _, s := range steps {
		if count[s.Kind]++; count[s.Kind] == 1 {
			kinds = append(kinds, s.Kind)
		}
	}
	parts := make([]string, len(kinds))
	for i, kind := range kinds {
		parts[i] = string(kind)
		if count[kind] > 1 {
			parts[i] = fmt.Sprintf("%d × %s", count[kind], kind)
		}
	}
	return fmt.Sprintf("in %d steps, and those for the pods on it: %s", len(steps), strings.Join(parts, ", "))
}
