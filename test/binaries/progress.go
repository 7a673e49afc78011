package binaries

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/schollz/progressbar/v3"
)

const (
	// wordEvery is the time between two lines about a build that goes on, or about a wait for another one. A CI system that
	// hears nothing for ten minutes takes a job for dead.
	wordEvery = 30 * time.Second
	// drawEvery is the time between two observations of the bar at the build.
	drawEvery = 250 * time.Millisecond
)

// chosen is the recipe of the requested version, instead of the current one. Older reports whether it is an earlier
// version.
func chosen(current recipe, root string) (r recipe, older bool, err error) {
	for _, c := range []choice{kubeChoice, devicePluginChoice} {
		if current.name == c.current.name {
			return c.made(root)
		}
	}
	return current, false, nil
}

// hasKube reports whether Kubernetes need not be built, as far as can be seen beforehand: it is there, or is to be downloaded. An error is Kube's to return.
func (b Builder) hasKube(ctx context.Context) bool {
	given, _, err := (Builder{Root: b.Root, Cache: b.Cache, Kubelet: b.Kubelet}).presentKube(ctx)
	return err != nil || given != "" || os.Getenv(KubeFrom) != ""
}

// Announce says, before anything begins, which of the named have to be built and about how long that takes in all:
// kube, runtime, deviceplugin, pluginconfig, migparted, dradriver, image, helm. It says nothing when all are there.
func (b Builder) Announce(ctx context.Context, names ...string) error {
	root, err := b.root()
	if err != nil {
		return err
	}
	cache, err := b.cache()
	if err != nil {
		return err
	}
	var missing []string
	var work time.Duration
	for _, name := range names {
		r, known := recipes[name]
		if !known {
			continue // a program of the root module, which takes seconds
		}
		r, older, err := chosen(r, root)
		if err != nil {
			return err
		}
		module := filepath.Join(root, r.module)
		dir, err := r.dir(ctx, cache, module)
		if err != nil {
			return err
		}
		if exists(dir) {
			continue
		}
		if name == "kube" && !older && b.hasKube(ctx) {
			continue
		}
		what, err := versions(r.modFile(module), r.what)
		if err != nil {
			return err
		}
		missing = append(missing, what)
		work += r.work
	}
	if len(missing) > 0 {
		b.logf("to be built, once: %s; %s. Kept in %s", strings.Join(missing, ", "), estimate(work), cache)
	}
	return nil
}

// estimate says how long work for one core takes on this machine, with the cores it may use. The linker uses one core
// only, for a tenth of the work.
func estimate(work time.Duration) string {
	cores := runtime.GOMAXPROCS(0) // knows the limits of a container too
	took := work/10 + (work-work/10)/time.Duration(cores)
	minutes := max(1, int((took+30*time.Second)/time.Minute))
	unit := "minutes"
	if minutes == 1 {
		unit = "minute"
	}
	on := fmt.Sprintf("%d cores", cores)
	if cores == 1 {
		on = "one core"
	}
	return fmt.Sprintf("about %d %s on %s, and the download where a module is not here yet", minutes, unit, on)
}

// status is the progress of a build. The Go command names each package that it compiles, but none in its cache. So a
// build may be over before all were named.
type status struct {
	mu    sync.Mutex
	named map[string]bool   // import path of all that the build may have to compile -> whether it was named
	mains map[string]string // import path of a program -> its name
	at    int               // how many were named
	now   string            // the last one named
}

// expect adds packages to those that the build may have to compile: lines of "<import path> <package name>".
func (s *status) expect(list string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.named == nil {
		s.named, s.mains = map[string]bool{}, map[string]string{}
	}
	for line := range strings.Lines(list) {
		pkg, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		s.named[pkg] = false
		if name == "main" {
			s.mains[pkg] = path.Base(pkg)
		}
	}
}

// begins notes the next phase of a build. Packages in the cache and the linker print no line of their own.
func (s *status) begins(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = what
}

// importPath is the form of a line in which the Go command names a package; lines of compilers have colons and spaces.
var importPath = regexp.MustCompile(`^[\w.~/-]+$`)

// saw takes a line that the Go command wrote, and reports whether it reported progress and nothing else.
func (s *status) saw(line string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if module, found := strings.CutPrefix(line, "go: downloading "); found {
		s.now = "downloading " + module
		return true
	}
	before, known := s.named[line]
	if !known && (s.named != nil || !importPath.MatchString(line)) {
		return false
	}
	if known && !before {
		s.named[line] = true
		s.at++
	}
	s.now = line
	if name, program := s.mains[line]; program {
		s.now = "linking " + name
	}
	return true
}

func (s *status) read() (at, total int, now string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at, len(s.named), s.now
}

func (s *status) String() string {
	at, total, now := s.read()
	switch {
	case now == "":
		return "looking at its sources"
	case total == 0 || at == 0:
		return now
	default:
		return fmt.Sprintf("package %d of at most %d, %s", at, total, now)
	}
}

// lines splits a program's output into lines, hands each to saw, and keeps those that saw does not take.
type lines struct {
	saw     func(line string) bool
	kept    bytes.Buffer
	partial []byte
}

func (l *lines) Write(p []byte) (int, error) {
	l.partial = append(l.partial, p...)
	for {
		line, rest, found := bytes.Cut(l.partial, []byte("\n"))
		if !found {
			return len(p), nil
		}
		if !l.saw(string(line)) {
			l.kept.Write(line)
			l.kept.WriteByte('\n')
		}
		l.partial = rest
	}
}

func (l *lines) String() string { return l.kept.String() + string(l.partial) }

// watched runs a build and reports how far it is: a bar on a terminal, elsewhere a line now and then.
func (b Builder) watched(name string, s *status, build func() error) error {
	start := time.Now()
	done := make(chan error, 1)
	go func() { done <- build() }()
	every := wordEvery
	report := func() { b.logf("%s: still building after %s: %s", name, time.Since(start).Round(time.Second), s) }
	if b.Terminal != nil {
		bar := progressbar.NewOptions(-1,
			progressbar.OptionSetWriter(b.Terminal), progressbar.OptionClearOnFinish(), progressbar.OptionSetWidth(30),
			progressbar.OptionSetPredictTime(false), progressbar.OptionSetElapsedTime(true), progressbar.OptionShowDescriptionAtLineEnd(),
			progressbar.OptionSpinnerType(14))
		defer func() { _ = bar.Finish() }() // a bar that cannot be drawn stops no build
		every, report = drawEvery, func() { draw(bar, name, s) }
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			report()
		case err := <-done:
			return err
		}
	}
}

// width limits the name of the current package next to the bar: all of it fits on one line of 80 columns.
const width = 32

func draw(bar *progressbar.ProgressBar, name string, s *status) {
	at, total, now := s.read()
	if now == "" {
		now = name
	}
	if len(now) > width {
		now = "…" + now[len(now)-width:] // the end of an import path says most
	}
	bar.Describe(now)
	if total == 0 {
		_ = bar.Add(1) // turns the spinner
		return
	}
	if bar.GetMax() != total {
		bar.ChangeMax(total)
	}
	_ = bar.Set(min(at, total-1)) // the linker has work left when all is compiled
}
