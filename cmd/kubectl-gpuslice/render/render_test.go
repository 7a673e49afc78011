package render

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

// cutBy is a rule for all GPUs of a model, or of any.
func cutBy(model string, devices map[string]int) catalog.MIGConfig {
	rule := catalog.MIGRule{All: true, MIG: true, Devices: devices}
	if model != "" {
		rule.Models = []string{model}
	}
	return catalog.MIGConfig{rule}
}

func sharedBy(strategy catalog.SharingStrategy, rename bool, replicas map[string]int) *catalog.Sharing {
	return &catalog.Sharing{Strategy: strategy, Rename: rename, Replicas: replicas}
}

// sources have a profile and a config of each kind.
func sources() Sources {
	labels := map[string]string{}
	for i := range mostLabels {
		labels[fmt.Sprintf("team-%d", i)] = "a"
	}
	return Sources{
		MIG: map[string]catalog.MIGConfig{
			"cut_in.Seven":  cutBy("", map[string]int{"1g.10gb": 7}),
			"media":         cutBy("", map[string]int{"1g.10gb+me": 1, "2g.20gb": 1}),
			"parts":         cutBy("", map[string]int{"1c.3g.40gb": 1}),
			"empty":         cutBy("", nil),
			"half":          {{Indices: []int{0}, MIG: true, Devices: map[string]int{"3g.40gb": 2}}},
			"-":             cutBy("", nil),
			"too-many":      cutBy("", map[string]int{"1g.10gb": 600, "1g.20gb": 401}),
			"cut-in-seven":  cutBy("", nil),
			"two.of-a-kind": cutBy("", nil),
		},
		Profiles: map[string]catalog.Profile{
			"whole":      {Description: "GPUs as they come", Labels: map[string]string{"workload": "training"}},
			"shared":     {Sharing: sharedBy(catalog.SharingTimeSlicing, true, map[string]int{"nvidia.com/gpu": 4}), Taints: []corev1.Taint{{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}}},
			"slices":     {MIG: cutBy("NVIDIA A100*", map[string]int{"1g.10gb": 7}), MIGStrategy: config.MIGStrategySingle},
			"many-marks": {Labels: labels},
			"mixed":      {MIG: cutBy("", map[string]int{"1g.10gb": 2, "3g.40gb": 1})},
		},
	}
}

