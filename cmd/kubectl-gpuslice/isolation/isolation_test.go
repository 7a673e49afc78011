package isolation_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/isolation"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
)

const gpu, slice = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"

func cut(device string) catalog.MIGConfig {
	return catalog.MIGConfig{{All: true, MIG: true, Devices: map[string]int{device: 2}}}
}

func sharing(rename bool, resource string) *catalog.Sharing {
	return &catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Rename: rename, Replicas: map[string]int{resource: 3}}
}

func TestTheClassOfAProfile(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		profile  catalog.Profile
		resource string
		want     string
	}{
		"whole GPUs":                     {catalog.Profile{}, gpu, "whole GPUs"},
		"without sharing":                {catalog.Profile{Sharing: &catalog.Sharing{Strategy: catalog.SharingNone}}, gpu, "whole GPUs"},
		"time-slicing":                   {catalog.Profile{Sharing: sharing(false, gpu)}, gpu, "shared"},
		"time-slicing by another name":   {catalog.Profile{Sharing: sharing(true, gpu)}, gpu + ".shared", "shared"},
		"time-slicing of MIG devices":    {catalog.Profile{MIG: cut("1g.10gb"), Sharing: sharing(false, slice)}, slice, "shared"},
		"MIG beside shared GPUs":         {catalog.Profile{MIG: cut("1g.10gb"), Sharing: sharing(false, gpu)}, slice, "MIG 1g.10gb"},
		"MIG, strategy mixed":            {catalog.Profile{MIG: cut("1g.10gb")}, slice, "MIG 1g.10gb"},
		"MIG, strategy single":           {catalog.Profile{MIG: cut("2g.20gb"), MIGStrategy: config.MIGStrategySingle}, gpu, "MIG 2g.20gb"},
		"MIG of all GPUs, no strategy":   {catalog.Profile{MIG: cut("2g.20gb")}, gpu, "MIG 2g.20gb"},
		"MIG of some GPUs, no strategy":  {catalog.Profile{MIG: append(cut("2g.20gb"), catalog.MIGRule{Indices: []int{1}})}, gpu, "whole GPUs"},
		"MIG of one GPU, no strategy":    {catalog.Profile{MIG: catalog.MIGConfig{{Indices: []int{0}, MIG: true, Devices: map[string]int{"2g.20gb": 3}}}}, gpu, "whole GPUs"},
		"MIG, mixed by the profile":      {catalog.Profile{MIG: cut("2g.20gb"), MIGStrategy: config.MIGStrategyMixed}, gpu, ""},
		"MIG of two sizes":               {catalog.Profile{MIG: append(cut("2g.20gb"), cut("3g.40gb")...)}, gpu, ""},
		"MIG devices of another size":    {catalog.Profile{MIG: cut("2g.20gb")}, slice, ""},
		"MIG devices of whole GPUs":      {catalog.Profile{MIG: catalog.MIGConfig{{All: true}}}, slice, ""},
		"MIG devices as they are":        {catalog.Profile{}, slice, "MIG 1g.10gb"},
		"MIG devices with a feature":     {catalog.Profile{MIG: cut("1g.10gb+me")}, slice + ".me", "MIG 1g.10gb.me"},
		"GPUs that have another name":    {catalog.Profile{Sharing: sharing(true, gpu)}, gpu, ""},
		"shared MIG, by strategy single": {catalog.Profile{MIG: cut("2g.20gb"), MIGStrategy: config.MIGStrategySingle, Sharing: sharing(false, gpu)}, gpu, "shared"},
	} {
		if got := isolation.OfProfile(row.profile, row.resource).String(); got != row.want {
			t.Errorf("%s: %s is %q, want %q", name, row.resource, got, row.want)
		}
	}
}

