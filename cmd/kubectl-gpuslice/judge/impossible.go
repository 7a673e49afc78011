package judge

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan/demand"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

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

// HasGPUs reports whether the node has ever shown GPUs: by a resource, even at 0, by an agent's condition, or by its fence. The agents count the nodes of a pool
// by the same rule.
func HasGPUs(n *corev1.Node) bool {
	for _, resources := range []corev1.ResourceList{n.Status.Capacity, n.Status.Allocatable} {
		for name := range resources {
			if nvml.GPUResource(string(name)) {
				return true
			}
		}
	}
	return IsChanging(n) || slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == config.ConditionGPUPartitionReady })
}

// IsChanging reports whether an agent changes the node, by its journal or by its fence: either may be gone.
func IsChanging(n *corev1.Node) bool {
	_, journal := n.Annotations[config.AnnotationJournal]
	return journal || slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == config.TaintRepartitioning })
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
