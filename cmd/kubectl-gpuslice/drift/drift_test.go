package drift_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
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

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/drift"
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

// groups gives the groups that the kinds are of.
func groups(of map[schema.GroupVersionResource]string) drift.Groups {
	return func(_ context.Context, group string) ([]string, error) {
		var versions []string
		for kind := range of {
			if kind.Group == group && !slices.Contains(versions, kind.Version) {
				versions = append(versions, kind.Version)
			}
		}
		return versions, nil
	}
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
	const lacks = "pods cannot run on its 2 nodes: each has a taint that neither its tolerations nor its nodeTaints have; admitted workloads stay Pending; " +
		"add to its tolerations, which Kueue gives to pods: "
	team := corev1.Taint{Key: "team", Value: "a", Effect: corev1.TaintEffectNoSchedule}
	for name, row := range map[string]struct {
		flavor string        // beside its labels
		first  corev1.Taint  // of the one node
		second *corev1.Taint // of the other
		want   string
	}{
		"both":                {"", team, &team, lacks + "{key: team, operator: Exists, effect: NoSchedule}"},
		"both, by others":     {"", team, &corev1.Taint{Key: "x", Effect: corev1.TaintEffectNoExecute}, lacks + "{key: team, operator: Exists, effect: NoSchedule}; {key: x, operator: Exists, effect: NoExecute}"},
		"tolerated":           {", tolerations: [{key: team, operator: Exists}]", team, &team, ""},
		"with another value":  {", tolerations: [{key: team, value: b}]", team, &team, lacks + "{key: team, operator: Exists, effect: NoSchedule}"},
		"asked of the pods":   {", nodeTaints: [{key: team, value: a, effect: NoSchedule}]", team, &team, ""},
		"one is open":         {"", team, nil, ""},
		"a request":           {"", corev1.Taint{Key: "team", Effect: corev1.TaintEffectPreferNoSchedule}, &team, ""},
		"for a while":         {"", corev1.Taint{Key: "node.kubernetes.io/not-ready", Effect: corev1.TaintEffectNoExecute}, &team, ""},
		"not ready yet":       {"", corev1.Taint{Key: "gpuslice.io/not-ready", Effect: corev1.TaintEffectNoSchedule}, &team, ""},
		"being divided again": {"", corev1.Taint{Key: "gpuslice.io/repartitioning", Effect: corev1.TaintEffectNoSchedule}, &team, ""},
	} {
		a, b := node("a", map[string]string{"pool": "x"}, "4"), node("b", map[string]string{"pool": "x"}, "4")
		a.Spec.Taints = []corev1.Taint{row.first}
		if row.second != nil {
			b.Spec.Taints = []corev1.Taint{*row.second}
		}
		f := object(t, "{apiVersion: kueue.x-k8s.io/v1beta2, kind: ResourceFlavor, metadata: {name: x}, spec: {nodeLabels: {pool: x}"+row.flavor+"}}")
		report, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset(a, b)),
			dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), served, f, object(t, queue("q", "x", "8"))), drift.Known{Groups: groups(served)})
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

