package nvml_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/gpuslice/gpuslice/nvml"
)

func TestAnErrorNamesTheOperationTheGPUAndTheCause(t *testing.T) {
	for want, e := range map[string]*nvml.Error{
		"resetting on GPU-0: ERROR_IN_USE":                         {Op: "resetting", GPU: "GPU-0", Code: "ERROR_IN_USE"},
		"listing: driver does not answer":                          {Op: "listing", Err: nvml.ErrUnresponsive},
		"listing on GPU-0: driver does not answer (ERROR_TIMEOUT)": {Op: "listing", GPU: "GPU-0", Err: nvml.ErrUnresponsive, Code: "ERROR_TIMEOUT"},
	} {
		if e.Error() != want || !errors.Is(e, e.Err) && e.Err != nil {
			t.Errorf("the error is %q, want %q", e, want)
		}
	}
}

func TestRecoveryActionsThatAreKnown(t *testing.T) {
	for action, want := range map[nvml.RecoveryAction]string{
		-1: "action -1, which this agent does not know", nvml.RecoverNothing: "none", nvml.RecoverByMachineReboot: "system reboot",
		nvml.RecoverByMachineReboot + 1: "action 8, which this agent does not know",
	} {
		if known := action >= 0 && action <= nvml.RecoverByMachineReboot; action.String() != want || action.Known() != known {
			t.Errorf("%d is %q, known: %t; want %q", int(action), action, action.Known(), want)
		}
	}
}

func TestAReadingIsSetIfItIsKnownAndTrue(t *testing.T) {
	for _, row := range []struct {
		reading nvml.Reading[bool]
		want    bool
	}{{nvml.Answered(true), true}, {nvml.Answered(false), false}, {nvml.Reading[bool]{}, false}, {nvml.Reading[bool]{Value: true}, false}} {
		if nvml.IsSet(row.reading) != row.want {
			t.Errorf("%+v is set: %t", row.reading, !row.want)
		}
	}
}

func TestComputeCapabilitiesAreOrderedByMajorAndThenMinor(t *testing.T) {
	for have, want := range map[nvml.ComputeCapability]bool{
		{Major: 8, Minor: 6}: true, {Major: 8, Minor: 7}: true, {Major: 9}: true, {Major: 8, Minor: 5}: false, {Major: 7, Minor: 9}: false, {}: false,
	} {
		if have.AtLeast(8, 6) != want {
			t.Errorf("%s is at least 8.6: %t", have, !want)
		}
	}
}

// An instance is named after its parts, unless it is one part as large as itself.
func TestAnInstanceIsNamedAfterItsParts(t *testing.T) {
	part := func(start, size int) nvml.Device {
		return nvml.Device{Part: nvml.Part{Name: map[int]string{1: "1c", 2: "2c", 3: "3c"}[size], Span: nvml.Span{Start: start, Size: size}}}
	}
	for _, row := range []struct {
		parts   []nvml.Device
		compute string
		devices []string
	}{
		{[]nvml.Device{part(0, 3)}, "", []string{"3g.40gb"}},
		{[]nvml.Device{part(0, 1)}, "1c", []string{"1c.3g.40gb"}},
		{[]nvml.Device{part(1, 2), part(0, 1)}, "1c+2c", []string{"1c.3g.40gb", "2c.3g.40gb"}},
		{nil, "", nil},
	} {
		i := nvml.Instance{Placed: nvml.Placed{Profile: "3g.40gb"}}.Divided(nvml.Profile{Name: "3g.40gb", Slices: 3}, row.parts)
		var devices []string
		for _, d := range i.Devices {
			devices = append(devices, d.Profile)
		}
		if i.Compute != row.compute || !slices.Equal(devices, row.devices) {
			t.Errorf("the parts are %q, the devices %v; want %q, %v", i.Compute, devices, row.compute, row.devices)
		}
	}
}

// A process that the driver shows on no device may be on each of them.
func TestProcessesOnADevice(t *testing.T) {
	mine, others, unknown := nvml.Process{PID: 1}, nvml.Process{PID: 2}, nvml.Process{PID: 3}
	a, b := nvml.Device{UUID: "a", Processes: []nvml.Process{mine}}, nvml.Device{UUID: "b", Processes: []nvml.Process{others}}
	i := nvml.Instance{Devices: []nvml.Device{a, b}, Processes: []nvml.Process{mine, others, unknown}}
	if got := i.ProcessesOn(a); len(got) != 2 || got[0].PID != 1 || got[1].PID != 3 {
		t.Errorf("on device a are %v, want its own and the one of no device", got)
	}
}
