package show

import (
	"encoding/json"
	"flag"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jedib0t/go-pretty/v6/text"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

var update = flag.Bool("update", false, "write the screens of testdata again")

// screenTime is when the screens are of.
var screenTime = time.Date(2026, 3, 1, 2, 5, 0, 0, time.UTC)

// balanced is a GPU of eight memory slices, cut as all-balanced does.
func balanced(index int) api.StatusGPU {
	return api.StatusGPU{
		Index: index, UUID: nvml.UUID(fmt.Sprintf("GPU-5d1c7f0%d-1111-2222-3333-444455556666", index)), MIG: true, Slices: 8,
		Geometry: "1g.10gb@0 1g.10gb@1 2g.20gb@2 3g.40gb@4", Instances: []api.StatusInstance{
			{Is: "1g.10gb@0", At: 0, Size: 1, ID: 9}, {Is: "1g.10gb@1", At: 1, Size: 1, ID: 10}, {Is: "2g.20gb@2", At: 2, Size: 2, ID: 5}, {Is: "3g.40gb@4", At: 4, Size: 4, ID: 2},
		},
	}
}

// seven is one with seven instances and a free slice.
func seven(index int) api.StatusGPU {
	g := balanced(index)
	g.Geometry, g.Instances = "", nil
	for at := range 7 {
		is := fmt.Sprintf("1g.10gb@%d", at)
		g.Geometry = strings.TrimSpace(g.Geometry + " " + is)
		g.Instances = append(g.Instances, api.StatusInstance{Is: is, At: at, Size: 1, ID: 7 + at})
	}
	return g
}

// onScreen is a node with the status, as of so long before.
func onScreen(name, label, asked string, s api.Status, since time.Duration, message string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label: asked}, Annotations: map[string]string{}}}
	s.Desired, s.Label, s.Since = asked, label, screenTime.Add(-since)
	agenttest.Says(n, s, message)
	n.Status.Conditions[0].LastHeartbeatTime = metav1.NewTime(screenTime.Add(-40 * time.Second))
	return n
}

// health says what is wrong with a GPU of the node, in the status and by the condition.
func health(n *corev1.Node, index int, h api.GPUHealth, reason, message string) {
	s := cluster.ReportOf(n).Status
	s.GPUs[index].Health = &h
	agenttest.States(n, s)
	n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: config.ConditionGPUUnhealthy, Status: corev1.ConditionTrue, Reason: reason, Message: message})
}

// screenNodes are what the screens show.
func screenNodes() []corev1.Node {
	well := onScreen("gpu-1", config.LabelMIGConfig, "all-balanced", api.Status{
		Phase: api.PhaseIdle, Reason: config.ReasonConverged, GPUs: []api.StatusGPU{balanced(0), seven(1), {Index: 2, UUID: "GPU-whole", MIG: false, Slices: 8}},
		Capacity: "nvidia.com/gpu 1, nvidia.com/mig-1g.10gb 9, nvidia.com/mig-2g.20gb 1, nvidia.com/mig-3g.40gb 1",
		Models:   []api.Model{{Name: "NVIDIA H100 80GB HBM3", GPUs: []int{0, 1, 2}}},
	}, 3*time.Hour, "all-balanced: as asked")
	health(well, 1, api.GPUHealth{
		Reason: config.ReasonUncorrectableECC, Severity: "degraded", Action: "ResetGPU", Since: screenTime.Add(-20 * time.Second), Instances: []string{"1g.10gb@6"},
		Xids: []api.XidSeen{
			{Number: 94, First: screenTime.Add(-time.Minute), Last: screenTime.Add(-time.Minute), GI: 13, CI: 0},
			{Number: 31, First: screenTime.Add(-5 * time.Hour), Last: screenTime.Add(-2 * time.Hour), GI: 8, CI: 0},
		},
	}, "UncorrectableECC", "GPU 1 (GPU-5d1c…, 0000:4b:00.0) has had an uncorrectable memory error")
	blocked := onScreen("gpu-2", config.LabelProfile, "research", api.Status{
		Phase: api.PhaseDraining, Reason: config.ReasonEvictionBlocked, Left: 9, GPUs: []api.StatusGPU{balanced(0)},
		Capacity: "nvidia.com/mig-1g.10gb 2", Blockers: []string{"team-a/trainer-0: PDB team-a/trainer: needs 2 healthy pods and has 2", "team-b/x: PDB team-b/x", "team-c/y: PDB team-c/y"},
	}, 4*time.Minute, "research: waiting")
	sick := onScreen("gpu-3", config.LabelMIGConfig, "all-1g.10gb", api.Status{
		Phase: api.PhaseIdle, Reason: config.ReasonConverged, Capacity: "nvidia.com/mig-1g.10gb 7", GPUs: []api.StatusGPU{seven(0), {
			Index: 1, UUID: "GPU-missing", Missing: true, PCI: "0000:4b:00.0",
			Health: &api.GPUHealth{Reason: config.ReasonGPUMissing, Severity: "critical", Action: "RebootNode", Since: screenTime.Add(-time.Hour)},
		}, {Index: -1, Missing: true, PCI: "0000:4c:00.0"}},
	}, 25*time.Hour, "all-1g.10gb: as asked")
	health(sick, 0, api.GPUHealth{
		Reason: config.ReasonResetRequired, Severity: "critical", Action: "ResetGPU", Since: screenTime.Add(-10 * time.Minute),
		Xids: []api.XidSeen{{Number: 95, First: screenTime.Add(-10 * time.Minute), Last: screenTime.Add(-10 * time.Minute), GI: -1, CI: -1}},
	}, "ResetRequired", "GPU 0 (GPU-5d1c…, 0000:4a:00.0) needs a reset: recovery action 1 (GPU reset) since 12:03:05Z, after Xid 95 (uncontained memory error, twice) at 12:03:04Z")
	stalled := onScreen("gpu-4", config.LabelMIGConfig, "all-9g.90gb", api.Status{Phase: api.PhaseStalled, Reason: config.ReasonUnknownConfig}, time.Minute, "there is no all-9g.90gb")
	none := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "cpu-1"}}
	return []corev1.Node{*none, *well, *blocked, *sick, *stalled}
}

