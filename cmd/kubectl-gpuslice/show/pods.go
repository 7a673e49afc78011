package show

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"

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

// seePods adds which pods use the GPUs: by the agents' answers, or by their last reports where they have not answered. Of a node without either it adds which
// pods request GPUs.
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
	pods, other := podsOn(ctx, client, silent, s.namespace)
	for i := range views {
		if v := &views[i]; slices.Contains(silent, v.Node) && !v.addReported(&nodes[i], pods, other) {
			if v.Pods.Asking = asking(v.Node, pods); other != missing && len(v.Pods.Asking) > 0 {
				v.Pods.Asking = append(v.Pods.Asking, "perhaps more in namespaces that you may not see")
			}
		}
	}
	return nil
}

// These stand for a pod of a report that no list names.
const (
	missing  = "a pod that the API server does not list" // as one that is gone
	unlisted = "a pod that you may not list"
	unread   = "a pod that could not be listed"
)

// addReported adds which pods have what by the agent's last report, and reports whether that says so. A pod that is not among pods is other.
func (v *nodeView) addReported(n *corev1.Node, pods []corev1.Pod, other string) bool {
	r := cluster.ReportOf(n)
	if r.Status.Held == nil || v.Silent || r.StandsAlone() {
		return false
	}
	names := map[types.UID]string{}
	for i := range pods {
		names[pods[i].UID] = pods[i].Namespace + "/" + pods[i].Name
	}
	for _, held := range r.Status.Held[:min(len(r.Status.Held), mostHeld)] {
		name := cmp.Or(names[held.Pod], other)
		given := false
		for _, on := range held.On[:min(len(held.On), mostInstances)] {
			given = v.give(name, on) || given
		}
		if !given && !slices.Contains(v.Pods.Anywhere, name) {
			v.Pods.Anywhere = append(v.Pods.Anywhere, name)
		}
	}
	v.Pods.Known, v.Pods.Why = true, "as its agent last reported, without processes outside of pods: "+v.Pods.Why
	return true
}

// mostHeld bounds the pods of a report, which any user who can write the node can write.
const mostHeld = 1024

// give puts a pod on a GPU, "3", or on an instance, "3/4", as a report names them.
func (v *nodeView) give(pod, on string) bool {
	index, start, isPart := strings.Cut(on, "/")
	for g := range v.GPUs {
		gpu := &v.GPUs[g]
		if gpu.Missing || strconv.Itoa(gpu.Index) != index {
			continue
		}
		if !isPart {
			gpu.Pods = append(gpu.Pods, pod)
			return true
		}
		for i := range gpu.Instances {
			if instance := &gpu.Instances[i]; strconv.Itoa(instance.At) == start {
				instance.Pods = append(instance.Pods, pod)
				return true
			}
		}
	}
	return false
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

// podsOn lists the pods of nodes, and says what a pod is that the list lacks. For several nodes it reads all pods at once, from the API server's cache. A user
// who may not list pods of all namespaces has those of one.
func podsOn(ctx context.Context, client kube.Interface, nodes []string, namespace string) (pods []corev1.Pod, other string) {
	o := metav1.ListOptions{ResourceVersion: "0"}
	switch len(nodes) {
	case 0:
		return nil, unread
	case 1:
		o = metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", nodes[0]).String()}
	}
	list, err := client.Pods("").List(ctx, o)
	if other = missing; apierrors.IsForbidden(err) {
		other = unlisted
		list, err = client.Pods(namespace).List(ctx, o)
	}
	switch {
	case apierrors.IsForbidden(err):
		return nil, unlisted
	case err != nil:
		return nil, unread
	default:
		return list.Items, other
	}
}

// asking returns the pods of the node that request GPUs, or may by claims, with their requests.
func asking(node string, pods []corev1.Pod) (out []string) {
	for i := range pods {
		p := &pods[i]
		if p.Spec.NodeName != node || judge.Ended(p) {
			continue
		}
		if gpus := judge.Asked(p); len(gpus) > 0 {
			out = append(out, fmt.Sprintf("%s/%s (%s)", p.Namespace, p.Name, strings.Join(gpus, ", ")))
		}
	}
	slices.Sort(out)
	if more := len(out) - mostAsking; more > 0 {
		out = append(out[:mostAsking], fmt.Sprintf("and %d more", more))
	}
	return out
}
