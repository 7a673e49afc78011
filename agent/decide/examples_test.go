package decide_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// readManifest reads a manifest of deploy, and returns its text.
func readManifest(t *testing.T, into any, path ...string) (text string) {
	t.Helper()
	read, err := os.ReadFile(filepath.Join(append([]string{"..", "..", "deploy"}, path...)...))
	if err == nil {
		err = yaml.Unmarshal(read, into)
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(read)
}

// plainPlugin is a pod of NVIDIA's plain DaemonSet (nvidia-device-plugin.yml of v0.19.3), with what counts here.
func plainPlugin(env ...corev1.EnvVar) corev1.Pod {
	p := corev1.Pod{Spec: corev1.PodSpec{
		Tolerations: []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}},
		Containers:  []corev1.Container{{Name: "nvidia-device-plugin-ctr", Env: env}},
	}}
	p.Namespace, p.Name = "kube-system", "nvidia-device-plugin-daemonset-x"
	return p
}

// nodesOf are nodes of four GPUs of each model that the examples are about.
func nodesOf(t *testing.T) (nodes [][]nvml.GPU) {
	t.Helper()
	for _, model := range []string{"A100-80GB", "H100-80GB", "H200"} {
		node, err := gpusim.Create(t.TempDir(), gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: model, Count: 4}}})
		if err != nil {
			t.Fatal(err)
		}
		gpus, err := node.Driver().Snapshot(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		gpus[0].UUID = "GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76" // which an example names
		nodes = append(nodes, gpus)
	}
	return nodes
}

// A profile of the examples runs beside NVIDIA's plain DaemonSet, or the first line of its file says what it needs, and with that it runs.
func TestTheProfilesOfTheExamplesRunWithWhatTheirFirstLineNames(t *testing.T) {
	t.Parallel()
	var overlay appsv1.DaemonSet
	readManifest(t, &overlay, "overlays", "device-plugin", "device-plugin.yaml")
	ofOverlay := corev1.Pod{Spec: overlay.Spec.Template.Spec}
	ofOverlay.Namespace, ofOverlay.Name = "gpuslice", "gpuslice-device-plugin-x"
	plain := func(_ *testing.T, r *request) { r.seen.DevicePlugin.Pods = []corev1.Pod{plainPlugin()} }
	mixedByEnv := func(_ *testing.T, r *request) {
		r.seen.DevicePlugin.Pods = []corev1.Pod{plainPlugin(corev1.EnvVar{Name: "MIG_STRATEGY", Value: "mixed"})}
	}
	withOverlay := func(t *testing.T, r *request) {
		t.Helper()
		r.reads(t, mixed, nil)
		r.seen.DevicePlugin.Pods = []corev1.Pod{ofOverlay}
	}
	nodes := nodesOf(t)
	for file, needed := range map[string]map[string]func(*testing.T, *request){
		"configmap-profiles.yaml": {"overlays/device-plugin": withOverlay, "MIG_STRATEGY=mixed": mixedByEnv},
		"configmap-pools.yaml":    {"overlays/device-plugin": withOverlay},
	} {
		var m corev1.ConfigMap
		text := readManifest(t, &m, "examples", file)
		profiles, err := catalog.ParseProfiles([]byte(m.Data[config.DefaultProfilesKey]))
		if err != nil || len(profiles) == 0 {
			t.Fatalf("%s: %d profiles, error %v", file, len(profiles), err)
		}
		// refused are the profiles that run on none of the nodes.
		refused := func(beside func(*testing.T, *request)) map[string]string {
			out := map[string]string{}
			for name := range profiles {
				var why string
				for _, gpus := range nodes {
					r := newRequest(t)
					r.label(config.LabelProfile, name)
					r.seen.GPUs, r.seen.Plugin = gpus, state.PluginConfig{Read: true}
					r.seen.Files.Profiles.Data = []byte(m.Data[config.DefaultProfilesKey])
					beside(t, r)
					_, err := r.desired(t)
					if err == nil {
						why = ""
						break
					}
					if why == "" || strings.HasPrefix(why, string(config.ReasonNoCapableGPU)) { // a node of another model says less
						why = refusal(err)
					}
				}
				if why != "" {
					out[name] = why
				}
			}
			return out
		}
		head, _, _ := strings.Cut(text, "\napiVersion:")
		needs := strings.HasPrefix(text, "# Needs ")
		if alone := refused(plain); needs != (len(alone) > 0) {
			t.Errorf("%s: it says that it needs something: %v; beside NVIDIA's plain DaemonSet these are refused: %v", file, needs, alone)
		}
		for what, beside := range needed {
			if !strings.Contains(head, what) {
				t.Errorf("%s does not name %s before its manifest", file, what)
			}
			if left := refused(beside); len(left) > 0 {
				t.Errorf("%s with %s: %v", file, what, left)
			}
		}
	}
}
