// Package cut measures what the calls take that cut a GPU, and brings the GPU back to what it was before the first of them. It knows no cluster.
package cut

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/agent/state/hostfile"
	"github.com/gpuslice/gpuslice/nvml"
)

// Found is what GPUs were before the first change.
type Found struct {
	Format int
	Began  time.Time
	GPUs   []nvml.GPU
}

const (
	format  = 1
	longest = 4 << 20 // bytes of the file; 16 GPUs with all that the driver says of them have a tenth of it
	file    = "found.json"
)

// Store keeps Found on the disk of this machine until it is restored. One process at a time has it.
type Store struct {
	file *hostfile.File
	dir  *os.File // locked while this process runs
}

// ErrTaken means that another process has the Store.
var ErrTaken = errors.New("another run cuts GPUs of this machine: wait until it ends")

// Open opens the store in a directory, and makes that. No other user may be able to write to it.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making the directory for what the GPUs were: %w", err)
	}
	if err := syncDir(filepath.Dir(dir)); err != nil { // which has the new directory
		return nil, fmt.Errorf("making the directory for what the GPUs were: %w", err)
	}
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("opening the directory for what the GPUs were: %w", err)
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrTaken
		}
		return nil, errors.Join(fmt.Errorf("locking %s: %w", dir, err), d.Close())
	}
	return &Store{file: hostfile.In(dir, file, longest), dir: d}, nil
}

// syncDir returns when the disk has the names in a directory.
func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Path is the file.
func (s *Store) Path() string { return s.file.Path() }

// Close lets another process have the store. While the disk may still do a write of this process, no other has it until this one ends: the write could
// replace what the other has found.
func (s *Store) Close(ctx context.Context) error {
	if _, err := s.file.Read(context.WithoutCancel(ctx)); errors.Is(err, hostfile.ErrSilent) {
		return nil
	}
	return s.dir.Close()
}

// Save writes what the GPUs are, and returns when the disk has it. The end of ctx does not leave half of it.
func (s *Store) Save(ctx context.Context, f Found) error {
	f.Format = format
	text, err := json.MarshalIndent(f, "", "  ")
	if err == nil {
		err = s.file.Write(context.WithoutCancel(ctx), text)
	}
	if err != nil {
		return fmt.Errorf("writing what the GPUs are to %s, without which none is changed: %w", s.Path(), err)
	}
	return nil
}

// Load reads what an earlier run has found and not restored; nil if there is nothing.
func (s *Store) Load(ctx context.Context) (*Found, error) { return load(ctx, s.file) }

// Left reads what a run has found and not restored, in the directory of its Store: it still runs, or has been killed. It is nil if there is nothing.
func Left(ctx context.Context, dir string) (*Found, error) {
	return load(ctx, hostfile.In(dir, file, longest))
}

func load(ctx context.Context, from *hostfile.File) (*Found, error) {
	text, err := from.Read(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading what the GPUs were from %s: %w", from.Path(), err)
	}
	if text == nil {
		return nil, nil
	}
	var f Found
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, fmt.Errorf("reading what the GPUs were from %s: %w: bring them back by hand, and remove the file", from.Path(), err)
	}
	if f.Format != format {
		return nil, fmt.Errorf("%s has format %d, and this program knows %d: restore by the version that wrote it", from.Path(), f.Format, format)
	}
	return &f, nil
}

// patience bounds how long Restore tries a call that the GPU's last users, or an earlier call, still keep from being done. retry is the pause in between.
const (
	patience = time.Minute
	callTime = time.Minute // of one call: a cold GPU takes seconds
	retry    = 250 * time.Millisecond
)

// Restore brings the GPUs back to what was found, from wherever they are now, and then removes the file. It returns the MIG devices that have
// another UUID than before. ctx ends it early; the file stays then.
func (s *Store) Restore(ctx context.Context, d nvml.Driver, f Found) (renamed []string, err error) {
	var errs []error
	for _, was := range f.GPUs {
		r := gpu{driver: d, uuid: was.UUID, index: was.Index}
		now, err := r.restore(ctx, was)
		if err != nil {
			errs = append(errs, fmt.Errorf("restoring GPU %d: %w", was.Index, err))
			continue
		}
		renamed = append(renamed, renames(was, now)...)
	}
	if err := errors.Join(errs...); err != nil {
		const again = "run make hardware CUT=restore (run.sh --restore)"
		advice := "end what uses the GPU, then " + again
		if !slices.ContainsFunc(errs, func(err error) bool { return !errors.Is(err, errAbsent) }) {
			advice = "if the GPU comes back, " + again + "; if it is in another machine, or has been replaced, remove the file"
		}
		return nil, fmt.Errorf("%w; what it was is in %s: %s", err, s.Path(), advice)
	}
	_, err = s.file.Remove(ctx)
	return renamed, err
}

