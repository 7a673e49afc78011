package lib_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
)

// scenarios are played on the library and on the simulator's own Driver, which must report and do the same. A line is a
// step: "on 0", "off 0", "create 0 3g.40gb@4", "create 0 3g.40gb(1c+2c)@0", "destroy 0 3g.40gb@4", "add 0 3g.40gb@4 1c@1" and
// "take 0 3g.40gb@4 1c@1" (a part of what stands there), "reset 0",
// "hold 0@4 4711", "hold 0 4711" (the whole GPU), "client 0 4711" (of MPS), "release 4711", "persist 0", "unpersist 0", "compute 0
// exclusive-process", "reboot", "fail Function ERROR_CODE", "lose Function ERROR_CODE" (it does its work and fails all the same).
var scenarios = []struct {
	name, spec, steps string
}{
	{"every model, as it comes", `gpus: [{model: A100-40GB}, {model: A100-80GB}, {model: A30}, {model: H100-80GB},
		{model: H200}, {model: B200}, {model: RTX-PRO-6000}, {model: T4}]`, ``},
	{"cut and uncut", "gpus: [{model: H200}]", `
		on 0
		create 0 3g.71gb@4
		create 0 1g.18gb@0
		create 0 1g.18gb+me@1
		create 0 2g.35gb@2
		create 0 1g.18gb@0
		destroy 0 3g.71gb@4
		destroy 0 3g.71gb@4
		create 0 1g.35gb@6
		off 0`},
	{"divided instances", "gpus: [{model: A100-80GB, mig: true}]", `
		create 0 3g.40gb(1c+2c)@0
		create 0 4g.40gb(2c+2c)@0
		create 0 3g.40gb(1c+1c+1c)@4
		create 0 3g.40gb(1c+2c)@4
		create 0 3g.40gb(1c+2c)@0
		destroy 0 3g.40gb(1c+2c)@0
		create 0 2g.20gb(1c)@0
		destroy 0 2g.20gb(1c)@0
		create 0 4g.40gb(1c+1c+2c)@0`},
	{"parts of an instance come and go", "gpus: [{model: A100-80GB, mig: true}]", `
		create 0 3g.40gb(1c)@4
		hold 0@4 4711
		add 0 3g.40gb@4 1c@1
		add 0 3g.40gb@4 1c@1
		add 0 3g.40gb@4 2c@0
		add 0 3g.40gb@4 1c@2
		take 0 3g.40gb@4 1c@0
		take 0 3g.40gb@4 1c@1
		take 0 3g.40gb@4 1c@1
		release 4711
		take 0 3g.40gb@4 1c@0
		add 0 3g.40gb@4 2c@0
		take 0 3g.40gb@4 1c@2
		take 0 3g.40gb@4 2c@0
		add 0 3g.40gb@4 3c@0
		take 0 3g.40gb@0 1c@0
		add 0 3g.40gb@0 1c@0`},
	{"a part that is not made or not removed leaves the others as they are", "gpus: [{model: H100-80GB, mig: true}]", `
		create 0 3g.40gb(1c+1c)@4
		fail CreateComputeInstanceWithPlacement ERROR_INSUFFICIENT_RESOURCES
		add 0 3g.40gb@4 1c@2
		lose CreateComputeInstanceWithPlacement ERROR_UNKNOWN
		add 0 3g.40gb@4 1c@2
		add 0 3g.40gb@4 1c@2
		fail ComputeInstanceDestroy ERROR_IN_USE
		take 0 3g.40gb@4 1c@1
		lose ComputeInstanceDestroy ERROR_UNKNOWN
		take 0 3g.40gb@4 1c@1
		take 0 3g.40gb@4 1c@1`},
	{"what does not fit", "gpus: [{model: A100-80GB, mig: true}]", `
		create 0 3g.40gb@0
		create 0 4g.40gb@0
		create 0 1g.10gb@1
		create 0 3g.40gb@4
		create 0 1g.10gb@6`},
	{"nothing is created with the mode off", "gpus: [{model: H100-80GB}]", `
		create 0 3g.40gb@0
		destroy 0 3g.40gb@0`},
	{"who holds an instance keeps it", "gpus: [{model: H100-80GB, mig: true}]", `
		create 0 3g.40gb@0
		create 0 3g.40gb@4
		hold 0@4 4711
		hold 0@4 4712
		destroy 0 3g.40gb@4
		destroy 0 3g.40gb@0
		release 4711
		destroy 0 3g.40gb@4
		release 4712
		destroy 0 3g.40gb@4`},
	{"an Ampere GPU waits with the mode until it is free", "gpus: [{model: A100-40GB}, {model: A100-40GB}]", `
		hold 1 4711
		on 1
		on 1
		release 4711
		reset 1
		create 1 7g.40gb@0
		hold 1@0 4712
		off 1
		release 4712
		off 1
		on 0`},
	{"a pending change can be taken back", "gpus: [{model: A100-40GB}]", `
		hold 0 4711
		on 0
		off 0
		release 4711`},
	{"a Hopper GPU does not take the mode while it is held", "gpus: [{model: H100-80GB}]", `
		hold 0 4711
		on 0
		release 4711
		on 0`},
	{"in a virtual machine an Ampere GPU waits for the reboot", "gpus: [{model: A100-80GB, passthrough: true}]", `
		on 0
		reset 0
		reboot
		create 0 1g.10gb@3
		reboot`},
	{"a Hopper GPU forgets the mode", "gpus: [{model: H100-80GB, mig: true}]", `
		create 0 1g.10gb@3
		reboot`},
	{"a GPU without MIG", "gpus: [{model: T4}]", `
		hold 0 4711
		on 0`},
	{"a failed compute instance leaves nothing behind", "gpus: [{model: H100-80GB, mig: true}]", `
		fail CreateComputeInstance ERROR_UNKNOWN
		create 0 3g.40gb@0
		create 0 3g.40gb@0`},
	{"a half-made instance is seen, and is completed", "gpus: [{model: H100-80GB, mig: true}]", `
		fail CreateComputeInstance ERROR_UNKNOWN
		fail GpuInstanceDestroy ERROR_UNKNOWN
		create 0 3g.40gb@0
		create 0 3g.40gb@0`},
	{"a half-made instance is seen, and is destroyed", "gpus: [{model: H100-80GB, mig: true}]", `
		fail CreateComputeInstance ERROR_UNKNOWN
		fail GpuInstanceDestroy ERROR_UNKNOWN
		create 0 3g.40gb@0
		destroy 0 3g.40gb@0`},
	{"a half-made instance that cannot be completed is removed", "gpus: [{model: H100-80GB, mig: true}]", `
		fail CreateComputeInstance ERROR_UNKNOWN
		fail GpuInstanceDestroy ERROR_IN_USE
		create 0 3g.40gb@0
		fail CreateComputeInstance ERROR_INSUFFICIENT_RESOURCES
		create 0 3g.40gb@0
		create 0 3g.40gb@0`},
	{"an answer that is lost leaves nothing behind that is not shown", "gpus: [{model: H100-80GB, mig: true}]", `
		lose CreateComputeInstance ERROR_UNKNOWN
		create 0 3g.40gb@0
		lose CreateGpuInstanceWithPlacement ERROR_UNKNOWN
		create 0 3g.40gb@0
		destroy 0 3g.40gb@0
		create 0 3g.40gb@4
		lose ComputeInstanceDestroy ERROR_UNKNOWN
		destroy 0 3g.40gb@4
		lose GpuInstanceDestroy ERROR_UNKNOWN
		destroy 0 3g.40gb@4
		destroy 0 3g.40gb@4`},
	{"an instance that cannot go stands as before", "gpus: [{model: H100-80GB, mig: true}]", `
		create 0 3g.40gb@0
		create 0 3g.40gb(1c+2c)@4
		fail GpuInstanceDestroy ERROR_IN_USE
		destroy 0 3g.40gb@0
		fail ComputeInstanceDestroy ERROR_IN_USE
		destroy 0 3g.40gb(1c+2c)@4
		destroy 0 3g.40gb(1c+2c)@4
		destroy 0 3g.40gb@0`},
	{"an instance that neither goes nor stands as before is half made, and goes later", "gpus: [{model: H100-80GB, mig: true}]", `
		create 0 3g.40gb@0
		fail GpuInstanceDestroy ERROR_IN_USE
		fail CreateComputeInstance ERROR_UNKNOWN
		fail CreateComputeInstanceWithPlacement ERROR_UNKNOWN
		destroy 0 3g.40gb@0
		destroy 0 3g.40gb@0`},
	{"codes are reported", "gpus: [{model: H100-80GB, mig: true}]", `
		fail CreateGpuInstanceWithPlacement ERROR_NO_PERMISSION
		create 0 3g.40gb@0
		fail CreateGpuInstanceWithPlacement ERROR_RESET_REQUIRED
		create 0 3g.40gb@0
		fail CreateGpuInstanceWithPlacement ERROR_INSUFFICIENT_RESOURCES
		create 0 3g.40gb@0
		fail SetMigMode ERROR_NO_PERMISSION
		off 0`},
	{"persistence mode is set and seen", "gpus: [{model: A100-80GB, persistence: true}, {model: T4, persistence: false}]", `
		persist 1
		unpersist 0
		fail SetPersistenceMode ERROR_NO_PERMISSION
		unpersist 0
		persist 1
		persist 0`},
	{"persistence mode keeps the mode of an Ampere GPU pending", "gpus: [{model: A100-80GB, persistence: true}, {model: A30}]", `
		on 0
		reset 0
		unpersist 0
		reset 0
		create 0 3g.40gb@4
		persist 1
		on 1
		reset 1
		reboot
		unpersist 0
		off 0`},
	{"persistence mode does not matter to the mode of a Hopper GPU", "gpus: [{model: H200, persistence: true}]", `
		on 0
		create 0 3g.71gb@4
		destroy 0 3g.71gb@4
		off 0
		reboot`},
	{"memory in use", "gpus: [{model: H200, mig: true}, {model: H200}, {model: T4}]", `
		hold 1 4711
		hold 1 4712
		hold 2 4711
		create 0 3g.71gb(1c+2c)@4
		create 0 1g.18gb@0
		hold 0@4 4713
		hold 0@0 4714
		release 4711`},
	{"the compute mode is set and seen", "gpus: [{model: A100-80GB}, {model: H200, passthrough: true}, {model: T4}]", `
		compute 0 exclusive-process
		compute 0 exclusive-process
		compute 1 prohibited
		compute 2 exclusive-process
		compute 2 default
		compute 0 shared
		client 0 4711
		client 0 4712
		lose SetComputeMode ERROR_UNKNOWN
		compute 0 default
		compute 0 default
		fail SetComputeMode ERROR_NO_PERMISSION
		compute 0 exclusive-process
		compute 0 exclusive-process
		reboot`},
	{"a GPU in MIG mode has the default compute mode", "gpus: [{model: H200}, {model: A100-80GB}]", `
		compute 0 exclusive-process
		on 0
		compute 0 exclusive-process
		compute 0 default
		off 0
		compute 1 exclusive-process
		on 1
		off 1`},
	{"a vGPU is cut by its host", "gpus: [{model: A100-80GB, virtual: vgpu}, {model: A100-80GB, virtual: host-vgpu}, {model: T4, virtual: host-vsga}]", `
		on 0
		reset 0
		compute 0 exclusive-process
		compute 0 default
		hold 0 4711
		on 1`},
	{"a driver without persistence mode", "gpus: [{model: H200}]", `
		fail GetPersistenceMode ERROR_NOT_SUPPORTED
		persist 0`},
}

