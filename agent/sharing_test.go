package agent_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/nvml"
)

// sharingProfiles are those of the tests of sharing.
const sharingProfiles = `
apiVersion: gpuslice.io/v1alpha1
kind: Profiles
profiles:
  alone:
    mig: [{gpus: {all: true}, enabled: false}]
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 1}]}}
  two:
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
    labels: {workload-type: development}
  four:
    mig: [{gpus: {all: true}, enabled: false}]
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
    labels: {workload-type: research}
    taints: [{key: gpu, value: "true", effect: NoSchedule}]
  apiece:
    sharing: {timeSlicing: {failRequestsGreaterThanOne: true, resources: [{name: nvidia.com/gpu, replicas: 2}]}}
  renamed:
    sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}
  slices:
    mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]
    sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]}}
  absent:
    sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]}}
  clients:
    sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
  cut:
    mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 1}]}}
`

// sharing returns a world of two GPUs that are shared as the profile says.
func sharing(t *testing.T, profile string) *world {
	t.Helper()
	w := newWorld(t, h100)
	w.deploySharing()
	w.profile(profile)
	w.reach(profile)
	return w
}

// deploySharing gives the node a device plugin with a config file, and the cluster a catalog of profiles.
func (w *world) deploySharing() {
	w.t.Helper()
	w.pluginFile = filepath.Join(w.t.TempDir(), "config.yaml")
	w.tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
	w.settings.Profiles = config.ConfigMapKey{Namespace: "gpuslice", Name: "gpuslice-profiles", Key: "profiles.yaml"}
	_, err := w.client.CoreV1().ConfigMaps("gpuslice").Create(w.t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "gpuslice-profiles", Namespace: "gpuslice"}, Data: map[string]string{"profiles.yaml": sharingProfiles},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	w.restart()
}

// setStrategy sets the MIG strategy of the settings.
func (w *world) setStrategy(s config.MIGStrategy) {
	w.settings.MIGStrategy = s
	w.restart()
}

// profile asks for a profile.
func (w *world) profile(name string) {
	w.t.Helper()
	w.set(config.LabelProfile, name)
}

// startConfigured starts a new pod of a plugin that reads a config file when it starts, and on SIGHUP.
func (w *world) startConfigured(name string) {
	w.t.Helper()
	pid := 500 + w.podsStarted
	uid := fmt.Sprintf("00000000-0000-4000-8000-%012d", w.podsStarted)
	w.addProcess(pid, "nvidia-device-p", podCgroup(uid))
	_, err := w.client.CoreV1().Pods("kube-system").Create(w.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(uid), Labels: map[string]string{"name": "nvidia-device-plugin-ds"}, OwnerReferences: ofDaemonSet("plugin")},
		Spec: corev1.PodSpec{
			NodeName: nodeName, Containers: []corev1.Container{{Name: pluginContainer}},
			Tolerations: w.tolerations,
			Volumes: []corev1.Volume{{Name: "config", VolumeSource: corev1.VolumeSource{
				HostPath: &corev1.HostPathVolumeSource{Path: filepath.Dir(w.settings.DevicePlugin.ConfigFile)},
			}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{runsSince(metav1.Now())}},
	}, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	w.readPluginFile()
}

// readPluginFile lets the plugin read its file: it offers what that says, or ends.
func (w *world) readPluginFile() {
	w.t.Helper()
	w.configReads++
	w.offered = map[string][]string{}
	text, err := os.ReadFile(w.pluginFile)
	if err != nil {
		text = nil
	}
	c, err := deviceplugin.Parse(text)
	if err != nil || w.refusesConfig != "" && strings.Contains(string(text), w.refusesConfig) {
		w.crashPlugin()
		return
	}
	w.registerDevices(c.Sharing)
}

// registerDevices registers what the plugin offers by the sharing.
func (w *world) registerDevices(s catalog.Sharing) {
	w.t.Helper()
	w.offered = map[string][]string{}
	for resource, ids := range w.devices() {
		name, n := s.Offered(resource)
		for _, id := range ids {
			if n == 1 {
				w.offered[name] = append(w.offered[name], id)
			}
			for i := range n {
				if n > 1 {
					w.offered[name] = append(w.offered[name], id+"::"+strconv.Itoa(i))
				}
			}
		}
		slices.Sort(w.offered[name])
	}
}

// crashPlugin makes the plugin end as often as kubelet starts it.
func (w *world) crashPlugin() {
	w.t.Helper()
	pods, err := w.client.CoreV1().Pods("kube-system").List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, p := range pods.Items {
		for i := range p.Status.ContainerStatuses {
			if at := p.Status.ContainerStatuses[i].LastTerminationState.Terminated; at != nil { // not the first time
				p.Status.ContainerStatuses[i].RestartCount++
			}
			p.Status.ContainerStatuses[i].State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
			p.Status.ContainerStatuses[i].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{ExitCode: 1, FinishedAt: metav1.Now()}
		}
		if _, err := w.client.CoreV1().Pods("kube-system").UpdateStatus(w.t.Context(), &p, metav1.UpdateOptions{}); err != nil {
			w.t.Fatal(err)
		}
	}
}

// recoverPlugin lets kubelet start a plugin in a crash loop again, now with a file that the plugin accepts.
func (w *world) recoverPlugin() {
	w.t.Helper()
	pods, err := w.client.CoreV1().Pods("kube-system").List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, p := range pods.Items {
		for i := range p.Status.ContainerStatuses {
			if p.Status.ContainerStatuses[i].State.Waiting != nil {
				p.Status.ContainerStatuses[i].State = corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}
				if _, err := w.client.CoreV1().Pods("kube-system").UpdateStatus(w.t.Context(), &p, metav1.UpdateOptions{}); err != nil {
					w.t.Fatal(err)
				}
				w.readPluginFile()
			}
		}
	}
}

