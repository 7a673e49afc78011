package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// cut is how a GPU is cut, without places.
type cut struct {
	MIG     bool
	Pending bool           // a change of the mode is asked for and has not happened
	Devices map[string]int // count by profile
}

func (c cut) equal(d cut) bool {
	return c.MIG == d.MIG && c.Pending == d.Pending && maps.Equal(c.Devices, d.Devices)
}

func cuts(gpus []nvml.GPU) []cut {
	out := make([]cut, len(gpus))
	for i, gpu := range gpus {
		out[i] = cut{MIG: gpu.Enabled, Pending: gpu.Enabled != gpu.Pending, Devices: map[string]int{}}
		for _, placed := range gpu.Geometry() {
			for _, device := range placed.Devices() {
				out[i].Devices[device]++
			}
		}
	}
	return out
}

// prepare cuts the GPUs as the scenario begins.
func prepare(ctx context.Context, node *gpusim.Node, start []map[string]int) error {
	gpus, err := node.Outside().Snapshot(ctx)
	if err != nil {
		return fmt.Errorf("preparing the GPUs: %w", err)
	}
	for i, gpu := range gpus {
		if len(start[i]) == 0 {
			continue
		}
		solution, err := nvml.Solve(gpu, start[i])
		if err != nil {
			return fmt.Errorf("preparing GPU %d: %w", i, err)
		}
		for _, placed := range solution.Create {
			if err := node.Outside().Create(ctx, gpu.UUID, placed); err != nil {
				return fmt.Errorf("preparing GPU %d: %w", i, err)
			}
		}
	}
	return nil
}

// firstPID is above what Linux gives to real processes.
const firstPID = 5_000_000

// hold gives instances to processes where there are no pods to do so: the first ones of each profile.
func hold(ctx context.Context, node *gpusim.Node, users map[string]int) error {
	gpus, err := node.Outside().Snapshot(ctx)
	if err != nil {
		return fmt.Errorf("giving instances to processes: %w", err)
	}
	pid, held := firstPID, map[string]int{}
	for _, gpu := range gpus {
		for _, instance := range gpu.Instances {
			if held[instance.Profile] == users[instance.Profile] {
				continue
			}
			held[instance.Profile]++
			pid++
			if err := node.Hold(instance.Devices[0].UUID, pid, "user", 512); err != nil {
				return fmt.Errorf("giving instances to processes: %w", err)
			}
		}
	}
	return nil
}

// capacity is what a node with these GPUs advertises when the device plugin's MIG strategy is mixed.
func capacity(gpus []nvml.GPU) map[string]int {
	out := map[string]int{}
	for _, gpu := range gpus {
		if !gpu.Enabled {
			out["nvidia.com/gpu"]++
			continue
		}
		for _, instance := range gpu.Instances {
			for _, device := range instance.Devices {
				out["nvidia.com/mig-"+strings.ReplaceAll(device.Profile, "+", ".")]++
			}
		}
	}
	return out
}

// devices are those that NVIDIA's DRA driver advertises of these GPUs, by UUID.
func devices(gpus []nvml.GPU) map[string]int {
	out := map[string]int{}
	for _, gpu := range gpus {
		if !gpu.Enabled {
			out[string(gpu.UUID)]++
		}
		for _, instance := range gpu.Instances {
			for _, device := range instance.Devices {
				out[device.UUID]++
			}
		}
	}
	return out
}

// gone counts the former MIG devices that no longer exist: those that were in use and those that were idle, separately.
func gone(before, after []nvml.GPU) (used, idle int) {
	left := map[string]bool{}
	for _, gpu := range after {
		for _, instance := range gpu.Instances {
			for _, device := range instance.Devices {
				left[device.UUID] = true
			}
		}
	}
	for _, gpu := range before {
		for _, instance := range gpu.Instances {
			lost := slices.ContainsFunc(instance.Devices, func(d nvml.Device) bool { return !left[d.UUID] })
			switch {
			case !lost:
			case len(instance.Processes) > 0:
				used++
			default:
				idle++
			}
		}
	}
	return used, idle
}
