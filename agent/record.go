package agent

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/agent/nodekeys"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
)

// Records keeps the record of this host, which outlives the agent, the boot and the node object. *hostrecord.File does.
type Records interface {
	// Read gives the record, or nil where there is none. The error is a *hostrecord.NewerError, or matches one of that package's.
	Read(ctx context.Context) (*hostrecord.Record, error)
	// Write returns when the disk has the record, and after hostrecord.ErrSilent may still write it.
	Write(ctx context.Context, r hostrecord.Record) error
	// SetAside moves one away that cannot be read, and says whereto.
	SetAside(ctx context.Context) (string, error)
}

// recordRetry is the pause before a disk is asked again that has refused a write of which nothing hangs.
const recordRetry = 30 * time.Second

// hostRecord is the host's record as this process knows it. The journal on the node is ours where it says word by word what this
// record says, for the node object with this UID; the record is written before the node is told. So a process that is killed anywhere
// finds the annotation in Journal or in Next; whatever else is on the node was written by somebody else, or long ago.
type hostRecord struct {
	store   Records
	log     *zap.Logger
	now     hostrecord.Record
	saved   hostrecord.Record // as the disk has it; behind now after a write that failed
	read    bool
	absent  bool                   // there was none: the node may have been in the care of an agent that kept none
	newer   *hostrecord.NewerError // owes nothing, and is set aside before the first write
	failed  error                  // why the disk is behind
	retryAt time.Time

	persisted *api.Status // what the node was told for good at the end of a change, until it is told something else
}

// load reads the record, once.
func (h *hostRecord) load(ctx context.Context) error {
	if h.read {
		return nil
	}
	r, err := h.store.Read(ctx)
	if errors.As(err, &h.newer) && len(h.newer.Owes) == 0 {
		r, err = nil, nil
	}
	if err != nil {
		return err
	}
	h.read, h.absent = true, r == nil
	if r != nil {
		h.now, h.saved = *r, *r
	}
	return nil
}

// write has the disk take the record. Where that fails, what is remembered stays as it was.
func (h *hostRecord) write(ctx context.Context, r hostrecord.Record, now time.Time) error {
	r.Version, r.Owes = hostrecord.Version, owes(r)
	if h.newer != nil {
		aside, err := h.store.SetAside(ctx)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return h.fail(err, now)
		}
		h.log.Info("the record of a newer agent owes nothing, and is set aside", zap.String("as", aside), zap.Int("version", h.newer.Version))
		h.newer = nil
	}
	if err := h.store.Write(ctx, r); err != nil {
		return h.fail(err, now)
	}
	h.now, h.saved, h.failed, h.absent = r, r, nil, false
	return nil
}

func (h *hostRecord) fail(err error, now time.Time) error {
	if h.failed == nil {
		h.log.Warn("the host's record cannot be written", zap.Error(err))
	}
	h.failed, h.retryAt = err, now.Add(recordRetry)
	return err
}

// keep remembers the record, and has the disk take it if it does. It is for what gives back, and for what can be lost.
func (h *hostRecord) keep(ctx context.Context, r hostrecord.Record, now time.Time) {
	r.Version, r.Owes = hostrecord.Version, owes(r)
	h.now = r
	switch {
	case same(r, h.saved):
		h.failed = nil
		return
	case h.failed != nil && now.Before(h.retryAt):
		return
	}
	_ = h.write(ctx, r, now) // it is logged, and tried again
}

// flush brings the disk up to date.
func (h *hostRecord) flush(ctx context.Context, now time.Time) error {
	if h.failed == nil {
		return nil
	}
	return h.write(ctx, h.now, now)
}

// covers reports whether a process that has only the disk to go by would give all back that is owed now.
func (h *hostRecord) covers() bool {
	journal := h.now.Journal == "" || h.now.Journal == h.saved.Journal || slices.Contains(h.saved.Next, h.now.Journal)
	return journal && h.now.UID == h.saved.UID && h.now.Host.Boot == h.saved.Host.Boot &&
		subset(h.now.Host.Stopped, h.saved.Host.Stopped) && subset(h.now.Host.Persistent, h.saved.Host.Persistent) &&
		reflect.DeepEqual(h.now.Learnt.NoReset, h.saved.Learnt.NoReset)
}

