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
	AtReboot      []nvml.GPU         // that turn MIG mode on at the node's next reboot, whoever does it; the change goes on after it
	Reboot        bool               // the steps wait for a reboot, or do it
	MIGStrategy   config.MIGStrategy // of the device plugin after it; offline, taken to be mixed where nothing says another
	Runs          string             // when the change would begin; empty offline, and where nothing is to do
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
	if err := a.apply(ctx, &seen, &want, profile, asWished(seen.gpus, targets(wishes))); err != nil {
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
	p.MIGStrategy = a.strategy(seen, want.plugin)
	return p, err
}

// PreviewOffline plans what the label would ask for on GPUs alone, as on a node that no cluster knows.
func PreviewOffline(catalog config.Catalog, label, name string, gpus []nvml.GPU) (Preview, error) {
	wishes, err := wishesOf(catalog, label, name, gpus)
	if err != nil {
		return Preview{}, err
	}
	// Without a node nobody knows how its GPUs are shared, or what the device plugin is told: as if they were not, and its config had
	// the strategy that overlays/device-plugin begins with.
	has := config.PluginConfig{Sharing: config.Sharing{Strategy: config.SharingNone}, MIGStrategy: config.MIGStrategyMixed}
	want := wish{}
	seen := plan.Observed{GPUs: gpus, Capacity: plan.Capacity{Agreed: plan.Proof}}
	if profile, ok := catalog.Profile(name); ok && label == config.LabelProfile && (profile.Sharing != nil || profile.MIGStrategy != "") {
		if want.plugin, err = wishOffline(has, profile, asWished(gpus, targets(wishes))); err != nil {
			return Preview{}, err
		}
		seen.Plugin = plan.Plugin{Now: plannedSharing(has.Sharing, has.MIGStrategy), Told: true, Tells: true, Set: want.plugin.as(&has)}
		has.MIGStrategy = want.plugin.strategy
	}
	p, err := preview(want.desired(targets(wishes)), seen)
	p.MIGStrategy = has.MIGStrategy
	return p, err
}

// wishOffline is what a profile asks of a device plugin that has this config and is told nothing else.
func wishOffline(has config.PluginConfig, profile config.Profile, after []nvml.GPU) (*pluginWish, error) {
	want := &pluginWish{sharing: has.Sharing, known: true, strategy: profile.MIGStrategy}
	if profile.Sharing != nil {
		want.sharing = *profile.Sharing
	}
	if want.strategy == "" {
		want.strategy = config.FittingStrategy(after, has.MIGStrategy, want.sharing.Strategy == config.SharingMPS)
	}
	if err := config.CheckStrategy(after, want.strategy); err != nil {
		return nil, err
	}
	return want, config.CheckSharing(after, want.strategy, want.sharing, slices.Collect(maps.Keys(expected(after, want.strategy))))
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
