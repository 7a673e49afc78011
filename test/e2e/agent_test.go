package e2e_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/realkubelet"
	"github.com/gpuslice/gpuslice/test/cluster/timeline"
)

const slice = "nvidia.com/mig-1g.10gb"

func TestALabelCutsTheGPUsOfARealNode(t *testing.T) {
	r := newRig(t, "gpus: [{model: H100-80GB, count: 2}]")
	r.deploy("../node/manifests/device-plugin.yaml")
	r.awaitAmount(gpu, 2, 2)
	r.pod("trainer", gpu)
	r.pod("idle", "") // it has no GPU, and is to notice nothing
	r.pod("waits", slice)
	before := r.awaitPod("trainer", "to run", running)
	r.awaitPod("idle", "to run", running)
	r.awaitPod("waits", "to find no place", pending)
	if len(before.Pods["trainer"].Devices) != 1 {
		t.Fatalf("the node says:\n%s", before)
	}
	r.await("its program to compute", func(timeline.State) bool { return r.processes() == 1 })
	idle := r.uid("idle")

	r.startAgent()
	r.label(config.LabelMIGConfig, "all-1g.10gb")
	n := r.awaitConverged("all-1g.10gb")

	ours := slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == config.TaintRepartitioning })
	if n.Spec.Unschedulable || ours || n.Annotations[config.AnnotationJournal] != "" {
		t.Errorf("the node is not given back: unschedulable %v, taints %v, journal %q", n.Spec.Unschedulable, n.Spec.Taints, n.Annotations[config.AnnotationJournal])
	}
	after := r.awaitPod("waits", "to run on a slice", running)
	if got := after.Pods["waits"].Devices; len(got) != 1 || !strings.HasPrefix(got[0], slice+" MIG-") {
		t.Errorf("the pod that waited for a slice was given %v", got)
	}
	r.await("its program to compute", func(timeline.State) bool { return r.processes() == 1 })
	if diff := cmp.Diff(timeline.Amount{Capacity: 14, Allocatable: 14}, after.Resources[slice]); diff != "" {
		t.Errorf("what kubelet offers (-want +got):\n%s", diff)
	}
	if _, there := after.Pods["trainer"]; there {
		t.Error("the pod whose GPU was cut is still there")
	}
	if p := after.Pods["idle"]; r.uid("idle") != idle || !running(p) || p.Restarts != 0 {
		t.Errorf("the pod without a GPU was disturbed: %+v", p)
	}
}

const profiles = `apiVersion: v1
kind: ConfigMap
metadata: {name: gpuslice-profiles, namespace: gpuslice}
data:
  profiles.yaml: |
    apiVersion: gpuslice.io/v1alpha1
    kind: Profiles
    profiles:
      research: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}}
      training: {sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}}
`

// Promise 3, by the answers of TestAPodHoldsADeviceWhileThePluginComesBackWithAnotherConfig.
func TestAProfileSharesTheGPUsOfARealNode(t *testing.T) {
	r := newRig(t, "gpus: [{model: H100-80GB, count: 2}]")
	r.label("feature.node.kubernetes.io/pci-10de.present", "true")
	r.deploy("../../deploy/overlays/device-plugin/device-plugin.yaml")
	r.awaitAmount(gpu, 2, 2)
	if err := os.WriteFile(r.file("profiles.yaml"), []byte(profiles), 0o600); err != nil {
		t.Fatal(err)
	}
	r.kubectl(t.Context(), "apply", "-f", r.file("profiles.yaml"))
	r.pod("trainer", gpu)
	r.pod("idle", "")
	r.awaitPod("trainer", "to run", running)
	r.awaitPod("idle", "to run", running)
	idle, plugin := r.uid("idle"), r.pluginPod()

	r.startAgent()
	r.label(config.LabelProfile, "research")
	r.awaitConverged("research")
	after := r.awaitAmount(gpu, 8, 8)
	if _, there := after.Pods["trainer"]; there {
		t.Error("the pod that had a whole GPU is still there, though that is shared now")
	}

	holders := r.hold(8, []string{"GPU-0::1", "GPU-1::3"})
	stays, leaves := holders["GPU-0::1"], holders["GPU-1::3"]
	uid := r.uid(stays)
	r.label(config.LabelProfile, "training")
	r.awaitConverged("training")
	after = r.awaitAmount(gpu, 4, 4)
	if p := after.Pods[stays]; r.uid(stays) != uid || !running(p) || p.Restarts != 0 {
		t.Errorf("the pod on a share that is still offered was disturbed: %+v", p)
	}
	if _, there := after.Pods[leaves]; there {
		t.Error("the pod on a share that is gone is still there")
	}
	if p := after.Pods["idle"]; r.uid("idle") != idle || !running(p) || p.Restarts != 0 {
		t.Errorf("the pod without a GPU was disturbed: %+v", p)
	}
	if p := r.pluginPod(); p != plugin {
		t.Errorf("the device plugin's pod was %s before and is %s: it was restarted for another config", plugin, p)
	}
}

