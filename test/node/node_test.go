package node_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

const (
	twoH100 = "gpus:\n- model: H100-80GB\n  count: 2\n"
	oneA100 = "gpus:\n- model: A100-80GB\n  count: 1\n"
)

// The change of the demo on two GPUs instead of eight.
func TestALabelDrainsRepartitionsAndGivesTheNodeBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.pod(namespace, "gpu", map[string]string{"nvidia.com/gpu": "1"})
	cpu := r.pod(namespace, "cpu", nil)
	r.awaitRunning(namespace, "gpu")
	r.awaitRunning(namespace, "cpu")

	r.run()
	r.awaitReason(config.ReasonNoWish)
	r.label(config.LabelMIGConfig, "all-balanced")
	n := r.awaitConverged("all-balanced")

	r.givenBack(n)
	want := map[string]int{"nvidia.com/mig-1g.10gb": 4, "nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-3g.40gb": 2}
	if diff := cmp.Diff(want, offered(n)); diff != "" {
		t.Errorf("allocatable (-want +got):\n%s", diff)
	}
	if _, err := r.client.CoreV1().Pods(namespace).Get(t.Context(), "gpu", metav1.GetOptions{}); err == nil {
		t.Error("the pod whose GPU was cut is still there")
	}
	after, err := r.client.CoreV1().Pods(namespace).Get(t.Context(), "cpu", metav1.GetOptions{})
	if err != nil || after.UID != cpu.UID || after.DeletionTimestamp != nil || after.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("the pod without a GPU was disturbed: %v, %v", after, err)
	}
}

// Promise 8. The agent is killed as soon as it has said that the step is done, so that it dies on the border to the next
// step or within it; the next agent must finish.
func TestKilledAfterAnyStepItEndsTheSame(t *testing.T) {
	t.Parallel()
	steps := change(t, -1)
	t.Logf("the change has %d steps: %s", len(steps), strings.Join(steps, "; "))
	if len(steps) != 1+2+2*5+2 { // fence; pod and plugin; mode and four instances of each GPU; plugin back, release
		t.Fatalf("the change has %d steps", len(steps))
	}
	for k, step := range steps {
		t.Run(fmt.Sprintf("step %d %s", k, strings.ReplaceAll(step, "/", " ")), func(t *testing.T) {
			t.Parallel()
			change(t, k)
		})
	}
}

// change cuts two GPUs while a pod holds one of them, kills the agent after the step with number k (not at all if negative),
// starts another, and checks the end. It returns the steps that the first agent said were done.
func change(t *testing.T, k int) []string {
	t.Helper()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.pod(namespace, "gpu", map[string]string{"nvidia.com/gpu": "1"})
	r.awaitRunning(namespace, "gpu")
	r.label(config.LabelMIGConfig, "all-balanced")
	p := r.run()
	var steps []string
	timeout := time.After(patience)
	for released := false; !released; {
		select {
		case step, ok := <-p.steps:
			if !ok {
				t.Fatalf("the agent ended by itself after %v", steps)
			}
			steps = append(steps, step)
			released = strings.HasPrefix(step, "release")
			if len(steps) == k+1 {
				r.kill()
				r.run()
				released = true
			}
		case <-timeout:
			t.Fatalf("the change takes too long; done: %v", steps)
		}
	}
	n := r.awaitConverged("all-balanced")
	r.givenBack(n)
	want := map[string]int{"nvidia.com/mig-1g.10gb": 4, "nvidia.com/mig-2g.20gb": 2, "nvidia.com/mig-3g.40gb": 2}
	if diff := cmp.Diff(want, offered(n)); diff != "" {
		t.Errorf("allocatable (-want +got):\n%s", diff)
	}
	for _, gpu := range r.snapshot() {
		const balanced = "1g.10gb@0 1g.10gb@1 2g.20gb@2 3g.40gb@4"
		if got := gpu.Geometry().String(); got != balanced {
			t.Errorf("GPU %d is cut as %s, want %s", gpu.Index, got, balanced)
		}
	}
	return steps
}

