package migrate

import (
	"slices"
	"strconv"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/nvml"
)

// machine is a node as its labels describe it.
type machine struct {
	gpus    []nvml.GPU // of one model, with the profiles that files name and the model has; one GPU if the labels do not say how many
	counted bool       // the labels say how many GPUs
	shape   features.Shape
	cut     bool // the labels say what the GPUs can be cut into
}

// machineOf has the profiles among the names of MIG devices that its GPUs have.
func machineOf(labels map[string]string, devices []string) machine {
	f := features.Of(labels)
	m := machine{counted: f.Count > 0, shape: f.Shape()}
	m.cut = f.Incapable || m.shape.Known()
	for i := range max(1, f.Count) {
		m.gpus = append(m.gpus, nvml.GPU{
			Index: i, UUID: nvml.UUID(strconv.Itoa(i)), Model: f.Model, Capable: !f.Incapable, Profiles: m.shape.Profiles(devices),
		})
	}
	return m
}

// made is the config of that name that the agent makes for the machine.
func (m machine) made(name string) (catalog.MIGConfig, bool) {
	rules, ok := catalog.Generate(m.gpus)[name]
	return rules, ok
}

// rules are those of a config that may be about the machine. It leaves out those with a device filter that name a MIG device which the
// machine's model does not have: the filter is about other models. A filter goes by PCI device ids, which no label has.
func (m machine) rules(of catalog.MIGConfig) catalog.MIGConfig {
	return slices.DeleteFunc(slices.Clone(of), func(r catalog.MIGRule) bool {
		return len(r.DeviceFilter) > 0 && len(m.shape.Lacks(r.Devices)) > 0
	})
}

// lacksOf are the devices that rules ask for and the machine's model does not have.
func (m machine) lacksOf(rules catalog.MIGConfig) []string {
	var out []string
	for _, r := range rules {
		out = append(out, m.shape.Lacks(r.Devices)...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// asks is what rules ask of each GPU. The error is the agent's own when it refuses them.
func (m machine) asks(name string, rules catalog.MIGConfig) (map[nvml.UUID]nvml.Request, error) {
	return catalog.Merge(nil, map[string]catalog.MIGConfig{name: rules}).Requests(name, m.gpus)
}

// namesNone reports whether all rules name GPUs, and none that the machine has.
func (m machine) namesNone(rules catalog.MIGConfig) bool {
	return !slices.ContainsFunc(rules, func(r catalog.MIGRule) bool {
		return r.All || slices.ContainsFunc(r.Indices, func(i int) bool { return i < len(m.gpus) })
	})
}
