package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/hardware/cuda"
)

// asProgram names the GPU, in the process that is the program on it. The dynamic loader reads LD_LIBRARY_PATH when a process begins.
const asProgram = "TEST_CUDA_ON"

// What a program does shows in the driver: its memory, and the error of its kernel.
func TestAProgramTakesMemoryAndItsKernelIsStopped(t *testing.T) {
	if gpu := os.Getenv(asProgram); gpu != "" {
		program(t, gpu)
		return
	}
	library, err := binaries.Builder{}.LibCUDA(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	spec, err := gpusim.ParseSpec([]byte("gpus: [{model: T4}, {model: H200}]"))
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "gpus")
	node, err := gpusim.Create(dir, spec)
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	events, err := node.Driver().Events(ctx)
	if err != nil {
		t.Fatal(err)
	}
	gpu := node.UUIDs()[1]
	c := exec.CommandContext(ctx, os.Args[0], "-test.run=^"+t.Name()+"$")
	c.Env = append(os.Environ(), asProgram+"="+gpu, "GPUSIM_NODE="+dir, "LD_LIBRARY_PATH="+filepath.Dir(library))
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := nvml.Event{GPU: nvml.UUID(gpu), Kind: nvml.EventXid, Xid: 31, GI: nvml.WholeGPU, CI: nvml.WholeGPU}
	if diff := cmp.Diff(want, <-events); diff != "" {
		t.Errorf("what the driver reports (-want +got):\n%s", diff)
	}
	if calls := node.Calls(); len(calls) > 0 {
		t.Errorf("the program has changed something of a GPU: %v", calls)
	}
}

func program(t *testing.T, gpu string) {
	t.Helper()
	c, err := cuda.Open(gpu)
	if err != nil {
		t.Fatal(err)
	}
	before, total, err := c.Memory()
	if err != nil {
		t.Fatal(err)
	}
	const gib = 1 << 30
	if total < 130*gib || before > total {
		t.Errorf("%d of %d bytes are free, want those of an H200", before, total)
	}
	if err := c.Allocate(100 * gib); err != nil {
		t.Fatal(err)
	}
	after, _, err := c.Memory()
	if err != nil || before-after != 100*gib {
		t.Errorf("after an allocation of 100 GiB there are %d bytes less: %v", before-after, err)
	}
	var refused *cuda.Error
	if err := c.Allocate(100 * gib); !errors.As(err, &refused) || fmt.Sprint(refused) != "cuMemAlloc_v2: CUDA error 2" {
		t.Errorf("more than there is: %v", err)
	}
	if err := c.Fault(); err != nil {
		t.Error(err)
	}
}
