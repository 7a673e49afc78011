package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/cmd/show"
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
				"the device plugin runs under the MIG strategy none, by what it offers, and mixed is needed",
				"set MIG_STRATEGY=mixed in the environment of its DaemonSet, or flags.migStrategy: mixed in its config",
			},
		},
		"single, and a label says mixed": {
			under: config.MIGStrategySingle, label: config.MIGStrategyMixed, settings: config.MIGStrategyAuto,
			says: []string{"the device plugin runs under the MIG strategy single, by what it offers, and mixed is needed", "set MIG_STRATEGY=mixed"},
		},
		"none, and the settings say mixed": {
			under: config.MIGStrategyNone, settings: config.MIGStrategyMixed,
			says: []string{"strategy none, by what it offers, and mixed is needed: migStrategy of the agent's settings is mixed", "set migStrategy of the settings to auto"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.under = row.under
				if row.label != "" {
					w.edit(func(n *corev1.Node) {
						metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelMIGStrategy, string(row.label))
					})
				}
				w.presents(row.settings)
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
				w.passes("the wait for capacity", func() bool { return w.condition().Reason == string(config.ReasonAwaitingCapacity) })
				w.spend(time.Minute)
				if c := w.condition(); c.Reason != string(config.ReasonAwaitingCapacity) {
					t.Errorf("after a minute it says %s: %s", c.Reason, c.Message)
				} else {
					named(c.Message)
				}
				named(strings.Join(strings.Fields(show.Diagnosis(w.agent.Diagnose(t.Context(), true))), " "))
				named(w.settle(config.ReasonWrongMIGStrategy).Message)
				w.givenBack()
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
		w.passes("the wait for capacity", func() bool { return w.condition().Reason == string(config.ReasonAwaitingCapacity) })
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

// TestPromise1APluginThatIsToldNoStrategyIsNotGuessed: with a config manager, the plugin has no other source of a strategy than its config.
func TestPromise1APluginThatIsToldNoStrategyIsNotGuessed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.managed()
		cm, err := w.client.CoreV1().ConfigMaps("kube-system").Get(t.Context(), "plugin-configs", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		cm.Data["default"] = "version: v1\n"
		if _, err := w.client.CoreV1().ConfigMaps("kube-system").Update(t.Context(), cm, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.manage()
		w.pod("train", w.devices()["nvidia.com/gpu"][0])
		w.edit(func(n *corev1.Node) {
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelMIGConfig, "all-1g.10gb")
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelDevicePluginConfig, "default")
		})
		if !w.within(300, w.manage, func() bool { return w.condition().Reason == string(config.ReasonWrongMIGStrategy) || w.owed() }) {
			t.Fatal("nothing is said:", w.condition())
		}
		c := w.condition()
		if w.owed() || w.node().Spec.Unschedulable || !w.runs("train") {
			t.Errorf("something was begun; %s: %s", c.Reason, c.Message)
		}
		if !strings.Contains(c.Message, "flags.migStrategy") {
			t.Errorf("it does not say what to do: %s", c.Message)
		}
		// GPU feature discovery publishes the plugin's strategy.
		w.edit(func(n *corev1.Node) {
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelMIGStrategy, string(config.MIGStrategyMixed))
		})
		if !w.within(300, w.manage, w.owed) {
			t.Errorf("with a label that says so: %s: %s", w.condition().Reason, w.condition().Message)
		}
	})
}

// What the plugin reads is its present config where no label names another, and where none is mounted the plugin has the strategy none.
func TestPromise1APluginThatIsToldNoStrategyIsNotGuessedForALabelOfMIGAlone(t *testing.T) {
	t.Parallel()
	for name, manages := range map[string]bool{"by a config manager": true, "by no config": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				manage := func() {}
				if manages {
					w.managed()
					w.setPluginConfigs("kube-system", "plugin-configs", map[string]string{"default": "version: v1\n"})
					manage = w.manage
				} else {
					w.withoutConfig = true
					if err := w.client.CoreV1().Pods("kube-system").DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
						t.Fatal(err)
					}
					w.startPlugin()
				}
				manage()
				w.pod("train", w.devices()["nvidia.com/gpu"][0])
				w.label("all-1g.10gb")
				if !w.within(300, manage, func() bool { return w.condition().Reason == string(config.ReasonWrongMIGStrategy) || w.owed() }) {
					t.Fatal("nothing is said:", w.condition())
				}
				c := w.condition()
				if w.owed() || w.node().Spec.Unschedulable || !w.runs("train") || !strings.Contains(c.Message, "flags.migStrategy: mixed") {
					t.Errorf("something was begun, or it does not say what to do; %s: %s", c.Reason, c.Message)
				}
			})
		})
	}
}

// The agent writes a config for a profile. If the present config has no strategy, it writes one that fits the profile.
func TestAProfileTellsThePluginTheStrategyThatNothingElseDoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.managed()
		w.setPluginConfigs("kube-system", "plugin-configs", map[string]string{"default": "version: v1\n"})
		w.manage()
		w.profile("slices")
		if !w.within(400, w.manage, w.done("slices")) {
			t.Fatal("never converges")
		}
		key := w.node().Labels[config.LabelDevicePluginConfig]
		if text := w.pluginConfigs()[key]; !strings.Contains(text, "migStrategy: mixed") {
			t.Errorf("key %q says:\n%s", key, text)
		}
	})
}

// TestPromise1APluginOfAFileThatIsToldNoStrategyIsNotGuessed: the plugin has no other source of a strategy than its file and its pod.
func TestPromise1APluginOfAFileThatIsToldNoStrategyIsNotGuessed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.DevicePlugin.ConfigMap = config.ConfigMapName{Namespace: "gpuslice", Name: "device-plugin-config"}
		w.shares()
		const name = "device-plugin-config"
		w.setPluginConfigs("gpuslice", name, map[string]string{"plain": "version: v1\n"})
		w.turn()
		w.pod("train", w.devices()["nvidia.com/gpu"][0])
		w.edit(func(n *corev1.Node) {
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelMIGConfig, "all-1g.10gb")
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelDevicePluginConfig, "plain")
		})
		if !w.within(300, nil, func() bool { return w.condition().Reason == string(config.ReasonWrongMIGStrategy) || w.owed() }) {
			t.Fatal("nothing is said:", w.condition())
		}
		c := w.condition()
		if w.owed() || w.node().Spec.Unschedulable || !w.runs("train") || !strings.Contains(c.Message, "flags.migStrategy") {
			t.Errorf("something was begun, or it does not say what to do; %s: %s", c.Reason, c.Message)
		}
		w.setPluginConfigs("gpuslice", name, map[string]string{"plain": "version: v1\nflags: {migStrategy: mixed}\n"})
		w.passes("the config that the label names", func() bool { return w.condition().Reason == string(config.ReasonConverged) && !w.owed() })
	})
}
