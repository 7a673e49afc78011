package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/gpuslice/gpuslice/agent/plan"
)

// sentinel is the file by which a reboot is asked for. Others write it too, package managers above all: what they have
// written stays.
type sentinel struct{ path string }

// state tells whether a reboot is asked for, and by whom. A file that cannot be looked at does not ask; writing it will
// say why.
func (s sentinel) state() plan.Asked {
	text, err := os.ReadFile(s.path)
	switch {
	case err != nil:
		return plan.AskedByNobody
	case strings.HasPrefix(string(text), FieldManager+":"):
		return plan.AskedByUs
	default:
		return plan.AskedByOthers
	}
}

// ask writes the file. One that is there already asks as well.
func (s sentinel) ask(why string) error {
	f, err := os.OpenFile(s.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644) //nolint:gosec // whoever reboots the node reads it, as any user
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("asking for a reboot: %w; mount the folder into the agent's container, or set reboot.sentinel", err)
	}
	_, err = fmt.Fprintf(f, "%s: %s\n", FieldManager, why)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("asking for a reboot: %w", err)
	}
	return nil
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
