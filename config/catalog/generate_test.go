package catalog_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// describe writes configs one to a line, rules joined by " | ", as a filter in brackets and the devices: for comparing.
func describe(configs map[string]catalog.MIGConfig) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(configs)) {
		var rules []string
		for _, r := range configs[name] {
			var parts []string
			if len(r.DeviceFilter) > 0 {
				parts = append(parts, fmt.Sprint(r.DeviceFilter))
			}
			if !r.All {
				parts = append(parts, fmt.Sprint(r.Indices))
			}
			if !r.MIG {
				parts = append(parts, "off")
			}
			for _, d := range slices.Backward(slices.Sorted(maps.Keys(r.Devices))) {
				parts = append(parts, fmt.Sprintf("%dx%s", r.Devices[d], d))
			}
			if r.MIG && len(r.Devices) == 0 {
				parts = append(parts, "on")
			}
			rules = append(rules, strings.Join(parts, " "))
		}
		fmt.Fprintf(&b, "%s: %s\n", name, strings.Join(rules, " | "))
	}
	return b.String()
}

// TestGenerate holds the generated configs to what NVIDIA's generator makes of the same profiles (mig-parted v0.14.4,
// pkg/mig/builder).
func TestGenerate(t *testing.T) {
	tests := map[string]struct {
		gpus []nvml.GPU
		want string
	}{
		"for an A100 40GB": {
			gpus: node(a100Small(), a100Small()),
			want: `
all-1g.10gb: 4x1g.10gb
all-1g.5gb: 7x1g.5gb
all-1g.5gb.me: 1x1g.5gb+me
all-2g.10gb: 3x2g.10gb
all-3g.20gb: 2x3g.20gb
all-4g.20gb: 1x4g.20gb
all-7g.40gb: 1x7g.40gb
all-balanced: 1x3g.20gb 1x2g.10gb 2x1g.5gb
all-disabled: off
all-enabled: on
`,
		},
		"for an H100, balanced with the 1g profile of which most fit": {
			gpus: node(h100()),
			want: `
all-1g.10gb: 7x1g.10gb
all-1g.10gb.me: 1x1g.10gb+me
all-1g.20gb: 4x1g.20gb
all-2g.20gb: 3x2g.20gb
all-3g.40gb: 2x3g.40gb
all-4g.40gb: 1x4g.40gb
all-7g.80gb: 1x7g.80gb
all-balanced: 1x3g.40gb 1x2g.20gb 2x1g.10gb
all-disabled: off
all-enabled: on
`,
		},
		"for an A30, with the counts that have a place and not those that the library gives": {
			gpus: node(a30()),
			want: `
all-1g.6gb: 4x1g.6gb
all-1g.6gb.me: 1x1g.6gb+me
all-2g.12gb: 2x2g.12gb
all-2g.12gb.me: 1x2g.12gb+me
all-4g.24gb: 1x4g.24gb
all-balanced: 1x2g.12gb 2x1g.6gb
all-disabled: off
all-enabled: on
`,
		},
		"for an RTX PRO 6000, with each variant under a name that a label can hold": {
			gpus: node(rtxPro6000()),
			want: `
all-1g.24gb: 4x1g.24gb
all-1g.24gb-me: 4x1g.24gb-me
all-1g.24gb.gfx: 4x1g.24gb+gfx
all-1g.24gb.me: 1x1g.24gb+me
all-1g.24gb.me.all: 1x1g.24gb+me.all
all-2g.48gb: 2x2g.48gb
all-2g.48gb-me: 2x2g.48gb-me
all-2g.48gb.gfx: 2x2g.48gb+gfx
all-2g.48gb.me.all: 1x2g.48gb+me.all
all-4g.96gb: 1x4g.96gb
all-4g.96gb.gfx: 1x4g.96gb+gfx
all-balanced: 1x2g.48gb 2x1g.24gb
all-disabled: off
all-enabled: on
`,
		},
		"for an RTX PRO 5000, which has no plain 2g profile to balance with": {
			gpus: node(nvml.GPU{Model: "NVIDIA RTX PRO 5000 Blackwell", DeviceID: 0x2BB310DE, Capable: true, Profiles: []nvml.Profile{
				profile("1g.12gb", 1, 1, 1, 0, 1, 2, 3),
				profile("1g.12gb-me", 1, 3, 1, 0, 1, 2, 3),
				profile("2g.24gb-me", 2, 1, 2, 0, 2),
				profile("4g.48gb", 4, 1, 4, 0),
			}}),
			want: `
all-1g.12gb: 1x1g.12gb
all-1g.12gb-me: 3x1g.12gb-me
all-2g.24gb-me: 1x2g.24gb-me
all-4g.48gb: 1x4g.48gb
all-disabled: off
all-enabled: on
`,
		},
		"for two kinds, with a filter on each rule and one rule for those of equal count": {
			gpus: node(h100(), a100Small(), a100()),
			want: `
all-1g.10gb: [0x20B010DE] 4x1g.10gb | [0x20B210DE 0x233010DE] 7x1g.10gb
all-1g.10gb.me: [0x20B210DE 0x233010DE] 1x1g.10gb+me
all-1g.20gb: [0x20B210DE 0x233010DE] 4x1g.20gb
all-1g.5gb: [0x20B010DE] 7x1g.5gb
all-1g.5gb.me: [0x20B010DE] 1x1g.5gb+me
all-2g.10gb: [0x20B010DE] 3x2g.10gb
all-2g.20gb: [0x20B210DE 0x233010DE] 3x2g.20gb
all-3g.20gb: [0x20B010DE] 2x3g.20gb
all-3g.40gb: [0x20B210DE 0x233010DE] 2x3g.40gb
all-4g.20gb: [0x20B010DE] 1x4g.20gb
all-4g.40gb: [0x20B210DE 0x233010DE] 1x4g.40gb
all-7g.40gb: [0x20B010DE] 1x7g.40gb
all-7g.80gb: [0x20B210DE 0x233010DE] 1x7g.80gb
all-balanced: [0x20B010DE] 1x3g.20gb 1x2g.10gb 2x1g.5gb | [0x20B210DE] 1x3g.40gb 1x2g.20gb 2x1g.10gb | [0x233010DE] 1x3g.40gb 1x2g.20gb 2x1g.10gb
all-disabled: off
all-enabled: on
`,
		},
		"beside a GPU that cannot do MIG, with a rule of its own": {
			gpus: node(t4(), a30()),
			want: `
all-1g.6gb: [0x20B710DE] 4x1g.6gb | [0x1EB810DE] off
all-1g.6gb.me: [0x20B710DE] 1x1g.6gb+me | [0x1EB810DE] off
all-2g.12gb: [0x20B710DE] 2x2g.12gb | [0x1EB810DE] off
all-2g.12gb.me: [0x20B710DE] 1x2g.12gb+me | [0x1EB810DE] off
all-4g.24gb: [0x20B710DE] 1x4g.24gb | [0x1EB810DE] off
all-balanced: [0x20B710DE] 1x2g.12gb 2x1g.6gb | [0x1EB810DE] off
all-disabled: off
all-enabled: [0x20B710DE] on | [0x1EB810DE] off
`,
		},
		"for GPUs that cannot do MIG": {
			gpus: node(t4(), t4()),
			want: "\nall-disabled: off\nall-enabled: on\n",
		},
		"for a driver that reports no profiles while MIG is off": {
			gpus: node(nvml.GPU{Model: "NVIDIA A100-SXM4-80GB", DeviceID: 0x20B210DE, Capable: true}),
			want: "\nall-disabled: off\nall-enabled: on\n",
		},
		"for GPUs of one kind of which one offers less, with what fits on both": {
			gpus: node(h100(), func() nvml.GPU { g := h100(); g.Profiles = g.Profiles[2:4]; return g }()),
			want: `
all-1g.20gb: 4x1g.20gb
all-2g.20gb: 3x2g.20gb
all-disabled: off
all-enabled: on
`,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, "\n"+describe(catalog.Generate(test.gpus))); diff != "" {
				t.Errorf("configs (-want +got):\n%s", diff)
			}
		})
	}
}

