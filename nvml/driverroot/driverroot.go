// Package driverroot finds NVIDIA's management library in a file system that has the driver: installed there, or in the root of the
// driver's container, which NVIDIA's GPU Operator mounts below it. The only file that Find opens is the operator's own, which names that root.
package driverroot

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Library is the file name of NVIDIA's management library.
const Library = "libnvidia-ml.so.1"

// The folder of the GPU Operator's driver container, and the operator's file with the name of the driver that works. From its validator and its chart
// (hostPaths.driverInstallDir), v26.7.
const (
	containers = "run/nvidia/driver"
	readyFile  = "run/nvidia/validations/driver-ready"
	readyRoot  = "NVIDIA_DRIVER_ROOT="
)

// longestReady is more than the operator writes into that file, in bytes.
const longestReady = 64 << 10

// folders are where drivers are installed, below their root.
var folders = []string{
	"usr/lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "lib64", "lib/x86_64-linux-gnu",
	"lib/aarch64-linux-gnu", "usr/lib", "lib", "usr/local/nvidia/lib64",
}

// Find gives the path of the library in the file system at root: where the GPU Operator says, below the root itself, or in the driver's
// container. The error, which matches fs.ErrNotExist, names the places.
//
// It stats files of the host. Any of them may be behind a server that does not answer, so callers abandon it at a deadline. At is called with each
// file first, so that the error of an abandoned call names the file; it may be nil.
func Find(root string, at aside.At) (string, error) {
	if at == nil {
		at = func(string) {}
	}
	said, asked := operatorsRoot(root, at)
	var places []string
	if asked {
		places = append(places, filepath.Join(root, said))
	}
	for _, place := range []string{filepath.Clean(root), filepath.Join(root, containers)} {
		if !slices.Contains(places, place) {
			places = append(places, place)
		}
	}
	for _, place := range places {
		for _, folder := range folders {
			path := filepath.Join(place, folder, Library)
			if at(path); exists(path) {
				return path, nil
			}
		}
	}
	err := fmt.Errorf("there is no %s under %s%w", Library, strings.Join(places, ", "), notThere{})
	switch {
	case asked && said == "/":
		err = fmt.Errorf("%w; the GPU Operator says that the driver is the host's own, so mount the host's /usr below %s", err, root)
	case asked:
		err = fmt.Errorf("%w; the GPU Operator says that it is under %s of the host: mount that below %s", err, said, root)
	}
	return "", err
}

// notThere is fs.ErrNotExist without a text of its own.
type notThere struct{}

func (notThere) Error() string { return "" }

// Is makes it fs.ErrNotExist.
func (notThere) Is(target error) bool { return target == fs.ErrNotExist }

// operatorsRoot gives the driver's root on the host that the GPU Operator's file names, which the operator writes once the driver works.
// The file may have any text, so operatorsRoot takes its path below the root.
func operatorsRoot(root string, at aside.At) (string, bool) {
	path := filepath.Join(root, readyFile)
	at(path)
	text, err := aside.Bounded(path, longestReady)
	if err != nil {
		return "", false
	}
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), readyRoot); ok && filepath.IsAbs(path) {
			return filepath.Clean(path), true
		}
	}
	return "", false
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Touch reads a library's file to its end, if path is more than a name for the dynamic loader to look up. It leaves errors to the loader. It is for
// files that may be behind a server that does not answer. A thread that waits for the file in the loader holds the loader's lock. Other threads of
// the Go runtime wait for that lock before garbage collection can start, and so the whole program stops. A thread that waits in Touch holds no lock.
func Touch(path string) {
	if !strings.ContainsRune(path, filepath.Separator) {
		return
	}
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Mode().IsRegular() {
		_, _ = io.Copy(io.Discard, f) // the loader reads it again
	}
}
