// Package isolation says what keeps a pod apart from others on its GPU, and finds the queues of Kueue that do not keep to it.
//
// It reads neither clusters nor files.
package isolation

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// Class is what keeps the pods of a resource apart. The zero value is not known.
type Class struct {
	Kind   Kind
	Device string // of KindMIG, "2g.20gb"; empty where it is not known
}

// Kind is a class without the size of its devices.
type Kind string

// The kinds.
const (
	KindShared Kind = "shared" // time-slicing or MPS, of GPUs or of MIG devices: pods feel each other
	KindMIG    Kind = "mig"    // a MIG device for each pod
	KindWhole  Kind = "whole"  // a GPU for each pod
)

// String is the class for people.
func (c Class) String() string {
	switch c.Kind {
	case KindMIG:
		return strings.TrimSpace("MIG " + sanitize.Cut(c.Device, longest))
	case KindWhole:
		return "whole GPUs"
	case KindShared:
	}
	return string(c.Kind)
}

// longest bounds a name in a message, in characters.
const longest = 100

// Of is the class of devices that so many pods share each. Device is empty for GPUs.
func Of(device string, replicas int) Class {
	switch {
	case replicas > 1:
		return Class{Kind: KindShared}
	case device != "":
		return Class{KindMIG, device}
	}
	return Class{Kind: KindWhole}
}

// OfProfile is the class of a resource on nodes of a profile; the zero value if they give none of it, as of whole GPUs where the profile cuts each one. Where it
// names no MIG strategy and cuts each GPU into devices of one size, nvidia.com/gpu is a MIG device. Rules that name single GPUs leave the others whole.
func OfProfile(p catalog.Profile, resource string) Class {
	replicas, given := replicasOf(p.Sharing, resource)
	device, does := deviceOf(resource), cutsOf(p.MIG)
	switch {
	case !given || device != "" && does.all && !slices.Contains(does.devices, device):
		return Class{}
	case device != "":
	case len(does.devices) > 0 && (p.MIGStrategy == config.MIGStrategySingle || p.MIGStrategy == "" && does.each && len(does.devices) == 1):
		device = does.devices[0]
	case does.each && strings.TrimSuffix(resource, nvml.SharedSuffix) == nvml.ResourceGPU:
		return Class{}
	}
	return Of(device, replicas)
}

// OfModels are the classes of a resource on nodes of a profile, one for each model that its rules name: a node has GPUs of one model.
func OfModels(p catalog.Profile, resource string) (classes []Class) {
	models := map[string]bool{}
	for _, rule := range p.MIG {
		models[strings.Join(rule.Models, "\n")] = true
	}
	if len(models) > 1 {
		delete(models, "") // its rules are about each
	}
	for _, of := range slices.Sorted(maps.Keys(models)) {
		on := p
		on.MIG = slices.DeleteFunc(slices.Clone(p.MIG), func(r catalog.MIGRule) bool { return len(r.Models) > 0 && strings.Join(r.Models, "\n") != of })
		if class := OfProfile(on, resource); !slices.Contains(classes, class) {
			classes = append(classes, class)
		}
	}
	if len(models) == 0 {
		return []Class{OfProfile(p, resource)}
	}
	return classes
}

// replicasOf is how many pods share a device of the resource; given is false for one that is offered under another name.
func replicasOf(sharing *catalog.Sharing, resource string) (n int, given bool) {
	n = 1
	if sharing == nil {
		return n, true
	}
	for _, shared := range sharing.Resources() {
		switch name, replicas := sharing.Offered(shared); resource {
		case name:
			n = replicas
		case shared:
			return 0, false
		}
	}
	return n, true
}

// cuts are what rules make of GPUs.
type cuts struct {
	devices []string // sorted, as names of resources have them
	all     bool     // a rule is about all GPUs
	each    bool     // no GPU is left whole
}

func cutsOf(rules catalog.MIGConfig) (out cuts) {
	leaves := false
	for _, rule := range rules {
		for device := range rule.Devices {
			out.devices = append(out.devices, strings.ReplaceAll(device, "+", "."))
		}
		out.all, leaves = out.all || rule.All, leaves || len(rule.Devices) == 0
	}
	slices.Sort(out.devices)
	out.devices, out.each = slices.Compact(out.devices), out.all && !leaves
	return out
}

