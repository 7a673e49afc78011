package drift_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/drift"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// served are the kinds of a cluster with Kueue and OpenShift AI.
var served = map[schema.GroupVersionResource]string{
	{Group: "kueue.x-k8s.io", Version: "v1beta2", Resource: "resourceflavors"}:             "ResourceFlavorList",
	{Group: "kueue.x-k8s.io", Version: "v1beta2", Resource: "clusterqueues"}:               "ClusterQueueList",
	{Group: "kueue.x-k8s.io", Version: "v1beta2", Resource: "localqueues"}:                 "LocalQueueList",
	{Version: "v1", Resource: "resourcequotas"}:                                            "ResourceQuotaList",
	{Group: "infrastructure.opendatahub.io", Version: "v1", Resource: "hardwareprofiles"}:  "HardwareProfileList",
	{Group: "dashboard.opendatahub.io", Version: "v1alpha1", Resource: "hardwareprofiles"}: "HardwareProfileList",
}

func object(t *testing.T, text string) runtime.Object {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatal(err)
	}
	return u
}

func node(name string, labels map[string]string, offers string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Status:     corev1.NodeStatus{Allocatable: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse(offers)}},
	}
}

func flavor(name, label string) string {
	return "{apiVersion: kueue.x-k8s.io/v1beta2, kind: ResourceFlavor, metadata: {name: " + name + "}, spec: {nodeLabels: {" + label + "}}}"
}

func queue(name, flavor, quota string) string {
	return "{apiVersion: kueue.x-k8s.io/v1beta2, kind: ClusterQueue, metadata: {name: " + name + "}, spec: {resourceGroups: [{coveredResources: [nvidia.com/gpu], " +
		"flavors: [{name: " + flavor + ", resources: [{name: nvidia.com/gpu, nominalQuota: " + quota + "}]}]}]}}"
}

func local(name, of string) string {
	return "{apiVersion: kueue.x-k8s.io/v1beta2, kind: LocalQueue, metadata: {name: " + name + ", namespace: team}, spec: {clusterQueue: " + of + "}}"
}

func profile(counts, scheduling string) string {
	return "{apiVersion: infrastructure.opendatahub.io/v1, kind: HardwareProfile, metadata: {name: p, namespace: b}, spec: {identifiers: [" +
		"{identifier: nvidia.com/gpu, displayName: GPU, " + counts + "}]" + scheduling + "}}"
}

// Pods that Kueue has admitted come to no node with a taint that they do not tolerate.
func TestAFlavorWhoseNodesAreAllClosedIsFoundOut(t *testing.T) {
	const lacks = "of its 2 nodes none is without a taint that neither its tolerations nor its nodeTaints have: what is admitted by it stays Pending; " +
		"add to its tolerations, by which Kueue has pods tolerate it: "
	team := corev1.Taint{Key: "team", Value: "a", Effect: corev1.TaintEffectNoSchedule}
	for name, row := range map[string]struct {
		flavor string        // beside its labels
		first  corev1.Taint  // of the one node
		second *corev1.Taint // of the other
		want   string
	}{
		"both":               {"", team, &team, lacks + "{key: team, operator: Exists, effect: NoSchedule}"},
		"both, by others":    {"", team, &corev1.Taint{Key: "x", Effect: corev1.TaintEffectNoExecute}, lacks + "{key: team, operator: Exists, effect: NoSchedule}; {key: x, operator: Exists, effect: NoExecute}"},
		"tolerated":          {", tolerations: [{key: team, operator: Exists}]", team, &team, ""},
		"with another value": {", tolerations: [{key: team, value: b}]", team, &team, lacks + "{key: team, operator: Exists, effect: NoSchedule}"},
		"asked of the pods":  {", nodeTaints: [{key: team, value: a, effect: NoSchedule}]", team, &team, ""},
		"one is open":        {"", team, nil, ""},
		"a wish":             {"", corev1.Taint{Key: "team", Effect: corev1.TaintEffectPreferNoSchedule}, &team, ""},
		"for a while":        {"", corev1.Taint{Key: "node.kubernetes.io/not-ready", Effect: corev1.TaintEffectNoExecute}, &team, ""},
		"being divided anew": {"", corev1.Taint{Key: "gpuslice.io/repartitioning", Effect: corev1.TaintEffectNoSchedule}, &team, ""},
	} {
		a, b := node("a", map[string]string{"pool": "x"}, "4"), node("b", map[string]string{"pool": "x"}, "4")
		a.Spec.Taints = []corev1.Taint{row.first}
		if row.second != nil {
			b.Spec.Taints = []corev1.Taint{*row.second}
		}
		f := object(t, "{apiVersion: kueue.x-k8s.io/v1beta2, kind: ResourceFlavor, metadata: {name: x}, spec: {nodeLabels: {pool: x}"+row.flavor+"}}")
		report, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset(a, b)),
			dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), served, f, object(t, queue("q", "x", "8"))))
		if err != nil {
			t.Fatal(err)
		}
		var want []drift.Finding
		if row.want != "" {
			want = []drift.Finding{{About: "ResourceFlavor x", Text: row.want}}
		}
		if diff := cmp.Diff(want, report.Findings); diff != "" {
			t.Errorf("%s: findings (-want +got):\n%s", name, diff)
		}
	}
}

