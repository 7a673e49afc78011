package e2e_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/cluster/realkubelet"
	"github.com/gpuslice/gpuslice/test/cluster/timeline"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/node"
)

const (
	nodeName = "gpu-1"
	// trainer is the image of a pod that computes on the devices it was given, until it is asked to end.
	trainer = "example.com/trainer:1"
	// patience bounds each wait. Most take a second or two, but kubelet puts off a container that has ended a few times by up to five minutes.
	patience = 6 * time.Minute
)

// Where containers see the driver: what NVIDIA's container runtime shows them on a real node.
const (
	driverInside = "/run/nvidia/lib"
	gpusInside   = "/run/gpusim"
	hostInside   = "/run/gpusim-host"
	procInside   = "/run/gpusim-proc"
)

// rig is one real node with simulated GPUs. It has no device plugin until a test brings one.
type rig struct {
	*realkubelet.Kubelet
	timeline.View
	t       *testing.T
	dir     string
	cluster *cluster.Cluster
	gpus    *gpusim.Node
	plugin  *pluginProcess
}

// newRig starts the node. Its runtime has the images in the archives, and those of the tests' own pods.
func newRig(t *testing.T, spec string, archives ...string) *rig {
	t.Helper()
	c := clustertest.Start(t)
	client, err := kubernetes.NewForConfig(c.Config())
	if err != nil {
		t.Fatal(err)
	}
	gpus, err := gpusim.ParseSpec([]byte(spec))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "e2e-") //nolint:usetesting // a failed test leaves its logs
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dir: dir, cluster: c}
	t.Cleanup(r.end)
	if r.gpus, err = gpusim.Create(r.file("gpus"), gpus); err != nil {
		t.Fatal(err)
	}
	if err := r.gpus.RenderHost(r.file("host")); err != nil {
		t.Fatal(err)
	}
	library := filepath.Join(r.file("driver"), "usr", "lib64", "libnvidia-ml.so.1")
	if err := os.MkdirAll(filepath.Dir(library), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(programs.LibNVML, library); err != nil {
		t.Fatal(err)
	}
	r.Kubelet, err = realkubelet.Start(t.Context(), realkubelet.Options{
		Node: nodeName, Dir: r.file("node"), Cluster: c,
		Kube: programs.Kube, Runtime: programs.Runtime, Pause: programs.Pause, Images: r.images(), Archives: archives,
		DriverMounts: map[string]string{
			driverInside: filepath.Dir(programs.LibNVML), gpusInside: r.file("gpus"), hostInside: r.file("host"), procInside: "/proc",
			r.file("host"): r.file("host"), // by this path the GPUs know it, so that the capabilities of what a pod makes come there
		},
		DriverEnv: []string{"LD_LIBRARY_PATH=" + driverInside, "GPUSIM_NODE=" + gpusInside, "GPUSIM_PROC=" + procInside},
	})
	if err != nil {
		t.Fatal(err)
	}
	r.View = timeline.View{
		Client: client, Node: nodeName, Namespace: clustertest.Namespace(t),
		PodResources: realkubelet.PodResourcesSocket, Domain: "nvidia.com", Rename: r.shortNames(),
	}
	return r
}

// asNVIDIA starts NVIDIA's plugin where it sees the driver's part of /proc at its own place, which no runtime can mount.
const asNVIDIA = `#!/bin/sh
exec /sandbox --bind=` + hostInside + `/proc/driver=/proc/driver -- "/nvidia/${0##*/}" "$@"
`

// mpsAsNVIDIA starts NVIDIA's MPS control daemon in the same way. What its subcommand mount-shm does, which the program that is built here lacks, the
// shell does.
const mpsAsNVIDIA = `#!/bin/sh
if test "$1" = mount-shm; then
	mkdir -p /mps/shm && exec mount -t tmpfs -o rw,nosuid,nodev,noexec,size=65536k shm /mps/shm
fi
` + "exec /sandbox --bind=" + hostInside + `/proc/driver=/proc/driver -- /nvidia/mps-control-daemon "$@"
`

// images are those of the pods.
func (r *rig) images() []realkubelet.Image {
	r.t.Helper()
	for name, script := range map[string]string{"as-nvidia": asNVIDIA, "mps-as-nvidia": mpsAsNVIDIA} {
		if err := os.WriteFile(r.file(name), []byte(script), 0o600); err != nil {
			r.t.Fatal(err)
		}
	}
	all := []realkubelet.Image{
		{
			Name: trainer, Entrypoint: []string{"/gpusim", "compute"}, Files: map[string]string{"/gpusim": programs.GPUSim},
		},
		{
			Name: node.DevicePluginImage, Entrypoint: []string{"nvidia-device-plugin"},
			Files: map[string]string{
				"/usr/bin/nvidia-device-plugin": r.file("as-nvidia"), "/usr/bin/gpu-feature-discovery": r.file("as-nvidia"),
				"/usr/bin/mps-control-daemon": r.file("mps-as-nvidia"), "/usr/bin/nvidia-cuda-mps-control": programs.GPUSim, "/usr/bin/nvidia-smi": programs.GPUSim,
				"/bin/sh": "/bin/sh", "/bin/sleep": "/bin/sleep", "/bin/mkdir": "/bin/mkdir", "/bin/mount": "/bin/mount", "/sandbox": programs.Sandbox,
				"/nvidia/mps-control-daemon":    filepath.Join(programs.DevicePlugin, "mps-control-daemon"),
				"/nvidia/nvidia-device-plugin":  filepath.Join(programs.DevicePlugin, "nvidia-device-plugin"),
				"/nvidia/gpu-feature-discovery": filepath.Join(programs.DevicePlugin, "gpu-feature-discovery"),
			},
		},
	}
	if programs.DRADriver != "" {
		all = append(all, r.draDriver())
	}
	return all
}

