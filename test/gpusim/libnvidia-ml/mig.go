package main

import "C"

import (
	"fmt"
	"strings"
	"unsafe"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

//export nvmlDeviceGetMigMode
func nvmlDeviceGetMigMode(device, current, pending unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		now, next, r := lib().MIGMode(d)
		if r := put(current, bit(now), r); r != gpusim.Success {
			return r
		}
		return put(pending, bit(next), r)
	})
}

//export nvmlDeviceSetMigMode
func nvmlDeviceSetMigMode(device unsafe.Pointer, mode uint32, activation unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		if mode > 1 || activation == nil {
			return gpusim.InvalidArgument
		}
		a, r := lib().SetMIGMode(d, mode == 1)
		*(*int32)(activation) = int32(a)
		return r
	})
}

//export nvmlDeviceGetMaxMigDeviceCount
func nvmlDeviceGetMaxMigDeviceCount(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		n, r := lib().MaxMIGDevices(d)
		return put(to, uint32(n), r)
	})
}

//export nvmlDeviceGetMigDeviceHandleByIndex
func nvmlDeviceGetMigDeviceHandleByIndex(device unsafe.Pointer, index uint32, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		mig, r := lib().MIGDevice(d, int(index))
		return putHandle(to, mig, r)
	})
}

//export nvmlDeviceGetDeviceHandleFromMigDeviceHandle
func nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		parent, r := lib().Parent(d)
		return putHandle(to, parent, r)
	})
}

//export nvmlDeviceIsMigDeviceHandle
func nvmlDeviceIsMigDeviceHandle(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return { return put(to, bit(d.IsMIG()), gpusim.Success) })
}

//export nvmlDeviceGetGpuInstanceId
func nvmlDeviceGetGpuInstanceId(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		gi, _, r := lib().InstanceIDs(d)
		return put(to, instanceID(gi), r)
	})
}

//export nvmlDeviceGetComputeInstanceId
func nvmlDeviceGetComputeInstanceId(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		_, ci, r := lib().InstanceIDs(d)
		return put(to, instanceID(ci), r)
	})
}

// attributes is nvmlDeviceAttributes_t.
type attributes struct {
	sms                             uint32
	copies, decoders, encoders      uint32
	jpegs, ofas                     uint32
	gpuInstanceSlices, computeSlice uint32
	memoryMB                        uint64
}

//export nvmlDeviceGetAttributes_v2
func nvmlDeviceGetAttributes_v2(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		a, r := lib().Attributes(d)
		return put(to, attributes{
			sms: u32(a.SMs), copies: u32(a.Engines.Copy), decoders: u32(a.Engines.Decoder), encoders: u32(a.Engines.Encoder),
			jpegs: u32(a.Engines.JPEG), ofas: u32(a.Engines.OFA), gpuInstanceSlices: u32(a.Slices),
			computeSlice: u32(a.ComputeSlices), memoryMB: uint64(a.MemoryMB),
		}, r)
	})
}

//export nvmlDeviceGetAttributes
func nvmlDeviceGetAttributes(device, to unsafe.Pointer) int32 {
	return nvmlDeviceGetAttributes_v2(device, to)
}

func u32(n int) uint32 { return uint32(n) }

// profileInfo is nvmlGpuInstanceProfileInfo_t.
type profileInfo struct {
	id, p2p, slices, instances, sms             uint32
	copies, decoders, encoders, jpegs, opticals uint32
	memoryMB                                    uint64
}

// profileInfoV2 is nvmlGpuInstanceProfileInfo_v2_t.
type profileInfoV2 struct {
	version                                     uint32
	id, p2p, slices, instances, sms             uint32
	copies, decoders, encoders, jpegs, opticals uint32
	memoryMB                                    uint64
	name                                        [96]int8
}

// profileInfoV3 is nvmlGpuInstanceProfileInfo_v3_t.
type profileInfoV3 struct {
	version                                     uint32
	id, slices, instances, sms                  uint32
	copies, decoders, encoders, jpegs, opticals uint32
	memoryMB                                    uint64
	name                                        [96]int8
	capabilities                                uint32
}

