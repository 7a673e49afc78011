// Package sentinel asks for a reboot of the host by a file, which kured and others look for.
package sentinel

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// File is the file by which a reboot is asked for. Others write it too, package managers above all: what they have
// written stays. It is wherever the settings say, which may be behind a mount that does not answer: no call lasts longer than
// outcome.HostTimeout,
// and none begins while another hangs.
type File struct {
	Path  string
	Calls aside.Lane // no two at a time
}

// longestRequest bounds what is read of the file, in bytes. What is longer is not ours.
const longestRequest = 64 << 10

// State tells whether a reboot is asked for, and by whom. Only a file asks: kured and others look by "test -f". One that
// cannot be looked at does not ask; writing it will say why. One that cannot be read asks, and is not known to be ours.
func (s *File) State(ctx context.Context) plan.Asked {
	ctx, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	asked, err := aside.Do(ctx, &s.Calls, "looking at "+s.Path, func(context.Context, aside.At) (plan.Asked, error) { return s.asked(), nil })
	if err != nil {
		return plan.NotAsked
	}
	return asked
}

func (s *File) asked() plan.Asked {
	if is, err := os.Stat(s.Path); err != nil || !is.Mode().IsRegular() {
		return plan.NotAsked
	}
	text, err := aside.Bounded(s.Path, longestRequest)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, aside.ErrNoFile):
		return plan.NotAsked
	case err == nil && strings.HasPrefix(string(text), nodewrite.FieldManager+":"):
		return plan.AskedByUs
	default:
		return plan.AskedByOthers
	}
}

// Ask writes the file, as a whole or not at all: half a file would not be known as ours. One that is there already asks as
// well.
func (s *File) Ask(ctx context.Context, why string) error {
	ctx, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	err := aside.Run(ctx, &s.Calls, "asking for a reboot by "+s.Path, func(ctx context.Context, _ aside.At) error { return s.write(ctx, why) })
	if aside.Hangs(err) {
		err = fmt.Errorf("%w; see the host's kernel log for the disk or file system that it is on, or set reboot.sentinel", err)
	}
	return err
}

func (s *File) write(ctx context.Context, why string) (err error) {
	// Only one agent of a machine runs: what is there by this name was left by one that was killed.
	whole := filepath.Join(filepath.Dir(s.Path), "."+filepath.Base(s.Path)+"."+nodewrite.FieldManager)
	defer func() {
		if gone := os.Remove(whole); gone != nil && !errors.Is(gone, fs.ErrNotExist) {
			err = errors.Join(err, fmt.Errorf("tidying up after asking for a reboot: %w", gone))
		}
	}()
	if err := writeAnew(whole, fmt.Sprintf("%s: %s\n", nodewrite.FieldManager, why)); err != nil {
		return fmt.Errorf("asking for a reboot: %w; mount the folder into the agent's container, or set reboot.sentinel", err)
	}
	if ctx.Err() != nil { // nobody waits for it any more, and it may have been asked for in vain
		return ctx.Err()
	}
	err = os.Link(whole, s.Path) // unlike a rename, it does not take the place of what is there
	if err == nil || errors.Is(err, fs.ErrExist) && s.asked() != plan.NotAsked {
		return nil
	}
	if is, told := os.Lstat(s.Path); told == nil && !is.Mode().IsRegular() {
		return fmt.Errorf("asking for a reboot: %s is %s, and should be a file or nothing; remove it, or set reboot.sentinel",
			s.Path, kindOf(is.Mode()))
	}
	return fmt.Errorf("asking for a reboot: %w; let the agent write there, or set reboot.sentinel", err)
}

// writeAnew writes a file that nobody else has by its name.
func writeAnew(path, text string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644) //nolint:gosec // whoever reboots the node reads it, as any user
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// kindOf says what stands in a file's place.
func kindOf(mode fs.FileMode) string {
	switch {
	case mode.IsDir():
		return "a directory"
	case mode&fs.ModeSymlink != 0:
		return "a link that leads to no file"
	default:
		return "a special file"
	}
}

// Withdraw removes the file, if it is ours.
func (s *File) Withdraw(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	return aside.Run(ctx, &s.Calls, "withdrawing the request for a reboot by "+s.Path, func(context.Context, aside.At) error {
		if s.asked() != plan.AskedByUs {
			return nil
		}
		if err := os.Remove(s.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("withdrawing the request for a reboot: %w", err)
		}
		return nil
	})
}
