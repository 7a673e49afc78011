package judge

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// Verdict is what a pending pod needs to run.
type Verdict string

// The verdicts.
const (
	WillFit     Verdict = "WillFit"     // nothing: a node has what it requests
	NeedsRecut  Verdict = "NeedsRecut"  // a change of geometry for which no pod has to leave
	NeedsDrain  Verdict = "NeedsDrain"  // pods have to leave
	NeedsCordon Verdict = "NeedsCordon" // pods have to leave, and their budget lets them go behind a cordon alone, if at all
	NeedsWindow Verdict = "NeedsWindow" // a change that may not begin yet: its window, a hold, or the limit or pause of its pool
	TooLarge    Verdict = "TooLarge"    // no node could have what it requests, whatever leaves
	Gated       Verdict = "Gated"       // its gates have to go first: the scheduler does not look at it
	NotGPU      Verdict = "NotGPU"      // it requests no GPU, or something else keeps it from each node that could have them
	NotKnown    Verdict = "NotKnown"    // what it needs is not known
)

// Move is what a pending pod needs to run.
type Move struct {
	Pod      string    `json:"pod"` // by namespace and name
	Since    time.Time `json:"since,omitzero"`
	Requests []string  `json:"requests,omitempty"` // of GPUs and their parts: "nvidia.com/mig-3g.40gb 1"
	Verdict  Verdict   `json:"verdict"`
	Reason   string    `json:"reason"`
	Node     string    `json:"node,omitempty"`
	Cuts     []Cut     `json:"cuts,omitempty"`
	Leave    []string  `json:"leave,omitempty"`      // pods that have to leave
	Lost     int       `json:"slicesLost,omitempty"` // memory slices that they have on the node
	Begins   time.Time `json:"begins,omitzero"`      // when the change may begin, if that is later; zero also where that is not known
	Budgets  []string  `json:"budgets,omitempty"`    // what keeps those that leave
	Stuck    bool      `json:"stuck,omitempty"`      // not all of them would leave
	Unsure   bool      `json:"unsure,omitempty"`     // whether they would all leave is not known
	Rivals   []string  `json:"rivals,omitempty"`     // pods, or those whose successors, kube-scheduler may run in its place
	Notes    []string  `json:"notes,omitempty"`

	// Node's changed GPUs by this move and those before it, by index.
	Request map[int]nvml.Request `json:"-"`
}

// Cut is one GPU before and after a change.
type Cut struct {
	GPU    int        `json:"gpu"`    // by index
	Before []Instance `json:"before"` // null with MIG off
	After  []Instance `json:"after"`  // the same
	Slices int        `json:"slices"` // memory slices of the GPU
}

// Instance is a GPU instance at its place.
type Instance struct {
	Is   string   `json:"is"`   // "3g.40gb@4"
	At   int      `json:"at"`   // its first memory slice
	Size int      `json:"size"` // memory slices
	Pods []string `json:"pods,omitempty"`
}

// Question is what Moves answers.
type Question struct {
	Cluster *Cluster
	Pending []corev1.Pod
	// Status has the report of a node's agent. Unknown says why it does not count.
	Status func(n *corev1.Node) (s api.Status, unknown string)
	// Begins returns when a change of the node may begin that takes something away; nil if that is not known.
	Begins func(n *corev1.Node) Beginning
	// Spells reports whether a label of the node can ask for these GPUs; nil if any can.
	Spells func(n *corev1.Node, requests map[int]nvml.Request) bool
	All    bool // the pods of the cluster are all that there are
	Now    time.Time
}

// Beginning is when a change may begin.
type Beginning struct {
	At  time.Time // not before this time; zero for now
	Not string    // what keeps it from beginning until something else ends; empty if nothing does
	// Stay is what keeps it so where pods have to leave; empty if nothing does.
	Stay string
}

