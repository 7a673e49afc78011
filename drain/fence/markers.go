package fence

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/managed"
)

// Marker is a sign on the node that another tool maintains it, or will.
type Marker struct {
	Tool  string    // "kured"
	Sign  string    // the tool's taint, label or annotation: "annotation weave.works/kured-reboot-in-progress=2026-03-01T02:00:00Z"
	Since time.Time // when the maintenance began; zero if the sign does not say

	// Cordons says that the tool keeps pods off the node until it is done. It may need a cordon that it has not made: a tool
	// that finds a node cordoned relies upon that. NVSentinel for one ends its quarantine when a user uncordons the node.
	Cordons bool
	// Planned says that the tool has announced its maintenance and not begun.
	Planned bool

	Done string // how the maintenance ends, as advice for users
}

// Markers lists the other tools that maintain the node, one marker for each tool, sorted by tool. By them the agent decides
// whether a cordon is a tool's if managedFields do not say, and its messages name them while it waits.
//
// It knows only signs from the tools' own sources or manuals, as of August 2026. It cannot see tools that write nothing on the node: kured without
// --annotate-nodes, Rancher's system-upgrade-controller, Mellanox's maintenance-operator, Cluster API while it drains, locksmith, Bottlerocket's
// update operator, EKS. It ignores node-problem-detector: its conditions name a problem, not a plan. It also ignores text that stays on the node
// after a tool is done, and the agent's own.
//
// Operands are the labels that NVIDIA's managers use to pause operands; similar labels are no sign.
func Markers(node *corev1.Node, operands []string) []Marker {
	var out []Marker
	for _, k := range slices.Concat(knownMarkers, operandMarkers(operands)) {
		// The signs of a tool stand together, the strongest first.
		if len(out) > 0 && out[len(out)-1].Tool == k.tool {
			continue
		}
		if sign, since := k.find(node); sign != "" {
			out = append(out, Marker{
				Tool: k.tool, Sign: sign, Since: since, Cordons: k.means == markCordons, Planned: k.means == markPlanned,
				Done: strings.ReplaceAll(k.done, "{node}", node.Name),
			})
		}
	}
	slices.SortFunc(out, func(a, b Marker) int { return cmp.Compare(a.Tool, b.Tool) })
	return out
}

// Tools that pause operands, as a Marker names them.
const (
	ToolMIGManager    = "mig-manager"
	ToolDriverManager = "k8s-driver-manager"
)

// knownMarker is a sign of a tool, and what it means.
type knownMarker struct {
	tool  string
	find  finder
	means markMeaning
	done  string // {node} stands for the node's name
}

type markMeaning int

const (
	markCordons markMeaning = iota // at work, with pods kept off the node
	markWorks                      // at work without that
	markPlanned                    // announced
)

// finder finds a sign. It returns an empty one if there is none, and a zero time if the sign has none.
type finder func(node *corev1.Node) (sign string, since time.Time)

