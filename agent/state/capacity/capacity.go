// Package capacity compares the GPUs with the devices that kubelet allocates, and with the node object, which the scheduler reads.
package capacity

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// Resources maps the name of a resource to the sorted ids of its devices.
type Resources map[string][]string

// Expected lists the devices that the device plugin advertises for the GPUs under the strategy.
func Expected(gpus []nvml.GPU, strategy config.MIGStrategy) Resources {
	out := Resources{}
	for _, gpu := range gpus {
		if gpu.Lost {
			continue
		}
		if !gpu.Enabled || strategy == config.MIGStrategyNone {
			out[nvml.ResourceGPU] = append(out[nvml.ResourceGPU], string(gpu.UUID))
			continue
		}
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				name := nvml.ResourceGPU
				if strategy == config.MIGStrategyMixed {
					name = nvml.ResourceMIGPrefix + strings.ReplaceAll(d.Profile, "+", ".")
				}
				out[name] = append(out[name], d.UUID)
			}
		}
	}
	for _, ids := range out {
		slices.Sort(ids)
	}
	return out
}

// Shared returns the resources as the device plugin advertises them with the sharing: under the shared resource's name, with each device as often as it is
// shared.
func Shared(of Resources, s catalog.Sharing) Resources {
	out := Resources{}
	for resource, ids := range of {
		name, n := s.Offered(resource)
		for _, id := range ids {
			if n == 1 {
				out[name] = append(out[name], id)
				continue
			}
			for i := range n {
				out[name] = append(out[name], id+nvml.ReplicaSeparator+strconv.Itoa(i))
			}
		}
		slices.Sort(out[name])
	}
	return out
}

// Mismatches compares the desired devices, one by one, with those that kubelet allocates, and with the node's allocatable.
func Mismatches(want, kubelet Resources, allocatable corev1.ResourceList) []string {
	var out []string
	names := map[string]bool{}
	for name := range want {
		names[name] = true
	}
	for name := range kubelet {
		names[name] = nvml.GPUResource(name)
	}
	for name := range allocatable {
		names[string(name)] = nvml.GPUResource(string(name))
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if !names[name] {
			continue
		}
		switch wanted, given := want[name], kubelet[name]; {
		case len(given) != len(wanted):
			out = append(out, fmt.Sprintf("%s: %d desired, kubelet has %d", name, len(wanted), len(given)))
		case !slices.Equal(given, wanted):
			out = append(out, fmt.Sprintf("%s: kubelet has %d, but other devices than desired", name, len(given)))
		case Count(allocatable, name) != len(given):
			out = append(out, fmt.Sprintf("%s: kubelet has %d, the node object %d", name, len(given), Count(allocatable, name)))
		}
	}
	return out
}

// Summary writes the capacity for users to check: "nvidia.com/gpu 24 = 8 x 3 time-slicing". Sharing is how the device plugin shares GPUs; nil if it is not
// known.
func (r Resources) Summary(sharing *catalog.Sharing) string {
	if sharing == nil || sharing.Strategy == catalog.SharingNone {
		return r.String()
	}
	replicas := map[string]int{}
	for _, resource := range sharing.Resources() {
		name, n := sharing.Offered(resource)
		replicas[name] = n
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(r)) {
		text := fmt.Sprintf("%s %d", name, len(r[name]))
		if n := replicas[name]; n > 1 { // the text may set any number
			text += fmt.Sprintf(" = %d x %d %s", len(r[name])/n, n, sharing.Strategy)
		}
		parts = append(parts, text)
	}
	return cmp.Or(strings.Join(parts, ", "), "none")
}

// Offered returns the resources of GPUs that kubelet allocates, without those that have no devices.
func Offered(kubelet Resources) Resources {
	out := Resources{}
	for name, ids := range kubelet {
		if nvml.GPUResource(name) && len(ids) > 0 {
			out[name] = ids
		}
	}
	return out
}