func TestWhatPoolsGive(t *testing.T) {
	t.Parallel()
	const a100, a100PCIe = "NVIDIA A100-SXM4-80GB", "NVIDIA-A100-PCIE-80GB"
	all := sources()
	for name, row := range map[string]struct {
		change func(*Sources)
		pools  []Pool
		want   []Given
	}{
		"a config that its name spells out": {
			pools: []Pool{{Name: "gpu0_3g.40gb_4x1g.10gb-gpu1_off", Nodes: 3, GPUs: 2}},
			want: []Given{{
				Name: "gpu0-3g.40gb-4x1g.10gb-gpu1-off", Profile: "gpu0_3g.40gb_4x1g.10gb-gpu1_off",
				Labels: map[string]string{config.LabelMIGConfig: "gpu0_3g.40gb_4x1g.10gb-gpu1_off"},
				Offers: []Offer{
					{Resource: "nvidia.com/gpu", Total: 3, OfNode: 1, Replicas: 1},
					{Resource: "nvidia.com/mig-1g.10gb", Device: "1g.10gb", Total: 12, OfNode: 4, Replicas: 1},
					{Resource: "nvidia.com/mig-3g.40gb", Device: "3g.40gb", Total: 3, OfNode: 1, Replicas: 1},
				},
			}},
		},
		"whole GPUs, selected by the labels that the profile publishes": {
			pools: []Pool{{Name: "whole", Nodes: 3, GPUs: 8}},
			want: []Given{{
				Name: "whole", Profile: "whole", Description: "GPUs as they come", Labels: map[string]string{config.LabelProfile: "whole", "workload": "training"},
				Offers: []Offer{{Resource: "nvidia.com/gpu", Total: 24, OfNode: 8, Replicas: 1}},
			}},
		},
		"shared GPUs, by the plugin's name for them": {
			pools: []Pool{{Name: "shared", Nodes: 2, GPUs: 2}},
			want: []Given{{
				Name: "shared", Profile: "shared", Labels: map[string]string{config.LabelProfile: "shared"}, Taints: all.Profiles["shared"].Taints,
				Offers: []Offer{{Resource: "nvidia.com/gpu.shared", Total: 16, OfNode: 8, Replicas: 4}},
			}},
		},
		"MIG devices that are GPUs by name under the strategy single, of two pools together": {
			pools: []Pool{{Name: "slices", Nodes: 2, GPUs: 8, Model: a100PCIe}, {Name: "slices", Nodes: 1, GPUs: 2, Model: a100}},
			want: []Given{{
				Name: "slices", Profile: "slices", Labels: map[string]string{config.LabelProfile: "slices"},
				Offers: []Offer{{Resource: "nvidia.com/gpu", Total: 2*56 + 14, OfNode: 56, Device: "1g.10gb", Replicas: 1}},
			}},
		},
		"a config, by a name that Kubernetes takes": {
			pools: []Pool{{Name: "cut_in.Seven", Nodes: 1, GPUs: 1}},
			want: []Given{{
				Name: "cut-in.seven", Profile: "cut_in.Seven", Labels: map[string]string{config.LabelMIGConfig: "cut_in.Seven"},
				Offers: []Offer{{Resource: "nvidia.com/mig-1g.10gb", Total: 7, OfNode: 7, Device: "1g.10gb", Replicas: 1}},
			}},
		},
		"a config of some GPUs, beside the whole ones": {
			pools: []Pool{{Name: "half", Nodes: 1, GPUs: 2}},
			want: []Given{{Name: "half", Profile: "half", Labels: map[string]string{config.LabelMIGConfig: "half"}, Offers: []Offer{
				{Resource: "nvidia.com/gpu", Total: 1, OfNode: 1, Replicas: 1}, {Resource: "nvidia.com/mig-3g.40gb", Total: 2, OfNode: 2, Device: "3g.40gb", Replicas: 1},
			}}},
		},
		"GPUs of the DRA driver, each device by its own name": {
			change: func(from *Sources) { from.DRA = true },
			pools:  []Pool{{Name: "slices", Nodes: 1, GPUs: 1, Model: a100}},
			want: []Given{{
				Name: "slices", Profile: "slices", Labels: map[string]string{config.LabelProfile: "slices"},
				Offers: []Offer{{Resource: "nvidia.com/mig-1g.10gb", Total: 7, OfNode: 7, Device: "1g.10gb", Replicas: 1}},
			}},
		},
		"a strategy for profiles that name none": {
			change: func(from *Sources) { from.Strategy = config.MIGStrategySingle },
			pools:  []Pool{{Name: "cut_in.Seven", Nodes: 1, GPUs: 1}},
			want: []Given{{
				Name: "cut-in.seven", Profile: "cut_in.Seven", Labels: map[string]string{config.LabelMIGConfig: "cut_in.Seven"},
				Offers: []Offer{{Resource: "nvidia.com/gpu", Total: 7, OfNode: 7, Device: "1g.10gb", Replicas: 1}},
			}},
		},
		"MIG mode without instances": {
			pools: []Pool{{Name: "empty", Nodes: 1, GPUs: 1}},
			want:  []Given{{Name: "empty", Profile: "empty", Labels: map[string]string{config.LabelMIGConfig: "empty"}}},
		},
		"as many labels as a flavor takes": {
			pools: []Pool{{Name: "many-marks", Nodes: 1, GPUs: 1}},
			want: []Given{{
				Name: "many-marks", Profile: "many-marks", Labels: map[string]string{
					config.LabelProfile: "many-marks", "team-0": "a", "team-1": "a", "team-2": "a", "team-3": "a", "team-4": "a", "team-5": "a",
				},
				Offers: []Offer{{Resource: "nvidia.com/gpu", Total: 1, OfNode: 1, Replicas: 1}},
			}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			from := sources()
			if row.change != nil {
				row.change(&from)
			}
			got, left := Resolve(from, row.pools)
			for i := range row.want {
				row.want[i].Pools = row.pools
				row.want[i].Labels["nvidia.com/mig.config.state"] = "success"
				row.want[i].Taints = append(slices.Clone(row.want[i].Taints), corev1.Taint{Key: "nvidia.com/gpu", Effect: corev1.TaintEffectNoSchedule})
			}
			if diff := cmp.Diff(row.want, got); diff != "" || left != nil {
				t.Errorf("left %v (-want +got):\n%s", left, diff)
			}
		})
	}
}

