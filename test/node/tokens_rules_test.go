package node_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// rulesRow begins each row of DeviceTaintRules.
const rulesRow = "DeviceTaintRule: "

// flooded is how many rules are made: more than the agent reads by its node's label.
const flooded = 1030

// ruleThief makes rules of the node of a stolen token that the agent of another node, its victim, could take for its own.
type ruleThief struct {
	*claimStage
	token stolen
	admin kubernetes.Interface // its requests have no limit
}

func newRuleThief(s *claimStage) *ruleThief {
	s.t.Helper()
	unlimited := rest.CopyConfig(s.cluster.Config())
	unlimited.QPS = -1
	admin, err := kubernetes.NewForConfig(unlimited)
	if err != nil {
		s.t.Fatal(err)
	}
	thief := &ruleThief{claimStage: s, token: s.stolenToken(), admin: admin}
	s.t.Cleanup(thief.clear)
	rights := thief.rule("gpuslice-"+string(thief.token.node.UID)+"-gpu-9-repartitioning", string(thief.token.node.UID))
	theirs := thief.rule("gpuslice-another-uid-gpu-9-repartitioning", string(thief.token.node.UID))
	clustertest.Eventually(s.t, "the rights and the policy are in force", func(ctx context.Context) (bool, error) {
		for _, rule := range []*resourcev1.DeviceTaintRule{rights, theirs} {
			_, err := thief.token.ResourceV1().DeviceTaintRules().Create(ctx, rule, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err != nil && !apierrors.IsForbidden(err) {
				return false, err
			}
			if apierrors.IsForbidden(err) != (rule == theirs) {
				return false, nil
			}
		}
		return true, nil
	})
	return thief
}

// rule closes nothing of the victim.
func (s *ruleThief) rule(name, label string) *resourcev1.DeviceTaintRule {
	return &resourcev1.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app.kubernetes.io/name": "gpuslice", "gpuslice.io/node": label}},
		Spec: resourcev1.DeviceTaintRuleSpec{
			DeviceSelector: &resourcev1.DeviceTaintSelector{Driver: new(draDriver), Pool: &s.token.node.Name, Device: new("gpu-9")},
			Taint:          resourcev1.DeviceTaint{Key: config.TaintRepartitioning, Effect: resourcev1.DeviceTaintEffectNoSchedule},
		},
	}
}

// make makes rules, the first of them with the token if that goes through. It returns how the write of the token ends.
func (s *ruleThief) make(rules ...*resourcev1.DeviceTaintRule) string {
	s.t.Helper()
	by, write := kubernetes.Interface(s.token), goesThrough
	for _, rule := range rules {
		_, err := by.ResourceV1().DeviceTaintRules().Create(s.t.Context(), rule, metav1.CreateOptions{})
		if apierrors.IsForbidden(err) && write == goesThrough {
			by, write = s.admin, refused
			_, err = by.ResourceV1().DeviceTaintRules().Create(s.t.Context(), rule, metav1.CreateOptions{})
		}
		if err != nil {
			s.t.Fatal(err)
		}
	}
	if write != refused {
		s.t.Errorf("the write of %s %s, want it %s", rules[0].Name, write, refused)
	}
	return write
}

// take makes a rule with the name of that which the victim needs for the device.
func (s *ruleThief) take(device, key string) string {
	s.t.Helper()
	return s.make(s.rule("gpuslice-"+string(s.node().UID)+"-"+device+"-"+strings.TrimPrefix(key, "gpuslice.io/"), string(s.token.node.UID)))
}

// flood makes rules with the victim's label, whose names are before those of the victim's.
func (s *ruleThief) flood() string {
	s.t.Helper()
	var rules []*resourcev1.DeviceTaintRule
	for i := range flooded {
		rules = append(rules, s.rule(fmt.Sprintf("flood-%s-%d", s.Name, i), string(s.node().UID)))
	}
	return s.make(rules...)
}

// clear deletes what the thief has made.
func (s *ruleThief) clear() {
	s.t.Helper()
	ctx, rules := context.WithoutCancel(s.t.Context()), s.admin.ResourceV1().DeviceTaintRules()
	list, err := rules.List(ctx, metav1.ListOptions{})
	if err != nil {
		s.t.Error(err)
		return
	}
	for _, rule := range list.Items {
		if *rule.Spec.DeviceSelector.Pool != s.token.node.Name {
			continue
		}
		if err := rules.Delete(ctx, rule.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			s.t.Error(err)
		}
	}
}

