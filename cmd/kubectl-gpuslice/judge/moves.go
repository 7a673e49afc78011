package judge

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/nodekeys"
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
	All    bool // the pods of the cluster are all that there are
	Now    time.Time
}

// Beginning is when a change may begin.
type Beginning struct {
	At  time.Time // not before this time; zero for now
	Not string    // what keeps it from beginning until something else ends; empty if nothing does
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
		move.Pod, move.Since, move.Requests = p.Namespace+"/"+p.Name, p.CreationTimestamp.UTC(), Asked(p)
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

// movesOf is the cluster before the first move.
func movesOf(q Question) *moves {
	m := &moves{
		running: runningIn(q.Cluster), question: q, hardware: map[string]*hardware{}, version: map[string]int{}, seen: map[string]*alike{},
		asked: map[string]map[int]nvml.Request{},
	}
	claims, known := m.devices.holders(), kinds{}
	for i := range q.Cluster.Nodes {
		n := &q.Cluster.Nodes[i]
		s, unknown := q.Status(n)
		m.hardware[n.Name] = hardwareOf(n, s, m.on[n.Name], q.All, claims, known)
		if unknown != "" {
			m.hardware[n.Name] = &hardware{unknown: unknown}
		}
	}
	m.room = m.roomWithout(Leaving{})
	m.search = demand.Asked(m.requested())
	m.fewest = m.search.FewestPods()
	return m
}

func pointers(pods []corev1.Pod) (out []*corev1.Pod) {
	for i := range pods {
		out = append(out, &pods[i])
	}
	return out
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
}

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
	case len(Asked(p)) == 0:
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

// offersByPlugin reports whether NVIDIA's device plugin offers the node's GPUs, as they are and after a change.
func (h *hardware) offersByPlugin() bool { return h.unknown == "" && !h.claims }

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

// mostKept bounds how often a change is looked for that makes other pods leave, where it cannot be had by those of the cheapest.
const mostKept = 4

// wouldCut adds the cheapest change of the node after which it has what is wanted.
func (m *moves) wouldCut(f *found, p *corev1.Pod, n *corev1.Node) {
	h := m.hardware[n.Name]
	if h.unknown != "" {
		f.unknown = fmt.Errorf("%s: %s", n.Name, h.unknown)
		return
	}
	if f.why = m.neverOffers(h, p, n); f.why != "" {
		return
	}
	search := m.search
	if h.dynamic {
		search = m.fewest
	}
	stay := map[string]bool{}
	for range mostKept {
		if f.recut, f.can = search.Find(h.keeping(stay), f.want); !f.can || !m.fails(f, n) {
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
	if f.can && !h.planned && len(f.recut.Pods) == 0 && (h.dynamic || len(f.recut.Cuts) == 0) {
		f.can, f.why = false, "devices that it could have are free, and the scheduler gives it none"+m.tainted(n)
	}
}

// ofDaemonSet is the pod if one of a DaemonSet; nil otherwise. Its successor comes to the same node, even behind the cordon, before any pod that waits.
func (m *moves) ofDaemonSet(name string) *corev1.Pod {
	p := m.pods[name]
	if owner := controller(p); owner == nil || owner.Kind != "DaemonSet" {
		return nil
	}
	return p
}

// fails reports whether the change comes to something else than the move and those before it say.
func (m *moves) fails(f *found, n *corev1.Node) bool {
	h := m.hardware[n.Name]
	return !h.dynamic && slices.ContainsFunc(f.recut.Restored(h.gpus).Cuts, func(c demand.Cut) bool { return h.differs(c, f.recut.Pods) }) || m.comeBack(f, n)
}

// comeBack reports whether pods of DaemonSets that leave for this move, or for those before it, would have what the moves are for: they request the same, and
// there is not enough.
func (m *moves) comeBack(f *found, n *corev1.Node) bool {
	h := m.hardware[n.Name]
	again := m.again(f.recut, n)
	var left demand.Want
	for kind, count := range again {
		if f.want[kind] == 0 && h.got[kind] == 0 {
			continue
		}
		if left == nil {
			left = h.left(f.recut.Restored(h.gpus))
		}
		if left[kind] < count+f.want[kind] {
			return true
		}
	}
	return false
}

// again is what pods of DaemonSets request again after the change, and after the moves before it.
func (m *moves) again(r demand.Recut, n *corev1.Node) demand.Want {
	h := m.hardware[n.Name]
	out := maps.Clone(h.again)
	for _, name := range r.Pods {
		if p := m.ofDaemonSet(name); p != nil {
			if out == nil {
				out = demand.Want{}
			}
			for kind, count := range h.named(wantOf(p)) {
				out[kind] += count
			}
		}
	}
	return out
}

// neverOffers returns why the node would not offer what the pod requests under that name, however its GPUs are cut; empty if it would.
func (m *moves) neverOffers(h *hardware, p *corev1.Pod, n *corev1.Node) string {
	if !keepsLabels(n, p) {
		return "the pod's node selector asks for labels of profile " + sanitize.Cut(n.Labels[config.LabelProfile], longestKey) + ", and a change takes the node out of that"
	}
	for name := range m.countable(p, n) {
		kind, shared := strings.CutSuffix(string(name), nvml.SharedSuffix)
		if !nvml.GPUResource(string(name)) {
			continue
		}
		renamed := n.Status.Allocatable[corev1.ResourceName(kind+nvml.SharedSuffix)]
		switch {
		case h.claims:
			return "NVIDIA's DRA driver offers its GPUs, and no DeviceClass has the resource " + sanitize.Cut(string(name), longestKey)
		case shared == renamed.IsZero():
			return "its device plugin does not offer GPUs under the name " + sanitize.Cut(string(name), longestKey)
		case h.leavesOutAttributes(kind, n):
			return "its device plugin leaves the attributes of profiles out of names, and offers no " + sanitize.Cut(string(name), longestKey)
		case kind != nvml.ResourceGPU && n.Labels[config.LabelMIGStrategy] == string(config.MIGStrategyNone):
			return "the MIG strategy of its device plugin is none"
		}
	}
	return ""
}

// keepsLabels reports whether the pod's rules accept the node also when a command has taken it out of its profile, and of the labels of that.
func keepsLabels(n *corev1.Node, p *corev1.Pod) bool {
	if n.Labels[config.LabelProfile] == "" {
		return true
	}
	var published nodekeys.Keys
	if json.Unmarshal([]byte(n.Annotations[config.AnnotationPublished]), &published) != nil {
		published = nodekeys.Keys{}
	}
	after := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: maps.Clone(n.Labels)}}
	maps.DeleteFunc(after.Labels, func(key, _ string) bool { _, is := published.Labels[key]; return is || key == config.LabelProfile })
	fits, err := nodeaffinity.GetRequiredNodeAffinity(p).Match(after)
	return err == nil && fits
}

// tainted names the taints of the node's devices.
func (m *moves) tainted(n *corev1.Node) string {
	var keys []string
	for _, s := range m.devices.slices {
		if s.Spec.NodeName == nil || *s.Spec.NodeName != n.Name {
			continue
		}
		for _, d := range s.Spec.Devices {
			for _, t := range d.Taints {
				if key := sanitize.Cut(t.Key, longestKey); !slices.Contains(keys, key) {
					keys = append(keys, key)
				}
			}
		}
	}
	if len(keys) == 0 {
		return ""
	}
	slices.Sort(keys)
	return ": some have the taint " + sanitize.Listed(keys)
}

// byClaims adds whether the node has devices for the pod's claims now; if not, what its GPUs would have to be cut into.
func (m *moves) byClaims(ctx context.Context, f *found, p *corev1.Pod, n *corev1.Node) {
	f.fits = false
	h := m.hardware[n.Name]
	if !h.planned || !h.claims {
		why, err := m.room.devices.place(ctx, n, p)
		f.fits = err == nil && why == ""
		if f.unknown = err; f.fits || err != nil {
			return
		}
		if f.why = why; !h.claims {
			return
		}
	}
	want, none, err := m.wantByClaims(ctx, p, n)
	f.want, f.why, f.unknown = want, "", err
	if err == nil && none != "" {
		f.why = "no GPU of it offers a device " + none
	}
}

// named is what is wanted by the names of profiles that the node's GPUs have: a resource has "." for the "+" of a profile. Of devices that are shared, a part
// of one is enough.
func (h *hardware) named(want demand.Want) demand.Want {
	out := demand.Want{}
	for kind, count := range want {
		name := kind
		for _, g := range h.gpus {
			for _, p := range g.Profiles {
				if strings.ReplaceAll(p.Name, "+", ".") == kind {
					name = p.Name
				}
			}
		}
		if replicas := h.replicas[name]; replicas > 1 {
			count = (count + replicas - 1) / replicas
		}
		out[name] = count
	}
	return out
}

// replicasOn is how often the node's plugin offers each device of a kind, before any move.
func (h *hardware) replicasOn(n *corev1.Node) map[string]int {
	out := map[string]int{}
	for _, g := range h.gpus {
		if !g.Enabled && !g.Lost {
			out[demand.Whole]++
		}
		for _, i := range g.Instances {
			out[i.Profile]++
		}
	}
	for kind, devices := range out {
		offered := 0
		for _, name := range resourcesOf(kind) {
			of := n.Status.Allocatable[name]
			offered += int(min(of.Value(), nvml.MaxDevices))
		}
		out[kind] = max(1, offered/devices)
	}
	return out
}

// resourcesOf are the device plugin's names for a kind of device.
func resourcesOf(kind string) []corev1.ResourceName {
	name := nvml.ResourceGPU
	if kind != demand.Whole {
		name = nvml.ResourceMIGPrefix + strings.ReplaceAll(kind, "+", ".")
	}
	return []corev1.ResourceName{corev1.ResourceName(name), corev1.ResourceName(name + nvml.SharedSuffix)}
}

// mostTried is how many of the cheapest changes recut looks at.
const mostTried = 8

// recut looks for the cheapest change after which the pod runs. It prefers changes that no budget keeps from ending.
func (m *moves) recut(ctx context.Context, c *alike, p *corev1.Pod) (Move, bool) {
	var best []int
	for i := range c.found {
		if c.found[i].can {
			best = append(best, i)
		}
	}
	slices.SortStableFunc(best, func(a, b int) int {
		return cmp.Or(c.found[a].recut.Cost.Compare(c.found[b].recut.Cost), cmp.Compare(m.Nodes[a].Name, m.Nodes[b].Name))
	})
	if len(best) == 0 {
		return Move{}, false
	}
	chosen, of := best[0], Judgement{}
	for tried, i := range best[:min(len(best), mostTried)] {
		j := m.judge(ctx, Leaving{Node: m.Nodes[i].Name, Pods: c.found[i].recut.Pods})
		if tried == 0 || j.Stuck == "" {
			chosen, of = i, j
		}
		if j.Stuck == "" {
			break
		}
	}
	out := m.carryOut(&m.Nodes[chosen], c.found[chosen].recut, c.found[chosen].want, p)
	m.judged(&out, of)
	m.begins(&out, &m.Nodes[chosen])
	return out, true
}

// carryOut notes the change on the node, for the moves that follow.
func (m *moves) carryOut(n *corev1.Node, r demand.Recut, want demand.Want, p *corev1.Pod) Move {
	h := m.hardware[n.Name]
	r = r.Restored(h.gpus)
	if removes(r.Cuts, h.gpus) && len(h.anywhere) > 0 { // the agent makes these leave before it takes anything
		r.Pods = slices.Compact(slices.Sorted(slices.Values(slices.Concat(r.Pods, h.anywhere))))
	}
	out := Move{Verdict: NeedsRecut, Node: n.Name, Leave: r.Pods, Lost: r.Cost.Lost}
	if m.asked[n.Name] == nil {
		m.asked[n.Name] = map[int]nvml.Request{}
	}
	h.again, h.leave = m.again(r, n), append(h.leave, r.Pods...)
	for kind, count := range want {
		h.got[kind] += count
	}
	var gpus []string
	if h.dynamic {
		out.Verdict = NeedsDrain
		out.Reason = fmt.Sprintf("NVIDIA's DRA driver cuts a GPU of node %s for it; before that, %s to leave, with %s", n.Name, have(len(r.Pods)), cli.Counted(r.Cost.Lost, "memory slice"))
		h.unknown = "NVIDIA's DRA driver cuts its GPUs for another pod first"
		m.version[n.Name]++
		return out
	}
	for _, c := range r.Cuts {
		g := &h.gpus[c.GPU]
		cut := Cut{GPU: g.Index, Before: h.instances(g), Slices: g.MemorySlices()}
		m.asked[n.Name][g.Index] = c.Request
		gpus = append(gpus, fmt.Sprintf("GPU %d", g.Index))
		h.cut(c, r.Pods, p.Namespace+"/"+p.Name)
		cut.After = h.instances(g)
		out.Cuts = append(out.Cuts, cut)
	}
	out.Request = maps.Clone(m.asked[n.Name])
	h.planned = true
	if len(r.Cuts) == 0 {
		h.take(want, p.Namespace+"/"+p.Name)
		out.Reason = "node " + n.Name + " has what it requests after the change for the pods before it"
		m.version[n.Name]++
		return out
	}
	out.Reason = fmt.Sprintf("a change of %s of node %s gives it what it requests, and no pod has to leave", sanitize.Listed(gpus), n.Name)
	if len(r.Pods) > 0 {
		out.Verdict = NeedsDrain
		out.Reason = fmt.Sprintf("a change of %s of node %s gives it what it requests; %s to leave, with %s", sanitize.Listed(gpus), n.Name,
			have(len(r.Pods)), cli.Counted(r.Cost.Lost, "memory slice"))
	}
	for kind := range want {
		if strings.ContainsAny(kind, "+-") && !h.claims {
			out.Notes = append(out.Notes, "device plugins before v0.20 leave the attributes of profiles out of names: then the pod does not get it")
		}
	}
	for name, n2 := range h.freeResources(n) {
		m.room.free[n.Name] = m.room.free[n.Name].DeepCopy()
		m.room.free[n.Name][name] = *resource.NewQuantity(int64(n2), resource.DecimalSI)
	}
	for name, need := range m.countable(p, n) {
		if !nvml.GPUResource(string(name)) {
			m.room.take(n.Name, corev1.ResourceList{name: need})
		}
	}
	m.version[n.Name]++
	return out
}

func have(pods int) string {
	if pods == 1 {
		return "1 pod has"
	}
	return fmt.Sprintf("%d pods have", pods)
}

// freeResources are the free devices of the node, by resource. A resource without a free device has 0.
func (h *hardware) freeResources(n *corev1.Node) map[corev1.ResourceName]int {
	out := map[corev1.ResourceName]int{nvml.ResourceGPU: 0}
	resource := func(profile string) corev1.ResourceName {
		name := resourcesOf(profile)[0]
		if h.leavesOutAttributes(string(name), n) {
			return plain(name)
		}
		return name
	}
	for _, g := range h.gpus {
		for _, p := range g.Profiles {
			out[resource(p.Name)] += 0
		}
		if !g.Enabled && len(g.All) == 0 && !g.Lost {
			out[nvml.ResourceGPU]++
		}
		for _, i := range g.Instances {
			if len(g.On[i.Start]) == 0 && len(g.All) == 0 && !g.Lost && i.Compute == "" {
				out[resource(i.Profile)]++
			}
		}
	}
	return out
}

// plain is the resource without the attributes of its profile: "nvidia.com/mig-1g.10gb".
func plain(name corev1.ResourceName) corev1.ResourceName {
	size, _, is := strings.Cut(string(name), "gb")
	if !is {
		return name
	}
	return corev1.ResourceName(size + "gb")
}

// leavesOutAttributes reports whether the node's device plugin offers an instance of the resource's profile by the plain name, as plugins before v0.20 do. That
// is known only of a node that has such an instance.
func (h *hardware) leavesOutAttributes(name string, n *corev1.Node) bool {
	full := corev1.ResourceName(name)
	offered, shared := n.Status.Allocatable[full], n.Status.Allocatable[full+nvml.SharedSuffix]
	if plain(full) == full || !offered.IsZero() || !shared.IsZero() {
		return false
	}
	has := func(gpus []demand.GPU) bool {
		return slices.ContainsFunc(gpus, func(g demand.GPU) bool {
			return slices.ContainsFunc(g.Instances, func(i nvml.Instance) bool { return resourcesOf(i.Profile)[0] == full })
		})
	}
	return !h.planned && has(h.gpus)
}

// judged adds what keeps the pods that have to leave.
func (m *moves) judged(out *Move, j Judgement) {
	for _, b := range j.Budgets {
		out.Budgets = append(out.Budgets, b.String())
	}
	for _, d := range j.Doubled {
		out.Budgets = append(out.Budgets, fmt.Sprintf("%s is in more than one budget, and the API server evicts no such pod: %s", d.Name, d.Why))
	}
	switch closed := slices.ContainsFunc(j.Budgets, func(b Budget) bool { return b.Allowed <= 0 }); {
	case j.Stuck != "" || len(j.Doubled) > 0:
		out.Stuck = true
		out.Reason += "; they would not all leave"
	case closed:
		out.Verdict = NeedsCordon
	}
	for _, name := range out.Leave {
		note, stays := losing(m.pods[name])
		out.Stuck = out.Stuck || stays
		if note != "" {
			out.Notes = append(out.Notes, name+" "+note)
		}
	}
	for _, h := range j.Homeless {
		out.Notes = append(out.Notes, fmt.Sprintf("%s fits on no other node: %s", h.Name, h.Why))
	}
}

// losing says what is lost with a pod that has to leave, and whether no agent makes it leave.
func losing(p *corev1.Pod) (note string, stays bool) {
	switch {
	case p == nil:
		return "", false
	case p.Annotations[corev1.MirrorPodAnnotationKey] != "":
		return "is a static pod: only the file on the node ends it", true
	case controller(p) == nil:
		return "has no controller that makes it again: apply --force-unmanaged, or drain.unmanagedPods of the agents, allows that", false
	case slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
		return v.EmptyDir != nil && v.EmptyDir.Medium != corev1.StorageMediumMemory
	}):
		return "loses files on an emptyDir: apply --delete-emptydir-data, or drain.emptyDir of the agents, allows that", false
	default:
		return "", false
	}
}

