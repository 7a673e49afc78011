package reboot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Sentinel is the sentinel file. Other programs write it too, package managers above all: the agent leaves what they have
// written. Its path is from the settings, and may be behind a mount that does not answer: no call lasts longer than
// outcome.HostTimeout, and none begins while another hangs.
type Sentinel struct {
	Path  string
	Calls aside.Lane // no two at a time
}

// longestRequest bounds what the agent reads of the file, in bytes. It never writes a longer one.
const longestRequest = 64 << 10

// State returns whether the file asks for a reboot, and whether the agent wrote it. Only a regular file asks: kured tests by "test -f". If
// State cannot stat the file, it does not ask, and Ask will say why. If State cannot read the file, it asks, and counts as another program's.
func (s *Sentinel) State(ctx context.Context) plan.Asked {
	ctx, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	asked, err := aside.Do(ctx, &s.Calls, "looking at "+s.Path, func(context.Context, aside.At) (plan.Asked, error) { return s.asked(), nil })
	if err != nil {
		return plan.NotAsked
	}
	return asked
}

func (s *Sentinel) asked() plan.Asked {
	if is, err := os.Stat(s.Path); err != nil || !is.Mode().IsRegular() {
		return plan.NotAsked
	}
	text, err := aside.Bounded(s.Path, longestRequest)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, aside.ErrNoFile):
		return plan.NotAsked
	case err == nil && strings.HasPrefix(string(text), config.FieldManager+":"):
		return plan.AskedByUs
	default:
		return plan.AskedByOthers
	}
}

// Ask writes the file, as a whole or not at all: the agent would not know half a file as its own. A file that is there already asks as
// well, and stays.
func (s *Sentinel) Ask(ctx context.Context, why string) error {
	ctx, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	err := aside.Run(ctx, &s.Calls, "asking for a reboot by "+s.Path, func(ctx context.Context, _ aside.At) error { return s.write(ctx, why) })
	if aside.Hangs(err) {
		err = fmt.Errorf("%w; see the host's kernel log for the disk or file system that it is on, or set reboot.sentinel", err)
	}
	return err
}

func (s *Sentinel) write(ctx context.Context, why string) (err error) {
	// Only one agent runs on a machine: a file of this name is left from one that was killed.
	whole := filepath.Join(filepath.Dir(s.Path), "."+filepath.Base(s.Path)+"."+config.FieldManager)
	defer func() {
		if gone := os.Remove(whole); gone != nil && !errors.Is(gone, fs.ErrNotExist) {
			err = errors.Join(err, fmt.Errorf("tidying up after asking for a reboot: %w", gone))
		}
	}()
	if err := rewrite(whole, fmt.Sprintf("%s: %s\n", config.FieldManager, why)); err != nil {
		return fmt.Errorf("asking for a reboot: %w; mount the folder into the agent's container, or set reboot.sentinel", err)
	}
	if ctx.Err() != nil { // the caller has stopped waiting, and may no longer need the reboot
		return ctx.Err()
	}
	err = os.Link(whole, s.Path) // unlike a rename, a link does not replace a file that is there
	if err == nil || errors.Is(err, fs.ErrExist) && s.asked() != plan.NotAsked {
		return nil
	}
	if is, failed := os.Lstat(s.Path); failed == nil && !is.Mode().IsRegular() {
		return fmt.Errorf("asking for a reboot: %s is %s, and should be a file or nothing; remove it, or set reboot.sentinel",
			s.Path, kindOf(is.Mode()))
	}
	return fmt.Errorf("asking for a reboot: %w; let the agent write there, or set reboot.sentinel", err)
}

// rewrite writes a new file at the path, in place of one that is there.
func rewrite(path, text string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644) //nolint:gosec // the tool that reboots the node may read it as any user
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// kindOf names what is at the path in place of a file.
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

// Withdraw removes the file, if the agent wrote it.
func (s *Sentinel) Withdraw(ctx context.Context) error {
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
