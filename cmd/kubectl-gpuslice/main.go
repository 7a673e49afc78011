// Command kubectl-gpuslice asks many nodes for a config at once and follows what becomes of it. Kubectl finds it as a plugin:
// kubectl gpuslice apply -l pool=research --profile research --wait.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	_ "k8s.io/client-go/plugin/pkg/client/auth" // kubeconfigs may log in by OpenID Connect, as kubectl's

	"github.com/gpuslice/gpuslice/cmd/internal/cli"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/migrate"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/render"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/rollout"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/show"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/validate"
)

// version is set by the build.
var version = "development"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the command at once
	o := cluster.Options{Invoked: os.Args[1:], Version: version}
	root := o.Root(commands...)
	root.AddCommand(cli.Version(version))
	narrow(root)
	if code := cli.End(os.Stderr, root.ExecuteContext(ctx)); code != 0 {
		os.Exit(code)
	}
}

// commands are what the plugin can do.
var commands = []cluster.Command{rollout.Apply, rollout.Plan, rollout.Hold, rollout.Recover, show.Status, show.Top, show.Explain, show.Advise, validate.Command, render.Command, migrate.Command}
