package repo_test

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/render"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/deviceplugin"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/config/migparted"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/gpusim/gpusimtest"
)

// configMap reads a manifest.
func configMap(t *testing.T, path ...string) corev1.ConfigMap {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(append([]string{"..", ".."}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	var m corev1.ConfigMap
	if err := sigsyaml.UnmarshalStrict(text, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

// An example runs on what deploy/base installs, next to NVIDIA's plain DaemonSet of its device plugin, or says first what it needs. agent/decide tries the profiles.
func TestEachExampleSaysFirstWhatItNeeds(t *testing.T) {
	onBase := []string{"configmap-maintenance.yaml"} // of what the agent alone reads
	files, err := os.ReadDir(filepath.Join("..", "..", "deploy", "examples"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d examples, error %v", len(files), err)
	}
	for _, file := range files {
		first, _, _ := strings.Cut(read(t, "deploy/examples/"+file.Name()), "\n")
		if strings.HasPrefix(first, "# Needs ") == slices.Contains(onBase, file.Name()) {
			t.Errorf("%s begins %q; want # Needs …, unless it runs on deploy/base", file.Name(), first)
		}
	}
}

// exampleProfiles reads a ConfigMap of profiles that is there to be copied.
func exampleProfiles(t *testing.T, file string) map[string]catalog.Profile {
	t.Helper()
	m := configMap(t, "deploy", "examples", file)
	if m.Namespace != namespace || m.Name != config.DefaultProfiles {
		t.Errorf("%s is ConfigMap %s/%s, which the settings of deploy/base do not name", file, m.Namespace, m.Name)
	}
	profiles, err := catalog.ParseProfiles([]byte(m.Data[config.DefaultProfilesKey]))
	if err != nil {
		t.Fatal(err)
	}
	return profiles
}

// apply cuts simulated GPUs as the label gpuslice.io/profile would ask by that name, and gives them as they are then.
func apply(t *testing.T, name string, profiles map[string]catalog.Profile, node string) []nvml.GPU {
	t.Helper()
	driver := gpusimtest.NodeIn(t, t.TempDir(), node).Driver()
	gpus, err := driver.Snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	requests, err := catalog.Merge(catalog.Generate(gpus), nil).WithProfiles(profiles).ProfileRequests(name, gpus)
	if err != nil {
		t.Fatal(err)
	}
	for _, gpu := range gpus {
		request, ok := requests[gpu.UUID]
		if !ok {
			t.Fatalf("%s says nothing about %s", name, gpu.Model)
		}
		cut(t, driver, gpu, request)
	}
	if gpus, err = driver.Snapshot(t.Context()); err != nil {
		t.Fatal(err)
	}
	return gpus
}

func cut(t *testing.T, driver nvml.Driver, gpu nvml.GPU, request nvml.Request) {
	t.Helper()
	if gpu.Enabled != request.MIG {
		if err := driver.SetMode(t.Context(), gpu.UUID, request.MIG); err != nil {
			t.Fatal(err)
		}
		if err := driver.Reset(t.Context(), gpu.UUID); err != nil {
			t.Fatal(err)
		}
	}
	solution, err := nvml.Solve(gpu, request.Devices)
	if err != nil {
		t.Fatalf("%s: %v", gpu.Model, err)
	}
	for _, placed := range solution.Create {
		if err := driver.Create(t.Context(), gpu.UUID, placed); err != nil {
			t.Fatal(err)
		}
	}
}

// capacity is what the device plugin makes of the GPUs under the strategy, by the name of the resource.
func capacity(t *testing.T, gpus []nvml.GPU, strategy config.MIGStrategy, sharing catalog.Sharing) map[string]int {
	t.Helper()
	devices := map[string]int{}
	for _, gpu := range gpus {
		if !gpu.Enabled {
			devices["nvidia.com/gpu"]++
		}
		for _, instance := range gpu.Instances {
			for _, device := range instance.Devices {
				name := "nvidia.com/gpu"
				if strategy == config.MIGStrategyMixed {
					name = "nvidia.com/mig-" + strings.ReplaceAll(device.Profile, "+", ".")
				}
				devices[name]++
			}
		}
	}
	if err := catalog.CheckSharing(gpus, strategy, sharing, slices.Collect(maps.Keys(devices))); err != nil {
		t.Fatal(err)
	}
	offered := map[string]int{}
	for resource, count := range devices {
		name, replicas := sharing.Offered(resource)
		offered[name] += count * replicas
	}
	return offered
}

func TestThePoolsHaveWhatTheirGuideCounts(t *testing.T) {
	const a100s, h100s = "gpus: [{model: A100-80GB, count: 8}]", "gpus: [{model: H100-80GB, count: 8}]"
	profiles := exampleProfiles(t, "configmap-pools.yaml")
	for name, guide := range map[string]struct {
		node string
		want map[string]int
	}{
		"research":             {a100s, map[string]int{"nvidia.com/gpu": 24}},
		"training":             {a100s, map[string]int{"nvidia.com/gpu": 24}},
		"development":          {a100s, map[string]int{"nvidia.com/gpu": 24}},
		"batch-inference":      {a100s, map[string]int{"nvidia.com/gpu": 24}},
		"training-h100":        {h100s, map[string]int{"nvidia.com/gpu": 16}},
		"fine-tuning":          {h100s, map[string]int{"nvidia.com/gpu": 16}},
		"production-inference": {a100s, map[string]int{"nvidia.com/gpu": 16}},
		"critical-agents":      {a100s, map[string]int{"nvidia.com/gpu": 24}},
		"small-inference":      {a100s, map[string]int{"nvidia.com/gpu": 56}},
		"balanced-inference":   {a100s, map[string]int{"nvidia.com/mig-3g.40gb": 8, "nvidia.com/mig-2g.20gb": 16}},
	} {
		t.Run(name, func(t *testing.T) {
			profile, ok := profiles[name]
			if !ok {
				t.Fatalf("the example has no profile of that name, but %v", slices.Sorted(maps.Keys(profiles)))
			}
			gpus := apply(t, name, profiles, guide.node)
			for _, has := range []config.MIGStrategy{config.MIGStrategyNone, config.MIGStrategySingle, config.MIGStrategyMixed} {
				strategy := profile.MIGStrategy
				if strategy == "" {
					strategy = catalog.FittingStrategy(gpus, has, false)
				}
				if diff := cmp.Diff(guide.want, capacity(t, gpus, strategy, *profile.Sharing)); diff != "" {
					t.Errorf("where the device plugin has had the strategy %s (-guide +example):\n%s", has, diff)
				}
			}
		})
	}
}

func TestTheConfigMapsOfGuidesGiveTheCapacityTheyPromise(t *testing.T) {
	none := catalog.Sharing{Strategy: catalog.SharingNone}
	for name, guide := range map[string]struct {
		file, key string // of the device plugin's config; without a file nothing is shared
		node, mig string
		want      map[string]int
	}{
		"nvidia.com/gpu: 4 (indicating 4 virtual GPUs available)": {
			"gpuaas-openshift-ai.yaml", "any", "gpus: [{model: A30}]", "all-disabled", map[string]int{"nvidia.com/gpu": 4},
		},
		"one T4 card each that we want to make seen as 4 different cards": {
			"working-with-gpus.yaml", "tesla-t4", "gpus: [{model: T4}]", "all-disabled", map[string]int{"nvidia.com/gpu": 4},
		},
		"3 replicas per A100 GPU": {
			"gpu-sharing-strategy.yaml", "config.yaml", "gpus: [{model: A100-80GB, count: 2}]", "all-disabled", map[string]int{"nvidia.com/gpu": 6},
		},
		"nvidia.com/mig-1g.5gb: 7": {
			"", "", "gpus: [{model: A100-40GB}]", "all-1g.5gb", map[string]int{"nvidia.com/mig-1g.5gb": 7},
		},
		"name: nvidia.com/mig-1g.5gb / replicas: 2": {
			"working-with-gpus-mig.yaml", "a100-mig", "gpus: [{model: A100-40GB}]", "all-1g.5gb", map[string]int{"nvidia.com/mig-1g.5gb": 14},
		},
	} {
		t.Run(name, func(t *testing.T) {
			sharing := none
			if guide.file != "" {
				text := configMap(t, "config", "deviceplugin", "testdata", guide.file).Data[guide.key]
				read, err := deviceplugin.Parse([]byte(text))
				if err != nil || text == "" {
					t.Fatalf("reading %q: %v", text, err)
				}
				sharing = read.Sharing
			}
			got := capacity(t, apply(t, guide.mig, nil, guide.node), config.MIGStrategyMixed, sharing)
			if diff := cmp.Diff(guide.want, got); diff != "" {
				t.Errorf("capacity (-promised +got):\n%s", diff)
			}
		})
	}
}

// People copy what the pages show.
func TestTheFilesThatThePagesShowAreRead(t *testing.T) {
	block := regexp.MustCompile("(?ms)^```yaml\n(.*?)^```")
	examples := 0
	for _, page := range pages(t) {
		for _, found := range block.FindAllSubmatch([]byte(read(t, page)), -1) {
			var err error
			var file struct {
				Kind   string
				Data   map[string]string
				Models []any
			}
			if err := sigsyaml.Unmarshal(found[1], &file); err != nil {
				t.Errorf("%s: %v\n%s", page, err, found[1])
			}
			switch file.Kind {
			case "ClusterRole":
				err = sigsyaml.UnmarshalStrict(found[1], &rbacv1.ClusterRole{})
			case "Kustomization":
				_, err = sigsyaml.YAMLToJSONStrict(found[1])
			case "Pod":
				err = sigsyaml.UnmarshalStrict(found[1], &corev1.Pod{})
			case "ResourceClaim":
				err = sigsyaml.UnmarshalStrict(found[1], &resourcev1.ResourceClaim{})
			case "ConfigMap":
				for name, inside := range file.Data {
					err = errors.Join(err, readByName(name, []byte(inside)))
				}
			default:
				err = readBare(found[1], file.Models != nil)
			}
			if examples++; err != nil {
				t.Errorf("%s: %v\n%s", page, err, found[1])
			}
		}
	}
	if examples < 4 {
		t.Errorf("the pages show %d files", examples)
	}
}

// readBare reads a file of prices, or a part of the settings.
func readBare(text []byte, prices bool) (err error) {
	if prices {
		_, err = render.ReadPrices("-", bytes.NewReader(text))
		return err
	}
	_, err = config.Parse(append([]byte("apiVersion: "+config.SettingsAPIVersion+"\nkind: "+config.SettingsKind+"\n"), text...))
	return err
}

// readByName reads a file that the agent finds in a ConfigMap under this name.
func readByName(name string, text []byte) (err error) {
	switch name {
	case config.DefaultProfilesKey:
		_, err = catalog.ParseProfiles(text)
	case config.DefaultMaintenanceKey:
		_, err = maintenance.Parse(text)
	case config.DefaultMIGConfigMapKey:
		_, err = migparted.Parse(text)
	case "settings.yaml":
		_, err = config.Parse(text)
	case "default": // of the overlays, for NVIDIA's device plugin
		_, err = deviceplugin.Parse(text)
	default:
		err = fmt.Errorf("the agent reads no %s", name)
	}
	return err
}
