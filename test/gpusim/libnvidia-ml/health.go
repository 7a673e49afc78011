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
		s, r := lib().Static(d)
		if r := put(current, bit(s.ECC), r); r != gpusim.Success {
			return r
		}
		return put(pending, bit(s.ECC), r)
	})
}

const uncorrected = 1 // NVML_MEMORY_ERROR_TYPE_UNCORRECTED

//export nvmlDeviceGetTotalEccErrors
func nvmlDeviceGetTotalEccErrors(device unsafe.Pointer, kind, _ uint32, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().Health(d)
		if kind != uncorrected {
			h.UncorrectableECC = 0
		}
		return put(to, h.UncorrectableECC, r)
	})
}

const deviceMemory = 2 // NVML_MEMORY_LOCATION_DEVICE_MEMORY

//export nvmlDeviceGetMemoryErrorCounter
func nvmlDeviceGetMemoryErrorCounter(device unsafe.Pointer, kind, counter, location uint32, to unsafe.Pointer) int32 {
	if location != deviceMemory {
		return on(device, func(d gpusim.Device) gpusim.Return {
			_, r := lib().Health(d)
			return put(to, uint64(0), r)
		})
	}
	return nvmlDeviceGetTotalEccErrors(device, kind, counter, to)
}

//export nvmlDeviceGetRemappedRows
func nvmlDeviceGetRemappedRows(device, correctable, uncorrectable, pending, failed unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		h, r := lib().Health(d)
		for _, out := range []struct {
			to unsafe.Pointer
			v  uint32
		}{
			{correctable, 0},
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

// fieldValue is nvmlFieldValue_t.
type fieldValue struct {
	field, scope       uint32
	timestamp, latency int64
	kind, result       uint32
	value              uint64
}

// What nvmlDeviceGetFieldValues is asked for here.
const (
	recoveryAction = 230 // NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
	unsignedInt    = 1   // NVML_VALUE_TYPE_UNSIGNED_INT
)

//export nvmlDeviceGetFieldValues
func nvmlDeviceGetFieldValues(device unsafe.Pointer, count int32, values unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		if values == nil || count < 0 {
			return gpusim.InvalidArgument
		}
		h, r := lib().Health(d)
		if r != gpusim.Success {
			return r
		}
		for i := range unsafe.Slice((*fieldValue)(values), count) {
			f := &unsafe.Slice((*fieldValue)(values), count)[i]
			f.timestamp = time.Now().UnixMicro()
			f.result = uint32(gpusim.NotSupported)
			if f.field == recoveryAction {
				f.kind, f.result, f.value = unsignedInt, uint32(gpusim.Success), uint64(h.RecoveryAction)
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
		_, r := lib().Static(d)
		return put(to, fabricInfo{}, r)
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
		_, r := lib().Static(d)
		v2 := fabricInfoV2{version: versionOf[fabricInfoV2](2)}
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
		s, r := lib().Static(d)
		return put(to, s.EventTypes, r)
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
