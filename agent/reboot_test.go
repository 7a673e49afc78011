package agent_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent"
	"github.com/gpuslice/gpuslice/config"
)

// reboot is the node after a reboot: the GPUs have lost what they lose, the plugin's pod is the same and reads them anew,
// and the agent is another process.
func (w *world) reboot() {
	w.t.Helper()
	if err := w.gpus.Reboot(); err != nil {
		w.t.Fatal(err)
	}
	w.offered = w.devices()
	w.restart()
}

// Promise 8. An H100 loses its instances and MIG mode at a reboot, an A100 its instances alone.
func TestWhatARebootTakesAwayIsMadeAgain(t *testing.T) {
	for _, model := range []string{"H100-80GB", "A100-80GB"} {
		t.Run(model, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "gpus:\n- model: "+model+"\n  count: 2\n")
				w.converge("all-balanced")
				before := w.gpus.String()
				w.reboot()
				if before == w.gpus.String() {
					t.Fatal("the reboot took nothing away")
				}
				w.passes("the same geometry", func() bool { return w.gpus.String() == before })
				w.settle(config.ReasonConverged)
				w.givenBack()
			})
		})
	}
}

// Promise 8, where the reboot comes in the middle of a change.
func TestAChangeGoesOnAfterAReboot(t *testing.T) {
	for _, model := range []string{"H100-80GB", "A100-80GB"} {
		t.Run(model, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "gpus:\n- model: "+model+"\n  count: 2\n")
				w.converge("all-3g.40gb")
				w.label("all-balanced")
				w.passes("the second GPU's first instance", func() bool {
					gpu := w.snapshot()[1]
					return len(gpu.Instances) == 1 && gpu.Instances[0].Profile == "1g.10gb" ||
						strings.HasPrefix(gpu.Geometry().String(), "1g.10gb")
				})
				w.reboot()
				w.reach("all-balanced")
			})
		})
	}
}

// Promise 7. What a journal of another version owes is not known, so nothing is touched.
func TestAJournalThatCannotBeReadStopsEverything(t *testing.T) {
	for _, journal := range []string{`{"version":2}`, `{"version":0}`, `not JSON`} {
		t.Run(journal, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, h100)
				w.label("all-balanced")
				w.annotate(config.AnnotationJournal, journal)
				before := w.gpus.String()
				w.passes("a word about the journal", func() bool { return w.condition().Reason == string(config.ReasonJournalUnreadable) })
				for range 5 {
					w.turn()
					<-time.After(w.agent.Pass(t.Context()))
				}
				if diff := cmp.Diff(before, w.gpus.String()); diff != "" {
					t.Errorf("the GPUs were touched (-before +after):\n%s", diff)
				}
				if got := w.node().Annotations[config.AnnotationJournal]; got != journal {
					t.Errorf("the journal was changed to %s", got)
				}
				if c := w.condition(); !strings.Contains(c.Message, config.AnnotationJournal) {
					t.Errorf("the message does not say what to do: %s", c.Message)
				}
			})
		})
	}
}

func FuzzParseJournal(f *testing.F) {
	f.Add(`{"version":1,"operation":"a","target":"all-balanced","previous":[{"gpu":"GPU-1","mig":true}]}`)
	f.Add(`{"version":1,"previous":[{"gpu":"GPU-1","mig":true,"instances":[{"profile":"1g.10gb","start":-1,"size":1}]}]}`)
	f.Add(`null`)
	f.Fuzz(func(t *testing.T, text string) {
		j, err := agent.ParseJournal(text)
		if err == nil && j == nil && text != "" {
			t.Errorf("a journal that is there reads as none: %q", text)
		}
	})
}
