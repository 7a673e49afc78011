package catalog

import (
	"maps"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// balancedCounts has NVIDIA's balanced cut by a GPU's compute slices: how many instances of how many slices.
var balancedCounts = map[int]map[int]int{
	7: {1: 2, 2: 1, 3: 1},
	4: {1: 2, 2: 1},
}

// GeneratedPrefix begins the name of each generated config: all-disabled, all-1g.10gb. A user's config may begin with it too.
const GeneratedPrefix = "all-"

// Generate makes the configs that NVIDIA's k8s-mig-manager makes for the node's GPUs, with its names: all-disabled, all-enabled, all-balanced, and
// one for each profile of any GPU, which fills GPUs with it. A profile's "+" is "." in the name, since a label cannot have a "+".
//
// The rules are NVIDIA's too, except on nodes where some GPUs cannot do MIG. There NVIDIA's rules request MIG on all GPUs, and its own tool never
// finds them met. Generate requests MIG on the capable GPUs, and MIG off on the others.
func Generate(gpus []nvml.GPU) map[string]MIGConfig {
	kinds, incapable := kindsOf(gpus)

	// rules makes a config of the rules for capable GPUs. On a node with one kind of GPU it drops their filters.
	rules := func(capable ...MIGRule) MIGConfig {
		if len(kinds)+len(incapable) <= 1 {
			for i := range capable {
				capable[i].DeviceFilter = nil
			}
			return capable
		}
		if len(incapable) > 0 {
			capable = append(capable, MIGRule{DeviceFilter: incapable, All: true})
		}
		return capable
	}

	configs := map[string]MIGConfig{"all-disabled": {{All: true}}}
	enabled := MIGRule{All: true, MIG: true, Devices: map[string]int{}}
	if len(kinds) == 0 {
		configs["all-enabled"] = MIGConfig{enabled}
		return configs
	}
	if len(incapable) > 0 {
		enabled.DeviceFilter = slices.Sorted(maps.Keys(kinds))
	}
	configs["all-enabled"] = rules(enabled)
	if filled := balancedRules(kinds); len(filled) > 0 {
		configs["all-balanced"] = rules(filled...)
	}
	for _, profile := range profileNames(kinds) {
		configs[GeneratedPrefix+strings.ReplaceAll(profile, "+", ".")] = rules(fillingRules(kinds, profile)...)
	}
	return configs
}

// kindsOf lists the node's kinds of GPU by device filter. Capable kinds have the profiles that each of their GPUs offers, as many as a GPU holds. The
// kinds that cannot do MIG are sorted.
func kindsOf(gpus []nvml.GPU) (capable map[string][]nvml.Profile, incapable []string) {
	capable = map[string][]nvml.Profile{}
	for _, g := range gpus {
		if !g.Capable {
			continue
		}
		offered, seen := capable[FilterOf(g)]
		if !seen {
			offered = slices.Clone(g.Profiles)
			for i := range offered {
				offered[i].Max = g.Holds(offered[i])
			}
		}
		capable[FilterOf(g)] = slices.DeleteFunc(offered, func(p nvml.Profile) bool {
			_, ok := g.Profile(p.Name)
			return !ok
		})
	}
	for _, g := range gpus {
		if _, ok := capable[FilterOf(g)]; !ok {
			incapable = append(incapable, FilterOf(g))
		}
	}
	slices.Sort(incapable)
	return capable, slices.Compact(incapable)
}

func profileNames(kinds map[string][]nvml.Profile) []string {
	var names []string
	for _, profiles := range kinds {
		for _, p := range profiles {
			if p.Max > 0 {
				names = append(names, p.Name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// fillingRules has one rule for each number of instances of the profile that fills a kind of GPU.
func fillingRules(kinds map[string][]nvml.Profile, profile string) []MIGRule {
	filters := map[int][]string{}
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		for _, p := range kinds[kind] {
			if p.Name == profile && p.Max > 0 {
				filters[p.Max] = append(filters[p.Max], kind)
			}
		}
	}
	var rules []MIGRule
	for _, n := range slices.Sorted(maps.Keys(filters)) {
		rules = append(rules, MIGRule{DeviceFilter: filters[n], All: true, MIG: true, Devices: map[string]int{profile: n}})
	}
	return rules
}

// balancedRules has one rule for each kind of GPU that offers the profiles of a balanced cut.
func balancedRules(kinds map[string][]nvml.Profile) []MIGRule {
	var rules []MIGRule
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		if devices := balancedDevices(kinds[kind]); devices != nil {
			rules = append(rules, MIGRule{DeviceFilter: []string{kind}, All: true, MIG: true, Devices: devices})
		}
	}
	return rules
}

// balancedDevices is the balanced cut of a GPU with these profiles, nil if it has none. It ignores profiles with attributes. Among profiles with the
// same number of compute slices it takes the one that fits most often, and so has the least memory: 1g.10gb rather than 1g.20gb.
func balancedDevices(profiles []nvml.Profile) map[string]int {
	best := map[int]nvml.Profile{}
	total := 0
	for _, p := range profiles {
		if strings.ContainsAny(p.Name, "+-") {
			continue
		}
		total = max(total, p.Slices)
		if have, ok := best[p.Slices]; !ok || p.Max > have.Max {
			best[p.Slices] = p
		}
	}
	devices := map[string]int{}
	for size, n := range balancedCounts[total] {
		p, ok := best[size]
		if !ok {
			return nil
		}
		devices[p.Name] = n
	}
	if len(devices) == 0 {
		return nil
	}
	return devices
}