func TestTheLibraryAndTheSimulatorsOwnDriverAgree(t *testing.T) {
	for _, s := range scenarios {
		t.Run(s.name, func(t *testing.T) {
			onSimulator := gpusimtest.NodeIn(t, t.TempDir(), s.spec)
			want := play(t, onSimulator, onSimulator.Driver(), s.steps)
			onLibrary := gpusimtest.Node(t, s.spec)
			got := play(t, onLibrary, openDriver(t), s.steps)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("-simulator's own Driver +library:\n%s", diff)
			}
		})
	}
}

// chapter is one step of a scenario, what it answered, and how the GPUs looked after it.
type chapter struct {
	Step  string
	Cause string
	GPUs  []nvml.GPU
	Node  string // as the simulator shows it
}

func play(t *testing.T, n *gpusim.Node, d nvml.Driver, steps string) []chapter {
	t.Helper()
	var out []chapter
	for _, step := range append([]string{""}, strings.Split(strings.TrimSpace(steps), "\n")...) {
		step = strings.TrimSpace(step)
		err := perform(t, n, d, step)
		gpus, observeErr := d.Snapshot(t.Context())
		if observeErr != nil {
			t.Fatalf("after %q: %v", step, observeErr)
		}
		for _, g := range gpus {
			forget(g)
			for _, i := range g.Instances {
				for n := range i.Devices {
					if !strings.HasPrefix(i.Devices[n].UUID, "MIG-") {
						t.Errorf("after %q: device %v has no MIG UUID", step, i.Devices[n])
					}
					i.Devices[n].UUID = "" // it depends on the order in which compute instances were made
				}
			}
		}
		out = append(out, chapter{Step: step, Cause: causeOf(err), GPUs: gpus, Node: n.String()})
	}
	return out
}

