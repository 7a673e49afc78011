package judge

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

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
		switch { // one that may begin lets the pod run
		case c.found[a].closed == c.found[b].closed:
		case c.found[b].closed:
			return -1
		default:
			return 1
		}
		return cmp.Or(c.found[a].recut.Cost.Compare(c.found[b].recut.Cost), cmp.Compare(m.Nodes[a].Name, m.Nodes[b].Name))
	})
	if len(best) == 0 {
		return Move{}, false
	}
	chosen, of := m.choose(ctx, c, best[:min(len(best), mostTried)])
	n := &m.Nodes[chosen]
	h := m.hardware[n.Name]
	before := h.open()
	out := m.carryOut(n, c.found[chosen].recut, c.found[chosen].want, p)
	m.judged(&out, of)
	m.begins(&out, n)
	h.planned.stuck = h.planned.stuck || out.Stuck || out.Verdict == NeedsWindow && out.Begins.IsZero()
	switch comes := !h.planned.stuck && m.spells(n, out.Request); {
	case comes: // and so do those before it
		h.planned.sure = nil
	case h.planned.sure == nil:
		h.planned.sure = before
	}
	return out, true
}

// choose returns the cheapest of the changes that no budget keeps from ending; of those that cost pods no more, one that comes with the moves before it.
func (m *moves) choose(ctx context.Context, c *alike, best []int) (chosen int, of Judgement) {
	chosen = -1
	for _, i := range best {
		n, r := &m.Nodes[i], c.found[i].recut
		if chosen >= 0 && of.Stuck == "" && r.Cost.Lost > c.found[chosen].recut.Cost.Lost {
			break
		}
		j, spells := m.judge(ctx, Leaving{Node: n.Name, Pods: r.Pods}), m.spells(n, m.requests(n, r))
		if chosen < 0 || j.Stuck == "" && (of.Stuck != "" || spells) {
			chosen, of = i, j
		}
		if j.Stuck == "" && spells {
			break
		}
	}
	return chosen, of
}

// requests are what the node's label has to ask for after the change, with the changes before it.
func (m *moves) requests(n *corev1.Node, r demand.Recut) map[int]nvml.Request {
	h := m.hardware[n.Name]
	out := map[int]nvml.Request{}
	maps.Copy(out, m.asked[n.Name])
	for _, c := range r.Restored(h.gpus).Cuts {
		out[h.gpus[c.GPU].Index] = c.Request
	}
	return out
}

// spells reports whether a label of the node can ask for the GPUs.
func (m *moves) spells(n *corev1.Node, requests map[int]nvml.Request) bool {
	return m.question.Spells == nil || len(requests) == 0 || m.question.Spells(n, requests)
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
	h.planned.returning, h.planned.leave = m.returning(r, n), append(h.planned.leave, r.Pods...)
	for kind, count := range want {
		h.planned.promised[kind] += count
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
	h.planned.changes = true
	h.take(unchanged(want, r.Cuts), p.Namespace+"/"+p.Name)
	if len(r.Cuts) == 0 {
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
	m.offer(p, n)
	m.version[n.Name]++
	return out
}

// offer notes what the node offers after a change, and what the pod takes of the rest.
func (m *moves) offer(p *corev1.Pod, n *corev1.Node) {
	h := m.hardware[n.Name]
	for name, n2 := range h.freeResources(n) {
		m.room.free[n.Name] = m.room.free[n.Name].DeepCopy()
		m.room.free[n.Name][name] = *resource.NewQuantity(int64(n2), resource.DecimalSI)
	}
	for name, need := range m.countable(p, n) {
		if !nvml.GPUResource(string(name)) {
			m.room.take(n.Name, corev1.ResourceList{name: need})
		}
	}
}

// unchanged are the wanted devices that no cut makes: GPUs without a cut have them.
func unchanged(want demand.Want, cuts []demand.Cut) demand.Want {
	out := maps.Clone(want)
	for _, c := range cuts {
		if !c.Request.MIG {
			out[demand.Whole]--
		}
		for _, p := range c.Used {
			out[p.Profile]--
		}
	}
	return out
}

func have(pods int) string {
	if pods == 1 {
		return "1 pod has"
	}
	return fmt.Sprintf("%d pods have", pods)
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
		out.Verdict, out.Unsure = NeedsCordon, true
	case j.Unknown != "":
		out.Unsure = true
		out.Notes = append(out.Notes, "whether they would all leave is not known: "+j.Unknown)
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
	h.planned.disturbs = h.planned.disturbs || disturbs(out.Cuts)
	why, held := n.Annotations[config.AnnotationHold]
	switch {
	case held:
		out.Verdict = NeedsWindow
		out.Notes = append(out.Notes, "node "+n.Name+" is on hold, and no change begins before that ends: "+sanitize.Message(why, longestKey))
		return
	case m.question.Begins == nil || !h.planned.disturbs:
		return
	}
	switch at := m.beginning(n); {
	case at.Not != "", at.Stay != "" && len(h.planned.leave) > 0:
		out.Verdict = NeedsWindow
		out.Notes = append(out.Notes, cmp.Or(at.Not, at.Stay))
	case at.At.After(m.question.Now):
		out.Verdict, out.Begins = NeedsWindow, at.At
	}
}

// closed reports whether the change may not begin before something ends of which no time is known.
func (m *moves) closed(n *corev1.Node, r demand.Recut) bool {
	h := m.hardware[n.Name]
	if _, held := n.Annotations[config.AnnotationHold]; held {
		return true
	}
	disturbs := h.planned.disturbs || removes(r.Restored(h.gpus).Cuts, h.gpus)
	if !disturbs || m.question.Begins == nil {
		return false
	}
	at := m.beginning(n)
	return at.Not != "" || at.Stay != "" && len(h.planned.leave)+len(r.Pods) > 0
}

// beginning is when a change of the node may begin that takes something away.
func (m *moves) beginning(n *corev1.Node) Beginning {
	at, asked := m.beginnings[n.Name]
	if !asked {
		at = m.question.Begins(n)
		m.beginnings[n.Name] = at
	}
	return at
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
