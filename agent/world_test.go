package agent_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// world is a node around an agent: simulated GPUs, and as much of kubelet, the DaemonSet controller and the device plugin
// as the agent sees of them. Locking, eviction and real plugins are tested in test/node, against the real parts.
type world struct {
	t        *testing.T
	gpus     *gpusim.Node
	client   *fake.Clientset
	agent    *agent.Agent
	settings config.Settings
	offered  map[string][]string // what the plugin read when it started
	started  int                 // plugin pods so far
	broken   bool                // the plugin registers nothing
}

const nodeName = "gpu-1"

func newWorld(t *testing.T, models string) *world {
	t.Helper()
	spec, err := gpusim.ParseSpec([]byte(models))
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := gpusim.Create(t.TempDir(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := gpus.Close(); err != nil {
			t.Error(err)
		}
	})
	w := &world{
		t: t, gpus: gpus, settings: config.Default(),
		client: fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "node-uid", ResourceVersion: "1"}}),
	}
	w.settings.MIGConfigMap = config.ConfigMapKey{}
	w.client.PrependReactor("create", "pods", w.evict)
	w.restart()
	return w
}

// restart is the next agent process: it knows nothing of the one before.
func (w *world) restart() {
	w.agent = agent.New(agent.Options{
		Node: nodeName, Client: w.client, Driver: w.gpus.Driver(), Kubelet: w, Settings: w.settings,
		Clock: clock.RealClock{}, Events: &record.FakeRecorder{}, Log: zaptest.NewLogger(w.t),
	})
}

// Assignments is kubelet's answer: each pod has the device that its annotation names.
func (w *world) Assignments(ctx context.Context) (drain.Assignments, error) {
	out := drain.Assignments{}
	pods, err := w.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, p := range pods.Items {
		if device := p.Annotations["device"]; device != "" {
			out[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}] = map[string][]string{"nvidia.com/gpu": {device}}
		}
	}
	return out, nil
}

// Allocatable is kubelet's answer: what the plugin registered.
func (w *world) Allocatable(context.Context) (map[string][]string, error) { return w.offered, nil }

// evict lets every pod go at once.
func (w *world) evict(action k8stesting.Action) (bool, runtime.Object, error) {
	if action.GetSubresource() != "eviction" {
		return false, nil, nil
	}
	eviction, ok := action.(k8stesting.CreateAction).GetObject().(*policyv1.Eviction)
	if !ok || eviction.DeleteOptions != nil && len(eviction.DeleteOptions.DryRun) > 0 {
		return true, nil, nil
	}
	pods := corev1.SchemeGroupVersion.WithResource("pods")
	return true, nil, w.client.Tracker().Delete(pods, eviction.Namespace, eviction.Name)
}

// turn is what the cluster does between two passes: the DaemonSet controller starts a plugin where none is and no taint
// forbids it, the plugin reads the GPUs, and kubelet updates the node.
func (w *world) turn() {
	w.t.Helper()
	ctx := w.t.Context()
	n := w.node()
	fenced := slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == config.TaintRepartitioning })
	plugins, err := w.client.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	switch {
	case len(plugins.Items) == 0 && fenced:
		w.offered = map[string][]string{}
	case len(plugins.Items) == 0:
		w.started++
		name := fmt.Sprintf("plugin-%d", w.started)
		_, err := w.client.CoreV1().Pods("kube-system").Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: map[string]string{"name": "nvidia-device-plugin-ds"}},
			Spec:       corev1.PodSpec{NodeName: nodeName},
			Status:     corev1.PodStatus{Phase: corev1.PodRunning},
		}, metav1.CreateOptions{})
		if err != nil {
			w.t.Fatal(err)
		}
		w.offered = w.devices()
	}
	n.Status.Allocatable = corev1.ResourceList{}
	for name, ids := range w.offered {
		n.Status.Allocatable[corev1.ResourceName(name)] = *resource.NewQuantity(int64(len(ids)), resource.DecimalSI)
	}
	if _, err := w.client.CoreV1().Nodes().UpdateStatus(ctx, n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// devices is what the plugin finds under the strategy mixed.
func (w *world) devices() map[string][]string {
	out := map[string][]string{}
	if w.broken {
		return out
	}
	gpus, err := w.gpus.Driver().Snapshot(w.t.Context())
	if err != nil {
		return out // as the plugin without a driver
	}
	for _, gpu := range gpus {
		if !gpu.Enabled {
			out["nvidia.com/gpu"] = append(out["nvidia.com/gpu"], string(gpu.UUID))
		}
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				name := "nvidia.com/mig-" + strings.ReplaceAll(d.Profile, "+", ".")
				out[name] = append(out[name], d.UUID)
			}
		}
	}
	return out
}

