package fence

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// The values of an operand's label. The DaemonSet of each operand selects nodes by a label of its own with DeployedValue; any other value
// sends the pod away. The operator leaves a value alone that it finds, unless it is empty.
const (
	// DeployedValue is the label's value for an operand that runs.
	DeployedValue = "true"
	// PausedValue is the label's value for an operand that the agent has paused.
	PausedValue = "paused-for-gpuslice"
	// PausedForMIGChange is the value that NVIDIA's mig-manager writes over any other but "false". It keeps no record of the former value (mig-parted
	// v0.14.4, pkg/mig/reconfigure).
	PausedForMIGChange = "paused-for-mig-change"
	// PausedForDriverUpgrade is the value that the k8s-driver-manager writes over "true". To another tool's pause it appends it behind an
	// underscore; in the end it removes its part, so that the agent's is there again.
	PausedForDriverUpgrade = "paused-for-driver-upgrade"
)

// OperandState says whether an operand runs, or which tool keeps it away.
type OperandState string

// The states of an operand.
const (
	OperandRunning OperandState = "Running" // its label is "true": the agent may pause it
	OperandPaused  OperandState = "Paused"  // its label is PausedValue: the agent has to resume it
	OperandForeign OperandState = "Foreign" // anything else, such as "false" or another tool's pause, even upon the agent's: it must not touch it
)

// Operand is a program that the GPU Operator, or a chart that follows its convention, runs on a node by a label of the node.
type Operand struct {
	Label, Value string
	State        OperandState

	// Pods are those that go when the label is paused; the operand is gone when they are. They are pods of DaemonSets
	// that select nodes by the label. There may be more than one: the MPS control daemon follows the device plugin's label.
	// A pod of another controller that selects by the label is not among them: no controller removes it when the label changes.
	Pods []holders.Pod
}

// Operands lists the operands that have a label on the node, in the order of labels. Pods are all pods of the node. The operator's validations
// (nvidia-cuda-validator, nvidia-device-plugin-validator) are bound to the node without any selector; while they run they are users of a GPU like
// others.
func Operands(node *corev1.Node, pods []corev1.Pod, labels []string) []Operand {
	var out []Operand
	for _, label := range labels {
		value, present := node.Labels[label]
		if !present {
			continue
		}
		o := Operand{Label: label, Value: value, State: OperandForeign}
		switch value {
		case DeployedValue:
			o.State = OperandRunning
		case PausedValue:
			o.State = OperandPaused
		}
		for i := range pods {
			if p := holders.Describe(&pods[i]); p.Daemon && requiresLabel(&pods[i], label) {
				o.Pods = append(o.Pods, p)
			}
		}
		out = append(out, o)
	}
	return out
}

// requiresLabel reports whether the pod is still there, and its selector or each term of its required affinity excludes a node with the label paused.
func requiresLabel(pod *corev1.Pod, label string) bool {
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return false // its containers have ended
	}
	if value, selects := pod.Spec.NodeSelector[label]; selects && value != PausedValue {
		return true
	}
	affinity := pod.Spec.Affinity
	if affinity == nil || affinity.NodeAffinity == nil {
		return false
	}
	required := affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if required == nil {
		return false
	}
	for _, term := range required.NodeSelectorTerms {
		if !slices.ContainsFunc(term.MatchExpressions, func(e corev1.NodeSelectorRequirement) bool {
			return e.Key == label && !allowsPaused(e)
		}) {
			return false
		}
	}
	return len(required.NodeSelectorTerms) > 0
}

// allowsPaused reports whether a paused label meets the requirement.
func allowsPaused(e corev1.NodeSelectorRequirement) bool {
	switch e.Operator {
	case corev1.NodeSelectorOpIn:
		return slices.Contains(e.Values, PausedValue)
	case corev1.NodeSelectorOpNotIn:
		return !slices.Contains(e.Values, PausedValue)
	case corev1.NodeSelectorOpExists:
		return true
	case corev1.NodeSelectorOpDoesNotExist, corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt: // the label exists, and is no number
		return false
	default: // of a newer API: if the agent waits for such a pod in vain, it undoes the change; one that it overlooks could keep the GPU
		return false
	}
}

// SetLabels writes only the labels that values names, in a patch of types.MergePatchType. It is guarded like Fence's patches: a decision by a label's
// value may be wrong once another tool has changed it.
func SetLabels(node *corev1.Node, values map[string]string) ([]byte, error) {
	p, err := guardedPatch(node)
	if err != nil {
		return nil, fmt.Errorf("labelling node %s: %w", node.Name, err)
	}
	p.Metadata.Labels = values
	return p.bytes()
}

// LeftPaused lists those of the operands' labels that have the value, sorted: operands that stay paused though no change is under
// way. With PausedValue that happens after a change when the k8s-driver-manager, which found the agent's pause at its start, puts it back.
// It leaves out labels that are no operand's: any tool may write the value there.
func LeftPaused(node *corev1.Node, operands []string, value string) []string {
	var out []string
	for _, label := range operands {
		if node.Labels[label] == value {
			out = append(out, label)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
