package migrate

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

// Where a label and the GPUs disagree, the agent's first pass does what the label says: whoever installs it has to know before.
func TestWhatGoesAtTheMomentOfInstallingIsSaid(t *testing.T) {
	a100 := map[string]string{"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "40960", "nvidia.com/mig.config.state": "success"}
	h100 := map[string]string{"nvidia.com/mig.config": "all-balanced", "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "81559"}
	pod := func(name, node, limit string, phase corev1.PodPhase) corev1.Pod {
		return corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}, Status: corev1.PodStatus{Phase: phase},
			Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{
				Limits: corev1.ResourceList{corev1.ResourceName(limit): resource.MustParse("1")},
			}}}},
		}
	}
	custom := map[string]catalog.MIGConfig{
		"custom":     {{All: true, MIG: true, Devices: map[string]int{"3g.20gb": 1, "1g.5gb": 1}}},
		"first-only": {{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.5gb": 7}}, {Indices: []int{1}}},
		"second":     {{Indices: []int{1}, MIG: true, Devices: map[string]int{"1g.5gb": 7}}},
		"both":       {{Indices: []int{0, 1}, MIG: true, Devices: map[string]int{"1g.5gb": 7}}},
		"some":       {{Indices: []int{1, 2}, MIG: true, Devices: map[string]int{"4g.20gb": 1, "3g.20gb": 1}}},
	}
	for name, row := range map[string]struct {
		labels map[string]string
		offers map[string]string
		pods   []corev1.Pod
		want   []string // in one finding; none for no finding of the kind
	}{
		"as asked, of sizes that the config's name does not have": {
			h100, map[string]string{"nvidia.com/mig-1g.10gb": "16", "nvidia.com/mig-2g.20gb": "8", "nvidia.com/mig-3g.40gb": "8"}, nil, nil,
		},
		"more than asked, of sizes that the config's name does not have": {
			h100,
			map[string]string{"nvidia.com/mig-1g.10gb": "56"},
			nil,
			[]string{"all-balanced asks for 2x 1g.10gb + 1x 2g", "again, nvidia.com/mig-1g.10gb 40 go"},
		},
		"whole GPUs of two models, of which discovery counts one": {
			map[string]string{"nvidia.com/mig.config": "all-disabled", "nvidia.com/gpu.count": "4"}, map[string]string{"nvidia.com/gpu": "8"}, nil, nil,
		},
		"slices of two models, of which discovery names one": {
			map[string]string{"nvidia.com/mig.config": "all-balanced"},
			map[string]string{"nvidia.com/mig-1g.5gb": "2", "nvidia.com/mig-2g.10gb": "1", "nvidia.com/mig-3g.20gb": "1", "nvidia.com/mig-1g.10gb": "2", "nvidia.com/mig-2g.20gb": "1", "nvidia.com/mig-3g.40gb": "1"},
			nil, nil,
		},
		"slices of another model under all-disabled": {
			map[string]string{"nvidia.com/mig.config": "all-disabled"}, map[string]string{"nvidia.com/mig-3g.40gb": "2"}, nil, []string{"nvidia.com/mig-3g.40gb 2 go"},
		},
		"what its agent has made of the label": {
			map[string]string{"nvidia.com/mig.config": "custom", "of its agent": "custom"}, map[string]string{"nvidia.com/mig-1g.5gb": "4"}, nil, nil,
		},
		"what its agent has made of another label": {
			map[string]string{"nvidia.com/mig.config": "custom", "of its agent": "all-1g.5gb"}, map[string]string{"nvidia.com/mig-1g.5gb": "4"}, nil, []string{"nvidia.com/mig-1g.5gb 3 go"},
		},
		"slices made by hand under all-enabled": {
			map[string]string{"nvidia.com/mig.config": "all-enabled"},
			map[string]string{"nvidia.com/mig-3g.20gb": "2", "nvidia.com/gpu": "0"},
			[]corev1.Pod{
				pod("train", "n", "nvidia.com/mig-3g.20gb", ""), pod("else", "m", "nvidia.com/mig-3g.20gb", ""), pod("done", "n", "nvidia.com/mig-3g.20gb", corev1.PodSucceeded),
				pod("web", "n", "cpu", ""),
			},
			[]string{
				"set nvidia.com/mig.config to what the GPUs are, or remove it, before gpuslice is installed: all-enabled asks for MIG mode without instances on each GPU",
				"the node offers nvidia.com/mig-3g.20gb 2. The agent takes nothing for a label that is older than itself, and says OlderRequest; once the label is set again, nvidia.com/mig-3g.20gb 2 go, and pods team/train leave",
			},
		},
		"whole GPUs under a label of slices": {
			map[string]string{"nvidia.com/mig.config": "all-1g.5gb"},
			map[string]string{"nvidia.com/gpu": "1"},
			nil,
			[]string{"all-1g.5gb asks for 7x 1g.5gb on each GPU", "nvidia.com/gpu 1 go, and the pods on them (kubectl get pods -A --field-selector spec.nodeName=n) leave"},
		},
		"shared GPUs under a label of slices": {
			map[string]string{"nvidia.com/mig.config": "all-1g.5gb", "nvidia.com/gpu.replicas": "4"},
			map[string]string{"nvidia.com/gpu.shared": "4"},
			[]corev1.Pod{pod("shares", "n", "nvidia.com/gpu.shared", "")},
			[]string{"nvidia.com/gpu 1 go, and pods team/shares leave"},
		},
		"slices under all-disabled": {
			map[string]string{"nvidia.com/mig.config": "all-disabled"}, map[string]string{"nvidia.com/mig-1g.5gb": "7"}, nil, []string{"nvidia.com/mig-1g.5gb 7 go"},
		},
		"more slices than a config asks for": {
			map[string]string{"nvidia.com/mig.config": "custom"},
			map[string]string{"nvidia.com/mig-1g.5gb": "4", "nvidia.com/mig-3g.20gb": "1"},
			nil,
			[]string{"custom asks for 1x 1g.5gb + 1x 3g.20gb on each GPU", "again, nvidia.com/mig-1g.5gb 3 go"},
		},
		"slices of the strategy single": {
			map[string]string{"nvidia.com/mig.config": "all-disabled", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"},
			map[string]string{"nvidia.com/gpu": "7"},
			nil,
			[]string{"nvidia.com/mig-1g.5gb 7 go"},
		},
		"as asked":              {map[string]string{"nvidia.com/mig.config": "all-1g.5gb"}, map[string]string{"nvidia.com/mig-1g.5gb": "7"}, nil, nil},
		"fewer than asked":      {map[string]string{"nvidia.com/mig.config": "all-1g.5gb"}, map[string]string{"nvidia.com/mig-1g.5gb": "2"}, nil, nil},
		"nothing is offered":    {map[string]string{"nvidia.com/mig.config": "all-1g.5gb"}, nil, nil, nil},
		"no label":              {nil, map[string]string{"nvidia.com/gpu": "1"}, nil, nil},
		"a profile that counts": {map[string]string{"nvidia.com/mig.config": "all-disabled", "gpuslice.io/profile": "x"}, map[string]string{"nvidia.com/mig-1g.5gb": "7"}, nil, nil},
		"several sizes by the strategy single": {
			map[string]string{"nvidia.com/mig.config": "custom", "nvidia.com/mig.strategy": "single"},
			nil, nil,
			[]string{"give the device plugin another MIG strategy, or change the label: nvidia.com/mig.config=custom asks for", "by the MIG strategy single, which the node's label says, it offers devices of one size alone"},
		},
		"whole GPUs beside slices by the strategy single": {
			map[string]string{"nvidia.com/mig.config": "first-only", "nvidia.com/mig.strategy": "single", "nvidia.com/gpu.count": "2"},
			nil, nil,
			[]string{"nvidia.com/mig.config=first-only asks for", "by the MIG strategy single, which the node's label says, it offers devices of one size alone"},
		},
		"slices on some GPUs by the strategy single": {
			map[string]string{"nvidia.com/mig.config": "second", "nvidia.com/mig.strategy": "single", "nvidia.com/gpu.count": "2"},
			nil, nil,
			[]string{"nvidia.com/mig.config=second asks for MIG devices, and", "it offers devices of one size alone, on all GPUs of the node: GPUs that the config does not name would have to be cut alike"},
		},
		"slices of several sizes on some GPUs by the strategy single": {
			map[string]string{"nvidia.com/mig.config": "some", "nvidia.com/mig.strategy": "single", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"},
			map[string]string{"nvidia.com/gpu": "7"},
			nil,
			[]string{"nvidia.com/mig.config=some asks for MIG devices, and by the MIG strategy single, which the node's label says, it offers devices of one size alone"},
		},
		"slices on all GPUs by their positions, by the strategy single": {
			map[string]string{"nvidia.com/mig.config": "both", "nvidia.com/mig.strategy": "single", "nvidia.com/gpu.count": "2"},
			nil, nil, nil,
		},
		"whole GPUs of the strategy single": {
			map[string]string{"nvidia.com/mig.config": "all-disabled", "nvidia.com/mig.strategy": "single"}, nil, nil, nil,
		},
		"a GPU that the node does not have, by the strategy single": {
			map[string]string{"nvidia.com/mig.config": "first-only", "nvidia.com/mig.strategy": "single"}, nil, nil, nil,
		},
		"slices of one size by the strategy single": {
			map[string]string{"nvidia.com/mig.config": "all-1g.5gb", "nvidia.com/mig.strategy": "single"}, nil, nil, nil,
		},
		"slices by the strategy none": {
			map[string]string{"nvidia.com/mig.config": "all-1g.5gb", "nvidia.com/mig.strategy": "none"}, nil, nil, []string{"by the MIG strategy none, which the node's label says, it offers no MIG device"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{}, Annotations: map[string]string{}}}
			for _, labels := range []map[string]string{a100, row.labels} {
				for key, value := range labels {
					n.Labels[key] = value
				}
			}
			reports(&n, n.Labels["of its agent"])
			delete(n.Labels, "of its agent")
			n.Status.Allocatable = corev1.ResourceList{}
			for key, value := range row.offers {
				n.Status.Allocatable[corev1.ResourceName(key)] = resource.MustParse(value)
			}
			m := migration{Sources: Sources{Pods: row.pods, Catalogs: []Catalog{{Where: "file", Configs: custom}}}}
			m.node(n)
			var said []string
			for _, f := range Judge(m.Sources, config.Default()) {
				if f.Verdict == Change && (strings.HasPrefix(f.Text, "set "+config.LabelMIGConfig) || strings.HasPrefix(f.Text, "give the device plugin")) {
					said = append(said, f.Text)
				}
			}
			if len(row.want) == 0 && len(said) > 0 || len(row.want) > 0 && len(said) != 1 {
				t.Fatalf("it says %q, want %q", said, row.want)
			}
			for _, want := range row.want {
				if !strings.Contains(said[0], want) {
					t.Errorf("it says\n%q, want\n%q", said[0], want)
				}
			}
		})
	}
}

// reports has the node's agent say that it has made the config; none where there is no agent.
func reports(n *corev1.Node, made string) {
	if made != "" {
		agenttest.Says(n, api.Status{Label: config.LabelMIGConfig, Desired: made, Phase: api.PhaseIdle, Reason: config.ReasonConverged}, "as asked")
	}
}

// A node that has all the labels is not asked for them again.
func TestAModelThatIsNotKnownIsNotAskedForLabelsThatAreThere(t *testing.T) {
	b300 := map[string]string{"nvidia.com/gpu.product": "NVIDIA-B300-SXM6-AC", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "275040"}
	rules := catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{"1g.34gb": 7}}}
	if _, text := compared("all-1g.34gb", rules, b300); !strings.HasPrefix(text, "compare all-1g.34gb with the agent's own of that name by gpuslice-agent plan --offline") || strings.Contains(text, "needed") {
		t.Errorf("it says %q", text)
	}
}
