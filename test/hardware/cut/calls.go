package cut

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Calls times calls into NVIDIA's library where the agent's driver makes them: nvml/lib.Options.Wrap takes Wrap.
type Calls struct {
	mu   sync.Mutex
	lib  nv.Interface
	made []Call
}

// Call is one call into the library.
type Call struct {
	Function string // as test/gpusim names it
	Took     time.Duration
	Refused  bool // it returned another code than SUCCESS
}

// Take returns the calls since the last Take.
func (c *Calls) Take() []Call {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.made
	c.made = nil
	return out
}

// Wrap times the calls of a library.
func (c *Calls) Wrap(lib nv.Interface) nv.Interface {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lib = timedLibrary{lib, c}
	return c.lib
}

func (c *Calls) note(function string, took time.Duration, ret nv.Return) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made = append(c.made, Call{function, took, ret != nv.SUCCESS})
}

// begin begins a call. What it returns ends it, with what the call has returned.
func (c *Calls) begin(function string) (end func(*nv.Return)) {
	began := time.Now()
	return func(ret *nv.Return) { c.note(function, time.Since(began), *ret) }
}

// apart makes calls that the driver does not make, and abandons them at their deadline. The error then matches nvml.ErrUnresponsive.
func apart(ctx context.Context, calls func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- calls(ctx) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", nvml.ErrUnresponsive, ctx.Err())
	}
}

// version names the driver, for people.
func (c *Calls) version(ctx context.Context) string {
	var version string
	if err := apart(ctx, func(context.Context) error {
		v, ret := c.lib.SystemGetDriverVersion()
		if ret != nv.SUCCESS {
			return ret
		}
		version = v
		return nil
	}); err != nil {
		return "a driver that does not say its version"
	}
	return "driver " + version
}

// walk takes the handle of each MIG device of a GPU by its index, and by its UUID. For the UUID the library goes through all MIG devices of the machine,
// which are so many. The library has to be open, and no other call may run. No call begins after the end of ctx.
func (c *Calls) walk(ctx context.Context, index, devices int) error {
	d, ret := c.lib.DeviceGetHandleByIndex(index)
	if ret != nv.SUCCESS {
		return ret
	}
	most, ret := d.GetMaxMigDeviceCount()
	if ret != nv.SUCCESS {
		return ret
	}
	for i := range most {
		if err := ctx.Err(); err != nil {
			return err
		}
		began := time.Now()
		mig, ret := d.GetMigDeviceHandleByIndex(i)
		if ret == nv.ERROR_NOT_FOUND {
			continue // there may be fewer
		}
		c.note(gpusim.GetMigDeviceHandleByIndex, time.Since(began), ret)
		if ret != nv.SUCCESS {
			return ret
		}
		uuid, ret := mig.GetUUID()
		if ret != nv.SUCCESS {
			return ret
		}
		began = time.Now()
		_, ret = c.lib.DeviceGetHandleByUUID(uuid)
		c.note(gpusim.WalkMIGDevice, time.Since(began)/time.Duration(devices), ret)
		if ret != nv.SUCCESS {
			return ret
		}
	}
	return nil
}

// The types below are values that can be compared: the driver compares handles.
type (
	timedLibrary struct {
		nv.Interface
		calls *Calls
	}
	timedGPU struct {
		nv.Device
		calls *Calls
	}
	timedInstance struct {
		nv.GpuInstance
		calls *Calls
	}
	timedPart struct {
		nv.ComputeInstance
		calls *Calls
	}
)

// Init implements nv.Interface.
func (l timedLibrary) Init() (ret nv.Return) {
	defer l.calls.begin(gpusim.Init)(&ret)
	return l.Interface.Init()
}

// DeviceGetHandleByIndex implements nv.Interface.
func (l timedLibrary) DeviceGetHandleByIndex(index int) (nv.Device, nv.Return) {
	d, ret := l.Interface.DeviceGetHandleByIndex(index)
	return timedGPU{d, l.calls}, ret
}