// operands are those of the settings, and those that the record's change has paused: the settings may have been others then.
func (h *hostRecord) operands(settings []string) []string {
	out := slices.Clone(settings)
	for _, text := range append([]string{h.now.Journal}, h.now.Next...) {
		if j, err := journal.Parse(text); err == nil && j != nil {
			out = slices.AppendSeq(out, maps.Keys(j.Paused))
		}
	}
	return out
}

func subset(a, b []string) bool {
	return !slices.ContainsFunc(a, func(s string) bool { return !slices.Contains(b, s) })
}

// same reports whether the disk would have the same for both.
func same(a, b hostrecord.Record) bool {
	textA, errA := json.Marshal(a)
	textB, errB := json.Marshal(b)
	return errA == nil && errB == nil && bytes.Equal(textA, textB)
}

// owes says what is owed by the record, for agents of all versions and for people.
func owes(r hostrecord.Record) []string {
	var out []string
	if r.Journal != "" || len(r.Next) > 0 {
		text := "a change of node " + r.Node
		all := append([]string{r.Journal}, r.Next...)
		if j, err := journal.Parse(all[len(all)-1]); err == nil && j != nil {
			text = j.Describe()
		}
		out = append(out, legible.Cut(text, longestText))
	}
	if len(r.Host.Stopped) > 0 {
		out = append(out, legible.Cut("start of "+strings.Join(r.Host.Stopped, ", ")+" in boot "+r.Host.Boot, longestText))
	}
	if len(r.Host.Persistent) > 0 {
		out = append(out, legible.Cut("persistence mode of "+strings.Join(r.Host.Persistent, ", ")+" in boot "+r.Host.Boot, longestText))
	}
	return out
}

// observeRecord reads the host's record, and tells by it whether the journal on the node is ours. What it says of the node is believed
// for the very node object that it was written for.
func (a *Agent) observeRecord(ctx context.Context, seen *state.Observed) error {
	h := a.record
	if err := h.load(ctx); err != nil {
		return unreadableRecord(err)
	}
	if h.now.Node != seen.Node.Name || h.now.UID != string(seen.Node.UID) {
		h.now = hostrecord.Record{Node: seen.Node.Name, UID: string(seen.Node.UID), Host: h.now.Host}
	}
	if h.now.Host.Boot != seen.Boot.ID && h.now.Host.Boot != "" && seen.Boot.ID != "" {
		h.now.Host = hostrecord.Host{} // a reboot has given it back
	}
	text := seen.Node.Annotations[config.AnnotationJournal]
	sent := slices.Contains(h.now.Next, text)
	switch {
	case text == "":
	case text == h.now.Journal || sent:
		j, err := journal.Parse(text)
		if err != nil {
			return &outcome.Stalled{Reason: config.ReasonJournalUnreadable, Journal: true, Message: err.Error() +
				"; nothing is changed. Run the agent that wrote it; or remove the annotation " + config.AnnotationJournal +
				": what is ours on the node is given back then, and its GPUs stay as they are"}
		}
		seen.Journal = j
		if sent {
			h.now = h.settled(seen.Boot.ID, *j, text)
		}
	default:
		seen.Record.Forged = true
		a.adoptOlder(seen, text)
	}
	seen.Record.Learnt = h.now.Learnt
	seen.Record.Status = learntStatus(parseStatus(seen.Node.Annotations[config.AnnotationStatus]), h.now.Learnt)
	return nil
}

// adoptOlder takes from the journal of an agent that kept no record, as before an upgrade, the one thing that hurts nobody if it was
// somebody else who wrote it: that units are started which the settings name.
func (a *Agent) adoptOlder(seen *state.Observed, text string) {
	j, err := journal.Parse(text)
	if !a.record.absent || err != nil || a.record.now.Host.Boot != "" {
		return
	}
	a.record.now.Host.Boot = seen.Boot.ID
	for _, unit := range a.settings.Units {
		if slices.Contains(j.Stopped, unit) {
			a.record.now.Host.Stopped = append(a.record.now.Host.Stopped, unit)
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
			Reason: config.ReasonHostRecordUnavailable, After: recordRetry, Message: err.Error(),
			Advice: "nothing is done before the directory below --state-dir can be read",
		}
	}
	return &outcome.Stalled{Reason: config.ReasonHostRecordUnavailable, Message: text}
}

