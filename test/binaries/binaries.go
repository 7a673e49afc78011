// Package binaries builds the programs that tests and the demo start, and keeps them outside the checkout: Kubernetes,
// etcd, containerd and NVIDIA's programs from modules of their own, the project's own programs from the root module.
//
// One build of a version of the sources serves every later process. Processes that want the same at the same moment
// build it once. The package knows how to build programs, not how to run them.
package binaries

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
)

// Builder builds what is not built yet. The zero value works within a checkout.
type Builder struct {
	Log      io.Writer // progress, a line each; nil for none
	Terminal io.Writer // a terminal, for a bar while something is built; nil for none, then Log has a line now and then
	Root     string    // the checkout; "" looks for it from the working directory upwards
	Cache    string    // where results are kept; "" is gpuslice in the user's cache directory
	Kubelet  bool      // Kube's programs must have kubelet among them, which test/e2e alone starts
}

// lazy leaves functions of the NVIDIA library unresolved until they are called: the programs start without it, and with
// one that is older than they are.
const lazy = "-extldflags=-Wl,-z,lazy"

// recipes are what is built from modules of their own, by the names that people give.
var recipes = map[string]recipe{
	"kube":         kube,
	"runtime":      runtimePrograms,
	"deviceplugin": devicePlugin,
	"pluginconfig": pluginConfig,
	"migparted":    migParted,
	"dradriver":    draDriver,
	"image":        image,
	"helm":         helm,
	"alerts":       alerts,
	"kueue":        kueue,
	"karpenter":    karpenter,
}

// Runtime returns the directory of containerd, containerd-shim-runc-v2, ctr, runc, and the CNI plugins bridge, host-local and
// loopback. runc needs the headers of libseccomp, and pkg-config to find them.
func (b Builder) Runtime(ctx context.Context) (dir string, err error) {
	return b.built(ctx, runtimePrograms)
}

const (
	containerdCommands = "github.com/containerd/containerd/v2/cmd/"
	cniPlugins         = "github.com/containernetworking/plugins/plugins/"
)

var runtimePrograms = recipe{
	name:   "runtime",
	what:   "containerd {{github.com/containerd/containerd/v2}}, runc and CNI plugins",
	module: "test/runtime",
	work:   4 * time.Minute,
	steps: []step{
		{out: "runc", packages: []string{"github.com/opencontainers/runc"}, tags: "seccomp", cgo: true},
		{
			packages: []string{
				containerdCommands + "containerd", containerdCommands + "containerd-shim-runc-v2", containerdCommands + "ctr",
				cniPlugins + "main/bridge", cniPlugins + "main/loopback", cniPlugins + "ipam/host-local",
			},
			tags:    "netgo,osusergo,no_btrfs,no_zfs",
			ldflags: []string{"-X github.com/containerd/containerd/v2/version.Version={{github.com/containerd/containerd/v2}}"},
		},
	},
}

// DevicePlugin returns the directory of NVIDIA's nvidia-device-plugin, gpu-feature-discovery, config-manager and
// mps-control-daemon. GPUSLICE_DEVICE_PLUGIN_VERSION names the version; the default is the one of
// test/nvidia/deviceplugin.
func (b Builder) DevicePlugin(ctx context.Context) (dir string, err error) {
	root, err := b.root()
	if err != nil {
		return "", err
	}
	r, _, err := devicePluginChoice.made(root)
	if err != nil {
		return "", err
	}
	return b.built(ctx, r)
}

const pluginCommands = "github.com/NVIDIA/k8s-device-plugin/cmd/"

var devicePlugin = recipe{
	name:   "nvidia-device-plugin",
	what:   "NVIDIA's device plugin {{github.com/NVIDIA/k8s-device-plugin}}",
	module: "test/nvidia/deviceplugin",
	work:   4 * time.Minute,
	steps: []step{{
		cgo: true,
		packages: []string{
			pluginCommands + "nvidia-device-plugin", pluginCommands + "gpu-feature-discovery", pluginCommands + "config-manager",
			"./mps-control-daemon",
		},
		ldflags: []string{
			"-X github.com/NVIDIA/k8s-device-plugin/internal/info.version={{github.com/NVIDIA/k8s-device-plugin}}", lazy,
		},
	}},
}