// forget has the GPU's profiles say nothing of where parts may stand, unless there is an instance of it: the library can be asked of no
// other, and remembers.
func forget(g nvml.GPU) {
	for _, p := range g.Profiles {
		if slices.ContainsFunc(g.Instances, func(i nvml.Instance) bool { return i.Profile == p.Name }) {
			continue
		}
		for n := range p.Compute {
			p.Compute[n].Placements = nil
		}
	}
}

func perform(t *testing.T, n *gpusim.Node, d nvml.Driver, step string) error {
	t.Helper()
	f := strings.Fields(step)
	if len(f) == 0 {
		return nil
	}
	number := func(i int) int {
		x, err := strconv.Atoi(f[i])
		if err != nil {
			t.Fatalf("step %q: %v", step, err)
		}
		return x
	}
	gpu := func() nvml.UUID { return nvml.UUID(n.UUIDs()[number(1)]) }
	must := func(err error) {
		if err != nil {
			t.Fatalf("step %q: %v", step, err)
		}
	}
	switch f[0] {
	case "on", "off":
		return d.SetMode(t.Context(), gpu(), f[0] == "on")
	case "persist", "unpersist":
		return d.SetPersistence(t.Context(), gpu(), f[0] == "persist")
	case "compute":
		return d.SetComputeMode(t.Context(), gpu(), nvml.ComputeMode(f[2]))
	case "create", "destroy", "add", "take":
		return cut(t, d, gpu(), placed(t, d, number(1), f[2]), f)
	case "reset":
		return d.Reset(t.Context(), gpu())
	case "hold":
		must(n.Hold(deviceAt(t, n, f[1]), number(2), "holder", 512))
	case "client":
		must(n.HoldAsMPSClient(n.UUIDs()[number(1)], number(2), "client", 512))
	case "release":
		must(n.Release(number(1)))
	case "reboot":
		must(n.Reboot())
	case "fail", "lose":
		code, err := gpusim.ParseReturn(f[2])
		must(err)
		must(n.Fail(f[1], gpusim.Fault{Return: code, Done: f[0] == "lose"}))
	default:
		t.Fatalf("step %q: unknown", step)
	}
	return nil
}

