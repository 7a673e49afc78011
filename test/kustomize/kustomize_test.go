package kustomize_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/kustomize"
)

const deploy = "../../deploy"

// People build with kubectl. The overlay has what needs most of kustomize: replacements, patches, components and a file that stays behind.
func TestTheLibraryMakesWhatKubectlMakes(t *testing.T) {
	kube, err := binaries.Builder{Log: os.Stderr}.Kube(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	files := kustomize.Over("overlays/openshift", "prometheus", "impersonation", "delete-after-deadline")
	run := exec.CommandContext(t.Context(), filepath.Join(kube, "kubectl"), "kustomize", kustomize.Write(t, deploy, files))
	run.Stderr = os.Stderr
	want, err := run.Output()
	if err != nil {
		t.Fatal(err)
	}
	got, err := kustomize.Build(t, deploy, files)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("(-kubectl +library):\n%s", diff)
	}
}
