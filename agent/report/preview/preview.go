// Package preview says what a config would do to a node, by the plan that the agent would make, and changes nothing.
package preview

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Result is what a config would do to the node.
type Result struct {
	Before, After []nvml.GPU
	Steps         []plan.Step
	AtReboot      []nvml.GPU         // GPUs that turn MIG mode on at the node's next reboot by a user or tool; the change continues after it
	Reboot        bool               // the steps wait for a reboot, or do it
	Holders       []Holder           // processes that NVML shows on devices that the change removes
	MIGStrategy   config.MIGStrategy // of the device plugin after the change; offline mixed, unless a config says otherwise
	Handover      config.Handover    // offline only: the assumed method of giving the device plugin its config, if the change does
	Beyond        []int              // positions that the config names and the node does not have; the agent ignores them
	HeldUp        string             // why the agent would not begin the change now; empty if it would, and offline
	Reason        config.Reason      // of HeldUp, as the node's condition would have it
	Lost          []string           // what is lost for good with the pods that leave; empty offline
	Asked         []string           // pods that are asked behind the cordon, and until when; empty offline
	Notes         []string           // other effects of the change, and what else a user should know of the node before it; empty offline
	Unsure        string             // why it is not known whether the change ends; empty offline
	Offers        string             // what the node offers after the change; empty if that is not known
	Takes         time.Duration      // how long such changes took, at most, or are assumed to take; 0 offline
	Measured      bool               // Takes was measured on this node
	Patience      time.Duration      // how long the agent waits for the pods, until it gives the change up; 0 if it does not, and offline
	Runs          string             // when the change would begin; empty offline, and if nothing is to do
}

// Holder is a GPU that loses something by the change, and the processes that NVML shows there.
type Holder struct {
	Index int // of the GPU
	PIDs  []int
}

// Ask is a request as a node's labels would have it: a profile, or a MIG config, a config of the device plugin, or both.
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

// SetLabels sets the node's labels to the request that Label returns. The label of the device plugin's config stays unchanged under a profile, and
// wherever an agent has set it.
func SetLabels(node *corev1.Node, label, name string) {
	geometry, pluginKey := parts(label, name)
	delete(node.Labels, config.LabelProfile)
	delete(node.Labels, config.LabelMIGConfig)
	if label != config.LabelProfile && !strings.HasPrefix(node.Labels[config.LabelDevicePluginConfig], config.OwnPluginKey) {
		delete(node.Labels, config.LabelDevicePluginConfig)
	}
	if geometry != "" {
		metav1.SetMetaDataLabel(&node.ObjectMeta, label, geometry)
	}
	if pluginKey != "" {
		metav1.SetMetaDataLabel(&node.ObjectMeta, config.LabelDevicePluginConfig, pluginKey)
	}
}

