// Command hardware tries gpuslice on the GPUs of this machine, and changes nothing of them, unless --cut is said and confirmed. It compares what it reads with nvidia-smi, plans
// every config and applies none, and has its own program provoke an Xid. A real control plane, NVIDIA's device plugin and the agent share
// the GPUs by time-slicing. With --simulated it does the same on simulated GPUs.
//
// It packs itself, and all that it starts, into one archive for a machine where nothing can be fetched.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/hardware/cut"
	"github.com/gpuslice/gpuslice/test/program"
)

// patience bounds a run once everything is built. It takes half a minute on two cores.
const patience = 15 * time.Minute

// errFailed ends a run that has found a fault. Its table says which.
var errFailed = errors.New("not all is as it should be: see the table")

func main() { program.Main(command()) }

// options are the flags of a run.
type options struct {
	bundle    string
	simulated bool
	gpus      string
	keep      bool

	cutOptions
}

func command() *cobra.Command {
	o := options{cutOptions: cutOptions{kept: keptAt}}
	c := program.New("hardware", "Try gpuslice on the GPUs of this machine, and change nothing of them", func(ctx context.Context) error {
		return program.InDir("gpuslice-hw", o.keep, os.Stderr, func(dir string) error {
			if o.cut || o.restore {
				return o.runCut(ctx, dir)
			}
			return o.run(ctx, dir)
		})
	})
	c.Flags().StringVar(&o.bundle, "bundle", "", "directory with all programs; without it they are built from the checkout")
	c.Flags().BoolVar(&o.simulated, "simulated", false, "try it on simulated GPUs")
	c.Flags().StringVar(&o.gpus, "gpus", "gpus: [{model: H200, passthrough: true}]", "with --simulated: the GPUs, as test/gpusim describes them")
	c.Flags().BoolVar(&o.keep, "keep", false, "keep the logs also where all is well")
	c.Flags().BoolVar(&o.cut, "cut", false, "measure what it takes to cut the GPUs of --confirm, and bring back what they were; without --confirm, list the GPUs")
	c.Flags().StringSliceVar(&o.confirm, "confirm", nil, "with --cut: the UUIDs of the GPUs that are cut")
	c.Flags().BoolVar(&o.restore, "restore", false, "only bring back what a run with --cut has left when it was killed")
	c.Flags().StringVar(&o.profile, "profile", "gpuslice-latency.yaml", "with --cut: the file for the simulator")
	c.AddCommand(bundling(), work())
	return c
}

// run does everything in its own directory, and prints the table.
func (o options) run(ctx context.Context, dir string) error {
	if !o.simulated {
		if said := unfinished(ctx, o.kept); said != "" {
			fmt.Fprintln(os.Stderr, said)
		}
	}
	programs, err := o.programs(ctx, dir)
	if err != nil {
		return err
	}
	m, err := o.machine(programs, dir)
	if err != nil {
		return err
	}
	defer m.close()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	r := newReport(os.Stderr, m.simulated)
	t := &trial{machine: m, report: r}
	t.all(ctx)
	fmt.Println(r.table())
	if r.failed() {
		return errFailed
	}
	return nil
}

// programs is the directory of all that the run starts.
func (o options) programs(ctx context.Context, dir string) (string, error) {
	if o.bundle != "" {
		return o.bundle, nil
	}
	t := tree(dir + "/programs")
	return string(t), t.fill(ctx, binaries.Builder{Log: os.Stderr}, func(context.Context) (string, error) { return os.Executable() })
}

// unfinished says that a run with --cut has not restored its GPUs; it is empty if there is none.
func unfinished(ctx context.Context, dir string) string {
	left, err := cut.Left(ctx, dir)
	switch {
	case err != nil:
		return fmt.Sprintf("whether a run with CUT=1 (run.sh --cut) has left a GPU cut is not known: %v", err)
	case left == nil:
		return ""
	}
	return fmt.Sprintf("the run of %s cuts GPUs still, or has ended before it could restore them: wait until it ends, or restore them by CUT=restore "+
		"(run.sh --restore). Until then checks see the GPUs as that run has made them", left.Began.Format(time.DateTime))
}
