package kubelet_test

import (
	"context"
	"errors"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/cluster/timeline"
)

// laterClock is real time that a test puts on.
type laterClock struct {
	clock.RealClock
	by atomic.Int64
}

func (c *laterClock) Now() time.Time                  { return c.RealClock.Now().Add(time.Duration(c.by.Load())) }
func (c *laterClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// The real kubelet does the same: TestAContainerWhoseResourceIsForgottenCannotStartAgain of test/e2e.
func TestAContainerWhoseResourceIsForgottenCannotStartAgain(t *testing.T) {
	t.Parallel()
	var later laterClock
	j := joinWithProgram(t, kubelet.Options{Clock: &later, StatusPeriod: 50 * time.Millisecond})
	p := servePlugin(t, j.DevicePluginDir(), "gpu.sock", gpu, "a")
	j.expect(t, gpu, 1, 1)
	j.pod(t, "holder", func(pod *corev1.Pod) {
		running(pod)
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{gpu: resource.MustParse("1")}
	})
	_ = j.ask(t, "holder", "/pid") // it runs
	p.stop()
	j.expect(t, gpu, 1, 0)
	later.by.Store(int64(5*time.Minute + time.Second))
	j.expect(t, gpu, 0, 0)

	j.ask(t, "holder", "/exit?code=1")
	pod := j.until(t, "holder", func(p *corev1.Pod) bool {
		w := p.Status.ContainerStatuses[0].State.Waiting
		return w != nil && w.Reason == "CreateContainerConfigError"
	})
	const want = "endpoint not found in cache for a registered resource: nvidia.com/gpu"
	if got := pod.Status.ContainerStatuses[0].State.Waiting.Message; got != want {
		t.Errorf("the container waits because %q, want %q", got, want)
	}
	servePlugin(t, j.DevicePluginDir(), "again.sock", gpu, "a")
	j.until(t, "holder", isReady)
}

// podProcesses are the processes of pods, by their UIDs.
type podProcesses struct {
	mu  sync.Mutex
	ids map[types.UID]int
}

func (p *podProcesses) started(pod *corev1.Pod, _ *corev1.Container, pid int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ids[pod.UID] = pid
}

func (p *podProcesses) kill(_ context.Context, pod *corev1.Pod) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ids[pod.UID] == 0 {
		return errors.New("it has no process")
	}
	return syscall.Kill(p.ids[pod.UID], syscall.SIGKILL)
}

// The real kubelet has written the time line: see test/e2e.
func TestTheTimeLineOfDevicePluginsIsThatOfARealKubelet(t *testing.T) {
	t.Parallel()
	c := clustertest.Start(t)
	b := binaries.Builder{Log: os.Stderr}
	pause, err := b.Tool(t.Context(), "./test/cluster/realkubelet/cmd/pause")
	if err != nil {
		t.Fatal(err)
	}
	box, err := b.Tool(t.Context(), "./test/sandbox/cmd/sandbox")
	if err != nil {
		t.Fatal(err)
	}
	const name = "timeline"
	credentials, err := c.ConfigFor("system:node:"+name, "system:nodes")
	if err != nil {
		t.Fatal(err)
	}
	running, boots := &podProcesses{ids: map[types.UID]int{}}, 0
	o := kubelet.Options{
		Node: name, Dir: shortDir(t), Config: credentials, SandboxBinary: box, ReportAtOnce: true, ListDelay: time.Second,
		Images: map[string]kubelet.Image{"pause": {Path: pause}}, OnStart: running.started,
		RestartDelay: 100 * time.Millisecond,
	}
	k, err := kubelet.Start(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Stop() })
	got, err := timeline.Run(t.Context(), timeline.Subject{
		View: timeline.View{
			Client: clustertest.Client(t), Node: name, Namespace: clustertest.Namespace(t), PodResources: k.PodResourcesSocket(), Domain: "nvidia.com",
		},
		PluginDir: k.DevicePluginDir(), Image: "pause", Kill: running.kill,
		Restart: func(ctx context.Context) error { return k.Restart(ctx) },
		Reboot: func(ctx context.Context) error {
			k.Stop()
			boots++
			o.BootID = "boot " + strconv.Itoa(boots)
			k, err = kubelet.Start(ctx, o)
			return err
		},
	})
	if err != nil {
		t.Fatalf("%v; until then:\n%s", err, got)
	}
	if diff := cmp.Diff(timeline.Golden, got); diff != "" {
		t.Errorf("the time line (-real kubelet +stand-in):\n%s", diff)
	}
}
