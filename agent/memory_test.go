package agent_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/nvml"
)

// t4 has 15360 MiB.
const t4 = "gpus: [{model: T4}, {model: T4}]"

// users are the pods of these tests, with the processes that compute in them.
var users = map[string]struct {
	uid types.UID
	pid int
}{
	"small": {"7a0c6a4e-0000-4000-8000-000000000001", 5001},
	"large": {"7a0c6a4e-0000-4000-8000-000000000002", 5002},
	"third": {"7a0c6a4e-0000-4000-8000-000000000003", 5003},
}

// pressure is a world for tests of GPU memory.
type pressure struct {
	*world
	events chan string
}

func newPressure(t *testing.T, models string) *pressure {
	t.Helper()
	p := &pressure{world: newWorld(t, models)}
	p.again()
	p.poll(0)
	return p
}

// again starts the next agent process.
func (p *pressure) again() {
	p.t.Helper()
	p.events = p.restartWithEvents()
}

// poll lets the agent observe every 15 seconds for d, and once more.
func (p *pressure) poll(d time.Duration) {
	p.t.Helper()
	for began := time.Now(); ; {
		for p.turn(); p.agent.Pass(p.t.Context()) == 0; {
			p.turn()
		}
		if time.Since(began) >= d {
			return
		}
		<-time.After(15 * time.Second)
	}
}

// takes puts the pod on the device, with its process, which has so much memory there.
func (p *pressure) takes(name, device string, mib int) {
	p.t.Helper()
	u := users[name]
	if !p.runs(name) {
		p.pod(name, device, func(pod *corev1.Pod) { pod.UID = u.uid })
		p.addProcess(u.pid, "python", podCgroup(string(u.uid)))
		held, _, _ := strings.Cut(device, "::")
		if err := p.gpus.Hold(held, u.pid, "python", mib); err != nil {
			p.t.Fatal(err)
		}
	}
	if err := p.gpus.Use(u.pid, mib); err != nil {
		p.t.Fatal(err)
	}
}

// fill puts two pods on the GPU, which have 91 % of its memory.
func (p *pressure) fill(gpu string) {
	p.t.Helper()
	p.takes("small", gpu+"::0", 4000)
	p.takes("large", gpu+"::1", 10000)
}

func (p *pressure) removePod(name string) {
	p.t.Helper()
	p.endGPUProcess(users[name].pid)
	if err := p.client.CoreV1().Pods("team").Delete(p.t.Context(), name, metav1.DeleteOptions{}); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pressure) condition() corev1.NodeCondition {
	p.t.Helper()
	c := p.node().Status.Conditions
	i := slices.IndexFunc(c, func(c corev1.NodeCondition) bool { return c.Type == config.ConditionGPUMemoryPressure })
	if i < 0 {
		return corev1.NodeCondition{}
	}
	return c[i]
}

func (p *pressure) expect(status corev1.ConditionStatus, reason config.Reason, words ...string) {
	p.t.Helper()
	c := p.condition()
	if c.Status != status || c.Reason != string(reason) {
		p.t.Errorf("the node says %s %s: %q, want %s %s", c.Status, c.Reason, c.Message, status, reason)
	}
	for _, w := range words {
		if !strings.Contains(c.Message, w) {
			p.t.Errorf("the node says %q, want %q in it", c.Message, w)
		}
	}
}

func (p *pressure) sufficient() {
	p.t.Helper()
	p.expect(corev1.ConditionFalse, config.ReasonGPUMemorySufficient, "no GPU that pods share is nearly full")
}

func (p *pressure) heard() []string {
	var out []string
	for len(p.events) > 0 {
		if e := <-p.events; strings.Contains(e, string(config.ReasonGPUMemoryNearlyFull)) {
			out = append(out, e)
		}
	}
	return out
}

func TestASharedGPUThatFillsUpIsReportedWithItsPods(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		gpu := p.gpus.UUIDs()[1]
		p.sufficient()
		p.takes("small", gpu+"::0", 3000)
		p.takes("large", gpu+"::1", 1000)
		p.poll(time.Minute)
		p.sufficient()

		p.fill(gpu)
		p.poll(0)
		p.sufficient() // the memory may be free again at once
		p.poll(30 * time.Second)
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull,
			"GPU 1 ("+gpu+") has 14000 of 15360 MiB in use (91%), shared by team/large 10000 MiB, team/small 4000 MiB")
		want := []string{"Warning GPUMemoryNearlyFull this pod has grown most, by 9000 MiB: GPU 1 (" + gpu +
			") has 14000 of 15360 MiB in use (91%), shared by team/large 10000 MiB, team/small 4000 MiB"}
		if diff := cmp.Diff(want, p.heard()); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}

		p.takes("large", gpu+"::1", 9000) // 84 %, which is over the lower limit
		p.poll(10 * time.Minute)
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull, "team/large 9000 MiB")
		p.takes("large", gpu+"::1", 8000) // 78 %
		p.poll(15 * time.Second)
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull)
		p.poll(15 * time.Second)
		p.sufficient()
		if more := p.heard(); len(more) > 0 {
			t.Errorf("reported more than once: %q", more)
		}
	})
}

