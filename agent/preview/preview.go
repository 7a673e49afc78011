// Package preview says what a config would do to a node, by the plan that would be made, and changes nothing.
package preview

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Result is what a config would do to the node.
type Result struct {
	Before, After []nvml.GPU
	Steps         []plan.Step
	AtReboot      []nvml.GPU         // that turn MIG mode on at the node's next reboot, whoever does it; the change goes on after it
	Reboot        bool               // the steps wait for a reboot, or do it
	Holders       []Holder           // processes that NVML shows on what the change takes away
	MIGStrategy   config.MIGStrategy // of the device plugin after it; offline, taken to be mixed where nothing says another
	Handover      config.Handover    // by which the device plugin is taken to be given its config; offline alone, where it is given any
	Beyond        []int              // positions that the config names and the node does not have, which are passed over
	Runs          string             // when the change would begin; empty offline, and where nothing is to do
}

// Holder is a GPU of which something goes, and the processes that NVML shows on that.
type Holder struct {
	Index int // of the GPU
	PIDs  []int
}

// Ask is what the labels of a node would ask for: a profile, or a MIG config, a config of the device plugin, or both.
type Ask struct {
	Profile, MIGConfig string
	PluginConfig       string // a key of the ConfigMap of configs
}

// Label is the label that asks, and the name of what is asked for, as Plan takes them.
func (a Ask) Label() (label, name string) {
	switch {
	case a.Profile != "":
		return config.LabelProfile, a.Profile
	case a.PluginConfig == "":
		return config.LabelMIGConfig, a.MIGConfig
	case a.MIGConfig == "":
		return config.LabelDevicePluginConfig, a.PluginConfig
	default:
		return config.LabelMIGConfig, a.MIGConfig + api.DesiredSeparator + a.PluginConfig
	}
}

// Parts are the names of the MIG config or profile, and of the config of the device plugin, in what Label gives.
func Parts(label, name string) (geometry, pluginKey string) {
	switch label {
	case config.LabelDevicePluginConfig:
		return "", name
	case config.LabelMIGConfig:
		geometry, pluginKey, _ = strings.Cut(name, api.DesiredSeparator)
		return geometry, pluginKey
	default:
		return name, ""
	}
}

// Offline is what is known where no cluster is asked: the GPUs, and files.
type Offline struct {
	GPUs    []nvml.GPU
	Catalog config.Catalog
	Plugin  map[string]config.PluginConfig // configs of the device plugin, by the key that a label would name
}

// Plan plans what the label would ask for, as on a node that no cluster knows. Label and name are those of an Ask.
func (o Offline) Plan(label, name string) (Result, error) {
	// Without a node nobody knows how its GPUs are shared, or what the device plugin is told: as if they were not, and its config had
	// the strategy that overlays/device-plugin begins with.
	has := config.PluginConfig{Sharing: config.Sharing{Strategy: config.SharingNone}, MIGStrategy: config.MIGStrategyMixed}
	seen := plan.Observed{GPUs: o.GPUs, Capacity: plan.Capacity{Agreed: plan.Proof}}
	geometry, pluginKey := Parts(label, name)
	want := state.Desired{}
	var profile config.Profile
	var wishes map[nvml.UUID]nvml.Wish
	var err error
	if geometry != "" {
		if wishes, err = state.WishesOf(o.Catalog, label, geometry, o.GPUs); err != nil {
			return Result{}, err
		}
	}
	if label == config.LabelProfile {
		profile, _ = o.Catalog.Profile(name)
		seen.Keys = len(profile.Labels)+len(profile.Taints) > 0
	}
	after := state.WithTargets(o.GPUs, state.Targets(wishes))
	switch asked, there := o.Plugin[pluginKey]; {
	case pluginKey != "" && !there:
		return Result{}, fmt.Errorf("no config of the device plugin is named %q: the files have %s", pluginKey,
			cmp.Or(strings.Join(slices.Sorted(maps.Keys(o.Plugin)), ", "), "none"))
	case pluginKey != "":
		want.Plugin, err = wishOffline(has, config.Profile{Sharing: &asked.Sharing, MIGStrategy: state.OrNone(asked.MIGStrategy)}, after)
	case profile.Sharing != nil || profile.MIGStrategy != "":
		want.Plugin, err = wishOffline(has, profile, after)
	}
	if err != nil {
		return Result{}, err
	}
	if want.Plugin != nil {
		seen.Plugin = plan.Plugin{Now: state.PlannedSharing(has.Sharing, has.MIGStrategy), Reloaded: true, NeedsReload: true, Set: want.Plugin.Matches(&has)}
		has.MIGStrategy = want.Plugin.Strategy
	}
	p, err := Of(want.Planned(state.Targets(wishes)), seen)
	p.MIGStrategy = has.MIGStrategy
	if want.Plugin != nil {
		p.Handover = config.HandoverFile
	}
	if _, isProfile := o.Catalog.Profile(geometry); label != config.LabelProfile || !isProfile {
		p.Beyond = o.Catalog.MissingPositions(geometry, o.GPUs)
	}
	return p, err
}

// wishOffline is what a profile asks of a device plugin that has this config and is told nothing else.
func wishOffline(has config.PluginConfig, profile config.Profile, after []nvml.GPU) (*state.DesiredPlugin, error) {
	want := &state.DesiredPlugin{Sharing: has.Sharing, Known: true, Strategy: profile.MIGStrategy}
	if profile.Sharing != nil {
		want.Sharing = *profile.Sharing
	}
	if want.Strategy == "" {
		want.Strategy = config.FittingStrategy(after, has.MIGStrategy, want.Sharing.Strategy == config.SharingMPS)
	}
	if err := config.CheckStrategy(after, want.Strategy); err != nil {
		return nil, err
	}
	return want, config.CheckSharing(after, want.Strategy, want.Sharing, slices.Collect(maps.Keys(capacity.Expected(after, want.Strategy))))
}

// Of is what the plan to what is wanted would do.
func Of(want plan.Desired, seen plan.Observed) (Result, error) {
	steps, err := plan.Make(seen, want)
	if err != nil {
		return Result{Before: seen.GPUs}, err
	}
	return Result{
		Before: seen.GPUs, After: plan.Result(seen.GPUs, steps), Steps: steps,
		AtReboot: plan.OnAtReboot(seen, want), Holders: holdersOf(seen.GPUs, plan.Takes(seen, want)),
		Reboot: plan.Has(steps, plan.Reboot),
	}, nil
}

// holdersOf are the processes that NVML shows on what is taken.
func holdersOf(gpus []nvml.GPU, taken []plan.Taken) []Holder {
	var out []Holder
	for _, t := range taken {
		for _, gpu := range gpus {
			if gpu.UUID != t.GPU {
				continue
			}
			var found []int
			if t.Whole || t.Compute {
				found = nvml.PIDs(gpu.Processes)
			}
			for _, instance := range gpu.Instances {
				for _, d := range instance.Devices {
					if t.Whole || t.Compute || slices.Contains(t.Devices, d.UUID) {
						found = append(found, nvml.PIDs(instance.ProcessesOn(d))...)
					}
				}
			}
			slices.Sort(found)
			if found = slices.Compact(found); len(found) > 0 {
				out = append(out, Holder{Index: gpu.Index, PIDs: found})
			}
		}
	}
	return out
}
