package binaries

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/mod/semver"
)

// KubeBin is the environment variable that names a directory with all programs of Kubernetes, which are then not built. It is
// never passed over: a program that is missing there or of another minor version is an error.
const KubeBin = "GPUSLICE_KUBE_BIN"

// Modules in test/kube; their versions decide which programs fit.
const (
	kubernetes = "k8s.io/kubernetes"
	etcd       = "go.etcd.io/etcd/server/v3"
)

var kube = recipe{
	name:   "kube",
	what:   "Kubernetes {{" + kubernetes + "}} and etcd {{" + etcd + "}}",
	module: "test/kube",
	work:   16 * time.Minute,
	steps: []step{
		{out: "kube", packages: []string{"."}, ldflags: []string{"-X k8s.io/component-base/version.gitVersion={{k8s.io/kubernetes}}"}},
		{out: "etcd", packages: []string{"go.etcd.io/etcd/server/v3"}},
	},
	links: map[string][]string{"kube": {"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl"}},
}

// program is one of Kubernetes' programs, with the command that prints its version.
type program struct {
	name   string
	ask    []string
	module string // the module that sets its minor version
}

var kubePrograms = []program{
	{"kube-apiserver", []string{"--version"}, kubernetes},
	{"kube-controller-manager", []string{"--version"}, kubernetes},
	{"kube-scheduler", []string{"--version"}, kubernetes},
	{"kubelet", []string{"--version"}, kubernetes},
	{"kubectl", []string{"version", "--client"}, kubernetes},
	{"etcd", []string{"--version"}, etcd},
}

// programs are those of kubePrograms that the builder needs.
func (b Builder) programs() []program {
	if b.Kubelet {
		return kubePrograms
	}
	return slices.DeleteFunc(slices.Clone(kubePrograms), func(p program) bool { return p.name == "kubelet" })
}

// Kube returns the directory of kube-apiserver, kube-controller-manager, kube-scheduler, kubectl and etcd, and of
// kubelet if the builder needs it. It takes GPUSLICE_KUBE_BIN if it is set, else the programs on PATH if all are there
// in the minor versions of test/kube, else with GPUSLICE_KUBE=download the published ones. Otherwise it builds them, which takes several minutes the first time. It never
// mixes programs of different origin. GPUSLICE_KUBE_VERSION builds an earlier version, without kubelet and with the
// same etcd.
//
// Tests of built programs alone need not run again: the Go command sees the sources.
func (b Builder) Kube(ctx context.Context) (dir string, err error) {
	root, err := b.root()
	if err != nil {
		return "", err
	}
	if r, older, err := kubeChoice.made(root); older || err != nil {
		if err != nil {
			return "", err
		}
		b.keepOutOfTestCache()
		return b.olderKube(ctx, r)
	}
	dir, unfit, err := b.presentKube(ctx)
	if err != nil || dir != "" {
		b.keepOutOfTestCache()
		return dir, err
	}
	wanted, err := required(kube.modFile(filepath.Join(root, kube.module)))
	if err != nil {
		return "", err
	}
	if dir, err := b.downloaded(ctx, wanted); err != nil || dir != "" {
		return dir, err
	}
	return b.cached(ctx, kube, unfit)
}

// presentKube returns the directory of programs that need not be built, or why it rejects those on PATH. Only a build
// needs the reason: finding it takes a second.
func (b Builder) presentKube(ctx context.Context) (dir string, unfit func() string, err error) {
	root, err := b.root()
	if err != nil {
		return "", nil, err
	}
	wanted, err := required(kube.modFile(filepath.Join(root, kube.module)))
	if err != nil {
		return "", nil, err
	}
	if dir := os.Getenv(KubeBin); dir != "" {
		if !filepath.IsAbs(dir) {
			return "", nil, fmt.Errorf("%s=%s: name the directory from / on, since tests run in many directories", KubeBin, dir)
		}
		s := locate(ctx, b.programs(), wanted, func(name string) (string, error) { return exec.LookPath(filepath.Join(dir, name)) })
		if err := ctx.Err(); err != nil {
			return "", nil, err
		}
		if !s.fits() {
			return "", nil, fmt.Errorf("%s=%s cannot be used: %s; put the right programs there, or unset it", KubeBin, dir, s.reason(true))
		}
		b.logf("kube: %s, from %s=%s", s.versions(), KubeBin, dir)
		return dir, nil, nil
	}
	on := locate(ctx, b.programs(), wanted, nil)
	if on.complete() {
		on = locate(ctx, b.programs(), wanted, exec.LookPath)
	}
	if on.fits() {
		dir, err := b.link("kube-on-path", on.paths)
		if err != nil {
			return "", nil, fmt.Errorf("linking the Kubernetes on PATH: %w", err)
		}
		b.logf("kube: %s, from PATH (%s)", on.versions(), filepath.Dir(on.paths[0]))
		return dir, nil, nil
	}
	return "", func() string {
		found := locate(ctx, b.programs(), wanted, exec.LookPath)
		if found.empty() {
			return ""
		}
		return "what is on PATH is not taken: " + found.reason(false)
	}, nil
}