func TestAGPUIsUnderNoPressureOnceAPodHasLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		gpu := p.gpus.UUIDs()[0]
		p.takes("small", gpu+"::0", 2000)
		p.takes("large", gpu+"::1", 13000)
		p.poll(time.Minute)
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull, "team/small")
		p.removePod("small")
		p.poll(0)
		p.sufficient() // 84 %, of one pod
		p.takes("large", gpu+"::1", 15000)
		p.poll(time.Hour)
		p.sufficient()
		if events := p.heard(); len(events) != 1 {
			t.Errorf("events: %q", events)
		}
	})
}

func TestMemoryThatIsGoneAtOnceIsNotReported(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		gpu := p.gpus.UUIDs()[0]
		p.takes("small", gpu+"::0", 2000)
		for range 10 {
			p.takes("large", gpu+"::1", 13000)
			p.poll(15 * time.Second)
			p.takes("large", gpu+"::1", 10000)
			p.poll(0)
			p.sufficient()
		}
	})
}

// Promise 12.
func TestAFullGPUWhoseMemoryChangesIsWrittenWithTheHeartbeat(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		gpu := p.gpus.UUIDs()[0]
		p.fill(gpu)
		p.poll(time.Minute)
		before, hours := len(p.client.Actions()), 2
		for n := range hours * 240 {
			p.takes("large", gpu+"::1", 10000+n)
			p.poll(0)
			<-time.After(15 * time.Second)
		}
		wrote := 0
		for _, a := range p.client.Actions()[before:] {
			if a.GetVerb() == "patch" {
				wrote++
			}
		}
		if beats := hours * int(time.Hour/p.settings.NodeHeartbeat); wrote > beats+1 || wrote < beats-1 {
			t.Errorf("%d writes in %d heartbeats", wrote, beats)
		}
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull, "team/small 4000 MiB")
		if strings.Contains(p.condition().Message, "10000 MiB") {
			t.Errorf("the numbers are those of two hours ago: %s", p.condition().Message)
		}

		p.takes("third", gpu+"::2", 100)
		p.poll(time.Minute)
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull, "team/third 100 MiB")
	})
}

func TestTheNextAgentKnowsWhatWasFull(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		gpu := p.gpus.UUIDs()[0]
		p.fill(gpu)
		p.takes("third", p.gpus.UUIDs()[1], 13000)
		p.poll(time.Minute)
		p.takes("large", gpu+"::1", 9000) // between the limits
		p.again()
		p.poll(time.Hour)
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull, "team/large 9000 MiB")
		if events := p.heard(); len(events) > 0 {
			t.Errorf("reported again: %q", events)
		}
	})
}

func TestInstancesAreFullEachForItself(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, "gpus: [{model: A100-40GB}]")
		p.converge("all-3g.20gb") // two with 19968 MiB each
		p.registerDevices(catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{"nvidia.com/mig-3g.20gb": 2}})
		first, second := p.gpus.MIGDevice(0, 0), p.gpus.MIGDevice(0, 4)
		p.takes("small", first+"::0", 1000)
		p.takes("large", first+"::1", 18000)
		p.takes("third", second+"::0", 19900)
		p.poll(time.Minute)
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull,
			"3g.20gb@0 of GPU 0 ("+p.gpus.UUIDs()[0]+") has 19000 of 19968 MiB in use (95%), shared by team/large 18000 MiB, team/small 1000 MiB;")
	})
}

func TestMemoryIsNotKnownWhileTheDriverIsSilent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		p.sufficient()
		p.unloadDriver()
		p.again()
		p.poll(0)
		p.expect(corev1.ConditionUnknown, config.ReasonGPUMemoryUnknown, "the driver does not say how full the GPUs are")
		p.wrapDriver = func(d nvml.Driver) nvml.Driver { return d }
		p.again()
		p.poll(0)
		p.sufficient()
	})
}

// The kernel does not unload a driver that a process has open, and the loop has closed it.
func TestADriverThatIsBeingUpgradedIsNotPolledInBetween(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		driver := &leaving{}
		p.wrapDriver = func(d nvml.Driver) nvml.Driver { driver.Driver = d; return driver }
		p.again()
		gpu := p.gpus.UUIDs()[0]
		p.takes("small", gpu+"::0", 4000)
		p.takes("large", gpu+"::1", 4000)
		p.poll(0)
		p.agent.Rest(t.Context(), time.Minute)
		if driver.observed < 4 {
			t.Errorf("%d looks in a minute", driver.observed)
		}
		p.edit(func(n *corev1.Node) {
			n.Labels = map[string]string{config.LabelDevicePlugin: fence.PausedForDriverUpgrade}
		})
		p.agent.Pass(t.Context())
		driver.observed = 0
		p.agent.Rest(t.Context(), time.Minute)
		if driver.observed > 0 {
			t.Errorf("%d looks at a driver that was let go of", driver.observed)
		}
	})
}