// hangup sends a signal to a process of the host's table.
func (w *world) hangup(pid int, signal unix.Signal) error {
	if signal != unix.SIGHUP || pid != 500+w.podsStarted {
		w.t.Errorf("signal %s to pid %d", signal, pid)
	}
	if c := w.condition(); c.Status == corev1.ConditionTrue {
		w.t.Errorf("the plugin reads its config while the node still says %s: %s", c.Reason, c.Message)
	}
	w.readPluginFile()
	return nil
}

// advertised lists the resources that kubelet gives out, with their counts.
func (w *world) advertised() string {
	var out []string
	for name, ids := range w.offered {
		out = append(out, fmt.Sprintf("%s=%d", strings.TrimPrefix(name, "nvidia.com/"), len(ids)))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

func TestEachSharingIsReachedFromEachOther(t *testing.T) {
	t.Parallel()
	offers := map[string]string{"alone": "gpu=2", "two": "gpu=4", "four": "gpu=8", "renamed": "gpu.shared=8", "slices": "mig-1g.10gb=28"}
	for from := range offers {
		for to, want := range offers {
			if from == to || from == "slices" && (to == "two" || to == "renamed") {
				continue // which say nothing of how the GPUs are cut, and there is no whole one
			}
			t.Run(from+" to "+to, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := sharing(t, from)
					w.profile(to)
					w.reach(to)
					if got := w.advertised(); got != want {
						t.Errorf("kubelet offers %s, want %s", got, want)
					}
				})
			})
		}
	}
}

// Promise 9. Under the new config kubelet has the same devices as under the former one, so that observations from before it would agree.
func TestObservationsFromBeforeTheConfigVerifyNothing(t *testing.T) {
	t.Parallel()
	for name, gives := range map[string]func(*world){"by the file": (*world).deploySharing, "by the config manager": (*world).deployConfigManager} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				gives(w)
				w.profile("two")
				w.reach("two")
				w.spend(time.Minute)
				w.profile("apiece")
				waited := false
				w.passes("apiece", func() bool {
					waited = waited || w.reason() == config.ReasonAwaitingCapacity
					return w.done("apiece")()
				})
				if !waited {
					t.Error("the node was given back without another observation")
				}
				w.expectGivenBack()
			})
		})
	}
}

