package remedy_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap/zaptest"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monitor/remedy"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// scene is a node on an API server, and what writes its taint.
type scene struct {
	t      *testing.T
	client *fake.Clientset
	clock  *clocktesting.FakeClock
	taint  *remedy.Taint
	writes int
	events []string
	before func() error // each write is let through
}

func newScene(t *testing.T, effect config.HealthTaint, node *corev1.Node) *scene {
	t.Helper()
	node.Name, node.UID, node.ResourceVersion = "gpu-1", "u1", "1"
	s := &scene{t: t, client: fake.NewClientset(node), clock: clocktesting.NewFakeClock(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))}
	s.client.PrependReactor("patch", "nodes", func(kubetesting.Action) (bool, runtime.Object, error) {
		s.writes++
		if s.before != nil {
			if err := s.before(); err != nil {
				return true, nil, err
			}
		}
		return false, nil, nil
	})
	s.process(effect)
	return s
}

// process is the next process of the agent.
func (s *scene) process(effect config.HealthTaint) {
	s.taint = &remedy.Taint{
		Nodes: nodewrite.Writer{Client: clientset.Of(s.client), Timeout: time.Minute}, Effect: effect, Clock: monotonic.New(s.clock), Log: zaptest.NewLogger(s.t),
		NodeEvent: func(e events.Event) {
			s.events = append(s.events, fmt.Sprintf("%s %s: %s", e.Type, e.Reason, e.Message))
		},
	}
}

func (s *scene) node() *corev1.Node {
	s.t.Helper()
	n, err := s.client.CoreV1().Nodes().Get(s.t.Context(), "gpu-1", metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

// follow is one observation, by the node as it is now.
func (s *scene) follow(critical, known bool) {
	s.t.Helper()
	s.taint.Follow(s.t.Context(), s.node(), critical, known)
}

func (s *scene) want(what string, taints ...string) {
	s.t.Helper()
	var got []string
	for _, t := range s.node().Spec.Taints {
		got = append(got, t.ToString())
	}
	if diff := cmp.Diff(taints, got); diff != "" {
		s.t.Errorf("%s: taints (-want +got):\n%s", what, diff)
	}
}

func tainted(taints ...corev1.Taint) *corev1.Node {
	return &corev1.Node{Spec: corev1.NodeSpec{Taints: taints}}
}

var (
	theirs = corev1.Taint{Key: "dedicated", Value: "team", Effect: corev1.TaintEffectNoSchedule}
	ours   = "gpuslice.io/gpu-unhealthy=critical:NoSchedule"
)

func TestTheTaintIsThereWhileAGPUIsCritical(t *testing.T) {
	s := newScene(t, config.HealthTaintNoSchedule, tainted(theirs))
	s.follow(false, false)
	s.follow(false, true)
	if s.writes > 0 {
		t.Errorf("%d writes for GPUs that are well", s.writes)
	}
	s.follow(true, true)
	s.want("critical", "dedicated=team:NoSchedule", ours)
	s.process(config.HealthTaintNoSchedule)
	s.follow(false, false)
	s.want("by a new process that does not know yet", "dedicated=team:NoSchedule", ours)
	s.follow(true, true)
	if s.writes != 1 {
		t.Errorf("%d writes, want 1", s.writes)
	}
	s.follow(false, true)
	s.want("well again", "dedicated=team:NoSchedule")
}

func TestByDefaultThereIsNoTaint(t *testing.T) {
	s := newScene(t, config.Default().Health.Taint, tainted(theirs))
	s.follow(true, true)
	s.want("critical", "dedicated=team:NoSchedule")
	if s.writes > 0 {
		t.Errorf("%d writes", s.writes)
	}
}

func TestTheTaintFollowsTheSetting(t *testing.T) {
	s := newScene(t, config.HealthTaintPreferNoSchedule, tainted())
	s.follow(true, true)
	s.want("preferred", "gpuslice.io/gpu-unhealthy=critical:PreferNoSchedule")
	s.process(config.HealthTaintNoSchedule)
	s.follow(true, true)
	s.want("another effect", ours)
	s.process(config.HealthTaintNone)
	s.follow(true, false)
	s.want("turned off, though the GPU is as before")
}

func TestATaintOfAnotherOwnerStays(t *testing.T) {
	for name, taint := range map[string]corev1.Taint{
		"another value":  {Key: config.TaintGPUUnhealthy, Value: "by-hand", Effect: corev1.TaintEffectNoSchedule},
		"another effect": {Key: config.TaintGPUUnhealthy, Value: config.ValueGPUUnhealthy, Effect: corev1.TaintEffectNoExecute},
		"no value":       {Key: config.TaintGPUUnhealthy, Effect: corev1.TaintEffectPreferNoSchedule},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t, config.HealthTaintNoSchedule, tainted(taint))
			s.follow(true, true)
			if taint.Effect == corev1.TaintEffectNoSchedule {
				s.want("critical", taint.ToString()) // the API allows one
			} else {
				s.want("critical", taint.ToString(), ours)
			}
			s.follow(false, true)
			s.want("well", taint.ToString())
			s.process(config.HealthTaintNone)
			s.follow(false, true)
			if err := s.taint.Clear(t.Context(), s.node()); err != nil {
				t.Fatal(err)
			}
			s.want("turned off, and cleared", taint.ToString())
		})
	}
}