// The server of MPS holds the memory of all clients' contexts, and is no client.
func TestTheDaemonOfMPSSharesNoGPU(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		gpu := p.gpus.UUIDs()[0]
		p.takes("large", gpu+"::0", 13500)
		const uid = "7a0c6a4e-0000-4000-8000-000000000009"
		p.pod("daemon", "", func(pod *corev1.Pod) {
			pod.UID, pod.Spec.Containers[0].Resources = uid, corev1.ResourceRequirements{}
			pod.Namespace, pod.OwnerReferences = "gpu-operator", ofDaemonSet("mps")
			pod.Labels = map[string]string{"app": "nvidia-device-plugin-mps-control-daemon"}
		})
		p.startGPUProcess(gpu, 5009, "nvidia-cuda-mps", podCgroup(uid))
		p.poll(time.Minute)
		p.sufficient()
		p.takes("small", gpu+"::1", 100)
		p.poll(time.Minute)
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull, "shared by team/large 13500 MiB, team/small 100 MiB;")
	})
}

// Without the process table, the agent goes by kubelet's answer which pods have a GPU.
func TestPodsAreReportedWithoutTheProcessTable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		gpu := p.gpus.UUIDs()[0]
		p.fill(gpu)
		p.removeProcess(agentPID) // without the agent's own process, the table may be an empty folder
		p.removeProcess(users["small"].pid)
		p.removeProcess(users["large"].pid)
		p.poll(time.Minute)
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull, "has 14000 of 15360 MiB in use (91%), shared by team/large", "team/small")
	})
}

func TestMemoryIsNotWatchedIfTheSettingsTurnThatOff(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		p.settings.MemoryPressure.Threshold = 0
		p.again()
		p.poll(0)
		p.expect(corev1.ConditionUnknown, config.ReasonGPUMemoryUnknown, "not watched")
		gpu := p.gpus.UUIDs()[0]
		p.fill(gpu)
		p.poll(time.Hour)
		p.expect(corev1.ConditionUnknown, config.ReasonGPUMemoryUnknown, "not watched")
		p.edit(func(n *corev1.Node) { n.Status.Conditions = nil })
		p.poll(time.Hour)
		if p.condition() != (corev1.NodeCondition{}) {
			t.Errorf("the node says %v", p.condition())
		}
	})
}

// An observation between two passes sends the API server no request.
func TestTheMemoryOfAQuietNodeIsPolledWithoutTheAPIServer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPressure(t, t4)
		gpu := p.gpus.UUIDs()[0]
		p.takes("small", gpu+"::0", 4000)
		p.takes("large", gpu+"::1", 4000)
		p.poll(0)
		before := len(p.client.Actions())
		woke := make(chan struct{})
		go func() {
			defer close(woke)
			p.agent.Rest(t.Context(), time.Hour)
		}()
		<-time.After(20 * time.Minute)
		p.takes("large", gpu+"::1", 10000)
		began := time.Now()
		before += len(p.client.Actions()[before:]) // the requests of the test itself
		<-woke
		if took := time.Since(began); took > time.Minute {
			t.Errorf("it took %v to be reported", took)
		}
		if asked := p.client.Actions()[before:]; len(asked) > 0 {
			t.Errorf("asked of the API server: %v", asked)
		}
		p.poll(0)
		p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull)

		woke = make(chan struct{})
		go func() {
			defer close(woke)
			p.agent.Rest(t.Context(), time.Hour)
		}()
		p.failForGood("GetCount")
		began = time.Now()
		<-woke
		if took := time.Since(began); took > time.Minute {
			t.Errorf("it took %v to find out that the driver is gone", took)
		}
	})
}

// A step of the host's clock does not count as time for which a device was nearly full.
func TestAStepOfTheClockIsNoTimeUnderPressure(t *testing.T) {
	t.Parallel()
	for name, by := range map[string]time.Duration{"forward": time.Hour, "back": -time.Hour} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				p := &pressure{world: newWorld(t, t4)}
				c := &hostClock{readings: map[time.Time]time.Time{}}
				p.clock = c
				p.again()
				p.poll(0)
				gpu := p.gpus.UUIDs()[0]
				p.fill(gpu)
				p.poll(0)
				c.ahead = by
				p.poll(15 * time.Second)
				p.sufficient()
				p.poll(30 * time.Second)
				p.expect(corev1.ConditionTrue, config.ReasonGPUMemoryNearlyFull)
			})
		})
	}
}
