package agent_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/config"
)

// closedDevices are the devices that DeviceTaintRules keep claims from, each with the key of its taint.
func (w *world) closedDevices() (out []string) {
	w.t.Helper()
	list, err := w.client.ResourceV1().DeviceTaintRules().List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, r := range list.Items {
		out = append(out, *r.Spec.DeviceSelector.Device+" "+r.Spec.Taint.Key)
	}
	slices.Sort(out)
	return out
}

// heartbeat is after which a pass has seen what the monitor of health has: only Run is woken by it.
const heartbeat = 6 * time.Minute

// expectClosed spends the time, and fails the test unless claims are kept from these devices then.
func (w *world) expectClosed(after time.Duration, what string, want ...string) {
	w.t.Helper()
	w.spend(after)
	if diff := cmp.Diff(want, w.closedDevices()); diff != "" {
		w.t.Errorf("%s: closed devices (-want +got):\n%s", what, diff)
	}
}

// countRuleRequests counts requests of the verb for DeviceTaintRules from now on.
func (w *world) countRuleRequests(verb string) (calls *int) {
	calls = new(int)
	w.client.PrependReactor(verb, "devicetaintrules", func(k8stesting.Action) (bool, runtime.Object, error) {
		*calls++
		return false, nil, nil
	})
	return calls
}

// newClosingWorld is a world of NVIDIA's DRA driver whose agent keeps claims from the devices of GPUs that are not well, and has cut them.
func newClosingWorld(t *testing.T) *world {
	t.Helper()
	w := newSickWorld(t, h100, config.HealthResetNever)
	w.settings.Health.DeviceTaint = config.DeviceTaintNoSchedule
	w.noPlugin, w.draDriver = true, true
	w.restart()
	w.spend(time.Minute)
	w.converge("all-3g.40gb")
	return w
}

const (
	first  = "gpu-0-mig-3g40gb-0 gpuslice.io/gpu-unhealthy"
	second = "gpu-0-mig-3g40gb-4 gpuslice.io/gpu-unhealthy"
)

// Claims are kept from the devices of the GPU that is not well, whatever becomes of agent, driver and rules in the meantime, and from no others.
func TestClaimsGetNoDeviceOfAGPUThatIsNotWell(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newClosingWorld(t)
		w.expectClosed(heartbeat, "all GPUs are well")
		w.setRecoveryAction(0, 1)
		w.expectClosed(heartbeat, "GPU 0 needs a reset", first, second)
		deletes := w.countRuleRequests("delete")
		w.stopWatch()
		w.restartWithEvents()
		w.expectClosed(heartbeat, "another process, which does not know the health yet", first, second)
		w.watch()
		w.expectClosed(heartbeat, "it knows the health", first, second)

		offered := w.published
		w.published = nil
		w.expectClosed(heartbeat, "the slices are away", first, second)
		w.published = offered
		w.expectClosed(heartbeat, "they are back", first, second)
		calls := w.countRuleRequests("*")
		w.spend(time.Hour)
		if *calls < 5 || *calls > 6 {
			t.Errorf("%d requests in an hour in which nothing has changed, want one in ten minutes", *calls)
		}
		if err := w.client.ResourceV1().DeviceTaintRules().DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		w.expectClosed(15*time.Minute, "a user has deleted the rules", first, second)
		if *deletes > 0 {
			t.Errorf("the agent has deleted %d rules while GPU 0 needed a reset", *deletes)
		}

		w.label("all-1g.10gb")
		w.settle(config.ReasonConverged)
		w.expectClosed(heartbeat, "it is cut again",
			"gpu-0-mig-1g10gb-0 gpuslice.io/gpu-unhealthy", "gpu-0-mig-1g10gb-1 gpuslice.io/gpu-unhealthy", "gpu-0-mig-1g10gb-2 gpuslice.io/gpu-unhealthy",
			"gpu-0-mig-1g10gb-3 gpuslice.io/gpu-unhealthy", "gpu-0-mig-1g10gb-4 gpuslice.io/gpu-unhealthy", "gpu-0-mig-1g10gb-5 gpuslice.io/gpu-unhealthy",
			"gpu-0-mig-1g10gb-6 gpuslice.io/gpu-unhealthy")
		w.setRecoveryAction(0, 0)
		w.expectClosed(heartbeat, "it is well again")
		calls = w.countRuleRequests("*")
		w.spend(time.Hour)
		if *calls > 0 {
			t.Errorf("%d requests in an hour in which all GPUs are well", *calls)
		}
	})
}

