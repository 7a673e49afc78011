package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/host"
)

// bytes

// observeRecord reads the host's record, and tells by it whether the journal on the node is ours. What it says of the node is believed
// for the very node object that it was written for.
func (a *Agent) observeRecord(ctx context.Context, seen *state.Observed) error {
	h := a.record
	if err := h.Load(ctx); err != nil {
		return unreadableRecord(err)
	}
	if h.Now.Node != seen.Node.Name || h.Now.UID != string(seen.Node.UID) {
		h.Now = hostrecord.Record{Node: seen.Node.Name, UID: string(seen.Node.UID), Host: h.Now.Host}
	}
	if h.Now.Host.Boot != seen.Boot.ID && h.Now.Host.Boot != "" && seen.Boot.ID != "" {
		h.Now.Host = hostrecord.Host{} // a reboot has given it back
	}
	text := seen.Node.Annotations[config.AnnotationJournal]
	sent := slices.Contains(h.Now.Next, text)
	switch {
	case text == "":
	case text == h.Now.Journal || sent:
		j, err := journal.Parse(text)
		if err != nil {
			return &outcome.Stalled{Reason: config.ReasonJournalUnreadable, Journal: true, Message: err.Error() +
				"; nothing is changed. Run the agent that wrote it; or remove the annotation " + config.AnnotationJournal +
				": what is ours on the node is given back then, and its GPUs stay as they are"}
		}
		seen.Journal = j
		if sent {
			h.Now = h.Settled(seen.Boot.ID, *j, text)
		}
	default:
		seen.Record.Forged = true
		a.adoptOlder(seen, text)
	}
	seen.Record.Learnt = h.Now.Learnt
	seen.Record.Status = hostrecord.StatusWith(parseStatus(seen.Node.Annotations[config.AnnotationStatus]), h.Now.Learnt)
	return nil
}

// adoptOlder takes from the journal of an agent that kept no record, as before an upgrade, the one thing that hurts nobody if it was
// somebody else who wrote it: that units are started which the settings name.
func (a *Agent) adoptOlder(seen *state.Observed, text string) {
	j, err := journal.Parse(text)
	if !a.record.Absent || err != nil || a.record.Now.Host.Boot != "" {
		return
	}
	a.record.Now.Host.Boot = seen.Boot.ID
	for _, unit := range a.settings.Units {
		if slices.Contains(j.Stopped, unit) {
			a.record.Now.Host.Stopped = append(a.record.Now.Host.Stopped, unit)
		}
	}
}

// unreadableRecord says what people can do about a record that cannot be read.
func unreadableRecord(err error) error {
	var newer *hostrecord.NewerError
	text := err.Error() + "; nothing is begun, and nothing is given back. "
	switch {
	case errors.Is(err, hostrecord.ErrSilent):
		return &outcome.Waiting{
			Reason: config.ReasonHostRecordUnavailable, After: outcome.DriverRetry, Message: "waiting for the disk with the host's record: " + err.Error(),
			Advice: "see the host's kernel log for the disk or file system below --state-dir",
		}
	case errors.As(err, &newer):
		text += "Run that agent until it has given back what it owes; or give that back by hand and remove the file"
	case errors.Is(err, hostrecord.ErrUnsafe):
		text += "Find out who has changed it; then remove it, or make file and directory root's own, with modes 0600 and 0700"
	case errors.Is(err, hostrecord.ErrCorrupt):
		text += "Remove the file to go on without it: what is ours on the node is given back then, and units of the host that were stopped are yours to start"
	default:
		return &outcome.Waiting{
			Reason: config.ReasonHostRecordUnavailable, After: hostrecord.Retry, Message: err.Error(),
			Advice: "nothing is done before the directory below --state-dir can be read",
		}
	}
	return &outcome.Stalled{Reason: config.ReasonHostRecordUnavailable, Message: text}
}

// mostSent bounds the journals that were sent to the API server and of which no answer is known. Each is guarded by the version of the
// node that it was made for, so that an old one arrives only while nothing else has.
const mostSent = 4

// recorded writes the journal: into the host's record first, then, by the patch, to the node. Where the record cannot be written, what
// takes something from the node or the host is not begun, and what gives back is done without.
func (a *Agent) recorded(ctx context.Context, seen state.Observed, j journal.Journal, write func(node *corev1.Node, text string) ([]byte, error)) (*corev1.Node, error) {
	text, err := j.Encode()
	if err != nil {
		return nil, err
	}
	h := a.record
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
	if seen.Gives || j.Undo != nil || !j.TakesMore(seen.Journal) {
		h.Keep(ctx, r, a.clock.Now())
	} else if err := h.Write(ctx, r, a.clock.Now()); err != nil {
		return nil, a.unrecorded(seen, err)
	}
	node, err := a.nodes.Patched(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) { return write(node, text) })
	switch {
	case err == nil:
		h.Keep(ctx, h.Settled(seen.Boot.ID, j, text), a.clock.Now())
	case refused(err): // it will not arrive any more
		h.Now.Journal, h.Now.Next, h.Now.Host = before.Journal, before.Next, before.Host
	}
	return node, err
}

// refused reports whether the API server has said that it does not do it.
func refused(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err) ||
		apierrors.IsBadRequest(err) || apierrors.IsRequestEntityTooLargeError(err)
}

