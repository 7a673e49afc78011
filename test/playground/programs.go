package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/bundle"
	"github.com/gpuslice/gpuslice/test/node"
)

// programs are all that a run starts, and where the manifests are.
type programs struct {
	parts  node.Parts
	plugin string // kubectl-gpuslice
	self   string // this program
	root   string // of the checkout, or of the unpacked archive, which has the same manifests
}

// draDriver is NVIDIA's DRA driver, from the root.
const draDriver = "test/node/manifests/dra-driver.yaml"

// both builds what is missing of nodes with NVIDIA's device plugin, and of those with its DRA driver.
func both(ctx context.Context, b binaries.Builder) (node.Parts, error) {
	if err := b.Announce(ctx, "kube", "deviceplugin", "dradriver"); err != nil {
		return node.Parts{}, err
	}
	parts, err := node.Build(ctx, b)
	if err != nil {
		return node.Parts{}, err
	}
	err = parts.BuildDRADriver(ctx, b)
	return parts, err
}

// built builds what is missing, in a checkout.
func built(ctx context.Context, b binaries.Builder, nodes func(context.Context, binaries.Builder) (node.Parts, error)) (p programs, err error) {
	if p.root, err = b.Checkout(); err != nil {
		return p, err
	}
	if p.parts, err = nodes(ctx, b); err != nil {
		return p, err
	}
	if p.plugin, err = b.Tool(ctx, "./cmd/kubectl-gpuslice"); err != nil {
		return p, err
	}
	p.self, err = os.Executable()
	return p, err
}

// The folders of the archive.
const (
	binFolder = "bin"
	libFolder = "lib" // what stands for NVIDIA's driver, away from where anything looks for the real one
)

// unpacked are the programs of an archive.
func unpacked(root string) (programs, error) {
	root, err := filepath.EvalSymlinks(root) // /proc names programs so
	if err != nil {
		return programs{}, fmt.Errorf("looking for the programs: %w", err)
	}
	if root, err = filepath.Abs(root); err != nil {
		return programs{}, fmt.Errorf("looking for the programs: %w", err)
	}
	bin := filepath.Join(root, binFolder)
	return programs{
		parts: node.Parts{
			Kube: bin, DevicePlugin: bin, DRADriver: bin, LibNVML: filepath.Join(root, libFolder, "libnvidia-ml.so.1"),
			Agent: filepath.Join(bin, "gpuslice-agent"), Sandbox: filepath.Join(bin, "sandbox"), GPUSim: filepath.Join(root, libFolder, "gpusim"),
		},
		plugin: filepath.Join(bin, "kubectl-gpuslice"), self: filepath.Join(bin, "playground"), root: root,
	}, nil
}

// link is one to a page that the archive does not have.
var link = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)

// pack writes the archive.
func pack(ctx context.Context, w io.Writer, b binaries.Builder, to string) (err error) {
	if err := bundle.Possible(); err != nil {
		return err
	}
	p, err := built(ctx, b, both)
	if err != nil {
		return err
	}
	if p.self, err = b.Tool(ctx, "./test/playground"); err != nil {
		return err
	}
	files := map[string]string{
		"bin/playground": p.self, "bin/gpuslice-agent": p.parts.Agent, "bin/sandbox": p.parts.Sandbox, "bin/kubectl-gpuslice": p.plugin,
		"lib/gpusim": p.parts.GPUSim, "lib/libnvidia-ml.so.1": p.parts.LibNVML,
	}
	for dir, names := range map[string][]string{
		p.parts.Kube:         {"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "etcd"},
		p.parts.DevicePlugin: {"nvidia-device-plugin", "gpu-feature-discovery", "mps-control-daemon"},
		p.parts.DRADriver:    {"gpu-kubelet-plugin"},
	} {
		for _, name := range names {
			files["bin/"+name] = filepath.Join(dir, name)
		}
	}
	for at, file := range map[string]string{"run.sh": "test/playground/run.sh", "LICENSE": "LICENSE", draDriver: draDriver, "deploy": "deploy"} {
		files[at] = filepath.Join(p.root, file)
	}
	dir, err := os.MkdirTemp("", archiveName+"-")
	if err != nil {
		return fmt.Errorf("making a directory for the archive: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := bundle.Link(dir, files); err != nil {
		return err
	}
	page, err := os.ReadFile(filepath.Join(p.root, "test/playground/README.md"))
	if err != nil {
		return fmt.Errorf("reading the page of the playground: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "README.md"), link.ReplaceAll(page, []byte("$1")), 0o644); err != nil {
		return fmt.Errorf("writing the page of the playground: %w", err)
	}
	return bundle.Pack(ctx, w, dir, archiveName, to, mostBytes)
}
