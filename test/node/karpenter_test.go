package node_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// machineTypes are those of the simulated cloud: the one of deploy/examples/karpenter.yaml, in two zones.
const machineTypes = `[{"name": "p4de.24xlarge", "architecture": "amd64", "operatingSystems": ["linux"],
  "resources": {"cpu": "96", "memory": "1152Gi", "ephemeral-storage": "1Ti", "nvidia.com/gpu": "8"},
  "offerings": [
    {"Price": 27, "Requirements": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                                   {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["zone-a"]}]},
    {"Price": 28, "Requirements": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                                   {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["zone-b"]}]}]}]`

// karpenter runs beside a control plane of its own, and adds nodes to it.
type karpenter struct {
	t         *testing.T
	cluster   *cluster.Cluster
	client    kubernetes.Interface
	objects   dynamic.Interface
	namespace string
	catalog   string // ConfigMap with the profiles of the examples, of the MIG strategy mixed

	promised *promises
}

// promises are all NodeClaims that there ever were, by name.
type promises struct {
	mu     sync.Mutex
	claims map[string]*nodeClaim
}

// nodeClaim is what the tests read of Karpenter's promise of a node.
type nodeClaim struct {
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		Resources corev1.ResourceRequirements `json:"resources"`
	} `json:"spec"`
	Status struct {
		NodeName   string             `json:"nodeName"`
		Conditions []metav1.Condition `json:"conditions"`
	} `json:"status"`
}

func (c *nodeClaim) condition(kind string) metav1.Condition {
	for _, condition := range c.Status.Conditions {
		if condition.Type == kind {
			return condition
		}
	}
	return metav1.Condition{}
}

func (c *nodeClaim) pool() string { return c.Labels["karpenter.sh/nodepool"] }

func resourceOf(plural string) schema.GroupVersionResource {
	version := map[string]string{"nodeoverlays": "v1alpha1"}[plural]
	if version == "" {
		version = "v1"
	}
	return schema.GroupVersionResource{Group: "karpenter.sh", Version: version, Resource: plural}
}

