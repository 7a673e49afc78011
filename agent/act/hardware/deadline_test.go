package hardware_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/hardware"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// hanging is a driver of which no call comes back before its context ends.
type hanging struct{ nvml.Driver }

func (hanging) hang(ctx context.Context) error {
	<-ctx.Done()
	return nvml.ErrUnresponsive
}

func (h hanging) Snapshot(ctx context.Context) ([]nvml.GPU, error) { return nil, h.hang(ctx) }

func (h hanging) SetMode(ctx context.Context, _ nvml.UUID, _ bool) error { return h.hang(ctx) }

func (h hanging) SetPersistence(ctx context.Context, _ nvml.UUID, _ bool) error { return h.hang(ctx) }

func (h hanging) SetComputeMode(ctx context.Context, _ nvml.UUID, _ nvml.ComputeMode) error {
	return h.hang(ctx)
}

func (h hanging) Reset(ctx context.Context, _ nvml.UUID) error { return h.hang(ctx) }

func (h hanging) Create(ctx context.Context, _ nvml.UUID, _ nvml.Placed) error { return h.hang(ctx) }

func (h hanging) Destroy(ctx context.Context, _ nvml.UUID, _ nvml.Placed) error { return h.hang(ctx) }

func (h hanging) CreatePart(ctx context.Context, _ nvml.UUID, _ nvml.Placed, _ nvml.Part) error {
	return h.hang(ctx)
}

func (h hanging) DestroyPart(ctx context.Context, _ nvml.UUID, _ nvml.Placed, _ nvml.Part) error {
	return h.hang(ctx)
}

// Promise 14. The deadline of a call into the driver is the agent's to set. Without one the bubble has no clock to wait for, and the test fails at
// once.
func TestNoCallIntoTheDriverOutlastsItsDeadline(t *testing.T) {
	t.Parallel()
	calls := map[string]func(ctx context.Context, g *hardware.GPUs) error{
		"Snapshot": func(ctx context.Context, g *hardware.GPUs) error {
			_, err := g.Snapshot(ctx)
			return err
		},
	}
	for _, kind := range hardware.Called() {
		step := plan.Step{Kind: kind, GPU: "GPU-a", Instance: nvml.Placed{Profile: "3g.40gb", Span: nvml.Span{Size: 4}}}
		calls[string(kind)] = func(ctx context.Context, g *hardware.GPUs) error { return g.Drive(ctx, step) }
		if kind == plan.Create || kind == plan.Destroy {
			step.Part = nvml.Part{Name: "1c", Span: nvml.Span{Size: 1}}
			calls[string(kind)+" of a part"] = func(ctx context.Context, g *hardware.GPUs) error { return g.Drive(ctx, step) }
		}
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := &hardware.GPUs{Env: act.Env{Settings: config.Default()}, Driver: hanging{}}
				began := time.Now()
				if err := call(context.WithoutCancel(t.Context()), g); !errors.Is(err, nvml.ErrUnresponsive) {
					t.Errorf("got %v", err)
				}
				if took, limit := time.Since(began), g.Settings.Timeouts.DriverCall; took != limit {
					t.Errorf("the call took %s, want %s", took, limit)
				}
			})
		})
	}
}