// Nodes of several classes offer the same resource.
func TestAQueueWithNodesOfSeveralClassesIsFoundOut(t *testing.T) {
	labels := func(profile, more, product, strategy string) map[string]string {
		out := map[string]string{"gpuslice.io/profile": profile, "nvidia.com/gpu.product": "NVIDIA-A100" + product, "nvidia.com/gpu.sharing-strategy": strategy}
		if key, value, is := strings.Cut(more, "="); is {
			out[key] = value
		}
		return out
	}
	shared, isolated := node("shared", labels("research", "", "-SHARED", "time-slicing"), "24"), node("isolated", labels("critical", "", "-MIG-2g.20gb", "none"), "24")
	tainted := shared.DeepCopy()
	tainted.Spec.Taints = []corev1.Taint{{Key: "team", Value: "a", Effect: corev1.TaintEffectNoSchedule}}
	fenced := node("fenced", labels("critical", "", "-SHARED", "time-slicing"), "24")
	fenced.Spec.Taints = []corev1.Taint{{Key: "gpuslice.io/repartitioning", Effect: corev1.TaintEffectNoSchedule}}
	undone := node("undone", labels("critical", "nvidia.com/mig.config.state=failed", "-SHARED", "time-slicing"), "24")
	of := func(flavors ...string) string {
		var all []string
		for _, name := range flavors {
			all = append(all, "{name: "+name+", resources: [{name: nvidia.com/gpu, nominalQuota: 24}]}")
		}
		return "{apiVersion: kueue.x-k8s.io/v1beta2, kind: ClusterQueue, metadata: {name: gpus}, spec: {resourceGroups: [{coveredResources: [nvidia.com/gpu], flavors: [" + strings.Join(all, ",") + "]}]}}"
	}
	const two = "nvidia.com/gpu is MIG 2g.20gb by %; shared by "
	for name, row := range map[string]struct {
		nodes   []runtime.Object
		objects []string
		want    string
	}{
		"two flavors": {
			[]runtime.Object{shared, isolated},
			[]string{flavor("r", "gpuslice.io/profile: research"), flavor("c", "gpuslice.io/profile: critical"), of("r", "c")},
			strings.Replace(two, "%", "c", 1) + "r: a pod that is to have one may get the other; make ClusterQueues of one class, and one of each MIG pool; these nodes share: shared by nvidia.com/gpu.sharing-strategy=time-slicing",
		},
		"nodes with a taint that the flavor does not tolerate": {
			[]runtime.Object{tainted, isolated},
			[]string{flavor("r", "gpuslice.io/profile: research"), flavor("c", "gpuslice.io/profile: critical"), of("r", "c")},
			"",
		},
		"a hardware profile of any node": {
			[]runtime.Object{shared, isolated},
			[]string{profile("minCount: 1, defaultCount: 1", "")},
			strings.Replace(two, "%", "p", 1) + "p: a pod that is to have one may get the other; the labels of p select nodes of several classes: ",
		},
		"a hardware profile of a pool": {
			[]runtime.Object{shared, isolated}, []string{profile("minCount: 1, defaultCount: 1", ", scheduling: {type: Node, node: {nodeSelector: {gpuslice.io/profile: critical}}}")}, "",
		},
		"a hardware profile that does not tolerate the taint of the others": {
			[]runtime.Object{tainted, isolated}, []string{profile("minCount: 1, defaultCount: 1", ", scheduling: {type: Node, node: {tolerations: []}}")}, "",
		},
		"a hardware profile of a queue": {
			[]runtime.Object{shared, isolated}, []string{profile("minCount: 1, defaultCount: 1", ", scheduling: {type: Queue, kueue: {localQueueName: l}}")}, "",
		},
		"a node that is being changed, behind its fence": {
			[]runtime.Object{fenced, isolated}, []string{flavor("c", "gpuslice.io/profile: critical"), of("c")}, "",
		},
		"a queue of each": {
			[]runtime.Object{shared, isolated},
			[]string{flavor("r", "gpuslice.io/profile: research"), flavor("c", "gpuslice.io/profile: critical"), of("r"), strings.Replace(of("c"), "name: gpus", "name: other", 1)},
			"",
		},
		"a node that was given back as it was": {
			[]runtime.Object{isolated, undone},
			[]string{flavor("c", "gpuslice.io/profile: critical"), of("c")},
			strings.Replace(two, "%", "c", 1) + "c: a pod that is to have one may get the other; the labels of c select nodes of several classes: ",
		},
		"what a cohort lends": {
			[]runtime.Object{shared, isolated},
			[]string{
				flavor("r", "gpuslice.io/profile: research"), flavor("c", "gpuslice.io/profile: critical"),
				strings.NewReplacer("24}", "0}", "{resourceGroups", "{cohortName: all, resourceGroups").Replace(of("r", "c")),
			},
			strings.Replace(two, "%", "c", 1) + "r: ",
		},
		"the same, kept off by its state": {
			[]runtime.Object{node("isolated", labels("critical", "nvidia.com/mig.config.state=success", "-MIG-2g.20gb", "none"), "24"), undone},
			[]string{flavor("c", "gpuslice.io/profile: critical, nvidia.com/mig.config.state: success"), of("c")},
			"",
		},
		"a flavor that is not there, and nodes that offer none": {
			[]runtime.Object{shared, node("isolated", isolated.Labels, "0")}, []string{flavor("r", "gpuslice.io/profile: research"), flavor("c", "gpuslice.io/profile: critical"), of("r", "c", "gone")}, "",
		},
	} {
		for version, kueue := range map[string]*strings.Replacer{"v1beta2": strings.NewReplacer(), "v1beta1": strings.NewReplacer("v1beta2", "v1beta1", "cohortName", "cohort")} {
			var objects []runtime.Object
			for _, text := range row.objects {
				objects = append(objects, object(t, kueue.Replace(text)))
			}
			in := map[schema.GroupVersionResource]string{}
			for kind, list := range served {
				kind.Version = kueue.Replace(kind.Version)
				in[kind] = list
			}
			report, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset(row.nodes...)),
				dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), in, objects...), drift.Known{Groups: groups(in)})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range report.Findings {
				if f.Mixed {
					got = append(got, f.About+": "+f.Text)
				}
			}
			if text := strings.Join(got, "\n"); row.want == "" && text != "" || row.want != "" && !strings.HasPrefix(strings.NewReplacer("ClusterQueue gpus: ", "", "HardwareProfile b/p: ", "").Replace(text), row.want) {
				t.Errorf("%s in %s: mixed are %q, want %q", name, version, text, row.want)
			}
		}
	}
}

