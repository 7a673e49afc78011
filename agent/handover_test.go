package agent_test

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/test/fullfs"
)

func TestAFreshNodeIsOpenedWithTheSharingOfItsProfile(t *testing.T) {
	t.Parallel()
	for _, p := range []string{"two", "four"} {
		t.Run(p, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.taintAsRegistered()
				w.deploySharing()
				w.profile(p)
				w.reach(p)
			})
		})
	}
}

func TestAConfigFileThatCannotBeWrittenKeepsNoNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := sharing(t, "alone")
		w.pluginFile = "/proc/1/gpuslice/config.yaml"
		w.restart()
		w.profile("four")
		w.settle(config.ReasonStepFailed)
		w.expectGivenBack()
	})
}

func TestALabelThatTheAPIServerRefusesKeepsNoNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := sharing(t, "alone")
		refused := 0
		w.patched(func(patch string) error {
			if !strings.Contains(patch, `"workload-type":"`) {
				return nil
			}
			refused++
			return apierrors.NewForbidden(nodeResource.GroupResource(), nodeName, fmt.Errorf("denied by a webhook"))
		})
		w.profile("four")
		w.passes("the refusal", func() bool { return refused > 0 })
		w.passes("the end of the undo", func() bool { return !w.hasJournal() })
		w.expectGivenBack()
		if got := w.advertised(); got != "gpu=2" {
			t.Errorf("kubelet offers %s", got)
		}
	})
}

// deployConfigManager gives the node a plugin with a config manager.
func (w *world) deployConfigManager() {
	w.configManager = true
	w.deploySharing()
	w.pluginFile = ""
	w.restart()
	if _, err := w.client.CoreV1().ConfigMaps("kube-system").Create(w.t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "plugin-configs", Namespace: "kube-system"}, Data: map[string]string{"default": "version: v1\nflags: {migStrategy: mixed}\n"},
	}, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// pluginConfigs returns the keys of the config manager's ConfigMap.
func (w *world) pluginConfigs() map[string]string {
	cm, err := w.client.CoreV1().ConfigMaps("kube-system").Get(w.t.Context(), "plugin-configs", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return cm.Data
}

// setPluginConfigs replaces the ConfigMap's keys by these configs of the plugin.
func (w *world) setPluginConfigs(namespace, name string, data map[string]string) {
	w.t.Helper()
	configMaps := w.client.CoreV1().ConfigMaps(namespace)
	object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace}, Data: data}
	if _, err := configMaps.Create(w.t.Context(), object, metav1.CreateOptions{}); err == nil {
		return
	}
	if _, err := configMaps.Update(w.t.Context(), object, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// configManagerTurn is what the DaemonSet and the config manager of such a plugin do in their turn.
func (w *world) configManagerTurn() {
	n := w.node()
	fenced := slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return strings.HasPrefix(t.Key, "gpuslice.io/") })
	pods, _ := w.client.CoreV1().Pods("kube-system").List(w.t.Context(), metav1.ListOptions{})
	if len(pods.Items) == 0 {
		w.offered = map[string][]string{}
		if fenced {
			return
		}
		w.podsStarted++
		name := fmt.Sprintf("managed-%d", w.podsStarted)
		_, err := w.client.CoreV1().Pods("kube-system").Create(w.t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: name, Namespace: "kube-system", UID: types.UID(name), Labels: map[string]string{"name": "nvidia-device-plugin-ds"}, OwnerReferences: ofDaemonSet("plugin"),
			},
			Spec: corev1.PodSpec{
				NodeName: nodeName, Tolerations: w.tolerations,
				Containers: []corev1.Container{
					{Name: pluginContainer},
					{Name: "config-manager", Env: []corev1.EnvVar{
						{Name: "NODE_LABEL", Value: config.LabelDevicePluginConfig},
						{Name: "CONFIG_FILE_SRCDIR", Value: "/available-configs"},
						{Name: "DEFAULT_CONFIG", Value: "default"},
					}, VolumeMounts: []corev1.VolumeMount{{Name: "configs", MountPath: "/available-configs"}}},
				},
				Volumes: []corev1.Volume{{Name: "configs", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
					LocalObjectReference: corev1.LocalObjectReference{Name: "plugin-configs"},
				}}}},
			},
			Status: corev1.PodStatus{Phase: corev1.PodRunning},
		}, metav1.CreateOptions{})
		if err != nil {
			w.t.Fatal(err)
		}
	}
	key := n.Labels[config.LabelDevicePluginConfig]
	if key == "" {
		key = "default"
	}
	text, there := w.pluginConfigs()[key]
	there = there || n.Labels[config.LabelDevicePluginConfig] == "" // then it takes an empty one, where it may
	w.offered = map[string][]string{}
	c, err := deviceplugin.Parse([]byte(text))
	if !there || err != nil && !check.PassedOver(err) || w.refusesConfig != "" && strings.Contains(text, w.refusesConfig) {
		return
	}
	w.pluginStrategy = cmp.Or(c.MIGStrategy, w.pluginStrategy)
	w.registerDevices(c.Sharing)
}

