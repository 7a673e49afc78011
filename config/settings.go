package config

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/document"
)

// The kind of the settings file.
const (
	SettingsAPIVersion = "gpuslice.io/v1alpha1"
	SettingsKind       = "Settings"
)

// SettingsFields configure an agent on its node.
type SettingsFields struct {
	APIVersion string `json:"apiVersion" jsonschema:"required,enum=gpuslice.io/v1alpha1"`
	Kind       string `json:"kind" jsonschema:"required,enum=Settings"`
	Settings
}

// Settings configure an agent on its node. A field that a file leaves out has its default.
type Settings struct {
	// How often the agent writes to an unchanged node.
	NodeHeartbeat time.Duration `json:"nodeHeartbeat" within:"10s,24h"` // kubelet's own lease interval is 10 s: more often is no news
	// How the device plugin presents MIG devices; auto takes it from the node.
	MIGStrategy MIGStrategy `json:"migStrategy"`
	// Your own MIG configs, in mig-parted's format.
	MIGConfigMap ConfigMapKey `json:"migConfigMap"` // without a name there are only generated ones
	// Your own profiles.
	Profiles ConfigMapKey `json:"profiles"` // without a name there are none
	// When changes may disturb nodes, and how many at once.
	Maintenance ConfigMapKey `json:"maintenance"` // without a name changes may begin at any time, on all nodes at once
	Reboot      Reboot       `json:"reboot"`

	DevicePlugin   DevicePlugin   `json:"devicePlugin"`
	MPS            MPS            `json:"mps"`
	MemoryPressure MemoryPressure `json:"memoryPressure"`
	// When a GPU counts as unhealthy, and what the agent does then.
	Health Health `json:"health"`
	// When a pod gets an Event because it does not use its GPU or instance.
	Idle Idle `json:"idle"`
	// Whether the agent reports or removes resources of former configs, which kubelet leaves on the node at 0.
	StaleResources StaleResources `json:"staleResources"`
	// Whether the agent queries pods as its node (impersonation) or as its own account, confined by a policy or by RBAC alone.
	PodAccess PodAccess `json:"podAccess"`
	Drain     Drain     `json:"drain"`
	// Labels that deploy the operands of NVIDIA's GPU operator, in the order the agent pauses them.
	Operands []string `json:"operands" form:"operand"`
	// systemd units of the host that keep a GPU open, in the order the agent stops them.
	Units    []string `json:"units" form:"unit"`
	Recover  Recover  `json:"recover"`
	Timeouts Timeouts `json:"timeouts"`
	Retry    Retry    `json:"retry"`
	// Key of a second startup taint, next to gpuslice.io/not-ready. The agent removes both once the GPUs are as requested.
	StartupTaint string `json:"startupTaint" form:"startupTaint"` // empty for none
}

// ConfigMapKey is a file in a ConfigMap.
type ConfigMapKey struct {
	// Empty for the agent's own.
	Namespace string `json:"namespace"`
	// Empty for no file at all.
	Name string `json:"name"`
	Key  string `json:"key"`
}

// Check checks a file that has a name.
func (k *ConfigMapKey) Check(c *check.Mistakes, at string, _ check.Written) {
	if k.Name == "" {
		*k = ConfigMapKey{}
		return
	}
	if k.Namespace != "" {
		c.RefuseEach(at+".namespace", k.Namespace, validation.IsDNS1123Label(k.Namespace))
	}
	c.RefuseEach(at+".name", k.Name, validation.IsDNS1123Subdomain(k.Name))
	c.RefuseEach(at+".key", k.Key, validation.IsConfigMapKey(k.Key))
}

// ConfigMapName is a ConfigMap with files of any name.
type ConfigMapName struct {
	// Empty for the agent's own.
	Namespace string `json:"namespace"`
	// Empty for no ConfigMap at all.
	Name string `json:"name"`
}

// Reboot says who reboots a node where a GPU changes its MIG mode only at a reboot.
type Reboot struct {
	Policy RebootPolicy `json:"policy"`
	// Path of the file that requests a reboot, for delegate.
	Sentinel string `json:"sentinel" form:"path"` // as the agent sees it
}