// settled is the record once the API server has taken the journal.
func (h *hostRecord) settled(boot string, j journal.Journal, text string) hostrecord.Record {
	r := h.now
	r.Operation, r.Journal, r.Next, r.Ends = legible.Cut(j.Operation, 128), text, nil, false
	r.Host = owedBy(j, boot)
	return r
}

// owedBy is what the journal says that the host is owed.
func owedBy(j journal.Journal, boot string) hostrecord.Host {
	host := hostrecord.Host{Stopped: slices.Clone(j.Stopped)}
	for _, c := range j.Previous {
		if c.Persistent {
			host.Persistent = append(host.Persistent, string(c.GPU))
		}
	}
	for _, gpu := range j.Persistent {
		if !slices.Contains(host.Persistent, string(gpu)) {
			host.Persistent = append(host.Persistent, string(gpu))
		}
	}
	if len(host.Stopped)+len(host.Persistent) > 0 {
		host.Boot = boot
	}
	return host
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
	before := h.now
	r := h.now
	r.Operation, r.Ends = legible.Cut(j.Operation, 128), false
	if text != r.Journal && !slices.Contains(r.Next, text) {
		r.Next = append(slices.Clone(r.Next[max(0, len(r.Next)-mostSent+1):]), text)
	}
	host := owedBy(j, seen.Boot.ID)
	r.Host = hostrecord.Host{
		Boot: cmp.Or(host.Boot, r.Host.Boot), Stopped: union(r.Host.Stopped, host.Stopped), Persistent: union(r.Host.Persistent, host.Persistent),
	}
	if seen.Gives || j.Undo != nil || !j.TakesMore(seen.Journal) {
		h.keep(ctx, r, a.clock.Now())
	} else if err := h.write(ctx, r, a.clock.Now()); err != nil {
		return nil, a.unrecorded(seen, err)
	}
	node, err := a.nodes.Patched(ctx, seen.Node, func(node *corev1.Node) ([]byte, error) { return write(node, text) })
	switch {
	case err == nil:
		h.keep(ctx, h.settled(seen.Boot.ID, j, text), a.clock.Now())
	case refused(err): // it will not arrive any more
		h.now.Journal, h.now.Next, h.now.Host = before.Journal, before.Next, before.Host
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
		Reason: config.ReasonHostRecordUnavailable, After: recordRetry, Since: seen.Since(config.ReasonHostRecordUnavailable, a.now()),
		Message: "nothing is disturbed before the host's record can be written, by which all is given back after a crash: " + err.Error(), Advice: advice,
	}
}

// recordable reports why the record could not be written, before anything is disturbed. It is written as it is.
func (a *Agent) recordable(ctx context.Context, seen state.Observed) error {
	if err := a.record.write(ctx, a.record.now, a.clock.Now()); err != nil {
		return a.unrecorded(seen, err)
	}
	return nil
}

// mayTake keeps a step from taking something of the host while the disk knows less than the node: after a crash, and without the
// annotation, it would not be given back.
func (a *Agent) mayTake(ctx context.Context, seen state.Observed, step plan.Step) error {
	if !step.Traits().TakesFromHost || seen.Gives || a.record.covers() {
		return nil
	}
	if err := a.record.flush(ctx, a.clock.Now()); err != nil {
		return a.unrecorded(seen, err)
	}
	return nil
}

// tidyRecord strikes from the record a change of which nothing is left, and brings the disk up to date.
func (a *Agent) tidyRecord(ctx context.Context, seen state.Observed) {
	r := a.record.now
	if seen.Journal == nil && !seen.Record.Forged && len(seen.Record.Owed.Stopped)+len(seen.Record.Owed.Persistent) == 0 {
		r.Operation, r.Journal, r.Next, r.Ends, r.Host = "", "", nil, false, hostrecord.Host{}
	}
	if a.record.absent && r.Journal == "" && len(r.Next)+len(r.Host.Stopped) == 0 && same(r, hostrecord.Record{Node: r.Node, UID: r.UID}) {
		return // nothing was learnt or taken yet
	}
	a.record.keep(ctx, r, a.clock.Now())
}

