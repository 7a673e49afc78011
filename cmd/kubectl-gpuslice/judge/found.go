package judge

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// alike is what was found for pods that request the same under the same rules, by node.
type alike struct {
	want  demand.Want
	found []found
}

// found is what a node has for a pod.
type found struct {
	looked  bool
	version int
	fits    bool
	want    demand.Want // by the names of the node's profiles
	why     string      // why the pod cannot run there, whatever is cut; empty if only GPUs are missing, or nothing
	unknown error       // why that is not known
	recut   demand.Recut
	can     bool // there is a change after which it runs
	closed  bool // that may not begin, and it is not known when it may
}

// alikeTo is what was found for pods like this one.
func (m *moves) alikeTo(p *corev1.Pod) *alike {
	name := ""
	if m.devices.classes.asksByClaims(p) { // an allocation takes what it finds
		name = p.Namespace + "/" + p.Name
	}
	key, err := json.Marshal([]any{
		name, Requests(p), p.Spec.NodeSelector, p.Spec.Affinity, p.Spec.Tolerations, p.Spec.Priority, p.Spec.PreemptionPolicy,
	})
	c := m.seen[string(key)]
	if c == nil || err != nil {
		c = &alike{want: wantOf(p), found: make([]found, len(m.Nodes))}
		m.seen[string(key)] = c
	}
	return c
}

// look is what the node has for pods like this one.
func (m *moves) look(ctx context.Context, c *alike, p *corev1.Pod, i int) *found {
	n, f := &m.Nodes[i], &c.found[i]
	if !f.looked || f.version != m.version[n.Name] {
		*f = found{looked: true, version: m.version[n.Name], want: m.hardware[n.Name].named(c.want)}
		if m.admits(ctx, f, p, n) {
			m.wouldCut(f, p, n)
			f.closed = f.can && m.closed(n, f.recut)
		}
	}
	return f
}

// admits adds whether the node has all that the pod needs now. It returns true if it may lack GPUs alone.
func (m *moves) admits(ctx context.Context, f *found, p *corev1.Pod, n *corev1.Node) bool {
	switch _, changing := n.Annotations[config.AnnotationJournal]; {
	case ctx.Err() != nil:
		f.unknown = errors.New("looking at the nodes takes too long")
		return false
	case changing && n.Spec.Unschedulable:
		f.unknown = fmt.Errorf("%s is being changed", n.Name)
		return false
	}
	needs := m.countable(p, n)
	other := maps.Clone(needs)
	maps.DeleteFunc(other, func(name corev1.ResourceName, _ resource.Quantity) bool { return nvml.GPUResource(string(name)) })
	if f.why = keeps(n, p, m.room.free[n.Name], other); f.why != "" {
		return false
	}
	f.fits = keeps(n, p, m.room.free[n.Name], needs) == ""
	if f.fits && m.devices.classes.asksByClaims(p) && !m.byPlugin(p, n) {
		m.byClaims(ctx, f, p, n)
	}
	return !f.fits && f.why == "" && f.unknown == nil
}

// countable are the needs of the pod that the node's allocatable counts, now or after a change.
func (m *moves) countable(p *corev1.Pod, n *corev1.Node) corev1.ResourceList {
	needs := Requests(p)
	out := m.devices.classes.countable(needs, n)
	for name, need := range needs {
		if m.hardware[n.Name].offersByPlugin() && nvml.GPUResource(string(name)) {
			out[name] = need
		}
	}
	return out
}

// byPlugin reports whether the pod gets all its devices from the node's device plugin, although a DeviceClass may stand for them elsewhere.
func (m *moves) byPlugin(p *corev1.Pod, n *corev1.Node) bool {
	if !m.hardware[n.Name].offersByPlugin() || len(p.Spec.ResourceClaims) > 0 {
		return false
	}
	for name := range Requests(p) {
		if m.devices.classes.of(name) != "" && !nvml.GPUResource(string(name)) {
			return false
		}
	}
	return true
}

