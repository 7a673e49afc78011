package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

// The log of a plugin that is not there does not help a user, and the agent undoes no change where none has begun.
func TestANodeWithoutADevicePluginSaysSo(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		ask  func(w *world)
		wait string // what the diagnosis says that the agent does
	}{
		"as it is asked for already": {func(w *world) { w.label("all-disabled") }, "waits for the device plugin, without a limit, and disturbs nothing"},
		"otherwise than asked for":   {func(w *world) { w.label("all-1g.10gb") }, "waits for the device plugin, without a limit, and disturbs nothing"},
		"a sharing that is asked for": {
			func(w *world) { w.deploySharing(); w.profile("two") },
			"waits for the device plugin, without a limit, and disturbs nothing",
		},
		"nothing is asked for": {func(*world) {}, "changes nothing: no label requests a config"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.noPlugin = true
				w.edit(func(n *corev1.Node) {
					n.Spec.Taints = []corev1.Taint{{Key: "restricted", Effect: corev1.TaintEffectNoSchedule}}
				})
				row.ask(w)
				w.spend(time.Hour)
				c := w.condition()
				d := w.agent.Diagnose(t.Context(), true)
				said := jsonOf(t, d)
				if want := "has to select the node, and to tolerate restricted:NoSchedule"; c.Reason != string(config.ReasonNoDevicePlugin) || !strings.Contains(c.Message, want) {
					t.Errorf("%s: %s: want %q in it", c.Reason, c.Message, want)
				}
				if strings.Contains(c.Message, "log") || strings.Contains(said, "see the log") || strings.Contains(said, "undoes the change") {
					t.Errorf("the node says %q, the diagnosis %q", c.Message, said)
				}
				if !strings.Contains(said, row.wait) || len(d.Causes) == 0 || d.Causes[len(d.Causes)-1].Cause != api.CauseCapacityMissing {
					t.Errorf("the diagnosis says %q, want %q", said, row.wait)
				}
				if state := stateOf(w.node()); w.hasJournal() || state == config.StateFailed {
					t.Errorf("a change has begun (%t), or the state is %q: the device plugin of a new node is on its way", w.hasJournal(), state)
				}
				w.noPlugin, w.tolerations = false, []corev1.Toleration{{Key: "restricted", Operator: corev1.TolerationOpExists}}
				w.settle(config.ReasonConverged, config.ReasonNotRequested)
			})
		})
	}
}

