package main

import "C"

import (
	"time"
	"unsafe"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

//export nvmlDeviceGetEccMode
func nvmlDeviceGetEccMode(device, current, pending unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		now, next, r := lib().ECCMode(d)
		if r := put(current, bit(now), r); r != gpusim.Success {
			return r
		}
		return put(pending, bit(next), r)
	})
}

const (
	uncorrected = 1 // NVML_MEMORY_ERROR_TYPE_UNCORRECTED
	aggregate   = 1 // NVML_AGGREGATE_ECC
)

func eccErrors(h gpusim.Health, kind, counter uint32) uint64 {
	switch {
	case kind == uncorrected && counter == aggregate:
		return h.UncorrectableECC
	case kind == uncorrected:
		return h.Volatile.Uncorrectable
	case counter == aggregate:
		return h.CorrectableECC
	default:
		return h.Volatile.Correctable
	}
}

//export nvmlDeviceGetTotalEccErrors
func nvmlDeviceGetTotalEccErrors(device unsafe.Pointer, kind, counter uint32, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().Health(d)
		return put(to, eccErrors(h, kind, counter), r)
	})
}

// Places of memory, as NVML_MEMORY_LOCATION_… numbers them. A real H200 has none of the others.
const (
	deviceMemory   = 2
	sram           = 7
	knownLocations = 8
)

//export nvmlDeviceGetMemoryErrorCounter
func nvmlDeviceGetMemoryErrorCounter(device unsafe.Pointer, kind, counter, location uint32, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().Health(d)
		switch {
		case r != gpusim.Success:
			return r
		case location >= knownLocations:
			return gpusim.InvalidArgument
		case location == sram:
			return put(to, uint64(0), r)
		case location != deviceMemory:
			return gpusim.NotSupported
		}
		return put(to, eccErrors(h, kind, counter), r)
	})
}

//export nvmlDeviceGetRemappedRows
func nvmlDeviceGetRemappedRows(device, correctable, uncorrectable, pending, failed unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().RowRemapping(d)
		for _, out := range []struct {
			to unsafe.Pointer
			v  uint32
		}{
			{correctable, uint32(h.RemappedRowsCorrectable)},
			{uncorrectable, uint32(h.RemappedRows)},
			{pending, bit(h.RemapPending)},
			{failed, bit(h.RemapFailed)},
		} {
			if r := put(out.to, out.v, r); r != gpusim.Success {
				return r
			}
		}
		return gpusim.Success
	})
}

// histogram is nvmlRowRemapperHistogramValues_t.
type histogram struct{ max, high, partial, low, none uint32 }

//export nvmlDeviceGetRowRemapperHistogram
func nvmlDeviceGetRowRemapperHistogram(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().RemapBanks(d)
		return put(to, histogram{max: uint32(h.FullBanks()), none: uint32(h.SparelessBanks)}, r)
	})
}

// sramStatus is nvmlEccSramErrorStatus_v1_t.
type sramStatus struct {
	version  uint32
	counts   [11]uint64
	exceeded uint32
}

//export nvmlDeviceGetSramEccErrorStatus
func nvmlDeviceGetSramEccErrorStatus(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().SRAMStatus(d)
		return putVersioned(to, sramStatus{version: versionOf[sramStatus](1), exceeded: bit(h.SRAMThreshold)}, 1, r)
	})
}

// repairStatus is nvmlRepairStatus_v1_t.
type repairStatus struct{ version, channel, tpc uint32 }

//export nvmlDeviceGetRepairStatus
func nvmlDeviceGetRepairStatus(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().RepairStatus(d)
		return putVersioned(to, repairStatus{version: versionOf[repairStatus](1), channel: bit(h.RepairPending)}, 1, r)
	})
}

//export nvmlDeviceGetUnrepairableMemoryFlag_v1
func nvmlDeviceGetUnrepairableMemoryFlag_v1(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().UnrepairableMemory(d)
		return put(to, bit(h.Unrepairable), r)
	})
}

//export nvmlDeviceGetRetiredPagesPendingStatus
func nvmlDeviceGetRetiredPagesPendingStatus(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		fields, r := lib().Fields(d, []uint32{retiredPagesPending})
		if r != gpusim.Success {
			return r
		}
		return put(to, uint32(fields[0].Value), fields[0].Return)
	})
}

const retiredPagesPending = 31 // NVML_FI_DEV_RETIRED_PENDING

// fieldValue is nvmlFieldValue_t.
type fieldValue struct {
	field, scope       uint32
	timestamp, latency int64
	kind, result       uint32
	value              uint64
}

