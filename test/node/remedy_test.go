package node_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// hasUnhealthyTaint reports whether pods are kept from the node for its GPUs.
func hasUnhealthyTaint(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == config.TaintGPUUnhealthy && t.Value == config.ValueGPUUnhealthy && t.Effect == corev1.TaintEffectNoSchedule
	})
}

// restart runs another agent, with the settings.
func (r *rig) restart(settings string) {
	r.t.Helper()
	r.kill()
	r.set(settings)
	r.run()
}

// The taint comes with a fault, by the agent's own account under the admission policies, and goes with it; it stays when the agent is killed, and goes
// when the setting is turned off. The device plugin, which has to be restarted in the meantime, tolerates it.
func TestANodeWhoseGPUCannotBeUsedIsTaintedIfTheSettingsSaySo(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "health: {taint: NoSchedule}\n")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.serveMetrics()
	r.run()
	r.awaitHealth(corev1.ConditionFalse, config.ReasonGPUsHealthy)
	r.awaitMetric("gpuslice_health_events_watched 1")
	r.play(0, "contained-ecc-drain") // which lasts: of an error for which the driver recommends nothing, nothing is left after half a minute
	c, _ := r.awaitHealth(corev1.ConditionTrue)
	n := r.await("the taint", hasUnhealthyTaint)
	if !strings.Contains(c.Message, config.TaintGPUUnhealthy) || n.Spec.Unschedulable {
		t.Errorf("cordoned: %v; the message does not name the taint: %s", n.Spec.Unschedulable, c.Message)
	}
	r.kill()
	r.run()
	r.await("the condition of the next agent", func(n *corev1.Node) bool {
		if !hasUnhealthyTaint(n) {
			t.Fatal("the taint is gone, and the GPU is as before")
		}
		return unhealthy(n).LastHeartbeatTime.After(c.LastHeartbeatTime.Time)
	})
	if err := r.GPUs.Cure(t.Context(), 0, "contained-ecc-drain"); err != nil {
		t.Fatal(err)
	}
	r.awaitHealth(corev1.ConditionFalse, config.ReasonGPUsHealthy)
	r.await("the end of the taint", func(n *corev1.Node) bool { return !hasUnhealthyTaint(n) })
	r.awaitOffered("nvidia.com/gpu", 2)

	r.play(1, "uncontained-ecc")
	r.await("the taint", hasUnhealthyTaint)
	r.restart("")
	r.await("the end of the taint", func(n *corev1.Node) bool { return !hasUnhealthyTaint(n) })
	r.awaitHealth(corev1.ConditionTrue, config.ReasonResetRequired)
}

func (r *rig) play(gpu int, fault string) {
	r.t.Helper()
	if err := r.GPUs.Play(r.t.Context(), gpu, gpusim.NoInstance, fault); err != nil {
		r.t.Fatal(err)
	}
}

// The driver asks for a reset of a GPU, by NVIDIA's library as it is simulated: the agent drains that GPU, has the driver's own nvidia-smi reset it, cuts
// it again as the label asks, and gives the node back. The pod on the other GPU stays. It is killed in the middle, too.
func TestAGPUThatNeedsAResetIsResetAndCutAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "health: {reset: critical, taint: NoSchedule}\n")
	namespace := clustertest.Namespace(t)
	r.awaitOffered("nvidia.com/gpu", 2)
	r.run()
	r.label(config.LabelMIGConfig, "all-3g.40gb")
	r.awaitConverged("all-3g.40gb")
	r.awaitOffered("nvidia.com/mig-3g.40gb", 4)
	r.pod(namespace, "train-0", map[string]string{"nvidia.com/mig-3g.40gb": "1"})
	r.awaitRunning(namespace, "train-0")
	device := r.assignments(namespace)["train-0"][0]
	held := 0
	for index, gpu := range r.snapshot() {
		if slices.ContainsFunc(gpu.Instances, func(i nvml.Instance) bool {
			return slices.ContainsFunc(i.Devices, func(d nvml.Device) bool { return d.UUID == device })
		}) {
			held = index
		}
	}
	sick := 1 - held
	stays := r.snapshot()[held].Geometry().String()
	r.play(sick, "uncontained-ecc")
	c, _ := r.awaitHealth(corev1.ConditionTrue)
	r.await("the fence", func(n *corev1.Node) bool { return n.Spec.Unschedulable })
	r.kill()
	r.run()
	r.awaitHealth(corev1.ConditionFalse, config.ReasonGPUsHealthy)
	r.awaitConverged("all-3g.40gb")
	n := r.await("the end", func(n *corev1.Node) bool { return !n.Spec.Unschedulable && !hasUnhealthyTaint(n) })
	r.awaitOffered("nvidia.com/mig-3g.40gb", 4)
	for index, gpu := range r.snapshot() {
		if got := gpu.Geometry().String(); got != stays {
			t.Errorf("GPU %d is cut as %s, want %s", index, got, stays)
		}
	}
	if n.Annotations[config.AnnotationJournal] != "" || !strings.Contains(c.Message, r.GPUs.UUIDs()[sick]) {
		t.Errorf("journal %q; the condition said %s", n.Annotations[config.AnnotationJournal], c.Message)
	}
	r.awaitRunning(namespace, "train-0")
}
