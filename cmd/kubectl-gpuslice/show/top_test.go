package show

import (
	"cmp"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

func TestTopShowsWhatTheAgentsSay(t *testing.T) {
	inWorld(t, func(w *world) {
		busy, over := 0.0, 1e300
		w.Start("top", "--sort-by", "busy")
		w.Answers("gpu-1", api.Answer{Uses: []api.Use{
			{Namespace: "team", Pod: "trainer", GPU: 1, Pods: 1, MemoryMiB: 70000, TotalMiB: 80000, Busy: &over, Since: time.Now().Add(-time.Hour)},
			{Namespace: "team", Pod: "unknown", GPU: 0, Instance: "1g.10gb@2", Pods: 1, MemoryMiB: 10, TotalMiB: 9728, Unknown: "not reported"},
			{Namespace: "team", Pod: "notebook", GPU: 0, Instance: "1g.10gb@3", Pods: 1, MemoryMiB: 5, TotalMiB: 9728, Busy: &busy},
		}})
		w.Answers("gpu-2", api.Answer{Refused: "it must be something else"})
		w.Is(`
POD             NODE    GPU           MEMORY                BUSY   FOR
team/notebook   gpu-1   0 1g.10gb@3   5/9728 MiB 0%         0%
team/trainer    gpu-1   1             70000/80000 MiB 88%   100%   60m
team/unknown    gpu-1   0 1g.10gb@2   10/9728 MiB 0%        ?
busy ?: not reported (gpu-1)
gpu-2: the agent does not say: it must be something else
`, 0)
		w.Untouched("gpu-1", "gpu-2")
		w.Start("top", "gpu-1", "-n", "research")
		w.Answers("gpu-1", api.Answer{Uses: []api.Use{
			{Namespace: "team", Pod: "trainer", GPU: 1, Pods: 1, TotalMiB: 80000, Busy: &busy}, {Namespace: "research", Pod: "small", GPU: 0, Pods: 1, TotalMiB: 80000, Busy: &busy},
		}})
		w.Is(`
POD              NODE    GPU   MEMORY           BUSY   FOR
research/small   gpu-1   0     0/80000 MiB 0%   0%
`, 0)
		w.Start("top", "gpu-1", "-n", "research")
		w.Answers("gpu-1", api.Answer{Uses: []api.Use{{Namespace: "team", Pod: "trainer", GPU: 1, Pods: 1, TotalMiB: 80000, Busy: &busy}}})
		w.Is("no pod of namespace research has a GPU\n", 0)
		w.Start("top", "gpu-2")
		w.Answers("gpu-2", api.Answer{})
		w.Is("no pod has a GPU\n", 0)
		began := time.Now()
		w.Start("top", "gpu-1")
		if said, code := w.Ended(); code != 1 || !strings.Contains(said, "gpu-1: the agent has not answered within 5s\nerror: no agent of 1 node has answered\n") {
			t.Errorf("exit code %d: %s", code, said)
		}
		if took := time.Since(began); took != viewTime {
			t.Errorf("it took %s", took)
		}
		w.Untouched("gpu-1")
		w.Start("top", "gpu-1", "--sort-by", "name")
		w.Is("\nerror: flag --sort-by is \"name\": it must be memory or busy\n", 1)
	}, agenttest.GPU("gpu-1"), agenttest.GPU("gpu-2"), agenttest.Bare("cpu-1"))
}

// A tenant sees the own namespace.
func TestTopOfATenantShowsThePodsOfTheNamespace(t *testing.T) {
	inPool(t, func(w adviser) {
		w.pool("gpu-1", "3g.40gb@0:team-a/trainer-0", "off:team-b/other")
		w.pod("team-a/waits", mig3)
		w.pod("team-a/claims", "cpu", func(p *corev1.Pod) {
			p.Spec.NodeName = "gpu-2"
			p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: new("mine")}}
		})
		claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "mine"}, Status: resourcev1.ResourceClaimStatus{
			ReservedFor: []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: "claims", UID: "team-a/claims"}},
			Allocation: &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{
				Results: []resourcev1.DeviceRequestAllocationResult{{Driver: "gpu.nvidia.com", Pool: "gpu-2", Device: "gpu-0-mig-3g40gb-9-4"}},
			}},
		}}
		if _, err := w.Client.ResourceV1().ResourceClaims("team-a").Create(t.Context(), claim, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, e := range []struct {
			name, by, message string
			ago               time.Duration
		}{
			{"newest", config.FieldManager, "team-a/trainer-0 has had GPU 0 3g.40gb for 6 h and used it for 0 %", 0},
			{"older", config.FieldManager, "it was well", time.Hour},
			{"of another", "kubelet", "Started container", -time.Hour},
		} {
			event := &corev1.Event{
				ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: e.name}, InvolvedObject: corev1.ObjectReference{Kind: "Pod", UID: "team-a/trainer-0"},
				Source: corev1.EventSource{Component: e.by}, Reason: string(config.ReasonGPUIdle), Message: e.message, LastTimestamp: metav1.NewTime(time.Now().Add(-e.ago)),
			}
			if _, err := w.Client.CoreV1().Events("team-a").Create(t.Context(), event, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		refuse(w.world, "*", "nodes")
		w.Start("top", "-n", "team-a")
		w.Is(`
POD                NODE    REQUESTS                           DEVICES
team-a/claims      gpu-2   by claim mine; perhaps of no GPU   gpu-0-mig-3g40gb-9-4
team-a/trainer-0   gpu-1   nvidia.com/mig-3g.40gb 1
team-a/waits               nvidia.com/mig-3g.40gb 1
how busy pods are is not known: reading nodes needs rights that you lack. kubectl gpuslice advise says more of pending pods
2000-01-01 00:00:00Z GPUIdle: team-a/trainer-0 has had GPU 0 3g.40gb for 6 h and used it for 0 %
team-a/waits is pending: 0/2 nodes are available: 2 Insufficient nvidia.com/mig-3g.40gb.
`, 0)
		w.Start("top", "-n", "team-c")
		w.Is(`
no pod of namespace team-c requests a GPU
how busy pods are is not known: reading nodes needs rights that you lack. kubectl gpuslice advise says more of pending pods
`, 0)
		for args, want := range map[string]string{"status": "listing nodes: ", "status gpu-1": "reading node gpu-1: ", "status gpu-1 gpu-2": "reading node gpu-1: ", "top gpu-1": "reading node gpu-1: "} {
			said, code := w.Run(strings.Fields(args)...)
			if code != 1 || !strings.HasPrefix(said, "error: "+want) || !strings.HasSuffix(said, "; without rights to nodes, kubectl gpuslice top shows the pods of your namespace that request GPUs\n") {
				t.Errorf("%s: exit code %d: %s", args, code, said)
			}
		}
	})
}

