package catalog_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// cut is a request for these devices; none is MIG off.
func cut(devices map[string]int) nvml.Request {
	return nvml.Request{MIG: devices != nil, Devices: devices}
}

func TestANameSpellsAConfigOut(t *testing.T) {
	gpus := node(h100(), h100(), t4(), rtxPro6000())
	h := func(devices map[string]int) map[int]nvml.Request { return map[int]nvml.Request{0: cut(devices)} }
	for name, want := range map[string]map[int]nvml.Request{
		"gpu0_3g.40gb_4x1g.10gb":         h(map[string]int{"3g.40gb": 1, "1g.10gb": 4}),
		"gpu0_1x7g.80gb":                 h(map[string]int{"7g.80gb": 1}),
		"gpu0_off":                       h(nil),
		"gpu0.2_off-gpu1_7x1g.10gb":      {0: cut(nil), 2: cut(nil), 1: cut(map[string]int{"1g.10gb": 7})},
		"gpu0_1g.10gb.me_2g.20gb":        h(map[string]int{"1g.10gb+me": 1, "2g.20gb": 1}),
		"gpu0_2x1c.3g.40gb":              h(map[string]int{"1c.3g.40gb": 2}),
		"gpu0_3c.3g.40gb":                h(map[string]int{"3g.40gb": 1}),
		"gpu3_1g.24gb.me.all_1g.24gb-me": {3: cut(map[string]int{"1g.24gb+me.all": 1, "1g.24gb-me": 1})},
		"gpu3_2x1g.24gb.gfx":             {3: cut(map[string]int{"1g.24gb+gfx": 2})},
		"gpu0_9x7g.80gb":                 h(map[string]int{"7g.80gb": 9}), // the planner says what fits
	} {
		t.Run(name, func(t *testing.T) {
			byUUID := map[nvml.UUID]nvml.Request{}
			for index, w := range want {
				byUUID[gpus[index].UUID] = w
			}
			for label, of := range map[string]func(string, []nvml.GPU) (map[nvml.UUID]nvml.Request, error){
				config.LabelMIGConfig: catalog.Merge(catalog.Generate(gpus), nil).Requests,
				config.LabelProfile:   catalog.Merge(catalog.Generate(gpus), nil).ProfileRequests,
			} {
				if got, err := of(name, gpus); err != nil || cmp.Diff(byUUID, got) != "" {
					t.Errorf("%s: %v: %s", label, err, cmp.Diff(byUUID, got))
				}
			}
			if problems := validation.IsValidLabelValue(name); len(problems) > 0 {
				t.Error(problems)
			}
		})
	}
}

func TestAWrongSpelledNameIsRefused(t *testing.T) {
	gpus := node(h100(), h100(), t4())
	for name, want := range map[string]string{
		"gpu9_off":                   `devices: 9 is not a GPU of this node, which has 0 to 2`,
		"gpu0.0_off":                 `gpu0.0: "0" is a GPU that the name has twice`,
		"gpu0_off-gpu0_7g.80gb":      `gpu0: "0" is a GPU that the name has twice`,
		"gpu00_off":                  `gpu00: "00" is no index of a GPU: write a whole number from 0 to 1000, without zeros before it`,
		"gpu0._off":                  `gpu0.: "" is no index`,
		"gpu1001_off":                `gpu1001: "1001" is no index`,
		"gpu0-gpu1_off":              `gpu0: has no instances: write them behind it, as in gpu0_3g.40gb_4x1g.10gb, or gpu0_off`,
		"gpu1_off-gpu0":              `gpu0: has no instances`,
		"gpu1_off-gpu_off":           `gpu: "" is no index`,
		"gpu0_":                      `gpu0: "" is not a MIG device`,
		"gpu0_7g.80gb_":              `gpu0: "" is not a MIG device`,
		"gpu0_seven":                 `gpu0: "seven" is not a MIG device: they look like "1g.10gb", "1g.10gb+me", "1c.3g.40gb"`,
		"gpu0_off_7g.80gb":           `gpu0: "off" is MIG off, and stands alone`,
		"gpu0_0x1g.10gb":             `gpu0: "0x1g.10gb" begins with no number of instances: write a whole number from 1 to 1000, without zeros before it, and x`,
		"gpu0_07x1g.10gb":            `gpu0: "07x1g.10gb" begins with no number`,
		"gpu0_1001x1g.10gb":          `gpu0: "1001x1g.10gb" begins with no number`,
		"gpu0_x1g.10gb":              `gpu0: "x1g.10gb" begins with no number`,
		"gpu0_99999999999999x1g.5gb": `begins with no number`,
		"gpu0_1g.10gb_2x1g.10gb":     `gpu0: "2x1g.10gb" is there twice: write it once, with its count before it, as in 2x1g.10gb`,
		"gpu0_1g.10gb_1c.1g.10gb":    `is there twice`,
		"gpu0_4c.3g.40gb":            `gpu0: "4c.3g.40gb" cannot be`,
		"gpu1_1g.5gb":                `GPU 1: 1g.5gb is no profile of it: a NVIDIA H100 80GB HBM3 offers 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb`,
		"gpu1_1g.10gb.gfx":           `GPU 1: 1g.10gb+gfx is no profile of it`,
		"gpu2_7g.80gb":               `devices: 2 is a Tesla T4, which cannot do MIG: leave it out, or write _off for it`,
		"gpu0_off-gpu1_off-inactive": `gpu1: "off-inactive" is not a MIG device`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := catalog.Merge(catalog.Generate(gpus), nil).Requests(name, gpus)
			if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), fmt.Sprintf("config %q", name)) {
				t.Errorf("got %v, want %s", err, want)
			}
			if reason := catalog.ReasonOf(err); reason != config.ReasonInvalidCatalog {
				t.Error(reason)
			}
		})
	}
}

