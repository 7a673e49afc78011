package rollout

import (
	"fmt"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
)

// lines shows a roll-out without a terminal: a line when a node has another reason, or is done.
type lines struct {
	out   *cli.Printer
	shown map[string]string // the last news of each node
}

func newLines(out *cli.Printer) *lines { return &lines{out: out, shown: map[string]string{}} }

func (l *lines) show(nodes []*followed) {
	for _, f := range nodes {
		if now := news(f); l.shown[f.Name] != now {
			l.shown[f.Name] = now
			l.say(sentence(f))
		}
	}
}

func (l *lines) say(line string) {
	l.out.Printf("%s  %s\n", time.Now().UTC().Format(time.TimeOnly+"Z"), line)
}

func (l *lines) close() {}

// news returns what is worth a line when it changes. In a running change that is the reason, and not the phase: if the agent waits for the
// same in another phase, that is no news.
func news(f *followed) string {
	switch {
	case f.reason == "":
		return f.state() + " " + f.message
	case f.stage == pending && f.phase != api.PhaseRollingBack:
		return string(f.reason)
	default:
		return f.state() + " " + string(f.reason)
	}
}

// sentence describes a node in one line. It says of a node that is done whether something still keeps pods off it.
func sentence(f *followed) string {
	state := f.state()
	if f.stage == converged && f.cordon != nil {
		state += ", " + cluster.Cordoned(f.cordon, time.Now())
	}
	return fmt.Sprintf("%s  %s  %s", f.Name, state, f.words())
}
