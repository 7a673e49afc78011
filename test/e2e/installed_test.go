package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/wait"
	deviceplugin "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/realkubelet"
	"github.com/gpuslice/gpuslice/test/machine"
	"github.com/gpuslice/gpuslice/test/node"
)

// driverDir is where NVIDIA's driver container has its root on the host.
const driverDir = "/run/nvidia/driver"

// installed is a node on which everything runs in pods, from the manifests and from the agent's image.
type installed struct {
	*rig
	before      *corev1.Node // before anything was installed
	filesBefore []string
	scenario    time.Time
	overlayName string // of deploy/overlays
}

// install applies the overlay for clusters without NVIDIA's operator, as the README says, and what a test adds to it.
func install(t *testing.T, spec, overlay string) *installed {
	t.Helper()
	i := bare(t, spec, programs.Image)
	i.overlayName = overlay
	i.apply("default", "")
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		i.kubectl(ctx, "delete", "--ignore-not-found", "--wait=false", "-k", i.file("default"))
	})
	return i
}

// bare is a node on which nothing of ours is installed yet.
func bare(t *testing.T, spec string, archives ...string) *installed {
	t.Helper()
	i := &installed{rig: newRig(t, spec, archives...)}
	if err := machine.AddAddress("lo:2", netip.MustParseAddr(cluster.ServiceAddress)); err != nil {
		t.Fatal(err)
	}
	service, err := i.cluster.Service(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(service.Close)
	i.installDriver()
	features := node.FollowFeatures(t.Context(), i.Client, i.View.Node, featureFiles, zap.NewNop())
	t.Cleanup(features.Stop)
	i.label("feature.node.kubernetes.io/pci-10de.present", "true") // as node feature discovery does
	if i.before, err = i.Client.CoreV1().Nodes().Get(t.Context(), i.View.Node, metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}
	i.filesBefore = hostFiles(t)
	return i
}

// installDriver does what the driver's container does.
func (i *installed) installDriver() {
	i.t.Helper()
	library, err := os.ReadFile(programs.LibNVML)
	if err == nil {
		err = os.MkdirAll(driverDir+"/usr/lib64", 0o755)
	}
	if err == nil {
		err = os.WriteFile(driverDir+"/usr/lib64/libnvidia-ml.so.1", library, 0o755)
	}
	if err != nil {
		i.t.Fatal(err)
	}
}

// apply applies the overlay with a component of deploy/components, or with none.
func (i *installed) apply(name, component string) {
	i.t.Helper()
	root, err := filepath.Abs("../../deploy")
	if err != nil {
		i.t.Fatal(err)
	}
	rel, err := filepath.Rel(i.file(name), root)
	if err != nil {
		i.t.Fatal(err)
	}
	text := fmt.Sprintf("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [%s/overlays/%s]\n", rel, i.overlayName)
	if component != "" {
		text += fmt.Sprintf("components: [%s/components/%s]\n", rel, component)
	}
	err = os.MkdirAll(i.file(name), 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(i.file(name), "kustomization.yaml"), []byte(text), 0o600)
	}
	if err != nil {
		i.t.Fatal(err)
	}
	i.kubectl(i.t.Context(), "apply", "-k", i.file(name))
}

// until polls for what is not of one look at the whole node, which has to be consistent.
func (i *installed) until(what string, done func() bool) {
	i.t.Helper()
	err := wait.PollUntilContextTimeout(i.t.Context(), 50*time.Millisecond, patience, true, func(context.Context) (bool, error) { return done(), nil })
	if err != nil {
		i.t.Fatalf("waiting for %s: %v", what, err)
	}
}

