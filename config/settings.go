package config

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/gpuslice/gpuslice/config/document"
)

// The kind of the settings file.
const (
	SettingsAPIVersion = "gpuslice.io/v1alpha1"
	SettingsKind       = "Settings"
)

// Settings says how the agent behaves on its node, whatever the labels ask for. All of it is checked.
type Settings struct {
	NodeHeartbeat time.Duration // time between two writes to a converged node
	MIGStrategy   MIGStrategy   // how the device plugin presents MIG devices
	MIGConfigMap  ConfigMapKey  // users' own MIG configs; without a name there are only generated ones
	Profiles      ConfigMapKey  // our own catalog; without a name there is none
	Maintenance   ConfigMapKey  // the maintenance file; without a name changes may begin at any time, on all nodes at once
	DevicePlugin  DevicePlugin
	MPS           MPS
	Reboot        Reboot
	Drain         Drain
	Operands      []string // labels by which the agent pauses NVIDIA's operands, in this order
	Units         []string // units of the host that the agent stops for a reset, in this order
	Recover       Recover

	MemoryPressure MemoryPressure
	Health         Health
	Idle           Idle
	StaleResources StaleResources
	PodAccess      PodAccess
	Timeouts       Timeouts
	Retry          Retry
	StartupTaint   string // key of a startup taint beside TaintNotReady; empty for none
}

// ConfigMapKey is a file in a ConfigMap.
type ConfigMapKey struct {
	Namespace string // empty for the agent's own
	Name      string // empty for no file at all
	Key       string
}

// ConfigMapName is a ConfigMap with files of any name.
type ConfigMapName struct {
	Namespace string // empty for the agent's own
	Name      string // empty for no ConfigMap at all
}

// Reboot says what the agent does about a GPU that changes its MIG mode only at a reboot of the node.
type Reboot struct {
	Policy   RebootPolicy
	Sentinel string // path of the file by which RebootDelegate asks, as the agent sees it
}

// RebootPolicy says who reboots the node.
type RebootPolicy string

// The policies.
const (
	// RebootNever leaves the reboot to an administrator: the condition says that the node needs one, and the node works on meanwhile.
	RebootNever RebootPolicy = "never"
	// RebootDelegate asks by a sentinel file, which kured and others watch and answer with a drain and a reboot.
	RebootDelegate RebootPolicy = "delegate"
	// RebootSelf drains the node and reboots it through logind.
	RebootSelf RebootPolicy = "self"
)

// Timeouts bound each wait.
type Timeouts struct {
	DriverCall time.Duration // one call into the driver
	APICall    time.Duration // one request to the API server
	Capacity   time.Duration // until kubelet shows the new devices
	Drain      time.Duration // until the pods that hold a GPU have left
	Unit       time.Duration // until a unit of the host is stopped, or started
	Reboot     time.Duration // until a reboot that was asked for has happened
	// DriverUpgrade is how long an upgrade of the driver may take until the condition asks an administrator to look at it.
	DriverUpgrade time.Duration
}