// byClaims adds whether the node has devices for the pod's claims now; if not, what its GPUs would have to be cut into.
func (m *moves) byClaims(ctx context.Context, f *found, p *corev1.Pod, n *corev1.Node) {
	f.fits = false
	h := m.hardware[n.Name]
	if !h.planned.changes || !h.claims {
		why, err := m.room.devices.place(ctx, n, p)
		f.fits = err == nil && why == ""
		if f.unknown = err; f.fits || err != nil {
			return
		}
		switch f.why = why; {
		case h.unknown != "" && m.devices.offeredOn(n):
			f.why, f.unknown = "", fmt.Errorf("%s: %s", n.Name, h.unknown)
			return
		case !h.claims:
			return
		}
	}
	want, none, err := m.wantByClaims(ctx, p, n)
	f.want, f.why, f.unknown = want, "", err
	if err == nil && none != "" {
		f.why = "no GPU of it offers a device " + none
	}
}

// wouldCut adds the cheapest change of the node after which it has what is wanted.
func (m *moves) wouldCut(f *found, p *corev1.Pod, n *corev1.Node) {
	h := m.hardware[n.Name]
	switch {
	case h.none:
		return
	case h.unknown != "":
		f.unknown = fmt.Errorf("%s: %s", n.Name, h.unknown)
		return
	}
	if f.why, f.unknown = m.neverOffers(h, p, n); f.why != "" || f.unknown != nil {
		return
	}
	search := m.search
	if h.dynamic {
		search = m.fewest
	}
	m.cheapest(search, f, n)
	if f.can && !h.planned.changes && len(f.recut.Pods) == 0 && (h.dynamic || len(f.recut.Cuts) == 0) {
		f.can, f.why = false, "devices that it could have are free, and the scheduler gives it none"+m.tainted(n)
	}
}

// mostKept bounds how often a change is looked for that makes other pods leave, where it cannot be had by those of the cheapest.
const mostKept = 4

// cheapest adds the cheapest change that comes true.
func (m *moves) cheapest(search *demand.Search, f *found, n *corev1.Node) {
	h := m.hardware[n.Name]
	stay := map[string]bool{}
	for range mostKept {
		if f.recut, f.can = search.Find(h.keeping(stay), f.want); !f.can || m.comesTrue(f, n) {
			break
		}
		f.can = false // it is so unless others are found that can leave
		if len(f.recut.Pods) == 0 {
			break
		}
		for _, p := range f.recut.Pods {
			stay[p] = true
		}
	}
}

// comesTrue reports whether one command for this move and those before it gives all their pods what they say. The agent solves for the end of all moves at
// once, and pods of DaemonSets that leave come back first.
func (m *moves) comesTrue(f *found, n *corev1.Node) bool {
	h := m.hardware[n.Name]
	for _, c := range f.recut.Restored(h.gpus).Cuts {
		if !h.dynamic && !h.asPlanned(c, f.recut.Pods) {
			return false
		}
	}
	return m.leftByReturning(f, n)
}

// leftByReturning reports whether the pods that come back leave what the moves give.
func (m *moves) leftByReturning(f *found, n *corev1.Node) bool {
	h := m.hardware[n.Name]
	var free demand.Want
	for kind, count := range m.returning(f.recut, n) {
		if f.want[kind] == 0 && h.planned.promised[kind] == 0 {
			continue
		}
		if free == nil {
			free = h.free(f.recut.Restored(h.gpus))
		}
		if free[kind] < count+f.want[kind] {
			return false
		}
	}
	return true
}

// returning is what pods request that come back to the node after this change and those before it.
func (m *moves) returning(r demand.Recut, n *corev1.Node) demand.Want {
	h := m.hardware[n.Name]
	out := maps.Clone(h.planned.returning)
	for _, name := range r.Pods {
		if p := m.ofDaemonSet(name); p != nil {
			for kind, count := range h.named(wantOf(p)) {
				out[kind] += count
			}
		}
	}
	return out
}

// ofDaemonSet is the pod if one of a DaemonSet; nil otherwise. Its successor comes to the same node, even behind the cordon, before any pod that waits.
func (m *moves) ofDaemonSet(name string) *corev1.Pod {
	p := m.pods[name]
	if owner := controller(p); owner == nil || owner.Kind != "DaemonSet" {
		return nil
	}
	return p
}