func (w *world) snapshot() []nvml.GPU {
	w.t.Helper()
	gpus, err := w.gpus.Driver().Snapshot(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return gpus
}

func (w *world) node() *corev1.Node {
	w.t.Helper()
	n, err := w.client.CoreV1().Nodes().Get(w.t.Context(), nodeName, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return n
}

func (w *world) label(value string) {
	w.t.Helper()
	n := w.node()
	if n.Labels == nil {
		n.Labels = map[string]string{}
	}
	n.Labels[config.LabelMIGConfig] = value
	if _, err := w.client.CoreV1().Nodes().Update(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) condition() corev1.NodeCondition {
	w.t.Helper()
	for _, c := range w.node().Status.Conditions {
		if c.Type == config.ConditionGPUPartitionReady {
			return c
		}
	}
	return corev1.NodeCondition{}
}

// passes lets the agent and the cluster take turns until stop is satisfied, in the bubble's time. It fails after a day.
func (w *world) passes(what string, stop func() bool) {
	w.t.Helper()
	began := time.Now()
	for !stop() {
		if time.Since(began) > 24*time.Hour {
			c := w.condition()
			w.t.Fatalf("no %s in a day; the node says %s: %s", what, c.Reason, c.Message)
		}
		w.turn()
		if pause := w.agent.Pass(w.t.Context()); pause > 0 {
			<-time.After(pause)
		}
	}
}

// settle lets turns pass until the agent's word is one of the reasons, with nothing owed to the node.
func (w *world) settle(reasons ...config.Reason) corev1.NodeCondition {
	w.t.Helper()
	w.passes(fmt.Sprint(reasons), func() bool {
		c := w.condition()
		_, owed := w.node().Annotations[config.AnnotationJournal]
		for _, r := range reasons {
			if c.Reason == string(r) && !owed {
				return true
			}
		}
		return false
	})
	return w.condition()
}

// converge asks for the config and lets turns pass until the node is as asked and given back.
func (w *world) converge(name string) {
	w.t.Helper()
	w.label(name)
	w.passes(name, func() bool {
		c := w.condition()
		return c.Reason == string(config.ReasonConverged) && strings.HasPrefix(c.Message, name+":")
	})
	w.givenBack()
}

// givenBack fails the test if anything of a change is left on the node.
func (w *world) givenBack() {
	w.t.Helper()
	n := w.node()
	if n.Spec.Unschedulable || len(n.Spec.Taints) > 0 || n.Annotations[config.AnnotationJournal] != "" {
		w.t.Errorf("the node is not given back: unschedulable %t, taints %v, journal %q",
			n.Spec.Unschedulable, n.Spec.Taints, n.Annotations[config.AnnotationJournal])
	}
}

// annotate sets an annotation of the node.
func (w *world) annotate(key, value string) {
	w.t.Helper()
	n := w.node()
	if n.Annotations == nil {
		n.Annotations = map[string]string{}
	}
	n.Annotations[key] = value
	if _, err := w.client.CoreV1().Nodes().Update(w.t.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}
