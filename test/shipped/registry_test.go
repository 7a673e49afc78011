package shipped_test

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// pinned is the program of a module of test/ that a release is pushed by.
func pinned(t *testing.T, module, name string) string {
	t.Helper()
	build := exec.CommandContext(t.Context(), "go", "tool", "-n", "-modfile=test/"+module+"/go.mod", name)
	build.Dir, build.Env, build.Stderr = root, compiling(), os.Stderr
	path, err := build.Output()
	if err != nil {
		t.Fatalf("building %s: %v", name, err)
	}
	return strings.TrimSpace(string(path))
}

// registry serves one of go-containerregistry on loopback until the test ends, and gives its address.
func registry(t *testing.T, crane string) string {
	t.Helper()
	serve := exec.CommandContext(t.Context(), crane, "registry", "serve", "--address", "127.0.0.1:0")
	log, err := serve.StderrPipe()
	if err == nil {
		err = serve.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = serve.Wait() }) // it ends with the context of the test
	lines := bufio.NewScanner(log)
	for lines.Scan() {
		if _, port, found := strings.Cut(lines.Text(), "serving on port "); found {
			go func() {
				for lines.Scan() { // or it would wait for a reader
				}
			}()
			return "127.0.0.1:" + port
		}
	}
	t.Fatal("the registry has not said where it serves")
	return ""
}

// isPublished has "make publish" push a release, as the workflow does, and installs what is then in the registry: the manifests of each place twice, and
// the chart by Helm.
func isPublished(t *testing.T, crane, out, at string) {
	t.Helper()
	publish := exec.CommandContext(t.Context(), "make", "publish", "VERSION=v9.8.7", "RELEASE="+out, "IMAGE="+at+"/gpuslice/gpuslice-agent", "CHARTS="+at+"/charts")
	publish.Dir, publish.Env = root, compiling("HELM_CONFIG_HOME="+t.TempDir())
	if said, err := publish.CombinedOutput(); err != nil {
		t.Fatalf("make publish: %v\n%s", err, said)
	}
	c := clustertest.Start(t)
	named := regexp.MustCompile(`image: (` + regexp.QuoteMeta(at) + `/\S+)`)
	for name, place := range places {
		text, err := os.ReadFile(filepath.Join(out, name))
		if err != nil {
			t.Fatal(err)
		}
		image := named.FindSubmatch(text)
		if image == nil {
			t.Fatalf("%s names no image of the registry", name)
		}
		// Each blob of each platform is there, and has the digest that its name says.
		if said, err := exec.CommandContext(t.Context(), crane, "validate", "--remote", string(image[1])).CombinedOutput(); err != nil {
			t.Errorf("%s: a node cannot pull %s: %v\n%s", name, image[1], err, said)
		}
		appliesTwice(t, c, filepath.Join(out, name), place.needs)
	}
	// In a cluster of its own: Helm takes over nothing that kubectl has applied.
	apart := clustertest.Apart(t, "helm")
	home := t.TempDir()
	install := exec.CommandContext(t.Context(), pinned(t, "helm", "helm"), "install", "gpuslice", "oci://"+at+"/charts/gpuslice", "--version", "9.8.7",
		"--plain-http", "--namespace", "gpuslice", "--create-namespace", "--set", "devicePlugin.enabled=true", "--kubeconfig", apart.AdminKubeconfig())
	install.Env = append(os.Environ(), "HELM_CONFIG_HOME="+home, "HELM_CACHE_HOME="+home, "HELM_DATA_HOME="+home)
	if said, err := install.CombinedOutput(); err != nil {
		t.Fatalf("helm install: %v\n%s", err, said)
	}
	image, err := kubectl(t, apart, "-n", "gpuslice", "get", "daemonset", "gpuslice-agent", "-o", "jsonpath={.spec.template.spec.containers[0].image}")
	if err != nil {
		t.Fatal(image, err)
	}
	if said, err := exec.CommandContext(t.Context(), crane, "validate", "--remote", image).CombinedOutput(); err != nil || !strings.Contains(image, "@sha256:") {
		t.Errorf("the chart installs %q: %v\n%s", image, err, said)
	}
}