func TestAProfileThatIsWithdrawnInTheMiddleTakesItsConfigAlong(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployConfigManager()
		w.profile("four")
		w.passes("our label", func() bool { return w.node().Labels[config.LabelDevicePluginConfig] != "" })
		w.unset(config.LabelProfile)
		w.settle(config.ReasonNotRequested)
		w.expectGivenBack()
		if v := w.node().Labels[config.LabelDevicePluginConfig]; v != "" {
			t.Errorf("our label %s is still there, kubelet offers %s: %s", v, w.advertised(), w.condition().Message)
		}
	})
}

// A user's config of the plugin counts beside the MIG config; one that a former profile has left is no user's request.
func TestWhileTheGPUsAreCutAUsersConfigStaysAndThatOfAFormerProfileGoes(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		before func(w *world)
		says   string
	}{
		"a user's": {func(w *world) { w.set(config.LabelDevicePluginConfig, "default") }, "all-1g.10gb + default"},
		"a former profile's": {func(w *world) {
			w.profile("four")
			w.reach("four")
			w.unset(config.LabelProfile)
		}, "all-1g.10gb"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.deployConfigManager()
				row.before(w)
				w.label("all-1g.10gb")
				w.passes("the instances", func() bool { return w.done(row.says)() && strings.Contains(w.advertised(), "mig-1g.10gb") })
				if got := w.node().Labels[config.LabelDevicePluginConfig]; name == "a user's" && got != "default" {
					t.Errorf("the label is %q", got)
				}
			})
		})
	}
}

func TestAKeyThatAnotherNodeHasCollectedIsWrittenAgainOnTheWayBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployConfigManager()
		w.profile("four")
		w.reach("four")
		key := func() string { return w.node().Labels[config.LabelDevicePluginConfig] }
		first := key()
		w.refusesConfig = "replicas: 2"
		w.profile("two")
		w.passes("the next key", func() bool { return key() != first })
		keys := w.pluginConfigs()
		delete(keys, first)
		w.setPluginConfigs("kube-system", "plugin-configs", keys)
		w.passes("the end of the undo", func() bool { return !w.hasJournal() })
		w.expectGivenBack()
		w.turn()
		if _, there := w.pluginConfigs()[key()]; !there || w.advertised() != "gpu=8" {
			t.Errorf("the label names %s, which is there: %t; kubelet offers %s", key(), there, w.advertised())
		}
	})
}

func TestLabelsThatLagBehindTheWayBackKeepNoNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := sharing(t, "four")
		w.refusesConfig = "replicas: 2"
		w.profile("two")
		w.passes("the next config", func() bool { w.recoverPlugin(); return w.configReads > 1 && w.hasJournal() })
		w.set("nvidia.com/gpu.replicas", "2")
		w.passes("the end of the undo", func() bool { w.recoverPlugin(); return !w.hasJournal() })
		w.expectGivenBack()
	})
}

