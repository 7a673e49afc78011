package geometry_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
	"github.com/gpuslice/gpuslice/test/incumbent"
)

// Random requests, one after the other, each on what the one before left and with random processes on it.
func TestRandomWalk(t *testing.T) {
	for _, model := range gpusim.ModelsWithMIG() {
		t.Run(model, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, t.TempDir(), model, perHost)
			walk(t, h, h.GPUs.Driver(), survey(t, model), (requestCount()+perHost-1)/perHost)
		})
	}
}

// The same walk through NVIDIA's library. It is short, as each call of it reads the GPU again; that the two drivers do
// the same, nvml/lib has tests for.
func TestRandomWalkThroughTheLibrary(t *testing.T) {
	const share = 10 // of the requests
	for _, model := range gpusim.ModelsWithMIG() {
		t.Run(model, func(t *testing.T) {
			if gpusimtest.Apart(t, "-test.v") { // for the figures
				return
			}
			h := newHost(t, t.TempDir(), model, perHost)
			t.Setenv(gpusimtest.NodeVariable, h.GPUs.Dir())
			driver := lib.Open(lib.Options{Library: gpusimtest.Library(t)})
			walk(t, h, driver, survey(t, model), (requestCount()/share+perHost-1)/perHost)
		})
	}
}

// walker takes the GPUs of one host from request to request.
type walker struct {
	t       *testing.T
	host    *incumbent.Host
	driver  nvml.Driver
	atlas   atlas
	random  *rand.Rand
	holders map[int]string // what a process holds, by its pid
	lastPID int
	figures struct {
		requests, changed         int
		kept, destroyed, created  int
		divided                   int
		busy, keptBusy, mustLeave int
	}
}

func walk(t *testing.T, h *incumbent.Host, d nvml.Driver, a atlas, rounds int) {
	t.Helper()
	w := &walker{t: t, host: h, driver: d, atlas: a, random: newRandom(a.gpu.Model), holders: map[int]string{}}
	for n := range rounds {
		if w.round(); t.Failed() {
			t.Fatalf("in round %d; run it again with -seed %d", n, *seed)
		}
	}
	f := w.figures
	t.Logf("seed %d: %d requests, %d of them a change; %d devices kept, %d destroyed, %d created; %d GPU instances divided otherwise where they stood; "+
		"%d busy devices, of which %d stayed and %d had to go",
		*seed, f.requests, f.changed, f.kept, f.destroyed, f.created, f.divided, f.busy, f.keptBusy, f.mustLeave)
	if rounds >= 10 && (f.divided == 0 || f.kept == 0 || f.destroyed == 0 || f.keptBusy == 0 || f.mustLeave == 0) {
		t.Error("the walk is too one-sided to prove anything")
	}
}

// round gives every GPU a request of its own, plans and carries out what it takes, and looks at everything.
func (w *walker) round() {
	w.t.Helper()
	w.hold()
	before := w.snapshot()
	requests := map[nvml.UUID]map[string]int{}
	want := plan.Targets{}
	for _, g := range before {
		requests[g.UUID] = w.draw(g)
		want[g.UUID] = plan.Target{Request: nvml.Request{MIG: true, Devices: requests[g.UUID]}}
	}
	steps, err := plan.Make(plan.Observed{GPUs: before, Pods: w.pods()}, plan.Desired{GPUs: want})
	if err != nil {
		w.t.Errorf("every request can be had, but: %v\n%v", err, requests)
		return
	}
	w.judge(before, requests, steps)
	w.evict(before, steps)
	if w.t.Failed() {
		return
	}
	w.execute(steps)
	after := w.snapshot()
	w.compare(before, after, requests, steps)
	if !testing.Short() { // to compile NVIDIA's tool takes minutes
		w.export(after, requests)
	}
}

// draw is a random request for the GPU: sometimes what it has, or that with a part more or less, sometimes one that is near to that,
// mostly any.
func (w *walker) draw(g nvml.GPU) map[string]int {
	has := devices(g)
	draws := 1
	switch w.random.IntN(10) {
	case 0:
		return has
	case 1, 2:
		return w.partially(g)
	case 3, 4, 5:
		draws = 20
	}
	var nearest map[string]int
	best := -1
	for range draws {
		request := w.atlas.draw(w.random)
		shared := 0
		for name, n := range request {
			shared += min(n, has[name])
		}
		if shared > best {
			nearest, best = request, shared
		}
	}
	return nearest
}

// partially is what the GPU has, with a part more in one of its instances, or one less; one that is not divided has a part instead.
func (w *walker) partially(g nvml.GPU) map[string]int {
	has := devices(g)
	divisible := slices.DeleteFunc(slices.Clone(g.Instances), func(i nvml.Instance) bool {
		p, _ := g.Profile(i.Profile)
		return len(p.Compute) < 2
	})
	if len(divisible) == 0 {
		return has
	}
	i := divisible[w.random.IntN(len(divisible))]
	p, _ := g.Profile(i.Profile)
	name := p.Compute[w.random.IntN(len(p.Compute)-1)].Name + "." + p.Name // the last one is the whole
	request := maps.Clone(has)
	switch {
	case i.Compute == "":
		request[p.Name]--
		request[name]++
	case w.random.IntN(2) == 0:
		request[i.Devices[w.random.IntN(len(i.Devices))].Profile]--
	default:
		request[name]++
	}
	maps.DeleteFunc(request, func(_ string, n int) bool { return n == 0 })
	if _, possible := w.atlas.cheapest(g, request); !possible {
		return has
	}
	return request
}