// Promise 3. A change by which no replica goes needs no cordon either.
func TestHoldersLeaveOnlyWhenTheirReplicaGoes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ from, to, stays, goes, says string }{
		{"two", "four", "::0 ::1", "", "nvidia.com/gpu 8 = 2 x 4 time-slicing"},
		{"four", "two", "::0 ::1", "::2 ::3", ""},
		{"alone", "two", "", "whole", ""},
		{"four", "renamed", "", "::0 ::3", ""},
		{"four", "alone", "", "::0 ::3", ""},
		{"alone", "cut", "", "whole", ""},
	} {
		t.Run(c.from+" to "+c.to, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := sharing(t, c.from)
				gpu := string(w.snapshot()[0].UUID)
				for _, replica := range strings.Fields(c.stays + " " + c.goes) {
					w.pod(strings.TrimPrefix(replica, "::"), gpu+strings.TrimPrefix(replica, "whole"))
				}
				w.profile(c.to)
				w.passes(c.to, func() bool {
					if c.goes == "" && w.node().Spec.Unschedulable {
						t.Fatal("the node is cordoned")
					}
					return w.done(c.to)()
				})
				w.expectGivenBack()
				for _, replica := range strings.Fields(c.stays) {
					if !w.runs(strings.TrimPrefix(replica, "::")) {
						t.Errorf("the pod on replica %s has left", replica)
					}
				}
				for _, replica := range strings.Fields(c.goes) {
					if w.runs(strings.TrimPrefix(replica, "::")) {
						t.Errorf("the pod on replica %s is still there", replica)
					}
				}
				if !strings.Contains(w.condition().Message, c.says) {
					t.Errorf("the node says %q, want %q in it", w.condition().Message, c.says)
				}
			})
		})
	}
}

// A config manager replaces the file, so that a plugin which starts at that instant finds none, and ends once.
func TestAPluginThatEndsOnceIsNoFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := sharing(t, "two")
		w.refusesConfig = "replicas: 4"
		w.profile("four")
		var ended time.Time
		w.passes("four", func() bool {
			if w.reason() == config.ReasonPluginFailed {
				t.Fatal(w.condition().Message)
			}
			if w.pluginCrashed() && ended.IsZero() {
				ended, w.refusesConfig = time.Now(), ""
			} else if w.pluginCrashed() && time.Since(ended) >= 10*time.Second { // kubelet's first pause
				w.recoverPlugin()
			}
			return w.reason() == config.ReasonConverged && strings.HasPrefix(w.condition().Message, "four:")
		})
		if ended.IsZero() {
			t.Error("the plugin has not ended, so the test shows nothing")
		}
	})
}

// pluginCrashed reports whether a device plugin waits to be started again.
func (w *world) pluginCrashed() bool {
	return slices.ContainsFunc(w.podsIn("kube-system"), func(p corev1.Pod) bool {
		return slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.State.Waiting != nil })
	})
}

func TestAConfigThatThePluginDoesNotRunByIsTakenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := sharing(t, "two")
		before, err := os.ReadFile(w.pluginFile)
		if err != nil {
			t.Fatal(err)
		}
		w.refusesConfig = "replicas: 4"
		w.profile("four")
		w.passes("a failure", func() bool {
			w.recoverPlugin()
			return w.reason() == config.ReasonPluginFailed && !w.hasJournal()
		})
		w.expectGivenBack()
		after, err := os.ReadFile(w.pluginFile)
		if err != nil || string(after) != string(before) {
			t.Errorf("the file is not what it was (%v):\n%s", err, after)
		}
		if got := w.advertised(); got != "gpu=4" {
			t.Errorf("kubelet offers %s", got)
		}
		if w.node().Labels["workload-type"] != "development" {
			t.Errorf("the node's labels are %v", w.node().Labels)
		}
	})
}

