package metrics

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// Bounds of one node's series in a cluster. Both are above what hardware and NVIDIA's device plugin can have: 16 GPUs with seven instances each, and
// a resource for each size.
const (
	mostInstances = 256
	mostResources = 64
	mostShares    = 1024 // devices of pods: 8 GPUs that a hundred pods share
	longestLabel  = 128  // characters of a label's value
)

// lastShares is how long what pods have is still reported while no pass observes all of the node, as while GPUs are reset: at rest a pass comes as rarely.
const lastShares = 5 * time.Minute

// observation is what the last pass has seen of the node.
type observation struct {
	label, name, fingerprint string // of the request; no name without one
	instances                []instance
	capacity                 []devices
	room                     room
	shares                   shares
	at                       time.Time
}

// instance is one MIG device.
type instance struct {
	gpu, device, id, profile, resource string
}

// devices counts the devices of one resource: by the hardware, by kubelet, and by the node object.
type devices struct {
	resource                       string
	expected, kubelet, allocatable int
}

var (
	descFenced        = Desc(config.MetricNodeFenced)
	descRequest       = Desc(config.MetricRequestInfo)
	descInstances     = Desc(config.MetricInstances)
	descInstance      = Desc(config.MetricInstanceInfo)
	descExpected      = Desc(config.MetricCapacityExpected)
	descKubelet       = Desc(config.MetricCapacityKubelet)
	descAllocatable   = Desc(config.MetricCapacityAllocatable)
	descPossible      = Desc(config.MetricPossibleDevices)
	descFragmentation = Desc(config.MetricGPUFragmentation)
	descShare         = Desc(config.MetricGPUShare)
	descPodShare      = Desc(config.MetricPodGPUShare)
)

// observationDescs are the metrics of the last observation.
var observationDescs = []*prometheus.Desc{
	descFenced, descRequest, descInstances, descInstance, descExpected, descKubelet, descAllocatable, descPossible, descFragmentation, descShare, descPodShare,
}

// Observed notes what a pass has observed, and, if that is complete, the desired state.
func (m *Metrics) Observed(seen *state.Observed, want state.Desired) {
	// It is known even if the driver does not answer. A fence may be a cordon alone.
	fenced := seen.Marks.Fenced || seen.Journal != nil && seen.Journal.Cordoned && seen.Node.Spec.Unschedulable
	now := m.clock.Now()
	m.mu.Lock()
	m.fenced = &fenced
	if m.observed != nil && !seen.Complete && now.Sub(m.observed.at) > lastShares {
		m.observed.shares = shares{}
	}
	m.mu.Unlock()
	if !seen.Complete {
		return
	}
	l := observation{label: want.Label, name: sanitize.Cut(want.Name, longestLabel), fingerprint: want.Fingerprint, at: now}
	offers := offer.Of(seen)
	given := offers.Offered()
	expected := capacity.Expected(seen.GPUs, seen.Capacity.Strategy).NamedBy(given)
	l.instances = instancesOf(seen.GPUs, expected)
	if holdings, known := holdingsOf(seen); known {
		l.room, l.shares = roomOf(seen, holdings), sharesOf(seen, holdings, expected, given)
	}
	if sharing := want.Plugin.SharingKnown(); sharing != nil {
		expected = capacity.Shared(expected, *sharing)
	}
	if offers.Known() {
		l.capacity = capacityOf(expected, given, offers.Allocatable)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.observed = &l
}

func instancesOf(gpus []nvml.GPU, expected capacity.Resources) []instance {
	resource := map[string]string{}
	for name, ids := range expected {
		for _, id := range ids {
			resource[id] = name
		}
	}
	var out []instance
	for _, gpu := range gpus {
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				out = append(out, instance{gpu: string(gpu.UUID), device: d.UUID, id: strconv.Itoa(i.ID), profile: d.Profile, resource: resource[d.UUID]})
			}
		}
	}
	return out[:min(len(out), mostInstances)]
}

// capacityOf counts the resources that the hardware has or kubelet advertises. Other resources on the node object are no GPUs.
func capacityOf(expected, kubelet capacity.Resources, allocatable func(name string) int) []devices {
	names := map[string]bool{}
	for _, of := range []capacity.Resources{expected, kubelet} {
		for name := range of {
			if nvml.GPUResource(name) {
				names[name] = true
			}
		}
	}
	var out []devices
	for _, name := range slices.Sorted(maps.Keys(names)) {
		out = append(out, devices{
			resource: name, expected: len(expected[name]), kubelet: len(kubelet[name]), allocatable: allocatable(name),
		})
	}
	return out[:min(len(out), mostResources)]
}

// collect writes the observation as metrics.
func (o *observation) collect(gauge func(d *prometheus.Desc, value float64, labels ...string)) {
	if o == nil {
		return
	}
	if o.name != "" {
		gauge(descRequest, 1, o.label, o.name, o.fingerprint)
	}
	count := map[[2]string]map[string]bool{} // ids of the instances, by GPU and profile
	for _, i := range o.instances {
		gauge(descInstance, 1, i.gpu, i.device, i.id, i.profile, i.resource)
		key := [2]string{i.gpu, i.profile}
		if count[key] == nil {
			count[key] = map[string]bool{}
		}
		count[key][i.id] = true
	}
	for key, ids := range count {
		gauge(descInstances, float64(len(ids)), key[0], key[1])
	}
	o.room.collect(gauge)
	o.shares.collect(gauge)
	for _, c := range o.capacity {
		gauge(descExpected, float64(c.expected), c.resource)
		gauge(descKubelet, float64(c.kubelet), c.resource)
		gauge(descAllocatable, float64(c.allocatable), c.resource)
	}
}
