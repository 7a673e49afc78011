package render

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/taints"
	"github.com/gpuslice/gpuslice/config"
)

const mostLabels = kinds.MostNodeLabels

// Flavors makes a ResourceFlavor for each name. Topology is the name of a Topology that Kueue places pods by; empty for none.
func Flavors(given []Given, topology string) ([]any, error) {
	var out []any
	for _, g := range given {
		tolerations := tolerationsOf(g.Taints)
		switch {
		case len(g.Labels) > mostLabels:
			return nil, fmt.Errorf("profile %s has %d labels, and a ResourceFlavor takes %d", g.Profile, len(g.Labels), mostLabels)
		case len(tolerations) > mostLabels:
			return nil, fmt.Errorf("profile %s and its nodes have %d taints, and a ResourceFlavor takes %d tolerations", g.Profile, len(tolerations), mostLabels)
		}
		out = append(out, &kinds.ResourceFlavor{
			TypeMeta: metav1.TypeMeta{APIVersion: kinds.KueueVersion, Kind: kinds.KindResourceFlavor}, ObjectMeta: metav1.ObjectMeta{Name: g.Name},
			Spec: kinds.FlavorSpec{NodeLabels: g.Labels, Tolerations: tolerations, TopologyName: topology},
		})
	}
	return out, nil
}

// Tolerate has pods tolerate what all nodes of the pool have of taints, beside those of the profile: else pods come to none of them. If each node is
// still closed by other taints, it returns these; none if pods can run on any node.
func (g *Given) Tolerate(ofNodes [][]corev1.Taint, startup config.StartupTaints) (closed []corev1.Taint) {
	var left [][]corev1.Taint
	for _, all := range ofNodes {
		left = append(left, taints.KeepingOut(all, tolerationsOf(g.Taints), startup))
	}
	g.Taints = append(slices.Clone(g.Taints), taints.Shared(left)...)
	for _, all := range left {
		rest := taints.KeepingOut(all, tolerationsOf(g.Taints), startup)
		if len(rest) == 0 {
			return nil
		}
		closed = append(closed, rest...)
	}
	return closed
}

func tolerationsOf(all []corev1.Taint) []corev1.Toleration {
	var out []corev1.Toleration
	for _, t := range all {
		toleration := corev1.Toleration{Key: t.Key, Operator: corev1.TolerationOpEqual, Value: t.Value, Effect: t.Effect}
		if t.Value == "" {
			toleration.Operator = corev1.TolerationOpExists
		}
		out = append(out, toleration)
	}
	return out
}

// Queues names Kueue's objects. Its texts are names that the API server takes.
type Queues struct {
	ClusterQueue string
	Cohort       string   // empty for none
	Topology     string   // empty for none
	Local        []string // NAMESPACE/NAME of the LocalQueues
}

// Kueue makes the flavors, a ClusterQueue with what they give, and its LocalQueues. Flavors that give a resource in common are in one group,
// since Kueue has each resource in one group.
func Kueue(given []Given, q Queues) ([]any, error) {
	out, err := Flavors(given, q.Topology)
	if err != nil {
		return nil, err
	}
	queue := &kinds.ClusterQueue{
		TypeMeta: metav1.TypeMeta{APIVersion: kinds.KueueVersion, Kind: kinds.KindClusterQueue}, ObjectMeta: metav1.ObjectMeta{Name: q.ClusterQueue},
		Spec: kinds.ClusterQueueSpec{CohortName: q.Cohort, NamespaceSelector: &metav1.LabelSelector{}},
	}
	for _, group := range groups(given) {
		made := groupOf(group)
		if n := len(made.Flavors); n > kinds.MostFlavorsOfGroup {
			return nil, fmt.Errorf("%d profiles give %s, and a group of a ClusterQueue takes %d flavors: render several queues",
				n, made.CoveredResources[0], kinds.MostFlavorsOfGroup)
		}
		queue.Spec.ResourceGroups = append(queue.Spec.ResourceGroups, made)
	}
	if n := len(queue.Spec.ResourceGroups); n > kinds.MostGroups {
		return nil, fmt.Errorf("the profiles give %d resources that have nothing to do with each other, and a ClusterQueue takes %d: render several queues", n, kinds.MostGroups)
	}
	out = append(out, queue)
	for _, local := range q.Local {
		namespace, name, _ := strings.Cut(local, "/")
		out = append(out, &kinds.LocalQueue{
			TypeMeta:   metav1.TypeMeta{APIVersion: kinds.KueueVersion, Kind: kinds.KindLocalQueue},
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
			Spec:       kinds.LocalQueueSpec{ClusterQueue: q.ClusterQueue},
		})
	}
	return out, nil
}

// groups puts together profiles with resources in common, in the order of the first profile of each group.
func groups(given []Given) [][]Given {
	var out [][]Given
	for _, g := range given {
		if len(g.Offers) == 0 {
			continue // GPUs in MIG mode without instances give nothing
		}
		joined := []Given{g}
		out = slices.DeleteFunc(out, func(group []Given) bool {
			together := slices.ContainsFunc(group, func(other Given) bool { return shareResource(other, g) })
			if together {
				joined = append(group[:len(group):len(group)], joined...)
			}
			return together
		})
		out = append(out, joined)
	}
	for _, group := range out {
		slices.SortFunc(group, func(a, b Given) int { return position(given, a) - position(given, b) })
	}
	slices.SortFunc(out, func(a, b []Given) int { return position(given, a[0]) - position(given, b[0]) })
	return out
}

func position(given []Given, g Given) int {
	return slices.IndexFunc(given, func(other Given) bool { return other.Name == g.Name })
}

func shareResource(a, b Given) bool {
	return slices.ContainsFunc(a.Offers, func(o Offer) bool {
		return slices.ContainsFunc(b.Offers, func(p Offer) bool { return o.Resource == p.Resource })
	})
}

// groupOf lists each resource for each flavor, as Kueue asks; 0 for what a flavor does not give.
func groupOf(given []Given) kinds.ResourceGroup {
	var out kinds.ResourceGroup
	for _, g := range given {
		for _, o := range g.Offers {
			out.CoveredResources = append(out.CoveredResources, o.Resource)
		}
	}
	slices.Sort(out.CoveredResources)
	out.CoveredResources = slices.Compact(out.CoveredResources)
	for _, g := range given {
		quotas := kinds.FlavorQuotas{Name: g.Name}
		for _, name := range out.CoveredResources {
			total := 0
			if i := slices.IndexFunc(g.Offers, func(o Offer) bool { return o.Resource == name }); i >= 0 {
				total = g.Offers[i].Total
			}
			quotas.Resources = append(quotas.Resources, kinds.ResourceShare{Name: name, NominalQuota: *resource.NewQuantity(int64(total), resource.DecimalSI)})
		}
		out.Flavors = append(out.Flavors, quotas)
	}
	return out
}
