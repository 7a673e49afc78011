package agent_test

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// renaming is a driver that calls profiles otherwise than the one with which the change began, as 535 calls a 3g.40gb of 545 a 3g.39gb.
type renaming struct {
	nvml.Driver
	names map[string]string
	fails func(gpu nvml.UUID, p nvml.Placed) error // before an instance is made
}

// Snapshot implements nvml.Driver.
func (r renaming) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	gpus, err := r.Driver.Snapshot(ctx)
	name := func(profile *string) {
		if to, ok := r.names[*profile]; ok {
			*profile = to
		}
	}
	for _, g := range gpus {
		for i := range g.Profiles {
			name(&g.Profiles[i].Name)
		}
		for i := range g.Instances {
			name(&g.Instances[i].Profile)
			for k := range g.Instances[i].Devices {
				name(&g.Instances[i].Devices[k].Profile)
			}
		}
	}
	return gpus, err
}

// known returns the former name of what the driver knows by its new one.
func (r renaming) known(gpu nvml.UUID, p nvml.Placed) (nvml.Placed, error) {
	if _, gone := r.names[p.Profile]; gone {
		return p, &nvml.Error{Op: "creating " + p.String(), GPU: gpu, Code: "ERROR_INVALID_ARGUMENT"}
	}
	for from, to := range r.names {
		if p.Profile == to {
			p.Profile = from
		}
	}
	if r.fails != nil {
		return p, r.fails(gpu, p)
	}
	return p, nil
}

// Create implements nvml.Driver.
func (r renaming) Create(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	p, err := r.known(gpu, p)
	if err != nil {
		return err
	}
	return r.Driver.Create(ctx, gpu, p)
}

// Promise 10: places and slices are the hardware's, names are the driver's.
func TestPromise10AnUndoUnderADriverWithOtherNamesGoesBySlicesAndPlaces(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-3g.40gb")
		before := w.gpus.String()
		w.startChange("all-1g.10gb")
		w.renamed = map[string]string{"3g.40gb": "3g.39gb", "1g.10gb": "1g.9gb"}
		w.wrapDriver = func(d nvml.Driver) nvml.Driver { return renaming{Driver: d, names: w.renamed} }
		w.restart()
		c := w.settle(config.ReasonUnknownConfig)
		w.expectGivenBack()
		if after := w.gpus.String(); after != before {
			t.Errorf("the GPUs are not as they were (%s: %s):\n%s", c.Reason, c.Message, after)
		}
	})
}

// Promise 10: what is wrong with one GPU does not keep the others from what they were.
func TestPromise10AGPUThatCannotBeUndoneKeepsNoOther(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-3g.40gb")
		gpus := w.snapshot()
		w.startChange("all-1g.10gb")
		w.passes("the cut of both", func() bool { return len(w.snapshot()[1].Instances) > 2 })
		w.wrapDriver = func(d nvml.Driver) nvml.Driver {
			return renaming{Driver: d, fails: func(gpu nvml.UUID, p nvml.Placed) error {
				if gpu == gpus[0].UUID {
					return &nvml.Error{Op: "creating " + p.String(), GPU: gpu, Code: "ERROR_UNKNOWN"}
				}
				return nil
			}}
		}
		w.restart()
		w.unset(config.LabelMIGConfig)
		w.label("all-nonsense")
		w.passes("the end of the undo", func() bool {
			return strings.Contains(w.condition().Message, "the node stays cordoned until this is mended") && len(w.snapshot()[1].Instances) == 2
		})
		if got := w.snapshot()[1].Geometry().String(); got != gpus[1].Geometry().String() || !w.node().Spec.Unschedulable {
			t.Errorf("GPU 1 is %s, the node open: %t", got, !w.node().Spec.Unschedulable)
		}
	})
}

// Destroy implements nvml.Driver.
func (r renaming) Destroy(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	for from, to := range r.names {
		if p.Profile == to {
			p.Profile = from
		}
	}
	return r.Driver.Destroy(ctx, gpu, p)
}