// parts splits the name from Label into the MIG config or profile, and the config of the device plugin.
func parts(label, name string) (geometry, pluginKey string) {
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

// Offline has what is known without a cluster: the GPUs, and files.
type Offline struct {
	GPUs    []nvml.GPU
	Catalog catalog.Catalog
	Plugin  map[string]catalog.PluginConfig // configs of the device plugin, by the key that a label would name

	ByClaims bool // NVIDIA's DRA driver advertises the GPUs
}

// Plan plans the label's request without a cluster. Label and name are those of an Ask.
func (o Offline) Plan(label, name string) (Result, error) {
	seen := o.observed(label, name)
	resolver := decide.Resolver{
		Catalog: &o.Catalog, Settings: config.Settings{MIGStrategy: config.MIGStrategyAuto},
		Format: catalog.PluginFormat{
			Parse: func(key []byte) (catalog.PluginConfig, error) {
				read := o.Plugin[string(key)]
				read.MIGStrategy = state.OrNone(read.MIGStrategy) // nothing else is known to set one
				return read, nil
			},
			Render: func([]byte, catalog.Sharing, config.MIGStrategy) ([]byte, error) { return nil, nil }, // nothing is written
		},
	}
	want, err := resolver.Resolve(seen)
	if stalled, is := errors.AsType[*outcome.Stalled](err); is && stalled.Cause != nil {
		return Result{}, stalled.Cause // there is no label yet
	}
	if err != nil {
		return Result{}, err
	}
	planned := plan.Observed{
		GPUs: o.GPUs, Capacity: plan.Capacity{Agreed: plan.VerifiedAfter},
		Keys: want.Keys != nil && nodekeys.Unpublished(seen.Node, seen.Record.Learnt.Published, *want.Keys),
	}
	if want.Plugin != nil {
		planned.Plugin = seen.PlannedPlugin(want.Plugin)
	}
	if o.ByClaims {
		planned.ByClaims, planned.Operands = true, []plan.Operand{{Pod: plan.Pod{Driver: true}, Stays: true}}
	}
	steps, err := plan.Make(planned, want.Planned(want.Targets))
	p := Of(want.Planned(want.Targets), planned, steps)
	p.MIGStrategy, p.Beyond = offer.Of(seen).Strategy(config.MIGStrategyAuto, want.Plugin), want.MissingPositions
	p.Offers = offer.Of(seen).After(Named(p.After), want.Plugin, p.MIGStrategy)
	if want.Plugin != nil {
		p.Handover = config.HandoverFile
	}
	return p, err
}

// observed assumes a node with these labels and GPUs: it shares nothing, and the plugin reads its config from a file, with the MIG strategy of
// overlays/device-plugin. The plugin's environment and arguments are unknown.
func (o Offline) observed(label, name string) *state.Observed {
	seen := &state.Observed{Node: &corev1.Node{}, GPUs: o.GPUs}
	SetLabels(seen.Node, label, name)
	files := map[string]string{}
	for key := range o.Plugin {
		files[key] = key // Plan finds the parsed config by it
	}
	seen.Plugin = state.PluginConfig{
		Read: true, Method: config.HandoverFile, Exists: true,
		Current: &catalog.PluginConfig{Sharing: catalog.Sharing{Strategy: catalog.SharingNone}, MIGStrategy: config.MIGStrategyMixed},
		Named:   &state.PluginConfigs{Files: files},
	}
	_, key := parts(label, name)
	named, there := o.Plugin[key]
	switch asks := (&state.DesiredPlugin{Sharing: named.Sharing, Strategy: named.MIGStrategy}); {
	case key != "" && !there:
		seen.Plugin.Named.Err = fmt.Errorf("no config of the device plugin is named %q: the files have %s", key,
			cmp.Or(strings.Join(slices.Sorted(maps.Keys(files)), ", "), "none"))
	case there && asks.Matches(seen.Plugin.Current):
		seen.Plugin.Text = files[key]
	}
	return seen
}

// Of returns what the steps to the desired state would do.
func Of(want plan.Desired, seen plan.Observed, steps []plan.Step) Result {
	return Result{
		Before: seen.GPUs, After: plan.Result(seen.GPUs, steps), Steps: steps,
		AtReboot: plan.OnAtReboot(seen, want), Holders: holdersOf(seen.GPUs, plan.Takes(seen, want)),
		Reboot: plan.Has(steps, plan.Reboot),
	}
}

// Named returns planned GPUs with the devices of their instances by name: only the driver knows more of them.
func Named(gpus []nvml.GPU) []nvml.GPU {
	out := slices.Clone(gpus)
	for g := range out {
		out[g].Instances = slices.Clone(out[g].Instances)
		for i := range out[g].Instances {
			instance := &out[g].Instances[i]
			instance.Devices = nil
			for _, name := range instance.Placed.Devices() {
				instance.Devices = append(instance.Devices, nvml.Device{Profile: name})
			}
		}
	}
	return out
}

// Unsure says why it is not known whether the steps succeed: they touch GPUs that cannot be used or trusted. It is empty if they touch none.
func Unsure(causes []api.Finding, steps []plan.Step) string {
	var out []string
	for _, f := range causes {
		if i := slices.IndexFunc(steps, func(s plan.Step) bool { return s.GPU != "" && s.GPU == f.GPU }); i >= 0 {
			out = append(out, fmt.Sprintf("GPU %d, which the change touches, has %s: %s", steps[i].Index, f.Cause, f.Evidence))
		}
	}
	return sanitize.Listed(out)
}

// Overstaying names pods that are past their grace period and hold devices; empty for none. Nothing evicts them, and the change waits for them.
func Overstaying(pods []holders.Pod, now time.Time) string {
	var out []string
	for _, p := range pods {
		if p.Terminating && !p.GraceEnds.IsZero() && now.After(p.GraceEnds) {
			out = append(out, fmt.Sprintf("pod %s, which is past its grace period, may hold what is withdrawn", p))
		}
	}
	return sanitize.Listed(out)
}

// Staying names pods that have to leave, and may still be on the node when the agent gives the change up; empty for none. A pod may take longer to end than the
// agent waits. Or its successors tolerate the fence, and the agent evicts one after the other. Patience is 0 if the agent deletes the pods that stay.
func Staying(seen *state.Observed, steps []plan.Step, patience time.Duration, now time.Time) string {
	var out []string
	for _, s := range steps {
		if s.Kind != plan.Evict {
			continue
		}
		for _, p := range seen.Drained(s.Pods) {
			grace := p.Grace
			if p.Terminating {
				grace = p.GraceEnds.Sub(now)
			}
			if patience > 0 && grace > patience {
				out = append(out, fmt.Sprintf("pod %s may take %s to end, and the change is given up after %s", p,
					check.WithoutZeroParts(grace.Round(time.Second)), check.WithoutZeroParts(patience)))
			}
			if p.Controller != "" && state.PassesFence(p) {
				out = append(out, fmt.Sprintf("the successor of pod %s may start on this node at once, since it tolerates the cordon and the taint %s", p, config.TaintRepartitioning))
			}
		}
	}
	return sanitize.Listed(out)
}

// Losses names what is lost for good with the evicted pods: files on the node's disk, and pods that no controller recreates.
func Losses(seen *state.Observed, steps []plan.Step) []string {
	var out []string
	for _, s := range steps {
		if s.Kind != plan.Evict {
			continue
		}
		for _, p := range seen.Drained(s.Pods) {
			if p.Controller == "" && !p.Mirror && !p.Terminating {
				out = append(out, fmt.Sprintf("pod %s, which no controller recreates", p))
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
