package main

import (
	"testing"

	"github.com/spf13/cobra"

	"github.com/gpuslice/gpuslice/test/pages"
)

func TestThePagesPrintWhatTheCommandTakes(t *testing.T) {
	pages.HoldTo(t, "kubectl gpuslice", func() *cobra.Command { return (&options{}).command() })
}
