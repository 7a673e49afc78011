package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform"
	"github.com/google/renameio/v2"
	"go.yaml.in/yaml/v3"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpuslice/gpuslice/nvml/aside"
)

// file is a spec of one of our kinds.
type file struct {
	path string // with symbolic links resolved, so that a link stays one
	text []byte
	spec *specs.Spec
}

// kind finds the kind of a spec, in YAML and JSON, without a whole parse: a file that is not ours may be of any version.
var kind = regexp.MustCompile(`(?:^|[\s{,])["']?kind["']?\s*:\s*["']?([A-Za-z0-9._/-]+)`)

// longestSpec is more than a spec of 16 GPUs of 7 instances each, in bytes.
const longestSpec = 16 << 20

// read finds the specs of our kinds.
func (s *Specs) read(at aside.At) ([]file, error) {
	var out []file
	var errs []error
	for _, dir := range s.dirs {
		at(dir)
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("looking for CDI specs in %s: %w", dir, err))
		}
		for _, e := range entries {
			if ext := filepath.Ext(e.Name()); ext != ".json" && ext != ".yaml" || e.IsDir() {
				continue // runtimes read no others
			}
			path := filepath.Join(dir, e.Name())
			at(path)
			f, err := open(path)
			if err != nil {
				errs = append(errs, err)
			}
			if f != nil {
				out = append(out, *f)
			}
		}
	}
	return out, errors.Join(errs...)
}

// open reads a spec; nil if it is not of our kinds, or gone.
func open(path string) (*file, error) {
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading CDI spec %s: %w", path, err)
	}
	text, err := aside.Bounded(real, longestSpec)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading CDI spec %s: %w", path, err)
	}
	found := kind.FindSubmatch(text)
	if found == nil || string(found[1]) != kindGPU && string(found[1]) != kindManagement {
		return nil, nil
	}
	spec, err := cdilib.ParseSpec(text)
	if err != nil {
		return nil, fmt.Errorf("reading CDI spec %s: %w: write it again with nvidia-ctk cdi generate, or remove it", path, err)
	}
	return &file{path: real, text: text, spec: spec}, nil
}

// withDevices gives the spec with other devices, and with the device "all" if it had one.
func (f file) withDevices(devices []specs.Device) (*specs.Spec, error) {
	out, err := cdilib.ParseSpec(f.text)
	if err != nil {
		return nil, err
	}
	// NVIDIA's transforms also sort the common edits, which the agent must not touch: so they get a copy.
	scratch := *f.spec
	scratch.Devices = devices
	if err := transform.NewSimplifier().Transform(&scratch); err != nil {
		return nil, fmt.Errorf("removing what all devices share: %w", err)
	}
	if scratch.Kind == kindGPU && has(f.spec, "all") && !isEmpty(devices) {
		all, err := transform.NewMergedDevice(transform.WithName("all"))
		if err != nil {
			return nil, fmt.Errorf("merging devices: %w", err)
		}
		if err := all.Transform(&scratch); err != nil {
			return nil, fmt.Errorf("merging devices: %w", err)
		}
	}
	out.Devices = scratch.Devices
	// A version above what the content needs would lock out older runtimes.
	if specs.ValidateVersion(out) != nil {
		if out.Version, err = specs.MinimumRequiredVersion(out); err != nil {
			return nil, fmt.Errorf("finding the CDI version: %w", err)
		}
	}
	return out, nil
}

// replace replaces the file by a spec, under the same name and mode, after a runtime's own checks of it.
func (f file) replace(spec *specs.Spec) error {
	text, err := encode(spec, filepath.Ext(f.path))
	if err != nil {
		return err
	}
	pending, err := renameio.NewPendingFile(f.path, renameio.WithTempDir(filepath.Dir(f.path)), renameio.WithExistingPermissions())
	if err != nil {
		return fmt.Errorf("writing its copy: %w: its directory must be mounted writable", err)
	}
	defer pending.Cleanup() //nolint:errcheck // after the rename there is no file left; before it, the first error counts
	if _, err := pending.Write(text); err != nil {
		return fmt.Errorf("writing its copy: %w", err)
	}
	if _, err := cdilib.ReadSpec(pending.Name(), 0); err != nil {
		return fmt.Errorf("checking what was generated: %w", err)
	}
	if err := pending.CloseAtomicallyReplace(); err != nil {
		return fmt.Errorf("replacing it: %w", err)
	}
	return nil
}

// encode writes a spec as NVIDIA's tools do.
func encode(spec *specs.Spec, ext string) ([]byte, error) {
	if ext == ".json" {
		text, err := json.Marshal(spec)
		if err != nil {
			return nil, fmt.Errorf("encoding JSON: %w", err)
		}
		return text, nil
	}
	text, err := yaml.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("encoding YAML: %w", err)
	}
	return append([]byte("---\n"), text...), nil
}

func has(spec *specs.Spec, name string) bool {
	for _, d := range spec.Devices {
		if d.Name == name {
			return true
		}
	}
	return false
}

func names(spec *specs.Spec) []string {
	var out []string
	for _, d := range spec.Devices {
		out = append(out, d.Name)
	}
	return out
}
