package node_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/node"
)

// Labels by which the GPU Operator deploys its pods to a node.
const (
	deploysPlugin    = "nvidia.com/gpu.deploy.device-plugin"
	deploysDCGM      = "nvidia.com/gpu.deploy.dcgm"
	deploysExporter  = "nvidia.com/gpu.deploy.dcgm-exporter"
	deploysDiscovery = "nvidia.com/gpu.deploy.gpu-feature-discovery"
	deploysMPS       = "nvidia.com/gpu.deploy.mps-control-daemon"
	deploysClient    = "nvidia.com/gpu.deploy.client"
)

// operator makes a node of the GPU Operator. Two of its operands are not there by the will of others: what they have
// written must stay.
func operator(o *node.Options) {
	o.Labels = operatorLabels()
}

func operatorLabels() map[string]string {
	return map[string]string{
		deploysPlugin: "true", deploysDCGM: "true", deploysExporter: "true", deploysDiscovery: "true",
		deploysMPS: "false", deploysClient: "paused-for-mig-change",
	}
}

// operandsBack fails the test if a label is not as the GPU Operator and others had it.
func (r *rig) operandsBack(n *corev1.Node) {
	r.t.Helper()
	got := maps.Clone(n.Labels)
	maps.DeleteFunc(got, func(key, _ string) bool { return !strings.HasPrefix(key, config.LabelOperandPrefix) })
	if diff := cmp.Diff(operatorLabels(), got); diff != "" {
		r.t.Errorf("labels of operands (-want +got):\n%s", diff)
	}
}

// awaitOperands waits until each operand runs that has the label for it.
func (r *rig) awaitOperands() {
	r.t.Helper()
	for _, app := range []string{"nvidia-device-plugin-daemonset", "nvidia-dcgm", "nvidia-dcgm-exporter", "gpu-feature-discovery"} {
		r.awaitPod("gpu-operator", metav1.ListOptions{LabelSelector: "app=" + app}, running)
	}
}

// Promises 7 and 13. DCGM has the GPUs open, which no list of processes shows, so that none could be reset while it runs.
func TestOperandsMakeWayInOrderAndComeBackInReverse(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus: [{model: A100-80GB, count: 2}]", "", operator)
	r.awaitOffered("nvidia.com/gpu", 2)
	r.awaitOperands()
	namespace := clustertest.Namespace(t)
	r.pod(namespace, "gpu", map[string]string{"nvidia.com/gpu": "1"})
	r.awaitRunning(namespace, "gpu")
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	n := r.awaitConverged("all-balanced")
	r.givenBack(n)
	r.operandsBack(n)
	r.awaitOperands()
	var paused, resumed []string
	for _, step := range r.kill() {
		if label, ok := strings.CutPrefix(step, "pause "); ok {
			paused = append(paused, label)
		}
		if label, ok := strings.CutPrefix(step, "resume "); ok && strings.HasPrefix(label, config.LabelOperandPrefix) {
			resumed = append(resumed, label)
		}
	}
	want := []string{deploysExporter, deploysDCGM, deploysDiscovery, deploysPlugin}
	if diff := cmp.Diff(want, paused); diff != "" {
		t.Errorf("paused (-want +got):\n%s", diff)
	}
	slices.Reverse(want)
	if diff := cmp.Diff(want, resumed); diff != "" {
		t.Errorf("resumed (-want +got):\n%s", diff)
	}
}