// The order of the pools decides nothing: one flavor would select the nodes of both classes.
func TestPoolsOfOneProfileAndTwoClassesAreLeft(t *testing.T) {
	t.Parallel()
	const a100, h100 = "NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3"
	profile := func(of map[string]int) catalog.Profile {
		rules := append(cutBy("NVIDIA A100*", map[string]int{"3g.40gb": 2}), catalog.MIGRule{All: true, Models: []string{"NVIDIA H100*"}, MIG: of != nil, Devices: of})
		return catalog.Profile{MIG: rules, MIGStrategy: config.MIGStrategySingle}
	}
	from := Sources{Profiles: map[string]catalog.Profile{"whole": profile(nil), "sizes": profile(map[string]int{"1g.10gb": 7}), "same": profile(map[string]int{"3g.40gb": 2})}}
	for name, row := range map[string]struct {
		want string // of either order; empty for none
	}{
		"whole": {want: "profile whole gives nvidia.com/gpu as "},
		"sizes": {want: "profile sizes gives nvidia.com/gpu as "},
		"same":  {},
	} {
		pools := []Pool{{Name: name, Nodes: 1, GPUs: 8, Model: a100}, {Name: name, Nodes: 1, GPUs: 8, Model: h100}}
		for range 2 {
			slices.Reverse(pools)
			got, left := Resolve(from, pools)
			if row.want == "" {
				if len(got) != 1 || len(left) > 0 {
					t.Errorf("%s: given %v, left %v", name, got, left)
				}
				continue
			}
			if len(got) > 0 || len(left) != 2 || !strings.HasPrefix(left[0].Err.Error(), row.want) || !strings.Contains(left[0].Err.Error(), " on "+pools[0].Model+" and as ") ||
				!strings.Contains(left[0].Err.Error(), " on "+pools[1].Model+": ") {
				t.Errorf("%s: given %v, left %v, want %s", name, got, left, row.want)
			}
		}
	}
	byType := []Pool{{Name: "sizes", Nodes: 1, GPUs: 8, Model: a100, Type: "a2"}, {Name: "sizes", Nodes: 1, GPUs: 8, Model: h100, Type: "a3"}}
	got, left := Resolve(from, byType)
	if _, err := Kueue(got, Queues{ClusterQueue: "gpus"}); err == nil || len(left) > 0 ||
		!strings.Contains(err.Error(), "as MIG 3g.40gb on NVIDIA-A100-SXM4-80GB of a2 and as MIG 1g.10gb on NVIDIA-H100-80GB-HBM3 of a3") {
		t.Errorf("by type: error %v, left %v", err, left)
	}
}

