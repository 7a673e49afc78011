// Command demo shows the main job on simulated GPUs and a real control plane, from nothing. A node is labelled, drained,
// cut into MIG instances, verified and released. Its agent is killed in the middle of it.
package main

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/program"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// patience bounds the demo once everything is built. It takes less than a minute on two cores.
const patience = 5 * time.Minute

func main() { program.Main(command()) }

// Folders that a user applies, on nodes of NVIDIA's device plugin and of its DRA driver.
const (
	manifests    = "deploy/base"
	draManifests = "deploy/overlays/dra"
)

type options struct {
	config string
	dra    bool
	kill   bool
	keep   bool
}

func command() *cobra.Command {
	var o options
	c := program.New("demo", "Show a simulated node of eight H100s being cut and given back", func(ctx context.Context) error {
		return o.show(ctx, newScreen(os.Stdout))
	})
	c.Flags().StringVar(&o.config, "config", "all-balanced", "MIG config to ask for")
	c.Flags().BoolVar(&o.dra, "dra", false, "with NVIDIA's DRA driver in place of its device plugin")
	c.Flags().BoolVar(&o.kill, "kill", true, "kill the agent in the middle")
	c.Flags().BoolVar(&o.keep, "keep", false, "stay up at the end, for kubectl, until Ctrl-C")
	return c
}

func (o options) show(ctx context.Context, out *screen) error {
	if err := sandbox.Possible(); err != nil {
		return err
	}
	if err := program.AtRoot(); err != nil {
		return err
	}
	out.title("gpuslice: eight simulated H100s, a real control plane, NVIDIA's own " + o.offerer())
	// An error in the config shows here, not after minutes of building.
	if err := foresee(ctx, out, o.config, o.dra); err != nil {
		return err
	}
	out.section("Building what is missing")
	build := node.Build
	if o.dra {
		build = node.BuildByClaims
	}
	parts, err := build(ctx, program.Builder(out, os.Stdout))
	if err != nil {
		return err
	}
	return program.InDir("gpuslice-demo", false, out, func(dir string) error {
		return o.play(ctx, &scene{options: o, out: out, parts: parts, dir: dir})
	})
}

// offerer is what offers the GPUs to pods.
func (o options) offerer() string {
	if o.dra {
		return "DRA driver"
	}
	return "device plugin"
}

// play goes through the scene, and ends all that it has started.
func (o options) play(ctx context.Context, s *scene) (err error) {
	acts, cancel := context.WithCancel(ctx)
	if !o.keep { // the nodes live as long as it
		acts, cancel = context.WithTimeout(ctx, patience)
	}
	defer cancel()
	defer func() { err = errors.Join(err, s.end()) }()
	if err := s.setUp(acts); err != nil {
		return err
	}
	if err := s.change(acts); err != nil {
		return err
	}
	if o.keep {
		s.stay(ctx)
	}
	return nil
}
