package node_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// slinkyKey begins the labels of Slinky's slurm-operator, and slurmState the conditions by which it shows the states of a Slurm node.
const (
	slinkyKey  = "nodeset.slinky.slurm.net/"
	slurmState = "SlurmNodeState"
	podProtect = slinkyKey + "pod-protect"
)

// slurm stands in for Slinky's slurm-operator and for Slurm: each node has a job at any moment, and the pod a label by which the one budget of the
// cluster keeps it. When the Kubernetes node is cordoned, no further job starts, and after the last one the label goes.
type slurm struct {
	t         *testing.T
	client    kubernetes.Interface
	namespace string
	protects  bool // the operator protects busy pods by the budget

	mu    sync.Mutex
	nodes map[string]*slurmNode // by the Kubernetes node
	jobs  int                   // that have ended
	cut   []string              // pods that were ended during a job

	gone map[string]bool             // nodes that are about to go
	left map[types.UID]time.Duration // how long after the end of its last job the pod was evicted
}

// slurmNode is what Slurm knows of one node.
type slurmNode struct {
	pod       types.UID
	name      string
	drain     bool
	job       int // counts the jobs; odd while one runs
	drainedAt time.Time
	leftAt    time.Time
}

// newSlurm starts the stand-in, with the budget of the cluster.
func newSlurm(t *testing.T, protects bool) *slurm {
	t.Helper()
	s := &slurm{
		t: t, client: clustertest.Client(t), namespace: clustertest.Namespace(t), protects: protects, nodes: map[string]*slurmNode{},
		left: map[types.UID]time.Duration{}, gone: map[string]bool{},
	}
	none := intstr.FromInt32(0)
	_, err := s.client.PolicyV1().PodDisruptionBudgets(s.namespace).Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "slurm-workers-pdb"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &none, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{podProtect: "true"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var watches sync.WaitGroup
	watches.Go(func() {
		s.follow(ctx, func(ctx context.Context) error {
			open := func(ctx context.Context) (watch.Interface, error) {
				return s.client.CoreV1().Pods(s.namespace).Watch(ctx, metav1.ListOptions{})
			}
			return clustertest.Follow(ctx, open, nil, func(did watch.EventType, p *corev1.Pod) bool { s.podSeen(ctx, did, p); return false })
		})
	})
	watches.Go(func() {
		s.follow(ctx, func(ctx context.Context) error {
			open := func(ctx context.Context) (watch.Interface, error) {
				return s.client.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{})
			}
			return clustertest.Follow(ctx, open, nil, func(_ watch.EventType, n *corev1.Node) bool { s.nodeSeen(ctx, n); return false })
		})
	})
	t.Cleanup(func() { stop(); watches.Wait() })
	return s
}

func (s *slurm) follow(ctx context.Context, watched func(context.Context) error) {
	if err := watched(ctx); err != nil && ctx.Err() == nil {
		s.t.Errorf("the stand-in for Slurm: %v", err)
	}
}

// podSeen starts the first job of a pod that has just come to run, and notes a pod that ends during one.
func (s *slurm) podSeen(ctx context.Context, did watch.EventType, p *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nodes[p.Spec.NodeName]
	switch {
	case p.Spec.NodeName == "", s.gone[p.Spec.NodeName]:
	case did == watch.Deleted || p.DeletionTimestamp != nil:
		if n != nil && n.pod == p.UID && n.leftAt.IsZero() {
			if n.leftAt = time.Now(); n.job%2 == 1 {
				s.cut = append(s.cut, fmt.Sprintf("%s (node drained: %t)", p.Name, n.drain))
			}
			s.left[p.UID] = n.leftAt.Sub(n.drainedAt)
		}
	case running(p) && (n == nil || n.pod != p.UID):
		drain := n != nil && n.drain
		n = &slurmNode{pod: p.UID, name: p.Name, drain: drain}
		s.nodes[p.Spec.NodeName] = n
		s.show(ctx, n)
		s.next(ctx, n)
	}
}

// nodeSeen drains the Slurm node of a node that is cordoned, and opens it again.
func (s *slurm) nodeSeen(ctx context.Context, node *corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.nodes[node.Name]
	if n == nil || n.drain == node.Spec.Unschedulable {
		return
	}
	n.drain = node.Spec.Unschedulable
	if n.drain && n.job%2 == 0 {
		n.drainedAt = time.Now()
	}
	s.show(ctx, n)
	s.next(ctx, n)
}

// next starts a job on a node that may have one. It takes a second or a few.
func (s *slurm) next(ctx context.Context, n *slurmNode) {
	if n.drain || n.job%2 == 1 || !n.leftAt.IsZero() {
		return
	}
	n.job++
	s.show(ctx, n)
	time.AfterFunc(time.Second+rand.N(3*time.Second), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if ctx.Err() != nil || !n.leftAt.IsZero() {
			return
		}
		n.job++
		s.jobs++
		if n.drain {
			n.drainedAt = time.Now()
			s.show(ctx, n)
			return
		}
		s.next(ctx, n) // the next one comes at once, before the operator has seen the end of this one
	})
}

