package main

import (
	"testing"

	"github.com/gpuslice/gpuslice/test/pages"
)

func TestThePagesPrintWhatTheCommandTakes(t *testing.T) {
	pages.HoldTo(t, "gpuslice-agent", command)
}
