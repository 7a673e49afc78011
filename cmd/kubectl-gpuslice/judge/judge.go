// Package judge says whether pods that leave a node find a place on another, and which budgets keep them; and what pending pods need to run.
package judge

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	requested "k8s.io/component-helpers/resource"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Bounds of the texts of others in a message.
const (
	longestKey   = 64  // characters of a taint or a resource
	longestCause = 200 // characters of an error about a claim, which quotes what its author wrote
)

// errLate says why it is not known whether a pod has a place if the context ends first.
var errLate = errors.New("the search for a place took too long")

// Leaving are the pods that have to leave a node which is to change, each by namespace and name. There may be none.
type Leaving struct {
	Node string
	Pods []string
	More int // pods that the agent has not named
}

// Pod is a pod, by namespace and name, with what is said of it.
type Pod struct{ Name, Why string }

// Judgement is what becomes of the pods that leave a node. Pods of DaemonSets come back to the node, and no controller recreates a
// bare pod: these are in none of its lists.
type Judgement struct {
	Placed   []string // pods that have a place on another node
	Homeless []Pod    // pods that have none, and why
	Unplaced []Pod    // pods of which that is not known, and why
	More     int      // pods of which nothing is known: they are not named, or no longer on the node
	Budgets  []Budget // those that do not let all the pods go at once
	Doubled  []Pod    // pods in more than one budget, which the API server does not evict, and the budgets

	Stuck   string // why not all the pods would leave; empty if they would
	Unknown string // why that is not known; empty if Stuck is not
}

// Judge says of the pods of each node whether they have a place on another node, and which budgets keep them. The lists are of one moment. Once ctx has ended,
// it is not known whether a pod has a place. Each node is judged as if pods left no other; but a node that changes, too, is no place that is known.
func Judge(ctx context.Context, c *Cluster, leaving ...Leaving) []Judgement {
	r := runningIn(c)
	var out []Judgement
	for _, l := range leaving {
		r.changes[l.Node] = true
	}
	for _, l := range leaving {
		out = append(out, r.judge(ctx, l))
	}
	return out
}

// running is what runs in the cluster, by what is asked of it.
type running struct {
	*Cluster
	pods    map[string]*corev1.Pod         // by namespace and name
	on      map[string][]*corev1.Pod       // those that use something, by node
	free    map[string]corev1.ResourceList // by node
	changes map[string]bool                // nodes that are to change
	devices *devices
}

func runningIn(c *Cluster) *running {
	r := &running{Cluster: c, pods: map[string]*corev1.Pod{}, on: map[string][]*corev1.Pod{}, free: map[string]corev1.ResourceList{}, changes: map[string]bool{}, devices: devicesOf(c)}
	for _, n := range c.Nodes {
		r.free[n.Name] = n.Status.Allocatable.DeepCopy()
	}
	for i := range c.Pods {
		p := &c.Pods[i]
		r.pods[p.Namespace+"/"+p.Name] = p
		if p.Spec.NodeName != "" && !Ended(p) {
			r.on[p.Spec.NodeName] = append(r.on[p.Spec.NodeName], p)
			subtract(r.free[p.Spec.NodeName], Requests(p))
		}
	}
	return r
}

// asksByClaims reports whether the pod asks for devices by claims, or may get its devices by one on another node.
func (c classes) asksByClaims(p *corev1.Pod) bool {
	if len(p.Spec.ResourceClaims) > 0 || p.Status.ExtendedResourceClaimStatus != nil {
		return true
	}
	for name := range Requests(p) {
		if c.of(name) != "" {
			return true
		}
	}
	return false
}

// Requests returns the resources that the pod requests, with its place among the node's pods.
func Requests(p *corev1.Pod) corev1.ResourceList {
	out := requested.PodRequests(p, requested.PodResourcesOptions{})
	out[corev1.ResourcePods] = *resource.NewQuantity(1, resource.DecimalSI)
	return out
}

func subtract(from, what corev1.ResourceList) {
	for name, n := range what {
		if left, there := from[name]; there {
			left.Sub(n)
			from[name] = left
		}
	}
}