// Names that begin like a GPU's may be users' own; what they mean is in the files.
func TestAConfigOfAFileWinsOverASpelledName(t *testing.T) {
	gpus := node(h100(), h100())
	whole := catalog.MIGConfig{{All: true}}
	configs := catalog.Merge(catalog.Generate(gpus), map[string]catalog.MIGConfig{"gpu0_7g.80gb": whole, "gpu4-inference": whole})
	for name, want := range map[string]int{"gpu0_7g.80gb": 2, "gpu1_7g.80gb": 1} {
		if got, err := configs.Requests(name, gpus); err != nil || len(got) != want {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	profiles := configs.WithProfiles(map[string]catalog.Profile{"gpu0_off": {MIG: whole}})
	if got, err := profiles.ProfileRequests("gpu0_off", gpus); err != nil || len(got) != 2 {
		t.Errorf("a profile: %v, %v", got, err)
	}
	for _, name := range []string{"gpu4-inferense", "gpu-all_off", "gpu3", "gpus_off", "GPU0_off"} {
		if _, err := configs.Requests(name, gpus); catalog.ReasonOf(err) != config.ReasonUnknownConfig {
			t.Errorf("%s: %v", name, err)
		}
	}
	if cfg, ok := configs.Config("gpu0.1_off"); !ok || cmp.Diff(catalog.MIGConfig{{Indices: []int{0, 1}}}, cfg) != "" {
		t.Errorf("%v, %t", cfg, ok)
	}
	if _, ok := configs.Config("gpu0_seven"); ok {
		t.Error("a wrong name is a config")
	}
}

func TestTheNameOfRequests(t *testing.T) {
	seven := cut(map[string]int{"1g.10gb": 7})
	for name, row := range map[string]struct {
		of   map[int]nvml.Request
		want string
	}{
		"the largest first":        {map[int]nvml.Request{3: cut(map[string]int{"1g.10gb": 4, "3g.40gb": 1})}, "gpu3_3g.40gb_4x1g.10gb"},
		"more memory first":        {map[int]nvml.Request{3: cut(map[string]int{"1g.5gb": 1, "1g.10gb": 1})}, "gpu3_1g.10gb_1g.5gb"},
		"equal GPUs together":      {map[int]nvml.Request{4: seven, 0: cut(nil), 10: seven, 2: cut(nil)}, "gpu0.2_off-gpu4.10_7x1g.10gb"},
		"an attribute":             {map[int]nvml.Request{0: cut(map[string]int{"1g.10gb+me": 1})}, "gpu0_1g.10gb.me"},
		"a compute instance":       {map[int]nvml.Request{0: cut(map[string]int{"1c.3g.40gb": 3})}, "gpu0_3x1c.3g.40gb"},
		"none of a profile":        {map[int]nvml.Request{0: cut(map[string]int{"1g.10gb": 7, "7g.80gb": 0})}, "gpu0_7x1g.10gb"},
		"off whatever the devices": {map[int]nvml.Request{0: {Devices: map[string]int{"1g.10gb": 7}}}, "gpu0_off"},
		"two attributes":           {map[int]nvml.Request{0: cut(map[string]int{"1g.10gb+gfx,me": 1})}, ""},
		"no GPU":                   {nil, ""},
		"MIG on without instances": {map[int]nvml.Request{0: cut(map[string]int{})}, ""},
		"too many":                 {map[int]nvml.Request{0: cut(map[string]int{"1g.10gb": 1001})}, ""},
		"no device":                {map[int]nvml.Request{0: cut(map[string]int{"seven": 1})}, ""},
		"a negative index":         {map[int]nvml.Request{-1: seven}, ""},
		"63 characters":            {map[int]nvml.Request{0: cut(map[string]int{"4g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1}), 10: cut(map[string]int{"3g.40gb": 2}), 11: seven}, "gpu0_4g.40gb_2g.20gb_1g.10gb-gpu10_2x3g.40gb-gpu11_7x1g.10gb"},
		"too long":                 {map[int]nvml.Request{0: cut(map[string]int{"4g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1}), 10: cut(map[string]int{"3g.40gb": 2}), 11: seven, 120: seven}, ""},
	} {
		got, ok := catalog.Spell(row.of)
		if ok != (row.want != "") || ok && got != row.want {
			t.Errorf("%s: %q, %t, want %q", name, got, ok, row.want)
		}
	}
}

// requestsOf reads a name back.
func requestsOf(cfg catalog.MIGConfig) map[int]nvml.Request {
	out := map[int]nvml.Request{}
	for _, rule := range cfg {
		for _, index := range rule.Indices {
			out[index] = nvml.Request{MIG: rule.MIG, Devices: rule.Devices}
		}
	}
	return out
}

func TestWhatIsSpelledIsReadBack(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	spelled := 0
	for range 20_000 {
		want := map[int]nvml.Request{}
		for range 1 + r.IntN(3) {
			g := []nvml.GPU{h100(), h200(), a30(), rtxPro6000(), a100()}[r.IntN(5)]
			var devices map[string]int
			for range r.IntN(3) {
				if devices == nil {
					devices = map[string]int{}
				}
				devices[g.Profiles[r.IntN(len(g.Profiles))].Name] = 1 + r.IntN(7)
			}
			want[r.IntN(16)] = cut(devices)
		}
		name, ok := catalog.Spell(want)
		if !ok {
			continue
		}
		spelled++
		cfg, err := catalog.Spelled(name)
		if diff := cmp.Diff(want, requestsOf(cfg)); err != nil || diff != "" || !catalog.IsSpelled(name) {
			t.Fatalf("%s: %v: %s", name, err, diff)
		}
	}
	if spelled < 10_000 {
		t.Errorf("%d of 20000 have a name", spelled)
	}
}

// Whatever the value of a label, it is refused, or read as what its own name spells out.
func FuzzSpelled(f *testing.F) {
	for _, name := range []string{"gpu0_off", "gpu0.1_off-gpu3_3g.40gb_4x1g.10gb", "gpu3_1g.24gb.me.all_1g.24gb-me", "gpu0_2x1c.3g.40gb", "gpu00_0x1g.5gb-gpu"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		cfg, err := catalog.Spelled(name)
		if err != nil {
			if cfg != nil {
				t.Errorf("%q is refused, and read as %v", name, cfg)
			}
			return
		}
		want := requestsOf(cfg)
		again, ok := catalog.Spell(want)
		if !ok { // such as one that is too long
			if len(validation.IsValidLabelValue(name)) == 0 && len(name) < 40 {
				t.Errorf("%q is read as %v, which has no name: %q", name, want, again)
			}
			return
		}
		back, err := catalog.Spelled(again)
		if diff := cmp.Diff(want, requestsOf(back)); err != nil || diff != "" {
			t.Errorf("%q is %q: %v: %s", name, again, err, diff)
		}
		if len(slices.Collect(maps.Keys(want))) == 0 {
			t.Errorf("%q names no GPU", name)
		}
	})
}
