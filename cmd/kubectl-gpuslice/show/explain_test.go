package show

import (
	"strings"
	"testing"

	"github.com/mattn/go-runewidth"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/output"
	"github.com/gpuslice/gpuslice/config/glossary"
	"github.com/gpuslice/gpuslice/test/agenttest"
)

func TestAReasonIsExplained(t *testing.T) {
	inWorld(t, func(w *world) {
		const held = `
Held
  is given: while gpuslice.io/hold keeps the node from any change
  you can:  let the node change again: kubectl gpuslice hold NODE --release
`
		for _, name := range []string{"Held", "held"} {
			w.Start("explain", name)
			w.Is(held, 0)
		}
		w.Start("explain", "gpuslice_instances")
		w.Is(`
gpuslice_instances
  is:     the number of existing GPU instances
  labels: gpu, profile
`, 0)
		w.Start("explain", "gpuslice_instance")
		if said, code := w.Ended(); code != 1 || !strings.Contains(said, "there is no metric \"gpuslice_instance\"; did you mean gpuslice_instances") {
			t.Errorf("exit code %d: %s", code, said)
		}
		w.Start("explain", "EvictionBloked")
		w.Is("\nerror: there is no reason \"EvictionBloked\"; did you mean EvictionBlocked? kubectl gpuslice explain lists them all\n", 1)
		w.Start("explain", "\x1b[2Jxyzzyxyzzyxyzzy")
		w.Is("\nerror: there is no reason \"\\x1b[2Jxyzzyxyzzyxyzzy\"; kubectl gpuslice explain lists them all\n", 1)
	})
}

func TestAllReasonsAndMetricsAreListedInEightyColumns(t *testing.T) {
	inWorld(t, func(w *world) {
		said, code := w.Run("explain")
		if code != 0 {
			t.Fatalf("exit code %d: %s", code, said)
		}
		for line := range strings.Lines(said) {
			if n := runewidth.StringWidth(strings.TrimSuffix(line, "\n")); n > output.PaperWidth {
				t.Errorf("%d columns: %s", n, line)
			}
		}
		for _, name := range glossary.Metrics().Names() {
			if !strings.Contains(said, "\n  "+name+" ") {
				t.Errorf("%s is not listed", name)
			}
		}
		for _, name := range glossary.Reasons().Names() {
			if !strings.Contains(said, "\n  "+name+" ") {
				t.Errorf("%s is not listed", name)
			}
			if r, known := glossary.Reasons().Find(name); !known || r.Means == "" || r.YouCan == "" {
				t.Errorf("%s: %+v", name, r)
			}
		}
	})
}

// A program that reads a pipe cannot ask for the rest of a word.
func TestNothingIsCutInAPipe(t *testing.T) {
	long := strings.Repeat("x", 200)
	one := adviceFor{Move: judge.Move{Pod: "team/" + long, Node: long, Verdict: judge.NeedsDrain, Reason: long, Leave: []string{"team/" + long}}}
	few, many := advised{Moves: []adviceFor{one}}, advised{Moves: []adviceFor{one, one, one, one}}
	explained := fragmented{Nodes: []nodeFragments{{Fragments: judge.Fragments{Node: long}}}}
	for name, of := range map[string]answer{"few": &few, "many": &many, "explained": &explained} {
		if said, err := of.text("", output.Paper{}); err != nil || strings.Contains(said, "…") || !strings.Contains(said, long) {
			t.Errorf("%s: %v:\n%s", name, err, said)
		}
	}
	if said := agenttest.Said(t, []cluster.Command{Explain}, "", "explain"); strings.Contains(said, "…\n") {
		t.Errorf("the list is cut:\n%s", said)
	}
}
