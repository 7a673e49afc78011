// The simulated GPUs of package gpusim as NVIDIA's management library, for programs that load libnvidia-ml.so.1: the agent
// itself, NVIDIA's device plugin, GPU feature discovery, mig-parted and mig-manager. It only translates C to Go and
// back; every rule is in gpusim.
//
// Package test/binaries builds it, as does the command
//
//	go run ./test/binaries/cmd/binaries libnvidia-ml
//
// which prints where the file is. Run a program with LD_LIBRARY_PATH set to its directory and GPUSIM_NODE set to the
// directory of a node, which `gpusim create` makes. The default of GPUSIM_NODE is /run/gpusim. Without a node there,
// the result is NVML_ERROR_DRIVER_NOT_LOADED.
//
// Every function that nvml.h declares is there. One that the simulator does not know returns NVML_ERROR_FUNCTION_NOT_FOUND,
// and leaves its name in the file trace.log of the node's directory, and on stderr if GPUSIM_TRACE is set.
package main

/*
#include <stdlib.h>
*/
import "C"

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"unsafe"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

//go:generate go run ./stubs

func main() {} // a shared library has no program

// defaultNode is where a node is if nothing else is said.
const defaultNode = "/run/gpusim"

// process is the library's state in the program that has loaded it. C functions have nowhere else to keep it.
var process struct {
	mu      sync.Mutex
	library *gpusim.Library // nil before the first nvmlInit that found a node
	node    string          // directory that library is over
	version string          // of the driver that this file is a part of: the one that the first node had
	open    *os.File        // while the library is initialised: the kernel does not unload its driver
}

// nodeDir asks C, since a Go runtime sees only the environment that its program was started with.
func nodeDir() string {
	name := C.CString("GPUSIM_NODE")
	defer C.free(unsafe.Pointer(name))
	if dir := C.getenv(name); dir != nil && *dir != 0 {
		return C.GoString(dir)
	}
	return defaultNode
}

// lib returns the library; an uninitialized one answers every call with that.
func lib() *gpusim.Library {
	process.mu.Lock()
	defer process.mu.Unlock()
	if process.library == nil {
		return new(gpusim.Library)
	}
	return process.library
}

//export nvmlInit_v2
func nvmlInit_v2() int32 {
	process.mu.Lock()
	defer process.mu.Unlock()
	// Look for the node again, as for the driver: it may have been created, removed or replaced since.
	if dir := nodeDir(); process.library == nil || !process.library.Initialized() && (process.node != dir || !process.library.Present()) {
		l, r := gpusim.OpenLibrary(dir, process.version)
		if r != gpusim.Success {
			return int32(r)
		}
		if process.library != nil {
			_ = process.library.Close() // of no more use either way
		}
		process.library, process.node, process.version = l, dir, l.Version()
	}
	r := process.library.Init()
	if r == gpusim.Success && process.open == nil {
		open, err := gpusim.Hold(process.node)
		if err != nil {
			return int32(gpusim.OperatingSystem)
		}
		process.open = open
	}
	return int32(r)
}

//export nvmlInit
func nvmlInit() int32 { return nvmlInit_v2() }

//export nvmlInitWithFlags
func nvmlInitWithFlags(uint32) int32 { return nvmlInit_v2() }

//export nvmlShutdown
func nvmlShutdown() int32 {
	r := lib().Shutdown()
	process.mu.Lock()
	defer process.mu.Unlock()
	if process.open != nil && !process.library.Initialized() {
		_ = process.open.Close() // with it goes the lock
		process.open = nil
	}
	return int32(r)
}

// errorTexts keeps the C strings that nvmlErrorString has returned.
var errorTexts struct {
	mu sync.Mutex
	of map[int32]*C.char
}

//export nvmlErrorString
func nvmlErrorString(code int32) *C.char {
	errorTexts.mu.Lock()
	defer errorTexts.mu.Unlock()
	text, known := errorTexts.of[code]
	if !known {
		if errorTexts.of == nil {
			errorTexts.of = map[int32]*C.char{}
		}
		text = C.CString(gpusim.Return(code).Text())
		errorTexts.of[code] = text
	}
	return text
}

// missed are the names that gpusimMissing has reported, each for its node.
var missed sync.Map

