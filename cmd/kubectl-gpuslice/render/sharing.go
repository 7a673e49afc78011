package render

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// leftOut is the key under which poolsOf lists the nodes that count for no pool.
var leftOut = Pool{}

// shares says why a node may share its devices although the profile or config that it requests names no sharing; empty if nothing says so. If the profile
// names its sharing, the agent applies it. Under NVIDIA's DRA driver no device plugin shares.
func (from Sources) shares(n *corev1.Node, p Pool) string {
	if from.DRA || from.Profiles[p.Name].Sharing != nil {
		return ""
	}
	name := sanitize.Cut(p.Name, longestName)
	if key := n.Labels[config.LabelDevicePluginConfig]; key != "" {
		label := config.LabelDevicePluginConfig + "=" + sanitize.Cut(key, longestName)
		switch plugin, known := from.Plugin[key]; {
		case !known:
			return fmt.Sprintf("its label %s names a config that is not in the files, and %s names no sharing: give the config by -f, or name the sharing in a profile",
				label, name)
		case plugin.Sharing.Strategy != catalog.SharingNone:
			return fmt.Sprintf("its label %s requests sharing by %s, and %s names no sharing: name it in a profile", label, plugin.Sharing.Strategy, name)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(n.Labels)) {
		if saysShared(key, n.Labels[key]) {
			return fmt.Sprintf("its label %s=%s says that it shares, and %s names no sharing: name it in a profile",
				sanitize.Cut(key, longestName), sanitize.Cut(n.Labels[key], longestName), name)
		}
	}
	capacity := reportedBy(n).Capacity
	for _, strategy := range []catalog.SharingStrategy{catalog.SharingTimeSlicing, catalog.SharingMPS} {
		if strings.Contains(capacity+",", " "+string(strategy)+",") {
			return fmt.Sprintf("its agent says that it shares: %s, and %s names no sharing: name it in a profile",
				sanitize.Message(capacity, longestMessage), name)
		}
	}
	return from.offersMore(n, p)
}

// offersMore says that a node which is not being changed offers more devices than its profile makes. An agent that no one has asked for a sharing does not
// report which there is.
func (from Sources) offersMore(n *corev1.Node, p Pool) string {
	if state := config.State(n.Labels[config.LabelMIGConfigState]); p.GPUs == 0 || state != "" && state != config.StateSuccess {
		return ""
	}
	offers, _, err := from.offers(p)
	if err != nil {
		return ""
	}
	for _, o := range offers {
		if has := n.Status.Allocatable[corev1.ResourceName(o.Resource)]; has.CmpInt64(int64(o.OfNode)) > 0 {
			return fmt.Sprintf("it offers %s of %s, and %s makes %d: it may share them: name the sharing in a profile",
				has.String(), o.Resource, sanitize.Cut(p.Name, longestName), o.OfNode)
		}
	}
	return ""
}

// driven says that a DRA driver, as far as the node's agent sees, has the GPUs: pods that request resources of a device plugin do not run there.
func (from Sources) driven(n *corev1.Node) string {
	switch owner := reportedBy(n).Owner; owner {
	case api.OwnerDRAStatic, api.OwnerDRADynamic, api.OwnerDRAStarting:
		if !from.DRA {
			return fmt.Sprintf("its agent says that NVIDIA's DRA driver has its GPUs (%s), so it offers no resources of the device plugin: count it with --dra", owner)
		}
	case api.OwnerBoth:
		return "its agent says that several programs advertise its GPUs, or a DRA driver other than NVIDIA's"
	case api.OwnerNone, api.OwnerPlugin:
	}
	return ""
}

// ofDiscovery are the ends of GPU feature discovery's labels about sharing.
var ofDiscovery = []string{".sharing-strategy", ".replicas", ".product"}

// isOfDiscovery reports whether GPU feature discovery says by the label how a resource is shared.
func isOfDiscovery(key string) bool {
	return slices.ContainsFunc(ofDiscovery, func(end string) bool {
		resource, is := strings.CutSuffix(key, end)
		return is && nvml.GPUResource(resource)
	})
}

func saysShared(key, value string) bool {
	switch {
	case !isOfDiscovery(key):
		return false
	case strings.HasSuffix(key, ".product"):
		return strings.HasSuffix(value, features.SuffixShared)
	case strings.HasSuffix(key, ".replicas"):
		n, err := strconv.Atoi(value)
		return err == nil && n > 1
	}
	return value == string(catalog.SharingTimeSlicing) || value == string(catalog.SharingMPS)
}

// apart keeps pods of a pool off nodes of another class. It adds labels of GPU feature discovery that all nodes of the pool have, and those nodes have not.
// Where no such label is, the pool is left.
func (from Sources) apart(given []Given, nodes map[Pool][]pooled) (out []Given, left []Left) {
	for _, g := range given {
		var own, others []pooled
		for kind, of := range nodes {
			if slices.ContainsFunc(g.Pools, func(p Pool) bool { return kindOf(p) == kind }) {
				own = append(own, of...)
				continue
			}
			others = append(others, slices.DeleteFunc(slices.Clone(of), func(n pooled) bool { return from.sameClass(g, n) })...)
		}
		g, reached := g.without(own, others)
		if len(reached) == 0 {
			out = append(out, g)
			continue
		}
		names := namesOf(reached)
		slices.Sort(names)
		for _, p := range g.Pools {
			left = append(left, Left{p, fmt.Errorf(
				"pool %s: its pods would also run on others with its labels, which share their GPUs otherwise, or may (%s): these have each label of GPU feature discovery "+
					"that all of its nodes have. Name the sharing of each in a profile, and remove %s from nodes that have one",
				sanitize.Cut(g.Profile, longestName), sanitize.Listed(names), config.LabelMIGConfig)})
		}
	}
	return out, left
}

// sameClass reports whether a node that is not of the pool gives nothing in another class than the pool does. Such a node may have the label of the pool's MIG
// config: its profile wins over that.
func (from Sources) sameClass(g Given, n pooled) bool {
	if n.shares || n.pool.Name == g.Profile {
		return !n.shares
	}
	offers, _, err := from.offers(n.pool)
	return err == nil && n.pool.GPUs > 0 && mixes(g, n.pool, offers) == nil
}

// without adds the labels to a copy of g. Reached are those of the other nodes that its labels select nevertheless.
func (g Given) without(own, others []pooled) (out Given, reached []pooled) {
	g.Labels = maps.Clone(g.Labels)
	selects := func(n pooled) bool {
		for key, value := range g.Labels {
			if n.labels[key] != value && key != config.LabelMIGConfigState { // which is of the moment
				return false
			}
		}
		return true
	}
	reached = slices.DeleteFunc(slices.Clone(others), func(n pooled) bool { return !selects(n) })
	for _, end := range ofDiscovery {
		for _, key := range slices.Sorted(maps.Keys(own[0].labels)) {
			value := own[0].labels[key]
			if len(reached) == 0 || len(g.Labels) == mostLabels {
				return g, reached
			}
			of := func(n pooled) bool { return n.labels[key] == value }
			other := func(n pooled) bool { return !of(n) }
			if !isOfDiscovery(key) || !strings.HasSuffix(key, end) || slices.ContainsFunc(own, other) || !slices.ContainsFunc(reached, other) {
				continue
			}
			g.Labels[key] = value
			reached = slices.DeleteFunc(reached, func(n pooled) bool { return !of(n) })
		}
	}
	return g, reached
}

// notes are about pools that --pool describes. No node of them was read, and nodes keep their sharing if the profile names none.
func (from Sources) notes(given []Given) (notes []string) {
	for _, g := range given {
		if from.DRA || from.Profiles[g.Profile].Sharing != nil || !slices.ContainsFunc(g.Offers, func(o Offer) bool { return o.Resource == nvml.ResourceGPU }) {
			continue
		}
		note := sanitize.Cut(g.Profile, longestName) + ": its nodes keep the sharing that they have, and what is written is for nodes that share nothing: name sharing: none in the profile"
		if _, isProfile := from.Profiles[g.Profile]; !isProfile {
			note = strings.TrimSuffix(note, "the profile") + "a profile"
		}
		if !slices.Contains(notes, note) {
			notes = append(notes, note)
		}
	}
	return notes
}
