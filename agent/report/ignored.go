package report

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// longestNote bounds what the condition and an Event say of a thing that does not count.
const longestNote = 400 // characters

// note says that something that a user has written does not count, and what to do about it.
type note struct {
	reason config.Reason
	text   string
}

// notes lists what does not count on the node.
func (w *Writer) notes(seen *state.Observed, want state.Desired) []note {
	var out []note
	if w.WrongSettings != "" {
		out = append(out, note{
			config.ReasonInvalidSettings,
			sanitize.Message("mend the settings: "+w.WrongSettings, longestNote) + "; until then this agent goes on with those of before",
		})
	}
	if want.Unread != nil {
		out = append(out, note{
			config.ReasonInvalidCatalog,
			sanitize.Message("mend "+want.Unread.Error(), longestNote) + "; until then this node stays as it was last asked, and begins no change",
		})
	}
	for _, label := range want.Overridden {
		text := fmt.Sprintf("%s does not count while %s is there", label, want.Label)
		if key, _, _ := strings.Cut(label, "="); key == config.LabelDevicePluginConfig && seen.DevicePlugin.ObeysLabel {
			text = fmt.Sprintf("remove %[1]s or %[2]s: the agent goes by %[2]s alone, and NVIDIA's config manager obeys %[3]s all the same", label, want.Label, key)
		}
		out = append(out, note{config.ReasonKeyIgnored, text})
	}
	return out
}

// ReportIgnored sends an Event about each thing that does not count, if it is new.
func (w *Writer) ReportIgnored(seen *state.Observed, want state.Desired) {
	now := w.notes(seen, want)
	for _, n := range now {
		if !slices.Contains(w.ignored, n) {
			w.Events.Node(w.Node, events.Ignored(n.reason, n.text))
		}
	}
	w.ignored = now
}

// Ignored says, for the end of the message, what does not count.
func (w *Writer) Ignored(seen *state.Observed, want state.Desired) string {
	text := ""
	for _, n := range w.notes(seen, want) {
		text += "; " + n.text
	}
	return text
}
