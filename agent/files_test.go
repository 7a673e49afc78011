package agent_test

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Promise 12: a failed request stays failed, even if for a moment the agent could not read the file that says what the request means.
func TestAFileThatIsBrokenForAMomentDoesNotBringTheFailedRequestBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.setConfigs(firstOnly)
		w.failForGood(gpusim.CreateGpuInstanceWithPlacement)
		w.label("first-1g")
		w.settle(config.ReasonHardwareFailure)
		calls := w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]
		broken := true
		w.client.PrependReactor("get", "configmaps", func(k8stesting.Action) (bool, runtime.Object, error) {
			return broken, &corev1.ConfigMap{}, nil
		})
		w.settle(config.ReasonInvalidCatalog)
		broken = false
		w.settle(config.ReasonHardwareFailure)
		w.spend(10 * time.Minute)
		w.expectGivenBack()
		if again := w.gpus.Calls()[gpusim.CreateGpuInstanceWithPlacement]; again != calls {
			t.Errorf("the failed request was tried again, with %d calls", again-calls)
		}
	})
}

// The agent observes the node although it cannot read a file that no label needs.
func TestAFileThatCannotBeReadEndsNoObservationThatDoesNotNeedIt(t *testing.T) {
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
		w.unset(config.LabelMIGConfig)
		w.settle(config.ReasonNotRequested)
		w.set(config.LabelProfile, "research")
		w.settle(config.ReasonRetrying) // the agent does not know what the label means
		w.spend(time.Minute)
		lost = map[string]bool{}
		c := w.settle(config.ReasonUnknownConfig)
		if want := "the settings name ConfigMap gpuslice/profiles, key profiles.yaml, which does not exist"; !strings.Contains(c.Message, want) {
			t.Errorf("the condition says %q, without %q", c.Message, want)
		}
	})
}
