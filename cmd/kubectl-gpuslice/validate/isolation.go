package validate

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/isolation"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/taints"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// queuedClasses finds the ClusterQueues of all files that mix pools with pods which something else keeps apart. The flavors' labels name profiles, MIG
// configs and configs of the device plugin, which say so; of those that are in no file it says nothing.
type queuedClasses struct {
	profiles map[string]catalog.Profile
	configs  map[string]catalog.MIGConfig
	plugin   map[string]catalog.PluginConfig
	flavors  map[string]kinds.FlavorSpec
	queues   []placedQueue
	hardware []placedProfile
	objects  map[string]placedObject // by kind, namespace and name
	twice    []placedObject
}

// placedObject is an object, and where it is written.
type placedObject struct {
	at, name string
	top      map[string]any
	other    string // where another of the name is written
}

// noteObject finds objects of one kind and name that differ: the cluster keeps the one that is applied last.
func (q *queuedClasses) noteObject(p manifest.Piece) {
	metadata, _ := p.Top["metadata"].(map[string]any)
	name, _ := metadata["name"].(string)
	namespace, _ := metadata["namespace"].(string)
	kind, _ := p.Top["kind"].(string)
	if p.Err != nil || name == "" {
		return
	}
	key := kind + " " + namespace + "/" + name
	first, there := q.objects[key]
	switch {
	case !there:
		q.objects = added(q.objects, map[string]placedObject{key: {at: p.At, name: kinds.Name(p.Top), top: p.Top}})
	case !reflect.DeepEqual(first.top, p.Top) && len(q.twice) < maxFlavors:
		q.twice = append(q.twice, placedObject{at: p.At, name: first.name, other: first.at})
	}
}

// placedQueue is a ClusterQueue, and where it is written.
type placedQueue struct {
	at    string
	queue kinds.ClusterQueue
}

// placedProfile is a HardwareProfile, and where it is written.
type placedProfile struct {
	at      string
	profile kinds.HardwareProfile
}

func (q *queuedClasses) note(p manifest.Piece) {
	if p.Format == manifest.Object {
		q.noteObject(p)
	}
	switch {
	case p.Format == manifest.Profiles:
		if profiles, err := catalog.ParseProfiles(p.Text); err == nil {
			q.profiles = added(q.profiles, profiles)
		}
	case p.Format == manifest.MIGConfigs:
		if configs, err := migparted.Parse(p.Text); err == nil {
			q.configs = added(q.configs, configs)
		}
	case p.Format == manifest.PluginConfig && p.Key != "":
		if plugin, err := deviceplugin.Parse(p.Text); err == nil {
			q.plugin = added(q.plugin, map[string]catalog.PluginConfig{p.Key: plugin})
		}
	default:
		q.noteKind(p)
	}
}

// noteKind notes what gives pods GPUs.
func (q *queuedClasses) noteKind(p manifest.Piece) {
	switch kind, _ := p.Top["kind"].(string); kind {
	case kinds.KindResourceFlavor:
		var f kinds.ResourceFlavor
		if document.ManifestInto(p.Text, &f) == nil {
			q.flavors = added(q.flavors, map[string]kinds.FlavorSpec{f.Name: f.Spec})
		}
	case kinds.KindClusterQueue:
		var of kinds.ClusterQueue
		if document.ManifestInto(p.Text, &of) == nil && len(q.queues) < maxFlavors {
			q.queues = append(q.queues, placedQueue{p.At, of})
		}
	case kinds.KindHardwareProfile:
		var of kinds.HardwareProfile
		if document.ManifestInto(p.Text, &of) == nil && len(q.hardware) < maxFlavors {
			q.hardware = append(q.hardware, placedProfile{p.At, of})
		}
	}
}

// added has as many as maxFlavors.
func added[T any](to, more map[string]T) map[string]T {
	if to == nil {
		to = map[string]T{}
	}
	for name, one := range more {
		if len(to) < maxFlavors {
			to[name] = one
		}
	}
	return to
}

func (q *queuedClasses) classes(flavor, resource string) []isolation.Class {
	spec, there := q.flavors[flavor]
	if !there {
		return nil
	}
	return q.classesOf(spec, resource)
}

func (q *queuedClasses) classesOf(flavor kinds.FlavorSpec, resource string) []isolation.Class {
	labels := flavor.NodeLabels
	if known := isolation.OfNode(labels, resource); known != (isolation.Class{}) {
		return []isolation.Class{known}
	}
	profile, known := q.profiles[labels[config.LabelProfile]]
	if labels[config.LabelProfile] == "" {
		profile.MIG, known = q.configs[labels[config.LabelMIGConfig]]
	}
	plugin, isPlugin := q.plugin[labels[config.LabelDevicePluginConfig]]
	switch asks := labels[config.LabelDevicePluginConfig] != ""; {
	case profile.Sharing != nil: // which the agent sees to, whatever another label says
	case isPlugin && (known || labels[config.LabelProfile] == ""):
		profile.Sharing = &plugin.Sharing
		profile.MIGStrategy = cmp.Or(profile.MIGStrategy, plugin.MIGStrategy)
	case asks:
		known = false
	}
	classes := isolation.OfModels(profile, resource)
	if !known && classes[0].Kind != isolation.KindShared {
		return q.published(flavor, resource)
	}
	return classes
}

// published are the classes of the profiles that a flavor selects for sure: they publish all of its labels, and no taint that keeps its pods off.
func (q *queuedClasses) published(flavor kinds.FlavorSpec, resource string) (classes []isolation.Class) {
	labels := maps.Clone(flavor.NodeLabels)
	delete(labels, config.LabelMIGConfigState) // which each node of a profile has at last
	for _, name := range slices.Sorted(maps.Keys(q.profiles)) {
		p := q.profiles[name]
		selected := !slices.ContainsFunc(slices.Collect(maps.Keys(labels)), func(key string) bool { return p.Labels[key] != labels[key] || p.Labels[key] == "" })
		if selected && len(taints.Closing(p.Taints, flavor.Tolerated())) == 0 {
			classes = append(classes, isolation.OfModels(p, resource)...)
		}
	}
	return classes
}

func (q *queuedClasses) check(v *fileCheck) {
	v.printed, v.mistakes = map[string]int{}, 0
	for _, of := range q.twice {
		v.report(of.at+", "+sanitize.Cut(of.name, manifest.LongestName), "", fmt.Errorf("metadata.name: %s has another of this kind and name, with other content: the one that is applied last stays; rename one of the two",
			sanitize.Cut(of.other, manifest.LongestName)))
	}
	for _, of := range q.queues {
		v.mixed(of.at+", ClusterQueue "+sanitize.Cut(of.queue.Name, manifest.LongestName), "spec.resourceGroups", isolation.Mixed(of.queue, q.classes))
	}
	for _, of := range q.hardware {
		if as, selects, is := of.profile.AsQueue(); is {
			v.mixed(of.at+", HardwareProfile "+sanitize.Cut(of.profile.Name, manifest.LongestName), "spec.scheduling",
				isolation.Mixed(as, func(_, resource string) []isolation.Class { return q.classesOf(selects, resource) }))
		}
	}
}

// mixed reports what an object gives of several classes.
func (v *fileCheck) mixed(at, field string, texts []string) {
	var wrong []error
	for _, text := range texts {
		wrong = append(wrong, fmt.Errorf("%s: %s", field, text))
	}
	if len(wrong) > 0 {
		v.report(at, "", errors.Join(wrong...))
	}
}