// GetMigMode implements nv.Device.
func (d timedGPU) GetMigMode() (current, pending int, ret nv.Return) {
	defer d.calls.begin(gpusim.GetMigMode)(&ret)
	return d.Device.GetMigMode()
}

// SetMigMode implements nv.Device.
func (d timedGPU) SetMigMode(mode int) (activation, ret nv.Return) {
	defer d.calls.begin(gpusim.SetMigMode)(&ret)
	return d.Device.SetMigMode(mode)
}

// CreateGpuInstanceWithPlacement implements nv.Device.
func (d timedGPU) CreateGpuInstanceWithPlacement(info *nv.GpuInstanceProfileInfo, at *nv.GpuInstancePlacement) (i nv.GpuInstance, ret nv.Return) {
	defer d.calls.begin(gpusim.CreateGpuInstanceWithPlacement)(&ret)
	i, ret = d.Device.CreateGpuInstanceWithPlacement(info, at)
	return timedInstance{i, d.calls}, ret
}

// GetGpuInstances implements nv.Device.
func (d timedGPU) GetGpuInstances(info *nv.GpuInstanceProfileInfo) ([]nv.GpuInstance, nv.Return) {
	found, ret := d.Device.GetGpuInstances(info)
	for n := range found {
		found[n] = timedInstance{found[n], d.calls}
	}
	return found, ret
}

// Destroy implements nv.GpuInstance.
func (i timedInstance) Destroy() (ret nv.Return) {
	defer i.calls.begin(gpusim.GpuInstanceDestroy)(&ret)
	return i.GpuInstance.Destroy()
}

// CreateComputeInstance implements nv.GpuInstance.
func (i timedInstance) CreateComputeInstance(info *nv.ComputeInstanceProfileInfo) (p nv.ComputeInstance, ret nv.Return) {
	defer i.calls.begin(gpusim.CreateComputeInstance)(&ret)
	p, ret = i.GpuInstance.CreateComputeInstance(info)
	return timedPart{p, i.calls}, ret
}

// CreateComputeInstanceWithPlacement implements nv.GpuInstance.
func (i timedInstance) CreateComputeInstanceWithPlacement(info *nv.ComputeInstanceProfileInfo, at *nv.ComputeInstancePlacement) (p nv.ComputeInstance, ret nv.Return) {
	defer i.calls.begin(gpusim.CreateComputeInstanceWithPlacement)(&ret)
	p, ret = i.GpuInstance.CreateComputeInstanceWithPlacement(info, at)
	return timedPart{p, i.calls}, ret
}

// GetComputeInstances implements nv.GpuInstance.
func (i timedInstance) GetComputeInstances(info *nv.ComputeInstanceProfileInfo) ([]nv.ComputeInstance, nv.Return) {
	found, ret := i.GpuInstance.GetComputeInstances(info)
	for n := range found {
		found[n] = timedPart{found[n], i.calls}
	}
	return found, ret
}

// GetInfo implements nv.ComputeInstance.
func (p timedPart) GetInfo() (info nv.ComputeInstanceInfo, ret nv.Return) {
	defer p.calls.begin(gpusim.ComputeInstanceGetInfo)(&ret)
	return p.ComputeInstance.GetInfo()
}

// Destroy implements nv.ComputeInstance.
func (p timedPart) Destroy() (ret nv.Return) {
	defer p.calls.begin(gpusim.ComputeInstanceDestroy)(&ret)
	return p.ComputeInstance.Destroy()
}

// changes reports whether a function changes a GPU.
func changes(function string) bool {
	return function == gpusim.SetMigMode || strings.HasPrefix(function, "Create") || strings.HasSuffix(function, "Destroy")
}

// changing is the time of the calls that change a GPU.
func changing(calls []Call) time.Duration {
	var sum time.Duration
	for _, c := range slices.DeleteFunc(slices.Clone(calls), func(c Call) bool { return !changes(c.Function) }) {
		sum += c.Took
	}
	return sum
}
