package migrate

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// sameNames judges configs of names that agents make themselves. An agent does not read mig-manager's ConfigMaps: what it has made counts
// until an administrator has copied the config into the agent's own ConfigMap, and then that wins.
func (j *judge) sameNames(c Catalog, names []string) {
	var alike, unlike []string
	asked := rows{}
	for _, name := range names {
		switch {
		case len(j.asking[name]) > 0:
			for _, n := range j.asking[name] {
				v, text := compared(name, c.Configs[name], n.Labels)
				asked.note(v, n.Name, "%s", text)
			}
		case isOfForm(name, c.Configs[name]):
			alike = append(alike, name)
		default:
			unlike = append(unlike, name)
		}
	}
	j.sayRows(c.Where, asked)
	if len(unlike) > 0 {
		j.say(c.Where, Change, "", "%s of a name that agents generate for something else: copy those that are to count, else the agent's own counts: %s",
			sanitize.Counted(len(unlike), "MIG config"), sanitize.Listed(unlike))
	}
	if len(alike) > 0 && !j.nodesRead {
		j.say(c.Where, Change, "", "%s of a name and form that each agent makes by what its GPUs can be; no node was read to compare their counts with: give the nodes too, or copy the configs, and they win: %s",
			sanitize.Counted(len(alike), "MIG config"), sanitize.Listed(alike))
	} else if len(alike) > 0 {
		j.say(c.Where, Ignored, "", "%s that no node asks for, of a name and form that each agent makes by what its GPUs can be; if yours has other counts, copy it, and it wins: %s",
			sanitize.Counted(len(alike), "MIG config"), sanitize.Listed(alike))
	}
}

// compared says what a config gives a node, and what the agent's own of that name gives it.
func compared(name string, yours catalog.MIGConfig, labels map[string]string) (Verdict, string) {
	const copyIt = "copy it, and it wins, as now"
	m := machineOf(labels, append(devicesOf(yours), deviceOf(name)))
	here := m.rules(yours)
	own, made := m.made(name)
	ofAnyShape := name == "all-disabled" || name == "all-enabled"
	switch {
	case !m.cut && !ofAnyShape:
		return Change, uncompared(name, labels, copyIt)
	case !m.counted && hasPositions(here):
		return Change, fmt.Sprintf("%s may be other than the agent's own of that name: to compare them the labels %s are needed; %s", name, neededLabels, copyIt)
	case len(here) == 0:
		return Change, fmt.Sprintf("%s has no rule for GPUs of this model, so that mig-manager leaves them; the agent would make its own of them: change the label", name)
	}
	if lacks := m.lacksOf(here); len(lacks) > 0 {
		return Change, fmt.Sprintf("%s names %s, which by its labels this model does not have: the agent refuses that, where mig-manager empties the GPUs and says success; change the label",
			name, sanitize.Listed(lacks))
	}
	if filtered(here) {
		return Change, fmt.Sprintf("%s has a device-filter, and no label shows the PCI device ids of the GPUs: compare it with the agent's own of that name by %s, without and with -f THIS-FILE. "+
			"Copied, it wins; the agent refuses it where no rule is about a GPU", name, offline(name))
	}
	asked, err := m.asks(name, here)
	if err != nil {
		return Change, fmt.Sprintf("%s: the agent would refuse it, even copied: %s", name, sanitize.Message(err.Error(), sanitize.Longest/2))
	}
	says := describe(asked, m)
	if !made {
		return Change, fmt.Sprintf("%s gives %s, and the agent makes none of that name of these GPUs: %s; else the agent says UnknownConfig", name, says, copyIt)
	}
	ours, err := m.asks(name, own)
	if err == nil && reflect.DeepEqual(asked, ours) {
		return Taken, fmt.Sprintf("%s gives %s, as the agent's own of that name does: copy it or not", name, says)
	}
	return Change, fmt.Sprintf("%s gives %s, and the agent's own of that name %s: %s; else the agent's own counts, and the GPUs are cut again",
		name, says, describe(ours, m), copyIt)
}

// uncompared says how to compare a config with the agent's own of that name, where migrate does not know how the GPUs can be cut.
func uncompared(name string, labels map[string]string, copyIt string) string {
	if labelled(labels) {
		return fmt.Sprintf("compare %s with the agent's own of that name by %s, since migrate does not know how a GPU of this model can be cut (%s); %s",
			name, offline(name), sanitize.Cut(labels[features.LabelProduct], 63), copyIt)
	}
	return fmt.Sprintf("%s may be other than the agent's own of that name: to compare them the labels %s are needed; %s", name, neededLabels, copyIt)
}