func TestALabelThatIsSetAtTheSameMomentIsNotOverwritten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		once := false
		w.patched(func(patch string) error {
			if once || !strings.Contains(patch, `"workload-type":"`) {
				return nil
			}
			once = true
			if err := w.writeBetween(func(n *corev1.Node) { metav1.SetMetaDataLabel(&n.ObjectMeta, "workload-type", "training") }); err != nil {
				return err
			}
			return apierrors.NewConflict(nodeResource.GroupResource(), nodeName, nil)
		})
		w.profile("two")
		w.passes("the refused write, and the end", func() bool { return once && !w.hasJournal() })
		if got := w.node().Labels["workload-type"]; got != "training" {
			t.Errorf("the other program's label is now %s", got)
		}
	})
}

func TestLabelsAreWaitedForNoLongerThanCapacityIs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.Timeouts.Capacity = time.Minute
		w.deploySharing()
		w.set("nvidia.com/gpu.replicas", "1")
		w.profile("two")
		w.reach("two") // the hint does not undo the change
	})
}

func TestAPodThatOnlySeesThePluginsConfigIsLeftAlone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := sharing(t, "alone")
		w.pod("agent", "", func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
			p.Spec.Volumes = []corev1.Volume{{Name: "plugin", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/gpuslice/device-plugin"}}}}
			p.Status.ContainerStatuses = []corev1.ContainerStatus{runsSince(metav1.Now())}
		})
		w.spend(time.Minute)
		w.profile("two")
		w.reach("two")
		if !w.runs("agent") {
			t.Error("the agent has evicted itself")
		}
	})
}

func TestLabelsAndTaintsGoWhenAnotherConfigIsAskedFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := sharing(t, "four")
		w.unset(config.LabelProfile)
		w.settle(config.ReasonNotRequested)
		if n := w.node(); n.Labels["workload-type"] != "research" || len(n.Spec.Taints) != 1 {
			t.Errorf("a label that goes changes nothing, but labels are %v, taints %v", n.Labels, n.Spec.Taints)
		}
		w.label("all-disabled")
		w.reach("all-disabled")
		if n := w.node(); n.Labels["workload-type"] != "" || len(n.Spec.Taints) > 0 {
			t.Errorf("labels %v, taints %v", n.Labels, n.Spec.Taints)
		}
	})
}

// A disk that is full beside the device plugin's config keeps no node: the note there is for a restarted agent alone.
func TestANoteForWhichThereIsNoRoomNeitherUndoesNorKeeps(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		// The tests may run as root, which can write to any folder: so another folder is in the place of the note.
		if err := os.MkdirAll(filepath.Join(w.pluginFile+".notified", "full"), 0o755); err != nil {
			t.Fatal(err)
		}
		w.profile("four")
		w.reach("four")
	})
}

func TestAFullFolderOfThePluginsConfigDisturbsNoPodAndIsNamed(t *testing.T) {
	t.Parallel()
	dir := fullfs.Folder(t)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		w.pluginFile = filepath.Join(dir, "config.yaml")
		w.restart()
		w.profile("two")
		w.reach("two")
		w.pod("train", string(w.snapshot()[0].UUID)+"::1")
		empty := fullfs.Fill(t, dir)
		if given := w.ask(config.LabelProfile + "=alone"); given.Reason != config.ReasonNoHandover || !strings.HasPrefix(given.HeldUp, "folder ") {
			t.Errorf("a preview is held up by %s: %q", given.Reason, given.HeldUp)
		}
		w.unannotate(config.AnnotationPreview)
		w.profile("alone")
		w.spend(90 * time.Minute)
		c := w.condition()
		if folder := filepath.Dir(w.settings.DevicePlugin.ConfigFile); !strings.Contains(c.Message, "folder "+folder+" ") {
			t.Errorf("it does not say which folder is full: %s: %s", c.Reason, c.Message)
		}
		if want := "make room for the device plugin's config for label gpuslice.io/profile=alone"; !strings.Contains(c.Message, want) {
			t.Errorf("the node says %q, want %q in it", c.Message, want)
		}
		if w.hasJournal() || w.node().Spec.Unschedulable || !w.runs("train") {
			t.Errorf("something was begun; %s: %s", c.Reason, c.Message)
		}
		empty()
		w.reach("alone")
	})
}

