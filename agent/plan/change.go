package plan

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gpuslice/gpuslice/nvml"
)

// change is what has to be done to one GPU.
type change struct {
	gpu         nvml.UUID
	steps       []Step
	later       []Step // steps after the reboot, if the change waits for one
	changesMode bool
	waits       bool     // the mode becomes current at a reboot only
	takesAway   bool     // it destroys an instance or changes the mode, so a device goes that kubelet may allocate to a pod
	taken       []string // UUIDs, as kubelet knows them, of the devices that go
}

var (
	errNotCapable = errors.New("it cannot be cut into instances; leave it out of the config by device-filter or by index")
	errLost       = fmt.Errorf("%w; reboot the node, or leave the GPU out of the config by index", nvml.ErrLost)
)

// changeOf compares one GPU with its target.
func (seen Observed) changeOf(gpu nvml.GPU, target Target) (change, error) {
	if err := seen.refusal(gpu, target); err != nil || !gpu.Capable {
		return change{}, err
	}
	if target.ModeOnly && gpu.SwitchesAlone() {
		return change{}, nil
	}
	solution, err := solve(seen.held(gpu), target)
	if err != nil {
		return change{}, err
	}
	if seen.onAtReboot(gpu, target) {
		return turnOnAtReboot(gpu), nil
	}
	// To set a pending mode back to the current one disturbs no pod.
	c := change{gpu: gpu.UUID, changesMode: gpu.Enabled != target.MIG}
	c.waits = seen.waits(gpu, target)
	c.takesAway = c.changesMode || takesAway(solution)
	c.taken = taken(gpu, solution, c.changesMode)
	c.steps = slices.Concat(instances(gpu, Destroy, solution.Destroy), parts(gpu, Destroy, solution))
	switch {
	case gpu.Pending != target.MIG:
		c.steps = append(c.steps, Step{Kind: SetMode, GPU: gpu.UUID, Index: gpu.Index, On: target.MIG})
	case gpu.Enabled != target.MIG && !c.waits:
		// The mode was set already, and is still pending: the driver could not reset the GPU by itself.
		c.steps = append(c.steps, reset(gpu)...)
	}
	if made := slices.Concat(parts(gpu, Create, solution), instances(gpu, Create, solution.Create)); c.waits {
		c.later = made
	} else {
		c.steps = append(c.steps, made...)
	}
	return c, nil
}

// waits reports whether the GPU changes its mode at a reboot only.
func (seen Observed) waits(gpu nvml.GPU, target Target) bool {
	return seen.Reboots.NoReset[gpu.UUID] && gpu.Enabled != target.MIG
}

// refusal returns why the GPU cannot become the target, whatever the geometry.
func (seen Observed) refusal(gpu nvml.GPU, target Target) error {
	switch {
	case gpu.Lost:
		return errLost
	case !gpu.Capable && target.MIG:
		return errNotCapable
	case !gpu.Capable || target.Undo:
		return nil
	case seen.Reboots.InVain && gpu.Pending == target.MIG && gpu.Enabled != target.MIG:
		return ErrStillPending
	case seen.Reboots.Policy == RebootNever && gpu.Enabled && !target.MIG && (seen.Reboots.NoReset[gpu.UUID] || seen.Reboots.Suspected[gpu.UUID]):
		return ErrNeedsReboot
	default:
		return nil
	}
}

// endsPersistence reports whether the change turns persistence mode off.
func (c change) endsPersistence() bool {
	return Has(c.steps, DropPersistence)
}

// resets reports whether the GPU is reset.
func (c change) resets() bool {
	return Has(c.steps, Reset) || Has(c.steps, Heal)
}

// instances lists the steps that destroy or create instances.
func instances(gpu nvml.GPU, kind Kind, placed []nvml.Placed) []Step {
	var out []Step
	for _, p := range placed {
		out = append(out, Step{Kind: kind, GPU: gpu.UUID, Index: gpu.Index, Instance: p})
	}
	return out
}

// parts lists the steps that destroy or create parts of instances that stay. A step does not list the other parts of its instance, since
// these change from one step to the next.
func parts(gpu nvml.GPU, kind Kind, solution nvml.Solution) []Step {
	var out []Step
	for _, c := range solution.Change {
		list := c.Destroy
		if kind == Create {
			list = c.Create
		}
		at := nvml.Placed{Profile: c.Instance.Profile, Span: c.Instance.Span}
		for _, p := range list {
			out = append(out, Step{Kind: kind, GPU: gpu.UUID, Index: gpu.Index, Instance: at, Part: p})
		}
	}
	return out
}