// set is the programs that were found, in their order.
type set struct {
	programs []program
	wanted   map[string]string // module -> version
	paths    []string          // "" for none
	have     []string          // versions; "" for unknown
	errs     []error           // why a program is missing or has no version
}

// locate finds the programs and asks them for their versions, all at once. Without find it only looks whether they are on PATH.
func locate(ctx context.Context, programs []program, wanted map[string]string, find func(name string) (string, error)) set {
	n := len(programs)
	s := set{programs: programs, wanted: wanted, paths: make([]string, n), have: make([]string, n), errs: make([]error, n)}
	var group sync.WaitGroup
	for i, p := range programs {
		if find == nil {
			s.paths[i], s.errs[i] = exec.LookPath(p.name)
			continue
		}
		group.Go(func() {
			if s.paths[i], s.errs[i] = find(p.name); s.errs[i] == nil {
				s.have[i], s.errs[i] = versionOf(ctx, s.paths[i], p.ask)
			}
		})
	}
	group.Wait()
	return s
}

func (s set) complete() bool {
	for i, path := range s.paths {
		if path == "" || s.errs[i] != nil {
			return false
		}
	}
	return true
}

func (s set) empty() bool {
	for _, path := range s.paths {
		if path != "" {
			return false
		}
	}
	return true
}

func (s set) fits() bool {
	for i := range s.programs {
		if s.errs[i] != nil || !s.right(i) {
			return false
		}
	}
	return true
}

// right reports whether a program has the minor version that is needed.
func (s set) right(i int) bool {
	return s.have[i] != "" && semver.MajorMinor(s.have[i]) == semver.MajorMinor(s.wanted[s.programs[i].module])
}

func (s set) versions() string {
	return fmt.Sprintf("Kubernetes %s and etcd %s", s.have[0], s.have[len(s.have)-1])
}

// reason says in one line what is wrong with each program that does not fit, with its file if wanted.
func (s set) reason(files bool) string {
	var wrong, missing []string
	for i, p := range s.programs {
		name := p.name
		if files && s.paths[i] != "" {
			name = s.paths[i]
		}
		switch {
		case s.paths[i] == "" && files:
			wrong = append(wrong, s.errs[i].Error())
		case s.paths[i] == "":
			missing = append(missing, name)
		case s.errs[i] != nil:
			wrong = append(wrong, fmt.Sprintf("%s %v", name, s.errs[i]))
		case !s.right(i):
			wrong = append(wrong, fmt.Sprintf("%s is %s, %s is needed", name, s.have[i], semver.MajorMinor(s.wanted[p.module])))
		}
	}
	if len(missing) > 0 {
		wrong = append(wrong, "there is no "+strings.Join(missing, ", "))
	}
	return strings.Join(wrong, "; ")
}

// A program that does not print its version within askFor is unusable. Kubernetes' programs take a tenth of a second on
// an idle machine.
var askFor = 30 * time.Second

// answer is what Kubernetes' programs print. kubectl of a cloud's toolbox adds to its version: v1.32.4-dispatcher.
var answer = regexp.MustCompile(`(?m)^(?:Kubernetes |Client Version: |etcd Version: )v?(\d{1,4}\.\d{1,4}\.\d{1,4}[-+.0-9A-Za-z]{0,40})\s*$`)

// versionOf asks a program for its version: v1.37.1.
func versionOf(ctx context.Context, file string, args []string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	out := &head{}
	cmd := exec.CommandContext(ctx, file, args...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(os.Environ(), "KUBECONFIG="+os.DevNull, "KUBERC=off") // a user's settings have no say in a version
	// A wrapper may have started others, which hold its output open.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); ctx.Err() != nil {
		return "", fmt.Errorf("did not say its version within %s", askFor)
	} else if err != nil {
		return "", fmt.Errorf("does not say its version: %w", err)
	}
	found := answer.FindSubmatch(out.Bytes())
	if found == nil {
		return "", fmt.Errorf("does not say its version when it is asked by %s", strings.Join(args, " "))
	}
	version := "v" + string(found[1])
	if !semver.IsValid(version) {
		return "", fmt.Errorf("says that its version is %q, which is none", version)
	}
	return version, nil
}

// head keeps the beginning of what a program prints, and takes the rest.
type head struct{ bytes.Buffer }

const headLength = 64 << 10

func (h *head) Write(p []byte) (int, error) {
	h.Buffer.Write(p[:min(len(p), headLength-h.Len())])
	return len(p), nil
}