// A change of GPUs that NVIDIA's DRA driver allocates sets no taint.
func TestWhichNodesAreChanging(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		taint, journal string
		want           []string
	}{
		"none":                    {"team", "", nil},
		"fenced by a taint":       {"gpuslice.io/repartitioning", "", []string{"a"}},
		"fenced by a cordon":      {"node.kubernetes.io/unschedulable", `{"version":1,"cordoned":true}`, []string{"a"}},
		"devices that are closed": {"team", `{"version":1,"cordoned":false,"closed":["gpu-0"]}`, []string{"a"}},
		"released until a reboot": {"team", `{"version":1,"cordoned":false,"parked":true}`, nil},
		"no journal":              {"team", `{"cordoned":`, nil},
		"endless":                 {"team", `{"cordoned":true,"target":"` + strings.Repeat("a", 256<<10) + `"}`, nil},
	} {
		a := node("a", nil, "4")
		a.Spec.Taints = []corev1.Taint{{Key: row.taint, Effect: corev1.TaintEffectNoSchedule}}
		a.Annotations = map[string]string{"gpuslice.io/journal": row.journal}
		report, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset(a)),
			dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), served), drift.Known{Groups: groups(served)})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(row.want, report.Changing); diff != "" {
			t.Errorf("%s: changing (-want +got):\n%s", name, diff)
		}
	}
}