// takesAway reports whether a device goes that kubelet may allocate to a pod.
func takesAway(solution nvml.Solution) bool {
	return len(solution.Destroy) > 0 || slices.ContainsFunc(solution.Change, func(c nvml.Change) bool { return len(c.Destroy) > 0 })
}

// turnOnAtReboot asks for MIG mode and leaves the rest to the next reboot. Pods have to leave the GPU anyway: if no process holds it, the driver may
// reset it at once after all.
func turnOnAtReboot(gpu nvml.GPU) change {
	if gpu.Pending {
		return change{}
	}
	return change{
		gpu: gpu.UUID, changesMode: true, takesAway: true, taken: []string{string(gpu.UUID)},
		steps: []Step{{Kind: SetMode, GPU: gpu.UUID, Index: gpu.Index, On: true}},
	}
}

// reset makes a pending mode current. Persistence mode keeps the GPU open as a client does: the plan ends it before, and restores it after.
func reset(gpu nvml.GPU) []Step {
	var steps []Step
	if gpu.Persistent {
		steps = append(steps, Step{Kind: DropPersistence, GPU: gpu.UUID, Index: gpu.Index})
	}
	return append(steps, Step{Kind: Reset, GPU: gpu.UUID, Index: gpu.Index})
}

// healed resets a GPU that is not well, and then brings it to its target. The whole GPU goes, and with it each pod that has a part of it.
func (seen Observed) healed(gpu nvml.GPU, target Target) (change, error) {
	after := withPending(Step{}, gpu)
	after.Persistent = false
	rest, err := seen.changeOf(after, target)
	if err != nil {
		return change{}, err
	}
	rest.gpu, rest.changesMode, rest.takesAway, rest.taken = gpu.UUID, true, true, taken(gpu, nvml.Solution{}, true)
	steps := reset(gpu)
	steps[len(steps)-1].Kind = Heal
	rest.steps = append(steps, rest.steps...)
	return rest, nil
}

// currentTarget keeps the present mode and geometry of a GPU without a request, as the journal records them. It ignores a pending mode: after the
// reset that makes this mode current, the plan changes it back.
func currentTarget(gpu nvml.GPU) Target {
	target := Target{Request: nvml.Request{MIG: gpu.Enabled}, Undo: true}
	for _, i := range gpu.Instances {
		if !i.HalfMade() {
			target.Exact = append(target.Exact, i.Placed)
		}
	}
	return target
}

// held marks the instances that kubelet has allocated to pods. Such a pod may have no process just now, but would have to leave. Pods with unknown
// devices do not count: they have to leave whatever goes.
func (seen Observed) held(gpu nvml.GPU) nvml.GPU {
	holds := map[string]bool{}
	for _, p := range seen.Pods {
		for _, d := range p.Devices {
			holds[d] = holds[d] || p.Known
		}
	}
	gpu.Instances = slices.Clone(gpu.Instances)
	for n := range gpu.Instances {
		i := &gpu.Instances[n]
		i.Devices = slices.Clone(i.Devices)
		for k := range i.Devices {
			i.Devices[k].Held = holds[i.Devices[k].UUID]
		}
	}
	return gpu
}

func solve(gpu nvml.GPU, target Target) (nvml.Solution, error) {
	if target.ModeOnly {
		return nvml.Solution{}, nil
	}
	if target.Undo || len(target.Exact) > 0 {
		exact := slices.Clone(target.Exact)
		for i := range exact {
			exact[i] = gpu.Named(exact[i])
		}
		return nvml.Restore(gpu, exact), nil
	}
	if !target.MIG {
		return nvml.Restore(gpu, nil), nil
	}
	return nvml.Solve(gpu, target.Devices)
}

// taken lists the devices that go: all of the GPU's when its mode changes, else those of the destroyed instances and parts. The GPU itself goes with
// any of them: a device plugin with a wrong MIG strategy advertises it as a whole while it has instances.
func taken(gpu nvml.GPU, solution nvml.Solution, changesMode bool) []string {
	parts := map[nvml.Placed][]nvml.Part{}
	for _, c := range solution.Change {
		parts[c.Instance] = c.Destroy
	}
	var out []string
	for _, i := range gpu.Instances {
		all := changesMode || slices.Contains(solution.Destroy, i.Placed)
		for _, d := range i.Devices {
			if all || slices.Contains(parts[i.Placed], d.Part) {
				out = append(out, d.UUID)
			}
		}
	}
	if changesMode || len(out) > 0 {
		out = append(out, string(gpu.UUID))
	}
	return out
}
