package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
)

// minutes is longer than any pause of a node at rest except the heartbeat.
const minutes = 4 * time.Minute

// podCgroup is the cgroup of a pod's container, as containerd and kubelet's systemd driver make it.
func podCgroup(uid string) string {
	return "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + strings.ReplaceAll(uid, "-", "_") +
		".slice/cri-containerd-" + strings.Repeat("a", 64) + ".scope"
}

// startGPUProcess puts a process on the device and into the host's table.
func (w *world) startGPUProcess(device string, pid int, command, cgroup string) {
	w.t.Helper()
	if err := w.gpus.Hold(device, pid, command, 512); err != nil {
		w.t.Fatal(err)
	}
	w.addProcess(pid, command, cgroup)
}

// endGPUProcess ends such a process.
func (w *world) endGPUProcess(pid int) {
	w.t.Helper()
	if err := w.gpus.Release(pid); err != nil {
		w.t.Fatal(err)
	}
	w.removeProcess(pid)
}

// Promise 3. A pod with NVIDIA_VISIBLE_DEVICES=all asks for nothing and has all.
func TestAPodThatIsKnownByItsProcessAloneIsEvicted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		const uid = "7a0c6a4e-0000-4000-8000-000000000001"
		w.pod("intruder", "", func(p *corev1.Pod) {
			p.UID, p.Spec.Containers[0].Resources = uid, corev1.ResourceRequirements{}
		})
		w.startGPUProcess(string(w.snapshot()[0].UUID), 5000, "python", podCgroup(uid))
		w.label("all-balanced")
		w.passes("the eviction", func() bool { return !w.runs("intruder") })
		w.endGPUProcess(5000)
		w.reach("all-balanced")
	})
}

// Promise 3. Such a pod has a device past kubelet, and need not have a process on it.
func TestAPodThatNamesADeviceIsEvictedFromIt(t *testing.T) {
	t.Parallel()
	names := func(w *world, pod, device string, change ...func(*corev1.Pod)) {
		w.pod(pod, "", append(change, func(p *corev1.Pod) {
			p.Spec.Containers[0] = corev1.Container{Name: "c", Env: []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", Value: device}}}
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
		})...)
	}
	t.Run("a GPU", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.setConfigs(firstOnly)
			w.turn()
			names(w, "first", w.gpus.UUIDs()[0])
			names(w, "second", w.gpus.UUIDs()[1])
			names(w, "monitor", "all")
			w.converge("first-1g")
			if w.runs("first") || !w.runs("second") || !w.runs("monitor") {
				t.Errorf("on the GPU that was cut: %t; on the other: %t; the monitor: %t", w.runs("first"), w.runs("second"), w.runs("monitor"))
			}
		})
	})
	t.Run("an instance", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.converge("all-1g.10gb")
			names(w, "holder", w.gpus.MIGDevice(0, 0))
			w.converge("all-3g.40gb")
			if w.runs("holder") {
				t.Error("the pod still runs, and its instance is gone")
			}
		})
	})
	// Anyone can bind such a pod to the node: past the fence it holds nothing up.
	t.Run("past the fence", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, h100)
			w.label("all-1g.10gb")
			w.untilCordoned()
			<-time.After(time.Second)
			names(w, "late", w.gpus.UUIDs()[0], func(p *corev1.Pod) { p.CreationTimestamp = metav1.Now() })
			w.reach("all-1g.10gb")
			if !w.runs("late") {
				t.Error("the pod was evicted")
			}
		})
	})
}

// GPUs count as busy while the agent cannot read the process table.
func TestAProcessTableThatCannotBeReadStopsTheChangeBeforeTheFence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		self := filepath.Join(w.processTable, "self")
		if err := os.Remove(self); err != nil {
			t.Fatal(err)
		}
		w.pod("trainer", w.devices()["nvidia.com/gpu"][0])
		fences := w.recordCordons()
		w.label("all-balanced")
		w.untilReason(config.ReasonHoldersUnknown)
		w.spend(minutes)
		if len(*fences) > 0 || w.hasJournal() || !w.runs("trainer") {
			t.Errorf("the node was fenced %d times, there is a journal: %t, the pod runs: %t", len(*fences), w.hasJournal(), w.runs("trainer"))
		}
		if err := os.Symlink("100", self); err != nil {
			t.Fatal(err)
		}
		w.reach("all-balanced")
	})
}

