package holders_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// cgroups is what /proc/PID/cgroup says on real systems, in the order of the runtimes and drivers that write it.
var cgroups = []struct {
	name string
	text string
	want holders.Owner
}{
	// Kubelet's systemd driver with containerd (SystemdCgroup = true), cgroup v2: the default of kubeadm, GKE and EKS.
	{
		"containerd, systemd, v2, burstable",
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + inSlice + ".slice/cri-containerd-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"containerd, systemd, v2, besteffort",
		"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + inSlice + ".slice/cri-containerd-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"containerd, systemd, v2, guaranteed",
		"0::/kubepods.slice/kubepods-pod" + inSlice + ".slice/cri-containerd-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	// A static pod's UID is the MD5 of its manifest: kubelet, pkg/kubelet/config.
	{
		"containerd, systemd, v2, a static pod",
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + hash + ".slice/cri-containerd-" + id + ".scope\n",
		holders.Owner{PodUID: hash, Container: id},
	},
	// CRI-O with conmon; crun puts processes in a cgroup "container" below the scope when it delegates.
	{
		"CRI-O, systemd, v2",
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + inSlice + ".slice/crio-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"CRI-O with crun, systemd, v2",
		"0::/kubepods.slice/kubepods-pod" + inSlice + ".slice/crio-" + id + ".scope/container\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"CRI-O's conmon in the pod's slice",
		"0::/kubepods.slice/kubepods-pod" + inSlice + ".slice/crio-conmon-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"CRI-O, systemd, v2, a static pod",
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + hash + ".slice/crio-" + id + ".scope\n",
		holders.Owner{PodUID: hash, Container: id},
	},
	// cri-dockerd with Docker's systemd driver.
	{
		"cri-dockerd, systemd, v2",
		"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + inSlice + ".slice/docker-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	// Kubelet's cgroupfs driver: k3s, microk8s, minikube, and kubelet's own default.
	{"cgroupfs, v2, burstable", "0::/kubepods/burstable/pod" + podUID + "/" + id + "\n", holders.Owner{PodUID: podUID, Container: id}},
	{"cgroupfs, v2, guaranteed", "0::/kubepods/pod" + podUID + "/" + id + "\n", holders.Owner{PodUID: podUID, Container: id}},
	{"CRI-O, cgroupfs, v2", "0::/kubepods/besteffort/pod" + podUID + "/crio-" + id + "\n", holders.Owner{PodUID: podUID, Container: id}},
	{"CRI-O's conmon, cgroupfs, v2", "0::/kubepods/pod" + podUID + "/crio-conmon-" + id + "\n", holders.Owner{PodUID: podUID, Container: id}},
	{"cgroupfs, v2, a static pod", "0::/kubepods/burstable/pod" + hash + "/" + id + "\n", holders.Owner{PodUID: hash, Container: id}},
	{"cgroupfs, v2, a static pod with a UID of its own", "0::/kubepods/besteffort/podmy-uid/" + id + "\n", holders.Owner{PodUID: "my-uid", Container: id}},
	{"cgroupfs below another root (cgroupRoot: /node-b)", "0::/node-b/kubepods/besteffort/pod" + podUID + "/" + id + "\n", holders.Owner{PodUID: podUID, Container: id}},
	{"a process in a pod and in no container of it", "0::/kubepods/besteffort/pod" + podUID + "\n", holders.Owner{PodUID: podUID}},
	// Kubelet's systemd driver over containerd's cgroupfs driver: a frequent misconfiguration.
	{
		"containerd with the other driver than kubelet, v2",
		"0::/system.slice/containerd.service/kubepods-burstable-pod" + inSlice + ".slice:cri-containerd:" + id + "\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"containerd with the other driver than kubelet, v1",
		"5:devices:/kubepods-besteffort-pod" + inSlice + ".slice:cri-containerd:" + id + "\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	// cgroup v1: a line for each hierarchy.
	{
		"cgroupfs, v1",
		"12:memory:/kubepods/burstable/pod" + podUID + "/" + id + "\n" +
			"11:cpu,cpuacct:/kubepods/burstable/pod" + podUID + "/" + id + "\n" +
			"1:name=systemd:/kubepods/burstable/pod" + podUID + "/" + id + "\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"CRI-O, cgroupfs, v1",
		"4:devices:/kubepods/burstable/pod" + podUID + "/crio-" + id + "\n1:name=systemd:/kubepods/burstable/pod" + podUID + "/crio-" + id + "\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"containerd, systemd, v1",
		"11:devices:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + inSlice + ".slice/cri-containerd-" + id + ".scope\n" +
			"1:name=systemd:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + inSlice + ".slice/cri-containerd-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	// Ubuntu 20.04: the unified hierarchy is mounted beside v1, and runc leaves the process in containerd's unit there.
	{
		"cgroupfs, v1 with an unused v2",
		"0::/system.slice/containerd.service\n12:rdma:/\n11:cpuset:/kubepods/pod" + podUID + "/" + id + "\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"CRI-O, systemd, v1, where one hierarchy has the pod alone",
		"12:pids:/kubepods.slice/kubepods-pod" + inSlice + ".slice\n" +
			"1:name=systemd:/kubepods.slice/kubepods-pod" + inSlice + ".slice/crio-" + id + ".scope\n0::/\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	// kind: the node is a container, and kubelet's cgroupRoot is /kubelet (older) or kubelet.slice.
	{
		"kind, seen from its node",
		"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod" + inSlice + ".slice/cri-containerd-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"kind, seen from the machine",
		"0::/system.slice/docker-" + other + ".scope/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + inSlice + ".slice/cri-containerd-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"kind of old with cgroupfs, seen from the machine", "9:memory:/docker/" + other + "/kubelet/kubepods/besteffort/pod" + podUID + "/" + id + "\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	// Containers and systemd inside a pod: what the cluster knows is the pod and its own container.
	{
		"docker in a pod", "0::/kubepods/burstable/pod" + podUID + "/" + id + "/docker/" + other + "\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"systemd in a pod",
		"0::/kubepods.slice/kubepods-pod" + inSlice + ".slice/cri-containerd-" + id + ".scope/system.slice/dbus.service\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	// The agent in a cgroup namespace, as containerd and CRI-O make on v2: paths begin at the agent's own container.
	{
		"another QoS class, from a namespace, systemd",
		"0::/../../../kubepods-besteffort.slice/kubepods-besteffort-pod" + inSlice + ".slice/cri-containerd-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{
		"the same QoS class, from a namespace, systemd", "0::/../../kubepods-burstable-pod" + inSlice + ".slice/crio-" + id + ".scope\n",
		holders.Owner{PodUID: podUID, Container: id},
	},
	{"the same QoS class, from a namespace, cgroupfs", "0::/../../pod" + podUID + "/" + id + "\n", holders.Owner{PodUID: podUID, Container: id}},
	{"a static pod of the same QoS class, from a namespace, cgroupfs", "0::/../../pod" + hash + "/" + id + "\n", holders.Owner{PodUID: hash, Container: id}},
	{"a static pod, from a namespace, cgroupfs", "0::/../../../burstable/pod" + hash + "/" + id + "\n", holders.Owner{PodUID: hash, Container: id}},
	{"the agent's own pod, from a namespace", "0::/../cri-containerd-" + id + ".scope\n", holders.Owner{Container: id}},
	{"the agent's own container, from a namespace", "0::/\n", holders.Owner{}},
	{"a unit, from a namespace", "0::/../../../../system.slice/nvidia-persistenced.service\n", holders.Owner{Unit: "nvidia-persistenced.service"}},
	{"the host's root, from a namespace", "0::/../../../..\n", holders.Owner{}},
	// Containers without kubelet.
	{"docker, systemd, v2", "0::/system.slice/docker-" + id + ".scope\n", holders.Owner{Container: id}},
	{"docker, cgroupfs, v1", "4:memory:/docker/" + id + "\n0::/system.slice/containerd.service\n", holders.Owner{Container: id}},
	{"podman as root", "0::/machine.slice/libpod-" + id + ".scope/container\n", holders.Owner{Container: id}},
	{"podman as a user", "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + id + ".scope\n", holders.Owner{Container: id}},
	{"podman's own pod", "0::/machine.slice/machine-libpod_pod_" + other + ".slice/libpod-" + id + ".scope\n", holders.Owner{Container: id}},
	{"podman, cgroupfs", "0::/podman/x\n", holders.Owner{}},
	{"nerdctl, cgroupfs", "0::/default/" + id + "\n", holders.Owner{Container: id}},
	// Kubelet without cgroups of pods (cgroupsPerQOS: false), containerd's systemd driver.
	{"a pod without a cgroup", "0::/system.slice/cri-containerd-" + id + ".scope\n", holders.Owner{Container: id}},
	{"LXC", "0::/lxc.payload.gpu1/system.slice/nvidia-persistenced.service\n", holders.Owner{}},
	// systemd of the host.
	{"a unit, v2", "0::/system.slice/nvidia-persistenced.service\n", holders.Owner{Unit: "nvidia-persistenced.service"}},
	{
		"a unit, v1",
		"12:cpuset:/\n5:devices:/system.slice/nvidia-dcgm.service\n1:name=systemd:/system.slice/nvidia-dcgm.service\n0::/system.slice/nvidia-dcgm.service\n",
		holders.Owner{Unit: "nvidia-dcgm.service"},
	},
	{"an instance of a unit", `0::/system.slice/system-nvidia\x2dmon.slice/nvidia-mon@0.service` + "\n", holders.Owner{Unit: "nvidia-mon@0.service"}},
	{"a unit that divides its cgroup", "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n", holders.Owner{Unit: "slurmstepd.scope"}},
	{"containerd itself", "0::/system.slice/containerd.service\n", holders.Owner{Unit: "containerd.service"}},
	{"a login session", "0::/user.slice/user-1000.slice/session-3.scope\n", holders.Owner{Unit: "session-3.scope"}},
	{"an application of a desktop", "0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-gnome-blender-4711.scope\n", holders.Owner{Unit: "user@1000.service"}},
	{"a name that systemd escaped", "0::/system.slice/_cgroup.service\n", holders.Owner{Unit: "cgroup.service"}},
	{"process 1", "0::/init.scope\n", holders.Owner{Unit: "init.scope"}},
	{"a unit whose cgroup was removed", "0::/system.slice/nvidia-smi.service (deleted)\n", holders.Owner{Unit: "nvidia-smi.service"}},
	{"a container whose cgroup was removed", "0::/kubepods/pod" + podUID + "/" + id + " (deleted)\n", holders.Owner{PodUID: podUID, Container: id}},
	{"a slice alone", "0::/user.slice\n", holders.Owner{}},
	// Texts that ParseCgroup cannot read.
	{"nothing", "", holders.Owner{}},
	{"no end of line", "0::/system.slice/a.service", holders.Owner{Unit: "a.service"}},
	{"no path", "0:\n1:cpu\nnonsense\n", holders.Owner{}},
	{"a path with colons", "0::/system.slice/a:b.service\n", holders.Owner{Unit: "a:b.service"}},
}

func TestParseCgroup(t *testing.T) {
	for _, c := range cgroups {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, holders.ParseCgroup(c.text)); diff != "" {
				t.Errorf("ParseCgroup (-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzParseCgroup(f *testing.F) {
	for _, c := range cgroups {
		f.Add(c.text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got := holders.ParseCgroup(text)
		if got.Unit != "" && (got.PodUID != "" || got.Container != "") {
			t.Errorf("%+v is of a container and of a unit", got)
		}
		if strings.ContainsAny(string(got.PodUID)+got.Container+got.Unit, "/\n") {
			t.Errorf("%+v has parts of a path or another line", got)
		}
		if n := len(got.Container); n != 0 && n != len(id) {
			t.Errorf("container %q is no id", got.Container)
		}
		if more := holders.ParseCgroup("7:cpuset:/\n" + text); more != got {
			t.Errorf("with a line that says nothing, got %+v, want %+v as without", more, got)
		}
		// Every name that it reads is fit for a message.
		_ = holders.NameClients([]holders.Client{{PID: 1, Owner: got}}, nil)
	})
}