// A pool that cannot be computed is left, and the others are not.
func TestPoolsThatCannotBeComputedAreLeftWithTheReason(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		pool   Pool
		change func(*Sources)
		want   string
	}{
		"a config that agents generate":       {Pool{Name: "all-1g.10gb"}, nil, "all-1g.10gb is not in the files: "},
		"a name of nothing":                   {Pool{Name: "whol"}, nil, `no profile or MIG config is named "whol": did you mean whole?`},
		"a spelled name with a mistake":       {Pool{Name: "gpu0_seven"}, nil, `config "gpu0_seven", gpu0: "seven" is not a MIG device`},
		"a spelled name of another node":      {Pool{Name: "gpu4_off"}, nil, "pool gpu4_off: "},
		"a name that no object has":           {Pool{Name: "-"}, nil, "- cannot be the name of an object: "},
		"a name that another one has":         {Pool{Name: "Whole"}, func(from *Sources) { from.MIG["Whole"] = from.MIG["empty"] }, "whole and Whole would both be named whole"},
		"a model that is not named":           {Pool{Name: "slices", GPUs: 8}, nil, "pool slices: the profile is about model NVIDIA-A100*: name the model of its GPUs, like slices=1x8:"},
		"another model":                       {Pool{Name: "slices", GPUs: 8, Model: "NVIDIA-L4"}, nil, "pool slices: profile \"slices\""},
		"too many slices":                     {Pool{Name: "too-many"}, nil, "pool too-many: more than 1000 slices of a GPU "},
		"an instance type of some nodes":      {Pool{Name: "whole", Type: "a"}, nil, "pool whole: name the instance type of all its nodes or of none: "},
		"sharing under the DRA driver":        {Pool{Name: "shared"}, func(from *Sources) { from.DRA = true }, "pool shared: it shares devices by time-slicing, and NVIDIA's DRA driver"},
		"parts of instances under the driver": {Pool{Name: "parts"}, func(from *Sources) { from.DRA = true }, "pool parts: it asks for 1c.3g.40gb, a part of a GPU instance"},
		"parts of instances":                  {Pool{Name: "parts"}, nil, "pool parts: "},
		"devices that differ, under single":   {Pool{Name: "mixed"}, func(from *Sources) { from.Strategy = config.MIGStrategySingle }, "pool mixed: the device plugin's MIG strategy is single"},
		"sharing of what is not there": {Pool{Name: "mixed"}, func(from *Sources) {
			p := from.Profiles["mixed"]
			p.Sharing = sharedBy(catalog.SharingTimeSlicing, false, map[string]int{"nvidia.com/mig-7g.80gb": 2})
			from.Profiles["mixed"] = p
		}, "pool mixed: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			from, right := sources(), Pool{Name: "whole", Nodes: 1, GPUs: 1}
			if row.change != nil {
				row.change(&from)
			}
			row.pool.Nodes, row.pool.GPUs = 1, max(row.pool.GPUs, 1)
			got, left := Resolve(from, []Pool{right, row.pool})
			if len(got) != 1 || got[0].Name != "whole" || len(left) != 1 || left[0].Pool != row.pool || !strings.Contains(left[0].Err.Error(), row.want) {
				t.Errorf("resolved %v, left %v, want %q", got, left, row.want)
			}
		})
	}
}

func TestPoolsAreReadAsPeopleWriteThem(t *testing.T) {
	t.Parallel()
	for text, row := range map[string]struct {
		want Pool
		err  string
	}{
		"small=4x8:NVIDIA A100-SXM4-80GB": {want: Pool{"small", 4, 8, "NVIDIA A100-SXM4-80GB", ""}},
		"l4=1x1:NVIDIA-L4@g6.4xlarge":     {want: Pool{"l4", 1, 1, "NVIDIA-L4", "g6.4xlarge"}},
		"l4=1x1@g6.4xlarge":               {want: Pool{"l4", 1, 1, "", "g6.4xlarge"}},
		"l4=1x1:NVIDIA-L4@g6_":            {err: `pool l4: "g6_" is no instance type: `},
		"small=100000x64":                 {want: Pool{"small", 100_000, 64, "", ""}},
		"small=100001x64":                 {err: "pool small: 100001 nodes: there can be 1 to 100000"},
		"small=0x8":                       {err: "pool small: 0 nodes: there can be 1 to 100000"},
		"small=1x65":                      {err: "pool small: 65 GPUs of a node: there can be 1 to 64"},
		"small=1x0":                       {err: "pool small: 0 GPUs of a node: there can be 1 to 64"},
		"small=8":                         {err: `pool "small=8": write PROFILE=NODESxGPUS:MODEL, like `},
		"=1x8":                            {err: `pool "=1x8": write `},
		"small=1x8:":                      {err: `pool "small=1x8:": write `},
		"small=-1x8":                      {err: `pool "small=-1x8": write `},
		strings.Repeat("a", 200) + "=1":   {err: `pool "` + strings.Repeat("a", longestName-1) + `…": write `},
	} {
		got, err := ParsePool(text)
		if row.err == "" && (err != nil || got != row.want) || row.err != "" && (err == nil || !strings.HasPrefix(err.Error(), row.err)) {
			t.Errorf("%q is %v, error %v, want %v and %q", text, got, err, row.want, row.err)
		}
	}
}

