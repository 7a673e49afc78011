package node_test

import (
	"context"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/node"
)

// usedElsewhere are rights that the agent of this test does not use, with the test that shows what for.
var usedElsewhere = map[string]string{
	"in the name of the node: get pods": "drain: TestClusterLeavesARecreatedPodOfTheSameNameAlone",
}

// What the API server's log says of one agent is what its roles give it, right by right, and the admission policies of deploy/, under which all
// agents of this package work, refuse none of it: a change with everything in it, once with a budget that lets only one of two pods go, so
// that the other is deleted at its deadline.
func TestTheAgentUsesEachOfItsRightsAndNeedsNoOther(t *testing.T) {
	t.Parallel()
	name := "rights-" + strconv.FormatUint(rand.Uint64(), 36)
	const twoA100 = "gpus:\n- model: A100-80GB\n  count: 2\n"
	settings := "profiles: {name: " + name + "}\nmaintenance: {name: no-" + name + "}\ndrain: {afterDeadline: delete, unmanagedPods: evict}\nstaleResources: remove\n" + impatient
	r := newRig(t, twoA100, settings, configManager, func(o *node.Options) {
		o.Labels[config.LabelDevicePluginConfig] = "mixed-4"
	})
	// Without a maintenance file the nodes that name the profile are a pool, whose Lease the agent deletes in the end.
	//
	// No other test has this many replicas: the key in the plugin's ConfigMap is made of the config, and what is there already is not written.
	r.configMapOf(name, map[string]string{
		"profiles.yaml": `apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  small:
    mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]
    sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 6}]}}
    labels: {example.com/size: small, tier: inference}
    taints: [{key: example.com/gpu, value: mig, effect: PreferNoSchedule}]
`,
	})
	r.awaitOffered("nvidia.com/gpu", 2)
	r.pairOfHolders()
	r.run()
	r.label(config.LabelProfile, "small")
	n := r.awaitConverged("small")
	r.givenBack(n)
	if !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == "example.com/gpu" }) || n.Labels["tier"] != "inference" {
		t.Errorf("the profile's labels and taints are not there: %v, %v", n.Labels, n.Spec.Taints)
	}
	for range 2 { // what is reported again in the same words is a patch of the Event
		r.label(config.LabelProfile, "nowhere")
		r.awaitReason(config.ReasonUnknownConfig)
		r.label(config.LabelProfile, "small")
		r.awaitConverged("small")
	}
	r.kill() // which ends its watches, and the log has a request when it is over
	r.agents.env = append(r.agents.env, lists)
	r.run()
	r.label(config.LabelProfile, "nowhere")
	r.awaitReason(config.ReasonUnknownConfig)
	r.kill()

	granted := grantedToAgents(t)
	maps.DeleteFunc(granted, func(right string, _ bool) bool { return strings.Contains(right, ".resource.k8s.io") }) // for nodes of NVIDIA's DRA driver alone
	var used map[string]bool
	for ctx, cancel := context.WithTimeout(t.Context(), patience); ; {
		used = r.used()
		if cmp.Equal(granted, used) || ctx.Err() != nil {
			cancel()
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second): // the log has no watch
		}
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(granted)), slices.Sorted(maps.Keys(used))); diff != "" {
		t.Errorf("rights (-given +used):\n%s", diff)
	}
	t.Logf("%d rights: %s", len(used), strings.Join(slices.Sorted(maps.Keys(used)), "; "))
}

// pairOfHolders are two pods with a GPU each, of which a budget lets one go.
func (r *rig) pairOfHolders() {
	r.t.Helper()
	namespace := clustertest.Namespace(r.t)
	for _, pod := range []string{"a", "b"} {
		if _, err := r.client.CoreV1().Pods(namespace).Create(r.t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: pod, Labels: map[string]string{"app": "both"}}, Spec: r.podSpec(map[string]string{"nvidia.com/gpu": "1"}),
		}, metav1.CreateOptions{}); err != nil {
			r.t.Fatal(err)
		}
		r.awaitPod(namespace, metav1.ListOptions{FieldSelector: "metadata.name=" + pod}, running)
	}
	r.budget(namespace, "both", 1)
	r.awaitBudget(namespace, "both", 1)
}