// judge judges the pods of one node. Some may go at once though not all would.
func (r *running) judge(ctx context.Context, l Leaving) (out Judgement) {
	room := r.roomWithout(l)
	out.More = l.More
	alone, mayBeAlone := map[string]bool{}, map[string]bool{} // pods without a successor, as far as budgets count until the change has ended
	for _, name := range l.Pods {
		p := r.pods[name]
		owner := controller(p)
		switch {
		case p == nil || p.Spec.NodeName != l.Node:
			out.More++
			continue
		case owner == nil, owner.Kind == "DaemonSet":
			alone[name], mayBeAlone[name] = true, true
			continue
		}
		switch why, err := r.place(ctx, p, l.Node, room); {
		case err != nil:
			mayBeAlone[name] = true
			out.Unplaced = append(out.Unplaced, Pod{name, err.Error()})
		case why != "":
			alone[name], mayBeAlone[name] = true, true
			out.Homeless = append(out.Homeless, Pod{name, why})
		default:
			out.Placed = append(out.Placed, name)
		}
	}
	out.Budgets, out.Doubled = r.blockingBudgets(l, alone)
	maybe, _ := r.blockingBudgets(l, mayBeAlone)
	closed := slices.IndexFunc(out.Budgets, func(b Budget) bool { return b.Allowed <= 0 })
	switch stuck := slices.IndexFunc(out.Budgets, Budget.keeps); {
	case stuck >= 0:
		out.Stuck = out.Budgets[stuck].String()
	case slices.ContainsFunc(maybe, Budget.keeps):
		out.Unknown = "pods with a budget may have no place: " + sanitize.Listed(out.unplaced())
	case closed >= 0: // the agent does not begin, unless it asks behind the cordon, where the budget may open
		out.Unknown = out.Budgets[closed].String()
	case out.More > 0 && len(r.Budgets) > 0:
		out.Unknown = nothingKnown(out.More)
	}
	return out
}

// room is what the nodes have for pods that leave one of them.
type room struct {
	free    map[string]corev1.ResourceList // by node
	devices *allocation
}

// roomWithout returns the room that there is once these pods have left.
func (r *running) roomWithout(l Leaving) room {
	var pods []*corev1.Pod
	for _, name := range l.Pods {
		if p := r.pods[name]; p != nil {
			pods = append(pods, p)
		}
	}
	return room{free: maps.Clone(r.free), devices: r.devices.without(pods)}
}

// take takes what a pod needs of the node, from this room alone.
func (in *room) take(node string, needs corev1.ResourceList) {
	left := in.free[node].DeepCopy()
	subtract(left, needs)
	in.free[node] = left
}

func controller(p *corev1.Pod) *metav1.OwnerReference {
	if p == nil {
		return nil
	}
	return metav1.GetControllerOf(p)
}

// place finds a node for the pod, and takes the resources and devices that it needs there. Otherwise it counts why the nodes do not fit. The error says why it
// is not known whether one fits: a node that seems to may lack what the scheduler alone asks for.
func (r *running) place(ctx context.Context, p *corev1.Pod, from string, in room) (why string, err error) {
	against := map[string]int{}
	var unknown error
	for i := range r.Nodes {
		n := &r.Nodes[i]
		switch {
		case ctx.Err() != nil:
			return "", errLate
		case n.Name == from:
			continue
		}
		switch why, failed := r.fits(ctx, p, n, in); {
		case failed != nil:
			unknown = failed
		case why == "":
			in.take(n.Name, r.devices.classes.countable(Requests(p), n))
			return "", unchecked(p)
		default:
			against[why]++
		}
	}
	switch {
	case unknown != nil:
		return "", unknown
	case len(against) == 0:
		return "there is none", nil
	}
	return listed(against), nil
}

// fits returns why the pod has no place on the node; empty if it has one, and has the devices then. The error says why that is not known.
func (r *running) fits(ctx context.Context, p *corev1.Pod, n *corev1.Node, in room) (why string, err error) {
	if _, changing := n.Annotations[config.AnnotationJournal]; changing && n.Spec.Unschedulable { // and its agent gives it back
		if selectsAnother(n, p) {
			return elsewhere, nil
		}
		return "", fmt.Errorf("%s is being changed", n.Name)
	}
	needs := r.devices.classes.countable(Requests(p), n)
	if why := keeps(n, p, in.free[n.Name], needs); why != "" {
		if r.mayPreempt(p, n, in.free[n.Name], needs) {
			return "", fmt.Errorf("it may preempt pods on %s", n.Name)
		}
		return why, nil
	}
	if r.changes[n.Name] {
		return "", fmt.Errorf("%s is to change, too", n.Name)
	}
	if r.devices.classes.asksByClaims(p) {
		return in.devices.place(ctx, n, p)
	}
	return "", nil
}