// gpu is one GPU that is changed.
type gpu struct {
	driver nvml.Driver
	uuid   nvml.UUID
	index  int
}

var errAbsent = errors.New("is not on this machine")

// look reads the GPU.
func (g gpu) look(ctx context.Context) (now nvml.GPU, err error) {
	err = g.patiently(ctx, func(ctx context.Context) error {
		all, err := g.driver.Snapshot(ctx)
		if err != nil {
			return err
		}
		at := slices.IndexFunc(all, func(o nvml.GPU) bool { return o.UUID == g.uuid })
		if at < 0 {
			return fmt.Errorf("%s %w", g.uuid, errAbsent)
		}
		now = all[at]
		if now.Lost {
			return fmt.Errorf("%s: %w: reset it, or reboot", g.uuid, nvml.ErrLost)
		}
		return nil
	})
	return now, err
}

// patiently repeats a call while the GPU is in use, or the driver is still busy with an earlier call.
func (g gpu) patiently(ctx context.Context, call func(context.Context) error) error {
	for ends := time.Now().Add(patience); ; {
		err := func() error {
			ctx, cancel := context.WithTimeout(ctx, callTime)
			defer cancel()
			return call(ctx)
		}()
		if !errors.Is(err, nvml.ErrInUse) && !errors.Is(err, nvml.ErrUnresponsive) {
			return err
		}
		if time.Now().After(ends) {
			return fmt.Errorf("%w: tried for %s", err, patience)
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(retry):
		}
	}
}

// restore makes the GPU what it was, and returns it as it then is. It begins from whatever it finds, so that it can be repeated.
func (g gpu) restore(ctx context.Context, was nvml.GPU) (nvml.GPU, error) {
	now, err := g.look(ctx)
	if err != nil {
		return now, err
	}
	if now, err = g.only(ctx, now, was); err != nil {
		return now, err
	}
	if now.Enabled != was.Enabled || now.Pending != was.Enabled {
		now, err = g.mode(ctx, was.Enabled, func(string) {})
		if errors.Is(err, errReboot) {
			err = fmt.Errorf("%w: reboot the machine", err)
		}
		if err != nil {
			return now, err
		}
	}
	if err := g.instances(ctx, now, was); err != nil {
		return now, err
	}
	if err := g.settings(ctx, was); err != nil {
		return now, err
	}
	if now, err = g.look(ctx); err != nil {
		return now, err
	}
	if before, after := Shape(was), Shape(now); before != after {
		return now, fmt.Errorf("it was %s, and is %s", before, after)
	}
	return now, nil
}

// only destroys the instances that the GPU did not have.
func (g gpu) only(ctx context.Context, now, was nvml.GPU) (nvml.GPU, error) {
	for _, i := range now.Instances {
		if was.Enabled && slices.ContainsFunc(was.Instances, func(o nvml.Instance) bool { return same(o, i) }) {
			continue
		}
		err := g.patiently(ctx, func(ctx context.Context) error { return g.driver.Destroy(ctx, g.uuid, i.Placed) })
		if err != nil {
			return now, err
		}
	}
	return g.look(ctx)
}

// same reports whether two instances have one place and equal parts.
func same(a, b nvml.Instance) bool { return a.Placed == b.Placed && slices.Equal(parts(a), parts(b)) }

func parts(i nvml.Instance) []nvml.Part {
	var out []nvml.Part
	for _, d := range i.Devices {
		out = append(out, d.Part)
	}
	slices.SortFunc(out, nvml.ComparePart)
	return out
}

// instances makes those that are missing, in the order of their ids: the driver may give the same ids again, and with them the UUIDs.
func (g gpu) instances(ctx context.Context, now, was nvml.GPU) error {
	missing := slices.DeleteFunc(slices.Clone(was.Instances), func(i nvml.Instance) bool {
		return slices.ContainsFunc(now.Instances, func(o nvml.Instance) bool { return same(o, i) })
	})
	slices.SortFunc(missing, func(a, b nvml.Instance) int { return cmp.Compare(a.ID, b.ID) })
	for _, i := range missing {
		if err := g.patiently(ctx, func(ctx context.Context) error { return g.driver.Create(ctx, g.uuid, i.Placed) }); err != nil {
			return err
		}
		if err := g.divide(ctx, i); err != nil {
			return err
		}
	}
	return nil
}

