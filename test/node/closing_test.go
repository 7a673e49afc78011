package node_test

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
)

// mayMakeRules lets agents make DeviceTaintRules, as far as the policy does.
func (r *rig) mayMakeRules() {
	r.t.Helper()
	const component = "../../deploy/components/device-taint-rules/"
	if err := deploy(r.cluster, component+"rbac.yaml", component+"policy.yaml"); err != nil {
		r.t.Fatal(err)
	}
}

// closed are the devices of the node that DeviceTaintRules close to claims.
func (r *rig) closed() (devices []string) {
	r.t.Helper()
	rules, err := r.client.ResourceV1().DeviceTaintRules().List(r.t.Context(), metav1.ListOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, rule := range rules.Items {
		if *rule.Spec.DeviceSelector.Pool == r.Name {
			devices = append(devices, *rule.Spec.DeviceSelector.Device)
		}
	}
	return devices
}

// While pods have yet to leave GPU 0, NVIDIA's DRA driver and the scheduler give the node's other GPUs to claims, and none of GPU 0. An agent that is killed
// then leaves no DeviceTaintRule in the end.
func TestClaimsGetOtherGPUsWhilePodsLeave(t *testing.T) {
	t.Parallel()
	s := newClaimStage(t, "drain: {fence: devices, unmanagedPods: evict, rules: [{selector: 'app in (template-0, resource-0)', action: wait, for: 1h}]}\n")
	s.mayMakeRules()
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	s.label(config.LabelMIGConfig, "one")
	s.awaitStep("close to claims")
	s.kill()
	s.run()

	// The third holder of GPU 0 has left by its eviction, so that a device of it is free.
	s.awaitPods(s.namespace, "the end of pod class-0", func(pods map[types.UID]*corev1.Pod) bool { return pods[s.leave[2].UID] == nil })
	s.claimant(s.namespace, "closed-out", "gpu-0")
	s.deletePod(s.namespace, "whole")
	s.template(s.namespace, "one-gpu", "gpu.nvidia.com", "")
	s.claimant(s.namespace, "late", "one-gpu")
	s.awaitRunning(s.namespace, "late")
	delete(s.stay, "whole")
	if out, err := s.client.CoreV1().Pods(s.namespace).Get(t.Context(), "closed-out", metav1.GetOptions{}); err != nil || out.Spec.NodeName != "" {
		t.Errorf("a claim has got a device of GPU 0: pod closed-out is on node %q (error %v)", out.Spec.NodeName, err)
	}
	if devices := s.closed(); len(devices) != 3 || !strings.HasPrefix(devices[0], "gpu-0-mig-") || s.node().Spec.Unschedulable {
		t.Errorf("claims are kept from %v, and the node is unschedulable: %t", devices, s.node().Spec.Unschedulable)
	}
	for _, pod := range s.leave[:2] { // they end by themselves
		s.deletePod(s.namespace, pod.Name)
	}
	s.check(s.await("config one", s.verified("one")), "7g.80gb@0", s.leave[2:])
	s.awaitRunning(s.namespace, "closed-out")
	if devices := s.closed(); len(devices) > 0 {
		t.Errorf("rules are left of %v", devices)
	}
}
