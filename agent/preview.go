package agent

import (
	"context"
	"slices"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Preview is what a config would do to the node.
type Preview struct {
	Before, After []nvml.GPU
	Steps         []plan.Step
	AtReboot      []nvml.GPU // that turn MIG mode on at the node's next reboot, whoever does it; the change goes on after it
	Reboot        bool       // the steps wait for a reboot, or do it
}

// Preview plans what the label would ask for on the node as it is now, and changes nothing. The label is
// config.LabelMIGConfig or config.LabelProfile. The error is the refusal that the node's condition would show.
func (a *Agent) Preview(ctx context.Context, label, name string) (Preview, error) {
	seen, err := a.observe(ctx)
	if err != nil {
		return Preview{}, err
	}
	wishes, err := a.wishes(seen, label, name)
	if err != nil {
		return Preview{}, err
	}
	want := wish{name: name}
	a.observeTaken(ctx, &seen, want, targets(wishes))
	return preview(wishes, seen.planned(want))
}

// PreviewOffline plans what the label would ask for on GPUs alone, as on a node that no cluster knows.
func PreviewOffline(catalog config.Catalog, label, name string, gpus []nvml.GPU) (Preview, error) {
	wishes, err := wishesOf(catalog, label, name, gpus)
	if err != nil {
		return Preview{}, err
	}
	return preview(wishes, plan.Observed{GPUs: gpus, Capacity: plan.Capacity{Agreed: plan.Proof}})
}

func preview(wishes map[nvml.UUID]nvml.Wish, seen plan.Observed) (Preview, error) {
	want := targets(wishes)
	steps, err := plan.Make(seen, want)
	if err != nil {
		return Preview{Before: seen.GPUs}, err
	}
	return Preview{
		Before: seen.GPUs, After: plan.Result(seen.GPUs, steps), Steps: steps,
		AtReboot: plan.OnAtReboot(seen, want),
		Reboot:   slices.ContainsFunc(steps, func(s plan.Step) bool { return s.Kind == plan.Reboot }),
	}, nil
}
