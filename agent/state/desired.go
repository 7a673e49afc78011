package state

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/document"
	"github.com/gpuslice/gpuslice/config/nodekeys"
	"github.com/gpuslice/gpuslice/config/window"
	"github.com/gpuslice/gpuslice/nvml"
)

// Desired is what the node's labels ask for.
type Desired struct {
	Name             string         // of the config; empty if nothing is asked for
	Label            string         // the label that asks for it
	Targets          plan.Targets   // GPU by GPU
	Plugin           *DesiredPlugin // nil leaves the device plugin's config as it is
	Keys             *nodekeys.Keys // of a profile; nil leaves the node's labels and taints as they are
	MissingPositions []int          // positions that the config names and the node does not have
	PluginLater      bool           // the agent asks the device plugin for a config once the startup taint does not keep it away
	Drain            *config.DrainOverrides
	Windows          []window.Window // of a profile; none for those of the pool
	Fingerprint      string          // distinguishes this request from any other, on these GPUs
	Left             *api.Failure    // why the agent restores first what an earlier agent has left; nil if the change itself does
	Overridden       []string        // labels, as key=value, that do not count while Label is there
	Unanswered       bool            // LabelMIGConfig is one of them, and asks for something else than Label does
	Unread           error           // why a file could not be read that this is from: it is as last verified, and no change begins by it; nil if all were
	Undo             bool            // the agent undoes the change instead
	UndoCause        error           // why, unless that is the failure in the journal
}

// ApplyCommand is the command by which a user asks the node for the same again, with these flags; empty if no user can.
func (d Desired) ApplyCommand(node string, flags ...string) string {
	of := map[string]string{
		config.LabelProfile: "--profile", config.LabelMIGConfig: "--mig-config",
		config.LabelDevicePluginConfig: "--device-plugin-config",
	}[d.Label]
	name, _, _ := strings.Cut(d.Name, api.DesiredSeparator) // the label of a MIG config counts beside that of the device plugin's
	if of == "" || d.Undo || len(flags) == 0 {
		return ""
	}
	return strings.Join(append([]string{"kubectl gpuslice apply", node, of, name}, flags...), " ")
}

// ResetTarget names the change that resets unhealthy GPUs of a node without a config label. No label can have it as its value.
const ResetTarget = "reset of a GPU"

// Read parses the file, if there is one.
func (f *ConfigMapFile) Read(parse func(data []byte) error) error {
	switch {
	case f == nil || f.Absent:
		return nil
	case f.Err != nil:
		return f.Err
	}
	if err := parse(f.Data); err != nil {
		return fmt.Errorf("%s: %w", f.Name, err)
	}
	return nil
}

// Only is the file with a single entry of the mapping that the field has, or none if it has no such entry; false if the file cannot be read.
func (f *ConfigMapFile) Only(field, name string) (*ConfigMapFile, bool) {
	if f == nil || f.Absent {
		return f, true
	}
	none := &ConfigMapFile{Name: f.Name, Absent: true}
	text, err := document.JSON(f.Data)
	var fields, entries map[string]json.RawMessage
	if f.Err != nil || err != nil || json.Unmarshal(text, &fields) != nil || json.Unmarshal(fields[field], &entries) != nil {
		return none, false
	}
	entry, has := entries[name]
	if !has {
		return none, true
	}
	if fields[field], err = json.Marshal(map[string]json.RawMessage{name: entry}); err != nil {
		return none, false
	}
	text, err = json.Marshal(fields)
	return &ConfigMapFile{Name: f.Name, Data: text}, err == nil
}

// Targets returns the requests as targets of the planner.
func Targets(requests map[nvml.UUID]nvml.Request) plan.Targets {
	out := plan.Targets{}
	for gpu, w := range requests {
		out[gpu] = plan.Target{Request: w}
	}
	return out
}

// RequestsOf returns what the catalog has by this name for the label, GPU by GPU.
func RequestsOf(configs catalog.Catalog, label, name string, gpus []nvml.GPU) (map[nvml.UUID]nvml.Request, error) {
	if label == config.LabelProfile {
		return configs.ProfileRequests(name, gpus)
	}
	return configs.Requests(name, gpus)
}
