package catalog_test

import (
	"testing"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

func TestTheStrategyThatFitsIsTheOneThatIsThereWhereThatWillDo(t *testing.T) {
	whole := nvml.GPU{UUID: "GPU-w"}
	cut := func(profiles ...string) nvml.GPU {
		gpu := nvml.GPU{UUID: "GPU-c", Capable: true, Enabled: true}
		for _, p := range profiles {
			gpu.Instances = append(gpu.Instances, nvml.Instance{Devices: []nvml.Device{{Profile: p}}})
		}
		return gpu
	}
	const none, single, mixed = config.MIGStrategyNone, config.MIGStrategySingle, config.MIGStrategyMixed
	for name, test := range map[string]struct {
		gpus []nvml.GPU
		mps  bool
		want map[config.MIGStrategy]config.MIGStrategy // by the one that is there
	}{
		"whole GPUs":         {[]nvml.GPU{whole, whole}, false, map[config.MIGStrategy]config.MIGStrategy{none: none, single: single, mixed: mixed}},
		"whole GPUs, by MPS": {[]nvml.GPU{whole, whole}, true, map[config.MIGStrategy]config.MIGStrategy{none: none, single: single, mixed: none}},
		"one size":           {[]nvml.GPU{cut("3g.40gb", "3g.40gb")}, false, map[config.MIGStrategy]config.MIGStrategy{none: mixed, single: single, mixed: mixed}},
		"two sizes":          {[]nvml.GPU{cut("3g.40gb", "2g.20gb")}, false, map[config.MIGStrategy]config.MIGStrategy{none: mixed, single: mixed, mixed: mixed}},
		"one size beside a whole GPU": {
			[]nvml.GPU{whole, cut("3g.40gb", "3g.40gb")}, false, map[config.MIGStrategy]config.MIGStrategy{none: mixed, single: mixed, mixed: mixed},
		},
	} {
		for has, want := range test.want {
			if got := catalog.FittingStrategy(test.gpus, has, test.mps); got != want {
				t.Errorf("%s under %s: %s, want %s", name, has, got, want)
			}
		}
	}
}

// NVIDIA's plugin advertises each profile that instances have, and exits on devices that share one.
func TestOnlyAPartOfAnInstanceIsOne(t *testing.T) {
	t.Parallel()
	for device, part := range map[string]bool{"1g.24gb": false, "1g.24gb+me.all": false, "2g.48gb-me": false, "1c.3g.40gb": true, "1c.2g.48gb+me.all": true} {
		gpu := nvml.GPU{Enabled: true, Capable: true, Instances: []nvml.Instance{{Devices: []nvml.Device{{Profile: device}}}}}
		if err := catalog.CheckStrategy([]nvml.GPU{gpu}, config.MIGStrategyMixed); (err != nil) != part {
			t.Errorf("%s: %v", device, err)
		}
	}
}
