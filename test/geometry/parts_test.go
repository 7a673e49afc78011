package geometry_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/incumbent"
)

// In mig-parted's format, devices such as 1c.3g.20gb say nothing of which GPU instances they share. Requests with such devices
// are carried out by both tools, and each finds the other's result to be as requested.
func TestPartsShareInstancesAsNVIDIAsToolHasThem(t *testing.T) {
	if testing.Short() {
		t.Skip("to compile NVIDIA's mig-parted takes minutes")
	}
	t.Parallel()
	a := survey(t, "A100-40GB")
	all := a.withParts()
	newRandom(a.gpu.Model).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	ours, theirs := newHost(t, t.TempDir(), "A100-40GB", perHost), newHost(t, t.TempDir(), "A100-40GB", perHost)
	fewer := 0
	for batch := range slices.Chunk(all, perHost) {
		file := write(t, batch)
		before := observe(t, ours)
		want := plan.Targets{}
		for i, request := range batch {
			want[before[i].UUID] = plan.Target{Request: nvml.Request{MIG: true, Devices: request}}
		}
		for i := len(batch); i < perHost; i++ {
			want[before[i].UUID] = plan.Target{Request: nvml.Request{MIG: true}}
		}
		carryOut(t, ours, before, want)
		if _, err := ours.MIGParted(t.Context(), "assert", "-f", file, "-c", "batch"); err != nil {
			t.Fatalf("of what stands is not as requested, NVIDIA's tool says: %v\n%v\n%v", err, batch, ours.GPUs)
		}
		if _, err := theirs.MIGParted(t.Context(), "apply", "-f", file, "-c", "batch"); err != nil {
			t.Fatalf("NVIDIA's tool cannot do what can be done: %v\n%v", err, batch)
		}
		for i, gpu := range observe(t, theirs)[:len(batch)] {
			gpu.UUID = before[i].UUID
			steps, err := plan.Make(plan.Observed{GPUs: []nvml.GPU{gpu}, Capacity: plan.Capacity{Agreed: 1}}, plan.Desired{GPUs: want})
			if err != nil || len(steps) > 0 {
				t.Errorf("%v is to be %v, and NVIDIA's tool has made it so, but: %v, %v", gpu.Geometry(), want[gpu.UUID].Devices, steps, err)
			}
			fewest, err := nvml.Solve(a.gpu, batch[i])
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case len(fewest.Target) < len(gpu.Instances):
				fewer++
			case len(fewest.Target) > len(gpu.Instances):
				t.Errorf("%v: NVIDIA's tool has made %v, of fewer instances than %v", batch[i], gpu.Geometry(), fewest.Target)
			}
		}
	}
	t.Logf("seed %d: %d requests with parts; %d of them take fewer GPU instances than NVIDIA's tool makes",
		*seed, len(all), fewer)
	if len(all) < 500 {
		t.Errorf("%d requests are too few to be all", len(all))
	}
}

// withParts are all requests that the empty GPU can grant with at least one part in them.
func (a atlas) withParts() []map[string]int {
	distinct := map[string]map[string]int{}
	for _, k := range a.keys {
		requests := []map[string]int{{}}
		for _, name := range strings.Split(k, " ") {
			p, _ := a.gpu.Profile(name)
			var next []map[string]int
			for _, request := range requests {
				for _, parts := range contents(p) {
					more := maps.Clone(request)
					for _, part := range parts {
						more[part]++
					}
					next = append(next, more)
				}
			}
			requests = next
		}
		for _, request := range requests {
			if fmt.Sprint(request) != fmt.Sprint(countOf(strings.Split(k, " "))) {
				distinct[fmt.Sprint(request)] = request
			}
		}
	}
	var out []map[string]int
	for _, k := range slices.Sorted(maps.Keys(distinct)) {
		out = append(out, distinct[k])
	}
	return out
}

func countOf(names []string) map[string]int {
	out := map[string]int{}
	for _, n := range names {
		out[n]++
	}
	return out
}

// contents are the devices that one instance can hold, in every way.
func contents(p nvml.Profile) [][]string {
	out := [][]string{{p.Name}}
	var held []string
	var put func(from, left int)
	put = func(from, left int) {
		if len(held) > 0 {
			out = append(out, slices.Clone(held))
		}
		for i := from; i < len(p.Compute); i++ {
			if c := p.Compute[i]; c.Slices <= left && c.Slices < p.Slices {
				held = append(held, c.Name+"."+p.Name)
				put(i, left-c.Slices)
				held = held[:len(held)-1]
			}
		}
	}
	put(0, p.Slices)
	return out
}

// write gives a file for NVIDIA's tool with one request for each GPU.
func write(t *testing.T, batch []map[string]int) string {
	t.Helper()
	var rules catalog.MIGConfig
	for i, request := range batch {
		rules = append(rules, catalog.MIGRule{Indices: []int{i}, MIG: true, Devices: request})
	}
	for i := len(batch); i < perHost; i++ { // it asserts nothing of a node whose GPUs are not all named
		rules = append(rules, catalog.MIGRule{Indices: []int{i}, MIG: true, Devices: map[string]int{}})
	}
	text, err := migparted.Render(map[string]catalog.MIGConfig{"batch": rules})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func observe(t *testing.T, h *incumbent.Host) []nvml.GPU {
	t.Helper()
	gpus, err := h.GPUs.Driver().Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return gpus
}

func carryOut(t *testing.T, h *incumbent.Host, gpus []nvml.GPU, want plan.Targets) {
	t.Helper()
	steps, err := plan.Make(plan.Observed{GPUs: gpus}, plan.Desired{GPUs: want})
	if err != nil {
		t.Fatal(err)
	}
	driver := h.GPUs.Driver()
	for _, s := range steps {
		if err := drive(t.Context(), driver, s); err != nil {
			t.Fatalf("%v: %v\n%v", s, err, h.GPUs)
		}
	}
}

// drive makes the call into the driver that a step is; those that are no change of an instance are none.
func drive(ctx context.Context, driver nvml.Driver, s plan.Step) error {
	switch {
	case s.Kind == plan.Destroy && s.OnPart():
		return driver.DestroyPart(ctx, s.GPU, s.Instance, s.Part)
	case s.Kind == plan.Destroy:
		return driver.Destroy(ctx, s.GPU, s.Instance)
	case s.Kind == plan.Create && s.OnPart():
		return driver.CreatePart(ctx, s.GPU, s.Instance, s.Part)
	case s.Kind == plan.Create:
		return driver.Create(ctx, s.GPU, s.Instance)
	case s.Traits().TouchesGPU():
		return fmt.Errorf("%v: no GPU changes its mode here", s)
	default:
		return nil
	}
}
