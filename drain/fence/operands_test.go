package fence_test

import (
	"context"
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

const (
	deployExporter = "nvidia.com/gpu.deploy.dcgm-exporter"
	deployDCGM     = "nvidia.com/gpu.deploy.dcgm"
	deployClient   = "nvidia.com/gpu.deploy.client"
	deployPlugin   = "nvidia.com/gpu.deploy.device-plugin"
)

func labelled(labels map[string]string) func(*corev1.Node) {
	return func(n *corev1.Node) {
		if n.Labels == nil {
			n.Labels = map[string]string{}
		}
		maps.Copy(n.Labels, labels)
	}
}

func TestOperandsAreListedInTheOrderInWhichTheyArePaused(t *testing.T) {
	n := node(labelled(map[string]string{
		deployPlugin:   "true",
		deployExporter: "paused-for-gpuslice",
		deployDCGM:     "paused-for-driver-upgrade",
		deployClient:   "false",
		"nvidia.com/gpu.deploy.gpu-feature-discovery": "paused-for-mig-change",
		"nvidia.com/gpu.deploy.nvsm":                  "",
		"nvidia.com/gpu.deploy.mig-manager":           "paused-for-gpuslice_paused-for-driver-upgrade",
		"nvidia.com/gpu.deploy.driver":                "true",
	}))
	got := fence.Operands(n, nil, []string{
		deployExporter, deployDCGM, deployClient, "nvidia.com/gpu.deploy.gpu-feature-discovery", "nvidia.com/gpu.deploy.nvsm",
		"nvidia.com/gpu.deploy.mig-manager", "nvidia.com/gpu.deploy.dcgm-dra", deployPlugin,
	})
	want := []fence.Operand{
		{Label: deployExporter, Value: "paused-for-gpuslice", State: fence.OperandPaused},
		{Label: deployDCGM, Value: "paused-for-driver-upgrade", State: fence.OperandForeign},
		{Label: deployClient, Value: "false", State: fence.OperandForeign},
		{Label: "nvidia.com/gpu.deploy.gpu-feature-discovery", Value: "paused-for-mig-change", State: fence.OperandForeign},
		{Label: "nvidia.com/gpu.deploy.nvsm", Value: "", State: fence.OperandForeign},
		{Label: "nvidia.com/gpu.deploy.mig-manager", Value: "paused-for-gpuslice_paused-for-driver-upgrade", State: fence.OperandForeign},
		{Label: deployPlugin, Value: "true", State: fence.OperandRunning},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Operands (-want +got):\n%s", diff)
	}
}

// operandPod is a pod as the GPU Operator's DaemonSets make them, unless it is changed.
func operandPod(name string, selector map[string]string, change ...func(*corev1.Pod)) corev1.Pod {
	yes := true
	p := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "gpu-operator", Name: name, UID: types.UID(name),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "ds", Controller: &yes}},
		},
		Spec:   corev1.PodSpec{NodeName: "n1", NodeSelector: selector},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, c := range change {
		c(&p)
	}
	return p
}

func requires(terms ...corev1.NodeSelectorTerm) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: terms},
		}}
	}
}

func term(requirements ...corev1.NodeSelectorRequirement) corev1.NodeSelectorTerm {
	return corev1.NodeSelectorTerm{
		MatchExpressions: requirements,
		// The DaemonSet controller adds this to each term.
		MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"n1"}}},
	}
}

func expression(key string, operator corev1.NodeSelectorOperator, values ...string) corev1.NodeSelectorRequirement {
	return corev1.NodeSelectorRequirement{Key: key, Operator: operator, Values: values}
}