func TestTheClassesOfAProfileOfSeveralModels(t *testing.T) {
	t.Parallel()
	of := func(device string, models ...string) catalog.MIGRule {
		rule := catalog.MIGRule{All: true, Models: models}
		if device != "" {
			rule.MIG, rule.Devices = true, map[string]int{device: 2}
		}
		return rule
	}
	for name, row := range map[string]struct {
		rules catalog.MIGConfig
		want  []isolation.Class
	}{
		"no rules":                     {nil, []isolation.Class{isolation.Of("", 1)}},
		"one model":                    {catalog.MIGConfig{of("1g.10gb", "A100*")}, []isolation.Class{isolation.Of("1g.10gb", 1)}},
		"two models of one class":      {catalog.MIGConfig{of("1g.10gb", "A100*"), of("1g.10gb", "H100*")}, []isolation.Class{isolation.Of("1g.10gb", 1)}},
		"MIG devices of two sizes":     {catalog.MIGConfig{of("1g.5gb", "A100*40GB"), of("1g.10gb", "A100*80GB")}, []isolation.Class{isolation.Of("1g.5gb", 1), isolation.Of("1g.10gb", 1)}},
		"MIG of one, whole the others": {catalog.MIGConfig{of("2g.20gb", "A100*"), of("", "H100*")}, []isolation.Class{isolation.Of("2g.20gb", 1), isolation.Of("", 1)}},
	} {
		if diff := cmp.Diff(row.want, isolation.OfModels(catalog.Profile{MIG: row.rules, MIGStrategy: config.MIGStrategySingle}, gpu)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestTheClassOfANode(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		labels   map[string]string
		resource string
		want     string
	}{
		"no labels":                       {nil, gpu, ""},
		"no labels of this resource":      {map[string]string{gpu + ".replicas": "2"}, slice, ""},
		"whole GPUs":                      {map[string]string{gpu + ".replicas": "1", gpu + ".product": "NVIDIA-L4"}, gpu, "whole GPUs"},
		"whole GPUs, by the strategy":     {map[string]string{gpu + ".sharing-strategy": "none"}, gpu, "whole GPUs"},
		"by replicas":                     {map[string]string{gpu + ".replicas": "3", gpu + ".product": "NVIDIA-L4-SHARED"}, gpu, "shared"},
		"by the model alone":              {map[string]string{gpu + ".product": "NVIDIA-A10G-SHARED"}, gpu, "shared"},
		"MIG, by the model alone":         {map[string]string{gpu + ".product": "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb"}, gpu, "MIG 3g.40gb"},
		"shared MIG, by the model alone":  {map[string]string{gpu + ".product": "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb-SHARED"}, gpu, "shared"},
		"a model alone":                   {map[string]string{gpu + ".product": "NVIDIA-A10G"}, gpu, ""},
		"shared MIG, strategy mixed":      {map[string]string{slice + ".product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb-SHARED"}, slice, "shared"},
		"MIG beside shared GPUs":          {map[string]string{gpu + ".product": "NVIDIA-A100-SXM4-80GB-SHARED", slice + ".product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb"}, slice, "MIG 1g.10gb"},
		"by time-slicing":                 {map[string]string{gpu + ".sharing-strategy": "time-slicing"}, gpu, "shared"},
		"by MPS":                          {map[string]string{gpu + ".sharing-strategy": "mps"}, gpu, "shared"},
		"by name":                         {nil, gpu + ".shared", "shared"},
		"MIG, strategy mixed":             {map[string]string{slice + ".replicas": "1"}, slice, "MIG 1g.10gb"},
		"MIG, strategy single":            {map[string]string{gpu + ".replicas": "1", gpu + ".product": "NVIDIA-A100-SXM4-80GB-MIG-2g.20gb"}, gpu, "MIG 2g.20gb"},
		"shared MIG, strategy single":     {map[string]string{gpu + ".replicas": "2", gpu + ".product": "NVIDIA-A100-SXM4-80GB-MIG-2g.20gb-SHARED"}, gpu, "shared"},
		"a number that no one could read": {map[string]string{gpu + ".replicas": "many"}, gpu, ""},
	} {
		if got := isolation.OfNode(row.labels, row.resource).String(); got != row.want {
			t.Errorf("%s: %s is %q, want %q", name, row.resource, got, row.want)
		}
	}
}

func TestAQueueThatMixesClasses(t *testing.T) {
	t.Parallel()
	quantity := func(text string) *resource.Quantity { q := resource.MustParse(text); return &q }
	classes := func(flavor, _ string) []isolation.Class {
		return map[string][]isolation.Class{
			"shared-a": {isolation.Of("", 3)}, "shared-b": {isolation.Of("", 2)}, "whole": {isolation.Of("", 1)},
			"mig-1g": {isolation.Of("1g.10gb", 1)}, "mig-2g": {isolation.Of("2g.20gb", 1)}, "unknown": {{}},
			"both": {isolation.Of("", 3), isolation.Of("1g.10gb", 1)},
		}[flavor]
	}
	const remedy = ": a pod that is to have one may get the other; make ClusterQueues of one class, and one of each MIG pool"
	for name, row := range map[string]struct {
		cohort  string
		flavors []string          // each with a quota of 4
		quota   map[string]string // of a flavor, otherwise
		borrow  map[string]string // limit of a flavor
		want    []string
	}{
		"pools of one class":         {flavors: []string{"shared-a", "shared-b"}},
		"shared and MIG":             {flavors: []string{"shared-a", "mig-2g", "shared-b"}, want: []string{gpu + " is MIG 2g.20gb by mig-2g; shared by shared-a; shared-b" + remedy}},
		"whole GPUs and shared ones": {flavors: []string{"whole", "shared-a"}, want: []string{gpu + " is shared by shared-a; whole GPUs by whole" + remedy}},
		"MIG devices of two sizes":   {flavors: []string{"mig-2g", "mig-1g"}, want: []string{gpu + " is MIG 1g.10gb by mig-1g; MIG 2g.20gb by mig-2g" + remedy}},
		"a flavor with nodes of two": {flavors: []string{"both"}, want: []string{gpu + " is MIG 1g.10gb by both; shared by both: a pod that is to have one may get the other; the labels of both select nodes of several classes: " +
			"add a label that the nodes of one class alone have, and take labels of other pools off the nodes"}},
		"what is not known":            {flavors: []string{"unknown", "shared-a", "gone"}},
		"nothing of the other":         {flavors: []string{"shared-a", "whole"}, quota: map[string]string{"whole": "0"}},
		"borrowed from the cohort":     {cohort: "all", flavors: []string{"shared-a", "whole"}, quota: map[string]string{"whole": "0"}, want: []string{gpu + " is shared by shared-a; whole GPUs by whole" + remedy}},
		"none borrowed from a cohort":  {cohort: "all", flavors: []string{"shared-a", "whole"}, quota: map[string]string{"whole": "0"}, borrow: map[string]string{"whole": "0"}},
		"some borrowed from a cohort ": {cohort: "all", flavors: []string{"shared-a", "whole"}, quota: map[string]string{"whole": "0"}, borrow: map[string]string{"whole": "1"}, want: []string{gpu + " is shared by shared-a; whole GPUs by whole" + remedy}},
	} {
		group := kinds.ResourceGroup{CoveredResources: []string{"cpu", gpu}}
		for _, flavor := range row.flavors {
			share := kinds.ResourceShare{Name: gpu, NominalQuota: *quantity("4")}
			if text, otherwise := row.quota[flavor]; otherwise {
				share.NominalQuota = *quantity(text)
			}
			if text, limited := row.borrow[flavor]; limited {
				share.BorrowingLimit = quantity(text)
			}
			group.Flavors = append(group.Flavors, kinds.FlavorQuotas{Name: flavor, Resources: []kinds.ResourceShare{{Name: "cpu", NominalQuota: *quantity("4")}, share}})
		}
		q := kinds.ClusterQueue{Spec: kinds.ClusterQueueSpec{CohortName: row.cohort, ResourceGroups: []kinds.ResourceGroup{group}}}
		if diff := cmp.Diff(row.want, isolation.Mixed(q, classes)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