func startKarpenter(t *testing.T) *karpenter {
	t.Helper()
	programs, err := binaries.Builder{Log: os.Stderr}.Karpenter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := clustertest.Apart(t, "karpenter") // it reads the pods and nodes of the whole cluster
	build(t)
	if err := deploy(c); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	types, class := filepath.Join(dir, "types.json"), filepath.Join(dir, "class.yaml")
	for file, text := range map[string]string{
		types: machineTypes, class: "apiVersion: karpenter.kwok.sh/v1alpha1\nkind: KWOKNodeClass\nmetadata: {name: gpu}\n",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	module := pinnedModule(t, "karpenter", "sigs.k8s.io/karpenter")
	for _, args := range [][]string{
		{"create", "-f", filepath.Join(module, "kwok", "charts", "crds"), "-f", filepath.Join(module, "kwok", "apis", "crds")},
		{"wait", "--for=condition=Established", "--timeout=2m", "crd", "--all"},
		{"create", "-f", class},
	} {
		if _, err := c.RunKubectl(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
	}
	health := strconv.Itoa(freePorts(t, 1)[0])
	manager := sandbox.Command(t.Context(), common.parts.Sandbox, sandbox.Options{}, filepath.Join(programs, "kwok"))
	manager.Env = append(manager.Env, "KUBECONFIG="+c.AdminKubeconfig(), "DISABLE_LEADER_ELECTION=true", "KUBERNETES_MIN_VERSION=1.19.0-0",
		"SYSTEM_NAMESPACE=kube-system", "HEALTH_PROBE_PORT="+health, "METRICS_PORT=0", "FEATURE_GATES=NodeOverlay=true", "INSTANCE_TYPES_FILE_PATH="+types,
		// The simulated cloud says of a machine on its way that it offers only what its first pods asked for: all pods of a case have to be first.
		"BATCH_IDLE_DURATION=5s", "BATCH_MAX_DURATION=1m")
	startManager(t, "Karpenter", "127.0.0.1:"+health, manager)
	k := &karpenter{t: t, cluster: c, client: clustertest.ClientOf(t, c), namespace: clustertest.NamespaceOf(t, c), promised: &promises{claims: map[string]*nodeClaim{}}}
	if k.objects, err = dynamic.NewForConfig(c.Config()); err != nil {
		t.Fatal(err)
	}
	k.catalog = "pools"
	(&rig{Node: &node.Node{}, t: t, client: k.client}).configMapOf(k.catalog,
		map[string]string{"profiles.yaml": strings.ReplaceAll(exampleProfiles(t), "migStrategy: single", "")}) // instances by name
	go k.watch()
	return k
}

// watch notes what Karpenter ever promised, until the test has ended.
func (k *karpenter) watch() {
	open := func(ctx context.Context) (watch.Interface, error) {
		return k.objects.Resource(resourceOf("nodeclaims")).Watch(ctx, metav1.ListOptions{})
	}
	_ = clustertest.Follow(k.t.Context(), open, nil, func(did watch.EventType, o *unstructured.Unstructured) bool { // it ends with the test
		text, err := o.MarshalJSON()
		c := &nodeClaim{}
		if err == nil {
			err = json.Unmarshal(text, c)
		}
		if err != nil {
			k.t.Errorf("reading NodeClaim %s: %v", o.GetName(), err)
		}
		if did == watch.Deleted {
			now := metav1.Now()
			c.DeletionTimestamp = &now
			c.Finalizers = nil
		}
		k.promised.mu.Lock()
		k.promised.claims[c.Name] = c
		k.promised.mu.Unlock()
		return false
	})
}

// of are the claims that there ever were for nodes of the pool.
func (k *karpenter) of(pool string) (claims []*nodeClaim) {
	k.promised.mu.Lock()
	defer k.promised.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(k.promised.claims)) {
		if k.promised.claims[name].pool() == pool {
			claims = append(claims, k.promised.claims[name])
		}
	}
	return claims
}

// await waits until the claims of the pool are as wanted.
func (k *karpenter) await(pool, what string, wanted func([]*nodeClaim) bool) []*nodeClaim {
	k.t.Helper()
	var claims []*nodeClaim
	clustertest.Eventually(k.t, pool+": "+what, func(context.Context) (bool, error) {
		claims = k.of(pool)
		return wanted(claims), nil
	})
	return claims
}

// pool is the example's, with another name and the simulated cloud's class, and what a case changes of it and of the overlay.
func (k *karpenter) pool(name string, changes ...func(pool, overlay *unstructured.Unstructured)) {
	k.t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "deploy", "examples", "karpenter.yaml"))
	if err != nil {
		k.t.Fatal(err)
	}
	made := map[string]*unstructured.Unstructured{}
	for part := range bytes.SplitSeq(text, []byte("\n---\n")) {
		o := &unstructured.Unstructured{}
		if err := yaml.Unmarshal(bytes.ReplaceAll(part, []byte("gpu-small-inference"), []byte(name)), &o.Object); err != nil {
			k.t.Fatal(err)
		}
		made[o.GetKind()] = o
	}
	pool, overlay := made["NodePool"], made["NodeOverlay"]
	set(k.t, pool, map[string]any{"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "gpu"}, "spec", "template", "spec", "nodeClassRef")
	for _, change := range changes {
		change(pool, overlay)
	}
	k.create("nodepools", pool)
	if overlay.Object != nil { // the case may leave it out
		k.create("nodeoverlays", overlay)
	}
}

// create makes the object, and waits until Karpenter has taken it.
func (k *karpenter) create(plural string, o *unstructured.Unstructured) {
	k.t.Helper()
	objects := k.objects.Resource(resourceOf(plural))
	if _, err := objects.Create(k.t.Context(), o, metav1.CreateOptions{}); err != nil {
		k.t.Fatal(err)
	}
	clustertest.Eventually(k.t, o.GetName()+" is ready", func(ctx context.Context) (bool, error) {
		now, err := objects.Get(ctx, o.GetName(), metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		conditions, _, err := unstructured.NestedSlice(now.Object, "status", "conditions")
		return slices.ContainsFunc(conditions, func(c any) bool {
			condition, ok := c.(map[string]any)
			return ok && condition["type"] == "Ready" && condition["status"] == "True"
		}), err
	})
}

func set(t *testing.T, o *unstructured.Unstructured, value any, path ...string) {
	t.Helper()
	if err := unstructured.SetNestedField(o.Object, value, path...); err != nil {
		t.Fatal(err)
	}
}

// offers has the overlay say what nodes offer.
func offers(t *testing.T, resources map[string]any) func(pool, overlay *unstructured.Unstructured) {
	t.Helper()
	return func(_, overlay *unstructured.Unstructured) {
		t.Helper()
		set(t, overlay, resources, "spec", "capacity")
	}
}

// pods asks for pods that each need one of the resource, on nodes of the pool.
func (k *karpenter) pods(pool string, count int32, resource string, changes ...func(*corev1.PodSpec)) {
	k.t.Helper()
	r := &rig{Node: &node.Node{}, t: k.t, client: k.client}
	spec := r.podSpec(map[string]string{resource: "1"})
	spec.NodeSelector = map[string]string{"karpenter.sh/nodepool": pool}
	spec.Tolerations = []corev1.Toleration{{Key: "gpu", Value: "mig", Effect: corev1.TaintEffectNoSchedule}}
	for _, change := range changes {
		change(&spec)
	}
	r.deploymentOf(k.namespace, pool, count, corev1.PodTemplateSpec{Spec: spec})
}

// says waits until Karpenter has said something in an Event on an object of which only the beginning of the name is known.
func (k *karpenter) says(kind, name string, it func(message string) bool) {
	k.t.Helper()
	var said []string
	k.t.Cleanup(func() {
		if k.t.Failed() {
			k.t.Logf("what was said of %s %s:\n%s", kind, name, strings.Join(said, "\n"))
		}
	})
	clustertest.Eventually(k.t, fmt.Sprintf("Karpenter says what is expected of %s %s", kind, name), func(ctx context.Context) (bool, error) {
		list, err := k.client.CoreV1().Events(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.kind=" + kind})
		if err != nil {
			return false, err
		}
		said = nil
		for i := range list.Items {
			e := &list.Items[i]
			if ours := e.InvolvedObject.Namespace == "" || e.InvolvedObject.Namespace == k.namespace; ours && strings.HasPrefix(e.InvolvedObject.Name, name) {
				said = append(said, e.Source.Component+e.ReportingController+": "+e.Reason+": "+e.Message)
			}
		}
		return slices.ContainsFunc(said, func(s string) bool { return strings.HasPrefix(s, "karpenter") && it(s) }), nil
	})
}

// What Karpenter decides before there is a node, by what AUTOSCALERS.md says of its objects. No kubelet runs on these nodes.
func (k *karpenter) decides(t *testing.T) {
	t.Helper()
	noOverlay := func(_, overlay *unstructured.Unstructured) { overlay.Object = nil }
	selects := func(key, value string) func(*corev1.PodSpec) {
		return func(spec *corev1.PodSpec) { spec.NodeSelector[key] = value }
	}
	for name, test := range map[string]struct {
		pool  func(pool, overlay *unstructured.Unstructured)
		count int32
		asks  string
		pods  func(*corev1.PodSpec)
		nodes int    // at least
		most  int64  // of what pods ask for, on the fullest of these nodes: that is how many Karpenter takes a node for
		why   string // it adds no node
		also  func(t *testing.T, claims []*nodeClaim)
	}{
		"instances":        {count: 57, asks: "nvidia.com/mig-1g.10gb", nodes: 2, most: 56},
		"whole":            {count: 1, asks: "nvidia.com/gpu", why: "no instance type has enough resources"},
		"profile":          {count: 1, asks: "nvidia.com/mig-1g.10gb", pods: selects("mig-profile", "1g.10gb"), nodes: 1},
		"other-profile":    {count: 1, asks: "nvidia.com/mig-1g.10gb", pods: selects("mig-profile", "3g.40gb"), why: "incompatible requirements"},
		"state":            {count: 1, asks: "nvidia.com/mig-1g.10gb", pods: selects(config.LabelMIGConfigState, string(config.StateSuccess)), why: config.LabelMIGConfigState},
		"single":           {pool: offers(t, map[string]any{"nvidia.com/gpu": int64(56)}), count: 57, asks: "nvidia.com/gpu", nodes: 2, most: 56},
		"single-unsaid":    {pool: noOverlay, count: 9, asks: "nvidia.com/gpu", nodes: 2, most: 8},
		"instances-unsaid": {pool: noOverlay, count: 1, asks: "nvidia.com/mig-1g.10gb", why: "no instance type has enough resources"},
		"startup-taint-unsaid": {pool: func(pool, _ *unstructured.Unstructured) {
			unstructured.RemoveNestedField(pool.Object, "spec", "template", "spec", "startupTaints")
			set(t, pool, []any{map[string]any{"key": config.TaintNotReady, "effect": "NoSchedule"}}, "spec", "template", "spec", "taints")
		}, count: 1, asks: "nvidia.com/mig-1g.10gb", why: "did not tolerate taint"},
		"zones": {count: 2, asks: "nvidia.com/mig-1g.10gb", pods: func(spec *corev1.PodSpec) {
			spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
				MaxSkew: 1, TopologyKey: corev1.LabelTopologyZone, WhenUnsatisfiable: corev1.DoNotSchedule,
				LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "zones"}},
			}}
		}, nodes: 2, also: func(t *testing.T, claims []*nodeClaim) {
			t.Helper()
			if a, b := claims[0].Labels[corev1.LabelTopologyZone], claims[1].Labels[corev1.LabelTopologyZone]; a == b {
				t.Errorf("both nodes are in %q", a)
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := k.in(t)
			if test.pool == nil {
				test.pool = func(_, _ *unstructured.Unstructured) {}
			}
			if test.pods == nil {
				test.pods = func(*corev1.PodSpec) {}
			}
			k.pool(name, test.pool)
			k.pods(name, test.count, test.asks, test.pods)
			if test.why != "" {
				k.says("Pod", name+"-", func(message string) bool {
					return slices.ContainsFunc(strings.Split(message, "; "), func(part string) bool {
						return strings.Contains(part, test.why) && !strings.Contains(part, "key karpenter.sh/nodepool,") // which is said of each other pool
					})
				})
			}
			claims := k.await(name, fmt.Sprintf("%d nodes", test.nodes), func(claims []*nodeClaim) bool {
				return len(slices.DeleteFunc(claims, func(c *nodeClaim) bool { return c.Status.NodeName == "" })) >= test.nodes
			})
			most := int64(0)
			for _, c := range claims {
				asked := c.Spec.Resources.Requests[corev1.ResourceName(test.asks)]
				most = max(most, asked.Value())
			}
			if test.most > 0 && most != test.most || test.why != "" && len(claims) > 0 {
				t.Errorf("%d nodes are added, the fullest for %d of %s; want %d", len(claims), most, test.asks, test.most)
			}
			if test.also != nil {
				test.also(t, claims)
			}
		})
	}
}

