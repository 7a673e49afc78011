package main

import "C"

import (
	"fmt"
	"strings"
	"unsafe"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

//export nvmlSystemGetDriverVersion
func nvmlSystemGetDriverVersion(to unsafe.Pointer, length uint32) int32 {
	driver, _, _, r := lib().Versions()
	return int32(putText(to, length, driver, r))
}

//export nvmlSystemGetNVMLVersion
func nvmlSystemGetNVMLVersion(to unsafe.Pointer, length uint32) int32 {
	_, version, _, r := lib().Versions()
	return int32(putText(to, length, version, r))
}

//export nvmlSystemGetCudaDriverVersion
func nvmlSystemGetCudaDriverVersion(to unsafe.Pointer) int32 {
	_, _, cuda, r := lib().Versions()
	return int32(put(to, int32(cuda), r))
}

//export nvmlSystemGetCudaDriverVersion_v2
func nvmlSystemGetCudaDriverVersion_v2(to unsafe.Pointer) int32 {
	return nvmlSystemGetCudaDriverVersion(to)
}

//export nvmlSystemGetProcessName
func nvmlSystemGetProcessName(pid uint32, to unsafe.Pointer, length uint32) int32 {
	name, r := lib().ProcessName(int(pid))
	if len(name) >= int(length) && length > 0 { // a name that is too long is cut
		name = name[:length-1]
	}
	return int32(putText(to, length, name, r))
}

//export nvmlDeviceGetCount_v2
func nvmlDeviceGetCount_v2(to unsafe.Pointer) int32 {
	n, r := lib().DeviceCount()
	return int32(put(to, uint32(n), r))
}

//export nvmlDeviceGetCount
func nvmlDeviceGetCount(to unsafe.Pointer) int32 { return nvmlDeviceGetCount_v2(to) }

//export nvmlDeviceGetHandleByIndex_v2
func nvmlDeviceGetHandleByIndex_v2(index uint32, to unsafe.Pointer) int32 {
	d, r := lib().DeviceByIndex(int(index))
	return int32(putHandle(to, d, r))
}

//export nvmlDeviceGetHandleByIndex
func nvmlDeviceGetHandleByIndex(index uint32, to unsafe.Pointer) int32 {
	return nvmlDeviceGetHandleByIndex_v2(index, to)
}

// text reads a C string.
func text(p unsafe.Pointer) string {
	if p == nil {
		return ""
	}
	n := 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

//export nvmlDeviceGetHandleByUUID
func nvmlDeviceGetHandleByUUID(uuid, to unsafe.Pointer) int32 {
	d, r := lib().DeviceByUUID(text(uuid))
	return int32(putHandle(to, d, r))
}

//export nvmlDeviceGetHandleBySerial
func nvmlDeviceGetHandleBySerial(serial, to unsafe.Pointer) int32 {
	d, r := lib().DeviceBySerial(text(serial))
	return int32(putHandle(to, d, r))
}

//export nvmlDeviceGetHandleByPciBusId_v2
func nvmlDeviceGetHandleByPciBusId_v2(address, to unsafe.Pointer) int32 {
	// domain:bus:device.function, where the domain and the function may be left out
	var bus, slot int
	parts := strings.Split(text(address), ":")
	if len(parts) < 2 {
		return int32(gpusim.InvalidArgument)
	}
	if _, err := fmt.Sscanf(strings.Join(parts[len(parts)-2:], ":"), "%x:%x", &bus, &slot); err != nil {
		return int32(gpusim.InvalidArgument)
	}
	d, r := lib().DeviceByPCI(bus, slot)
	return int32(putHandle(to, d, r))
}

//export nvmlDeviceGetHandleByPciBusId
func nvmlDeviceGetHandleByPciBusId(address, to unsafe.Pointer) int32 {
	return nvmlDeviceGetHandleByPciBusId_v2(address, to)
}

//export nvmlDeviceGetName
func nvmlDeviceGetName(device, to unsafe.Pointer, length uint32) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		name, r := lib().Name(d)
		return putText(to, length, name, r)
	})
}

//export nvmlDeviceGetUUID
func nvmlDeviceGetUUID(device, to unsafe.Pointer, length uint32) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		uuid, r := lib().UUID(d)
		return putText(to, length, uuid, r)
	})
}

//export nvmlDeviceGetSerial
func nvmlDeviceGetSerial(device, to unsafe.Pointer, length uint32) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		serial, r := lib().Serial(d)
		return putText(to, length, serial, r)
	})
}

//export nvmlDeviceGetIndex
func nvmlDeviceGetIndex(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		n, r := lib().Index(d)
		return put(to, uint32(n), r)
	})
}

//export nvmlDeviceGetMinorNumber
func nvmlDeviceGetMinorNumber(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		n, r := lib().Minor(d)
		return put(to, uint32(n), r)
	})
}

