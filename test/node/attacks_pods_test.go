package node_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// Promise 15: Believe only what this host's agent wrote. A tenant, who may create pods and nothing else, has one that looks like the
// device plugin and is given another MIG strategy, one with a GPU that says it is of a DaemonSet, so that it would come back as often
// as it is evicted, and two with an owner that cannot be asked for: while the agent waits for an answer, it looks at nothing. README.md has what
// came of each before.
func TestATenantsPodsHoldUpNoChange(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	everything := []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	r.user(namespace, "immune", func(p *corev1.Pod) {
		p.Spec.Tolerations = everything
		p.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: "none.example/v1", Kind: "DaemonSet", Name: "none", UID: "2f1c1d2e-0000-4000-8000-000000000001", Controller: new(true),
		}}
	})
	r.user(namespace, "plugin", func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "nvidia-device-plugin-daemonset"}
		p.Spec.Tolerations = everything
		p.Spec.Containers[0] = corev1.Container{
			Name: "nvidia-device-plugin", Image: p.Spec.Containers[0].Image,
			Env: []corev1.EnvVar{
				{Name: "MIG_STRATEGY", Value: "none"}, {Name: "NODE_LABEL", Value: "example.com/mine"}, {Name: "CONFIG_FILE_SRCDIR", Value: "/configs"},
			},
			VolumeMounts: []corev1.VolumeMount{{Name: "configs", MountPath: "/configs"}},
		}
		p.Spec.Volumes = []corev1.Volume{{Name: "configs", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
			LocalObjectReference: corev1.LocalObjectReference{Name: "mine"}, Optional: new(true),
		}}}}
	})
	r.ownedByWhatCannotBeAsked(namespace, "../../pods", strings.Repeat("x", 1<<20))
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	r.givenBack(r.awaitConverged("all-balanced"))
	if _, err := r.client.CoreV1().Pods(namespace).Get(t.Context(), "immune", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the pod that had a GPU of the node is still there: %v", err)
	}
	if _, err := r.client.CoreV1().Pods(namespace).Get(t.Context(), "plugin", metav1.GetOptions{}); err != nil {
		t.Errorf("the pod without a GPU was disturbed: %v", err)
	}
}

// ownedByWhatCannotBeAsked makes pods of DaemonSets with these names. The API server takes any text.
func (r *rig) ownedByWhatCannotBeAsked(namespace string, names ...string) {
	r.t.Helper()
	pods := r.client.CoreV1().Pods(namespace)
	for i, name := range names {
		spec := r.podSpec(nil)
		spec.NodeName, spec.NodeSelector = r.Name, nil
		pod, err := pods.Create(r.t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("owned-%d", i), Finalizers: []string{"example.com/stays"}, // though the garbage collector misses its owner
				OwnerReferences: []metav1.OwnerReference{{
					APIVersion: "apps/v1", Kind: "DaemonSet", Name: name, UID: "2f1c1d2e-0000-4000-8000-000000000001", Controller: new(true),
				}},
			}, Spec: spec,
		}, metav1.CreateOptions{})
		if err != nil {
			r.t.Fatal(err)
		}
		r.t.Cleanup(func() {
			body := []byte(`{"metadata":{"finalizers":null}}`)
			if _, err := pods.Patch(context.WithoutCancel(r.t.Context()), pod.Name, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
				r.t.Error(err)
			}
		})
	}
}

// lists has client-go begin a watch with a list, as it does where the API server cannot begin one with what is there.
const lists = "KUBE_FEATURE_WatchListClient=false"

// eachBeginning runs an agent for each way in which watches begin, one after the other beside the same objects, and fails the test if one of them
// takes more memory than half of what its pod has: of that it needs as much in a long run as in a short one, since nothing that it keeps
// grows with what others write.
func (r *rig) eachBeginning(change func(requested string)) {
	r.t.Helper()
	for _, watches := range []struct {
		begin     string
		env       []string
		requested string
	}{
		{"as a stream", nil, "all-balanced"},
		{"with a list", []string{lists}, "all-disabled"},
	} {
		r.agents.env = watches.env
		p := r.run()
		change(watches.requested)
		most := r.resident(p, "VmHWM") >> 10
		r.t.Logf("an agent whose watches begin %s has taken %d MiB", watches.begin, most)
		if most > 128 {
			r.t.Errorf("an agent whose watches begin %s has taken %d MiB", watches.begin, most)
		}
		r.kill()
	}
}

