package journal

import (
	"context"
	"errors"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
)

// Known is what the host's record says besides the journal.
type Known struct {
	StrangeJournal bool // the node has a journal that this host's agent did not write for it
	First          bool // the host has no record: no agent has been here, or the record is lost
	Learnt         Learnt
}

// Read reads the host's record, which shows whether this host's agent wrote the journal on the node. The record counts only for the node object that it
// was written for. Boot is the ID of the host's boot. The journal is nil if no change is under way.
func (w *Writer) Read(ctx context.Context, node *corev1.Node, boot string) (j *Journal, known Known, err error) {
	h := w.Record
	if err := h.Load(ctx); err != nil {
		return nil, known, unreadable(err)
	}
	h.attribute(node, boot)
	text := node.Annotations[config.AnnotationJournal]
	sent := slices.Contains(h.now.Next, text)
	switch {
	case text == "":
	case text == h.now.Journal || sent:
		if j, err = Parse(text); err != nil {
			return nil, known, &outcome.Stalled{Reason: config.ReasonJournalUnreadable, Journal: err.Error(), Message: err.Error() +
				"; the agent changes nothing. Run the agent that wrote it; or remove the annotation " + config.AnnotationJournal +
				": the agent then restores the node, and leaves its GPUs unchanged"}
		}
		if sent {
			h.now = h.accepted(boot, *j, text)
		}
	default:
		known.StrangeJournal = true
	}
	known.First, known.Learnt = h.first, h.now.Learnt
	return j, known, nil
}

// unreadable says what a user can do about a record that the agent cannot read.
func unreadable(err error) error {
	var newer *NewerError
	text := err.Error() + "; the agent begins nothing and restores nothing. "
	switch {
	case errors.Is(err, ErrSilent):
		return &outcome.Waiting{
			Reason: config.ReasonHostRecordUnavailable, After: outcome.DriverRetry, Message: "waiting for the disk with the host's record: " + err.Error(),
			Advice: "see the host's kernel log for the disk or file system below --state-dir",
		}
	case errors.As(err, &newer):
		text += "Run that agent until it has restored that; or restore it by hand and remove the file"
	case errors.Is(err, ErrUnsafe):
		text += "Find out who has changed it; then remove it, or make file and directory root's own, with modes 0600 and 0700"
	case errors.Is(err, ErrCorrupt):
		text += "Remove the file to go on without it: the agent then restores the node, but start the host's stopped units yourself"
	default:
		return &outcome.Waiting{
			Reason: config.ReasonHostRecordUnavailable, After: Retry, Message: err.Error(),
			Else: "changes nothing until the directory below --state-dir can be read",
		}
	}
	return &outcome.Stalled{Reason: config.ReasonHostRecordUnavailable, Message: text}
}
