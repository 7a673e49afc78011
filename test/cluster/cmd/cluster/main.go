// Command cluster runs the control plane that tests use, for people.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/cluster"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	root := &cobra.Command{Use: "cluster", Short: "A Kubernetes control plane on this machine", SilenceUsage: true}
	root.AddCommand(up())
	if root.ExecuteContext(ctx) != nil {
		stop()
		os.Exit(1)
	}
}

func up() *cobra.Command {
	var o cluster.Options
	command := &cobra.Command{
		Use:   "up",
		Short: "Start a control plane, and stop it at Ctrl-C",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			o.Log = cmd.ErrOrStderr()
			began := time.Now()
			c, err := cluster.Start(cmd.Context(), o)
			if err != nil {
				return err
			}
			defer func() {
				if stopped := c.Stop(); err == nil {
					err = stopped
				}
			}()
			cmd.SetOut(os.Stdout)
			cmd.Printf("\nThe control plane runs after %s. Logs and the audit log are in %s.\n\n", time.Since(began).Round(100*time.Millisecond), c.Dir())
			cmd.Printf("  export KUBECONFIG=%s\n  alias kubectl=%s\n\nCtrl-C stops it.\n", c.AdminKubeconfig(), c.Kubectl())
			return c.Wait(cmd.Context())
		},
	}
	command.Flags().StringVar(&o.Dir, "dir", "", "keep logs and certificates in `directory` (default: a temporary one)")
	command.Flags().StringVar(&o.Binaries, "binaries", "", "take the programs from `directory` (default: build what is missing)")
	return command
}