func TestWhatIsPromisedIsComparedWithWhatNodesOffer(t *testing.T) {
	nodes := []runtime.Object{
		node("a", map[string]string{"pool": "x", "size": "large", "in": "v"}, "8"),
		node("b", map[string]string{"pool": "x", "size": "small", "nvidia.com/mig.config.state": "failed"}, "4"),
		node("c", map[string]string{"in": "v"}, "1"),
	}
	for name, row := range map[string]struct {
		objects []string
		want    []drift.Finding
	}{
		"as much as there is": {[]string{flavor("x", "pool: x"), queue("q", "x", "12")}, nil},
		"two queues together": {
			[]string{flavor("x", "pool: x"), queue("p", "x", "8"), queue("q", "x", "8")},
			[]drift.Finding{{About: "ClusterQueues p; q", Text: "16 of nvidia.com/gpu may be admitted by flavor x, and its 2 nodes offer 12: pods of admitted workloads stay Pending"}},
		},
		"less than there is": {
			[]string{flavor("x", "size: large"), queue("q", "x", "6")},
			[]drift.Finding{{About: "ClusterQueue q", Idle: true, Text: "2 of nvidia.com/gpu that the 1 node of flavor x offers can be admitted by no queue"}},
		},
		"one node in two flavors": {
			[]string{flavor("x", "pool: x"), flavor("z", "size: large"), queue("p", "x", "12"), queue("q", "z", "8")},
			[]drift.Finding{{About: "ClusterQueues p; q", Text: "20 of nvidia.com/gpu may be admitted by flavors x; z together, and the 2 nodes of flavor x offer 12: some nodes have the labels of several flavors"}},
		},
		"one node in two flavors, beside a node in none": {
			[]string{flavor("w", "size: large, pool: x"), flavor("z", "size: large"), queue("p", "w", "8"), queue("q", "z", "4")},
			[]drift.Finding{
				{About: "ClusterQueue q", Idle: true, Text: "4 of nvidia.com/gpu that the 1 node of flavor z offers can be admitted by no queue"},
				{About: "ClusterQueues p; q", Text: "12 of nvidia.com/gpu may be admitted by flavors w; z together, and the 1 node of flavor w offers 8: some nodes have the labels of several flavors"},
			},
		},
		"flavors that have some nodes in common": {
			[]string{flavor("x", "pool: x"), flavor("w", "in: v"), queue("p", "x", "12"), queue("q", "w", "9")},
			[]drift.Finding{{About: "ClusterQueues p; q", Text: "21 of nvidia.com/gpu may be admitted by all flavors together, and all nodes offer 13: some nodes have the labels of several flavors"}},
		},
		"a flavor that no node has, beside others": {
			[]string{flavor("x", "pool: x"), flavor("z", "pool: none"), queue("p", "x", "12"), queue("q", "z", "8")},
			[]drift.Finding{{About: "ResourceFlavor z", Text: "no node has its labels pool=none: admitted workloads stay Pending; if an autoscaler creates its nodes on demand, say --autoscaled z"}},
		},
		"a node that could not be changed": {
			[]string{flavor("x", "pool: x, nvidia.com/mig.config.state: success"), queue("q", "x", "12")},
			[]drift.Finding{{About: "ClusterQueue q", Text: "12 of nvidia.com/gpu may be admitted by flavor x, and its 1 node offers 8: pods of admitted workloads stay Pending"}},
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
			[]drift.Finding{{About: "ResourceFlavor x", Text: "no node has its labels pool=none: admitted workloads stay Pending; if an autoscaler creates its nodes on demand, say --autoscaled x"}},
		},
		"more than a number holds": {
			[]string{flavor("x", "pool: x"), queue("p", "x", "9e18"), queue("q", "x", "9e18")},
			[]drift.Finding{{About: "ClusterQueues p; q", Text: "18E of nvidia.com/gpu may be admitted by flavor x, and its 2 nodes offer 12: pods of admitted workloads stay Pending"}},
		},
		"the group of before": {
			[]string{"{apiVersion: dashboard.opendatahub.io/v1alpha1, kind: HardwareProfile, metadata: {name: a, namespace: b}, spec: {enabled: true}}"},
			[]drift.Finding{{About: "HardwareProfile b/a", Text: "is of dashboard.opendatahub.io/v1alpha1, a group that is replaced: make it again as infrastructure.opendatahub.io/v1"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var objects []runtime.Object
			for _, text := range row.objects {
				objects = append(objects, object(t, text))
			}
			report, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset(nodes...)), dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), served, objects...), drift.Known{Groups: groups(served)})
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
	report, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset()), objects, drift.Known{Groups: groups(served)})
	if diff := cmp.Diff(drift.Report{Read: map[string]int{"ResourceQuota": 0}}, report); diff != "" || err != nil {
		t.Errorf("error %v, report (-want +got):\n%s", err, diff)
	}
}

func TestWhatMayNotBeReadIsSaid(t *testing.T) {
	objects := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), served)
	refusal := errors.New("this account may not list them")
	objects.PrependReactor("list", "clusterqueues", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, refusal })
	if _, err := drift.Find(t.Context(), clientset.Of(fake.NewClientset()), objects, drift.Known{Groups: groups(served)}); !errors.Is(err, refusal) {
		t.Errorf("got %v, want that error", err)
	}
}