// RebootPolicy says who reboots the node.
type RebootPolicy string

// The policies.
const (
	// RebootNever leaves the reboot to an administrator. The condition says that the node needs one; until then the node keeps working.
	RebootNever RebootPolicy = "never"
	// RebootDelegate writes a sentinel file. kured and others watch it, drain the node and reboot it.
	RebootDelegate RebootPolicy = "delegate"
	// RebootSelf drains the node and reboots it through logind.
	RebootSelf RebootPolicy = "self"
)

// Values lists the policies.
func (RebootPolicy) Values() []string { return check.Words(RebootNever, RebootDelegate, RebootSelf) }

// Timeouts bound each wait.
type Timeouts struct {
	// One call into the driver.
	DriverCall time.Duration `json:"driverCall" within:"1s,10m"`
	// One request to the API server.
	APICall time.Duration `json:"apiCall" within:"1s,5m"`
	// Until kubelet shows the new devices.
	Capacity time.Duration `json:"capacity" within:"10s,1h"`
	// Until the pods that hold a GPU have left.
	Drain time.Duration `json:"drain" within:"1m,168h"`
	// Until a unit of the host is stopped, or started.
	Unit time.Duration `json:"unit" within:"1s,1h"`
	// Until a requested reboot has happened.
	Reboot time.Duration `json:"reboot" within:"1m,720h"`
	// Until the agent asks users to check an unfinished upgrade of the driver.
	DriverUpgrade time.Duration `json:"driverUpgrade" within:"1m,24h"`
}

// Retry bounds the retries of a step that fails for a cause that may pass.
type Retry struct {
	// Failures in a row until the agent gives up and undoes the change.
	Failures int `json:"failures" within:"1,1000"`
	// First delay; it doubles each time.
	First time.Duration `json:"first" within:"100ms,1h"`
	// Longest delay.
	Longest time.Duration `json:"longest" within:"100ms,1h"`
	// How often a step may succeed and still be needed, and a request may be refused during its change.
	NoEffect int `json:"noEffect" within:"1,1000"`
}

// Check refuses delays that do not grow.
func (r *Retry) Check(c *check.Mistakes, at string, in check.Written) {
	if r.Longest > 0 && r.Longest < r.First {
		c.Refuse(at+".longest", cmp.Or(in.Text("longest"), r.Longest.String()), "is less than retry.first, "+r.First.String())
	}
}

// MIGStrategy is how the device plugin presents MIG devices, in the plugin's own words.
type MIGStrategy string

// The strategies. Auto takes the plugin's from the node.
const (
	MIGStrategyAuto   MIGStrategy = "auto"
	MIGStrategyNone   MIGStrategy = "none"
	MIGStrategySingle MIGStrategy = "single"
	MIGStrategyMixed  MIGStrategy = "mixed"
)

// Values lists the strategies.
func (MIGStrategy) Values() []string {
	return check.Words(MIGStrategyAuto, MIGStrategyNone, MIGStrategySingle, MIGStrategyMixed)
}

// On returns the strategy on a node, given the value of its LabelMIGStrategy: empty if the node has no such label. Auto without the label is mixed:
// clusters that cut GPUs unevenly use it. GPU feature discovery sets the label, and need not run.
func (s MIGStrategy) On(label string) MIGStrategy {
	if s != MIGStrategyAuto {
		return s
	}
	switch found := MIGStrategy(label); found {
	case MIGStrategyNone, MIGStrategySingle, MIGStrategyMixed:
		return found
	case MIGStrategyAuto:
	}
	return MIGStrategyMixed
}

