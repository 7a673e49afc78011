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
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// unused is how long an unused program of our own is kept: each edit makes a new one.
const unused = 24 * time.Hour

// runVariable names the run of make, which sets it. runSuffix marks the file next to a program that records the run
// that built it.
const (
	runVariable = "GPUSLICE_RUN"
	runSuffix   = ".run"
)

// Tags are the build tags of the project's own programs, as in the Makefile and the Dockerfile. With gRPC's tracing the
// linker would keep every method of every type.
const Tags = "grpcnotrace"

// LibNVML returns the simulated driver library as a file named libnvidia-ml.so.1, alone in its directory, so that the
// directory can be put on LD_LIBRARY_PATH.
func (b Builder) LibNVML(ctx context.Context) (file string, err error) {
	const soname = "libnvidia-ml.so.1"
	return b.own(ctx, "./test/gpusim/libnvidia-ml", soname,
		"-buildmode=c-shared", "-ldflags=-s -w -extldflags=-Wl,-soname,"+soname)
}

// LibCUDA returns the simulated part of the driver's library for programs as a file named libcuda.so.1, as LibNVML does.
func (b Builder) LibCUDA(ctx context.Context) (file string, err error) {
	const soname = "libcuda.so.1"
	return b.own(ctx, "./test/gpusim/libcuda", soname,
		"-buildmode=c-shared", "-ldflags=-s -w -extldflags=-Wl,-soname,"+soname)
}

// Tool returns the program of a main package of the root module, named from the root: "./cmd/gpuslice-agent". It is built
// with further flags of "go build", if any are given.
func (b Builder) Tool(ctx context.Context, pkg string, flags ...string) (file string, err error) {
	return b.own(ctx, pkg, path.Base(pkg), append([]string{"-ldflags=-s -w " + lazy}, flags...)...)
}

// own builds a package of the root module and puts the result under a name made of its content. The compiler works only
// when something changed. A process that started an earlier build keeps it. A run of make asks the compiler once: to
// hear that nothing changed takes a second, and the tests ask for programs a hundred times.
func (b Builder) own(ctx context.Context, pkg, name string, flags ...string) (string, error) {
	b.keepOutOfTestCache()
	root, err := b.root()
	if err != nil {
		return "", err
	}
	cache, err := b.cache()
	if err != nil {
		return "", err
	}
	checkout := sha256.Sum256([]byte(strings.Join(append([]string{root, pkg}, flags...), "\n")))
	latest := filepath.Join(cache, "latest", hex.EncodeToString(checkout[:])[:hashLength], name)
	unlock, err := b.lock(ctx, latest+".lock", name)
	if err != nil {
		return "", err
	}
	defer unlock()
	if file := builtInThisRun(latest); file != "" {
		return file, nil
	}
	start := time.Now()
	// Without -trimpath the compiler shares what it compiled with tests of the same packages.
	args := append([]string{"build", "-v", "-buildvcs=false", "-tags=" + Tags, "-o", latest}, flags...)
	s := &status{}
	err = b.watched(name, s, func() error {
		_, err := run(ctx, root, nil, s.saw, append(args, pkg)...)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("building %s: %w", pkg, err)
	}
	file, err := keep(cache, latest, name)
	if err != nil {
		return "", fmt.Errorf("keeping %s: %w", name, err)
	}
	if err := noteRun(latest, file); err != nil {
		return "", fmt.Errorf("keeping %s: %w", name, err)
	}
	b.logf("%s: up to date after %s", name, time.Since(start).Round(100*time.Millisecond))
	return file, nil
}

// thisRun is the name of the run of make that started this process, or "". The Go command notes what os.Getenv reads,
// and would reuse no cached test result under a different name.
func thisRun() string {
	run, _ := syscall.Getenv(runVariable)
	return run
}

// builtInThisRun is the file of the program that this run of make last built, or "".
func builtInThisRun(latest string) string {
	run := thisRun()
	if run == "" {
		return ""
	}
	text, err := os.ReadFile(latest + runSuffix)
	if err != nil {
		return "" // it is built, which says what is wrong
	}
	file, found := strings.CutPrefix(string(text), run+"\n")
	if !found || !exists(file) {
		return ""
	}
	return file
}

// noteRun makes builtInThisRun return file for the program at latest.
func noteRun(latest, file string) error {
	run := thisRun()
	if run == "" {
		return nil
	}
	return os.WriteFile(latest+runSuffix, []byte(run+"\n"+file), 0o600)
}

// keep links the file into a directory named after its content, and removes unused directories of that name.
func keep(cache, built, name string) (string, error) {
	hash, err := hashOf(built)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, name+"-"+hash)
	file := filepath.Join(dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if err := os.Link(built, file); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	now := time.Now()
	if err := os.Chtimes(dir, now, now); err != nil {
		return "", err
	}
	return file, dropUnused(cache, name, now)
}

func dropUnused(cache, name string, now time.Time) error {
	entries, err := os.ReadDir(cache)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		hash, found := strings.CutPrefix(entry.Name(), name+"-")
		if !found || len(hash) != hashLength || !entry.IsDir() {
			continue
		}
		info, err := entry.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if now.Sub(info.ModTime()) > unused {
			if err := os.RemoveAll(filepath.Join(cache, entry.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

func hashOf(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil))[:hashLength], nil
}