// An autoscaler makes nodes when they are needed: what has fewer than are promised for, or none, is right.
func TestPoolsThatAreAutoscaledMayBeEmpty(t *testing.T) {
	quota := "{apiVersion: v1, kind: ResourceQuota, metadata: {name: q, namespace: team}, spec: {hard: {requests.nvidia.com/gpu: 20}}}"
	wants := func(selector string) string {
		return profile("minCount: 1, defaultCount: 1", ", scheduling: {type: Node, node: {nodeSelector: {"+selector+"}}}")
	}
	for name, row := range map[string]struct {
		objects    []string
		autoscaled []string
		want       []string // with drift or idle before it
		err        string
	}{
		"no node": {
			objects: []string{flavor("z", "pool: none"), queue("q", "z", "8")}, autoscaled: []string{"z"},
			want: []string{"idle ResourceFlavor z: no node has its labels pool=none at the moment: admitted workloads wait for nodes that an autoscaler creates"},
		},
		"some nodes": {
			objects: []string{flavor("x", "pool: x"), queue("q", "x", "40")}, autoscaled: []string{"x"},
			want: []string{"idle ClusterQueue q: 40 of nvidia.com/gpu may be admitted by flavor x, and its 2 nodes offer 12 at the moment: the rest waits for nodes that an autoscaler makes"},
		},
		"nodes that offer something else": {
			objects: []string{flavor("x", "pool: x"), strings.ReplaceAll(queue("q", "x", "40"), "nvidia.com/gpu", "nvidia.com/mig-1g.10gb")}, autoscaled: []string{"x"},
			want: []string{"drift ClusterQueue q: 40 of nvidia.com/mig-1g.10gb may be admitted by flavor x, and its 2 nodes offer 0: pods of admitted workloads stay Pending"},
		},
		"another": {
			objects: []string{flavor("x", "pool: x"), flavor("z", "pool: none"), queue("q", "x", "12"), queue("r", "z", "8")}, autoscaled: []string{"x"},
			want: []string{"drift ResourceFlavor z: no node has its labels pool=none: admitted workloads stay Pending; if an autoscaler creates its nodes on demand, say --autoscaled z"},
		},
		"a quota of what comes": {
			objects: []string{flavor("x", "pool: x"), flavor("z", "pool: none"), queue("q", "x", "12"), queue("r", "z", "8"), quota}, autoscaled: []string{"z"},
			want: []string{
				"idle ResourceFlavor z: no node has its labels pool=none at the moment: admitted workloads wait for nodes that an autoscaler creates",
				"idle ResourceQuota team/q: requests.nvidia.com/gpu allows 20, and all nodes offer 12 at the moment: queues promise 8 more of nodes that an autoscaler makes",
			},
		},
		"a quota of more": {
			objects: []string{flavor("x", "pool: x"), queue("q", "x", "12"), quota}, autoscaled: []string{"x"},
			want: []string{"drift ResourceQuota team/q: requests.nvidia.com/gpu allows 20, and all nodes offer 12"},
		},
		"a hardware profile": {
			objects: []string{wants("pool: none")}, autoscaled: []string{"p"},
			want: []string{"idle HardwareProfile b/p: identifier nvidia.com/gpu: no node with its labels pool=none offers it at the moment: its workloads wait for nodes that an autoscaler makes"},
		},
		"a hardware profile of the flavor's nodes": {
			objects: []string{flavor("z", "pool: none, size: s"), queue("q", "z", "8"), wants("pool: none")}, autoscaled: []string{"z"},
			want: []string{
				"idle ResourceFlavor z: no node has its labels pool=none,size=s at the moment: admitted workloads wait for nodes that an autoscaler creates",
				"idle HardwareProfile b/p: identifier nvidia.com/gpu: no node with its labels pool=none offers it at the moment: its workloads wait for nodes that an autoscaler makes",
			},
		},
		"a hardware profile of other nodes": {
			objects: []string{flavor("z", "pool: none"), queue("q", "z", "8"), wants("pool: other")}, autoscaled: []string{"z"},
			want: []string{
				"idle ResourceFlavor z: no node has its labels pool=none at the moment: admitted workloads wait for nodes that an autoscaler creates",
				"drift HardwareProfile b/p: identifier nvidia.com/gpu: no node with its labels pool=other offers it",
			},
		},
		"a name that nothing has": {
			objects: []string{flavor("x", "pool: x")}, autoscaled: []string{"z"}, err: `flag --autoscaled is "z": the cluster has no ResourceFlavor or HardwareProfile of that name`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			var objects []runtime.Object
			for _, text := range row.objects {
				objects = append(objects, object(t, text))
			}
			nodes := fake.NewClientset(node("a", map[string]string{"pool": "x"}, "8"), node("b", map[string]string{"pool": "x"}, "4"))
			report, err := drift.Find(t.Context(), clientset.Of(nodes), dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), served, objects...),
				drift.Known{Groups: groups(served), Autoscaled: row.autoscaled})
			if row.err != "" && (err == nil || err.Error() != row.err) || row.err == "" && err != nil {
				t.Fatalf("error %v, want %q", err, row.err)
			}
			if diff := cmp.Diff(row.want, said(report)); diff != "" {
				t.Errorf("findings (-want +got):\n%s", diff)
			}
		})
	}
}

func said(r drift.Report) (out []string) {
	for _, f := range r.Findings {
		verdict := "drift "
		if f.Idle {
			verdict = "idle "
		}
		out = append(out, verdict+f.About+": "+f.Text)
	}
	return out
}

