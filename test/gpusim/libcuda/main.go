// The simulated GPUs of package gpusim as the part of NVIDIA's libcuda.so.1 that test/hardware/cuda calls: a process has a context on a
// GPU, takes memory, and runs one kernel. It knows that kernel by its text, and computes nothing.
//
// It finds its node by GPUSIM_NODE, as the simulated libnvidia-ml.so.1 does. If GPUSIM_KERNEL_LOG is set, it writes into that pipe what the
// driver writes into the kernel's log.
package main

/*
#include <stdlib.h>
*/
import "C"

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

func main() {} // a shared library has no program

// Result codes of cuda.h.
const (
	success           int32 = 0
	invalidValue      int32 = 1
	outOfMemory       int32 = 2
	notInitialized    int32 = 3
	deviceUnavailable int32 = 46
	noDevice          int32 = 100
	invalidContext    int32 = 201
	illegalAddress    int32 = 700
	notSupported      int32 = 801
)

// contextMiB is what a context uses in addition to its program's allocations, as measured on an H200.
const contextMiB = 500

// mmuFault is the Xid of a kernel that uses an unmapped address.
const mmuFault = 31

// process is this process's state on the node.
var process struct {
	mu      sync.Mutex
	node    *gpusim.Node
	gpu     int // index
	uuid    string
	usedMiB int // 0 without a context
	faulted bool
}

// value is the current value of a variable: a Go runtime sees only the environment at the start of the program.
func value(name string) string {
	key := C.CString(name)
	defer C.free(unsafe.Pointer(key))
	return C.GoString(C.getenv(key))
}

// locked runs a function for one thread at a time.
func locked(f func() int32) int32 {
	process.mu.Lock()
	defer process.mu.Unlock()
	return f()
}

//export cuInit
func cuInit(uint32) int32 {
	return locked(func() int32 {
		if process.node != nil {
			return success
		}
		node, err := gpusim.Open(value("GPUSIM_NODE"))
		if err != nil {
			return noDevice
		}
		process.node = node
		return success
	})
}

// cuDeviceGet knows the one device that CUDA_VISIBLE_DEVICES names.
//
//export cuDeviceGet
func cuDeviceGet(to unsafe.Pointer, ordinal int32) int32 {
	return locked(func() int32 {
		if process.node == nil {
			return notInitialized
		}
		uuid := value("CUDA_VISIBLE_DEVICES")
		index, there := process.node.GPUOf(uuid)
		if !there || ordinal != 0 {
			return noDevice
		}
		process.gpu, process.uuid = index, uuid
		*(*int32)(to) = 0
		return success
	})
}

// The pointers of contexts, modules and functions lead to these, and no one reads there.
var context, module, function = C.malloc(1), C.malloc(1), C.malloc(1)

//export cuDevicePrimaryCtxRetain
func cuDevicePrimaryCtxRetain(to unsafe.Pointer, _ int32) int32 {
	return locked(func() int32 {
		if process.uuid == "" {
			return notInitialized
		}
		if process.usedMiB == 0 {
			if process.node.HoldReal(process.uuid, os.Getpid(), program(), contextMiB) != nil {
				return deviceUnavailable
			}
			process.usedMiB = contextMiB
		}
		*(*unsafe.Pointer)(to) = context
		return success
	})
}

//export cuCtxSetCurrent
func cuCtxSetCurrent(c unsafe.Pointer) int32 {
	if c != context {
		return invalidContext
	}
	return success
}

// memory is the GPU's memory, in bytes.
func memory() (m gpusim.Memory, ok bool) {
	l := process.node.Library()
	if l.Init() != gpusim.Success {
		return m, false
	}
	d, r := l.DeviceByIndex(process.gpu)
	if r == gpusim.Success {
		m, r = l.Memory(d)
	}
	return m, r == gpusim.Success
}

