package show_test

import (
	"testing"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/internal/show"
	"github.com/gpuslice/gpuslice/config"
)

// A verdict is never better than what is known.
func TestTheVerdictOnAnAnswer(t *testing.T) {
	t.Parallel()
	steps, hour := []string{"fence"}, api.Duration(time.Hour)
	for name, row := range map[string]struct {
		answer         api.Answer
		stuck, unknown string
		want           string
		code           int
	}{
		"nothing to do":                 {api.Answer{}, "", "", "nothing to do", 0},
		"steps that are only counted":   {api.Answer{More: 7, Patience: hour}, "", "", "begins at once", 0},
		"no pod leaves":                 {api.Answer{Steps: steps, Runs: "at once: it disturbs no pod"}, "", "", "begins at once: it disturbs no pod", 0},
		"refused":                       {api.Answer{Refused: "no such config", Reason: config.ReasonUnknownConfig}, "", "", "would be refused: UnknownConfig: no such config", cli.ExitHeldUp},
		"held up":                       {api.Answer{Steps: steps, HeldUp: "audit", Reason: config.ReasonHeld}, "", "", "would be held up: Held: audit", cli.ExitHeldUp},
		"a budget keeps pods":           {api.Answer{Steps: steps, Patience: hour}, "budget a", "", "would give up after 1h: budget a", cli.ExitHeldUp},
		"a budget, and pods are killed": {api.Answer{Steps: steps}, "budget a", "", "begins at once; at the deadline its agent deletes the pods that are still there: budget a", 0},
		"room is not known":             {api.Answer{Steps: steps, Patience: hour}, "", "no list", "begins at once; whether it ends is not known: no list", cli.ExitUnknown},
		"a GPU is sick":                 {api.Answer{Steps: steps, Unsure: "GPU 1"}, "", "", "begins at once; whether it ends is not known: GPU 1", cli.ExitUnknown},
		"a GPU is sick, a budget keeps": {api.Answer{Steps: steps, Patience: hour, Unsure: "GPU 1"}, "budget a", "", "would give up after 1h: budget a", cli.ExitHeldUp},
		"a GPU is sick, pods are killed": {
			api.Answer{Steps: steps, Unsure: "GPU 1"}, "budget a", "", "begins at once; whether it ends is not known: GPU 1", cli.ExitUnknown,
		},
	} {
		got := show.Judge(&row.answer, row.stuck, row.unknown)
		if got.String() != row.want || got.Ruling.ExitCode() != row.code {
			t.Errorf("%s: %q, exit code %d; want %q, %d", name, got, got.Ruling.ExitCode(), row.want, row.code)
		}
	}
}
