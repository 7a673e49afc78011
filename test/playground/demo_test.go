package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// People look at the plan while Kubernetes is built, which takes minutes.
func TestThePlanIsDrawnAndWhatIsToBeBuiltIsSaidBeforeAnythingIsBuilt(t *testing.T) {
	if err := sandbox.Possible(); err != nil {
		t.Skip(err)
	}
	t.Chdir("../..")
	t.Setenv("XDG_CACHE_HOME", t.TempDir())                                                 // nothing is built yet
	t.Setenv(binaries.KubeBin, t.TempDir())                                                 // has no programs, so that the first build is an error
	for dra, offerer := range map[bool]string{false: "device plugin", true: "DRA driver"} { // of the two, the one that runs
		starts := map[bool]string{false: "ResumeOperands", true: "RestartOperands"}[dra]
		var said bytes.Buffer
		err := options{config: "all-balanced", dra: dra}.show(t.Context(), newScreen(&said))
		if err == nil || !strings.Contains(err.Error(), binaries.KubeBin) {
			t.Fatalf("error %v, want that of %s", err, binaries.KubeBin)
		}
		rest := strings.Join(strings.Fields(said.String()), " ") // wherever lines are broken
		for _, next := range []string{
			"== The plan: what nvidia.com/mig.config=all-balanced will do to h100-1", "now GPU 0-7", "then GPU 0-7", "3g.40gb", "8 × SetMode", starts, "VerifyCapacity",
			"== Building what is missing", "to be built, once: NVIDIA's " + offerer + " v", "; about ", "minute",
		} {
			_, after, found := strings.Cut(rest, next)
			if !found {
				t.Fatalf("%q does not come where it should in:\n%s", next, said.String())
			}
			rest = after
		}
	}
}

func TestAConfigThatCannotBeIsRefusedBeforeAnythingIsBuilt(t *testing.T) {
	if err := sandbox.Possible(); err != nil {
		t.Skip(err)
	}
	t.Chdir("../..")
	var said bytes.Buffer
	err := options{config: "all-1g.5gb"}.show(t.Context(), newScreen(&said))
	if err == nil || !strings.Contains(err.Error(), "all-1g.5gb cannot be") || strings.Contains(said.String(), "Building") {
		t.Errorf("error %v after:\n%s", err, said.String())
	}
}
