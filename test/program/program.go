// Package program is the frame of the programs in test/ that people start: how they end, what they build, and where their files are.
package program

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// New is a command without arguments. Main prints its errors.
func New(name, short string, run func(context.Context) error) *cobra.Command {
	return &cobra.Command{
		Use:           name,
		Short:         short,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return run(cmd.Context()) },
	}
}

// Main runs the command. Its context ends with a signal, so that what was written is removed first.
func Main(c *cobra.Command) {
	ends := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // as it is under nohup
		ends = append(ends, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	err := c.ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

var errNotAtRoot = errors.New("run it from the root of the checkout")

// AtRoot reports whether the working directory is the root of the checkout, where manifests are found.
func AtRoot() error {
	for _, name := range []string{"go.mod", "deploy/base"} {
		if _, err := os.Stat(name); err != nil {
			return fmt.Errorf("%w: %w", errNotAtRoot, err)
		}
	}
	return nil
}

// Builder builds what is missing, and shows its progress in the log, or by a bar if the file that people look at is a terminal.
func Builder(log io.Writer, seen *os.File) binaries.Builder {
	b := binaries.Builder{Log: log}
	if term.IsTerminal(int(seen.Fd())) {
		b.Terminal = seen
	}
	return b
}

// InDir calls do with a new directory. The directory stays, and the log names it, if do fails, or if it is to be kept. Its path is short, since
// Unix sockets are in it.
func InDir(name string, keep bool, log io.Writer, do func(dir string) error) error {
	dir, err := os.MkdirTemp("", name+"-")
	if err != nil {
		return fmt.Errorf("making a directory for logs and sockets: %w", err)
	}
	if err := do(dir); err != nil || keep {
		fmt.Fprintln(log, "the logs are in", dir)
		return err
	}
	return os.RemoveAll(dir)
}