// The defaults of the settings.
const (
	// DefaultNodeHeartbeat: as often as kubelet itself writes to a node of unchanged status. Each write of a node goes to all who watch nodes.
	DefaultNodeHeartbeat = 5 * time.Minute

	// DefaultMIGConfigMap and DefaultMIGConfigMapKey are what NVIDIA's GPU operator documents for custom configs.
	DefaultMIGConfigMap    = "custom"
	DefaultMIGConfigMapKey = "config.yaml"

	// DefaultProfiles and DefaultProfilesKey are the ConfigMap and key of our own catalog, in the agent's namespace.
	DefaultProfiles    = "gpuslice-profiles"
	DefaultProfilesKey = "profiles.yaml"

	// DefaultMaintenance and DefaultMaintenanceKey are the ConfigMap and key of the maintenance file, in the agent's namespace.
	DefaultMaintenance    = "gpuslice-maintenance"
	DefaultMaintenanceKey = "maintenance.yaml"

	// DefaultSentinel is the file that kured watches by default, and that Debian's packages write.
	DefaultSentinel = "/var/run/reboot-required"

	// DefaultReboot: machines with many GPUs and much memory take a quarter of an hour to come up.
	DefaultReboot = time.Hour

	// DefaultDriverUpgrade: a driver container compiles for some minutes, and pods have to leave before.
	DefaultDriverUpgrade = 30 * time.Minute

	// DefaultDriverCall: the slowest call known, a mode change on an A100, takes some 4 s, and a reset a few times that.
	DefaultDriverCall = 30 * time.Second
	// DefaultAPICall: an API server that needs longer is not there, and the next try may reach another one.
	DefaultAPICall = 15 * time.Second
	// DefaultCapacity: the plugin needs seconds for a few devices; with 56 on a node, users have seen discovery take minutes.
	DefaultCapacity = 5 * time.Minute
	// DefaultDrain: long enough for a disruption budget to free up after a rollout, short enough to be noticed the same
	// day.
	DefaultDrain = time.Hour

	// DefaultFailures, with the delays below, gives a driver that is being restarted about ten minutes.
	DefaultFailures   = 10
	DefaultFirstDelay = 2 * time.Second
	// DefaultLongestDelay: a user who has removed the cause should see the effect before they turn away.
	DefaultLongestDelay = 2 * time.Minute
	// DefaultNoEffect: once may be a reader that lags behind; three times in a row is no lag.
	DefaultNoEffect = 3
)

// Default returns the settings of an agent without a settings file.
func Default() Settings {
	return Settings{
		NodeHeartbeat: DefaultNodeHeartbeat,
		MIGStrategy:   MIGStrategyAuto,
		MIGConfigMap:  ConfigMapKey{Name: DefaultMIGConfigMap, Key: DefaultMIGConfigMapKey},
		Profiles:      ConfigMapKey{Name: DefaultProfiles, Key: DefaultProfilesKey},
		Maintenance:   ConfigMapKey{Name: DefaultMaintenance, Key: DefaultMaintenanceKey},
		DevicePlugin: DevicePlugin{
			PodSelector: []labels.Selector{
				labels.SelectorFromSet(labels.Set{"app": "nvidia-device-plugin-daemonset"}),          // GPU operator
				labels.SelectorFromSet(labels.Set{"app.kubernetes.io/name": "nvidia-device-plugin"}), // the plugin's Helm chart
				labels.SelectorFromSet(labels.Set{"name": "nvidia-device-plugin-ds"}),                // the plugin's static manifest
			},
			Namespaces: []string{
				"gpu-operator",
				"nvidia-device-plugin", // where NVIDIA's documents put the Helm chart
				"kube-system",          // the plugin's static manifest
				"nvidia-gpu-operator",  // OpenShift
			},
			Containers: []string{
				"nvidia-device-plugin",     // GPU operator
				"nvidia-device-plugin-ctr", // the plugin's Helm chart and static manifest
			},
			Handover: HandoverAuto, ConfigFile: DefaultPluginConfigFile, ConfigMap: ConfigMapName{Name: DefaultPluginConfigMap},
		},
		MPS: MPS{
			PodSelector: []labels.Selector{
				labels.SelectorFromSet(labels.Set{"app": "nvidia-device-plugin-mps-control-daemon"}), // GPU operator
				labels.SelectorFromSet(labels.Set{"app.kubernetes.io/name": "nvidia-device-plugin"}), // the plugin's Helm chart
			},
			Containers: []string{"mps-control-daemon-ctr"},
		},
		MemoryPressure: MemoryPressure{Threshold: DefaultPressureThreshold, Clear: DefaultPressureClear, For: DefaultPressureFor},
		Health:         Health{KernelLog: KernelLogAuto, Taint: HealthTaintNone, DeviceTaint: DeviceTaintNone, Reset: HealthResetNever},
		Idle:           Idle{Every: DefaultIdleEvery, After: DefaultIdleAfter, Below: DefaultIdleBelow, Instances: IdleInstancesSample},
		StaleResources: StaleResourcesReport,
		PodAccess:      PodAccessAuto,
		Reboot:         Reboot{Policy: RebootNever, Sentinel: DefaultSentinel},
		Drain: Drain{Eviction: Eviction{
			Mode: DrainAtOnce, GradualFor: DefaultGradualFor,
			AfterDeadline: AfterDeadlineUndo, DeleteGrace: DefaultDeleteGrace,
			UnmanagedPods: DrainRefuse, EmptyDir: DrainRefuse, OnUncordon: UncordonCancel,
		}, Fence: DrainFenceNode},
		Operands: defaultOperands(),
		Units:    defaultUnits(),
		Timeouts: Timeouts{
			DriverCall: DefaultDriverCall, APICall: DefaultAPICall, Capacity: DefaultCapacity, Drain: DefaultDrain, Unit: DefaultUnit,
			Reboot: DefaultReboot, DriverUpgrade: DefaultDriverUpgrade,
		},
		Retry: Retry{Failures: DefaultFailures, First: DefaultFirstDelay, Longest: DefaultLongestDelay, NoEffect: DefaultNoEffect},
	}
}