// Promise 1.
func TestABadWishDisturbsNothing(t *testing.T) {
	t.Parallel()
	const impossible = `version: v1
mig-configs:
  two-3g-and-a-1g:
    - devices: all
      mig-enabled: true
      mig-devices: {3g.40gb: 2, 1g.10gb: 1}
`
	for _, row := range []struct {
		name, label, configs string
		reason               config.Reason
		says                 []string
	}{
		{"an unknown name", "all-1g.5gb", impossible, config.ReasonUnknownConfig, []string{"all-1g.5gb", "all-1g.10gb"}},
		{
			"an impossible geometry", "two-3g-and-a-1g", impossible, config.ReasonImpossibleGeometry,
			[]string{"2x 3g.40gb take all 8 memory slices", "possible: 2x 3g.40gb"},
		},
		{
			"a malformed ConfigMap", "all-balanced", "version: v1\nmig-configs:\n  broken:\n    - devices: sometimes\n",
			config.ReasonInvalidCatalog,
			[]string{"ConfigMap gpuslice/", "config.yaml"},
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, oneA100, "migConfigMap: {name: wishes-"+strings.ReplaceAll(strings.ToLower(row.label), ".", "-")+"}\n")
			r.configMap("wishes-"+strings.ReplaceAll(strings.ToLower(row.label), ".", "-"), row.configs)
			r.awaitOffered("nvidia.com/gpu", 1)
			r.cut("3g.40gb@4", "1g.10gb@0")
			r.restartPlugin()
			r.awaitOffered("nvidia.com/mig-3g.40gb", 1)
			namespace := clustertest.Namespace(t)
			pod := r.pod(namespace, "user", map[string]string{"nvidia.com/mig-3g.40gb": "1"})
			r.awaitRunning(namespace, "user")
			before := r.GPUs.String()

			r.run()
			r.label(config.LabelMIGConfig, row.label)
			n := r.awaitReason(row.reason)

			for _, say := range row.says {
				if !strings.Contains(condition(n).Message, say) {
					t.Errorf("the message does not say %q: %s", say, condition(n).Message)
				}
			}
			if got := n.Labels[config.LabelMIGConfigState]; got != string(config.StateFailed) {
				t.Errorf("state label is %q, want failed", got)
			}
			r.givenBack(n)
			if diff := cmp.Diff(before, r.GPUs.String()); diff != "" {
				t.Errorf("the GPU was touched (-before +after):\n%s", diff)
			}
			after, err := r.client.CoreV1().Pods(namespace).Get(t.Context(), "user", metav1.GetOptions{})
			if err != nil || after.UID != pod.UID || after.DeletionTimestamp != nil {
				t.Errorf("the pod was disturbed: %v", err)
			}
			if writes := r.writes("pods/eviction"); len(writes) > 0 {
				t.Errorf("evictions were asked for: %v", writes)
			}
		})
	}
}

// Placed greedily at 0, the 3g would leave room for one 2g alone.
func TestOne3gAndTwo2gWorkAtTheFirstTry(t *testing.T) {
	t.Parallel()
	r := newRig(t, oneA100, "migConfigMap: {name: recommended}\n")
	r.configMap("recommended", "version: v1\nmig-configs:\n  recommended:\n    - devices: all\n      mig-enabled: true\n"+
		"      mig-devices: {3g.40gb: 1, 2g.20gb: 2}\n")
	r.awaitOffered("nvidia.com/gpu", 1)
	r.run()
	r.label(config.LabelMIGConfig, "recommended")
	n := r.awaitConverged("recommended")
	r.givenBack(n)
	if got, want := r.snapshot()[0].Geometry().String(), "2g.20gb@0 2g.20gb@2 3g.40gb@4"; got != want {
		t.Errorf("the GPU is cut as %s, want %s", got, want)
	}
	calls := r.GPUs.Calls()
	if made := calls[gpusim.CreateGpuInstanceWithPlacement]; made != 3 {
		t.Errorf("%d instances were created for 3: %v", made, calls)
	}
}

