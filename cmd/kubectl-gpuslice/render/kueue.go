package render

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/isolation"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/taints"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

const mostLabels = kinds.MostNodeLabels

// Flavors makes a ResourceFlavor for each name. Topology is the name of a Topology that Kueue places pods by; empty for none.
func Flavors(given []Given, topology string) ([]any, error) {
	parts, err := parted(given)
	if err != nil {
		return nil, err
	}
	var out []any
	for _, g := range parts {
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
	ClusterQueue string // the beginning of the names of the ClusterQueues
	Cohort       string // the beginning of the names of their cohorts; empty for ClusterQueue's
	Topology     string // empty for none
	Local        []LocalQueue
	Priorities   []Priority
	OpenShift    bool // with what Red Hat's operator needs: its own object, and the namespaces of the LocalQueues
	DRA          bool // workloads claim devices of NVIDIA's DRA driver: the operator's object maps them to resources
}

// LocalQueue is the entry of a namespace to a ClusterQueue.
type LocalQueue struct {
	Namespace, Name string
	Pool            string // one of the ClusterQueue's, by its profile; empty where there is one ClusterQueue
}

// ParseLocalQueue reads "team/inference", or "team/inference=critical-agents".
func ParseLocalQueue(text string) (LocalQueue, error) {
	at, pool, named := strings.Cut(text, "=")
	namespace, name, ok := strings.Cut(at, "/")
	if !ok || namespace == "" || name == "" || named && pool == "" {
		return LocalQueue{}, fmt.Errorf("flag --local-queue is %q: write NAMESPACE/NAME, or NAMESPACE/NAME=PROFILE", sanitize.Cut(text, longestName))
	}
	return LocalQueue{namespace, name, pool}, nil
}

// Kueue makes the flavors, a ClusterQueue of each pool, LocalQueues, and a WorkloadPriorityClass for each priority. Kueue takes the next flavor of a
// ClusterQueue where one is full, and lends within a cohort. So both have pools of one class alone. A MIG pool's ClusterQueue has no other pool.
func Kueue(given []Given, q Queues) ([]any, error) {
	out, err := Flavors(given, q.Topology)
	if err != nil {
		return nil, err
	}
	queues, err := queued(given)
	if err != nil {
		return nil, err
	}
	for _, of := range queues {
		made, err := of.clusterQueue(q)
		if err != nil {
			return nil, err
		}
		out = append(out, made)
	}
	if q.OpenShift {
		if out, err = forOperator(out, given, q); err != nil {
			return nil, err
		}
	}
	for _, local := range q.Local {
		of, err := entry(queues, local)
		if err != nil {
			return nil, err
		}
		out = append(out, &kinds.LocalQueue{
			TypeMeta:   metav1.TypeMeta{APIVersion: kinds.KueueVersion, Kind: kinds.KindLocalQueue},
			ObjectMeta: metav1.ObjectMeta{Name: local.Name, Namespace: local.Namespace},
			Spec:       kinds.LocalQueueSpec{ClusterQueue: of.name(q.ClusterQueue)},
		})
	}
	classes, err := prioritized(given, q.Priorities, func(name, description string, value int32) any {
		return &kinds.WorkloadPriorityClass{
			TypeMeta:   metav1.TypeMeta{APIVersion: kinds.KueueVersion, Kind: kinds.KindWorkloadPriorityClass},
			ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value, Description: description,
		}
	})
	return append(out, classes...), err
}

// forOperator puts the operator's object before the queues, since Kueue's kinds come with it, and the namespaces behind them.
func forOperator(made []any, given []Given, q Queues) ([]any, error) {
	var mappings []DeviceClassMapping
	if q.DRA {
		var err error
		if mappings, err = mapped(given, nil); err != nil {
			return nil, err
		}
	}
	operator, err := operatorKueue(mappings)
	return append(append([]any{operator}, made...), managed(q.Local)...), err
}

// queue is the ClusterQueue of a pool.
type queue struct {
	pool   string // name of the pool, and of its class if it has several
	class  isolation.Kind
	own    []Given
	others []Given // of the class, with a resource in common: for workloads that the pool has no room for
}

// queued makes a queue of each pool. A pool that gives resources of two classes has a queue of each.
func queued(given []Given) (queues []queue, err error) {
	parts, err := parted(given)
	parts = slices.DeleteFunc(parts, func(g Given) bool { return len(g.Offers) == 0 }) // GPUs in MIG mode without instances give nothing
	for _, g := range parts {
		at := slices.IndexFunc(queues, func(q queue) bool { return q.own[0].Profile == g.Profile && q.class == g.class() })
		if at < 0 {
			name := g.poolName(parts)
			if other := slices.IndexFunc(queues, func(q queue) bool { return q.pool == name }); other >= 0 {
				return nil, fmt.Errorf("the ClusterQueues of %s and %s would both be of the pool %s: rename one of the two", queues[other].own[0].Profile, g.Profile, name)
			}
			at, queues = len(queues), append(queues, queue{pool: name, class: g.class()})
		}
		for _, other := range queues[at].own {
			if err := mixes(other, g.Pools[0], g.Offers); err != nil {
				return nil, err
			}
		}
		queues[at].own = append(queues[at].own, g)
	}
	for i, q := range queues {
		for _, g := range parts {
			if q.class != isolation.KindMIG && g.class() == q.class && g.Profile != q.own[0].Profile && shareResource(q.own[0], g) {
				queues[i].others = append(queues[i].others, g)
			}
		}
	}
	return queues, err
}

// poolName is the pool's, whatever instance types its nodes are of.
func (g Given) poolName(parts []Given) string {
	name := objectName(g.Profile)
	if slices.ContainsFunc(parts, func(other Given) bool {
		return other.Profile == g.Profile && len(other.Offers) > 0 && other.class() != g.class()
	}) {
		name += "-" + string(g.class())
	}
	return name
}

func (o Offer) isolated() isolation.Class { return isolation.Of(o.Device, o.Replicas) }

func (o Offer) class() isolation.Kind { return o.isolated().Kind }

// class is the same of all offers, once parted has gone over them.
func (g Given) class() isolation.Kind { return g.Offers[0].class() }

// parted makes of each pool one for each class of its resources: a flavor is never in queues of two classes.
func parted(given []Given) (parts []Given, err error) {
	for _, g := range given {
		var classes []isolation.Kind
		for _, o := range g.Offers {
			if class := o.class(); !slices.Contains(classes, class) {
				classes = append(classes, class)
			}
		}
		if len(classes) < 2 {
			parts = append(parts, g)
			continue
		}
		for _, class := range classes {
			part := g
			part.Name = g.Name + "-" + string(class)
			part.Offers = slices.DeleteFunc(slices.Clone(g.Offers), func(o Offer) bool { return o.class() != class })
			parts = append(parts, part)
		}
	}
	for i, g := range parts {
		if at := position(parts, g); at < i {
			return nil, fmt.Errorf("the flavors of %s and %s would both be named %s: rename one of the two", parts[at].Profile, g.Profile, g.Name)
		}
	}
	return parts, nil
}

// name is the ClusterQueue's.
func (q queue) name(begins string) string { return begins + "-" + q.pool }

// clusterQueue has what the pool gives, with cpu and memory of its nodes, and nothing of the others but what it may borrow. Its workloads preempt those of
// a lower priority, and take back what others have borrowed.
func (q queue) clusterQueue(names Queues) (*kinds.ClusterQueue, error) {
	group, err := q.group()
	if err != nil {
		return nil, err
	}
	out := &kinds.ClusterQueue{
		TypeMeta: metav1.TypeMeta{APIVersion: kinds.KueueVersion, Kind: kinds.KindClusterQueue}, ObjectMeta: metav1.ObjectMeta{Name: q.name(names.ClusterQueue)},
		Spec: kinds.ClusterQueueSpec{
			CohortName: cmp.Or(names.Cohort, names.ClusterQueue) + "-" + string(q.class), NamespaceSelector: &metav1.LabelSelector{},
			Preemption: map[string]any{
				"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Any", "borrowWithinCohort": map[string]any{"policy": "LowerPriority"},
			},
			ResourceGroups: []kinds.ResourceGroup{group},
		},
	}
	return out, errors.Join(checkName("cluster-queue", out.Name, objectForm), checkName("cohort", out.Spec.CohortName, objectForm))
}

// group lists each resource of the pool for each flavor, as Kueue asks.
func (q queue) group() (kinds.ResourceGroup, error) {
	var out kinds.ResourceGroup
	for _, g := range q.own {
		for _, o := range g.Offers {
			out.CoveredResources = append(out.CoveredResources, o.Resource)
		}
	}
	slices.Sort(out.CoveredResources)
	out.CoveredResources = slices.Compact(out.CoveredResources)
	for _, name := range slices.Sorted(maps.Keys(besides)) {
		out.CoveredResources = append(out.CoveredResources, string(name))
	}
	for _, g := range slices.Concat(q.own, q.others) {
		quotas := kinds.FlavorQuotas{Name: g.Name}
		for _, name := range out.CoveredResources {
			share := kinds.ResourceShare{Name: name, NominalQuota: *resource.NewQuantity(0, resource.DecimalSI)}
			if g.Profile == q.own[0].Profile {
				share.NominalQuota = g.total(name)
			}
			quotas.Resources = append(quotas.Resources, share)
		}
		out.Flavors = append(out.Flavors, quotas)
	}
	if n := len(out.Flavors); n > kinds.MostFlavorsOfGroup {
		return out, fmt.Errorf("%d pools of the class %s give %s, and a ClusterQueue takes %d flavors: render fewer pools", n, q.class, out.CoveredResources[0], kinds.MostFlavorsOfGroup)
	}
	if n := len(out.CoveredResources); n > kinds.MostResources {
		return out, fmt.Errorf("profile %s gives %d resources, and a ClusterQueue takes %d", q.own[0].Profile, n, kinds.MostResources)
	}
	return out, nil
}

// besides are resources of each node besides GPUs, with more of each than any pool has. Kueue refuses a workload that requests what its ClusterQueue does
// not cover. Kueue sums up the quotas of a cohort, in bytes and in thousandths of a core, and the sum of some dozen pools is still an int64.
var besides = corev1.ResourceList{
	corev1.ResourceCPU: resource.MustParse("10M"), corev1.ResourceMemory: resource.MustParse("100Pi"), corev1.ResourceEphemeralStorage: resource.MustParse("100Pi"),
}

// total is how much of a resource the pool's nodes have. Where that is not known, it is more than they have: the scheduler alone limits it then.
func (g Given) total(name string) resource.Quantity {
	if i := slices.IndexFunc(g.Offers, func(o Offer) bool { return o.Resource == name }); i >= 0 {
		return *resource.NewQuantity(int64(g.Offers[i].Total), resource.DecimalSI)
	}
	if has, known := g.Host[corev1.ResourceName(name)]; known {
		return has
	}
	return besides[corev1.ResourceName(name)]
}

// entry is the queue that a LocalQueue leads to.
func entry(queues []queue, local LocalQueue) (queue, error) {
	var of []queue
	var pools []string
	for _, q := range queues {
		profile := q.own[0].Profile
		pools = append(pools, profile)
		if local.Pool == profile || local.Pool == "" {
			of = append(of, q)
		}
	}
	at := local.Namespace + "/" + local.Name
	switch slices.Sort(pools); {
	case len(of) == 1:
		return of[0], nil
	case len(of) == 0:
		return queue{}, fmt.Errorf("flag --local-queue is %s=%s: no pool with GPUs is of this profile; there are %s", at, sanitize.Cut(local.Pool, longestName), sanitize.Listed(slices.Compact(pools)))
	case local.Pool != "":
		return queue{}, fmt.Errorf("flag --local-queue is %s=%s: the pool has a ClusterQueue of each class, and a LocalQueue is of one: make it by hand", at, sanitize.Cut(local.Pool, longestName))
	}
	return queue{}, fmt.Errorf("flag --local-queue is %s: the pools are of %d ClusterQueues, and a LocalQueue is of one: write %s=PROFILE, of %s",
		at, len(of), at, sanitize.Listed(slices.Compact(pools)))
}

func position(given []Given, g Given) int {
	return slices.IndexFunc(given, func(other Given) bool { return other.Name == g.Name })
}

func shareResource(a, b Given) bool {
	return slices.ContainsFunc(a.Offers, func(o Offer) bool {
		return slices.ContainsFunc(b.Offers, func(p Offer) bool { return o.Resource == p.Resource })
	})
}
