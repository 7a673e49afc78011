// Package kustomize builds kustomizations over deploy/ by the library that is in kubectl, in the process of the test: most of the time of
// kubectl kustomize goes into its start.
package kustomize

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// Files are those of a kustomization, by their paths. In each kustomization.yaml DEPLOY is the folder deploy/, and kind and version need not be
// said.
type Files map[string]string

// Over is a kustomization of one in deploy/, as of "overlays/gpu-operator", with components.
func Over(one string, components ...string) Files {
	text := "resources: [DEPLOY/" + one + "]\ncomponents:\n"
	for _, c := range components {
		text += "  - DEPLOY/components/" + c + "\n"
	}
	return Files{"kustomization.yaml": text}
}

// The library keeps the schemas of kinds in its own variables.
var oneAtATime sync.Mutex

// Build is what kubectl kustomize makes of the files, with deploy/ at that path.
func Build(t testing.TB, deploy string, files Files) (string, error) {
	t.Helper()
	dir := Write(t, deploy, files)
	oneAtATime.Lock()
	defer oneAtATime.Unlock()
	options := krusty.MakeDefaultOptions()
	options.Reorder = krusty.ReorderOptionUnspecified // as the kustomization says, as kubectl has it
	made, err := krusty.MakeKustomizer(options).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		return "", fmt.Errorf("building %v: %w", files, err)
	}
	out, err := made.AsYaml()
	if err != nil {
		return "", fmt.Errorf("building %v: %w", files, err)
	}
	return string(out), nil
}

// Write writes the files into a folder, for commands that take one, and returns it. It is removed with the test.
func Write(t testing.TB, deploy string, files Files) (dir string) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir()) // kustomize takes relative paths alone
	if err != nil {
		t.Fatal(err)
	}
	deploy, err = filepath.Abs(deploy)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		file := filepath.Join(dir, name)
		there, err := filepath.Rel(filepath.Dir(file), deploy)
		if err != nil {
			t.Fatal(err)
		}
		if filepath.Base(name) == "kustomization.yaml" {
			text = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n" + strings.ReplaceAll(text, "DEPLOY", there)
		}
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}
