// Package cli writes output and ends a command with its exit code, for all commands.
package cli

import (
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Exit codes other than 0 and 1, of several commands.
const (
	ExitTimeout     = 3
	ExitHeldUp      = 4   // of a dry run: the change would be refused, held up or given up
	ExitUnknown     = 5   // of a dry run: the change would begin, and it is not known whether it ends
	ExitInterrupted = 130 // that of a program which SIGINT ends
)

// ExitError is an error that a command ends with by an exit code other than 1.
type ExitError struct {
	Err  error
	Code int
}

// Error implements error.
func (e *ExitError) Error() string { return e.Err.Error() }

// Unwrap gives the error itself.
func (e *ExitError) Unwrap() error { return e.Err }

// ExitCode is the code, for who cannot name the type.
func (e *ExitError) ExitCode() int { return e.Code }

// ExitCode gives the exit code of a command which ends with the error: 0 for nil, 1 unless the error is an ExitError.
func ExitCode(err error) int {
	if exit, ok := errors.AsType[*ExitError](err); ok {
		return exit.Code
	}
	if err != nil {
		return 1
	}
	return 0
}

// End writes the error of a command for users, if there is one, and gives the exit code.
func End(w io.Writer, err error) int {
	if err != nil {
		_, _ = fmt.Fprintln(w, "error:", sanitize.Lines(err.Error())) // if this write fails too, the exit code still says it
	}
	return ExitCode(err)
}

// Version is the command that prints the version.
func Version(version string) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version)
			return err
		},
	}
}

// Printer keeps the first error of many writes. It escapes characters that move a cursor or turn the reading direction round.
type Printer struct {
	W   io.Writer
	Err error
}

// Printf writes unless a write before has failed.
func (p *Printer) Printf(format string, args ...any) {
	if p.Err == nil {
		_, p.Err = io.WriteString(p.W, sanitize.Lines(fmt.Sprintf(format, args...)))
	}
}

// Counted writes a number of things: "1 node", "2 nodes".
func Counted(n int, noun string) string { return sanitize.Counted(n, noun) }
