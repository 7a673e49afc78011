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

// Desired is what the node's labels request.
type Desired struct {
	Name             string         // of the config; empty if nothing is requested
	Label            string         // the label that requests it
	Targets          plan.Targets   // GPU by GPU
	Geometry         bool           // the request has one; Targets has none where it is refused
	Plugin           *DesiredPlugin // nil keeps the device plugin's config
	Keys             *nodekeys.Keys // of a profile; nil keeps the node's labels and taints
	MissingPositions []int          // positions that the config names and the node does not have
	PluginLater      bool           // the agent gives the device plugin a config once the startup taint no longer keeps it away
	Drain            *config.DrainOverrides
	Windows          []window.Window // of a profile; without any, those of the pool count
	Fingerprint      string          // distinguishes this request from any other, on these GPUs
	Left             *api.Failure    // why the agent first restores what an earlier one has left; nil if the change itself does
	Overridden       []string        // labels, as key=value, that do not count while Label is there
	Unanswered       bool            // LabelMIGConfig is one of them, and requests something else than Label
	Unread           error           // why a file of this request could not be read: the rest requests what was last verified, and no change begins; nil if all were read
	Restoring        bool            // it restores instances that a reboot has removed: pods get their devices back
	Undo             bool            // the agent undoes the change instead
	UndoCause        error           // why, unless that is the failure in the journal
}

// ApplyCommand is the command that repeats the request, with these flags; empty if no user can.
func (d Desired) ApplyCommand(node string, flags ...string) string {
	of := map[string]string{
		config.LabelProfile: "--profile", config.LabelMIGConfig: "--mig-config",
		config.LabelDevicePluginConfig: "--device-plugin-config",
	}[d.Label]
	name, _, _ := strings.Cut(d.Name, api.DesiredSeparator) // the label of the device plugin's config keeps counting next to that of a MIG config
	if of == "" || d.Undo {
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

// Only returns the file with only one entry of the mapping in the field, without any if it has no such entry; false if the file cannot be read.
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
