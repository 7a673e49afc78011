package offer

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// textUnknown is what users read in place of a capacity that is not known.
const textUnknown = "not known"

// WithdrawnFrom returns what has been withdrawn from the pod; nil if nothing has.
func WithdrawnFrom(seen *state.Observed, pod holders.Pod) *state.Withdrawn {
	return find(seen.Capacity.Withdrawn, pod)
}

func find(withdrawn []state.Withdrawn, pod holders.Pod) *state.Withdrawn {
	for i, w := range withdrawn {
		if w.Pod.UID == pod.UID && w.Pod.String() == pod.String() {
			return &withdrawn[i]
		}
	}
	return nil
}

// WithdrawnTexts says which pods hold what has been withdrawn from them, pod by pod.
func WithdrawnTexts(seen *state.Observed) []string {
	return withdrawnTexts(seen, seen.Capacity.Withdrawn)
}

func withdrawnTexts(seen *state.Observed, withdrawn []state.Withdrawn) []string {
	var out []string
	for _, w := range withdrawn {
		text := fmt.Sprintf("pod %s holds %s, which kubelet now allocates as %s", w.Pod, replicaNames(seen, w.Replicas), w.As)
		if len(w.Gone) > 0 {
			text = fmt.Sprintf("pod %s has %s, which NVIDIA's DRA driver no longer advertises", w.Pod, sanitize.Names(w.Gone))
		}
		if others := allocatedTo(seen, withdrawn, w); len(others) > 0 {
			text += ": " + others[0] + " has it too"
		}
		if w.Pod.Terminating {
			text += "; it is ending"
		}
		out = append(out, text)
	}
	return out
}

// longestID bounds the id of a device in a message. A MIG device of an older driver has 90 characters.
const longestID = 110

func replicaNames(seen *state.Observed, replicas []plan.Replica) string {
	var names []string
	for _, r := range replicas {
		device := capacity.DeviceOf(r.ID)
		text := sanitize.Cut(seen.DeviceName(device), longestID) + " (" + r.Resource
		if n := strings.TrimPrefix(r.ID, device+nvml.ReplicaSeparator); n != r.ID {
			text += ", replica " + sanitize.Cut(n, longestID)
		}
		names = append(names, text+")")
	}
	return sanitize.Names(names)
}

// allocatedTo names the other pods that have one of these devices, by what kubelet allocates now.
func allocatedTo(seen *state.Observed, withdrawn []state.Withdrawn, w state.Withdrawn) []string {
	var out []string
	for _, pod := range seen.Holders.Pods {
		if find(withdrawn, pod) == nil && slices.ContainsFunc(replicasOf(seen, pod), func(has plan.Replica) bool {
			return slices.Contains(seen.Kubelet.Offered[has.Resource], has.ID) &&
				slices.ContainsFunc(w.Replicas, func(r plan.Replica) bool { return capacity.DeviceOf(r.ID) == capacity.DeviceOf(has.ID) })
		}) {
			out = append(out, pod.String())
		}
	}
	return out
}

// EndedByReboot reports whether the pod holds nothing although its claims have devices: a reboot has removed them, and ended the pod's containers with that.
// Only claims that the agent has read show that the pod has devices. A device that the driver advertises counts as always. If the driver lacks a device of the
// GPUs before the agent has touched one, the pod may have just that device, and has perhaps started since the reboot.
func EndedByReboot(seen *state.Observed, pod holders.Pod) bool {
	return seen.RebootedSinceVerified() && seen.DRA.Complete && (seen.Journal != nil || !(driver{seen}).lacksDevices()) &&
		!slices.ContainsFunc(pod.Sources, func(s holders.Source) bool { return s != holders.SourceClaim }) &&
		!slices.ContainsFunc(pod.DeviceClaims, func(name string) bool {
			return !seen.DRA.Claims[holders.PodClaim{Pod: pod.UID, Name: name}].IsSettledFor(pod.UID)
		})
}
