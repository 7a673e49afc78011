// Package migparted reads and writes NVIDIA's mig-parted format, version v1, for users' MIG configs. It is the only package that knows the format.
// NVIDIA's own package needs cgo and NVML's bindings, which a command for macOS and Windows cannot have, and it names one mistake without its place.
// The tests compare with it.
//
// It does not know the hardware: no GPU may have a correctly written profile.
package migparted

import (
	"errors"
	"fmt"
	"maps"

	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/document"
)

// version is the format's only version.
const version = "v1"

// file is what Render writes.
type file struct {
	Version string            `json:"version"`
	Configs map[string][]rule `json:"mig-configs,omitempty"`
}

type rule struct {
	DeviceFilter []string       `json:"device-filter,omitempty"`
	Devices      any            `json:"devices"` // "all" or positions
	MIG          bool           `json:"mig-enabled"`
	MIGDevices   map[string]int `json:"mig-devices"`
}

// Parse reads a file of MIG configs. It refuses files that mig-parted refuses. It also refuses values that mig-parted silently ignores: a filter that
// can match nothing, a negative index, a name that no label can have, a field that is there twice.
//
// The error joins one *check.InvalidError for each mistake, in the order of names and rules. A file with a mistake has no configs: with half a
// catalog a label would not mean what the file's author reads there.
func Parse(text []byte) (map[string]catalog.MIGConfig, error) {
	doc, err := document.JSON(text)
	if err != nil {
		return nil, errors.Join(append(misplacedIn(text), fmt.Errorf("reading MIG configs as YAML: %w", err))...)
	}
	if string(doc) == "null" {
		return nil, fmt.Errorf("reading MIG configs: the file is empty, and needs at least %q and %q", "version: v1", "mig-configs")
	}
	configs, errs := read(doc)
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return configs, nil
}

// Render writes configs as a file that mig-parted reads, and that Parse reads back unchanged. A rule that selects GPUs by UUID, PCI address or model
// is an error: the format cannot have it.
func Render(configs map[string]catalog.MIGConfig) ([]byte, error) {
	out := file{Version: version, Configs: map[string][]rule{}}
	for name, rules := range configs {
		var written []rule
		for i, r := range rules {
			if len(r.UUIDs)+len(r.PCI)+len(r.Models) > 0 {
				return nil, fmt.Errorf("writing MIG config %s: rule %d selects by UUID, PCI address or model, which mig-parted cannot", name, i+1)
			}
			w := rule{DeviceFilter: r.DeviceFilter, Devices: r.Indices, MIG: r.MIG, MIGDevices: map[string]int{}}
			maps.Copy(w.MIGDevices, r.Devices)
			if r.All {
				w.Devices = "all"
			}
			written = append(written, w)
		}
		out.Configs[name] = written
	}
	text, err := yaml.Marshal(out)
	if err != nil {
		return nil, fmt.Errorf("writing MIG configs: %w", err)
	}
	return text, nil
}
