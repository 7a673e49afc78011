package shipped_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/render"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// kueueConfigs are what the tests of the command hold it to.
func kueueConfigs(t *testing.T) map[string][]byte {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", "cmd", "kubectl-gpuslice", "render", "testdata", "kueue-config", "*.yaml"))
	if err != nil || len(files) < 2 {
		t.Fatalf("%d configs, error %v", len(files), err)
	}
	out := map[string][]byte{}
	for _, file := range files {
		if out[filepath.Base(file)], err = os.ReadFile(file); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func TestKueueReadsTheConfigThatIsRendered(t *testing.T) {
	atFullLength(t, "the reader of Kueue's config")
	program := filepath.Join(t.TempDir(), "config")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./config")
	build.Dir = filepath.Join("..", "kueue")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	read := func(text []byte) (string, error) {
		run := exec.CommandContext(t.Context(), program)
		run.Stdin = bytes.NewReader(text)
		out, err := run.CombinedOutput()
		return string(out), err
	}
	got := map[string]string{}
	for name, text := range kueueConfigs(t) {
		said, err := read(text)
		if err != nil {
			t.Errorf("%s: %v\n%s", name, err, said)
		}
		got[name] = said
		if said, err := read(bytes.Replace(text, []byte("deviceClassNames:"), []byte("deviceClasses:"), 1)); err == nil {
			t.Errorf("%s with a field that Kueue does not have: it says %s", name, said)
		}
	}
	const classes = " [gpu.nvidia.com mig.nvidia.com mig-1g.10gb mig-2g.20gb mig-3g.40gb] 1\n"
	if diff := cmp.Diff(map[string]string{
		"devices.yaml": "nvidia.com/gpu [gpu.nvidia.com] 0\nnvidia.com/mig-1g.10gb [mig-1g.10gb] 0\nnvidia.com/mig-1g.10gb.me [mig-1g.10gb.me] 0\n" +
			"nvidia.com/mig-2g.20gb [mig-2g.20gb] 0\nnvidia.com/mig-3g.40gb [mig-3g.40gb] 0\n",
		"counters.yaml": "gpu.nvidia.com/memory" + classes + "gpu.nvidia.com/multiprocessors" + classes,
	}, got); diff != "" {
		t.Errorf("mappings (-want +got):\n%s", diff)
	}
}

// An API server takes each example by the command that its head has, but for those of kinds that others bring, or that Argo CD and Flux apply.
func TestAnAPIServerTakesTheExamples(t *testing.T) {
	c := clustertest.Start(t)
	for _, namespace := range []string{"gpuslice", "demo", "team"} {
		if out, err := kubectl(t, c, "create", "namespace", namespace); err != nil && !strings.Contains(out, "already exists") {
			t.Fatalf("error %v\n%s", err, out)
		}
	}
	files, err := filepath.Glob(filepath.Join("..", "..", "deploy", "examples", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d examples, error %v", len(files), err)
	}
	foreign := []string{
		"argocd-health.yaml", "argocd.yaml", "clusterpolicy.yaml", "clusterpolicy-configs.yaml", "flux.yaml", "gitops.yaml", "karpenter.yaml", "machineset.yaml",
	}
	objects := map[string]int{"dra.yaml": 15}
	for _, file := range files {
		name := filepath.Base(file)
		if slices.Contains(foreign, name) {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		found := regexp.MustCompile(`(?m)^#   kubectl ((?:-n [a-z]+ )?apply .*)deploy/examples/` + name + "$").FindSubmatch(text)
		if found == nil {
			t.Errorf("%s has no command that applies it", name)
			continue
		}
		args := append(strings.Fields(string(found[1])), file, "--dry-run=server", "--validate=strict")
		if out, err := kubectl(t, c, args...); err != nil || strings.Count(out, "\n") != max(1, objects[name]) {
			t.Errorf("kubectl %s: error %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// Kueue compiles selectors as the API server does, when it starts: with one that is wrong it would not start.
func TestAnAPIServerCompilesTheSelectorsOfKueuesConfig(t *testing.T) {
	client := clustertest.Client(t)
	compiled := func(selector resourcev1.DeviceSelector) error {
		_, err := client.ResourceV1().DeviceClasses().Create(t.Context(), &resourcev1.DeviceClass{
			ObjectMeta: metav1.ObjectMeta{Name: "selector"}, Spec: resourcev1.DeviceClassSpec{Selectors: []resourcev1.DeviceSelector{selector}},
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	tried := 0
	for name, text := range kueueConfigs(t) {
		var c render.Configuration
		if err := yaml.UnmarshalStrict(text, &c); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, m := range c.Resources.DeviceClassMappings {
			for _, s := range m.Sources {
				tried++
				if err := compiled(s.Counter.DeviceSelector.DeviceSelector); err != nil {
					t.Errorf("%s, %s: %v", name, m.Name, err)
				}
			}
		}
	}
	wrong := resourcev1.DeviceSelector{CEL: &resourcev1.CELDeviceSelector{Expression: "device.attributes['gpu.nvidia.com'].productName.replaced(' ')"}}
	if err := compiled(wrong); tried < 2 || err == nil || !strings.Contains(err.Error(), "replaced") {
		t.Errorf("%d selectors are compiled, and a wrong one says %v", tried, err)
	}
}

// The driver refuses a claim's config only when kubelet prepares the claim, and then its pod hangs: a page must not say what the driver refuses.
func TestNVIDIAsDRADriverReadsTheConfigsOfThePages(t *testing.T) {
	atFullLength(t, "the reader of NVIDIA's DRA driver")
	program := filepath.Join(t.TempDir(), "parameters")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "./parameters")
	build.Dir = filepath.Join("..", "nvidia", "dradriver")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	page, err := os.ReadFile(filepath.Join("..", "..", "deploy", "DRA.md"))
	if err != nil {
		t.Fatal(err)
	}
	read := 0
	for _, block := range strings.Split(string(page), "```yaml\n")[1:] {
		block, _, _ = strings.Cut(block, "```")
		for _, text := range strings.Split(block, "\n---\n") {
			var claim resourcev1.ResourceClaim
			if !strings.Contains(text, "opaque:") {
				continue
			}
			if err := yaml.UnmarshalStrict([]byte(text), &claim); err != nil {
				t.Fatalf("%v:\n%s", err, text)
			}
			for _, config := range claim.Spec.Devices.Config {
				gpu := config.Opaque.Parameters.Raw
				for _, parameters := range [][]byte{gpu, bytes.Replace(gpu, []byte(`"GpuConfig"`), []byte(`"MigDeviceConfig"`), 1)} { // as the page says
					run := exec.CommandContext(t.Context(), program)
					run.Stdin = bytes.NewReader(parameters)
					if out, err := run.CombinedOutput(); err != nil {
						t.Errorf("of %s NVIDIA's driver says: %s", parameters, out)
					}
					read++
				}
			}
		}
	}
	if read < 2 {
		t.Errorf("%d configs are on the page", read)
	}
}
