package cut

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Bench measures the calls that cut GPUs, one GPU after the other. Each of its methods begins from whatever the GPUs are, and leaves them cut as it likes.
type Bench struct {
	Driver  nvml.Driver
	Calls   *Calls
	GPUs    []nvml.GPU // as they were found
	Rounds  int        // how often each call is made
	Figures *Figures
}

// NotHereError says why something cannot be measured on this machine.
type NotHereError struct{ Err error }

// Error is the text of the cause.
func (e *NotHereError) Error() string { return e.Err.Error() }

// Unwrap is the cause.
func (e *NotHereError) Unwrap() error { return e.Err }

// Step is one measurement.
type Step struct {
	Name string
	Do   func(context.Context) (saw string, err error)
}

// Steps are all that measure calls, in their order. A step that gets a NotHereError keeps none after it from being made.
func (b *Bench) Steps() []Step {
	return []Step{
		{"MIG mode goes on and off", b.Modes},
		{"an instance of each profile is made and destroyed", b.Profiles},
		{"the GPUs are read with as many MIG devices as fit", b.Look},
		{"all instances go, and MIG mode goes off", b.Uncut},
	}
}

// each calls f for each GPU, without instances.
func (b *Bench) each(ctx context.Context, f func(gpu, nvml.GPU) error) error {
	for _, g := range b.GPUs {
		on := gpu{driver: b.Driver, uuid: g.UUID, index: g.Index}
		now, err := on.look(ctx)
		if err == nil {
			now, err = on.only(ctx, now, nvml.GPU{})
		}
		if err == nil {
			err = f(on, now)
		}
		if err != nil {
			return fmt.Errorf("GPU %d: %w", g.Index, err)
		}
	}
	return nil
}

// Modes turns MIG mode on and off.
func (b *Bench) Modes(ctx context.Context) (saw string, err error) {
	err = b.each(ctx, func(g gpu, now nvml.GPU) error {
		for range 2 * b.Rounds {
			if now, err = b.mode(ctx, g, !now.Enabled); err != nil {
				return err
			}
		}
		return nil
	})
	return fmt.Sprintf("%d times on and off", b.Rounds), err
}

// mode turns MIG mode on or off, and measures it. It is a NotHereError if only a reboot does that; the change is no more pending then.
func (b *Bench) mode(ctx context.Context, g gpu, on bool) (nvml.GPU, error) {
	var add []func()
	b.Calls.Take()
	now, err := g.mode(ctx, on, func(what string) {
		calls := b.Calls.Take()
		add = append(add, func() { b.Figures.addCalls(what, calls, gpusim.SetMigMode) })
	})
	if errors.Is(err, errReboot) {
		if err := b.Driver.SetMode(ctx, g.uuid, !on); err != nil {
			return now, err
		}
		return now, &NotHereError{fmt.Errorf("%w: to measure instances, turn it on, reboot, and run this again", err)}
	}
	if err != nil {
		return now, err
	}
	for _, f := range add { // of a mode that has changed
		f()
	}
	return now, nil
}

// Profiles makes and destroys an instance of each profile, alone on its GPU.
func (b *Bench) Profiles(ctx context.Context) (saw string, err error) {
	n := 0
	err = b.each(ctx, func(g gpu, now nvml.GPU) error {
		if now, err = b.enable(ctx, g, now); err != nil {
			return err
		}
		profiles := slices.DeleteFunc(slices.Clone(now.Profiles), func(p nvml.Profile) bool { return fit(p) == 0 })
		n = len(profiles)
		for range b.Rounds {
			for _, p := range profiles {
				if err := b.profile(ctx, g, p); err != nil {
					return err
				}
			}
		}
		return nil
	})
	return fmt.Sprintf("%d profiles, %d times each", n, b.Rounds), err
}

// enable turns MIG mode on, if it is off.
func (b *Bench) enable(ctx context.Context, g gpu, now nvml.GPU) (nvml.GPU, error) {
	if now.Enabled {
		return now, nil
	}
	return b.mode(ctx, g, true)
}

func (b *Bench) profile(ctx context.Context, g gpu, p nvml.Profile) error {
	at := nvml.Placed{Profile: p.Name, Span: p.Placements[0]}
	b.Calls.Take()
	if err := g.patiently(ctx, func(ctx context.Context) error { return b.Driver.Create(ctx, g.uuid, at) }); err != nil {
		return err
	}
	calls := b.Calls.Take()
	b.Figures.addCalls("creating "+p.Name, calls, gpusim.CreateGpuInstanceWithPlacement)
	b.Figures.addCalls("its compute instance", calls, gpusim.CreateComputeInstance)
	if err := g.patiently(ctx, func(ctx context.Context) error { return b.Driver.Destroy(ctx, g.uuid, at) }); err != nil {
		return err
	}
	calls = b.Calls.Take()
	b.Figures.addCalls("destroying its compute instance", calls, gpusim.ComputeInstanceDestroy)
	b.Figures.addCalls("destroying "+p.Name, calls, gpusim.GpuInstanceDestroy)
	return nil
}

