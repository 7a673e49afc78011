package nvml_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/nvml"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestDrawingsAreAsInTheGoldenFile(t *testing.T) {
	off := h100()
	off.Enabled = false
	var b strings.Builder
	for _, c := range []struct {
		name string
		gpu  nvml.GPU
		cut  []string
	}{
		{"balanced", h100(), []string{"1g.10gb@0", "1g.10gb@1", "2g.20gb@2", "3g.40gb@4"}},
		{"free slices behind and between", h100(), []string{"4g.40gb@0", "1g.10gb@5"}},
		{"uncut", h100(), nil},
		{"one instance", h100(), []string{"7g.80gb@0"}},
		{"seven of one slice, the last memory slice is nobody's", h200(), []string{
			"1g.18gb+me@0", "1g.18gb@1", "1g.18gb@2", "1g.18gb@3", "1g.18gb@4", "1g.18gb@5", "1g.18gb@6",
		}},
		{"divided instances", h100(), []string{"1g.20gb@0", "2g.20gb(1c+1c)@2", "3g.40gb(1c+2c)@4"}},
		{"mode off", off, nil},
		{"mode off, to be cut", off, []string{"3g.40gb@0", "3g.40gb@4"}},
		{"four memory slices", a30(), []string{"1g.6gb@0", "1g.6gb+me@1", "2g.12gb@2"}},
		{"four memory slices, one free", a30(), []string{"2g.12gb+me@0", "1g.6gb@2"}},
		{"sixteen memory slices", sixteen(), []string{"1g.6gb@0", "2g.12gb(1c+1c)@1", "1g.6gb+gfx@4", "8g.48gb@8"}},
		{"not capable", nvml.GPU{Model: "NVIDIA L40S"}, nil},
	} {
		g := stand(c.gpu, c.cut...)
		line := nvml.Draw(g, g.Geometry())
		if got, want := utf8.RuneCountInString(line), 65; got != want {
			t.Errorf("%s: %q has %d columns, want %d", c.name, line, got, want)
		}
		b.WriteString("# " + c.name + "\n" + line + "\n")
	}
	compareGolden(t, "draw.txt", b.String())
}

func compareGolden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := gocmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got), rewrite it with -update:\n%s", path, diff)
	}
}
