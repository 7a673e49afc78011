package judge

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	rivalsTime = 5 * time.Second // bounds the search for all rivals
	mostRivals = 64              // of one pod
)

// addRivals adds to each move the pods that kube-scheduler may run in the place of its pod. The scheduler sorts its queue by priority, and then by its last try
// of each pod, which no object shows; and it runs a pod on any node that accepts it. So a pod is certain to run only where there is enough for all others, too.
func (m *moves) addRivals(ctx context.Context, pending []*corev1.Pod, out []Move) {
	ctx, cancel := context.WithTimeout(ctx, rivalsTime)
	defer cancel()
	all := m.contendersOf(ctx, pending, out)
	for i := range out {
		if out[i].Node == "" || !all.gets(&out[i]) {
			continue
		}
		switch names := all.rivals(out[i].Pod); {
		case ctx.Err() != nil:
			out[i].Notes = append(out[i].Notes, "whether another pod runs in its place is not known")
		case len(names) > 0:
			out[i].Rivals = slices.Clone(names[:min(len(names), mostRivals)])
			for n, name := range names {
				if m.pods[name] != nil && m.pods[name].Spec.NodeName != "" {
					names[n] = "the successor of " + name
				}
			}
			out[i].Notes = append(out[i].Notes, "kube-scheduler may run another pod in its place: "+sanitize.Names(names))
		}
	}
}

// contender are pods that request the same under the same rules.
type contender struct {
	pods     []string
	priority int32
	preempts bool
	on       map[string][]portion // what they request, by the nodes that accept them, before and after the moves
	may      map[string][]portion // and by those that accept them before or after
	rivals   []*contender         // that may have all of which one of these needs a part
	judged   bool                 // the rivals are known
}

// portion is so many devices of any of these kinds.
type portion struct {
	kinds []string // nil for any
	count int
}

func (p portion) overlaps(q portion) bool {
	return p.kinds == nil || q.kinds == nil || slices.ContainsFunc(p.kinds, func(k string) bool { return slices.Contains(q.kinds, k) })
}

// contenders are the pods that may run once all moves are carried out: those that wait, and the successors of those that have to leave.
type contenders struct {
	*moves

	all   []*contender
	of    map[string]*contender  // by pod
	given map[string]demand.Want // what moves give of each node
}

func (m *moves) contendersOf(ctx context.Context, pending []*corev1.Pod, out []Move) *contenders {
	c := &contenders{moves: m, of: map[string]*contender{}, given: map[string]demand.Want{}}
	byRules := map[string]*contender{}
	add := func(name string, p *corev1.Pod) {
		key := m.rulesOf(p)
		if byRules[key] == nil {
			byRules[key] = m.contender(ctx, p)
			c.all = append(c.all, byRules[key])
		}
		c.of[name] = byRules[key]
		c.of[name].pods = append(c.of[name].pods, name)
	}
	var leave []string
	for i, p := range pending {
		never := slices.Contains([]Verdict{TooLarge, Gated}, out[i].Verdict)
		if never || out[i].Verdict == NotGPU && (len(m.devices.classes.asked(p)) == 0 || m.missingClass(p) != "") {
			continue
		}
		add(out[i].Pod, p)
		for _, of := range c.of[out[i].Pod].may[out[i].Node] {
			if c.given[out[i].Node] == nil {
				c.given[out[i].Node] = demand.Want{}
			}
			for _, kind := range of.kinds {
				c.given[out[i].Node][kind] += of.count
			}
		}
		leave = append(leave, out[i].Leave...)
	}
	slices.Sort(leave)
	for _, name := range slices.Compact(leave) {
		if p := m.pods[name]; controller(p) != nil {
			add(name, p)
		}
	}
	return c
}

// rulesOf is equal for pods that request the same under the same rules.
func (m *moves) rulesOf(p *corev1.Pod) string {
	var claims []any
	for _, ref := range p.Spec.ResourceClaims {
		claims = append(claims, p.Namespace, ref.ResourceClaimName)
		for _, s := range p.Status.ResourceClaimStatuses {
			if s.Name != ref.Name || s.ResourceClaimName == nil {
				continue
			}
			if of := m.devices.claims[types.NamespacedName{Namespace: p.Namespace, Name: *s.ResourceClaimName}]; of != nil {
				claims = append(claims, of.Spec)
			}
		}
	}
	key, err := json.Marshal([]any{Requests(p), p.Spec.NodeSelector, p.Spec.Affinity, p.Spec.Tolerations, p.Spec.Priority, p.Spec.PreemptionPolicy, claims})
	if err != nil {
		return p.Namespace + "/" + p.Name
	}
	return string(key)
}

// contender is what pods like this one request of each node, as far as all but GPUs let them run there.
func (m *moves) contender(ctx context.Context, p *corev1.Pod) *contender {
	c := &contender{
		priority: ptr.Deref(p.Spec.Priority, 0), on: map[string][]portion{}, may: map[string][]portion{},
		preempts: ptr.Deref(p.Spec.PreemptionPolicy, corev1.PreemptLowerPriority) != corev1.PreemptNever && !m.devices.classes.asksByClaims(p),
	}
	for i := range m.Nodes {
		n := &m.Nodes[i]
		if ctx.Err() != nil || m.otherName(m.hardware[n.Name], p, n) != "" {
			continue
		}
		other := m.countable(p, n)
		maps.DeleteFunc(other, func(name corev1.ResourceName, _ resource.Quantity) bool { return nvml.GPUResource(string(name)) })
		before := keeps(n, p, m.free[n.Name], other) == ""
		after := before
		if len(m.asked[n.Name]) > 0 {
			after = keeps(withoutProfile(n), p, m.free[n.Name], other) == ""
		}
		if before || after {
			c.may[n.Name] = m.portions(ctx, p, n)
		}
		if before && after {
			c.on[n.Name] = c.may[n.Name]
		}
	}
	if len(c.on) == 0 {
		c.on = c.may
	}
	return c
}

