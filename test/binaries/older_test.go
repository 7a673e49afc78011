package binaries_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/tools/txtar"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// earlier are the modules of earlier versions, whose programs print the version, too.
const earlier = `
-- test/skew/kube/go.mod --
module example.com/earlier

go 1.26.0

require (
	k8s.io/component-base v0.34.2
	k8s.io/kubernetes v1.34.2
)

replace (
	k8s.io/component-base => ../../kube/base
	k8s.io/kubernetes => ../../kube/kubernetes
)
-- test/skew/kube/v1.30.14.mod --
module example.com/earlier

go 1.26.0

require (
	k8s.io/component-base v0.30.14
	k8s.io/kubernetes v1.30.14
)

replace (
	k8s.io/component-base => ../../kube/base
	k8s.io/kubernetes => ../../kube/kubernetes
)
-- test/skew/kube/main.go --
package main

import (
	"os"
	"path/filepath"

	"k8s.io/component-base/version"
)

func main() { println(filepath.Base(os.Args[0]), version.Version()) }
-- test/nvidia/deviceplugin/go.mod --
module example.com/plugin

go 1.26.0

require github.com/NVIDIA/k8s-device-plugin v0.19.3

replace github.com/NVIDIA/k8s-device-plugin => ./now
-- test/nvidia/deviceplugin/v0.17.4.mod --
module example.com/plugin

go 1.26.0

require github.com/NVIDIA/k8s-device-plugin v0.17.4

replace github.com/NVIDIA/k8s-device-plugin => ./before
-- test/nvidia/deviceplugin/mps-control-daemon/main.go --
package main

func main() {}
`

// newEarlierBuilder returns a builder for a checkout that has them.
func newEarlierBuilder(t *testing.T) binaries.Builder {
	t.Helper()
	b, root := newBuilder(t)
	t.Setenv(binaries.KubeVersion, "")
	t.Setenv(binaries.DevicePluginVersion, "")
	for _, f := range txtar.Parse([]byte(earlier)).Files {
		write(t, filepath.Join(root, f.Name), string(f.Data))
	}
	for _, when := range []string{"now", "before"} {
		plugin := filepath.Join(root, "test/nvidia/deviceplugin", when)
		write(t, filepath.Join(plugin, "go.mod"), "module github.com/NVIDIA/k8s-device-plugin\n")
		for _, name := range []string{"nvidia-device-plugin", "gpu-feature-discovery", "config-manager"} {
			write(t, filepath.Join(plugin, "cmd", name, "main.go"), "package main\n\nfunc main() { println(\""+name+" "+when+"\") }\n")
		}
	}
	return b
}

func TestAnEarlierKubernetesIsTakenWhereItsVersionIsNamed(t *testing.T) {
	b := newEarlierBuilder(t)
	for version, want := range map[string]string{"": "v1.37.1", "v1.30.14": "v1.30.14", "v1.34.2": "v1.34.2", "v1.37.1": "v1.37.1"} {
		t.Setenv(binaries.KubeVersion, version)
		dir, err := b.Kube(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "etcd"} {
			got = append(got, output(t, filepath.Join(dir, name)))
		}
		all := []string{"kube-apiserver " + want, "kube-controller-manager " + want, "kube-scheduler " + want, "kubectl " + want, "etcd"}
		if diff := cmp.Diff(all, got); diff != "" {
			t.Errorf("%q: what the programs print (-want +got):\n%s", version, diff)
		}
	}
}

func TestAnEarlierDevicePluginIsBuiltByTheModuleFileOfItsVersion(t *testing.T) {
	b := newEarlierBuilder(t)
	for version, want := range map[string]string{"": "now", "v0.17.4": "before", "v0.19.3": "now"} {
		t.Setenv(binaries.DevicePluginVersion, version)
		dir, err := b.DevicePlugin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := output(t, filepath.Join(dir, "config-manager")); got != "config-manager "+want {
			t.Errorf("%q: it prints %q, want that of %s", version, got, want)
		}
	}
}

func TestAnEarlierVersionIsBuiltOnlyWhereItIsNamed(t *testing.T) {
	b := newEarlierBuilder(t)
	var lines log
	b.Log = &lines
	if err := b.Announce(t.Context(), "kube", "deviceplugin"); err != nil {
		t.Fatal(err)
	}
	if text := lines.String(); strings.Contains(text, "v1.30.14") || strings.Contains(text, "v0.17.4") {
		t.Errorf("to be built: %s", text)
	}
	lines.Reset()
	t.Setenv(binaries.KubeVersion, "v1.30.14")
	t.Setenv(binaries.DevicePluginVersion, "v0.17.4")
	if err := b.Announce(t.Context(), "kube", "deviceplugin"); err != nil {
		t.Fatal(err)
	}
	if want := "to be built, once: Kubernetes v1.30.14, NVIDIA's device plugin v0.17.4; "; !strings.HasPrefix(lines.String(), want) {
		t.Errorf("it was said %q, want %q", &lines, want)
	}
	if built, err := filepath.Glob(filepath.Join(b.Cache, "kube-*")); err != nil || len(built) > 0 {
		t.Errorf("built: %v, %v", built, err)
	}
}

func TestAVersionThatIsNotKnownIsNeverPassedOver(t *testing.T) {
	b := newEarlierBuilder(t)
	t.Setenv(binaries.KubeVersion, "v1.29.0")
	if dir, err := b.Kube(t.Context()); err == nil || !strings.Contains(err.Error(), "GPUSLICE_KUBE_VERSION=v1.29.0: only v1.30.14, v1.34.2, v1.37.1 can be built") {
		t.Errorf("Kube returned %q, %v", dir, err)
	}
	t.Setenv(binaries.DevicePluginVersion, "v1")
	if dir, err := b.DevicePlugin(t.Context()); err == nil || !strings.Contains(err.Error(), "GPUSLICE_DEVICE_PLUGIN_VERSION=v1: only v0.17.4, v0.18.0, v0.19.3 can be built") {
		t.Errorf("DevicePlugin returned %q, %v", dir, err)
	}
	t.Setenv(binaries.KubeVersion, "v1.34.2")
	t.Setenv(binaries.KubeBin, install(t, says()))
	if dir, err := b.Kube(t.Context()); err == nil || !strings.Contains(err.Error(), "name two: unset one") {
		t.Errorf("beside %s=%s Kube returned %q, %v", binaries.KubeBin, os.Getenv(binaries.KubeBin), dir, err)
	}
}

func TestTheVersionsThereAreAreThoseOfTheModuleFiles(t *testing.T) {
	root, err := binaries.Builder{}.Checkout()
	if err != nil {
		t.Fatal(err)
	}
	kube, plugins, err := binaries.Builder{}.Versions()
	if err != nil {
		t.Fatal(err)
	}
	requires := func(file, module, version string) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(text), "\t"+module+" "+version+"\n") {
			t.Errorf("%s does not require %s %s", file, module, version)
		}
	}
	if len(kube) != 3 || len(plugins) != 3 {
		t.Fatalf("versions %v and %v", kube, plugins)
	}
	requires("test/skew/kube/v1.30.14.mod", "k8s.io/kubernetes", kube[0])
	requires("test/skew/kube/go.mod", "k8s.io/kubernetes", kube[1])
	requires("test/kube/go.mod", "k8s.io/kubernetes", kube[2])
	for _, version := range plugins[:2] {
		requires("test/nvidia/deviceplugin/"+version+".mod", "github.com/NVIDIA/k8s-device-plugin", version)
	}
	requires("test/nvidia/deviceplugin/go.mod", "github.com/NVIDIA/k8s-device-plugin", plugins[2])
}
