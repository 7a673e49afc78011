package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/config"
)

// deployWithoutDefault deploys the node's config managers without a default, as the GPU Operator does if its ClusterPolicy names none.
func (w *world) deployWithoutDefault(fallbacks string) {
	w.client.PrependReactor("create", "pods", func(action k8stesting.Action) (bool, runtime.Object, error) {
		pod, ok := action.(k8stesting.CreateAction).GetObject().(*corev1.Pod)
		if !ok {
			return false, nil, nil
		}
		for i, c := range pod.Spec.Containers {
			for j, env := range c.Env {
				if env.Name == "DEFAULT_CONFIG" {
					pod.Spec.Containers[i].Env[j] = corev1.EnvVar{Name: "FALLBACK_STRATEGIES", Value: fallbacks}
				}
			}
		}
		return false, nil, nil
	})
}

// "Replicas not showing up": there is a config, and no label or setting names it. The condition and the diagnosis say how to.
func TestConfigsOfThePluginThatNothingAsksForAreNamed(t *testing.T) {
	t.Parallel()
	const four = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	keys := map[string]string{"any": four, "tesla-t4": four, "gpuslice-0123456789ab": four, "not a label": four}
	for name, test := range map[string]struct {
		begin func(w *world)
		want  []string
	}{
		"the GPU Operator without a default": {
			func(w *world) {
				w.deployConfigManager()
				w.deployWithoutDefault("empty")
				w.setPluginConfigs("kube-system", "plugin-configs", keys)
			},
			[]string{
				"ConfigMap kube-system/plugin-configs has configs of the device plugin, but this node uses none",
				"set label nvidia.com/device-plugin.config to one of its keys (any; tesla-t4)", "devicePlugin.config.default of the GPU Operator's ClusterPolicy",
			},
		},
		"a plugin with a file of the host": {
			func(w *world) {
				w.deploySharing()
				w.settings.DevicePlugin.ConfigMap = config.ConfigMapName{Namespace: "gpuslice", Name: "device-plugin-config"}
				w.restart()
				w.setPluginConfigs("gpuslice", "device-plugin-config", keys)
			},
			[]string{"ConfigMap gpuslice/device-plugin-config has configs", "to one of its keys (any; tesla-t4)", "devicePlugin.defaultConfig of the settings"},
		},
		"a default":                 {func(w *world) { w.deployConfigManager() }, nil},
		"a key that is the default": {func(w *world) { w.deployConfigManager(); w.deployWithoutDefault("named,single") }, nil},
		"a ConfigMap without a key": {func(w *world) {
			w.deployConfigManager()
			w.deployWithoutDefault("empty")
			w.setPluginConfigs("kube-system", "plugin-configs", nil)
		}, nil},
		"a file, and no such configs": {func(w *world) { w.deploySharing() }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				test.begin(w)
				w.passesWithin(5, func() bool { return len(w.offered) > 0 })
				c := w.settle(config.ReasonNotRequested)
				said := jsonOf(t, w.agent.Diagnose(t.Context(), true))
				for _, label := range config.RequestLabels() {
					if !strings.Contains(c.Message, label) {
						t.Errorf("the node says %q, without label %s", c.Message, label)
					}
				}
				for _, text := range test.want {
					if !strings.Contains(c.Message, text) {
						t.Errorf("the node says %q, want %q in it", c.Message, text)
					}
					if !strings.Contains(said, text) {
						t.Errorf("the diagnosis says %q, want %q in it", said, text)
					}
				}
				if test.want == nil && (strings.Contains(c.Message, "ConfigMap") || strings.Contains(said, "ConfigMap")) {
					t.Errorf("the node says %q, the diagnosis %q", c.Message, said)
				}
			})
		})
	}
}

// A ConfigMap that is not there, or has no key, keeps the plugin's pod from starting: such a pod has no log that would say so.
func TestAPluginWhosePodDoesNotStartIsNamedWithWhatItNeeds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployConfigManager()
		w.client.PrependReactor("create", "pods", func(action k8stesting.Action) (bool, runtime.Object, error) {
			if pod, ok := action.(k8stesting.CreateAction).GetObject().(*corev1.Pod); ok && strings.HasPrefix(pod.Name, "managed-") {
				pod.Status.InitContainerStatuses = []corev1.ContainerStatus{{
					Name: "config-manager-init", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
				}}
			}
			return false, nil, nil
		})
		w.pluginBroken = true
		w.untilReason(config.ReasonCapacityMismatch)
		want := ": pod kube-system/managed-1 does not start: its container config-manager-init waits (CrashLoopBackOff); " +
			"NVIDIA's config manager needs ConfigMap kube-system/plugin-configs, with one key at least; "
		if c := w.condition(); !strings.Contains(c.Message, want) || strings.Contains(c.Message, "log on this node") {
			t.Errorf("the node says %s: %s; want it to begin with %q", c.Reason, c.Message, want)
		}
	})
}
