package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/bundle"
)

const (
	// archiveName is the directory in the archive.
	archiveName = "gpuslice-hardware"
	// mostBytes is how large the archive may be: it is carried by hand to where nothing can be fetched.
	mostBytes = 60_000_000
)

func bundling() *cobra.Command {
	var to string
	c := &cobra.Command{
		Use:   "bundle",
		Short: "Pack this program and all that it starts into one archive, for a machine where nothing can be fetched",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return pack(cmd.Context(), cmd.OutOrStdout(), to) },
	}
	c.Flags().StringVarP(&to, "output", "o", archiveName+".tar.xz", "the archive")
	return c
}

// pack builds what is missing, and writes the archive.
func pack(ctx context.Context, w io.Writer, to string) (err error) {
	if err := bundle.Possible(); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", archiveName+"-")
	if err != nil {
		return fmt.Errorf("making a directory for the bundle: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	b := binaries.Builder{Log: os.Stderr}
	t := tree(dir)
	if err := t.fill(ctx, b, func(ctx context.Context) (string, error) { return b.Tool(ctx, "./test/hardware") }); err != nil {
		return err
	}
	return bundle.Pack(ctx, w, dir, archiveName, to, mostBytes)
}
