package show

import (
	"context"
	"fmt"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// requesting is a pod that requests GPUs, as its namespace shows it.
type requesting struct {
	Pod      string   `json:"pod"` // by namespace and name
	Node     string   `json:"node,omitempty"`
	Requests []string `json:"requests"`
	Devices  []string `json:"devices,omitempty"` // that its claims have, by the names of the DRA driver
}

// requested are the pods of a namespace that request GPUs: what a user sees who may not read nodes. Without the right to list claims, their devices are missing.
func requested(ctx context.Context, client kube.Interface, namespace string) (uses, error) {
	all := uses{Uses: []use{}, notes: []string{
		"how busy they are is not known: reading nodes needs rights that you lack; kubectl gpuslice advise says why pods are pending",
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
	for i := range pods.Items {
		p := &pods.Items[i]
		if gpus := judge.Asked(p); len(gpus) > 0 && !judge.Ended(p) {
			all.Requested = append(all.Requested, requesting{p.Namespace + "/" + p.Name, p.Spec.NodeName, gpus, devices[p.UID]})
		}
	}
	return all, nil
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
