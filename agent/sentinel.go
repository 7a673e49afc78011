package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/gpuslice/gpuslice/agent/plan"
)

// sentinel is the file by which a reboot is asked for. Others write it too, package managers above all: what they have
// written stays.
type sentinel struct{ path string }

// state tells whether a reboot is asked for, and by whom. Only a file asks: kured and others look by "test -f". One that
// cannot be looked at does not ask; writing it will say why. One that cannot be read asks, and is not known to be ours.
func (s sentinel) state() plan.Asked {
	if is, err := os.Stat(s.path); err != nil || !is.Mode().IsRegular() {
		return plan.AskedByNobody
	}
	text, err := os.ReadFile(s.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return plan.AskedByNobody
	case err == nil && strings.HasPrefix(string(text), FieldManager+":"):
		return plan.AskedByUs
	default:
		return plan.AskedByOthers
	}
}

// ask writes the file, as a whole or not at all: half a file would not be known as ours. One that is there already asks as
// well.
func (s sentinel) ask(why string) (err error) {
	// Only one agent of a machine runs: what is there by this name was left by one that was killed.
	whole := filepath.Join(filepath.Dir(s.path), "."+filepath.Base(s.path)+"."+FieldManager)
	defer func() {
		if gone := os.Remove(whole); gone != nil && !errors.Is(gone, fs.ErrNotExist) {
			err = errors.Join(err, fmt.Errorf("tidying up after asking for a reboot: %w", gone))
		}
	}()
	if err := writeAnew(whole, fmt.Sprintf("%s: %s\n", FieldManager, why)); err != nil {
		return fmt.Errorf("asking for a reboot: %w; mount the folder into the agent's container, or set reboot.sentinel", err)
	}
	err = os.Link(whole, s.path) // unlike a rename, it does not take the place of what is there
	if err == nil || errors.Is(err, fs.ErrExist) && s.state() != plan.AskedByNobody {
		return nil
	}
	if is, told := os.Lstat(s.path); told == nil && !is.Mode().IsRegular() {
		return fmt.Errorf("asking for a reboot: %s is %s, and should be a file or nothing; remove it, or set reboot.sentinel",
			s.path, kindOf(is.Mode()))
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

// withdraw removes the file, if it is ours.
func (s sentinel) withdraw() error {
	if s.state() != plan.AskedByUs {
		return nil
	}
	if err := os.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("withdrawing the request for a reboot: %w", err)
	}
	return nil
}
