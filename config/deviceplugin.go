package config

import (
	"fmt"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
)

// DevicePlugin says how the agent recognises NVIDIA's device plugin, and how it hands it another config.
type DevicePlugin struct {
	PodSelector []labels.Selector // its pod on the node matches at least one
	// Namespaces, at least one, are where the agent looks for its pod and that of MPS: in any other namespace a user may create a pod
	// with the same labels.
	Namespaces []string
	// Containers are the names of its container, of which the pod has one; empty for any. The plugin's Helm chart gives
	// the pods of the plugin, of GPU feature discovery and of the MPS control daemon the same labels.
	Containers []string

	Handover      Handover
	ConfigFile    string        // path on the host of the file that the plugin is run with, for HandoverFile and HandoverRestart
	ConfigMap     ConfigMapName // the configs by the keys that LabelDevicePluginConfig names
	DefaultConfig string        // key of it for nodes without that label; empty to leave them as they are
}

// Handover says how the agent gives the device plugin another config.
type Handover string

// The values of Handover.
const (
	// HandoverAuto chooses one of the others by the pods that run on the node.
	HandoverAuto Handover = "auto"
	// HandoverFile writes the file that the plugin is run with, and sends it the signal to read it.
	HandoverFile Handover = "file"
	// HandoverLabel sets LabelDevicePluginConfig to a key that the plugin's config manager has already.
	HandoverLabel Handover = "label"
	// HandoverConfigMap writes a key into the ConfigMap of the plugin's config manager first.
	HandoverConfigMap Handover = "configmap"
	// HandoverRestart writes the file, and deletes the plugin's pod.
	HandoverRestart Handover = "restart"
)

// MPS says how the agent recognises NVIDIA's MPS control daemon.
type MPS struct {
	PodSelector []labels.Selector // its pod on the node matches at least one
	Containers  []string          // names of its container, of which the pod has one; empty for any
}

// MemoryPressure says when a GPU that several pods share is nearly full.
type MemoryPressure struct {
	Threshold int           // percent of the GPU's memory: at this use or more it is nearly full; 0 for never
	Clear     int           // percent: at this use or less it is no longer
	For       time.Duration // how long the use must stay there
}

// StaleResources says what happens to resources of former configs, which kubelet leaves on the node at 0 for ever.
type StaleResources string

// The actions on stale resources.
const (
	// StaleResourcesReport names them in the node's status.
	StaleResourcesReport StaleResources = "report"
	// StaleResourcesRemove takes them off the node.
	StaleResourcesRemove StaleResources = "remove"
)

// The defaults of sharing.
const (
	// DefaultPluginConfigFile: a directory of its own, since a file that is replaced by renaming is not seen through a
	// mount of the file alone.
	DefaultPluginConfigFile = "/var/lib/gpuslice/device-plugin/config.yaml"
	// DefaultPluginConfigMap is the usual name of the ConfigMap of the device plugin's configs, in the agent's namespace.
	DefaultPluginConfigMap = "device-plugin-config"

	// DefaultPressureThreshold: a framework that grows its pool asks for some per cent of the GPU at a time.
	DefaultPressureThreshold = 90
	// DefaultPressureClear is so much lower that a memory pool which shrinks and grows again causes one Event, not many.
	DefaultPressureClear = 80
	// DefaultPressureFor ignores a peak that is over at once.
	DefaultPressureFor = 30 * time.Second
)

func (c *checks) devicePlugin(in devicePluginInputs) DevicePlugin {
	const field = "devicePlugin"
	d := DevicePlugin{
		PodSelector: c.podSelector(field, in.PodSelector, "the device plugin's"),
		Namespaces:  c.elements(field+".namespaces", in.Namespaces, validation.IsDNS1123Label),
		Containers:  c.elements(field+".containers", in.Containers, validation.IsDNS1123Label),
		Handover: Handover(c.oneOf(field+".handover", in.Handover, string(HandoverAuto), string(HandoverFile), string(HandoverLabel),
			string(HandoverConfigMap), string(HandoverRestart))),
		ConfigFile:    c.path(field+".configFile", in.ConfigFile, DefaultPluginConfigFile),
		ConfigMap:     ConfigMapName{Namespace: string(in.ConfigMap.Namespace), Name: string(in.ConfigMap.Name)},
		DefaultConfig: string(in.DefaultConfig),
	}
	if len(in.Namespaces) == 0 {
		c.add(&InvalidError{Field: field + ".namespaces", Value: "[]", Want: "must name at least one namespace"})
	}
	if d.ConfigMap.Namespace != "" {
		c.refuseEach(field+".configMap.namespace", d.ConfigMap.Namespace, validation.IsDNS1123Label(d.ConfigMap.Namespace))
	}
	switch {
	case d.ConfigMap.Name != "":
		c.refuseEach(field+".configMap.name", d.ConfigMap.Name, validation.IsDNS1123Subdomain(d.ConfigMap.Name))
	case d.Handover == HandoverConfigMap:
		c.refuse(field+".configMap.name", "", "must name the ConfigMap that handover configmap writes to")
	case d.DefaultConfig != "":
		c.refuse(field+".configMap.name", "", "must name the ConfigMap that has defaultConfig")
	default:
		d.ConfigMap = ConfigMapName{}
	}
	if d.DefaultConfig != "" {
		c.refuseEach(field+".defaultConfig", d.DefaultConfig, validation.IsConfigMapKey(d.DefaultConfig))
	}
	return d
}

func (c *checks) mps(in mpsInputs) MPS {
	return MPS{
		PodSelector: c.podSelector("mps", in.PodSelector, "the MPS control daemon"),
		Containers:  c.elements("mps.containers", in.Containers, validation.IsDNS1123Label),
	}
}

// podSelector checks the selectors of a pod that must be found.
func (c *checks) podSelector(section string, in list, whose string) []labels.Selector {
	field := section + ".podSelector"
	if len(in) == 0 {
		c.add(&InvalidError{Field: field, Value: "[]", Want: "must have at least one label selector"})
	}
	return c.selectors(field, in, whose)
}

func (c *checks) memoryPressure(in memoryPressureInputs) MemoryPressure {
	m := MemoryPressure{
		Threshold: c.percent("memoryPressure.threshold", in.Threshold),
		Clear:     c.percent("memoryPressure.clear", in.Clear),
		For:       c.duration("memoryPressure.for", in.For, 0, time.Hour),
	}
	if m.Threshold > 0 && m.Clear >= m.Threshold {
		c.refuse("memoryPressure.clear", string(in.Clear), fmt.Sprintf("must be less than memoryPressure.threshold, which is %d", m.Threshold))
	}
	return m
}

func (c *checks) percent(field string, value scalar) int {
	n, err := strconv.Atoi(string(value))
	if err != nil || n < 0 || n > 100 {
		c.refuse(field, string(value), "must be per cent, a whole number from 0 to 100")
		return 0
	}
	return n
}
