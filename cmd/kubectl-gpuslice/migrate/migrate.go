// Package migrate judges an installation of NVIDIA's k8s-mig-manager that gpuslice is to replace: which parts gpuslice takes over unchanged, which it
// ignores and why, and which an administrator has to change.
//
// The command reads files or a cluster (command.go, helmvalues.go); the rest judges what was read, and changes nothing.
package migrate

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/cmd/internal/manifest"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/devices"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/features"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// pausedForMIGChange is what mig-manager writes as the value of an operand's label while it is at work; drain/fence, which is of the daemon, says more.
const pausedForMIGChange = "paused-for-mig-change"

// Sources are the parts of an installation of mig-manager and the GPU Operator.
type Sources struct {
	Policies []Policy
	Clusters []Cluster
	Catalogs []Catalog
	Clients  []Clients
	Plugins  []PluginConfig
	Broken   []Broken
	Nodes    []corev1.Node
	Pods     []corev1.Pod               // as far as they were given
	Profiles map[string]catalog.Profile // gpuslice's own, as far as there are any yet

	ConfigMaps map[string][]string // keys of those that were found, by name
	Namespaces []string            // in which ConfigMaps were found
	Closed     []string            // names of ConfigMaps that the reader may not read, somewhere
	Unread     []error             // what the reader has no right to read; Judge may miss what is there
}

// Policy has the fields of a ClusterPolicy of the GPU Operator (v26.7) that matter here.
type Policy struct {
	Metadata struct {
		Name   string            `json:"name"`
		Labels map[string]string `json:"labels"`
	} `json:"metadata"`
	Spec struct {
		MIGManager struct {
			Enabled    *bool           `json:"enabled"` // true if left out
			Config     *named          `json:"config"`
			GPUClients *named          `json:"gpuClientsConfig"`
			Env        []corev1.EnvVar `json:"env"`
		} `json:"migManager"`
		MIG struct {
			Strategy string `json:"strategy"`
		} `json:"mig"`
		DevicePlugin struct {
			Config *named `json:"config"`
		} `json:"devicePlugin"`
		Daemonsets struct {
			Tolerations []corev1.Toleration `json:"tolerations"`
		} `json:"daemonsets"`
	} `json:"spec"`

	lineOf func(field string) int // of values of the operator's chart, in their file; 0 if the field is not there
}

// named is a ConfigMap of a ClusterPolicy.
type named struct {
	Name    string `json:"name"`
	Default string `json:"default"`
}

// ReadPolicy reads a ClusterPolicy from its JSON or YAML. Fields that do not matter here may be anything.
func ReadPolicy(text []byte) (p Policy, err error) {
	if err := yaml.Unmarshal(text, &p); err != nil {
		return p, fmt.Errorf("reading a ClusterPolicy: %w", manifest.InWords(err))
	}
	return p, nil
}

// Catalog is a file of MIG configs.
type Catalog struct {
	Where     string
	ConfigMap string // name of the ConfigMap that has it; empty for a bare file
	Configs   map[string]catalog.MIGConfig
	Err       error // by which the agent would refuse the file
}

// Clients is a file of the units of the host that mig-manager stops.
type Clients struct {
	Where string
	Units []string
	Err   error // by which it cannot be read
}

// PluginConfig is a config of the device plugin.
type PluginConfig struct {
	Where     string
	ConfigMap string // empty for a bare file
	Namespace string // of the ConfigMap; empty if the manifest does not say it
	Key       string
	Read      catalog.PluginConfig // as far as it could be read
	Err       error                // by which the agent would refuse it
}

// Broken is a text that cannot be read as YAML.
type Broken struct {
	Where     string
	ConfigMap string
	Err       error
	Ours      bool // words in it say that mig-manager or the device plugin is to read it
}

