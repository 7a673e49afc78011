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
