package shipped_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/kustomize"
)

// places are the folders of deploy/ that a release has a manifest of, by what that is named after, each with the namespace that must be there.
var places = map[string]struct{ folder, needs string }{
	"install.yaml":               {"base", ""},
	"install-device-plugin.yaml": {"overlays/device-plugin", ""},
	"install-dra.yaml":           {"overlays/dra", ""},
	"install-gpu-operator.yaml":  {"overlays/gpu-operator", "gpu-operator"},
	"install-openshift.yaml":     {"overlays/openshift", "nvidia-gpu-operator"},
}

// What kubectl takes for a change at each run, a system that keeps a cluster as a repository says takes for drift.
func TestWhatIsAppliedTwiceChangesNothing(t *testing.T) {
	c := start(t)
	for name, place := range places {
		appliesTwice(t, c, manifestOf(t, name, place.folder), place.needs)
	}
}

// Argo CD and Flux apply in this way, and look for drift by a dry run of it.
func TestWhatIsAppliedByTheServerDoesNotDrift(t *testing.T) {
	c := start(t)
	by := []string{"--server-side", "--force-conflicts", "--field-manager=git", "-f"}
	for name, place := range places {
		file := manifestOf(t, name, place.folder)
		removedWithTheTest(t, c, file, place.needs)
		must(t, c, append(append([]string{"apply"}, by...), file)...)
		if out, err := kubectl(t, c, append(append([]string{"diff"}, by...), file)...); err != nil {
			t.Errorf("%s differs from what is in the cluster: %v\n%s", name, err, out)
		}
	}
}

// manifestOf builds the manifest of a folder of deploy/ into a file.
func manifestOf(t *testing.T, name, folder string) (file string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), name)
	text := build(t, kustomize.Files{"kustomization.yaml": "resources: [DEPLOY/" + folder + "]\n"})
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// removedWithTheTest makes the namespace, if there is to be one. It removes all of a manifest but namespaces with the test: other tests of the cluster use these,
// and in one that is being deleted nothing can be created.
func removedWithTheTest(t *testing.T, c *cluster.Cluster, file, namespace string) {
	t.Helper()
	if namespace != "" {
		if out, err := kubectl(t, c, "create", "namespace", namespace); err != nil && !strings.Contains(out, "already exists") { // by another test
			t.Fatalf("%v: %s", err, out)
		}
	}
	t.Cleanup(func() {
		if _, err := c.RunKubectl(context.WithoutCancel(t.Context()), "delete", "--ignore-not-found", "--wait=false", "-f", withoutNamespaces(t, file)); err != nil {
			t.Error(err)
		}
	})
}

// appliesTwice applies a manifest to a cluster that has the namespace, and again.
func appliesTwice(t *testing.T, c *cluster.Cluster, file, namespace string) {
	t.Helper()
	removedWithTheTest(t, c, file, namespace)
	must(t, c, "apply", "-f", file)
	out, err := kubectl(t, c, "apply", "-f", file)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	changed := slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return strings.HasSuffix(line, " unchanged") })
	if err != nil || len(lines) < 10 || len(changed) > 0 {
		t.Errorf("%s applied again: error %v; of %d lines these say a change:\n%s", filepath.Base(file), err, len(lines), strings.Join(changed, "\n"))
	}
}

// withoutNamespaces is the file without these.
func withoutNamespaces(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	docs := slices.DeleteFunc(strings.Split(string(text), "\n---\n"), func(doc string) bool { return strings.Contains("\n"+doc, "\nkind: Namespace\n") })
	out := strings.TrimSuffix(file, ".yaml") + "-removed.yaml"
	if err := os.WriteFile(out, []byte(strings.Join(docs, "\n---\n")), 0o600); err != nil {
		t.Fatal(err)
	}
	return out
}