// Types of fields: NVML_VALUE_TYPE_….
const (
	unsignedInt      = 1
	unsignedLongLong = 3
)

//export nvmlDeviceGetFieldValues
func nvmlDeviceGetFieldValues(device unsafe.Pointer, count int32, values unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		if values == nil || count < 0 {
			return gpusim.InvalidArgument
		}
		asked := unsafe.Slice((*fieldValue)(values), count)
		ids := make([]uint32, len(asked))
		for i := range asked {
			ids[i] = asked[i].field
		}
		found, r := lib().Fields(d, ids)
		if r != gpusim.Success {
			return r
		}
		for i, f := range found {
			asked[i].timestamp, asked[i].kind, asked[i].result = time.Now().UnixMicro(), unsignedInt, uint32(f.Return)
			if f.Wide {
				asked[i].kind = unsignedLongLong
			}
			if f.Return == gpusim.Success {
				asked[i].value = f.Value
			}
		}
		return gpusim.Success
	})
}

// fabricInfo is nvmlGpuFabricInfo_t. A state of 0 is "not supported".
type fabricInfo struct {
	cluster        [16]byte
	status, clique uint32
	state          uint8
}

//export nvmlDeviceGetGpuFabricInfo
func nvmlDeviceGetGpuFabricInfo(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().Health(d)
		return put(to, fabricInfo{status: uint32(h.Fabric.Status), state: uint8(h.Fabric.State)}, r)
	})
}

// fabricInfoV2 is nvmlGpuFabricInfo_v2_t.
type fabricInfoV2 struct {
	version        uint32
	cluster        [16]byte
	status, clique uint32
	state          uint8
	health         uint32
}

// fabricInfoV3 is nvmlGpuFabricInfo_v3_t.
type fabricInfoV3 struct {
	fabricInfoV2
	summary uint8
}

//export nvmlDeviceGetGpuFabricInfoV
func nvmlDeviceGetGpuFabricInfoV(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().Health(d)
		v2 := fabricInfoV2{
			version: versionOf[fabricInfoV2](2), status: uint32(h.Fabric.Status), state: uint8(h.Fabric.State), health: h.Fabric.Mask,
		}
		if r := putVersioned(to, v2, 2, r); r != gpusim.VersionMismatch {
			return r
		}
		v2.version = versionOf[fabricInfoV3](3)
		return putVersioned(to, fabricInfoV3{fabricInfoV2: v2}, 3, r)
	})
}

// addressingMode is nvmlDeviceAddressingMode_v1_t. A value of 0 is "none".
type addressingMode struct{ version, value uint32 }

//export nvmlDeviceGetAddressingMode
func nvmlDeviceGetAddressingMode(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		_, r := lib().Static(d)
		return putVersioned(to, addressingMode{version: versionOf[addressingMode](1)}, 1, r)
	})
}

//export nvmlDeviceGetSupportedEventTypes
func nvmlDeviceGetSupportedEventTypes(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		types, r := lib().EventTypes(d)
		return put(to, types, r)
	})
}

//export nvmlEventSetCreate
func nvmlEventSetCreate(to unsafe.Pointer) int32 {
	set, r := lib().NewEventSet()
	return int32(putHandle(to, set, r))
}

//export nvmlEventSetFree
func nvmlEventSetFree(set unsafe.Pointer) int32 {
	return on(set, func(*gpusim.EventSet) gpusim.Return {
		forget(set)
		return gpusim.Success
	})
}

//export nvmlDeviceRegisterEvents
func nvmlDeviceRegisterEvents(device unsafe.Pointer, types uint64, set unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		s, ok := behind[*gpusim.EventSet](set)
		if !ok {
			return gpusim.InvalidArgument
		}
		return lib().Register(d, types, s)
	})
}

// eventData is nvmlEventData_t.
type eventData struct {
	device     unsafe.Pointer
	kind, data uint64
	gi, ci     uint32
}

//export nvmlEventSetWait_v2
func nvmlEventSetWait_v2(set, to unsafe.Pointer, milliseconds uint32) int32 {
	return on(set, func(s *gpusim.EventSet) gpusim.Return {
		e, r := s.Wait(time.Duration(milliseconds) * time.Millisecond)
		if r != gpusim.Success {
			return r
		}
		return put(to, eventData{handleOf(e.Handle()), e.Type, e.Data, instanceID(e.GI), instanceID(e.CI)}, r)
	})
}

//export nvmlEventSetWait
func nvmlEventSetWait(set, to unsafe.Pointer, milliseconds uint32) int32 {
	return nvmlEventSetWait_v2(set, to, milliseconds)
}