// begins says when the change may begin.
func (m *moves) begins(out *Move, n *corev1.Node) {
	h := m.hardware[n.Name] // the command asks for all changes of the node so far
	h.disturbed = h.disturbed || disturbs(out.Cuts)
	why, held := n.Annotations[config.AnnotationHold]
	switch {
	case held:
		out.Verdict = NeedsWindow
		out.Notes = append(out.Notes, "node "+n.Name+" is on hold, and no change begins before that ends: "+sanitize.Message(why, longestKey))
		return
	case m.question.Begins == nil || !h.disturbed:
		return
	}
	switch at := m.question.Begins(n); {
	case at.Not != "":
		out.Verdict = NeedsWindow
		out.Notes = append(out.Notes, at.Not)
	case at.At.After(m.question.Now):
		out.Verdict, out.Begins = NeedsWindow, at.At
	}
}

// removes reports whether cuts take anything away.
func removes(cuts []demand.Cut, gpus []demand.GPU) bool {
	return slices.ContainsFunc(cuts, func(c demand.Cut) bool {
		g := &gpus[c.GPU]
		return g.Enabled != c.Request.MIG || slices.ContainsFunc(g.Instances, func(i nvml.Instance) bool { return !slices.Contains(c.After, i.Placed) })
	})
}

// disturbs reports whether a change takes anything away. The agent does not wait to add instances in free places.
func disturbs(cuts []Cut) bool {
	return slices.ContainsFunc(cuts, func(c Cut) bool {
		return c.Before == nil || c.After == nil || slices.ContainsFunc(c.Before, func(i Instance) bool {
			return !slices.ContainsFunc(c.After, func(j Instance) bool { return i.Is == j.Is })
		})
	})
}