// OfNode is the class of a resource on a node with labels of GPU feature discovery.
func OfNode(labels map[string]string, resource string) Class {
	plain := strings.TrimSuffix(resource, nvml.SharedSuffix)
	replicas, err := strconv.Atoi(labels[plain+".replicas"])
	strategy := catalog.SharingStrategy(labels[plain+".sharing-strategy"])
	product := labels[plain+".product"]
	_, single, isSingle := strings.Cut(product, "-MIG-")
	switch {
	case strings.HasSuffix(product, features.SuffixShared) || plain != resource || replicas > 1 || strategy == catalog.SharingTimeSlicing || strategy == catalog.SharingMPS:
		return Class{Kind: KindShared}
	case err != nil && strategy != catalog.SharingNone && !isSingle:
		return Class{}
	}
	device := deviceOf(resource)
	if isSingle && device == "" {
		device = single
	}
	return Of(device, 1)
}

// SharedBy returns the label of GPU feature discovery that says that a node shares a resource; empty without one.
func SharedBy(labels map[string]string, resource string) string {
	plain := strings.TrimSuffix(resource, nvml.SharedSuffix)
	for _, key := range []string{plain + ".sharing-strategy", plain + ".replicas", plain + ".product"} {
		if OfNode(map[string]string{key: labels[key]}, plain).Kind == KindShared {
			return key + "=" + labels[key]
		}
	}
	return ""
}

// deviceOf is the MIG device that a resource is named after; empty if it is named after none.
func deviceOf(resource string) string {
	device, is := strings.CutPrefix(resource, nvml.ResourceMIGPrefix)
	if !is {
		return ""
	}
	return device
}

// Mixed says of each resource of a queue that the queue gives from flavors of several classes: Kueue takes the next flavor where one is full, so a pod
// that needs one class runs on nodes of another. The classes of a flavor are those of its nodes.
func Mixed(q kinds.ClusterQueue, classes func(flavor, resource string) []Class) (wrong []string) {
	for _, group := range q.Spec.ResourceGroups {
		for _, resource := range group.CoveredResources {
			if !kinds.IsGPU(resource) {
				continue
			}
			flavors := map[Class][]string{}
			for _, f := range group.Flavors {
				if !gives(f, resource, q.Spec.CohortName != "") {
					continue
				}
				for _, class := range classes(f.Name, resource) {
					if class != (Class{}) && !slices.Contains(flavors[class], f.Name) {
						flavors[class] = append(flavors[class], f.Name)
					}
				}
			}
			if len(flavors) > 1 {
				wrong = append(wrong, said(resource, flavors))
			}
		}
	}
	return wrong
}

// gives reports whether a queue may have any of a resource from the flavor, of its own or of its cohort's.
func gives(f kinds.FlavorQuotas, resource string, cohort bool) bool {
	return slices.ContainsFunc(f.Resources, func(r kinds.ResourceShare) bool {
		borrows := cohort && (r.BorrowingLimit == nil || !r.BorrowingLimit.IsZero())
		return r.Name == resource && (!r.NominalQuota.IsZero() || borrows)
	})
}

func said(resource string, flavors map[Class][]string) string {
	classes := slices.SortedFunc(maps.Keys(flavors), func(a, b Class) int {
		return cmp.Or(strings.Compare(string(a.Kind), string(b.Kind)), strings.Compare(a.Device, b.Device))
	})
	var parts, twice []string
	seen := map[string]bool{}
	for _, c := range classes {
		parts = append(parts, fmt.Sprintf("%s by %s", c, sanitize.Listed(flavors[c])))
		for _, name := range flavors[c] {
			if seen[name] && !slices.Contains(twice, name) {
				twice = append(twice, name)
			}
			seen[name] = true
		}
	}
	remedy := "make ClusterQueues of one class, and one of each MIG pool"
	if len(twice) > 0 {
		remedy = fmt.Sprintf("the labels of %s select nodes of several classes: add a label that the nodes of one class alone have, and take labels of other pools off the nodes",
			sanitize.Listed(twice))
	}
	return fmt.Sprintf("%s is %s: a pod that is to have one may get the other; %s", resource, sanitize.Listed(parts), remedy)
}
