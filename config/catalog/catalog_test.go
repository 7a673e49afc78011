package catalog_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// The profiles below are from NVIDIA's MIG user guide; the H200's are what one answered. Device ids need only differ here.

// sevenSlices is a GPU of the A100's shape. The names are 1g, 1g+me, 1g with double memory, 2g, 3g, 4g, 7g.
func sevenSlices(id uint32, model string, names ...string) nvml.GPU {
	shapes := []struct {
		slices, most, size int
		starts             []int
	}{
		{1, 7, 1, []int{0, 1, 2, 3, 4, 5, 6}},
		{1, 1, 1, []int{0, 1, 2, 3, 4, 5, 6}},
		{1, 4, 2, []int{0, 2, 4, 6}},
		{2, 3, 2, []int{0, 2, 4}},
		{3, 2, 4, []int{0, 4}},
		{4, 1, 4, []int{0}},
		{7, 1, 8, []int{0}},
	}
	g := nvml.GPU{Model: model, DeviceID: id, Capable: true}
	for i, s := range shapes {
		g.Profiles = append(g.Profiles, profile(names[i], s.slices, s.most, s.size, s.starts...))
	}
	return g
}

func profile(name string, slices, most, size int, starts ...int) nvml.Profile {
	p := nvml.Profile{Name: name, Slices: slices, Max: most, Engines: nvml.Engines{Copy: slices}}
	for _, s := range starts {
		p.Placements = append(p.Placements, nvml.Span{Start: s, Size: size})
	}
	return p
}

