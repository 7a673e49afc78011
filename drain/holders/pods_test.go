package holders_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/drain/holders"
)

const (
	gpu   = "nvidia.com/gpu"
	mig1g = "nvidia.com/mig-1g.10gb"
)

func limits(name string, n int64) corev1.ResourceRequirements {
	return corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceName(name): *resource.NewQuantity(n, resource.DecimalSI)}}
}

// pod is a running pod "team/<name>" with UID "uid-<name>".
func pod(name string, change ...func(*corev1.Pod)) corev1.Pod {
	p := corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name)},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	for _, c := range change {
		c(&p)
	}
	return p
}

func container(r corev1.ResourceRequirements) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Resources: r}) }
}

func initContainer(r corev1.ResourceRequirements) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.InitContainers = append(p.Spec.InitContainers, corev1.Container{Resources: r})
	}
}

func sidecar(r corev1.ResourceRequirements) func(*corev1.Pod) {
	always := corev1.ContainerRestartPolicyAlways
	return func(p *corev1.Pod) {
		p.Spec.InitContainers = append(p.Spec.InitContainers, corev1.Container{Resources: r, RestartPolicy: &always})
	}
}

func ephemeral(r corev1.ResourceRequirements) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers,
			corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Resources: r}})
	}
}

// claiming has a claim of its own, which is still to be made from its template.
func claiming(p *corev1.Pod) {
	p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "gpu"})
}

// claims is claiming for a claim that exists, by that name.
func claims(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "of " + name, ResourceClaimName: &name})
	}
}

// implicit has the scheduler make a claim by that name for an extended resource of a device class, which no field of the spec names.
func implicit(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		container(limits("deviceclass.resource.kubernetes.io/gpu.nvidia.com", 1))(p)
		p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: name}
	}
}

// madeFor is claiming for a claim that was made from its template by that name, or was not needed.
func madeFor(name *string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		claiming(p)
		p.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: name}}
	}
}

func phase(ph corev1.PodPhase) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Status.Phase = ph }
}

// given is what kubelet answers when it gave the ids of one resource to "team/<name>".
func given(name, resource string, ids ...string) holders.Assignments {
	return holders.Assignments{{Namespace: "team", Name: name}: {resource: ids}}
}