// pluginPod is the identity of the device plugin's pod, and how often it was started.
func (r *rig) pluginPod() string {
	r.t.Helper()
	found, err := r.Client.CoreV1().Pods("gpuslice").List(r.t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=nvidia-device-plugin"})
	if err != nil || len(found.Items) != 1 {
		r.t.Fatalf("%d pods of the device plugin: %v", len(found.Items), err)
	}
	p := found.Items[0]
	return fmt.Sprintf("%s (%s), started again %d times", p.Name, p.UID, p.Status.ContainerStatuses[0].RestartCount)
}

// deploy gives the cluster the agent's rights, and a device plugin for as long as the test runs.
func (r *rig) deploy(plugin string) {
	r.t.Helper()
	for _, file := range []string{
		"../../deploy/base/namespace.yaml", "../../deploy/base/serviceaccount.yaml", "../../deploy/base/rbac.yaml", plugin,
	} {
		r.kubectl(r.t.Context(), "apply", "-f", file)
	}
	r.kubectl(r.t.Context(), "apply", "-k", "../../deploy/policies")
	r.t.Cleanup(func() { r.kubectl(context.WithoutCancel(r.t.Context()), "delete", "--wait=false", "-f", plugin) })
}

func (r *rig) kubectl(ctx context.Context, args ...string) {
	r.t.Helper()
	cmd := exec.CommandContext(ctx, r.cluster.Kubectl(), append([]string{"--kubeconfig", r.cluster.AdminKubeconfig()}, args...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		r.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// startAgent runs the agent as a process of the node, with the rights of its service account.
func (r *rig) startAgent() {
	r.t.Helper()
	account, err := r.cluster.NodeConfig(r.t.Context(), "gpuslice", "gpuslice-agent", r.View.Node)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := cluster.WriteKubeconfig(r.file("agent.kubeconfig"), account); err != nil {
		r.t.Fatal(err)
	}
	if err := os.WriteFile(r.file("settings.yaml"), []byte("apiVersion: gpuslice.io/v1alpha1\nkind: Settings\n"), 0o600); err != nil {
		r.t.Fatal(err)
	}
	if err := journal.RecordIn(r.file("state")).Write(r.t.Context(), journal.Record{Version: journal.Version}); err != nil { // an agent has been here
		r.t.Fatal(err)
	}
	log, err := os.OpenFile(r.file("agent.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		r.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.CommandContext(r.t.Context(), programs.Agent, "run", "--node", r.View.Node,
		"--kubeconfig", r.file("agent.kubeconfig"), "--settings", r.file("settings.yaml"), "--driver-root", r.file("driver"),
		"--pod-resources", realkubelet.PodResourcesSocket, "--lock", r.file("agent.lock"), "--state-dir", r.file("state"), "--system-bus", "unix:path="+r.file("no-bus"),
		"--cdi", r.file("cdi"), "--dev-root", r.file("host"))
	cmd.Env = append(os.Environ(), "GPUSIM_NODE="+r.gpus.Dir())
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = cmd.Wait() }) // the test's context has killed it
}

// label sets a label. A change that it asks for may evict bare pods, as those of these tests are: it is what kubectl gpuslice apply --force-unmanaged does.
func (r *rig) label(name, value string) {
	r.t.Helper()
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, name, value)
	if name == config.LabelMIGConfig || name == config.LabelProfile {
		patch = fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q},"annotations":{%q:%q}}}`,
			name, value, config.AnnotationAllowEviction, config.Allowance(name, value, config.FieldUnmanagedPods))
	}
	if _, err := r.Client.CoreV1().Nodes().Patch(r.t.Context(), r.View.Node, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// awaitConverged waits until the agent says that the node is as the label asks.
func (r *rig) awaitConverged(name string) *corev1.Node {
	r.t.Helper()
	var n *corev1.Node
	last := "nothing"
	r.await("the node to be as asked", func(timeline.State) bool {
		var err error
		if n, err = r.Client.CoreV1().Nodes().Get(r.t.Context(), r.View.Node, metav1.GetOptions{}); err != nil {
			r.t.Fatal(err)
		}
		for _, c := range n.Status.Conditions {
			if c.Type == config.ConditionGPUPartitionReady && c.Reason+c.Message != last {
				last = c.Reason + c.Message
				r.t.Logf("%s: %s", c.Reason, c.Message)
				return c.Status == corev1.ConditionTrue && strings.HasPrefix(c.Message, name+":")
			}
		}
		return false
	})
	return n
}

func (r *rig) uid(pod string) types.UID {
	r.t.Helper()
	p, err := r.Client.CoreV1().Pods(r.Namespace).Get(r.t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return p.UID
}

// processes counts the programs that compute on the GPUs, as NVML does.
func (r *rig) processes() int {
	r.t.Helper()
	seen, err := r.gpus.Driver().Snapshot(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	n := 0
	for _, g := range seen {
		n += len(g.Processes)
		for _, i := range g.Instances {
			n += len(i.Processes)
		}
	}
	return n
}
