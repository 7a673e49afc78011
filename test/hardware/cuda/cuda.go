// Package cuda does to a GPU what programs in pods do, through NVIDIA's driver alone. It has a context, takes memory, and runs a kernel
// that stores to an invalid address. It needs no CUDA toolkit: it opens libcuda.so.1 at run time, which compiles the kernel itself.
//
// Its effects end with the process. It changes no setting of the GPU.
package cuda

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>

// The few functions of cuda.h that are called here, by their addresses. A CUresult is an int.
static int cuda_uint(void *f, unsigned a) { return ((int (*)(unsigned))f)(a); }
static int cuda_int_int(void *f, int *out, int a) { return ((int (*)(int *, int))f)(out, a); }
static int cuda_context(void *f, void **out, int device) { return ((int (*)(void **, int))f)(out, device); }
static int cuda_pointer(void *f, void *a) { return ((int (*)(void *))f)(a); }
static int cuda_none(void *f) { return ((int (*)(void))f)(); }
static int cuda_sizes(void *f, size_t *a, size_t *b) { return ((int (*)(size_t *, size_t *))f)(a, b); }
static int cuda_allocate(void *f, unsigned long long *out, size_t size) { return ((int (*)(unsigned long long *, size_t))f)(out, size); }
static int cuda_load(void *f, void **out, const void *image) { return ((int (*)(void **, const void *))f)(out, image); }
static int cuda_function(void *f, void **out, void *module, const char *name) {
	return ((int (*)(void **, void *, const char *))f)(out, module, name);
}
static int cuda_launch(void *f, void *function) {
	return ((int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))f)(
		function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}
*/
import "C"

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"
)

// Library is the name of the driver's library for programs, which the dynamic loader finds.
const Library = "libcuda.so.1"

// illegalAddress is CUDA_ERROR_ILLEGAL_ADDRESS: the driver reports to a program that it has stopped its kernel.
const illegalAddress = 700

// faulting is a kernel that stores to an unmapped address. The driver compiles it for the GPU that is there: this version and
// target are known to each driver since 418 and each GPU since Turing.
const faulting = `.version 6.3
.target sm_75
.address_size 64

.visible .entry fault()
{
	.reg .u64 %address;
	.reg .u32 %value;
	mov.u64 %address, 4096;
	mov.u32 %value, 1;
	st.global.u32 [%address], %value;
	ret;
}
`

// Context is the context of this process on one GPU. It belongs to the thread that called Open. That thread then runs this goroutine
// alone.
type Context struct{ library unsafe.Pointer }

// Error is a result code of the driver.
type Error struct {
	Function string
	Code     int // CUresult
}

// Error names the function and the code, which NVIDIA's cuda.h explains.
func (e *Error) Error() string { return fmt.Sprintf("%s: CUDA error %d", e.Function, e.Code) }

// Open makes a context on the GPU with that UUID. The process can have one alone.
func Open(gpu string) (*Context, error) {
	// The driver reads these when it is initialised: it counts no other GPU then, and keeps no compiled kernel in the user's home.
	for name, value := range map[string]string{"CUDA_VISIBLE_DEVICES": gpu, "CUDA_CACHE_DISABLE": "1"} {
		if err := os.Setenv(name, value); err != nil {
			return nil, fmt.Errorf("choosing GPU %s: %w", gpu, err)
		}
	}
	runtime.LockOSThread()
	name := C.CString(Library)
	defer C.free(unsafe.Pointer(name))
	c := &Context{library: C.dlopen(name, C.RTLD_NOW)}
	if c.library == nil {
		return nil, fmt.Errorf("opening %s: %s; it comes with NVIDIA's driver, and has to be where the dynamic loader looks, or in LD_LIBRARY_PATH",
			Library, C.GoString(C.dlerror()))
	}
	if err := c.begin(); err != nil {
		return nil, fmt.Errorf("making a context on %s: %w", gpu, err)
	}
	return c, nil
}

func (c *Context) begin() error {
	if err := c.call("cuInit", func(f unsafe.Pointer) C.int { return C.cuda_uint(f, 0) }); err != nil {
		return err
	}
	var device C.int
	if err := c.call("cuDeviceGet", func(f unsafe.Pointer) C.int { return C.cuda_int_int(f, &device, 0) }); err != nil {
		return err
	}
	var context unsafe.Pointer
	if err := c.call("cuDevicePrimaryCtxRetain", func(f unsafe.Pointer) C.int { return C.cuda_context(f, &context, device) }); err != nil {
		return err
	}
	return c.call("cuCtxSetCurrent", func(f unsafe.Pointer) C.int { return C.cuda_pointer(f, context) })
}

// Memory returns the bytes of the GPU that are free, and all that programs may have.
func (c *Context) Memory() (free, total uint64, err error) {
	var a, b C.size_t
	err = c.call("cuMemGetInfo_v2", func(f unsafe.Pointer) C.int { return C.cuda_sizes(f, &a, &b) })
	return uint64(a), uint64(b), err
}

// Allocate takes so many bytes of the GPU's memory, for the life of the process.
func (c *Context) Allocate(bytes uint64) error {
	var at C.ulonglong
	return c.call("cuMemAlloc_v2", func(f unsafe.Pointer) C.int { return C.cuda_allocate(f, &at, C.size_t(bytes)) })
}

// Fault runs the kernel that stores where nothing is, and returns nil if the driver has stopped it for that. The context is of no more use then.
func (c *Context) Fault() error {
	text := C.CString(faulting)
	defer C.free(unsafe.Pointer(text))
	var module, function unsafe.Pointer
	if err := c.call("cuModuleLoadData", func(f unsafe.Pointer) C.int { return C.cuda_load(f, &module, unsafe.Pointer(text)) }); err != nil {
		return err
	}
	name := C.CString("fault")
	defer C.free(unsafe.Pointer(name))
	if err := c.call("cuModuleGetFunction", func(f unsafe.Pointer) C.int { return C.cuda_function(f, &function, module, name) }); err != nil {
		return err
	}
	if err := c.call("cuLaunchKernel", func(f unsafe.Pointer) C.int { return C.cuda_launch(f, function) }); err != nil {
		return err
	}
	code, err := c.ask("cuCtxSynchronize", func(f unsafe.Pointer) C.int { return C.cuda_none(f) })
	switch {
	case err != nil:
		return err
	case code != illegalAddress:
		return fmt.Errorf("a kernel that stores to an address which no one has ended with CUDA error %d, and not with %d", code, illegalAddress)
	}
	return nil
}

func (c *Context) call(name string, f func(unsafe.Pointer) C.int) error {
	code, err := c.ask(name, f)
	if err == nil && code != 0 {
		err = &Error{Function: name, Code: code}
	}
	return err
}

// ask calls a function of the library, and returns its code.
func (c *Context) ask(name string, f func(unsafe.Pointer) C.int) (code int, err error) {
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	at := C.dlsym(c.library, text)
	if at == nil {
		return 0, fmt.Errorf("%s has no function %s", Library, name)
	}
	return int(f(at)), nil
}