// Promise 16. The agent's pod has 256 MiB. A tenant fills what the agent lists with as much text as the API server takes.
func TestPromise16ListsFullOfTextTakeNoMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("two lists of 64 MiB, beside which nothing else can run; agent/observe/watch keeps little of each object")
	}
	// One after the other, and nothing beside them: such lists slow the API server down for all.
	t.Run("pods", podsFullOfText)
	t.Run("disruption budgets", budgetsFullOfText)
}

// Kubelet refuses those pods that are too many, and they stay in the list all the same.
func podsFullOfText(t *testing.T) {
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	t.Cleanup(func() {
		now := metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}
		if err := r.client.CoreV1().Pods(namespace).DeleteCollection(context.WithoutCancel(t.Context()), now, metav1.ListOptions{}); err != nil {
			t.Error(err)
		}
	})
	text := strings.Repeat("x", 1<<20)
	for i := range 64 {
		spec := r.podSpec(nil)
		spec.NodeName, spec.NodeSelector = r.Name, nil
		spec.Containers[0].Env = []corev1.EnvVar{{Name: "TEXT", Value: text}}
		if _, err := r.client.CoreV1().Pods(namespace).Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("full-%d", i)}, Spec: spec,
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	r.eachBeginning(func(requested string) {
		r.label(config.LabelMIGConfig, requested)
		r.givenBack(r.awaitConverged(requested))
	})
}

// The tenant's pod is kept by one budget, and the others are beside it.
func budgetsFullOfText(t *testing.T) {
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	t.Cleanup(func() {
		budgets := r.client.PolicyV1().PodDisruptionBudgets(namespace)
		if err := budgets.DeleteCollection(context.WithoutCancel(t.Context()), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			t.Error(err)
		}
	})
	var values []string
	for i := range 16 << 10 {
		values = append(values, fmt.Sprintf("%063d", i))
	}
	for i := range 64 {
		_, err := r.client.PolicyV1().PodDisruptionBudgets(namespace).Create(t.Context(), &policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("full-%d", i)},
			Spec: policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
				{Key: "app", Operator: metav1.LabelSelectorOpIn, Values: values},
			}}},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	held := map[string]string{"all-balanced": "nvidia.com/gpu", "all-disabled": "nvidia.com/mig-1g.10gb"} // when that is asked for
	r.eachBeginning(func(requested string) {
		pod := "train-" + requested
		r.user(namespace, pod, func(p *corev1.Pod) { p.Spec = r.podSpec(map[string]string{held[requested]: "1"}) })
		r.budget(namespace, pod, 1)
		r.awaitBudget(namespace, pod, 0)
		r.label(config.LabelMIGConfig, requested)
		r.awaitReason(config.ReasonEvictionBlocked)
		r.relax(namespace, pod)
		r.givenBack(r.awaitConverged(requested))
	})
}

// A tenant's DaemonSet that tolerates everything forbids no change, though the controller makes another pod as soon as one is evicted, and a finalizer
// keeps each.
func TestATenantsDaemonSetForbidsNoChange(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus: [{model: H100-80GB}]", "drain: {afterDeadline: delete}\n"+impatient)
	r.awaitOffered("nvidia.com/gpu", 1)
	namespace, labels := clustertest.Namespace(t), map[string]string{"app": "veto"}
	pod := r.podSpec(map[string]string{"nvidia.com/gpu": "1"})
	pod.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	if _, err := r.client.AppsV1().DaemonSets(namespace).Create(t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "veto"},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels, Finalizers: []string{"example.com/veto"}}, Spec: pod},
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	first := r.awaitPod(namespace, metav1.ListOptions{LabelSelector: "app=veto"}, running)
	r.run()
	given := r.cause()
	r.label(config.LabelMIGConfig, "all-balanced")
	given(r.awaitConverged("all-balanced"))
	evicted := r.evictions(namespace)
	if evicted[first.UID] == "" {
		t.Errorf("pod %s was not evicted: %v", first.Name, evicted)
	}
	t.Logf("%d pods of the DaemonSet were evicted", len(evicted))
}