// diagnosed is what the agent of gpu-1 says of its pods.
func diagnosed() *api.Diagnosis {
	return &api.Diagnosis{Pods: []api.PodSeen{
		{Namespace: "team-a", Name: "notebook-0", Devices: []string{"GPU 0 1g.10gb@0"}},
		{Namespace: "team-a", Name: "trainer-0", Devices: []string{"GPU 0 3g.40gb@4", "GPU 0 2g.20gb@2"}},
		{Namespace: "team-b", Name: "half", Devices: []string{"GPU 1 1c@0 in 1g.10gb@6"}},
		{Namespace: "team-b", Name: "shared-with-a-name-that-is-so-long-that-no-line-of-eighty-columns-has-room-for-it-all", Devices: []string{"GPU 2"}},
		{Namespace: "team-b", Name: "other", Devices: []string{"GPU 2"}, State: "Terminating"},
		{Namespace: "team-c", Name: "claims", Devices: []string{"unknown; it counts as holding everything"}},
	}}
}

// alike is a node of eight GPUs that are cut alike, and four that time-slicing shares by three, with pods on some.
func alike() nodeView {
	s := api.Status{
		Phase: api.PhaseIdle, Reason: config.ReasonConverged, Capacity: "nvidia.com/gpu 12 = 4 x 3 time-slicing, nvidia.com/mig-1g.10gb 16",
		Models: []api.Model{{Name: "NVIDIA H100 80GB HBM3", GPUs: []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}}},
	}
	for i := range 12 {
		g := balanced(i)
		if i >= 8 {
			g = api.StatusGPU{Index: i, UUID: g.UUID, Slices: 8}
		}
		s.GPUs = append(s.GPUs, g)
	}
	n := onScreen("gpu-12", config.LabelProfile, "research", s, 3*time.Hour, "research: as asked")
	n.Status.Allocatable = corev1.ResourceList{"cpu": resource.MustParse("64"), "nvidia.com/gpu": resource.MustParse("12"), "nvidia.com/mig-1g.10gb": resource.MustParse("32")}
	v := viewOf(n, screenTime)
	v.addDiagnosis(&api.Diagnosis{Pods: []api.PodSeen{
		{Namespace: "team-a", Name: "notebook-0", Devices: []string{"GPU 0 1g.10gb@0"}},
		{Namespace: "team-a", Name: "trainer-0", Devices: []string{"GPU 5 3g.40gb@4", "GPU 6 3g.40gb@4"}},
		{Namespace: "team-b", Name: "first", Devices: []string{"GPU 9"}},
		{Namespace: "team-b", Name: "second", Devices: []string{"GPU 9"}},
	}})
	return v
}