// What others have under the name of one rule keeps no other device open, neither for health nor for a change, and the condition says what is open.
func TestARuleOfOthersUnderANameOfTheAgentsIsReportedAsLongAsItIsThere(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newClosingWorld(t)
		taken := "gpuslice-" + string(w.node().UID) + "-gpu-0-mig-3g40gb-0-gpu-unhealthy"
		theirs := &resourcev1.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: taken}, Spec: resourcev1.DeviceTaintRuleSpec{
			DeviceSelector: &resourcev1.DeviceTaintSelector{Device: ptr.To("thief")}, Taint: resourcev1.DeviceTaint{Key: "team/none", Effect: resourcev1.DeviceTaintEffectNoSchedule},
		}}
		if _, err := w.client.ResourceV1().DeviceTaintRules().Create(t.Context(), theirs, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		says := func() bool {
			c := report.Find(w.node(), config.ConditionGPUUnhealthy)
			return c != nil && strings.Contains(c.Message, "It is not closed to claims: delete DeviceTaintRule "+taken)
		}
		w.setRecoveryAction(0, 1)
		w.expectClosed(heartbeat, "a name is taken", second, "thief team/none")
		if !says() {
			t.Errorf("the condition does not say that GPU 0 is open: %v", report.Find(w.node(), config.ConditionGPUUnhealthy))
		}
		if err := w.client.ResourceV1().DeviceTaintRules().Delete(t.Context(), taken, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.expectClosed(heartbeat, "the name is free", first, second)
		if says() {
			t.Error("the condition says of GPU 0, which is closed, that it is open")
		}
	})
}

// An agent that does not close devices deletes what one before it has left, which was killed or had other settings: so does the one that gives the node up.
func TestRulesThatAnAgentHasLeftAreDeleted(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(w *world){
		"the setting is off": func(w *world) {
			w.settings.Health.DeviceTaint = config.DeviceTaintNone
			w.restart()
			w.spend(heartbeat)
		},
		"the GPU was mended in the meantime": func(w *world) {
			w.stopWatch()
			w.setRecoveryAction(0, 0)
			w.restart()
			w.spend(heartbeat)
		},
		"the node is given up": func(w *world) { w.recoverByHand() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newClosingWorld(t)
				w.setRecoveryAction(0, 1)
				w.expectClosed(heartbeat, "GPU 0 needs a reset", first, second)
				end(w)
				w.expectClosed(0, name)
			})
		})
	}
}

// Where the API server does not serve the rules, or does not let the agent make them, one Event says so, and all else goes on.
func TestRulesThatCannotBeMadeAreReportedOnce(t *testing.T) {
	t.Parallel()
	kind := resourcev1.Resource("devicetaintrules")
	for name, says := range map[string]error{
		"absent": apierrors.NewNotFound(kind, ""), "forbidden": apierrors.NewForbidden(kind, "", errors.New("no right")), "failing": apierrors.NewInternalError(errors.New("down")),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newClosingWorld(t)
				heals := false
				calls := 0
				w.client.PrependReactor("*", "devicetaintrules", func(k8stesting.Action) (bool, runtime.Object, error) {
					calls++
					return !heals, nil, says
				})
				w.stopWatch()
				events := w.restartWithEvents()
				w.watch()
				w.spend(time.Minute)
				if n := heard(events, string(config.ReasonMissingRight), "deviceTaint"); n != 0 {
					t.Errorf("%d Events while no rule is needed", n)
				}
				w.setRecoveryAction(0, 1)
				calls = 0
				w.spend(heartbeat + 10*time.Minute)
				want := 1
				if name == "failing" { // it is the API server that has to be mended, and its failures are reported elsewhere
					want = 0
				}
				if n := heard(events, corev1.EventTypeWarning, string(config.ReasonMissingRight), "health.deviceTaint"); n != want {
					t.Errorf("%d Events, want %d", n, want)
				}
				if calls < 20 || calls > 33 {
					t.Errorf("%d requests in 16 minutes", calls)
				}
				heals = true
				w.expectClosed(heartbeat, "the API server answers", first, second)
				if n := heard(events, string(config.ReasonGPUUnhealthy), "gpu-0-mig-3g40gb-0, gpu-0-mig-3g40gb-4"); n != 1 {
					t.Errorf("%d Events name the devices", n)
				}
			})
		})
	}
}