// cut is a step about an instance or a part of one.
func cut(t *testing.T, d nvml.Driver, gpu nvml.UUID, p nvml.Placed, words []string) error {
	t.Helper()
	switch words[0] {
	case "create":
		return d.Create(t.Context(), gpu, p)
	case "destroy":
		return d.Destroy(t.Context(), gpu, p)
	case "add":
		return d.CreatePart(t.Context(), gpu, p, part(t, words[3]))
	default:
		return d.DestroyPart(t.Context(), gpu, p, part(t, words[3]))
	}
}

// deviceAt reads "0", a GPU by its index, and "0@4", the first MIG device of its instance at a place.
func deviceAt(t *testing.T, n *gpusim.Node, where string) string {
	t.Helper()
	var index, start int
	if _, err := fmt.Sscanf(where, "%d@%d", &index, &start); err == nil {
		return n.MIGDevice(index, start)
	}
	if _, err := fmt.Sscan(where, &index); err != nil {
		t.Fatalf("device %q: %v", where, err)
	}
	return n.UUIDs()[index]
}

// part reads "1c@2".
func part(t *testing.T, s string) nvml.Part {
	t.Helper()
	var p nvml.Part
	if _, err := fmt.Sscanf(s, "%dc@%d", &p.Size, &p.Start); err != nil {
		t.Fatalf("part %q: %v", s, err)
	}
	p.Name = fmt.Sprintf("%dc", p.Size)
	return p
}

// placed reads "3g.40gb(1c+2c)@0" with the size of the place from what the GPU offers.
func placed(t *testing.T, d nvml.Driver, index int, s string) nvml.Placed {
	t.Helper()
	name, start, _ := strings.Cut(s, "@")
	name, compute, _ := strings.Cut(name, "(")
	gpus, err := d.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p, ok := gpus[index].Profile(name)
	if !ok {
		t.Fatalf("%s is not offered by %s", name, gpus[index].Model)
	}
	at := slices.IndexFunc(p.Placements, func(s nvml.Span) bool { return fmt.Sprint(s.Start) == start })
	if at < 0 {
		t.Fatalf("%s has no place at %s", name, start)
	}
	return nvml.Placed{Profile: name, Span: p.Placements[at], Compute: strings.TrimSuffix(compute, ")")}
}

// causeOf is the part of an error that callers decide by, or the library's code if there is none.
func causeOf(err error) string {
	for _, cause := range []error{
		nvml.ErrInUse, nvml.ErrNotSupported, nvml.ErrNotFound, nvml.ErrNoRoom, nvml.ErrResetRequired, nvml.ErrLost,
		nvml.ErrPermission, nvml.ErrNoDriver, nvml.ErrReplaced, nvml.ErrUnresponsive,
	} {
		if errors.Is(err, cause) {
			return cause.Error()
		}
	}
	if e := new(nvml.Error); errors.As(err, &e) {
		return e.Code
	}
	if err != nil {
		return err.Error()
	}
	return ""
}