func TestScreens(t *testing.T) {
	text.EnableColors()
	t.Cleanup(text.DisableColors)
	var views []nodeView
	nodes := screenNodes()
	for i := range nodes {
		views = append(views, viewOf(&nodes[i], screenTime))
	}
	known, sick := viewOf(&nodes[1], screenTime), viewOf(&nodes[3], screenTime)
	known.addDiagnosis(diagnosed())
	equal := alike()
	sick.Pods.Why = "the agent has not answered within 5s"
	sick.Pods.Asking = []string{"team-a/notebook-0 (nvidia.com/mig-1g.10gb 1)"}
	for _, width := range []int{160, 80, 40} {
		for _, colour := range []bool{false, true} {
			p := output.Paper{Width: width, Colour: colour, Now: screenTime}
			for name, screen := range map[string]string{
				"status":      tabulate(views, nodeColumns, false, p),
				"status-wide": tabulate(views, nodeColumns, true, p),
				"status-node": draw(&known, p) + "\n\n" + draw(&sick, p) + "\n\n" + draw(&equal, p),
			} {
				file := filepath.Join("testdata", fmt.Sprintf("%s-%d.txt", name, width))
				if colour {
					file = strings.TrimSuffix(file, ".txt") + "-colour.txt"
				}
				golden(t, file, screen+"\n")
				for line := range strings.SplitSeq(screen, "\n") {
					if n := text.StringWidthWithoutEscSequences(line); n > width {
						t.Errorf("%s: %d columns: %s", file, n, line)
					}
				}
				if colour != strings.Contains(screen, "\x1b[") {
					t.Errorf("%s: colour %t", file, !colour)
				}
			}
		}
	}
	golden(t, "testdata/status-pipe.txt", tabulate(views, nodeColumns, false, output.Paper{Now: screenTime})+"\n\n"+draw(&known, output.Paper{Now: screenTime})+"\n")
}

func TestALongNameOfANodeIsCut(t *testing.T) {
	n := screenNodes()[1]
	n.Name = strings.Repeat("gpu-", 40)
	v := viewOf(&n, screenTime)
	for line := range strings.SplitSeq(draw(&v, output.Paper{Width: 80, Now: screenTime}), "\n") {
		if n := text.StringWidthWithoutEscSequences(line); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

func golden(t *testing.T, file, got string) {
	t.Helper()
	agenttest.Golden(t, file, got, *update)
}

// Colours say nothing that the words do not.
func TestColoursAddNothing(t *testing.T) {
	text.EnableColors()
	t.Cleanup(text.DisableColors)
	for _, n := range screenNodes() {
		v := viewOf(&n, screenTime)
		v.addDiagnosis(diagnosed())
		with, without := output.Paper{Width: 80, Colour: true, Now: screenTime}, output.Paper{Width: 80, Now: screenTime}
		if diff := gocmp.Diff(tabulate([]nodeView{v}, nodeColumns, true, without)+draw(&v, without), text.StripEscape(tabulate([]nodeView{v}, nodeColumns, true, with)+draw(&v, with))); diff != "" {
			t.Errorf("(-plain +colour without its colours):\n%s", diff)
		}
	}
}

func TestAStatusForPrograms(t *testing.T) {
	nodes := screenNodes()
	v := viewOf(&nodes[1], screenTime)
	v.addDiagnosis(diagnosed())
	for _, format := range []string{output.JSON, output.YAML} {
		said, err := (&statusRequest{format: format}).text([]nodeView{v}, true, output.Paper{Now: screenTime})
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "testdata/status."+format, said)
	}
	said, err := (&statusRequest{format: output.JSON}).text([]nodeView{v}, true, output.Paper{})
	var back struct{ Nodes []nodeView }
	if err != nil || json.Unmarshal([]byte(said), &back) != nil {
		t.Fatalf("%v: %s", err, said)
	}
	if diff := gocmp.Diff([]nodeView{v}, back.Nodes); diff != "" {
		t.Errorf("(-said +read):\n%s", diff)
	}
}

// Fifty nodes of eight GPUs are read, drawn and written.
func BenchmarkStatusOfFiftyNodes(b *testing.B) {
	var nodes []corev1.Node
	for i := range 50 {
		s := api.Status{Phase: api.PhaseIdle, Reason: config.ReasonConverged, Capacity: "nvidia.com/mig-1g.10gb 56"}
		for g := range 8 {
			s.GPUs = append(s.GPUs, seven(g))
		}
		nodes = append(nodes, *onScreen(fmt.Sprintf("gpu-%d", i), config.LabelMIGConfig, "all-1g.10gb", s, time.Hour, "as asked"))
	}
	for b.Loop() {
		var views []nodeView
		for i := range nodes {
			views = append(views, viewOf(&nodes[i], screenTime))
		}
		if _, err := (&statusRequest{}).text(views, true, output.Paper{Width: 80, Colour: true, Now: screenTime}); err != nil {
			b.Fatal(err)
		}
	}
}
