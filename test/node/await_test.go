package node_test

import (
	"context"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// await watches the node until done is satisfied with it.
func (r *rig) await(what string, done func(*corev1.Node) bool) *corev1.Node {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	n, satisfied := r.seek(ctx, done)
	if !satisfied {
		r.t.Fatalf("waiting for %s: %v; the node says:\n%s", what, context.Cause(ctx), words(n))
	}
	return n
}

// seek watches the node until done is satisfied with it, or ctx ends. It returns the node as last seen.
func (r *rig) seek(ctx context.Context, done func(*corev1.Node) bool) (last *corev1.Node, satisfied bool) {
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.CoreV1().Nodes().Watch(ctx, metav1.SingleObject(metav1.ObjectMeta{Name: r.Name}))
	}
	err := clustertest.Follow(ctx, open, nil, func(_ watch.EventType, n *corev1.Node) bool {
		last = n
		return done(n)
	})
	if err != nil && ctx.Err() == nil {
		r.t.Fatalf("watching node %s: %v", r.Name, err)
	}
	return last, err == nil
}

// awaitReason watches the node until GPUPartitionReady has the reason.
func (r *rig) awaitReason(reason config.Reason) *corev1.Node {
	r.t.Helper()
	return r.await("reason "+string(reason), func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(reason)
	})
}

// awaitConverged watches the node until it is as the label asks, and given back.
func (r *rig) awaitConverged(name string) *corev1.Node {
	r.t.Helper()
	return r.await("config "+name, converged(name))
}

// converged is true of a node that is as the label asks, and given back.
func converged(name string) func(*corev1.Node) bool {
	return func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Status == corev1.ConditionTrue && strings.HasPrefix(c.Message, name+":") &&
			n.Labels[config.LabelMIGConfigState] == string(config.StateSuccess)
	}
}

// awaitOffered watches the node until kubelet offers so many of the resource.
func (r *rig) awaitOffered(resource string, n int) {
	r.t.Helper()
	r.await(fmt.Sprintf("%s %d", resource, n), func(o *corev1.Node) bool { return offered(o)[resource] == n })
}

// awaitRunning waits until the pod runs.
func (r *rig) awaitRunning(namespace, name string) {
	r.t.Helper()
	r.awaitPod(namespace, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", name).String()}, running)
}

// awaitPod watches the pods that are selected until one of this node is as wanted.
func (r *rig) awaitPod(namespace string, selected metav1.ListOptions, wanted func(*corev1.Pod) bool) *corev1.Pod {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	var last *corev1.Pod
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.CoreV1().Pods(namespace).Watch(ctx, selected)
	}
	err := clustertest.Follow(ctx, open, nil, func(did watch.EventType, p *corev1.Pod) bool {
		last = p
		return p.Spec.NodeName == r.Name && did != watch.Deleted && wanted(p)
	})
	if err == nil {
		return last
	}
	seen := "there is none"
	if last != nil {
		seen = fmt.Sprintf("%s on node %q: %s %s %s", last.Name, last.Spec.NodeName, last.Status.Phase, last.Status.Reason, last.Status.Message)
	}
	r.t.Fatalf("waiting for a pod of namespace %s (%s%s): %v; the last seen is %s", namespace,
		selected.LabelSelector, selected.FieldSelector, err, seen)
	return nil
}

func running(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodRunning && p.DeletionTimestamp == nil
}

// givenBack fails the test if anything of a change is left on the node.
func (r *rig) givenBack(n *corev1.Node) {
	r.t.Helper()
	if n.Spec.Unschedulable {
		r.t.Error("the node is still cordoned")
	}
	for _, taint := range n.Spec.Taints {
		if taint.Key == config.TaintRepartitioning {
			r.t.Error("the node still has our taint")
		}
	}
	if j, ok := n.Annotations[config.AnnotationJournal]; ok {
		r.t.Errorf("the node still has a journal: %s", j)
	}
}

func condition(n *corev1.Node) *corev1.NodeCondition {
	for i := range n.Status.Conditions {
		if n.Status.Conditions[i].Type == config.ConditionGPUPartitionReady {
			return &n.Status.Conditions[i]
		}
	}
	return nil
}

// offered is what the node has to give out of NVIDIA's resources, without those at 0.
func offered(n *corev1.Node) map[string]int {
	out := map[string]int{}
	for name, q := range n.Status.Allocatable {
		if strings.HasPrefix(string(name), "nvidia.com/") && !q.IsZero() {
			out[string(name)] = int(q.Value())
		}
	}
	return out
}

func words(n *corev1.Node) string {
	if n == nil {
		return "nothing"
	}
	c := condition(n)
	if c == nil {
		return fmt.Sprintf("no condition; allocatable %v", offered(n))
	}
	return fmt.Sprintf("%s=%s %s: %s; allocatable %v", c.Type, c.Status, c.Reason, c.Message, offered(n))
}
