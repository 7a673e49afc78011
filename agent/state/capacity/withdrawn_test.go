package capacity_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/nvml"
)

// Promise 19. A pod keeps what it was given under a former config of the device plugin. Kubelet compares names, so it gives the same device to
// another pod under another name.
func TestADeviceIsGivenOutAgainUnderAnotherId(t *testing.T) {
	gpus := []nvml.GPU{
		{UUID: "GPU-a"},
		{UUID: "GPU-c", Enabled: true, Instances: []nvml.Instance{{Devices: []nvml.Device{{UUID: "MIG-m"}}}, {Devices: []nvml.Device{{UUID: "MIG-n"}}}}},
	}
	for name, row := range map[string]struct{ kubelet, resource, id, as string }{
		"as before":                                  {"gpu: GPU-a", "gpu", "GPU-a", ""},
		"a replica as before":                        {"gpu: GPU-a::0 GPU-a::1", "gpu", "GPU-a::1", ""},
		"fewer replicas":                             {"gpu: GPU-a::0 GPU-a::1", "gpu", "GPU-a::2", "gpu x 2"},
		"no replicas":                                {"gpu: GPU-a", "gpu", "GPU-a::0", "gpu"},
		"replicas of a whole GPU":                    {"gpu: GPU-a::0 GPU-a::1", "gpu", "GPU-a", "gpu x 2"},
		"another name":                               {"gpu.shared: GPU-a::0 GPU-a::1", "gpu", "GPU-a::0", "gpu.shared x 2"},
		"the former name":                            {"gpu: GPU-a", "gpu.shared", "GPU-a::0", "gpu"},
		"a MIG device as a GPU":                      {"gpu: MIG-m MIG-n", "mig-1g.10gb", "MIG-m", "gpu"},
		"a MIG device by its profile":                {"mig-1g.10gb: MIG-m MIG-n", "gpu", "MIG-m", "mig-1g.10gb"},
		"replicas of a MIG device":                   {"mig-1g.10gb: MIG-m::0 MIG-m::1", "mig-1g.10gb", "MIG-m", "mig-1g.10gb x 2"},
		"the GPU of a MIG device":                    {"gpu: GPU-a GPU-c", "mig-1g.10gb", "MIG-m", "gpu"},
		"a MIG device of a GPU":                      {"mig-1g.10gb: MIG-m MIG-n", "gpu", "GPU-c", "mig-1g.10gb x 2"},
		"a plugin that offers nothing yet":           {"", "gpu.shared", "GPU-a::0", ""},
		"a plugin that offers other GPUs so far":     {"gpu: GPU-a", "gpu", "GPU-b", ""},
		"a plugin that offers other instances yet":   {"mig-1g.10gb: MIG-n", "mig-1g.10gb", "MIG-m", ""},
		"a resource that is none of GPUs":            {"gpu: GPU-a", "hostdev", "GPU-a", ""},
		"a GPU given out as what is none of GPUs":    {"hostdev: GPU-a", "gpu", "GPU-a", ""},
		"an id of a plugin that is none of NVIDIA's": {"gpu: GPU-a-0 GPU-a-1", "gpu", "GPU-a-2", ""},
	} {
		as := row.as
		if as != "" {
			as = "nvidia.com/" + as
		}
		if got := capacity.GivenBy(gpus, resources(row.kubelet)).Again("nvidia.com/"+row.resource, row.id); got != as {
			t.Errorf("%s: kubelet gives it out as %q, want %q", name, got, as)
		}
	}
}
