package cut_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/lib"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
	"github.com/gpuslice/gpuslice/test/hardware/cut"
)

// storeVariable is the directory of the store, in a process that a test starts to kill it.
const storeVariable = "CUT_STORE"

// TestMain runs the tests with the simulated library; a process that one of them starts measures.
func TestMain(m *testing.M) {
	if dir := os.Getenv(storeVariable); dir != "" {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		err := measure(ctx, dir)
		stop()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	gpusimtest.Main(m)
}

// measure does what test/hardware does with --cut, or with --restore if it has the argument: all but the cluster.
func measure(ctx context.Context, dir string) (err error) {
	s, err := cut.Open(dir)
	if err != nil {
		return err
	}
	calls := &cut.Calls{}
	d := lib.Open(lib.Options{Library: os.Getenv(gpusimtest.LibraryVariable), Wrap: calls.Wrap})
	left, err := s.Load(ctx)
	if err != nil {
		return err
	}
	if left != nil {
		fmt.Println("restored")
		if _, err := s.Restore(context.WithoutCancel(ctx), d, *left); err != nil {
			return err
		}
	}
	if len(os.Args) > 1 && os.Args[1] == "restore" {
		return nil
	}
	gpus, err := d.Snapshot(ctx)
	if err != nil {
		return err
	}
	found := cut.Found{GPUs: gpus}
	if err := s.Save(ctx, found); err != nil {
		return err
	}
	b := &cut.Bench{Driver: d, Calls: calls, GPUs: gpus, Rounds: 2, Figures: &cut.Figures{}}
	fmt.Println("measuring")
	var errs []error
	var absent *cut.NotHereError
	for _, step := range b.Steps() {
		if _, err := step.Do(ctx); err != nil && !errors.As(err, &absent) {
			errs = append(errs, fmt.Errorf("%s: %w", step.Name, err))
			break
		}
	}
	_, err = s.Restore(context.WithoutCancel(ctx), d, found)
	return errors.Join(append(errs, err)...)
}

// shapes are what the GPUs are.
func shapes(t *testing.T, d nvml.Driver) []string {
	t.Helper()
	gpus, err := d.Snapshot(context.WithoutCancel(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, g := range gpus {
		out = append(out, cut.Shape(g))
	}
	return out
}