func TestOperandsHaveThePodsThatGoWhenTheirLabelIsPaused(t *testing.T) {
	for _, c := range []struct {
		name string
		pod  corev1.Pod
		want bool
	}{
		{"the device plugin", operandPod("a", map[string]string{deployPlugin: "true"}), true},
		{"the MPS control daemon, by the same label", operandPod("a", map[string]string{deployPlugin: "true", "nvidia.com/mps.capable": "true"}), true},
		{"another operand", operandPod("a", map[string]string{deployDCGM: "true"}), false},
		{"a validation, which selects nothing", operandPod("a", nil), false},
		{"one that ended", operandPod("a", map[string]string{deployPlugin: "true"}, func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), false},
		{"a Deployment's, which no one takes away", operandPod("a", map[string]string{deployPlugin: "true"}, func(p *corev1.Pod) {
			p.OwnerReferences[0].Kind = "ReplicaSet"
		}), false},
		{"by affinity", operandPod("a", nil, requires(term(expression(deployPlugin, corev1.NodeSelectorOpIn, "true")))), true},
		{"by affinity in every term", operandPod("a", nil, requires(
			term(expression(deployPlugin, corev1.NodeSelectorOpIn, "true"), expression("zone", corev1.NodeSelectorOpIn, "a")),
			term(expression(deployPlugin, corev1.NodeSelectorOpNotIn, "paused-for-gpuslice")),
		)), true},
		{"by affinity with another way in", operandPod("a", nil, requires(
			term(expression(deployPlugin, corev1.NodeSelectorOpIn, "true")), term(expression("zone", corev1.NodeSelectorOpIn, "a")),
		)), false},
		{"by affinity that is met while paused: exists", operandPod("a", nil, requires(term(expression(deployPlugin, corev1.NodeSelectorOpExists)))), false},
		{"by affinity that is met while paused: not false", operandPod("a", nil, requires(term(expression(deployPlugin, corev1.NodeSelectorOpNotIn, "false")))), false},
		{"by affinity that is met while paused: ours", operandPod("a", nil, requires(
			term(expression(deployPlugin, corev1.NodeSelectorOpIn, "true", "paused-for-gpuslice")),
		)), false},
		{"by affinity to a number", operandPod("a", nil, requires(term(expression(deployPlugin, corev1.NodeSelectorOpGt, "1")))), true},
		{"by a preference", operandPod("a", nil, func(p *corev1.Pod) { p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{}} }), false},
		{"by affinity to pods", operandPod("a", nil, func(p *corev1.Pod) { p.Spec.Affinity = &corev1.Affinity{} }), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			// The effect of a pause does not depend on the present value of the label.
			for _, value := range []string{"true", "paused-for-gpuslice", "false"} {
				o := fence.Operands(node(labelled(map[string]string{deployPlugin: value})), []corev1.Pod{c.pod}, []string{deployPlugin})[0]
				if got := len(o.Pods) == 1 && o.Pods[0].UID == c.pod.UID; got != c.want || len(o.Pods) > 1 {
					t.Errorf("with %s=%s the pods are %v; listed is %v, want %v", deployPlugin, value, o.Pods, got, c.want)
				}
			}
		})
	}
}

func TestSetLabelsIsGuardedAndWritesNothingElse(t *testing.T) {
	n := node(cordoned, labelled(map[string]string{deployPlugin: "true", "team": "ml"}))
	got, err := fence.SetLabels(n, map[string]string{deployPlugin: "paused-for-gpuslice"})
	if err != nil {
		t.Fatal(err)
	}
	want := `{"metadata":{"uid":"u1","resourceVersion":"7","labels":{"nvidia.com/gpu.deploy.device-plugin":"paused-for-gpuslice"}}}`
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("patch (-want +got):\n%s", diff)
	}
	if _, err := fence.SetLabels(&corev1.Node{}, map[string]string{deployPlugin: "true"}); err == nil {
		t.Error("a node that was not read from the API server is labelled without a guard")
	}
}

