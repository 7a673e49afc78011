package kubelet

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// podResources is the PodResources v1 service.
type podResources struct {
	podresourcesv1.UnimplementedPodResourcesListerServer
	devices *deviceTable
	pods    *podWatch
	lists   time.Time // when it begins to know its pods: before, a kubelet answers and lists none
	server  *grpc.Server
	serving sync.WaitGroup
}

func servePodResources(ctx context.Context, socket string, devices *deviceTable, pods *podWatch, delay time.Duration,
) (*podResources, error) {
	dir := filepath.Dir(socket)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("making the directory of PodResources: %w", err)
	}
	if err := removeSockets(dir); err != nil {
		return nil, err
	}
	listener, err := listenUnix(ctx, socket)
	if err != nil {
		return nil, err
	}
	p := &podResources{devices: devices, pods: pods, lists: devices.clock.Now().Add(delay), server: grpc.NewServer()}
	podresourcesv1.RegisterPodResourcesListerServer(p.server, p)
	p.serving.Go(func() { _ = p.server.Serve(listener) }) // its only end is stop
	return p, nil
}

func (p *podResources) stop() {
	p.server.Stop()
	p.serving.Wait()
}

// List reports which devices each active pod has. Pods without devices are listed too.
func (p *podResources) List(context.Context, *podresourcesv1.ListPodResourcesRequest) (*podresourcesv1.ListPodResourcesResponse, error) {
	answer := &podresourcesv1.ListPodResourcesResponse{}
	if p.devices.clock.Now().Before(p.lists) {
		return answer, nil
	}
	for _, pod := range p.pods.active() {
		answer.PodResources = append(answer.PodResources, p.of(pod))
	}
	return answer, nil
}

// GetAllocatableResources reports the healthy devices, whether or not a pod has them.
func (p *podResources) GetAllocatableResources(context.Context, *podresourcesv1.AllocatableResourcesRequest,
) (*podresourcesv1.AllocatableResourcesResponse, error) {
	t := p.devices
	t.mu.Lock()
	defer t.mu.Unlock()
	answer := &podresourcesv1.AllocatableResourcesResponse{}
	for _, name := range sets.List(sets.KeySet(t.resources)) {
		r := t.resources[name]
		for _, id := range sets.List(r.healthy) {
			numa, known := numaOf(r.devices[id])
			answer.Devices = append(answer.Devices, entries(name, id, numa, known)...)
		}
	}
	return answer, nil
}

func (p *podResources) of(pod *corev1.Pod) *podresourcesv1.PodResources {
	answer := &podresourcesv1.PodResources{Name: pod.Name, Namespace: pod.Namespace}
	for _, c := range pod.Spec.Containers {
		of := &podresourcesv1.ContainerResources{Name: c.Name, DynamicResources: p.pods.k.claims.dynamic(pod, &c)}
		given := p.devices.given(pod.UID, c.Name)
		for _, name := range sets.List(sets.KeySet(given)) {
			for _, id := range given[name].IDs {
				numa, known := given[name].NUMA[id]
				of.Devices = append(of.Devices, entries(name, id, numa, known)...)
			}
		}
		answer.Containers = append(answer.Containers, of)
	}
	return answer
}

// entries describes one device as kubelet does: an entry for each NUMA node, and none at all for an empty topology.
func entries(name, id string, numa []int64, known bool) []*podresourcesv1.ContainerDevices {
	if !known {
		return []*podresourcesv1.ContainerDevices{{ResourceName: name, DeviceIds: []string{id}}}
	}
	var all []*podresourcesv1.ContainerDevices
	for _, n := range numa {
		all = append(all, &podresourcesv1.ContainerDevices{
			ResourceName: name, DeviceIds: []string{id},
			Topology: &podresourcesv1.TopologyInfo{Nodes: []*podresourcesv1.NUMANode{{ID: n}}},
		})
	}
	return all
}
