package node_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/google/go-cmp/cmp"
	"github.com/google/renameio/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/node"
)

// Ways in which NVIDIA's device plugin is deployed where it has a config, each by a node's labels.

// configFile makes a node on which the plugin and GPU feature discovery are run with a file of the host's, as
// deploy/overlays/device-plugin deploys them.
func configFile(o *node.Options) {
	// All that node feature discovery says of it, which comes before any GPU feature discovery.
	o.Labels = map[string]string{"feature.node.kubernetes.io/pci-10de.present": "true", "test.gpuslice.io/config-file": "true"}
}

// configManager makes a node on which config-manager gives them the key of a ConfigMap that the node's label names.
func configManager(o *node.Options) {
	o.Labels = map[string]string{deploysPlugin: "true", deploysDiscovery: "true", "test.gpuslice.io/config-manager": "true"}
}

const (
	labelPluginConfig = "nvidia.com/device-plugin.config"
	labelCount        = "nvidia.com/gpu.count"
	labelReplicas     = "nvidia.com/gpu.replicas"
	labelStrategy     = "nvidia.com/gpu.sharing-strategy"
	labelProduct      = "nvidia.com/gpu.product"
	labelMPSCapable   = "nvidia.com/mps.capable"
)

// pluginConfigs are the configs of manifests/config-manager.yaml by their keys.
func (r *rig) pluginConfigs() map[string]string {
	r.t.Helper()
	found, err := r.client.CoreV1().ConfigMaps("nvidia-device-plugin").Get(r.t.Context(), "device-plugin-configs", metav1.GetOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return found.Data
}

// writeConfig gives the programs that are run with a file another one, and has them read it.
func (r *rig) writeConfig(text string) {
	r.t.Helper()
	if err := renameio.WriteFile(r.PluginConfig(), []byte(text), 0o644); err != nil {
		r.t.Fatal(err)
	}
	r.signal("nvidia-device-plugin", syscall.SIGHUP)
	r.signal("gpu-feature-discovery", syscall.SIGHUP)
}

// signal reaches the real processes that the node's process table shows under the name.
func (r *rig) signal(program string, s syscall.Signal) {
	r.t.Helper()
	sent := 0
	for _, pid := range r.processes(program) {
		if err := syscall.Kill(pid, s); err != nil {
			r.t.Fatalf("sending %s to %s: %v", s, program, err)
		}
		sent++
	}
	if sent == 0 {
		r.t.Fatalf("no process of %s is in %s", program, r.ProcRoot())
	}
}

// processes are the pids under which the node's process table shows the program.
func (r *rig) processes(program string) []int {
	r.t.Helper()
	files, err := filepath.Glob(filepath.Join(r.ProcRoot(), "[0-9]*", "cmdline"))
	if err != nil {
		r.t.Fatal(err)
	}
	var pids []int
	for _, file := range files {
		cmdline, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it has ended
		}
		if err != nil {
			r.t.Fatal(err)
		}
		if name, _, _ := strings.Cut(string(cmdline), "\x00"); name != program {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			r.t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}

// devices are the ids that kubelet would give out, by resource.
func (r *rig) devices() map[string][]string {
	r.t.Helper()
	kubelet := holders.DialKubelet(r.Kubelet.PodResourcesSocket())
	defer kubelet.Close()
	found, err := kubelet.Allocatable(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	for _, ids := range found {
		slices.Sort(ids)
	}
	return found
}

// replicated are the ids under which the plugin offers each of the devices n times; as they are for n = 1.
func replicated(devices []string, n int) []string {
	if n == 1 {
		return slices.Sorted(slices.Values(devices))
	}
	var ids []string
	for _, device := range devices {
		for i := range n {
			ids = append(ids, fmt.Sprintf("%s::%d", device, i))
		}
	}
	slices.Sort(ids)
	return ids
}

// awaitLabels waits until the node has these labels.
func (r *rig) awaitLabels(want map[string]string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	var diff string
	_, found := r.seek(ctx, func(n *corev1.Node) bool {
		got := map[string]string{}
		for key := range want {
			got[key] = n.Labels[key]
		}
		diff = cmp.Diff(want, got)
		return diff == ""
	})
	if !found {
		r.t.Fatalf("labels of GPU feature discovery (-want +got):\n%s", diff)
	}
}
