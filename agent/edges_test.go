package agent_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/test/fullfs"
)

// A disk that is full beside the device plugin's config keeps no node: the note there is for a restarted agent alone.
func TestANoteForWhichThereIsNoRoomNeitherUndoesNorKeeps(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.shares()
		// Whoever runs the tests may be root, for whom a folder that may not be written is none: what stands there is another folder.
		if err := os.MkdirAll(filepath.Join(w.pluginFile+".told", "full"), 0o755); err != nil {
			t.Fatal(err)
		}
		w.profile("four")
		if !w.within(300, nil, func() bool { return w.condition().Reason == string(config.ReasonConverged) }) {
			c := w.condition()
			t.Fatalf("%s: %s", c.Reason, c.Message)
		}
		w.givenBack()
	})
}

// TestPromise1APluginThatIsToldNoStrategyIsNotGuessed: with a config manager, what its config does not say is nowhere.
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
		// GPU feature discovery tells what the plugin has told it.
		w.edit(func(n *corev1.Node) {
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelMIGStrategy, string(config.MIGStrategyMixed))
		})
		if !w.within(300, w.manage, w.owed) {
			t.Errorf("with a label that says so: %s: %s", w.condition().Reason, w.condition().Message)
		}
	})
}

// A profile has a config of its own, which says what fits it where the one that is there says nothing.
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

// TestPromise1APluginOfAFileThatIsToldNoStrategyIsNotGuessed: what its file does not say, and its pod is not told, is nowhere.
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

func TestAFullFolderOfThePluginsConfigDisturbsNobodyAndIsNamed(t *testing.T) {
	t.Parallel()
	dir := fullfs.Folder(t)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.shares()
		w.pluginFile = filepath.Join(dir, "config.yaml")
		w.restart()
		w.profile("two")
		w.reach("two")
		w.pod("train", string(w.snapshot()[0].UUID)+"::1")
		empty := fullfs.Fill(t, dir)
		w.profile("alone")
		w.spend(90 * time.Minute)
		c := w.condition()
		if folder := filepath.Dir(w.settings.DevicePlugin.ConfigFile); !strings.Contains(c.Message, "folder "+folder+" ") {
			t.Errorf("it does not say which folder is full: %s: %s", c.Reason, c.Message)
		}
		if w.owed() || w.node().Spec.Unschedulable || !w.runs("train") {
			t.Errorf("something was begun; %s: %s", c.Reason, c.Message)
		}
		empty()
		w.reach("alone")
	})
}

// There, it is neither undone nor kept, and on the way back neither.
func TestAFolderThatFillsInTheMiddleOfAChangeNeitherUndoesNorKeepsIt(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]bool{"": false, " and back": true} {
		t.Run("there"+name, func(t *testing.T) {
			t.Parallel()
			dir := fullfs.Folder(t)
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.shares()
				w.pluginFile = filepath.Join(dir, "config.yaml")
				w.restart()
				w.profile("four")
				w.reach("four")
				w.pod("train", string(w.snapshot()[0].UUID)+"::3")
				w.profile("two")
				w.passes("the fence", func() bool { return w.node().Spec.Unschedulable })
				fullfs.Fill(t, dir)
				if broken {
					w.refusesConfig = "replicas: 2"
				}
				if !broken {
					w.reach("two")
					return
				}
				w.settle(config.ReasonPluginFailed)
				w.givenBack()
				if got := w.offers(); got != "gpu=8" {
					t.Errorf("kubelet offers %s", got)
				}
			})
		})
	}
}

// Who may write labels must not be able to stop an agent by one that no driver manager sets, and one that it has left is told.
func TestAnUpgradeOfTheDriverIsWhatOperandsSayAndEndsOrIsTold(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.Timeouts.DriverUpgrade = 45 * time.Minute
		w.restart()
		w.converge("all-1g.10gb")
		w.edit(func(n *corev1.Node) {
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelOperandPrefix+"anything", fence.PausedForDriverUpgrade)
		})
		w.spend(10 * time.Minute)
		if c := w.condition(); c.Reason != string(config.ReasonConverged) {
			t.Errorf("by a label of no operand, %s: %s", c.Reason, c.Message)
		}
		w.edit(func(n *corev1.Node) {
			metav1.SetMetaDataLabel(&n.ObjectMeta, config.LabelOperandPrefix+"dcgm", fence.PausedForDriverUpgrade)
		})
		c := w.settle(config.ReasonDriverNotLoaded)
		if strings.Contains(c.Message, "kubectl") || !strings.Contains(c.Message, config.LabelOperandPrefix+"dcgm="+fence.PausedForDriverUpgrade) {
			t.Errorf("people are sent there at once, or the label is not named: %s", c.Message)
		}
		w.spend(40 * time.Minute)
		if c := w.condition(); strings.Contains(c.Message, "kubectl") {
			t.Errorf("people are sent there before timeouts.driverUpgrade: %s", c.Message)
		}
		w.spend(6 * time.Minute)
		if c := w.condition(); !strings.Contains(c.Message, "kubectl label node gpu-1 "+config.LabelOperandPrefix+"dcgm=true --overwrite") {
			t.Errorf("it does not say who has to act: %s", c.Message)
		}
		w.edit(func(n *corev1.Node) { delete(n.Labels, config.LabelOperandPrefix+"dcgm") })
		w.reach("all-1g.10gb")
	})
}

// One file serves nodes of four GPUs and of eight. Who looks at the node sees that a part of it is about others.
func TestPositionsThatTheNodeDoesNotHaveAreToldAndPassedOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB}]")
		w.administer(map[string]config.MIGConfig{"mine": {{Indices: []int{0, 4, 5}, MIG: true, Devices: map[string]int{"3g.40gb": 2}}}})
		w.label("mine")
		w.reach("mine")
		if p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "mine"); err != nil || !slices.Equal(p.Beyond, []int{4, 5}) {
			t.Errorf("the preview passes over %v, error %v", p.Beyond, err)
		}
		if got, want := w.condition().Message, "does not have, which were passed over: 4; 5"; !strings.Contains(got, want) {
			t.Errorf("the condition does not say %q: %s", want, got)
		}
	})
}
