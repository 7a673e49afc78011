package hostrecord

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/legible"
)

// Store keeps the record of this host, which outlives the agent, the boot and the node object. *File does.
type Store interface {
	// Read gives the record, or nil where there is none. The error is a *NewerError, or matches one of this package's.
	Read(ctx context.Context) (*Record, error)
	// Write returns when the disk has the record, and after ErrSilent may still write it.
	Write(ctx context.Context, r Record) error
	// SetAside moves one away that cannot be read, and says whereto.
	SetAside(ctx context.Context) (string, error)
}

// Retry is the pause before a disk is asked again that has refused a write of which nothing hangs.
const Retry = 30 * time.Second

// Keeper is the host's record as this process knows it. The journal on the node is ours where it says word by word what this
// record says, for the node object with this UID; the record is written before the node is told. So a process that is killed anywhere
// finds the annotation in Journal or in Next; whatever else is on the node was written by somebody else, or long ago.
type Keeper struct {
	Store   Store
	Log     *zap.Logger
	Now     Record // what the host owes and has learnt, whether the disk has it or not
	saved   Record // as the disk has it; behind now after a write that failed
	read    bool
	Absent  bool        // there was none: the node may have been in the care of an agent that kept none
	newer   *NewerError // owes nothing, and is set aside before the first write
	failed  error       // why the disk is behind
	retryAt time.Time
}

// Reread has the next Load read the record again: for who looks while another process writes it.
func (h *Keeper) Reread() { h.read = false }

// Load reads the record, once.
func (h *Keeper) Load(ctx context.Context) error {
	if h.read {
		return nil
	}
	r, err := h.Store.Read(ctx)
	if errors.As(err, &h.newer) && len(h.newer.Owes) == 0 {
		r, err = nil, nil
	}
	if err != nil {
		return err
	}
	h.read, h.Absent = true, r == nil
	if r != nil {
		h.Now, h.saved = *r, *r
	}
	return nil
}

// Write has the disk take the record. Where that fails, what is remembered stays as it was.
func (h *Keeper) Write(ctx context.Context, r Record, now time.Time) error {
	r.Version, r.Owes = Version, debtsOf(r)
	if h.newer != nil {
		aside, err := h.Store.SetAside(ctx)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return h.noteWriteFailure(err, now)
		}
		h.Log.Info("the record of a newer agent owes nothing, and is set aside", zap.String("as", aside), zap.Int("version", h.newer.Version))
		h.newer = nil
	}
	if err := h.Store.Write(ctx, r); err != nil {
		return h.noteWriteFailure(err, now)
	}
	h.Now, h.saved, h.failed, h.Absent = r, r, nil, false
	return nil
}

func (h *Keeper) noteWriteFailure(err error, now time.Time) error {
	if h.failed == nil {
		h.Log.Warn("the host's record cannot be written", zap.Error(err))
	}
	h.failed, h.retryAt = err, now.Add(Retry)
	return err
}

// Keep remembers the record, and has the disk take it if it does. It is for what gives back, and for what can be lost.
func (h *Keeper) Keep(ctx context.Context, r Record, now time.Time) {
	r.Version, r.Owes = Version, debtsOf(r)
	h.Now = r
	switch {
	case Same(r, h.saved):
		h.failed = nil
		return
	case h.failed != nil && now.Before(h.retryAt):
		return
	}
	_ = h.Write(ctx, r, now) // it is logged, and tried again
}

// Flush brings the disk up to date.
func (h *Keeper) Flush(ctx context.Context, now time.Time) error {
	if h.failed == nil {
		return nil
	}
	return h.Write(ctx, h.Now, now)
}

// DiskCoversDebts reports whether a process that has only the disk to go by would give all back that is owed now.
func (h *Keeper) DiskCoversDebts() bool {
	journal := h.Now.Journal == "" || h.Now.Journal == h.saved.Journal || slices.Contains(h.saved.Next, h.Now.Journal)
	return journal && h.Now.UID == h.saved.UID && h.Now.Host.Boot == h.saved.Host.Boot &&
		subset(h.Now.Host.Stopped, h.saved.Host.Stopped) && subset(h.Now.Host.Persistent, h.saved.Host.Persistent) &&
		reflect.DeepEqual(h.Now.Learnt.NoReset, h.saved.Learnt.NoReset)
}

// Operands are those of the settings, and those that the record's change has paused: the settings may have been others then.
func (h *Keeper) Operands(settings []string) []string {
	out := slices.Clone(settings)
	for _, text := range append([]string{h.Now.Journal}, h.Now.Next...) {
		if j, err := journal.Parse(text); err == nil && j != nil {
			out = slices.AppendSeq(out, maps.Keys(j.Paused))
		}
	}
	return out
}

func subset(a, b []string) bool {
	return !slices.ContainsFunc(a, func(s string) bool { return !slices.Contains(b, s) })
}

// Same reports whether the disk would have the same for both.
func Same(a, b Record) bool {
	textA, errA := json.Marshal(a)
	textB, errB := json.Marshal(b)
	return errA == nil && errB == nil && bytes.Equal(textA, textB)
}

// longestOwed bounds what is said of one thing that is owed.
const longestOwed = 1000

// debtsOf says what is owed by the record, for agents of all versions and for people.
func debtsOf(r Record) []string {
	var out []string
	if r.Journal != "" || len(r.Next) > 0 {
		text := "a change of node " + r.Node
		all := append([]string{r.Journal}, r.Next...)
		if j, err := journal.Parse(all[len(all)-1]); err == nil && j != nil {
			text = j.Describe()
		}
		out = append(out, legible.Cut(text, longestOwed))
	}
	if len(r.Host.Stopped) > 0 {
		out = append(out, legible.Cut("start of "+strings.Join(r.Host.Stopped, ", ")+" in boot "+r.Host.Boot, longestOwed))
	}
	if len(r.Host.Persistent) > 0 {
		out = append(out, legible.Cut("persistence mode of "+strings.Join(r.Host.Persistent, ", ")+" in boot "+r.Host.Boot, longestOwed))
	}
	return out
}

// AfterJournalWrite is the record once the API server has taken the journal.
func (h *Keeper) AfterJournalWrite(boot string, j journal.Journal, text string) Record {
	r := h.Now
	r.Operation, r.Journal, r.Next, r.Ends = legible.Cut(j.Operation, 128), text, nil, false
	r.Host = OwedBy(j, boot)
	return r
}

// OwedBy is what the journal says that the host is owed.
func OwedBy(j journal.Journal, boot string) Host {
	host := Host{Stopped: slices.Clone(j.Stopped)}
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

// Release tells the record that the annotation is about to go, so that its absence means nothing is owed.
func (h *Keeper) Release(ctx context.Context, now time.Time) {
	r := h.Now
	r.Ends = true
	h.Keep(ctx, r, now)
}

// NoteJournalGone tells it that the annotation is gone.
func (h *Keeper) NoteJournalGone(ctx context.Context, now time.Time) {
	r := h.Now
	r.DropChange()
	h.Keep(ctx, r, now)
}