// awaitClosed waits until so many devices of the victim's GPUs are closed to claims.
func (s *ruleThief) awaitClosed(want int) {
	s.t.Helper()
	clustertest.Eventually(s.t, fmt.Sprintf("%d devices are closed to claims", want), func(context.Context) (bool, error) { return len(s.closed()) == want, nil }) //nolint:contextcheck // it has the test's, as all of a rig
}

// stolenRules has a node under NVIDIA's DRA driver whose agent closes single devices by DeviceTaintRules: for changes of GPU 0, and while GPU 1 is not well.
func stolenRules(t *testing.T) []afterwards {
	t.Helper()
	s := newClaimStage(t, "health: {deviceTaint: NoSchedule}\ndrain: {fence: devices, unmanagedPods: evict, rules: [{selector: app=holds, action: wait, for: 1h}]}\n")
	s.mayMakeRules()
	thief := newRuleThief(s)
	s.serveMetrics()
	s.run()
	s.awaitReason(config.ReasonNotRequested)
	s.awaitHealth(corev1.ConditionFalse, config.ReasonGPUsHealthy)
	s.awaitMetric("gpuslice_health_events_watched 1")
	var rows []afterwards
	// ends waits for the end of a change of GPU 0.
	ends := func(requested string) (then string) {
		t.Helper()
		n, cut := s.await("config "+requested, s.verified(requested)), "7g.80gb@0"
		if requested == "three" {
			cut = s.three()
		}
		s.check(n, cut, s.leave)
		thief.awaitClosed(0)
		return fmt.Sprintf("the change ends as asked; %d of %d pods on other GPUs evicted; devices closed afterwards: 0",
			len(s.evictions(s.namespace))-len(s.leave), len(s.stay))
	}
	note := func(attempt, write, then string) { rows = append(rows, afterwards{rulesRow + attempt, write, then}) }

	write := thief.take(s.given(s.namespace, "template-0")[0], config.TaintRepartitioning)
	s.label(config.LabelMIGConfig, "one")
	s.awaitEvent(metav1.NamespaceDefault, s.Name, config.ReasonStepFailed, "it differs from an agent's")
	note("the name of one that a change of another node needs, taken before the change", write, ends("one"))
	thief.clear()

	s.claimant(s.namespace, "holds", "gpu-0")
	s.awaitRunning(s.namespace, "holds")
	s.label(config.LabelMIGConfig, "three")
	thief.awaitClosed(1)
	write = thief.flood()
	s.deletePod(s.namespace, "holds") // it ends by itself
	note(fmt.Sprintf("%d with the label of another node, in the middle of its change", flooded), write, ends("three"))
	s.label(config.LabelMIGConfig, "one")
	note("the same, before its next change", write, ends("one"))
	thief.clear()

	// GPU 1 has a device for each of its three pods.
	const fault = "contained-ecc-drain" // it lasts until it is cured
	heals := func() {
		t.Helper()
		if err := s.GPUs.Cure(t.Context(), 1, fault); err != nil {
			t.Fatal(err)
		}
		s.awaitHealth(corev1.ConditionFalse, config.ReasonGPUsHealthy)
		thief.awaitClosed(0)
	}
	s.play(1, fault)
	thief.awaitClosed(3)
	write = thief.flood()
	s.kill() // the next agent knows no rule by itself
	s.run()
	s.awaitMetric("gpuslice_health_last_success_timestamp_seconds")
	closed := len(s.closed())
	heals()
	note(fmt.Sprintf("%d with the label of another node, one of whose GPUs is not well", flooded), write,
		fmt.Sprintf("%d of 3 devices of that GPU closed while it is not well, 0 when it is well", closed))
	thief.clear()

	write = thief.take(s.devices["template-1"][0], config.TaintGPUUnhealthy)
	s.play(1, fault)
	thief.awaitClosed(2)
	s.await("words about the device that is open", func(n *corev1.Node) bool { return strings.Contains(unhealthy(n).Message, "DeviceTaintRule") })
	heals()
	note("the name of one that another node needs for a GPU that is not well, taken before", write,
		"the other 2 of 3 devices of that GPU closed while it is not well, and its condition says which rule is in the way; 0 when it is well")
	for name, pod := range s.stay {
		s.undisturbedClaimant(pod, s.devices[name])
	}
	return rows
}
