package show_test

import (
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/config"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// The whole page as users see it.
func TestADiagnosisAsText(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 21, 3, 4, 5, 0, time.UTC)
	began := at.Add(-33 * time.Minute)
	for name, d := range map[string]api.Diagnosis{
		"budget": {
			Node: "gpu-1", At: at, Kubelet: api.KubeletSeen{Ready: corev1.ConditionTrue},
			Agent: api.AgentSeen{
				Runs: true, Wrote: at.Add(-12 * time.Second), Phase: api.PhaseDraining, Reason: config.ReasonEvictionBlocked,
				Message: "all-balanced: team/api-0: PDB team/api: needs 2 healthy pods and has 2",
			},
			Cordon: &api.CordonSeen{By: "gpuslice-agent", Ours: true, Since: began},
			PendingRestore: &api.PendingRestore{
				Operation: "0b1f5d0e-6f7a-4c39-9d7e-2f6a3c1d7b11", Target: "all-balanced", Since: began, Phase: api.PhaseDraining,
				Deadline: began.Add(time.Hour), Cordon: true,
				Paused: map[string]string{config.LabelOperandPrefix + "dcgm": "true"}, Stopped: []string{"nvsm.service"},
				Before: []api.StatusGPU{{Index: 0, MIG: true, Geometry: "1g.10gb@0 3g.40gb@4"}, {Index: 1}},
			},
			Others: []api.ToolSeen{{Tool: "kured", Sign: "annotation weave.works/kured-most-recent-reboot-needed", Since: began, Cordons: true}},
			Taints: []api.TaintSeen{{Key: config.TaintRepartitioning, Effect: corev1.TaintEffectNoSchedule, Since: began, Means: "ours: the node is fenced"}},
			Pods: []api.PodSeen{
				{Namespace: "team", Name: "api-0", Devices: []string{"GPU 0 1g.10gb@0"}, FoundBy: []string{"pod spec", "kubelet"}, Leaves: true, State: "Blocked", Message: "PDB team/api: needs 2 healthy pods and has 2"},
				{Namespace: "team", Name: "train-0", Devices: []string{"GPU 7"}, FoundBy: []string{"pod spec", "kubelet"}},
				{Namespace: "kube-system", Name: "plugin", Devices: []string{"GPU 0"}, FoundBy: []string{"device file /dev/nvidia0"}, Operand: true},
			},
			Processes: []api.ProcessSeen{{PID: 812, Name: "pid 812 nv-hostengine of dcgm.service", Holds: []string{"GPU 1"}, FoundBy: []string{"device file /dev/nvidia1"}}},
			Operands:  []api.OperandSeen{{Label: config.LabelOperandPrefix + "dcgm", Value: "paused-for-gpuslice", By: "gpuslice", PendingRestore: true}},
			GPUs: api.GPUsSeen{
				Asked: "all-balanced", Label: config.LabelMIGConfig, Steps: []string{"evict team/api-0", "GPU 0: destroy 1g.10gb@0", "GPU 0: create 1g.10gb@1", "GPU 0: create 1g.10gb@2", "GPU 0: create 1g.10gb@3"},
				Now: []api.StatusGPU{{Index: 0, MIG: true, Geometry: "1g.10gb@0 3g.40gb@4"}, {Index: 1}, {Index: 2, Lost: true}},
			},
			Failed: &api.Failure{Reason: config.ReasonHardwareFailure, Message: "all-3g.40gb: creating 3g.40gb at 4: Unknown Error"},
			Causes: []api.Finding{
				{Cause: api.CauseChangeUnderWay, Evidence: "change to all-balanced", Agent: "is at work"},
				{Cause: api.CauseBudgetBlocks, Evidence: "pod team/api-0: PDB team/api: needs 2 healthy pods and has 2", Agent: "asks again", You: "make the budget allow it", Command: "kubectl get pdb -n team api"},
			},
			Outcome: api.Outcome{Verdict: api.VerdictGivesBack, Text: "the agent releases this node by itself within 32m"},
		},
		"cordoned": {
			Node: "gpu-1", At: at, Kubelet: api.KubeletSeen{Ready: corev1.ConditionUnknown, Since: began, Says: "Kubelet stopped posting node status."},
			Cordon: &api.CordonSeen{By: "kubectl-cordon", Since: began, Kept: true},
			Left:   []string{"the label nvidia.com/gpu.deploy.dcgm=paused-for-gpuslice"},
			Unseen: []string{"the GPUs: the driver is not loaded"},
			Causes: []api.Finding{{Cause: api.CauseCordonedByPerson, Evidence: "cordoned by kubectl-cordon", Agent: "never lifts a cordon that it did not set"}},
			Outcome: api.Outcome{
				Verdict: api.VerdictNotOurs, Text: "not ours: cordoned by kubectl-cordon",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			golden := filepath.Join("testdata", "diagnosis-"+name+".txt")
			if *update {
				if err := os.WriteFile(golden, []byte(show.Diagnosis(d)), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), show.Diagnosis(d)); diff != "" {
				t.Errorf("the page (-want +got):\n%s", diff)
			}
		})
	}
}