// portions are what the pod requests of the node's GPUs.
func (m *moves) portions(ctx context.Context, p *corev1.Pod, n *corev1.Node) (out []portion) {
	h := m.hardware[n.Name]
	any := []portion{{count: mostDevices}} // it is not known which
	switch claims := m.devices.classes.asksByClaims(p); {
	case claims && h.claims:
		out, _, err := m.portionsByClaims(ctx, p, n, true)
		if err != nil {
			return any
		}
		return out
	case claims && h.unknown != "" && m.devices.offeredOn(n):
		return any
	}
	want := h.named(wantOf(p))
	for _, kind := range slices.Sorted(maps.Keys(want)) {
		out = append(out, portion{kinds: []string{kind}, count: want[kind]})
	}
	return out
}

// gets reports whether the pod is to have what it requests once all moves are carried out that can be.
func (c *contenders) gets(move *Move) bool {
	is := c.of[move.Pod]
	return is != nil && !slices.ContainsFunc(is.may[move.Node], func(p portion) bool { return c.devices(move.Node, p) < p.count })
}

// rivals are the pods that may run in the place of the pod; none if it is certain to run.
func (c *contenders) rivals(pod string) (out []string) {
	is := c.of[pod]
	if !is.judged {
		is.judged, is.rivals = true, c.before(is)
	}
	for _, other := range is.rivals {
		for _, name := range other.pods {
			if name != pod {
				out = append(out, name)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// before are those that may have so much that each node lacks something that such a pod requests; none if they cannot.
func (c *contenders) before(is *contender) (out []*contender) {
	keep, all := c.keeping(is)
	taken, total := map[string][]int{}, 0
	for nodeName := range keep {
		taken[nodeName] = make([]int, len(keep[nodeName]))
	}
	for _, other := range c.all {
		pods, most := len(other.pods), 0
		switch {
		case is.preempts && other.priority < is.priority:
			continue
		case other == is:
			pods--
		}
		for nodeName := range keep {
			for i, request := range is.on[nodeName] {
				each := other.takes(nodeName, request)
				taken[nodeName][i] += each * pods
				most = max(most, each)
			}
		}
		if total += most * pods; most > 0 && pods > 0 {
			out = append(out, other)
		}
	}
	for nodeName, has := range keep {
		enough := true
		for i, n := range has {
			enough = enough && taken[nodeName][i] < n
		}
		if enough {
			return nil
		}
	}
	if total < all {
		return nil
	}
	return out
}

// keeping is how many devices have to go to others before a node has none for a request of the pod, by node and request; and how many at least for all nodes.
func (c *contenders) keeping(is *contender) (keep map[string][]int, all int) {
	keep = map[string][]int{}
	for nodeName, of := range is.on {
		var has []int
		for _, request := range of {
			has = append(has, c.devices(nodeName, request)-request.count+1)
		}
		if len(has) > 0 && slices.Min(has) > 0 {
			keep[nodeName] = has
			all += slices.Min(has)
		}
	}
	return keep, all
}

// takes is how many of the devices that a request accepts one of the pods may have of the node.
func (c *contender) takes(nodeName string, request portion) (n int) {
	for _, p := range c.may[nodeName] {
		if p.overlaps(request) {
			n += p.count
		}
	}
	return n
}

// devices are those of the node for a request once all moves are carried out that can be. Pods that run now and stay have others.
func (c *contenders) devices(nodeName string, request portion) (n int) {
	h := c.hardware[nodeName]
	if h.dynamic || request.kinds == nil { // cut for the pods that come
		return request.count
	}
	open := h.planned.sure
	if open == nil {
		open = h.open()
	}
	for _, kind := range request.kinds {
		replicas := max(1, h.replicas[kind])
		if h.unknown == "" && replicas == 1 {
			n += open[kind]
			continue
		}
		n += c.given[nodeName][kind]
		for _, name := range resourcesOf(kind) {
			free := c.room.free[nodeName][name]
			n += int(max(0, free.Value())) / replicas
		}
	}
	return n
}

// open are the devices that pods have by moves, or none has, by their kind.
func (h *hardware) open() demand.Want {
	out := demand.Want{}
	isOpen := func(pods []string) bool {
		return !slices.ContainsFunc(pods, func(p string) bool { return p != demand.Stays })
	}
	for i := range h.gpus {
		g := &h.gpus[i]
		switch {
		case g.Lost || !isOpen(g.All):
		case !g.Enabled:
			out[demand.Whole]++
		default:
			for _, part := range g.Instances {
				if part.Compute == "" && isOpen(g.On[part.Start]) {
					out[part.Profile]++
				}
			}
		}
	}
	return out
}
