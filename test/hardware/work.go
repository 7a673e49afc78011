package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/hardware/cuda"
)

// Kinds of work that a process of this program does, like a program in a container, on the GPU that
// NVIDIA_VISIBLE_DEVICES names.
const (
	computes = "compute" // has a context, and takes little memory
	fills    = "fill"    // takes 95 % of the GPU's memory, with what others have
	errs     = "err"     // runs a kernel that stores where nothing is
)

const (
	modest = 256 << 20 // bytes that computes takes
	piece  = 2 << 30   // bytes that fills takes at once: the GPU's memory need not be in one piece
	// fillPercent is how full fills makes the GPU.
	fillPercent = 95
	// begins is when errs makes its error. A program that loads a model has run for longer; if the agent has not yet seen a program, it reports it
	// as one of several possible ones.
	begins = 2 * time.Second
	// lingers is how long a process lives on after its kernel was stopped, so that its owner can be found.
	lingers = 2 * time.Second
)

var errNoGPU = errors.New("NVIDIA_VISIBLE_DEVICES names no GPU by its UUID")

// work is what pods run.
func work() *cobra.Command {
	return &cobra.Command{
		Use:       "work WHAT",
		Short:     "Use a GPU as a program in a pod does: compute, fill its memory, or make an error",
		Hidden:    true,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: []string{computes, fills, errs},
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			gpu, _, _ := strings.Cut(os.Getenv("NVIDIA_VISIBLE_DEVICES"), ",")
			if !strings.HasPrefix(gpu, "GPU-") {
				return errNoGPU
			}
			c, err := cuda.Open(gpu)
			if err != nil {
				return err
			}
			return use(ctx, c, args[0])
		},
	}
}

func use(ctx context.Context, c *cuda.Context, how string) error {
	switch how {
	case errs:
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(begins):
		}
		if err := c.Fault(); err != nil {
			return err
		}
		fmt.Println("the driver has stopped the kernel")
		select {
		case <-ctx.Done():
		case <-time.After(lingers):
		}
		return nil
	case fills:
		if err := fill(c); err != nil {
			return err
		}
	default:
		if err := c.Allocate(modest); err != nil {
			return err
		}
	}
	fmt.Println("computing")
	<-ctx.Done()
	return nil
}

// fill takes memory until so much of the GPU's is in use.
func fill(c *cuda.Context) error {
	for {
		free, total, err := c.Memory()
		if err != nil {
			return err
		}
		spare := total / 100 * (100 - fillPercent)
		if free <= spare {
			return nil
		}
		if err := c.Allocate(min(piece, free-spare)); err != nil {
			return err
		}
	}
}
