package drain

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// reactor is a program that lets a pod go, or moves it, because its node is cordoned or its eviction was requested. What keeps the pod before the cordon
// is no sign that it stays. The program is known by a label of the pod. A tenant can write that too, and gains time behind the cordon by it, no more.
type reactor struct {
	owns func(labels map[string]string) bool
	may  string // what the pod may do until its deadline: "its Slurm job may run"

	moves func(denial string) bool            // whether a webhook's denial is the program's, and it moves the pod; nil if each one counts
	busy  func(holders.Pod) string            // why the pod is not to be evicted yet, though no budget keeps it; empty if it may be. Nil for never
	ends  func(holders.Pod) (time.Time, bool) // when the pod's own work has ended at the latest, if that is known; nil for never
}

// reactors are the known ones. Others need a rule of the settings, such as CloudNativePG and Strimzi's drain cleaner: their pods do not show whether they will
// react, since a single instance stays, and the drain cleaner may not be installed.
var reactors = []reactor{
	{ // Slinky's slurm-operator, api/v1beta1/well_known.go: it drains the Slurm node of a NodeSet's pod when the Kubernetes node is cordoned
		owns: func(labels map[string]string) bool {
			for key := range labels {
				if strings.HasPrefix(key, slinky) {
					return true
				}
			}
			return false
		},
		may: slurmJob, busy: slurmBusy, ends: slurmEnds,
	},
	{ // Nebius' soperator, internal/consts/label.go: it takes a worker out of its budget when its Slurm jobs have ended
		owns: func(labels map[string]string) bool { return labels["slurm.nebius.ai/worker"] == "true" },
		may:  slurmJob,
	},
	{ // KubeVirt, pod-eviction-admitter.go: its webhook denies the eviction, and migrates the machine because of it. Of one that cannot migrate it says so
		owns:  func(labels map[string]string) bool { return labels["kubevirt.io"] == "virt-launcher" },
		may:   "its virtual machine may migrate",
		moves: func(denial string) bool { return strings.Contains(strings.ToLower(denial), "evacuation") },
	},
}

// Keys of Slinky's slurm-operator.
const (
	slinky           = "nodeset.slinky.slurm.net/"
	slinkyDeadline   = slinky + "pod-deadline" // annotation: when Slurm's time limits end the jobs of the node, RFC 3339
	slurmStatePrefix = "SlurmNodeState"        // of the pod's conditions, with a state of the Slurm node
)

const (
	slurmJob      = "its Slurm job may run" // what such a pod may do
	longestAsked  = 720 * time.Hour         // for how long an annotation may have the agent ask for a pod
	longestMoment = 64                      // bytes of a time; a longer text is none
)

// reactorOf finds the program that reacts for the pod; nil if none is known.
func reactorOf(pod holders.Pod) *reactor {
	if i := slices.IndexFunc(reactors, func(r reactor) bool { return r.owns(pod.Labels) }); i >= 0 {
		return &reactors[i]
	}
	return nil
}

// slurmBusy says why Slurm may still have work on the node, by the states that the operator reports: a job, or a node that it has not drained and that
// may get one at any moment. Without any state only the budget counts.
func slurmBusy(pod holders.Pod) string {
	states := map[string]bool{}
	for _, c := range pod.Conditions {
		if state, is := strings.CutPrefix(string(c.Type), slurmStatePrefix); is {
			states[state] = c.Status == corev1.ConditionTrue
		}
	}
	switch {
	case len(states) == 0:
		return ""
	case states["Allocated"], states["Mixed"], states["Completing"]:
		return "Slurm has a job on it"
	case !states["Drain"], states["Undrain"]:
		return "Slurm has not drained it yet"
	}
	return ""
}

func slurmEnds(pod holders.Pod) (time.Time, bool) {
	text := pod.Annotations[slinkyDeadline]
	if len(text) > longestMoment {
		return time.Time{}, false
	}
	at, err := time.Parse(time.RFC3339, text)
	return at, err == nil
}
