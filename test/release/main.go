// Command release makes all parts of a release in one folder. It makes the container image as an OCI archive with bills of materials,
// the Helm chart, and a manifest for each way of installing. It makes kubectl's plugin for every system that people work on, with the
// manifest of krew, and the playground's archive. It adds notes from the commits' subjects, and checksums of it all. "make release" runs it; it publishes nothing.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/test/binaries"
)

// release is what is made, and of what.
type release struct {
	version   string // with a v in front, as tags have it
	out       string
	source    string // where the project is, for links and krew
	agent     string // name of the agent's image, with the registry that it will be in
	digest    string // of the agent's image, once that is made
	platforms []string
	images    string    // architectures of the image, separated by commas; empty for those that a compiler is here for
	plays     bool      // with the playground
	at        time.Time // of the commit: what is made of it is the same whenever it is made
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var r release
	var platforms string
	flag.StringVar(&r.version, "version", "", "version, like v1.2.3")
	flag.StringVar(&r.out, "out", "bin/release", "folder of the results, which must be empty or not there")
	flag.StringVar(&r.source, "source", "https://github.com/gpuslice/gpuslice", "address of the project")
	flag.StringVar(&r.agent, "image", shippedImage, "name of the agent's image in the registry that it will be pushed to, without a tag")
	flag.StringVar(&platforms, "platforms", "linux/amd64,linux/arm64,darwin/amd64,darwin/arm64,windows/amd64", "systems of kubectl's plugin")
	flag.StringVar(&r.images, "images", "amd64,arm64", "architectures of the image")
	flag.BoolVar(&r.plays, "playground", true, "with the archive of the playground, which takes minutes to compress")
	flag.Parse()
	r.platforms = strings.Split(platforms, ",")
	if err := r.make(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// semver is what krew and Helm take for a version.
var semver = regexp.MustCompile(`^v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?$`)

func (r *release) make(ctx context.Context) error {
	if !semver.MatchString(r.version) {
		return fmt.Errorf("-version %q: it must be like v1.2.3 or v1.2.3-rc.1", r.version)
	}
	if entries, err := os.ReadDir(r.out); err == nil && len(entries) > 0 {
		return fmt.Errorf("-out %s: it has files already: remove them, so that no old one is taken for one of this release", r.out)
	}
	seconds, err := output(ctx, nil, "git", "log", "-1", "--format=%ct")
	if err != nil {
		return err
	}
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return fmt.Errorf("reading the time of the commit: %w", err)
	}
	r.at = time.Unix(unix, 0).UTC()
	return r.whole(ctx)
}

// whole makes the parts where no one takes them for a release, and gives them the name of the folder when they are all there.
func (r *release) whole(ctx context.Context) error {
	to := filepath.Clean(r.out)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return fmt.Errorf("making the folder of the results: %w", err)
	}
	var err error
	if r.out, err = os.MkdirTemp(filepath.Dir(to), filepath.Base(to)+"-unfinished-"); err != nil {
		return fmt.Errorf("making the folder of the results: %w", err)
	}
	defer os.RemoveAll(r.out)
	if err := r.parts(ctx); err != nil {
		return err
	}
	if err := os.Chmod(r.out, 0o755); err != nil {
		return fmt.Errorf("opening the folder of the results: %w", err)
	}
	return os.Rename(r.out, to) //nolint:wrapcheck // it names both
}

func (r *release) parts(ctx context.Context) error {
	for _, part := range []struct {
		name string
		make func(context.Context) error
	}{{"image", r.image}, {"chart", r.chart}, {"manifests", r.manifests}, {"plugin", r.plugins}, {"playground", r.playground}, {"notes", r.notes}, {"checksums", r.checksums}} {
		began := time.Now()
		if err := part.make(ctx); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
		fmt.Printf("%s: %s\n", part.name, time.Since(began).Round(100*time.Millisecond))
	}
	return nil
}