// in is for a subtest.
func (k *karpenter) in(t *testing.T) *karpenter { t.Helper(); c := *k; c.t = t; return &c }

// machine has the simulated cloud's node be one with simulated GPUs, a kubelet and NVIDIA's device plugin. Kubelet begins without the resources of any plugin.
func (k *karpenter) machine(claim *nodeClaim, gpus int) *rig {
	k.t.Helper()
	r := &rig{Node: &node.Node{Name: claim.Status.NodeName}, t: k.t, client: k.client, cluster: k.cluster}
	n := r.node()
	status := map[string]any{"capacity": map[string]any{}, "allocatable": map[string]any{}}
	for _, list := range status {
		for name := range n.Status.Allocatable {
			if resources, ok := list.(map[string]any); ok && strings.HasPrefix(string(name), "nvidia.com/") {
				resources[string(name)] = nil
			}
		}
	}
	labels := &node.Options{}
	configFile(labels)
	r.patched(map[string]any{"status": status}, "status")
	r.patched(map[string]any{"metadata": map[string]any{"labels": labels.Labels}})
	return rigIn(k.t, k.cluster, fmt.Sprintf("gpus: [{model: A100-80GB, count: %d}]", gpus), "profiles: {name: "+k.catalog+"}\n",
		func(o *node.Options) { o.Name = claim.Status.NodeName })
}

