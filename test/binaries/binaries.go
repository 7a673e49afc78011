// Package binaries builds the programs that tests and the demo start, and keeps them outside the checkout: Kubernetes,
// etcd, containerd and NVIDIA's programs from modules of their own, the project's own programs from the root module.
//
// What is built once for a version of the sources is found again by every later process; processes that want the same at
// the same moment build it once. The package knows how programs are built, never how they are run.
package binaries

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Builder builds what is not built yet. The zero value works within a checkout.
type Builder struct {
	Log   io.Writer // progress, a line each; nil for none
	Root  string    // the checkout; "" looks for it from the working directory upwards
	Cache string    // where results are kept; "" is gpuslice in the user's cache directory
}

// lazy leaves functions of the NVIDIA library unresolved until they are called: the programs start without it, and with
// one that is older than they are.
const lazy = "-extldflags=-Wl,-z,lazy"

// Kube returns the directory of kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kubectl and etcd. Building
// them for the first time takes several minutes.
func (b Builder) Kube(ctx context.Context) (dir string, err error) {
	return b.cached(ctx, recipe{
		name:   "kube",
		module: "test/kube",
		steps: []step{
			{out: "kube", packages: []string{"."}, ldflags: []string{"-X k8s.io/component-base/version.gitVersion={{k8s.io/kubernetes}}"}},
			{out: "etcd", packages: []string{"go.etcd.io/etcd/server/v3"}},
		},
		links: map[string][]string{"kube": {"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"}},
	})
}

// Runtime returns the directory of containerd, containerd-shim-runc-v2, ctr, runc, and the CNI plugins bridge, host-local and
// loopback. runc needs the headers of libseccomp, and pkg-config to find them.
func (b Builder) Runtime(ctx context.Context) (dir string, err error) {
	const commands = "github.com/containerd/containerd/v2/cmd/"
	const plugins = "github.com/containernetworking/plugins/plugins/"
	return b.cached(ctx, recipe{
		name:   "runtime",
		module: "test/runtime",
		steps: []step{
			{out: "runc", packages: []string{"github.com/opencontainers/runc"}, tags: "seccomp", cgo: true},
			{
				packages: []string{
					commands + "containerd", commands + "containerd-shim-runc-v2", commands + "ctr",
					plugins + "main/bridge", plugins + "main/loopback", plugins + "ipam/host-local",
				},
				tags:    "netgo,osusergo,no_btrfs,no_zfs",
				ldflags: []string{"-X github.com/containerd/containerd/v2/version.Version={{github.com/containerd/containerd/v2}}"},
			},
		},
	})
}

// DevicePlugin returns the directory of NVIDIA's nvidia-device-plugin, gpu-feature-discovery, config-manager and
// mps-control-daemon.
func (b Builder) DevicePlugin(ctx context.Context) (dir string, err error) {
	const commands = "github.com/NVIDIA/k8s-device-plugin/cmd/"
	return b.cached(ctx, recipe{
		name:   "nvidia-device-plugin",
		module: "test/nvidia/deviceplugin",
		steps: []step{{
			cgo: true,
			packages: []string{
				commands + "nvidia-device-plugin", commands + "gpu-feature-discovery", commands + "config-manager", "./mps-control-daemon",
			},
			ldflags: []string{
				"-X github.com/NVIDIA/k8s-device-plugin/internal/info.version={{github.com/NVIDIA/k8s-device-plugin}}", lazy,
			},
		}},
	})
}

// PluginConfig returns the directory of pluginconfig, which reads config files as NVIDIA's device plugin does.
func (b Builder) PluginConfig(ctx context.Context) (dir string, err error) {
	return b.cached(ctx, recipe{
		name:   "nvidia-plugin-config",
		module: "test/nvidia/pluginconfig",
		steps:  []step{{packages: []string{"."}}},
	})
}

// MigParted returns the directory of NVIDIA's nvidia-mig-parted and nvidia-mig-manager.
func (b Builder) MigParted(ctx context.Context) (dir string, err error) {
	const commands = "github.com/NVIDIA/mig-parted/cmd/"
	return b.cached(ctx, recipe{
		name:   "nvidia-mig-parted",
		module: "test/nvidia/migparted",
		steps: []step{{
			cgo:      true,
			packages: []string{commands + "nvidia-mig-parted", commands + "nvidia-mig-manager"},
			ldflags: []string{
				"-X github.com/NVIDIA/mig-parted/internal/info.version={{github.com/NVIDIA/mig-parted}}", lazy,
			},
		}},
	})
}

// recipe says how the programs of a module of its own are built.
type recipe struct {
	name   string
	module string // directory of the module, from the root of the checkout
	steps  []step
	links  map[string][]string // file that was built -> further names for it
}

