package main

import "C"

import (
	"unsafe"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

// utilizationSample is nvmlProcessUtilizationSample_t.
type utilizationSample struct {
	pid                          uint32
	timestamp                    uint64
	sm, memory, encoder, decoder uint32
}

// sampleRoom is how many samples the driver says to have room for, whether it has any or not.
const sampleRoom = 100

//export nvmlDeviceGetProcessUtilization
func nvmlDeviceGetProcessUtilization(device, array, count unsafe.Pointer, since uint64) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		if count == nil {
			return gpusim.InvalidArgument
		}
		found, r := lib().ProcessUtilization(d, since)
		if r != gpusim.Success && r != gpusim.NotFound {
			return r
		}
		n := (*uint32)(count)
		if room := max(sampleRoom, len(found)); array == nil || int(*n) < len(found) {
			*n = uint32(room)
			return gpusim.InsufficientSize
		}
		if r != gpusim.Success {
			return r // and leaves the count as it was, as a real driver does
		}
		*n = uint32(len(found))
		out := unsafe.Slice((*utilizationSample)(array), len(found))
		for i, u := range found {
			out[i] = utilizationSample{pid: uint32(u.PID), timestamp: u.Time, sm: uint32(u.SM)}
		}
		return r
	})
}

// gpmSupport is nvmlGpmSupport_t.
type gpmSupport struct{ version, supported uint32 }

const gpmVersion = 1 // of both structs: these versions have no size in them

//export nvmlGpmQueryDeviceSupport
func nvmlGpmQueryDeviceSupport(device, to unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		supported, r := lib().GPMSupported(d)
		if to != nil && (*gpmSupport)(to).version != gpmVersion {
			return gpusim.VersionMismatch
		}
		return put(to, gpmSupport{gpmVersion, bit(supported)}, r)
	})
}

//export nvmlGpmSampleAlloc
func nvmlGpmSampleAlloc(to unsafe.Pointer) int32 {
	if !lib().Initialized() {
		return int32(gpusim.Uninitialized)
	}
	return int32(putHandle(to, new(gpusim.GPMSample), gpusim.Success))
}

//export nvmlGpmSampleFree
func nvmlGpmSampleFree(sample unsafe.Pointer) int32 {
	return on(sample, func(*gpusim.GPMSample) gpusim.Return {
		forget(sample)
		return gpusim.Success
	})
}

//export nvmlGpmSampleGet
func nvmlGpmSampleGet(device, sample unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		to, ok := behind[*gpusim.GPMSample](sample)
		if !ok {
			return gpusim.InvalidArgument
		}
		return lib().GPMSampleOf(d, to)
	})
}

//export nvmlGpmMigSampleGet
func nvmlGpmMigSampleGet(device unsafe.Pointer, id uint32, sample unsafe.Pointer) int32 {
	return on(device, func(d gpusim.Device) gpusim.Return {
		to, ok := behind[*gpusim.GPMSample](sample)
		if !ok {
			return gpusim.InvalidArgument
		}
		return lib().GPMSampleOfInstance(d, int(id), to)
	})
}

// gpmMetric is nvmlGpmMetric_t.
type gpmMetric struct {
	id, result uint32
	value      float64
	texts      [3]unsafe.Pointer
}

// gpmMetrics is nvmlGpmMetricsGet_t up to its first metric.
type gpmMetrics struct {
	version, count uint32
	samples        [2]unsafe.Pointer
	first          gpmMetric
}

//export nvmlGpmMetricsGet
func nvmlGpmMetricsGet(to unsafe.Pointer) int32 {
	if to == nil {
		return int32(gpusim.InvalidArgument)
	}
	asked := (*gpmMetrics)(to)
	return on(asked.samples[0], func(from *gpusim.GPMSample) gpusim.Return {
		until, ok := behind[*gpusim.GPMSample](asked.samples[1])
		switch {
		case !ok || asked.count == 0:
			return gpusim.InvalidArgument
		case asked.version != gpmVersion:
			return gpusim.VersionMismatch
		}
		metrics := unsafe.Slice(&asked.first, asked.count)
		for i := range metrics {
			value, r := lib().GPMMetric(from, until, metrics[i].id)
			if r == gpusim.InvalidArgument || r == gpusim.Uninitialized {
				return r
			}
			metrics[i].result, metrics[i].value = uint32(r), value
		}
		return gpusim.Success
	})
}

// sampling reports whether the program has a sample of the instance that it has not freed. Whether a driver then refuses to destroy the
// instance was not measured: the stricter one does.
func sampling(i gpusim.GPUInstance) bool {
	handles.mu.Lock()
	defer handles.mu.Unlock()
	for _, v := range handles.value {
		if s, is := v.(*gpusim.GPMSample); is && s.IsOf(i) {
			return true
		}
	}
	return false
}
