// Command demo shows the main job on simulated GPUs and a real control plane, from nothing: a node is labelled, drained,
// cut into MIG instances, proven and given back, and its agent is killed in the middle of it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// patience bounds the demo once everything is built. It takes less than a minute on two cores.
const patience = 5 * time.Minute

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := command().ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// manifests is what a user applies, as the README says.
const manifests = "deploy/base"

type options struct {
	config string
	kill   bool
	keep   bool
}

func command() *cobra.Command {
	var o options
	c := &cobra.Command{
		Use:           "demo",
		Short:         "Show a simulated node of eight H100s being cut and given back",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return o.show(cmd.Context(), newScreen(os.Stdout)) },
	}
	c.Flags().StringVar(&o.config, "config", "all-balanced", "MIG config to ask for")
	c.Flags().BoolVar(&o.kill, "kill", true, "kill the agent in the middle")
	c.Flags().BoolVar(&o.keep, "keep", false, "stay up at the end, for kubectl, until Ctrl-C")
	return c
}

func (o options) show(ctx context.Context, out *screen) (err error) {
	if err := sandbox.Possible(); err != nil {
		return err
	}
	if _, err := os.Stat(manifests); err != nil {
		return fmt.Errorf("run the demo from the root of the checkout: %w", err)
	}
	out.title("gpuslice: eight simulated H100s, a real control plane, NVIDIA's own device plugin")
	// What is wrong with the config shows here, and not after minutes of building.
	if err := foresee(ctx, out, o.config); err != nil {
		return err
	}
	out.section("Building what is missing")
	b := binaries.Builder{Log: out}
	if term.IsTerminal(int(os.Stdout.Fd())) {
		b.Terminal = os.Stdout
	}
	parts, err := node.Build(ctx, b)
	if err != nil {
		return err
	}
	// Unix sockets are in it, whose paths must be short.
	dir, err := os.MkdirTemp("", "gpuslice-demo-")
	if err != nil {
		return fmt.Errorf("making a directory for the demo: %w", err)
	}
	defer func() {
		if err == nil {
			err = os.RemoveAll(dir)
		} else {
			out.line("the logs are in %s", dir)
		}
	}()
	play, cancel := context.WithCancel(ctx)
	if !o.keep { // the nodes live as long as it
		play, cancel = context.WithTimeout(ctx, patience)
	}
	defer cancel()
	s := &scene{options: o, out: out, parts: parts, dir: dir}
	defer func() { err = errors.Join(err, s.end()) }()
	if err := s.setUp(play); err != nil {
		return err
	}
	if err := s.change(play); err != nil {
		return err
	}
	if o.keep {
		s.stay(ctx)
	}
	return nil
}
