//go:build cgo

package agent_test

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
)

// useLibrary gives the agent that starts next the product's driver over the simulated library, instead of the
// simulator's own.
func (w *world) useLibrary() {
	w.t.Helper()
	file := gpusimtest.Library(w.t)
	w.wrapDriver = func(nvml.Driver) nvml.Driver { return lib.Open(lib.Options{Library: file}) }
}

// Error codes that the simulator does not give by itself.
const (
	insufficientPower gpusim.Return = 8
	irqIssue          gpusim.Return = 11
)

// documented are the error codes that nvml.h says a function returns, in the version that go-nvml v0.13.4-0 comes with.
// GetMemoryInfo, GetRunningProcesses and GetGpuInstanceProfileInfo stand for all forms of theirs, GetStatic for the
// compute capability and the virtualization mode. For functions that create and destroy compute instances nvml.h does not
// document NOT_SUPPORTED, but drivers return it all the same.
var documented = map[string][]gpusim.Return{
	gpusim.Init:                               {gpusim.DriverNotLoaded, gpusim.NoPermission, gpusim.Unknown},
	gpusim.GetCount:                           {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.Unknown},
	gpusim.GetHandleByIndex:                   {gpusim.Uninitialized, gpusim.InvalidArgument, insufficientPower, gpusim.NoPermission, irqIssue, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.GetUUID:                            {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.InsufficientSize, gpusim.NotSupported, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.GetIndex:                           {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.GetName:                            {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.InsufficientSize, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.GetMinorNumber:                     {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.GetPciInfo:                         {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.GetMemoryInfo:                      {gpusim.Uninitialized, gpusim.NoPermission, gpusim.InvalidArgument, gpusim.GPUIsLost, gpusim.NotSupported, gpusim.Unknown},
	gpusim.GetPersistenceMode:                 {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.SetPersistenceMode:                 {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.GetStatic:                          {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.GetComputeMode:                     {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.SetComputeMode:                     {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission, gpusim.GPUIsLost, gpusim.Unknown},
	gpusim.GetRunningProcesses:                {gpusim.Uninitialized, gpusim.InsufficientSize, gpusim.NoPermission, gpusim.InvalidArgument, gpusim.GPUIsLost, gpusim.NotSupported, gpusim.Unknown},
	gpusim.GetMigMode:                         {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.Unknown},
	gpusim.SetMigMode:                         {gpusim.ResetRequired, gpusim.InUse, gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NoPermission, gpusim.NotSupported},
	gpusim.GetGpuInstanceProfileInfo:          {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission},
	gpusim.GetGpuInstancePossiblePlacements:   {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission},
	gpusim.GetGpuInstanceRemainingCapacity:    {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission},
	gpusim.GetGpuInstances:                    {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission},
	gpusim.CreateGpuInstanceWithPlacement:     {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission, gpusim.InsufficientResources},
	gpusim.GpuInstanceGetInfo:                 {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NoPermission},
	gpusim.GpuInstanceDestroy:                 {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission, gpusim.InUse},
	gpusim.GetComputeInstanceProfileInfo:      {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission},
	gpusim.GetComputeInstancePlacements:       {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission},
	gpusim.GetComputeInstances:                {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission},
	gpusim.CreateComputeInstance:              {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission, gpusim.InsufficientResources},
	gpusim.CreateComputeInstanceWithPlacement: {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission, gpusim.InsufficientResources},
	gpusim.ComputeInstanceGetInfo:             {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NoPermission},
	gpusim.ComputeInstanceDestroy:             {gpusim.Uninitialized, gpusim.InvalidArgument, gpusim.NotSupported, gpusim.NoPermission, gpusim.InUse},
	gpusim.Shutdown:                           {gpusim.Uninitialized, gpusim.Unknown},
}

// anywhere are codes that any function may return when the driver, the GPU or the process is in trouble, documented or not.
var anywhere = []gpusim.Return{
	gpusim.Uninitialized, gpusim.DriverNotLoaded, gpusim.LibRMVersionMismatch, gpusim.GPUIsLost, gpusim.ResetRequired, gpusim.NotFound,
	gpusim.Timeout, gpusim.OperatingSystem, gpusim.NoMemory, gpusim.Unknown,
}

// activations are the second codes of SetMigMode: why the mode is not current.
var activations = []gpusim.Return{
	gpusim.InUse, gpusim.ResetRequired, gpusim.NotSupported, gpusim.NoPermission, gpusim.GPUIsLost, gpusim.Timeout, gpusim.Unknown,
}

// mishap is a fault at a spot.
type mishap struct {
	spot
	fault gpusim.Fault
}

func (m mishap) String() string {
	out := fmt.Sprintf("%v %v", m.spot, m.fault.Return)
	if m.fault.Return == gpusim.Success {
		out = fmt.Sprintf("%v activation %v", m.spot, m.fault.Activation)
	}
	if m.fault.Done {
		out += " done"
	}
	if m.fault.Times > 1 {
		out += fmt.Sprintf(" %d times", m.fault.Times)
	}
	return out
}

var everyFault = flag.Bool("everyfault", false,
	"TestEachCallOfTheLibraryFailsOnce has each call fail with each code, some 6,000 changes, and not each call and each code once")

// mishaps returns the faults of a function at the spots where the agent calls it, and those that last.
func mishaps(function string, spots []spot, failures, venture int) []mishap {
	codes := slices.Clone(anywhere)
	for _, c := range documented[function] {
		if !slices.Contains(codes, c) {
			codes = append(codes, c)
		}
	}
	changes := slices.Contains(changing, function)
	var out []mishap
	if *everyFault {
		out = everyMishap(spots, codes, changes)
	} else {
		out = coveringMishaps(spots, codes, changes, venture)
	}
	if changes {
		out = append(out, lasting(function, spots[0], codes, failures)...)
	}
	return out
}

// everyMishap lets each call that changes something fail with each code, before and after the driver has made the change, and so the
// first, the middle and the last of those that only read; the other calls fail with one code.
func everyMishap(spots []spot, codes []gpusim.Return, changes bool) []mishap {
	var out []mishap
	for n, s := range spots {
		these := []gpusim.Return{codes[(7*n+len(spots))%len(codes)]}
		if changes || slices.Contains(pick(spots), s) {
			these = codes
		}
		for _, code := range these {
			out = append(out, mishap{s, gpusim.Fault{Return: code}})
			if changes {
				out = append(out, mishap{s, gpusim.Fault{Return: code, Done: true}})
			}
		}
	}
	return out
}

// observations is how many calls of a function that only reads fail in a venture, spread over all of them: there are hundreds, of the same passes.
const observations = 4

// coveringMishaps lets each call that changes something fail before and after the driver has made the change, each with another code,
// and so some of those that only read. The first call of each function also fails with each code; if the function only reads, with every fourth
// code in each of the four ventures, each of which begins with another code.
func coveringMishaps(spots []spot, codes []gpusim.Return, changes bool, venture int) []mishap {
	every := 1
	if !changes {
		every = (len(spots) + observations - 1) / observations
	}
	var out []mishap
	for n := 0; n < len(spots); n += every {
		for k, code := range codes {
			one := k == (7*n+len(spots))%len(codes)
			first := n == 0 && (changes || k%len(ventures) == venture)
			if !one && !first {
				continue
			}
			out = append(out, mishap{spots[n], gpusim.Fault{Return: code}})
			if changes {
				out = append(out, mishap{spots[n], gpusim.Fault{Return: code, Done: true}})
			}
		}
	}
	return out
}

// lasting returns faults of a change that last as long as the agent tries; and those of SetMigMode's second code, which
// count as lasting.
func lasting(function string, at spot, codes []gpusim.Return, failures int) []mishap {
	var out []mishap
	for _, code := range codes {
		out = append(out, mishap{at, gpusim.Fault{Return: code, Times: failures}})
	}
	if function == gpusim.SetMigMode {
		for _, code := range activations {
			out = append(out, mishap{at, gpusim.Fault{Activation: code}})
		}
	}
	return out
}

// Promises 8 and 10. The test makes the whole change again for each fault.
func TestEachCallOfTheLibraryFailsOnce(t *testing.T) {
	if testing.Short() {
		t.Skip("it makes 1,283 changes")
	}
	for n, v := range ventures {
		t.Run(v.name, func(t *testing.T) {
			if gpusimtest.Apart(t) {
				return
			}
			var s stage
			var spots *[]spot
			failures := 0
			synctest.Test(t, func(t *testing.T) {
				w := v.prepare(t, gpusimtest.Dir(t))
				w.useLibrary()
				spots = w.recordCalls()
				w.restart()
				s = v.rehearse(t, w)
				failures = w.settings.Retry.Failures
			})
			ends := tally{}
			for _, function := range gpusim.Functions() {
				at := of(function, *spots)
				if len(at) == 0 {
					continue
				}
				if documented[function] == nil {
					t.Errorf("%s is called: what it may answer is not known", function)
				}
				for _, m := range mishaps(function, at, failures, n) {
					t.Run(m.String(), func(t *testing.T) {
						got, took := v.suffer(t, s, m)
						ends.add(m, got, took)
					})
				}
			}
			fmt.Print(ends)
		})
	}
}

// suffer makes the change with a fault in it.
func (v venture) suffer(t *testing.T, s stage, m mishap) (out end, took time.Duration) {
	t.Helper()
	began := time.Now()
	synctest.Test(t, func(t *testing.T) {
		w := v.prepare(t, gpusimtest.Dir(t))
		w.useLibrary()
		left := w.failAt(m.spot, m.fault)
		w.restart()
		w.label(v.request)
		out = v.conclude(w, s)
		if m.fault.Times == 0 && len(*left) > 0 {
			t.Errorf("the call was not made: %+v", *left)
		}
	})
	return out, time.Since(began)
}

// tally counts the ends of changes, for the log.
type tally map[end][]string

func (t tally) add(m mishap, e end, took time.Duration) {
	t[e] = append(t[e], fmt.Sprintf("%9s %v", took.Round(time.Millisecond), m))
}

// String returns the counts, the slowest run, and the runs that ended with the former config.
func (t tally) String() string {
	all := slices.Concat(t[asRequested], t[previous])
	slices.Sort(all)
	return fmt.Sprintf("%d as requested, %d as before, slowest %s\n%s\n",
		len(t[asRequested]), len(t[previous]), strings.TrimSpace(slices.Max(append(all, ""))), strings.Join(t[previous], "\n"))
}

// No pod can use a GPU instance without its compute instance. If the driver cannot remove it at once, the agent completes or removes it
// later.
func TestAHalfMadeInstanceDoesNotStay(t *testing.T) {
	if gpusimtest.Apart(t) {
		return
	}
	v := ventures[slices.IndexFunc(ventures, func(v venture) bool { return v.name == "a H100 is cut" })]
	var s stage
	synctest.Test(t, func(t *testing.T) { s = v.rehearse(t, v.prepare(t, gpusimtest.Dir(t))) })
	for _, row := range []struct {
		name     string
		times    int // that the compute instance cannot be made in the GPU instance that stands then
		restarts bool
		end      end
	}{
		{"the compute instance is made later", 1, false, asRequested},
		{"the compute instance is made by the next agent", 1, true, asRequested},
		{"the compute instance cannot be made", config.DefaultFailures, false, previous},
		{"the compute instance cannot be made, as the next agent finds out", config.DefaultFailures + 1, true, previous},
	} {
		t.Run(row.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := v.prepare(t, gpusimtest.Dir(t))
				w.useLibrary()
				w.restart()
				w.setFault(gpusim.CreateComputeInstance, gpusim.Fault{Return: gpusim.InsufficientResources})
				w.setFault(gpusim.CreateComputeInstanceWithPlacement, gpusim.Fault{Return: gpusim.InsufficientResources, Times: row.times})
				w.setFault(gpusim.GpuInstanceDestroy, gpusim.Fault{Return: gpusim.InUse})
				w.label(v.request)
				w.passes("half-made instance", func() bool { return strings.Contains(w.gpus.String(), "half-made") })
				if row.restarts {
					w.restart()
				}
				if got := v.conclude(w, s); got != row.end {
					t.Errorf("it came out %s, want %s: %s", got, row.end, w.condition().Message)
				}
			})
		})
	}
}
