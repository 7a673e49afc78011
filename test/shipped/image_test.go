// Package shipped_test holds what people install to what it says it is: the container image to the Dockerfile, and the Helm chart to
// the kustomize base.
//
// It builds and renders, and asks an API server by dry runs; it installs nothing.
package shipped_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// root is the top of the checkout, as seen from this package.
const root = "../.."

// sources copies what the image is built from, as .dockerignore lets it through, into a folder of its own.
func sources(t *testing.T) string {
	t.Helper()
	list := exec.CommandContext(t.Context(), "git", "ls-files", "--cached", "--others", "--exclude-standard", "--",
		"go.mod", "go.sum", "agent", "cmd", "config", "drain", "nvml", ":!*_test.go", ":!**/testdata/**")
	list.Dir = root
	names, err := list.Output()
	if err != nil {
		t.Fatalf("listing the sources: %v", err)
	}
	folder := t.TempDir()
	for name := range strings.Lines(string(names)) {
		name = strings.TrimSpace(name)
		content, err := os.ReadFile(filepath.Join(root, name))
		if os.IsNotExist(err) {
			continue // taken away, and not committed yet
		}
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// made is a run of the maker of images: its results by their names, and what it says.
type made struct {
	files map[string][]byte
	says  string
}

func (m made) archive() []byte { return m.files["gpuslice-agent-v1.2.3.tar"] }

func (m made) bill(arch string) []byte {
	return m.files["gpuslice-agent-v1.2.3-linux-"+arch+".cdx.json"]
}

// compiling is the environment of a program that compiles: a test may use one core alone, its compiler may not.
func compiling(more ...string) []string { return append(append(os.Environ(), "GOMAXPROCS="), more...) }

func makeImage(t *testing.T, checkout string, flags ...string) made {
	t.Helper()
	atFullLength(t, "the maker of images")
	tool, err := binaries.Builder{Log: os.Stderr}.Image(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	run := exec.CommandContext(t.Context(), filepath.Join(tool, "image"),
		append([]string{"-checkout", checkout, "-out", out, "-version", "v1.2.3", "-revision", "abc", "-created", "1700000000"}, flags...)...)
	run.Env = compiling("TMPDIR=" + t.TempDir()) // where a thing was made must not matter
	says, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("making the image: %v\n%s", err, says)
	}
	m := made{files: map[string][]byte{}, says: string(says)}
	entries, err := os.ReadDir(out)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if m.files[e.Name()], err = os.ReadFile(filepath.Join(out, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// native is the image for this machine, made once for all tests.
var native struct {
	sync.Once
	made
}

func nativeImage(t *testing.T) made {
	t.Helper()
	atFullLength(t, "the maker of images")
	native.Do(func() { native.made = makeImage(t, sources(t), "-platforms", runtime.GOARCH) })
	if native.files == nil {
		t.Fatal("the image could not be made: see the test that failed")
	}
	return native.made
}

// untar gives the files of an archive, and its folders as those that end in "/".
func untar(t *testing.T, from io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	r := tar.NewReader(from)
	for {
		h, err := r.Next()
		if err == io.EOF { //nolint:errorlint // as the reader says
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%s is not root's", h.Name)
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

// descriptor and those below are of OCI's image format.
type descriptor struct {
	MediaType   string
	Digest      string
	Platform    struct{ Architecture, OS string }
	Annotations map[string]string
}

type manifest struct {
	MediaType string
	Manifests []descriptor // of an index
	Config    descriptor
	Layers    []descriptor
}

type imageConfig struct {
	Architecture, OS string
	Config           struct {
		User            string
		Entrypoint, Cmd []string
		Labels          map[string]string
	}
}

// opened is one image of an archive.
type opened struct {
	config imageConfig
	files  map[string][]byte
}

// open reads an archive by the paths that OCI's layout has, by architecture.
func open(t *testing.T, archive []byte) map[string]opened {
	t.Helper()
	layout := untar(t, bytes.NewReader(archive))
	blob := func(d descriptor) []byte {
		content, ok := layout["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
		if !ok {
			t.Fatalf("the archive has no blob %s", d.Digest)
		}
		return content
	}
	parse := func(text []byte) (m manifest) {
		if err := json.Unmarshal(text, &m); err != nil {
			t.Fatal(err)
		}
		return m
	}
	top := parse(layout["index.json"])
	if len(top.Manifests) != 1 {
		t.Fatalf("index.json names %+v", top.Manifests)
	}
	// With its registry, or kubelet would not find by the name in a pod what was imported.
	host, name, _ := strings.Cut(top.Manifests[0].Annotations["io.containerd.image.name"], "/")
	if !strings.Contains(host, ".") || name != "gpuslice/gpuslice-agent:v1.2.3" {
		t.Errorf("containerd is given the name %q", host+"/"+name)
	}
	all := map[string]opened{}
	for _, d := range parse(blob(top.Manifests[0])).Manifests {
		m := parse(blob(d))
		if m.MediaType != "application/vnd.oci.image.manifest.v1+json" || len(m.Layers) != 1 {
			t.Fatalf("the manifest is %+v", m)
		}
		var one opened
		if err := json.Unmarshal(blob(m.Config), &one.config); err != nil {
			t.Fatal(err)
		}
		unzipped, err := gzip.NewReader(bytes.NewReader(blob(m.Layers[0])))
		if err != nil {
			t.Fatal(err)
		}
		one.files = untar(t, unzipped)
		if one.config.Architecture != d.Platform.Architecture || d.Platform.OS != "linux" {
			t.Errorf("the image of %+v says that it is of %s", d.Platform, one.config.Architecture)
		}
		all[d.Platform.Architecture] = one
	}
	return all
}

// dockerfile is what the Dockerfile's second stage says, and the commands of its first.
type dockerfile struct {
	runs   []string
	config imageConfig
}

func readDockerfile(t *testing.T) (d dockerfile) {
	t.Helper()
	text, err := os.ReadFile(root + "/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	joined := regexp.MustCompile(`(?m)^\s*#.*\n`).ReplaceAllString(string(text), "")
	joined = strings.ReplaceAll(joined, "\\\n", " ")
	_, stages, _ := strings.Cut(joined, "FROM ")
	build, last, ok := strings.Cut(stages, "FROM scratch")
	if !ok || strings.Contains(last, "RUN ") {
		t.Fatal("the Dockerfile's last stage is no longer what its first has put together")
	}
	for _, run := range regexp.MustCompile(`(?m)^RUN (.*)$`).FindAllStringSubmatch(build, -1) {
		if !strings.Contains(run[1], "go mod download") {
			d.runs = append(d.runs, run[1])
		}
	}
	line := func(keyword string) string {
		found := regexp.MustCompile(`(?m)^` + keyword + ` (.*)$`).FindStringSubmatch(last)
		if found == nil {
			t.Fatalf("the Dockerfile has no %s", keyword)
		}
		return found[1]
	}
	list := func(text string) (words []string) {
		if err := json.Unmarshal([]byte(text), &words); err != nil {
			t.Fatal(err)
		}
		return words
	}
	d.config.Config.User = line("USER")
	d.config.Config.Entrypoint, d.config.Config.Cmd = list(line("ENTRYPOINT")), list(line("CMD"))
	d.config.Config.Labels = map[string]string{}
	for _, l := range regexp.MustCompile(`(\S+?)="([^"]*)"`).FindAllStringSubmatch(line("LABEL"), -1) {
		d.config.Config.Labels[l[1]] = strings.NewReplacer("${VERSION}", "v1.2.3", "${REVISION}", "abc").Replace(l[2])
	}
	return d
}

// The Dockerfile's own commands are run here, by this machine's compiler and C library instead of those of its build image.
func TestTheImageIsWhatTheDockerfileMakes(t *testing.T) {
	want := readDockerfile(t)
	got, ok := open(t, nativeImage(t).archive())[runtime.GOARCH]
	if !ok {
		t.Fatalf("there is no image of %s", runtime.GOARCH)
	}
	want.config.Architecture, want.config.OS = runtime.GOARCH, "linux"
	if diff := cmp.Diff(want.config, got.config); diff != "" {
		t.Errorf("config (-Dockerfile +image):\n%s", diff)
	}
	folder, rootfs := sources(t), t.TempDir()
	for _, command := range want.runs {
		run := exec.CommandContext(t.Context(), "sh", "-ec", strings.ReplaceAll(command, "/rootfs", rootfs))
		run.Dir, run.Env = folder, compiling("GOFLAGS=", "VERSION=v1.2.3")
		if said, err := run.CombinedOutput(); err != nil {
			t.Fatalf("RUN %s: %v\n%s", command, err, said)
		}
	}
	const most = 36_000_000 // bytes
	if program, err := os.Stat(filepath.Join(rootfs, "usr/bin/gpuslice-agent")); err != nil || program.Size() > most {
		t.Errorf("the agent (%v) is larger than %d bytes, or missing: see what it links again by go tool nm -size -sort size", program, most)
	}
	there := map[string]bool{}
	if err := filepath.WalkDir(rootfs, func(path string, entry os.DirEntry, err error) error {
		if err != nil || path == rootfs {
			return err
		}
		name, err := filepath.Rel(rootfs, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			there[name+"/"] = true
			return nil
		}
		there[name] = true
		content, err := os.ReadFile(path)
		if err == nil && !bytes.Equal(content, got.files[name]) {
			t.Errorf("%s: the Dockerfile makes another", name)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(slices.Sorted(maps.Keys(there)), slices.Sorted(maps.Keys(got.files))); diff != "" {
		t.Errorf("files (-Dockerfile +image):\n%s", diff)
	}
}

// Whoever doubts an image builds it again and compares.
func TestTheImageIsTheSameWhereverItIsMade(t *testing.T) {
	first, second := nativeImage(t), makeImage(t, sources(t), "-platforms", runtime.GOARCH)
	if len(first.files) != 2 || !maps.EqualFunc(first.files, second.files, bytes.Equal) {
		for name := range first.files {
			t.Errorf("%s: the same in both: %t", name, bytes.Equal(first.files[name], second.files[name]))
		}
		t.Errorf("one was made by\n%s and one by\n%s", first.says, second.says)
	}
	t.Log(first.says)
}

func TestTheBillOfMaterialsNamesWhatIsInTheImage(t *testing.T) {
	m := nativeImage(t)
	var bill struct {
		BomFormat, SpecVersion string
		Components             []struct{ Type, Name, Version, Purl string }
	}
	if err := json.Unmarshal(m.bill(runtime.GOARCH), &bill); err != nil || bill.BomFormat != "CycloneDX" {
		t.Fatalf("it is %q %q, error %v", bill.BomFormat, bill.SpecVersion, err)
	}
	has := map[string]string{}
	for _, c := range bill.Components {
		has[c.Name] = c.Version
	}
	info, err := buildinfo.Read(bytes.NewReader(open(t, m.archive())[runtime.GOARCH].files["usr/bin/gpuslice-agent"]))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range info.Deps {
		if has[d.Path] != d.Version {
			t.Errorf("%s: the bill says %q, the program %q", d.Path, has[d.Path], d.Version)
		}
	}
	if len(info.Deps) < 30 || has["std"] != strings.TrimPrefix(info.GoVersion, "go") {
		t.Errorf("of %d modules; Go is %q, want %s", len(info.Deps), has["std"], info.GoVersion)
	}
	if _, err := exec.LookPath("dpkg-query"); err == nil && !strings.Contains(m.says, "Debian's package libc6 "+has["libc6"]) {
		t.Errorf("the C library is %q in the bill, and otherwise in what was said:\n%s", has["libc6"], m.says)
	}
}

// Where there is no cross compiler the image of this machine is made all the same, and what is left out is said.
func TestBothArchitecturesAreInOneArchive(t *testing.T) {
	other := map[string]string{"amd64": "aarch64-linux-gnu-gcc", "arm64": "x86_64-linux-gnu-gcc"}[runtime.GOARCH]
	if _, err := exec.LookPath(other); err != nil {
		t.Skipf("there is no %s: TestAMissingCompilerIsNamed shows what comes of that", other)
	}
	images := open(t, makeImage(t, sources(t), "-platforms", "amd64,arm64").archive())
	for arch, loader := range map[string]string{"amd64": "lib64/ld-linux-x86-64.so.2", "arm64": "lib/ld-linux-aarch64.so.1"} {
		if one, ok := images[arch]; !ok || len(one.files[loader]) == 0 || len(one.files["usr/bin/gpuslice-agent"]) == 0 {
			t.Errorf("%s: the image has %v", arch, slices.Sorted(maps.Keys(one.files)))
		}
	}
}

func TestANameThatNoImageCanHaveIsRefused(t *testing.T) {
	atFullLength(t, "the maker of images")
	tool, err := binaries.Builder{Log: os.Stderr}.Image(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for want, flags := range map[string][]string{
		`-name "GPU Slice"`:       {"-name", "GPU Slice"},
		`-version "v1.2.3+local"`: {"-version", "v1.2.3+local"},
		`-created "now"`:          {"-created", "now"},
		`"riscv64"`:               {"-platforms", "riscv64"},
		`"extra" is no flag`:      {"extra"},
	} {
		run := exec.CommandContext(t.Context(), filepath.Join(tool, "image"), append([]string{"-checkout", root, "-out", t.TempDir()}, flags...)...)
		if said, err := run.CombinedOutput(); err == nil || !strings.Contains(string(said), want) {
			t.Errorf("%v: error %v, want %q in:\n%s", flags, err, want, said)
		}
	}
}

func TestAMissingCompilerIsNamed(t *testing.T) {
	atFullLength(t, "the maker of images")
	tool, err := binaries.Builder{Log: os.Stderr}.Image(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	other := map[string]string{"amd64": "arm64", "arm64": "amd64"}[runtime.GOARCH]
	run := exec.CommandContext(t.Context(), filepath.Join(tool, "image"), "-checkout", root, "-out", t.TempDir(), "-platforms", other)
	run.Env = append(os.Environ(), "PATH="+t.TempDir())
	said, err := run.CombinedOutput()
	if want := fmt.Sprintf("-linux-gnu and libc6-dev-%s-cross", other); err == nil || !strings.Contains(string(said), want) {
		t.Errorf("error %v, want %q in:\n%s", err, want, said)
	}
}
