package binaries

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/gofrs/flock"
)

// hashLength is how many hexadecimal digits of a hash name a directory of the cache.
const hashLength = 16

var rootModule = regexp.MustCompile(`(?m)^module github\.com/gpuslice/gpuslice\s*$`)

// Checkout returns the root of the checkout.
func (b Builder) Checkout() (dir string, err error) { return b.root() }

func (b Builder) root() (string, error) {
	if b.Root != "" {
		return filepath.Abs(b.Root)
	}
	start, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("looking for the checkout: %w", err)
	}
	for dir := start; ; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && rootModule.Match(mod) {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("neither %s nor a directory above it is a checkout of github.com/gpuslice/gpuslice: run this within one", start)
		}
	}
}

// KeepOutOfTestCache makes the Go command run the tests of the calling package each time. The Go command sees the
// variables and files that a test reads, but not the programs it runs. Without the log of these it keeps no result of a
// test. Nor does it check each file in that log; the tests of agent open half a million.
func KeepOutOfTestCache() {
	if log := flag.Lookup("test.testlogfile"); log != nil && log.Value.String() != "" {
		_ = os.Remove(log.Value.String()) // it is gone already, or another test of the package has removed it
	}
}

// keepOutOfTestCache does the same except for tests of the builder, which have their own cache.
func (b Builder) keepOutOfTestCache() {
	if b.Cache == "" {
		KeepOutOfTestCache()
	}
}

func (b Builder) cache() (string, error) {
	dir := b.Cache
	if dir == "" {
		user, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("looking for the cache directory (set XDG_CACHE_HOME): %w", err)
		}
		dir = filepath.Join(user, "gpuslice")
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("looking for the cache directory: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("making the cache directory: %w", err)
	}
	return dir, nil
}

// lock makes this the only process that builds the file; it waits for others.
func (b Builder) lock(ctx context.Context, file, name string) (unlock func(), err error) {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return nil, fmt.Errorf("locking the build of %s: %w", name, err)
	}
	l := flock.New(file)
	locked, err := l.TryLock()
	for start := time.Now(); err == nil && !locked; {
		b.logf("%s: waiting for another process that builds it, for %s now", name, time.Since(start).Round(time.Second))
		wait, cancel := context.WithTimeout(ctx, wordEvery)
		locked, err = l.TryLockContext(wait, 100*time.Millisecond)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			err = nil // it goes on waiting: the kernel takes the lock from a process that ends
		}
	}
	if err != nil {
		return nil, fmt.Errorf("locking the build of %s with %s: %w", name, file, err)
	}
	return func() { _ = l.Unlock() }, nil // closing the file unlocks it in any case
}

// run starts the go command in dir and returns what it prints. Lines of its progress go to saw, if there is one.
func run(ctx context.Context, dir string, environ []string, saw func(line string) bool, args ...string) (string, error) {
	if saw == nil {
		saw = func(string) bool { return false }
	}
	var stdout bytes.Buffer
	stderr := &lines{saw: saw}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	// Flags and workspaces of the user would change the result without changing its hash. A test may use one core alone; its compiler may not.
	cmd.Env = append(append(os.Environ(), "GOFLAGS=", "GOWORK=off", "GOMAXPROCS="), environ...)
	cmd.Stdout, cmd.Stderr = &stdout, stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // lets go end its compilers
	cmd.WaitDelay = 10 * time.Second
	err := cmd.Run()
	if errors.Is(err, exec.ErrNotFound) {
		return "", fmt.Errorf("%w: install Go as go.mod asks for and put it on PATH", err)
	}
	if err != nil {
		return "", fmt.Errorf("running go %s in %s: %w%s", args[0], dir, err, complaint(stderr.String()))
	}
	return stdout.String(), nil
}

// complaint is the end of what the compiler said, and what to do about the commonest cause.
func complaint(stderr string) string {
	var lines []string
	for line := range strings.Lines(strings.TrimSpace(stderr)) {
		if !strings.HasPrefix(line, "go: downloading ") {
			lines = append(lines, strings.TrimRight(line, "\n"))
		}
	}
	if len(lines) == 0 {
		return ""
	}
	text := "\n" + strings.Join(lines[max(0, len(lines)-30):], "\n")
	switch {
	case strings.Contains(text, "no space left on device"):
		text += "\nmake room: the Go command keeps what it compiles where go env GOCACHE says, works in TMPDIR, and results go to XDG_CACHE_HOME"
	case strings.Contains(text, "signal: killed"):
		text += "\nthe kernel kills a compiler or linker when memory runs out: end other programs, or give the container more"
	case strings.Contains(text, "dial tcp") || strings.Contains(text, "i/o timeout"):
		text += "\nmodules are downloaded the first time: see whether the network is there, then start again; what has come is kept"
	}
	if strings.Contains(text, `C compiler "`) || strings.Contains(text, "cgo: C compiler") {
		text += "\na C compiler is needed: on Debian, apt-get install gcc libc6-dev"
	}
	return text
}
