package main

import "C"

import (
	"unsafe"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Levels of nvmlGpuTopologyLevel_t.
const (
	topologyInternal = 0  // the same board
	topologySystem   = 50 // the processors' interconnect is between the two
)

// The simulated GPUs hang on one root port each and have no NVLink: NVIDIA's device plugin, which asks for both when it
// is to choose among several GPUs, finds all choices alike.

//export nvmlDeviceGetTopologyCommonAncestor
func nvmlDeviceGetTopologyCommonAncestor(one, other, to unsafe.Pointer) int32 {
	return on(one, func(a gpusim.Device) gpusim.Return {
		return gpusim.Return(on(other, func(b gpusim.Device) gpusim.Return {
			if _, r := lib().PCI(b); r != gpusim.Success {
				return r
			}
			_, r := lib().PCI(a)
			if a == b {
				return put(to, uint32(topologyInternal), r)
			}
			return put(to, uint32(topologySystem), r)
		}))
	})
}

//export nvmlDeviceGetNvLinkState
func nvmlDeviceGetNvLinkState(device unsafe.Pointer, link uint32, active unsafe.Pointer) int32 {
	_, _ = link, active // cgo wants each parameter to have a name
	return on(device, func(d gpusim.Device) gpusim.Return {
		if _, r := lib().PCI(d); r != gpusim.Success {
			return r
		}
		return gpusim.NotSupported
	})
}
