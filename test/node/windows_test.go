package node_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// What the agent makes of maintenance windows by the real clock. Where it is in a year's windows and in changes of the clock is for
// the tests of config/window, and what it decides in each state for those of agent.

// zone has no whole hours between itself and UTC.
const zone = "Asia/Kathmandu"

// farOff begins when no test runs any more.
var farOff = span{24 * time.Hour, 48 * time.Hour}

// span is a window, counted from now.
type span struct{ from, to time.Duration }

// always is a window that was open before the test and is open after it.
var always = span{-time.Hour, time.Hour}

// scheduled is a node with a maintenance file of its own.
type scheduled struct {
	*rig
	configMap string
}

// newScheduled starts a node with its agent, which may be disturbed in the windows.
func newScheduled(t *testing.T, settings string, windows ...span) *scheduled {
	t.Helper()
	name := fmt.Sprintf("maintenance-%d", rand.Uint32())
	s := &scheduled{rig: newRig(t, twoH100, "maintenance: {name: "+name+"}\n"+settings), configMap: name}
	s.configMapOf(name, map[string]string{maintenanceKey: file(windows...)})
	s.awaitOffered("nvidia.com/gpu", 2)
	return s
}

const (
	maintenanceKey    = "maintenance.yaml"
	maintenanceHeader = "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nestimate: 1s\njitter: 0s\n"
)

// file is a maintenance file with one-off windows.
func file(windows ...span) string { return fileAt(time.Now(), windows...) }

// fileAt is a maintenance file whose windows are so long after now.
func fileAt(now time.Time, windows ...span) string {
	text := maintenanceHeader
	for i, w := range windows {
		if i == 0 {
			text += "windows:\n"
		}
		text += fmt.Sprintf("- {notBefore: %q, notAfter: %q, timeZone: %s}\n",
			now.Add(w.from).UTC().Format(time.RFC3339), now.Add(w.to).UTC().Format(time.RFC3339), zone)
	}
	return text
}

