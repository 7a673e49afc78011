package report

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// snapshotOf is what the driver says of simulated GPUs.
func snapshotOf(t *testing.T, spec gpusim.Spec) []nvml.GPU {
	t.Helper()
	n, err := gpusim.Create(t.TempDir(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	gpus, err := n.Driver().Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return gpus
}

func TestTheModelsAreTheKindsOfGPUs(t *testing.T) {
	all := snapshotOf(t, gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: "A100-80GB"}, {Model: "T4"}, {Model: "A100-80GB", MIG: true}, {Model: "H100-80GB"}, {Model: "H100-80GB"}}})
	for name, row := range map[string]struct {
		change func(gpus []nvml.GPU)
		want   string
	}{
		"each kind once":               {func([]nvml.GPU) {}, "[0 2] [1] [3 4]"},
		"without a lost one":           {func(gpus []nvml.GPU) { gpus[3].Lost = true }, "[0 2] [1] [4]"},
		"without one that has no name": {func(gpus []nvml.GPU) { gpus[1].Model = "" }, "[0 2] [3 4]"},
		"without a vGPU":               {func(gpus []nvml.GPU) { gpus[0].Virtualization = nvml.VirtualGPU }, "[1] [2] [3 4]"},
		"another driver's profiles":    {func(gpus []nvml.GPU) { gpus[4].Profiles = gpus[4].Profiles[1:] }, "[0 2] [1] [3] [4]"},
	} {
		t.Run(name, func(t *testing.T) {
			gpus := append([]nvml.GPU(nil), all...)
			row.change(gpus)
			var got []string
			for _, m := range Models(gpus) {
				got = append(got, fmt.Sprint(m.GPUs))
				if of := gpus[m.GPUs[0]]; m.Name != of.Model || m.Profiles == nil || len(m.Profiles) != len(of.Profiles) {
					t.Errorf("%s with %d profiles is %s with %d", m.Name, len(m.Profiles), of.Model, len(of.Profiles))
				}
			}
			if got := strings.Join(got, " "); got != row.want {
				t.Errorf("got %s, want %s", got, row.want)
			}
		})
	}
}

func TestAModelHasTheProfilesThatHaveAPlace(t *testing.T) {
	gpus := snapshotOf(t, gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: "H100-80GB"}}})
	for _, want := range []api.Profile{
		{Name: "3g.40gb", Slices: 3, Size: 4, At: []int{0, 4}, Max: 2, Engines: nvml.Engines{Copy: 3, Decoder: 3, JPEG: 3}},
		{Name: "7g.80gb", Slices: 7, Size: 8, At: []int{0}, Max: 1, Engines: nvml.Engines{Copy: 8, Decoder: 7, JPEG: 7, OFA: 1}},
	} {
		all := Models(gpus)[0].Profiles
		at := slices.IndexFunc(all, func(p api.Profile) bool { return p.Name == want.Name })
		if at < 0 || cmp.Diff(want, all[at]) != "" {
			t.Errorf("want %+v among %+v", want, all)
		}
	}
	uneven := nvml.GPU{Model: "uneven", Capable: true, Profiles: []nvml.Profile{
		{Name: "a", Placements: []nvml.Span{{Size: 1}, {Start: 1, Size: 2}}}, {Name: "b"}, {Name: "c", Placements: []nvml.Span{{Size: 1}}},
	}}
	if got := Models([]nvml.GPU{uneven})[0].Profiles; len(got) != 1 || got[0].Name != "c" {
		t.Errorf("places of several sizes, or none: %v", got)
	}
}

// holding is a pod with so many instances of a GPU.
func holding(uid string, known bool, places int) decide.Holding {
	h := decide.Holding{Pod: holders.Pod{UID: types.UID(uid)}, Known: known}
	for i := range places {
		h.On = append(h.On, decide.Place{GPU: 1, Start: i})
	}
	return h
}

func TestThePodsOfTheStatusAreAllOrNone(t *testing.T) {
	var many []decide.Holding
	for i := range mostHeld + 1 {
		many = append(many, holding(fmt.Sprintf("%08d", i), true, 1))
	}
	for name, row := range map[string]struct {
		of   []decide.Holding
		want string
	}{
		"no pods":                     {nil, `[]`},
		"in the order of their UIDs":  {[]decide.Holding{holding("b", true, 1), holding("a", true, 2)}, `[{"pod":"a","on":["1/0","1/1"]},{"pod":"b","on":["1/0"]}]`},
		"a pod that may have any":     {[]decide.Holding{holding("a", false, 1)}, `[{"pod":"a"}]`},
		"a pod of more than may be":   {[]decide.Holding{holding("a", true, mostPlaces+1)}, `[{"pod":"a"}]`},
		"a pod without a UID":         {[]decide.Holding{holding("", true, 1)}, `[]`},
		"more pods than may be there": {many, `null`},
	} {
		if got, err := json.Marshal(held(row.of)); err != nil || string(got) != row.want {
			t.Errorf("%s: %s, %v, want %s", name, got, err, row.want)
		}
	}
}
