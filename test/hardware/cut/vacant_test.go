package cut_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
	"github.com/gpuslice/gpuslice/test/hardware/cut"
)

// answers is a kubelet.
type answers struct {
	podresources.UnimplementedPodResourcesListerServer
	given      []*podresources.ContainerDevices // to one pod
	claimed    string                           // device of a claim of it, as driver/device
	advertised []*podresources.ContainerDevices
}

func (a *answers) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	c := &podresources.ContainerResources{Devices: a.given}
	if driver, device, ok := strings.Cut(a.claimed, "/"); ok {
		c.DynamicResources = []*podresources.DynamicResource{{ClaimName: "mine", ClaimResources: []*podresources.ClaimResource{{
			DriverName: driver, PoolName: "node", DeviceName: device,
		}}}}
	}
	return &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{{
		Namespace: "team", Name: "trainer", Containers: []*podresources.ContainerResources{c},
	}}}, nil
}

func (a *answers) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	return &podresources.AllocatableResourcesResponse{Devices: a.advertised}, nil
}

func (a *answers) serve(t *testing.T, socket string) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, a)
	go func() { _ = server.Serve(listener) }() // which Stop ends
	t.Cleanup(server.Stop)
}

func devices(ids ...string) []*podresources.ContainerDevices {
	return []*podresources.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: ids}}
}

// situation is a machine with two GPUs, of which the first is chosen.
type situation struct {
	*testing.T
	node    *gpusim.Node
	table   *pods.Table
	kubelet *answers // nil for none
	silent  bool     // kubelet's socket is there, and no one answers
	chosen  []nvml.UUID
	driver  nvml.Driver
}

func (s *situation) uuid(index int) string { return s.node.UUIDs()[index] }

