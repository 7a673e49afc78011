package kubelet

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// allocate gives the pod's containers the devices they request, or none and an error in kubelet's words. A container
// keeps the devices that it already has while they are healthy.
func (t *deviceTable) allocate(ctx context.Context, pod *corev1.Pod) error {
	t.admission.Lock()
	defer t.admission.Unlock()
	if err := t.allocateAll(ctx, pod); err != nil {
		t.free(pod.UID)
		return fmt.Errorf("Allocate failed due to %w, which is unexpected", err) //nolint:staticcheck // kubelet's own words
	}
	return nil
}

func (t *deviceTable) allocateAll(ctx context.Context, pod *corev1.Pod) error {
	for _, c := range pod.Spec.InitContainers {
		if c.RestartPolicy != nil || slices.ContainsFunc(resourceNames(c.Resources.Limits), t.isManaged) {
			return fmt.Errorf("init container %s: this kubelet knows those that end, and that have no devices", c.Name)
		}
	}
	for _, c := range pod.Spec.Containers {
		for _, name := range resourceNames(c.Resources.Limits) {
			needed := int(c.Resources.Limits.Name(corev1.ResourceName(name), "").Value())
			if needed == 0 || byClaim(pod, c.Name, name) || !t.isManaged(name) {
				continue
			}
			ids, by, err := t.choose(ctx, pod.UID, c.Name, name, needed)
			if err != nil {
				return err
			}
			if by == nil {
				continue // it has them already
			}
			if err := t.take(ctx, pod, c.Name, by, ids); err != nil {
				return err
			}
		}
	}
	return nil
}

func resourceNames(list corev1.ResourceList) []string {
	var names []string
	for name := range list {
		names = append(names, string(name))
	}
	slices.Sort(names)
	return names
}

// isManaged reports whether a device plugin has registered the resource, or has given devices of it to some pod.
func (t *deviceTable) isManaged(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.resources[name] != nil || t.inUse(name).Len() > 0
}

// startable reports a resource of the container that kubelet has forgotten, because its plugin has been gone too long.
// A container that runs on its devices continues, but does not start again.
func (t *deviceTable) startable(pod *corev1.Pod, c *corev1.Container) error {
	for _, name := range resourceNames(c.Resources.Limits) {
		if c.Resources.Limits.Name(corev1.ResourceName(name), "").IsZero() || byClaim(pod, c.Name, name) || !t.isManaged(name) {
			continue
		}
		t.mu.Lock()
		known := t.resources[name] != nil
		t.mu.Unlock()
		if !known {
			return fmt.Errorf("endpoint not found in cache for a registered resource: %s", name)
		}
	}
	return nil
}

// choose picks the devices for a container and the plugin that allocates them; no plugin if the container has them already.
func (t *deviceTable) choose(ctx context.Context, pod types.UID, container, name string, needed int) ([]string, *plugin, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.resources[name]
	if r == nil {
		return nil, nil, fmt.Errorf("cannot allocate unregistered device %s", name)
	}
	if r.healthy.Len() == 0 {
		return nil, nil, fmt.Errorf("no healthy devices present; cannot allocate unhealthy devices %s", name)
	}
	if had := t.idsOf(pod, container, name); len(had) > 0 {
		if !r.healthy.HasAll(had...) {
			return nil, nil, fmt.Errorf("previously allocated devices are no longer healthy; cannot allocate unhealthy devices %s", name)
		}
		return nil, nil, nil
	}
	if len(r.plugins) == 0 {
		return nil, nil, fmt.Errorf("unknown Device Plugin %s", name)
	}
	by := r.plugins[len(r.plugins)-1]
	free := r.healthy.Difference(t.inUse(name))
	if free.Len() < needed {
		return nil, nil, fmt.Errorf("requested number of devices unavailable for %s. Requested: %d, Available: %d", name, needed, free.Len())
	}
	t.mu.Unlock() // the plugin may take its time; t.admission keeps others from these devices
	preferred, err := by.prefer(ctx, sets.List(free), needed)
	t.mu.Lock()
	if err != nil {
		return nil, nil, err
	}
	var chosen []string
	for _, id := range append(preferred, sets.List(free)...) {
		if len(chosen) == needed {
			break
		}
		if free.Has(id) {
			chosen = append(chosen, id)
			free.Delete(id)
		}
	}
	return chosen, by, nil
}