// impossible says why no change helps.
func (m *moves) impossible(ctx context.Context, c *alike, p *corev1.Pod) Move {
	against, holds, unknown := map[string]int{}, false, error(nil)
	barred := false // by something other than GPUs, on a node that could have what is wanted
	for i := range c.found {
		f, n := &c.found[i], &m.Nodes[i]
		h := m.hardware[n.Name]
		can := h.unknown == "" && m.couldHave(ctx, c, p, n)
		switch {
		case f.unknown != nil:
			unknown = cmp.Or(unknown, f.unknown)
		case f.why != "":
			if can || h.unknown != "" && HasGPUs(n) || hasAny(n, c.want) {
				barred = true
				against[f.why]++
			}
		case can:
			holds = true
		}
	}
	switch {
	case holds && unknown != nil:
		return Move{Verdict: NotKnown, Reason: "other pods have all that it could get of some nodes; of others it is not known: " + unknown.Error()}
	case holds:
		return Move{Verdict: NeedsDrain, Reason: "other pods have all that it could get, and no change of geometry takes one from them: one has to end"}
	case unknown != nil:
		return Move{Verdict: NotKnown, Reason: unknown.Error()}
	case barred:
		return Move{Verdict: NotGPU, Reason: "what keeps it from the nodes that could have it: " + listed(against)}
	default:
		return Move{Verdict: TooLarge, Reason: "no node could have what it requests, whatever leaves" + m.largest()}
	}
}

