package monitor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// ownersTimeout bounds the search for the pods with processes on the GPUs.
const ownersTimeout = 5 * time.Second

// Device is a GPU that is not cut, or one instance of a GPU that is. Pods on the same device are not isolated from each other.
type Device struct {
	ID    string    // UUID of the GPU, or of the instance's first MIG device
	GPU   nvml.UUID // that it is, or belongs to
	Index int       // of the GPU
	GI    int       // the driver's number of the instance, or nvml.WholeGPU

	Placed    nvml.Placed // of the instance
	TotalMiB  int
	UsedMiB   int // memory in use by all processes; -1 if the driver does not say
	Processes []nvml.Process

	uuids []string // by which kubelet allocates it
}

// Devices lists the devices that pods may have, in the order of the GPUs. It omits lost GPUs and half-made instances.
func Devices(gpus []nvml.GPU) []Device {
	var out []Device
	for _, g := range gpus {
		switch {
		case g.Lost:
		case !g.Enabled:
			out = append(out, Device{
				ID: string(g.UUID), GPU: g.UUID, Index: g.Index, GI: nvml.WholeGPU, TotalMiB: g.MemoryMiB, UsedMiB: g.UsedMiB, Processes: g.Processes,
				uuids: []string{string(g.UUID)},
			})
		default:
			for _, i := range g.Instances {
				if i.HalfMade() {
					continue
				}
				p, _ := g.Profile(i.Profile)
				d := Device{
					ID: i.Devices[0].UUID, GPU: g.UUID, Index: g.Index, GI: i.ID, Placed: i.Placed, TotalMiB: p.MemoryMiB, UsedMiB: i.UsedMiB,
					Processes: i.Processes,
				}
				for _, part := range i.Devices {
					d.uuids = append(d.uuids, part.UUID)
				}
				out = append(out, d)
			}
		}
	}
	return out
}

// IsWhole reports whether it is a GPU that is not cut.
func (d Device) IsWhole() bool { return d.GI == nvml.WholeGPU }

// Instance is the profile and the place of the instance, "1g.10gb@2"; empty for a GPU.
func (d Device) Instance() string {
	if d.IsWhole() {
		return ""
	}
	return d.Placed.String()
}

// Name returns the device's name in messages, with the UUID of the GPU.
func (d Device) Name() string {
	if d.IsWhole() {
		return fmt.Sprintf("GPU %d (%s)", d.Index, d.GPU)
	}
	return fmt.Sprintf("%s of GPU %d (%s)", d.Placed, d.Index, d.GPU)
}

// Holders returns the pods that have the device, or any part of the instance, by kubelet's report.
func (d Device) Holders(pods []holders.Pod) []holders.Pod {
	var out []holders.Pod
	for _, p := range pods {
		if p.UID != "" && slices.ContainsFunc(p.Devices, func(uuid string) bool { return slices.Contains(d.uuids, uuid) }) {
			out = append(out, p)
		}
	}
	return out
}

// Processes are the host's processes.
type Processes interface {
	// Holders finds the processes that have a device.
	Holders(ctx context.Context, sought []holders.Sought) ([]holders.Client, error)
}

// OwnerFinder finds the pods of processes.
type OwnerFinder struct {
	Processes Processes
	// ComputesForOthers reports whether the pod's processes on a GPU belong to a server for other pods.
	ComputesForOthers func(pod *corev1.Pod) bool
	Log               *zap.Logger
}

// Owners returns, by pid, the pods of the processes that the driver reports on each device. It omits processes of no pod, and of servers for
// other pods. Without a process table that shows them it returns none.
func (o OwnerFinder) Owners(ctx context.Context, reported map[string][]int, pods []corev1.Pod) map[int]*corev1.Pod {
	var sought []holders.Sought
	for _, device := range slices.Sorted(maps.Keys(reported)) {
		sought = append(sought, holders.Sought{Device: device, Minor: holders.NoFiles, Reported: reported[device]})
	}
	call, cancel := context.WithTimeout(ctx, ownersTimeout)
	defer cancel()
	clients, err := o.Processes.Holders(call, sought)
	if err != nil {
		o.Log.Debug("cannot map GPU processes to pods", zap.Error(err))
	}
	owners := holders.PodsOf(clients, pods)
	maps.DeleteFunc(owners, func(_ int, pod *corev1.Pod) bool { return o.ComputesForOthers(pod) })
	return owners
}
