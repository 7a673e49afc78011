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
	devices devices
}

// Verdict says whether all pods that have to leave a node would leave. It is zero if they would.
type Verdict struct {
	Stuck   string // why not all of them would
	Unknown string // why that is not known; empty if Stuck is not
}

// Fit says whether the pods that leave each node fit on others, and which budgets block them, and returns the verdict by node. A list that the user has
// no right to leaves the verdict unknown, and is no error.
func Fit(ctx context.Context, client kube.Interface, leaving []Leaving, out *cli.Printer) map[string]Verdict {
	if len(leaving) == 0 || ctx.Err() != nil {
		return nil
	}
	verdicts := map[string]Verdict{}
	r, err := listRunning(ctx, client, leaving)
	if err != nil {
		out.Printf("whether the pods that leave fit elsewhere is not known: %v\n", err)
		for _, l := range leaving {
			verdicts[l.Node] = Verdict{Unknown: err.Error()}
		}
		return verdicts
	}
	if r.devices.unknown != nil {
		out.Printf("which devices claims have is not known: %v\n", r.devices.unknown)
	}
	for _, l := range leaving {
		lines, verdict := r.judge(ctx, l)
		verdicts[l.Node] = verdict
		for _, line := range lines {
			out.Printf("%s: %s\n", l.Node, line)
		}
	}
	return verdicts
}

// listRunning lists nodes, pods, budgets and DeviceClasses; and claims and ResourceSlices if a pod that leaves asks by claims. The lists come from the API
// server's cache, since they may be long.
func listRunning(ctx context.Context, client kube.Interface, leaving []Leaving) (*running, error) {
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
	r.devices.classes, r.devices.unknown = listClasses(ctx, client)
	if r.devices.unknown == nil && slices.ContainsFunc(leaving, func(l Leaving) bool {
		return slices.ContainsFunc(l.Pods, func(name string) bool { return r.pods[name] != nil && r.asksByClaims(r.pods[name]) })
	}) {
		r.devices.unknown = r.devices.list(ctx, client)
	}
	return r, nil
}

// asksByClaims reports whether the pod asks for devices by claims, or may get its devices by one on another node.
func (r *running) asksByClaims(p *corev1.Pod) bool {
	if len(p.Spec.ResourceClaims) > 0 || p.Status.ExtendedResourceClaimStatus != nil {
		return true
	}
	for name := range Requests(p) {
		if r.devices.classes.of(name) != "" {
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

// judge says whether the pods of one node fit on the others, as if nothing else changed, and what keeps them. Some may go at once though not all would.
func (r *running) judge(ctx context.Context, l Leaving) (lines []string, verdict Verdict) {
	room := r.roomWithout(l)
	var placed, lost, unknown []string
	homeless, mayBeHomeless := map[string]bool{}, map[string]bool{}
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
		}
		switch why, err := r.place(ctx, p, l.Node, room); {
		case err != nil:
			mayBeHomeless[name] = true
			unknown = append(unknown, fmt.Sprintf("%s (%v)", name, err))
		case why != "":
			homeless[name], mayBeHomeless[name] = true, true
			lines = append(lines, fmt.Sprintf("%s fits on no other node: %s", name, why))
		default:
			placed = append(placed, name)
		}
	}
	if len(placed) > 0 {
		lines = append([]string{have(len(placed)) + " a place on other nodes: " + sanitize.Listed(placed)}, lines...)
	}
	if n := len(unknown); n > 0 {
		lines = append(lines, fmt.Sprintf("whether %s more would fit elsewhere is not known: %s", cli.Counted(n, "pod"), sanitize.Listed(unknown)))
	}
	if n := len(lost) + l.More; n > 0 {
		verdict.Unknown = fmt.Sprintf("whether %s more would fit elsewhere is not known", cli.Counted(n, "pod"))
		lines = append(lines, verdict.Unknown)
	}
	budgets, stuck := r.blockingBudgets(l, homeless)
	_, maybe := r.blockingBudgets(l, mayBeHomeless)
	switch {
	case stuck != "":
		verdict = Verdict{Stuck: stuck}
	case maybe != "":
		verdict.Unknown = "it is not known where pods with a budget would go: " + sanitize.Listed(unknown)
	case len(r.budgets) == 0:
		verdict.Unknown = ""
	}
	return append(lines, budgets...), verdict
}

// room is what the nodes have for pods that leave one of them.
type room struct {
	free    map[string]corev1.ResourceList // by node
	devices *allocation
}

// roomWithout returns the room that there is once these pods have left.
func (r *running) roomWithout(l Leaving) room {
	out := room{free: map[string]corev1.ResourceList{}}
	for name, list := range r.free {
		out.free[name] = list.DeepCopy()
	}
	var pods []*corev1.Pod
	for _, name := range l.Pods {
		if p := r.pods[name]; p != nil {
			pods = append(pods, p)
		}
	}
	out.devices = r.devices.without(pods)
	return out
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

// place finds a node for the pod, and takes the resources and devices that it needs there. Otherwise it counts why the nodes do not fit. The error says why it
// is not known whether one fits.
func (r *running) place(ctx context.Context, p *corev1.Pod, from string, in room) (why string, err error) {
	claims := r.asksByClaims(p)
	against := map[string]int{}
	var unknown error
	for i := range r.nodes {
		n := &r.nodes[i]
		if n.Name == from {
			continue
		}
		needs := r.devices.classes.countable(Requests(p), n)
		why := keeps(n, p, in.free[n.Name], needs)
		if why == "" && claims {
			var failed error
			if why, failed = in.devices.place(ctx, n, p); failed != nil {
				unknown = failed
				continue
			}
		}
		if why == "" {
			subtract(in.free[n.Name], needs)
			return "", nil
		}
		against[why]++
	}
	switch {
	case unknown != nil:
		return "", unknown
	case len(against) == 0:
		return "there is none", nil
	}
	var out []string
	for _, why := range slices.SortedFunc(maps.Keys(against), func(a, b string) int { return cmp.Or(against[b]-against[a], cmp.Compare(a, b)) }) {
		out = append(out, fmt.Sprintf("%s: %s", cli.Counted(against[why], "node"), why))
	}
	return strings.Join(out, "; "), nil
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
