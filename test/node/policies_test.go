package node_test

import (
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/systemd"
)

// All agents of this package work under the admission policies of deploy/. Two changes that write all that an agent ever writes, there
// and back: a cordon, evictions, operands' labels, units of the host, geometry by a reset, sharing by a key of a ConfigMap,
// labels and taints of a profile, a Lease, a startup taint, conditions and events. The policies refuse none of it, to no agent.
func TestThePoliciesRefuseAnAgentNothing(t *testing.T) {
	t.Parallel()
	name := "policies-" + strconv.FormatUint(rand.Uint64(), 36)
	r := newRig(t, oneA100, "profiles: {name: "+name+"}\nmaintenance: {name: "+name+"}\nstaleResources: remove\n", configManager, func(o *node.Options) {
		o.Labels[labelPool], o.Labels["nvidia.com/gpu.deploy.dcgm"], o.Labels[config.LabelDevicePluginConfig] = name, "true", "mixed-4"
	})
	host := r.onMachine()
	r.configMapOf(name, map[string]string{
		maintenanceKey: maintenanceHeader + "pools:\n- {name: " + name + ", selector: " + labelPool + "=" + name + ", maxUnavailable: 1}\n",
		"profiles.yaml": `apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  small:
    mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]
    sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 3}]}}
    labels: {example.com/size: small, tier: inference}
    taints: [{key: example.com/gpu, value: mig, effect: PreferNoSchedule}]
  whole:
    mig: [{gpus: {all: true}, enabled: false}]
    sharing: none
`,
	})
	r.awaitOffered("nvidia.com/gpu", 1)
	namespace := clustertest.Namespace(t)
	holder := r.holder(namespace, "holder")
	r.run()
	for _, profile := range []string{"small", "whole"} {
		r.label(config.LabelProfile, profile)
		n := r.awaitConverged(profile)
		r.givenBack(n)
		published := slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == "example.com/gpu" }) &&
			n.Labels["tier"] == "inference"
		if published != (profile == "small") {
			t.Errorf("profile %s: labels %v, taints %v", profile, n.Labels, n.Spec.Taints)
		}
	}
	r.hasLeft(holder)
	host.asBefore()
	if len(host.jobs(systemd.StopUnit)) == 0 {
		t.Error("no unit of the host was stopped: this change does not show what it should")
	}
	lease, err := r.client.CoordinationV1().Leases(agentNamespace).Get(t.Context(), config.LeasePrefix+name, metav1.GetOptions{})
	if err != nil || lease.Annotations[config.AnnotationSlots] == "" {
		t.Errorf("the pool's Lease: %v", err)
	}
	all, err := r.cluster.Writes("system:serviceaccount:gpuslice:gpuslice-agent")
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, e := range all {
		kinds[e.Verb+" "+e.Resource]++
		// An agent tries by its own request whether the policy for evictions acts.
		if e.Code == http.StatusForbidden && !tried(e) {
			t.Errorf("refused: %s %s", e, e.Body)
		}
	}
	for _, want := range []string{"patch nodes", "patch nodes/status", "create pods/eviction", "patch configmaps", "create leases", "update leases", "create events"} {
		if kinds[want] == 0 {
			t.Errorf("no agent has made the request %q: this change does not show what it should", want)
		}
	}
	t.Logf("%d requests of agents to change something: %v", len(all), kinds)
}

func tried(e cluster.AuditEvent) bool {
	return e.Resource == "pods/eviction" && e.Name == "gpuslice-policies"
}