// prefer asks the plugin which devices it would take, if it supports that.
func (p *plugin) prefer(ctx context.Context, available []string, size int) ([]string, error) {
	if !p.options.GetGetPreferredAllocationAvailable() {
		return nil, nil
	}
	answer, err := p.client.GetPreferredAllocation(ctx, &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: available, AllocationSize: int32(size),
		}},
	})
	if err != nil {
		return nil, fmt.Errorf("device plugin GetPreferredAllocation rpc failed with err: %w", err)
	}
	if len(answer.ContainerResponses) == 0 {
		return nil, nil
	}
	return answer.ContainerResponses[0].DeviceIDs, nil
}

// take has the plugin allocate the devices and records them.
func (t *deviceTable) take(ctx context.Context, pod *corev1.Pod, container string, by *plugin, ids []string) error {
	answer, err := by.client.Allocate(ctx, &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return err
	}
	if len(answer.ContainerResponses) == 0 {
		return errors.New("no containers return in allocation response")
	}
	given := &containerIDs{IDs: ids, NUMA: map[string][]int64{}, Envs: answer.ContainerResponses[0].Envs}
	for _, m := range answer.ContainerResponses[0].Mounts {
		given.Mounts = append(given.Mounts, hostMount{Host: m.HostPath, Container: m.ContainerPath})
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.resources[by.resource]; r != nil {
		for _, id := range ids {
			if numa, known := numaOf(r.devices[id]); known {
				given.NUMA[id] = numa
			}
		}
	}
	record := t.pods[pod.UID]
	if record == nil {
		record = &podDevices{Namespace: pod.Namespace, Name: pod.Name, Containers: map[string]map[string]*containerIDs{}}
		t.pods[pod.UID] = record
	}
	if record.Containers[container] == nil {
		record.Containers[container] = map[string]*containerIDs{}
	}
	record.Containers[container][by.resource] = given
	t.log.Info("devices allocated", zap.String("pod", pod.Namespace+"/"+pod.Name), zap.String("resource", by.resource), zap.Strings("devices", ids))
	return t.save()
}

// numaOf lists the NUMA nodes of a device; false if its plugin reported no topology.
func numaOf(d *v1beta1.Device) ([]int64, bool) {
	if d.GetTopology() == nil {
		return nil, false
	}
	nodes := []int64{}
	for _, n := range d.Topology.Nodes {
		nodes = append(nodes, n.ID)
	}
	return nodes, true
}

// inUse are the devices of a resource that pods have. The caller holds t.mu.
func (t *deviceTable) inUse(name string) sets.Set[string] {
	used := sets.New[string]()
	for _, pod := range t.pods {
		for _, resources := range pod.Containers {
			if c := resources[name]; c != nil {
				used.Insert(c.IDs...)
			}
		}
	}
	return used
}

// idsOf are the devices of a container. The caller holds t.mu.
func (t *deviceTable) idsOf(pod types.UID, container, name string) []string {
	record := t.pods[pod]
	if record == nil || record.Containers[container][name] == nil {
		return nil
	}
	return record.Containers[container][name].IDs
}

// free releases the pod's devices and returns their ids.
func (t *deviceTable) free(pod types.UID) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	record := t.pods[pod]
	if record == nil {
		return nil
	}
	delete(t.pods, pod)
	if err := t.save(); err != nil {
		t.log.Error("devices are not on record", zap.Error(err))
	}
	return record.all()
}

// idsOfPod lists the devices of all containers of a pod.
func (t *deviceTable) idsOfPod(pod types.UID) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pods[pod] == nil {
		return nil
	}
	return t.pods[pod].all()
}

// given is what device plugins gave a container, by resource.
func (t *deviceTable) given(pod types.UID, container string) map[string]*containerIDs {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pods[pod] == nil {
		return nil
	}
	return t.pods[pod].Containers[container]
}

// owners are the pods on record, as far as the record knows them.
func (t *deviceTable) owners() []*corev1.Pod {
	t.mu.Lock()
	defer t.mu.Unlock()
	var pods []*corev1.Pod
	for uid, record := range t.pods {
		pods = append(pods, record.stub(uid))
	}
	return pods
}
