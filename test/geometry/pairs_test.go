package geometry_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/nvml"
)

// From every place in which a full A100 can be cut, to every other cut that fills it.
func TestAllPairsOfMaximalGeometries(t *testing.T) {
	t.Parallel()
	a := survey(t, "A100-40GB")
	pairs, destroyed, stood := 0, 0, 0
	began := time.Now()
	planning := time.Duration(0)
	for _, from := range a.maximal() {
		for _, stands := range a.geometries[from] {
			for _, to := range a.maximal() {
				gpu := standing(a.gpu, stands)
				request := map[string]int{}
				for _, name := range strings.Split(to, " ") {
					request[name]++
				}
				want, _ := a.cheapest(gpu, request)

				start := time.Now()
				steps, err := plan.Make(plan.Observed{GPUs: []nvml.GPU{gpu}}, plan.Desired{GPUs: plan.Targets{gpu.UUID: {Request: nvml.Request{MIG: true, Devices: request}}}})
				planning += time.Since(start)
				if err != nil {
					t.Fatalf("from %v to %s: %v", stands, to, err)
				}
				got := costOf(gpu, steps)
				if got != want {
					t.Errorf("from %v to %s: the plan destroys %d instances of %d memory slices by %d calls, and %d of %d by %d are enough",
						stands, to, got[1], got[3], got[2], want[1], want[3], want[2])
				}
				end := plan.Result([]nvml.GPU{gpu}, steps)[0].Geometry()
				if !slices.ContainsFunc(a.geometries[to], func(g nvml.Geometry) bool { return slices.Equal(g, end) }) {
					t.Errorf("from %v to %s: the plan ends with %v, which the hardware does not admit", stands, to, end)
				}
				pairs++
				destroyed += got[1]
				if from != to {
					stood += len(stands)
				}
			}
		}
	}
	t.Logf("%d pairs; %d instances destroyed, as by brute force, of %d that NVIDIA's tool would clear; %.1f s, of which planning %.2f s",
		pairs, destroyed, stood, time.Since(began).Seconds(), planning.Seconds())
	if pairs < 7000 {
		t.Errorf("%d pairs are too few to be all", pairs)
	}
}

// standing puts idle instances on the GPU.
func standing(gpu nvml.GPU, g nvml.Geometry) nvml.GPU {
	gpu.Instances = nil
	for _, p := range g {
		profile, _ := gpu.Profile(p.Profile)
		whole := nvml.Part{Name: fmt.Sprintf("%dc", profile.Slices), Span: nvml.Span{Size: profile.Slices}}
		gpu.Instances = append(gpu.Instances, nvml.Instance{Placed: p, Devices: []nvml.Device{{UUID: "MIG-" + p.String(), Profile: p.Profile, Part: whole}}})
	}
	return gpu
}
