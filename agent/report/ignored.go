package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/check"
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
	if value, is := seen.Node.Annotations[config.AnnotationForce]; is && want.Name != "" && !seen.Forces(want) {
		text := fmt.Sprintf("annotation %s=%s begins no change: its value is %s, or the id of the change", config.AnnotationForce, sanitize.Cut(value, longestKey), config.ForceNow)
		if seen.Older(config.AnnotationForce) {
			text = fmt.Sprintf("annotation %s begins no change: it was there before the agent", config.AnnotationForce)
		}
		out = append(out, note{config.ReasonKeyIgnored, text})
	}
	for _, text := range slices.Concat(
		misspelt("label", seen.Node.Labels, config.RequestLabels(), "an annotation", config.UserAnnotations()),
		misspelt("annotation", seen.Node.Annotations, config.UserAnnotations(), "a label", config.RequestLabels()),
	) {
		out = append(out, note{config.ReasonKeyIgnored, text})
	}
	return out
}

const (
	// longestKey bounds a key or a value in a note.
	longestKey = 64 // characters
	// mostMisspelt bounds the notes on misspelt keys of a kind.
	mostMisspelt = 3
)

// misspelt says of the node's keys of this kind which of the agent's they are nearly spelt like, and which are of the other kind. Such a key has no effect.
func misspelt(kind string, of map[string]string, ours []string, otherKind string, others []string) []string {
	var out []string
	for _, key := range slices.Sorted(maps.Keys(of)) {
		if len(out) == mostMisspelt {
			break
		}
		if slices.Contains(others, key) {
			out = append(out, fmt.Sprintf("%s %s has no effect: it is the key of %s", kind, key, otherKind))
			continue
		}
		domain, name, _ := strings.Cut(key, "/")
		for _, our := range ours {
			asked, meant, _ := strings.Cut(our, "/")
			if domain == asked && !slices.Contains(ours, key) && len(check.Closest(name, []string{meant})) > 0 {
				out = append(out, fmt.Sprintf("did you mean %s by the %s %s?", our, kind, sanitize.Cut(key, longestKey)))
				break
			}
		}
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