// Promise 5. What keeps such a pod may keep it for hours, and is known before the fence.
func TestAPodThatIsPastItsGraceIsWaitedForBeforeTheFence(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.turn()
		w.pod("stuck", w.gpus.UUIDs()[0], func(p *corev1.Pod) {
			p.Finalizers, p.DeletionTimestamp = []string{"example.com/wait"}, new(metav1.NewTime(time.Now().Add(-time.Minute)))
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
		})
		cordons := w.recordCordons()
		w.label("all-balanced")
		w.untilReason(config.ReasonEvictionBlocked)
		w.spend(minutes)
		if c := w.condition(); len(*cordons) > 0 || w.hasJournal() || !strings.Contains(c.Message, "team/stuck: terminating") || !strings.Contains(c.Message, "container c still runs") {
			t.Errorf("cordoned %d times, a journal: %t; the node says %s", len(*cordons), w.hasJournal(), c.Message)
		}
		if err := w.client.Tracker().Delete(podResource, "team", "stuck"); err != nil {
			t.Fatal(err)
		}
		w.reach("all-balanced")
	})
}

// monitored returns a world of one A100 that a unit of the host keeps open, so that the driver cannot reset it while the unit runs.
func monitored(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, "gpus: [{model: A100-80GB}]")
	const pid = 812
	gpu := string(w.snapshot()[0].UUID)
	hold := func() {
		if err := w.gpus.HoldHidden(gpu, pid, "nv-hostengine"); err != nil {
			t.Fatal(err)
		}
		w.addProcess(pid, "nv-hostengine", "0::/system.slice/nvidia-dcgm.service", "/dev/nvidia0")
	}
	hold()
	w.units.states = map[string]string{"nvidia-dcgm.service": "active", "nvsm.service": "inactive", "ssh.service": "active"}
	w.units.changed = func(name string) {
		switch {
		case name != "nvidia-dcgm.service":
		case w.units.states[name] == "active":
			hold()
		default:
			w.endGPUProcess(pid)
		}
	}
	return w
}

// Promises 7 and 8.
func TestUnitsAreStoppedForAResetAndStartedAgain(t *testing.T) {
	t.Parallel()
	for _, killed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := monitored(t)
			w.label("all-balanced")
			w.passes("the end", func() bool {
				if killed {
					w.restartUnlessVerifying()
				}
				return w.done("all-balanced")()
			})
			w.expectGivenBack()
			if diff := cmp.Diff([]string{"stop nvidia-dcgm.service", "start nvidia-dcgm.service"}, w.units.did); diff != "" {
				t.Errorf("units (-want +got):\n%s", diff)
			}
			if w.units.states["nvsm.service"] != "inactive" {
				t.Error("a unit that was not running was started")
			}
		})
	}
}

// Promise 10.
func TestAUnitThatDoesNotStopEndsTheChange(t *testing.T) {
	t.Parallel()
	for name, why := range map[string]error{
		"its job fails": &host.JobError{Unit: "nvidia-dcgm.service", Verb: "stop", Result: "failed"},
		"its job hangs": host.ErrJobRunning,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := monitored(t)
				w.units.refuses = map[string]error{"stop nvidia-dcgm.service": why}
				w.label("all-balanced")
				w.passes("the end", func() bool {
					return !w.hasJournal() && w.reason() == config.ReasonUnitFailed
				})
				w.expectGivenBack()
				if c := w.condition(); !strings.Contains(c.Message, "nvidia-dcgm.service") {
					t.Errorf("the message does not name the unit: %s", c.Message)
				}
				if gpu := w.snapshot()[0]; gpu.Enabled || gpu.Pending {
					t.Errorf("MIG mode is %t, pending %t", gpu.Enabled, gpu.Pending)
				}
			})
		})
	}
}

