package binaries_test

import (
	"bytes"
	"context"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	"golang.org/x/tools/txtar"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// checkout is the least that the package takes for a checkout; its Kubernetes prints its name and version.
const checkout = `
-- go.mod --
module github.com/gpuslice/gpuslice

go 1.26.0
-- cmd/tool/main.go --
package main

func main() { println("first") }
-- test/gpusim/libnvidia-ml/main.go --
package main

import "C"

//export nvmlInit_v2
func nvmlInit_v2() C.int { return 0 }

func main() {}
-- test/kube/go.mod --
module example.com/kube

go 1.26.0

require (
	go.etcd.io/etcd/server/v3 v3.7.0
	k8s.io/component-base v0.37.1
	k8s.io/kubernetes v1.37.1
)

replace (
	go.etcd.io/etcd/server/v3 => ./etcd
	k8s.io/component-base => ./base
	k8s.io/kubernetes => ./kubernetes
)
-- test/kube/main.go --
package main

import (
	"os"
	"path/filepath"

	"k8s.io/component-base/version"
)

func main() { println(filepath.Base(os.Args[0]), version.Version()) }
-- test/kube/base/go.mod --
module k8s.io/component-base
-- test/kube/base/version/version.go --
package version

var gitVersion = "unknown"

func Version() string { return gitVersion }
-- test/kube/etcd/go.mod --
module go.etcd.io/etcd/server/v3
-- test/kube/etcd/main.go --
package main

func main() { println("etcd") }
-- test/kube/kubernetes/go.mod --
module k8s.io/kubernetes
`

// newBuilder returns a builder for a checkout of its own with an empty cache.
func newBuilder(t *testing.T) (b binaries.Builder, root string) {
	t.Helper()
	// What the user has is of no account, as long as a test does not say otherwise; and sources change within a run of make.
	inRun(t, "")
	t.Setenv(binaries.KubeBin, "")
	old := t.TempDir()
	script(t, filepath.Join(old, "kubectl"), "echo Client Version: v1.2.3\n")
	t.Setenv("PATH", old+":"+os.Getenv("PATH"))
	root = t.TempDir()
	for _, f := range txtar.Parse([]byte(checkout)).Files {
		write(t, filepath.Join(root, f.Name), string(f.Data))
	}
	return binaries.Builder{Root: root, Cache: t.TempDir()}, root
}

// inRun names the run of make that the test is of; "" is none. It is not t.Setenv, which reads the variable too: the Go command notes that, and
// would take no result of these tests from its cache.
func inRun(t *testing.T, run string) {
	t.Helper()
	const variable = "GPUSLICE_RUN"
	before, _ := syscall.Getenv(variable)
	if err := syscall.Setenv(variable, run); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Setenv(variable, before); err != nil {
			t.Error(err)
		}
	})
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func output(t *testing.T, program string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), program).CombinedOutput()
	if err != nil {
		t.Fatalf("running %s: %v\n%s", program, err, out)
	}
	return strings.TrimSpace(string(out))
}

// log collects progress lines of builders that run at the same time.
type log struct {
	mu sync.Mutex
	bytes.Buffer
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.Write(p)
}

