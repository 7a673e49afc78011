package agent

import (
	"context"
	"maps"
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
	Runs          string     // when the change would begin; empty offline, and where nothing is to do
}

// Preview plans what the label would ask for on the node as it is now, and changes nothing. The label is
// config.LabelMIGConfig or config.LabelProfile. The error is the refusal that the node's condition would show.
func (a *Agent) Preview(ctx context.Context, label, name string) (Preview, error) {
	seen, err := a.observe(ctx)
	if err != nil {
		return Preview{}, err
	}
	return a.previewOf(ctx, seen, label, name)
}

// previewOf plans by a look that was taken already.
func (a *Agent) previewOf(ctx context.Context, seen observed, label, name string) (Preview, error) {
	profile, wishes, err := a.wishes(seen, label, name)
	if err != nil {
		return Preview{}, err
	}
	want := wish{name: name, label: label}
	if err := a.apply(ctx, &seen, &want, profile); err != nil {
		return Preview{}, err
	}
	want.targets = targets(wishes)
	if err := a.fits(seen, want); err != nil {
		return Preview{}, err
	}
	a.prove(&seen, want.plugin)
	a.observeTaken(ctx, &seen, want, want.targets)
	p, err := preview(want.desired(want.targets), a.planned(seen, want))
	if err == nil && len(p.Steps) > 0 {
		p.Runs = a.runs(seen, want, p.Steps)
	}
	return p, err
}

// PreviewOffline plans what the label would ask for on GPUs alone, as on a node that no cluster knows.
func PreviewOffline(catalog config.Catalog, label, name string, gpus []nvml.GPU) (Preview, error) {
	wishes, err := wishesOf(catalog, label, name, gpus)
	if err != nil {
		return Preview{}, err
	}
	want := wish{}
	seen := plan.Observed{GPUs: gpus, Capacity: plan.Capacity{Agreed: plan.Proof}}
	if profile, ok := catalog.Profile(name); ok && label == config.LabelProfile && profile.Sharing != nil {
		// Without a node nobody knows how its GPUs are shared, or what the device plugin is told: as if they were not, and it were told
		// what suits the sharing.
		strategy := config.MIGStrategyMixed
		if profile.Sharing.Strategy == config.SharingMPS {
			strategy = config.MIGStrategyNone
		}
		after := asWished(gpus, targets(wishes))
		err := config.CheckSharing(after, strategy, *profile.Sharing, slices.Collect(maps.Keys(expected(after, strategy))))
		if err != nil {
			return Preview{}, err
		}
		want.plugin = &pluginWish{sharing: *profile.Sharing, known: true}
		seen.Plugin = plan.Plugin{Now: &plan.Sharing{}, Told: true, Tells: true, Set: profile.Sharing.Strategy == config.SharingNone}
	}
	return preview(want.desired(targets(wishes)), seen)
}

func preview(want plan.Desired, seen plan.Observed) (Preview, error) {
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
