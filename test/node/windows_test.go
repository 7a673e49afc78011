package node_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// What the agent makes of maintenance windows by the real clock. Where it is in a year's windows and in changes of the clock is for
// the tests of config/window, and what it decides in each state for those of agent.

// zone has no whole hours between itself and UTC.
const zone = "Asia/Kathmandu"

// farOff begins when no test runs any more.
var farOff = span{24 * time.Hour, 48 * time.Hour}

// span is a window, counted from now.
type span struct{ from, to time.Duration }

// scheduled is a node with a maintenance file of its own.
type scheduled struct {
	*rig
	configMap string
}

// newScheduled starts a node without its agent, which may be disturbed in the window.
func newScheduled(t *testing.T, window span) *scheduled {
	t.Helper()
	name := fmt.Sprintf("maintenance-%d", rand.Uint32())
	s := &scheduled{rig: newRig(t, twoH100, "maintenance: {name: "+name+"}\n"), configMap: name}
	s.configMapOf(name, map[string]string{maintenanceKey: file(window)})
	s.awaitOffered("nvidia.com/gpu", 2)
	return s
}

const (
	maintenanceKey    = "maintenance.yaml"
	maintenanceHeader = "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nestimate: 1s\njitter: 0s\nmaxUnavailable: none\n"
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

// edit rewrites the maintenance file.
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

// isPlanned fails the test if the node does not say to other tools when it will be disturbed.
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

// Promise 11.
func TestNothingMovesBeforeTheWindowOpens(t *testing.T) {
	t.Parallel()
	s := newScheduled(t, farOff)
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
	s.neverFenced()
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