// ReadClients reads a clients file of mig-manager (clients.yaml). ok is false for a text that is none.
func ReadClients(where string, text []byte) (c Clients, ok bool) {
	var file struct {
		Version string    `json:"version"`
		Units   *[]string `json:"systemd-services"`
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		if _, bad := errors.AsType[*json.UnmarshalTypeError](err); bad && strings.Contains(string(text), "systemd-services") {
			return Clients{Where: where, Err: errors.New("systemd-services: must be a list of names of units")}, true
		}
		return c, false // another's text
	}
	if file.Units == nil {
		return c, false
	}
	return Clients{Where: where, Units: *file.Units}, true
}

// Verdict says how gpuslice treats a part of the installation.
type Verdict string

// The verdicts.
const (
	Taken   Verdict = "taken over" // gpuslice uses it as it is
	Change  Verdict = "change"     // an administrator has to change it before gpuslice is installed
	Ignored Verdict = "ignored"    // it has no effect any more
	Unread  Verdict = "not read"   // the reader has no right to

	Unreadable Verdict = "unreadable" // it is broken
)

// Finding is a verdict on a part of the installation.
type Finding struct {
	About   string // the file or object that has the part
	Verdict Verdict
	Text    string
	Command string // that makes the change; empty for none
}

// Judge gives the findings, those of one file or object together. No text in them is longer than a condition's message.
func Judge(s Sources, settings config.Settings) []Finding {
	j := judge{
		settings: settings, configs: map[string]catalog.MIGConfig{}, asking: map[string][]corev1.Node{},
		nodesRead: len(s.Nodes) > 0, byPluginKey: map[string][]corev1.Node{}, overlay: overlayOf(s), byClaims: len(s.Clusters) > 0,
	}
	j.sort(s.Nodes)
	for _, c := range s.Clusters {
		j.cluster(c, s)
	}
	named := map[string]bool{}
	for _, p := range s.Policies {
		j.policy(p, s)
		if of := p.Spec.MIGManager.Config; of != nil && of.Name != "" {
			named[of.Name] = true
			j.migConfigs(p, of.Name, s)
		}
	}
	j.broken(s, named)
	for _, c := range s.Catalogs {
		if len(named) > 0 && c.ConfigMap != "" && !named[c.ConfigMap] {
			j.say(c.Where, Ignored, "", "mig-manager does not read it: the ClusterPolicy names ConfigMap %s", sanitize.Listed(slices.Sorted(maps.Keys(named))))
			continue
		}
		j.catalog(c)
	}
	for _, c := range s.Clients {
		j.clients(c)
	}
	j.plugins(s)
	j.nodes(s.Nodes, s.Pods, len(s.Catalogs) > 0)
	j.pluginLabels()
	j.toggles()
	for _, err := range s.Unread {
		j.say("Rights", Unread, "", "%v", err)
	}
	return j.found
}

// migConfigs judges the ConfigMap that the policy names for MIG configs, where no MIG configs of it were read.
func (j *judge) migConfigs(p Policy, name string, s Sources) {
	keys, there := s.ConfigMaps[name]
	switch {
	case slices.ContainsFunc(s.Catalogs, func(c Catalog) bool { return c.ConfigMap == name }):
	case slices.ContainsFunc(s.Broken, func(b Broken) bool { return b.ConfigMap == name }): // broken says it
	case there:
		j.say(p.about(), Change, "", "migManager.config.name is %s, and no key of that ConfigMap has MIG configs, but it has %s: write them below version and mig-configs",
			name, sanitize.Listed(orNone(keys)))
	case slices.Contains(s.Closed, name):
		j.say(p.about(), Unread, "", "migManager.config.name is %s, and you may not read whether there is such a ConfigMap", name)
	default:
		j.say(p.about(), Change, "", "migManager.config.name is %s, and no ConfigMap of that name was found: name its namespace by --operator-namespace, or its file by -f", name)
	}
}

