package repo_test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// goesTo reports whether the DaemonSet's pods may be on a node with these labels, as the scheduler reads its selector and affinity.
func goesTo(t *testing.T, d *appsv1.DaemonSet, node labels.Set) bool {
	t.Helper()
	pod := d.Spec.Template.Spec
	if !labels.SelectorFromSet(pod.NodeSelector).Matches(node) {
		return false
	}
	if pod.Affinity == nil || pod.Affinity.NodeAffinity == nil {
		return true
	}
	for _, term := range pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		all := labels.NewSelector()
		for _, e := range term.MatchExpressions {
			operator, ok := map[corev1.NodeSelectorOperator]selection.Operator{
				corev1.NodeSelectorOpIn: selection.In, corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist,
			}[e.Operator]
			if !ok {
				t.Fatalf("%s: this test does not know the operator %s", d.Name, e.Operator)
			}
			requirement, err := labels.NewRequirement(e.Key, operator, e.Values)
			if err != nil {
				t.Fatal(err)
			}
			all = all.Add(*requirement)
		}
		if all.Matches(node) {
			return true
		}
	}
	return false
}

// What finds GPUs on a node sets one of these labels: node feature discovery by the fields that its own config or NVIDIA's has it name
// devices by, the GPU Operator, and people. GPU feature discovery sets none of them.
func TestTheDaemonSetsGoWhereGPUsAre(t *testing.T) {
	const agent, plugin, discovery, mps = "gpuslice-agent", "gpuslice-device-plugin", "gpuslice-gpu-feature-discovery", "gpuslice-mps-control-daemon"
	daemonSets := map[string]*appsv1.DaemonSet{}
	for _, name := range []string{agent, plugin, discovery, mps} {
		daemonSets[name] = the[*appsv1.DaemonSet](t, name)
	}
	overlay := []string{agent, plugin, discovery}
	operators := labels.Set{
		"nvidia.com/gpu.present": "true", "feature.node.kubernetes.io/pci-10de.present": "true",
		"nvidia.com/gpu.deploy.device-plugin": "true", "nvidia.com/gpu.deploy.gpu-feature-discovery": "true", "nvidia.com/mps.capable": "true",
	}
	for name, node := range map[string]struct {
		labels labels.Set
		want   []string
	}{
		"node feature discovery by vendor":                {labels.Set{"feature.node.kubernetes.io/pci-10de.present": "true"}, overlay},
		"node feature discovery by class and vendor, 3D":  {labels.Set{"feature.node.kubernetes.io/pci-0302_10de.present": "true"}, overlay},
		"node feature discovery by class and vendor, VGA": {labels.Set{"feature.node.kubernetes.io/pci-0300_10de.present": "true"}, overlay},
		"node feature discovery on a system on a chip":    {labels.Set{"feature.node.kubernetes.io/cpu-model.vendor_id": "NVIDIA"}, overlay},
		"a label by hand":                                 {labels.Set{"nvidia.com/gpu.present": "true"}, overlay},
		"a config that shares by MPS":                     {labels.Set{"feature.node.kubernetes.io/pci-10de.present": "true", "nvidia.com/mps.capable": "true"}, append([]string{mps}, overlay...)},
		"the GPU Operator, which has a plugin and daemon": {operators, []string{agent}},
		"the GPU Operator, which pauses its plugin":       {labels.Merge(operators, labels.Set{"nvidia.com/gpu.deploy.device-plugin": "paused-for-gpuslice"}), []string{agent}},
		"the GPU Operator, of a node whose GPUs are gone": {labels.Set{"nvidia.com/gpu.present": "false"}, nil},
		"another vendor's card":                           {labels.Set{"feature.node.kubernetes.io/pci-0300_1a03.present": "true"}, nil},
		"another vendor's processor":                      {labels.Set{"feature.node.kubernetes.io/cpu-model.vendor_id": "Intel"}, nil},
		"no label of a device":                            {labels.Set{"kubernetes.io/os": "linux"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for name, d := range daemonSets {
				if got, want := goesTo(t, d, node.labels), slices.Contains(node.want, name); got != want {
					t.Errorf("a pod of %s goes there: %v, want %v", name, got, want)
				}
			}
		})
	}
}

func TestNVIDIAsImagesCanBePulled(t *testing.T) {
	found := 0
	for _, m := range manifests(t) {
		d, ok := m.object.(*appsv1.DaemonSet)
		if !ok {
			continue
		}
		for _, c := range append(d.Spec.Template.Spec.InitContainers, d.Spec.Template.Spec.Containers...) {
			switch {
			case strings.HasPrefix(c.Image, "gpuslice/"): // people build it themselves
			case !strings.HasPrefix(c.Image, nvidiasRegistry):
				t.Errorf("%s: container %s: image %s is not at NVIDIA's registry", m.file, c.Name, c.Image)
			default:
				found++
			}
		}
	}
	if found == 0 {
		t.Error("there is none")
	}
}