func TestGPUPodsFindsEveryPodThatMayHoldAGPU(t *testing.T) {
	requests := corev1.ResourceRequirements{Requests: limits(gpu, 1).Limits}
	nothing := holders.Assignments{}
	const spec, claim, kubelet = holders.SourceSpec, holders.SourceClaim, holders.SourceKubelet
	claimed := func(names ...string) []holders.Pod {
		return []holders.Pod{{Namespace: "team", Name: "a", UID: "uid-a", Sources: []holders.Source{claim}, DeviceClaims: names, UnreadClaims: names}}
	}
	found := func(devices []string, known bool, requests map[string]int64, by ...holders.Source) []holders.Pod {
		return []holders.Pod{{Namespace: "team", Name: "a", UID: "uid-a", Devices: devices, DevicesKnown: known, Requests: requests, Sources: by}}
	}
	one := map[string]int64{gpu: 1}
	for _, c := range []struct {
		name     string
		pod      corev1.Pod
		assigned holders.Assignments
		want     []holders.Pod
	}{
		{"asks for no GPU", pod("a", container(limits("cpu", 4))), nothing, nil},
		{"asks for none of them", pod("a", container(limits(gpu, 0))), nothing, nil},
		{"asks for another vendor's", pod("a", container(limits("amd.com/gpu", 1))), nothing, nil},
		{
			"has what its limits ask for", pod("a", container(limits(gpu, 1))), given("a", gpu, "GPU-1"),
			found([]string{"GPU-1"}, true, one, spec, kubelet),
		},
		{
			"has what its requests ask for", pod("a", container(requests)), given("a", gpu, "GPU-1"),
			found([]string{"GPU-1"}, true, one, spec, kubelet),
		},
		{
			"has MIG devices, sorted", pod("a", container(limits(mig1g, 2))), given("a", mig1g, "MIG-2", "MIG-1"),
			found([]string{"MIG-1", "MIG-2"}, true, map[string]int64{mig1g: 2}, spec, kubelet),
		},
		{
			"has shares of one GPU, which is named once", pod("a", container(limits(gpu, 2))), given("a", gpu, "GPU-1::0", "GPU-1::13"),
			found([]string{"GPU-1"}, true, map[string]int64{gpu: 2}, spec, kubelet),
		},
		{
			"asks through containers, a sidecar and an init container that runs before them",
			pod("a", sidecar(limits(gpu, 1)), initContainer(limits(gpu, 2)), container(limits(gpu, 1)), container(limits(gpu, 2))),
			given("a", gpu, "GPU-1", "GPU-2", "GPU-3", "GPU-4"),
			found([]string{"GPU-1", "GPU-2", "GPU-3", "GPU-4"}, true, map[string]int64{gpu: 4}, spec, kubelet),
		},
		{
			"asks for most in an init container, beside the sidecar before it",
			pod("a", sidecar(limits(gpu, 1)), initContainer(limits(gpu, 4)), container(limits(gpu, 1))), nothing,
			found(nil, false, map[string]int64{gpu: 5}, spec),
		},
		{
			"asks in an init container only", pod("a", initContainer(limits(gpu, 1))), given("a", gpu, "GPU-1"),
			found([]string{"GPU-1"}, true, one, spec, kubelet),
		},
		{"asks in an ephemeral container", pod("a", ephemeral(limits(gpu, 1))), nothing, found(nil, false, one, spec)},
		{"was given one without asking", pod("a"), given("a", gpu, "GPU-1"), found([]string{"GPU-1"}, true, nil, kubelet)},
		{"was given a share without asking", pod("a"), given("a", gpu, "GPU-1::3"), found([]string{"GPU-1"}, true, nil, kubelet)},
		{"kubelet could not be asked", pod("a", container(limits(gpu, 1))), nil, found(nil, false, one, spec)},
		{"is bound and not yet admitted", pod("a", container(limits(gpu, 1)), phase(corev1.PodPending)), nothing, found(nil, false, one, spec)},
		{
			"lacks a device of one of its resources", pod("a", container(limits(gpu, 1)), container(limits(mig1g, 1))), given("a", gpu, "GPU-1"),
			found([]string{"GPU-1"}, false, map[string]int64{gpu: 1, mig1g: 1}, spec, kubelet),
		},
		{
			"has a device that is not named by UUID", pod("a", container(limits(gpu, 1))), given("a", gpu, "0"),
			found(nil, false, one, spec, kubelet),
		},
		{
			"has a device that is no GPU", pod("a", container(limits("nvidia.com/hostdev", 1))), given("a", "nvidia.com/hostdev", "0000:17:00.0"),
			found(nil, true, nil, kubelet),
		},
		{"has a claim that is not made", pod("a", claiming), nothing, nil},
		{"has a claim that is not made, and a device", pod("a", claiming, container(limits(gpu, 1))), given("a", gpu, "GPU-1"), found([]string{"GPU-1"}, true, one, spec, kubelet)},
		{"has a claim that kubelet says nothing of", pod("a", claims("c1")), given("a", "claim c2", "dra.net"), claimed("c1")},
		{"has a claim of GPUs", pod("a", claims("c1")), given("a", "claim c1", "gpu.nvidia.com"), claimed("c1")},
		{"has a claim of GPUs and more", pod("a", claims("c1")), given("a", "claim c1", "dra.net", "gpu.nvidia.com"), claimed("c1")},
		{"has a claim of other devices", pod("a", claims("c1")), given("a", "claim c1", "dra.net"), nil},
		{"has a claim of other devices, and one not known", pod("a", claims("c1"), madeFor(ptr.To("c2"))), given("a", "claim c1", "dra.net"), claimed("c2")},
		{"has a claim from a template, of GPUs", pod("a", madeFor(ptr.To("a-x7k2p"))), given("a", "claim a-x7k2p", "gpu.nvidia.com"), claimed("a-x7k2p")},
		{"has a claim from a template, of other devices", pod("a", madeFor(ptr.To("a-x7k2p"))), given("a", "claim a-x7k2p", "dra.net"), nil},
		{"has a claim from a template that was not needed", pod("a", madeFor(nil)), nothing, nil},
		{"has a claim that the scheduler made for an extended resource, of GPUs", pod("a", implicit("a-er")), given("a", "claim a-er", "gpu.nvidia.com"), claimed("a-er")},
		{"has a claim that the scheduler made for an extended resource, of which kubelet says nothing", pod("a", implicit("a-er")), nothing, claimed("a-er")},
		{"has a claim that the scheduler made for an extended resource, of other devices", pod("a", implicit("a-er")), given("a", "claim a-er", "dra.net"), nil},
		{"has a claim of other devices and asks for a GPU", pod("a", claims("c1"), container(limits(gpu, 1))), given("a", "claim c1", "dra.net"), found(nil, false, one, spec)},
		{
			"is listed by kubelet alone, with a claim of GPUs", pod("cpu-only"), given("a", "claim c1", "gpu.nvidia.com"),
			[]holders.Pod{{Namespace: "team", Name: "a", Sources: []holders.Source{claim}, DeviceClaims: []string{"c1"}, Terminating: true, Unlisted: true}},
		},
		{"is listed by kubelet alone, with a claim of other devices", pod("cpu-only"), given("a", "claim c1", "dra.net"), nil},
		{"has succeeded", pod("a", container(limits(gpu, 1)), phase(corev1.PodSucceeded)), given("a", gpu, "GPU-1"), nil},
		{"has failed", pod("a", container(limits(gpu, 1)), phase(corev1.PodFailed)), given("a", gpu, "GPU-1"), nil},
		{
			"is listed by kubelet alone", pod("cpu-only"), given("a", gpu, "GPU-1"),
			[]holders.Pod{{
				Namespace: "team", Name: "a", Sources: []holders.Source{kubelet}, Devices: []string{"GPU-1"}, DevicesKnown: true,
				Terminating: true, Unlisted: true,
			}},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, holders.GPUPods([]corev1.Pod{c.pod}, c.assigned, nil, holders.Claimed{}, nil)); diff != "" {
				t.Errorf("GPUPods (-want +got):\n%s", diff)
			}
		})
	}
}