// pciInfo is nvmlPciInfo_t.
type pciInfo struct {
	legacyAddress                             [16]int8
	domain, bus, device, deviceID, subSystems uint32
	address                                   [32]int8
}

//export nvmlDeviceGetPciInfo_v3
func nvmlDeviceGetPciInfo_v3(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		pci, r := lib().PCI(d)
		out := pciInfo{bus: uint32(pci.Bus), device: uint32(pci.Slot), deviceID: pci.DeviceID, subSystems: pci.SubsystemID}
		fill(out.legacyAddress[:], fmt.Sprintf("0000:%02X:%02X.0", pci.Bus, pci.Slot))
		fill(out.address[:], fmt.Sprintf("00000000:%02X:%02X.0", pci.Bus, pci.Slot))
		return put(to, out, r)
	})
}

// pciInfoExt is nvmlPciInfoExt_v1_t.
type pciInfoExt struct {
	version, domain, bus, device, deviceID, subSystems, baseClass, subClass uint32
	address                                                                 [32]int8
}

//export nvmlDeviceGetPciInfoExt
func nvmlDeviceGetPciInfoExt(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		pci, r := lib().PCI(d)
		out := pciInfoExt{
			version: versionOf[pciInfoExt](1), bus: uint32(pci.Bus), device: uint32(pci.Slot), deviceID: pci.DeviceID, subSystems: pci.SubsystemID,
			baseClass: pci.Class >> 16, subClass: pci.Class >> 8 & 0xff,
		}
		fill(out.address[:], fmt.Sprintf("00000000:%02X:%02X.0", pci.Bus, pci.Slot))
		return putVersioned(to, out, 1, r)
	})
}

// versionOf is NVML_STRUCT_VERSION: the size of a struct, and its version above.
func versionOf[T any](version uint32) uint32 {
	var v T
	return uint32(unsafe.Sizeof(v)) | version<<24
}

// putVersioned is put for a struct that begins with its version, which the caller has set.
func putVersioned[T any](to unsafe.Pointer, v T, version uint32, r gpusim.Return) gpusim.Return {
	if to == nil {
		return gpusim.InvalidArgument
	}
	if *(*uint32)(to) != versionOf[T](version) {
		return gpusim.VersionMismatch
	}
	return put(to, v, r)
}

// memory is nvmlMemory_t.
type memory struct{ total, free, used uint64 }

//export nvmlDeviceGetMemoryInfo
func nvmlDeviceGetMemoryInfo(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		m, r := lib().Memory(d)
		return put(to, memory{m.Total, m.Free, m.Used + m.Reserved}, r)
	})
}

// memoryV2 is nvmlMemory_v2_t.
type memoryV2 struct {
	version                     uint32
	total, reserved, free, used uint64
}

//export nvmlDeviceGetMemoryInfo_v2
func nvmlDeviceGetMemoryInfo_v2(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		m, r := lib().Memory(d)
		return putVersioned(to, memoryV2{versionOf[memoryV2](2), m.Total, m.Reserved, m.Free, m.Used}, 2, r)
	})
}

//export nvmlDeviceGetBAR1MemoryInfo
func nvmlDeviceGetBAR1MemoryInfo(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		m, r := lib().Memory(d)
		return put(to, memory{m.Total, m.Total, 0}, r)
	})
}

//export nvmlDeviceGetArchitecture
func nvmlDeviceGetArchitecture(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		s, r := lib().Static(d)
		return put(to, s.Arch, r)
	})
}

//export nvmlDeviceGetBrand
func nvmlDeviceGetBrand(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		s, r := lib().Static(d)
		return put(to, s.Brand, r)
	})
}

//export nvmlDeviceGetCudaComputeCapability
func nvmlDeviceGetCudaComputeCapability(device, major, minor unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		s, r := lib().Static(d)
		if r := put(major, int32(s.Major), r); r != gpusim.Success {
			return r
		}
		return put(minor, int32(s.Minor), r)
	})
}

//export nvmlDeviceGetNumGpuCores
func nvmlDeviceGetNumGpuCores(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		s, r := lib().Static(d)
		return put(to, uint32(s.Cores), r)
	})
}

//export nvmlDeviceGetNumaNodeId
func nvmlDeviceGetNumaNodeId(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		s, r := lib().Static(d)
		return put(to, uint32(s.NUMA), r)
	})
}

//export nvmlDeviceGetGspFirmwareMode
func nvmlDeviceGetGspFirmwareMode(device, enabled, byDefault unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		_, r := lib().Static(d)
		if byDefault == nil {
			return gpusim.InvalidArgument
		}
		if r == gpusim.Success {
			*(*uint32)(byDefault) = 1
		}
		return put(enabled, uint32(1), r)
	})
}