func (r *rig) patched(body map[string]any, subresources ...string) {
	r.t.Helper()
	if _, err := r.patch(r.t.Context(), body, subresources...); err != nil {
		r.t.Fatal(err)
	}
}

// Karpenter is real, and so are the scheduler, NVIDIA's device plugin and the agent. The cloud is simulated: its machines are Node objects.
func TestKarpenterAddsAndSparesTheNodesOfAgents(t *testing.T) {
	if testing.Short() {
		t.Skip("Karpenter takes minutes to compile")
	}
	t.Parallel()
	k := startKarpenter(t)
	t.Run("decides", func(t *testing.T) { t.Parallel(); k.decides(t) })
	t.Run("adds and spares", func(t *testing.T) { t.Parallel(); k.in(t).addsAndSpares() })
	t.Run("an unknown taint", func(t *testing.T) { t.Parallel(); k.in(t).unknownTaint() })
	t.Run("launched for whole GPUs", func(t *testing.T) { t.Parallel(); k.in(t).neverInitialized() })
	t.Run("expiry", func(t *testing.T) { t.Parallel(); k.in(t).expires() })
	t.Run("another profile", func(t *testing.T) { t.Parallel(); k.in(t).drifts() })
}

// One pool of the example: it grows from no node, the node gets pods when it is cut, and is spared for the time of the next change.
func (k *karpenter) addsAndSpares() {
	const pool, resource = "small", "nvidia.com/mig-1g.10gb" // a short name: the cloud makes one of a node of it, which labels repeat
	k.pool(pool, func(pool, _ *unstructured.Unstructured) {
		set(k.t, pool, "0s", "spec", "disruption", "consolidateAfter")
	})
	k.pods(pool, 1, resource)
	claim := k.registered(pool)
	r := k.machine(claim, 8)
	k.await(pool, "not initialized before it is cut", func(claims []*nodeClaim) bool {
		return claims[0].condition("Initialized").Reason == "StartupTaintsExist"
	})
	r.run()
	r.awaitConverged("small-inference")
	r.awaitOffered(resource, 56)
	k.await(pool, "initialized", func(claims []*nodeClaim) bool {
		return claims[0].condition("Initialized").Status == metav1.ConditionTrue
	})
	r.kubectl("scale", "deployment", pool, "-n", k.namespace, "--replicas=8")
	k.running(pool, 8, r.Name)
	if claims := k.of(pool); len(claims) != 1 {
		k.t.Errorf("%d nodes were added for what one of them offers", len(claims))
	}

	// Karpenter has set the labels of its template, so they are not the agent's to change.
	r.label(config.LabelProfile, "production-inference")
	r.awaitReason(config.ReasonNodeKeyConflict)
	r.label(config.LabelProfile, "small-inference")
	r.kubectl("label", "node", r.Name, "mig-profile-")
	r.await("the agent's own label", func(n *corev1.Node) bool { return n.Labels["mig-profile"] == "1g.10gb" })

	// The next change stops at its first instance, on a node that its pods have left.
	goOn := r.holdCreation()
	r.label(config.LabelProfile, "production-inference")
	n := r.await("a fence", func(n *corev1.Node) bool { return n.Annotations[config.AnnotationJournal] != "" })
	if !n.Spec.Unschedulable || n.Annotations[config.AnnotationDoNotDisrupt] != "true" {
		k.t.Errorf("behind its fence the node is unschedulable %t, and has %v", n.Spec.Unschedulable, n.Annotations)
	}
	// What has left needs another node in the meantime.
	k.await(pool, "a second node for what has left", func(claims []*nodeClaim) bool { return len(claims) == 2 })
	r.kill() // the agent
	goOn()
	k.says("Node", r.Name, func(message string) bool {
		return strings.Contains(strings.ToLower(message), `disruption is blocked through the "karpenter.sh/do-not-disrupt" annotation`)
	})
	r.run()
	r.await("an open node", func(n *corev1.Node) bool {
		_, kept := n.Annotations[config.AnnotationDoNotDisrupt]
		return !n.Spec.Unschedulable && !kept
	})
	if claim := k.claim(claim.Name); claim.DeletionTimestamp != nil {
		k.t.Errorf("Karpenter has removed the node in the middle of a change, at %s", claim.DeletionTimestamp)
	}
	k.await(pool, "no node that is empty", func([]*nodeClaim) bool { return k.claim(claim.Name).DeletionTimestamp != nil })
}