func TestGPUPodsSaysHowAPodCanLeave(t *testing.T) {
	ends := metav1.NewTime(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	controller := true
	pods := []corev1.Pod{
		pod("static", container(limits(gpu, 1)), func(p *corev1.Pod) {
			mirror(p, "hash")
		}),
		pod("daemon", container(limits(gpu, 1)), func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "d", UID: "d", Controller: &controller}}
		}),
		pod("leaving", container(limits(gpu, 1)), func(p *corev1.Pod) {
			p.DeletionTimestamp, p.Finalizers, p.Labels = &ends, []string{"example.io/wait"}, map[string]string{"app": "web"}
		}),
		pod("owned", container(limits(gpu, 1)), func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "r", Controller: &controller}}
		}),
	}
	one, spec := map[string]int64{gpu: 1}, []holders.Source{holders.SourceSpec}
	want := []holders.Pod{
		{Namespace: "team", Name: "daemon", UID: "uid-daemon", Requests: one, Sources: spec, Controller: "DaemonSet/d", Daemon: true},
		{
			Namespace: "team", Name: "leaving", UID: "uid-leaving", Requests: one, Sources: spec, Labels: map[string]string{"app": "web"},
			Terminating: true, GraceEnds: ends.Time, Finalizers: []string{"example.io/wait"},
		},
		{Namespace: "team", Name: "owned", UID: "uid-owned", Requests: one, Sources: spec, Controller: "ReplicaSet/r"},
		{Namespace: "team", Name: "static", UID: "uid-static", Annotations: pods[0].Annotations, Requests: one, Sources: spec, Controller: "Node/gpu-1", Mirror: true},
	}
	if diff := cmp.Diff(want, holders.GPUPods(pods, nil, nil, holders.Claimed{}, nil)); diff != "" {
		t.Errorf("GPUPods (-want +got):\n%s", diff)
	}
}