// A GPU works without the unit, so the agent does not keep the node for it.
func TestAUnitThatDoesNotStartAgainKeepsNoNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := monitored(t)
		w.units.refuses = map[string]error{"start nvidia-dcgm.service": host.ErrJobRunning}
		w.converge("all-balanced")
	})
}

// A process that is restarted again and again has another pid each time, which the agent need not report.
func TestAProcessThatIsStartedAgainAndAgainIsReportedOnceAMinute(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		gpu := string(w.snapshot()[0].UUID)
		pid := 4711
		w.startGPUProcess(gpu, pid, "python", "0::/user.slice/user-1000.slice/session-3.scope")
		w.label("all-balanced")
		w.untilReason(config.ReasonGPUInUse)
		said := map[string]bool{}
		for range 120 {
			w.endGPUProcess(pid)
			pid++
			w.startGPUProcess(gpu, pid, "python", "0::/user.slice/user-1000.slice/session-3.scope")
			w.spend(5 * time.Second)
			said[w.condition().Message] = true
		}
		if len(said) > 12 {
			t.Errorf("the node said %d things in 10 minutes", len(said))
		}
		if c := w.condition(); !strings.Contains(c.Message, " python of session-3.scope") {
			t.Errorf("the process is not named: %s", c.Message)
		}
		w.endGPUProcess(pid)
		w.reach("all-balanced")
	})
}

// A job of systemd is done when the unit's process has begun. If the process ends then, the agent reports it, and does not keep the node.
func TestAUnitThatIsStartedAndFailsIsReported(t *testing.T) {
	t.Parallel()
	const unit = "nvidia-dcgm.service"
	for name, row := range map[string]struct {
		atOnce, later string // what becomes of it
		starts        int
	}{
		"at once":                     {"failed", "failed", config.DefaultNoEffect},
		"when the node is given back": {"active", "failed", 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := monitored(t)
				events := w.restartWithEvents()
				before := w.units.changed
				w.units.changed = func(name string) {
					if w.units.states[name] == "active" && row.atOnce != "active" {
						w.units.states[name] = row.atOnce
						return
					}
					before(name)
				}
				w.converge("all-balanced")
				w.spend(30 * time.Second)
				w.units.states[unit] = row.later
				w.spend(10 * time.Minute)
				if c := w.condition(); c.Status != corev1.ConditionTrue || !strings.Contains(c.Message, unit+" of this host was stopped for a change and has not run since") {
					t.Errorf("the node says %s: %s", c.Status, c.Message)
				}
				starts, reported := 0, heard(events, string(config.ReasonUnitFailed), unit)
				for _, d := range w.units.did {
					if d == "start "+unit {
						starts++
					}
				}
				if starts != row.starts || reported != 1 {
					t.Errorf("it was started %d times, want %d; and reported %d times, want once", starts, row.starts, reported)
				}
				w.units.states[unit] = "active"
				w.spend(10 * time.Minute)
				if c := w.condition(); strings.Contains(c.Message, unit) {
					t.Errorf("it runs again, and the node says %s", c.Message)
				}
			})
		})
	}
}

// Promises 5 and 10.
func TestAClientOfTheLibraryThatMayNotGoKeepsNoNode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: A100-80GB}]")
		s, _ := labels.Parse("app=monitor")
		w.settings.Drain.Clients = []labels.Selector{s}
		w.restart()
		w.pod("monitor", "", func(p *corev1.Pod) {
			p.Labels = map[string]string{"app": "monitor"}
			p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
		})
		full := true
		w.budgetKeeps(func() bool { return full }, "monitor")
		cordons := w.recordCordons()
		w.label("all-balanced")
		w.untilReason(config.ReasonEvictionBlocked)
		w.spend(10 * time.Minute)
		if c := w.condition(); w.hasJournal() || len(*cordons) > 0 || c.Reason != string(config.ReasonEvictionBlocked) || !strings.Contains(c.Message, "team/monitor") {
			t.Errorf("a journal %t, cordoned %d times; the node says %s: %s", w.hasJournal(), len(*cordons), c.Reason, c.Message)
		}
		full = false
		w.reach("all-balanced")
	})
}

