package drain

import (
	"fmt"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// endSlack is how long after its grace a pod may take before a message says what keeps it. Kubelet kills its processes and unmounts its volumes then,
// which takes seconds.
const endSlack = 10 * time.Second

// terminating says how long a terminating pod has left, or what keeps it.
func (r *round) terminating(pod holders.Pod) string {
	text := "terminating"
	if !pod.GraceEnds.IsZero() {
		verb := "ends"
		if !r.now.Before(pod.GraceEnds) {
			verb = "ended"
		}
		text = fmt.Sprintf("terminating, its grace %s at %s", verb, r.shortTime(pod.GraceEnds, time.TimeOnly))
	}
	switch {
	case r.policy.KubeletSilent != "":
		return text + "; kubelet cannot end it: " + r.policy.KubeletSilent
	case r.late(pod):
		return text + "; " + r.whatKeeps(pod)
	default:
		return text
	}
}

func (r *round) late(pod holders.Pod) bool {
	return !pod.GraceEnds.IsZero() && !r.now.Before(pod.GraceEnds.Add(endSlack))
}

// whatKeeps says what keeps a pod that is past its grace period, the first cause first: a finalizer can wait for a container. Claims come right after
// the containers: kubelet reports that a pod has ended only when the drivers of its claims have released the devices.
func (r *round) whatKeeps(pod holders.Pod) string {
	var causes []string
	switch n := len(pod.Running); {
	case n == 1:
		causes = append(causes, fmt.Sprintf("container %s still runs: the container runtime or the kernel does not end it, see kubelet's log", pod.Running[0]))
	case n > 1:
		causes = append(causes, fmt.Sprintf("containers %s still run: the container runtime or the kernel does not end them, see kubelet's log",
			strings.Join(pod.Running, ", ")))
	case len(pod.DeviceClaims) > 0 && r.policy.ClaimDriverAway != "":
		causes = append(causes, fmt.Sprintf("its containers have ended, but kubelet cannot release its resource claims (%s): their DRA driver %s "+
			"does not run on this node: %s", strings.Join(pod.DeviceClaims, ", "), holders.ClaimDriver, r.policy.ClaimDriverAway))
	case len(pod.Finalizers) > 0:
	case len(pod.Claims) > 0:
		text := fmt.Sprintf("its containers have ended, and kubelet is still unmounting its volumes (claims %s), see kubelet's log", strings.Join(pod.Claims, ", "))
		if r.policy.Keeps != "" {
			text += "; a CSI driver whose pod has gone from this node has to tolerate the taint " + r.policy.Keeps
		}
		causes = append(causes, text)
	default:
		causes = append(causes, "its containers have ended, and kubelet is still cleaning up, see kubelet's log")
	}
	if len(pod.Finalizers) > 0 {
		causes = append(causes, fmt.Sprintf("finalizers %s keep it until the programs that set them remove them", strings.Join(pod.Finalizers, ", ")))
	}
	return strings.Join(causes, "; ")
}

// runsUnlisted says why a pod that the API server does not list still counts as running.
func runsUnlisted(pod holders.Pod) string {
	const text = "the API server does not list it; "
	var processes []string
	for _, s := range pod.Sources {
		if s == holders.SourceKubelet || s == holders.SourceClaim {
			return text + "kubelet still has its devices in use"
		}
		processes = append(processes, string(s))
	}
	return text + "its processes still have a GPU: " + strings.Join(processes, ", ")
}

// shortTime writes a time for users who read the message today. Moments, not spans: a message that changes by itself would be
// written to the node again and again.
func (r *round) shortTime(t time.Time, layout string) string {
	t = t.UTC()
	if t.Format(time.DateOnly) == r.now.UTC().Format(time.DateOnly) {
		return t.Format(layout) + "Z"
	}
	return t.Format(time.DateOnly+"T"+layout) + "Z"
}