// Promise 12.
func TestAConvergedAgentWritesItsHeartbeatAlone(t *testing.T) {
	t.Parallel()
	const heartbeat, watched = 30 * time.Second, 2 * time.Minute
	r := newRig(t, twoH100, "nodeHeartbeat: 30s\n")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	r.label(config.LabelMIGConfig, "all-3g.40gb")
	r.awaitConverged("all-3g.40gb")
	plugin, calls := r.plugin(), r.GPUs.Calls()
	settled := r.writes("")

	idle(t, watched)
	beats := r.writes("")[len(settled):]
	for _, w := range beats {
		if w.Resource != "nodes/status" {
			t.Errorf("a write that is no heartbeat: %s %s", w, w.Body)
		}
	}
	t.Logf("%d writes in %s with a heartbeat of %s", len(beats), watched, heartbeat)
	if n, want := len(beats), int(watched/heartbeat); n < want-1 || n > want {
		t.Errorf("%d writes in %s, want %d: %v", n, watched, want, beats)
	}

	r.kill()
	restarted := r.writes("")
	r.run()
	idle(t, heartbeat+5*time.Second)
	for _, w := range r.writes("")[len(restarted):] {
		if w.Resource != "nodes/status" {
			t.Errorf("the restarted agent wrote: %s %s", w, w.Body)
		}
	}
	if again := r.plugin(); again.UID != plugin.UID {
		t.Error("the device plugin was restarted")
	}
	if diff := cmp.Diff(calls, r.GPUs.Calls()); diff != "" {
		t.Errorf("the GPUs were touched (-before +after):\n%s", diff)
	}
}