// labelled reports whether the node has the labels that neededLabels names.
func labelled(labels map[string]string) bool {
	f := features.Of(labels)
	return f.Model != "" && f.Count > 0 && f.MemoryMiB > 0
}

const neededLabels = "nvidia.com/gpu.product, gpu.count and gpu.memory of GPU feature discovery, of whole GPUs,"

// offline is how a user sees on the node what a config asks of its GPUs, where labels do not say it.
func offline(name string) string {
	return "gpuslice-agent plan --offline --mig-config " + name + " on the node"
}

// filtered reports whether a rule has a device filter. A filter goes by PCI device ids, which no label has.
func filtered(rules catalog.MIGConfig) bool {
	return slices.ContainsFunc(rules, func(r catalog.MIGRule) bool { return len(r.DeviceFilter) > 0 })
}

// isOfForm reports whether a config is as agents make it under that name, but for counts, which depend on the GPUs.
func isOfForm(name string, rules catalog.MIGConfig) bool {
	return len(rules) > 0 && !slices.ContainsFunc(rules, func(r catalog.MIGRule) bool {
		switch {
		case !r.All:
			return true
		case name == "all-disabled":
			return r.MIG
		case name == "all-enabled":
			return !r.MIG || len(r.Devices) > 0
		case name == "all-balanced":
			return !r.MIG || len(r.Devices) < 2 || slices.ContainsFunc(slices.Collect(maps.Keys(r.Devices)), func(d string) bool { return strings.ContainsAny(d, "+-") })
		default:
			return len(r.Devices) != 1 || r.Devices[deviceOf(name)] == 0
		}
	})
}

// attribute is where the name of a config has a dot in place of the sign before a profile's attribute, which no label can have.
var attribute = regexp.MustCompile(`^([1-9]g\.[0-9]+gb)\.(.+)$`)

// deviceOf is the MIG device that a config made for one has in its name.
func deviceOf(name string) string {
	return attribute.ReplaceAllString(strings.TrimPrefix(name, catalog.GeneratedPrefix), "$1+$2")
}

func devicesOf(rules catalog.MIGConfig) []string {
	all := map[string]bool{}
	for _, r := range rules {
		for device := range r.Devices {
			all[device] = true
		}
	}
	return slices.Sorted(maps.Keys(all))
}

func hasPositions(rules catalog.MIGConfig) bool {
	return slices.ContainsFunc(rules, func(r catalog.MIGRule) bool { return len(r.Indices) > 0 })
}

// describe says what is asked of the machine's GPUs.
func describe(asked map[nvml.UUID]nvml.Request, m machine) string {
	at := map[string][]int{}
	for _, g := range m.gpus {
		text := ""
		if w, ok := asked[g.UUID]; ok {
			text = describeRequest(w)
		}
		at[text] = append(at[text], g.Index)
	}
	var parts []string
	for _, text := range slices.SortedFunc(maps.Keys(at), func(a, b string) int { return at[a][0] - at[b][0] }) {
		switch {
		case len(at) == 1:
			return text + " on each GPU"
		case text == "":
			parts = append(parts, positions(at[text])+" left as they are")
		default:
			parts = append(parts, fmt.Sprintf("%s on %s", text, positions(at[text])))
		}
	}
	return strings.Join(parts, ", ")
}

func describeRequest(w nvml.Request) string {
	switch {
	case !w.MIG:
		return "MIG off"
	case len(w.Devices) == 0:
		return "MIG mode without instances"
	}
	var parts []string
	for _, device := range slices.Sorted(maps.Keys(w.Devices)) {
		parts = append(parts, fmt.Sprintf("%dx %s", w.Devices[device], device))
	}
	return strings.Join(parts, " + ")
}

// positions names GPUs: "GPU 3", "GPUs 0 to 3 and 7".
func positions(of []int) string {
	const most = 8
	var parts []string
	for i := 0; i < len(of); {
		end := i
		for end+1 < len(of) && of[end+1] == of[end]+1 {
			end++
		}
		part := strconv.Itoa(of[i])
		if end > i {
			part += " to " + strconv.Itoa(of[end])
		}
		parts, i = append(parts, part), end+1
	}
	noun := "GPUs "
	if len(of) == 1 {
		noun = "GPU "
	}
	if more := len(parts) - most; more > 0 {
		parts = append(parts[:most], fmt.Sprintf("%d more", more))
	}
	if last := len(parts) - 1; last > 0 {
		return noun + strings.Join(parts[:last], ", ") + " and " + parts[last]
	}
	return noun + strings.Join(parts, "")
}