// image makes the archive and its bills of materials.
func (r *release) image(ctx context.Context) error {
	commit, err := output(ctx, nil, "git", "rev-parse", "HEAD")
	if err != nil {
		return err
	}
	tool, err := binaries.Builder{Log: os.Stderr}.Image(ctx)
	if err != nil {
		return err //nolint:wrapcheck // it says what was built
	}
	says, err := output(ctx, nil, filepath.Join(tool, "image"), "-out", r.out, "-name", r.agent, "-version", r.version, "-revision", commit,
		"-created", strconv.FormatInt(r.at.Unix(), 10), "-platforms", r.images)
	if err != nil {
		return err
	}
	fmt.Println(says)
	r.digest, err = digestIn(filepath.Join(r.out, "gpuslice-agent-"+r.version+".tar"))
	return err
}

func (r *release) chart(ctx context.Context) error {
	tool, err := binaries.Builder{Log: os.Stderr}.Helm(ctx)
	if err != nil {
		return err //nolint:wrapcheck // it says what was built
	}
	_, err = output(ctx, nil, filepath.Join(tool, "helm"), "package", "-chart", "deploy/chart", "-version", r.version, "-image", r.agent, "-digest", r.digest, "-out", r.out)
	return err
}

// shippedImage is what the manifests of the repository name.
const shippedImage = "gpuslice/gpuslice-agent"

var imageLine = regexp.MustCompile(`(?m)(image: )` + shippedImage + `:v[0-9.]+$`)

// manifests writes one file for each way of installing that needs no choice. They name the image by its digest: a tag may be given another image.
func (r *release) manifests(ctx context.Context) error {
	kube, err := binaries.Builder{Log: os.Stderr}.Kube(ctx)
	if err != nil {
		return err //nolint:wrapcheck // it says what was built
	}
	for name, folder := range map[string]string{
		"install.yaml": "deploy/base", "install-device-plugin.yaml": "deploy/overlays/device-plugin",
		"install-gpu-operator.yaml": "deploy/overlays/gpu-operator", "install-openshift.yaml": "deploy/overlays/openshift",
		"install-dra.yaml": "deploy/overlays/dra",
	} {
		text, err := output(ctx, nil, filepath.Join(kube, "kubectl"), "kustomize", folder)
		if err != nil {
			return err
		}
		if !imageLine.MatchString(text) {
			return fmt.Errorf("%s names no image of the agent", folder)
		}
		text = imageLine.ReplaceAllString(text, "${1}"+r.agent+":"+r.version+"@"+r.digest)
		if err := os.WriteFile(filepath.Join(r.out, name), []byte(text+"\n"), 0o644); err != nil {
			return fmt.Errorf("writing %s: %w", name, err)
		}
	}
	return nil
}

// plugins builds kubectl's plugin for each system, and packs it with the licence.
func (r *release) plugins(ctx context.Context) error {
	licence, err := os.ReadFile("LICENSE")
	if err != nil {
		return fmt.Errorf("reading the licence: %w", err)
	}
	work, err := os.MkdirTemp("", "gpuslice-release-")
	if err != nil {
		return fmt.Errorf("making a folder for programs: %w", err)
	}
	defer os.RemoveAll(work)
	var packed []archive
	for _, platform := range r.platforms {
		system, arch, ok := strings.Cut(platform, "/")
		if !ok {
			return fmt.Errorf("-platforms %q: write a system and an architecture, like linux/arm64", platform)
		}
		name := "kubectl-gpuslice"
		if system == "windows" {
			name += ".exe"
		}
		program := filepath.Join(work, system+"-"+arch, name)
		_, err := output(ctx, []string{"GOFLAGS=", "CGO_ENABLED=0", "GOOS=" + system, "GOARCH=" + arch},
			"go", "build", "-trimpath", "-buildvcs=false", "-tags", binaries.Tags, "-ldflags", "-s -w -X main.version="+r.version, "-o", program, "./cmd/kubectl-gpuslice")
		if err != nil {
			return err
		}
		content, err := os.ReadFile(program)
		if err != nil {
			return fmt.Errorf("reading the plugin: %w", err)
		}
		one := archive{system: system, arch: arch, program: name, file: fmt.Sprintf("kubectl-gpuslice_%s_%s_%s", r.version, system, arch)}
		text, err := one.pack([]packedFile{{"LICENSE", licence, 0o644}, {name, content, 0o755}}, r.at)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(text)
		one.sum = hex.EncodeToString(sum[:])
		if err := os.WriteFile(filepath.Join(r.out, one.file), text, 0o644); err != nil {
			return fmt.Errorf("writing %s: %w", one.file, err)
		}
		packed = append(packed, one)
	}
	return r.krew(packed)
}