// elsewhere says that the pod's own rules keep it from a node.
const elsewhere = "excluded by the pod's node selector or affinity"

// selectsAnother reports whether the pod's node selector excludes the node also when its change has ended: no profile publishes Kubernetes' own labels.
func selectsAnother(n *corev1.Node, p *corev1.Pod) bool {
	for key, value := range p.Spec.NodeSelector {
		domain, _, _ := strings.Cut(key, "/")
		if has := n.Labels[key]; has != value && (domain == "kubernetes.io" || strings.HasSuffix(domain, ".kubernetes.io")) {
			return true
		}
	}
	return false
}

// mayPreempt reports whether the pod would have a place on the node without the pods of lower priority.
func (r *running) mayPreempt(p *corev1.Pod, n *corev1.Node, free, needs corev1.ResourceList) bool {
	if ptr.Deref(p.Spec.PreemptionPolicy, corev1.PreemptLowerPriority) == corev1.PreemptNever {
		return false
	}
	without, some := free.DeepCopy(), false
	for _, other := range r.on[n.Name] {
		if ptr.Deref(other.Spec.Priority, 0) < ptr.Deref(p.Spec.Priority, 0) {
			some = true
			for name, has := range Requests(other) {
				if left, there := without[name]; there {
					left.Add(has)
					without[name] = left
				}
			}
		}
	}
	return some && keeps(n, p, without, needs) == ""
}

// unchecked is what else the scheduler asks of a node for the pod; nil for nothing.
func unchecked(p *corev1.Pod) error {
	affinity := ptr.Deref(p.Spec.Affinity, corev1.Affinity{})
	with, without := affinity.PodAffinity, affinity.PodAntiAffinity
	switch {
	case p.Spec.SchedulerName != "" && p.Spec.SchedulerName != corev1.DefaultSchedulerName:
		return fmt.Errorf("its scheduler, %s, is not asked", sanitize.Cut(p.Spec.SchedulerName, longestKey))
	case with != nil && len(with.RequiredDuringSchedulingIgnoredDuringExecution) > 0, without != nil && len(without.RequiredDuringSchedulingIgnoredDuringExecution) > 0:
		return errors.New("its affinity to other pods is not checked")
	case slices.ContainsFunc(p.Spec.TopologySpreadConstraints, func(c corev1.TopologySpreadConstraint) bool { return c.WhenUnsatisfiable == corev1.DoNotSchedule }):
		return errors.New("its topology spread is not checked")
	case slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return v.PersistentVolumeClaim != nil || v.Ephemeral != nil }):
		return errors.New("its volumes are not checked")
	case slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool {
		return slices.ContainsFunc(c.Ports, func(port corev1.ContainerPort) bool { return port.HostPort != 0 })
	}):
		return errors.New("its host ports are not checked")
	default:
		return nil
	}
}

// keeps returns why the pod could not be scheduled to the node; empty if it could, as far as capacity, selectors and taints go.
func keeps(n *corev1.Node, p *corev1.Pod, free, needs corev1.ResourceList) string {
	if !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}) {
		return "not ready"
	}
	if fits, err := nodeaffinity.GetRequiredNodeAffinity(p).Match(n); err != nil || !fits {
		return elsewhere
	}
	repels := func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}
	taints := n.Spec.Taints
	if n.Spec.Unschedulable {
		taints = append([]corev1.Taint{{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}}, taints...)
	}
	switch taint, repelled := scheduling.FindMatchingUntoleratedTaint(klog.Background(), taints, p.Spec.Tolerations, repels, true); {
	case repelled && taint.Key == corev1.TaintNodeUnschedulable:
		return "cordoned"
	case repelled:
		return "taint " + sanitize.Cut(taint.Key, longestKey)
	}
	for _, name := range slices.Sorted(maps.Keys(needs)) {
		need := needs[name]
		left, there := free[name]
		switch {
		case need.IsZero():
		case !there:
			return "no " + sanitize.Cut(string(name), longestKey)
		case left.Cmp(need) < 0:
			return "too little free " + sanitize.Cut(string(name), longestKey)
		}
	}
	return ""
}

