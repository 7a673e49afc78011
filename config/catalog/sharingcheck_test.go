package catalog_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// wayOut ends a refusal of a resource that the node will not have.
const wayOut = ": share that, or request a key without sharing by label, or both by a profile"

func TestCheckSharing(t *testing.T) {
	const gpu, small = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
	whole := func(major, minor int) nvml.GPU {
		g := h100()
		g.ComputeCapability, g.Virtualization = nvml.ComputeCapability{Major: major, Minor: minor}, nvml.NotVirtualized
		return g
	}
	with := func(g nvml.GPU, change func(*nvml.GPU)) nvml.GPU { change(&g); return g }
	mig := with(whole(9, 0), func(g *nvml.GPU) { g.Enabled = true })
	slicing := func(replicas int, names ...string) catalog.Sharing {
		s := catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{}}
		for _, n := range names {
			s.Replicas[n] = replicas
		}
		return s
	}
	mps := func(replicas int, names ...string) catalog.Sharing {
		s := slicing(replicas, names...)
		s.Strategy = catalog.SharingMPS
		return s
	}
	is := func(v nvml.Virtualization) nvml.GPU {
		return with(whole(9, 0), func(g *nvml.GPU) { g.Virtualization = v })
	}

	for name, tt := range map[string]struct {
		gpus     []nvml.GPU
		strategy config.MIGStrategy
		sharing  catalog.Sharing
		offered  []string
		want     string
		reason   config.Reason
	}{
		"none is always possible": {gpus: node(is(nvml.VirtualGPU)), sharing: catalog.Sharing{Strategy: catalog.SharingNone}},
		"time-slicing of GPUs": {
			gpus: node(whole(9, 0), whole(6, 0)), strategy: config.MIGStrategyNone, sharing: slicing(100, gpu), offered: []string{gpu},
		},
		"time-slicing of a GPU that is handed to a virtual machine": {
			gpus: node(is(nvml.PassedThrough)), strategy: config.MIGStrategyMixed, sharing: slicing(4, gpu), offered: []string{gpu},
		},
		"time-slicing of MIG devices and GPUs": {
			gpus: node(mig, whole(9, 0)), strategy: config.MIGStrategyMixed, sharing: slicing(2, gpu, small), offered: []string{gpu, small},
		},
		"time-slicing of MIG devices under their plain name": {
			gpus: node(mig), strategy: config.MIGStrategySingle, sharing: slicing(2, gpu), offered: []string{gpu},
		},
		"MPS up to the limit": {
			gpus: node(whole(9, 0), whole(7, 5)), strategy: config.MIGStrategySingle, sharing: mps(48, gpu), offered: []string{gpu},
		},
		"MPS up to the limit of old GPUs": {
			gpus: node(whole(7, 0)), strategy: config.MIGStrategyNone, sharing: mps(16, gpu), offered: []string{gpu},
		},
		"MPS over the limit": {
			gpus: node(whole(7, 5), whole(7, 0)), strategy: config.MIGStrategyNone, sharing: mps(49, gpu), offered: []string{gpu},
			want: "GPU 0 cannot be shared by 49 replicas through MPS, which has at most 48 clients on a NVIDIA H100 80GB HBM3: use 48 or fewer\n" +
				"GPU 1 cannot be shared by 49 replicas through MPS, which has at most 16 clients on a NVIDIA H100 80GB HBM3: use 16 or fewer",
			reason: config.ReasonImpossibleSharing,
		},
		"MPS with the strategy mixed": {
			gpus: node(whole(9, 0)), strategy: config.MIGStrategyMixed, sharing: mps(4, gpu), offered: []string{gpu},
			want: "MPS does not go with the MIG strategy mixed: the device plugin exits; set the strategy to none or single, or share by time-slicing",

			reason: config.ReasonImpossibleSharing,
		},
		"MPS with a MIG device": {
			gpus: node(whole(9, 0), mig), strategy: config.MIGStrategySingle, sharing: mps(4, gpu), offered: []string{gpu},
			want: "GPU 1 is in MIG mode, and MPS does not share MIG devices: share by time-slicing, or turn MIG mode off",

			reason: config.ReasonImpossibleSharing,
		},
		"GPUs in MIG mode as whole ones": {
			gpus: node(mig, whole(9, 0)), strategy: config.MIGStrategyNone, sharing: slicing(2, gpu), offered: []string{gpu},
			want: "GPU 0 is in MIG mode, and under the MIG strategy none it would be shared as a whole GPU that nothing can run on: " +
				"set the strategy to single or mixed, or turn MIG mode off",
			reason: config.ReasonImpossibleSharing,
		},
		"a vGPU": {
			gpus: node(is(nvml.VirtualGPU)), strategy: config.MIGStrategyNone, sharing: slicing(2, gpu), offered: []string{gpu},
			want: "GPU 0 is a vGPU, for one workload at a time: it cannot be shared by time-slicing; request no sharing on this node",

			reason: config.ReasonVirtualGPU,
		},
		"a GPU of virtual machines": {
			gpus: node(is(nvml.HostOfVirtualGPUs)), strategy: config.MIGStrategyNone, sharing: slicing(2, gpu), offered: []string{gpu},
			want:   "GPU 0 is lent to virtual machines by this host: no container computes on it; request no sharing on this node",
			reason: config.ReasonVirtualGPU,
		},
		"a resource that the node will not have": {
			gpus: node(mig), strategy: config.MIGStrategyMixed, sharing: slicing(2, "nvidia.com/mig-1g.5gb", small), offered: []string{"nvidia.com/mig-3g.40gb", small},
			want: "nvidia.com/mig-1g.5gb is to be shared, but the node will not have it: under the MIG strategy mixed it will have " +
				"nvidia.com/mig-1g.10gb, nvidia.com/mig-3g.40gb" + wayOut,
			reason: config.ReasonImpossibleSharing,
		},
		"a MIG resource under the strategy single": {
			gpus: node(mig), strategy: config.MIGStrategySingle, sharing: slicing(2, small), offered: []string{gpu},
			want:   small + " is to be shared, but the node will not have it: under the MIG strategy single it will have nvidia.com/gpu" + wayOut,
			reason: config.ReasonImpossibleSharing,
		},
		"on a node without a GPU": {
			strategy: config.MIGStrategySingle, sharing: slicing(2, gpu),
			want:   "nvidia.com/gpu is to be shared, but the node will not have it: under the MIG strategy single it will have no GPU resource" + wayOut,
			reason: config.ReasonImpossibleSharing,
		},
		"more replicas than kubelet takes in one message": {
			gpus: node(whole(9, 0), whole(9, 0)), strategy: config.MIGStrategyNone, sharing: slicing(40000, gpu), offered: []string{gpu},
			want: "nvidia.com/gpu cannot have 40000 replicas of each of 2 devices: kubelet takes the ids of all replicas of a resource in one message of 4 MiB, " +
				"with room for 60000; use 30000 or fewer",
			reason: config.ReasonImpossibleSharing,
		},
		"a lost GPU is not asked": {
			gpus:     node(with(is(nvml.VirtualGPU), func(g *nvml.GPU) { g.Lost, g.Enabled = true, true }), whole(9, 0)),
			strategy: config.MIGStrategyNone, sharing: mps(48, gpu), offered: []string{gpu},
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := catalog.CheckSharing(tt.gpus, tt.strategy, tt.sharing, tt.offered)
			got := ""
			var wrong *catalog.SharingError
			if errors.As(err, &wrong) {
				got = err.Error()
				if wrong.Reason() != tt.reason {
					t.Errorf("reason is %s, want %s", wrong.Reason(), tt.reason)
				}
			} else if err != nil {
				t.Fatalf("%v is no *SharingError", err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
		})
	}
}