// The agent neither undoes the change nor keeps the node for that, nor in an undo.
func TestAFolderThatFillsInTheMiddleOfAChangeNeitherUndoesNorKeepsIt(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]bool{"": false, " and back": true} {
		t.Run("there"+name, func(t *testing.T) {
			t.Parallel()
			dir := fullfs.Folder(t)
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.deploySharing()
				w.pluginFile = filepath.Join(dir, "config.yaml")
				w.restart()
				w.profile("four")
				w.reach("four")
				w.pod("train", string(w.snapshot()[0].UUID)+"::3")
				w.profile("two")
				w.untilCordoned()
				fullfs.Fill(t, dir)
				if broken {
					w.refusesConfig = "replicas: 2"
				}
				if !broken {
					w.reach("two")
					return
				}
				w.settle(config.ReasonPluginFailed)
				w.expectGivenBack()
				if got := w.advertised(); got != "gpu=8" {
					t.Errorf("kubelet offers %s", got)
				}
			})
		})
	}
}

// Any agent can fill the ConfigMap that all nodes share. An agent finds that out before it disturbs anything; after that it gives the node back.
func TestAConfigMapThatTakesNoKeyDisturbsNoPodAndIsNamed(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		takes  func(fenced, dryRun bool) bool
		fences bool
		taken  bool // another client takes the agent's key away when the node is fenced
	}{
		"before the change":                  {takes: func(bool, bool) bool { return false }},
		"as soon as it would take it":        {takes: func(_, dryRun bool) bool { return dryRun }},
		"at the fence, with the key in it":   {takes: func(fenced, _ bool) bool { return !fenced }, fences: true},
		"at the fence, and the key is taken": {takes: func(fenced, _ bool) bool { return !fenced }, fences: true, taken: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.deployConfigManager()
				full := true
				w.client.PrependReactor("patch", "configmaps", func(action k8stesting.Action) (bool, runtime.Object, error) {
					patch := action.(k8stesting.PatchActionImpl) //nolint:errcheck // it is a patch
					node, err := w.client.nodes.Get(nodeResource, "", nodeName)
					tries := len(patch.PatchOptions.DryRun) > 0                                          // the fake writes that, too
					if err != nil || !full || row.takes(node.(*corev1.Node).Spec.Unschedulable, tries) { //nolint:errcheck // it is a node
						return err != nil || tries, &corev1.ConfigMap{}, err
					}
					return true, nil, apierrors.NewInvalid(schema.GroupKind{Kind: "ConfigMap"}, "plugin-configs", field.ErrorList{field.TooLong(field.NewPath("data"), nil, 1<<20)})
				})
				w.pod("train", string(w.snapshot()[0].UUID))
				cordons := w.recordCordons()
				if given := w.ask(config.LabelProfile + "=two"); (given.Reason == config.ReasonNoHandover) != !row.takes(false, true) {
					t.Errorf("a preview is held up by %s: %q", given.Reason, given.HeldUp)
				}
				w.unannotate(config.AnnotationPreview)
				w.profile("two")
				if !row.fences {
					w.spend(90 * time.Minute)
					c := w.condition()
					if want := "two: make room in ConfigMap kube-system/plugin-configs"; c.Reason != string(config.ReasonNoHandover) || !strings.HasPrefix(c.Message, want) {
						t.Errorf("%s: %q, want %q first", c.Reason, c.Message, want)
					}
					if w.hasJournal() || len(*cordons) > 0 || !w.runs("train") {
						t.Errorf("something was begun, and the node was cordoned %d times; %s: %s", len(*cordons), c.Reason, c.Message)
					}
					full = false
					w.reach("two")
					return
				}
				w.untilCordoned()
				if !row.taken {
					w.reach("two")
					return
				}
				w.setPluginConfigs("kube-system", "plugin-configs", map[string]string{"default": w.pluginConfigs()["default"]})
				w.settle(config.ReasonNoHandover)
				w.expectGivenBack()
				if got := w.advertised(); got != "gpu=2" {
					t.Errorf("kubelet offers %s", got)
				}
			})
		})
	}
}

