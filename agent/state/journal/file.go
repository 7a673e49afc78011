package journal

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/gpuslice/gpuslice/agent/state/hostfile"
)

const (
	fileName = "record.json"
	// asideName is where the agent moves the record of a newer agent if it has nothing to restore.
	asideName = "record.newer.json"
)

// Errors of calls on the disk.
var (
	// ErrSilent means that the disk has not answered in time. It may still do a write later.
	ErrSilent = hostfile.ErrSilent
	// ErrUnsafe means that not only the agent's user could have written the file.
	ErrUnsafe = hostfile.ErrUnsafe
)

// RecordFile is the record of this host. Its methods are for one goroutine at a time; each returns at its deadline, whatever the disk does.
type RecordFile struct{ file, aside *hostfile.File }

// RecordIn returns the record below the directory, which Write creates.
func RecordIn(dir string) *RecordFile {
	return &RecordFile{file: hostfile.In(dir, fileName, MaxSize), aside: hostfile.In(dir, asideName, MaxSize)}
}

// Path returns the path of the file.
func (f *RecordFile) Path() string { return f.file.Path() }

// Read returns the record, or nil if there is none. The error is a *NewerError, matches ErrCorrupt, ErrUnsafe or ErrSilent, or is the
// file system's.
func (f *RecordFile) Read(ctx context.Context) (*Record, error) {
	data, err := f.file.Read(ctx)
	if data == nil && err == nil {
		return nil, nil
	}
	var r Record
	if err == nil {
		r, err = ParseRecord(data)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the host's record %s: %w", f.Path(), err)
	}
	return &r, nil
}

// Write replaces the record as a whole, and returns when the disk has it. The error matches ErrUnsafe or ErrSilent, or is the file
// system's. The former record is then still there; after ErrSilent it may be either.
func (f *RecordFile) Write(ctx context.Context, r Record) error {
	return f.with(ctx, r, f.file.Write)
}

// Try returns why Write would not replace the record. It changes nothing.
func (f *RecordFile) Try(ctx context.Context, r Record) error { return f.with(ctx, r, f.file.Try) }

func (f *RecordFile) with(ctx context.Context, r Record, write func(ctx context.Context, data []byte) error) error {
	r.Version = Version
	data, err := json.Marshal(r)
	if err == nil {
		_, err = ParseRecord(data) // the agent does not write a record that it could not read again
	}
	if err == nil {
		err = write(ctx, data)
	}
	if err != nil {
		return fmt.Errorf("writing the host's record %s: %w", f.Path(), err)
	}
	return nil
}

// SetAside moves a record that cannot be read to another name in the same directory, and returns that. It replaces one that was moved before.
func (f *RecordFile) SetAside(ctx context.Context) (string, error) {
	aside, err := f.file.SetAside(ctx, asideName)
	if err != nil {
		return "", fmt.Errorf("setting the host's record %s aside: %w", f.Path(), err)
	}
	return aside, nil
}

// Remove removes the record, if there is one, and one that was set aside, and reports whether there was any.
func (f *RecordFile) Remove(ctx context.Context) (bool, error) {
	removed, err := f.aside.Remove(ctx)
	if err != nil {
		return removed, err
	}
	record, err := f.file.Remove(ctx)
	return removed || record, err
}