// Promise 5: the node stays schedulable while a disruption budget holds a pod, and the change goes on when it lets go.
func TestABudgetIsAskedBeforeTheCordon(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.pod(namespace, "guarded", map[string]string{"nvidia.com/gpu": "1"})
	r.awaitRunning(namespace, "guarded")
	r.budget(namespace, "guarded", 1)

	r.run()
	r.label(config.LabelMIGConfig, "all-1g.10gb")
	n := r.awaitReason(config.ReasonEvictionBlocked)
	r.givenBack(n)
	for _, say := range []string{"nothing is disturbed before", namespace + "/guarded", "1"} {
		if !strings.Contains(condition(n).Message, say) {
			t.Errorf("the message does not say %q: %s", say, condition(n).Message)
		}
	}
	relaxed := []byte(`{"spec":{"minAvailable":0}}`)
	_, err := r.client.PolicyV1().PodDisruptionBudgets(namespace).Patch(t.Context(), "guarded", types.MergePatchType, relaxed, metav1.PatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r.givenBack(r.awaitConverged("all-1g.10gb"))
}

// Promises 6 and 10: a label that is removed in the middle brings back what was before; an administrator's cordon stays.
func TestAWithdrawnWishIsUndoneAndACordonStays(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	before := r.GPUs.String()
	r.cordon()
	if err := r.GPUs.Delay(gpusim.CreateGpuInstanceWithPlacement, 300*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	p := r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	for step := range p.steps {
		if strings.Contains(step, "GPU 0: create") {
			break
		}
	}
	r.label(config.LabelMIGConfig, "")
	n := r.awaitReason(config.ReasonNoWish)
	if !n.Spec.Unschedulable {
		t.Error("the administrator's cordon was lifted")
	}
	if _, ok := n.Annotations[config.AnnotationJournal]; ok {
		t.Error("the journal is still there")
	}
	if diff := cmp.Diff(before, r.GPUs.String()); diff != "" {
		t.Errorf("the GPUs are not as they were (-before +after):\n%s", diff)
	}
}

// NVIDIA's own tool must see what the agent made, and find each config of the catalog applied.
func TestNVIDIAsToolAgreesWithEveryConfig(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus:\n- model: A100-80GB\n  count: 2\n", "")
	tool := r.migParted()
	catalog := config.Generate(r.snapshot())
	file := filepath.Join(r.Dir, "catalog.yaml")
	text, err := migparted.Render(catalog)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	for _, name := range config.Merge(catalog, nil).Names() {
		r.label(config.LabelMIGConfig, name)
		r.givenBack(r.awaitConverged(name))
		if out, err := tool("assert", "-f", file, "-c", name); err != nil {
			t.Errorf("nvidia-mig-parted assert -c %s: %v\n%s", name, err, out)
		}
		out, err := tool("export")
		if err != nil {
			t.Fatalf("nvidia-mig-parted export: %v\n%s", err, out)
		}
		exported, err := migparted.Parse([]byte(out))
		if err != nil {
			t.Fatalf("reading what nvidia-mig-parted exports: %v\n%s", err, out)
		}
		wishes, err := config.Merge(nil, exported).Wishes("current", r.snapshot())
		if err != nil {
			t.Fatal(err)
		}
		for _, gpu := range r.snapshot() {
			if diff := cmp.Diff(counts(gpu), wishes[gpu.UUID].Devices); gpu.Enabled && diff != "" {
				t.Errorf("%s, GPU %d (-agent made +nvidia-mig-parted exports):\n%s", name, gpu.Index, diff)
			}
		}
	}
}

func counts(gpu nvml.GPU) map[string]int {
	out := map[string]int{}
	for _, p := range gpu.Geometry() {
		for _, d := range p.Devices() {
			out[d]++
		}
	}
	return out
}

// idle lets real time pass, in which other processes must do nothing.
func idle(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
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
func (r *rig) cut(instances ...string) {
	r.t.Helper()
	driver := r.GPUs.Driver()
	gpu := r.snapshot()[0]
	if err := driver.SetMode(r.t.Context(), gpu.UUID, true); err != nil {
		r.t.Fatal(err)
	}
	gpu = r.snapshot()[0]
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

// plugin is the device plugin's pod on the node.
func (r *rig) plugin() *corev1.Pod {
	r.t.Helper()
	pods, err := r.client.CoreV1().Pods("kube-system").List(r.t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + r.Name})
	if err != nil || len(pods.Items) == 0 {
		r.t.Fatalf("no device plugin on node %s: %v", r.Name, err)
	}
	return &pods.Items[0]
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
	list := corev1.ResourceList{}
	for resourceName, n := range limits {
		list[corev1.ResourceName(resourceName)] = resource.MustParse(n)
	}
	grace := int64(2)
	p, err := r.client.CoreV1().Pods(namespace).Create(r.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec: corev1.PodSpec{
			NodeSelector: map[string]string{corev1.LabelHostname: r.Name}, TerminationGracePeriodSeconds: &grace,
			Containers: []corev1.Container{{Name: "c", Image: "team/app:1", Resources: corev1.ResourceRequirements{Limits: list}}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

func (r *rig) awaitRunning(namespace, name string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	w, err := r.client.CoreV1().Pods(namespace).Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	if err != nil {
		r.t.Fatal(err)
	}
	defer w.Stop()
	var last corev1.PodStatus
	for event := range w.ResultChan() {
		p, ok := event.Object.(*corev1.Pod)
		if !ok {
			break
		}
		if last = p.Status; last.Phase == corev1.PodRunning {
			return
		}
		if last.Phase == corev1.PodFailed {
			break
		}
	}
	r.t.Fatalf("pod %s/%s does not run: %s %s %s", namespace, name, last.Phase, last.Reason, last.Message)
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

// configMap makes a ConfigMap with MIG configs. It goes with the test.
func (r *rig) configMap(name, text string) {
	r.t.Helper()
	configMaps := r.client.CoreV1().ConfigMaps("gpuslice")
	_, err := configMaps.Create(r.t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"config.yaml": text},
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

func (r *rig) cordon() {
	r.t.Helper()
	cmd := exec.Command(r.cluster.Kubectl(), "--kubeconfig", r.cluster.AdminKubeconfig(), "cordon", r.Name)
	if out, err := cmd.CombinedOutput(); err != nil {
		r.t.Fatalf("kubectl cordon: %v\n%s", err, out)
	}
}

// writes are the requests by which agents changed something of this node, of the resource or of any if it is empty.
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

// migParted gives NVIDIA's nvidia-mig-parted on this node.
func (r *rig) migParted() func(args ...string) (string, error) {
	r.t.Helper()
	dir, err := binaries.Builder{Log: os.Stderr}.MigParted(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	return func(args ...string) (string, error) {
		var out strings.Builder
		cmd := sandbox.Command(r.t.Context(), r.Parts.Sandbox, r.Sandbox(), filepath.Join(dir, "nvidia-mig-parted"), args...)
		cmd.Stdout, cmd.Stderr = &out, os.Stderr
		err := cmd.Run()
		return out.String(), err
	}
}