// Promise 3.
func TestAClientOfTheLibraryThatHasAnInstanceIsEvicted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		s, _ := labels.Parse("app=monitor")
		w.settings.Drain.Clients = []labels.Selector{s}
		w.restart()
		w.converge("all-1g.10gb")
		w.pod("monitor", w.gpus.MIGDevice(0, 0), func(p *corev1.Pod) { p.Labels = map[string]string{"app": "monitor"} })
		w.label("all-3g.40gb")
		w.passes("the end", w.done("all-3g.40gb"))
		if w.runs("monitor") {
			t.Error("the pod still runs, and its instance is gone")
		}
	})
}

// Promise 3: GPUs count as busy while the agent cannot read the process table, even after the fence.
func TestNoGPUIsTouchedWhileTheProcessTableCannotBeRead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.converge("all-1g.10gb")
		w.label("all-3g.40gb")
		w.untilCordoned()
		w.breakTable()
		<-time.After(time.Minute)
		before := w.gpus.String()
		w.spend(5 * time.Minute)
		if after := w.gpus.String(); after != before {
			t.Errorf("the GPUs were changed while no one could say who holds them: %s: %s", w.condition().Reason, w.condition().Message)
		}
	})
}

// slow is a driver that takes long for each observation, as one does after a long idle time.
type slow struct {
	nvml.Driver
	by time.Duration
}

// Snapshot takes its time, unless ctx ends before.
func (s slow) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	select {
	case <-time.After(s.by):
		return s.Driver.Snapshot(ctx)
	case <-ctx.Done():
		return nil, nvml.ErrUnresponsive
	}
}

// Promise 3. Kubelet has its own deadline, whatever time the driver takes.
func TestASlowDriverIsNoReasonToEvictFromOtherGPUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.wrapDriver = func(d nvml.Driver) nvml.Driver { return slow{d, w.settings.Timeouts.APICall + time.Second} }
		w.setConfigs(firstOnly)
		w.turn()
		w.pod("innocent", w.gpus.UUIDs()[1])
		w.converge("first-1g")
		if !w.runs("innocent") {
			t.Error("the pod on the other GPU was evicted")
		}
	})
}

// evictsNoneWhile has GPU 0 cut while kubelet does not say who has which GPU, and fails the test if the pod on GPU 1 is evicted.
func evictsNoneWhile(t *testing.T, kubeletIs func(w *world, so bool)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, h100)
		w.setConfigs(firstOnly)
		w.turn()
		w.pod("innocent", w.gpus.UUIDs()[1])
		w.label("first-1g")
		w.passes("a journal", w.hasJournal)
		kubeletIs(w, true)
		w.spend(20 * time.Second)
		if c := w.condition(); c.Reason != string(config.ReasonKubeletUnavailable) {
			t.Errorf("the node says %s: %s", c.Reason, c.Message)
		}
		kubeletIs(w, false)
		w.reach("first-1g")
		if !w.runs("innocent") {
			t.Error("the pod on the other GPU was evicted")
		}
	})
}

// Promise 3. Kubelet may be restarted at any time.
func TestASilentKubeletIsNoReasonToEvictFromOtherGPUs(t *testing.T) {
	t.Parallel()
	evictsNoneWhile(t, func(w *world, so bool) { w.kubeletSilent = so })
}

// Promise 3. Kubelet lists no pod before it knows them, as if none had a device.
func TestAKubeletThatHasJustStartedIsNoReasonToEvictFromOtherGPUs(t *testing.T) {
	t.Parallel()
	evictsNoneWhile(t, func(w *world, so bool) { w.kubeletStarting = so })
}
