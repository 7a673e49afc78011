package observe_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpuslice/gpuslice/agent/observe"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// slow is an API server whose answers take a while.
type slow struct {
	kube.Interface
	takes time.Duration
}

// ConfigMaps implements kube.Interface.
func (s slow) ConfigMaps(namespace string) kube.ConfigMaps {
	return slowConfigMaps{s.Interface.ConfigMaps(namespace), s.takes}
}

type slowConfigMaps struct {
	kube.ConfigMaps
	takes time.Duration
}

// Get implements kube.ConfigMaps.
func (s slowConfigMaps) Get(ctx context.Context, name string, o metav1.GetOptions) (*corev1.ConfigMap, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(s.takes):
		return s.ConfigMaps.Get(ctx, name, o)
	}
}

// Promise 14. Each read has a deadline of its own: where each answer takes most of it all files are read, and one that does not come in time is not awaited.
func TestEachFileIsReadWithinADeadlineOfItsOwn(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		part float64 // of the deadline that an answer takes
		read bool
	}{
		"slow answers": {0.8, true},
		"no answer":    {3, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				settings := config.Default()
				settings.MIGConfigMap = config.ConfigMapKey{Namespace: "gpuslice", Name: "configs", Key: "config.yaml"}
				settings.Profiles = config.ConfigMapKey{Namespace: "gpuslice", Name: "profiles", Key: "profiles.yaml"}
				settings.Maintenance = config.ConfigMapKey{Namespace: "gpuslice", Name: "maintenance", Key: "maintenance.yaml"}
				var objects []runtime.Object
				for _, ref := range []config.ConfigMapKey{settings.MIGConfigMap, settings.Profiles, settings.Maintenance} {
					objects = append(objects, &corev1.ConfigMap{
						ObjectMeta: metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name},
						Data:       map[string]string{ref.Key: "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\n"},
					})
				}
				takes := time.Duration(row.part * float64(settings.Timeouts.APICall))
				f := &observe.Files{
					Objects:  watch.NewObjects(watch.Options{Node: "gpu-1", Client: slow{clientset.Of(fake.NewClientset(objects...)), takes}}),
					Settings: settings,
				}
				seen := state.Observed{Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", Labels: map[string]string{config.LabelProfile: "slices"}}}}
				began := time.Now()
				err := f.Observe(t.Context(), &seen)
				if took := time.Since(began); !row.read && took > settings.Timeouts.APICall {
					t.Errorf("it took %s, and one read may take %s", took, settings.Timeouts.APICall)
				}
				if read := err == nil && len(seen.Files.Configs.Data) > 0 && len(seen.Files.Profiles.Data) > 0 && seen.Pool.Err == nil; read != row.read {
					t.Errorf("all files were read: %t, want %t: %v", read, row.read, err)
				}
			})
		})
	}
}