// setPluginSockets writes on which Unix sockets the present device plugin listens into the host's table: on the one that kubelet asks, or on none.
func (w *world) setPluginSockets(kubelet bool) {
	w.t.Helper()
	text := "Num       RefCount Protocol Flags    Type St Inode Path\n"
	if kubelet {
		text += "0000000000000000: 00000002 00000000 00010000 0001 01 4711 /var/lib/kubelet/device-plugins/nvidia-gpu.sock\n"
	}
	dir := filepath.Join(w.processTable, strconv.Itoa(500+w.podsStarted), "net")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "unix"), []byte(text), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

// Kubelet 1.37 may keep giving out what a plugin offered whose registrations it refuses from then on.
func TestWhatKubeletGivesOutOfAPluginThatDoesNotServeItProvesNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		w.setPluginSockets(true)
		w.profile("two")
		w.reach("two")
		w.profile("four")
		w.passes("a failure", func() bool {
			w.setPluginSockets(!w.hasJournal()) // kubelet loses the plugin when it reads its config
			if w.condition().Status == corev1.ConditionTrue && strings.HasPrefix(w.condition().Message, "four") {
				t.Fatal("the node says that it gives out four")
			}
			return w.condition().Status == corev1.ConditionFalse && strings.Contains(w.condition().Message, "the GPUs are restored, but their capacity is not back")
		})
		c := w.condition()
		if first, want := "restart kubelet on this node, if the log of the device plugin's pod says", "listens on no socket for devices that kubelet still allocates, so pods that get them fail: nvidia.com/gpu"; c.Reason != string(config.ReasonCapacityMismatch) ||
			!strings.HasPrefix(c.Message, first) || !strings.Contains(c.Message, want) {
			t.Errorf("the node says %s: %s; want first %q, and %q", c.Reason, c.Message, first, want)
		}
		w.passes("the node to be given back once kubelet has been restarted", func() bool {
			w.setPluginSockets(true)
			return !w.hasJournal()
		})
		w.expectGivenBack()
		if got := w.advertised(); got != "gpu=4" {
			t.Errorf("kubelet offers %s", got)
		}
	})
}

// Capacity that did not agree before a change need not agree after its undo: the node is not kept, and says what helps.
func TestANodeWhosePluginWasLostBeforeTheChangeIsGivenBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		w.setPluginSockets(true)
		w.profile("two")
		w.reach("two")
		w.passes("a word at rest", func() bool {
			w.setPluginSockets(false)
			return w.reason() == config.ReasonCapacityMismatch
		})
		w.profile("four")
		w.passes("the change to be given up", func() bool {
			w.setPluginSockets(false)
			return !w.hasJournal() && strings.Contains(w.condition().Message, "the agent has undone the change")
		})
		w.expectGivenBack()
		if c := w.condition(); c.Status != corev1.ConditionFalse || !strings.Contains(c.Message, "restart kubelet on this node") {
			t.Errorf("the node says %s: %s", c.Reason, c.Message)
		}
	})
}

func TestASharingThatCannotBeDisturbsNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := sharing(t, "two")
		reads, cordons := w.configReads, w.recordCordons()
		w.profile("absent")
		c := w.settle(config.ReasonImpossibleSharing)
		if want := "nvidia.com/mig-1g.10gb is to be shared"; !strings.Contains(c.Message, want) {
			t.Errorf("the node says %q, want %q in it", c.Message, want)
		}
		if w.configReads != reads {
			t.Error("the device plugin has been notified to read its file")
		}
		if len(*cordons) > 0 {
			t.Errorf("the node was cordoned %d times", len(*cordons))
		}
		w.expectGivenBack()
	})
}

func TestLabelsAndTaintsComeAndGoWithTheProfile(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		w.edit(func(n *corev1.Node) { n.Labels = map[string]string{"pool": "a"} })
		w.profile("four")
		w.untilReason(config.ReasonConverged)
		n := w.node()
		if n.Labels["workload-type"] != "research" || !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.ToString() == "gpu=true:NoSchedule" }) {
			t.Errorf("labels %v, taints %v", n.Labels, n.Spec.Taints)
		}
		w.profile("two")
		w.reach("two") // with no taints
		w.profile("alone")
		w.reach("alone")
		n = w.node()
		if _, there := n.Labels["workload-type"]; there || n.Labels["pool"] != "a" || n.Annotations[config.AnnotationPublished] != "" {
			t.Errorf("labels %v, annotations %v", n.Labels, n.Annotations)
		}
	})
}

