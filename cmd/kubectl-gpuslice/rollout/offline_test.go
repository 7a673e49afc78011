package rollout

import (
	"html"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/report/preview"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml/models"
	"github.com/gpuslice/gpuslice/test/agenttest"
	"github.com/gpuslice/gpuslice/test/browser"
)

const configsOfFile = `version: v1
mig-configs:
  three: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 3}}]
  first: [{devices: [0], mig-enabled: true, mig-devices: {3g.40gb: 1, 2g.20gb: 1}}, {devices: [1], mig-enabled: false}]
---
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}
`

// A laptop has neither cluster nor GPU: the world of these tests has no node either.
func TestAPlanForGPUsThatAreNotThere(t *testing.T) {
	file := filepath.Join(t.TempDir(), "configs.yaml")
	if err := os.WriteFile(file, []byte(configsOfFile), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, row := range map[string]struct {
		args []string
		code int
		says []string
	}{
		"equal GPUs": {[]string{"--gpus", "8xH100-80GB", "--mig-config", "all-balanced"}, 0, []string{
			"8xH100-80GB: possible by NVIDIA's tables; no node was asked\n  GPU 0-7 NVIDIA H100 80GB HBM3\n  before │ MIG off", "after  │1g.10gb│1g.10gb│ 2g.20gb       │ 3g.40gb ",
			"offers then: nvidia.com/mig-1g.10gb 16, nvidia.com/mig-2g.20gb 8, nvidia.com/mig-3g.40gb 8\n", "is taken to be mixed",
		}},
		"two kinds":        {[]string{"--gpus", "4xA100-40GB,4xA100-80GB", "--profile", "all-balanced"}, 0, []string{"GPU 0-3 NVIDIA A100-SXM4-40GB", "GPU 4-7 NVIDIA A100-SXM4-80GB", "mig-1g.5gb 8"}},
		"a file":           {[]string{"--gpus", "2xnvidia h100 80gb hbm3", "--mig-config", "first", "-f", file}, 0, []string{"GPU 0 NVIDIA", "GPU 1 NVIDIA", "stays ", "nvidia.com/gpu 1, nvidia.com/mig-2g.20gb 1, nvidia.com/mig-3g.40gb 1"}},
		"time-slicing":     {[]string{"--gpus", "2xH200", "--device-plugin-config", "configs", "-f", file}, 0, []string{"nvidia.com/gpu 8 = 2 x 4 time-slicing"}},
		"no room":          {[]string{"--gpus", "8xH100-80GB", "--mig-config", "three", "-f", file}, cli.ExitHeldUp, []string{"cannot be: NVIDIA H100 80GB HBM3: ", "error: MIG config three cannot be on 8xH100-80GB"}},
		"another config":   {[]string{"--gpus", "H200", "--mig-config", "all-1g.10gb"}, cli.ExitHeldUp, []string{"no MIG config is named \"all-1g.10gb\"", "all-1g.18gb"}},
		"another model":    {[]string{"--gpus", "8xH1000", "--mig-config", "all-balanced"}, 1, []string{`"H1000" is no model of NVIDIA's tables that can be cut; known are A30, A100-40GB, `, "RTX-PRO-6000"}},
		"too many":         {[]string{"--gpus", "60xH200,5xB200", "--mig-config", "all-balanced"}, 1, []string{"a node has 1 to 64 GPUs"}},
		"very many":        {[]string{"--gpus", "100000xH100-80GB", "--mig-config", "all-balanced"}, 1, []string{"flag --gpus: 100000xH100-80GB: a node has 1 to 64 GPUs"}},
		"half a name":      {[]string{"--gpus", "8xh100", "--mig-config", "all-balanced"}, 1, []string{`"h100" is no model of NVIDIA's tables that can be cut: did you mean H100-80GB or H100-94GB?`}},
		"half of one name": {[]string{"--gpus", "GH200-9", "--mig-config", "all-balanced"}, 1, []string{`"GH200-9" is no model of NVIDIA's tables that can be cut: did you mean GH200-96GB?`}},
		"no MIG": {[]string{"--gpus", "4xL4", "--profile", "shared", "-f", file}, 1, []string{
			`"L4" is no model of NVIDIA's tables that can be cut; known are A30, `, "a GPU without MIG is shared as a whole, which needs no drawing: kubectl gpuslice plan NODE says what it offers then",
		}},
		"none":                {[]string{"--gpus", "0xH200", "--mig-config", "all-balanced"}, 1, []string{"a node has 1 to 64 GPUs"}},
		"an empty part":       {[]string{"--gpus", "H200,", "--mig-config", "all-balanced"}, 1, []string{"flag --gpus has an empty part"}},
		"no config":           {[]string{"--gpus", "H200"}, 1, []string{"say what to ask for"}},
		"a node":              {[]string{"--gpus", "H200", "gpu-1", "--mig-config", "all-balanced"}, 1, []string{"--gpus asks no node: leave out gpu-1"}},
		"a name of two files": {[]string{"--gpus", "H200", "--mig-config", "first", "-f", file, "-f", file}, 1, []string{`"first" is in ` + file}},
		"a file too much":     {[]string{"gpu-1", "-f", file, "--mig-config", "all-balanced"}, 1, []string{"--file goes with --gpus"}},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				said, code := w.Run(append([]string{"plan"}, row.args...)...)
				if code != row.code {
					t.Errorf("exit code %d, want %d", code, row.code)
				}
				for _, want := range row.says {
					if !strings.Contains(said, want) {
						t.Errorf("want %q:\n%s", want, said)
					}
				}
			})
		})
	}
}