//export nvmlDeviceGetVirtualizationMode
func nvmlDeviceGetVirtualizationMode(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		s, r := lib().Static(d)
		return put(to, s.VirtualizationMode, r)
	})
}

//export nvmlDeviceGetPersistenceMode
func nvmlDeviceGetPersistenceMode(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		on, r := lib().Persistence(d)
		return put(to, bit(on), r)
	})
}

//export nvmlDeviceSetPersistenceMode
func nvmlDeviceSetPersistenceMode(device unsafe.Pointer, mode uint32) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		if mode > 1 {
			return gpusim.InvalidArgument
		}
		return lib().SetPersistence(d, mode == 1)
	})
}

//export nvmlDeviceGetComputeMode
func nvmlDeviceGetComputeMode(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		mode, r := lib().ComputeMode(d)
		return put(to, mode, r)
	})
}

//export nvmlDeviceSetComputeMode
func nvmlDeviceSetComputeMode(device unsafe.Pointer, mode uint32) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return { return lib().SetComputeMode(d, mode) })
}

// noInstance is gpusim.NoInstance as NVML writes it.
const noInstance = 0xffffffff

func instanceID(id int) uint32 {
	if id == gpusim.NoInstance {
		return noInstance
	}
	return uint32(id)
}

// processInfo is nvmlProcessInfo_t of versions 2 and 3.
type processInfo struct {
	pid    uint32
	used   uint64
	gi, ci uint32
}

// anyProcess, since clients of MPS are computing processes, too: nvidia-smi shows them as "M+C".
func anyProcess(gpusim.Process) bool { return true }

func mpsClient(p gpusim.Process) bool { return p.MPS }

// processInfoV1 is nvmlProcessInfo_v1_t.
type processInfoV1 struct {
	pid  uint32
	used uint64
}

func processes(device, count, array unsafe.Pointer, which func(gpusim.Process) bool) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		ps, r := lib().Processes(d)
		var out []processInfo
		for _, p := range ps {
			if !which(p) {
				continue
			}
			out = append(out, processInfo{uint32(p.PID), p.Used, instanceID(p.GI), instanceID(p.CI)})
		}
		return putProcesses(array, count, out, r)
	})
}

// putProcesses is putList, but here a missing array is one that is too small.
func putProcesses[T any](array, count unsafe.Pointer, list []T, r gpusim.Return) gpusim.Return {
	if count != nil && array == nil && r == gpusim.Success && len(list) > 0 {
		*(*uint32)(count) = uint32(len(list))
		return gpusim.InsufficientSize
	}
	return putList(array, count, list, r)
}

//export nvmlDeviceGetComputeRunningProcesses_v3
func nvmlDeviceGetComputeRunningProcesses_v3(device, count, array unsafe.Pointer) int32 {
	return processes(device, count, array, anyProcess)
}

//export nvmlDeviceGetComputeRunningProcesses_v2
func nvmlDeviceGetComputeRunningProcesses_v2(device, count, array unsafe.Pointer) int32 {
	return processes(device, count, array, anyProcess)
}

//export nvmlDeviceGetComputeRunningProcesses
func nvmlDeviceGetComputeRunningProcesses(device, count, array unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		ps, r := lib().Processes(d)
		var out []processInfoV1
		for _, p := range ps {
			out = append(out, processInfoV1{uint32(p.PID), p.Used})
		}
		return putProcesses(array, count, out, r)
	})
}

// none answers for kinds of processes that no one simulates.
func none(device, count, array unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		_, r := lib().Processes(d)
		return putProcesses[processInfo](array, count, nil, r)
	})
}

//export nvmlDeviceGetGraphicsRunningProcesses_v3
func nvmlDeviceGetGraphicsRunningProcesses_v3(device, count, array unsafe.Pointer) int32 {
	return none(device, count, array)
}

//export nvmlDeviceGetGraphicsRunningProcesses_v2
func nvmlDeviceGetGraphicsRunningProcesses_v2(device, count, array unsafe.Pointer) int32 {
	return none(device, count, array)
}

//export nvmlDeviceGetGraphicsRunningProcesses
func nvmlDeviceGetGraphicsRunningProcesses(device, count, array unsafe.Pointer) int32 {
	return none(device, count, array)
}

//export nvmlDeviceGetMPSComputeRunningProcesses_v3
func nvmlDeviceGetMPSComputeRunningProcesses_v3(device, count, array unsafe.Pointer) int32 {
	return processes(device, count, array, mpsClient)
}

//export nvmlDeviceGetMPSComputeRunningProcesses_v2
func nvmlDeviceGetMPSComputeRunningProcesses_v2(device, count, array unsafe.Pointer) int32 {
	return processes(device, count, array, mpsClient)
}

//export nvmlDeviceGetMPSComputeRunningProcesses
func nvmlDeviceGetMPSComputeRunningProcesses(device, count, array unsafe.Pointer) int32 {
	return none(device, count, array)
}
