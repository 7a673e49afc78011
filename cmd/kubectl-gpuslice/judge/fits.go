// Package judge says whether pods that leave a node find a place on another, and which budgets keep them.
package judge

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	requested "k8s.io/component-helpers/resource"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// longestKey bounds the characters of a taint or a resource in a message.
const longestKey = 64

// Leaving are the pods that have to leave a node, each by namespace and name.
type Leaving struct {
	Node string
	Pods []string
	More int // pods that the agent has not named
}

// running is what runs in the cluster, to find out whether pods that leave a node have a place on another.
type running struct {
	nodes   []corev1.Node
	pods    map[string]*corev1.Pod // by namespace and name
	free    map[string]corev1.ResourceList
	budgets []policyv1.PodDisruptionBudget

	claimed        map[corev1.ResourceName]bool // extended resources that DeviceClasses give
	claimedUnknown error                        // why those are not known
}

// Fit says whether the pods that leave each node fit on others, and which budgets block them. By node, it returns why not all of its pods would
// leave. If the user has no right to list these, it says so, and returns no error.
func Fit(ctx context.Context, client kube.Interface, leaving []Leaving, out *cli.Printer) (stuck map[string]string) {
	if len(leaving) == 0 || ctx.Err() != nil {
		return nil
	}
	r, err := listRunning(ctx, client)
	if err != nil {
		out.Printf("whether the pods that leave fit elsewhere is not known: %v\n", err)
		return nil
	}
	if r.claimedUnknown != nil {
		out.Printf("which extended resources are given by claims is not known, and such pods may fit where it says otherwise: %v\n", r.claimedUnknown)
	}
	stuck = map[string]string{}
	for _, l := range leaving {
		lines, why := r.judge(l)
		stuck[l.Node] = why
		for _, line := range lines {
			out.Printf("%s: %s\n", l.Node, line)
		}
	}
	return stuck
}

// listRunning lists nodes, pods, budgets and DeviceClasses. The lists come from the API server's cache, since they may be long.
func listRunning(ctx context.Context, client kube.Interface) (*running, error) {
	cached := metav1.ListOptions{ResourceVersion: "0"}
	nodes, err := client.Nodes().List(ctx, cached)
	if err != nil {
		return nil, fmt.Errorf("listing nodes: %w", err)
	}
	pods, err := client.Pods("").List(ctx, cached)
	if err != nil {
		return nil, fmt.Errorf("listing pods: %w", err)
	}
	budgets, err := client.PodDisruptionBudgets("").List(ctx, cached)
	if err != nil {
		return nil, fmt.Errorf("listing budgets: %w", err)
	}
	r := &running{nodes: nodes.Items, budgets: budgets.Items, pods: map[string]*corev1.Pod{}, free: map[string]corev1.ResourceList{}}
	for _, n := range nodes.Items {
		r.free[n.Name] = n.Status.Allocatable.DeepCopy()
	}
	for i := range pods.Items {
		p := &pods.Items[i]
		r.pods[p.Namespace+"/"+p.Name] = p
		if p.Spec.NodeName != "" && !Ended(p) {
			subtract(r.free[p.Spec.NodeName], Requests(p))
		}
	}
	r.claimed, r.claimedUnknown = listClaimed(ctx, client)
	return r, nil
}

// listClaimed returns the extended resources that the scheduler makes claims of DeviceClasses for. An API server without DeviceClasses has none.
func listClaimed(ctx context.Context, client kube.Interface) (map[corev1.ResourceName]bool, error) {
	classes, err := client.DeviceClasses().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("listing DeviceClasses: %w", err)
	}
	out := map[corev1.ResourceName]bool{}
	for _, c := range classes.Items {
		if c.Spec.ExtendedResourceName != nil {
			out[corev1.ResourceName(*c.Spec.ExtendedResourceName)] = true
		}
	}
	return out, nil
}

