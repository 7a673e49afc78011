package node_test

import (
	"context"
	"encoding/json"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/node"
)

// What a test does to a rig: with the hands of a user, of an administrator, or of fate.

// label asks for a config.
func (r *rig) label(key, value string) {
	r.t.Helper()
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": map[string]any{key: value}}})
	if err != nil {
		r.t.Fatal(err)
	}
	_, err = r.client.CoreV1().Nodes().Patch(r.t.Context(), r.Name, types.MergePatchType, body, metav1.PatchOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) snapshot() []nvml.GPU {
	r.t.Helper()
	gpus, err := r.GPUs.Driver().Snapshot(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	return gpus
}

// cut makes instances on GPU 0 behind the agent's back.
func (r *rig) cut(instances ...string) { r.t.Helper(); r.cutGPU(0, instances...) }

// cutGPU does so with the GPU of that index.
func (r *rig) cutGPU(index int, instances ...string) {
	r.t.Helper()
	driver := r.GPUs.Driver()
	gpu := r.snapshot()[index]
	if err := driver.SetMode(r.t.Context(), gpu.UUID, true); err != nil {
		r.t.Fatal(err)
	}
	gpu = r.snapshot()[index]
	for _, text := range instances {
		name, start, _ := strings.Cut(text, "@")
		p, ok := gpu.Profile(name)
		i := slices.IndexFunc(p.Placements, func(s nvml.Span) bool { return start == string(rune('0'+s.Start)) })
		if !ok || i < 0 {
			r.t.Fatalf("no %s", text)
		}
		if err := driver.Create(r.t.Context(), gpu.UUID, nvml.Placed{Profile: name, Span: p.Placements[i]}); err != nil {
			r.t.Fatal(err)
		}
	}
}

// plugin is the device plugin's pod on the node, whoever deploys it.
func (r *rig) plugin() *corev1.Pod {
	r.t.Helper()
	for _, pod := range r.pods() {
		if slices.ContainsFunc(pod.Spec.Containers, isPlugin) {
			return &pod
		}
	}
	r.t.Fatalf("no device plugin on node %s", r.Name)
	return nil
}

// isPlugin distinguishes the device plugin from other programs of its image.
func isPlugin(c corev1.Container) bool {
	return c.Image == node.DevicePluginImage && (len(c.Command) == 0 || c.Command[0] == "nvidia-device-plugin")
}

// pods are all of the node.
func (r *rig) pods() []corev1.Pod {
	r.t.Helper()
	pods, err := r.client.CoreV1().Pods(metav1.NamespaceAll).List(r.t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + r.Name})
	if err != nil {
		r.t.Fatal(err)
	}
	return pods.Items
}

func (r *rig) restartPlugin() {
	r.t.Helper()
	p := r.plugin()
	if err := r.client.CoreV1().Pods(p.Namespace).Delete(r.t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) pod(namespace, name string, limits map[string]string) *corev1.Pod {
	r.t.Helper()
	p, err := r.client.CoreV1().Pods(namespace).Create(r.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}}, Spec: r.podSpec(limits),
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

// podSpec is a pod of this node and no other.
func (r *rig) podSpec(limits map[string]string) corev1.PodSpec {
	list := corev1.ResourceList{}
	for resourceName, n := range limits {
		list[corev1.ResourceName(resourceName)] = resource.MustParse(n)
	}
	grace := int64(2)
	return corev1.PodSpec{
		NodeSelector: map[string]string{corev1.LabelHostname: r.Name}, TerminationGracePeriodSeconds: &grace,
		Containers: []corev1.Container{{Name: "c", Image: "team/app:1", Resources: corev1.ResourceRequirements{Limits: list}}},
	}
}

func (r *rig) budget(namespace, app string, minAvailable int32) {
	r.t.Helper()
	n := intstr.FromInt32(minAvailable)
	_, err := r.client.PolicyV1().PodDisruptionBudgets(namespace).Create(r.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: app},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &n, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
}

// relax lets go of all pods that a budget holds.
func (r *rig) relax(namespace, name string) {
	r.t.Helper()
	body := []byte(`{"spec":{"minAvailable":0}}`)
	_, err := r.client.PolicyV1().PodDisruptionBudgets(namespace).Patch(r.t.Context(), name, types.MergePatchType, body, metav1.PatchOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
}

// configMap makes a ConfigMap with MIG configs. It goes with the test.
func (r *rig) configMap(name, text string) {
	r.t.Helper()
	r.configMapOf(name, map[string]string{"config.yaml": text})
}

// configMapOf makes one with several files.
func (r *rig) configMapOf(name string, data map[string]string) {
	r.t.Helper()
	configMaps := r.client.CoreV1().ConfigMaps("gpuslice")
	_, err := configMaps.Create(r.t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Data: data,
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		if err := configMaps.Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			r.t.Error(err)
		}
	})
}

// writes are the requests by which agents changed something of this node, of the resource or of any if it is empty. Those about
// pods do not name the node: see evictions.
func (r *rig) writes(resource string) []cluster.AuditEvent {
	r.t.Helper()
	all, err := r.cluster.Writes("system:serviceaccount:gpuslice:gpuslice-agent")
	if err != nil {
		r.t.Fatal(err)
	}
	return slices.DeleteFunc(all, func(e cluster.AuditEvent) bool {
		of := e.Name == r.Name || strings.Contains(e.Body, r.Name)
		return !of || resource != "" && e.Resource != resource
	})
}