// unrecorded is why nothing is taken, for want of a record of it. A change that is under way is put off, and what it has taken given
// back.
func (a *Agent) unrecorded(seen state.Observed, err error) error {
	if seen.DisruptionStarted() {
		return &api.Failure{
			Wish: seen.Asks, Reason: config.ReasonHostRecordUnavailable, Later: true,
			Message: err.Error() + ": what the change would take next could not be given back after a crash; the change is put off",
		}
	}
	advice := "make room on the disk below --state-dir, and make it writable for root"
	if errors.Is(err, hostrecord.ErrSilent) {
		advice = "see the host's kernel log for the disk or file system below --state-dir, which does not answer"
	}
	return &outcome.Waiting{
		Reason: config.ReasonHostRecordUnavailable, After: hostrecord.Retry, Since: seen.Since(config.ReasonHostRecordUnavailable, a.now()),
		Message: "nothing is disturbed before the host's record can be written, by which all is given back after a crash: " + err.Error(), Advice: advice,
	}
}

// recordable reports why the record could not be written, before anything is disturbed. It is written as it is.
func (a *Agent) recordable(ctx context.Context, seen state.Observed) error {
	if err := a.record.Write(ctx, a.record.Now, a.clock.Now()); err != nil {
		return a.unrecorded(seen, err)
	}
	return nil
}

// mayTake keeps a step from taking something of the host while the disk knows less than the node: after a crash, and without the
// annotation, it would not be given back.
func (a *Agent) mayTake(ctx context.Context, seen state.Observed, step plan.Step) error {
	if !step.Traits().TakesFromHost || seen.Gives || a.record.Covers() {
		return nil
	}
	if err := a.record.Flush(ctx, a.clock.Now()); err != nil {
		return a.unrecorded(seen, err)
	}
	return nil
}

// tidyRecord strikes from the record a change of which nothing is left, and brings the disk up to date.
func (a *Agent) tidyRecord(ctx context.Context, seen state.Observed) {
	r := a.record.Now
	if seen.Journal == nil && !seen.Record.Forged && len(seen.Record.Owed.Stopped)+len(seen.Record.Owed.Persistent) == 0 {
		r.DropChange()
	}
	if a.record.Absent && r.Journal == "" && len(r.Next)+len(r.Host.Stopped) == 0 && hostrecord.Same(r, hostrecord.Record{Node: r.Node, UID: r.UID}) {
		return // nothing was learnt or taken yet
	}
	a.record.Keep(ctx, r, a.clock.Now())
}

// observeOwed looks what the host is still owed of a change that no journal is left of: after somebody has removed it, or the node object
// was deleted. What the settings do not name any more is nobody's to start, and is told.
func (a *Agent) observeOwed(ctx context.Context, seen *state.Observed) {
	owed := a.record.Now.Host
	if seen.Journal != nil || a.record.Now.Ends && !seen.Record.Forged {
		return
	}
	for _, gpu := range seen.GPUs {
		if !gpu.Persistent && !gpu.Lost && slices.Contains(owed.Persistent, string(gpu.UUID)) {
			seen.Record.Owed.Persistent = append(seen.Record.Owed.Persistent, gpu.UUID)
		}
	}
	named := a.named(seen, owed.Stopped)
	if len(named) == 0 {
		return
	}
	states, err := a.unitStates(ctx, named)
	for _, unit := range named {
		state, exists := states[unit]
		switch {
		case errors.Is(err, host.ErrNoSystemd):
		case err == nil && !exists:
			seen.Drop(unit, notStartable)
		case !runs(state):
			seen.Record.Owed.Stopped = append(seen.Record.Owed.Stopped, unit)
		}
	}
}

// named are those of the units that the settings name; the others are told, and left alone.
func (a *Agent) named(seen *state.Observed, stopped []string) []string {
	var out []string
	for _, unit := range stopped {
		if slices.Contains(a.settings.Units, unit) {
			out = append(out, unit)
		} else {
			seen.Drop(unit, "units of the settings does not name it any more")
		}
	}
	return out
}

// tellDropped says of units that were stopped for a change why they are not started, in the log once and at the end of the message.
func (a *Agent) tellDropped(seen state.Observed) string {
	text := ""
	for _, unit := range slices.Sorted(maps.Keys(seen.Record.Dropped)) {
		why := seen.Record.Dropped[unit]
		text += fmt.Sprintf("; %s of this host was stopped for a change and is not started: %s", legible.Cut(unit, 256), why)
		if a.systemd.toldDropped[unit] == why {
			continue
		}
		a.log.Warn("a unit of the host was stopped for a change and is not started", zap.String("unit", unit), zap.String("why", why))
		a.eventf(seen.Node, corev1.EventTypeWarning, config.ReasonUnitFailed, "%s of this host was stopped for a change and is not started: %s", legible.Cut(unit, 256), why)
		if slices.Contains(a.settings.Units, unit) {
			a.systemd.started[unit] = start{at: a.clock.Now(), failed: true} // which is told until it runs
		}
	}
	a.systemd.toldDropped = seen.Record.Dropped
	return text
}

// learn keeps what the next changes go by.
func (a *Agent) learn(ctx context.Context, learnt hostrecord.Learnt) {
	r := a.record.Now
	r.Learnt = learnt
	if a.record.Absent && reflect.DeepEqual(learnt, hostrecord.Learnt{}) {
		return
	}
	a.record.Keep(ctx, r, a.clock.Now())
}
