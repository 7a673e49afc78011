package metrics

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// shares are the parts of the GPUs that pods have, and that they do not have. They are zero if the agent does not know what pods have.
type shares struct {
	gpus []share
	pods map[podShare]float64
}

// share is how one GPU is divided; the three parts are 1 together.
type share struct {
	gpu, model       string
	used, idle, lost float64
}

// podShare is what one pod has: the labels of its series.
type podShare struct {
	namespace, pod, gpu, model, device, resource string
}

// sharesOf divides each GPU among the pods that have it. Expected are the devices of the GPUs, and given those that pods can get.
func sharesOf(seen *state.Observed, holdings []decide.Holding, expected, given capacity.Resources) shares {
	d := divider{
		assigned: seen.Kubelet.Assigned, replicas: replicasOf(given), resources: map[string]string{}, held: map[decide.Place]bool{},
		on: map[decide.Place][]holders.Pod{}, pods: map[podShare]float64{},
	}
	for name, ids := range expected {
		for _, id := range ids {
			d.resources[id] = name
		}
	}
	for _, h := range holdings {
		for _, place := range h.On {
			d.held[place] = true
			d.on[place] = append(d.on[place], h.Pod)
		}
	}
	out := shares{pods: d.pods}
	for _, gpu := range seen.GPUs {
		out.gpus = append(out.gpus, d.divide(gpu))
	}
	return out
}

// divider divides the GPUs of a node.
type divider struct {
	assigned  holders.Assignments
	replicas  map[string]map[string]int // how often a device is offered, by resource and device; by the empty one as often as any of the resource
	resources map[string]string         // of the devices that the GPUs have
	held      map[decide.Place]bool
	on        map[decide.Place][]holders.Pod
	pods      map[podShare]float64
}

func replicasOf(given capacity.Resources) map[string]map[string]int {
	out := map[string]map[string]int{}
	for resource, ids := range given {
		n := map[string]int{}
		for _, id := range ids {
			device := capacity.DeviceOf(id)
			n[device]++
			n[""] = max(n[""], n[device])
		}
		out[resource] = n
	}
	return out
}

// divide counts memory slices, since no two instances share one, and by them the driver places instances. It does not count compute slices: a 1g.20gb
// has one of seven, and keeps two memory slices from the others.
func (d divider) divide(gpu nvml.GPU) share {
	// A lost GPU may have no UUID.
	out := share{gpu: cmp.Or(string(gpu.UUID), fmt.Sprintf("gpu-%d", gpu.Index)), model: sanitize.Cut(gpu.Model, longestLabel)}
	all := max(1, gpu.MemorySlices())
	left := all
	cut := withHeld(gpu, d.held)
	if gpu.Lost {
		cut.Instances = nil
	}
	for _, i := range cut.Instances {
		left -= i.Size
		d.giveParts(&out, i, float64(i.Size)/float64(all), d.on[decide.Place{GPU: gpu.Index, Start: i.Start}])
	}
	whole := d.on[decide.Place{GPU: gpu.Index, Start: nvml.WholeGPU}]
	switch free := 0; {
	case len(whole) > 0:
		d.give(&out, string(gpu.UUID), float64(left)/float64(all), whole)
	case gpu.Lost:
		out.lost = float64(left) / float64(all)
	default:
		free = left
		if len(cut.Instances) > 0 { // else the GPU can be given as a whole
			largest, _ := cut.Largest()
			free = min(cut.FreeSlices(), sizeOf(largest))
		}
		out.idle += float64(free) / float64(all)
		out.lost += float64(left-free) / float64(all)
	}
	return out
}

// giveParts divides the part of the GPU that an instance is among its devices, by their compute slices: they have its memory together.
func (d divider) giveParts(out *share, i nvml.Instance, part float64, pods []holders.Pod) {
	compute := 0
	for _, device := range i.Devices {
		compute += device.Part.Size
	}
	for _, device := range i.Devices {
		of := 1 / float64(len(i.Devices))
		if compute > 0 {
			of = float64(device.Part.Size) / float64(compute)
		}
		d.give(out, device.UUID, part*of, having(pods, device.UUID, i))
	}
	if i.HalfMade() {
		d.give(out, "", part, pods)
	}
}

// having returns the pods that have the device of an instance. A pod that has the instance by a claim which names the GPU has each of its devices.
func having(pods []holders.Pod, device string, i nvml.Instance) (out []holders.Pod) {
	for _, p := range pods {
		ofInstance := slices.ContainsFunc(i.Devices, func(d nvml.Device) bool { return slices.Contains(p.Devices, d.UUID) })
		if !ofInstance || slices.Contains(p.Devices, device) {
			out = append(out, p)
		}
	}
	return out
}

// give divides the part of the GPU that a device is among the pods that have it. What none has of a shared device is idle.
func (d divider) give(out *share, device string, part float64, pods []holders.Pod) {
	type taken struct {
		by       podShare
		replicas int
	}
	var all []taken
	replicas, total := 1, 0
	for _, p := range pods {
		resource, ids := d.replicasFor(p, device)
		t := taken{podShare{p.Namespace, cmp.Or(p.Name, string(p.UID)), out.gpu, out.model, device, resource}, max(1, len(ids))}
		all = append(all, t)
		total += t.replicas
		replicas = max(replicas, d.replicas[resource][device], replicasAtLeast(ids))
		if len(ids) > 0 && d.replicas[resource][device] == 0 { // the device is kept from pods
			replicas = max(replicas, d.replicas[resource][""])
		}
	}
	replicas = max(replicas, total)
	for _, t := range all {
		d.pods[t.by] += part * float64(t.replicas) / float64(replicas)
	}
	out.used += part * float64(total) / float64(replicas)
	out.idle += part * float64(replicas-total) / float64(replicas)
}

// replicasFor returns the ids of the device that kubelet has given to the pod, and their resource.
func (d divider) replicasFor(p holders.Pod, device string) (resource string, ids []string) {
	given := d.assigned[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}]
	for _, name := range slices.Sorted(maps.Keys(given)) {
		for _, id := range given[name] {
			if nvml.GPUResource(name) && capacity.DeviceOf(id) == device {
				resource, ids = name, append(ids, id)
			}
		}
	}
	return cmp.Or(resource, d.resources[device], nvml.ResourceGPU), ids
}

// replicasAtLeast is how many replicas a device has by the numbers of some.
func replicasAtLeast(ids []string) (n int) {
	for _, id := range ids {
		if _, number, is := strings.Cut(id, nvml.ReplicaSeparator); is {
			if i, err := strconv.ParseUint(number, 10, 16); err == nil {
				n = max(n, int(i)+1)
			}
		}
	}
	return n
}

// collect writes the shares as metrics.
func (s shares) collect(gauge func(d *prometheus.Desc, value float64, labels ...string)) {
	for _, g := range s.gpus {
		gauge(descShare, g.used, g.gpu, g.model, "used")
		gauge(descShare, g.idle, g.gpu, g.model, "idle")
		gauge(descShare, g.lost, g.gpu, g.model, "lost")
	}
	all := slices.SortedFunc(maps.Keys(s.pods), func(a, b podShare) int { return slices.Compare(a.labels(), b.labels()) })
	for _, p := range all[:min(len(all), mostShares)] {
		gauge(descPodShare, s.pods[p], p.labels()...)
	}
}

func (p podShare) labels() []string {
	return []string{p.namespace, p.pod, p.gpu, p.model, p.device, p.resource}
}
