package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuslice/gpuslice/config"
)

func TestAPreviewNamesWhatWaitsForAReboot(t *testing.T) {
	t.Parallel()
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
			w := requested(t)
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

func TestAPreviewSaysWhenTheChangeWouldBegin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := busy(t)
		runs := func(name string) string {
			t.Helper()
			p, err := w.agent.Preview(t.Context(), config.LabelMIGConfig, name)
			if err != nil {
				t.Fatal(err)
			}
			return p.Runs
		}
		expect := func(name, want string) {
			t.Helper()
			if got := runs(name); !strings.HasPrefix(got, want) {
				t.Errorf("%s runs %q, want %q", name, got, want)
			}
		}
		expect("all-1g.10gb", "at once, since no window has to be waited for")
		expect("all-disabled", "")
		w.maintain(nights)
		expect("all-1g.10gb", "at once: a window is open until Sat 2000-01-01 04:00:00Z")
		w.maintain(nights + "freezes: [{from: '2000-01-01T00:00:00Z', to: '2000-01-02T00:00:00Z'}]\npools: [{name: all, selector: '!none', maxUnavailable: 2}]\n")
		expect("all-1g.10gb", "at Sun 2000-01-02 00:00:00Z, by the windows of pool all, when the node gets a slot: pool all can do without 2 nodes at once")
		w.maintain(until(time.Now()))
		expect("all-1g.10gb", "never: by the windows of the maintenance file no window comes")
		w.annotate(config.AnnotationHold, "audit")
		expect("all-1g.10gb", "not before annotation gpuslice.io/hold is taken away")
	})
}