// RunsUnder returns the MIG strategy that explains all devices of kubelet, if it differs from the one that the agent assumes; empty otherwise.
func RunsUnder(gpus []nvml.GPU, kubelet Resources, taken config.MIGStrategy) config.MIGStrategy {
	given := Resources{}
	for name, ids := range Offered(kubelet) {
		name = strings.TrimSuffix(name, nvml.SharedSuffix)
		given[name] = append(given[name], Physical(ids)...)
	}
	for name, ids := range given {
		slices.Sort(ids)
		given[name] = slices.Compact(ids)
	}
	wanted := Expected(gpus, taken).NamedBy(given)
	for _, other := range []config.MIGStrategy{config.MIGStrategyNone, config.MIGStrategySingle, config.MIGStrategyMixed} {
		would := Expected(gpus, other).NamedBy(given)
		if would.Equal(given) && !would.Equal(wanted) {
			return other
		}
	}
	return ""
}

// StaleFeatures returns the labels of GPU feature discovery that show another sharing of the resources than this one. It returns none if GPU feature
// discovery does not run.
func StaleFeatures(of Resources, sharing catalog.Sharing, labels map[string]string) []string {
	var out []string
	for _, resource := range slices.Sorted(maps.Keys(of)) {
		_, n := sharing.Offered(resource)
		strategy := catalog.SharingNone
		if n > 1 {
			strategy = sharing.Strategy
		}
		for label, value := range map[string]string{resource + ".replicas": strconv.Itoa(n), resource + ".sharing-strategy": string(strategy)} {
			if published, there := labels[label]; there && published != value {
				out = append(out, fmt.Sprintf("GPU feature discovery still says %s=%s, not %s", label, published, value))
			}
		}
	}
	slices.Sort(out)
	return out
}

// Equal reports whether both have the same devices, and at least one.
func (r Resources) Equal(other Resources) bool {
	return len(r) > 0 && maps.EqualFunc(r, other, slices.Equal)
}

// NamedBy gives the hardware's devices the names that the node's plugin advertises them by. Plugins before v0.20 leave out the attributes of a profile: they
// advertise a 1g.10gb+me as nvidia.com/mig-1g.10gb.
func (r Resources) NamedBy(kubelet Resources) Resources {
	out := Resources{}
	for name, ids := range r {
		profile, plain := strings.CutPrefix(name, nvml.ResourceMIGPrefix)
		size, _, is := strings.Cut(profile, "gb")
		if plain && is && len(kubelet[name])+len(kubelet[name+nvml.SharedSuffix]) == 0 {
			name = nvml.ResourceMIGPrefix + size + "gb"
		}
		out[name] = append(out[name], ids...)
	}
	for _, ids := range out {
		slices.Sort(ids)
	}
	return out
}

// String lists names and counts: "nvidia.com/mig-1g.10gb 16, nvidia.com/mig-3g.40gb 8".
func (r Resources) String() string {
	if len(r) == 0 {
		return "none"
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(r)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, len(r[name])))
	}
	return strings.Join(parts, ", ")
}

