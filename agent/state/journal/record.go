package journal

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	strictjson "sigs.k8s.io/json"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Version is the version of the format that this package writes. Every version has the fields version and toRestore, with the same meaning: an agent of any
// version can read whether a record of any other has something to restore.
const Version = 1

// Bounds of a record, besides maxJournal for each journal in it.
const (
	MaxSize    = 2 << 20 // bytes of the file
	maxNext    = 4       // journals whose write to the node may still arrive
	maxNames   = 256     // units, GPUs, labels, taints, sentences
	maxName    = 512     // bytes of a name
	maxText    = 16 << 10
	maxTook    = 16
	maxSeconds = 366 * 24 * 3600
)

// Record is what the file holds.
type Record struct {
	Version   int      `json:"version"`
	ToRestore []string `json:"toRestore,omitempty"` // what the agent must restore, in sentences for users; empty if nothing
	Node      string   `json:"node,omitempty"`      // name of the node object that the journal was written to
	UID       string   `json:"uid,omitempty"`       // and its UID: a node that was deleted and registered again is another one
	Operation string   `json:"operation,omitempty"` // the change that the journal is of
	Journal   string   `json:"journal,omitempty"`   // the annotation, word by word, as the API server has accepted it
	Next      []string `json:"next,omitempty"`      // annotations that the agent has sent since, without an answer from the API server
	Ends      bool     `json:"ends,omitempty"`      // the agent is about to remove the annotation
	Host      Host     `json:"host,omitzero"`
	Learnt    Learnt   `json:"learnt,omitzero"`
}

// DropChange removes a change from the record once all is restored.
func (r *Record) DropChange() {
	r.Operation, r.Journal, r.Next, r.Ends, r.Host, r.Learnt.Granted = "", "", nil, false, Host{}, nil
}

// Host is what the agent must restore on the host. It holds for one boot: a reboot starts units, and ends persistence mode.
type Host struct {
	Boot       string   `json:"boot,omitempty"`
	Stopped    []string `json:"stopped,omitempty"`    // units of systemd that were running, in the order in which they are stopped
	Persistent []string `json:"persistent,omitempty"` // UUIDs of GPUs that were in persistence mode
}

// ErrCorrupt means that no agent has written such a file.
var ErrCorrupt = errors.New("it is not a record that an agent has written")

// NewerError is a record in a newer version than this package's.
type NewerError struct {
	Version   int
	ToRestore []string // what the newer agent must restore, empty if the record can be set aside
}

func (e *NewerError) Error() string {
	text := fmt.Sprintf("a newer agent wrote it, in version %d, and this agent knows %d", e.Version, Version)
	if len(e.ToRestore) > 0 {
		text += "; it has to restore: " + strings.Join(e.ToRestore, "; ")
	}
	return text
}

// ParseRecord reads a record, and refuses unknown fields. The error is a *NewerError or matches ErrCorrupt.
func ParseRecord(data []byte) (Record, error) {
	if len(data) > MaxSize {
		return Record{}, fmt.Errorf("%w: it is longer than %d bytes", ErrCorrupt, MaxSize)
	}
	var head struct {
		Version   int      `json:"version"`
		ToRestore []string `json:"toRestore"`
	}
	if err := strictjson.UnmarshalCaseSensitivePreserveInts(data, &head); err != nil {
		return Record{}, fmt.Errorf("%w: %s", ErrCorrupt, sanitize.Cut(err.Error(), 256))
	}
	switch {
	case head.Version < 1:
		return Record{}, fmt.Errorf("%w: its version is %d", ErrCorrupt, head.Version)
	case head.Version > Version:
		return Record{}, &NewerError{Version: head.Version, ToRestore: summary(head.ToRestore)}
	}
	var r Record
	strict, err := strictjson.UnmarshalStrict(data, &r)
	if err := errors.Join(append(strict, err)...); err != nil {
		return Record{}, fmt.Errorf("%w: %s", ErrCorrupt, sanitize.Cut(err.Error(), 256))
	}
	if err := r.check(); err != nil {
		return Record{}, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return r, nil
}

// summary shortens a newer record's list of things to restore to fit into a message.
func summary(restores []string) []string {
	const most, longest = 8, 256
	var out []string
	for _, text := range restores[:min(len(restores), most)] {
		out = append(out, sanitize.Cut(text, longest))
	}
	if more := len(restores) - most; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return out
}

// check holds the record to its bounds: another program may have written it.
func (r *Record) check() error {
	err := errors.Join(
		names("toRestore", r.ToRestore, maxText), name("node", r.Node), name("uid", r.UID), name("operation", r.Operation),
		name("host.boot", r.Host.Boot), names("host.stopped", r.Host.Stopped, maxName), names("host.persistent", r.Host.Persistent, maxName),
		r.Learnt.check(),
	)
	if len(r.Next) > maxNext {
		err = errors.Join(err, fmt.Errorf("next has %d entries, at most %d", len(r.Next), maxNext))
	}
	for _, journal := range append(slices.Clone(r.Next), r.Journal) {
		if len(journal) > maxJournal || !utf8.ValidString(journal) {
			err = errors.Join(err, fmt.Errorf("a journal of %d bytes: at most %d, in UTF-8", len(journal), maxJournal))
		}
	}
	return err
}

func name(field, value string) error { return checkText(field, value, maxName) }

func names[S ~string](field string, values []S, longest int) error {
	if len(values) > maxNames {
		return fmt.Errorf("%s has %d entries, at most %d", field, len(values), maxNames)
	}
	var err error
	for _, value := range values {
		err = errors.Join(err, checkText(field, string(value), longest))
	}
	return err
}

func checkText(field, value string, longest int) error {
	if len(value) > longest {
		return fmt.Errorf("%s has %d bytes, at most %d", field, len(value), longest)
	}
	if sanitize.Text(value) != value {
		return fmt.Errorf("%s is not printable", field)
	}
	return nil
}