// A key that a change has left, which came to nothing, takes none of the few that a node may have.
func TestAKeyOfAnUndoneChangeGoes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployConfigManager()
		w.profile("four")
		w.reach("four")
		w.refusesConfig = "replicas: 2"
		w.profile("two")
		w.settle(config.ReasonCapacityMismatch)
		w.expectGivenBack()
		if keys := w.pluginConfigs(); len(keys) != 2 {
			t.Errorf("beside default and %s there are %v", w.node().Labels[config.LabelDevicePluginConfig], slices.Sorted(maps.Keys(keys)))
		}
	})
}

// The settings' default counts on every node without a label of its own, even if the config manager of the GPU Operator has a default of
// its own: the node gets it as a profile's sharing, by a key of the agent's.
func TestTheSettingsDefaultIsHandedToAConfigManager(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployConfigManager()
		w.settings.DevicePlugin.ConfigMap = config.ConfigMapName{Namespace: "gpuslice", Name: "device-plugin-config"}
		w.settings.DevicePlugin.DefaultConfig = "default"
		w.restart()
		becomes := func(text, want string) {
			t.Helper()
			w.setPluginConfigs("gpuslice", "device-plugin-config", map[string]string{"default": text})
			w.passes(want, func() bool { return w.done("default")() && w.advertised() == want })
		}
		becomes("version: v1\nflags: {migStrategy: mixed, plugin: {deviceIDStrategy: index}}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n", "gpu=8")
		key := w.node().Labels[config.LabelDevicePluginConfig]
		if text := w.pluginConfigs()[key]; !strings.HasPrefix(key, config.OwnPluginKey) || !strings.Contains(text, "deviceIDStrategy: index") {
			t.Errorf("the node has label %s=%q, whose config is %q: all that the default says is to count", config.LabelDevicePluginConfig, key, text)
		}
		if !w.status().ByDefault {
			t.Error("the status says of the default that a label asks for it")
		}
		becomes("version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n", "gpu=4")
		if _, there := w.pluginConfigs()[key]; there {
			t.Errorf("key %s is still there, which no node goes by", key)
		}
		w.profile("alone")
		w.passes("the profile in place of the default", func() bool { return w.done("alone")() && w.advertised() == "gpu=2" })
		w.unset(config.LabelProfile)
		w.passes("the default again", func() bool { return w.done("default")() && w.advertised() == "gpu=4" })
	})
}

// Something that sets the label of the plugin's config manager back at each event of the node, as OpenShift's machine controller does with the
// labels of a MachineSet, ends the change once, and users read what it is.
func TestALabelThatIsSetBackEndsTheHandOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployConfigManager()
		w.fillManagedFields()
		w.set(config.LabelDevicePluginConfig, "default")
		fences, set, reported := 0, 0, []string{}
		pending := false
		w.profile("two")
		began := time.Now()
		for time.Since(began) < time.Hour {
			if w.hasJournal() && !pending {
				fences++
			}
			pending = w.hasJournal()
			if v := w.node().Labels[config.LabelDevicePluginConfig]; v != "default" {
				set++
				w.set(config.LabelDevicePluginConfig, "default")
			}
			w.pass()
			if m := w.condition().Reason + ": " + w.condition().Message; !slices.Contains(reported, m) {
				reported = append(reported, m)
			}
		}
		t.Logf("fences %d, set %d\n%s", fences, set, strings.Join(reported, "\n"))
		c := w.condition()
		if fences != 1 || set > 3 || w.hasJournal() || c.Reason != string(config.ReasonStepHadNoEffect) {
			t.Errorf("%d fences, the label was set %d times, a journal %t: %s: %s", fences, set, w.hasJournal(), c.Reason, c.Message)
		}
		for _, want := range []string{"label " + config.LabelDevicePluginConfig, `went back to "default"`, "by managedFields", "MachineSet"} {
			if !strings.Contains(c.Message, want) {
				t.Errorf("the message is %q, want %q in it", c.Message, want)
			}
		}
	})
}