// inContext runs a function of a process with a context. After a fault the context is unusable.
func inContext(f func() int32) int32 {
	return locked(func() int32 {
		switch {
		case process.usedMiB == 0:
			return invalidContext
		case process.faulted:
			return illegalAddress
		default:
			return f()
		}
	})
}

//export cuMemGetInfo_v2
func cuMemGetInfo_v2(free, total unsafe.Pointer) int32 {
	return inContext(func() int32 {
		m, ok := memory()
		if !ok {
			return deviceUnavailable
		}
		*(*uint64)(free), *(*uint64)(total) = m.Free, m.Total-m.Reserved
		return success
	})
}

//export cuMemAlloc_v2
func cuMemAlloc_v2(to unsafe.Pointer, size uint64) int32 {
	return inContext(func() int32 {
		m, ok := memory()
		switch {
		case !ok:
			return deviceUnavailable
		case size == 0:
			return invalidValue
		case size > m.Free:
			return outOfMemory
		}
		mib := process.usedMiB + int((size+1<<20-1)>>20)
		if process.node.Use(os.Getpid(), mib) != nil {
			return deviceUnavailable
		}
		process.usedMiB = mib
		*(*uint64)(to) = 1 << 32
		return success
	})
}

//export cuModuleLoadData
func cuModuleLoadData(to, text unsafe.Pointer) int32 {
	return inContext(func() int32 {
		ptx := C.GoString((*C.char)(text))
		if !strings.Contains(ptx, ".entry fault()") || !strings.Contains(ptx, "st.global") {
			return notSupported
		}
		*(*unsafe.Pointer)(to) = module
		return success
	})
}

//export cuModuleGetFunction
func cuModuleGetFunction(to, of unsafe.Pointer, _ *C.char) int32 {
	return inContext(func() int32 {
		if of != module {
			return invalidValue
		}
		*(*unsafe.Pointer)(to) = function
		return success
	})
}

//export cuLaunchKernel
func cuLaunchKernel(f unsafe.Pointer, gridX, gridY, gridZ, blockX, blockY, blockZ, shared uint32, stream, params, extra unsafe.Pointer) int32 {
	return inContext(func() int32 {
		if f != function {
			return invalidValue
		}
		return success
	})
}

// cuCtxSynchronize waits for the kernel, which has made its error by then.
//
//export cuCtxSynchronize
func cuCtxSynchronize() int32 {
	return inContext(func() int32 {
		process.faulted = true
		if log() != nil || process.node.Xid(process.gpu, mmuFault) != nil {
			return deviceUnavailable
		}
		return illegalAddress
	})
}

// log writes the driver's line about the fault, before the driver reports the event.
func log() error {
	path := value("GPUSIM_KERNEL_LOG")
	if path == "" {
		return nil
	}
	l := process.node.Library()
	r := l.Init()
	var d gpusim.Device
	if r == gpusim.Success {
		d, r = l.DeviceByIndex(process.gpu)
	}
	var pci gpusim.PCI
	if r == gpusim.Success {
		pci, r = l.PCI(d)
	}
	if r != gpusim.Success {
		return fmt.Errorf("finding GPU %d: %s", process.gpu, r.Text())
	}
	// The pipe keeps apart what is written at once, as the kernel keeps its records.
	pipe, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer pipe.Close()
	if _, err := unix.FcntlInt(pipe.Fd(), unix.F_SETFL, unix.O_DIRECT|unix.O_NONBLOCK); err != nil {
		return err
	}
	const ofKernel = 3 // facility 0, level 3: an error
	now := time.Now().UnixMicro()
	_, err = fmt.Fprintf(pipe, "%d,%d,%d,-;NVRM: Xid (PCI:%s): %d, pid=%d, name=%s, Ch 00000008, intr 00000000. MMU Fault\n",
		ofKernel, now, now, strings.TrimSuffix(pci.Address, ".0"), mmuFault, os.Getpid(), program())
	return err
}

func program() string { return filepath.Base(os.Args[0]) }
