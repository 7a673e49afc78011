package main

import (
	"context"
	_ "embed" // the script that starts the bundle
	"fmt"
	"os"
	"path/filepath"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/bundle"
)

//go:embed run.sh
var script []byte

// tree is a directory with all that a run starts.
type tree string

// kubePrograms are those of the control plane, and kubectl.
var kubePrograms = []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "etcd"}

// manifests are what is applied to the control plane, from the root of the checkout.
var manifests = []string{
	"deploy/base/namespace.yaml", "deploy/base/serviceaccount.yaml", "deploy/base/rbac.yaml", "deploy/overlays/device-plugin/device-plugin.yaml",
}

// draManifest is NVIDIA's DRA driver, which is applied when the device plugin has gone.
const draManifest = "test/node/manifests/dra-driver.yaml"

func (t tree) bin(name string) string { return filepath.Join(string(t), "bin", name) }

// simulated is where what stands for NVIDIA's driver is, away from where anything looks for the real one.
func (t tree) simulated(name string) string { return filepath.Join(string(t), "simulated", name) }

func (t tree) manifest(file string) string {
	return filepath.Join(string(t), "manifests", filepath.Base(file))
}

// fill links into the tree what the cache has, and builds what it does not have.
func (t tree) fill(ctx context.Context, b binaries.Builder, self func(context.Context) (string, error)) error {
	if err := b.Announce(ctx, "kube", "deviceplugin", "dradriver"); err != nil {
		return err
	}
	kube, err := b.Kube(ctx)
	if err != nil {
		return err
	}
	plugin, err := b.DevicePlugin(ctx)
	if err != nil {
		return err
	}
	driver, err := b.DRADriver(ctx)
	if err != nil {
		return err
	}
	links := map[string]string{t.bin(pluginProgram): filepath.Join(plugin, pluginProgram), t.bin(draProgram): filepath.Join(driver, draProgram)}
	for _, name := range kubePrograms {
		links[t.bin(name)] = filepath.Join(kube, name)
	}
	tool := func(pkg string) func(context.Context) (string, error) {
		return func(ctx context.Context) (string, error) { return b.Tool(ctx, pkg) }
	}
	for at, build := range map[string]func(context.Context) (string, error){
		t.bin("hardware"):                self,
		t.bin("sandbox"):                 tool("./test/sandbox/cmd/sandbox"),
		t.simulated("gpusim"):            tool("./test/gpusim/cmd/gpusim"),
		t.simulated("libnvidia-ml.so.1"): b.LibNVML,
		t.simulated("libcuda.so.1"):      b.LibCUDA,
	} {
		if links[at], err = build(ctx); err != nil {
			return err
		}
	}
	root, err := b.Checkout()
	if err != nil {
		return err
	}
	for _, file := range append([]string{draManifest}, manifests...) {
		links[t.manifest(file)] = filepath.Join(root, file)
	}
	if err := bundle.Link("/", links); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(string(t), "run.sh"), script, 0o755); err != nil {
		return fmt.Errorf("putting the programs together: %w", err)
	}
	return nil
}
