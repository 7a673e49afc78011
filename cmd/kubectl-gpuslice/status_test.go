package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

func TestStatusShowsANodePerLine(t *testing.T) {
	inWorld(t, func(w *world) {
		w.edit("gpu-1", func(n *corev1.Node) {
			n.Labels[config.LabelProfile] = "research"
			s := done()
			s.Capacity = "nvidia.com/gpu 24 = 8 x 3 time-slicing"
			says(n, s, "research: as asked")
		})
		w.edit("gpu-2", func(n *corev1.Node) {
			n.Labels[config.LabelMIGConfig], n.Labels[config.LabelDevicePluginConfig] = "all-1g.10gb", "slices"
			s := research(api.PhaseDraining, config.ReasonEvictionBlocked, 9, "team/a: PDB team/a", "team/b: PDB team/b", "team/c: PDB", "team/d: PDB")
			s.Next = time.Date(2000, 1, 1, 22, 0, 0, 0, time.UTC)
			says(n, s, "waiting")
			n.Annotations[config.AnnotationHold] = "audit"
		})
		<-time.After(3 * time.Minute)
		w.start("status")
		w.is(`
NODE    ASKED FOR              PHASE      REASON            SINCE   CAPACITY                                 BLOCKERS
gpu-1   research               Idle       Converged         3m      nvidia.com/gpu 24 = 8 x 3 time-slicing
gpu-2   all-1g.10gb + slices   Draining   EvictionBlocked   3m                                               held: audit; begins at 2000-01-01 22:00:00Z; team/a: PDB team/a; team/b: PDB team/b; and 2 others
`, 0)
		w.start("status", "-l", "pool=none")
		w.is(`
error: no node fits the selector "pool=none"; see the nodes' labels by: kubectl get nodes --show-labels
`, 1)
		w.start("status", "cpu-1")
		w.is(`
NODE    ASKED FOR   PHASE   REASON     SINCE   CAPACITY   BLOCKERS
cpu-1                       no agent
`, 0)
	}, gpu("gpu-1"), gpu("gpu-2"), bare("cpu-1"))
}

func TestAStatusIsCutToTheTerminal(t *testing.T) {
	n := says(gpuNode("gpu-1"), research(api.PhaseDraining, config.ReasonEvictionBlocked, 9, "team/a: PDB team/a: needs 2 healthy pods and has 2"), "")
	want := `NODE    ASKED FOR   PHASE      REASON            SINCE   CAPACITY   BLOCKER…
gpu-1               Draining   EvictionBlocked   0s                 team/a:…`
	if diff := cmp.Diff(want, tabulate([]corev1.Node{*n}, 76, time.Now())); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestWhatOthersWroteOnANodeMovesNoCursor(t *testing.T) {
	const hostile = "\x1b[2J\x1b[1;1Hgpu-9   research   Idle\r\ngpu-8\u202e"
	n := gpuNode("gpu-1")
	s := research(api.PhaseDraining, config.ReasonEvictionBlocked, 9, hostile)
	s.Capacity = hostile
	says(n, s, hostile)
	n.Annotations[config.AnnotationHold] = hostile
	for _, r := range tabulate([]corev1.Node{*n}, 0, time.Now()) {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Errorf("raw %q", r)
		}
	}
	if lines := strings.Count(tabulate([]corev1.Node{*n}, 0, time.Now()), "\n") + 1; lines != 2 {
		t.Errorf("%d lines for one node", lines)
	}
	q := &inquiry{wish: wish{config.LabelProfile, "research"}}
	a := &askedNode{node: n, identity: identify(n)}
	answer, err := json.Marshal(api.Answer{For: q.wish.String(), Steps: []string{hostile}, Pods: []string{hostile}, Runs: hostile})
	if err != nil {
		t.Fatal(err)
	}
	n.Annotations[config.AnnotationPreview], n.Annotations[config.AnnotationPlan] = q.wish.String(), string(answer)
	a.see(n, q.wish.String())
	if text := q.describe(a); strings.ContainsAny(text, "\x1b\r\u202e") || strings.Count(text, "\n") != 1 {
		t.Errorf("raw in the answer: %q", text)
	}
}