// A device plugin that the agent does not know it cannot restart, so no change could be verified: the pods would be gone for nothing.
func TestPromise1APluginThatTheAgentDoesNotKnowDisturbsNothing(t *testing.T) {
	t.Parallel()
	other := func(change func(s *config.Settings)) func(w *world) {
		return func(w *world) {
			w.withoutConfig = true
			change(&w.settings)
			w.restart()
		}
	}
	names := func(s *config.Settings) {
		s.DevicePlugin.PodSelector = []labels.Selector{labels.SelectorFromSet(labels.Set{"name": "other"})}
	}
	for name, row := range map[string]struct {
		has  func(w *world)
		says []string
	}{
		"under another label": {other(names), []string{
			`NoDevicePlugin: all-1g.10gb: add "set=plugin" to devicePlugin.podSelector of the settings, if pod kube-system/plugin-1 is the node's device plugin, as its container nvidia-device-plugin-ctr suggests`,
		}},
		"under another label and in another namespace": {
			other(func(s *config.Settings) {
				names(s)
				s.DevicePlugin.Namespaces = []string{"gpu-operator"}
			}),
			[]string{`add "set=plugin" to devicePlugin.podSelector and "kube-system" to devicePlugin.namespaces of the settings`},
		},
		"in another namespace": {
			other(func(s *config.Settings) { s.DevicePlugin.Namespaces = []string{"gpu-operator"} }),
			[]string{`NoDevicePlugin: all-1g.10gb: add "kube-system" to devicePlugin.namespaces of the settings`},
		},
		"with another container": {
			other(func(s *config.Settings) { s.DevicePlugin.Containers = []string{"gpus"} }),
			[]string{`NoDevicePlugin: all-1g.10gb: add "nvidia-device-plugin-ctr" to devicePlugin.containers of the settings`},
		},
		"as a unit of the host": {
			func(w *world) {
				w.turn()
				if err := w.client.Tracker().Delete(podResource, "kube-system", "plugin-1"); err != nil {
					w.t.Fatal(err)
				}
				w.pluginOnHost = true
			},
			[]string{"NoDevicePlugin: all-1g.10gb: run the node's device plugin as a DaemonSet"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				row.has(w)
				w.turn()
				w.pod("train", w.devices()["nvidia.com/gpu"][0])
				before := w.gpus.String()
				w.label("all-1g.10gb")
				w.spend(time.Hour)
				c := w.condition()
				text := c.Reason + ": " + c.Message
				for _, want := range append(row.says, "changes nothing until then", "no pod that devicePlugin of the settings matches") {
					if !strings.Contains(text, want) {
						t.Errorf("the node says\n%q, want\n%q in it", text, want)
					}
				}
				if said := jsonOf(t, w.agent.Diagnose(t.Context(), true)); strings.Contains(said, "see the log") || strings.Contains(said, "MIG_STRATEGY") {
					t.Errorf("the diagnosis says %q", said)
				}
				if w.hasJournal() || !w.runs("train") || w.node().Spec.Unschedulable || w.gpus.String() != before {
					t.Errorf("a change has begun: %q", text)
				}
				if state := stateOf(w.node()); state != config.StateFailed {
					t.Errorf("the state is %q: tools wait for what only a user can end", state)
				}
				w.deploySharing()
				w.unset(config.LabelMIGConfig)
				w.profile("two")
				w.spend(time.Hour)
				if state, c := stateOf(w.node()), w.condition(); state != config.StateFailed || c.Reason != string(config.ReasonNoDevicePlugin) {
					t.Errorf("for a sharing the node says %s: %s, and the state is %q", c.Reason, c.Message, state)
				}
			})
		})
	}
}

// Administrators taint nodes that have a device plugin already: it runs on, and does not start again after the change.
func TestPromise1ATaintThatThePluginDoesNotTolerateDisturbsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.turn()
		w.pod("train", w.devices()["nvidia.com/gpu"][0])
		before := w.gpus.String()
		w.edit(func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "restrictedaccess", Value: "yes", Effect: corev1.TaintEffectNoSchedule}}
		})
		w.label("all-1g.10gb")
		w.spend(time.Hour)
		const want = "add the toleration to the DaemonSet of pod kube-system/plugin-1; pod kube-system/plugin-1 does not tolerate the taint restrictedaccess=yes:NoSchedule, " +
			"and would not start again"
		c := w.condition()
		if c.Reason != string(config.ReasonNoDevicePlugin) || !strings.Contains(c.Message, want) {
			t.Errorf("%s: %s; want %q in it", c.Reason, c.Message, want)
		}
		if w.hasJournal() || !w.runs("train") || w.node().Spec.Unschedulable || w.gpus.String() != before {
			t.Errorf("a change has begun: %s", c.Message)
		}
		w.edit(func(n *corev1.Node) { n.Spec.Taints = nil })
		w.settle(config.ReasonConverged)
	})
}

// A change that only creates instances disturbs no pod, and could not be verified either.
func TestPromise1APluginThatTheAgentDoesNotKnowIsNamedBeforeInstancesAreMade(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-enabled")
		before := w.gpus.String()
		w.settings.DevicePlugin.Namespaces = []string{"gpu-operator"}
		w.restart()
		w.label("all-1g.10gb")
		w.offered = map[string][]string{"nvidia.com/gpu": {"GPU-of-before"}}
		if c := w.untilReason(config.ReasonNoDevicePlugin); w.hasJournal() || w.gpus.String() != before || !strings.Contains(c.Message, `add "kube-system" to devicePlugin.namespaces`) {
			t.Errorf("a change has begun: %s", c.Message)
		}
	})
}
