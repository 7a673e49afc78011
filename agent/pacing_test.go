package agent_test

import (
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
)

// TestPromise16AServerThatFailsEverySecondRequestStopsNoChange: one request of a look that failed used to end it, with a pause of up to two
// minutes.
func TestPromise16AServerThatFailsEverySecondRequestStopsNoChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB}]")
		w.settings.MIGConfigMap = config.ConfigMapKey{Namespace: "gpuslice", Name: "custom", Key: "config.yaml"}
		w.settings.Maintenance = config.ConfigMapKey{Namespace: "gpuslice", Name: "maintenance", Key: "maintenance.yaml"}
		w.restart()
		w.pod("train", w.devices()["nvidia.com/gpu"][0])
		asked := 0
		fails := func(k8stesting.Action) (bool, runtime.Object, error) {
			if asked++; asked%2 == 0 {
				return false, nil, nil
			}
			return true, nil, apierrors.NewInternalError(io.ErrUnexpectedEOF)
		}
		w.label("all-1g.10gb")
		began := time.Now()
		w.client.PrependReactor("get", "configmaps", fails)
		w.client.PrependReactor("patch", "nodes", fails)
		w.reach("all-1g.10gb")
		if took := w.condition().LastTransitionTime.Sub(began); took > time.Minute {
			t.Errorf("the change took %s", took)
		}
	})
}

// A file that nothing asks for is no reason not to look at the node.
func TestAFileThatCannotBeReadEndsNoLookThatDoesNotNeedIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB}]")
		w.settings.Profiles = config.ConfigMapKey{Namespace: "gpuslice", Name: "profiles", Key: "profiles.yaml"}
		w.settings.MIGConfigMap = config.ConfigMapKey{Namespace: "gpuslice", Name: "custom", Key: "config.yaml"}
		w.restart()
		lost := map[string]bool{"profiles": true}
		w.client.PrependReactor("get", "configmaps", func(action k8stesting.Action) (bool, runtime.Object, error) {
			get, ok := action.(k8stesting.GetAction)
			if !ok || !lost[get.GetName()] {
				return false, nil, nil
			}
			return true, nil, errors.New("connection reset by peer")
		})
		w.converge("all-1g.10gb")
		lost["custom"] = true
		w.edit(func(n *corev1.Node) { delete(n.Labels, config.LabelMIGConfig) })
		w.settle(config.ReasonNotRequested)
		w.edit(func(n *corev1.Node) { metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelProfile, "research") })
		w.settle(config.ReasonRetrying) // what it means is not known
		w.spend(time.Minute)
		lost = map[string]bool{}
		w.settle(config.ReasonUnknownConfig)
	})
}

// TestPromise16ANodeAtRestIsLookedAtOnceASecondAtMost: whoever writes to a node or to a pod makes the agent look.
func TestPromise16ANodeAtRestIsLookedAtOnceASecondAtMost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB}]")
		w.converge("all-1g.10gb")
		pause := w.agent.Pass(t.Context())
		began := time.Now()
		left := w.agent.Settle(t.Context(), pause)
		took := time.Since(began)
		if took < time.Second || took > 2*time.Second || left != pause-took {
			t.Errorf("the next pass comes after %s, and %s of %s are left", took, left, pause)
		}
		if left := w.agent.Settle(t.Context(), 100*time.Millisecond); left != 0 {
			t.Errorf("what is to come sooner comes %s later", left)
		}
		w.begin("all-3g.40gb") // in the middle of a change
		began = time.Now()
		if left := w.agent.Settle(t.Context(), 5*time.Second); left != 5*time.Second || time.Since(began) > 0 {
			t.Errorf("a change is slowed down: %s, %s left", time.Since(began), left)
		}
	})
}
