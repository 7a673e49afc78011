// Package render makes queues, quotas and hardware profiles for the slices of a cluster's GPUs, from the profiles of its pools and the pools' nodes.
// A quota is what a node of the profile advertises, times the nodes.
//
// Only the command reads a cluster (command.go); no part asks a GPU. Whether the GPUs have room for a profile's instances is for a plan on the hardware to say.
package render

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// Bounds of a pool. No machine has as many GPUs, and no cluster as many nodes.
const (
	mostGPUs  = 64
	mostNodes = 100_000
)

// Pool is how many nodes of one kind ask for a profile.
type Pool struct {
	Name  string // of the profile, or of the MIG config
	Nodes int
	GPUs  int    // of each node
	Model string // as nvidia-smi -L prints it, or as GPU feature discovery labels nodes, with dashes
	Type  string // instance type of the cloud, by which its nodes have a flavor of their own; empty for any
}

var poolForm = regexp.MustCompile(`^([^=]+)=([0-9]{1,6})x([0-9]{1,3})(?::([^@]+))?(?:@(.+))?$`)

// ParsePool reads a pool as people write it: "small-inference=4x8:NVIDIA A100-SXM4-80GB" are 4 nodes of 8 GPUs. The model may be left out
// where the profile selects GPUs by none. "l4=1x1:NVIDIA-L4@g6.4xlarge" are nodes of an instance type.
func ParsePool(text string) (Pool, error) {
	m := poolForm.FindStringSubmatch(text)
	if m == nil {
		return Pool{}, fmt.Errorf("pool %q: write PROFILE=NODESxGPUS:MODEL, like small-inference=4x8:NVIDIA-A100-SXM4-80GB", sanitize.Cut(text, longestName))
	}
	if problems := validation.IsValidLabelValue(m[5]); len(problems) > 0 {
		return Pool{}, fmt.Errorf("pool %s: %q is no instance type: %s", sanitize.Cut(m[1], longestName), sanitize.Cut(m[5], longestName), problems[0])
	}
	nodes, err := strconv.Atoi(m[2])
	gpus, err2 := strconv.Atoi(m[3])
	switch {
	case err != nil || nodes < 1 || nodes > mostNodes:
		return Pool{}, fmt.Errorf("pool %s: %s nodes: there can be 1 to %d", sanitize.Cut(m[1], longestName), m[2], mostNodes)
	case err2 != nil || gpus < 1 || gpus > mostGPUs:
		return Pool{}, fmt.Errorf("pool %s: %s GPUs of a node: there can be 1 to %d", sanitize.Cut(m[1], longestName), m[3], mostGPUs)
	}
	return Pool{Name: m[1], Nodes: nodes, GPUs: gpus, Model: m[4], Type: m[5]}, nil
}

// longestName bounds a name in a message, in characters.
const longestName = 100

// Sources are where profiles come from.
type Sources struct {
	MIG      map[string]catalog.MIGConfig
	Profiles map[string]catalog.Profile
	Plugin   map[string]catalog.PluginConfig
	Strategy config.MIGStrategy // of the device plugin, for profiles that name none; empty for one that fits
	DRA      bool               // the nodes have NVIDIA's DRA driver in place of the device plugin, and each device has a name of its own
}

// Offer is one resource that nodes of a pool advertise.
type Offer struct {
	Resource string
	Total    int // of all nodes
	OfNode   int // of the node that has most
	Device   string
	Replicas int // how many pods share each device
}

// Slice reports whether it is a MIG device.
func (o Offer) Slice() bool { return o.Device != "" }

// Given is what the nodes of one name advertise, and how pods get to them.
type Given struct {
	Name        string // as Kubernetes takes it
	Profile     string // as the label has it
	Description string
	Pools       []Pool
	Labels      map[string]string   // that all nodes of the pool have, and no others
	Taints      []corev1.Taint      // that pods tolerate
	Offers      []Offer             // by resource
	Host        corev1.ResourceList // besides GPUs, of all its nodes together; without what is not known of each
	Doubts      []string            // why nodes may refuse the config, by NVIDIA's tables of their model
}