func TestPrioritiesAreReadAsPeopleWriteThem(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]Priority{"a=1000": {"a", 1000}, "a=-5": {"a", -5}, "a=1000000000": {"a", 1_000_000_000}} {
		if got, err := ParsePriority(text); err != nil || got != want {
			t.Errorf("%q is %v, error %v", text, got, err)
		}
	}
	for _, text := range []string{"a", "=1", "a=", "a=1.5", "a=1000000001", "a=99999999999"} {
		if got, err := ParsePriority(text); err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("priority %q: write PROFILE=VALUE ", text)) {
			t.Errorf("%q is %v, error %v", text, got, err)
		}
	}
}

// some is what four pools give: whole GPUs of two profiles, shared ones, slices, and nothing.
func some() []Given {
	return []Given{
		{
			Name: "training", Profile: "Training", Description: "whole GPUs", Pools: []Pool{{Name: "Training", Nodes: 2, GPUs: 8, Model: "NVIDIA H100"}, {Name: "Training", Nodes: 1, GPUs: 1, Model: "NVIDIA-H100"}},
			Labels: map[string]string{"gpuslice.io/profile": "Training"}, Offers: []Offer{{Resource: "nvidia.com/gpu", Total: 17, OfNode: 8, Replicas: 1}},
		},
		{
			Name: "slices", Profile: "slices", Pools: []Pool{{Name: "slices", Nodes: 4, GPUs: 1, Model: "NVIDIA-A100"}}, Labels: map[string]string{"nvidia.com/mig.config": "slices"},
			Taints: []corev1.Taint{{Key: "gpu", Value: "mig", Effect: corev1.TaintEffectNoSchedule}, {Key: "slow", Effect: corev1.TaintEffectNoExecute}},
			Offers: []Offer{{Resource: "nvidia.com/mig-1g.10gb.me", Total: 4, OfNode: 1, Device: "1g.10gb.me", Replicas: 1}, {Resource: "nvidia.com/mig-2g.20gb", Total: 8, OfNode: 2, Device: "2g.20gb", Replicas: 1}},
		},
		{Name: "nothing", Profile: "nothing", Pools: []Pool{{Name: "nothing", Nodes: 1, GPUs: 2, Model: "NVIDIA-A100"}}},
		{
			Name: "serving", Profile: "serving", Pools: []Pool{{Name: "serving", Nodes: 1, GPUs: 4, Model: "NVIDIA-L4"}}, Labels: map[string]string{"gpuslice.io/profile": "serving"},
			Offers: []Offer{{Resource: "nvidia.com/gpu", Total: 16, OfNode: 16, Replicas: 4}},
		},
	}
}

// The goldens of testdata/kinds are what is written of some.
func TestEachKindOfObjectIsWritten(t *testing.T) {
	t.Parallel()
	for name, objects := range map[string]func() ([]any, error){
		"flavors": func() ([]any, error) { return Flavors(some(), "racks") },
		"kueue": func() ([]any, error) {
			return Kueue(some(), Queues{ClusterQueue: "gpus", Cohort: "all", Local: []LocalQueue{{"team-a", "gpus", "Training"}, {"team-b", "slices", "slices"}}, Priorities: []Priority{{"slices", -1}, {"Training", 1000}}})
		},
		"hardwareprofiles": func() ([]any, error) { return HardwareProfiles(some(), Profiles{Namespace: "redhat-ods-applications"}) },
		"hardwareprofiles-queue": func() ([]any, error) {
			return HardwareProfiles(some()[1:3], Profiles{Namespace: "team", LocalQueue: "gpus"})
		},
		"hardwareprofiles-memory": func() ([]any, error) {
			return HardwareProfiles(some()[3:], Profiles{Namespace: "team", CPU: &Amount{"500m", "4"}, Memory: &Amount{"8Gi", "16Gi"}})
		},
		"quota": func() ([]any, error) {
			return Quota(some(), "team", "gpus", []Priority{{"slices", -1}, {"Training", 1000}})
		},
		"dra":            func() ([]any, error) { return Claims(some(), "team"), nil },
		"kueue-config":   func() ([]any, error) { return KueueConfig(some(), nil, false) },
		"kueue-counters": func() ([]any, error) { return KueueConfig(some()[:2], []string{"memory", "multiprocessors"}, false) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			made, err := objects()
			if err != nil {
				t.Fatal(err)
			}
			got, err := Text(some(), made)
			if err != nil {
				t.Fatal(err)
			}
			agenttest.Golden(t, filepath.Join("testdata", "kinds", name+".yaml"), string(got), *update)
		})
	}
}

