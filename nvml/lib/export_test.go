package lib

import nv "github.com/NVIDIA/go-nvml/pkg/nvml"

// DeriveName is deriveName for the tests, which have no driver that keeps the names of its profiles to itself.
func DeriveName(kind, slices int, memoryMB, total uint64) (string, error) {
	info := nv.GpuInstanceProfileInfo{SliceCount: uint32(slices), MemorySizeMB: memoryMB}
	return deriveName(kind, info, total)
}
