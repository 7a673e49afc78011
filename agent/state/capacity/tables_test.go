package capacity_test

import (
	"strings"
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

var (
	twoShared = catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{"nvidia.com/gpu": 2}}
	renamed   = catalog.Sharing{Strategy: catalog.SharingTimeSlicing, Replicas: map[string]int{"nvidia.com/gpu": 2}, Rename: true}
)

func TestMismatches(t *testing.T) {
	for _, row := range []struct{ want, kubelet, node, mismatches string }{
		{"gpu: a b", "gpu: a b; hostdev: x", "gpu=2 hostdev=1", ""},
		{"gpu: a b; mig-1g.10gb: m", "gpu: a; mig-1g.10gb: m", "gpu=1 mig-1g.10gb=1", "nvidia.com/gpu: 2 desired, kubelet has 1"},
		{"gpu: a", "gpu: b", "gpu=1", "nvidia.com/gpu: kubelet has 1, but other devices than desired"},
		{"gpu: a", "gpu: a", "gpu=2", "nvidia.com/gpu: kubelet has 1, the node object 2"},
		{"", "gpu: a", "", "nvidia.com/gpu: 0 desired, kubelet has 1"},
		{"", "hostdev: x", "a=1 gpu=1", "nvidia.com/gpu: kubelet has 0, the node object 1"},
	} {
		if got := strings.Join(capacity.Mismatches(resources(row.want), resources(row.kubelet), allocatable(row.node)), "; "); got != row.mismatches {
			t.Errorf("%s, where kubelet has %s and the node %s: %q, want %q", row.want, row.kubelet, row.node, got, row.mismatches)
		}
	}
}

func TestDisagreementsOfWhatTheGPUsDoNotHave(t *testing.T) {
	for _, row := range []struct{ gpus, kubelet, node, want string }{
		{"", "mig-1g.10gb: m; gpu:", "mig-1g.10gb=1", "nvidia.com/mig-1g.10gb: the GPUs have none, kubelet 1"},
		{"gpu: a", "gpu: a; gpu.shared: a::0", "gpu=1 gpu.shared=1", "nvidia.com/gpu.shared: the GPUs have none, kubelet 1"},
		{"gpu: a", "", "gpu=1", "nvidia.com/gpu: the GPUs have 1, kubelet 0"},
		{"mig-1g.10gb.me: m", "mig-1g.10gb.me: m; mig-1g.10gb.me.shared: m::0", "mig-1g.10gb.me=1", "nvidia.com/mig-1g.10gb.me.shared: the GPUs have none, kubelet 1"},
		{"mig-1g.10gb.me: m", "mig-1g.10gb.me.shared: m::0 m::1", "mig-1g.10gb.me.shared=2", ""},
	} {
		if got := strings.Join(capacity.Disagreements(resources(row.gpus), resources(row.kubelet), allocatable(row.node)), "; "); got != row.want {
			t.Errorf("GPUs have %s, kubelet %s, the node %s: %q, want %q", row.gpus, row.kubelet, row.node, got, row.want)
		}
	}
	stale := capacity.StaleResources(resources("mig-1g.10gb: m"), allocatable("mig-3g.40gb=0 mig-1g.10gb=0 gpu=1 hostdev=0"))
	if got := strings.Join(stale, " "); got != "nvidia.com/mig-3g.40gb" {
		t.Errorf("stale are %v, want the one that is at 0 and has no devices", got)
	}
}

func TestSharedResourcesAndTheirSummary(t *testing.T) {
	none := catalog.Sharing{Strategy: catalog.SharingNone}
	for _, row := range []struct {
		sharing *catalog.Sharing
		offered string
		summary string
	}{
		{nil, "", "nvidia.com/gpu 1, nvidia.com/mig-1g.10gb 2"},
		{&none, "gpu: a; mig-1g.10gb: m n", "nvidia.com/gpu 1, nvidia.com/mig-1g.10gb 2"},
		{&twoShared, "gpu: a::0 a::1; mig-1g.10gb: m n", "nvidia.com/gpu 2 = 1 x 2 time-slicing, nvidia.com/mig-1g.10gb 2"},
		{&renamed, "gpu.shared: a::0 a::1; mig-1g.10gb: m n", "nvidia.com/gpu.shared 2 = 1 x 2 time-slicing, nvidia.com/mig-1g.10gb 2"},
	} {
		hardware := resources("gpu: a; mig-1g.10gb: m n")
		if row.sharing != nil {
			hardware = capacity.Shared(hardware, *row.sharing)
			if !hardware.Equal(resources(row.offered)) {
				t.Errorf("offered are %v, want %s", hardware, row.offered)
			}
		}
		if got := hardware.Summary(row.sharing); got != row.summary {
			t.Errorf("the summary is %q, want %q", got, row.summary)
		}
	}
	empty := capacity.Resources{}
	if empty.String() != "none" || empty.Summary(&twoShared) != "none" || empty.Equal(empty) {
		t.Error("no resources are some")
	}
	if got := capacity.Offered(resources("gpu: a; mig-1g.10gb:; hostdev: x")); !got.Equal(resources("gpu: a")) {
		t.Errorf("offered of GPUs is %v", got)
	}
}

func TestTheStrategyThatThePluginRunsUnder(t *testing.T) {
	gpus := []nvml.GPU{{UUID: "g", Enabled: true, Instances: []nvml.Instance{{Devices: []nvml.Device{{UUID: "m", Profile: "1g.10gb"}}}}}}
	for kubelet, want := range map[string]config.MIGStrategy{
		"gpu: g": config.MIGStrategyNone, "gpu: m": config.MIGStrategySingle, "gpu.shared: m::0 m::1": config.MIGStrategySingle,
		"mig-1g.10gb: m": "", "": "", "gpu: other": "",
	} {
		if got := capacity.RunsUnder(gpus, resources(kubelet), config.MIGStrategyMixed); got != want {
			t.Errorf("where kubelet gives out %s, the strategy is %q, want %q", kubelet, got, want)
		}
	}
	whole := []nvml.GPU{{UUID: "g"}}
	if got := capacity.RunsUnder(whole, resources("gpu: g"), config.MIGStrategyMixed); got != "" {
		t.Errorf("where all strategies offer the same, the plugin runs under %q", got)
	}
}

// Two observations count as two if an interval lies between them. One in which something else was not there yet can only be the first.
func TestObservationsThatCount(t *testing.T) {
	at := time.Unix(1000, 0)
	var p capacity.Agreement
	for _, row := range []struct {
		after   time.Duration
		observe func(time.Time)
		want    int
	}{
		{0, func(now time.Time) { p.Count(true, now) }, 1},
		{capacity.VerifyInterval - 1, func(now time.Time) { p.Count(true, now) }, 1},
		{1, func(now time.Time) { p.Count(true, now) }, 2},
		{1, func(now time.Time) { p.Count(false, now) }, 0},
		{1, p.CountFirst, 1},
		{1, p.CountFirst, 1},
		{capacity.VerifyInterval - 2, func(now time.Time) { p.Count(true, now) }, 1},
		{1, func(now time.Time) { p.Count(true, now) }, 2},
		{1, p.CountFirst, 1},
		{1, p.Forget, 0},
	} {
		at = at.Add(row.after)
		if row.observe(at); p.Agreed != row.want {
			t.Errorf("after %s %d looks agree, want %d", at.Sub(time.Unix(1000, 0)), p.Agreed, row.want)
		}
	}
	p.Count(true, at)
	if left := p.Left(at.Add(time.Second)); left != capacity.VerifyInterval-time.Second {
		t.Errorf("%s are left", left)
	}
}
