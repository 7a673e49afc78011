package agent_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
)

// One file serves nodes of four GPUs and of eight. The condition says that a part of it is about other nodes.
func TestPositionsThatTheNodeDoesNotHaveAreReportedAndPassedOver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "gpus: [{model: H100-80GB}]")
		w.setConfigs(map[string]catalog.MIGConfig{"mine": {{Indices: []int{0, 4, 5}, MIG: true, Devices: map[string]int{"3g.40gb": 2}}}})
		w.label("mine")
		w.reach("mine")
		if p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "mine"); err != nil || !slices.Equal(p.Beyond, []int{4, 5}) {
			t.Errorf("the preview passes over %v, error %v", p.Beyond, err)
		}
		if got, want := w.condition().Message, "the config names and this node lacks: 4; 5"; !strings.Contains(got, want) {
			t.Errorf("the condition does not say %q: %s", want, got)
		}
	})
}

// A label alone cuts one GPU: the name spells the config out, and the other GPUs stay unchanged, with their pods. So it is by either label.
func TestALabelAloneCutsOneGPU(t *testing.T) {
	t.Parallel()
	for _, label := range []string{config.LabelMIGConfig, config.LabelProfile} {
		t.Run(label, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.converge("all-1g.10gb")
				w.unset(config.LabelMIGConfig)
				w.settle(config.ReasonNotRequested)
				w.pod("stays", w.snapshot()[0].Instances[0].Devices[0].UUID)
				w.set(label, "gpu1_3g.40gb_4x1g.10gb")
				w.reach("gpu1_3g.40gb_4x1g.10gb")
				const want = "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 3g.40gb@4"
				if got := w.snapshot(); got[1].Geometry().String() != want || len(got[0].Instances) != 7 || !w.runs("stays") {
					t.Errorf("GPU 1 is %s, want %s; GPU 0 is %s; the pod there stays: %t", got[1].Geometry(), want, got[0].Geometry(), w.runs("stays"))
				}
				w.set(label, "gpu1_3g.40gb_4x1g.10gb-gpu7_off")
				if c := w.settle(config.ReasonInvalidCatalog); !strings.Contains(c.Message, "devices: 7 is not a GPU of this node, which has 0 to 1") {
					t.Error(c.Message)
				}
			})
		})
	}
}