// couldHave reports whether the node could have what the pod requests if it had no pod.
func (m *moves) couldHave(ctx context.Context, c *alike, p *corev1.Pod, n *corev1.Node) bool {
	h := m.hardware[n.Name]
	want := h.named(c.want)
	if h.claims && m.devices.classes.asksByClaims(p) {
		byClaims, none, err := m.wantByClaims(ctx, p, n)
		if err != nil || none != "" {
			return false
		}
		want = byClaims
	}
	_, can := m.search.Find(h.empty(), want)
	return can
}

// hasAny reports whether the node offers any of the resources.
func hasAny(n *corev1.Node, want demand.Want) bool {
	for kind := range want {
		for _, name := range resourcesOf(kind) {
			if of := n.Status.Allocatable[name]; !of.IsZero() {
				return true
			}
		}
	}
	return false
}

// HasGPUs reports whether the node shows GPUs, by its resources or by an agent's report.
func HasGPUs(n *corev1.Node) bool {
	_, reported := n.Annotations[config.AnnotationStatus]
	return reported || slices.ContainsFunc(slices.Collect(maps.Keys(n.Status.Allocatable)), func(name corev1.ResourceName) bool { return nvml.GPUResource(string(name)) })
}

// largest names the largest profile of each model.
func (m *moves) largest() string {
	var out []string
	for _, h := range m.hardware {
		for _, g := range h.gpus {
			best := ""
			slicesOf := 0
			for _, p := range g.Profiles {
				if p.Slices > slicesOf {
					best, slicesOf = p.Name, p.Slices
				}
			}
			if text := sanitize.Cut(g.Model, longestKey) + " " + sanitize.Cut(best, longestKey); best != "" && !slices.Contains(out, text) {
				out = append(out, text)
			}
		}
	}
	if len(out) == 0 {
		return ""
	}
	slices.Sort(out)
	return "; the largest there are: " + sanitize.Listed(out)
}

// listed counts reasons of nodes, the most frequent first.
func listed(against map[string]int) string {
	var out []string
	for _, why := range slices.SortedFunc(maps.Keys(against), func(a, b string) int { return cmp.Or(against[b]-against[a], cmp.Compare(a, b)) }) {
		out = append(out, fmt.Sprintf("%s: %s", cli.Counted(against[why], "node"), why))
	}
	return strings.Join(out, "; ")
}
