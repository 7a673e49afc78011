package gpusim

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Functions of the library by the names that Fail, Delay and Calls use: those of nvml.h without "nvml", "Device" and
// version suffixes. Reset is not a function of NVML: it is what nvidia-smi and the bus do.
const (
	Init     = "Init"
	Shutdown = "Shutdown"

	GetDriverVersion     = "GetDriverVersion"
	GetCount             = "GetCount"
	GetHandleByIndex     = "GetHandleByIndex"
	GetHandleByUUID      = "GetHandleByUUID"
	GetHandleByPciBusId  = "GetHandleByPciBusId"
	GetHandleBySerial    = "GetHandleBySerial"
	GetName              = "GetName"
	GetUUID              = "GetUUID"
	GetIndex             = "GetIndex"
	GetMinorNumber       = "GetMinorNumber"
	GetSerial            = "GetSerial"
	GetPciInfo           = "GetPciInfo"
	GetMemoryInfo        = "GetMemoryInfo"
	GetStatic            = "GetStatic" // architecture, brand, compute capability and the like
	GetPersistenceMode   = "GetPersistenceMode"
	SetPersistenceMode   = "SetPersistenceMode"
	GetComputeMode       = "GetComputeMode"
	SetComputeMode       = "SetComputeMode"
	GetRunningProcesses  = "GetRunningProcesses"
	GetHealth            = "GetHealth"      // ECC counters, remapped rows, SRAM, repairs, fabric
	GetFieldValues       = "GetFieldValues" // the same as fields, and the recovery action
	GetMigMode           = "GetMigMode"
	SetMigMode           = "SetMigMode"
	GetMaxMigDeviceCount = "GetMaxMigDeviceCount"

	GetMigDeviceHandleByIndex = "GetMigDeviceHandleByIndex"
	GetAttributes             = "GetAttributes"
	GetInstanceIds            = "GetInstanceIds"

	GetGpuInstanceProfileInfo        = "GetGpuInstanceProfileInfo"
	GetGpuInstancePossiblePlacements = "GetGpuInstancePossiblePlacements"
	GetGpuInstanceRemainingCapacity  = "GetGpuInstanceRemainingCapacity"
	GetGpuInstances                  = "GetGpuInstances"
	GetGpuInstanceById               = "GetGpuInstanceById"
	CreateGpuInstance                = "CreateGpuInstance"
	CreateGpuInstanceWithPlacement   = "CreateGpuInstanceWithPlacement"
	GpuInstanceGetInfo               = "GpuInstanceGetInfo"
	GpuInstanceDestroy               = "GpuInstanceDestroy"

	GetComputeInstanceProfileInfo      = "GetComputeInstanceProfileInfo"
	GetComputeInstanceRemaining        = "GetComputeInstanceRemainingCapacity"
	GetComputeInstancePlacements       = "GetComputeInstancePossiblePlacements"
	GetComputeInstances                = "GetComputeInstances"
	GetComputeInstanceById             = "GetComputeInstanceById"
	CreateComputeInstance              = "CreateComputeInstance"
	CreateComputeInstanceWithPlacement = "CreateComputeInstanceWithPlacement"
	ComputeInstanceGetInfo             = "ComputeInstanceGetInfo"
	ComputeInstanceDestroy             = "ComputeInstanceDestroy"

	GetProcessUtilization = "GetProcessUtilization"
	GpmQueryDeviceSupport = "GpmQueryDeviceSupport"
	GpmSampleGet          = "GpmSampleGet"
	GpmMigSampleGet       = "GpmMigSampleGet"
	GpmMetricsGet         = "GpmMetricsGet"

	RegisterEvents = "RegisterEvents"
	EventSetWait   = "EventSetWait"

	Reset = "Reset"

	// WalkMIGDevice is not a function of NVML either: GetHandleByUUID of a MIG device does it for each MIG device of the node.
	WalkMIGDevice = "WalkMIGDevice"
)