// union is what all sources together say of a node, as text: a line for each pod that may hold a GPU, and for each process
// that holds one and is of no pod.
func union(t *testing.T, table holders.Processes, sought []holders.Sought, pods []corev1.Pod, assigned holders.Assignments) string {
	t.Helper()
	var out strings.Builder
	clients, err := table.Holders(t.Context(), sought)
	for _, p := range holders.GPUPods(pods, assigned, clients, holders.Claimed{}, nil) {
		devices := strings.Join(p.Devices, " ")
		if !p.DevicesKnown {
			devices += " and any other"
		}
		if p.Unlisted {
			devices += ", unlisted"
		}
		fmt.Fprintf(&out, "%s has %s: %s\n", p, strings.TrimSpace(devices), strings.Join(texts(p.Sources), ", "))
	}
	unowned := holders.Unowned(clients, pods)
	for i, name := range holders.NameClients(unowned, pods) {
		fmt.Fprintf(&out, "no pod: %s has %s: %s\n", name, strings.Join(unowned[i].Devices, " "), strings.Join(texts(unowned[i].Sources), ", "))
	}
	if err != nil {
		out.WriteString("busy: " + err.Error() + "\n")
	}
	return strings.ReplaceAll(out.String(), table.Root, "/proc")
}

func texts(sources []holders.Source) []string {
	var out []string
	for _, s := range sources {
		out = append(out, string(s))
	}
	return out
}

func withUID(uid types.UID) func(*corev1.Pod) { return func(p *corev1.Pod) { p.UID = uid } }