func (w *walker) snapshot() []nvml.GPU {
	w.t.Helper()
	gpus, err := w.driver.Snapshot(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	return gpus
}

// hold puts processes on some devices, and takes some of those away that are there from before.
func (w *walker) hold() {
	w.t.Helper()
	for _, pid := range slices.Sorted(maps.Keys(w.holders)) {
		if w.random.IntN(3) == 0 {
			w.release(pid)
		}
	}
	for _, g := range w.snapshot() {
		for _, i := range g.Instances {
			if w.random.IntN(4) > 0 {
				continue
			}
			w.lastPID++
			device := i.Devices[w.random.IntN(len(i.Devices))].UUID
			if err := w.host.GPUs.Hold(device, w.lastPID, "trainer", 512); err != nil {
				w.t.Fatal(err)
			}
			w.holders[w.lastPID] = device
		}
	}
}

func (w *walker) release(pid int) {
	w.t.Helper()
	if err := w.host.GPUs.Release(pid); err != nil {
		w.t.Fatal(err)
	}
	delete(w.holders, pid)
}

// pods are the processes as the planner knows them.
func (w *walker) pods() []plan.Pod {
	var out []plan.Pod
	for _, pid := range slices.Sorted(maps.Keys(w.holders)) {
		out = append(out, plan.Pod{Namespace: "default", Name: strconv.Itoa(pid), UID: strconv.Itoa(pid), Devices: []string{w.holders[pid]}, Known: true})
	}
	return out
}

// judge compares what the plan destroys and creates with what has to be.
func (w *walker) judge(before []nvml.GPU, requests map[nvml.UUID]map[string]int, steps []plan.Step) {
	w.t.Helper()
	for _, g := range before {
		want, ok := w.atlas.cheapest(g, requests[g.UUID])
		if !ok {
			w.t.Fatalf("%v was drawn from the atlas, and is not in it", requests[g.UUID])
		}
		if got := costOf(g, steps); got != want {
			w.t.Errorf("GPU %d from %v to %v: the plan takes (busy, devices, calls, memory slices) %v, and %v is enough:\n%v",
				g.Index, g.Geometry(), requests[g.UUID], got, want, steps)
		}
	}
}

// costOf is what the steps cost on a GPU.
func costOf(g nvml.GPU, steps []plan.Step) cost {
	var out cost
	for _, d := range doomed(g, steps) {
		out.addDevice(d)
	}
	for _, s := range steps {
		switch {
		case s.GPU != g.UUID:
		case s.Kind == plan.Create && s.OnPart():
			out[2]++
		case s.Kind == plan.Create:
			out[2] += 1 + len(s.Instance.Devices())
		case s.Kind == plan.Destroy && !s.OnPart():
			out.add(cost{2: 1, 3: s.Instance.Size})
		}
	}
	return out
}

// doomed are the devices of the GPU that the steps destroy.
func doomed(g nvml.GPU, steps []plan.Step) []nvml.Device {
	var out []nvml.Device
	for _, s := range steps {
		if s.Kind != plan.Destroy || s.GPU != g.UUID {
			continue
		}
		for _, i := range g.Instances {
			if !sameGPUInstance(i.Placed, s.Instance) {
				continue
			}
			for _, d := range i.Devices {
				if !s.OnPart() || d.Part == s.Part {
					out = append(out, d)
				}
			}
		}
	}
	return out
}

// evict takes the processes away that the plan names, which must be those on what it destroys and no others. All others
// stay, and the simulator lets no one destroy what they hold.
func (w *walker) evict(before []nvml.GPU, steps []plan.Step) {
	w.t.Helper()
	var want, got []int
	for _, g := range before {
		for _, d := range doomed(g, steps) {
			for _, p := range d.Processes {
				want = append(want, p.PID)
			}
		}
	}
	for _, s := range steps {
		if s.Kind != plan.Evict {
			continue
		}
		for _, p := range s.Pods {
			pid, err := strconv.Atoi(p.UID)
			if err != nil {
				w.t.Fatal(err)
			}
			got = append(got, pid)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(want, got) {
		w.t.Errorf("on what goes are %v, and the plan evicts %v", want, got)
	}
	for _, pid := range got {
		w.release(pid)
	}
}

// execute carries out the steps, and has the calls counted that it takes.
func (w *walker) execute(steps []plan.Step) {
	w.t.Helper()
	if err := w.host.GPUs.ForgetCalls(); err != nil {
		w.t.Fatal(err)
	}
	for _, s := range steps {
		if err := drive(w.t.Context(), w.driver, s); err != nil {
			w.t.Errorf("%v: %v\n%v", s, err, w.host.GPUs)
			return
		}
	}
}

// compare holds what stands now against the requests, against what stood before, and against the calls that were made.
func (w *walker) compare(before, after []nvml.GPU, requests map[nvml.UUID]map[string]int, steps []plan.Step) {
	w.t.Helper()
	calls := map[string]int{}
	for n, g := range after {
		if diff := cmp.Diff(requests[g.UUID], devices(g)); diff != "" {
			w.t.Errorf("GPU %d (-request +made):\n%s", g.Index, diff)
		}
		w.count(before[n], g, steps, calls)
	}
	got := w.host.GPUs.Calls()
	// Either function makes a compute instance; which one depends on whether it needs a place of its own.
	got[gpusim.CreateComputeInstance] += got[gpusim.CreateComputeInstanceWithPlacement]
	delete(got, gpusim.CreateComputeInstanceWithPlacement)
	for _, all := range []map[string]int{got, calls} {
		maps.DeleteFunc(all, func(_ string, n int) bool { return n == 0 })
	}
	if diff := cmp.Diff(calls, got); diff != "" {
		w.t.Errorf("calls (-destroyed and created +made):\n%s\n%v", diff, steps)
	}
}

// count adds up the calls that one GPU's change takes, and checks that whatever was not to go is still the same device.
func (w *walker) count(before, after nvml.GPU, steps []plan.Step, calls map[string]int) {
	w.t.Helper()
	stand, gone := places(after), doomed(before, steps)
	kept := 0
	for where, d := range places(before) {
		w.figures.busy += min(1, len(d.Processes))
		if slices.ContainsFunc(gone, func(o nvml.Device) bool { return o.UUID == d.UUID }) {
			w.figures.mustLeave += min(1, len(d.Processes))
			continue
		}
		kept++
		w.figures.keptBusy += min(1, len(d.Processes))
		if diff := cmp.Diff(d, stand[where]); diff != "" {
			w.t.Errorf("GPU %d: what stood as %s has been made again, or has lost a process:\n%s", before.Index, where, diff)
		}
	}
	calls[gpusim.ComputeInstanceDestroy] += len(gone)
	calls[gpusim.CreateComputeInstance] += len(stand) - kept
	stayed := 0
	for _, i := range before.Instances {
		if slices.ContainsFunc(steps, func(s plan.Step) bool {
			return s.GPU == before.UUID && s.Kind == plan.Destroy && !s.OnPart() && s.Instance == i.Placed
		}) {
			calls[gpusim.GpuInstanceDestroy]++
			continue
		}
		stayed++
		at := slices.IndexFunc(after.Instances, func(o nvml.Instance) bool { return sameGPUInstance(o.Placed, i.Placed) })
		if at < 0 {
			w.t.Errorf("GPU %d: %v is gone", before.Index, i.Placed)
		} else if after.Instances[at].Placed != i.Placed {
			w.figures.divided++
		}
	}
	calls[gpusim.CreateGpuInstanceWithPlacement] += len(after.Instances) - stayed
	w.figures.requests++
	w.figures.kept += kept
	w.figures.destroyed += len(gone)
	w.figures.created += len(stand) - kept
	w.figures.changed += min(1, len(gone)+len(stand)-kept)
}

// places are the GPU's devices by where they stand.
func places(g nvml.GPU) map[string]nvml.Device {
	out := map[string]nvml.Device{}
	for _, i := range g.Instances {
		for _, d := range i.Devices {
			out[fmt.Sprintf("%v in %s@%d", d.Part, i.Profile, i.Start)] = d
		}
	}
	return out
}

func devices(g nvml.GPU) map[string]int {
	out := map[string]int{}
	for _, i := range g.Instances {
		for _, d := range i.Devices {
			out[d.Profile]++
		}
	}
	return out
}

// export asks NVIDIA's tool what it sees.
func (w *walker) export(gpus []nvml.GPU, requests map[nvml.UUID]map[string]int) {
	w.t.Helper()
	seen := exported(w.t, w.host, gpus)
	for _, g := range gpus {
		if diff := cmp.Diff(requests[g.UUID], seen[g.UUID]); diff != "" {
			w.t.Errorf("GPU %d with %v (-request +nvidia-mig-parted export):\n%s", g.Index, g.Geometry(), diff)
		}
	}
}

// exported is what nvidia-mig-parted says that the GPUs have.
func exported(t *testing.T, h *incumbent.Host, gpus []nvml.GPU) map[nvml.UUID]map[string]int {
	t.Helper()
	out, err := h.Command(t.Context(), "nvidia-mig-parted", "export").Output()
	if err != nil {
		t.Fatalf("nvidia-mig-parted export: %v", err)
	}
	configs, err := migparted.Parse(out)
	if err != nil {
		t.Fatalf("reading what nvidia-mig-parted exports: %v\n%s", err, out)
	}
	all, err := catalog.Merge(nil, configs).Requests("current", gpus)
	if err != nil {
		t.Fatal(err)
	}
	devices := map[nvml.UUID]map[string]int{}
	for gpu, request := range all {
		devices[gpu] = request.Devices
	}
	return devices
}
