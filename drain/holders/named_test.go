package holders_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// twoGPUs has a whole GPU, and one with two MIG devices.
func twoGPUs() []nvml.GPU {
	return []nvml.GPU{
		{UUID: "GPU-aaaaaaaa-0000-0000-0000-000000000000", Index: 0, PCI: "0000:17:00.0"},
		{UUID: "GPU-bbbbbbbb-0000-0000-0000-000000000000", Index: 1, PCI: "0000:65:00.0", Enabled: true, Instances: []nvml.Instance{
			{ID: 7, Devices: []nvml.Device{{UUID: "MIG-11111111-0000-0000-0000-000000000000"}}},
			{ID: 8, Devices: []nvml.Device{{UUID: "MIG-GPU-bbbbbbbb-0000-0000-0000-000000000000/8/0"}}}, // as older drivers name them
		}},
	}
}

// env gives a container a variable.
func env(name, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Env: []corev1.EnvVar{{Name: name, Value: value}}})
	}
}

// envFrom gives a container a variable whose value only kubelet reads.
func envFrom(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Env: []corev1.EnvVar{{Name: name, ValueFrom: &corev1.EnvVarSource{}}}})
	}
}

func TestADeviceThatAContainerNamesIsHeld(t *testing.T) {
	t.Parallel()
	const (
		visible = "NVIDIA_VISIBLE_DEVICES"
		a       = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
		b       = "GPU-bbbbbbbb-0000-0000-0000-000000000000"
		m       = "MIG-11111111-0000-0000-0000-000000000000"
		old     = "MIG-GPU-bbbbbbbb-0000-0000-0000-000000000000/8/0"
		nothing = "nothing"
		any     = "any"
	)
	mount := func(path string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.Containers = []corev1.Container{{VolumeMounts: []corev1.VolumeMount{{MountPath: path}}}}
		}
	}
	variable := []corev1.EnvVar{{Name: visible, Value: a}}
	for name, row := range map[string]struct {
		pod  func(*corev1.Pod)
		want string
	}{
		"a GPU":                                 {env(visible, a), a},
		"a MIG device":                          {env(visible, m), m},
		"an older MIG device":                   {env(visible, old), old},
		"a MIG device by its GPU and numbers":   {env(visible, "MIG-"+b+"/7/0"), b},
		"several, with spaces":                  {env(visible, m+", "+a), a + " " + m},
		"the beginning of a UUID":               {env(visible, "GPU-aaaaaaaa"), a},
		"the beginning that any UUID has":       {env(visible, "GPU-"), nothing},
		"in other letters":                      {env(visible, strings.ToUpper(a)), a},
		"by CDI":                                {env(visible, "nvidia.com/gpu="+m), m},
		"by indexes":                            {env(visible, "1,0"), a + " " + b},
		"a MIG device by indexes":               {env(visible, "1:0"), b},
		"an index that is not there":            {env(visible, "2"), nothing},
		"a PCI address":                         {env(visible, "00000000:65:00.0"), b},
		"GPU of another node":                   {env(visible, "GPU-cccccccc-0000-0000-0000-000000000000"), nothing},
		"more than a UUID":                      {env(visible, a+"0"), nothing},
		"all":                                   {env(visible, "all"), nothing},
		"void":                                  {env(visible, "void"), nothing},
		"none":                                  {env(visible, "none"), nothing},
		"empty":                                 {env(visible, ""), nothing},
		"by CUDA's variable":                    {env("CUDA_VISIBLE_DEVICES", m), m},
		"CUDA counts what the container has":    {env("CUDA_VISIBLE_DEVICES", "0"), nothing},
		"in a variable that others refer to":    {env("MY_GPU", a), a},
		"by another variable":                   {env(visible, "$(MY_GPU)"), any},
		"from elsewhere":                        {envFrom(visible), any},
		"from elsewhere, by another variable":   {envFrom("CUDA_VISIBLE_DEVICES"), nothing},
		"by a mount":                            {mount("/var/run/nvidia-container-devices/" + m), m},
		"by a mount of an index":                {mount("/var/run/nvidia-container-devices/0"), a},
		"by a mount of CDI":                     {mount("/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/1"), b},
		"by a mount of all":                     {mount("/var/run/nvidia-container-devices/all"), nothing},
		"in a folder of that name somewhere":    {mount("/data/" + a), nothing},
		"in an init container":                  {func(p *corev1.Pod) { p.Spec.InitContainers = []corev1.Container{{Env: variable}} }, a},
		"beside a GPU from kubelet":             {func(p *corev1.Pod) { container(limits(gpu, 1))(p); env(visible, a)(p) }, "GPU-1 " + a},
		"in a pod that has ended":               {func(p *corev1.Pod) { env(visible, a)(p); phase(corev1.PodSucceeded)(p) }, nothing},
		"in a pod that no container ran of yet": {func(p *corev1.Pod) { env(visible, a)(p); p.Status.ContainerStatuses = nil }, nothing},
		"in an ephemeral container": {func(p *corev1.Pod) {
			p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Env: variable}}}
		}, a},
	} {
		assigned := holders.Assignments{}
		if strings.HasPrefix(name, "beside") {
			assigned = given("a", gpu, "GPU-1")
		}
		got := holders.GPUPods([]corev1.Pod{pod("a", started, row.pod)}, assigned, nil, holders.Claimed{}, twoGPUs())
		if text := devicesOf(got); text != row.want {
			t.Errorf("%s: the pod holds %s, want %s", name, text, row.want)
		}
		if row.want != nothing && !slices.Contains(got[0].Sources, holders.SourceContainer) {
			t.Errorf("%s: found by %v", name, got[0].Sources)
		}
	}
}