// 3. Only holders leave: each source finds some that the others miss, and together they miss none. The plan takes GPU 0
// away as a whole, and one MIG device of GPU 1.
func TestTheUnionOfAllSources(t *testing.T) {
	const (
		kubepods   = "0::/kubepods.slice/kubepods-pod" + inSlice + ".slice/"
		containerd = kubepods + "cri-containerd-" + id + ".scope\n"
	)
	static := func(p *corev1.Pod) {
		p.UID = "ffffffff-0000-0000-0000-000000000000"
		mirror(p, hash)
	}
	daemon := func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "d", UID: "d", Controller: ptr.To(true)}}
	}
	runs := func(containerID string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Status.ContainerStatuses = []corev1.ContainerStatus{{ContainerID: containerID}} }
	}
	agentIn := func(cgroup string) func(*testing.T, string) {
		return func(t *testing.T, root string) {
			t.Helper()
			replace(t, filepath.Join(root, strconv.Itoa(agentPID), "cgroup"), func(path string) error {
				return os.WriteFile(path, []byte(cgroup), 0o600)
			})
		}
	}
	idle := pod("idle", container(limits("cpu", 1)))
	for _, c := range []struct {
		name      string
		pods      []corev1.Pod
		assigned  holders.Assignments
		processes []process
		gpu, mig  []int // pids that NVML reports on GPU 0, and on the MIG device of GPU 1
		spoil     func(t *testing.T, root string)
		want      string
	}{
		{name: "no one", pods: []corev1.Pod{idle}, assigned: holders.Assignments{}},
		{
			name: "the pod's spec alone",
			pods: []corev1.Pod{pod("a", container(limits(gpu, 1))), idle}, assigned: holders.Assignments{},
			want: "team/a has and any other: pod spec\n",
		},
		{
			name: "a claim alone",
			pods: []corev1.Pod{pod("a", claims("c1")), idle}, assigned: holders.Assignments{},
			want: "team/a has and any other: claim\n",
		},
		{
			name: "kubelet alone, with a replica",
			pods: []corev1.Pod{pod("a"), idle}, assigned: given("a", gpu, "GPU-0::3"),
			want: "team/a has GPU-0: kubelet\n",
		},
		{
			name: "NVML alone, as with NVIDIA_VISIBLE_DEVICES=all",
			pods: []corev1.Pod{pod("a", withUID(podUID)), idle}, assigned: holders.Assignments{}, gpu: []int{99},
			processes: []process{{pid: 99, command: "python", cgroup: containerd}},
			want:      "team/a has GPU-0: NVML pid 99 python\n",
		},
		{
			name: "NVML alone, on a MIG device",
			pods: []corev1.Pod{pod("a", withUID(podUID)), idle}, assigned: holders.Assignments{}, mig: []int{99},
			processes: []process{{pid: 99, command: "python", cgroup: containerd, files: []string{"/dev/nvidia1"}}},
			want:      "team/a has MIG-1: NVML pid 99 python\n",
		},
		{
			name: "an open file alone, as of a monitor, which a DaemonSet brings",
			pods: []corev1.Pod{pod("a", withUID(podUID), daemon), idle}, assigned: holders.Assignments{},
			processes: []process{{pid: 99, command: "dcgm-exporter", cgroup: containerd, files: []string{"/dev/nvidia0", "/dev/nvidia1"}}},
			want:      "team/a has GPU-0: device file /dev/nvidia0 of pid 99 dcgm-exporter\n",
		},
		{
			name: "an open file of a GPU of which an instance goes, and of one that stays",
			pods: []corev1.Pod{pod("a", withUID(podUID)), idle}, assigned: holders.Assignments{},
			processes: []process{{pid: 99, command: "python", cgroup: containerd, files: []string{"/dev/nvidia1", "/dev/nvidia2"}}},
		},
		{
			name: "all of them", pods: []corev1.Pod{pod("a", withUID(podUID), container(limits(gpu, 1))), idle}, assigned: given("a", gpu, "GPU-0::3"),
			processes: []process{
				{pid: 99, command: "python", cgroup: containerd, files: []string{"/dev/nvidia0"}},
				{pid: 100, command: "python", cgroup: containerd, files: []string{"/dev/nvidia0"}},
			},
			gpu:  []int{99},
			want: "team/a has GPU-0: pod spec, kubelet, NVML pid 99 python, device file /dev/nvidia0 of pid 99 python, device file /dev/nvidia0 of pid 100 python\n",
		},
		{
			name: "kubelet and NVML disagree: the pod has both",
			pods: []corev1.Pod{pod("a", withUID(podUID), container(limits(mig1g, 1))), idle}, assigned: given("a", mig1g, "MIG-7"), gpu: []int{99},
			processes: []process{{pid: 99, command: "python", cgroup: containerd}},
			want:      "team/a has GPU-0 MIG-7: pod spec, kubelet, NVML pid 99 python\n",
		},
		{
			name: "kubelet does not answer, and NVML names one device",
			pods: []corev1.Pod{pod("a", withUID(podUID), container(limits(mig1g, 1))), idle}, gpu: []int{99},
			processes: []process{{pid: 99, command: "python", cgroup: containerd}},
			want:      "team/a has GPU-0 and any other: pod spec, NVML pid 99 python\n",
		},
		{
			name: "a static pod", pods: []corev1.Pod{pod("a", static), idle}, assigned: holders.Assignments{}, gpu: []int{99},
			processes: []process{{pid: 99, command: "python", cgroup: "0::/kubepods/burstable/pod" + hash + "/" + id + "\n"}},
			want:      "team/a has GPU-0: NVML pid 99 python\n",
		},
		{
			name: "a pod of CRI-O", pods: []corev1.Pod{pod("a", withUID(podUID)), idle}, assigned: holders.Assignments{}, gpu: []int{99},
			processes: []process{{pid: 99, command: "python", cgroup: kubepods + "crio-" + id + ".scope/container\n"}},
			want:      "team/a has GPU-0: NVML pid 99 python\n",
		},
		{
			name: "a pod without a cgroup, by its container",
			pods: []corev1.Pod{pod("a", runs("cri-o://"+id)), idle}, assigned: holders.Assignments{}, gpu: []int{99},
			processes: []process{{pid: 99, command: "python", cgroup: "0::/system.slice/crio-" + id + ".scope\n"}},
			want:      "team/a has GPU-0: NVML pid 99 python\n",
		},
		{
			name: "a pod that has ended, with a process that has not",
			pods: []corev1.Pod{pod("a", withUID(podUID), container(limits(gpu, 1)), phase(corev1.PodFailed))}, assigned: given("a", gpu, "GPU-5"),
			processes: []process{{pid: 99, command: "python", cgroup: containerd}}, gpu: []int{99},
			want: "team/a has GPU-0: NVML pid 99 python\n",
		},
		{
			name: "pods that the API server does not list", pods: []corev1.Pod{idle}, assigned: given("a", gpu, "GPU-0"), gpu: []int{99, 98},
			processes: []process{
				{pid: 99, command: "python", cgroup: containerd},
				{pid: 98, command: "python", cgroup: "0::/kubepods/pod00000000-1111-2222-3333-444444444444/" + other + "\n"},
			},
			want: "pod with UID 00000000-1111-2222-3333-444444444444 has GPU-0, unlisted: NVML pid 98 python\n" +
				"pod with UID " + podUID + " has GPU-0, unlisted: NVML pid 99 python\n" +
				"team/a has GPU-0, unlisted: kubelet\n",
		},
		{
			name: "processes of no pod", pods: []corev1.Pod{idle}, assigned: holders.Assignments{}, gpu: []int{901, 902},
			processes: []process{
				{pid: 812, command: "nvidia-persiste", cgroup: "0::/system.slice/nvidia-persistenced.service\n", files: []string{"/dev/nvidia0"}},
				{pid: 901, command: "python", cgroup: "0::/system.slice/docker-" + id + ".scope\n"},
				{pid: 902, command: "python", cgroup: "0::/\n"},
			},
			want: "no pod: pid 812 nvidia-persiste of nvidia-persistenced.service has GPU-0: device file /dev/nvidia0\n" +
				"no pod: pid 901 python (container 3f2a9c51d0e7) has GPU-0: NVML\n" +
				"no pod: pid 902 python has GPU-0: NVML\n",
		},
		{
			name: "a process that ends in the meantime", pods: []corev1.Pod{pod("a", withUID(podUID))}, assigned: holders.Assignments{}, gpu: []int{98},
			processes: []process{{pid: 99, command: "python", cgroup: containerd, files: []string{"/dev/nvidia0"}}},
			spoil: func(t *testing.T, root string) {
				t.Helper()
				replace(t, filepath.Join(root, "99/comm"), func(path string) error { return os.Symlink("nowhere", path) })
			},
			want: "no pod: pid 98 (reported by NVML, not in the process table) has GPU-0: NVML\n",
		},
		{
			name: "an open file that cannot be read", assigned: holders.Assignments{}, gpu: []int{99},
			pods: []corev1.Pod{pod("a", withUID(podUID))},
			processes: []process{
				{pid: 99, command: "python", cgroup: containerd},
				{pid: 100, command: "python", files: []string{"/dev/null"}},
			},
			spoil: func(t *testing.T, root string) {
				t.Helper()
				replace(t, filepath.Join(root, "100/fd/0"), asFile)
			},
			want: "team/a has GPU-0: NVML pid 99 python\n" +
				"busy: looking for processes that hold /dev/nvidia0 or MIG-1: readlink /proc/100/fd/0: invalid argument\n",
		},
		{
			name: "the agent itself", pods: []corev1.Pod{pod("a", withUID(podUID))}, assigned: holders.Assignments{}, gpu: []int{agentPID},
			spoil: agentIn(containerd),
		},
		{
			name: "what a person runs in the agent's pod", pods: []corev1.Pod{pod("a", withUID(podUID))}, assigned: holders.Assignments{},
			processes: []process{{pid: 99, command: "gpuslice-agent", cgroup: containerd, files: []string{"/dev/nvidia0"}}},
			spoil:     agentIn(containerd),
			want:      "no pod: pid 99 gpuslice-agent of pod team/a has GPU-0: device file /dev/nvidia0\n",
		},
		{
			name: "what a person runs in the agent's pod, where pods have no cgroups",
			pods: []corev1.Pod{pod("a", runs("containerd://"+id))}, assigned: holders.Assignments{},
			processes: []process{{pid: 99, command: "gpuslice-agent", cgroup: "0::/system.slice/cri-containerd-" + id + ".scope\n", files: []string{"/dev/nvidia0"}}},
			spoil:     agentIn("0::/system.slice/cri-containerd-" + id + ".scope\n"),
			want:      "no pod: pid 99 gpuslice-agent of pod team/a has GPU-0: device file /dev/nvidia0\n",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			table := processTable(t, c.processes...)
			if c.spoil != nil {
				c.spoil(t, table.Root)
			}
			sought := []holders.Sought{
				{Device: "GPU-0", Minor: 0, Reported: c.gpu},
				{Device: "MIG-1", Minor: holders.NoFiles, Reported: c.mig},
			}
			if diff := cmp.Diff(c.want, union(t, table, sought, c.pods, c.assigned)); diff != "" {
				t.Errorf("the union (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDrainableIsWhateverAnAPIRequestMovesAway(t *testing.T) {
	pod := func(name string, change func(*corev1.Pod)) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}}
		change(&p)
		return p
	}
	owned := func(kind string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: kind, Name: "o", Controller: ptr.To(true)}}
		}
	}
	var names []string
	for _, p := range holders.Drainable([]corev1.Pod{
		pod("alone", func(*corev1.Pod) {}),
		pod("of-a-deployment", owned("ReplicaSet")),
		pod("of-a-daemonset", owned("DaemonSet")),
		pod("static", func(p *corev1.Pod) { mirror(p, "hash") }),
		pod("ended", func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }),
		pod("leaving", func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }),
	}) {
		names = append(names, p.Name)
	}
	if diff := cmp.Diff([]string{"alone", "of-a-deployment", "leaving"}, names); diff != "" {
		t.Errorf("pods (-want +got):\n%s", diff)
	}
}