// edit writes the maintenance file anew.
func (s *scheduled) edit(text string) {
	s.t.Helper()
	configMaps := s.client.CoreV1().ConfigMaps("gpuslice")
	found, err := configMaps.Get(s.t.Context(), s.configMap, metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	found.Data[maintenanceKey] = text
	if _, err := configMaps.Update(s.t.Context(), found, metav1.UpdateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// guarded is who is on a node that cannot be drained to the end: two pods, of which a disruption budget lets one go.
type guarded struct {
	namespace string
	calls     map[string]int // by which the GPUs were changed before
}

// guard puts the two pods on the node, and starts its agent.
func (s *scheduled) guard() guarded {
	s.t.Helper()
	g := guarded{namespace: clustertest.Namespace(s.t)}
	s.budget(g.namespace, "api", 1)
	s.replica(g, "api-0")
	s.replica(g, "api-1")
	s.awaitBudget(g.namespace, "api", 1)
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	g.calls = s.GPUs.Calls()
	return g
}

// replica is one of the two.
func (s *scheduled) replica(g guarded, name string) {
	s.t.Helper()
	s.user(g.namespace, name, func(p *corev1.Pod) { p.Labels["app"] = "api" })
}

// awaitBlocked waits until the node is fenced, and a pod is in the way.
func (s *scheduled) awaitBlocked() {
	s.t.Helper()
	s.await("a drain that does not end", func(n *corev1.Node) bool {
		return hasReason(n, config.ReasonEvictionBlocked) && fenced(n)
	})
}

// awaitPutOff waits until the change is undone, and checks that no GPU was touched for it and that the one pod is still there.
func (s *scheduled) awaitPutOff(g guarded, reasons ...config.Reason) {
	s.t.Helper()
	n := s.await("the end of the attempt", func(n *corev1.Node) bool {
		_, owed := n.Annotations[config.AnnotationJournal]
		return !owed && !n.Spec.Unschedulable && hasReason(n, reasons...)
	})
	s.givenBack(n)
	if diff := cmp.Diff(g.calls, s.GPUs.Calls()); diff != "" {
		s.t.Errorf("calls that change something (-before +after):\n%s", diff)
	}
	pods, err := s.client.CoreV1().Pods(g.namespace).List(s.t.Context(), metav1.ListOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	if len(pods.Items) != 1 || !running(&pods.Items[0]) || pods.Items[0].Status.ContainerStatuses[0].RestartCount != 0 {
		s.t.Errorf("%d pods are left, and one was not to be evicted: %+v", len(pods.Items), pods.Items)
	}
}

func hasReason(n *corev1.Node, reasons ...config.Reason) bool {
	c := condition(n)
	for _, reason := range reasons {
		if c != nil && c.Reason == string(reason) {
			return true
		}
	}
	return false
}

// conditionOf is a condition of the node; an empty one if it does not have it.
func conditionOf(n *corev1.Node, name corev1.NodeConditionType) corev1.NodeCondition {
	for _, c := range n.Status.Conditions {
		if c.Type == name {
			return c
		}
	}
	return corev1.NodeCondition{}
}

// isPlanned fails the test if the node does not tell other tools when it will be disturbed.
func (s *scheduled) isPlanned(n *corev1.Node, at time.Time) {
	s.t.Helper()
	there, err := time.LoadLocation(zone)
	if err != nil {
		s.t.Fatal(err)
	}
	c := conditionOf(n, config.ConditionMaintenancePlanned)
	if c.Status != corev1.ConditionTrue {
		s.t.Errorf("%s is %s", c.Type, c.Status)
	}
	for _, want := range []string{at.In(there).Format("15:04:05"), at.UTC().Format("15:04:05Z")} {
		for _, message := range []string{c.Message, condition(n).Message} {
			if !strings.Contains(message, want) {
				s.t.Errorf("the message does not say %q: %s", want, message)
			}
		}
	}
}

// awaitEvent waits for an event about the node.
func (s *scheduled) awaitEvent(reason config.Reason) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	open := func(ctx context.Context) (watch.Interface, error) {
		return s.client.CoreV1().Events(metav1.NamespaceDefault).Watch(ctx, metav1.ListOptions{FieldSelector: fields.Set{
			"involvedObject.name": s.Name, "reason": string(reason),
		}.AsSelector().String()})
	}
	err := clustertest.Follow(ctx, open, nil, func(watch.EventType, *corev1.Event) bool { return true })
	if err != nil {
		s.t.Errorf("no event %s about the node: %v", reason, err)
	}
}

// Promise 11.
func TestNothingMovesBeforeTheWindowOpens(t *testing.T) {
	t.Parallel()
	s := newScheduled(t, "", farOff)
	namespace := clustertest.Namespace(t)
	s.user(namespace, "train", nil)
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	s.label(config.LabelMIGConfig, "all-balanced")
	s.awaitReason(config.ReasonAwaitingWindow)
	calls := s.GPUs.Calls()
	now := time.Now()
	opens := now.Add(time.Hour).Truncate(time.Second)
	s.edit(fileAt(now, span{time.Hour, 2 * time.Hour}))
	s.isPlanned(s.await("the time of the opening", func(n *corev1.Node) bool {
		return strings.Contains(conditionOf(n, config.ConditionMaintenancePlanned).Message, opens.UTC().Format("15:04:05Z"))
	}), opens)
	if diff := cmp.Diff(calls, s.GPUs.Calls()); diff != "" {
		t.Errorf("calls that change something (-before +after):\n%s", diff)
	}
	const soon = 5 * time.Second
	now = time.Now()
	opens = now.Add(soon).Truncate(time.Second)
	s.edit(fileAt(now, span{soon, time.Hour}))
	s.await("the fence", fenced)
	if now := time.Now(); now.Before(opens) {
		t.Errorf("the node was disturbed %s before the opening", opens.Sub(now))
	}
	n := s.awaitConverged("all-balanced")
	s.givenBack(n)
	if c := conditionOf(n, config.ConditionMaintenancePlanned); c.Status == corev1.ConditionTrue {
		t.Errorf("%s is still True: %s", c.Type, c.Message)
	}
}

// Before a GPU is touched the change is put off. After that it goes on.
func TestCauseWindowClosedInTheMiddle(t *testing.T) {
	t.Parallel()
	t.Run("of a drain", func(t *testing.T) {
		t.Parallel()
		s := newScheduled(t, "", always)
		g := s.guard()
		s.label(config.LabelMIGConfig, "all-balanced")
		s.awaitBlocked()
		closes, again := 5*time.Second, time.Hour
		now := time.Now()
		second := now.Add(again).Truncate(time.Second)
		s.edit(fileAt(now, span{-time.Hour, closes}, span{again, 2 * time.Hour}))
		given := s.cause()
		s.awaitPutOff(g, config.ReasonWindowClosed, config.ReasonAwaitingWindow)
		given(s.node())
		s.awaitEvent(config.ReasonWindowClosed)
		s.isPlanned(s.awaitReason(config.ReasonAwaitingWindow), second)
		s.relax(g.namespace, "api")
		soon := 5 * time.Second
		now = time.Now()
		second = now.Add(soon).Truncate(time.Second)
		s.edit(fileAt(now, span{soon, time.Hour}))
		s.await("the second attempt", fenced)
		if now := time.Now(); now.Before(second) {
			t.Errorf("the second attempt began %s before its window", second.Sub(now))
		}
		s.givenBack(s.awaitConverged("all-balanced"))
	})
	t.Run("of the cutting", func(t *testing.T) {
		t.Parallel()
		s := newScheduled(t, "", always)
		s.cut("3g.40gb@4", "1g.10gb@0")
		s.restartPlugin()
		s.awaitOffered("nvidia.com/mig-3g.40gb", 1)
		goOn := s.runIntoAStep("all-1g.10gb")
		if destroyed := s.GPUs.Calls()[gpusim.GpuInstanceDestroy]; destroyed == 0 {
			t.Fatal("no instance was destroyed, so that there is no need to go on")
		}
		s.edit(file(farOff))
		given := s.cause()
		goOn()
		given(s.awaitConverged("all-1g.10gb"))
		s.awaitEvent(config.ReasonWindowOverrun)
	})
}

// Promise 11. What is edited counts at once.
func TestAMaintenanceFileThatIsEditedInTheMiddle(t *testing.T) {
	t.Parallel()
	s := newScheduled(t, "", always)
	g := s.guard()
	s.label(config.LabelMIGConfig, "all-balanced")
	s.awaitBlocked()

	s.edit(file(farOff))
	s.awaitPutOff(g, config.ReasonWindowClosed, config.ReasonAwaitingWindow)

	broken := maintenanceHeader + "windows: [{days: [Caturday], start: \"22:00\", duration: 6h}]\n"
	s.edit(broken)
	n := s.awaitReason(config.ReasonInvalidMaintenance)
	s.givenBack(n)
	for _, want := range []string{"Caturday", s.configMap} {
		if !strings.Contains(condition(n).Message, want) {
			t.Errorf("the message does not say %q: %s", want, condition(n).Message)
		}
	}

	s.replica(g, "api-2") // for the one that has left
	s.awaitBudget(g.namespace, "api", 1)
	s.edit(file(always))
	s.awaitBlocked()
	s.edit(broken)
	s.awaitPutOff(g, config.ReasonInvalidMaintenance)

	s.relax(g.namespace, "api")
	s.edit(file())
	s.givenBack(s.awaitConverged("all-balanced"))
}

// Promise 11, and who may break it: one change for each time that it is said.
func TestAnAnnotationForcesOneChangeOutOfItsWindow(t *testing.T) {
	t.Parallel()
	s := newScheduled(t, "", farOff)
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	s.label(config.LabelMIGConfig, "all-balanced")
	s.givenBack(s.awaitReason(config.ReasonAwaitingWindow))
	s.kubectl("annotate", "node", s.Name, config.AnnotationForce+"="+config.ForceNow)
	n := s.awaitConverged("all-balanced")
	s.givenBack(n)
	if force, ok := n.Annotations[config.AnnotationForce]; ok {
		t.Errorf("annotation %s is still there: %q", config.AnnotationForce, force)
	}
	s.label(config.LabelMIGConfig, "all-1g.10gb")
	s.givenBack(s.awaitReason(config.ReasonAwaitingWindow))
}

// Promise 11.
func TestAHeldNodeBeginsNothing(t *testing.T) {
	t.Parallel()
	s := newScheduled(t, "", always)
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	calls := s.GPUs.Calls()
	s.kubectl("annotate", "node", s.Name, config.AnnotationHold+"=until the paper is out")
	s.label(config.LabelMIGConfig, "all-balanced")
	n := s.awaitReason(config.ReasonHeld)
	s.givenBack(n)
	if message := condition(n).Message; !strings.Contains(message, "until the paper is out") {
		t.Errorf("the message does not say why: %s", message)
	}
	if diff := cmp.Diff(calls, s.GPUs.Calls()); diff != "" {
		t.Errorf("calls that change something (-before +after):\n%s", diff)
	}
	s.kubectl("annotate", "node", s.Name, config.AnnotationHold+"-")
	s.givenBack(s.awaitConverged("all-balanced"))
}