// Left is a pool with a config or profile that cannot be computed, and why.
type Left struct {
	Pool Pool
	Err  error
}

// Resolve finds out what pools give, in the order of their names' first appearance. Pools of one name and instance type are one. The others are left.
// Pools of one name that give a resource in two classes are left too, all of the name: one flavor would select the nodes of both.
func Resolve(from Sources, pools []Pool) (out []Given, left []Left) {
	mixed := map[string]error{} // by the name of what is given
	for _, p := range pools {
		g, err := from.given(p.Name, p.Type)
		i := slices.IndexFunc(out, func(other Given) bool { return other.Name == g.Name })
		if err == nil && i >= 0 && out[i].Profile != p.Name {
			err = fmt.Errorf("%s and %s would both be named %s, as Kubernetes takes names: rename one of the two", out[i].Profile, p.Name, g.Name)
		}
		if err == nil && slices.ContainsFunc(out, func(other Given) bool {
			return other.Profile == p.Name && (other.Pools[0].Type == "") != (p.Type == "")
		}) {
			err = fmt.Errorf("pool %s: name the instance type of all its nodes or of none: a flavor without a type has the nodes of each", p.Name)
		}
		if err != nil {
			left = append(left, Left{p, err})
			continue
		}
		offers, doubt, err := from.offers(p)
		if err != nil {
			left = append(left, Left{p, fmt.Errorf("pool %s: %w", p.Name, err)})
			continue
		}
		if i < 0 {
			i, out = len(out), append(out, g)
		}
		mixed[g.Name] = cmp.Or(mixed[g.Name], mixes(out[i], p, offers))
		out[i].Pools = append(out[i].Pools, p)
		out[i].Offers = added(out[i].Offers, offers)
		if doubt != "" && !slices.Contains(out[i].Doubts, doubt) {
			out[i].Doubts = append(out[i].Doubts, doubt)
		}
	}
	return leaving(out, left, mixed)
}

// leaving moves what is mixed, by its name, from given to left.
func leaving(given []Given, left []Left, mixed map[string]error) ([]Given, []Left) {
	for _, g := range given {
		for _, p := range g.Pools {
			if err := mixed[g.Name]; err != nil {
				left = append(left, Left{p, err})
			}
		}
	}
	return slices.DeleteFunc(given, func(g Given) bool { return mixed[g.Name] != nil }), left
}

// mixes refuses a pool that gives a resource in another class than the pools before it do.
func mixes(g Given, p Pool, offers []Offer) error {
	for _, o := range offers {
		for _, h := range g.Offers {
			if h.Resource == o.Resource && h.isolated() != o.isolated() {
				return fmt.Errorf("profile %s gives %s as %s on %s and as %s on %s: a flavor would select both, and a pod that is to have one may get the other: write a profile for each model",
					sanitize.Cut(p.Name, longestName), o.Resource, h.isolated(), modelOf(g.Pools[0]), o.isolated(), modelOf(p))
			}
		}
	}
	return nil
}

// modelOf is the model of a pool's GPUs for people.
func modelOf(p Pool) string {
	model := sanitize.Cut(cmp.Or(p.Model, "a pool without a model"), longestName)
	if p.Type != "" {
		model += " of " + p.Type
	}
	return model
}