// gpusimMissing implements the functions in stubs.c.
//
//export gpusimMissing
func gpusimMissing(name *C.char) int32 {
	function := C.GoString(name)
	if _, known := missed.LoadOrStore(nodeDir()+" "+function, true); known {
		return int32(gpusim.FunctionNotFound)
	}
	line := fmt.Sprintf("%s[%d]: %s is not simulated\n", filepath.Base(os.Args[0]), os.Getpid(), function)
	trace := C.CString("GPUSIM_TRACE")
	defer C.free(unsafe.Pointer(trace))
	if C.getenv(trace) != nil {
		fmt.Fprint(os.Stderr, line)
	}
	if f, err := os.OpenFile(filepath.Join(nodeDir(), "trace.log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o666); err == nil {
		_, _ = f.WriteString(line) // the trace is a convenience
		_ = f.Close()
	}
	return int32(gpusim.FunctionNotFound)
}

// handles are the pointers that C programs hold for devices, instances and event sets. Each stands for one value as long
// as the program runs; the memory behind it is only there so that no two are the same. But an instance gets the handle
// of the former one with its id. So a program cannot find out by a handle whether an instance is still the same.
var handles struct {
	mu      sync.Mutex
	pointer map[any]unsafe.Pointer
	value   map[unsafe.Pointer]any
	slot    map[any]unsafe.Pointer // by gpusim.Slot
}

func handleOf(v any) unsafe.Pointer {
	handles.mu.Lock()
	defer handles.mu.Unlock()
	if p, ok := handles.pointer[v]; ok {
		return p
	}
	if handles.pointer == nil {
		handles.pointer, handles.value, handles.slot = map[any]unsafe.Pointer{}, map[unsafe.Pointer]any{}, map[any]unsafe.Pointer{}
	}
	slot, has := lib().SlotOf(v)
	p, used := handles.slot[slot]
	if !has || !used {
		p = C.malloc(16)
	}
	if has {
		handles.slot[slot] = p
	}
	delete(handles.pointer, handles.value[p])
	handles.pointer[v], handles.value[p] = p, v
	return p
}

// behind is the value of a handle; it returns false for a pointer that is no handle, or one of another kind.
func behind[T any](p unsafe.Pointer) (T, bool) {
	handles.mu.Lock()
	defer handles.mu.Unlock()
	v, ok := handles.value[p].(T)
	return v, ok
}

func forget(p unsafe.Pointer) {
	handles.mu.Lock()
	defer handles.mu.Unlock()
	delete(handles.pointer, handles.value[p])
	delete(handles.value, p)
	C.free(p)
}

// on runs f on what a handle stands for.
func on[T any](p unsafe.Pointer, f func(T) gpusim.Return) int32 {
	if !lib().Initialized() {
		return int32(gpusim.Uninitialized)
	}
	v, ok := behind[T](p)
	if !ok {
		return int32(gpusim.InvalidArgument)
	}
	return int32(f(v))
}

// put writes a result, if there is one, to where the caller wants it.
func put[T any](to unsafe.Pointer, v T, r gpusim.Return) gpusim.Return {
	if to == nil {
		return gpusim.InvalidArgument
	}
	if r == gpusim.Success {
		*(*T)(to) = v
	}
	return r
}

// putHandle writes a handle for v.
func putHandle(to unsafe.Pointer, v any, r gpusim.Return) gpusim.Return {
	if to != nil && r == gpusim.Success {
		return put(to, handleOf(v), r)
	}
	return put(to, unsafe.Pointer(nil), r)
}

// putText writes a string and the zero behind it into a buffer.
func putText(to unsafe.Pointer, length uint32, text string, r gpusim.Return) gpusim.Return {
	switch {
	case r != gpusim.Success:
		return r
	case to == nil:
		return gpusim.InvalidArgument
	case int(length) <= len(text):
		return gpusim.InsufficientSize
	}
	fill(unsafe.Slice((*int8)(to), length), text)
	return gpusim.Success
}

// fill copies text into a field of a C struct.
func fill(field []int8, text string) {
	for i := range field {
		field[i] = 0
		if i < len(text) && i < len(field)-1 {
			field[i] = int8(text[i])
		}
	}
}

// putList writes a list as most functions do: with no array it only counts, with one that is too small it says so.
func putList[T any](array, count unsafe.Pointer, list []T, r gpusim.Return) gpusim.Return {
	switch {
	case count == nil:
		return gpusim.InvalidArgument
	case r != gpusim.Success:
		return r
	}
	n := (*uint32)(count)
	room := *n
	*n = uint32(len(list))
	switch {
	case len(list) == 0:
	case array == nil:
		if room > 0 {
			return gpusim.InvalidArgument
		}
	case int(room) < len(list):
		return gpusim.InsufficientSize
	default:
		copy(unsafe.Slice((*T)(array), len(list)), list)
	}
	return gpusim.Success
}

func bit(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}
