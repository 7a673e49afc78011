package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

var update = flag.Bool("update", false, "rewrite testdata")

// The command as a person runs it on a node without a cluster, through the real library path.
func TestPlanOffline(t *testing.T) {
	library, err := binaries.Builder{Log: os.Stderr}.LibNVML(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	configs := filepath.Join("testdata", "configs.yaml")
	for _, row := range []struct{ name, args string }{
		{"balanced", "--mig-config all-balanced"},
		{"profile", "--profile recommended -f " + configs},
		{"impossible", "--mig-config two-3g-and-a-1g -f " + configs},
		{"unknown", "--mig-config all-1g.5gb"},
		{"nothing", "--mig-config all-disabled"},
	} {
		t.Run(row.name, func(t *testing.T) {
			spec, err := gpusim.ParseSpec([]byte("gpus:\n- model: A100-80GB\n  count: 1\n"))
			if err != nil {
				t.Fatal(err)
			}
			gpus, err := gpusim.Create(t.TempDir(), spec)
			if err != nil {
				t.Fatal(err)
			}
			defer gpus.Close()
			before := gpus.String()
			t.Setenv("GPUSIM_NODE", gpus.Dir())
			root := t.TempDir()
			lib64 := filepath.Join(root, "usr", "lib64")
			if err := os.MkdirAll(lib64, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(library, filepath.Join(lib64, "libnvidia-ml.so.1")); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			c := command()
			c.SetOut(&out)
			c.SetArgs(append([]string{"plan", "--offline", "--driver-root", root}, strings.Fields(row.args)...))
			if err := c.ExecuteContext(t.Context()); err != nil {
				out.WriteString("error: " + err.Error() + "\n")
			}
			got := regexp.MustCompile(`GPU-[0-9a-f-]{36}`).ReplaceAllString(out.String(), "GPU-<uuid>")
			golden := filepath.Join("testdata", row.name+".txt")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("plan (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, gpus.String()); diff != "" {
				t.Errorf("the plan changed the GPU (-before +after):\n%s", diff)
			}
		})
	}
}
