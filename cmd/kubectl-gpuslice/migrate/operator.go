package migrate

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/taints"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// pluginConfig judges the ConfigMap of the device plugin's configs that the policy names. The plugin's pods mount it, and begin with NVIDIA's
// config manager, which ends with an error if the key is not there: then they do not start.
func (j *judge) pluginConfig(p Policy, s Sources) {
	about, c := p.about(), p.Spec.DevicePlugin.Config
	if c == nil || c.Name == "" {
		return
	}
	keys, there := s.ConfigMaps[c.Name]
	if there {
		j.keys, j.keysRead = keys, true
	}
	switch {
	case !there && slices.Contains(s.Closed, c.Name):
		j.say(about, Unread, "", "devicePlugin.config.name is %s, and you may not read whether there is such a ConfigMap: without it NVIDIA's config manager does not start the plugin", c.Name)
	case !there:
		j.say(about, Change, "", "devicePlugin.config.name is %s, and no ConfigMap of that name was found, without which NVIDIA's config manager does not start the plugin: make it, "+
			"or name its namespace by --operator-namespace, or its file by -f", c.Name)
	default:
		of := slices.DeleteFunc(slices.Clone(s.Plugins), func(one PluginConfig) bool { return one.ConfigMap != c.Name })
		j.say(about, Taken, "", "devicePlugin.config.name is %s: %s", c.Name, j.lets(c.Name, of))
		j.pluginKeys(about, of)
	}
	switch {
	case c.Default == "" && len(keys) > 0:
		j.say(about, Taken, "", "devicePlugin.config.default is not set: a node gets a config by the label %s alone, and without the label it shares nothing", config.LabelDevicePluginConfig)
	case c.Default == "":
	case there && !slices.Contains(keys, c.Default):
		j.say(about, Change, "", "devicePlugin.config.default is %s, and ConfigMap %s has no such key, but %s: NVIDIA's config manager does not start the plugin on nodes without the label %s; "+
			"add the key, or name another", c.Default, c.Name, sanitize.Listed(orNone(keys)), config.LabelDevicePluginConfig)
	default:
		j.say(about, Taken, "", "devicePlugin.config.default is %s: NVIDIA's config manager gives it to nodes without the label %s, without a drain; where labels ask for a config, "+
			"the agent then evicts the pods that hold what it has withdrawn, and elsewhere the node's condition names them", c.Default, config.LabelDevicePluginConfig)
	}
}

// pluginConfigMap judges a ConfigMap of the device plugin's configs that no policy names.
func (j *judge) pluginConfigMap(name string, of []PluginConfig, policies int) {
	var labels []string
	for _, c := range of {
		j.keys, j.keysRead = append(j.keys, c.Key), true
		if c.Err == nil {
			labels = append(labels, config.LabelDevicePluginConfig+"="+c.Key)
		}
	}
	about := "ConfigMap " + name
	if len(labels) > 0 {
		j.say(about, Taken, "", "configs of the device plugin: a node gets one by its label, with gpuslice as without: %s", sanitize.Listed(labels))
	}
	policy := "the ClusterPolicy was not read"
	if policies > 0 {
		policy = "the ClusterPolicy names no ConfigMap"
	}
	j.say(about, Taken, "", "%s: its devicePlugin.config.name has to be %s. Nodes without that label get the key that its devicePlugin.config.default names; without a default they share nothing", policy, name)
	j.say(about, Taken, "", "%s", j.lets(name, of))
	j.say(about, Taken, "", "overlays/device-plugin is for nodes without the GPU Operator: devicePlugin.configMap of the settings names the ConfigMap, in the agent's namespace, and devicePlugin.defaultConfig the default")
	j.pluginKeys(about, of)
}

// lets says how an overlay lets the agent use a ConfigMap of the device plugin's configs.
func (j *judge) lets(name string, of []PluginConfig) string {
	namespace := operatorNamespace
	if j.overlay == overlayOpenShift {
		namespace = openShiftNamespace
	}
	var says []string
	if !slices.Contains(ofGuides, name) {
		says = append(says, "configMap: "+name)
	}
	for _, c := range of {
		if c.Namespace != "" && c.Namespace != namespace {
			says = append(says, "namespace: "+c.Namespace)
			break
		}
	}
	text := j.overlay + " lets the agent use that ConfigMap"
	if len(says) > 0 {
		text += ", once a copy of its operator.yaml has " + strings.Join(says, " and ")
	}
	return text
}

// pluginKeys says of the configs in a ConfigMap what they do not go with.
func (j *judge) pluginKeys(about string, of []PluginConfig) {
	var silent, mps []string
	for _, c := range of {
		switch {
		case c.Err != nil:
		case c.Read.Sharing.Strategy == catalog.SharingMPS:
			mps = append(mps, c.Key)
		case c.Read.MIGStrategy == "":
			silent = append(silent, c.Key)
		}
	}
	if len(silent) > 0 {
		j.say(about, Taken, "", "configs without flags.migStrategy: while mig.strategy of the ClusterPolicy is unset, a node with one offers no MIG device, and the agent refuses to cut its GPUs (%s). "+
			"For such nodes add a key that has flags: {migStrategy: mixed}: %s", config.ReasonWrongMIGStrategy, sanitize.Listed(silent))
	}
	if len(mps) > 0 && j.overlay == overlayOpenShift {
		j.say(about, Taken, "", "configs by MPS, which has not been tried on OpenShift: Red Hat's gpu-partitioning-guide says that one process at a time runs on each GPU there: %s", sanitize.Listed(mps))
	}
}

