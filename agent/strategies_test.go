package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
)

// The plugin's strategy need not be set anywhere that the agent can read: then only what the plugin offers shows it, and the plugin's log reports
// no error.
func TestAPluginUnderAnotherMIGStrategyIsNamedAsTheCause(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		under, label config.MIGStrategy
		settings     config.MIGStrategy
		says         []string
	}{
		"none, and nothing says so": {
			under: config.MIGStrategyNone, settings: config.MIGStrategyAuto,
			says: []string{
				"the device plugin advertises as under MIG strategy none, but the node needs mixed",
				"set MIG_STRATEGY=mixed in the environment of its DaemonSet, or flags.migStrategy: mixed in its config",
			},
		},
		"single, and a label says mixed": {
			under: config.MIGStrategySingle, label: config.MIGStrategyMixed, settings: config.MIGStrategyAuto,
			says: []string{"the device plugin advertises as under MIG strategy single, but the node needs mixed", "set MIG_STRATEGY=mixed"},
		},
		"none, and the settings say mixed": {
			under: config.MIGStrategyNone, settings: config.MIGStrategyMixed,
			says: []string{"strategy none, but the node needs mixed: migStrategy of the agent's settings is mixed", "set migStrategy of the settings to auto"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.pluginStrategy = row.under
				if row.label != "" {
					w.set(config.LabelMIGStrategy, string(row.label))
				}
				w.setStrategy(row.settings)
				w.settle(config.ReasonNotRequested)
				before := w.gpus.String()
				named := func(text string) {
					t.Helper()
					for _, want := range row.says {
						if !strings.Contains(text, want) {
							t.Errorf("it says %q, want %q in it", text, want)
						}
					}
				}
				w.label("all-1g.10gb")
				w.untilReason(config.ReasonAwaitingCapacity)
				w.spend(time.Minute)
				if c := w.condition(); c.Reason != string(config.ReasonAwaitingCapacity) {
					t.Errorf("after a minute it says %s: %s", c.Reason, c.Message)
				} else {
					named(c.Message)
				}
				named(jsonOf(t, w.agent.Diagnose(t.Context(), true)))
				named(w.settle(config.ReasonWrongMIGStrategy).Message)
				w.expectGivenBack()
				if after := w.gpus.String(); after != before {
					t.Errorf("the GPUs are not as they were:\n%s", after)
				}
			})
		})
	}
}

// For a moment kubelet still gives out what the plugin offered before the change: a whole GPU, as under the strategy none.
func TestAPluginThatIsOnItsWayIsNotTakenForOneUnderAnotherStrategy(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settle(config.ReasonNotRequested)
		former := w.offered
		w.label("all-1g.10gb")
		w.untilReason(config.ReasonAwaitingCapacity)
		w.offered = former
		for range 3 {
			w.agent.Pass(t.Context())
			if c := w.condition(); strings.Contains(c.Message, "strategy") {
				t.Fatalf("%s: %s", c.Reason, c.Message)
			}
		}
		w.offered = w.devices()
		w.reach("all-1g.10gb")
	})
}

// TestPromise1APluginWithoutAStrategyIsNotGuessed: a plugin has no other source of a strategy than its config, its file and its pod. Where no
// config is mounted, it has the strategy none.
func TestPromise1APluginWithoutAStrategyIsNotGuessed(t *testing.T) {
	t.Parallel()
	const file = "device-plugin-config"
	managed := func(w *world) {
		w.deployConfigManager()
		w.setPluginConfigs("kube-system", "plugin-configs", map[string]string{"default": "version: v1\n"})
	}
	for name, row := range map[string]struct {
		has  func(w *world)
		says string
		mend func(w *world)
	}{
		"by the config of a config manager that a label names": {func(w *world) {
			managed(w)
			w.set(config.LabelDevicePluginConfig, "default")
		}, "flags.migStrategy", func(w *world) {
			w.set(config.LabelMIGStrategy, string(config.MIGStrategyMixed)) // GPU feature discovery publishes the plugin's strategy
		}},
		"by the default of a config manager": {managed, "flags.migStrategy: mixed", nil},
		"by no config": {func(w *world) {
			w.withoutConfig = true
			if err := w.client.CoreV1().Pods("kube-system").DeleteCollection(w.t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
				w.t.Fatal(err)
			}
		}, "flags.migStrategy: mixed", nil},
		"by the plugin's file": {func(w *world) {
			w.settings.DevicePlugin.ConfigMap = config.ConfigMapName{Namespace: "gpuslice", Name: file}
			w.deploySharing()
			w.setPluginConfigs("gpuslice", file, map[string]string{"plain": "version: v1\n"})
			w.set(config.LabelDevicePluginConfig, "plain")
		}, "flags.migStrategy", func(w *world) {
			w.setPluginConfigs("gpuslice", file, map[string]string{"plain": "version: v1\nflags: {migStrategy: mixed}\n"})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				row.has(w)
				w.turn()
				w.pod("train", w.devices()["nvidia.com/gpu"][0])
				w.label("all-1g.10gb")
				w.passes("a refusal", func() bool { return w.reason() == config.ReasonWrongMIGStrategy || w.hasJournal() })
				c := w.condition()
				if w.hasJournal() || w.node().Spec.Unschedulable || !w.runs("train") || !strings.Contains(c.Message, row.says) {
					t.Errorf("something was begun, or it does not say what to do; %s: %s", c.Reason, c.Message)
				}
				if row.mend != nil {
					row.mend(w)
					w.passes("the change", w.hasJournal)
					w.settle(config.ReasonConverged)
				}
			})
		})
	}
}