// Promise 12. The host's record holds which labels and taints the agent has set, for a profile and for the one before it. The agent must not
// find out behind the fence, again and again, that they do not fit.
func TestAsManyLabelsAndTaintsAsAProfileMayHaveComeAndGo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		var file strings.Builder
		file.WriteString("apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles:\n")
		for _, p := range []struct {
			name string
			keys int
		}{{"first", 100}, {"second", 100}, {"much", 300}} {
			fmt.Fprintf(&file, "  %s:\n    migStrategy: mixed\n    mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]\n    labels:\n", p.name)
			for i := range p.keys {
				fmt.Fprintf(&file, "      %s-%d: %s\n", p.name, i, strings.Repeat("x", 63))
			}
		}
		profiles := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "gpuslice-profiles", Namespace: "gpuslice"}, Data: map[string]string{}}
		profiles.Data["profiles.yaml"] = file.String()
		set := func() {
			t.Helper()
			if _, err := w.client.CoreV1().ConfigMaps("gpuslice").Update(t.Context(), profiles, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		set()
		w.pod("train", "0")
		w.profile("much")
		w.passesWithin(50, func() bool { return w.reason() == config.ReasonInvalidCatalog })
		if !w.runs("train") {
			t.Fatalf("a pod had to leave for a profile that cannot be: %s", w.condition().Message)
		}
		profiles.Data["profiles.yaml"], _, _ = strings.Cut(file.String(), "  much:")
		set()
		for _, name := range []string{"first", "second"} {
			w.profile(name)
			w.reach(name)
			if n := len(w.node().Labels); n < 100 || n > 110 {
				t.Errorf("%s: %d labels", name, n)
			}
		}
	})
}

func TestASharingThatIsInPlaceIsLeftAloneByARestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := sharing(t, "four")
		reads := w.configReads
		w.restart()
		w.spend(10 * time.Minute)
		if w.configReads != reads {
			t.Errorf("the plugin has read its config %d times more", w.configReads-reads)
		}
	})
}

func TestAnAgentThatForgetsEverythingSharesAllTheSame(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		for _, name := range []string{"four", "slices", "two", "alone"} {
			if name == "two" {
				w.profile("alone")
				w.reach("alone")
			}
			w.profile(name)
			w.passes(name, func() bool {
				w.restartUnlessVerifying()
				c := w.condition()
				return c.Reason == string(config.ReasonConverged) && strings.HasPrefix(c.Message, name+":") && !w.hasJournal()
			})
		}
	})
}

func TestAComputeModeThatMPSHasLeftIsMended(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := sharing(t, "two")
		if err := w.gpus.Driver().SetComputeMode(t.Context(), w.snapshot()[0].UUID, nvml.ComputeExclusiveProcess); err != nil {
			t.Fatal(err)
		}
		w.profile("four")
		w.passes("four", func() bool {
			return strings.HasPrefix(w.condition().Message, "four:") && !w.hasJournal() && w.reason() == config.ReasonConverged
		})
		if mode := w.snapshot()[0].ComputeMode; mode != nvml.ComputeDefault {
			t.Errorf("the compute mode is %s", mode)
		}
	})
}

func TestLabelsOfGPUFeatureDiscoveryAreWaitedForAndNotRelied(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		w.set("nvidia.com/gpu.replicas", "1")
		w.profile("two")
		began := time.Now()
		w.passes("a word about the labels", func() bool { return strings.Contains(w.condition().Message, "GPU feature discovery still says") })
		w.reach("two")
		if took := w.condition().LastTransitionTime.Sub(began); took < time.Minute || took > 3*time.Minute {
			t.Errorf("given back after %s", took)
		}
		if want := "GPU feature discovery still says nvidia.com/gpu.replicas=1, not 2"; !strings.Contains(w.condition().Message, want) {
			t.Errorf("the node says %q, want %q in it", w.condition().Message, want)
		}
		w.profile("four")
		w.passes("a wait for the labels", func() bool { return strings.Contains(w.condition().Message, ", not 4") })
		began = time.Now()
		w.set("nvidia.com/gpu.replicas", "4")
		w.reach("four")
		if took := w.condition().LastTransitionTime.Sub(began); took > time.Minute {
			t.Errorf("given back %s after the labels were right", took)
		}
	})
}