// Disagreements compares the hardware with kubelet's devices and with the node's allocatable. It returns nothing if all three agree. It compares devices by
// id, since equal counts of old ids show nothing.
func Disagreements(hardware Resources, kubelet Resources, allocatable corev1.ResourceList) []string {
	var out []string
	hardware = hardware.NamedBy(kubelet)
	seen := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(hardware)) {
		shown := name
		if len(kubelet[name]) == 0 && len(kubelet[name+nvml.SharedSuffix]) > 0 {
			shown = name + nvml.SharedSuffix
		}
		seen[shown] = true
		switch ids := Physical(kubelet[shown]); {
		case len(ids) != len(hardware[name]):
			out = append(out, fmt.Sprintf("%s: the GPUs have %d, kubelet %d", name, len(hardware[name]), len(ids)))
		case !slices.Equal(ids, hardware[name]):
			out = append(out, fmt.Sprintf("%s: kubelet still has devices that no longer exist", name))
		default:
			if n := Count(allocatable, shown); n != len(kubelet[shown]) {
				out = append(out, fmt.Sprintf("%s: kubelet has %d, the node object %d", shown, len(kubelet[shown]), n))
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(kubelet)) {
		if nvml.GPUResource(name) && !seen[name] && len(kubelet[name]) > 0 {
			seen[name] = true
			out = append(out, fmt.Sprintf("%s: the GPUs have none, kubelet %d", name, len(kubelet[name])))
		}
	}
	for name := range allocatable {
		if n := Count(allocatable, string(name)); nvml.GPUResource(string(name)) && !seen[string(name)] && n > 0 {
			out = append(out, fmt.Sprintf("%s: the GPUs have none, the node object %d", name, n))
		}
	}
	slices.Sort(out)
	return out
}

// StaleResources lists resources that stay on the node object at 0 after their plugin has stopped: kubelet never removes them.
func StaleResources(kubelet Resources, allocatable corev1.ResourceList) []string {
	var out []string
	for name := range allocatable {
		if nvml.GPUResource(string(name)) && Count(allocatable, string(name)) == 0 && len(kubelet[string(name)]) == 0 {
			out = append(out, string(name))
		}
	}
	slices.Sort(out)
	return out
}

// Count returns how many devices of the resource the list has.
func Count(list corev1.ResourceList, name string) int {
	quantity := list[corev1.ResourceName(name)]
	return int(quantity.Value())
}

// Physical cuts the replica numbers off the ids, and returns each device once.
func Physical(ids []string) []string {
	out := make([]string, len(ids))
	for i, id := range ids {
		out[i] = DeviceOf(id)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Withheld reports whether kubelet does not allocate all devices of the GPU.
func Withheld(gpu nvml.GPU, strategy config.MIGStrategy, kubelet Resources) bool {
	offered := map[string]bool{}
	for _, ids := range Offered(kubelet) {
		for _, id := range Physical(ids) {
			offered[id] = true
		}
	}
	for _, ids := range Expected([]nvml.GPU{gpu}, strategy) {
		if slices.ContainsFunc(ids, func(id string) bool { return !offered[id] }) {
			return true
		}
	}
	return false
}

// VerifyInterval is the least time between two observations that both count. A plugin that registers and then fails, or registers twice, does so within a
// second or two. A DRA driver opens its sockets and publishes at once, and kubelet registers sockets once a second (loopSleepDuration of its plugin manager):
// nothing shows the agent when it has. A pod that comes before cannot get its devices, and kubelet tries again after 10 to 15 seconds. So the slices alone, however
// new, do not stand for the second observation. That kubelet deletes slices when it starts, and 30 seconds after the last connection to their driver has ended unless
// another has begun, is seen at rest.
const VerifyInterval = 2 * time.Second

// Agreement is how often the agent has seen hardware, kubelet and node agree, and when last.
type Agreement struct {
	Agreed     int // observations in a row
	at         time.Time
	StaleSince time.Time // when the agent first saw that labels of GPU feature discovery lag behind the change
}

// Forget drops all observations, since the clock was set.
func (p *Agreement) Forget(time.Time) { *p = Agreement{} }

// Left returns how long it is until another observation counts; 0 or less if one would now.
func (p *Agreement) Left(now time.Time) time.Duration { return VerifyInterval - now.Sub(p.at) }

// CountFirst counts an observation that agrees although something else is still missing: it can be the first of the two, but not the last.
func (p *Agreement) CountFirst(now time.Time) {
	if p.Agreed == 0 {
		p.at = now
	}
	p.Agreed = 1
}

// Count adds an observation, if it comes long enough after the last.
func (p *Agreement) Count(agrees bool, now time.Time) {
	switch {
	case !agrees:
		p.Agreed = 0
	case p.Agreed == 0 || p.Left(now) <= 0:
		p.Agreed++
		p.at = now
	}
}
