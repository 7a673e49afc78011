package binaries

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/semver"
)

// Variables that select an earlier version to build, instead of the one that all tests run with. An unknown version is
// an error, never ignored.
const (
	KubeVersion         = "GPUSLICE_KUBE_VERSION"
	DevicePluginVersion = "GPUSLICE_DEVICE_PLUGIN_VERSION"
)

const plugin = "github.com/NVIDIA/k8s-device-plugin"

// choice is what a variable chooses from.
type choice struct {
	variable string
	module   string            // its version is chosen
	current  recipe            // without the variable
	older    map[string]recipe // by version
}

var (
	kubeChoice = choice{KubeVersion, kubernetes, kube, map[string]recipe{
		"v1.30.14": olderKube("v1.30.14", "v1.30.14.mod"),
		"v1.34.2":  olderKube("v1.34.2", ""),
	}}
	devicePluginChoice = choice{DevicePluginVersion, plugin, devicePlugin, map[string]recipe{
		"v0.17.4": olderDevicePlugin("v0.17.4", "plugin0.17"),
		"v0.18.0": olderDevicePlugin("v0.18.0", ""),
	}}
)

// olderKube is an earlier Kubernetes than test/kube has, without kubelet and etcd.
func olderKube(version, mod string) recipe {
	return recipe{
		name:   "kube-" + version,
		what:   "Kubernetes {{" + kubernetes + "}}",
		module: "test/skew/kube",
		mod:    mod,
		work:   12 * time.Minute,
		steps:  []step{kube.steps[0]},
		links:  map[string][]string{"kube": olderKubePrograms},
	}
}

var olderKubePrograms = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"}

// olderDevicePlugin is an earlier version of NVIDIA's device plugin than test/nvidia/deviceplugin has: the same
// module with other requirements.
func olderDevicePlugin(version, tags string) recipe {
	r := devicePlugin
	r.mod = version + ".mod"
	r.steps = slices.Clone(r.steps)
	r.steps[0].tags = tags
	return r
}

// Versions are the selectable versions of Kubernetes and of NVIDIA's device plugin, the oldest first. The last of each
// is the default.
func (b Builder) Versions() (kube, devicePlugin []string, err error) {
	root, err := b.root()
	if err != nil {
		return nil, nil, err
	}
	if kube, err = kubeChoice.versions(root); err != nil {
		return nil, nil, err
	}
	devicePlugin, err = devicePluginChoice.versions(root)
	return kube, devicePlugin, err
}

func (c choice) versions(root string) ([]string, error) {
	wanted, err := required(c.current.modFile(filepath.Join(root, c.current.module)))
	if err != nil {
		return nil, err
	}
	var versions []string
	for version := range c.older {
		versions = append(versions, version)
	}
	semver.Sort(versions)
	return append(versions, wanted[c.module]), nil
}

// made is the recipe that the variable chooses, and whether it is an older one.
func (c choice) made(root string) (r recipe, older bool, err error) {
	version := os.Getenv(c.variable)
	if version == "" {
		return c.current, false, nil
	}
	if r, older = c.older[version]; older {
		return r, true, nil
	}
	versions, err := c.versions(root)
	if err != nil {
		return recipe{}, false, err
	}
	if version != versions[len(versions)-1] {
		return recipe{}, false, fmt.Errorf("%s=%s: only %s can be built", c.variable, version, strings.Join(versions, ", "))
	}
	return c.current, false, nil
}

// olderKube returns the directory of an earlier Kubernetes, together with the etcd that all tests run with.
func (b Builder) olderKube(ctx context.Context, r recipe) (string, error) {
	if dir := os.Getenv(KubeBin); dir != "" {
		return "", fmt.Errorf("%s=%s and %s=%s name two: unset one", KubeBin, dir, KubeVersion, os.Getenv(KubeVersion))
	}
	older, err := b.cached(ctx, r, nil)
	if err != nil {
		return "", err
	}
	current, unfit, err := b.presentKube(ctx)
	if err == nil && current == "" {
		current, err = b.cached(ctx, kube, unfit)
	}
	if err != nil {
		return "", err
	}
	paths := []string{filepath.Join(current, "etcd")}
	for _, name := range olderKubePrograms {
		paths = append(paths, filepath.Join(older, name))
	}
	dir, err := b.link(r.name, paths)
	if err != nil {
		return "", fmt.Errorf("linking Kubernetes %s and etcd: %w", os.Getenv(KubeVersion), err)
	}
	return dir, nil
}

// link makes a directory with these programs under their names, or finds it.
func (b Builder) link(name string, paths []string) (string, error) {
	cache, err := b.cache()
	if err != nil {
		return "", err
	}
	hash := sha256.Sum256([]byte(strings.Join(paths, "\n")))
	dir := filepath.Join(cache, name+"-linked-"+hex.EncodeToString(hash[:])[:hashLength])
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	partial, err := os.MkdirTemp(cache, ".linking-kube-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(partial)
	for _, path := range paths {
		if err := os.Symlink(path, filepath.Join(partial, filepath.Base(path))); err != nil {
			return "", err
		}
	}
	if err := os.Chmod(partial, 0o755); err != nil {
		return "", err
	}
	// Another process may already have made the same.
	if err := os.Rename(partial, dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	return dir, nil
}
