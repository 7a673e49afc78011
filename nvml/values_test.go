package nvml_test

import (
	"errors"
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
	}{{nvml.Told(true), true}, {nvml.Told(false), false}, {nvml.Reading[bool]{}, false}, {nvml.Reading[bool]{Value: true}, false}} {
		if nvml.IsSet(row.reading) != row.want {
			t.Errorf("%+v is set: %t", row.reading, !row.want)
		}
	}
}