// refusesKey refuses to write the key of the ConfigMap, as long as that is so, and counts.
func (w *world) refusesKey(key string, refuses *bool, tried *int) {
	w.client.PrependReactor("patch", "configmaps", func(action k8stesting.Action) (bool, runtime.Object, error) {
		patch := action.(k8stesting.PatchActionImpl) //nolint:errcheck // it is a patch
		if !*refuses || !strings.Contains(string(patch.Patch), key) {
			return false, nil, nil
		}
		*tried++
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "plugin-configs", fmt.Errorf("by a policy"))
	})
}

// A key that the agent may not write again is needed only where the plugin starts: the node stays as good as it is, nothing begins that would start the
// plugin or could not be undone without, and what is under way goes on once the key is back.
func TestAKeyThatCannotBeWrittenAgainHoldsUpWhatNeedsIt(t *testing.T) {
	t.Parallel()
	const waits = "let the agent write its key of ConfigMap kube-system/plugin-configs: "
	for name, row := range map[string]struct {
		asks          func(w *world)
		before, after config.Reason // while the key is away, and once it is back
		fenced        bool
		has           string // the profile in the end
	}{
		"at rest":                          {func(*world) {}, config.ReasonConverged, config.ReasonConverged, false, "four"},
		"before a change":                  {func(w *world) { w.profile("two") }, config.ReasonNoHandover, config.ReasonConverged, false, "two"},
		"in a change that touched nothing": {func(w *world) { w.profile("two") }, config.ReasonNoHandover, config.ReasonConverged, true, "two"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.deployConfigManager()
				w.profile("four")
				w.reach("four")
				key := w.node().Labels[config.LabelDevicePluginConfig]
				text := w.pluginConfigs()[key]
				refuses, tried := true, 0
				w.refusesKey(key, &refuses, &tried)
				events := w.restartWithEvents()
				w.spend(time.Minute)
				if row.fenced {
					row.asks(w)
					w.passes("the fence", func() bool { return w.node().Spec.Unschedulable })
				}
				keys := w.pluginConfigs()
				keys[key] += "# by another\n" // what the plugin offers is the same, since it has read the key before
				w.setPluginConfigs("kube-system", "plugin-configs", keys)
				if !row.fenced {
					w.spend(time.Minute)
					row.asks(w)
				}
				w.spend(2 * time.Hour)
				c := w.condition()
				if c.Reason != string(row.before) || row.before == config.ReasonNoHandover && !strings.Contains(c.Message, waits) || w.node().Spec.Unschedulable != row.fenced {
					t.Errorf("while the key is not the agent's: %s: %s, cordoned %t", c.Reason, c.Message, w.node().Spec.Unschedulable)
				}
				if n := heard(events, string(config.ReasonNoHandover), waits, "was removed or changed by another program"); n != 1 {
					t.Errorf("%d Events say that it is away", n)
				}
				if tried < 50 || tried > 70 {
					t.Errorf("it was tried %d times in two hours", tried)
				}
				refuses = false
				w.reach(row.has)
				w.spend(time.Minute)
				if c := w.condition(); c.Reason != string(row.after) || row.has == "four" && w.pluginConfigs()[key] != text {
					t.Errorf("once it is back: %s: %s; %v", c.Reason, c.Message, w.pluginConfigs())
				}
			})
		})
	}
}

// The device plugin passes over what it does not know in its config, and runs by the rest: so does the node.
func TestWhatThePluginPassesOverIsAWarningWhereItRunsByTheRest(t *testing.T) {
	t.Parallel()
	const passed = "version: v1\nflags: {renameByDefault: true}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 1200}]}}\n"
	const warning = "the device plugin ignores a part of its config: ConfigMap kube-system/plugin-configs, key any: flags.renameByDefault: is unknown here: it belongs below sharing.timeSlicing or sharing.mps"
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deployConfigManager()
		w.setPluginConfigs("kube-system", "plugin-configs", map[string]string{"any": passed})
		w.set(config.LabelDevicePluginConfig, "any")
		if c := w.settle(config.ReasonConverged); !strings.Contains(c.Message, warning) || w.node().Labels[config.LabelMIGConfigState] == string(config.StateFailed) {
			t.Errorf("the node says %s: %s; want %q", c.Reason, c.Message, warning)
		}
		if n := len(w.offered["nvidia.com/gpu"]); n != 2400 {
			t.Errorf("%d replicas are offered", n)
		}
		w.setPluginConfigs("kube-system", "plugin-configs", map[string]string{"any": strings.Replace(passed, "flags: {", "flags: {migStrategy: mixed, ", 1)})
		w.label("all-1g.10gb")
		if c := w.untilReason(config.ReasonImpossibleSharing); !strings.Contains(c.Message, "nvidia.com/gpu is to be shared, but the node will not have it") {
			t.Errorf("a MIG config beside it: %s: %s", c.Reason, c.Message)
		}
	})
}