// Load reads a settings file.
func Load(path string) (Settings, error) {
	text, err := document.ReadFile(path)
	if err != nil {
		return Settings{}, fmt.Errorf("reading settings: %w", err)
	}
	s, err := Parse(text)
	if err != nil {
		return Settings{}, fmt.Errorf("reading settings from %s: %w", path, err)
	}
	return s, nil
}

// Parse reads settings from YAML. A missing field has its default; an unknown field is refused. The error joins one *InvalidError for each value that
// is not allowed.
func Parse(text []byte) (Settings, error) {
	doc, err := document.JSON(text)
	if err != nil {
		return Settings{}, fmt.Errorf("reading YAML: %w", err)
	}
	var c check.Mistakes
	file := SettingsFields{Settings: Default()}
	c.Read("file", check.OrEmpty(doc), &file)
	if len(c) > 0 {
		return Settings{}, errors.Join(c...)
	}
	return file.Settings, nil
}

// Beside returns the settings of an agent in that namespace. Files without a namespace are there, and a device plugin may be, as in
// overlays/device-plugin.
func (s Settings) Beside(namespace string) Settings {
	s.MIGConfigMap.Namespace = cmp.Or(s.MIGConfigMap.Namespace, namespace)
	s.DevicePlugin.ConfigMap.Namespace = cmp.Or(s.DevicePlugin.ConfigMap.Namespace, namespace)
	s.Profiles.Namespace = cmp.Or(s.Profiles.Namespace, namespace)
	s.Maintenance.Namespace = cmp.Or(s.Maintenance.Namespace, namespace)
	if !slices.Contains(s.DevicePlugin.Namespaces, namespace) {
		s.DevicePlugin.Namespaces = append(slices.Clone(s.DevicePlugin.Namespaces), namespace)
	}
	return s
}

// ConfigMaps lists those that the settings name.
func (s Settings) ConfigMaps() []ConfigMapKey {
	plugin := ConfigMapKey{Namespace: s.DevicePlugin.ConfigMap.Namespace, Name: s.DevicePlugin.ConfigMap.Name}
	return slices.DeleteFunc([]ConfigMapKey{s.MIGConfigMap, s.Profiles, s.Maintenance, plugin}, func(c ConfigMapKey) bool { return c.Name == "" })
}
