// Command kubectl-gpuslice asks many nodes for a config at once and follows what becomes of it. Kubectl finds it as a plugin:
// kubectl gpuslice apply -l pool=research --profile research --wait.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // kubeconfigs may log in by OpenID Connect, as kubectl's

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
)

// version is set by the build.
var version = "development"

// Exit codes other than 0 and 1.
const (
	exitTimeout     = 3
	exitHeldUp      = 4   // of a dry run: the change would be refused, held up or given up
	exitInterrupted = 130 // that of a program which SIGINT ends
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the command at once
	o := options{invoked: os.Args[1:]}
	if code := cli.End(os.Stderr, o.command().ExecuteContext(ctx)); code != 0 {
		os.Exit(code)
	}
}

func (o *options) command() *cobra.Command {
	root := &cobra.Command{
		Use:           "kubectl-gpuslice",
		Short:         "Rolls a config of GPUs out to many nodes, and says how far they are",
		SilenceUsage:  true,
		SilenceErrors: true,
		// Help shows the command as users call it.
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl gpuslice"},
	}
	o.bind(root.PersistentFlags())
	root.AddCommand(o.apply(), o.plan(), o.hold(), o.recover(), o.status(), o.top(), o.validate(), o.render(), o.migrate(), explain(), cli.Version(version))
	return root
}