//export nvmlDeviceGetGpuInstanceProfileInfo
func nvmlDeviceGetGpuInstanceProfileInfo(device unsafe.Pointer, kind uint32, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		p, r := lib().GPUInstanceProfile(d, int(kind))
		e := p.Engines
		return put(to, profileInfo{
			id: u32(p.ID), slices: u32(p.Slices), instances: u32(p.Count), sms: u32(p.SMs), copies: u32(e.Copy),
			decoders: u32(e.Decoder), encoders: u32(e.Encoder), jpegs: u32(e.JPEG), opticals: u32(e.OFA),
			memoryMB: uint64(p.MemoryMB),
		}, r)
	})
}

//export nvmlDeviceGetGpuInstanceProfileInfoV
func nvmlDeviceGetGpuInstanceProfileInfoV(device unsafe.Pointer, kind uint32, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		p, r := lib().GPUInstanceProfile(d, int(kind))
		return putProfile(to, p, r)
	})
}

//export nvmlDeviceGetGpuInstanceProfileInfoByIdV
func nvmlDeviceGetGpuInstanceProfileInfoByIdV(device unsafe.Pointer, id uint32, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		p, r := lib().GPUInstanceProfileByID(d, int(id))
		return putProfile(to, p, r)
	})
}

const graphicsCapability = 2 // NVML_GPU_INSTANCE_PROFILE_CAPS_GFX

func putProfile(to unsafe.Pointer, p gpusim.GPUInstanceProfile, r gpusim.Return) gpusim.Return {
	e := p.Engines
	// A real H200 overwrites the version with 0 in both. V3 has eight zero bytes instead of the name. Then follows a
	// name with the number of instances instead of slices, and no memory (driver 580).
	v3 := profileInfoV3{
		id: u32(p.ID), slices: u32(p.Slices), instances: u32(p.Count), sms: u32(p.SMs),
		copies: u32(e.Copy), decoders: u32(e.Decoder), encoders: u32(e.Encoder), jpegs: u32(e.JPEG), opticals: u32(e.OFA),
		memoryMB: uint64(p.MemoryMB),
	}
	suffix := ""
	if _, attributes, ok := strings.Cut(p.Name, "+"); ok {
		suffix = "+" + attributes
	}
	fill(v3.name[8:], fmt.Sprintf("MIG %dg.0gb%s", p.Count, suffix))
	if p.Graphics {
		v3.capabilities = graphicsCapability
	}
	if r := putVersioned(to, v3, 3, r); r != gpusim.VersionMismatch {
		return r
	}
	v2 := profileInfoV2{
		id: v3.id, slices: v3.slices, instances: v3.instances, sms: v3.sms,
		copies: v3.copies, decoders: v3.decoders, encoders: v3.encoders, jpegs: v3.jpegs, opticals: v3.opticals,
		memoryMB: v3.memoryMB,
	}
	fill(v2.name[:], "MIG "+p.Name)
	return putVersioned(to, v2, 2, r)
}

// placement is nvmlGpuInstancePlacement_t and nvmlComputeInstancePlacement_t.
type placement struct{ start, size uint32 }

func placements(spans []nvml.Span) []placement {
	var out []placement
	for _, s := range spans {
		out = append(out, placement{u32(s.Start), u32(s.Size)})
	}
	return out
}

func span(p unsafe.Pointer) nvml.Span {
	at := *(*placement)(p)
	return nvml.Span{Start: int(at.start), Size: int(at.size)}
}

//export nvmlDeviceGetGpuInstancePossiblePlacements_v2
func nvmlDeviceGetGpuInstancePossiblePlacements_v2(device unsafe.Pointer, id uint32, array, count unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		spans, r := lib().Placements(d, int(id))
		return putCounted(array, count, placements(spans), r)
	})
}

// putCounted is putList for functions that count if there is no array, whatever the count says before.
func putCounted[T any](array, count unsafe.Pointer, list []T, r gpusim.Return) gpusim.Return {
	if count != nil && array == nil && r == gpusim.Success {
		*(*uint32)(count) = u32(len(list))
		return gpusim.Success
	}
	return putList(array, count, list, r)
}

//export nvmlDeviceGetGpuInstancePossiblePlacements
func nvmlDeviceGetGpuInstancePossiblePlacements(device unsafe.Pointer, id uint32, array, count unsafe.Pointer) int32 {
	return nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, id, array, count)
}

//export nvmlDeviceGetGpuInstanceRemainingCapacity
func nvmlDeviceGetGpuInstanceRemainingCapacity(device unsafe.Pointer, id uint32, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		n, r := lib().Capacity(d, int(id))
		return put(to, u32(n), r)
	})
}