// registered waits for the only node of a pool.
func (k *karpenter) registered(pool string) *nodeClaim {
	k.t.Helper()
	return k.await(pool, "a node", func(claims []*nodeClaim) bool { return len(claims) > 0 && claims[0].Status.NodeName != "" })[0]
}

func (k *karpenter) claim(name string) *nodeClaim {
	k.promised.mu.Lock()
	defer k.promised.mu.Unlock()
	return k.promised.claims[name]
}

// running waits until so many pods of the pool run on the node.
func (k *karpenter) running(pool string, count int, on string) {
	k.t.Helper()
	clustertest.Eventually(k.t, fmt.Sprintf("%d pods of %s run on %s", count, pool, on), func(ctx context.Context) (bool, error) {
		list, err := k.client.CoreV1().Pods(k.namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=" + pool, FieldSelector: "spec.nodeName=" + on})
		if err != nil {
			return false, err
		}
		return len(slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return !running(&p) })) == count, nil
	})
}

// A startup taint that kubelet sets and the pool does not name: the node counts for nothing, and the next is added.
func (k *karpenter) unknownTaint() {
	const pool = "unknown-taint"
	k.pool(pool, func(pool, _ *unstructured.Unstructured) {
		unstructured.RemoveNestedField(pool.Object, "spec", "template", "spec", "startupTaints")
		set(k.t, pool, map[string]any{"cpu": "192"}, "spec", "limits") // two nodes
	})
	k.pods(pool, 1, "nvidia.com/mig-1g.10gb")
	r := &rig{Node: &node.Node{Name: k.registered(pool).Status.NodeName}, t: k.t, client: k.client, cluster: k.cluster}
	r.kubectl("taint", "node", r.Name, config.TaintNotReady+"=:NoSchedule")
	r.kubectl("delete", "pod", "-n", k.namespace, "-l", "app="+pool, "--force") // the scheduler may have been faster than the taint
	k.await(pool, "a second node for the same pod", func(claims []*nodeClaim) bool { return len(claims) == 2 })
}

