package agent

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/nodekeys"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// publishedOn are the keys that a profile has put on the node, of an agent that kept no record of its host, as before an upgrade, or on a host
// that was installed anew.
func (a *Agent) publishedOn(seen *observed) nodekeys.Keys {
	profiles, err := seen.catalogOfProfiles()
	if err != nil {
		return nodekeys.Keys{}
	}
	return nodekeys.Noted(seen.node, profiles)
}

// unbearable names a taint that would keep the device plugin away when it is started the next time.
func unbearable(seen observed, taints []corev1.Taint) string {
	for _, pod := range slices.Concat(seen.devicePlugin.pods, seen.devicePlugin.mpsDaemons) {
		for _, t := range taints {
			if t.Effect == corev1.TaintEffectNoSchedule && !holders.Tolerates(pod.Spec.Tolerations, t) {
				return fmt.Sprintf("pod %s/%s does not tolerate the taint %s, and would not come back: add the toleration to its DaemonSet",
					pod.Namespace, pod.Name, t.ToString())
			}
		}
	}
	return ""
}

// publish writes the profile's labels and taints to the node. The host's record has those that will be ours before, and those that are
// after.
func (a *Agent) publish(ctx context.Context, seen observed, want nodekeys.Keys) error {
	ours := seen.record.published
	_, _, note := nodekeys.Settled(seen.node, ours, want)
	during := note.And(ours)
	r := a.record.now
	r.Learnt = learntOf(seen.record.status, during)
	if seen.gives {
		a.record.keep(ctx, r, a.clock.Now())
	} else if err := a.record.write(ctx, r, a.clock.Now()); err != nil {
		return a.unrecorded(seen, err)
	}
	var body []byte
	err := a.nodes.Patch(ctx, seen.node, func(node *corev1.Node) (_ []byte, err error) {
		body, note, err = nodekeys.Patch(node, ours, want)
		return body, err
	})
	switch {
	case err == nil:
		a.learn(ctx, learntOf(seen.record.status, note))
	case refused(err): // what stands there now is of somebody else
		a.learn(ctx, learntOf(seen.record.status, ours))
	}
	return err
}