func TestLeftPausedAreOperandsOfThatValueAlone(t *testing.T) {
	n := node(labelled(map[string]string{
		deployPlugin: "paused-for-gpuslice", deployDCGM: "paused-for-gpuslice", deployExporter: "true",
		deployClient:                        "paused-for-mig-change",
		"nvidia.com/gpu.deploy.mig-manager": "paused-for-gpuslice_paused-for-driver-upgrade",
		"nvidia.com/gpu.deploy.another":     "paused-for-gpuslice",
		"example.com/other":                 "paused-for-gpuslice",
	}))
	operands := []string{deployPlugin, deployExporter, deployDCGM, deployClient, deployDCGM, "nvidia.com/gpu.deploy.mig-manager"}
	if diff := cmp.Diff([]string{deployDCGM, deployPlugin}, fence.LeftPaused(n, operands, fence.PausedValue)); diff != "" {
		t.Errorf("left by us (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{deployClient}, fence.LeftPaused(n, operands, "paused-for-mig-change")); diff != "" {
		t.Errorf("left by mig-manager (-want +got):\n%s", diff)
	}
	if left := fence.LeftPaused(node(), operands, fence.PausedValue); len(left) > 0 {
		t.Errorf("left on a node without labels: %v, want none", left)
	}
}

// change applies what a patch is made of until the API server accepts it, as the agent does.
func change(t *testing.T, client kubernetes.Interface, name string, patch func(*corev1.Node) ([]byte, error)) {
	t.Helper()
	clustertest.Eventually(t, "a patch is accepted", func(ctx context.Context) (bool, error) {
		p, err := patch(readNode(ctx, t, client, name))
		if err != nil {
			return false, err
		}
		_, err = patchNode(ctx, client, name, "agent", string(p))
		if apierrors.IsConflict(err) {
			return false, nil
		}
		return err == nil, err
	})
}

func label(key, value string) func(*corev1.Node) ([]byte, error) {
	return func(n *corev1.Node) ([]byte, error) { return fence.SetLabels(n, map[string]string{key: value}) }
}

// daemons runs a DaemonSet for each name, that selects nodes as given, and returns their namespace.
func daemons(t *testing.T, client kubernetes.Interface, selectors map[string]map[string]string) string {
	t.Helper()
	namespace := clustertest.Namespace(t)
	for name, selector := range selectors {
		labels := map[string]string{"app": name}
		_, err := client.AppsV1().DaemonSets(namespace).Create(t.Context(), &appsv1.DaemonSet{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: appsv1.DaemonSetSpec{
				Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
					NodeSelector: selector, Containers: []corev1.Container{{Name: "main", Image: "none"}},
				}},
			},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	return namespace
}

func TestClusterOperandsGoWhenTheirLabelIsPausedAndComeBackToACordonedNode(t *testing.T) {
	client := clustertest.Client(t)
	name := clustertest.Node(t).Name
	const room = `{"status":{"capacity":{"pods":"9"},"allocatable":{"pods":"9"}}}`
	if _, err := client.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, []byte(room), metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	const only = "example.io/node"
	mine := func(labels map[string]string) map[string]string {
		labels[only] = name // other tests have nodes in this cluster too
		return labels
	}
	mustPatchNode(t, client, name, "operator", `{"metadata":{"labels":{"`+only+`":"`+name+`","`+deployPlugin+`":"true","`+deployDCGM+`":"true","nvidia.com/mps.capable":"true"}}}`)
	namespace := daemons(t, client, map[string]map[string]string{
		"plugin": mine(map[string]string{deployPlugin: "true"}),
		"mps":    mine(map[string]string{deployPlugin: "true", "nvidia.com/mps.capable": "true"}),
		"dcgm":   mine(map[string]string{deployDCGM: "true"}),
	})
	operandsNow := func(ctx context.Context) map[string]fence.Operand {
		list, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + name})
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]fence.Operand{}
		for _, o := range fence.Operands(readNode(ctx, t, client, name), list.Items, []string{deployDCGM, deployPlugin}) {
			out[o.Label] = o
		}
		return out
	}
	runs := func(what string, plugin, dcgm int, state fence.OperandState) (now map[string]fence.Operand) {
		t.Helper()
		clustertest.Eventually(t, what, func(ctx context.Context) (bool, error) {
			now = operandsNow(ctx)
			return len(now[deployPlugin].Pods) == plugin && len(now[deployDCGM].Pods) == dcgm && now[deployPlugin].State == state, nil
		})
		return now
	}
	before := runs("the operands run", 2, 1, fence.OperandRunning)

	change(t, client, name, raise)
	change(t, client, name, label(deployPlugin, fence.PausedValue))
	clustertest.Eventually(t, "the plugin and the MPS control daemon are on their way out", func(ctx context.Context) (bool, error) {
		pods := operandsNow(ctx)[deployPlugin].Pods
		return len(pods) == 2 && pods[0].Terminating && pods[1].Terminating, nil
	})
	for _, p := range before[deployPlugin].Pods { // as kubelet does when their containers have ended
		now := int64(0)
		if err := client.CoreV1().Pods(namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
			t.Fatal(err)
		}
	}
	paused := runs("they are gone", 0, 1, fence.OperandPaused)
	if diff := cmp.Diff(before[deployDCGM], paused[deployDCGM]); diff != "" {
		t.Errorf("the operand that was not paused (-before +after):\n%s", diff)
	}

	change(t, client, name, theFence.Open)
	change(t, client, name, label(deployPlugin, "true"))
	after := runs("they are back", 2, 1, fence.OperandRunning)
	for _, p := range after[deployPlugin].Pods {
		if p.UID == before[deployPlugin].Pods[0].UID || p.UID == before[deployPlugin].Pods[1].UID {
			t.Errorf("%s was never away", p)
		}
	}
	if n := readNode(t.Context(), t, client, name); !n.Spec.Unschedulable {
		t.Error("the node is not cordoned any more, so this shows nothing")
	}
}