// becomes has the only node of a pool be ready and offer resources, as if kubelet and an agent had made it so.
func (k *karpenter) becomes(pool string, resources map[string]any) *rig {
	k.t.Helper()
	r := &rig{Node: &node.Node{Name: k.registered(pool).Status.NodeName}, t: k.t, client: k.client, cluster: k.cluster}
	r.patched(map[string]any{"status": map[string]any{
		"capacity": resources, "allocatable": resources,
		"conditions": []any{map[string]any{"type": "Ready", "status": "True", "reason": "KubeletReady"}},
	}}, "status")
	r.kubectl("taint", "node", r.Name, config.TaintNotReady+"-", config.TaintRepartitioning+"-")
	return r
}

// A node that was launched for nvidia.com/gpu, and has instances in its place.
func (k *karpenter) neverInitialized() {
	const pool = "launched-for-gpus"
	k.pool(pool, func(_, overlay *unstructured.Unstructured) { overlay.Object = nil })
	k.pods(pool, 1, "nvidia.com/gpu")
	k.becomes(pool, map[string]any{"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "56"})
	k.await(pool, "ResourceNotRegistered", func(claims []*nodeClaim) bool {
		return claims[0].condition("Initialized").Reason == "ResourceNotRegistered"
	})
}

// The annotation does not hold off the end of a node's time.
func (k *karpenter) expires() {
	const pool = "expiry"
	k.pool(pool, func(pool, _ *unstructured.Unstructured) {
		set(k.t, pool, "20s", "spec", "template", "spec", "expireAfter")
		set(k.t, pool, map[string]any{config.AnnotationDoNotDisrupt: "true"}, "spec", "template", "metadata", "annotations")
	})
	k.pods(pool, 1, "nvidia.com/mig-1g.10gb")
	claim := k.registered(pool)
	k.await(pool, "removal", func([]*nodeClaim) bool { return k.claim(claim.Name).DeletionTimestamp != nil })
}

// Another profile in the pool's template is for new nodes. Karpenter replaces those that it has.
func (k *karpenter) drifts() {
	const pool = "another-profile"
	k.pool(pool)
	k.pods(pool, 1, "nvidia.com/mig-1g.10gb")
	r := k.becomes(pool, map[string]any{"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "56"})
	k.await(pool, "initialized", func(claims []*nodeClaim) bool {
		return claims[0].condition("Initialized").Status == metav1.ConditionTrue
	})
	body := fmt.Sprintf(`{"spec":{"template":{"metadata":{"labels":{%q:"production-inference"}}}}}`, config.LabelProfile)
	if _, err := k.objects.Resource(resourceOf("nodepools")).Patch(k.t.Context(), pool, types.MergePatchType, []byte(body), metav1.PatchOptions{}); err != nil {
		k.t.Fatal(err)
	}
	k.await(pool, "a node in the place of the first", func(claims []*nodeClaim) bool {
		return len(claims) == 2 && slices.ContainsFunc(claims, func(c *nodeClaim) bool { return c.condition("Drifted").Status == metav1.ConditionTrue })
	})
	if profile := r.node().Labels[config.LabelProfile]; profile != "small-inference" {
		k.t.Errorf("the first node's label requests %q", profile)
	}
}
