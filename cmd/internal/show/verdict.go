package show

import (
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
)

// Verdict is what the agent would make of a change right now, by its own gates: the first words about a plan. An answer without steps has none: its
// GPUs are as requested. Now reports whether the change would go on at once, or there is none.
func Verdict(a *api.Answer) (text string, now bool) {
	switch {
	case a.Refused != "":
		return "would be refused: " + reasoned(a.Reason, a.Refused), false
	case a.HeldUp != "":
		return "would be held up: " + reasoned(a.Reason, a.HeldUp), false
	case len(a.Steps) == 0:
		return "", true
	case a.Runs == "":
		return "runs at once", true
	default:
		return "runs " + a.Runs, true
	}
}

// EndUnknown adds to the verdict on a change that begins why it is not known whether the change ends.
func EndUnknown(verdict, why string) string {
	return "begins" + strings.TrimPrefix(verdict, "runs") + "; whether it ends is not known: " + why
}

// GivesUp is the verdict on a change that begins, and cannot come to its end.
func GivesUp(a *api.Answer, why string) string {
	return "would give up after " + Period(time.Duration(a.Patience)) + ": " + why
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
