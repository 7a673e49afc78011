package picture_test

import (
	"flag"
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/picture"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// migGPU returns a GPU with MIG mode on, and with so many memory slices.
func migGPU(slices int) nvml.GPU {
	return nvml.GPU{Enabled: true, Profiles: []nvml.Profile{{Placements: []nvml.Span{{Start: 0, Size: slices}}}}}
}

// at is an instance of so many memory slices.
func at(start, size int, profile, compute string) nvml.Placed {
	return nvml.Placed{Profile: profile, Span: nvml.Span{Start: start, Size: size}, Compute: compute}
}

func TestDrawingsAreAsInTheGoldenFile(t *testing.T) {
	off := migGPU(8)
	off.Enabled = false
	var b strings.Builder
	for _, c := range []struct {
		name string
		gpu  nvml.GPU
		cut  nvml.Geometry
	}{
		{"balanced", migGPU(8), nvml.Geometry{at(0, 1, "1g.10gb", ""), at(1, 1, "1g.10gb", ""), at(2, 2, "2g.20gb", ""), at(4, 4, "3g.40gb", "")}},
		{"free slices behind and between", migGPU(8), nvml.Geometry{at(0, 4, "4g.40gb", ""), at(5, 1, "1g.10gb", "")}},
		{"uncut", migGPU(8), nil},
		{"one instance", migGPU(8), nvml.Geometry{at(0, 8, "7g.80gb", "")}},
		{"seven of one slice, the last memory slice is no one's", migGPU(8), nvml.Geometry{
			at(0, 1, "1g.18gb+me", ""), at(1, 1, "1g.18gb", ""), at(2, 1, "1g.18gb", ""), at(3, 1, "1g.18gb", ""), at(4, 1, "1g.18gb", ""),
			at(5, 1, "1g.18gb", ""), at(6, 1, "1g.18gb", ""),
		}},
		{"divided instances", migGPU(8), nvml.Geometry{at(0, 2, "1g.20gb", ""), at(2, 2, "2g.20gb", "1c+1c"), at(4, 4, "3g.40gb", "1c+2c")}},
		{"mode off", off, nil},
		{"mode off, to be cut", off, nvml.Geometry{at(0, 4, "3g.40gb", ""), at(4, 4, "3g.40gb", "")}},
		{"four memory slices", migGPU(4), nvml.Geometry{at(0, 1, "1g.6gb", ""), at(1, 1, "1g.6gb+me", ""), at(2, 2, "2g.12gb", "")}},
		{"four memory slices, one free", migGPU(4), nvml.Geometry{at(0, 2, "2g.12gb+me", ""), at(2, 1, "1g.6gb", "")}},
		{"sixteen memory slices", migGPU(16), nvml.Geometry{
			at(0, 1, "1g.6gb", ""), at(1, 2, "2g.12gb", "1c+1c"), at(4, 1, "1g.6gb+gfx", ""), at(8, 8, "8g.48gb", ""),
		}},
		{"not capable", nvml.GPU{Model: "NVIDIA L40S"}, nil},
		{"lost", nvml.GPU{Lost: true}, nil},
	} {
		line := picture.GPU(c.gpu, c.cut)
		if got, want := utf8.RuneCountInString(line), 65; got != want {
			t.Errorf("%s: %q has %d columns, want %d", c.name, line, got, want)
		}
		b.WriteString("# " + c.name + "\n" + line + "\n")
	}
	const golden = "testdata/gpu.txt"
	if *update {
		if err := os.WriteFile(golden, []byte(b.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), b.String()); diff != "" {
		t.Errorf("%s (-want +got), rewrite it with -update:\n%s", golden, diff)
	}
}