func TestKubeIsOneProgramUnderAllItsNamesWithTheVersionOfItsModule(t *testing.T) {
	b, _ := newBuilder(t)
	dir, err := b.Kube(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, name := range []string{"kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl", "etcd"} {
		got = append(got, output(t, filepath.Join(dir, name)))
	}
	want := []string{"kube-apiserver v1.37.1", "kube-controller-manager v1.37.1", "kube-scheduler v1.37.1", "kubelet v1.37.1", "kubectl v1.37.1", "etcd"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what the programs print (-want +got):\n%s", diff)
	}
}

func TestBuildersAtTheSameMomentBuildOnce(t *testing.T) {
	b, _ := newBuilder(t)
	var lines log
	b.Log = &lines
	var group errgroup.Group
	dirs := make([]string, 4)
	for i := range dirs {
		group.Go(func() (err error) {
			dirs[i], err = b.Kube(t.Context())
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if built, cached := strings.Count(lines.String(), ": building "), strings.Count(lines.String(), ": cached\n"); built != 1 || cached != 3 {
		t.Errorf("built %d times and found %d times, want 1 and 3:\n%s", built, cached, &lines)
	}
	for _, dir := range dirs {
		if dir != dirs[0] {
			t.Errorf("results are in %s and %s, want one directory", dirs[0], dir)
		}
	}
}

func TestAChangedSourceIsBuiltAgain(t *testing.T) {
	b, root := newBuilder(t)
	before, err := b.Kube(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(root, "test/kube/main.go"), "package main\n\nfunc main() { println(\"changed\") }\n")
	after, err := b.Kube(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got := output(t, filepath.Join(after, "kubectl")); got != "changed" {
		t.Errorf("the program built after the change prints %q", got)
	}
	if got := output(t, filepath.Join(before, "kubectl")); got != "kubectl v1.37.1" {
		t.Errorf("the program built before the change prints %q, want that it is as it was", got)
	}
}

func TestABuildThatFailsSaysWhatTheCompilerSaidAndIsTriedAgain(t *testing.T) {
	b, root := newBuilder(t)
	source := filepath.Join(root, "test/kube/etcd/main.go")
	good, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	write(t, source, "package main\n\nfunc main() { undefinedName() }\n")
	if dir, err := b.Kube(t.Context()); err == nil || !strings.Contains(err.Error(), "undefined: undefinedName") {
		t.Fatalf("Kube returned %q, %v; want the compiler's complaint", dir, err)
	}
	write(t, source, string(good))
	if _, err := b.Kube(t.Context()); err != nil {
		t.Errorf("after the mistake is corrected: %v", err)
	}
	leftovers, err := filepath.Glob(filepath.Join(b.Cache, ".building-*"))
	if err != nil || len(leftovers) > 0 {
		t.Errorf("left in the cache: %v, %v", leftovers, err)
	}
}

func TestABuildEndsWithItsContext(t *testing.T) {
	b, _ := newBuilder(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if dir, err := b.Kube(ctx); err == nil {
		t.Errorf("Kube returned %s for a context that was over", dir)
	}
}

func TestAToolThatIsRunningIsNotReplacedByItsNextVersion(t *testing.T) {
	b, root := newBuilder(t)
	first, err := b.Tool(t.Context(), "./cmd/tool")
	if err != nil {
		t.Fatal(err)
	}
	again, err := b.Tool(t.Context(), "./cmd/tool")
	if err != nil {
		t.Fatal(err)
	}
	if first != again {
		t.Errorf("the same source gave %s, then %s", first, again)
	}
	write(t, filepath.Join(root, "cmd/tool/main.go"), "package main\n\nfunc main() { println(\"second\") }\n")
	second, err := b.Tool(t.Context(), "./cmd/tool")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"first", "second"}, []string{output(t, first), output(t, second)}); diff != "" {
		t.Errorf("what the two versions print (-want +got):\n%s", diff)
	}
}

func TestARunOfMakeBuildsAProgramOnce(t *testing.T) {
	b, root := newBuilder(t)
	tool := func(run string) string {
		t.Helper()
		inRun(t, run)
		file, err := b.Tool(t.Context(), "./cmd/tool")
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	first := tool("1")
	write(t, filepath.Join(root, "cmd/tool/main.go"), "package main\n\nfunc main() { println(\"second\") }\n")
	if same := tool("1"); same != first {
		t.Errorf("one run has %s, then %s", first, same)
	}
	second := tool("2")
	if diff := cmp.Diff([]string{"first", "second"}, []string{output(t, first), output(t, second)}); diff != "" {
		t.Errorf("what the programs of two runs print (-want +got):\n%s", diff)
	}
	if err := os.Remove(second); err != nil {
		t.Fatal(err)
	}
	if got := output(t, tool("2")); got != "second" {
		t.Errorf("the program that was removed prints %q", got)
	}
	if got := output(t, tool("")); got != "second" {
		t.Errorf("outside of make it prints %q", got)
	}
}

func TestTheGoCommandKeepsNoResultOfATestThatIsKeptOut(t *testing.T) {
	second := func(test string) string {
		t.Helper()
		var out []byte
		for range 2 {
			cmd := exec.CommandContext(t.Context(), "go", "test", "-vet=off", "-run=^"+test+"$", "./testdata/keptout")
			cmd.Env = append(os.Environ(), "GOFLAGS=-tags="+binaries.Tags) // -count=1 in GOFLAGS would keep out all
			var err error
			if out, err = cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
		return string(out)
	}
	if out := second("TestAlone"); !strings.Contains(out, "(cached)") {
		t.Errorf("a test that starts no program is not taken from the cache: %s", out)
	}
	for _, test := range []string{"TestKeptOut", "TestProgram"} {
		if out := second(test); strings.Contains(out, "(cached)") {
			t.Errorf("%s is taken from the cache: %s", test, out)
		}
	}
}

func TestTheDriverLibraryIsFoundUnderItsOwnName(t *testing.T) {
	b, _ := newBuilder(t)
	file, err := b.LibNVML(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	library, err := elf.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer library.Close()
	soname, err := library.DynString(elf.DT_SONAME)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{filepath.Base(file)}, soname); diff != "" {
		t.Errorf("soname of %s (-file name +soname):\n%s", file, diff)
	}
	symbols, err := library.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(symbols, func(s elf.Symbol) bool { return s.Name == "nvmlInit_v2" && s.Section != elf.SHN_UNDEF }) {
		t.Errorf("%s exports no nvmlInit_v2", file)
	}
}

func TestOutsideACheckoutItIsSaidWhereToRun(t *testing.T) {
	t.Chdir(t.TempDir())
	_, err := binaries.Builder{Cache: t.TempDir()}.Kube(t.Context())
	if err == nil || !strings.Contains(err.Error(), "run this within one") {
		t.Errorf("Kube outside a checkout: %v", err)
	}
}