// broken names the texts that cannot be read, of ConfigMaps that are named or have configs too. Other programs may have keys of others for templates.
func (j *judge) broken(s Sources, named map[string]bool) {
	named = maps.Clone(named)
	for _, p := range s.Policies {
		named[p.PluginConfigMap()] = true
	}
	for _, c := range s.Catalogs {
		named[c.ConfigMap] = true
	}
	for _, c := range s.Plugins {
		named[c.ConfigMap] = true
	}
	for _, b := range s.Broken {
		if b.Ours || named[b.ConfigMap] || slices.Contains(migManagersConfigMaps, b.ConfigMap) {
			j.say(b.Where, Unreadable, "", "%s", sanitize.Message(b.Err.Error(), sanitize.Longest/2))
			j.unread = append(j.unread, b.Where)
		}
	}
}

// plugins names the mistakes of the device plugin's configs, and judges their ConfigMaps where no policy names any.
func (j *judge) plugins(s Sources) {
	byConfigMap := map[string][]PluginConfig{}
	for _, c := range s.Plugins {
		if c.Err != nil {
			j.say(c.Where, Change, "", "NVIDIA's device plugin refuses or ignores a part of it, and so would the agent: %s", sanitize.Message(c.Err.Error(), sanitize.Longest/2))
		}
		if c.ConfigMap == "" && c.Err == nil {
			j.say(c.Where, Taken, "", "a config of the device plugin, which the agent leaves: nodes get it as a key of the ConfigMap that devicePlugin.config.name of the ClusterPolicy names")
		}
		if c.ConfigMap != "" {
			byConfigMap[c.ConfigMap] = append(byConfigMap[c.ConfigMap], c)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(byConfigMap)) {
		if slices.ContainsFunc(s.Policies, func(p Policy) bool { return p.PluginConfigMap() != "" }) {
			continue // the policy says which one counts
		}
		j.pluginConfigMap(name, byConfigMap[name], len(s.Policies))
	}
}

// sort keeps the nodes by what their labels ask for.
func (j *judge) sort(nodes []corev1.Node) {
	for _, n := range nodes {
		if name := n.Labels[config.LabelMIGConfig]; name != "" && n.Labels[config.LabelProfile] == "" {
			j.asking[name] = append(j.asking[name], n)
		}
		if key := n.Labels[config.LabelDevicePluginConfig]; key != "" {
			j.byPluginKey[key] = append(j.byPluginKey[key], n)
		}
	}
}

// toggles warns users of mig-manager of what a label does that is set to another value for a moment.
func (j *judge) toggles() {
	if len(j.asking) > 0 {
		j.say("Nodes", Ignored, "", "to have a change tried again, remove %s and set it again. Do not set another value in between, as for mig-manager: "+
			"the agent changes to that value too, and pods leave for it", config.LabelMIGConfig)
	}
}

type judge struct {
	settings config.Settings
	configs  map[string]catalog.MIGConfig // that mig-manager has
	asking   map[string][]corev1.Node     // nodes for which a config counts, by its name
	found    []Finding

	nodesRead   bool
	unread      []string                 // files of MIG configs that the agent would refuse
	byPluginKey map[string][]corev1.Node // nodes by the key of the device plugin's configs that their label names
	keys        []string                 // of the ConfigMap that the policy names for the device plugin
	keysRead    bool                     // there is such a ConfigMap, and it could be read
	overlay     string                   // of deploy, for this cluster
	byClaims    bool                     // a GPUCluster has NVIDIA's DRA driver give out the GPUs
}

// rows are findings on nodes, which many nodes have in common.
type rows map[row][]string

type row struct {
	verdict Verdict
	text    string
}

func (r rows) note(v Verdict, node, format string, args ...any) {
	at := row{v, fmt.Sprintf(format, args...)}
	r[at] = append(r[at], node)
}

// mostRows bounds the findings of one verdict on nodes.
const mostRows = 100

func (j *judge) sayRows(about string, r rows) {
	for _, v := range []Verdict{Taken, Change, Ignored} {
		said := 0
		for _, at := range slices.SortedFunc(maps.Keys(r), func(a, b row) int { return strings.Compare(a.text, b.text) }) {
			if at.verdict != v {
				continue
			}
			if said++; said <= mostRows {
				j.say(about, v, "", "%s: %s", at.text, sanitize.Listed(r[at]))
			}
		}
		if more := said - mostRows; more > 0 {
			j.say(about, v, "", "and %d more of the kind, for other nodes", more)
		}
	}
}

func (j *judge) say(about string, v Verdict, command, format string, args ...any) {
	j.found = append(j.found, Finding{
		About: sanitize.Cut(about, sanitize.Longest), Verdict: v,
		Text: sanitize.Cut(fmt.Sprintf(format, args...), sanitize.Longest), Command: sanitize.Text(command),
	})
}

func (p Policy) about() string { return "ClusterPolicy " + p.Metadata.Name }

// set is how a field of the policy is set: the end of a sentence, and a command. Helm writes the policy again at each upgrade, by its values.
func (p Policy) set(field, value, spec string) (how, command string) {
	if p.lineOf != nil {
		at := ""
		if line := p.lineOf(field); line > 0 {
			at = fmt.Sprintf(" (line %d)", line)
		}
		return fmt.Sprintf("; write %s: %s into the values%s, and upgrade the release", field, value, at), ""
	}
	name := p.Metadata.Name
	if len(validation.IsDNS1123Subdomain(name)) > 0 { // of a file: the command is to be pasted
		name = "NAME"
	}
	if p.Metadata.Labels["app.kubernetes.io/managed-by"] == "Helm" {
		how = fmt.Sprintf("; write %s: %s into the values of the chart too, or the next upgrade of the release undoes the command", field, value)
	}
	return how, fmt.Sprintf("kubectl patch clusterpolicies.nvidia.com/%s --type merge -p '{\"spec\": %s}'", name, spec)
}

func (j *judge) policy(p Policy, from Sources) {
	about := p.about()
	m := p.Spec.MIGManager
	if m.Enabled == nil || *m.Enabled {
		how, command := p.set("migManager.enabled", "false", `{"migManager": {"enabled": false}}`)
		j.say(about, Change, command, "migManager is enabled: two programs that divide the same GPUs undo each other's work%s", how)
	} else {
		j.say(about, Taken, "", "migManager is off")
	}
	if m.Config != nil && m.Config.Default != "" {
		j.say(about, Ignored, "", "migManager.config.default is %s: the operator has given nodes without a label this one; gpuslice does not change such nodes", m.Config.Default)
	}
	for _, e := range m.Env {
		j.env(about, e)
	}
	switch s := p.Spec.MIG.Strategy; {
	case s == "":
	case s != string(config.MIGStrategyNone) && (p.Spec.DevicePlugin.Config == nil || p.Spec.DevicePlugin.Config.Name == ""):
		j.say(about, Change, "",
			"mig.strategy is %s, and devicePlugin.config names no ConfigMap: unset alone, it leaves the device plugin with the strategy none, which offers no MIG device at all. "+
				"Leave it where all configs and profiles go with %s; otherwise first make a ConfigMap with a default config that says flags: {migStrategy: %s}, and name it, "+
				"as deploy/README.md says of the ClusterPolicy, and only then unset mig.strategy", s, s, s)
	default:
		how, command := p.set("mig.strategy", "null", `{"mig": {"strategy": null}}`)
		j.say(about, Change, command,
			"mig.strategy is %s and wins over configs of the device plugin: unset it where profiles or configs are to decide node by node; otherwise all of them have to go with %s%s", s, s, how)
	}
	j.pluginConfig(p, from)
	j.tolerations(p, from)
}

// env judges a variable of mig-manager. Only those that reboot the host or stop its units matter to gpuslice.
func (j *judge) env(about string, e corev1.EnvVar) {
	on := strings.EqualFold(e.Value, "true")
	switch {
	case e.Name == "WITH_REBOOT" && on && j.settings.Reboot.Policy == config.RebootNever:
		j.say(about, Change, "", "migManager.env: WITH_REBOOT=true reboots the node without a drain; write reboot: {policy: self} into the settings, and the agent drains first; or delegate")
	case e.Name == "WITH_REBOOT":
		j.say(about, Taken, "", "migManager.env: WITH_REBOOT=%s; reboot.policy of the settings is %s", e.Value, j.settings.Reboot.Policy)
	case e.Name == "WITH_SHUTDOWN_HOST_GPU_CLIENTS":
		j.say(about, Taken, "", "migManager.env: WITH_SHUTDOWN_HOST_GPU_CLIENTS=%s: the agent stops the units of its settings where they run, and only for a reset", e.Value)
	default:
		j.say(about, Ignored, "", "migManager.env: %s is mig-manager's own", e.Name)
	}
}

func (j *judge) catalog(c Catalog) {
	if c.Err != nil {
		j.say(c.Where, Change, "", "the agent would refuse the file, and none of its configs could be read here: %s",
			sanitize.Message(c.Err.Error(), sanitize.Longest/2))
		j.unread = append(j.unread, c.Where)
	}
	var made, own []string
	for _, name := range slices.Sorted(maps.Keys(c.Configs)) {
		j.configs[name] = c.Configs[name]
		if strings.HasPrefix(name, catalog.GeneratedPrefix) {
			made = append(made, name)
		} else {
			own = append(own, name)
		}
	}
	if len(own) > 0 {
		j.say(c.Where, Change, "", "%s to copy into the ConfigMap that migConfigMap of the settings names (gpuslice-mig-configs in deploy/base); the format is the same: %s",
			sanitize.Counted(len(own), "MIG config"), sanitize.Listed(own))
	}
	j.sameNames(c, made)
}

func (j *judge) clients(c Clients) {
	if c.Err != nil {
		j.say(c.Where, Change, "", "%s: add those that hold GPUs on your nodes to units of the settings", sanitize.Message(c.Err.Error(), sanitize.Longest/2))
	}
	var has, lacks, never []string
	for _, unit := range c.Units {
		switch {
		case unit == "kubelet.service":
			never = append(never, unit)
		case slices.Contains(j.settings.Units, unit):
			has = append(has, unit)
		default:
			lacks = append(lacks, unit)
		}
	}
	if len(has) > 0 {
		j.say(c.Where, Taken, "", "the settings' units have %s", sanitize.Listed(has))
	}
	if len(lacks) > 0 {
		j.say(c.Where, Change, "", "add to units of the settings, in stopping order: %s", sanitize.Listed(lacks))
	}
	if len(never) > 0 {
		j.say(c.Where, Ignored, "", "the agent never stops %s: it evicts pods instead", sanitize.Listed(never))
	}
}

// nodes judges nodes together, since many have the same labels.
func (j *judge) nodes(nodes []corev1.Node, pods []corev1.Pod, files bool) {
	at := rows{}
	for _, n := range nodes {
		note := func(v Verdict, format string, args ...any) { at.note(v, n.Name, format, args...) }
		here := podsOf(n.Name, pods)
		j.request(n, files, note)
		if !j.rivals(n, here, note) { // what a rival offers does not say how the GPUs are cut
			j.goes(n, here, note)
		}
		switch state := n.Labels[config.LabelMIGConfigState]; state {
		case "", string(config.StateSuccess):
		default:
			note(Change, "%s=%s: mig-manager is in the middle of a change, or has failed: wait until it has ended, or set the label to what the GPUs are, before it is turned off", config.LabelMIGConfigState, state)
		}
		for _, key := range slices.Sorted(maps.Keys(n.Labels)) {
			if strings.HasPrefix(key, config.LabelOperandPrefix) && n.Labels[key] == pausedForMIGChange &&
				!slices.Contains(j.settings.Recover.Adopt, config.AdoptMIGManager) {
				note(Change, "%s=%s: mig-manager has left an operand paused; write recover: {adopt: [mig-manager]} into the settings, and the agent restores it", key, pausedForMIGChange)
			}
		}
	}
	j.sayRows("Nodes", at)
}

// request judges the config that a node's labels name for mig-manager.
func (j *judge) request(n corev1.Node, files bool, note func(Verdict, string, ...any)) {
	name := n.Labels[config.LabelMIGConfig]
	rules, there := j.configs[name]
	switch {
	case n.Labels[config.LabelProfile] != "":
		note(Taken, "%s=%s wins over %s", config.LabelProfile, n.Labels[config.LabelProfile], config.LabelMIGConfig)
	case name == "":
		note(Ignored, "no label %s: gpuslice does not change the GPUs", config.LabelMIGConfig)
	case there && j.byClaims && devices.Refused(rules, nil) != "":
		note(Change, "%s=%s: %s", config.LabelMIGConfig, name, devices.Refused(rules, nil))
	case there:
		j.positions(n, name, rules, note)
	case j.mistaken(name) != "":
		note(Change, "%s=%s: %s", config.LabelMIGConfig, name, j.mistaken(name))
	case strings.HasPrefix(name, catalog.GeneratedPrefix):
		j.generated(n, name, note)
	case catalog.IsSpelled(name):
		spelledOut(name, note)
	case len(j.unread) > 0:
		note(Change, "%s=%s is in no file that could be read, and not all could, for what is wrong in any of their configs: mend them first (%s), and run this again",
			config.LabelMIGConfig, name, sanitize.Listed(j.unread))
	case files:
		note(Change, "%s=%s is in none of the files: the agent would say UnknownConfig; add it, or change the label", config.LabelMIGConfig, name)
	default:
		note(Change, "%s=%s: no file of MIG configs was read that would say whether it is there", config.LabelMIGConfig, name)
	}
}

// spelledOut judges a name that spells a config out, which mig-manager does not know.
func spelledOut(name string, note func(Verdict, string, ...any)) {
	if _, err := catalog.Spelled(name); err != nil {
		note(Change, "%s=%s: the agent would refuse it: %v", config.LabelMIGConfig, name, err)
		return
	}
	note(Taken, "%s=%s: the agent reads it as a config, where mig-manager has found none", config.LabelMIGConfig, name)
}

// mistaken says what a name that no file has is in place of a MIG config; empty for none that is known.
func (j *judge) mistaken(name string) string {
	_, notDevice := catalog.DeviceName(attribute.ReplaceAllString(name, "$1+$2"))
	switch {
	case slices.Contains([]config.MIGStrategy{config.MIGStrategyNone, config.MIGStrategySingle, config.MIGStrategyMixed}, config.MIGStrategy(name)):
		return fmt.Sprintf("%s is a MIG strategy, which the device plugin has, and no MIG config: name a config, as all-balanced, or remove the label", name)
	case notDevice == nil:
		return fmt.Sprintf("%s is a MIG device, and no MIG config: %s%s is the config that fills GPUs with it", name, catalog.GeneratedPrefix, name)
	case slices.Contains(j.keys, name):
		return fmt.Sprintf("%s is a config of the device plugin, and no MIG config: set the label %s to it, and remove this one", name, config.LabelDevicePluginConfig)
	default:
		return ""
	}
}

// generated judges a name that agents make configs of, by what the labels say of the GPUs.
func (j *judge) generated(n corev1.Node, name string, note func(Verdict, string, ...any)) {
	m := machineOf(n.Labels, []string{deviceOf(name)})
	if _, made := m.made(name); !made && m.cut {
		note(Change, "%s=%s: the agent makes no config of that name of the node's GPUs (%s), and says UnknownConfig: change the label", config.LabelMIGConfig, name,
			cmp.Or(sanitize.Cut(n.Labels[features.LabelProduct], 63), "by their labels"))
		return
	}
	note(Taken, "%s=%s", config.LabelMIGConfig, name)
}

// positions judges a config that is there by the GPUs that it names: mig-parted passes over those that a node does not have, and so does the agent.
func (j *judge) positions(n corev1.Node, name string, rules catalog.MIGConfig, note func(Verdict, string, ...any)) {
	m := machineOf(n.Labels, nil)
	here := m.rules(rules)
	rules = here
	generated := strings.HasPrefix(name, catalog.GeneratedPrefix) // what else there is to say of it, sameNames says
	missing := catalog.Merge(nil, map[string]catalog.MIGConfig{name: rules}).MissingPositions(name, m.gpus)
	lacks := m.lacksOf(here)
	switch {
	case generated && (!hasPositions(rules) || m.counted && (len(missing) == 0 || m.namesNone(rules))):
	case filtered(here) && generated:
	case filtered(here):
		note(Change, "%s=%s has a device-filter, and no label shows the PCI device ids of the GPUs: see whether a rule is about them by %s with -f THIS-FILE. If none is, the agent refuses the config; mig-parted does nothing and says success",
			config.LabelMIGConfig, name, offline(name))
	case len(here) == 0:
		note(Change, "%s=%s has no rule for GPUs of the node's model: mig-parted does nothing and says success, where the agent refuses the config; add a rule, or change the label",
			config.LabelMIGConfig, name)
	case !m.counted && hasPositions(rules):
		note(Taken, "%s=%s names GPUs by their positions, and the labels do not say how many there are: the agent passes over those that the node does not have, as mig-parted does, and says so in its condition",
			config.LabelMIGConfig, name)
	case len(lacks) > 0:
		note(Change, "%s=%s names %s, which by its labels the node's model does not have: the agent refuses that, where mig-manager empties the GPUs and says success; change the config or the label",
			config.LabelMIGConfig, name, sanitize.Listed(lacks))
	case len(missing) == 0:
		note(Taken, "%s=%s", config.LabelMIGConfig, name)
	case m.namesNone(rules):
		note(Change, "%s=%s names %s, and the node has %s: mig-parted does nothing and says success, where the agent refuses the config; add a rule for such nodes, or change the label",
			config.LabelMIGConfig, name, positions(missing), sanitize.Counted(len(m.gpus), "GPU"))
	default:
		note(Taken, "%s=%s names %s, which the node with its %s does not have: the agent passes over them, as mig-parted does, and says so in its condition",
			config.LabelMIGConfig, name, positions(missing), sanitize.Counted(len(m.gpus), "GPU"))
	}
}

// PluginConfigMap is the one that the policy names for the device plugin; empty for none.
func (p Policy) PluginConfigMap() string {
	if c := p.Spec.DevicePlugin.Config; c != nil {
		return c.Name
	}
	return ""
}

// ConfigMaps lists those that the policy names for mig-manager.
func (p Policy) ConfigMaps() (names []string) {
	for _, of := range []*named{p.Spec.MIGManager.Config, p.Spec.MIGManager.GPUClients} {
		if of != nil && of.Name != "" {
			names = append(names, of.Name)
		}
	}
	return names
}

// Concerns reports whether a node has a GPU, by the labels of node and GPU feature discovery, a label of mig-manager, or another program that divides GPUs.
func Concerns(n corev1.Node) bool {
	if slices.ContainsFunc(rivals, func(r rival) bool { return r.sign(n, nil) != "" }) {
		return true
	}
	for key, value := range n.Labels {
		gpu := slices.Contains([]string{
			"nvidia.com/gpu.present", "feature.node.kubernetes.io/pci-10de.present", "feature.node.kubernetes.io/pci-0302_10de.present",
			"feature.node.kubernetes.io/pci-0300_10de.present",
		}, key) && value == "true"
		if gpu || key == config.LabelMIGConfig || key == config.LabelDevicePluginConfig || key == config.LabelMIGConfigState {
			return true
		}
	}
	return false
}