var knownMarkers = slices.Concat(
	[]knownMarker{
		// NVIDIA/NVSentinel. The label: commons/pkg/statemanager/statemanager.go. Each value means that the node is in quarantine, those of failures
		// (drain-failed, remediation-failed) for good; the label goes with the quarantine. The annotations: fault-quarantine/pkg/common/common.go,
		// commons/pkg/managed/maintenance_request.go. The taint: commons/pkg/managed/external_remediation.go. The time:
		// fault-quarantine/pkg/reconciler/reconciler.go, in a label; its prefix is a setting, and this is the default.
		{
			"NVSentinel", sinceLabel(label("dgxc.nvidia.com/nvsentinel-state"), "k8saas.nvidia.com/cordon-timestamp", "2006-01-02T15-04-05Z"), markCordons,
			"NVSentinel lifts its quarantine when the node is healthy again; drain-failed and remediation-failed wait for a person. kubectl uncordon {node} cancels the quarantine",
		},
		{
			"NVSentinel", annotation("quarantineHealthEventIsCordoned", "True"), markCordons,
			"NVSentinel lifts its quarantine when the node is healthy again; kubectl uncordon {node} cancels it",
		},
		{
			"NVSentinel", taint("nvsentinel.nvidia.com/external-remediation"), markCordons,
			"NVSentinel removes the taint when the ExternalRemediationRequest that it names is closed",
		},
		{
			"NVSentinel", annotation("nvsentinel.dgxc.nvidia.com/active-maintenance-request"), markCordons,
			"NVSentinel ends the MaintenanceRequest that the annotation names",
		},

		// kubereboot/kured, cmd/kured/main.go; with --annotate-nodes. The annotation comes before kured has its lock or
		// has cordoned, and goes after the reboot; kured-most-recent-reboot-needed stays for ever. The name of the taint
		// is a setting; this is the one that kured's help proposes.
		{
			"kured", annotationTime("weave.works/kured-reboot-in-progress", rfc3339), markCordons,
			"kured removes it after the reboot; after a reboot by others: kubectl annotate node {node} weave.works/kured-reboot-in-progress-",
		},
		{"kured", taint("weave.works/kured-node-reboot"), markPlanned, "kured reboots the node when its lock is free"},

		// openshift/machine-config-operator, pkg/daemon/constants/constants.go, pkg/controller/drain/drain_controller.go.
		{
			"machine-config-operator", openShiftDrain, markCordons,
			"the machine-config-operator uncordons the node when its MachineConfig is applied; oc describe node {node} and the log of machine-config-controller say what it waits for",
		},
		{
			"machine-config-operator", annotation("machineconfiguration.openshift.io/state", "Working"), markCordons,
			"the machine-config-operator is done when the annotation says Done",
		},

		// kubernetes-sigs/karpenter, pkg/apis/v1/taints.go and labels.go.
		{"karpenter", deletion(true), markCordons, "Karpenter removes the node when it is drained"},
		{
			"karpenter", taint("karpenter.sh/disrupted"), markCordons,
			"Karpenter removes the node when it is drained, or removes the taint if it changes its mind",
		},
		{"deletion of the node", deletion(false), markCordons, "the node is deleted when the programs that set its finalizers have removed them"},

		// kubernetes/autoscaler, cluster-autoscaler/utils/taints/taints.go. Values are Unix times.
		{
			"cluster-autoscaler", taintTime("ToBeDeletedByClusterAutoscaler"), markCordons,
			"the cluster-autoscaler deletes the node, or removes the taint if that fails",
		},
		{
			"cluster-autoscaler", taintTime("DeletionCandidateOfClusterAutoscaler"), markPlanned,
			"the cluster-autoscaler removes the taint when the node is needed again",
		},

		// medik8s/node-maintenance-operator, internal/controller/taint.go. Its lease is no part of the node.
		{
			"node-maintenance-operator", taint("medik8s.io/drain"), markCordons,
			"deleting the NodeMaintenance of {node} uncordons it",
		},
		// medik8s/self-node-remediation, internal/controller/selfnoderemediation_controller.go.
		{
			"self-node-remediation", taint("remediation.medik8s.io/self-node-remediation"), markCordons,
			"the operator removes the taint when the node is healthy again and its SelfNodeRemediation is deleted",
		},
		// medik8s/fence-agents-remediation, api/v1alpha1/fenceagentsremediation_types.go.
		{
			"fence-agents-remediation", taint("remediation.medik8s.io/fence-agents-remediation"), markCordons,
			"the operator removes the taint when the node is healthy again and its FenceAgentsRemediation is deleted",
		},

		// aws/aws-node-termination-handler, pkg/node/node.go. It cordons; the taints are a setting. The labels are for events after which the node
		// returns, and go with its uncordon.
		{
			"aws-node-termination-handler",
			sinceLabel(label("aws-node-termination-handler/action", "UncordonAfterReboot"), "aws-node-termination-handler/action-time", unixSeconds), markCordons,
			"the handler uncordons the node after the reboot",
		},
		{
			"aws-node-termination-handler", taint("aws-node-termination-handler/scheduled-maintenance"), markCordons,
			"the handler uncordons the node when AWS has completed or cancelled the event",
		},
		{"aws-node-termination-handler", taint("aws-node-termination-handler/spot-itn"), markCordons, "AWS removes the instance two minutes after its notice"},
		{
			"aws-node-termination-handler", taint("aws-node-termination-handler/asg-lifecycle-termination"), markCordons,
			"the Auto Scaling group removes the instance",
		},
		{
			"aws-node-termination-handler", taint("aws-node-termination-handler/rebalance-recommendation"), markCordons,
			"AWS may remove the instance at any time; if it does not: kubectl uncordon {node}",
		},

		// rancher/system-upgrade-controller writes nothing on the node before it is done; k8snetworkplumbingwg's
		// sriov-network-operator does: pkg/consts/constants.go, controllers/drain_controller.go. Idle is its rest.
		{
			"sriov-network-operator", annotation("sriovnetwork.openshift.io/state", "Drain_Required", "Reboot_Required"), markCordons,
			"the sriov-network-operator sets the annotation to Idle when the node's network devices are configured",
		},

		// NVIDIA/nodewright, formerly skyhook, operator/internal/wrapper/node.go: one annotation for each Skyhook that
		// holds the cordon.
		{
			"nodewright", annotation("skyhook.nvidia.com/cordon_*"), markCordons,
			"nodewright removes the annotation and uncordons when the Skyhook that it names is complete on {node}; without that Skyhook it is left over (kubectl skyhook reset)",
		},

		// kubernetes-sigs/cluster-api, api/core/v1beta2/common_types.go. When a machine is drained, the node only shows
		// the cordon; the annotations of a deletion are the Machine's.
		{"cluster-api", taint("node.cluster.x-k8s.io/outdated-revision"), markPlanned, "Cluster API replaces the node in the rollout of its MachineDeployment"},

		// gardener/machine-controller-manager, pkg/apis/machine/v1alpha1/constants.go, pkg/util/provider/machineutils/utils.go,
		// pkg/controller/deployment_util.go. An update in place takes its labels away and uncordons when it has succeeded.
		{
			"machine-controller-manager", label("node.machine.sapcloud.io/selected-for-update", "true"), markCordons,
			"the machine-controller-manager uncordons the node after its update; if that has failed, the annotation node.machine.sapcloud.io/update-failed-reason says why",
		},
		{
			"machine-controller-manager", taint("node.machine.sapcloud.io/preserved"), markCordons,
			"the machine-controller-manager removes the taint when the failed machine need not be preserved any more",
		},
		{
			"machine-controller-manager", label("node.machine.sapcloud.io/candidate-for-update", "true"), markPlanned,
			"the machine-controller-manager updates the node when it is its turn",
		},
		{
			"machine-controller-manager", taint("deployment.machine.sapcloud.io/prefer-no-schedule"), markPlanned,
			"the machine-controller-manager replaces the node in a rolling update",
		},

		// The taint: kubernetes/autoscaler, cluster-autoscaler/utils/taints/taints.go. The labels: Google's manual,
		// "Manage GKE node disruption for GPUs and TPUs".
		{
			"GKE", taint("cloud.google.com/impending-node-termination"), markCordons,
			"Google terminates the node, or removes the taint after the maintenance of its host",
		},
		{"GKE", label("cloud.google.com/active-node-maintenance", "ONGOING"), markCordons, "Google ends the maintenance of the node's host"},
		{"GKE", label("cloud.google.com/scheduled-maintenance-time"), markPlanned, "the label is the time when Google begins the maintenance of the node's host"},
		// Google Distributed Cloud's manual, "Put nodes into maintenance mode".
		{
			"Google Distributed Cloud", taint("baremetal.cluster.gke.io/maintenance"), markCordons,
			"removing the node from the cluster's maintenanceBlocks ends its maintenance",
		},
		// Microsoft's API reference of AKS, UndrainableNodeBehavior "Cordon".
		{
			"AKS", label("kubernetes.azure.com/upgrade-status", "Quarantined"), markCordons,
			"an upgrade could not drain the node and has replaced it: delete its pods, then the node",
		},

		// siderolabs/talos, pkg/machinery/constants/constants.go.
		{"Talos", annotation("talos.dev/cordoned", "true"), markCordons, "Talos uncordons the node when it has booted"},
	},
	driverUpgrade("gpu-operator", "gpu"),
	driverUpgrade("network-operator", "ofed"),
	flatcarReboot(),
)

