package fence_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/drain/fence"
)

// Flags of a marker in the tables.
const (
	holds   = "holds the node empty"
	at      = "is at work"
	planned = "is planned"
)

// seen is a sign of a tool, and what it says.
type seen struct {
	on    func(*corev1.Node)
	tool  string
	sign  string
	is    string
	since time.Time
}

func labelOf(key, value string) func(*corev1.Node) { return labelled(map[string]string{key: value}) }

func taintOf(key, value string, effect corev1.TaintEffect) func(*corev1.Node) {
	return tainted(corev1.Taint{Key: key, Value: value, Effect: effect})
}

func both(changes ...func(*corev1.Node)) func(*corev1.Node) {
	return func(n *corev1.Node) {
		for _, c := range changes {
			c(n)
		}
	}
}

// signs are what each tool writes.
func signs() []seen {
	const noSchedule, prefer = corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule
	const drained, applied = "machineconfiguration.openshift.io/desiredDrain", "machineconfiguration.openshift.io/lastAppliedDrain"
	never := time.Time{}
	two := time.Date(2026, 3, 1, 2, 0, 0, 0, time.UTC)
	out := []seen{
		{
			both(labelOf("dgxc.nvidia.com/nvsentinel-state", "drain-failed"), labelOf("k8saas.nvidia.com/cordon-timestamp", "2026-03-01T02-00-00Z")),
			"NVSentinel", "label dgxc.nvidia.com/nvsentinel-state=drain-failed", holds, two,
		},
		{labelOf("dgxc.nvidia.com/nvsentinel-state", "quarantined"), "NVSentinel", "label dgxc.nvidia.com/nvsentinel-state=quarantined", holds, never},
		{annotated("quarantineHealthEventIsCordoned", "True"), "NVSentinel", "annotation quarantineHealthEventIsCordoned=True", holds, never},
		{taintOf("nvsentinel.nvidia.com/external-remediation", "r1", noSchedule), "NVSentinel", "taint nvsentinel.nvidia.com/external-remediation=r1:NoSchedule", holds, never},
		{annotated("nvsentinel.dgxc.nvidia.com/active-maintenance-request", "m1"), "NVSentinel", "annotation nvsentinel.dgxc.nvidia.com/active-maintenance-request=m1", holds, never},
		{annotated("weave.works/kured-reboot-in-progress", "2026-03-01T03:00:00+01:00"), "kured", "annotation weave.works/kured-reboot-in-progress=2026-03-01T03:00:00+01:00", holds, two},
		{annotated("weave.works/kured-reboot-in-progress", "soon"), "kured", "annotation weave.works/kured-reboot-in-progress=soon", holds, never},
		{taintOf("weave.works/kured-node-reboot", "", prefer), "kured", "taint weave.works/kured-node-reboot:PreferNoSchedule", planned, never},
		{
			both(annotated(drained, "drain-r2"), annotated(applied, "uncordon-r1")),
			"machine-config-operator", "annotations " + drained + "=drain-r2, " + applied + "=uncordon-r1", holds, never,
		},
		{
			both(annotated(drained, "drain-r2"), annotated(applied, "drain-r2")),
			"machine-config-operator", "annotations " + drained + "=drain-r2, " + applied + "=drain-r2", holds, never,
		},
		{
			both(annotated(drained, "uncordon-r2"), annotated(applied, "drain-r2")),
			"machine-config-operator", "annotations " + drained + "=uncordon-r2, " + applied + "=drain-r2", holds, never,
		},
		{annotated("machineconfiguration.openshift.io/state", "Working"), "machine-config-operator", "annotation machineconfiguration.openshift.io/state=Working", holds, never},
		{
			tainted(corev1.Taint{Key: "karpenter.sh/disrupted", Effect: noSchedule, TimeAdded: &cordonTime}),
			"karpenter", "taint karpenter.sh/disrupted:NoSchedule", holds, cordonTime.Time,
		},
		{taintOf("ToBeDeletedByClusterAutoscaler", "1772330400", noSchedule), "cluster-autoscaler", "taint ToBeDeletedByClusterAutoscaler=1772330400:NoSchedule", holds, two},
		{taintOf("DeletionCandidateOfClusterAutoscaler", "x", prefer), "cluster-autoscaler", "taint DeletionCandidateOfClusterAutoscaler=x:PreferNoSchedule", planned, never},
		{labelOf(deployPlugin, "paused-for-driver-upgrade"), "k8s-driver-manager", "label nvidia.com/gpu.deploy.device-plugin=paused-for-driver-upgrade", holds, never},
		{
			both(labelOf(deployPlugin, "paused-for-gpuslice_paused-for-driver-upgrade"), labelOf(deployDCGM, "paused-for-driver-upgrade")),
			"k8s-driver-manager", "label nvidia.com/gpu.deploy.dcgm=paused-for-driver-upgrade, and 1 more like it", holds, never,
		},
		{labelOf(deployClient, "paused-for-mig-change"), "mig-manager", "label nvidia.com/gpu.deploy.client=paused-for-mig-change", at, never},
		{taintOf("medik8s.io/drain", "", noSchedule), "node-maintenance-operator", "taint medik8s.io/drain:NoSchedule", holds, never},
		{taintOf("remediation.medik8s.io/self-node-remediation", "", noSchedule), "self-node-remediation", "taint remediation.medik8s.io/self-node-remediation:NoSchedule", holds, never},
		{taintOf("remediation.medik8s.io/fence-agents-remediation", "", noSchedule), "fence-agents-remediation", "taint remediation.medik8s.io/fence-agents-remediation:NoSchedule", holds, never},
		{
			both(labelOf("aws-node-termination-handler/action", "UncordonAfterReboot"), labelOf("aws-node-termination-handler/action-time", "1772330400")),
			"aws-node-termination-handler", "label aws-node-termination-handler/action=UncordonAfterReboot", holds, two,
		},
		{annotated("sriovnetwork.openshift.io/state", "Drain_Required"), "sriov-network-operator", "annotation sriovnetwork.openshift.io/state=Drain_Required", holds, never},
		{annotated("sriovnetwork.openshift.io/state", "Reboot_Required"), "sriov-network-operator", "annotation sriovnetwork.openshift.io/state=Reboot_Required", holds, never},
		{
			both(annotated("skyhook.nvidia.com/cordon_tuning", "true"), annotated("skyhook.nvidia.com/cordon_kernel", "true")),
			"nodewright", "annotation skyhook.nvidia.com/cordon_kernel=true", holds, never,
		},
		{taintOf("node.cluster.x-k8s.io/outdated-revision", "", prefer), "cluster-api", "taint node.cluster.x-k8s.io/outdated-revision:PreferNoSchedule", planned, never},
		{
			both(labelOf("node.machine.sapcloud.io/candidate-for-update", "true"), labelOf("node.machine.sapcloud.io/selected-for-update", "true")),
			"machine-controller-manager", "label node.machine.sapcloud.io/selected-for-update=true", holds, never,
		},
		{labelOf("node.machine.sapcloud.io/candidate-for-update", "true"), "machine-controller-manager", "label node.machine.sapcloud.io/candidate-for-update=true", planned, never},
		{taintOf("node.machine.sapcloud.io/preserved", "", noSchedule), "machine-controller-manager", "taint node.machine.sapcloud.io/preserved:NoSchedule", holds, never},
		{taintOf("deployment.machine.sapcloud.io/prefer-no-schedule", "True", prefer), "machine-controller-manager", "taint deployment.machine.sapcloud.io/prefer-no-schedule=True:PreferNoSchedule", planned, never},
		{taintOf("cloud.google.com/impending-node-termination", "", noSchedule), "GKE", "taint cloud.google.com/impending-node-termination:NoSchedule", holds, never},
		{labelOf("cloud.google.com/active-node-maintenance", "ONGOING"), "GKE", "label cloud.google.com/active-node-maintenance=ONGOING", holds, never},
		{labelOf("cloud.google.com/scheduled-maintenance-time", "1772330400"), "GKE", "label cloud.google.com/scheduled-maintenance-time=1772330400", planned, never},
		{taintOf("baremetal.cluster.gke.io/maintenance", "", noSchedule), "Google Distributed Cloud", "taint baremetal.cluster.gke.io/maintenance:NoSchedule", holds, never},
		{labelOf("kubernetes.azure.com/upgrade-status", "Quarantined"), "AKS", "label kubernetes.azure.com/upgrade-status=Quarantined", holds, never},
		{annotated("talos.dev/cordoned", "true"), "Talos", "annotation talos.dev/cordoned=true", holds, never},
	}
	for _, reason := range []string{"scheduled-maintenance", "spot-itn", "asg-lifecycle-termination", "rebalance-recommendation"} {
		key := "aws-node-termination-handler/" + reason
		out = append(out, seen{taintOf(key, "e1", noSchedule), "aws-node-termination-handler", "taint " + key + "=e1:NoSchedule", holds, never})
	}
	for tool, driver := range map[string]string{"gpu-operator": "gpu", "network-operator": "ofed"} {
		state := "nvidia.com/" + driver + "-driver-upgrade-state"
		for _, s := range []string{
			"cordon-required", "wait-for-jobs-required", "pod-deletion-required", "drain-required", "node-maintenance-required",
			"post-maintenance-required", "pod-restart-required", "validation-required", "uncordon-required", "upgrade-failed",
		} {
			out = append(out, seen{labelOf(state, s), tool, "label " + state + "=" + s, holds, never})
		}
		wait := "nvidia.com/" + driver + "-driver-upgrade.driver-wait-for-safe-load"
		out = append(out,
			seen{labelOf(state, "upgrade-required"), tool, "label " + state + "=upgrade-required", planned, never},
			seen{both(labelOf(state, "upgrade-done"), annotated(wait, "true")), tool, "annotation " + wait + "=true", planned, never})
	}
	const flatcar, prefix = "flatcar-linux-update-operator", "flatcar-linux-update.v1.flatcar-linux.net/"
	return append(out,
		seen{
			both(annotated(prefix+"reboot-needed", "true"), annotated(prefix+"reboot-ok", "true"), annotated(prefix+"reboot-in-progress", "true")),
			flatcar, "annotation " + prefix + "reboot-in-progress=true", holds, never,
		},
		seen{both(annotated(prefix+"reboot-needed", "true"), annotated(prefix+"reboot-ok", "true")), flatcar, "annotation " + prefix + "reboot-ok=true", holds, never},
		seen{annotated(prefix+"reboot-needed", "true"), flatcar, "annotation " + prefix + "reboot-needed=true", planned, never})
}