// PluginConfig returns the directory of pluginconfig, which reads config files as NVIDIA's device plugin does.
func (b Builder) PluginConfig(ctx context.Context) (dir string, err error) {
	return b.built(ctx, pluginConfig)
}

var pluginConfig = recipe{
	name:   "nvidia-plugin-config",
	what:   "the reader of device plugin configs",
	module: "test/nvidia/pluginconfig",
	work:   time.Minute,
	steps:  []step{{packages: []string{"."}}},
}

// MigParted returns the directory of NVIDIA's nvidia-mig-parted and nvidia-mig-manager.
func (b Builder) MigParted(ctx context.Context) (dir string, err error) {
	return b.built(ctx, migParted)
}

const migPartedCommands = "github.com/NVIDIA/mig-parted/cmd/"

var migParted = recipe{
	name:   "nvidia-mig-parted",
	what:   "NVIDIA's mig-parted {{github.com/NVIDIA/mig-parted}}",
	module: "test/nvidia/migparted",
	work:   3 * time.Minute,
	steps: []step{{
		cgo:      true,
		packages: []string{migPartedCommands + "nvidia-mig-parted", migPartedCommands + "nvidia-mig-manager"},
		ldflags: []string{
			"-X github.com/NVIDIA/mig-parted/internal/info.version={{github.com/NVIDIA/mig-parted}}", lazy,
		},
	}},
}

// DRADriver returns the directory of gpu-kubelet-plugin, which is NVIDIA's DRA driver for GPUs on a node.
func (b Builder) DRADriver(ctx context.Context) (dir string, err error) {
	return b.built(ctx, draDriver)
}

const draDriverModule = "sigs.k8s.io/dra-driver-nvidia-gpu"

var draDriver = recipe{
	name:   "nvidia-dra-driver",
	what:   "NVIDIA's DRA driver {{" + draDriverModule + "}}",
	module: "test/nvidia/dradriver",
	work:   3 * time.Minute,
	steps: []step{{
		cgo:      true,
		packages: []string{draDriverModule + "/cmd/gpu-kubelet-plugin"},
		ldflags:  []string{"-X " + draDriverModule + "/internal/info.version={{" + draDriverModule + "}}", lazy},
	}},
}

// Image returns the directory of image, which makes the agent's container image.
func (b Builder) Image(ctx context.Context) (dir string, err error) {
	return b.built(ctx, image)
}

var image = recipe{
	name:   "image",
	what:   "the maker of container images",
	module: "test/image",
	work:   time.Minute,
	steps:  []step{{packages: []string{"."}}},
}

// Helm returns the directory of helm, which renders, checks and packs a chart by Helm's own packages.
func (b Builder) Helm(ctx context.Context) (dir string, err error) {
	return b.built(ctx, helm)
}

var helm = recipe{
	name:   "helm",
	what:   "the renderer of charts, with Helm {{helm.sh/helm/v4}}",
	module: "test/helm",
	work:   3 * time.Minute,
	steps:  []step{{packages: []string{"."}}},
}

// Alerts returns the directory of promtool, and of alerts, which reads expressions and objects of Prometheus.
func (b Builder) Alerts(ctx context.Context) (dir string, err error) {
	return b.built(ctx, alerts)
}

var alerts = recipe{
	name:   "promtool",
	what:   "promtool {{github.com/prometheus/prometheus}}",
	module: "test/alerts",
	work:   3 * time.Minute,
	// Omits service discovery for all the clouds.
	steps: []step{{packages: []string{".", "github.com/prometheus/prometheus/cmd/promtool"}, tags: "remove_all_sd"}},
}

// Kueue returns the directory of kueue, which is Kueue's manager.
func (b Builder) Kueue(ctx context.Context) (dir string, err error) {
	return b.built(ctx, kueue)
}

const kueueModule = "sigs.k8s.io/kueue"

var kueue = recipe{
	name:   "kueue",
	what:   "Kueue {{" + kueueModule + "}}",
	module: "test/kueue",
	work:   4 * time.Minute,
	steps:  []step{{packages: []string{kueueModule + "/cmd/kueue"}}},
}