// shortNames are those of the GPUs in what tests expect: GPU-0 for the first one's UUID.
func (r *rig) shortNames() *strings.Replacer {
	var pairs []string
	for i, uuid := range r.gpus.UUIDs() {
		pairs = append(pairs, uuid, fmt.Sprintf("GPU-%d", i))
	}
	return strings.NewReplacer(pairs...)
}

func (r *rig) file(name string) string { return filepath.Join(r.dir, name) }

// end takes the node down. A failed test leaves the directory, with the logs, and says where it is.
func (r *rig) end() {
	ctx := context.WithoutCancel(r.t.Context())
	if r.plugin != nil {
		r.plugin.stop()
	}
	if r.Kubelet != nil {
		if err := r.Stop(ctx); err != nil {
			r.t.Error(err)
		}
	}
	for _, left := range []string{"/var/lib/gpuslice", "/run/gpuslice", "/run/nvidia"} { // by pods with folders of the host
		if err := unmountBelow(left); err != nil {
			r.t.Error(err)
		}
		if err := os.RemoveAll(left); err != nil {
			r.t.Error(err)
		}
	}
	if r.t.Failed() {
		r.t.Logf("the logs of the node are in %s", r.dir)
		return
	}
	if err := os.RemoveAll(r.dir); err != nil {
		r.t.Error(err)
	}
}

// unmountBelow unmounts what is mounted in the directory, as the MPS control daemon's pod does.
func unmountBelow(dir string) error {
	text, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 1 && strings.HasPrefix(fields[1], dir+"/") {
			if err := syscall.Unmount(fields[1], syscall.MNT_DETACH); err != nil {
				return fmt.Errorf("unmounting %s: %w", fields[1], err)
			}
		}
	}
	return nil
}

// await looks until the goal is reached, and the node and its kubelet say the same.
func (r *rig) await(what string, goal func(timeline.State) bool) timeline.State {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	s, err := r.Await(ctx, goal)
	if err != nil {
		r.t.Fatalf("waiting for %s: %v; the node says:\n%s", what, err, s)
	}
	return s
}

// awaitReport waits until kubelet has reported its node's status since then: until it does, the node says what an earlier kubelet has said.
func (r *rig) awaitReport(since time.Time) {
	r.t.Helper()
	r.await("a report of kubelet", func(timeline.State) bool {
		node, err := r.Client.CoreV1().Nodes().Get(r.t.Context(), r.Node, metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == corev1.NodeReady && c.LastHeartbeatTime.After(since)
		})
	})
}

// awaitAmount waits until the node says so of the resource.
func (r *rig) awaitAmount(resource string, capacity, allocatable int64) timeline.State {
	r.t.Helper()
	return r.await(fmt.Sprintf("%s %d/%d", resource, allocatable, capacity), func(s timeline.State) bool {
		return s.Resources[resource] == timeline.Amount{Capacity: capacity, Allocatable: allocatable}
	})
}

// awaitPod waits until the pod is as wanted.
func (r *rig) awaitPod(name, what string, wanted func(timeline.Pod) bool) timeline.State {
	r.t.Helper()
	return r.await("pod "+name+" "+what, func(s timeline.State) bool {
		p, known := s.Pods[name]
		return known && wanted(p)
	})
}

func running(p timeline.Pod) bool { return p.Phase == corev1.PodRunning && p.Reason == "" }
func pending(p timeline.Pod) bool {
	return p.Phase == corev1.PodPending && p.Reason == corev1.PodReasonUnschedulable
}
func failed(p timeline.Pod) bool { return p.Phase == corev1.PodFailed }

// pod makes a pod that computes on one device of the resource; one that does nothing if there is none.
func (r *rig) pod(name, of string) {
	r.t.Helper()
	grace := int64(1)
	main := corev1.Container{Name: "main", Image: "localhost/pause:1"}
	if of != "" {
		main.Image = trainer
		main.Resources.Limits = corev1.ResourceList{corev1.ResourceName(of): resource.MustParse("1")}
	}
	_, err := r.Client.CoreV1().Pods(r.Namespace).Create(r.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			Containers:                    []corev1.Container{main},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
}

// deletePods returns when the pods are gone.
func (r *rig) deletePods(names ...string) {
	r.t.Helper()
	for _, name := range names {
		if err := r.Client.CoreV1().Pods(r.Namespace).Delete(r.t.Context(), name, metav1.DeleteOptions{}); err != nil {
			r.t.Fatal(err)
		}
	}
	r.await(fmt.Sprintf("the end of pods %q", names), func(s timeline.State) bool {
		return !slices.ContainsFunc(names, func(name string) bool { _, there := s.Pods[name]; return there })
	})
}

// kill ends the processes of a pod, as the kernel does when memory runs out. Kubelet then starts its container again.
func (r *rig) kill(ctx context.Context, pod *corev1.Pod) error {
	pids, err := r.Processes(ctx, pod)
	if err != nil {
		return err
	}
	if len(pids) == 0 {
		return fmt.Errorf("pod %s has no process", pod.Name)
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			return err
		}
	}
	return nil
}