// used is what the agents of the pool say of the use of their GPUs.
func used() uses {
	busy := func(percent float64) *float64 { return &percent }
	one := func(node, pod string, u api.Use) use {
		u.Namespace, u.Pod, _ = strings.Cut(pod, "/")
		return use{node, u}
	}
	const noProcesses = "the driver does not report how busy processes are on MIG instances of this model"
	all := uses{More: 12, Silent: []silent{{"gpu-9", "the agent has not answered within 5s"}}, Uses: []use{
		one("gpu-1", "team-a/trainer-0", api.Use{GPU: 0, Instance: "3g.40gb@4", Pods: 1, MemoryMiB: 31200, UsedMiB: 31240, TotalMiB: 40192, Unknown: noProcesses, Since: screenTime.Add(-6 * time.Hour)}),
		one("gpu-1", "team-a/notebook-0", api.Use{GPU: 0, Instance: "1g.10gb@0", Pods: 1, MemoryMiB: 0, UsedMiB: 12, TotalMiB: 9728, Unknown: noProcesses, Since: screenTime.Add(-26 * time.Hour)}),
		one("gpu-2", "team-b/serving-7d9c5b6f4-x2x9z", api.Use{GPU: 3, Pods: 3, MemoryMiB: 20480, UsedMiB: 61440, TotalMiB: 81559, Busy: busy(93.4), Since: screenTime.Add(-40 * time.Minute), UUID: "GPU-5d1c7f03-1111-2222-3333-444455556666"}),
		one("gpu-2", "team-b/idle-with-a-name-that-is-so-long-that-no-line-of-eighty-columns-has-room-for-it-all", api.Use{GPU: 3, Pods: 3, MemoryMiB: 500, UsedMiB: 61440, TotalMiB: 81559, Busy: busy(0), Since: screenTime.Add(-9 * 24 * time.Hour)}),
	}}
	all.sort(byMemory)
	return all
}

func TestScreensOfTop(t *testing.T) {
	text.EnableColors()
	t.Cleanup(text.DisableColors)
	for _, width := range []int{160, 80, 40} {
		for _, colour := range []bool{false, true} {
			p := output.Paper{Width: width, Colour: colour, Now: screenTime}
			for name, r := range map[string]topRequest{"top": {}, "top-wide": {format: output.Wide}} {
				screen, err := r.text(used(), p)
				if err != nil {
					t.Fatal(err)
				}
				file := filepath.Join("testdata", fmt.Sprintf("%s-%d.txt", name, width))
				if colour {
					file = strings.TrimSuffix(file, ".txt") + "-colour.txt"
				}
				golden(t, file, screen)
				for line := range strings.SplitSeq(screen, "\n") {
					if n := text.StringWidthWithoutEscSequences(line); n > width {
						t.Errorf("%s: %d columns: %s", file, n, line)
					}
				}
				if plain, err := r.text(used(), output.Paper{Width: width, Now: screenTime}); err != nil || text.StripEscape(screen) != plain {
					t.Errorf("%s: %v: the colours say what the words do not", file, err)
				}
			}
		}
	}
	for _, format := range []string{output.JSON, output.YAML, ""} {
		said, err := (&topRequest{format: format}).text(used(), output.Paper{Now: screenTime})
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "testdata/top."+cmp.Or(format, "pipe.txt"), said)
	}
}