// Whoever may patch the node can set NVSentinel's labels, so they take no taint away.
func TestNVSentinelsWordTakesNoTaintAway(t *testing.T) {
	node := tainted(theirs)
	node.Status.Conditions = []corev1.NodeCondition{{Type: "GpuMemWatch", Status: corev1.ConditionFalse}}
	s := newScene(t, config.HealthTaintNoSchedule, node)
	s.follow(true, true)
	s.want("NVSentinel's", "dedicated=team:NoSchedule", ours)

	now := s.node()
	now.Labels = map[string]string{"dgxc.nvidia.com/nvsentinel-state": "quarantined"}
	s.replace(now)
	s.follow(true, true)
	s.want("NVSentinel has taken it over", "dedicated=team:NoSchedule", ours)
}

func (s *scene) replace(node *corev1.Node) {
	s.t.Helper()
	if _, err := s.client.CoreV1().Nodes().Update(s.t.Context(), node, metav1.UpdateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// Others write in between: what they have put there is neither lost nor brought back.
func TestTaintsThatOthersAddBetweenReadAndWriteAreKept(t *testing.T) {
	s := newScene(t, config.HealthTaintNoSchedule, tainted(theirs))
	s.before = func() error {
		s.before = nil
		nodes := corev1.SchemeGroupVersion.WithResource("nodes")
		object, err := s.client.Tracker().Get(nodes, "", "gpu-1") // the client itself waits for this reaction
		if err != nil {
			return err
		}
		now, _ := object.(*corev1.Node)
		now.Spec.Taints = []corev1.Taint{{Key: "node.kubernetes.io/unschedulable", Effect: corev1.TaintEffectNoSchedule}}
		now.Annotations = map[string]string{config.AnnotationStatus: "{}"}
		now.ResourceVersion = "2"
		if err := s.client.Tracker().Update(nodes, now, ""); err != nil {
			return err
		}
		return apierrors.NewConflict(corev1.Resource("nodes"), "gpu-1", errors.New("the object has been modified"))
	}
	s.follow(true, true)
	s.want("critical", "node.kubernetes.io/unschedulable:NoSchedule", ours)
}

func TestAWriteThatIsRefusedIsReportedOnceAndTriedAgain(t *testing.T) {
	s := newScene(t, config.HealthTaintNoSchedule, tainted())
	s.before = func() error {
		return apierrors.NewForbidden(corev1.Resource("nodes"), "gpu-1", errors.New("the agent does not set the taints"))
	}
	s.follow(true, true)
	s.follow(true, true)
	if s.writes != 1 || !s.taint.Pending() {
		t.Errorf("%d writes within the pause, want 1; pending: %v", s.writes, s.taint.Pending())
	}
	s.clock.Step(remedy.Retry)
	s.follow(true, true)
	if s.writes != 2 || len(s.events) != 1 {
		t.Errorf("%d writes, want 2; Events: %q", s.writes, s.events)
	}
	s.before = nil
	s.clock.Step(remedy.Retry)
	s.follow(true, true)
	s.want("allowed", ours)
	if s.taint.Pending() {
		t.Error("it is still to be tried again")
	}
}

func TestAWriteEndsWithItsContext(t *testing.T) {
	s := newScene(t, config.HealthTaintNoSchedule, tainted())
	ctx, cancel := context.WithCancel(t.Context())
	s.before = func() error { cancel(); return ctx.Err() }
	s.taint.Follow(ctx, s.node(), true, true)
	if !s.taint.Pending() {
		t.Error("a write that was cut off is not tried again")
	}
}