// mirror makes the pod the image of a static pod, as kubelet does.
func mirror(p *corev1.Pod, hash string) {
	p.Annotations = map[string]string{"kubernetes.io/config.hash": hash, corev1.MirrorPodAnnotationKey: hash}
	p.Spec.NodeName = "gpu-1"
	p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "gpu-1", UID: "node-uid", Controller: ptr.To(true)}}
}

// By the scheduler's rules, the fence's taint keeps a pod away that tolerates another value of it.
func TestATolerationIsForTheTaintWithItsValue(t *testing.T) {
	const key = "gpuslice.io/repartitioning"
	for _, row := range []struct {
		toleration corev1.Toleration
		value      string // of the taint
		want       bool
	}{
		{corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists}, "", true},
		{corev1.Toleration{Operator: corev1.TolerationOpExists}, "any", true},
		{corev1.Toleration{Key: key}, "", true},
		{corev1.Toleration{Key: key, Value: "other"}, "", false},
		{corev1.Toleration{Key: key, Operator: corev1.TolerationOpEqual, Value: "mine"}, "mine", true},
		{corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}, "", false},
		{corev1.Toleration{Key: key, Operator: corev1.TolerationOpGt, Value: "1"}, "2", true},
		{corev1.Toleration{Key: key, Operator: "Like", Value: "2"}, "2", false},
		{corev1.Toleration{Key: "example.com/other", Operator: corev1.TolerationOpExists}, "", false},
	} {
		taint := corev1.Taint{Key: key, Value: row.value, Effect: corev1.TaintEffectNoSchedule}
		if got := holders.Tolerates([]corev1.Toleration{row.toleration}, taint); got != row.want {
			t.Errorf("%+v tolerates %s: %t", row.toleration, taint.ToString(), got)
		}
	}
}
