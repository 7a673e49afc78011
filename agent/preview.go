package agent

import (
	"context"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Preview is what a config would do to the node.
type Preview struct {
	Before, After []nvml.GPU
	Steps         []plan.Step
}

// Preview plans the named config on the node as it is now, and changes nothing. The error is the refusal that the node's
// condition would show.
func (a *Agent) Preview(ctx context.Context, name string) (Preview, error) {
	seen, err := a.observe(ctx)
	if err != nil {
		return Preview{}, err
	}
	catalog, err := a.catalog(seen)
	if err != nil {
		return Preview{}, err
	}
	return preview(catalog, name, seen.planned(wish{name: name}))
}

// PreviewOffline plans the named config on GPUs alone, as on a node that no cluster knows.
func PreviewOffline(catalog config.Catalog, name string, gpus []nvml.GPU) (Preview, error) {
	return preview(catalog, name, plan.Observed{GPUs: gpus, Capacity: plan.Capacity{Agreed: plan.Proof}})
}

func preview(catalog config.Catalog, name string, seen plan.Observed) (Preview, error) {
	wishes, err := catalog.Wishes(name, seen.GPUs)
	if err != nil {
		return Preview{}, err
	}
	want := plan.Desired{}
	for gpu, w := range wishes {
		want[gpu] = plan.Target{Wish: w}
	}
	steps, err := plan.Make(seen, want)
	if err != nil {
		return Preview{Before: seen.GPUs}, err
	}
	return Preview{Before: seen.GPUs, After: plan.Result(seen.GPUs, steps), Steps: steps}, nil
}
