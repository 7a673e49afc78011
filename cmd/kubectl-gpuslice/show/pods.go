package show

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// viewTime is how long the agents have to answer which pods use the GPUs: users do not want to wait for an agent in the middle of a step.
const viewTime = 5 * time.Second

// mostAsking bounds the list of pods with a known node and no known device.
const mostAsking = 32

// seePods adds which pods use the GPUs, by the agents' answers; without an answer, which pods of the node request GPUs.
func (s *statusRequest) seePods(ctx context.Context, client kube.Interface, nodes []corev1.Node, views []nodeView) error {
	said, why, err := s.askAgents(ctx, client, nodes, views)
	if err != nil {
		return err
	}
	var silent []string
	for i := range views {
		v := &views[i]
		if !v.Agent {
			v.Pods.Why = "no agent"
			continue
		}
		v.Pods.Why = why
		if a := said[v.Node]; a == nil || !v.heed(a) {
			silent = append(silent, v.Node)
		}
	}
	known := asking(ctx, client, silent)
	for i := range views {
		views[i].Pods.Asking = known[views[i].Node]
	}
	return nil
}

// askAgents asks the agents that have ever written anything, and says why others have not answered.
func (s *statusRequest) askAgents(ctx context.Context, client kube.Interface, nodes []corev1.Node, views []nodeView) (said map[string]*cluster.Asked, why string, err error) {
	if !s.ask {
		return nil, "--ask=false", nil
	}
	var asked []corev1.Node
	for i := range views {
		if views[i].Agent {
			asked = append(asked, nodes[i])
		}
	}
	said = map[string]*cluster.Asked{}
	q, err := cluster.Inquire(ctx, client, asked, cluster.Of(config.RequestDiagnosis), viewTime, &cli.Printer{W: io.Discard}) // a request that stays on a node does no harm
	for _, a := range q.Nodes {
		said[a.Name] = a
	}
	switch {
	case apierrors.IsForbidden(err):
		return said, "asking the agent needs the verb patch on nodes, which you lack", nil
	case err != nil && ctx.Err() != nil:
		return nil, "", &cli.ExitError{Code: cli.ExitInterrupted, Err: err}
	case err != nil:
		return nil, "", err
	default:
		return said, fmt.Sprintf("the agent has not answered within %s", viewTime), nil
	}
}

// heed takes the agent's answer, and reports whether that says which pods use the GPUs.
func (v *nodeView) heed(a *cluster.Asked) bool {
	switch {
	case a.Answer != nil && a.Answer.Diagnosis != nil:
		v.addDiagnosis(a.Answer.Diagnosis)
		return true
	case a.Answer != nil && a.Answer.Refused != "": // it is too long for the annotation
		v.Pods.Why = "the agent does not say: " + a.Answer.Refused
	case a.Lost != "":
		v.Pods.Why = a.Lost
	}
	return false
}

// asking returns the pods of each node that request GPUs, or may by claims, with their requests; none if the user may not list pods. For several nodes it reads
// all pods at once, from the API server's cache.
func asking(ctx context.Context, client kube.Interface, nodes []string) map[string][]string {
	o := metav1.ListOptions{ResourceVersion: "0"}
	switch len(nodes) {
	case 0:
		return nil
	case 1:
		o = metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", nodes[0]).String()}
	}
	list, err := client.Pods("").List(ctx, o)
	if err != nil {
		return nil
	}
	out := map[string][]string{}
	for i := range list.Items {
		p := &list.Items[i]
		if !slices.Contains(nodes, p.Spec.NodeName) || judge.Ended(p) {
			continue
		}
		if gpus := judge.Asked(p); len(gpus) > 0 {
			out[p.Spec.NodeName] = append(out[p.Spec.NodeName], fmt.Sprintf("%s/%s (%s)", p.Namespace, p.Name, strings.Join(gpus, ", ")))
		}
	}
	for node, pods := range out {
		slices.Sort(pods)
		if more := len(pods) - mostAsking; more > 0 {
			out[node] = append(pods[:mostAsking], fmt.Sprintf("and %d more", more))
		}
	}
	return out
}
