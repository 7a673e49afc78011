package holders_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpuslice/gpuslice/drain/holders"
)

// lister is a kubelet that gives the answer of the test.
type lister struct {
	podresources.UnimplementedPodResourcesListerServer
	pods        []*podresources.PodResources
	allocatable []*podresources.ContainerDevices
	hang        chan struct{} // if set, List says here that it was called, and does not answer
}

func (l *lister) List(ctx context.Context, _ *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	if l.hang != nil {
		close(l.hang)
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &podresources.ListPodResourcesResponse{PodResources: l.pods}, nil
}

func (l *lister) GetAllocatableResources(context.Context, *podresources.AllocatableResourcesRequest) (*podresources.AllocatableResourcesResponse, error) {
	if l.allocatable == nil {
		return nil, status.Error(codes.Internal, "device manager is not ready")
	}
	return &podresources.AllocatableResourcesResponse{Devices: l.allocatable}, nil
}

// serve answers on the socket until the returned function is called, or the test ends.
func (l *lister) serve(t *testing.T, socket string) (stop func()) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(server, l)
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	stop = func() {
		server.Stop()
		if err, running := <-done; running && err != nil {
			t.Errorf("serving PodResources: %v", err)
		}
	}
	t.Cleanup(func() { server.Stop() })
	return stop
}

// socket is a path for a Unix socket, which must be short.
func socket(t *testing.T) string {
	t.Helper()
	t.Chdir(t.TempDir())
	return "kubelet.sock"
}

func dial(t *testing.T, path string) *holders.Kubelet {
	t.Helper()
	k := holders.DialKubelet(path)
	t.Cleanup(k.Close)
	return k
}

func devices(resource string, ids ...string) *podresources.ContainerDevices {
	return &podresources.ContainerDevices{ResourceName: resource, DeviceIds: ids}
}

func TestKubeletReportsWhichPodHasWhichDevice(t *testing.T) {
	at := socket(t)
	(&lister{pods: []*podresources.PodResources{
		{Namespace: "team", Name: "two-containers", Containers: []*podresources.ContainerResources{
			{Name: "a", Devices: []*podresources.ContainerDevices{devices(gpu, "GPU-2::1"), devices("example.com/nic", "eth1")}},
			{Name: "b", Devices: []*podresources.ContainerDevices{devices(gpu, "GPU-1"), devices(mig1g, "MIG-1")}},
		}},
		{Namespace: "team", Name: "restarted", Containers: []*podresources.ContainerResources{
			{Name: "init", Devices: []*podresources.ContainerDevices{devices(gpu, "GPU-3")}},
			{Name: "main", Devices: []*podresources.ContainerDevices{devices(gpu, "GPU-3")}},
		}},
		{Namespace: "team", Name: "cpu-only", Containers: []*podresources.ContainerResources{{Name: "a", CpuIds: []int64{1}}}},
		{Namespace: "team", Name: "claiming", Containers: []*podresources.ContainerResources{{
			Name: "a", DynamicResources: []*podresources.DynamicResource{
				{ClaimName: "mine-x7k2p", ClaimNamespace: "team", ClaimResources: []*podresources.ClaimResource{
					{DriverName: "gpu.nvidia.com", PoolName: "node-1", DeviceName: "gpu-0"},
					{DriverName: "gpu.nvidia.com", PoolName: "node-1", DeviceName: "gpu-1"},
					{DriverName: "dra.net", PoolName: "node-1", DeviceName: "eth1"},
				}},
				{ClaimName: "not-prepared", ClaimNamespace: "team"},
			},
		}}},
		{Namespace: "team", Name: "freed", Containers: []*podresources.ContainerResources{
			{Name: "a", Devices: []*podresources.ContainerDevices{devices(gpu)}},
		}},
	}}).serve(t, at)

	got, err := dial(t, at).Assignments(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := holders.Assignments{
		{Namespace: "team", Name: "two-containers"}: {gpu: {"GPU-1", "GPU-2::1"}, mig1g: {"MIG-1"}},
		{Namespace: "team", Name: "restarted"}:      {gpu: {"GPU-3"}},
		{Namespace: "team", Name: "claiming"}:       {"claim mine-x7k2p": {"dra.net/node-1/eth1", "gpu.nvidia.com/node-1/gpu-0", "gpu.nvidia.com/node-1/gpu-1"}, "claim not-prepared": nil},
		{Namespace: "team", Name: "cpu-only"}:       {},
		{Namespace: "team", Name: "freed"}:          {},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Assignments (-want +got):\n%s", diff)
	}
}

func TestKubeletWithNothingAssignedIsNotUnknown(t *testing.T) {
	at := socket(t)
	(&lister{}).serve(t, at)
	got, err := dial(t, at).Assignments(t.Context())
	if err != nil || got == nil || len(got) != 0 {
		t.Errorf("Assignments are %v, %v; want none, which is not nil", got, err)
	}
}

// A real kubelet does: test/e2e, TestAKubeletThatHasJustStartedListsNoPods.
func TestAnAnswerFromBeforeKubeletKnowsItsPodsIsDistinguishedFromOneThatNothingIsAssigned(t *testing.T) {
	at := func(phase corev1.PodPhase, leaving bool) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "a"}, Status: corev1.PodStatus{Phase: phase}}
		if leaving {
			p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
		}
		return p
	}
	one := holders.Assignments{{Namespace: "team", Name: "a"}: {}}
	for _, row := range []struct {
		name     string
		assigned holders.Assignments
		pods     []corev1.Pod
		want     bool
	}{
		{"a pod runs and none is listed", holders.Assignments{}, []corev1.Pod{at(corev1.PodPending, false), at(corev1.PodRunning, false)}, true},
		{"one is listed", one, []corev1.Pod{at(corev1.PodRunning, false)}, false},
		{"no pod runs", holders.Assignments{}, []corev1.Pod{at(corev1.PodPending, false), at(corev1.PodFailed, false)}, false},
		{"the only pod is about to go", holders.Assignments{}, []corev1.Pod{at(corev1.PodRunning, true)}, false},
		{"kubelet could not be asked", nil, []corev1.Pod{at(corev1.PodRunning, false)}, false},
	} {
		if got := row.assigned.Premature(row.pods); got != row.want {
			t.Errorf("%s: premature %v, want %v", row.name, got, row.want)
		}
	}
}