// step is one run of the compiler.
type step struct {
	out      string // name of the program; "" names each after its package
	packages []string
	cgo      bool
	tags     string   // build tags, separated by commas
	ldflags  []string // {{module}} stands for the version of that module
}

// cached returns the directory with the results of r and builds it when it is not there.
func (b Builder) cached(ctx context.Context, r recipe) (string, error) {
	root, err := b.root()
	if err != nil {
		return "", err
	}
	cache, err := b.cache()
	if err != nil {
		return "", err
	}
	module := filepath.Join(root, r.module)
	key, err := r.key(ctx, module)
	if err != nil {
		return "", fmt.Errorf("looking for changes of %s: %w", module, err)
	}
	dir := filepath.Join(cache, r.name+"-"+key)
	unlock, err := b.lock(ctx, dir+".lock", r.name)
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(dir); err == nil {
		b.logf("%s: cached", r.name)
		return dir, nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	partial, err := os.MkdirTemp(cache, ".building-"+r.name+"-")
	if err != nil {
		return "", fmt.Errorf("building %s: %w", r.name, err)
	}
	defer os.RemoveAll(partial)
	if err := b.timed(r.name, func() error { return r.build(ctx, module, partial) }); err != nil {
		return "", err
	}
	if err := os.Chmod(partial, 0o755); err != nil {
		return "", fmt.Errorf("building %s: %w", r.name, err)
	}
	if err := os.Rename(partial, dir); err != nil {
		return "", fmt.Errorf("building %s: %w", r.name, err)
	}
	return dir, nil
}

// key hashes everything that decides the result: sources, versions of what they require, compiler and flags.
func (r recipe) key(ctx context.Context, module string) (string, error) {
	hash := sha256.New()
	err := filepath.WalkDir(module, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		if name := entry.Name(); name != "go.mod" && name != "go.sum" && filepath.Ext(name) != ".go" {
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(module, path)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(hash, "%s %d\n%s\n", name, len(source), source)
		return err
	})
	if err != nil {
		return "", err
	}
	version, err := run(ctx, module, nil, "version")
	if err != nil {
		return "", err
	}
	if _, err := fmt.Fprintf(hash, "%s\n%+v\n%v\n", version, r.steps, r.links); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil))[:hashLength], nil
}

func (r recipe) build(ctx context.Context, module, dir string) error {
	for _, s := range r.steps {
		environ := []string{"CGO_ENABLED=0"}
		if s.cgo {
			environ = []string{"CGO_ENABLED=1"}
		}
		ldflags, err := versions(ctx, module, strings.Join(append([]string{"-s", "-w"}, s.ldflags...), " "))
		if err != nil {
			return err
		}
		args := append([]string{
			"build", "-trimpath", "-buildvcs=false", "-tags=" + s.tags, "-ldflags=" + ldflags, "-o", dir + "/" + s.out,
		}, s.packages...)
		if _, err := run(ctx, module, environ, args...); err != nil {
			return err
		}
	}
	for target, names := range r.links {
		for _, name := range names {
			if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// versions replaces {{module}} by the version that the go.mod in dir requires of it.
func versions(ctx context.Context, dir, text string) (string, error) {
	before, rest, found := strings.Cut(text, "{{")
	if !found {
		return text, nil
	}
	name, after, _ := strings.Cut(rest, "}}")
	version, err := run(ctx, dir, nil, "list", "-m", "-f={{.Version}}", name)
	if err != nil {
		return "", fmt.Errorf("looking for the version of %s: %w", name, err)
	}
	return versions(ctx, dir, before+strings.TrimSpace(version)+after)
}

// timed runs a build and says how long it takes, also while it does.
func (b Builder) timed(name string, build func() error) error {
	start := time.Now()
	b.logf("%s: building", name)
	tick := time.NewTicker(30 * time.Second)
	defer tick.Stop()
	done := make(chan error, 1)
	go func() { done <- build() }()
	for {
		select {
		case <-tick.C:
			b.logf("%s: still building after %s", name, time.Since(start).Round(time.Second))
		case err := <-done:
			took := time.Since(start).Round(100 * time.Millisecond)
			if err != nil {
				b.logf("%s: the build failed after %s", name, took)
				return fmt.Errorf("building %s: %w", name, err)
			}
			b.logf("%s: built in %s", name, took)
			return nil
		}
	}
}

func (b Builder) logf(format string, args ...any) {
	if b.Log == nil {
		return
	}
	_, _ = fmt.Fprintf(b.Log, format+"\n", args...) // progress that nobody can read stops no build
}
