// Command kubectl-gpuslice asks many nodes for a config at once and follows what becomes of it. Kubectl finds it as a plugin:
// kubectl gpuslice apply -l pool=research --profile research --wait.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/cmd/cli"
)

// version is set by the build.
var version = "development"

// Exit codes other than 0 and 1.
const (
	exitTimeout     = 3
	exitInterrupted = 130 // as of a program that SIGINT ends
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the command at once
	o := options{invoked: os.Args[1:]}
	if err := o.command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", legible.Lines(err.Error()))
		os.Exit(cli.ExitCode(err))
	}
}

func (o *options) command() *cobra.Command {
	root := &cobra.Command{
		Use:           "kubectl-gpuslice",
		Short:         "Rolls a config of GPUs out to many nodes, and says how far they are",
		SilenceUsage:  true,
		SilenceErrors: true,
		// Help shows the command as people call it.
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl gpuslice"},
	}
	o.bind(root.PersistentFlags())
	root.AddCommand(o.apply(), o.hold(), o.status(), &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version)
			return err
		},
	})
	return root
}
