// Package ledger keeps what the agent owes to its node: each journal goes into the host's record first, which only root can write, and then to
// the node's annotation, which tells people. What stands on the node is believed only if the record says that this host's agent wrote it.
package ledger

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/steady"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
)

// Ledger reads and writes what is owed to one node.
type Ledger struct {
	Record *hostrecord.Keeper
	Nodes  nodewrite.Writer
	Fence  fence.Fence
	Units  []string // of the host, that the settings name
	Clock  *steady.Clock
}

// Purpose is what a step is performed for.
type Purpose struct {
	Wish      string // fingerprint of the config that is asked for
	GivesBack bool   // the step takes nothing: it is done even if the host's record cannot be written
}

// For is the purpose of a step on the way to what is wanted.
func For(want state.Desired, step plan.Kind) Purpose {
	return Purpose{Wish: want.Fingerprint, GivesBack: want.Undo || step == plan.Adopt}
}

// Amend writes the journal anew, and takes away annotations by which people have asked for something that it now holds.
func (l *Ledger) Amend(ctx context.Context, seen state.Observed, p Purpose, j journal.Journal, spent ...string) error {
	_, err := l.Write(ctx, seen, p, j, func(node *corev1.Node, text string) ([]byte, error) { return l.Fence.Record(node, text, spent...) })
	return err
}

func union(a, b []string) []string {
	out := slices.Clone(a)
	for _, s := range b {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// mostSent bounds the journals that were sent to the API server and of which no answer is known. Each is guarded by the version of the
// node that it was made for, so that an old one arrives only while nothing else has.
const mostSent = 4

// Write writes the journal: into the host's record first, then, by the patch, to the node. Where the record cannot be written, what
// takes something from the node or the host is not begun, and what gives back is done without.
func (l *Ledger) Write(
	ctx context.Context, seen state.Observed, p Purpose, j journal.Journal, write func(node *corev1.Node, text string) ([]byte, error),
) (*corev1.Node, error) {
	text, err := j.Encode()
	if err != nil {
		return nil, err
	}
	h := l.Record
	before := h.Now
	r := h.Now
	r.Operation, r.Ends = legible.Cut(j.Operation, 128), false
	if text != r.Journal && !slices.Contains(r.Next, text) {
		r.Next = append(slices.Clone(r.Next[max(0, len(r.Next)-mostSent+1):]), text)
	}
	host := hostrecord.OwedBy(j, seen.Boot.ID)
	r.Host = hostrecord.Host{
		Boot: cmp.Or(host.Boot, r.Host.Boot), Stopped: union(r.Host.Stopped, host.Stopped), Persistent: union(r.Host.Persistent, host.Persistent),
	}
	if p.GivesBack || j.Undo != nil || !j.TakesMore(seen.Journal) {
		h.Keep(ctx, r, l.Clock.Now())
	} else if err := h.Write(ctx, r, l.Clock.Now()); err != nil {
		return nil, l.Unrecorded(seen, p, err)
	}
	node, err := l.Nodes.Patched(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) { return write(node, text) })
	switch {
	case err == nil:
		h.Keep(ctx, h.AfterJournalWrite(seen.Boot.ID, j, text), l.Clock.Now())
	case Refused(err): // it will not arrive any more
		h.Now.Journal, h.Now.Next, h.Now.Host = before.Journal, before.Next, before.Host
	}
	return node, err
}

// Refused reports whether the API server has said that it does not do it.
func Refused(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err) ||
		apierrors.IsBadRequest(err) || apierrors.IsRequestEntityTooLargeError(err)
}

// Unrecorded is why nothing is taken, for want of a record of it. A change that is under way is put off, and what it has taken given
// back.
func (l *Ledger) Unrecorded(seen state.Observed, p Purpose, err error) error {
	if seen.DisruptionStarted() {
		return &api.Failure{
			Wish: p.Wish, Reason: config.ReasonHostRecordUnavailable, Later: true,
			Message: err.Error() + ": what the change would take next could not be given back after a crash; the change is put off",
		}
	}
	advice := "make room on the disk below --state-dir, and make it writable for root"
	if errors.Is(err, hostrecord.ErrSilent) {
		advice = "see the host's kernel log for the disk or file system below --state-dir, which does not answer"
	}
	return &outcome.Waiting{
		Reason: config.ReasonHostRecordUnavailable, After: hostrecord.Retry, Since: seen.Since(config.ReasonHostRecordUnavailable, l.Clock.Stamp()),
		Message: "nothing is disturbed before the host's record can be written, by which all is given back after a crash: " + err.Error(), Advice: advice,
	}
}

// Recordable reports why the record could not be written, before anything is disturbed. It is written as it is.
func (l *Ledger) Recordable(ctx context.Context, seen state.Observed, p Purpose) error {
	if err := l.Record.Write(ctx, l.Record.Now, l.Clock.Now()); err != nil {
		return l.Unrecorded(seen, p, err)
	}
	return nil
}

// MayTake keeps a step from taking something of the host while the disk knows less than the node: after a crash, and without the
// annotation, it would not be given back.
func (l *Ledger) MayTake(ctx context.Context, seen state.Observed, want state.Desired, step plan.Step) error {
	p := For(want, step.Kind)
	if !step.Traits().TakesFromHost || p.GivesBack || l.Record.DiskCoversDebts() {
		return nil
	}
	if err := l.Record.Flush(ctx, l.Clock.Now()); err != nil {
		return l.Unrecorded(seen, p, err)
	}
	return nil
}

// Tidy strikes from the record a change of which nothing is left, and brings the disk up to date.
func (l *Ledger) Tidy(ctx context.Context, seen state.Observed) {
	r := l.Record.Now
	if seen.Journal == nil && !seen.Record.Forged && len(seen.Record.Owed.Stopped)+len(seen.Record.Owed.Persistent) == 0 {
		r.DropChange()
	}
	if l.Record.Absent && r.Journal == "" && len(r.Next)+len(r.Host.Stopped) == 0 && hostrecord.Same(r, hostrecord.Record{Node: r.Node, UID: r.UID}) {
		return // nothing was learnt or taken yet
	}
	l.Record.Keep(ctx, r, l.Clock.Now())
}

// Learn keeps what the next changes go by.
func (l *Ledger) Learn(ctx context.Context, learnt hostrecord.Learnt) {
	r := l.Record.Now
	r.Learnt = learnt
	if l.Record.Absent && reflect.DeepEqual(learnt, hostrecord.Learnt{}) {
		return
	}
	l.Record.Keep(ctx, r, l.Clock.Now())
}