// grantedToAgents are the rights of the roles, but for those that another test uses.
func grantedToAgents(t *testing.T) map[string]bool {
	t.Helper()
	granted := map[string]bool{}
	for _, file := range []string{"base/rbac.yaml", "components/impersonation/rbac.yaml", "components/delete-after-deadline/rbac.yaml", "components/gpu-operator/rbac.yaml"} {
		for role, rights := range rightsIn(t, "../../deploy/"+file) {
			if role == "gpuslice-agent-pods" && file == "base/rbac.yaml" {
				continue // the component's take their place
			}
			maps.Copy(granted, rights)
		}
	}
	for right := range usedElsewhere {
		if !granted[right] {
			t.Errorf("%s: the agent has no such right", right)
		}
		delete(granted, right)
	}
	return granted
}

// rightsIn are the rights of a file's roles, as used has them.
func rightsIn(t *testing.T, file string) map[string]map[string]bool {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]map[string]bool{}
	for _, doc := range strings.Split(string(text), "\n---\n") {
		var role rbacv1.ClusterRole // a Role has the same fields
		if err := yaml.Unmarshal([]byte(doc), &role); err != nil {
			t.Fatal(err)
		}
		for _, rule := range role.Rules {
			for _, verb := range rule.Verbs {
				right := rightOf(verb, rule.APIGroups[0], rule.Resources[0])
				if right == "" {
					continue
				}
				if out[role.Name] == nil {
					out[role.Name] = map[string]bool{}
				}
				out[role.Name][right] = true
			}
			if len(rule.APIGroups) != 1 || len(rule.Resources) != 1 {
				t.Fatalf("%s: a rule has more than one group or resource: %v", file, rule)
			}
		}
	}
	return out
}

// rightOf is a right in words. The right to ask in the name of the node at all is in each that is used so.
func rightOf(verb, group, resource string) string {
	if group != "" {
		resource += "." + group
	}
	if verb == "impersonate:associated-node" {
		return ""
	}
	if as, ok := strings.CutPrefix(verb, "impersonate-on:associated-node:"); ok {
		return "in the name of the node: " + as + " " + resource
	}
	return verb + " " + resource
}

// used are the rights that the node's agent has used so far. What was refused fails the test, but for the questions by which it finds out what
// confines it.
func (r *rig) used() map[string]bool {
	r.t.Helper()
	all, err := r.cluster.Requests(func(e cluster.AuditEvent) bool {
		return e.User == "system:serviceaccount:gpuslice:gpuslice-agent" && e.Node == r.Name && e.Resource != ""
	})
	if err != nil {
		r.t.Fatal(err)
	}
	used := map[string]bool{}
	for _, e := range all {
		verb := e.Verb
		if e.As != "" {
			verb = "impersonate-on:associated-node:" + verb
			if e.As != "system:node:"+r.Name {
				r.t.Errorf("%s in the name of %s", e, e.As)
			}
		}
		if e.Code == http.StatusForbidden {
			if !strings.Contains(e.URI, "dryRun=") && !tried(e) && !strings.HasSuffix(e.URI, "/pods?limit=1") &&
				!strings.Contains(e.URI, "/pods?fieldSelector=status.phase%3DPending") { // of a budget, which may be on other nodes: then no cause is named
				r.t.Errorf("refused: %s %s", e, e.URI)
			}
			continue
		}
		used[rightOf(verb, e.Group, e.Resource)] = true
	}
	return used
}

// tried reports whether an agent asks by this request whether the policy for evictions acts.
func tried(e cluster.AuditEvent) bool {
	return e.Resource == "pods/eviction" && e.Name == "gpuslice-policies"
}