func TestStaleResourcesAreRemovedWhereTheSettingsSaySo(t *testing.T) {
	t.Parallel()
	for _, setting := range []config.StaleResources{config.StaleResourcesReport, config.StaleResourcesRemove} {
		t.Run(string(setting), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.settings.StaleResources = setting
				w.deploySharing()
				n := w.node()
				n.Status.Capacity = corev1.ResourceList{"nvidia.com/gpu.shared": resource.MustParse("0")}
				if _, err := w.client.CoreV1().Nodes().UpdateStatus(t.Context(), n, metav1.UpdateOptions{}); err != nil {
					t.Fatal(err)
				}
				events := w.restartWithEvents()
				w.profile("four")
				w.reach("four")
				w.spend(2 * time.Minute)
				_, there := w.node().Status.Capacity["nvidia.com/gpu.shared"]
				if there != (setting == config.StaleResourcesReport) {
					t.Errorf("the resource of a former config is there: %t", there)
				}
				if reported := heard(events, string(config.ReasonStaleResourcesRemoved)); reported != map[bool]int{true: 0, false: 1}[there] {
					t.Errorf("it is there: %t, and the Events say %d times that it was removed", there, reported)
				}
				if reported := slices.Contains(w.status().StaleResources, "nvidia.com/gpu.shared"); reported != there || strings.Contains(w.condition().Message, "gpu.shared at 0") {
					t.Errorf("it is reported in the status: %t; the condition says: %s", reported, w.condition().Message)
				}
			})
		})
	}
}

func TestAConfigThatALabelNamesStaysWhileTheGPUsAreCut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.DevicePlugin.ConfigMap = config.ConfigMapName{Namespace: "gpuslice", Name: "device-plugin-config"}
		w.deploySharing()
		w.setStrategy(config.MIGStrategyMixed)
		w.setPluginConfigs("gpuslice", "device-plugin-config", map[string]string{"plain": "version: v1\n"})
		w.set(config.LabelDevicePluginConfig, "plain")
		for _, name := range []string{"all-disabled", "all-1g.10gb", "all-balanced"} {
			w.label(name)
			w.passes(name, func() bool {
				if strings.Contains(w.node().Annotations[config.AnnotationJournal], "given up") || w.reason() == config.ReasonRollingBack {
					t.Fatalf("the change to %s is undone: %s", name, w.condition().Message)
				}
				w.restartUnlessVerifying()
				c := w.condition()
				return c.Reason == string(config.ReasonConverged) && strings.HasPrefix(c.Message, name+" + plain:") && !w.hasJournal()
			})
		}
		w.unset(config.LabelMIGConfig)
		w.passes("the plugin's config alone", func() bool { return strings.HasPrefix(w.condition().Message, "plain:") })
	})
}

// A request names one label. The agent answers what the node would ask for with it: the other labels stay.
func TestARequestIsAnsweredWithTheLabelsThatTheNodeHas(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.settings.DevicePlugin.ConfigMap = config.ConfigMapName{Namespace: "gpuslice", Name: "device-plugin-config"}
		w.deploySharing()
		w.setStrategy(config.MIGStrategyMixed)
		w.setPluginConfigs("gpuslice", "device-plugin-config", map[string]string{
			"plain": "version: v1\n",
			"two":   "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n",
		})
		key := config.LabelDevicePluginConfig
		w.settle(config.ReasonNotRequested)
		if given := w.ask(key + "=two"); given.Refused != "" || len(given.Steps) == 0 {
			t.Errorf("where nothing is asked for: %+v", given)
		}
		const keys = "=three: ConfigMap gpuslice/device-plugin-config has no such key; it has plain; two"
		if given := w.ask(key + "=three"); !strings.Contains(given.Refused, keys) {
			t.Errorf("a key that is not there: %+v", given)
		}
		w.removeRequest()
		w.label("all-1g.10gb")
		w.reach("all-1g.10gb")
		if given := w.ask(key + "=two"); !strings.Contains(given.Refused, "nvidia.com/gpu") {
			t.Errorf("on GPUs that are cut, none is left to be shared as nvidia.com/gpu: %+v", given)
		}
		if given := w.ask(key + "=plain"); given.Refused != "" {
			t.Errorf("a config that fits what stands: %+v", given)
		}
		w.removeRequest()
		w.set(key, "two")
		if given := w.ask(config.LabelMIGConfig + "=all-disabled"); given.Refused != "" || len(given.Steps) == 0 {
			t.Errorf("the MIG config that the plugin's config fits: %+v", given)
		}
	})
}

