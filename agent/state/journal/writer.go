package journal

import (
	"cmp"
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// Writer reads and writes what the agent must restore on one node.
type Writer struct {
	Record *Keeper
	Nodes  nodewrite.Writer
	Fence  fence.Fence
	Clock  *monotonic.Clock
}

// Write describes why a journal is written.
type Write struct {
	Node        *corev1.Node
	Boot        string    // ID of the host's boot
	Before      *Journal  // that the node has now; nil if it has none
	Fingerprint string    // fingerprint of the desired config
	GivesBack   bool      // the step takes nothing: the agent performs it even if it cannot write the host's record
	Disrupted   bool      // the change has taken something from the node already
	Since       time.Time // since when the agent has been unable to write the host's record; zero if it does not wait for that
}

// Amend writes the journal again, and removes the annotations of users that the journal now holds.
func (w *Writer) Amend(ctx context.Context, write Write, j Journal, spent ...string) error {
	_, err := w.Write(ctx, write, j, func(node *corev1.Node, text string) ([]byte, error) { return w.Fence.Record(node, text, spent...) })
	return err
}

// Write writes the journal: first into the host's record, then, with the patch, to the node. If it cannot write the record, it refuses a step that takes
// something from the node or the host, but lets one that restores go on.
func (w *Writer) Write(ctx context.Context, write Write, j Journal, patch func(node *corev1.Node, text string) ([]byte, error)) (*corev1.Node, error) {
	text, err := j.Encode()
	if err != nil {
		return nil, err
	}
	h := w.Record
	before, r := h.Now(), h.sending(write.Boot, j, text)
	if write.GivesBack || j.Undo != nil || !j.TakesMore(write.Before) {
		h.Keep(ctx, r, w.Clock.Now())
	} else if err := h.Write(ctx, r, w.Clock.Now()); err != nil {
		return nil, w.Unrecorded(write, err)
	}
	node, err := w.Nodes.Patched(ctx, write.Node, func(node *corev1.Node) ([]byte, error) { return patch(node, text) })
	switch {
	case err == nil:
		h.Keep(ctx, h.accepted(write.Boot, j, text), w.Clock.Now())
	case Refused(err): // the write will not succeed later
		h.refused(before)
	}
	return node, err
}

// Refused reports whether the API server has refused the write.
func Refused(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err) ||
		apierrors.IsBadRequest(err) || apierrors.IsRequestEntityTooLargeError(err)
}

// Unrecorded returns why the agent takes nothing: it could not record that. A change that is under way is postponed and undone.
func (w *Writer) Unrecorded(write Write, err error) error {
	if write.Disrupted {
		return &api.Failure{
			Fingerprint: write.Fingerprint, Reason: config.ReasonHostRecordUnavailable, Later: true,
			Message: err.Error() + ": after a crash the agent could not restore what the change takes next; the change is postponed",
		}
	}
	advice := "make room on the disk below --state-dir, and make it writable for root"
	if errors.Is(err, ErrSilent) {
		advice = "see the host's kernel log for the disk or file system below --state-dir, which does not answer"
	}
	return &outcome.Waiting{
		Reason: config.ReasonHostRecordUnavailable, After: Retry, Since: cmp.Or(write.Since, w.Clock.Stamp()),
		Message: "changes nothing until the host's record can be written, which the agent restores the node from after a crash: " + err.Error(), Advice: advice,
	}
}

// TryRecord writes the present record, before the agent disturbs anything, and returns why it has to wait if it cannot.
func (w *Writer) TryRecord(ctx context.Context, write Write) error {
	if err := w.Record.Write(ctx, w.Record.Now(), w.Clock.Now()); err != nil {
		return w.Unrecorded(write, err)
	}
	return nil
}

// ForeseeRecord returns why TryRecord would have to wait. It changes nothing.
func (w *Writer) ForeseeRecord(ctx context.Context, write Write) error {
	r := w.Record.Now()
	r.ToRestore = restoresOf(r)
	if err := w.Record.Store.Try(ctx, r); err != nil {
		return w.Unrecorded(write, err)
	}
	return nil
}

// RecordRestores repeats the last write of the record, if it has failed, before a step takes something from the host. While the disk knows less than the
// node, an agent that finds no annotation after a crash would not restore it. The error says why the step has to wait.
func (w *Writer) RecordRestores(ctx context.Context, write Write, step plan.Step) error {
	if !step.Traits().TakesFromHost || write.GivesBack || w.Record.DiskCoversRestores() {
		return nil
	}
	if err := w.Record.Flush(ctx, w.Clock.Now()); err != nil {
		return w.Unrecorded(write, err)
	}
	return nil
}

// Tidy removes the change from the record once nothing is pending, and repeats a failed write.
func (w *Writer) Tidy(ctx context.Context, pending bool) {
	r := w.Record.Now()
	if !pending {
		r.DropChange()
	}
	w.Record.Keep(ctx, r, w.Clock.Now())
}

// Learn keeps what later changes need to know.
func (w *Writer) Learn(ctx context.Context, learnt Learnt) {
	r := w.Record.Now()
	r.Learnt = learnt.bounded()
	w.Record.Keep(ctx, r, w.Clock.Now())
}

// Begin makes the first record of a host, with what users had asked for before.
func (w *Writer) Begin(ctx context.Context, found map[string]string) Learnt {
	w.Record.first = false
	learnt := w.Record.Now().Learnt
	learnt.Found = found
	w.Learn(ctx, learnt)
	return learnt
}

// JoinPool writes down the node's pool before the node asks it for a slot. The agent returns the slot there, though the labels may choose another pool by
// then. The error is why the step has to wait.
func (w *Writer) JoinPool(ctx context.Context, write Write, pool Pool) error {
	learnt := w.Record.Now().Learnt
	if learnt.Pool != nil && *learnt.Pool == pool {
		return nil
	}
	learnt.Pool = &pool
	return w.LearnFirst(ctx, write, learnt)
}

// Grant keeps how long after the fence of a change, raised at since, pods may take to leave.
func (w *Writer) Grant(ctx context.Context, since time.Time, pods map[types.UID]time.Duration) {
	granted := &Granted{Since: since, Until: map[types.UID]time.Time{}}
	for uid, wait := range pods {
		granted.Until[uid] = since.Add(wait)
	}
	learnt := w.Record.Now().Learnt
	learnt.Granted = granted
	w.Learn(ctx, learnt)
}

// LeavePool forgets the pool: its Lease has nothing of the node any more.
func (w *Writer) LeavePool(ctx context.Context) {
	if learnt := w.Record.Now().Learnt; learnt.Pool != nil {
		learnt.Pool = nil
		w.Learn(ctx, learnt)
	}
}

// LearnFirst keeps what later changes need to know of a step before the agent performs it. The error says why the step has to wait.
func (w *Writer) LearnFirst(ctx context.Context, write Write, learnt Learnt) error {
	if write.GivesBack {
		w.Learn(ctx, learnt)
		return nil
	}
	r := w.Record.Now()
	r.Learnt = learnt.bounded()
	if err := w.Record.Write(ctx, r, w.Clock.Now()); err != nil {
		return w.Unrecorded(write, err)
	}
	return nil
}
