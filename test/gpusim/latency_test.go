package gpusim_test

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

//go:generate go test -count=1 . -run TestThePageHasTheFiguresOfTheCode -update

var update = flag.Bool("update", false, "write the table of figures into the page")

func TestThePageHasTheFiguresOfTheCode(t *testing.T) {
	const begin, end = "<!-- figures: written by go generate ./test/gpusim -->\n", "<!-- end of figures -->"
	page, err := os.ReadFile("README.md")
	must(t, err)
	head, rest, ok := strings.Cut(string(page), begin)
	got, tail, closed := strings.Cut(rest, end)
	if !ok || !closed {
		t.Fatalf("the page lacks %q or %q", begin, end)
	}
	var b strings.Builder
	b.WriteString("\n| call | profile | takes | is | source |\n|---|---|---|---|---|\n")
	for _, f := range gpusim.Figures() {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", strings.Join(f.Calls, ", "), strings.Join(f.Profiles, ", "), f.Takes, f.Basis, f.Source)
	}
	b.WriteString("\n")
	if *update {
		must(t, os.WriteFile("README.md", []byte(head+begin+b.String()+end+tail), 0o600))
		return
	}
	if diff := cmp.Diff(b.String(), got); diff != "" {
		t.Errorf("run go generate ./test/gpusim (-code +page):\n%s", diff)
	}
}

// A second figure for a call would win without a word, and a missing one would make a program that calls it faster than any hardware.
func TestEachLatencyProfileHasOneFigureForEachCallThatChangesInstancesOrModes(t *testing.T) {
	want := []string{
		gpusim.SetMigMode, gpusim.CreateGpuInstance, gpusim.CreateGpuInstanceWithPlacement, gpusim.CreateComputeInstance,
		gpusim.CreateComputeInstanceWithPlacement, gpusim.GpuInstanceDestroy, gpusim.ComputeInstanceDestroy, gpusim.Reset, gpusim.Init,
	}
	for _, profile := range gpusim.Latencies() {
		found := map[string]int{}
		for _, f := range gpusim.Figures() {
			for _, call := range f.Calls {
				if slices.Contains(f.Profiles, profile) {
					found[call]++
				}
				if !slices.Contains(gpusim.Functions(), call) || f.Takes <= 0 || f.Source == "" {
					t.Errorf("%s takes %s, by %q", call, f.Takes, f.Source)
				}
			}
		}
		for _, call := range want {
			if found[call] == 0 {
				t.Errorf("%s: no figure for %s", profile, call)
			}
		}
		for call, n := range found {
			if n > 1 {
				t.Errorf("%s: %d figures for %s", profile, n, call)
			}
		}
	}
	if _, err := gpusim.ParseSpec([]byte("latency: realistic\n" + one("A30"))); err == nil || !strings.Contains(err.Error(), "hopper-fast") {
		t.Errorf("a spec with an unknown latency: %v", err)
	}
}

func TestOnADenseMachineEachHandleOfAMIGDeviceTakesItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := node(t, "latency: dense\ngpus: [{model: B200, count: 2, mig: true}]")
		for i, gpu := range n.UUIDs() {
			for start := range 1 + i {
				must(t, n.Driver().Create(t.Context(), nvml.UUID(gpu), placed(fmt.Sprintf("1g.23gb@%d:1", start))))
			}
		}
		l := library(t, n)
		const handle = 93 * time.Millisecond
		for _, tt := range []struct {
			name string
			call func() gpusim.Return
			want time.Duration
		}{
			{"a GPU by its UUID", func() gpusim.Return { _, r := l.DeviceByUUID(n.UUIDs()[1]); return r }, 0},
			{"a MIG device by its UUID", func() gpusim.Return { _, r := l.DeviceByUUID(n.MIGDevice(1, 1)); return r }, 3 * handle},
			{"a MIG device by its index", func() gpusim.Return { _, r := l.MIGDevice(gpusim.Device{}, 0); return r }, handle},
			{"the GPU instances", func() gpusim.Return { _, r := l.GPUInstances(gpusim.Device{}, 19); return r }, 0},
		} {
			began := time.Now()
			expectReturn(t, tt.name, tt.call(), gpusim.Success)
			if took := time.Since(began); took != tt.want {
				t.Errorf("%s took %s, want %s", tt.name, took, tt.want)
			}
		}
		began := time.Now()
		must(t, n.ForgetCalls())
		must(t, n.Fail(gpusim.GetCount, gpusim.Fault{Return: gpusim.Unknown}))
		_, err := n.Outside().Snapshot(t.Context())
		must(t, err)
		must(t, n.Outside().Destroy(t.Context(), nvml.UUID(n.UUIDs()[1]), placed("1g.23gb@1:1")))
		if took := time.Since(began); took > 0 || len(n.Calls())+len(n.Reads()) > 0 {
			t.Errorf("from outside: took %s, and counted %v and %v", took, n.Calls(), n.Reads())
		}
		_, r := open(t, n.Dir()).Library().DeviceByUUID(n.MIGDevice(0, 0))
		expectReturn(t, "before Init", r, gpusim.Uninitialized)
		_, r = l.DeviceByUUID(n.MIGDevice(0, 0))
		expectReturn(t, "finding", r, gpusim.Success)
		if diff := cmp.Diff(map[string]int{gpusim.GetHandleByUUID: 1, gpusim.WalkMIGDevice: 2}, open(t, n.Dir()).Reads()); diff != "" {
			t.Errorf("reads (-want +got):\n%s", diff)
		}
	})
}
