package cut_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
)

var (
	kills = flag.Int("kills", 1, "how often a run on each kind of machine is ended at a random instant")
	seed  = flag.Uint64("seed", 0, "of the random instants; 0 for another each time")
)

// delays are so long that most of a run is inside of a call.
const delays = `
delays: {SetMigMode: 30ms, CreateGpuInstanceWithPlacement: 4ms, CreateComputeInstance: 4ms, CreateComputeInstanceWithPlacement: 4ms,
  ComputeInstanceDestroy: 4ms, GpuInstanceDestroy: 4ms, SetPersistenceMode: 4ms, SetComputeMode: 4ms}`

// machines are GPUs as they are found, each with what is on them: "placed" as nvml.Placed writes it, then the parts that go and come.
var machines = []struct {
	name, spec string
	instances  string
	parts      map[string]string // of the instance at the place, the only part that stays
	compute    nvml.ComputeMode
}{
	{name: "an A100 without MIG", spec: "gpus: [{model: A100-80GB, persistence: true}]", compute: nvml.ComputeExclusiveProcess},
	{name: "an A100 in instances", spec: "gpus: [{model: A100-80GB, mig: true, persistence: true}]", instances: "3g.40gb@4 1g.10gb@0 2g.20gb@2"},
	{name: "an A30 in instances", spec: "gpus: [{model: A30, mig: true}]", instances: "2g.12gb@2 1g.6gb@0"},
	{name: "two H100s without MIG", spec: "gpus: [{model: H100-80GB, count: 2}]", compute: nvml.ComputeProhibited},
	{name: "an H100 in divided instances", spec: "gpus: [{model: H100-80GB, mig: true}]", instances: "4g.40gb(1c+1c+2c)@0 3g.40gb(1c)@4", parts: map[string]string{"3g.40gb@4": "1c@2"}},
	{name: "an A100 of a virtual machine", spec: "gpus: [{model: A100-40GB, passthrough: true}]"},
	{name: "an A100 of a virtual machine in instances", spec: "gpus: [{model: A100-40GB, passthrough: true, mig: true}]", instances: "7g.40gb@0"},
}

// placed reads what nvml.Placed writes, with the size that the GPU has for the profile.
func placed(t *testing.T, g nvml.GPU, text string) nvml.Placed {
	t.Helper()
	var out nvml.Placed
	name, start, _ := strings.Cut(text, "@")
	name, compute, divided := strings.Cut(name, "(")
	out.Profile = name
	if divided {
		out.Compute = strings.TrimSuffix(compute, ")")
	}
	if _, err := fmt.Sscan(start, &out.Start); err != nil {
		t.Fatal(err)
	}
	p, known := g.Profile(name)
	if !known {
		t.Fatalf("%s has no %s", g.Model, name)
	}
	out.Size = p.Placements[0].Size
	return out
}

// prepare makes the GPUs what they are to be found as.
func prepare(t *testing.T, n *gpusim.Node, instances string, parts map[string]string, compute nvml.ComputeMode) {
	t.Helper()
	d := n.Driver()
	gpus, err := d.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range gpus {
		for _, text := range strings.Fields(instances) {
			if err := d.Create(t.Context(), g.UUID, placed(t, g, text)); err != nil {
				t.Fatal(err)
			}
		}
		for at, stays := range parts {
			movePart(t, d, g, placed(t, g, at), stays)
		}
		if compute != "" {
			if err := d.SetComputeMode(t.Context(), g.UUID, compute); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// movePart has the only part of an instance be elsewhere than the driver puts it.
func movePart(t *testing.T, d nvml.Driver, g nvml.GPU, at nvml.Placed, to string) {
	t.Helper()
	var part nvml.Part
	if _, err := fmt.Sscanf(strings.Replace(to, "c@", " ", 1), "%d %d", &part.Size, &part.Start); err != nil {
		t.Fatal(err)
	}
	part.Name = fmt.Sprintf("%dc", part.Size)
	was := part
	was.Start = 0
	if err := d.DestroyPart(t.Context(), g.UUID, at, was); err != nil {
		t.Fatal(err)
	}
	if err := d.CreatePart(t.Context(), g.UUID, at, part); err != nil {
		t.Fatal(err)
	}
}

// process runs measure, until it ends or the signal comes after so long.
func process(t *testing.T, store string, end syscall.Signal, after time.Duration, args ...string) (said string, took time.Duration, err error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), self, args...)
	c.Env = append(os.Environ(), storeVariable+"="+store)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	began := time.Now()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if after > 0 {
		timer := time.AfterFunc(after, func() { _ = c.Process.Signal(end) }) // it may have ended
		defer timer.Stop()
	}
	err = c.Wait()
	return out.String(), time.Since(began), err
}

func TestGPUsAreAsTheyWereFoundWheneverTheRunEnds(t *testing.T) {
	by := *seed
	if by == 0 {
		by = rand.Uint64()
	}
	t.Logf("run with -seed %d to have the same instants", by)
	random := rand.New(rand.NewPCG(by, 0))
	for _, m := range machines {
		t.Run(m.name, func(t *testing.T) {
			n := gpusimtest.Node(t, m.spec+delays)
			prepare(t, n, m.instances, m.parts, m.compute)
			store := filepath.Join(t.TempDir(), "store")
			found := filepath.Join(store, "found.json")
			want := shapes(t, n.Driver())
			said, whole, err := process(t, store, 0, 0)
			check := func(when string) {
				t.Helper()
				if diff := cmp.Diff(want, shapes(t, n.Driver())); diff != "" {
					t.Errorf("%s: the GPUs (-found +now):\n%s\n%s", when, diff, said)
				}
				if _, err := os.Stat(found); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s: the file is still there: %v", when, err)
				}
			}
			if err != nil {
				t.Fatalf("%v: %s", err, said)
			}
			check("after a whole run")
			left := 0 // ends after which there was something to restore
			for range *kills {
				end := []syscall.Signal{syscall.SIGKILL, syscall.SIGKILL, syscall.SIGTERM, syscall.SIGINT}[random.IntN(4)]
				after := time.Duration(random.Int64N(int64(whole)))
				when := fmt.Sprintf("%v after %v", end, after)
				said, _, err = process(t, store, end, after)
				if _, err := os.Stat(found); err == nil {
					left++
				}
				if end == syscall.SIGKILL {
					_, _, _ = process(t, store, end, time.Duration(random.Int64N(int64(whole/4))), "restore") // it may be killed, too
					if said, _, err = process(t, store, 0, 0, "restore"); err != nil {
						t.Fatalf("%s: restoring: %v: %s", when, err, said)
					}
				} else if err == nil && strings.Contains(said, "measuring") {
					t.Logf("%s: it had ended", when)
				}
				check(when)
			}
			t.Logf("%d of %d ends have left something to restore", left, *kills)
		})
	}
}