// observeOwed looks what the host is still owed of a change that no journal is left of: after somebody has removed it, or the node object
// was deleted. What the settings do not name any more is nobody's to start, and is told.
func (a *Agent) observeOwed(ctx context.Context, seen *state.Observed) {
	owed := a.record.now.Host
	if seen.Journal != nil || a.record.now.Ends && !seen.Record.Forged {
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

// release tells the record that the annotation is about to go, so that its absence means nothing is owed.
func (h *hostRecord) release(ctx context.Context, now time.Time) {
	r := h.now
	r.Ends = true
	h.keep(ctx, r, now)
}

// over tells it that the annotation is gone.
func (h *hostRecord) over(ctx context.Context, now time.Time) {
	r := h.now
	r.Operation, r.Journal, r.Next, r.Ends, r.Host = "", "", nil, false, hostrecord.Host{}
	h.keep(ctx, r, now)
}

// learn keeps what the next changes go by.
func (a *Agent) learn(ctx context.Context, learnt hostrecord.Learnt) {
	r := a.record.now
	r.Learnt = learnt
	if a.record.absent && reflect.DeepEqual(learnt, hostrecord.Learnt{}) {
		return
	}
	a.record.keep(ctx, r, a.clock.Now())
}

// learntOf is what of the status the next changes go by, as the record takes it.
func learntOf(s api.Status, published nodekeys.Keys) hostrecord.Learnt {
	out := hostrecord.Learnt{Proven: s.Proven, Cut: legible.Cut(s.Cut, 128)}
	if n := s.NoReset; n != nil {
		out.NoReset = &hostrecord.NoReset{Boot: legible.Cut(n.Boot, 128)}
		for _, gpu := range n.GPUs {
			out.NoReset.GPUs = append(out.NoReset.GPUs, string(gpu))
		}
	}
	if s.Asked != nil {
		out.Asked = &hostrecord.Asked{Wish: s.Asked.Wish, Since: s.Asked.Since}
	}
	const year = 365 * 24 * 3600
	for _, t := range s.Took {
		out.Took = append(out.Took, hostrecord.Took{Whole: min(max(t.Whole, 0), year), Rest: min(max(t.Rest, 0), year)})
	}
	if f := s.Failed; f != nil {
		out.Failed = &hostrecord.Failed{Wish: f.Wish, Reason: string(f.Reason), Message: legible.Cut(f.Message, 4<<10)}
	}
	out.Published.Labels = published.Labels
	for _, t := range published.Taints {
		out.Published.Taints = append(out.Published.Taints, hostrecord.Taint{Key: t.Key, Value: t.Value, Effect: string(t.Effect)})
	}
	return out
}

// learntStatus is the status with what the host's record says has been learnt, whatever the annotation says of it.
func learntStatus(s api.Status, l hostrecord.Learnt) api.Status {
	s.Failed, s.NoReset, s.Asked, s.Took = nil, nil, nil, nil
	s.Proven, s.Cut = l.Proven, l.Cut
	if n := l.NoReset; n != nil {
		s.NoReset = &api.NoReset{Boot: n.Boot}
		for _, gpu := range n.GPUs {
			s.NoReset.GPUs = append(s.NoReset.GPUs, nvml.UUID(gpu))
		}
	}
	if l.Asked != nil {
		s.Asked = &api.AskedFor{Wish: l.Asked.Wish, Since: l.Asked.Since}
	}
	for _, t := range l.Took {
		s.Took = append(s.Took, api.Took{Whole: t.Whole, Rest: t.Rest})
	}
	if f := l.Failed; f != nil {
		s.Failed = &api.Failure{Wish: f.Wish, Reason: config.Reason(f.Reason), Message: f.Message}
	}
	return s
}

// publishedBy are the labels and taints of a profile that the record says are ours.
func publishedBy(l hostrecord.Learnt) nodekeys.Keys {
	out := nodekeys.Keys{Labels: l.Published.Labels}
	for _, t := range l.Published.Taints {
		out.Taints = append(out.Taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: corev1.TaintEffect(t.Effect)})
	}
	return out
}
