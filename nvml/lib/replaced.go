package lib

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/driverroot"
)

// mapped is the library's file that this process has mapped.
//
// There is one for the life of the process. go-nvml leaves its calls to the dynamic linker. The linker binds each call at its first use to the
// library that was loaded first, and never again. When the driver is replaced by another version, that library talks to a kernel module of the other
// version, and answers every call with a mismatch. The process could map the new library too, but would never call it: only a new process can use it.
var mapped struct {
	mu    sync.Mutex
	place string      // its path, which will be that of a replacing driver's library too
	file  os.FileInfo // of the file that place led to; nil before the first one
}

// remember notes which file has been mapped from path, if it is the first.
//
// It stats the path and does not take device and inode from /proc/self/maps, which differ from those of a
// path on overlayfs and btrfs. The kernel gives an inode to no other file as long as this process has it mapped.
func remember(path string) {
	mapped.mu.Lock()
	defer mapped.mu.Unlock()
	if mapped.file != nil {
		return
	}
	mapped.place = path
	if path == libraryName {
		mapped.place = foundByLoader()
	}
	if file, err := os.Stat(mapped.place); err == nil {
		mapped.file = file
	}
}

// foundByLoader gives the path of the library that the dynamic loader has found by its bare name: in the folder of the
// mapped file, by the name that each version has there.
func foundByLoader() string {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return libraryName
	}
	// See proc_pid_maps(5): the path is the last field, and begins with the first slash. go-nvml's own way to ask, dl's Path,
	// has the path written into a buffer of no bytes.
	for line := range bytes.Lines(maps) {
		_, path, found := bytes.Cut(bytes.TrimSpace(line), []byte("/"))
		file := "/" + string(path)
		if !found || !strings.HasPrefix(filepath.Base(file), strings.TrimSuffix(libraryName, ".1")) {
			continue
		}
		if link := filepath.Join(filepath.Dir(file), libraryName); exists(link) {
			return link
		}
		return file
	}
	return libraryName
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// judge decides about a mismatch of versions. If another file is in the library's place, the new driver is complete, and
// a new process will work with it. If it is the same file, or none, an installer is just replacing the driver.
func (d *Driver) judge(err error) error {
	if !errors.Is(err, errMismatch) || !d.replaced() {
		return err
	}
	e := new(nvml.Error)
	errors.As(err, &e)
	return &nvml.Error{Op: e.Op, GPU: e.GPU, Code: e.Code, Err: nvml.ErrReplaced}
}

// replaced reports whether the library in that place is another file than the mapped one.
func (d *Driver) replaced() bool {
	mapped.mu.Lock()
	defer mapped.mu.Unlock()
	place, err := d.find()
	if err != nil || mapped.file == nil {
		return false
	}
	if place == libraryName { // the loader would give the one that it has loaded before, wherever the name leads now
		place = mapped.place
		if d.setPath(place); !exists(place) {
			if place, err = driverroot.Find("/", d.setPath); err != nil {
				return false // there is no other file
			}
		}
	}
	d.setPath(place)
	now, err := os.Stat(place)
	return err == nil && !os.SameFile(now, mapped.file)
}