// asksByClaims reports whether the pod asks for devices by claims, which no allocatable counts.
func (r *running) asksByClaims(p *corev1.Pod) bool {
	if len(p.Spec.ResourceClaims) > 0 || p.Status.ExtendedResourceClaimStatus != nil {
		return true
	}
	for name := range Requests(p) {
		if r.claimed[name] || strings.HasPrefix(string(name), resourcev1.ResourceDeviceClassPrefix) {
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

// judge says whether the pods of one node fit on the others, as if nothing else changed, and what keeps them. Stuck is why not all of them would
// leave, though some may go at once; empty if they would.
func (r *running) judge(l Leaving) (lines []string, stuck string) {
	free := map[string]corev1.ResourceList{}
	for name, list := range r.free {
		free[name] = list.DeepCopy()
	}
	var placed, lost, claiming []string
	homeless := map[string]bool{}
	for _, name := range l.Pods {
		p := r.pods[name]
		owner := controller(p)
		switch {
		case p == nil || p.Spec.NodeName != l.Node:
			lost = append(lost, name)
			continue
		case owner == nil:
			continue // its agent names it among what is lost
		case owner.Kind == "DaemonSet": // the pod comes back to the node
			continue
		case r.asksByClaims(p):
			claiming = append(claiming, name)
			continue
		}
		if why := r.place(p, l.Node, free); why != "" {
			homeless[name] = true
			lines = append(lines, fmt.Sprintf("%s fits on no other node: %s", name, why))
		} else {
			placed = append(placed, name)
		}
	}
	if len(placed) > 0 {
		lines = append([]string{have(len(placed)) + " a place on other nodes: " + sanitize.Listed(placed)}, lines...)
	}
	if n := len(claiming); n > 0 {
		lines = append(lines, fmt.Sprintf("whether %s with claims for devices would fit elsewhere is not judged: %s", cli.Counted(n, "pod"), sanitize.Listed(claiming)))
	}
	if n := len(lost) + l.More; n > 0 {
		lines = append(lines, fmt.Sprintf("whether %s more would fit elsewhere is not known", cli.Counted(n, "pod")))
	}
	budgets, stuck := r.blockingBudgets(l, homeless)
	return append(lines, budgets...), stuck
}

func have(n int) string {
	if n == 1 {
		return "1 pod has"
	}
	return fmt.Sprintf("%d pods have", n)
}

func controller(p *corev1.Pod) *metav1.OwnerReference {
	if p == nil {
		return nil
	}
	return metav1.GetControllerOf(p)
}

// place finds a node for the pod, and takes the resources that it needs there. Otherwise it counts why the nodes do not fit.
func (r *running) place(p *corev1.Pod, from string, free map[string]corev1.ResourceList) string {
	needs := Requests(p)
	against := map[string]int{}
	for i := range r.nodes {
		n := &r.nodes[i]
		if n.Name == from {
			continue
		}
		why := keeps(n, p, free[n.Name], needs)
		if why == "" {
			subtract(free[n.Name], needs)
			return ""
		}
		against[why]++
	}
	if len(against) == 0 {
		return "there is none"
	}
	var out []string
	for _, why := range slices.SortedFunc(maps.Keys(against), func(a, b string) int { return cmp.Or(against[b]-against[a], cmp.Compare(a, b)) }) {
		out = append(out, fmt.Sprintf("%s: %s", cli.Counted(against[why], "node"), why))
	}
	return strings.Join(out, "; ")
}

// keeps returns why the pod could not be scheduled to the node; empty if it could, as far as capacity, selectors and taints go.
func keeps(n *corev1.Node, p *corev1.Pod, free, needs corev1.ResourceList) string {
	if n.Spec.Unschedulable {
		return "cordoned"
	}
	ready := slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	if !ready {
		return "not ready"
	}
	if fits, err := nodeaffinity.GetRequiredNodeAffinity(p).Match(n); err != nil || !fits {
		return "labels that the pod's selector does not fit"
	}
	repels := func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}
	if taint, repelled := scheduling.FindMatchingUntoleratedTaint(klog.Background(), n.Spec.Taints, p.Spec.Tolerations, repels, true); repelled {
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

// blockingBudgets returns the budgets that do not let all the pods go at once, and which of them would keep some of the pods for good.
func (r *running) blockingBudgets(l Leaving, homeless map[string]bool) (lines []string, stuck string) {
	over := map[string][]string{} // budgets, by pod
	for i := range r.budgets {
		b := &r.budgets[i]
		selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if err != nil {
			continue
		}
		name := b.Namespace + "/" + b.Name
		var of []string // its pods that leave, in the order in which the agent asks for them
		for _, pod := range l.Pods {
			p := r.pods[pod]
			if p == nil || p.Namespace != b.Namespace || p.Spec.NodeName != l.Node || !selector.Matches(labels.Set(p.Labels)) {
				continue
			}
			of = append(of, pod)
			over[pod] = append(over[pod], name)
		}
		allowed := int(b.Status.DisruptionsAllowed)
		left := leftBehind(of, allowed, homeless)
		switch {
		case len(of) <= allowed:
		case allowed <= 0:
			lines = append(lines, fmt.Sprintf("budget %s lets none of %s go now: it needs %d healthy and has %d",
				name, cli.Counted(len(of), "pod"), b.Status.DesiredHealthy, b.Status.CurrentHealthy))
		case left > 0:
			away := len(slices.DeleteFunc(slices.Clone(of), func(pod string) bool { return !homeless[pod] }))
			line := fmt.Sprintf("budget %s lets %d of %s go, and stays in the way then: the next one waits for a successor, and %d of them %s no place elsewhere",
				name, allowed, cli.Counted(len(of), "pod"), away, has(away))
			lines, stuck = append(lines, line), cmp.Or(stuck, line)
		default:
			lines = append(lines, fmt.Sprintf("budget %s lets %d of %s go at a time: the next one waits until a successor is ready",
				name, allowed, cli.Counted(len(of), "pod")))
		}
	}
	for _, pod := range l.Pods {
		if len(over[pod]) > 1 {
			lines = append(lines, fmt.Sprintf("%s is in more than one budget, and the API server evicts no such pod: %s", pod, sanitize.Listed(over[pod])))
		}
	}
	return lines, stuck
}

// leftBehind counts the pods that a budget never lets go. A pod without a place elsewhere costs the budget a healthy one for good, any other pod
// until its successor is ready.
func leftBehind(pods []string, allowed int, homeless map[string]bool) int {
	for len(pods) > 0 && allowed > 0 {
		gone := pods[:min(allowed, len(pods))]
		pods = pods[len(gone):]
		for _, pod := range gone {
			if homeless[pod] {
				allowed--
			}
		}
	}
	return len(pods)
}

func has(n int) string {
	if n == 1 {
		return "has"
	}
	return "have"
}

// Ended reports whether the pod uses nothing any more.
func Ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}