// divide moves the parts of a new instance to the places that they had.
func (g gpu) divide(ctx context.Context, was nvml.Instance) error {
	now, err := g.look(ctx)
	if err != nil {
		return err
	}
	want := parts(was)
	for _, i := range now.Instances {
		if i.Profile != was.Profile || i.Span != was.Span {
			continue
		}
		for _, p := range parts(i) {
			if !slices.Contains(want, p) {
				if err := g.patiently(ctx, func(ctx context.Context) error { return g.driver.DestroyPart(ctx, g.uuid, i.Placed, p) }); err != nil {
					return err
				}
			}
		}
		for _, p := range want {
			if !slices.Contains(parts(i), p) {
				if err := g.patiently(ctx, func(ctx context.Context) error { return g.driver.CreatePart(ctx, g.uuid, i.Placed, p) }); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// settings sets persistence and compute mode to what they were: a reset loses the one, MIG mode the other.
func (g gpu) settings(ctx context.Context, was nvml.GPU) error {
	now, err := g.look(ctx)
	if err != nil {
		return err
	}
	if now.Persistent != was.Persistent {
		if err := g.patiently(ctx, func(ctx context.Context) error { return g.driver.SetPersistence(ctx, g.uuid, was.Persistent) }); err != nil {
			return err
		}
	}
	if was.Enabled || was.ComputeMode == "" || now.ComputeMode == was.ComputeMode {
		return nil
	}
	return g.patiently(ctx, func(ctx context.Context) error { return g.driver.SetComputeMode(ctx, g.uuid, was.ComputeMode) })
}

// errReboot means that the mode is pending, and that only a reboot makes it current.
var errReboot = errors.New("here only a reboot changes MIG mode")

// mode turns MIG mode on or off, with the reset that some GPUs need, and returns the GPU as it then is. It calls did after each of the two.
func (g gpu) mode(ctx context.Context, on bool, did func(what string)) (nvml.GPU, error) {
	now, err := g.look(ctx)
	if err != nil {
		return now, err
	}
	if now.Persistent && !now.SwitchesAlone() { // which holds the GPU against the reset
		if err := g.patiently(ctx, func(ctx context.Context) error { return g.driver.SetPersistence(ctx, g.uuid, false) }); err != nil {
			return now, err
		}
	}
	if err := g.patiently(ctx, func(ctx context.Context) error { return g.driver.SetMode(ctx, g.uuid, on) }); err != nil {
		return now, err
	}
	did(modeOn[on])
	if now, err = g.look(ctx); err != nil || now.Enabled == on && now.Pending == on {
		return now, err
	}
	err = g.patiently(ctx, func(ctx context.Context) error { return g.driver.Reset(ctx, g.uuid) })
	if errors.Is(err, nvml.ErrNotSupported) {
		err = errReboot
	}
	if err != nil {
		return now, err
	}
	did(reset)
	if now, err = g.look(ctx); err == nil && (now.Enabled != on || now.Pending != on) {
		err = fmt.Errorf("%s of %s: the driver said that it is done, and the mode is as before", modeOn[on], g.uuid)
	}
	return now, err
}

// modeOn and reset name the calls of mode.
var modeOn = map[bool]string{true: "turning MIG mode on", false: "turning MIG mode off"}

const reset = "the reset after that"

// Shape is all of a GPU that Restore restores, in words.
func Shape(g nvml.GPU) string {
	word := map[bool]string{true: "on", false: "off"}
	mode := g.ComputeMode
	if g.Enabled {
		mode = "" // it has none of its own
	}
	words := []string{"MIG mode " + word[g.Enabled]}
	if g.Pending != g.Enabled {
		words = append(words, "pending "+word[g.Pending])
	}
	words = append(words, "persistence "+word[g.Persistent], "compute mode "+cmp.Or(string(mode), "not its own"))
	for _, i := range g.Instances {
		words = append(words, fmt.Sprintf("%v %v", i.Placed, parts(i)))
	}
	return strings.Join(words, ", ")
}

// renames lists the MIG devices that have other UUIDs than those at their places had.
func renames(was, now nvml.GPU) []string {
	at := func(g nvml.GPU) map[string]string {
		out := map[string]string{}
		for _, i := range g.Instances {
			for _, d := range i.Devices {
				out[fmt.Sprintf("%v %v", i.Placed, d.Part)] = d.UUID
			}
		}
		return out
	}
	var out []string
	is := at(now)
	for place, uuid := range at(was) {
		if is[place] != uuid {
			out = append(out, fmt.Sprintf("%s is %s", uuid, is[place]))
		}
	}
	slices.Sort(out)
	return out
}
