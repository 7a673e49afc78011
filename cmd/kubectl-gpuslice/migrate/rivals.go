package migrate

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// rival is another program that divides NVIDIA's GPUs, and the signs of it that its project documents or its manifests have.
type rival struct {
	name        string
	labels      []string          // of nodes, with any value but false
	annotations []string          // of nodes
	resources   []string          // beginnings of those that nodes offer
	podLabels   map[string]string // of its pods
	images      []string          // parts of the names of its pods' images
	off         string            // how it is turned off; empty for taking it off the nodes
}

// rivals are the programs that are known. Labels of fractions that a scheduler keeps in pods alone are none: it divides no GPU.
var rivals = []rival{
	{
		name: "HAMi", annotations: []string{"hami.io/node-nvidia-register"}, podLabels: map[string]string{"app.kubernetes.io/component": "hami-device-plugin"},
		images: []string{"projecthami/hami"},
	},
	{name: "nos", labels: []string{"nos.nebuly.com/gpu-partitioning"}, images: []string{"nos-mig-agent", "nos-gpu-agent"}},
	{name: "the Dynamic Accelerator Slicer (InstaSlice)", resources: []string{"mig.das.com/"}, images: []string{"instaslice-daemonset"}},
	{name: "Run:ai's dynamic MIG", labels: []string{"node-role.kubernetes.io/runai-dynamic-mig"}},
	{
		name: "Volcano's vGPU plugin", annotations: []string{"volcano.sh/node-vgpu-register"}, resources: []string{"volcano.sh/vgpu-"},
		podLabels: map[string]string{"name": "volcano-device-plugin"}, images: []string{"volcano-vgpu-device-plugin"},
	},
	{name: "Aliyun's gpushare", resources: []string{"aliyun.com/gpu-mem"}, podLabels: map[string]string{"component": "gpushare-device-plugin"}, images: []string{"k8s-gpushare-plugin"}},
	{name: "GKE", labels: []string{"cloud.google.com/gke-gpu-partition-size"}, off: "create the node pool without a partition size"},
}

// otherVendors begin the resources of GPUs that are not NVIDIA's.
var otherVendors = []string{"amd.com/gpu", "gpu.intel.com/"}

// sign is what shows that the program is on the node; empty for nothing.
func (r rival) sign(n corev1.Node, pods []corev1.Pod) string {
	for _, label := range r.labels {
		if value := n.Labels[label]; value != "" && value != "false" {
			return "label " + label
		}
	}
	for _, annotation := range r.annotations {
		if n.Annotations[annotation] != "" {
			return "annotation " + annotation
		}
	}
	if resource := offers(n, r.resources); resource != "" {
		return "resource " + resource
	}
	for i := range pods {
		for label, value := range r.podLabels {
			if pods[i].Labels[label] == value {
				return fmt.Sprintf("a pod with label %s=%s", label, value)
			}
		}
		for _, c := range pods[i].Spec.Containers {
			for _, image := range r.images {
				if strings.Contains(c.Image, image) {
					return "a pod with image " + image
				}
			}
		}
	}
	return ""
}

// offers is a resource of the node with one of the beginnings; empty for none.
func offers(n corev1.Node, beginnings []string) string {
	for _, resource := range slices.Sorted(maps.Keys(n.Status.Allocatable)) {
		if slices.ContainsFunc(beginnings, func(b string) bool { return strings.HasPrefix(string(resource), b) }) {
			return string(resource)
		}
	}
	return ""
}

// rivals names the other programs on the node that divide its GPUs, and reports whether there are any.
func (j *judge) rivals(n corev1.Node, pods []corev1.Pod, note func(Verdict, string, ...any)) bool {
	found := false
	for _, r := range rivals {
		sign := r.sign(n, pods)
		if sign == "" {
			continue
		}
		found = true
		off := r.off
		if off == "" {
			off = "take it off these nodes"
		}
		note(Change, "%s divides the GPUs too (%s), and two programs that divide the same GPUs undo each other's work: %s, or set no label there that gpuslice obeys", r.name, sign, off)
	}
	if resource := offers(n, otherVendors); resource != "" {
		note(Ignored, "%s are GPUs of another vendor, which gpuslice does not change", resource)
	}
	return found
}

// annotationsOfRivals are the annotations among a node's that show a rival.
func annotationsOfRivals(all map[string]string) map[string]string {
	out := map[string]string{}
	for _, r := range rivals {
		for _, key := range r.annotations {
			if all[key] != "" {
				out[key] = "present"
			}
		}
	}
	return out
}
