package node_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/renameio/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
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

// writeConfig gives the programs that are run with a file another one, and tells them to read it.
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

// awaitComputeMode waits until all GPUs have the mode.
func (r *rig) awaitComputeMode(mode nvml.ComputeMode) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	var gpus []nvml.GPU
	err := wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(context.Context) (bool, error) {
		gpus = r.snapshot() //nolint:contextcheck // it has the test's, as all of a rig
		return !slices.ContainsFunc(gpus, func(gpu nvml.GPU) bool { return gpu.ComputeMode != mode }), nil
	})
	if err != nil {
		r.t.Fatalf("waiting for compute mode %s: %v; GPU 0 has %s", mode, err, gpus[0].ComputeMode)
	}
}

// What NVIDIA's programs make of their configs, without the agent, however they are handed to them.
func TestThePluginOffersWhatItsConfigSays(t *testing.T) {
	t.Parallel()
	for _, deployment := range []struct {
		name     string
		option   option
		switches func(r *rig, config string)
	}{
		{"a file of the host", configFile, func(r *rig, config string) { r.writeConfig(r.pluginConfigs()[config]) }},
		{"config-manager", configManager, func(r *rig, config string) { r.label(labelPluginConfig, config) }},
	} {
		t.Run(deployment.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "gpus: [{model: H100-80GB, count: 8}]", "", deployment.option)
			r.awaitOffered("nvidia.com/gpu", 8)
			r.awaitLabels(map[string]string{labelCount: "8", labelReplicas: "1", labelStrategy: "none"})
			product := r.node().Labels[labelProduct]
			if product == "" || strings.HasSuffix(product, "-SHARED") {
				t.Fatalf("the product of GPUs that are not shared is %q", product)
			}
			// becomes hands the config over, and checks what kubelet would give out by ids.
			becomes := func(config string, want map[string][]string, labels map[string]string) {
				t.Helper()
				counts := map[string]int{}
				for resource, ids := range want {
					counts[resource] = len(ids)
				}
				deployment.switches(r, config)
				r.await(config, func(n *corev1.Node) bool { return maps.Equal(offered(n), counts) })
				if diff := cmp.Diff(want, r.devices()); diff != "" {
					t.Errorf("%s: devices (-want +got):\n%s", config, diff)
				}
				r.awaitLabels(labels)
			}
			gpus := r.GPUs.UUIDs()
			becomes("time-slicing-4", map[string][]string{"nvidia.com/gpu": replicated(gpus, 4)}, map[string]string{
				labelCount: "8", labelReplicas: "4", labelStrategy: "time-slicing", labelProduct: product + "-SHARED",
			})
			becomes("renamed-4", map[string][]string{"nvidia.com/gpu.shared": replicated(gpus, 4)}, map[string]string{
				labelCount: "8", labelReplicas: "4", labelStrategy: "time-slicing", labelProduct: product,
			})
			becomes("mps-4", map[string][]string{"nvidia.com/gpu": replicated(gpus, 4)}, map[string]string{
				labelCount: "8", labelReplicas: "4", labelStrategy: "mps", labelMPSCapable: "true", labelProduct: product + "-SHARED",
			})
			r.awaitComputeMode(nvml.ComputeExclusiveProcess)
			becomes("whole", map[string][]string{"nvidia.com/gpu": replicated(gpus, 1)}, map[string]string{
				labelCount: "8", labelReplicas: "1", labelStrategy: "none", labelProduct: product,
			})
			r.awaitComputeMode(nvml.ComputeDefault) // which the daemon gives back when it goes
			r.cut("1g.10gb@0", "1g.10gb@1")
			var parts []string
			for _, instance := range r.snapshot()[0].Instances {
				parts = append(parts, instance.Devices[0].UUID)
			}
			becomes("mixed-4", map[string][]string{
				"nvidia.com/gpu": replicated(gpus[1:], 1), "nvidia.com/mig-1g.10gb": replicated(parts, 4),
			}, map[string]string{
				labelCount: "8", labelReplicas: "1", labelStrategy: "none",
				"nvidia.com/mig-1g.10gb.count": "2", "nvidia.com/mig-1g.10gb.replicas": "4",
				"nvidia.com/mig-1g.10gb.product": product + "-MIG-1g.10gb-SHARED",
			})
		})
	}
}