//export nvmlDeviceCreateGpuInstance
func nvmlDeviceCreateGpuInstance(device unsafe.Pointer, id uint32, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		if to == nil {
			return gpusim.InvalidArgument
		}
		gi, r := lib().CreateGPUInstance(d, int(id))
		return putHandle(to, gi, r)
	})
}

//export nvmlDeviceCreateGpuInstanceWithPlacement
func nvmlDeviceCreateGpuInstanceWithPlacement(device unsafe.Pointer, id uint32, at, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		if at == nil || to == nil {
			return gpusim.InvalidArgument
		}
		gi, r := lib().CreateGPUInstanceAt(d, int(id), span(at))
		return putHandle(to, gi, r)
	})
}

// putHandles writes handles into an array that has room for all that the profile can have: its count is only written.
func putHandles[T any](array, count unsafe.Pointer, list []T, r gpusim.Return) gpusim.Return {
	switch {
	case array == nil || count == nil:
		return gpusim.InvalidArgument
	case r != gpusim.Success:
		return r
	}
	*(*uint32)(count) = u32(len(list))
	out := unsafe.Slice((*unsafe.Pointer)(array), len(list))
	for i, v := range list {
		out[i] = handleOf(v)
	}
	return gpusim.Success
}

//export nvmlDeviceGetGpuInstances
func nvmlDeviceGetGpuInstances(device unsafe.Pointer, id uint32, array, count unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		list, r := lib().GPUInstances(d, int(id))
		return putHandles(array, count, list, r)
	})
}

//export nvmlDeviceGetGpuInstanceById
func nvmlDeviceGetGpuInstanceById(device unsafe.Pointer, id uint32, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		gi, r := lib().GPUInstanceByID(d, int(id))
		return putHandle(to, gi, r)
	})
}

// gpuInstanceInfo is nvmlGpuInstanceInfo_t.
type gpuInstanceInfo struct {
	device      unsafe.Pointer
	id, profile uint32
	at          placement
}

//export nvmlGpuInstanceGetInfo
func nvmlGpuInstanceGetInfo(instance, to unsafe.Pointer) int32 {
	return on(instance, func(gi gpusim.GPUInstance) gpusim.Return {
		f, r := lib().DescribeGPUInstance(gi)
		return put(to, gpuInstanceInfo{
			handleOf(f.Device), u32(f.ID), u32(f.Profile), placement{u32(f.At.Start), u32(f.At.Size)},
		}, r)
	})
}

//export nvmlGpuInstanceDestroy
func nvmlGpuInstanceDestroy(instance unsafe.Pointer) int32 {
	return on(instance, func(gi gpusim.GPUInstance) gpusim.Return {
		if sampling(gi) {
			return gpusim.InUse
		}
		return lib().DestroyGPUInstance(gi)
	})
}

// computeInfo is nvmlComputeInstanceProfileInfo_t.
type computeInfo struct {
	id, slices, instances, sms                  uint32
	copies, decoders, encoders, jpegs, opticals uint32
}

// computeInfoV2 is nvmlComputeInstanceProfileInfo_v2_t.
type computeInfoV2 struct {
	version uint32
	computeInfo
	name [96]int8
}

// computeInfoV3 is nvmlComputeInstanceProfileInfo_v3_t.
type computeInfoV3 struct {
	computeInfoV2
	capabilities uint32
}

func describeCompute(p gpusim.ComputeInstanceProfile) computeInfo {
	e := p.Engines
	return computeInfo{
		id: u32(p.ID), slices: u32(p.Slices), instances: u32(p.Count), sms: u32(p.SMs), copies: u32(e.Copy),
		decoders: u32(e.Decoder), encoders: u32(e.Encoder), jpegs: u32(e.JPEG), opticals: u32(e.OFA),
	}
}

//export nvmlGpuInstanceGetComputeInstanceProfileInfo
func nvmlGpuInstanceGetComputeInstanceProfileInfo(instance unsafe.Pointer, kind, engine uint32, to unsafe.Pointer) int32 {
	return on(instance, func(gi gpusim.GPUInstance) gpusim.Return {
		p, r := lib().ComputeInstanceProfile(gi, int(kind), int(engine))
		return put(to, describeCompute(p), r)
	})
}