func TestAGPUIsCutOnlyIfNothingUsesItAndAllOfItCanBeRestored(t *testing.T) {
	const twoH100, divided = "gpus: [{model: H100-80GB, count: 2}]", "gpus: [{model: H100-80GB, count: 2, mig: true}]"
	for _, c := range []struct {
		name, spec string
		do         func(*situation)
		want       []string // in the error; none if it may be cut
	}{
		{"nothing uses it", twoH100, nil, nil},
		{"it is divided, and no one uses the instances", divided, func(s *situation) { s.instance(0, "3g.40gb@4") }, nil},
		{"another GPU is used", divided, func(s *situation) {
			s.instance(1, "3g.40gb@4")
			other := s.node.MIGDevice(1, 4)
			must(s.T, s.node.Hold(other, 4711, "python", 1), s.table.Add(pods.Process{PID: 4711, Command: "python", Cgroup: "/", Files: []string{"/dev/nvidia1"}}))
			s.kubelet = &answers{given: devices(other), advertised: devices(other, s.uuid(1), s.uuid(1)+"::3"), claimed: "compute-domain.nvidia.com/channel-0"}
		}, nil},
		{"NVIDIA's persistence daemon has it open", twoH100, func(s *situation) {
			must(s.T, s.table.Add(pods.Process{PID: 812, Command: "nvidia-persistenced", Cgroup: "/", Files: []string{"/dev/nvidia0"}}))
		}, nil},

		{"it is not there", twoH100, func(s *situation) { s.chosen = []nvml.UUID{"GPU-\x1bother"} }, []string{`this machine has no GPU-`, "name one of GPU-"}},
		{"it is named twice", twoH100, func(s *situation) { s.chosen = append(s.chosen, s.chosen[0]) }, []string{"is named twice: name each GPU once"}},
		{"two models", "gpus: [{model: H100-80GB}, {model: H200}]", func(s *situation) {
			s.chosen = append(s.chosen, nvml.UUID(s.uuid(1)))
		}, []string{"GPU 1 is NVIDIA H200, and GPU 0 is NVIDIA H100 80GB HBM3: cut one model at a time"}},
		{"it has no MIG mode", "gpus: [{model: T4}]", nil, []string{"GPU 0", "has no MIG mode: name another"}},
		{"its driver has no place for an instance", "gpus: [{model: A30}]", func(s *situation) {
			s.driver = unplaced{s.driver, []string{"1g.6gb", "1g.6gb+me", "2g.12gb", "2g.12gb+me", "4g.24gb"}}
		}, []string{"GPU 0", "has no place for an instance of any profile: name another"}},
		{"it is lost", twoH100, func(s *situation) {
			must(s.T, s.node.SetHealth(0, gpusim.Health{Lost: true}))
		}, []string{"has fallen off the bus"}},
		{"its host divides it", "gpus: [{model: H100-80GB, virtual: host-vgpu}]", nil, []string{"GPU 0", "is shared with virtual machines (host-vgpu)"}},
		{"a mode is pending", "gpus: [{model: A100-80GB, passthrough: true}]", func(s *situation) {
			must(s.T, s.node.Driver().SetMode(s.Context(), nvml.UUID(s.uuid(0)), true))
		}, []string{"GPU 0", "has a change of MIG mode pending: reset it or reboot first"}},
		{"a process computes on it", twoH100, func(s *situation) {
			must(s.T, s.node.Hold(s.uuid(0), 4711, "python", 1))
		}, []string{"GPU 0", "is used by process 4711: end it"}},
		{"a process computes on an instance of it", divided, func(s *situation) {
			s.instance(0, "3g.40gb@4")
			must(s.T, s.node.Hold(s.node.MIGDevice(0, 4), 4711, "python", 1))
		}, []string{"GPU 0", "is used by process 4711: end it"}},
		{"an instance is half made", divided, func(s *situation) {
			must(s.T, s.node.Fail(gpusim.CreateComputeInstance, gpusim.Fault{Return: gpusim.Unknown}), s.node.Fail(gpusim.GpuInstanceDestroy, gpusim.Fault{Return: gpusim.Unknown}))
			d := s.node.Driver()
			all, err := d.Snapshot(s.Context())
			must(s.T, err)
			if d.Create(s.Context(), all[0].UUID, placed(s.T, all[0], "3g.40gb@4")) == nil {
				s.Fatal("it is made")
			}
		}, []string{"GPU 0", "has 3g.40gb@4 without a compute instance", "destroy it, or complete it"}},
		{"a process has it open", twoH100, func(s *situation) {
			must(s.T, s.table.Add(pods.Process{PID: 99, Command: "nv-hostengine", Cgroup: "/", Files: []string{"/dev/nvidia0"}}))
		}, []string{"GPU 0", "is open in pid 99 nv-hostengine: it monitors every GPU for DCGM: stop nvidia-dcgm.service"}},
		{"NVIDIA's DRA driver runs, which has no GPU open", twoH100, func(s *situation) {
			must(s.T, s.table.Add(pods.Process{PID: 77, Command: "gpu-kubelet-plugin", Cgroup: "/"}))
		}, []string{"process 77, gpu-kubelet-plu, advertises or divides the GPUs of this machine: stop it"}},
		{"NVIDIA's device plugin runs", twoH100, func(s *situation) {
			must(s.T, s.table.Add(pods.Process{PID: 78, Command: "nvidia-device-plugin", Cgroup: "/"}))
		}, []string{"process 78, nvidia-device-p, advertises"}},
		{
			"the process table cannot be read", twoH100, func(s *situation) { must(s.T, os.RemoveAll(s.table.Dir())) },
			[]string{"looking for programs", "a process that this program cannot see may use a GPU"},
		},
		{
			"kubelet advertises it", twoH100, func(s *situation) { s.kubelet = &answers{advertised: devices(s.uuid(0))} },
			[]string{"GPU 0", "is advertised by kubelet: stop the device plugin"},
		},
		{
			"kubelet advertises something unknown", twoH100, func(s *situation) { s.kubelet = &answers{advertised: devices("0")} },
			[]string{"is advertised by kubelet"},
		},
		{
			"a pod has a share of it", twoH100, func(s *situation) { s.kubelet = &answers{given: devices(s.uuid(0) + "::2")} },
			[]string{"GPU 0", "is given to pod team/trainer: delete it"},
		},
		{"a pod has an instance of it", divided, func(s *situation) {
			s.instance(0, "3g.40gb@4")
			s.kubelet = &answers{given: devices(s.node.MIGDevice(0, 4))}
		}, []string{"is given to pod team/trainer"}},
		{
			"a pod has a claim of some GPU", twoH100, func(s *situation) { s.kubelet = &answers{claimed: "gpu.nvidia.com/gpu-1"} },
			[]string{"is given to pod team/trainer"},
		},
		{"kubelet does not answer", twoH100, func(s *situation) { s.silent = true }, []string{"kubelet may have given a GPU to a pod; stop it"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := gpusimtest.Node(t, c.spec)
			table, err := pods.MakeTable(filepath.Join(t.TempDir(), "proc"), n.BootID())
			must(t, err)
			s := &situation{T: t, node: n, table: table, chosen: []nvml.UUID{nvml.UUID(n.UUIDs()[0])}, driver: n.Driver()}
			_, err = s.driver.Snapshot(t.Context()) // so that it knows the UUID of a GPU that is lost
			must(t, err)
			if c.do != nil {
				c.do(s)
			}
			t.Chdir(t.TempDir()) // the path of a socket is short
			const socket = "kubelet.sock"
			if s.kubelet != nil {
				s.kubelet.serve(t, socket)
			} else if s.silent {
				must(t, os.WriteFile(socket, nil, 0o600))
			}
			all, err := s.driver.Snapshot(t.Context())
			must(t, err)
			gpus, err := cut.Machine{Processes: table.Dir(), Kubelet: socket}.Vacant(t.Context(), all, s.chosen)
			if len(c.want) == 0 {
				if err != nil || len(gpus) != len(s.chosen) {
					t.Errorf("it is not cut: %v", err)
				}
				return
			}
			if err == nil {
				t.Fatal("it is cut")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\x1b") {
					t.Errorf("error %q, want %q", err, want)
				}
			}
		})
	}
}

func (s *situation) instance(index int, text string) {
	s.Helper()
	all, err := s.node.Driver().Snapshot(s.Context())
	must(s.T, err)
	must(s.T, s.node.Driver().Create(s.Context(), all[index].UUID, placed(s.T, all[index], text)))
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}