// operandMarkers are the signs of NVIDIA's managers, which pause operands by these labels.
func operandMarkers(operands []string) []knownMarker {
	return []knownMarker{
		// NVIDIA/k8s-driver-manager, cmd/driver-manager/main.go. It pauses operands, cordons and drains if its settings say so,
		// unloads the driver, and puts everything back. If it dies in between, the labels stay.
		{
			ToolDriverManager, pausedOperands(operands, PausedForDriverUpgrade), markCordons,
			"the k8s-driver-manager restores the labels when the driver is loaded: see the pod of nvidia-driver-daemonset on {node}",
		},

		// NVIDIA/mig-parted, pkg/mig/reconfigure/reconfigure.go. It cordons nothing. The agent writes the same state label,
		// so the label counts only if the mig-manager has written it, by its field manager.
		{
			ToolMIGManager, pausedOperands(operands, PausedForMIGChange), markWorks,
			"the mig-manager restores the labels when its change is done. If it has failed or is gone, they stay so: set them to true",
		},
		{
			ToolMIGManager, writtenBy("nvidia-mig-manager", label("nvidia.com/mig.config.state", "pending", "rebooting")), markWorks,
			"the mig-manager sets the label to success or failed. If it is gone, the label stays so",
		},
	}
}

// driverUpgrade is the upgrade of a driver by NVIDIA/k8s-operator-libs, pkg/upgrade/consts.go and common_manager.go. The
// GPU Operator calls its driver "gpu" (cmd/gpu-operator/main.go), the Network Operator "ofed" (main.go).
//
// Of the states, upgrade-done is rest and upgrade-required a place in a queue, for weeks at times. In upgrade-failed the node stays cordoned until
// its driver is ready after all. In all others, from cordon-required to uncordon-required, the node is under work. The annotations next to it say
// nothing alone: they stay when upgrades are switched off during one. The exception is the driver's pod that waits for the node to be drained.
func driverUpgrade(tool, driver string) []knownMarker {
	state := "nvidia.com/" + driver + "-driver-upgrade-state"
	wait := "nvidia.com/" + driver + "-driver-upgrade.driver-wait-for-safe-load"
	return []knownMarker{
		{
			tool, label(state, "upgrade-failed"), markCordons,
			"the " + tool + " continues, and uncordons, when the driver's pod on {node} is ready: delete that pod, or see its log",
		},
		{
			tool, labelOtherThan(state, "upgrade-done", "upgrade-required"), markCordons,
			"the " + tool + " uncordons the node when its driver is upgraded and validated, unless it was cordoned before",
		},
		{tool, label(state, "upgrade-required"), markPlanned, "the " + tool + " upgrades the driver when it is the node's turn"},
		{tool, annotation(wait), markPlanned, "the " + tool + " drains the node so that the driver can be loaded"},
	}
}