func TestFormatsOfAPlanForGPUsThatAreNotThere(t *testing.T) {
	inWorld(t, func(w *world) {
		for _, format := range []string{"json", "html"} {
			said, code := w.Run("plan", "--gpus", "8xH100-80GB", "--mig-config", "all-balanced", "-o", format)
			agenttest.Golden(t, "testdata/plan-gpus."+format, said, *update)
			if code != 0 {
				t.Errorf("exit code %d", code)
			}
			if format == "html" {
				browser.Harmless(t, said)
			}
		}
	})
}

// The README's picture is of this command: make pictures writes it.
func TestThePictureShowsWhatTheCommandPrints(t *testing.T) {
	tags := regexp.MustCompile(`(?s)<[^>]*>`)
	inWorld(t, func(w *world) {
		said, _ := w.Run("plan", "--gpus", "8xH100-80GB", "--mig-config", "all-balanced")
		for _, theme := range []string{"light", "dark"} {
			svg, err := os.ReadFile("../../../.github/images/plan-" + theme + ".svg")
			if err != nil {
				t.Fatal(err)
			}
			shown := html.UnescapeString(tags.ReplaceAllString(string(svg), " "))
			if diff := cmp.Diff(strings.Fields(said), strings.Fields(shown)); diff != "" {
				t.Errorf("%s: -printed +shown, mend it by make pictures:\n%s", theme, diff)
			}
		}
	})
}

// What a laptop says of a config is what the agent plans on such a node.
func TestAPlanWithoutANodeIsTheAgents(t *testing.T) {
	for _, name := range models.Names() {
		gpus, err := parseGPUs("2x" + name + ",A30")
		if err != nil {
			t.Fatal(err)
		}
		generated := catalog.Generate(gpus)
		for _, wanted := range slices.Sorted(maps.Keys(generated)) {
			p, refused := preview.Offline{GPUs: gpus, Catalog: catalog.Merge(generated, nil)}.Plan(config.LabelMIGConfig, wanted)
			var agents api.Answer
			p.AddTo(&agents)
			if len(p.Steps) == 0 {
				agents.GPUs, agents.Offers = api.Recuts(p.Before, p.After, nil), p.Offers
			}
			said, err := planFor(gpus, manifest.Configs{}, cluster.Target{Label: config.LabelMIGConfig, Name: wanted})
			if (err == nil) != (refused == nil) {
				t.Errorf("%s, %s: the agent says %v, the plugin %v", name, wanted, refused, err)
				continue
			}
			if err != nil {
				continue
			}
			if diff := cmp.Diff(agents.GPUs, said.GPUs); diff != "" || agents.Offers != said.Offers {
				t.Errorf("%s, %s: the agent offers %q, the plugin %q; GPUs (-agent +plugin):\n%s", name, wanted, agents.Offers, said.Offers, diff)
			}
		}
	}
}