func (from Sources) given(name, instanceType string) (Given, error) {
	g := Given{Name: objectName(name), Profile: name}
	if instanceType != "" {
		g.Name += "-" + objectName(instanceType)
	}
	profile, isProfile := from.Profiles[name]
	_, isConfig := catalog.Merge(nil, from.MIG).Config(name)
	switch {
	case !isProfile && !isConfig && catalog.IsSpelled(name):
		_, err := catalog.Spelled(name)
		return g, err
	case !isProfile && !isConfig && strings.HasPrefix(name, catalog.GeneratedPrefix):
		return g, fmt.Errorf("%s is not in the files: the agent makes such configs from the GPUs that it sees, and here are none; write it into a file of MIG configs", name)
	case !isProfile && !isConfig:
		known := slices.Sorted(maps.Keys(from.Profiles))
		return g, &catalog.UnknownConfigError{Profile: true, Name: name, Close: check.Closest(name, known), Known: slices.AppendSeq(known, maps.Keys(from.MIG))}
	case isProfile:
		g.Description, g.Taints = profile.Description, profile.Taints
		g.Labels = map[string]string{config.LabelProfile: name}
	default:
		g.Labels = map[string]string{config.LabelMIGConfig: name}
	}
	g.selects(profile.Labels, instanceType)
	if problems := validation.IsDNS1123Subdomain(g.Name); len(problems) > 0 {
		return g, fmt.Errorf("%s cannot be the name of an object: %s", name, problems[0])
	}
	return g, nil
}

// selects adds labels of the pool's nodes to the one that requests the profile, and the taint of nodes with GPUs.
func (g *Given) selects(published map[string]string, instanceType string) {
	// Clouds and installers taint nodes with GPUs so. Profiles may not, and no pool's description says whether its nodes have the taint.
	if byInstaller := (corev1.Taint{Key: nvml.ResourceGPU, Effect: corev1.TaintEffectNoSchedule}); len(g.Taints) < mostLabels {
		g.Taints = append(slices.Clone(g.Taints), byInstaller)
	}
	// Until its change has ended, and after one that was undone, a node is of another class than its label requests.
	g.Labels[config.LabelMIGConfigState] = string(config.StateSuccess)
	if instanceType != "" {
		g.Labels[corev1.LabelInstanceTypeStable] = instanceType
	}
	for _, key := range slices.Sorted(maps.Keys(published)) {
		if len(g.Labels) < mostLabels { // those above select the nodes by themselves
			g.Labels[key] = published[key]
		}
	}
}

// objectName turns the value of a label into a name that Kubernetes takes for objects.
func objectName(value string) string {
	name := strings.ReplaceAll(strings.ToLower(value), "_", "-")
	return badDots.ReplaceAllString(name, "-")
}

// badDots are dots beside a sign that no part of a name begins or ends with.
var badDots = regexp.MustCompile(`[.-]*\.[.-]+|-+\.`)

// offers is what one pool advertises. The doubt says why its nodes may refuse that.
func (from Sources) offers(p Pool) (out []Offer, doubt string, err error) {
	gpus := make([]nvml.GPU, p.GPUs)
	for i := range gpus {
		gpus[i] = nvml.GPU{UUID: nvml.UUID(strconv.Itoa(i)), Index: i, Model: dashed(p.Model), Capable: true, ComputeCapability: newest}
	}
	profile := from.Profiles[p.Name]
	profile.MIG = withDashes(profile.MIG)
	configs := catalog.Merge(from.MIG, nil).WithProfiles(map[string]catalog.Profile{p.Name: profile})
	if _, isProfile := from.Profiles[p.Name]; !isProfile {
		configs = catalog.Merge(from.MIG, nil)
	}
	requests, err := configs.ProfileRequests(p.Name, gpus)
	if none, ok := errors.AsType[*catalog.NoSelectedGPUError](err); ok && p.Model == "" {
		return nil, "", fmt.Errorf("the profile is about %s: name the model of its GPUs, like %s=%dx%d:NVIDIA-A100-SXM4-80GB",
			sanitize.Listed(none.Selectors), p.Name, p.Nodes, p.GPUs)
	}
	if err != nil {
		return nil, "", err
	}
	if err := bounded(requests); err != nil {
		return nil, "", err
	}
	after := slices.Clone(gpus)
	for i, gpu := range gpus {
		if w, named := requests[gpu.UUID]; named {
			after[i] = gpu.With(w)
		}
	}
	sharing := catalog.Sharing{Strategy: catalog.SharingNone}
	if profile.Sharing != nil {
		sharing = *profile.Sharing
	}
	strategy := cmp.Or(profile.MIGStrategy, from.Strategy)
	switch {
	case from.DRA:
		if err := takenByDRA(after, sharing); err != nil {
			return nil, "", err
		}
		strategy = config.MIGStrategyMixed
	case strategy == "":
		strategy = catalog.FittingStrategy(after, config.MIGStrategyMixed, sharing.Strategy == catalog.SharingMPS)
	}
	if err := catalog.CheckStrategy(after, strategy); err != nil {
		return nil, "", err
	}
	expected := capacity.Expected(after, strategy)
	if err := catalog.CheckSharing(after, strategy, sharing, slices.Collect(maps.Keys(expected))); err != nil {
		return nil, "", err
	}
	return offered(p, after, expected, sharing), doubtOf(p, requests), nil
}

