package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"

	"github.com/gpuslice/gpuslice/config"
)

func TestAPreviewTellsWhatWaitsForAReboot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, passthrough)
		w.label("all-balanced")
		w.parked()
		w.passes("a word about both GPUs", func() bool { return strings.Contains(w.condition().Message, "GPUs 0, 1") })
		p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "all-balanced")
		if err != nil {
			t.Fatal(err)
		}
		if len(p.AtReboot) != 2 || p.Reboot {
			t.Errorf("%d GPUs are said to turn MIG on at the next reboot, and the steps wait for one: %t", len(p.AtReboot), p.Reboot)
		}
		w.reboot()
		w.reach("all-balanced")
	})
	t.Run("in the middle of the change", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, passthrough)
			w.label("all-balanced")
			w.parked()
			w.reboot()
			w.reach("all-balanced")
			w.settings.Reboot.Policy = config.RebootDelegate
			w.restart()
			w.label("all-disabled")
			w.passes("the request", w.asked)
			p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, "all-disabled")
			if err != nil {
				t.Fatal(err)
			}
			if len(p.AtReboot) != 0 || !p.Reboot {
				t.Errorf("%d GPUs are said to turn MIG on at the next reboot, and the steps wait for one: %t", len(p.AtReboot), p.Reboot)
			}
		})
	})
}