// marker is what Markers shall make of it; the advice is for the test to look at.
func (s seen) marker() []fence.Marker {
	return []fence.Marker{{Tool: s.tool, Sign: s.sign, Since: s.since, Cordons: s.is == holds, Planned: s.is == planned}}
}

var exceptAdvice = cmpopts.IgnoreFields(fence.Marker{}, "Done")

// operands are the labels that the settings name.
var operands = []string{deployPlugin, deployDCGM, deployClient}

func TestMarkersNameTheToolThatIsAtWork(t *testing.T) {
	for _, s := range signs() {
		t.Run(s.tool+" "+s.sign, func(t *testing.T) {
			got := fence.Markers(node(s.on), operands)
			if diff := cmp.Diff(s.marker(), got, exceptAdvice); diff != "" {
				t.Fatalf("Markers (-want +got):\n%s", diff)
			}
			if got[0].Done == "" || strings.Contains(got[0].Done, "{") {
				t.Errorf("advice is %q", got[0].Done)
			}
		})
	}
}

func TestMarkersNameTheToolThatDeletesTheNode(t *testing.T) {
	deleted := func(finalizers ...string) func(*corev1.Node) {
		return func(n *corev1.Node) { n.DeletionTimestamp, n.Finalizers = &cordonTime, finalizers }
	}
	for _, c := range []struct {
		name string
		node *corev1.Node
		want []fence.Marker
	}{
		{"Karpenter", node(deleted("example.io/x", "karpenter.sh/termination"), taintOf("karpenter.sh/disrupted", "", corev1.TaintEffectNoSchedule)), []fence.Marker{{
			Tool: "karpenter", Sign: `deletionTimestamp 2026-03-01T12:00:00Z, finalizers ["example.io/x" "karpenter.sh/termination"]`, Since: cordonTime.Time, Cordons: true,
		}}},
		{"another user", node(deleted("example.io/x")), []fence.Marker{{
			Tool: "deletion of the node", Sign: `deletionTimestamp 2026-03-01T12:00:00Z, finalizers ["example.io/x"]`, Since: cordonTime.Time, Cordons: true,
		}}},
		{"no one, though Karpenter would like to know", node(func(n *corev1.Node) { n.Finalizers = []string{"karpenter.sh/termination"} }), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, fence.Markers(c.node, operands), exceptAdvice); diff != "" {
				t.Errorf("Markers (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMarkersDoNotCountWhatStaysAfterwards(t *testing.T) {
	for name, on := range map[string]func(*corev1.Node){
		"kured":                          annotated("weave.works/kured-most-recent-reboot-needed", "2026-03-01T02:00:00Z"),
		"kured's lock is not on nodes":   annotated("weave.works/kured-node-lock", "{}"),
		"a driver that is upgraded":      labelOf("nvidia.com/gpu-driver-upgrade-state", "upgrade-done"),
		"a driver that no one looked at": labelOf("nvidia.com/gpu-driver-upgrade-state", ""),
		"an upgrade that was turned off": both(cordoned, annotated("nvidia.com/gpu-driver-upgrade.node-initial-state.unschedulable", "true"), annotated("nvidia.com/gpu-driver-upgrade-validation-start-time", "1772330400")),
		"upgrades that are turned on":    annotated("nvidia.com/gpu-driver-upgrade-enabled", "true"),
		"an applied MachineConfig": both(
			annotated("machineconfiguration.openshift.io/desiredDrain", "uncordon-r2"), annotated("machineconfiguration.openshift.io/lastAppliedDrain", "uncordon-r2"),
			annotated("machineconfiguration.openshift.io/state", "Done"),
		),
		"a reboot that is over": both(
			annotated("flatcar-linux-update.v1.flatcar-linux.net/reboot-needed", "false"), annotated("flatcar-linux-update.v1.flatcar-linux.net/reboot-ok", "false"),
			annotated("flatcar-linux-update.v1.flatcar-linux.net/reboot-in-progress", "false"), annotated("flatcar-linux-update.v1.flatcar-linux.net/agent-made-unschedulable", "false"),
		),
		"network devices at rest":                 annotated("sriovnetwork.openshift.io/state", "Idle"),
		"a Skyhook that is complete":              both(labelOf("skyhook.nvidia.com/status_tuning", "complete"), annotated("skyhook.nvidia.com/nodeState_tuning", "{}")),
		"a plan of the system-upgrade-controller": labelOf("plan.upgrade.cattle.io/latest", "abc"),
		"a quarantine that was cancelled":         both(annotated("quarantinedNodeUncordonedManually", "True"), labelOf("k8saas.nvidia.com/uncordon-by", "admin")),
		"an update in place that was counted":     labelOf("node.machine.sapcloud.io/update-result", "successful"),
		"a MIG change that is over":               both(labelOf("nvidia.com/mig.config.state", "success"), labelOf(deployPlugin, "true")),
		"a MIG change of an unknown writer":       labelOf("nvidia.com/mig.config.state", "pending"),
		"an operand that someone keeps away":      labelOf(deployPlugin, "false"),
		"a label of no operand":                   both(labelOf("nvidia.com/gpu.deploy.anything", "paused-for-driver-upgrade"), labelOf("nvidia.com/gpu.deploy.more", "paused-for-mig-change")),
		"a paused label of another user's":        labelOf("example.com/plugin", "paused-for-mig-change"),
		"an administrator's cordon":               both(cordoned, tainted(cordonTaint, foreignTaint)),
		"ourselves": both(
			cordoned, taintOf("gpuslice.io/repartitioning", "", corev1.TaintEffectNoSchedule), taintOf("gpuslice.io/not-ready", "", corev1.TaintEffectNoSchedule),
			annotated("gpuslice.io/journal", "{}"), annotated("gpuslice.io/status", "{}"), labelOf(deployPlugin, fence.PausedValue),
			labelOf("nvidia.com/mig.config.state", "pending"), managedBy("gpuslice-agent", `{"f:metadata":{"f:labels":{"f:nvidia.com/mig.config.state":{}}}}`, cordonTime.Time),
		),
	} {
		t.Run(name, func(t *testing.T) {
			if got := fence.Markers(node(on), operands); got != nil {
				t.Errorf("Markers are %+v, want none", got)
			}
		})
	}
}

func TestMarkersKnowTheMIGManagersStateByItsWriter(t *testing.T) {
	writer := func(by string) func(*corev1.Node) {
		return managedBy(by, `{"f:metadata":{"f:labels":{"f:nvidia.com/mig.config.state":{}}}}`, cordonTime.Time)
	}
	for _, state := range []string{"pending", "rebooting"} {
		got := fence.Markers(node(labelOf("nvidia.com/mig.config.state", state), writer("kubelet"), writer("nvidia-mig-manager")), operands)
		want := []fence.Marker{{Tool: "mig-manager", Sign: "label nvidia.com/mig.config.state=" + state}}
		if diff := cmp.Diff(want, got, exceptAdvice); diff != "" {
			t.Errorf("Markers (-want +got):\n%s", diff)
		}
	}
	if got := fence.Markers(node(labelOf("nvidia.com/mig.config.state", "failed"), writer("nvidia-mig-manager")), operands); got != nil {
		t.Errorf("Markers of a change that has failed are %+v, want none", got)
	}
}

func TestMarkersOfSeveralToolsAreSortedAndShort(t *testing.T) {
	n := node(
		annotated("talos.dev/cordoned", "true"),
		annotated("weave.works/kured-reboot-in-progress", strings.Repeat("a", 100)+"\n"),
		taintOf("ToBeDeletedByClusterAutoscaler", "", corev1.TaintEffectNoSchedule),
		func(n *corev1.Node) { n.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "nvidia-mig-manager"}} },
	)
	want := []fence.Marker{
		{Tool: "Talos", Sign: "annotation talos.dev/cordoned=true", Cordons: true, Done: "Talos uncordons the node when it has booted"},
		{
			Tool: "cluster-autoscaler", Sign: "taint ToBeDeletedByClusterAutoscaler:NoSchedule", Cordons: true,
			Done: "the cluster-autoscaler deletes the node, or removes the taint if that fails",
		},
		{
			Tool: "kured", Sign: "annotation weave.works/kured-reboot-in-progress=" + strings.Repeat("a", 63) + "…", Cordons: true,
			Done: "kured removes it after the reboot; after a reboot by others: kubectl annotate node n1 weave.works/kured-reboot-in-progress-",
		},
	}
	if diff := cmp.Diff(want, fence.Markers(n, operands)); diff != "" {
		t.Errorf("Markers (-want +got):\n%s", diff)
	}
}