// doubtOf says why the pool's model may refuse what is requested of it; empty if it does not, or if the model is not known.
func doubtOf(p Pool, requests map[nvml.UUID]nvml.Request) string {
	shape := features.GPUs{Model: dashed(p.Model)}.Shape()
	for _, gpu := range slices.Sorted(maps.Keys(requests)) {
		if why := shape.Refuses(requests[gpu].Devices); why != "" {
			return fmt.Sprintf("%s: by NVIDIA's tables %s %s: agents refuse it there, and the objects promise what such nodes do not offer", sanitize.Cut(p.Name, longestName), sanitize.Cut(p.Model, longestName), why)
		}
	}
	return ""
}

// bounded refuses requests for more slices than any GPU holds.
func bounded(requests map[nvml.UUID]nvml.Request) error {
	for _, w := range requests {
		total := 0
		for _, n := range w.Devices {
			if total += n; total > nvml.MaxDevices {
				return fmt.Errorf("more than %d slices of a GPU are requested, and none holds as many", nvml.MaxDevices)
			}
		}
	}
	return nil
}

// newest is a compute capability that refuses nothing that some GPU can.
var newest = nvml.ComputeCapability{Major: 9}

func offered(p Pool, after []nvml.GPU, expected capacity.Resources, sharing catalog.Sharing) []Offer {
	slice := "" // under single, a MIG device is a GPU by name
	for _, gpu := range after {
		for _, i := range gpu.Instances {
			slice = i.Devices[0].Profile
		}
	}
	var out []Offer
	for _, resource := range slices.Sorted(maps.Keys(expected)) {
		name, replicas := sharing.Offered(resource)
		n := len(expected[resource]) * replicas
		o := Offer{Resource: name, Total: n * p.Nodes, OfNode: n, Replicas: replicas}
		switch mig, isMIG := strings.CutPrefix(resource, nvml.ResourceMIGPrefix); {
		case isMIG:
			o.Device = mig
		case !slices.ContainsFunc(after, func(g nvml.GPU) bool { return !g.Enabled }):
			o.Device = slice
		}
		out = append(out, o)
	}
	return out
}

func added(have, more []Offer) []Offer {
	for _, o := range more {
		if i := slices.IndexFunc(have, func(h Offer) bool { return h.Resource == o.Resource }); i >= 0 {
			have[i].Total += o.Total
			have[i].OfNode = max(have[i].OfNode, o.OfNode)
			continue
		}
		have = append(have, o)
	}
	slices.SortFunc(have, func(a, b Offer) int { return cmp.Compare(a.Resource, b.Resource) })
	return have
}

// dashed is a model as GPU feature discovery writes it into labels, which have no spaces.
func dashed(model string) string { return strings.ReplaceAll(model, " ", "-") }

// withDashes has rules select models by their names in labels.
func withDashes(rules catalog.MIGConfig) catalog.MIGConfig {
	rules = slices.Clone(rules)
	for i, rule := range rules {
		rules[i].Models = nil
		for _, pattern := range rule.Models {
			rules[i].Models = append(rules[i].Models, dashed(pattern))
		}
	}
	return rules
}