// playground packs the playground.
func (r *release) playground(ctx context.Context) error {
	if !r.plays {
		return nil
	}
	tool, err := binaries.Builder{Log: os.Stderr}.Tool(ctx, "./test/playground")
	if err != nil {
		return err //nolint:wrapcheck // it says what was built
	}
	says, err := output(ctx, nil, tool, "bundle", "--output", filepath.Join(r.out, "gpuslice-playground-linux-amd64.tar.xz"))
	fmt.Println(says)
	return err
}

// longestNotes is in bytes: GitHub refuses a release whose text has more than 125,000 characters.
const longestNotes = 120_000

// notes says what has changed since the release before, by the subjects of the commits: those of one part together. Of the first release all is new.
func (r *release) notes(ctx context.Context) error {
	var text bytes.Buffer
	fmt.Fprintf(&text, "# gpuslice %s\n\n[What it changes for you](%s/blob/%s/.github/CHANGELOG.md). Image: `%s:%s@%s`\n",
		r.version, r.source, r.version, r.agent, r.version, r.digest)
	if before, err := output(ctx, nil, "git", "describe", "--tags", "--abbrev=0", "HEAD^"); err == nil {
		subjects, err := output(ctx, nil, "git", "log", "--no-merges", "--reverse", "--format=%s", before+"..HEAD")
		if err != nil {
			return err
		}
		if list := byPart(subjects); text.Len()+len(list) < longestNotes {
			text.WriteString(list)
		} else {
			fmt.Fprintf(&text, "\n[The commits](%s/compare/%s...%s) are too many for this page.\n", r.source, before, r.version)
		}
	}
	return os.WriteFile(filepath.Join(r.out, "NOTES.md"), text.Bytes(), 0o644) //nolint:wrapcheck // it names the file
}

// byPart lists subjects of commits below the part that each begins with.
func byPart(subjects string) string {
	parts := map[string][]string{}
	var order []string
	for subject := range strings.Lines(subjects) {
		part, what, found := strings.Cut(strings.TrimSpace(subject), ": ")
		if !found {
			part, what = "other", part
		}
		if parts[part] == nil {
			order = append(order, part)
		}
		parts[part] = append(parts[part], what)
	}
	slices.Sort(order)
	var text strings.Builder
	for _, part := range order {
		fmt.Fprintf(&text, "\n## %s\n\n", part)
		for _, what := range parts[part] {
			fmt.Fprintf(&text, "- %s\n", what)
		}
	}
	return text.String()
}

// checksums writes what sha256sum --check reads.
func (r *release) checksums(context.Context) error {
	entries, err := os.ReadDir(r.out)
	if err != nil {
		return fmt.Errorf("listing the results: %w", err)
	}
	var text bytes.Buffer
	for _, e := range entries {
		sum, err := sumOf(filepath.Join(r.out, e.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&text, "%s  %s\n", sum, e.Name())
	}
	return os.WriteFile(filepath.Join(r.out, "checksums.txt"), text.Bytes(), 0o644) //nolint:wrapcheck // it names the file
}

func sumOf(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err //nolint:wrapcheck // it names the file
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("reading %s: %w", file, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func output(ctx context.Context, env []string, program string, args ...string) (string, error) {
	run := exec.CommandContext(ctx, program, args...)
	run.Env = append(os.Environ(), env...)
	out, err := run.Output()
	if exit, is := errors.AsType[*exec.ExitError](err); is {
		return "", fmt.Errorf("%s %s: %w\n%s%s", filepath.Base(program), strings.Join(args, " "), err, out, exit.Stderr)
	}
	if err != nil {
		return "", fmt.Errorf("running %s: %w", program, err)
	}
	return strings.TrimSpace(string(out)), nil
}