func TestEveryGeneratedConfigFitsItsHardwareAndCanBeAskedForByALabel(t *testing.T) {
	for _, gpus := range [][]nvml.GPU{
		node(a100Small()), node(a100()), node(h100()), node(h200()), node(b200()), node(a30()), node(rtxPro6000()),
		node(h200(), a30(), t4(), rtxPro6000()),
	} {
		configs := catalog.Merge(catalog.Generate(gpus), nil)
		for _, name := range configs.Names() {
			if problems := validation.IsValidLabelValue(name); len(problems) > 0 {
				t.Errorf("%s: %v", name, problems)
			}
			requests, err := configs.Requests(name, gpus)
			if err != nil {
				t.Errorf("%s on %s: %v", name, gpus[0].Model, err)
			}
			for _, g := range gpus {
				if _, err := nvml.Solve(g, requests[g.UUID].Devices); err != nil {
					t.Errorf("%s on %s: %v", name, g.Model, err)
				}
			}
		}
	}
}

func TestAllOfAProfileIsAllThatFit(t *testing.T) {
	for _, g := range []nvml.GPU{a100Small(), a100(), h100(), h200(), b200(), a30(), rtxPro6000()} {
		gpus := node(g)
		configs := catalog.Merge(catalog.Generate(gpus), nil)
		for _, p := range g.Profiles {
			requests, err := configs.Requests("all-"+strings.ReplaceAll(p.Name, "+", "."), gpus)
			if err != nil {
				t.Error(err)
				continue
			}
			n := requests["GPU-0"].Devices[p.Name]
			if _, err := nvml.Solve(gpus[0], map[string]int{p.Name: n + 1}); n == 0 || err == nil {
				t.Errorf("%s: %d of %s, and one more would fit", g.Model, n, p.Name)
			}
		}
	}
}
