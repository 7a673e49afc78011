// Package smi runs NVIDIA's program nvidia-smi for the one thing that NVIDIA's library does not offer: the reset of a GPU that needs no other mode.
// The program is the one that is installed with the library, of the same version, and is trusted as much. It is the only package that runs a program.
package smi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
)

// Name is the file name of the program.
const Name = "nvidia-smi"

// folders are where the program is, below the root that the library is installed in.
var folders = []string{"usr/bin", "bin", "usr/local/nvidia/bin"}

// mostUp is how many folders a library is below its root at most: usr/lib/x86_64-linux-gnu, and one to spare.
const mostUp = 4

// mostSaid is how much of what the program says is kept, in bytes.
const mostSaid = 1 << 10

// Find gives the path of the program that is installed with the library at that path, or with the one that the loader finds by a bare name. It asks for
// files of the host: call it where a deadline abandons it.
func Find(library string) (string, error) {
	roots := []string{"/"}
	if filepath.IsAbs(library) {
		roots = nil
		for dir := filepath.Dir(library); len(roots) < mostUp && dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
			roots = append(roots, filepath.Dir(dir))
		}
	}
	for _, root := range roots {
		for _, folder := range folders {
			path := filepath.Join(root, folder, Name)
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				return path, nil
			}
		}
	}
	return "", fmt.Errorf("%w: NVIDIA's library resets no GPU, and its program %s is missing: looked below %s", nvml.ErrNotSupported, Name,
		strings.Join(roots, ", "))
}

// Reset has the program reset a GPU that no process holds, and destroys every instance of it. The program finds the library by its path; it may be
// a bare name. Errors match ErrInUse, ErrNotSupported, ErrPermission, ErrLost and ErrNoDriver where the program says so.
//
// It returns when the program has ended. Where ctx ends before, it kills the program; one that the kernel holds in a call into the driver cannot be
// killed, so call Reset where a deadline abandons it.
func Reset(ctx context.Context, program, library string, gpu nvml.UUID) error {
	cmd := exec.CommandContext(ctx, program, "--gpu-reset", "-i", string(gpu)) //nolint:gosec // the driver's own program, and the UUID that the driver gave
	cmd.WaitDelay = time.Second
	if filepath.IsAbs(library) {
		// The program looks for the library by its bare name, which the loader of this image does not find. A search path would have the loader
		// take the host's C library, too, which this image's does not go with.
		cmd.Env = append(os.Environ(), "LD_PRELOAD="+library)
	}
	said := &head{most: mostSaid}
	cmd.Stdout, cmd.Stderr = said, said
	err := cmd.Run()
	if err == nil {
		return nil
	}
	return &nvml.Error{Op: "resetting", GPU: gpu, Code: said.text(err), Err: cause(err, said.String())}
}

// cause returns the error that callers test for, or nil, by the program's exit code. It is mostly the library's code (see RETURN VALUE in its
// manual). A client of the GPU has no code of its own in the manual.
func cause(err error, said string) error {
	exit := new(exec.ExitError)
	if !errors.As(err, &exit) {
		return nil
	}
	switch exit.ExitCode() {
	case 3, 13: // not available on the device, or in this version
		return nvml.ErrNotSupported
	case 4:
		return nvml.ErrPermission
	case 9, 12: // the driver, or its library, is not there
		return nvml.ErrNoDriver
	case 15:
		return nvml.ErrLost
	}
	said = strings.ToLower(said)
	switch {
	case strings.Contains(said, "in use"):
		return nvml.ErrInUse
	case strings.Contains(said, "not supported"):
		return nvml.ErrNotSupported
	default:
		return nil
	}
}

// head keeps the beginning of what is written to it.
type head struct {
	strings.Builder
	most int
}

// Write implements io.Writer.
func (h *head) Write(p []byte) (int, error) {
	h.Builder.Write(p[:min(len(p), h.most-h.Len())])
	return len(p), nil
}

// text is what the program says, in one line, with how it has ended.
func (h *head) text(err error) string {
	return strings.Join(append([]string{Name + ": " + err.Error()}, strings.Fields(strings.ToValidUTF8(h.String(), "?"))...), " ")
}
