package migrate

import (
	"path/filepath"
	"strings"
	"testing"
)

// Two programs that divide the same GPUs undo each other's work, and what one of them offers does not say how the GPUs are cut.
func TestMigrateNamesOtherProgramsThatDivideTheGPUs(t *testing.T) {
	const undo = " divides the GPUs too (SIGN), and two programs that divide the same GPUs undo each other's work: take it off these nodes, or set no label there that gpuslice obeys: gpu-1\n"
	for name, row := range map[string]struct {
		labels, annotations, offers string // of the node
		pod                         string // its labels and image
		want                        string // what divides the GPUs; empty for nothing
		sign                        string
	}{
		"HAMi":                {annotations: "hami.io/node-nvidia-register: 'GPU-0,10'", offers: "nvidia.com/gpu: 40", want: "HAMi", sign: "annotation hami.io/node-nvidia-register"},
		"HAMi's pod":          {pod: "{labels: {app.kubernetes.io/component: hami-device-plugin}}|x", want: "HAMi", sign: "a pod with label app.kubernetes.io/component=hami-device-plugin"},
		"HAMi's image":        {pod: "{}|projecthami/hami:v2.7.0", want: "HAMi", sign: "a pod with image projecthami/hami"},
		"nos":                 {labels: "nos.nebuly.com/gpu-partitioning: mig", want: "nos", sign: "label nos.nebuly.com/gpu-partitioning"},
		"nos' agent":          {pod: "{}|nebuly-ai/nos-mig-agent:0.1.2", want: "nos", sign: "a pod with image nos-mig-agent"},
		"InstaSlice":          {offers: "mig.das.com/1g.5gb: 7", want: "the Dynamic Accelerator Slicer (InstaSlice)", sign: "resource mig.das.com/1g.5gb"},
		"InstaSlice's pod":    {pod: "{}|example/instaslice-daemonset:latest", want: "the Dynamic Accelerator Slicer (InstaSlice)", sign: "a pod with image instaslice-daemonset"},
		"Run:ai":              {labels: "node-role.kubernetes.io/runai-dynamic-mig: 'true'", want: "Run:ai's dynamic MIG", sign: "label node-role.kubernetes.io/runai-dynamic-mig"},
		"Run:ai, not dynamic": {labels: "node-role.kubernetes.io/runai-dynamic-mig: 'false'"},
		"Volcano":             {offers: "volcano.sh/vgpu-memory: 10, volcano.sh/vgpu-number: 1", want: "Volcano's vGPU plugin", sign: "resource volcano.sh/vgpu-memory"},
		"Aliyun":              {offers: "aliyun.com/gpu-mem: 10", want: "Aliyun's gpushare", sign: "resource aliyun.com/gpu-mem"},
		"GKE":                 {labels: "cloud.google.com/gke-gpu-partition-size: 1g.5gb", want: "GKE", sign: "label cloud.google.com/gke-gpu-partition-size"},
		"a pod of NVIDIA":     {pod: "{labels: {app: nvidia-device-plugin-daemonset}}|nvcr.io/nvidia/k8s-device-plugin:v0.19.3"},
		"another vendor":      {offers: "amd.com/gpu: 8, nvidia.com/gpu: 4"},
	} {
		t.Run(name, func(t *testing.T) {
			text := "apiVersion: v1\nkind: Node\nmetadata: {name: gpu-1, labels: {nvidia.com/gpu.present: 'true', nvidia.com/gpu.product: NVIDIA-A100-PCIE-40GB, nvidia.com/gpu.count: '4', " +
				"nvidia.com/gpu.memory: '40960', nvidia.com/mig.config: all-enabled, " + row.labels + "}, annotations: {" + row.annotations + "}}\n" +
				"status: {allocatable: {nvidia.com/mig-1g.5gb: 7, " + row.offers + "}}\n"
			if row.pod != "" {
				meta, image, _ := strings.Cut(row.pod, "|")
				text += "---\napiVersion: v1\nkind: Pod\nmetadata: " + meta + "\nspec: {nodeName: gpu-1, containers: [{image: '" + image + "'}]}\n"
			}
			file := filepath.Join(written(t, map[string]string{"nodes.yaml": text}), "nodes.yaml")
			got, err := migrates(t, "--dry-run", "-f", file)
			want := "  change      " + row.want + strings.ReplaceAll(undo, "SIGN", row.sign)
			if row.want == "GKE" {
				want = strings.ReplaceAll(want, "take it off these nodes", "create the node pool without a partition size")
			}
			if row.want == "" {
				want = "the node offers nvidia.com/"
			}
			if err != nil || !strings.Contains(got, want) || strings.Contains(got, "undo each other") != (row.want != "") || row.want != "" && strings.Contains(got, "the node offers") {
				t.Errorf("error %v, want %s in\n%s", err, want, got)
			}
			if other := "amd.com/gpu are GPUs of another vendor, which gpuslice does not change: gpu-1\n"; strings.Contains(got, other) != strings.Contains(row.offers, "amd.com") {
				t.Errorf("of another vendor:\n%s", got)
			}
		})
	}
}