// Budget is a budget that does not let all the pods that leave go at once.
type Budget struct {
	Name             string // by namespace and name
	Allowed          int    // how many of them it lets go now
	Of               int    // how many of them it is about
	Left             int    // how many of them it never lets go
	Alone            int    // how many of them get no successor
	Desired, Healthy int32  // healthy pods that it needs, and that it has
	Failed           string // why the controller manager cannot count its pods; empty if it can
}

func (b Budget) keeps() bool { return b.Left > 0 }

// blockingBudgets returns the budgets that do not let all the pods go at once, and the pods that are in several.
func (r *running) blockingBudgets(l Leaving, alone map[string]bool) (out []Budget, doubled []Pod) {
	over := map[string][]string{} // budgets, by pod
	for i := range r.Budgets {
		b := &r.Budgets[i]
		selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if err != nil {
			continue
		}
		name := b.Namespace + "/" + b.Name
		var of []string // its pods that leave, in the order in which the agent asks for them
		for _, pod := range l.Pods {
			p := r.pods[pod]
			if p == nil || p.Namespace != b.Namespace || p.Spec.NodeName != l.Node || unstarted(p) || !selector.Matches(labels.Set(p.Labels)) {
				continue
			}
			over[pod] = append(over[pod], name)
			if ready(p) || !letsUnreadyGo(b) {
				of = append(of, pod)
			}
		}
		if len(of) <= int(b.Status.DisruptionsAllowed) {
			continue
		}
		out = append(out, blocking(b, of, alone))
	}
	for _, pod := range l.Pods {
		if len(over[pod]) > 1 {
			doubled = append(doubled, Pod{pod, sanitize.Listed(over[pod])})
		}
	}
	return out, doubled
}

// unstarted reports whether the API server evicts the pod without a look at budgets: it has not started, ends or has ended.
func unstarted(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodPending || Ended(p) || p.DeletionTimestamp != nil
}

func ready(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue })
}

// letsUnreadyGo reports whether the API server evicts a pod of the budget that is not ready: it costs the budget nothing.
func letsUnreadyGo(b *policyv1.PodDisruptionBudget) bool {
	return ptr.Deref(b.Spec.UnhealthyPodEvictionPolicy, policyv1.IfHealthyBudget) == policyv1.AlwaysAllow ||
		b.Status.DesiredHealthy > 0 && b.Status.CurrentHealthy >= b.Status.DesiredHealthy
}

// blocking is a budget that does not let these pods go at once.
func blocking(b *policyv1.PodDisruptionBudget, of []string, alone map[string]bool) Budget {
	out := Budget{
		Name: b.Namespace + "/" + b.Name, Allowed: int(b.Status.DisruptionsAllowed), Of: len(of), Desired: b.Status.DesiredHealthy, Healthy: b.Status.CurrentHealthy,
	}
	if c := meta.FindStatusCondition(b.Status.Conditions, policyv1.DisruptionAllowedCondition); c != nil && c.Reason == policyv1.SyncFailedReason {
		out.Failed = sanitize.Message(c.Message, sanitize.Longest)
	}
	if out.Allowed > 0 { // otherwise the agent says of it that it keeps the change from beginning
		out.Left = leftBehind(of, out.Allowed, alone)
	}
	for _, pod := range of {
		if alone[pod] {
			out.Alone++
		}
	}
	return out
}

// leftBehind counts the pods that a budget never lets go. A pod without a successor costs the budget a healthy one for good, any other pod until its
// successor is ready.
func leftBehind(pods []string, allowed int, alone map[string]bool) int {
	for len(pods) > 0 && allowed > 0 {
		gone := pods[:min(allowed, len(pods))]
		pods = pods[len(gone):]
		for _, pod := range gone {
			if alone[pod] {
				allowed--
			}
		}
	}
	return len(pods)
}

// Ended reports whether the pod uses nothing any more.
func Ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}