var functions = []string{
	Init, Shutdown, GetDriverVersion, GetCount, GetHandleByIndex, GetHandleByUUID, GetHandleByPciBusId, GetHandleBySerial,
	GetName, GetUUID, GetIndex, GetMinorNumber, GetSerial, GetPciInfo, GetMemoryInfo, GetStatic, GetPersistenceMode,
	SetPersistenceMode, GetComputeMode, SetComputeMode, GetRunningProcesses, GetHealth, GetFieldValues, GetMigMode, SetMigMode,
	GetMaxMigDeviceCount, GetMigDeviceHandleByIndex, GetAttributes, GetInstanceIds, GetGpuInstanceProfileInfo,
	GetGpuInstancePossiblePlacements, GetGpuInstanceRemainingCapacity, GetGpuInstances, GetGpuInstanceById,
	CreateGpuInstance, CreateGpuInstanceWithPlacement, GpuInstanceGetInfo, GpuInstanceDestroy,
	GetComputeInstanceProfileInfo, GetComputeInstanceRemaining, GetComputeInstancePlacements, GetComputeInstances,
	GetComputeInstanceById, CreateComputeInstance, CreateComputeInstanceWithPlacement, ComputeInstanceGetInfo,
	ComputeInstanceDestroy, RegisterEvents, EventSetWait, Reset,
	GetProcessUtilization, GpmQueryDeviceSupport, GpmSampleGet, GpmMigSampleGet, GpmMetricsGet, WalkMIGDevice,
}

// Functions are the names of all functions.
func Functions() []string { return slices.Clone(functions) }

func checkFunction(name string) error {
	if slices.Contains(functions, name) {
		return nil
	}
	return fmt.Errorf("function %q is not known: use one of %s", name, strings.Join(functions, ", "))
}

// Fault is what a function does instead of its work.
type Fault struct {
	// Return is the code that the call returns.
	Return Return `json:"return,omitempty"`
	// Activation is the second code of SetMigMode. With Return Success and another Activation, the mode stays pending
	// on GPUs that support that.
	Activation Return `json:"activation,omitempty"`
	// Hang blocks the call until the fault is removed; then the call does its work.
	Hang bool `json:"hang,omitempty"`
	// Done lets the call do its work before it returns Return, as when an answer is lost.
	Done bool `json:"done,omitempty"`
	// After is how many calls go well first.
	After int `json:"after,omitempty"`
	// Times is how many calls fail after that: 0 is one, -1 all of them. A Hang lasts until it is removed.
	Times int `json:"times,omitempty"`
	// For is how long calls fail, from the first one that does, instead of Times. Drivers refuse to destroy an instance for some tenths of a second
	// after its last process has ended.
	For time.Duration `json:"for,omitempty"`
	// Until is the end of For once a call has failed; the simulator sets it.
	Until time.Time `json:"until,omitzero"`
	// GPU limits the fault to calls about one GPU, by its UUID. It needs a function that is about a GPU.
	GPU string `json:"gpu,omitempty"`
}

// strike finds the fault of a call, and counts the call. The state is a writer's own copy.
func (s *state) strike(function, gpu string) (Fault, bool) {
	now := time.Now()
	faults := slices.DeleteFunc(s.Faults[function], func(f Fault) bool { return !f.Until.IsZero() && now.After(f.Until) })
	defer func() {
		if s.Faults[function] = faults; len(faults) == 0 {
			delete(s.Faults, function)
		}
	}()
	for i := range faults {
		f := &faults[i]
		if f.GPU != "" && f.GPU != gpu {
			continue
		}
		if f.After > 0 {
			f.After--
			continue
		}
		hit := *f
		switch {
		case f.For > 0 && f.Until.IsZero():
			f.Until = now.Add(f.For)
		case f.For > 0 || f.Hang || f.Times < 0:
		case f.Times > 1:
			f.Times--
		default:
			faults = slices.Delete(faults, i, i+1)
		}
		return hit, true
	}
	return Fault{}, false
}

// hangs reports whether a call would still hang.
func (s *state) hangs(function, gpu string) bool {
	return slices.ContainsFunc(s.Faults[function], func(f Fault) bool {
		return f.Hang && f.After == 0 && (f.GPU == "" || f.GPU == gpu)
	})
}

// pollInterval is how often a waiting call looks for changes made by other processes.
const pollInterval = 20 * time.Millisecond

// wait returns after d, or when the node is closed.
func (s *store) wait(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-s.closed:
	}
}

// hang returns when the function's fault is removed, or the node is closed.
func (s *store) hang(function, gpu string) {
	for {
		changed := s.change()
		st, err := s.load()
		if err != nil || !st.hangs(function, gpu) {
			return
		}
		t := time.NewTimer(pollInterval)
		select {
		case <-changed:
		case <-t.C:
		case <-s.closed:
			t.Stop()
			return
		}
		t.Stop()
	}
}
