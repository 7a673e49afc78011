package geometry_test

import (
	"cmp"
	"flag"
	"hash/fnv"
	"math/rand/v2"
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/incumbent"
)

var (
	requests = flag.Int("requests", 0, "random requests for each model; 0 is 2,000, and 12 in short runs")
	seed     = flag.Uint64("seed", 1, "where random numbers begin")
)

// requestCount is how many random requests there are for each model.
func requestCount() int {
	if testing.Short() {
		return cmp.Or(*requests, 12)
	}
	return cmp.Or(*requests, 2000)
}

// newRandom gives random numbers that are others for each model, and the same for each run.
func newRandom(model string) *rand.Rand {
	h := fnv.New64a()
	h.Write([]byte(model))
	return rand.New(rand.NewPCG(*seed, h.Sum64()))
}

// perHost is how many GPUs a host here has, as most nodes do. With fewer, NVIDIA's tool runs more often; with more, each call
// of the simulator takes longer.
const perHost = 8

// newHost makes a machine of so many GPUs of the model in dir, with MIG mode on.
func newHost(t *testing.T, dir, model string, gpus int) *incumbent.Host {
	t.Helper()
	build := incumbent.Build
	if testing.Short() {
		build = incumbent.BuildSimulated
	}
	programs, err := build(t.Context(), binaries.Builder{})
	if err != nil {
		t.Fatal(err)
	}
	h, err := incumbent.NewHost(dir, specOf(model, gpus), programs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeNode(t, h.GPUs) })
	if err := h.NamePCIDevices(); err != nil {
		t.Fatal(err)
	}
	return h
}

func specOf(model string, gpus int) gpusim.Spec {
	return gpusim.Spec{GPUs: []gpusim.GPUSpec{{Model: model, Count: gpus, MIG: true}}}
}

func closeNode(t *testing.T, n *gpusim.Node) {
	t.Helper()
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}
