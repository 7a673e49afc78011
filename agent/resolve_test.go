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
