package agent

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/preview"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Preview plans what the label would ask for on the node as it is now, and changes nothing. Label and name
// are those of an Ask. The error is the refusal that the node's condition would show.
func (a *Agent) Preview(ctx context.Context, label, name string) (preview.Result, error) {
	seen, err := a.observe(ctx)
	if err != nil {
		return preview.Result{}, err
	}
	return a.previewOf(ctx, seen, label, name)
}

// previewOf plans by an observation that the caller has made.
func (a *Agent) previewOf(ctx context.Context, seen state.Observed, label, name string) (preview.Result, error) {
	want := state.Desired{Name: name, Label: label}
	var wishes map[nvml.UUID]nvml.Wish
	var beyond []int
	geometry, pluginKey := preview.Parts(label, name)
	if geometry != "" {
		var profile config.Profile
		var err error
		if profile, wishes, beyond, err = a.resolver.Wishes(seen, label, geometry); err != nil {
			return preview.Result{}, err
		}
		if err := a.resolver.Apply(ctx, &seen, &want, profile, state.WithTargets(seen.GPUs, state.Targets(wishes))); err != nil {
			return preview.Result{}, err
		}
	}
	if pluginKey != "" {
		// The device plugin's config manager reads the label: it gets the value that it would have.
		seen.Node = seen.Node.DeepCopy()
		metav1.SetMetaDataLabel(&seen.Node.ObjectMeta, config.LabelDevicePluginConfig, pluginKey)
		if err := a.resolver.AskPlugin(ctx, &seen, &want, a.devicePlugin.AskedBy(seen.Node, pluginKey), func() (*state.DesiredPlugin, error) { return a.devicePlugin.NamedConfig(ctx, &seen, pluginKey) }); err != nil {
			return preview.Result{}, err
		}
	}
	want.Targets = state.Targets(wishes)
	if err := a.devicePlugin.Fits(ctx, seen, want); err != nil {
		return preview.Result{}, err
	}
	a.prover.Prove(&seen, want.Plugin)
	a.observeTaken(ctx, &seen, want, want.Targets)
	p, err := preview.Of(want.Planned(want.Targets), a.planned(seen, want))
	if err == nil && len(p.Steps) > 0 {
		p.Runs = a.gates.Runs(seen, want, p.Steps)
	}
	p.MIGStrategy, p.Beyond = a.devicePlugin.Strategy(seen, want.Plugin), beyond
	return p, err
}