// A config manager ends once if it finds no plugin to signal, and its SIGHUP ends a plugin that does not yet listen to it. Neither says anything of
// the plugin's config.
func TestAContainerThatEndsForTheConfigManagerIsNoFailureOfThePlugin(t *testing.T) {
	t.Parallel()
	ended := func(name string, code int32) corev1.ContainerStatus {
		return corev1.ContainerStatus{
			Name: name, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
				ExitCode: code, FinishedAt: metav1.NewTime(time.Now().Add(time.Hour)),
			}},
		}
	}
	for name, change := range map[string]func(*corev1.PodStatus){
		"a sidecar": func(s *corev1.PodStatus) {
			s.ContainerStatuses = append(s.ContainerStatuses, ended("nvidia-device-plugin-sidecar", 1))
		},
		"the plugin, by SIGHUP": func(s *corev1.PodStatus) { s.ContainerStatuses[0] = ended(s.ContainerStatuses[0].Name, 129) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := sharing(t, "two")
				w.set("nvidia.com/gpu.replicas", "2") // GPU feature discovery takes long to change it
				plugins := w.podsIn("kube-system")
				if len(plugins) != 1 {
					t.Fatalf("%d pods", len(plugins))
				}
				change(&plugins[0].Status)
				if _, err := w.client.CoreV1().Pods("kube-system").UpdateStatus(t.Context(), &plugins[0], metav1.UpdateOptions{}); err != nil {
					t.Fatal(err)
				}
				w.profile("four")
				w.passes("four", func() bool {
					if w.reason() == config.ReasonPluginFailed {
						t.Fatal(w.condition().Message)
					}
					return w.reason() == config.ReasonConverged && strings.HasPrefix(w.condition().Message, "four:")
				})
			})
		})
	}
}

// A profile names no MIG config, so that only nodes whose label names one report a mistake in the file of MIG configs.
func TestABrokenFileOfMIGConfigsKeepsNoProfileFromItsNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		w.setConfigs(nil)
		w.fileError = errors.New("version: must be v1")
		for _, name := range []string{"two", "slices"} {
			w.profile(name)
			w.reach(name)
		}
		for _, ask := range []func(){func() { w.profile("all-1g.10gb") }, func() {
			w.unset(config.LabelProfile)
			w.label("all-1g.10gb")
		}} {
			ask()
			c := w.settle(config.ReasonInvalidCatalog)
			if want := "ConfigMap gpuslice/custom, key config.yaml: version: must be v1"; !strings.Contains(c.Message, want) {
				t.Errorf("the node says %q, want %q in it", c.Message, want)
			}
			w.profile("slices")
			w.reach("slices")
		}
	})
}