// Moves says of each pending pod what it needs to run. Like the scheduler, it takes the pods by priority, then by age. Each move counts on those before it.
// The lists are of one moment. Where ctx ends first, the verdict is NotKnown.
func Moves(ctx context.Context, q Question) []Move {
	m := movesOf(q)
	pending := slices.SortedFunc(slices.Values(pointers(q.Pending)), func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(ptr.Deref(b.Spec.Priority, 0), ptr.Deref(a.Spec.Priority, 0)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	var out []Move
	spent := map[string]time.Duration{}
	for _, p := range pending {
		began := time.Now()
		move := m.within(ctx, p, namespaceTime-spent[p.Namespace])
		spent[p.Namespace] += time.Since(began)
		move.Pod, move.Since, move.Requests = p.Namespace+"/"+p.Name, p.CreationTimestamp.UTC(), m.devices.classes.asked(p)
		out = append(out, move)
	}
	m.addRivals(ctx, pending, out)
	return out
}

// namespaceTime bounds the search for the pods of a namespace: what its users request may take long, and that has to cost the others nothing.
const namespaceTime = 5 * time.Second

// within is the move of one pod that is found in so much time.
func (m *moves) within(ctx context.Context, p *corev1.Pod, left time.Duration) Move {
	ctx, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	m.search.Until(func() bool { return ctx.Err() != nil })
	m.fewest.Until(func() bool { return ctx.Err() != nil })
	if ctx.Err() == nil {
		if move := m.of(ctx, p); ctx.Err() == nil {
			return move
		}
	}
	return Move{Verdict: NotKnown, Reason: fmt.Sprintf("looking at the pods of namespace %s takes too long", sanitize.Cut(p.Namespace, longestKey))}
}

// moves is the cluster with the moves so far.
type moves struct {
	*running

	question Question
	hardware map[string]*hardware // by node
	room     room
	search   *demand.Search
	fewest   *demand.Search    // where NVIDIA's DRA driver cuts
	version  map[string]int    // of a node: moves have changed it so often
	seen     map[string]*alike // pods with equal requests and rules
	asked    map[string]map[int]nvml.Request

	beginnings map[string]Beginning // by node
}

// movesOf is the cluster before the first move.
func movesOf(q Question) *moves {
	m := &moves{
		running: runningIn(q.Cluster), question: q, hardware: map[string]*hardware{}, version: map[string]int{}, seen: map[string]*alike{},
		asked: map[string]map[int]nvml.Request{}, beginnings: map[string]Beginning{},
	}
	claims, known := m.devices.holders(), kinds{}
	for i := range q.Cluster.Nodes {
		n := &q.Cluster.Nodes[i]
		s, unknown := q.Status(n)
		m.hardware[n.Name] = hardwareOf(n, s, m.on[n.Name], q.All, claims, known)
		switch {
		case unknown != "":
			m.hardware[n.Name] = &hardware{unknown: unknown}
		case len(s.GPUs) == 0 && m.without(n):
			m.hardware[n.Name].none = true
		}
	}
	m.room = m.roomWithout(Leaving{})
	m.search = demand.Asked(m.requested())
	m.fewest = m.search.FewestPods()
	return m
}

// without reports whether the node shows no GPU at all: neither by a resource, an agent, NVIDIA's DRA driver nor a label of a discovery.
func (m *moves) without(n *corev1.Node) bool {
	for key := range n.Labels {
		if strings.HasPrefix(key, "nvidia.com/gpu.") || strings.HasPrefix(key, "feature.node.kubernetes.io/pci-") && strings.Contains(key, "10de") {
			return false
		}
	}
	return !HasGPUs(n) && !m.devices.unknown && !m.devices.offeredOn(n)
}

func pointers(pods []corev1.Pod) (out []*corev1.Pod) {
	for i := range pods {
		out = append(out, &pods[i])
	}
	return out
}

// requested counts how often each profile is requested: by what pods have, by a claim or without one, and by what pods wait for.
func (m *moves) requested() map[string]int {
	out := map[string]int{}
	for _, h := range m.hardware {
		for i := range h.gpus {
			g := &h.gpus[i]
			out[demand.Whole] += len(g.All)
			for _, held := range g.Held() {
				out[held.Profile] += len(g.On[held.Start])
			}
		}
	}
	for i := range m.question.Pending {
		for kind, n := range wantOf(&m.question.Pending[i]) {
			out[kind] += n
		}
	}
	return out
}

// wantOf is what a pod requests of the device plugin, by profile. Shared devices count as whole ones.
func wantOf(p *corev1.Pod) demand.Want {
	out := demand.Want{}
	for name, n := range Requests(p) {
		kind := strings.TrimSuffix(string(name), nvml.SharedSuffix)
		profile, part := strings.CutPrefix(kind, nvml.ResourceMIGPrefix)
		switch {
		case n.Value() <= 0:
		case kind == nvml.ResourceGPU:
			out[demand.Whole] += int(min(n.Value(), mostDevices+1))
		case part:
			out[profile] += int(min(n.Value(), mostDevices+1))
		}
	}
	return out
}

// of is the move of one pod.
func (m *moves) of(ctx context.Context, p *corev1.Pod) Move {
	switch {
	case len(m.devices.classes.asked(p)) == 0:
		return Move{Verdict: NotGPU, Reason: "it requests no GPU"}
	case len(p.Spec.SchedulingGates) > 0:
		return Move{Verdict: Gated, Reason: gates(p)}
	}
	ways := 1
	for _, n := range wantOf(p) {
		if n > mostDevices {
			return Move{Verdict: TooLarge, Reason: fmt.Sprintf("no node has more than %d devices", mostDevices)}
		}
		ways = min(ways*(n+1), mostWays+1)
	}
	if ways > mostWays {
		return Move{Verdict: NotKnown, Reason: "it requests so many devices of several kinds that the ways to divide them among GPUs are not looked at"}
	}
	if name := m.missingClass(p); name != "" {
		return Move{Verdict: NotGPU, Reason: "it asks for devices of DeviceClass " + name + ", which is not there"}
	}
	out := m.find(ctx, p)
	if name := p.Spec.SchedulerName; name != "" && name != corev1.DefaultSchedulerName {
		out.Notes = append(out.Notes, fmt.Sprintf("its scheduler, %s, decides; this follows the rules of kube-scheduler", sanitize.Cut(name, longestKey)))
	} else if err := unchecked(p); err != nil {
		out.Notes = append(out.Notes, err.Error())
	}
	return out
}

// Bounds of what one pod requests: it may cost neither minutes, nor what is said of other pods.
const (
	mostDevices = mostGPUs * mostInstances // of one kind, as no node has more
	mostWays    = 600                      // to divide devices of several kinds among GPUs
)

// gates says which gates keep the scheduler from the pod.
func gates(p *corev1.Pod) string {
	var names []string
	for _, g := range p.Spec.SchedulingGates {
		if strings.HasPrefix(g.Name, "kueue.x-k8s.io/") {
			return "Kueue has not admitted it: its queue's quota, or the workloads before it, decide"
		}
		names = append(names, sanitize.Cut(g.Name, longestKey))
	}
	return "the scheduler does not look at it before its scheduling gates go: " + sanitize.Listed(names)
}

// find looks for a node: first for one with room, then for the cheapest change.
func (m *moves) find(ctx context.Context, p *corev1.Pod) Move {
	c := m.alikeTo(p)
	for i := range m.Nodes {
		if f := m.look(ctx, c, p, i); f.fits {
			n := &m.Nodes[i]
			m.room.take(n.Name, m.countable(p, n))
			m.hardware[n.Name].take(m.gets(ctx, f, p, n), p.Namespace+"/"+p.Name)
			m.version[n.Name]++
			return Move{Verdict: WillFit, Reason: "node " + n.Name + " has what it requests", Node: n.Name}
		}
	}
	if out, ok := m.recut(ctx, c, p); ok {
		return out
	}
	return m.impossible(ctx, c, p)
}

// gets is what a pod that fits gets of the node.
func (m *moves) gets(ctx context.Context, f *found, p *corev1.Pod, n *corev1.Node) demand.Want {
	if !m.devices.classes.asksByClaims(p) || m.byPlugin(p, n) {
		return f.want
	}
	want, _, err := m.wantByClaims(ctx, p, n)
	if err != nil { // some device of a claim that other pods may use, too
		m.hardware[n.Name].unknown = "it is not known which devices " + p.Namespace + "/" + p.Name + " gets"
	}
	return want
}
