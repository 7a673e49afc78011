package evict_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/evict"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// keeps has the API server refuse to evict the named pods, and notes for which pods it was asked. Each request has to be a dry run.
func keeps(t *testing.T, client *fake.Clientset, names []string, asked *[]string) {
	t.Helper()
	client.PrependReactor("create", "pods/eviction", func(action kubetesting.Action) (bool, runtime.Object, error) {
		create, _ := action.(kubetesting.CreateAction)
		eviction, is := create.GetObject().(*policyv1.Eviction)
		if !is || !slices.Equal(eviction.DeleteOptions.DryRun, []string{metav1.DryRunAll}) {
			t.Errorf("a request that is no dry run: %+v", action)
			return true, nil, nil
		}
		*asked = append(*asked, eviction.Name)
		if slices.Contains(names, eviction.Name) {
			return true, nil, apierrors.NewTooManyRequests("the budget is used up", 0)
		}
		return true, nil, nil
	})
}

// notEvictable names the pods that may not be evicted now.
func notEvictable(t *testing.T, d evict.Evictions, in act.Input) (names []string) {
	t.Helper()
	for _, v := range d.Evictable(t.Context(), in) {
		if v.State != drain.Requested {
			names = append(names, v.Pod.Name)
		}
	}
	return names
}

// Promise 5. Before the cordon the agent asks the budget of each pod that the change evicts: of a pod that holds what goes, of the device plugin,
// of a client of the library, and of a driver that restarts after the change. It does not ask for pods that leave by their label, whose controllers no budget holds up.
func TestEachPodThatIsEvictedIsAskedForBeforeTheCordon(t *testing.T) {
	t.Parallel()
	set := []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "set", UID: "set", Controller: new(true)}}
	pod := func(name string) corev1.Pod {
		return corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID(name), OwnerReferences: set}}
	}
	planned := func(names ...string) (pods []plan.Pod) {
		for _, name := range names {
			pods = append(pods, plan.Pod{Namespace: "team", Name: name, UID: name})
		}
		return pods
	}
	seen := state.Observed{
		Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1"}},
		Pods: []corev1.Pod{pod("holder"), pod("plugin"), pod("client"), pod("operand"), pod("driver")},
	}
	seen.Holders.Pods = []holders.Pod{holders.Describe(&seen.Pods[0])}
	seen.DevicePlugin.Pods = []corev1.Pod{seen.Pods[1], seen.Pods[4]}
	seen.Holders.OfLibrary = []holders.Pod{holders.Describe(&seen.Pods[2])}
	steps := []plan.Step{
		{Kind: plan.Fence},
		{Kind: plan.Evict, Pods: planned("holder")},
		{Kind: plan.PauseOperands, Label: config.LabelOperandPrefix + "dcgm", Pods: planned("operand")},
		{Kind: plan.PauseOperands, Pods: planned("plugin", "client")},
		{Kind: plan.RestartOperands, Pods: planned("driver")},
	}
	for kept, waits := range map[string]bool{"": false, "holder": true, "plugin": true, "client": true, "plugin, client": true, "driver": true, "operand": false} {
		t.Run("kept: "+kept, func(t *testing.T) {
			names := strings.Split(kept, ", ")
			client := fake.NewClientset()
			var asked []string
			keeps(t, client, names, &asked)
			clock := clocktesting.NewFakeClock(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
			d := evict.Evictions{
				Env:     act.Env{Node: "gpu-1", Settings: config.Default(), Clock: monotonic.New(clock)},
				Evictor: drain.NewEvictor(clientset.Of(client), clock, zap.NewNop()), Wakes: &watch.Sources{},
			}
			err := d.Drainable(t.Context(), act.Input{Seen: &seen, Steps: steps})
			var wait *outcome.Waiting
			switch is := errors.As(err, &wait); {
			case !waits && err != nil:
				t.Errorf("got %v, want the change to begin", err)
			case waits && (!is || wait.Reason != config.ReasonEvictionBlocked || !strings.Contains(wait.Message, "team/"+names[0]) || len(wait.Blockers) != len(names)):
				t.Errorf("got %v, want a wait for %s", err, kept)
			}
			want := []string{"holder", "plugin", "client", "driver"}
			switch kept { // the others may not be asked for in vain
			case "holder":
				want = want[:1]
			case "plugin", "client", "plugin, client":
				want = want[:3]
			}
			if diff := cmp.Diff(want, asked); diff != "" {
				t.Errorf("pods that were asked for (-want +got):\n%s", diff)
			}
			if !waits {
				names = nil
			}
			if blocked := notEvictable(t, d, act.Input{Seen: &seen, Steps: steps}); !slices.Equal(blocked, names) { // what a diagnosis says of the same
				t.Errorf("a diagnosis finds %v, want %s", blocked, names)
			}
		})
	}
}
