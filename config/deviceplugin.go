package config

import (
	"fmt"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config/check"
)

// DevicePlugin says how the agent recognises NVIDIA's device plugin, and gives it another config.
type DevicePlugin struct {
	// Label selectors; its pod matches one of them.
	PodSelector []labels.Selector `json:"podSelector" whose:"the device plugin's" empty:"must have at least one label selector"`
	// Namespaces where the agent looks for its pod, and for the MPS control daemon's.
	Namespaces []string `json:"namespaces" form:"dnsLabel" empty:"must name at least one namespace"` // in any other a user may create a pod with the same labels
	// Names of containers; its pod has one of them. Empty for any. The plugin's Helm chart gives the pods of other programs the same labels.
	Containers []string `json:"containers" form:"dnsLabel"`
	// How it gets another config; auto chooses by what runs on the node.
	Handover Handover `json:"handover"`
	// Path on the host of its config file, for file and restart.
	ConfigFile string `json:"configFile" form:"path"`
	// Its configs, by key. The label nvidia.com/device-plugin.config names the key.
	ConfigMap ConfigMapName `json:"configMap"`
	// The key for nodes without that label.
	DefaultConfig string `json:"defaultConfig" form:"key"` // empty: they stay unchanged
}

// Check checks the ConfigMap that the other fields need.
func (d *DevicePlugin) Check(c *check.Mistakes, at string, _ check.Written) {
	at += "."
	if d.ConfigMap.Namespace != "" {
		c.RefuseEach(at+"configMap.namespace", d.ConfigMap.Namespace, validation.IsDNS1123Label(d.ConfigMap.Namespace))
	}
	switch {
	case d.ConfigMap.Name != "":
		c.RefuseEach(at+"configMap.name", d.ConfigMap.Name, validation.IsDNS1123Subdomain(d.ConfigMap.Name))
	case d.Handover == HandoverConfigMap:
		c.Refuse(at+"configMap.name", "", "must name the ConfigMap that handover configmap writes to")
	case d.DefaultConfig != "":
		c.Refuse(at+"configMap.name", "", "must name the ConfigMap that has defaultConfig")
	default:
		d.ConfigMap = ConfigMapName{}
	}
	if d.DefaultConfig != "" {
		c.RefuseEach(at+"defaultConfig", d.DefaultConfig, validation.IsConfigMapKey(d.DefaultConfig))
	}
}

// Handover says how the agent gives the device plugin another config.
type Handover string

// The values of Handover.
const (
	// HandoverAuto chooses one of the others by the pods that run on the node.
	HandoverAuto Handover = "auto"
	// HandoverFile writes the plugin's config file, and signals the plugin to read it.
	HandoverFile Handover = "file"
	// HandoverLabel sets LabelDevicePluginConfig to a key that the plugin's config manager has already.
	HandoverLabel Handover = "label"
	// HandoverConfigMap writes a key into the ConfigMap of the plugin's config manager first.
	HandoverConfigMap Handover = "configmap"
	// HandoverRestart writes the file, and deletes the plugin's pod.
	HandoverRestart Handover = "restart"
)

// Values lists them.
func (Handover) Values() []string {
	return check.Words(HandoverAuto, HandoverFile, HandoverLabel, HandoverConfigMap, HandoverRestart)
}

// MPS says how the agent recognises NVIDIA's MPS control daemon.
type MPS struct {
	// Label selectors; its pod matches one of them.
	PodSelector []labels.Selector `json:"podSelector" whose:"the MPS control daemon" empty:"must have at least one label selector"`
	// Names of containers; its pod has one of them. Empty for any.
	Containers []string `json:"containers" form:"dnsLabel"`
}

// MemoryPressure says when a GPU that several pods share counts as full.
type MemoryPressure struct {
	// Per cent of its memory in use; 0 for never.
	Threshold int `json:"threshold" called:"per cent, a whole number" within:"0,100"`
	// The GPU stops counting as full at this per cent, which is less than threshold.
	Clear int `json:"clear" called:"per cent, a whole number" within:"0,100"`
	// How long either must last.
	For time.Duration `json:"for" within:"0s,1h"`
}

// Check refuses pressure that is over before it begins.
func (m *MemoryPressure) Check(c *check.Mistakes, at string, _ check.Written) {
	if m.Threshold > 0 && m.Clear >= m.Threshold {
		c.Refuse(at+".clear", strconv.Itoa(m.Clear), fmt.Sprintf("must be less than memoryPressure.threshold, which is %d", m.Threshold))
	}
}

// StaleResources says what the agent does with resources of former configs, which kubelet leaves on the node at 0 for ever.
type StaleResources string

// The actions on stale resources.
const (
	// StaleResourcesReport names them in the annotation gpuslice.io/status.
	StaleResourcesReport StaleResources = "report"
	// StaleResourcesRemove removes them from the node.
	StaleResourcesRemove StaleResources = "remove"
)

// Values lists the actions.
func (StaleResources) Values() []string {
	return check.Words(StaleResourcesReport, StaleResourcesRemove)
}

// The defaults of sharing.
const (
	// DefaultPluginConfigFile has its own directory: a file that is replaced by renaming is not seen through a mount of the file alone.
	DefaultPluginConfigFile = "/var/lib/gpuslice/device-plugin/config.yaml"
	// DefaultPluginConfigMap is the usual name of the ConfigMap of the device plugin's configs, in the agent's namespace.
	DefaultPluginConfigMap = "device-plugin-config"

	// DefaultPressureThreshold: a framework that grows its pool requests some per cent of the GPU at a time.
	DefaultPressureThreshold = 90
	// DefaultPressureClear is low enough that a memory pool which shrinks and grows again causes one Event, not many.
	DefaultPressureClear = 80
	// DefaultPressureFor ignores a peak that is over at once.
	DefaultPressureFor = 30 * time.Second
)
