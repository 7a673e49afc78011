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
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/test/binaries"
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
	running := &podProcesses{ids: map[types.UID]int{}}
	o := withPause(t, running)
	o.Clock, o.StatusPeriod = &later, 50*time.Millisecond
	j := join(t, o)
	p := j.serve(t, "gpu.sock", "a")
	holder := j.pod(t, "holder", func(pod *corev1.Pod) {
		oneGPU(pod)
		pod.Spec.Containers[0].Image = pauseImage
	})
	j.until(t, "holder", isReady)
	p.Stop()
	j.expect(t, 1, 0)
	later.by.Store(int64(5*time.Minute + time.Second))
	j.expect(t, 0, 0)

	if err := running.kill(t.Context(), holder); err != nil {
		t.Fatal(err)
	}
	pod := j.until(t, "holder", func(p *corev1.Pod) bool {
		w := p.Status.ContainerStatuses[0].State.Waiting
		return w != nil && w.Reason == "CreateContainerConfigError"
	})
	const want = "endpoint not found in cache for a registered resource: nvidia.com/gpu"
	if got := pod.Status.ContainerStatuses[0].State.Waiting.Message; got != want {
		t.Errorf("the container waits because %q, want %q", got, want)
	}
	j.serve(t, "again.sock", "a")
	j.until(t, "holder", isReady)
}

func TestAPodThatAsksForAGhostIsRejected(t *testing.T) {
	t.Parallel()
	var later laterClock
	j := join(t, kubelet.Options{Clock: &later, StatusPeriod: 50 * time.Millisecond})
	j.serve(t, "gpu.sock", "a").Stop()
	j.expect(t, 1, 0)
	later.by.Store(int64(5*time.Minute + time.Second))
	j.expect(t, 0, 0)
	j.pod(t, "late", oneGPU)
	if late := j.until(t, "late", hasFailed); late.Status.Reason != "OutOf"+gpu {
		t.Errorf("rejected for %s: %s", late.Status.Reason, late.Status.Message)
	}
}

// pauseImage is that of a container that runs until it is asked to end.
const pauseImage = "pause"

// withPause are the options by which that image has a process.
func withPause(t *testing.T, processes *podProcesses) kubelet.Options {
	t.Helper()
	b := binaries.Builder{Log: os.Stderr}
	pause, err := b.Tool(t.Context(), "./test/cluster/realkubelet/cmd/pause")
	if err != nil {
		t.Fatal(err)
	}
	box, err := b.Tool(t.Context(), "./test/sandbox/cmd/sandbox")
	if err != nil {
		t.Fatal(err)
	}
	return kubelet.Options{SandboxBinary: box, Images: map[string]kubelet.Image{pauseImage: {Path: pause}}, OnStart: processes.started}
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
func TestTheTimeLineOfClaimsIsThatOfARealKubelet(t *testing.T) {
	t.Parallel()
	var later laterClock
	o := withPause(t, &podProcesses{ids: map[types.UID]int{}})
	o.ListDelay, o.Clock = time.Second, &later
	j := join(t, o)
	got, err := timeline.RunClaims(t.Context(), timeline.ClaimSubject{
		View:       timeline.View{Client: j.admin, Node: j.options.Node, Namespace: j.namespace, PodResources: j.PodResourcesSocket()},
		KubeletDir: j.options.Dir, Image: pauseImage,
		Restart: func(ctx context.Context) error { return j.Restart(ctx) },
		Pass:    func(_ context.Context, d time.Duration) error { later.by.Add(int64(d)); return nil },
	})
	if err != nil {
		t.Fatalf("%v; until then:\n%s", err, got)
	}
	if diff := cmp.Diff(timeline.GoldenClaims, got); diff != "" {
		t.Errorf("the time line (-real kubelet +stand-in):\n%s", diff)
	}
}

// The real kubelet has written the time line: see test/e2e.
func TestTheTimeLineOfDevicePluginsIsThatOfARealKubelet(t *testing.T) {
	t.Parallel()
	running, boots := &podProcesses{ids: map[types.UID]int{}}, 0
	o := withPause(t, running)
	o.ListDelay = time.Second
	j := join(t, o)
	got, err := timeline.Run(t.Context(), timeline.Subject{
		View: timeline.View{
			Client: j.admin, Node: j.options.Node, Namespace: j.namespace, PodResources: j.PodResourcesSocket(), Domain: "nvidia.com",
		},
		PluginDir: j.DevicePluginDir(), Image: pauseImage, Kill: running.kill,
		Restart: func(ctx context.Context) error { return j.Restart(ctx) },
		Reboot: func(ctx context.Context) error {
			j.Stop()
			boots++
			j.options.BootID = "boot " + strconv.Itoa(boots)
			j.start(ctx, t)
			return nil
		},
	})
	if err != nil {
		t.Fatalf("%v; until then:\n%s", err, got)
	}
	if diff := cmp.Diff(timeline.Golden, got); diff != "" {
		t.Errorf("the time line (-real kubelet +stand-in):\n%s", diff)
	}
}