func TestWhatCannotBeHandedOverIsSaidWithTheLabelThatAsksForIt(t *testing.T) {
	t.Parallel()
	asks := map[string]struct {
		ask  func(w *world)
		says string
	}{
		"a profile": {func(w *world) { w.profile("two") }, "label gpuslice.io/profile=two"},
		"a config":  {func(w *world) { w.set(config.LabelDevicePluginConfig, "any") }, "label nvidia.com/device-plugin.config=any"},
		"a config beside another label": {func(w *world) {
			w.label("all-disabled")
			w.set(config.LabelDevicePluginConfig, "any")
		}, "label nvidia.com/device-plugin.config=any"},
		"the settings' default": {func(w *world) {
			w.settings.DevicePlugin.DefaultConfig = "any"
			w.restart()
		}, "devicePlugin.defaultConfig of the settings, any"},
	}
	for why, row := range map[string]struct {
		spoil func(w *world)
		says  string
	}{
		"the plugin reads no file": {func(w *world) { w.pluginFile = "" }, ": see devicePlugin.handover in the settings: the agent cannot change the config of pod kube-system/plugin-"},
		"the former config is longer than the journal can hold": {func(w *world) {
			w.settings.DevicePlugin.ConfigMap = config.ConfigMapName{Namespace: "gpuslice", Name: "device-plugin-config"}
			w.setPluginConfigs("gpuslice", "device-plugin-config", map[string]string{"any": "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"})
			text := "version: v1\n" + strings.Repeat("# "+strings.Repeat("x", 100)+"\n", 400)
			if err := os.WriteFile(w.pluginFile, []byte(text), 0o600); err != nil {
				w.t.Fatal(err)
			}
		}, ": noting the device plugin's config "},
	} {
		for what, asked := range asks {
			t.Run(what+", and "+why, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, h100)
					w.deploySharing()
					row.spoil(w)
					w.restart()
					asked.ask(w)
					if c := w.settle(config.ReasonNoHandover); !strings.HasPrefix(c.Message, asked.says+row.says) {
						t.Errorf("the node says %q, want %q", c.Message, asked.says+row.says)
					}
				})
			})
		}
	}
}

// Guides create their ConfigMap by another name than that in the settings.
func TestAConfigMapThatIsNotThereIsNamedWithTheSettingThatNamesIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		w.settings.DevicePlugin.ConfigMap = config.ConfigMapName{Namespace: "gpuslice", Name: "device-plugin-config"}
		w.restart()
		w.set(config.LabelDevicePluginConfig, "any")
		const want = "label nvidia.com/device-plugin.config=any: reading ConfigMap gpuslice/device-plugin-config: configmaps \"device-plugin-config\" not found: " +
			"create it, or name yours in devicePlugin.configMap of the settings"
		if c := w.settle(config.ReasonInvalidCatalog); c.Message != want {
			t.Errorf("the node says %q, want %q", c.Message, want)
		}
	})
}

// The DaemonSet of the control daemon selects nodes by a label. If the node lacks it, no selector of the settings is wrong.
func TestAnMPSDaemonThatHasNoLabelToComeByIsMissedByTheLabel(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		w.setStrategy(config.MIGStrategyNone)
		w.settings.Timeouts.Capacity = time.Hour
		w.restart()
		w.profile("clients")
		for capable, want := range map[string]string{
			"":      "the node lacks label nvidia.com/mps.capable=true, which its DaemonSet selects: GPU feature discovery sets it",
			"false": `selects label nvidia.com/mps.capable=true, and the node has "false"`,
			"true":  "none of its pods matches mps.podSelector of the settings",
		} {
			w.edit(func(n *corev1.Node) {
				delete(n.Labels, "nvidia.com/mps.capable")
				if capable != "" {
					metav1.SetMetaDataLabel(&n.ObjectMeta, "nvidia.com/mps.capable", capable)
				}
			})
			w.spend(time.Minute)
			c := w.condition()
			if !strings.Contains(c.Message, want) || capable != "true" && strings.Contains(c.Message, "podSelector") {
				t.Errorf("with %q the node says %q, want %q in it", capable, c.Message, want)
			}
		}
	})
}

func TestTheLastStepIsOne(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.deploySharing()
		w.profile("two")
		one := false
		w.passes("two", func() bool {
			<-time.After(2 * time.Second) // so that the agent reports each step
			c := w.condition()
			if strings.Contains(c.Message, " 1 steps") {
				t.Fatal(c.Message)
			}
			one = one || strings.Contains(c.Message, " 1 step left")
			return c.Reason == string(config.ReasonConverged)
		})
		if !one {
			t.Error("it was never one step from its end")
		}
	})
}