func TestWhatIsPromisedIsComparedWithWhatNodesOffer(t *testing.T) {
	nodes := []runtime.Object{
		node("a", map[string]string{"pool": "x", "size": "large"}, "8"),
		node("b", map[string]string{"pool": "x", "size": "small"}, "4"),
	}
	for name, row := range map[string]struct {
		objects []string
		want    []drift.Finding
	}{
		"as much as there is": {[]string{flavor("x", "pool: x"), queue("q", "x", "12")}, nil},
		"two queues together": {
			[]string{flavor("x", "pool: x"), queue("p", "x", "8"), queue("q", "x", "8")},
			[]drift.Finding{{About: "ClusterQueues p; q", Text: "16 of nvidia.com/gpu may be admitted by flavor x, and its 2 nodes offer 12: workloads are admitted whose pods stay Pending"}},
		},
		"less than there is": {
			[]string{flavor("x", "size: large"), queue("q", "x", "6")},
			[]drift.Finding{{About: "ClusterQueue q", Idle: true, Text: "2 of nvidia.com/gpu that the 1 node of flavor x offers can be admitted by no queue"}},
		},
		"one node in two flavors": {
			[]string{flavor("x", "pool: x"), flavor("z", "size: large"), queue("p", "x", "12"), queue("q", "z", "8")},
			[]drift.Finding{{About: "ClusterQueues", Text: "20 of nvidia.com/gpu may be admitted by all flavors together, and all nodes offer 12: some nodes have the labels of several flavors"}},
		},
		"a flavor that no node has, beside others": {
			[]string{flavor("x", "pool: x"), flavor("z", "pool: none"), queue("p", "x", "12"), queue("q", "z", "8")},
			[]drift.Finding{{About: "ResourceFlavor z", Text: "no node has its labels pool=none: what is admitted by it stays Pending"}},
		},
		"a queue of a namespace": {[]string{flavor("x", "pool: x"), queue("q", "x", "12"), local("l", "q")}, nil},
		"a queue of a namespace for none": {
			[]string{local("l", "q")},
			[]drift.Finding{{About: "LocalQueue team/l", Text: "ClusterQueue q is not there: no workload of the queue is ever admitted"}},
		},
		"a hardware profile":                {[]string{profile("minCount: 1, defaultCount: 1, maxCount: 8", "")}, nil},
		"a hardware profile without a most": {[]string{profile("minCount: 1, defaultCount: 8", "")}, nil},
		"a hardware profile of more than a node has": {
			[]string{profile("minCount: 1, defaultCount: 1, maxCount: 9", "")},
			[]drift.Finding{{About: "HardwareProfile b/p", Text: "identifier nvidia.com/gpu: its workloads may ask for 9, and no node offers more than 8: lower maxCount"}},
		},
		"a hardware profile of a queue": {
			[]string{flavor("x", "pool: x"), queue("q", "x", "12"), local("l", "q"), profile("minCount: 1, defaultCount: 1, maxCount: 8", ", scheduling: {type: Queue, kueue: {localQueueName: l}}")}, nil,
		},
		"a hardware profile of no queue": {
			[]string{profile("minCount: 1, defaultCount: 1, maxCount: 8", ", scheduling: {type: Queue, kueue: {localQueueName: l}}")},
			[]drift.Finding{{About: "HardwareProfile b/p", Text: "scheduling.kueue.localQueueName is l, and no namespace has a LocalQueue of that name: its workloads are never admitted"}},
		},
		"a flavor that gives no GPUs": {
			[]string{flavor("x", "pool: none"), "{apiVersion: kueue.x-k8s.io/v1beta2, kind: ClusterQueue, metadata: {name: q}, spec: {resourceGroups: [{coveredResources: [cpu], " +
				"flavors: [{name: x, resources: [{name: cpu, nominalQuota: 8}]}]}]}}"},
			nil,
		},
		"a flavor without nodes": {
			[]string{flavor("x", "pool: none"), queue("q", "x", "1")},
			[]drift.Finding{{About: "ResourceFlavor x", Text: "no node has its labels pool=none: what is admitted by it stays Pending"}},
		},
		"more than a number holds": {
			[]string{flavor("x", "pool: x"), queue("p", "x", "9e18"), queue("q", "x", "9e18")},
			[]drift.Finding{{About: "ClusterQueues p; q", Text: "18E of nvidia.com/gpu may be admitted by flavor x, and its 2 nodes offer 12: workloads are admitted whose pods stay Pending"}},
		},
		"the group of before": {
			[]string{"{apiVersion: dashboard.opendatahub.io/v1alpha1, kind: HardwareProfile, metadata: {name: a, namespace: b}, spec: {enabled: true}}"},
			[]drift.Finding{{About: "HardwareProfile b/a", Text: "is of dashboard.opendatahub.io/v1alpha1, a group that is replaced: make it anew as infrastructure.opendatahub.io/v1"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var objects []runtime.Object
			for _, text := range row.objects {
				objects = append(objects, object(t, text))
			}
			report, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset(nodes...)), dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), served, objects...))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(row.want, report.Findings); diff != "" {
				t.Errorf("findings (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAClusterWithoutKueueHasNoQueues(t *testing.T) {
	objects := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), served)
	objects.PrependReactor("list", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if a.GetResource().Group == "" {
			return false, nil, nil
		}
		return true, nil, apierrors.NewNotFound(a.GetResource().GroupResource(), "")
	})
	report, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset()), objects)
	if diff := cmp.Diff(drift.Report{Read: map[string]int{"ResourceQuota": 0}}, report); diff != "" || err != nil {
		t.Errorf("error %v, report (-want +got):\n%s", err, diff)
	}
}

func TestWhatMayNotBeReadIsSaid(t *testing.T) {
	objects := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), served)
	refusal := errors.New("this account may not list them")
	objects.PrependReactor("list", "clusterqueues", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, refusal })
	if _, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset()), objects); !errors.Is(err, refusal) {
		t.Errorf("got %v, want that error", err)
	}
}