// A cluster with an older Kueue or OpenShift AI promises as much as one with a new one.
func TestOlderVersionsAreReadOrAnError(t *testing.T) {
	in := func(version, text string) string {
		return strings.ReplaceAll(strings.ReplaceAll(text, "kueue.x-k8s.io/v1beta2", version), "infrastructure.opendatahub.io/v1,", version+",")
	}
	serving := func(from, to string) map[schema.GroupVersionResource]string {
		out := maps.Clone(served)
		for kind, list := range served {
			if kind.GroupVersion().String() != from {
				continue
			}
			delete(out, kind)
			if group, version, there := strings.Cut(to, "/"); there {
				out[schema.GroupVersionResource{Group: group, Version: version, Resource: kind.Resource}] = list
			}
		}
		return out
	}
	const kueue, infra = "kueue.x-k8s.io/v1beta2", "infrastructure.opendatahub.io/v1"
	const board, olderKueue, olderInfra = "dashboard.opendatahub.io/v1alpha1", "kueue.x-k8s.io/v1beta1", "infrastructure.opendatahub.io/v1alpha1"
	const many = "drift HardwareProfile b/p: identifier nvidia.com/gpu: its workloads may ask for 9, and no node offers more than 8: lower maxCount"
	const none = "drift HardwareProfile b/p: identifier nvidia.com/gpu: no node with its labels pool=none offers it"
	for name, row := range map[string]struct {
		served  map[schema.GroupVersionResource]string
		objects []string
		older   []string
		want    []string
		err     string
	}{
		"Kueue before 0.15": {
			served: serving(kueue, olderKueue), objects: []string{in(olderKueue, flavor("x", "pool: x")), in(olderKueue, queue("q", "x", "9")), in(olderKueue, local("l", "none"))},
			older: []string{"kueue.x-k8s.io/v1beta1 (kueue.x-k8s.io/v1beta2 needs Kueue 0.15 or newer)"},
			want: []string{
				"drift ClusterQueue q: 9 of nvidia.com/gpu may be admitted by flavor x, and its 1 node offers 8: pods of admitted workloads stay Pending",
				"drift LocalQueue team/l: ClusterQueue none is not there: no workload of the queue is ever admitted",
			},
		},
		"a Kueue that is older still": {
			served: serving(kueue, "kueue.x-k8s.io/v1alpha2"),
			err: "the cluster serves the API group kueue.x-k8s.io in v1alpha2 alone, and gpuslice-agent reads it in v1beta2; v1beta1: cannot compare what its objects promise; " +
				"kueue.x-k8s.io/v1beta2 needs Kueue 0.15 or newer; a newer gpuslice-agent may read newer versions",
		},
		"a hardware profile of before v1": {
			served: serving(infra, olderInfra), objects: []string{in(olderInfra, profile("minCount: 1, defaultCount: 9", ""))},
			older: []string{"infrastructure.opendatahub.io/v1alpha1 (infrastructure.opendatahub.io/v1 needs OpenShift AI 3.0 or newer)"}, want: []string{many},
		},
		"a hardware profile of the dashboard, without others": {
			served: serving(infra, ""), objects: []string{in(board, profile("minCount: 1, defaultCount: 1", ", enabled: true, nodeSelector: {pool: none}"))}, want: []string{none},
		},
		"one that is off": {
			served: serving(infra, ""), objects: []string{in(board, profile("minCount: 1, defaultCount: 9", ", enabled: false"))},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var objects []runtime.Object
			for _, text := range row.objects {
				objects = append(objects, object(t, text))
			}
			client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), row.served, objects...)
			client.PrependReactor("list", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
				if _, there := row.served[a.GetResource()]; there {
					return false, nil, nil
				}
				return true, nil, apierrors.NewNotFound(a.GetResource().GroupResource(), "")
			})
			nodes := clientset.Of(fake.NewClientset(node("a", map[string]string{"pool": "x"}, "8")))
			report, err := drift.Find(t.Context(), nodes, client, drift.Known{Groups: groups(row.served)})
			if row.err != "" && (err == nil || err.Error() != row.err) || row.err == "" && err != nil {
				t.Fatalf("error %v, want %q", err, row.err)
			}
			if diff := cmp.Diff(row.want, said(report)); diff != "" {
				t.Errorf("findings (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(row.older, report.Older); diff != "" {
				t.Errorf("older (-want +got):\n%s", diff)
			}
		})
	}
}