func a100Small() nvml.GPU {
	return sevenSlices(0x20B010DE, "NVIDIA A100-SXM4-40GB", "1g.5gb", "1g.5gb+me", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
}

func a100() nvml.GPU {
	return sevenSlices(0x20B210DE, "NVIDIA A100-SXM4-80GB", "1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
}

func h100() nvml.GPU {
	return sevenSlices(0x233010DE, "NVIDIA H100 80GB HBM3", "1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
}

func h200() nvml.GPU {
	return sevenSlices(0x233510DE, "NVIDIA H200", "1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb")
}

func b200() nvml.GPU {
	return sevenSlices(0x290110DE, "NVIDIA B200", "1g.23gb", "1g.23gb+me", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb")
}

// a30 counts more than it has places for. The library is known to count wrongly on this model (mig-parted v0.14.4 has a
// table for it), not in which way.
func a30() nvml.GPU {
	return nvml.GPU{Model: "NVIDIA A30", DeviceID: 0x20B710DE, Capable: true, Profiles: []nvml.Profile{
		profile("1g.6gb", 1, 7, 1, 0, 1, 2, 3),
		profile("1g.6gb+me", 1, 1, 1, 0, 1, 2, 3),
		profile("2g.12gb", 2, 3, 2, 0, 2),
		profile("2g.12gb+me", 2, 1, 2, 0, 2),
		profile("4g.24gb", 4, 1, 4, 0),
	}}
}

func rtxPro6000() nvml.GPU {
	return nvml.GPU{Model: "NVIDIA RTX PRO 6000 Blackwell Server Edition", DeviceID: 0x2BB510DE, Capable: true, Profiles: []nvml.Profile{
		profile("1g.24gb", 1, 4, 1, 0, 1, 2, 3),
		profile("1g.24gb+me", 1, 1, 1, 0, 1, 2, 3),
		profile("1g.24gb+gfx", 1, 4, 1, 0, 1, 2, 3),
		profile("1g.24gb+me.all", 1, 1, 1, 0, 1, 2, 3),
		profile("1g.24gb-me", 1, 4, 1, 0, 1, 2, 3),
		profile("2g.48gb", 2, 2, 2, 0, 2),
		profile("2g.48gb+gfx", 2, 2, 2, 0, 2),
		profile("2g.48gb+me.all", 2, 1, 2, 0, 2),
		profile("2g.48gb-me", 2, 2, 2, 0, 2),
		profile("4g.96gb", 4, 1, 4, 0),
		profile("4g.96gb+gfx", 4, 1, 4, 0),
	}}
}

func t4() nvml.GPU { return nvml.GPU{Model: "Tesla T4", DeviceID: 0x1EB810DE} }

func vGPU() nvml.GPU {
	return nvml.GPU{Model: "NVIDIA A100-40C", DeviceID: 0x20B010DE, Virtualization: nvml.VirtualGPU}
}

// cutVGPU is one that is backed by MIG: its machine sees MIG mode on, and cannot change it.
func cutVGPU() nvml.GPU {
	g := a100Small()
	g.Model, g.Virtualization, g.Enabled = vGPU().Model, nvml.VirtualGPU, true
	return g
}

// node puts GPUs into one node: GPU-0, GPU-1, …
func node(gpus ...nvml.GPU) []nvml.GPU {
	for i := range gpus {
		gpus[i].Index, gpus[i].UUID = i, nvml.UUID(fmt.Sprintf("GPU-%d", i))
	}
	return gpus
}

func all(devices map[string]int, filter ...string) catalog.MIGRule {
	return catalog.MIGRule{All: true, MIG: devices != nil, Devices: devices, DeviceFilter: filter}
}

func TestRequests(t *testing.T) {
	type requests = map[nvml.UUID]nvml.Request
	sevenOf10 := nvml.Request{MIG: true, Devices: map[string]int{"1g.10gb": 7}}
	twoOf40 := nvml.Request{MIG: true, Devices: map[string]int{"3g.40gb": 2}}
	off := nvml.Request{}

	tests := map[string]struct {
		config catalog.MIGConfig
		gpus   []nvml.GPU
		want   requests
	}{
		"for all GPUs are for each": {
			config: catalog.MIGConfig{all(map[string]int{"1g.10gb": 7})},
			gpus:   node(h100(), h100()),
			want:   requests{"GPU-0": sevenOf10, "GPU-1": sevenOf10},
		},
		"by position leave the other GPUs alone": {
			config: catalog.MIGConfig{{Indices: []int{1}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
			gpus:   node(h100(), h100(), h100()),
			want:   requests{"GPU-1": sevenOf10},
		},
		"for all GPUs pass over vGPUs beside others": {
			config: catalog.MIGConfig{all(map[string]int{"1g.10gb": 7})},
			gpus:   node(vGPU(), h100()),
			want:   requests{"GPU-1": sevenOf10},
		},
		"for MIG off are for a vGPU that is whole": {
			config: catalog.MIGConfig{all(nil)},
			gpus:   node(vGPU()),
			want:   requests{"GPU-0": off},
		},
		"of the last rule win": {
			config: catalog.MIGConfig{
				all(map[string]int{"1g.10gb": 7}),
				{Indices: []int{1}, MIG: true, Devices: map[string]int{"3g.40gb": 2}},
				{Indices: []int{2}},
			},
			gpus: node(h100(), h100(), h100()),
			want: requests{"GPU-0": sevenOf10, "GPU-1": twoOf40, "GPU-2": off},
		},
		"by filter are for GPUs of that kind, however the filter is written": {
			config: catalog.MIGConfig{
				all(map[string]int{"1g.10gb": 7}, "0x20b210de", "0x233010DE"),
				all(map[string]int{"1g.6gb": 4}, "548868318"),
			},
			gpus: node(h100(), a30(), t4()),
			want: requests{"GPU-0": sevenOf10, "GPU-1": {MIG: true, Devices: map[string]int{"1g.6gb": 4}}},
		},
		"by filter and position are for GPUs that both name": {
			config: catalog.MIGConfig{{DeviceFilter: []string{"0x233010DE"}, Indices: []int{0, 1}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
			gpus:   node(h100(), t4(), h100()),
			want:   requests{"GPU-0": sevenOf10},
		},
		"for kinds of GPU that are on other nodes are passed over, positions and all": {
			config: catalog.MIGConfig{
				{DeviceFilter: []string{"0x20B210DE"}, Indices: []int{7}, MIG: true, Devices: map[string]int{"3g.40gb": 2}},
				all(map[string]int{"1g.10gb": 7}, "0x233010DE"),
			},
			gpus: node(h100()),
			want: requests{"GPU-0": sevenOf10},
		},
		"by a filter of several kinds are for GPUs of each, and leave other kinds alone": {
			config: catalog.MIGConfig{
				{DeviceFilter: []string{"0x20B010DE", "0x233010DE"}, All: true, MIG: true, Devices: map[string]int{"1g.10gb": 4}},
				all(map[string]int{"1g.10gb": 7}, "0x233010DE"),
			},
			gpus: node(a100Small(), h100(), h200(), a100Small()),
			want: requests{
				"GPU-0": {MIG: true, Devices: map[string]int{"1g.10gb": 4}}, "GPU-1": sevenOf10,
				"GPU-3": {MIG: true, Devices: map[string]int{"1g.10gb": 4}},
			},
		},
		"by a position that is there twice are for that GPU once": {
			config: catalog.MIGConfig{{Indices: []int{1, 1}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
			gpus:   node(t4(), h100()),
			want:   requests{"GPU-1": sevenOf10},
		},
		"for MIG off by position are met by a GPU that cannot do MIG, beside others": {
			config: catalog.MIGConfig{{Indices: []int{0}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}, {Indices: []int{1}}},
			gpus:   node(a100(), t4(), h100()),
			want:   requests{"GPU-0": sevenOf10, "GPU-1": off},
		},
		"by no position at all are for no GPU": {
			config: catalog.MIGConfig{{MIG: true, Devices: map[string]int{"1g.10gb": 7}}, {Indices: []int{0}}},
			gpus:   node(h100(), h100()),
			want:   requests{"GPU-0": off},
		},
		"for all GPUs pass over those that cannot do MIG": {
			config: catalog.MIGConfig{all(map[string]int{"1g.10gb": 7})},
			gpus:   node(t4(), h100()),
			want:   requests{"GPU-1": sevenOf10},
		},
		"for MIG off are met by GPUs that cannot do MIG": {
			config: catalog.MIGConfig{all(nil)},
			gpus:   node(t4(), h100()),
			want:   requests{"GPU-0": off, "GPU-1": off},
		},
		"for MIG on without instances are requests too": {
			config: catalog.MIGConfig{all(map[string]int{})},
			gpus:   node(h100()),
			want:   requests{"GPU-0": {MIG: true, Devices: map[string]int{}}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			configs := catalog.Merge(nil, map[string]catalog.MIGConfig{"mine": test.config})
			got, err := configs.Requests("mine", test.gpus)
			if diff := cmp.Diff(test.want, got); err != nil || diff != "" {
				t.Errorf("error %v, requests (-want +got):\n%s", err, diff)
			}
		})
	}
}

// One file serves nodes of four GPUs and of eight: NVIDIA's mig-parted passes over what is not there.
func TestPositionsBeyondTheNodesGPUsArePassedOver(t *testing.T) {
	configs := catalog.Merge(nil, map[string]catalog.MIGConfig{"mine": {
		{Indices: []int{7, 1, 3}, MIG: true, Devices: map[string]int{"1g.10gb": 7}},
		{Indices: []int{0, 3}},
		{DeviceFilter: []string{"0x20B210DE"}, Indices: []int{5}},
	}})
	gpus := node(h100(), h100())
	requests, err := configs.Requests("mine", gpus)
	if err != nil {
		t.Fatal(err)
	}
	want := map[nvml.UUID]nvml.Request{gpus[0].UUID: {}, gpus[1].UUID: {MIG: true, Devices: map[string]int{"1g.10gb": 7}}}
	if diff := cmp.Diff(want, requests); diff != "" {
		t.Errorf("requests (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]int{3, 7}, configs.MissingPositions("mine", gpus)); diff != "" {
		t.Errorf("positions beyond (-want +got):\n%s", diff)
	}
}

func TestWrongRequestsAreRefused(t *testing.T) {
	sevenOf10 := map[string]int{"1g.10gb": 7}
	tests := map[string]struct {
		config catalog.MIGConfig
		gpus   []nvml.GPU
		want   string
		reason config.Reason
	}{
		"for positions that are none of the node's": {
			config: catalog.MIGConfig{{Indices: []int{8, 9}, MIG: true, Devices: sevenOf10}},
			gpus:   node(h100(), h100()),
			want:   `config "mine", devices: 8, 9 is no position of this node, which has 0 to 1`,
			reason: config.ReasonInvalidCatalog,
		},
		"when every filter is for other nodes": {
			config: catalog.MIGConfig{all(sevenOf10, "0x20B210DE"), all(nil, "0x20B710DE")},
			gpus:   node(h100(), t4()),
			want: `config "mine", device-filter: 0x20B210DE, 0x20B710DE fits no GPU of this node,` +
				` which has 0x1EB810DE (Tesla T4), 0x233010DE (NVIDIA H100 80GB HBM3)`,
			reason: config.ReasonInvalidCatalog,
		},
		"when filter and positions exclude each other": {
			config: catalog.MIGConfig{{DeviceFilter: []string{"0x233010DE"}, Indices: []int{1}, MIG: true, Devices: sevenOf10}},
			gpus:   node(h100(), t4()),
			want: `config "mine", devices: 1 fails the rules' filters on this node,` +
				` which has 0x1EB810DE (Tesla T4), 0x233010DE (NVIDIA H100 80GB HBM3)`,
			reason: config.ReasonInvalidCatalog,
		},
		"for a filter that is none": {
			config: catalog.MIGConfig{all(nil, "H100")},
			gpus:   node(h100()),
			want:   `config "mine", rule 1, device-filter: "H100" is not of the form "0x233010DE", the PCI device id followed by the vendor id, or "0x233010DE:0x16C110DE" with those of the subsystem`,
			reason: config.ReasonInvalidCatalog,
		},
		"for MIG on a GPU that is named and cannot do it": {
			config: catalog.MIGConfig{{Indices: []int{0, 1}, MIG: true, Devices: sevenOf10}},
			gpus:   node(h100(), t4()),
			want:   `config "mine", rule 1, devices: 1 is a Tesla T4, which cannot do MIG: leave it out, or set mig-enabled to false for it`,
			reason: config.ReasonInvalidCatalog,
		},
		"for MIG on all GPUs when none can do it": {
			config: catalog.MIGConfig{all(sevenOf10)},
			gpus:   node(t4(), t4()),
			want: `config "mine" requests MIG, but no GPU that it names can do MIG: Tesla T4;` +
				` choose a config with mig-enabled false, or remove the label`,
			reason: config.ReasonNoCapableGPU,
		},
		"for MIG on all GPUs of a kind that cannot, beside a rule for MIG off": {
			config: catalog.MIGConfig{all(sevenOf10, "0x1EB810DE"), all(nil, "0x233010DE")},
			gpus:   node(t4(), h100()),
			want: `config "mine" requests MIG, but no GPU that it names can do MIG: Tesla T4;` +
				` choose a config with mig-enabled false, or remove the label`,
			reason: config.ReasonNoCapableGPU,
		},
		"for MIG on vGPUs": {
			config: catalog.MIGConfig{all(sevenOf10)},
			gpus:   node(vGPU(), t4(), vGPU()),
			want: `config "mine": a vGPU can only be cut on the host of its virtual machine: ` +
				`GPU 0, NVIDIA A100-40C; GPU 2, NVIDIA A100-40C; ` +
				`choose another vGPU profile for this virtual machine there, and remove the label`,
			reason: config.ReasonVirtualGPU,
		},
		"for MIG on a vGPU that is named, beside a GPU that can do it": {
			config: catalog.MIGConfig{{Indices: []int{0, 1}, MIG: true, Devices: sevenOf10}},
			gpus:   node(h100(), vGPU()),
			want: `config "mine": a vGPU can only be cut on the host of its virtual machine: ` +
				`GPU 1, NVIDIA A100-40C; choose another vGPU profile for this virtual machine there, and remove the label`,
			reason: config.ReasonVirtualGPU,
		},
		"for MIG off on a vGPU that its host has cut": {
			config: catalog.MIGConfig{all(nil)},
			gpus:   node(cutVGPU()),
			want: `config "mine": a vGPU can only be cut on the host of its virtual machine: ` +
				`GPU 0, NVIDIA A100-40C; choose another vGPU profile for this virtual machine there, and remove the label`,
			reason: config.ReasonVirtualGPU,
		},
		"on a node without GPUs": {
			config: catalog.MIGConfig{all(nil)},
			want:   `config "mine" names no GPU, since this node has none`,
			reason: config.ReasonNoCapableGPU,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			configs := catalog.Merge(nil, map[string]catalog.MIGConfig{"mine": test.config})
			requests, err := configs.Requests("mine", test.gpus)
			if err == nil {
				t.Fatalf("requests %v, want an error", requests)
			}
			if diff := cmp.Diff(test.want, err.Error()); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
			if reason := catalog.ReasonOf(err); reason != test.reason {
				t.Errorf("the reason of %v is %s, want %s", err, reason, test.reason)
			}
		})
	}

	t.Run("for every mistake at once", func(t *testing.T) {
		mine := catalog.MIGConfig{all(nil, "H100"), {DeviceFilter: []string{":0x16C110DE"}, Indices: []int{5}}}
		_, err := catalog.Merge(nil, map[string]catalog.MIGConfig{"mine": mine}).Requests("mine", node(h100()))
		want := `config "mine", rule 1, device-filter: "H100" is not of the form "0x233010DE", the PCI device id followed by the vendor id, or "0x233010DE:0x16C110DE" with those of the subsystem` + "\n" +
			`config "mine", rule 2, device-filter: ":0x16C110DE" begins with a colon, so that mig-parted matches no GPU: write the device id before it, "0x233010DE:0x16C110DE"`
		if err == nil || err.Error() != want {
			t.Errorf("error\n%v\nwant\n%s", err, want)
		}
	})
}

// Generate makes no config that would cut a vGPU. An error that such a name is unknown would send users on a search.
func TestAConfigThatOtherNodesGenerateIsRefusedOnAVGPUForWhatItIs(t *testing.T) {
	gpus := node(vGPU())
	_, err := catalog.Merge(catalog.Generate(gpus), nil).Requests("all-1g.5gb", gpus)
	if _, ok := errors.AsType[*catalog.VirtualGPUError](err); !ok {
		t.Errorf("got %v", err)
	}
	_, err = catalog.Merge(catalog.Generate(gpus), nil).Requests("gold", gpus)
	if _, ok := errors.AsType[*catalog.UnknownConfigError](err); !ok {
		t.Errorf("got %v", err)
	}
}

// Nor is a list of names an answer where none of them could be had.
func TestAConfigThatOtherNodesGenerateIsRefusedWhereNoGPUCanDoMIG(t *testing.T) {
	gpus := node(t4())
	configs := catalog.Merge(catalog.Generate(gpus), nil)
	_, err := configs.Requests("all-1g.5gb", gpus)
	incapable, ok := errors.AsType[*catalog.NoCapableGPUError](err)
	if want := (&catalog.NoCapableGPUError{Config: "all-1g.5gb", Models: []string{"Tesla T4"}}); !ok || incapable.Error() != want.Error() {
		t.Errorf("got %v, want %v", err, want)
	}
	_, err = configs.Requests("gold", gpus)
	if _, ok := errors.AsType[*catalog.UnknownConfigError](err); !ok {
		t.Errorf("got %v", err)
	}
}

func TestAnUnknownConfig(t *testing.T) {
	tests := map[string]struct {
		name string
		gpus []nvml.GPU
		want string
	}{
		"is answered with what it is called on this model": {
			name: "all-1g.5gb", gpus: node(h200()),
			want: `no MIG config is named "all-1g.5gb": did you mean all-1g.35gb or all-1g.18gb or all-2g.35gb? This node has` +
				` all-1g.18gb, all-1g.18gb.me, all-1g.35gb, all-2g.35gb, all-3g.71gb, all-4g.71gb, all-7g.141gb, all-balanced, all-disabled, all-enabled`,
		},
		"is answered with how a label writes the plus sign": {
			name: "all-1g.18gb+me", gpus: node(h200()),
			want: `no MIG config is named "all-1g.18gb+me": did you mean all-1g.18gb.me or all-1g.18gb? This node has` +
				` all-1g.18gb, all-1g.18gb.me, all-1g.35gb, all-2g.35gb, all-3g.71gb, all-4g.71gb, all-7g.141gb, all-balanced, all-disabled, all-enabled`,
		},
		"is answered with the names alone when it is like none of them": {
			name: "gold", gpus: node(rtxPro6000()),
			want: `no MIG config is named "gold"; this node has all-1g.24gb, all-1g.24gb-me, all-1g.24gb.gfx, all-1g.24gb.me, all-1g.24gb.me.all,` +
				` all-2g.48gb, all-2g.48gb-me, all-2g.48gb.gfx, all-2g.48gb.me.all, all-4g.96gb, all-4g.96gb.gfx, all-balanced, and 2 more`,
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			configs := catalog.Merge(catalog.Generate(test.gpus), nil)
			_, err := configs.Requests(test.name, test.gpus)
			unknown, ok := errors.AsType[*catalog.UnknownConfigError](err)
			if !ok {
				t.Fatalf("error %v is not about an unknown config", err)
			}
			if diff := cmp.Diff(test.want, unknown.Error()); diff != "" {
				t.Errorf("error (-want +got):\n%s", diff)
			}
			if !slices.Equal(unknown.Known, configs.Names()) || unknown.Reason() != config.ReasonUnknownConfig {
				t.Errorf("known names %v, reason %s", unknown.Known, unknown.Reason())
			}
		})
	}
}

func TestMerge(t *testing.T) {
	generated := catalog.Generate(node(h100()))
	custom := map[string]catalog.MIGConfig{
		"all-balanced": {all(map[string]int{"3g.40gb": 1, "2g.20gb": 2})},
		"night":        {all(map[string]int{"7g.80gb": 1})},
	}
	before := maps.Clone(generated)
	configs := catalog.Merge(generated, custom)
	for name, want := range map[string]catalog.MIGConfig{
		"all-balanced": custom["all-balanced"], "night": custom["night"], "all-1g.10gb": generated["all-1g.10gb"],
	} {
		got, ok := configs.Config(name)
		if diff := cmp.Diff(want, got); !ok || diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if len(configs.Names()) != len(generated)+1 || !slices.IsSorted(configs.Names()) {
		t.Errorf("names %v", configs.Names())
	}
	if diff := cmp.Diff(before, generated); diff != "" {
		t.Errorf("merging changed the generated configs:\n%s", diff)
	}
}