// pluginLabels judges the keys that nodes' labels name.
func (j *judge) pluginLabels() {
	keys, known, at := j.keys, j.keysRead, rows{}
	for _, key := range slices.Sorted(maps.Keys(j.byPluginKey)) {
		for _, n := range j.byPluginKey[key] {
			switch {
			case j.byClaims:
				at.note(Change, n.Name, "%s=%s: nothing reads it where NVIDIA's DRA driver gives out the GPUs, and the agent refuses it (%s): remove the label; "+
					"a claim's own config shares its device", config.LabelDevicePluginConfig, key, config.ReasonImpossibleSharing)
			case !slices.Contains(keys, key) && j.isMIGConfig(key):
				at.note(Change, n.Name, "%s=%s: %s is a MIG config, and no config of the device plugin: set the label %s to it, and remove this one", config.LabelDevicePluginConfig, key, key, config.LabelMIGConfig)
			case known && !slices.Contains(keys, key):
				at.note(Change, n.Name, "%s=%s, and the ConfigMap of the device plugin's configs has no such key, but %s: NVIDIA's config manager does not start the plugin there; "+
					"add the key, or change the label", config.LabelDevicePluginConfig, key, sanitize.Listed(orNone(keys)))
			case known:
				at.note(Taken, n.Name, "%s=%s: NVIDIA's config manager obeys it as before, and the agent leaves it; for a profile that asks for another sharing or MIG strategy the agent drains, "+
					"and sets the label to a key that says so", config.LabelDevicePluginConfig, key)
			default:
				at.note(Taken, n.Name, "%s=%s, if the ConfigMap of the device plugin's configs has that key: it was not read (give it by -f), and without the key NVIDIA's config manager "+
					"does not start the plugin", config.LabelDevicePluginConfig, key)
			}
		}
	}
	j.sayRows("Nodes", at)
}

// isMIGConfig reports whether a name is that of a MIG config: of one that was read, or of one that agents make.
func (j *judge) isMIGConfig(name string) bool {
	_, there := j.configs[name]
	_, notDevice := catalog.DeviceName(deviceOf(name))
	return there || slices.Contains([]string{"all-disabled", "all-enabled", "all-balanced"}, name) || strings.HasPrefix(name, catalog.GeneratedPrefix) && notDevice == nil
}

// The overlays for use with the GPU Operator, and how to recognize OpenShift: NVIDIA's names for its catalog, and a label of its nodes.
const (
	overlayOperator  = "overlays/gpu-operator"
	overlayOpenShift = "overlays/openshift"

	operatorNamespace  = "gpu-operator"
	openShiftPolicy    = "gpu-cluster-policy"
	openShiftNamespace = "nvidia-gpu-operator"
	openShiftLabel     = "node.openshift.io/os_id"
)

// ofGuides are the names of ConfigMaps in the role of the component gpu-operator, whatever operator.yaml says of the first.
var ofGuides = []string{config.DefaultPluginConfigMap, "time-slicing-config"}

func overlayOf(s Sources) string {
	openShift := slices.ContainsFunc(s.Policies, func(p Policy) bool { return p.Metadata.Name == openShiftPolicy }) ||
		slices.Contains(s.Namespaces, openShiftNamespace) ||
		slices.ContainsFunc(s.Nodes, func(n corev1.Node) bool { return n.Labels[openShiftLabel] != "" })
	if openShift {
		return overlayOpenShift
	}
	return overlayOperator
}

func orNone(keys []string) []string {
	if len(keys) == 0 {
		return []string{"none"}
	}
	return keys
}

// usual is what the operator's DaemonSets tolerate where a ClusterPolicy names nothing.
var usual = []corev1.Toleration{{Key: keyGPU, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}

// keyGPU is the key of the taint that the operator's DaemonSets tolerate by default.
const keyGPU = "nvidia.com/gpu"

// tolerations judges the list of the operator's DaemonSets, which replaces the usual one.
func (j *judge) tolerations(p Policy, s Sources) {
	j.tolerated(p.about(), p.Spec.Daemonsets.Tolerations, s)
}

// kept is what a taint keeps away that the operator's DaemonSets do not tolerate.
func (j *judge) kept() string {
	if j.byClaims {
		return "DRA driver"
	}
	return "driver and no device plugin"
}

func (j *judge) tolerated(about string, all []corev1.Toleration, s Sources) {
	said := map[string]bool{}
	if len(all) > 0 {
		for _, key := range append([]string{keyGPU}, j.settings.StartupTaints().Keys()...) {
			if !slices.ContainsFunc(all, func(t corev1.Toleration) bool {
				return t.Key == key || t.Key == "" && t.Operator == corev1.TolerationOpExists
			}) {
				said[key] = true
				j.say(about, Change, "", "daemonsets.tolerations lacks %s: on a node with that taint there would be no %s; add {key: %s, operator: Exists, effect: NoSchedule}", key, j.kept(), key)
			}
		}
	} else {
		all = usual
	}
	at := rows{}
	check := func(on string, of []corev1.Taint) {
		for _, t := range taints.Closing(of, all) {
			if !said[t.Key] || t.Effect != corev1.TaintEffectNoSchedule {
				at.note(Change, on, "daemonsets.tolerations lacks %s: where that taint is, no pod of the driver or the device plugin is started; add %s",
					taints.Text(t), taints.Toleration(t))
			}
		}
	}
	for _, n := range s.Nodes {
		check(n.Name, n.Spec.Taints)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Profiles)) {
		check("profile "+name, s.Profiles[name].Taints)
	}
	j.sayRows(about, at)
}
