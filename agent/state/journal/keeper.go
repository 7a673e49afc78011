package journal

import (
	"bytes"
	"cmp"
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
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Store keeps the record of this host. The record outlives the agent, the boot and the node object. *RecordFile is a Store.
type Store interface {
	// Read returns the record, or nil if there is none. The error is a *NewerError, or matches one of this package's.
	Read(ctx context.Context) (*Record, error)
	// Write returns when the disk has the record. After ErrSilent it may still write it.
	Write(ctx context.Context, r Record) error
	// Try returns why Write would not write the record, and changes nothing.
	Try(ctx context.Context, r Record) error
	// SetAside moves a record that cannot be read to another name, and returns that.
	SetAside(ctx context.Context) (string, error)
}

// Retry is the pause after which the agent repeats a failed write that no step waits for.
const Retry = 30 * time.Second

// Keeper is the host's record as this process knows it. The agent writes the record before the node, and believes the journal on the node only if the record
// has the same text for the node object with this UID. So an agent that is killed anywhere finds its annotation in Journal or in Next: any other journal on
// the node is another program's, or an old one.
type Keeper struct {
	Store   Store
	Log     *zap.Logger
	now     Record // the record, whether the disk has it or not
	saved   Record // the record on the disk, older than now after a failed write
	read    bool
	first   bool        // there was no record to read, and none has been made since
	newer   *NewerError // a newer agent's record with nothing to restore; the first write sets it aside
	failed  error       // why saved is older than now
	retryAt time.Time
}

// Now returns the record, whether the disk has it or not.
func (k *Keeper) Now() Record { return k.now }

// Forget lets the agent repeat a failed write at once.
func (k *Keeper) Forget(time.Time) { k.retryAt = time.Time{} }

// Reread makes the next Load read the record again. It is for a process that watches while the agent's process writes it.
func (k *Keeper) Reread() { k.read = false }

// Load reads the record, once.
func (k *Keeper) Load(ctx context.Context) error {
	if k.read {
		return nil
	}
	r, err := k.Store.Read(ctx)
	if errors.As(err, &k.newer) && len(k.newer.ToRestore) == 0 {
		r, err = nil, nil
	}
	if err != nil {
		return err
	}
	k.read = true
	k.first = r == nil && k.newer == nil
	if r != nil {
		k.now, k.saved = *r, *r
	}
	return nil
}

// attribute drops what no longer counts: a record belongs to the one node object that it was written for, and things to restore on the host to one boot. The
// boot is empty if it is not known.
func (k *Keeper) attribute(node *corev1.Node, boot string) {
	if k.now.Node != node.Name || k.now.UID != string(node.UID) {
		k.now = Record{Node: node.Name, UID: string(node.UID), Host: k.now.Host, Learnt: Learnt{Found: k.now.Learnt.Found}}
	}
	if k.now.Host.Boot != boot && k.now.Host.Boot != "" && boot != "" {
		k.now.Host = Host{} // a reboot has restored the host
	}
}

// Write writes the record to the disk. If that fails, Now does not change.
func (k *Keeper) Write(ctx context.Context, r Record, now time.Time) error {
	r.Version, r.ToRestore = Version, restoresOf(r)
	if k.newer != nil {
		aside, err := k.Store.SetAside(ctx)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return k.noteWriteFailure(err, now)
		}
		k.Log.Info("the record of a newer agent has nothing to restore, and is set aside", zap.String("as", aside), zap.Int("version", k.newer.Version))
		k.newer = nil
	}
	if err := k.Store.Write(ctx, r); err != nil {
		return k.noteWriteFailure(err, now)
	}
	k.now, k.saved, k.failed = r, r, nil
	return nil
}

func (k *Keeper) noteWriteFailure(err error, now time.Time) error {
	if k.failed == nil {
		k.Log.Warn("the host's record cannot be written", zap.Error(err))
	}
	k.failed, k.retryAt = err, now.Add(Retry)
	return err
}

// Keep sets Now, and tries to write it to the disk; if that fails, Flush repeats it. It is for steps that only restore, and for facts that may get lost.
func (k *Keeper) Keep(ctx context.Context, r Record, now time.Time) {
	r.Version, r.ToRestore = Version, restoresOf(r)
	k.now = r
	switch {
	case same(r, k.saved):
		k.failed = nil
		return
	case k.failed != nil && now.Before(k.retryAt):
		return
	}
	_ = k.Write(ctx, r, now) // Write has logged the error, and Flush repeats it
}