// Each agent may write to the ConfigMap that all nodes share. What another than this node's agent has put under one of its keys is no config of the
// plugin: no pod leaves for it, and no path of it gets into the next one.
func TestWhatAnotherHasWrittenUnderTheAgentsKeyIsNotBelieved(t *testing.T) {
	t.Parallel()
	const evil = "version: v1\nflags: {plugin: {containerDriverRoot: /opt/evil, deviceListStrategy: volume-mounts}}\n" +
		"sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
	const sliced = "version: v1\nflags: {migStrategy: mixed, plugin: {containerDriverRoot: /opt/evil}}\n" +
		"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: N}]}}\n"
	put := func(w *world, key, text string) {
		keys := w.pluginConfigs()
		if keys[key] = text; text == "" {
			delete(keys, key)
		}
		w.setPluginConfigs("kube-system", "plugin-configs", keys)
	}
	for name, row := range map[string]struct {
		does func(w *world, key string)
		says int // Events
	}{
		"another text":                           {func(w *world, key string) { put(w, key, evil) }, 1},
		"another text, and a new agent":          {func(w *world, key string) { put(w, key, evil); w.restartUnlessVerifying() }, 1},
		"none":                                   {func(w *world, key string) { put(w, key, "") }, 1},
		"one by a key that another node goes by": {func(w *world, _ string) { put(w, "gpuslice-other-uid-"+state.Hash(evil), evil) }, 0},
		"one by a key of no node":                {func(w *world, _ string) { put(w, "gpuslice-"+state.Hash(evil), evil) }, 0},
		"one for the next profile, by the name that this agent would give it": {func(w *world, _ string) {
			for _, fits := range []string{strings.ReplaceAll(sliced, "N", "4"), strings.ReplaceAll(sliced, "N", "2")} {
				put(w, config.OwnPluginKey+"node-uid-"+state.Hash(fits), fits)
			}
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.deployConfigManager()
				put(w, "default", "version: v1\nflags: {migStrategy: mixed, plugin: {nvidiaCTKPath: /usr/bin/of-people}}\n")
				w.profile("four")
				w.reach("four")
				key := w.node().Labels[config.LabelDevicePluginConfig]
				text := w.pluginConfigs()[key]
				for i := range 4 {
					w.pod(fmt.Sprintf("train-%d", i), string(w.snapshot()[i%2].UUID)+fmt.Sprintf("::%d", i))
				}
				w.spend(time.Minute)
				cordons := w.recordCordons()
				row.does(w, key)
				events := w.restartWithEvents()
				w.spend(10 * time.Minute)
				if n := len(w.podsIn("team")); n != 4 || len(*cordons) > 0 {
					t.Errorf("%d of 4 pods are left, and the node was cordoned %d times: %s", n, len(*cordons), w.condition().Message)
				}
				if got := w.pluginConfigs()[key]; got != text || w.reason() != config.ReasonConverged {
					t.Errorf("%s: under %s is %q, and was %q", w.reason(), key, got, text)
				}
				if n := heard(events, key, "was removed or changed by another program"); n != row.says {
					t.Errorf("%d Events say it, want %d", n, row.says)
				}
				w.profile("two")
				w.reach("two")
				key = w.node().Labels[config.LabelDevicePluginConfig]
				if got := w.pluginConfigs()[key]; strings.Contains(got, "/opt/evil") || !strings.Contains(got, "/usr/bin/of-people") ||
					key != config.OwnPluginKey+"node-uid-"+state.Hash(got) {
					t.Errorf("the next config, under %s:\n%s", key, got)
				}
			})
		})
	}
}