// Retry says how the agent tries a step again that fails for a cause that may pass.
type Retry struct {
	Failures int           // failures in a row after which the agent gives the change up and undoes it
	First    time.Duration // delay after the first failure; each further one doubles it
	Longest  time.Duration // longest delay
	NoEffect int           // successes of one step without effect after which it is a fault
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

// On gives the strategy on a node whose LabelMIGStrategy has the given value, which is empty if the node has no such label.
// Auto without the label is mixed: clusters that cut GPUs unevenly use it. The label comes with GPU feature discovery, which need not run.
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

// The defaults of the settings, and what bounds them.
const (
	// DefaultNodeHeartbeat: as often as kubelet itself writes to a node whose status does not change. Each write of a
	// node goes to all who watch nodes.
	DefaultNodeHeartbeat = 5 * time.Minute
	minNodeHeartbeat     = 10 * time.Second // kubelet's own lease interval: more often tells nobody anything
	maxNodeHeartbeat     = 24 * time.Hour

	// DefaultMIGConfigMap and DefaultMIGConfigMapKey are what NVIDIA's GPU operator documents for custom configs.
	DefaultMIGConfigMap    = "custom"
	DefaultMIGConfigMapKey = "config.yaml"

	// DefaultProfiles and DefaultProfilesKey are the ConfigMap and key of our own catalog, in the agent's namespace.
	DefaultProfiles    = "gpuslice-profiles"
	DefaultProfilesKey = "profiles.yaml"

	// DefaultMaintenance and DefaultMaintenanceKey are the ConfigMap and key of the maintenance file, in the agent's namespace.
	DefaultMaintenance    = "gpuslice-maintenance"
	DefaultMaintenanceKey = "maintenance.yaml"

	// DefaultSentinel is the file that kured watches unless told otherwise, and that Debian's packages write.
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
	// DefaultLongestDelay: a user who has removed the cause should see the effect while still looking.
	DefaultLongestDelay = 2 * time.Minute
	// DefaultNoEffect: once may be a reader that lags behind; three times in a row is no lag.
	DefaultNoEffect = 3
	maxCount        = 1000 // more tries than anyone waits for
)

// Default gives the settings of an agent without a settings file.
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
		Health:         Health{KernelLog: KernelLogAuto, Taint: HealthTaintNone, Reset: HealthResetNever},
		Idle:           Idle{Every: DefaultIdleEvery, After: DefaultIdleAfter, Below: DefaultIdleBelow, Instances: IdleInstancesSkip},
		StaleResources: StaleResourcesReport,
		PodAccess:      PodAccessAuto,
		Reboot:         Reboot{Policy: RebootNever, Sentinel: DefaultSentinel},
		Drain: Drain{
			Mode: DrainAtOnce, GradualFor: DefaultGradualFor,
			AfterDeadline: AfterDeadlineUndo, DeleteGrace: DefaultDeleteGrace,
			UnmanagedPods: DrainRefuse, EmptyDir: DrainRefuse, OnUncordon: UncordonCancel,
		},
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

// Parse reads settings from YAML. A field that is not written has its default; fields that do not exist are refused.
// The error joins one *InvalidError for each value that is not allowed.
func Parse(text []byte) (Settings, error) {
	in := inputsOf(Default())
	unknown, err := in.decode(text)
	if err != nil {
		return Settings{}, err
	}
	s, wrong := in.settings()
	if err := errors.Join(unknown, wrong); err != nil {
		return Settings{}, err
	}
	return s, nil
}

// settings checks the inputs, all of them, and makes settings of them.
func (in inputs) settings() (Settings, error) {
	var c checks
	c.oneOf("apiVersion", in.APIVersion, SettingsAPIVersion)
	c.oneOf("kind", in.Kind, SettingsKind)
	s := Settings{
		NodeHeartbeat: c.duration("nodeHeartbeat", in.NodeHeartbeat, minNodeHeartbeat, maxNodeHeartbeat),
		MIGStrategy: MIGStrategy(c.oneOf("migStrategy", in.MIGStrategy,
			string(MIGStrategyAuto), string(MIGStrategyNone), string(MIGStrategySingle), string(MIGStrategyMixed))),
		MIGConfigMap: c.configMapKey("migConfigMap", in.MIGConfigMap),
		Profiles:     c.configMapKey("profiles", in.Profiles),
		Maintenance:  c.configMapKey("maintenance", in.Maintenance),
		Reboot: Reboot{
			Policy:   RebootPolicy(c.oneOf("reboot.policy", in.Reboot.Policy, string(RebootNever), string(RebootDelegate), string(RebootSelf))),
			Sentinel: c.path("reboot.sentinel", in.Reboot.Sentinel, DefaultSentinel),
		},
		DevicePlugin:   c.devicePlugin(in.DevicePlugin),
		MPS:            c.mps(in.MPS),
		MemoryPressure: c.memoryPressure(in.MemoryPressure),
		Health:         c.health(in.Health),
		Idle:           c.idle(in.Idle),
		StaleResources: StaleResources(c.oneOf("staleResources", in.StaleResources, string(StaleResourcesReport), string(StaleResourcesRemove))),
		PodAccess: PodAccess(c.oneOf("podAccess", in.PodAccess,
			string(PodAccessAuto), string(PodAccessImpersonation), string(PodAccessPolicy), string(PodAccessRBAC))),
		Drain:    c.drain("drain", in.Drain),
		Operands: c.operands("operands", in.Operands),
		Units:    c.units("units", in.Units),
		Recover:  Recover{Adopt: c.adopt("recover.adopt", in.Recover.Adopt)},
		Timeouts: Timeouts{
			DriverCall: c.duration("timeouts.driverCall", in.Timeouts.DriverCall, time.Second, 10*time.Minute),
			APICall:    c.duration("timeouts.apiCall", in.Timeouts.APICall, time.Second, 5*time.Minute),
			Capacity:   c.duration("timeouts.capacity", in.Timeouts.Capacity, 10*time.Second, time.Hour),
			Drain:      c.drainDeadline("timeouts.drain", in.Timeouts.Drain),
			Unit:       c.duration("timeouts.unit", in.Timeouts.Unit, time.Second, time.Hour),
			Reboot:     c.duration("timeouts.reboot", in.Timeouts.Reboot, time.Minute, 30*24*time.Hour),

			DriverUpgrade: c.duration("timeouts.driverUpgrade", in.Timeouts.DriverUpgrade, time.Minute, 24*time.Hour),
		},
		Retry: Retry{
			Failures: c.count("retry.failures", in.Retry.Failures),
			First:    c.duration("retry.first", in.Retry.First, 100*time.Millisecond, time.Hour),
			Longest:  c.duration("retry.longest", in.Retry.Longest, 100*time.Millisecond, time.Hour),
			NoEffect: c.count("retry.noEffect", in.Retry.NoEffect),
		},
		StartupTaint: c.startupTaint("startupTaint", in.StartupTaint),
	}
	if len(c) == 0 && s.Retry.Longest < s.Retry.First {
		c.refuse("retry.longest", string(in.Retry.Longest), "is less than retry.first, "+s.Retry.First.String())
	}
	if len(c) > 0 {
		return Settings{}, errors.Join(c...)
	}
	return s, nil
}

// checks collects the mistakes of the inputs. Each method gives the checked value, or zero if it refuses it.
type checks []error

func (c *checks) add(err error) { *c = AddMistake(*c, err) }

func (c *checks) refuse(field, value, want string) {
	c.add(&InvalidError{Field: field, Value: strconv.Quote(value), Want: want})
}

func (c *checks) oneOf(field string, value scalar, allowed ...string) string {
	if !slices.Contains(allowed, string(value)) {
		c.refuse(field, string(value), "must be "+strings.Join(allowed, " or "))
		return ""
	}
	return string(value)
}

func (c *checks) duration(field string, value scalar, least, most time.Duration) time.Duration {
	d, err := time.ParseDuration(string(value))
	switch {
	case err != nil:
		c.refuse(field, string(value), `must be a duration with its unit, like "90s" or "1h30m"`)
	case d < least || d > most:
		c.refuse(field, string(value), fmt.Sprintf("must be from %s to %s", withoutZeroParts(least), withoutZeroParts(most)))
	default:
		return d
	}
	return 0
}

func (c *checks) count(field string, value scalar) int {
	n, err := strconv.Atoi(string(value))
	if err != nil || n < 1 || n > maxCount {
		c.refuse(field, string(value), fmt.Sprintf("must be a whole number from 1 to %d", maxCount))
		return 0
	}
	return n
}

func (c *checks) path(field string, value scalar, example string) string {
	p := string(value)
	if !filepath.IsAbs(p) || filepath.Clean(p) != p {
		c.refuse(field, p, "must be the absolute path of a file, like "+strconv.Quote(example))
	}
	return p
}

func (c *checks) configMapKey(field string, in configMapInputs) ConfigMapKey {
	k := ConfigMapKey{Namespace: string(in.Namespace), Name: string(in.Name), Key: string(in.Key)}
	if k.Name == "" {
		return ConfigMapKey{}
	}
	if k.Namespace != "" {
		c.refuseEach(field+".namespace", k.Namespace, validation.IsDNS1123Label(k.Namespace))
	}
	c.refuseEach(field+".name", k.Name, validation.IsDNS1123Subdomain(k.Name))
	c.refuseEach(field+".key", k.Key, validation.IsConfigMapKey(k.Key))
	return k
}

func (c *checks) refuseEach(field, value string, problems []string) {
	for _, p := range problems {
		c.refuse(field, value, p)
	}
}

// selectors checks label selectors of pods or nodes, which whose names for messages, and refuses one that is there twice.
func (c *checks) selectors(field string, in list, whose string) []labels.Selector {
	var out []labels.Selector
	texts := map[string]bool{}
	for i, text := range in {
		at := fmt.Sprintf("%s[%d]", field, i)
		selector := c.selector(at, text, whose)
		if meaning := selector.String(); texts[meaning] {
			c.refuse(at, string(text), "is there twice")
		} else if meaning != "" { // which is refused already
			texts[meaning] = true
		}
		out = append(out, selector)
	}
	return out
}

func (c *checks) selector(field string, text scalar, whose string) labels.Selector {
	selector, err := labels.Parse(string(text))
	switch {
	case err != nil:
		c.refuse(field, string(text), fmt.Sprintf(`must be a label selector, like "app=nvidia-device-plugin-daemonset": %v`, err))
		return labels.Nothing()
	case selector.Empty():
		c.refuse(field, string(text), "matches every pod: name the labels of "+whose)
	}
	return selector
}

// Beside returns the settings of an agent of that namespace: files of which no namespace is said are there, and a device plugin may be, as
// overlays/device-plugin puts it.
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

// withoutZeroParts writes a duration as "10m", not "10m0s".
func withoutZeroParts(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