func TestKubeletReportsWhatCanBeAllocated(t *testing.T) {
	at := socket(t)
	(&lister{allocatable: []*podresources.ContainerDevices{
		devices(mig1g, "MIG-2"), devices("example.com/nic", "eth1"), devices(mig1g, "MIG-1"), devices(gpu, "GPU-1::1", "GPU-1::0"),
	}}).serve(t, at)
	got, err := dial(t, at).Allocatable(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string][]string{mig1g: {"MIG-1", "MIG-2"}, gpu: {"GPU-1::0", "GPU-1::1"}}, got); diff != "" {
		t.Errorf("Allocatable (-want +got):\n%s", diff)
	}
}

func TestKubeletThatRefusesIsNotUnavailable(t *testing.T) {
	at := socket(t)
	(&lister{}).serve(t, at)
	got, err := dial(t, at).Allocatable(t.Context())
	if got != nil || err == nil || errors.Is(err, holders.ErrKubeletUnavailable) || status.Code(err) != codes.Internal {
		t.Errorf("Allocatable is %v, %v; want kubelet's own error", got, err)
	}
}

func TestKubeletWithoutASocketIsUnavailable(t *testing.T) {
	k := dial(t, filepath.Join(t.TempDir(), "none"))
	if got, err := k.Assignments(t.Context()); got != nil || !errors.Is(err, holders.ErrKubeletUnavailable) {
		t.Errorf("Assignments are %v, %v; want ErrKubeletUnavailable", got, err)
	}
	if got, err := k.Allocatable(t.Context()); got != nil || !errors.Is(err, holders.ErrKubeletUnavailable) {
		t.Errorf("Allocatable is %v, %v; want ErrKubeletUnavailable", got, err)
	}
}

func TestKubeletThatHangsIsUnavailableWhenTheCallerHasWaitedEnough(t *testing.T) {
	at := socket(t)
	asked := make(chan struct{})
	(&lister{hang: asked}).serve(t, at)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if got, err := dial(t, at).Assignments(ctx); got != nil || !errors.Is(err, holders.ErrKubeletUnavailable) {
		t.Errorf("Assignments are %v, %v; want ErrKubeletUnavailable", got, err)
	}
}

func TestKubeletIsFoundAgainAtTheFirstCallAfterItsRestart(t *testing.T) {
	at := socket(t)
	stop := (&lister{}).serve(t, at)
	k := dial(t, at)
	if _, err := k.Assignments(t.Context()); err != nil {
		t.Fatal(err)
	}
	stop()
	for range 3 { // more failures, longer backoff, if it were left to gRPC
		if _, err := k.Assignments(t.Context()); !errors.Is(err, holders.ErrKubeletUnavailable) {
			t.Fatalf("error while kubelet is down is %v, want ErrKubeletUnavailable", err)
		}
	}
	(&lister{}).serve(t, at)
	if _, err := k.Assignments(t.Context()); err != nil {
		t.Errorf("the first call after the restart: %v", err)
	}
	k.Close()
	if _, err := k.Assignments(t.Context()); err != nil {
		t.Errorf("a call after Close: %v", err)
	}
}
