package show

import (
	"context"
	"fmt"
	"strings"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// requesting is a pod that requests GPUs, as its namespace shows it.
type requesting struct {
	Pod      string   `json:"pod"` // by namespace and name
	Node     string   `json:"node,omitempty"`
	Requests []string `json:"requests"`
	Devices  []string `json:"devices,omitempty"` // that its claims have, by the names of the DRA driver
	// Scheduler is why it is pending, in the scheduler's words.
	Scheduler string `json:"scheduler,omitempty"`
	// Agent is the newest Event of an agent about it, as that it does not use its GPU. Any user who may create Events in the namespace can write one.
	Agent *agentEvent `json:"agent,omitempty"`
}

// agentEvent is an Event of an agent.
type agentEvent struct {
	Reason  string    `json:"reason"`
	Message string    `json:"message"`
	At      time.Time `json:"at"`
}

// requested are the pods of a namespace that request GPUs. A user who may not read nodes sees them. Without the right to list claims, their devices are missing.
func requested(ctx context.Context, client kube.Interface, namespace string) (uses, error) {
	all := uses{Uses: []use{}, Requested: []requesting{}, Notes: []string{
		"how busy pods are is not known: reading nodes needs rights that you lack. kubectl gpuslice advise says more of pending pods",
	}}
	pods, err := client.Pods(namespace).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return all, fmt.Errorf("listing pods of namespace %s: %w", namespace, err)
	}
	devices := map[types.UID][]string{}
	if claims, err := client.ResourceClaims(namespace).List(ctx, metav1.ListOptions{ResourceVersion: "0"}); err == nil {
		for i := range claims.Items {
			for _, of := range claims.Items[i].Status.ReservedFor {
				devices[of.UID] = append(devices[of.UID], allocated(&claims.Items[i])...)
			}
		}
	}
	said := agentsEvents(ctx, client, namespace)
	for i := range pods.Items {
		p := &pods.Items[i]
		gpus := judge.Asked(p)
		if len(gpus) == 0 || judge.Ended(p) {
			continue
		}
		r := requesting{Pod: p.Namespace + "/" + p.Name, Node: p.Spec.NodeName, Requests: gpus, Devices: devices[p.UID], Agent: said[p.UID]}
		if isPending(p) {
			r.Scheduler = schedulerOf(p)
		}
		all.Requested = append(all.Requested, r)
		all.Notes = append(all.Notes, r.said()...)
	}
	return all, nil
}

// said is what the scheduler and the agents say of the pod, each in a sentence.
func (r *requesting) said() (out []string) {
	if r.Scheduler != "" {
		out = append(out, r.Pod+" is pending: "+r.Scheduler)
	}
	if e := r.Agent; e != nil {
		out = append(out, fmt.Sprintf("%s %s: %s", e.At.Format("2006-01-02 15:04:05Z"), e.Reason, e.Message))
	}
	return out
}

// mostEvents bounds the Events that are read of a namespace.
const mostEvents = 500

// agentsEvents are the newest Events of agents about the pods of a namespace, by the pod's UID. Without the right to list Events there are none.
func agentsEvents(ctx context.Context, client kube.Interface, namespace string) map[types.UID]*agentEvent {
	out := map[types.UID]*agentEvent{}
	from := fields.Set{"source": config.FieldManager, "involvedObject.kind": "Pod"}
	list, err := client.Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: from.String(), Limit: mostEvents})
	if err != nil {
		return out
	}
	for i := range list.Items {
		e := &list.Items[i]
		about := e.InvolvedObject.UID
		if before := out[about]; e.Source.Component != config.FieldManager || before != nil && !before.At.Before(e.LastTimestamp.Time) {
			continue
		}
		out[about] = &agentEvent{
			sanitize.Cut(e.Reason, cluster.LongestWord), sanitize.Message(e.Message, sanitize.Longest), e.LastTimestamp.UTC(),
		}
	}
	return out
}

// allocated names the devices that a claim has.
func allocated(c *resourcev1.ResourceClaim) (out []string) {
	if c.Status.Allocation == nil {
		return nil
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		out = append(out, sanitize.Cut(r.Device, cluster.LongestWord))
	}
	return out
}

var requestedColumns = []column[requesting]{
	{name: "pod", shrinks: leastPodName, of: func(r *requesting, _ output.Paper) string { return r.Pod }},
	{name: "node", folds: true, of: func(r *requesting, _ output.Paper) string { return r.Node }},
	{name: "requests", folds: true, of: func(r *requesting, _ output.Paper) string { return sanitize.Listed(r.Requests) }},
	{name: "devices", folds: true, of: func(r *requesting, _ output.Paper) string { return strings.Join(r.Devices, " ") }},
}