// agentPod is the agent's pod, which runs and is ready.
func (i *installed) agentPod(what string, wanted func(*corev1.Pod) bool) *corev1.Pod {
	i.t.Helper()
	var pod *corev1.Pod
	i.until(what, func() bool {
		found, err := i.Client.CoreV1().Pods("gpuslice").List(i.t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=agent"})
		if err != nil {
			i.t.Fatal(err)
		}
		for n := range found.Items {
			if p := &found.Items[n]; p.DeletionTimestamp == nil && ready(p) && wanted(p) {
				pod = p
				return true
			}
		}
		return false
	})
	return pod
}

func ready(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

func anyPod(*corev1.Pod) bool { return true }

// awaitNode waits until the node is as wanted.
func (i *installed) awaitNode(what string, wanted func(*corev1.Node) bool) *corev1.Node {
	i.t.Helper()
	var node *corev1.Node
	i.until(what, func() bool {
		var err error
		if node, err = i.Client.CoreV1().Nodes().Get(i.t.Context(), i.View.Node, metav1.GetOptions{}); err != nil {
			i.t.Fatal(err)
		}
		return wanted(node)
	})
	return node
}

// partitionReady is what the agent says of the node; the zero value before it has said anything.
func partitionReady(n *corev1.Node) corev1.NodeCondition {
	if c := report.Find(n, config.ConditionGPUPartitionReady); c != nil {
		return *c
	}
	return corev1.NodeCondition{}
}

func reason(n *corev1.Node) string { return partitionReady(n).Reason }

// underWay reports whether a change is.
func underWay(n *corev1.Node) bool { return n.Annotations[config.AnnotationJournal] != "" }

// did logs how long a scenario took.
func (i *installed) did(scenario string) {
	if !i.scenario.IsZero() {
		i.t.Logf("%-60s %3.0f s", scenario, time.Since(i.scenario).Seconds())
	}
	i.scenario = time.Now()
}

// Everything that the manifests install runs in pods of a real kubelet, from the image that a release has, and does what the README says.
func TestWhatTheManifestsInstallDoesAllThatItPromises(t *testing.T) {
	i := install(t, "gpus: [{model: H100-80GB, count: 2}]", "device-plugin")
	i.did("")
	i.agentPod("the agent to be ready", anyPod)
	i.awaitAmount(gpu, 2, 2)
	i.awaitNode("the agent to say that nothing is asked for", func(n *corev1.Node) bool { return reason(n) == string(config.ReasonNotRequested) })
	i.did("installed: agent, device plugin and GPU feature discovery run")

	i.repartition()
	i.waitsForItsWindow()
	i.recoversAStuckNode()
	i.killedAndMovedInTheMiddle()
	i.reboots()
	if !testing.Short() { // each way of sharing takes half a minute more
		i.overlays()
	}
	i.uninstall()
}

// repartition cuts the GPUs by a label; the pod in the way has a budget.
func (i *installed) repartition() {
	one := intstr.FromInt32(1)
	_, err := i.Client.PolicyV1().PodDisruptionBudgets(i.Namespace).Create(i.t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "trainer"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MinAvailable: &one, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "trainer"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		i.t.Fatal(err)
	}
	i.pod("trainer", gpu)
	i.patchPod("trainer", `{"metadata":{"labels":{"app":"trainer"}}}`)
	i.pod("waits", slice)
	i.awaitPod("trainer", "to run", running)
	i.until("the budget to count it", func() bool {
		b, err := i.Client.PolicyV1().PodDisruptionBudgets(i.Namespace).Get(i.t.Context(), "trainer", metav1.GetOptions{})
		return err == nil && b.Status.CurrentHealthy == 1
	})
	i.label(config.LabelMIGConfig, "all-1g.10gb")
	n := i.awaitNode("the budget to be in the way", func(n *corev1.Node) bool { return reason(n) == string(config.ReasonEvictionBlocked) })
	if n.Spec.Unschedulable {
		i.t.Error("the node is cordoned, though nothing can leave it")
	}
	if err := i.Client.PolicyV1().PodDisruptionBudgets(i.Namespace).Delete(i.t.Context(), "trainer", metav1.DeleteOptions{}); err != nil {
		i.t.Fatal(err)
	}
	i.awaitConverged("all-1g.10gb")
	i.awaitPod("waits", "to run on a slice", running)
	i.awaitAmount(slice, 14, 14)
	i.deletePods("waits")
	i.did("a label cuts the GPUs, after a budget was in the way; a slice runs")
}

func (i *installed) patchPod(name, patch string) {
	i.t.Helper()
	if _, err := i.Client.CoreV1().Pods(i.Namespace).Patch(i.t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		i.t.Fatal(err)
	}
}

// maintenance is a file whose windows begin and end then.
func maintenance(from, to time.Time) string {
	return fmt.Sprintf(`apiVersion: v1
kind: ConfigMap
metadata: {name: gpuslice-maintenance, namespace: gpuslice}
data:
  maintenance.yaml: |
    apiVersion: gpuslice.io/v1alpha1
    kind: Maintenance
    jitter: 0s
    estimate: 1m
    windows: [{notBefore: %q, notAfter: %q}]
`, from.UTC().Format(time.RFC3339), to.UTC().Format(time.RFC3339))
}

// applyText applies a manifest.
func (i *installed) applyText(name, text string) {
	i.t.Helper()
	if err := os.WriteFile(i.file(name), []byte(text), 0o600); err != nil {
		i.t.Fatal(err)
	}
	i.kubectl(i.t.Context(), "apply", "-f", i.file(name))
}

// waitsForItsWindow asks for a change while no window is open, and opens one.
func (i *installed) waitsForItsWindow() {
	now := time.Now()
	i.applyText("maintenance.yaml", maintenance(now.Add(240*time.Hour), now.Add(242*time.Hour)))
	i.pod("holds", slice)
	i.awaitPod("holds", "to run on a slice", running)
	i.label(config.LabelMIGConfig, "all-3g.40gb")
	n := i.awaitNode("the change to wait for its window", func(n *corev1.Node) bool { return reason(n) == string(config.ReasonAwaitingWindow) })
	if n.Spec.Unschedulable || underWay(n) {
		i.t.Errorf("outside of its window the node is cordoned (%t), or its change has begun (%t)", n.Spec.Unschedulable, underWay(n))
	}
	i.applyText("maintenance.yaml", maintenance(now.Add(-time.Hour), now.Add(time.Hour)))
	i.awaitConverged("all-3g.40gb")
	i.kubectl(i.t.Context(), "delete", "-f", i.file("maintenance.yaml"))
	i.did("a change waits for its window, and begins when that is opened")
}

// recoversAStuckNode lets the agent be taken away in the middle of a change, so that its node stays cordoned, and comes back.
func (i *installed) recoversAStuckNode() {
	const nowhere = `-p={"spec":{"template":{"spec":{"nodeSelector":{"example.com/nowhere":%s}}}}}`
	i.pod("holds", "nvidia.com/mig-3g.40gb")
	i.patchPod("holds", `{"metadata":{"finalizers":["example.com/stays"]}}`) // so that the drain takes as long as this test needs
	i.awaitPod("holds", "to run on a slice", running)
	i.label(config.LabelMIGConfig, "all-1g.10gb")
	i.awaitNode("the node to be drained", func(n *corev1.Node) bool { return underWay(n) && n.Spec.Unschedulable })
	i.kubectl(i.t.Context(), "-n", "gpuslice", "patch", "daemonset", "gpuslice-agent", fmt.Sprintf(nowhere, `"true"`))
	i.until("the agent to be gone", func() bool {
		found, err := i.Client.CoreV1().Pods("gpuslice").List(i.t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=agent"})
		return err == nil && len(found.Items) == 0
	})
	if n := i.awaitNode("the node", func(*corev1.Node) bool { return true }); !n.Spec.Unschedulable {
		i.t.Error("the node is not stuck: this shows nothing")
	}
	i.patchPod("holds", `{"metadata":{"finalizers":null}}`)
	i.kubectl(i.t.Context(), "-n", "gpuslice", "patch", "daemonset", "gpuslice-agent", fmt.Sprintf(nowhere, "null"))
	i.awaitConverged("all-1g.10gb")
	i.awaitNode("the node to be given back", func(n *corev1.Node) bool { return !underWay(n) && !n.Spec.Unschedulable })
	i.did("a node that was left cordoned in the middle is recovered")
}

// killedAndMovedInTheMiddle ends the agent in the middle of changes in each way in which agents end, and kubelet too.
func (i *installed) killedAndMovedInTheMiddle() {
	for _, interruption := range []struct {
		name, config string
		do           func()
	}{
		{"the agent's process is killed in the middle of a change", "all-3g.40gb", func() {
			if err := i.kill(i.t.Context(), i.agentPod("the agent", anyPod)); err != nil {
				i.t.Fatal(err)
			}
		}},
		{"the agent's DaemonSet is rolled out in the middle of a change", "all-1g.10gb", func() {
			i.kubectl(i.t.Context(), "-n", "gpuslice", "rollout", "restart", "daemonset", "gpuslice-agent")
		}},
		{"kubelet is restarted in the middle of a change", "all-2g.20gb", func() {
			if err := i.Restart(i.t.Context()); err != nil {
				i.t.Fatal(err)
			}
		}},
	} {
		i.label(config.LabelMIGConfig, interruption.config)
		i.awaitNode("the change to begin", underWay)
		interruption.do()
		i.awaitConverged(interruption.config)
		i.awaitNode("the node to be given back", func(n *corev1.Node) bool { return !underWay(n) && !n.Spec.Unschedulable })
		i.did(interruption.name)
	}
	i.awaitAmount("nvidia.com/mig-2g.20gb", 6, 6)
}

// reboots the machine, which forgets GPU instances.
func (i *installed) reboots() {
	if err := i.gpus.Reboot(); err != nil {
		i.t.Fatal(err)
	}
	if err := i.Reboot(i.t.Context()); err != nil {
		i.t.Fatal(err)
	}
	i.installDriver()
	i.awaitNode("the agent to make the instances again", func(n *corev1.Node) bool {
		return !underWay(n) && !n.Spec.Unschedulable && reason(n) == string(config.ReasonConverged)
	})
	i.awaitAmount("nvidia.com/mig-2g.20gb", 6, 6)
	i.did("the machine reboots, and the instances are there again")
}

// overlays applies each default of nodes without labels in turn, and then makes kubelet lose the device plugin.
func (i *installed) overlays() {
	i.label(config.LabelMIGConfig, "all-disabled")
	i.awaitConverged("all-disabled")
	i.kubectl(i.t.Context(), "label", "node", i.View.Node, config.LabelMIGConfig+"-")
	for _, overlay := range []struct {
		component string
		resource  string
		amount    int64
	}{
		{"time-sliced-2", gpu, 4},
		{"time-sliced-4", gpu, 8},
		{"mps-2", gpu, 4},
		{"mps-4", gpu, 8},
		{"mig-single", gpu, 2},
		{"mig-mixed", gpu, 2},
	} {
		i.overlay(overlay.component, overlay.resource, overlay.amount)
	}
	// Kubelet does not notice that this plugin ends, and refuses the next. If it ended by itself to read its config again, it could register
	// before kubelet looks for the end, and nothing would be lost. The overlay gives out as many devices as the one before, so that nothing but
	// the connection reports the loss.
	i.registerAgain(gpu, "nvidia-gpu.sock")
	i.kubectl(i.t.Context(), "-n", "gpuslice", "delete", "pod", "-l", "app.kubernetes.io/name=nvidia-device-plugin")
	if !i.overlay("default", gpu, 2) {
		i.t.Error("kubelet has lost the device plugin, and the node does not say so")
	}
}

// overlay applies the component as the default of nodes without labels, and reports whether kubelet lost the device plugin and was restarted.
func (i *installed) overlay(component, resource string, amount int64) (restarted bool) {
	i.t.Helper()
	former := i.agentPod("the agent", anyPod).UID
	i.apply(component, component)
	i.kubectl(i.t.Context(), "-n", "gpuslice", "rollout", "restart", "daemonset", "gpuslice-agent")
	i.agentPod("the agent's DaemonSet to be rolled out", func(p *corev1.Pod) bool { return p.UID != former })
	restarted = i.awaitOverlay()
	i.awaitAmount(resource, amount, amount)
	i.pod("one", resource)
	i.awaitPod("one", "to run", running)
	i.deletePods("one")
	i.did(fmt.Sprintf("overlay %s: %d %s, and a pod runs", component, amount, resource))
	return restarted
}

// registerAgain registers a device plugin that kubelet is connected to, as if it had begun again. Kubelet refuses, forgets its client for the one that
// is connected, and so does not notice its end: each later registration is refused, too, unless it comes before that end.
func (i *installed) registerAgain(resource, socket string) {
	i.t.Helper()
	conn, err := grpc.NewClient("unix://"+filepath.Join(realkubelet.DevicePluginDir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		i.t.Fatal(err)
	}
	defer conn.Close()
	_, err = deviceplugin.NewRegistrationClient(conn).Register(i.t.Context(), &deviceplugin.RegisterRequest{
		Version: deviceplugin.Version, Endpoint: socket, ResourceName: resource,
	})
	if err == nil || !strings.Contains(err.Error(), "already connected") {
		i.t.Fatalf("registering %s again: %v; this shows nothing", resource, err)
	}
}

// awaitOverlay waits until the agent has done what the overlay says. If the node says that kubelet has lost the device plugin, it does what the node
// says, once: a busy kubelet may do so with each plugin that reads its config again.
func (i *installed) awaitOverlay() (restarted bool) {
	i.t.Helper()
	i.awaitNode("the agent to have done what the overlay says", func(n *corev1.Node) bool {
		if c := partitionReady(n); !restarted && strings.Contains(c.Message, "restart kubelet on this node") {
			i.t.Logf("%s: %s", c.Reason, c.Message)
			restarted = true
			if err := i.Restart(i.t.Context()); err != nil {
				i.t.Fatal(err)
			}
			return false
		}
		return !underWay(n) && (reason(n) == string(config.ReasonConverged) || reason(n) == string(config.ReasonNotRequested))
	})
	return restarted
}

// uninstall takes the agent away by the commands of deploy/README, and the label, which is the user's.
func (i *installed) uninstall() {
	i.kubectl(i.t.Context(), "label", "node", i.View.Node, config.LabelMIGConfig+"-")
	i.kubectl(i.t.Context(), "-n", "gpuslice", "patch", "daemonset", "gpuslice-agent", "--type=json", `-p=[
	  {"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["cleanup", "--stay"]},
	  {"op": "replace", "path": "/spec/updateStrategy/rollingUpdate/maxUnavailable", "value": "100%"},
	  {"op": "replace", "path": "/spec/minReadySeconds", "value": 0}]`)
	i.kubectl(i.t.Context(), "-n", "gpuslice", "rollout", "status", "daemonset", "gpuslice-agent", "--timeout=5m")
	i.kubectl(i.t.Context(), "delete", "-k", i.file("default"))
	n, err := i.Client.CoreV1().Nodes().Get(i.t.Context(), i.View.Node, metav1.GetOptions{})
	if err != nil {
		i.t.Fatal(err)
	}
	found, err := discovered()
	if err != nil {
		i.t.Fatal(err)
	}
	if diff := cmp.Diff(withoutKubelets(i.before, found), withoutKubelets(n, found)); diff != "" {
		i.t.Errorf("the node is not as before (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(conditionTypes(i.before), conditionTypes(n)); diff != "" {
		i.t.Errorf("the node has other conditions than before (-before +after):\n%s", diff)
	}
	for _, entry := range n.ManagedFields {
		if strings.Contains(entry.Manager, "gpuslice") {
			i.t.Errorf("%s still manages fields of the node: %s", entry.Manager, entry.FieldsV1)
		}
	}
	// Kubelet keeps the capacity of a device plugin that has ended for minutes, and takes what can be had away at once.
	i.awaitNode("kubelet to give out no GPU", func(n *corev1.Node) bool {
		for resource, amount := range n.Status.Allocatable {
			if strings.HasPrefix(string(resource), "nvidia.com/") && !amount.IsZero() {
				return false
			}
		}
		return true
	})
	leases, err := i.Client.CoordinationV1().Leases(metav1.NamespaceAll).List(i.t.Context(), metav1.ListOptions{})
	if err != nil {
		i.t.Fatal(err)
	}
	for _, lease := range leases.Items {
		if strings.HasPrefix(lease.Name, "gpuslice") && lease.DeletionTimestamp == nil {
			i.t.Errorf("Lease %s/%s is still there", lease.Namespace, lease.Name)
		}
	}
	// The plugin's config stays for a plugin that stays; that the lock is taken away while another agent waits for it would let two agents run.
	stay := []string{"/var/lib/gpuslice/device-plugin/config.yaml", "/run/gpuslice/agent.lock"}
	left := slices.DeleteFunc(hostFiles(i.t), func(path string) bool { return slices.Contains(stay, path) })
	if diff := cmp.Diff(i.filesBefore, left, cmpopts.EquateEmpty()); diff != "" {
		i.t.Errorf("the host has other files than before (-before +after):\n%s", diff)
	}
	i.did("the agent is removed, and leaves nothing on the node")
}

// featureFiles is where GPU feature discovery leaves labels for node feature discovery.
const featureFiles = "/etc/kubernetes/node-feature-discovery/features.d"

// discovered returns the keys of the labels that GPU feature discovery has left to node feature discovery, which keeps them.
func discovered() (map[string]bool, error) {
	files, err := filepath.Glob(featureFiles + "/*")
	out := map[string]bool{}
	for _, file := range files {
		text, failed := os.ReadFile(file)
		err = errors.Join(err, failed)
		for line := range strings.Lines(string(text)) {
			key, _, _ := strings.Cut(line, "=")
			out[key] = true
		}
	}
	return out, err
}

// withoutKubelets is the node without what kubelet reports, and without the labels that were discovered, which are not the agent's to take away.
func withoutKubelets(n *corev1.Node, discovered map[string]bool) *corev1.Node {
	out := n.DeepCopy()
	out.ResourceVersion, out.Generation, out.ManagedFields, out.Status = "", 0, nil, corev1.NodeStatus{}
	maps.DeleteFunc(out.Labels, func(key, _ string) bool { return discovered[key] })
	return out
}

func conditionTypes(n *corev1.Node) []corev1.NodeConditionType {
	var out []corev1.NodeConditionType
	for _, c := range n.Status.Conditions {
		out = append(out, c.Type)
	}
	slices.Sort(out)
	return out
}

// hostFiles lists the files in each directory of the host that the agent's pod can write to. Directories do not count: kubelet makes them for
// the volumes.
func hostFiles(t *testing.T) []string {
	t.Helper()
	var out []string
	for _, dir := range []string{"/var/lib/gpuslice", "/run/gpuslice", "/var/run/cdi", "/etc/cdi"} {
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && !entry.IsDir() {
				out = append(out, path)
			}
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	return out
}