// Karpenter returns the directory of kwok, which is Karpenter's manager with a simulated cloud: it creates a Node object for each machine.
func (b Builder) Karpenter(ctx context.Context) (dir string, err error) {
	return b.built(ctx, karpenter)
}

const karpenterModule = "sigs.k8s.io/karpenter"

var karpenter = recipe{
	name:   "karpenter",
	what:   "Karpenter {{" + karpenterModule + "}}",
	module: "test/karpenter",
	work:   5 * time.Minute,
	steps:  []step{{packages: []string{karpenterModule + "/kwok"}}},
}

// recipe says how the programs of a module of its own are built.
type recipe struct {
	name   string
	what   string        // for people; {{module}} stands for that module's version
	module string        // directory of the module, from the root of the checkout
	mod    string        // file in it that says the versions in place of go.mod; "" for go.mod
	work   time.Duration // of one core, when nothing is compiled yet, to say how long it takes
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

// built is cached for programs that read files of the checkout. The Go command does not see that a test depends on
// these files, so the test runs each time.
func (b Builder) built(ctx context.Context, r recipe) (dir string, err error) {
	b.keepOutOfTestCache()
	return b.cached(ctx, r, nil)
}

// cached returns the directory with the results of r, and builds it if it is missing. Before it builds, it prints
// before.
func (b Builder) cached(ctx context.Context, r recipe, before func() string) (string, error) {
	root, err := b.root()
	if err != nil {
		return "", err
	}
	cache, err := b.cache()
	if err != nil {
		return "", err
	}
	module := filepath.Join(root, r.module)
	dir, err := r.dir(ctx, cache, module)
	if err != nil {
		return "", err
	}
	unlock, err := b.lock(ctx, dir+".lock", r.name)
	if err != nil {
		return "", err
	}
	defer unlock()
	if exists(dir) {
		b.logf("%s: cached", r.name)
		return dir, nil
	}
	if before != nil {
		if text := before(); text != "" {
			b.logf("%s: %s", r.name, text)
		}
	}
	// The lock makes the name ours: a killed build left this file.
	partial := filepath.Join(cache, ".building-"+filepath.Base(dir))
	if err := os.RemoveAll(partial); err != nil {
		return "", fmt.Errorf("building %s: %w", r.name, err)
	}
	if err := os.Mkdir(partial, 0o755); err != nil {
		return "", fmt.Errorf("building %s: %w", r.name, err)
	}
	defer os.RemoveAll(partial)
	what, err := versions(r.modFile(module), r.what)
	if err != nil {
		return "", fmt.Errorf("building %s: %w", r.name, err)
	}
	b.logf("%s: building %s, %s", r.name, what, estimate(r.work))
	if err := b.timed(r.name, func(s *status) error { return r.build(ctx, module, partial, s) }); err != nil {
		return "", err
	}
	if err := os.Rename(partial, dir); err != nil {
		return "", fmt.Errorf("building %s: %w", r.name, err)
	}
	return dir, nil
}

// dir is where the results of r are, or will be.
func (r recipe) dir(ctx context.Context, cache, module string) (string, error) {
	key, err := r.key(ctx, module)
	if err != nil {
		return "", fmt.Errorf("looking for changes of %s: %w", module, err)
	}
	return filepath.Join(cache, r.name+"-"+key), nil
}

// modFile is the file with the versions, for the module in dir.
func (r recipe) modFile(dir string) string {
	if r.mod == "" {
		return filepath.Join(dir, "go.mod")
	}
	return filepath.Join(dir, r.mod)
}

// flags make the Go command read that file.
func (r recipe) flags() []string {
	if r.mod == "" {
		return nil
	}
	return []string{"-modfile=" + r.mod}
}

func exists(dir string) bool {
	_, err := os.Stat(dir)
	return err == nil
}

// key hashes everything that decides the result: sources, versions of their requirements, compiler and flags.
func (r recipe) key(ctx context.Context, module string) (string, error) {
	hash := sha256.New()
	err := filepath.WalkDir(module, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		if !r.counts(entry.Name()) {
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
	version, err := run(ctx, module, nil, nil, "version")
	if err != nil {
		return "", err
	}
	if _, err := fmt.Fprintf(hash, "%s\n%+v\n%v\n", version, r.steps, r.links); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil))[:hashLength], nil
}

// counts reports whether the file of that name decides the result.
func (r recipe) counts(name string) bool {
	switch {
	case name == "go.mod" || name == "go.sum" || filepath.Ext(name) == ".go":
		return true
	case r.mod == "":
		return false
	default:
		return name == r.mod || name == strings.TrimSuffix(r.mod, ".mod")+".sum"
	}
}

func (r recipe) build(ctx context.Context, module, dir string, s *status) error {
	// Find and download everything before compiling anything: then the amount is known.
	for _, step := range r.steps {
		if err := step.expect(ctx, module, r.flags(), s); err != nil {
			return err
		}
	}
	for _, step := range r.steps {
		ldflags, err := versions(r.modFile(module), strings.Join(append([]string{"-s", "-w"}, step.ldflags...), " "))
		if err != nil {
			return err
		}
		args := slices.Concat([]string{
			"build", "-v", "-trimpath", "-buildvcs=false", "-tags=" + step.tags, "-ldflags=" + ldflags, "-o", dir + "/" + step.out,
		}, r.flags(), step.packages)
		s.begins("compiling and linking " + step.names())
		if _, err := run(ctx, module, step.environ(), s.saw, args...); err != nil {
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

// downloads is the number of tries to download the modules. One download in hundreds may fail; the next try skips
// finished ones.
const downloads = 3

// expect says to s which packages a step may have to compile, and downloads their modules.
func (s step) expect(ctx context.Context, module string, flags []string, into *status) error {
	args := slices.Concat([]string{"list", "-deps", "-f={{.ImportPath}} {{.Name}}", "-tags=" + s.tags}, flags, s.packages)
	for try := 1; ; try++ {
		list, err := run(ctx, module, s.environ(), into.saw, args...)
		if err == nil {
			into.expect(list)
			return nil
		}
		if try == downloads {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(time.Duration(try) * 2 * time.Second):
		}
	}
}

// names are the programs that a step makes.
func (s step) names() string {
	if s.out != "" {
		return s.out
	}
	names := make([]string, len(s.packages))
	for i, pkg := range s.packages {
		names[i] = path.Base(pkg)
	}
	return strings.Join(names, ", ")
}

func (s step) environ() []string {
	if s.cgo {
		return []string{"CGO_ENABLED=1"}
	}
	return []string{"CGO_ENABLED=0"}
}

// versions replaces {{module}} by the version that a go.mod requires of it.
func versions(file, text string) (string, error) {
	var wanted map[string]string
	for {
		before, rest, found := strings.Cut(text, "{{")
		if !found {
			return text, nil
		}
		if wanted == nil {
			var err error
			if wanted, err = required(file); err != nil {
				return "", err
			}
		}
		name, after, _ := strings.Cut(rest, "}}")
		if wanted[name] == "" {
			return "", fmt.Errorf("%s does not require %s", file, name)
		}
		text = before + wanted[name] + after
	}
}

// required are the versions in a go.mod, by module. Reading it needs no network; the Go command does until modules are
// downloaded.
func required(file string) (map[string]string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("looking for versions: %w", err)
	}
	mod, err := modfile.ParseLax(file, text, nil)
	if err != nil {
		return nil, fmt.Errorf("looking for versions: %w", err)
	}
	versions := map[string]string{}
	for _, r := range mod.Require {
		versions[r.Mod.Path] = r.Mod.Version
	}
	return versions, nil
}

// timed runs a build and says how long it takes, also while it does.
func (b Builder) timed(name string, build func(*status) error) error {
	start := time.Now()
	s := &status{}
	err := b.watched(name, s, func() error { return build(s) })
	took := time.Since(start).Round(100 * time.Millisecond)
	if err != nil {
		b.logf("%s: the build failed after %s", name, took)
		return fmt.Errorf("building %s: %w", name, err)
	}
	b.logf("%s: built in %s", name, took)
	return nil
}

func (b Builder) logf(format string, args ...any) {
	if b.Log == nil {
		return
	}
	_, _ = fmt.Fprintf(b.Log, format+"\n", args...) // progress that no one can read stops no build
}
