package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gpuslice/gpuslice/nvml"
)

// errForbidden is what each call gets that would change something of a GPU.
var errForbidden = errors.New("this program changes nothing of a GPU")

// reader is what the guard lets pass.
type reader interface {
	nvml.HealthReader // Health, Events
	nvml.UsageReader
	Snapshot(ctx context.Context) ([]nvml.GPU, error)
	Release(ctx context.Context) error
}

// guard is the driver of everything that runs in this program, the agent too. It refuses each call that would change a GPU's mode, instances or
// settings, before the driver sees it, and remembers it: a run with such a call has failed. Only a run with --cut lets calls about its GPUs pass. Each
// method of nvml.Driver is written out here, so that one that is added to it does not pass by itself.
type guard struct {
	reader
	stop func(error) // ends the run; may be nil

	mu      sync.Mutex
	refused []string
	may     []nvml.UUID // GPUs that are changed
	writer  nvml.Driver // that changes them
}

var (
	_ nvml.Driver       = (*guard)(nil)
	_ nvml.HealthReader = (*guard)(nil)
	_ nvml.UsageReader  = (*guard)(nil)
)

// calls lists those that were refused.
func (g *guard) calls() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.refused)
}

// cuts lets calls about these GPUs pass from now on.
func (g *guard) cuts(writer nvml.Driver, gpus []nvml.UUID) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.writer, g.may = writer, gpus
}

// change makes a call that changes the GPU, if it may be changed.
func (g *guard) change(op string, gpu nvml.UUID, call func(nvml.Driver) error) error {
	g.mu.Lock()
	may := slices.Contains(g.may, gpu)
	g.mu.Unlock()
	if !may {
		return g.refuse(op, gpu)
	}
	return call(g.writer)
}

func (g *guard) refuse(op string, gpu nvml.UUID) error {
	err := &nvml.Error{Op: op, GPU: gpu, Err: errForbidden}
	g.mu.Lock()
	g.refused = append(g.refused, fmt.Sprintf("%s on %s", op, gpu))
	g.mu.Unlock()
	if g.stop != nil {
		g.stop(err)
	}
	return err
}

// SetMode implements nvml.Driver.
func (g *guard) SetMode(ctx context.Context, gpu nvml.UUID, on bool) error {
	return g.change(fmt.Sprintf("setting MIG mode to %t", on), gpu, func(d nvml.Driver) error { return d.SetMode(ctx, gpu, on) })
}

// Create implements nvml.Driver.
func (g *guard) Create(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	return g.change("creating "+p.String(), gpu, func(d nvml.Driver) error { return d.Create(ctx, gpu, p) })
}

// Destroy implements nvml.Driver.
func (g *guard) Destroy(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	return g.change("destroying "+p.String(), gpu, func(d nvml.Driver) error { return d.Destroy(ctx, gpu, p) })
}

// CreatePart implements nvml.Driver.
func (g *guard) CreatePart(ctx context.Context, gpu nvml.UUID, p nvml.Placed, part nvml.Part) error {
	return g.change("creating "+part.String()+" in "+p.String(), gpu, func(d nvml.Driver) error { return d.CreatePart(ctx, gpu, p, part) })
}

// DestroyPart implements nvml.Driver.
func (g *guard) DestroyPart(ctx context.Context, gpu nvml.UUID, p nvml.Placed, part nvml.Part) error {
	return g.change("destroying "+part.String()+" in "+p.String(), gpu, func(d nvml.Driver) error { return d.DestroyPart(ctx, gpu, p, part) })
}

// Reset implements nvml.Driver.
func (g *guard) Reset(ctx context.Context, gpu nvml.UUID) error {
	return g.change("resetting", gpu, func(d nvml.Driver) error { return d.Reset(ctx, gpu) })
}

// SetPersistence implements nvml.Driver.
func (g *guard) SetPersistence(ctx context.Context, gpu nvml.UUID, on bool) error {
	return g.change(fmt.Sprintf("setting persistence mode to %t", on), gpu, func(d nvml.Driver) error { return d.SetPersistence(ctx, gpu, on) })
}

// SetComputeMode implements nvml.Driver.
func (g *guard) SetComputeMode(ctx context.Context, gpu nvml.UUID, mode nvml.ComputeMode) error {
	return g.change("setting the compute mode to "+string(mode), gpu, func(d nvml.Driver) error { return d.SetComputeMode(ctx, gpu, mode) })
}