//export nvmlGpuInstanceGetComputeInstanceProfileInfoV
func nvmlGpuInstanceGetComputeInstanceProfileInfoV(instance unsafe.Pointer, kind, engine uint32, to unsafe.Pointer) int32 {
	return on(instance, func(gi gpusim.GPUInstance) gpusim.Return {
		p, r := lib().ComputeInstanceProfile(gi, int(kind), int(engine))
		v2 := computeInfoV2{version: versionOf[computeInfoV2](2), computeInfo: describeCompute(p)}
		fill(v2.name[:], "MIG "+p.Name)
		if r := putVersioned(to, v2, 2, r); r != gpusim.VersionMismatch {
			return r
		}
		v2.version = versionOf[computeInfoV3](3)
		return putVersioned(to, computeInfoV3{computeInfoV2: v2}, 3, r)
	})
}

//export nvmlGpuInstanceGetComputeInstanceRemainingCapacity
func nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance unsafe.Pointer, id uint32, to unsafe.Pointer) int32 {
	return on(instance, func(gi gpusim.GPUInstance) gpusim.Return {
		n, r := lib().ComputeCapacity(gi, int(id))
		return put(to, u32(n), r)
	})
}

//export nvmlGpuInstanceGetComputeInstancePossiblePlacements
func nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance unsafe.Pointer, id uint32, array, count unsafe.Pointer) int32 {
	return on(instance, func(gi gpusim.GPUInstance) gpusim.Return {
		spans, r := lib().ComputePlacements(gi, int(id))
		return putCounted(array, count, placements(spans), r)
	})
}

//export nvmlGpuInstanceCreateComputeInstance
func nvmlGpuInstanceCreateComputeInstance(instance unsafe.Pointer, id uint32, to unsafe.Pointer) int32 {
	return on(instance, func(gi gpusim.GPUInstance) gpusim.Return {
		if to == nil {
			return gpusim.InvalidArgument
		}
		ci, r := lib().CreateComputeInstance(gi, int(id))
		return putHandle(to, ci, r)
	})
}

//export nvmlGpuInstanceCreateComputeInstanceWithPlacement
func nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance unsafe.Pointer, id uint32, at, to unsafe.Pointer) int32 {
	return on(instance, func(gi gpusim.GPUInstance) gpusim.Return {
		if at == nil || to == nil {
			return gpusim.InvalidArgument
		}
		ci, r := lib().CreateComputeInstanceAt(gi, int(id), span(at))
		return putHandle(to, ci, r)
	})
}

//export nvmlGpuInstanceGetComputeInstances
func nvmlGpuInstanceGetComputeInstances(instance unsafe.Pointer, id uint32, array, count unsafe.Pointer) int32 {
	return on(instance, func(gi gpusim.GPUInstance) gpusim.Return {
		list, r := lib().ComputeInstances(gi, int(id))
		return putHandles(array, count, list, r)
	})
}

//export nvmlGpuInstanceGetComputeInstanceById
func nvmlGpuInstanceGetComputeInstanceById(instance unsafe.Pointer, id uint32, to unsafe.Pointer) int32 {
	return on(instance, func(gi gpusim.GPUInstance) gpusim.Return {
		ci, r := lib().ComputeInstanceByID(gi, int(id))
		return putHandle(to, ci, r)
	})
}

// computeInstanceInfo is nvmlComputeInstanceInfo_t.
type computeInstanceInfo struct {
	device, gpuInstance unsafe.Pointer
	id, profile         uint32
	at                  placement
}

//export nvmlComputeInstanceGetInfo_v2
func nvmlComputeInstanceGetInfo_v2(instance, to unsafe.Pointer) int32 {
	return on(instance, func(ci gpusim.ComputeInstance) gpusim.Return {
		f, r := lib().DescribeComputeInstance(ci)
		if r != gpusim.Success {
			return put(to, computeInstanceInfo{}, r)
		}
		return put(to, computeInstanceInfo{
			handleOf(f.Device), handleOf(f.GPUInstance), u32(f.ID), u32(f.Profile), placement{u32(f.At.Start), u32(f.At.Size)},
		}, r)
	})
}

//export nvmlComputeInstanceGetInfo
func nvmlComputeInstanceGetInfo(instance, to unsafe.Pointer) int32 {
	return nvmlComputeInstanceGetInfo_v2(instance, to)
}

//export nvmlComputeInstanceDestroy
func nvmlComputeInstanceDestroy(instance unsafe.Pointer) int32 {
	return on(instance, func(ci gpusim.ComputeInstance) gpusim.Return { return lib().DestroyComputeInstance(ci) })
}
