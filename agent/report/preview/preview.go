// Package preview says what a config would do to a node, by the plan that the agent would make, and changes nothing.
package preview

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// Result is what a config would do to the node.
type Result struct {
	Before, After []nvml.GPU
	Steps         []plan.Step
	AtReboot      []nvml.GPU         // GPUs that turn MIG mode on at the node's next reboot by a user or tool; the change goes on after it
	Reboot        bool               // the steps wait for a reboot, or do it
	Holders       []Holder           // processes that NVML shows on what the change takes away
	MIGStrategy   config.MIGStrategy // of the device plugin after the change; offline it is mixed, unless a config says another
	Handover      config.Handover    // offline only: the method that the agent is assumed to give the device plugin its config by, if it gives one
	Beyond        []int              // positions that the config names and the node does not have; the agent ignores them
	HeldUp        string             // why the agent would not begin the change now, by what it asks before it begins one; empty if it would, and offline
	Reason        config.Reason      // of HeldUp, as the node's condition would have it
	Lost          []string           // what is lost with the pods that leave, and comes back by nothing; empty offline
	Patience      time.Duration      // how long the agent waits for the pods, until it gives the change up; 0 if it does not, and offline
	Runs          string             // when the change would begin; empty offline, and if nothing is to do
}

// Holder is a GPU of which the change takes something, and the processes that NVML shows there.
type Holder struct {
	Index int // of the GPU
	PIDs  []int
}

// Ask is what the labels of a node would ask for: a profile, or a MIG config, a config of the device plugin, or both.
type Ask struct {
	Profile, MIGConfig string
	PluginConfig       string // a key of the ConfigMap of configs
}

// Label returns the label and the name of the config, for Plan.
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

// Parts splits what Label returns into the name of the MIG config or profile, and that of the config of the device plugin.
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

// Offline is what is known without a cluster: the GPUs, and files.
type Offline struct {
	GPUs    []nvml.GPU
	Catalog catalog.Catalog
	Plugin  map[string]catalog.PluginConfig // configs of the device plugin, by the key that a label would name
}

// Plan plans what the label would ask for, without a cluster. Label and name are those of an Ask.
func (o Offline) Plan(label, name string) (Result, error) {
	// Without a node Plan knows neither how its GPUs are shared, nor the device plugin's environment and arguments. It assumes that nothing
	// is shared, and that the config has the strategy with which overlays/device-plugin begins.
	has := catalog.PluginConfig{Sharing: catalog.Sharing{Strategy: catalog.SharingNone}, MIGStrategy: config.MIGStrategyMixed}
	seen := plan.Observed{GPUs: o.GPUs, Capacity: plan.Capacity{Agreed: plan.Proof}}
	geometry, pluginKey := Parts(label, name)
	want := state.Desired{}
	var profile catalog.Profile
	var requests map[nvml.UUID]nvml.Request
	var err error
	if geometry != "" {
		if requests, err = state.RequestsOf(o.Catalog, label, geometry, o.GPUs); err != nil {
			return Result{}, err
		}
	}
	if label == config.LabelProfile {
		profile, _ = o.Catalog.Profile(name)
		seen.Keys = len(profile.Labels)+len(profile.Taints) > 0
	}
	after := state.WithTargets(o.GPUs, state.Targets(requests))
	switch asked, there := o.Plugin[pluginKey]; {
	case pluginKey != "" && !there:
		return Result{}, fmt.Errorf("no config of the device plugin is named %q: the files have %s", pluginKey,
			cmp.Or(strings.Join(slices.Sorted(maps.Keys(o.Plugin)), ", "), "none"))
	case pluginKey != "":
		want.Plugin, err = requestedOffline(has, catalog.Profile{Sharing: &asked.Sharing, MIGStrategy: state.OrNone(asked.MIGStrategy)}, after)
	case profile.Sharing != nil || profile.MIGStrategy != "":
		want.Plugin, err = requestedOffline(has, profile, after)
	}
	if err != nil {
		return Result{}, err
	}
	if want.Plugin != nil {
		seen.Plugin = plan.Plugin{Now: state.PlannedSharing(has.Sharing, has.MIGStrategy), Reloaded: true, NeedsReload: true, Set: want.Plugin.Matches(&has)}
		has.MIGStrategy = want.Plugin.Strategy
	}
	p, err := Of(want.Planned(state.Targets(requests)), seen)
	p.MIGStrategy = has.MIGStrategy
	if want.Plugin != nil {
		p.Handover = config.HandoverFile
	}
	if _, isProfile := o.Catalog.Profile(geometry); label != config.LabelProfile || !isProfile {
		p.Beyond = o.Catalog.MissingPositions(geometry, o.GPUs)
	}
	return p, err
}

// requestedOffline returns the config that a profile asks for, if the device plugin has this config and no MIG strategy from elsewhere.
func requestedOffline(has catalog.PluginConfig, profile catalog.Profile, after []nvml.GPU) (*state.DesiredPlugin, error) {
	want := &state.DesiredPlugin{Sharing: has.Sharing, Known: true, Strategy: profile.MIGStrategy}
	if profile.Sharing != nil {
		want.Sharing = *profile.Sharing
	}
	if want.Strategy == "" {
		want.Strategy = catalog.FittingStrategy(after, has.MIGStrategy, want.Sharing.Strategy == catalog.SharingMPS)
	}
	if err := catalog.CheckStrategy(after, want.Strategy); err != nil {
		return nil, err
	}
	return want, catalog.CheckSharing(after, want.Strategy, want.Sharing, slices.Collect(maps.Keys(capacity.Expected(after, want.Strategy))))
}

// Of returns what the plan to the desired state would do.
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

// Losses names what is lost for good with the pods that the steps evict: files on the node's disk, and pods that no controller brings back.
func Losses(seen *state.Observed, steps []plan.Step) []string {
	var out []string
	for _, s := range steps {
		if s.Kind != plan.Evict {
			continue
		}
		for _, p := range seen.Drained(s.Pods) {
			if p.Controller == "" && !p.Mirror && !p.Terminating {
				out = append(out, fmt.Sprintf("pod %s, which no controller makes anew", p))
			}
			if len(p.EmptyDirs) > 0 {
				out = append(out, fmt.Sprintf("the files of %s on emptyDir %s", p, strings.Join(p.EmptyDirs, ", ")))
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// holdersOf returns the processes that NVML shows on what the plan takes.
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