// flatcarReboot are the annotations of flatcar/flatcar-linux-update-operator, pkg/constants/constants.go. They stay, with the value
// "false", when a reboot is over.
func flatcarReboot() []knownMarker {
	const tool, prefix = "flatcar-linux-update-operator", "flatcar-linux-update.v1.flatcar-linux.net/"
	return []knownMarker{
		{tool, annotation(prefix+"reboot-in-progress", "true"), markCordons, "the update agent uncordons the node after the reboot"},
		{tool, annotation(prefix+"reboot-ok", "true"), markCordons, "the update agent drains and reboots the node, and uncordons it after that"},
		{tool, annotation(prefix+"reboot-needed", "true"), markPlanned, "the update operator reboots the node when its turn has come"},
	}
}

// openShiftDrain is the two-phase request of OpenShift's machine-config-daemon: it asks by desiredDrain for "drain-…" and,
// when its update is done, for "uncordon-…"; lastAppliedDrain says how far the controller is.
func openShiftDrain(node *corev1.Node) (string, time.Time) {
	const desired, applied = "machineconfiguration.openshift.io/desiredDrain", "machineconfiguration.openshift.io/lastAppliedDrain"
	want, is := node.Annotations[desired], node.Annotations[applied]
	if want == "" || want == is && !strings.HasPrefix(want, "drain-") {
		return "", time.Time{}
	}
	return fmt.Sprintf("annotations %s=%s, %s=%s", desired, short(want), applied, short(is)), time.Time{}
}

// deletion is a node that is being deleted and has finalizers left, either Karpenter's among them or others only.
func deletion(byKarpenter bool) finder {
	return func(node *corev1.Node) (string, time.Time) {
		if node.DeletionTimestamp == nil || slices.Contains(node.Finalizers, "karpenter.sh/termination") != byKarpenter {
			return "", time.Time{}
		}
		at := node.DeletionTimestamp.UTC()
		return fmt.Sprintf("deletionTimestamp %s, finalizers %q", at.Format(time.RFC3339), node.Finalizers), at
	}
}

// pausedOperands are those of the labels that contain the value.
func pausedOperands(operands []string, value string) finder {
	return func(node *corev1.Node) (string, time.Time) {
		var labels []string
		for _, key := range operands {
			if strings.Contains(node.Labels[key], value) {
				labels = append(labels, key)
			}
		}
		if len(labels) == 0 {
			return "", time.Time{}
		}
		slices.Sort(labels)
		sign := fmt.Sprintf("label %s=%s", labels[0], short(node.Labels[labels[0]]))
		if more := len(labels) - 1; more > 0 {
			sign += fmt.Sprintf(", and %d more like it", more)
		}
		return sign, time.Time{}
	}
}

