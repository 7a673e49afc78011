package agent_test

import (
	"io"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
)

// failsEverySecond lets every second request of the kind fail as an API server's proxy does, and counts them.
func (w *world) failsEverySecond(verb, resource, subresource string) (seen *int) {
	seen = new(int)
	w.client.PrependReactor(verb, resource, func(a k8stesting.Action) (bool, runtime.Object, error) {
		if a.GetSubresource() != subresource {
			return false, nil, nil
		}
		if *seen++; *seen%2 == 1 {
			return true, nil, apierrors.NewInternalError(apierrors.NewServiceUnavailable("no upstream"))
		}
		return false, nil, nil
	})
	return seen
}

func TestAKeyOfTheConfigManagerIsWrittenAgainWhereTheAPIServerFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployConfigManager()
		w.settings.Retry.Failures = 1 // so that a request which is not repeated undoes the change
		w.restart()
		patches := w.failsEverySecond("patch", "configmaps", "")
		w.profile("two")
		w.reach("two")
		if *patches < 2 {
			t.Errorf("%d patches, of which none failed", *patches)
		}
	})
}

// TestPromise16AServerThatFailsEverySecondRequestStopsNoChange: without repetition, one failed request would end an observation, with a pause of up
// to two minutes.
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