// Flush repeats a write that has failed.
func (k *Keeper) Flush(ctx context.Context, now time.Time) error {
	if k.failed == nil {
		return nil
	}
	return k.Write(ctx, k.now, now)
}

// DiskCoversRestores reports whether an agent that starts now with the record on the disk would restore everything.
func (k *Keeper) DiskCoversRestores() bool {
	journal := k.now.Journal == "" || k.now.Journal == k.saved.Journal || slices.Contains(k.saved.Next, k.now.Journal)
	return journal && k.now.UID == k.saved.UID && k.now.Host.Boot == k.saved.Host.Boot &&
		subset(k.now.Host.Stopped, k.saved.Host.Stopped) && subset(k.now.Host.Persistent, k.saved.Host.Persistent) &&
		reflect.DeepEqual(k.now.Learnt.NoReset, k.saved.Learnt.NoReset)
}

// Operands returns the labels of operands in the settings, and those that the change in the record has paused: an administrator may have
// changed the settings since.
func (k *Keeper) Operands(settings []string) []string {
	out := slices.Clone(settings)
	for _, text := range append([]string{k.now.Journal}, k.now.Next...) {
		if j, err := Parse(text); err == nil && j != nil {
			out = slices.AppendSeq(out, maps.Keys(j.Paused))
		}
	}
	return out
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

func subset(a, b []string) bool {
	return !slices.ContainsFunc(a, func(s string) bool { return !slices.Contains(b, s) })
}

// same reports whether both records have the same text on the disk.
func same(a, b Record) bool {
	textA, errA := json.Marshal(a)
	textB, errB := json.Marshal(b)
	return errA == nil && errB == nil && bytes.Equal(textA, textB)
}

// longestRestore bounds the text about one thing to restore.
const longestRestore = 1000

// restoresOf lists what the record has to restore, for agents of all versions and for users.
func restoresOf(r Record) []string {
	var out []string
	if r.Journal != "" || len(r.Next) > 0 {
		text := "a change of node " + r.Node
		all := append([]string{r.Journal}, r.Next...)
		if j, err := Parse(all[len(all)-1]); err == nil && j != nil {
			text = j.Describe()
		}
		out = append(out, sanitize.Cut(text, longestRestore))
	}
	if len(r.Host.Stopped) > 0 {
		out = append(out, sanitize.Cut("start of "+strings.Join(r.Host.Stopped, ", ")+" in boot "+r.Host.Boot, longestRestore))
	}
	if len(r.Host.Persistent) > 0 {
		out = append(out, sanitize.Cut("persistence mode of "+strings.Join(r.Host.Persistent, ", ")+" in boot "+r.Host.Boot, longestRestore))
	}
	return out
}

// mostSent bounds the journals that the agent has sent to the API server without an answer. Each write names the node's version that it was made for, so an
// old one succeeds only if no later one has.
const mostSent = 4

// sending returns the record for when the agent sends the journal to the API server.
func (k *Keeper) sending(boot string, j Journal, text string) Record {
	r := k.now
	r.Operation, r.Ends = sanitize.Cut(j.Operation, 128), false
	if text != r.Journal && !slices.Contains(r.Next, text) {
		r.Next = append(slices.Clone(r.Next[max(0, len(r.Next)-mostSent+1):]), text)
	}
	host := hostOf(j, boot)
	r.Host = Host{
		Boot: cmp.Or(host.Boot, r.Host.Boot), Stopped: union(r.Host.Stopped, host.Stopped), Persistent: union(r.Host.Persistent, host.Persistent),
	}
	return r
}

// accepted returns the record for when the API server has accepted the journal.
func (k *Keeper) accepted(boot string, j Journal, text string) Record {
	r := k.now
	r.Operation, r.Journal, r.Next, r.Ends = sanitize.Cut(j.Operation, 128), text, nil, false
	r.Host = hostOf(j, boot)
	return r
}

// refused removes from the record what sending has added: the API server has refused the journal.
func (k *Keeper) refused(before Record) {
	k.now.Journal, k.now.Next, k.now.Host = before.Journal, before.Next, before.Host
}

// hostOf returns what the agent must restore on the host by the journal.
func hostOf(j Journal, boot string) Host {
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

// Release notes in the record that the agent is about to remove the annotation: once it is gone, nothing is left to restore.
func (k *Keeper) Release(ctx context.Context, now time.Time) {
	r := k.now
	r.Ends = true
	k.Keep(ctx, r, now)
}

// NoteJournalGone notes in the record that the annotation is gone.
func (k *Keeper) NoteJournalGone(ctx context.Context, now time.Time) {
	r := k.now
	r.DropChange()
	k.Keep(ctx, r, now)
}
