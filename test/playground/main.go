// Command playground runs a Kubernetes cluster with simulated GPUs on this machine, and gpuslice on it, for as long as the shell that it opens. From a
// checkout it builds what is missing; from its archive it needs no compiler. "playground demo" shows the main job on the same cluster.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/program"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// patience bounds the start, and the demo, once everything is built. Each takes less than a minute on two cores.
const patience = 5 * time.Minute

const (
	// archiveName is the folder in the archive.
	archiveName = "gpuslice-playground-linux-amd64"
	// mostBytes is how large the archive may be.
	mostBytes = 80_000_000
)

func main() { program.Main(command()) }

func command() *cobra.Command {
	var from string
	c := program.New("playground", "Open a shell on a cluster with simulated GPUs, for as long as the shell", func(ctx context.Context) error {
		return play(ctx, os.Stdout, from)
	})
	c.PersistentFlags().StringVar(&from, bundleFlag, "", "directory of the unpacked archive; without it programs are built from the checkout")
	c.AddCommand(demo(), menuCommand(), killAgent(), packing())
	return c
}

func packing() *cobra.Command {
	var to string
	c := program.New("bundle", "Pack this program and all that it starts into one archive, which needs no compiler", func(ctx context.Context) error {
		return pack(ctx, os.Stdout, program.Builder(os.Stderr, os.Stderr), to)
	})
	c.Flags().StringVarP(&to, "output", "o", archiveName+".tar.xz", "the archive")
	return c
}

// play starts the cluster, opens the shell, and removes everything when that has ended.
func play(ctx context.Context, out *os.File, from string) error {
	p, err := load(ctx, out, from, both)
	if err != nil {
		return err
	}
	removeStale(os.TempDir())
	return inDir(out, func(dir string) error {
		return playIn(ctx, out, &world{programs: p, dir: dir})
	})
}

// bundleFlag names the directory of the unpacked archive.
const bundleFlag = "bundle"

// load finds the programs, or builds them.
func load(ctx context.Context, out io.Writer, from string, nodes func(context.Context, binaries.Builder) (node.Parts, error)) (programs, error) {
	if err := sandbox.Possible(); err != nil {
		return programs{}, err
	}
	if from != "" {
		return unpacked(from)
	}
	return built(ctx, program.Builder(out, os.Stdout), nodes)
}

func playIn(ctx context.Context, out io.Writer, w *world) (err error) {
	began := time.Now()
	fmt.Fprintln(out, "starting a cluster of five simulated nodes: about 20 s")
	defer func() { err = errors.Join(err, w.end()) }()
	if err := w.open(ctx); err != nil {
		return err
	}
	fmt.Fprintf(out, "ready after %.0f s\n\n", time.Since(began).Seconds())
	if err := w.greet(ctx, out); err != nil {
		return err
	}
	return w.shell(ctx)
}

// open starts the cluster with all that a user finds in it.
func (w *world) open(ctx context.Context) error {
	starting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := w.start(ctx, machines()); err != nil { // the nodes live as long as it
		return err
	}
	if err := errors.Join(w.writeTries(time.Now()), w.tools()); err != nil {
		return err
	}
	if err := w.cluster.Apply(starting, filepath.Join(w.root, draDriver), w.tries("deploy/mine")); err != nil {
		return err
	}
	if err := w.cluster.Apply(starting, w.tries("maintenance.yaml"), w.tries("sharing.yaml"), w.tries("pods.yaml"), w.tries("more-pods.yaml")); err != nil {
		return err
	}
	const running = 6 // one more of more-pods.yaml is to wait
	return w.settled(starting, machines(), running)
}

// killAgent ends an agent as the kernel does when memory runs out.
func killAgent() *cobra.Command {
	return &cobra.Command{
		Use: "kill-agent NODE", Short: "End the agent of a node by SIGKILL; its kubelet starts another", Args: cobra.ExactArgs(1), SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := here()
			if err != nil {
				return err
			}
			agent, err := filepath.EvalSymlinks(filepath.Join(dir, "bin", "gpuslice-agent"))
			if err != nil {
				return fmt.Errorf("looking for the agent's program: %w", err)
			}
			pid, err := node.AgentPID(agent, filepath.Join(dir, filepath.Base(args[0]), "gpus"))
			if err == nil {
				err = syscall.Kill(pid, syscall.SIGKILL)
			}
			if err != nil {
				return fmt.Errorf("killing the agent of node %s: %w", args[0], err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "kill -9 %d: the agent of %s is dead\n", pid, args[0])
			return nil
		},
	}
}

// dirVariable has the directory of the playground that a shell is in.
const dirVariable = "GPUSLICE_PLAYGROUND"

var errNotHere = errors.New("this works in the shell of a playground alone: start one by make playground, or by run.sh of the archive")

func here() (string, error) {
	dir := os.Getenv(dirVariable)
	if dir == "" {
		return "", errNotHere
	}
	return dir, nil
}
