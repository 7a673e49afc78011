package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode"

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

func TestWhatOthersWroteOnANodeMovesNoCursor(t *testing.T) {
	const hostile = "\x1b[2J\x1b[1;1Hgpu-9   research   Idle\r\ngpu-8\u202e"
	n := gpuNode("gpu-1")
	s := research(api.PhaseDraining, config.ReasonEvictionBlocked, 9, hostile)
	s.Capacity = hostile
	says(n, s, hostile)
	n.Annotations[config.AnnotationHold] = hostile
	n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: config.ConditionGPUUnhealthy, Status: corev1.ConditionTrue, Reason: hostile, Message: hostile})
	v := viewOf(n)
	v.addDiagnosis(&api.Diagnosis{
		Pods:   []api.PodSeen{{Namespace: hostile, Name: hostile, Devices: []string{hostile, "GPU 0"}, State: hostile}},
		Unseen: []string{hostile},
		GPUs: api.GPUsSeen{Now: []api.StatusGPU{{UUID: hostile, Health: &api.GPUHealth{
			Reason: hostile, Severity: hostile, Action: hostile, Instances: []string{hostile, "1g@0"}, Xids: []api.XidSeen{{Number: 1 << 60, GI: -1 << 60}},
		}, MIG: true, Slices: 1 << 40, Geometry: hostile, Instances: []api.StatusInstance{
			{Is: hostile, At: -5, Size: 1 << 40}, {Is: hostile, At: 1 << 62, Size: 1 << 62}, {Is: "1g@0", At: 0, Size: 1, ID: -1 << 60},
		}}}},
	})
	table := tabulate([]nodeView{v}, nodeColumns, true, paper{now: time.Now()})
	if lines := strings.Count(table, "\n") + 1; lines != 2 {
		t.Errorf("%d lines for one node", lines)
	}
	for _, r := range table + draw(&v, paper{width: 80}) {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Errorf("raw %q", r)
		}
	}
	top := &inquiry{request: config.RequestTop, nodes: []*askedNode{{identity: identify(n), answer: &api.Answer{MoreUses: -1, Uses: []api.Use{
		{Namespace: hostile, Pod: hostile, GPU: -1 << 60, UUID: hostile, Instance: hostile, MemoryMiB: 1 << 62, TotalMiB: 1, UsedMiB: -1 << 62, Unknown: hostile},
	}}}}}
	screen, err := (&topRequest{format: formatWide}).text(usesOf(top), paper{now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range screen {
		if r != '\n' && !unicode.IsPrint(r) {
			t.Errorf("raw %q", r)
		}
	}
	if lines := strings.Count(screen, "\n"); lines != 3 {
		t.Errorf("%d lines for one pod: %s", lines, screen)
	}
	q := &plans{&inquiry{request: "gpuslice.io/profile=research"}, wish{config.LabelProfile, "research"}}
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
