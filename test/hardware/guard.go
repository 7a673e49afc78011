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
// settings, before the driver sees it, and remembers it: a run with such a call has failed. Each method of nvml.Driver is written out here, so
// that one that is added to it does not pass by itself.
type guard struct {
	reader
	stop func(error) // ends the run; may be nil

	mu      sync.Mutex
	refused []string
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
func (g *guard) SetMode(_ context.Context, gpu nvml.UUID, on bool) error {
	return g.refuse(fmt.Sprintf("setting MIG mode to %t", on), gpu)
}

// Create implements nvml.Driver.
func (g *guard) Create(_ context.Context, gpu nvml.UUID, p nvml.Placed) error {
	return g.refuse("creating "+p.String(), gpu)
}

// Destroy implements nvml.Driver.
func (g *guard) Destroy(_ context.Context, gpu nvml.UUID, p nvml.Placed) error {
	return g.refuse("destroying "+p.String(), gpu)
}

// CreatePart implements nvml.Driver.
func (g *guard) CreatePart(_ context.Context, gpu nvml.UUID, p nvml.Placed, part nvml.Part) error {
	return g.refuse("creating "+part.String()+" in "+p.String(), gpu)
}

// DestroyPart implements nvml.Driver.
func (g *guard) DestroyPart(_ context.Context, gpu nvml.UUID, p nvml.Placed, part nvml.Part) error {
	return g.refuse("destroying "+part.String()+" in "+p.String(), gpu)
}

// Reset implements nvml.Driver.
func (g *guard) Reset(_ context.Context, gpu nvml.UUID) error { return g.refuse("resetting", gpu) }

// SetPersistence implements nvml.Driver.
func (g *guard) SetPersistence(_ context.Context, gpu nvml.UUID, on bool) error {
	return g.refuse(fmt.Sprintf("setting persistence mode to %t", on), gpu)
}

// SetComputeMode implements nvml.Driver.
func (g *guard) SetComputeMode(_ context.Context, gpu nvml.UUID, mode nvml.ComputeMode) error {
	return g.refuse("setting the compute mode to "+string(mode), gpu)
}
