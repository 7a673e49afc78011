package show

import (
	"cmp"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/config"
)

// Ruling is what becomes of a request on a node.
type Ruling int

// The rulings, from the best to the worst.
const (
	NothingToDo Ruling = iota
	Begins
	BeginsUnsure // and it is not known whether it ends
	GivesUp      // it begins, and cannot come to its end
	HeldUp
	Refused
	NotKnown
)

// String is the name of the ruling for programs.
func (r Ruling) String() string {
	return [...]string{"NothingToDo", "Begins", "BeginsUnsure", "GivesUp", "HeldUp", "Refused", "NotKnown"}[r]
}

// ExitCode is the exit code of a dry run or plan.
func (r Ruling) ExitCode() int {
	switch r {
	case NothingToDo, Begins:
		return 0
	case BeginsUnsure:
		return cli.ExitUnknown
	case GivesUp, HeldUp, Refused:
		return cli.ExitHeldUp
	case NotKnown:
	}
	return 1
}

// Verdict is the ruling on a request with its text, which every command prints first about a node.
type Verdict struct {
	Ruling Ruling
	text   string
}

// Judge returns the verdict on a request. The agent has asked its own gates for the answer. The command has looked at the rest of the cluster: stuck is why not
// all the pods would leave, and unknown is why that is not known. Both are empty if all would leave, or if the command has not looked. If the answer
// has no patience, the agent deletes at the deadline the pods that are still there.
func Judge(a *api.Answer, stuck, unknown string) Verdict {
	switch {
	case a.Refused != "" && a.Reason == "": // its observation has failed, which may pass
		return Unanswered(a.Refused)
	case a.Refused != "":
		return Verdict{Refused, "would be refused: " + reasoned(a.Reason, a.Refused)}
	case a.HeldUp != "":
		return Verdict{HeldUp, "would be held up: " + reasoned(a.Reason, a.HeldUp)}
	case len(a.Steps)+a.More == 0:
		return Verdict{NothingToDo, "nothing to do"}
	}
	return beginning(a, stuck, unknown)
}

// beginning is the verdict on a change that begins.
func beginning(a *api.Answer, stuck, unknown string) Verdict {
	begins, patience := "begins "+cmp.Or(a.Runs, "at once"), time.Duration(a.Patience)
	switch {
	case a.Unsure != "" && (stuck == "" || patience <= 0):
		return Verdict{BeginsUnsure, begins + "; whether it ends is not known: " + a.Unsure}
	case patience <= 0 && stuck != "":
		return Verdict{Begins, begins + "; at the deadline its agent deletes the pods that are still there: " + stuck}
	case patience <= 0 && unknown != "":
		return Verdict{Begins, begins + "; at the deadline its agent deletes the pods that are still there, and it is not known whether there are any: " + unknown}
	case stuck != "":
		return Verdict{GivesUp, "would give up after " + Period(patience) + ": " + stuck}
	case unknown != "":
		return Verdict{BeginsUnsure, begins + "; whether it ends is not known: " + unknown}
	default:
		return Verdict{Begins, begins}
	}
}

// Unanswered is the verdict where the agent has not answered, or cannot.
func Unanswered(why string) Verdict { return Verdict{NotKnown, "not known: " + why} }

// String is the verdict on a request that no label makes yet.
func (v Verdict) String() string { return v.text }

// Labelled is the verdict on a request that a label makes now.
func (v Verdict) Labelled() string {
	if v.Ruling == HeldUp || v.Ruling == Refused {
		return strings.TrimPrefix(v.text, "would be ")
	}
	return v.text
}

// Period writes a duration without the parts that are zero: 1h, 30m, 1h30m.
func Period(d time.Duration) string {
	text := d.Round(time.Second).String()
	for _, zero := range []string{"m0s", "h0m"} {
		if n := len(text) - len(zero); n > 0 && text[n:] == zero {
			text = text[:n+1]
		}
	}
	return text
}

func reasoned(reason config.Reason, text string) string {
	if reason == "" {
		return text
	}
	return string(reason) + ": " + text
}