// show writes to the pod what the operator does: the conditions, and the label of a busy one.
func (s *slurm) show(ctx context.Context, n *slurmNode) {
	busy := n.job%2 == 1
	is := func(state string, on bool) map[string]any {
		status := map[bool]corev1.ConditionStatus{true: corev1.ConditionTrue, false: corev1.ConditionFalse}[on]
		return map[string]any{"type": slurmState + state, "status": status}
	}
	conditions := map[string]any{"metadata": map[string]any{"uid": n.pod}, "status": map[string]any{"conditions": []any{is("Allocated", busy), is("Idle", !busy), is("Drain", n.drain)}}}
	var label any
	if busy && s.protects {
		label = "true"
	}
	labels := map[string]any{"metadata": map[string]any{"uid": n.pod, "labels": map[string]any{podProtect: label}}}
	for _, patch := range []struct {
		body        any
		subresource []string
	}{{labels, nil}, {conditions, []string{"status"}}} {
		body, err := json.Marshal(patch.body)
		if err == nil {
			_, err = s.client.CoreV1().Pods(s.namespace).Patch(ctx, n.name, types.StrategicMergePatchType, body, metav1.PatchOptions{}, patch.subresource...)
		}
		// Another pod may have its name by now.
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && !apierrors.IsInvalid(err) && ctx.Err() == nil {
			s.t.Errorf("the stand-in for Slinky's operator: %v", err)
		}
	}
}

// isAt returns what Slurm knows of the node now.
func (s *slurm) isAt(node string) slurmNode {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.nodes[node]; n != nil {
		return *n
	}
	return slurmNode{}
}

// worker is the pod of a NodeSet that is pinned to the node: its successor is Pending there as long as the node is cordoned.
func (s *slurm) worker(r *rig) {
	r.t.Helper()
	one, labels := int32(1), map[string]string{"app": r.Name, slinkyKey + "pod-hostname": r.Name}
	_, err := s.client.AppsV1().StatefulSets(s.namespace).Create(r.t.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: r.Name},
		Spec: appsv1.StatefulSetSpec{
			Replicas: &one, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": r.Name}},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: r.podSpec(map[string]string{"nvidia.com/gpu": "1"})},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
}

// forget ends the Slurm node, whose Kubernetes node is about to go.
func (s *slurm) forget(node string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodes[node].leftAt, s.gone[node] = time.Now(), true
}

// turn is what was seen of one change.
type turn struct{ begun, goneOn, whole time.Duration }

// change requests a config that takes the GPU of the busy worker, and waits until the node has it and Slurm has the node again.
func (s *slurm) change(r *rig, name string) turn {
	before := s.awaitBusy(r, "")
	requested := time.Now()
	r.label(config.LabelMIGConfig, name)
	r.await("cordon", func(n *corev1.Node) bool { return n.Spec.Unschedulable })
	begun := time.Now()
	r.awaitConverged(name)
	s.awaitBusy(r, before.pod)
	took := turn{begun: begun.Sub(requested), whole: time.Since(requested)}
	s.mu.Lock()
	defer s.mu.Unlock()
	took.goneOn = s.left[before.pod]
	return took
}

// awaitBusy waits until a worker other than that one has a job on the node.
func (s *slurm) awaitBusy(r *rig, other types.UID) slurmNode {
	r.awaitPod(s.namespace, metav1.ListOptions{LabelSelector: "app=" + r.Name}, func(p *corev1.Pod) bool {
		return p.UID != other && running(p) && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == slurmState+"Allocated" && c.Status == corev1.ConditionTrue
		})
	})
	return s.isAt(r.Name)
}

// Promise 5, and the change does begin: Slurm's jobs are always running, and the budget of their pods opens only behind the cordon. No setting is needed.
// The successor of the pod is pinned to the node, and Pending there until the node is given back.
func TestSlurmNodesAreChangedAndNoJobIsCutOff(t *testing.T) {
	t.Parallel()
	nodes, changes := 4, 100
	if testing.Short() {
		nodes, changes = 2, 4
	}
	deployedCluster(t)
	for name, changes := range map[string]int{"protected": changes, "unprotected": max(nodes, changes/5)} {
		t.Run(name, func(t *testing.T) {
			s, name := newSlurm(t, name == "protected"), fmt.Sprintf("slurm-%d", rand.Uint32())
			cluster := &rig{t: t, client: s.client}
			cluster.configMapOf(name+"-maintenance", map[string]string{maintenanceKey: maintenanceHeader})
			cluster.configMap(name, `version: v1
mig-configs:
  first:
  - {devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 7}}
  - {devices: [1], mig-enabled: false}
  second:
  - {devices: [0], mig-enabled: false}
  - {devices: [1], mig-enabled: true, mig-devices: {1g.10gb: 7}}
`)
			var mu sync.Mutex
			var turns []turn
			t.Run("nodes", func(t *testing.T) {
				for range nodes {
					t.Run("node", func(t *testing.T) {
						t.Parallel()
						r := newRig(t, twoH100, "migConfigMap: {name: "+name+"}\nmaintenance: {name: "+name+"-maintenance}\ndrain: {}\n")
						r.awaitOffered("nvidia.com/gpu", 2)
						r.run()
						r.label(config.LabelMIGConfig, "first")
						r.awaitConverged("first")
						s.worker(r)
						for i := range changes / nodes {
							took := s.change(r, []string{"second", "first"}[i%2])
							mu.Lock()
							turns = append(turns, took)
							mu.Unlock()
						}
						s.forget(r.Name)
					})
				}
			})
			longest := func(of func(turn) time.Duration) time.Duration {
				var most time.Duration
				for _, one := range turns {
					most = max(most, of(one))
				}
				return most.Round(10 * time.Millisecond)
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			t.Logf("%d changes beside %d jobs: begun within %s, gone on within %s of the end of the job, whole within %s", len(turns), s.jobs,
				longest(func(o turn) time.Duration { return o.begun }), longest(func(o turn) time.Duration { return o.goneOn }),
				longest(func(o turn) time.Duration { return o.whole }))
			if len(s.cut) > 0 || len(turns) != changes {
				t.Errorf("%d of %d changes; jobs were cut off on %s", len(turns), changes, strings.Join(s.cut, ", "))
			}
		})
	}
}