// taint finds a taint by its key.
func taint(key string) finder {
	return func(node *corev1.Node) (string, time.Time) {
		for _, t := range node.Spec.Taints {
			if t.Key != key {
				continue
			}
			var since time.Time
			if t.TimeAdded != nil {
				since = t.TimeAdded.Time
			}
			return "taint " + t.ToString(), since
		}
		return "", time.Time{}
	}
}

// taintTime finds a taint; its value is the time when it was added, in seconds of Unix.
func taintTime(key string) finder {
	return func(node *corev1.Node) (string, time.Time) {
		sign, since := taint(key)(node)
		for _, t := range node.Spec.Taints {
			if t.Key == key && since.IsZero() {
				since = parseTime(unixSeconds, t.Value)
			}
		}
		return sign, since
	}
}

// label finds a label by its key, and by its value if any are given; else any but the empty one counts.
func label(key string, values ...string) finder {
	return func(node *corev1.Node) (string, time.Time) {
		return entry("label", node.Labels, key, values), time.Time{}
	}
}

// labelOtherThan finds a label by its key, unless it is empty or has one of the values.
func labelOtherThan(key string, values ...string) finder {
	return func(node *corev1.Node) (string, time.Time) {
		if slices.Contains(values, node.Labels[key]) {
			return "", time.Time{}
		}
		return label(key)(node)
	}
}

// annotation finds an annotation as label does a label. A key that ends in * stands for all that begin so.
func annotation(key string, values ...string) finder {
	return func(node *corev1.Node) (string, time.Time) {
		return entry("annotation", node.Annotations, key, values), time.Time{}
	}
}

// annotationTime finds an annotation that has a time as its value.
func annotationTime(key, layout string) finder {
	return func(node *corev1.Node) (string, time.Time) {
		sign, _ := annotation(key)(node)
		return sign, parseTime(layout, node.Annotations[key])
	}
}

// entry gives the first label or annotation that fits, in the order of keys.
func entry(kind string, all map[string]string, key string, values []string) string {
	keys := []string{key}
	if prefix, some := strings.CutSuffix(key, "*"); some {
		keys = nil
		for k := range all {
			if strings.HasPrefix(k, prefix) {
				keys = append(keys, k)
			}
		}
		slices.Sort(keys)
	}
	for _, k := range keys {
		if v := all[k]; v != "" && (len(values) == 0 || slices.Contains(values, v)) {
			return fmt.Sprintf("%s %s=%s", kind, k, short(v))
		}
	}
	return ""
}

// sinceLabel finds a sign with its time in a label.
func sinceLabel(find finder, key, layout string) finder {
	return func(node *corev1.Node) (string, time.Time) {
		sign, _ := find(node)
		if sign == "" {
			return "", time.Time{}
		}
		return sign, parseTime(layout, node.Labels[key])
	}
}

// writtenBy finds a label that counts only if managedFields name its writer.
func writtenBy(manager string, find finder) finder {
	return func(node *corev1.Node) (string, time.Time) {
		sign, since := find(node)
		key, _, _ := strings.Cut(strings.TrimPrefix(sign, "label "), "=")
		for _, m := range node.ManagedFields {
			if sign != "" && m.Manager == manager && managed.OwnsField(m, "f:metadata", "f:labels", "f:"+key) {
				return sign, since
			}
		}
		return "", time.Time{}
	}
}

// The layouts of times in values; unixSeconds is not one of package time.
const (
	rfc3339     = time.RFC3339
	unixSeconds = "unix"
)

// parseTime reads the time of a value; zero if the value has another form, as a newer version of the tool may give it.
func parseTime(layout, value string) time.Time {
	if layout == unixSeconds {
		if seconds, err := strconv.ParseInt(value, 10, 64); err == nil && seconds > 0 {
			return time.Unix(seconds, 0).UTC()
		}
		return time.Time{}
	}
	at, err := time.Parse(layout, value)
	if err != nil {
		return time.Time{}
	}
	return at.UTC()
}

// short makes a value fit for a message. Annotations may be long, and have any characters.
func short(value string) string {
	const most = 64
	if runes := []rune(sanitize.Name(value)); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return sanitize.Name(value)
}
