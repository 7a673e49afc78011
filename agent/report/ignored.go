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

// longestNote bounds what the condition and an Event say of an ignored label or file.
const longestNote = 400 // characters

// note says that the agent ignores something that a user has written, and what to do about it.
type note struct {
	reason config.Reason
	text   string
}

// notes lists what the agent ignores on the node.
func (w *Writer) notes(seen *state.Observed, want state.Desired) []note {
	var out []note
	if w.WrongSettings != "" {
		out = append(out, note{
			config.ReasonInvalidSettings,
			sanitize.Message("mend the settings: "+w.WrongSettings, longestNote) + "; until then this agent uses the former ones",
		})
	}
	if want.Unread != nil {
		out = append(out, note{
			config.ReasonInvalidCatalog,
			sanitize.Message("mend "+want.Unread.Error(), longestNote) + "; until then this node keeps its last request, and begins no change",
		})
	}
	for _, label := range want.Overridden {
		text := fmt.Sprintf("%s is ignored while %s is there", label, want.Label)
		if key, _, _ := strings.Cut(label, "="); key == config.LabelDevicePluginConfig && seen.DevicePlugin.ObeysLabel {
			text = fmt.Sprintf("remove %[1]s or %[2]s: the agent follows only %[2]s, but NVIDIA's config manager still obeys %[3]s", label, want.Label, key)
		}
		out = append(out, note{config.ReasonKeyIgnored, text})
	}
	return out
}

// ReportIgnored sends an Event about each new thing that the agent ignores.
func (w *Writer) ReportIgnored(seen *state.Observed, want state.Desired) {
	now := w.notes(seen, want)
	for _, n := range now {
		if !slices.Contains(w.ignored, n) {
			w.Events.Node(w.Node, events.Ignored(n.reason, n.text))
		}
	}
	w.ignored = now
}

// Ignored says, for the end of the message, what the agent ignores.
func (w *Writer) Ignored(seen *state.Observed, want state.Desired) string {
	text := ""
	for _, n := range w.notes(seen, want) {
		text += "; " + n.text
	}
	return text
}
