// Package build makes the simulator's shared library for tests that load it.
package build

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
)

// LibraryName is what programs ask the dynamic linker for.
const LibraryName = "libnvidia-ml.so.1"

// Library builds the library into dir and gives its path. It needs the Go toolchain and a C compiler.
func Library(ctx context.Context, dir string) (string, error) {
	to := filepath.Join(dir, LibraryName)
	return to, run(ctx, to, "./libnvidia-ml", "-buildmode=c-shared", "-ldflags", "-extldflags=-Wl,-soname,"+LibraryName)
}

// Command builds the program gpusim into dir and gives its path.
func Command(ctx context.Context, dir string) (string, error) {
	to := filepath.Join(dir, "gpusim")
	return to, run(ctx, to, "./cmd/gpusim")
}

func run(ctx context.Context, to, what string, flags ...string) error {
	const module = "github.com/gpuslice/gpuslice/test/gpusim"
	args := append([]string{"build"}, flags...)
	args = append(args, "-o", to, filepath.Join(module, what))
	out, err := exec.CommandContext(ctx, "go", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("building %s: %w: %s", what, err, out)
	}
	return nil
}
