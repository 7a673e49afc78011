package evict_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/evict"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// restart restarts a device plugin. The API server answers the eviction with refusal. It returns how many evictions were no dry run, and the
// Events.
func restart(t *testing.T, refusal error, marks []fence.Marker, taints []corev1.Taint, objects ...runtime.Object) (wait *outcome.Waiting, evictions int, said []string) {
	t.Helper()
	client := fake.NewClientset(objects...)
	client.PrependReactor("create", "pods/eviction", func(action kubetesting.Action) (bool, runtime.Object, error) {
		if create, is := action.(kubetesting.CreateAction); is {
			if eviction, is := create.GetObject().(*policyv1.Eviction); is && len(eviction.DeleteOptions.DryRun) == 0 {
				evictions++
			}
		}
		return true, nil, refusal
	})
	clock := clocktesting.NewFakeClock(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	steadied, recorder := monotonic.New(clock), record.NewFakeRecorder(10)
	d := evict.Evictions{
		Env:     act.Env{Node: "gpu-1", Events: events.Recorder{To: recorder}, Clock: steadied},
		Evictor: drain.NewEvictor(clientset.Of(client), clock, zap.NewNop()), Wakes: &watch.Sources{}, Metrics: metrics.New(clock),
	}
	plugin := corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "kube-system", Name: "plugin-x", UID: "uid", Labels: map[string]string{"app": "plugin"},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "plugin", UID: "set", Controller: new(true)}},
	}}
	seen := state.Observed{Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1"}}, Pods: []corev1.Pod{plugin}}
	seen.Marks.Tools, seen.DevicePlugin.Pods = marks, []corev1.Pod{plugin}
	seen.Node.Spec.Taints = taints
	err := d.Restart(t.Context(), act.Input{Seen: &seen, Steps: []plan.Step{{Kind: plan.RestartPlugin, Pods: []plan.Pod{{Namespace: "kube-system", Name: "plugin-x", UID: "uid"}}}}})
	if !errors.As(err, &wait) {
		t.Fatalf("got %v, want a wait: only the next observation can show that the pod is gone", err)
	}
	close(recorder.Events)
	for event := range recorder.Events {
		said = append(said, event)
	}
	return wait, evictions, said
}

func TestAPluginThatWithholdsAGPUIsEvictedAndThatIsReported(t *testing.T) {
	t.Parallel()
	wait, evictions, events := restart(t, nil, nil, nil)
	if wait.Reason != config.ReasonAwaitingCapacity || evictions != 1 {
		t.Errorf("%s after %d evictions: %s", wait.Reason, evictions, wait.Message)
	}
	if len(events) != 1 || !strings.Contains(events[0], string(config.ReasonPluginRestarted)) || !strings.Contains(events[0], "kube-system/plugin-x") {
		t.Errorf("Events: %q", events)
	}
}

func TestAPluginIsNotRestartedWhileAnotherToolWorksOnTheNode(t *testing.T) {
	t.Parallel()
	wait, evictions, events := restart(t, nil, []fence.Marker{{Tool: "NVSentinel", Sign: "label dgxc.nvidia.com/nvsentinel-state=quarantined"}}, nil)
	if wait.Reason != config.ReasonOtherMaintenance || !strings.Contains(wait.Message, "NVSentinel") || evictions > 0 || len(events) > 0 {
		t.Errorf("%s: %s; %d evictions, Events %q", wait.Reason, wait.Message, evictions, events)
	}
	announced, evictions, _ := restart(t, nil, []fence.Marker{{Tool: "kured", Planned: true}}, nil)
	if announced.Reason != config.ReasonAwaitingCapacity || evictions != 1 {
		t.Errorf("what a tool has only announced: %s: %s; %d evictions", announced.Reason, announced.Message, evictions)
	}
}

func TestAPluginThatATaintWouldKeepAwayIsNotRestarted(t *testing.T) {
	t.Parallel()
	wait, evictions, _ := restart(t, nil, nil, []corev1.Taint{{Key: "restrictedaccess", Value: "yes", Effect: corev1.TaintEffectNoSchedule}})
	const want = "pod kube-system/plugin-x does not tolerate the taint restrictedaccess=yes:NoSchedule"
	if wait.Reason != config.ReasonNoDevicePlugin || !strings.Contains(wait.Message, want) || evictions > 0 {
		t.Errorf("%s: %s; %d evictions", wait.Reason, wait.Message, evictions)
	}
}

func TestABudgetThatKeepsThePluginIsNamed(t *testing.T) {
	t.Parallel()
	full := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", 10)
	full.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: policyv1.DisruptionBudgetCause, Message: "The disruption budget plugins needs 1 healthy pods and has 1 currently"}}
	wait, _, events := restart(t, full, nil, nil, &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "plugins"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "plugin"}}, MinAvailable: new(intstr.FromInt32(1)),
		},
		Status: policyv1.PodDisruptionBudgetStatus{CurrentHealthy: 1, DesiredHealthy: 1, ExpectedPods: 1},
	})
	if wait.Reason != config.ReasonEvictionBlocked || !strings.Contains(wait.Message, "plugins") || !strings.Contains(wait.Message, "kube-system/plugin-x") {
		t.Errorf("%s: %s", wait.Reason, wait.Message)
	}
	if wait.Else == "" || len(events) > 0 {
		t.Errorf("what helps at once is %q, Events %q", wait.Else, events)
	}
}