// What one class lacks, Kueue may never take from another: not by the next flavor, and not from the cohort.
func TestNoQueueHasPoolsOfTwoClasses(t *testing.T) {
	t.Parallel()
	pool := func(name string, offers ...Offer) Given {
		for i := range offers {
			offers[i].Total, offers[i].Replicas = 4, max(offers[i].Replicas, 1)
		}
		return Given{Name: name, Profile: name, Offers: offers}
	}
	const gpu, slice = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
	all := []Given{
		pool("research", Offer{Resource: gpu, Replicas: 3}), pool("critical", Offer{Resource: gpu, Device: "2g.20gb"}),
		pool("training", Offer{Resource: gpu, Replicas: 2}), pool("small", Offer{Resource: gpu, Device: "1g.10gb"}), pool("whole", Offer{Resource: gpu}),
		pool("half", Offer{Resource: gpu}, Offer{Resource: slice, Device: "1g.10gb"}), pool("packed", Offer{Resource: slice, Device: "1g.10gb", Replicas: 2}),
		pool("empty"),
	}
	made, err := Kueue(all, Queues{ClusterQueue: "gpus", Cohort: "all"})
	if err != nil {
		t.Fatal(err)
	}
	got, flavors := map[string][]string{}, map[string]bool{}
	for _, object := range made {
		if f, is := object.(*kinds.ResourceFlavor); is {
			flavors[f.Name] = true
		}
		q, is := object.(*kinds.ClusterQueue)
		if !is {
			continue
		}
		at := q.Name + " in " + q.Spec.CohortName
		for _, group := range q.Spec.ResourceGroups {
			for _, f := range group.Flavors {
				got[at] = append(got[at], f.Name+" "+f.Resources[0].NominalQuota.String())
				if !flavors[f.Name] {
					t.Errorf("%s names the flavor %s, which is not there", at, f.Name)
				}
			}
		}
	}
	if diff := cmp.Diff(map[string][]string{
		"gpus-research in all-shared":  {"research 4", "training 0"},
		"gpus-training in all-shared":  {"training 4", "research 0"},
		"gpus-packed in all-shared":    {"packed 4"},
		"gpus-critical in all-mig":     {"critical 4"},
		"gpus-small in all-mig":        {"small 4"},
		"gpus-half-mig in all-mig":     {"half-mig 4"},
		"gpus-whole in all-whole":      {"whole 4", "half-whole 0"},
		"gpus-half-whole in all-whole": {"half-whole 4", "whole 0"},
	}, got); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	if _, err := Kueue(append(all, pool("half-mig")), Queues{ClusterQueue: "gpus"}); err == nil || err.Error() != "the flavors of half and half-mig would both be named half-mig: rename one of the two" {
		t.Errorf("two flavors of a name: error %v", err)
	}
}

// numbered are so many profiles; of makes one of them different from the others.
func numbered(n int, of func(i int, g *Given)) []Given {
	out := make([]Given, n)
	for i := range out {
		out[i] = Given{Name: fmt.Sprintf("p%d", i), Profile: fmt.Sprintf("p%d", i), Offers: []Offer{{Resource: "nvidia.com/gpu", Total: 1, OfNode: 1, Replicas: 1}}}
		of(i, &out[i])
	}
	return out
}