// Look fills the GPUs with instances of their smallest profile, and reads them in the ways that programs do.
func (b *Bench) Look(ctx context.Context) (saw string, err error) {
	err = b.each(ctx, func(g gpu, now nvml.GPU) error {
		if now, err = b.enable(ctx, g, now); err != nil {
			return err
		}
		return b.fill(ctx, g, now)
	})
	if err != nil {
		return "", err
	}
	devices := 0
	for range b.Rounds {
		if devices, err = b.look(ctx); err != nil {
			return "", err
		}
	}
	for _, g := range b.GPUs {
		if err := apart(ctx, func(ctx context.Context) error { return b.Calls.walk(ctx, g.Index, devices) }); err != nil {
			return "", fmt.Errorf("walking through the MIG devices of GPU %d: %w", g.Index, err)
		}
	}
	calls := b.Calls.Take()
	b.Figures.addCalls("a MIG device by its index", calls, gpusim.GetMigDeviceHandleByIndex)
	b.Figures.addCalls("a MIG device by its UUID, for each MIG device of the machine", calls, gpusim.WalkMIGDevice)
	return fmt.Sprintf("%d MIG devices", devices), nil
}

// fit is how many instances of a profile a GPU can have.
func fit(p nvml.Profile) int { return min(p.Max, len(p.Placements)) }

// Smallest is the profile with the most instances on a GPU that has any.
func Smallest(g nvml.GPU) nvml.Profile {
	return slices.MaxFunc(g.Profiles, func(a, b nvml.Profile) int { return fit(a) - fit(b) })
}

// fill makes as many instances of the smallest profile as fit.
func (b *Bench) fill(ctx context.Context, g gpu, now nvml.GPU) error {
	p := Smallest(now)
	began := time.Now()
	for _, at := range p.Placements[:fit(p)] {
		one := nvml.Placed{Profile: p.Name, Span: at}
		if err := g.patiently(ctx, func(ctx context.Context) error { return b.Driver.Create(ctx, g.uuid, one) }); err != nil {
			return err
		}
	}
	b.Figures.Add(fmt.Sprintf("filling a GPU with %d x %s", fit(p), p.Name), time.Since(began))
	return nil
}

// look closes and opens the library, and reads all GPUs twice. It returns how many MIG devices the machine has.
func (b *Bench) look(ctx context.Context) (devices int, err error) {
	if err := b.Driver.Release(ctx); err != nil {
		return 0, err
	}
	b.Calls.Take()
	for _, what := range []string{"the first look at the GPUs", "each further look"} {
		began := time.Now()
		all, err := b.Driver.Snapshot(ctx)
		if err != nil {
			return 0, err
		}
		devices = 0
		for _, g := range all {
			for _, i := range g.Instances {
				devices += len(i.Devices)
			}
		}
		b.Figures.Add(fmt.Sprintf("%s, with %d MIG devices", what, devices), time.Since(began))
	}
	calls := b.Calls.Take()
	b.Figures.addCalls("opening the library", calls, gpusim.Init)
	b.Figures.addCalls("reading the mode", calls, gpusim.GetMigMode)
	b.Figures.addCalls("a MIG device by its compute instance", calls, gpusim.ComputeInstanceGetInfo)
	return devices, nil
}

// Uncut destroys all instances of the GPUs, and turns MIG mode off.
func (b *Bench) Uncut(ctx context.Context) (saw string, err error) {
	return "", b.each(ctx, func(g gpu, now nvml.GPU) error {
		if !now.Enabled {
			return nil
		}
		_, err := b.mode(ctx, g, false)
		return err
	})
}

// Change measures a change that others make of the GPUs: how long it takes, and how much of that the driver's calls take.
func (b *Bench) Change(what string, change func() error) (saw string, err error) {
	b.Calls.Take()
	began := time.Now()
	if err := change(); err != nil {
		return "", err
	}
	took, calls := time.Since(began), changing(b.Calls.Take())
	b.Figures.Add(what, took)
	b.Figures.Add(what+": without the driver's calls", took-calls)
	return fmt.Sprintf("%s; the driver's calls took %s of it", short(took), short(calls)), nil
}

// Time measures something that calls no driver.
func (b *Bench) Time(what string, do func() error) (saw string, err error) {
	began := time.Now()
	if err := do(); err != nil {
		return "", err
	}
	took := time.Since(began)
	b.Figures.Add(what, took)
	return short(took), nil
}
