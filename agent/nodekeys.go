package agent

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/nodekeys"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/drain/holders"
)

// publishedOn are the keys that a profile has put on the node, of an agent that kept no record of its host, as before an upgrade, or on a host
// that was installed anew.
func (a *Agent) publishedOn(seen *state.Observed) nodekeys.Keys {
	profiles, err := seen.CatalogOfProfiles()
	if err != nil {
		return nodekeys.Keys{}
	}
	return nodekeys.Noted(seen.Node, profiles)
}

// unbearable names a taint that would keep the device plugin away when it is started the next time.
func unbearable(seen state.Observed, taints []corev1.Taint) string {
	for _, pod := range slices.Concat(seen.DevicePlugin.Pods, seen.DevicePlugin.MPSDaemons) {
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
func (a *Agent) publish(ctx context.Context, seen state.Observed, want nodekeys.Keys) error {
	ours := seen.Record.Published
	_, _, note := nodekeys.Settled(seen.Node, ours, want)
	during := note.And(ours)
	r := a.record.Now
	r.Learnt = hostrecord.LearntOf(seen.Record.Status, during)
	if seen.Gives {
		a.record.Keep(ctx, r, a.clock.Now())
	} else if err := a.record.Write(ctx, r, a.clock.Now()); err != nil {
		return a.unrecorded(seen, err)
	}
	var body []byte
	err := a.nodes.Patch(ctx, seen.Node, func(node *corev1.Node) (_ []byte, err error) {
		body, note, err = nodekeys.Patch(node, ours, want)
		return body, err
	})
	switch {
	case err == nil:
		a.learn(ctx, hostrecord.LearntOf(seen.Record.Status, note))
	case refused(err): // what stands there now is of somebody else
		a.learn(ctx, hostrecord.LearntOf(seen.Record.Status, ours))
	}
	return err
}