// Each bound is that of the API server or of Kueue: with one less, the objects are made.
func TestWhatNoObjectHoldsIsRefused(t *testing.T) {
	t.Parallel()
	labels := func(n int) []Given {
		return numbered(1, func(_ int, g *Given) {
			g.Labels = map[string]string{}
			for i := range n {
				g.Labels[fmt.Sprint(i)] = "a"
			}
		})
	}
	tainted := func(n int) []Given {
		return numbered(1, func(_ int, g *Given) {
			for i := range n {
				g.Taints = append(g.Taints, corev1.Taint{Key: fmt.Sprint(i), Effect: corev1.TaintEffectNoSchedule})
			}
		})
	}
	device := func(i int, g *Given) {
		g.Offers[0].Resource, g.Offers[0].Device = fmt.Sprintf("nvidia.com/mig-%dg.10gb", i), fmt.Sprintf("%dg.10gb", i)
		g.Pools = []Pool{{Name: g.Name, Nodes: 2, GPUs: 8, Model: "NVIDIA-H100"}}
	}
	modelled := func(n int) []Given {
		return numbered(n, func(i int, g *Given) {
			g.Pools = []Pool{{Name: g.Name, Nodes: 2, GPUs: 8, Model: fmt.Sprintf("NVIDIA-A-LONG-NAME-OF-MODEL-NUMBER-%d", i)}}
		})
	}
	halved := func(beside string) []Given {
		return []Given{
			{Name: "x-t1", Profile: "x", Offers: []Offer{{Resource: "nvidia.com/gpu", Replicas: 1}, {Resource: "nvidia.com/mig-1g.10gb", Device: "1g.10gb", Replicas: 1}}},
			{Name: beside + "-t2", Profile: beside, Offers: []Offer{{Resource: "nvidia.com/gpu", Replicas: 1}}},
		}
	}
	queue := func(given []Given) ([]any, error) { return Kueue(given, Queues{ClusterQueue: "gpus"}) }
	counted := func(given []Given) ([]any, error) { return KueueConfig(given, []string{"memory"}, false) }
	prioritized := func(priorities ...Priority) func([]Given) ([]any, error) {
		return func(given []Given) ([]any, error) { return Quota(given, "team", "gpus", priorities) }
	}
	for name, row := range map[string]struct {
		make        func([]Given) ([]any, error)
		right, over []Given
		want        string
	}{
		"labels of a flavor": {
			func(given []Given) ([]any, error) { return Flavors(given, "") }, labels(8), labels(9), "profile p0 has 9 labels, and a ResourceFlavor takes 8",
		},
		"labels of a queue's flavor": {queue, labels(8), labels(9), "profile p0 has 9 labels"},
		"tolerations of a flavor": {
			func(given []Given) ([]any, error) { return Flavors(given, "") }, tainted(8), tainted(9),
			"profile p0 and its nodes have 9 taints, and a ResourceFlavor takes 8 tolerations",
		},
		"flavors of a group": {
			queue, numbered(64, func(int, *Given) {}), numbered(65, func(int, *Given) {}),
			"65 pools of the class whole give nvidia.com/gpu, and a ClusterQueue takes 64 flavors: render fewer pools",
		},
		"two ClusterQueues of a name": {
			queue, halved("y"), halved("x-mig"), "the ClusterQueues of x and x-mig would both be of the pool x-mig: rename one of the two",
		},
		"mappings of Kueue's config": {
			func(given []Given) ([]any, error) { return KueueConfig(given, nil, false) }, numbered(16, device), numbered(17, device),
			"the pools give 17 kinds of devices, and Kueue's config takes 16 mappings: render fewer pools",
		},
		"classes of a mapping": {
			counted, numbered(6, device), numbered(7, device), "the pools give 9 kinds of devices, and a mapping of Kueue's config takes 8: render fewer pools",
		},
		"counters of a model that is not named": {
			counted, numbered(1, device), numbered(1, func(_ int, g *Given) { g.Pools = []Pool{{Name: "p0", Nodes: 2, GPUs: 8}} }),
			"pool p0: counters are those of a model: name it, like p0=2x8:NVIDIA-H100-80GB-HBM3",
		},
		"models of a selector, on OpenShift": {
			func(given []Given) ([]any, error) { return KueueConfig(given, []string{"memory"}, true) }, modelled(23), modelled(24),
			"the GPUs are of too many models: their selector has 1043 characters, and the operator's Kueue takes 1024: render fewer pools",
		},
		"two HardwareProfiles of a name": {
			func(given []Given) ([]any, error) { return HardwareProfiles(given, Profiles{Namespace: "team"}) }, numbered(2, device),
			append(numbered(1, func(_ int, g *Given) {
				g.Name, g.Profile = "a", "A"
				g.Offers = []Offer{{Resource: "nvidia.com/gpu"}, {Resource: "nvidia.com/mig-1g.10gb"}}
			}), numbered(1, func(_ int, g *Given) { g.Name, g.Profile = "a-1g.10gb", "a-1g.10gb" })...),
			"the HardwareProfiles of A and a-1g.10gb would both be named a-1g.10gb: rename one of the two",
		},
		"the priority of no pool": {
			prioritized(Priority{"p1", 1}), numbered(2, device), numbered(1, device), "priority p1: none of the pools is of this name",
		},
		"two priorities of a pool, in a queue": {
			func(given []Given) ([]any, error) {
				return Kueue(given, Queues{ClusterQueue: "gpus", Priorities: []Priority{{"p0", 1}, {"p0", 2}}})
			}, nil, numbered(1, device), "priority p0: there are two",
		},
		"two priorities of a pool":       {prioritized(Priority{"p0", 1}, Priority{"p0", 2}), nil, numbered(1, device), "priority p0: there are two"},
		"a priority that is Kubernetes'": {prioritized(Priority{"system-a", 1}), nil, numbered(1, func(_ int, g *Given) { g.Name, g.Profile = "system-a", "system-a" }), "priority system-a: a name that begins with system-"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if row.right != nil {
				if _, err := row.make(row.right); err != nil {
					t.Errorf("what fits is refused: %v", err)
				}
			}
			if got, err := row.make(row.over); err == nil || !strings.HasPrefix(err.Error(), row.want) {
				t.Errorf("made %v, error %v, want %q", got, err, row.want)
			}
		})
	}
}

func TestPodsTolerateTheTaintsThatAllNodesHave(t *testing.T) {
	t.Parallel()
	taint := func(key, value string) corev1.Taint {
		return corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffectNoSchedule}
	}
	for name, row := range map[string]struct {
		nodes        [][]corev1.Taint
		want, closed []string // keys
	}{
		"one that all have":               {[][]corev1.Taint{{taint("team", "a")}, {taint("team", "b")}}, []string{"profile", "team"}, nil},
		"one that some have":              {[][]corev1.Taint{{taint("team", "a")}, {}}, []string{"profile"}, nil},
		"the profile's own":               {[][]corev1.Taint{{taint("profile", "")}}, []string{"profile"}, nil},
		"a startup taint":                 {[][]corev1.Taint{{taint("starting", "")}}, []string{"profile"}, nil},
		"each closed by one of its own":   {[][]corev1.Taint{{taint("a", "")}, {taint("b", "")}}, []string{"profile"}, []string{"a", "b"}},
		"all closed, beside a shared one": {[][]corev1.Taint{{taint("a", ""), taint("x", "")}, {taint("b", ""), taint("x", "")}}, []string{"profile", "x"}, []string{"a", "b"}},
	} {
		g := Given{Taints: []corev1.Taint{taint("profile", "")}}
		keys := func(all []corev1.Taint) (out []string) {
			for _, t := range all {
				out = append(out, t.Key)
			}
			slices.Sort(out)
			return out
		}
		settings := config.Default()
		settings.StartupTaint = "starting"
		closed := keys(g.Tolerate(row.nodes, settings.StartupTaints()))
		if got := keys(g.Taints); !slices.Equal(got, row.want) || !slices.Equal(closed, row.closed) {
			t.Errorf("%s: pods tolerate %v, want %v; closed by %v, want %v", name, got, row.want, closed, row.closed)
		}
	}
}

func TestAnObjectThatJSONDoesNotHoldIsAnError(t *testing.T) {
	t.Parallel()
	if got, err := Text(nil, []any{func() {}}); err == nil || !strings.HasPrefix(err.Error(), "writing YAML: ") {
		t.Errorf("written is %q, error %v", got, err)
	}
}
