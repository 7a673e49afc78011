package agent

import (
	"cmp"
	"context"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/evict"
	"github.com/gpuslice/gpuslice/agent/act/fencing"
	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/act/hardware"
	"github.com/gpuslice/gpuslice/agent/act/nodekeys"
	"github.com/gpuslice/gpuslice/agent/act/plugin"
	"github.com/gpuslice/gpuslice/agent/act/reboot"
	"github.com/gpuslice/gpuslice/agent/act/units"
	"github.com/gpuslice/gpuslice/agent/act/verify"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monitor"
	"github.com/gpuslice/gpuslice/agent/monitor/health"
	"github.com/gpuslice/gpuslice/agent/monitor/idle"
	"github.com/gpuslice/gpuslice/agent/monitor/memory"
	"github.com/gpuslice/gpuslice/agent/monitor/remedy"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/observe"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml"
)

// Kubelet reports through its pod-resources API which devices each pod has, and which devices it may allocate.
type Kubelet interface {
	Assignments(ctx context.Context) (holders.Assignments, error)
	Allocatable(ctx context.Context) (map[string][]string, error)
}

// Options is what an Agent works with.
type Options struct {
	Node    string // name of the node it runs on; it never touches another
	Client  kube.Interface
	Driver  nvml.Driver
	Pods    watch.Pods
	Kubelet Kubelet
	Host    reboot.Host
	Units   units.Systemd
	Specs   hardware.Specs
	Record  journal.Store
	// Health has the sources of the GPUs' health. Without a driver in it the agent does not watch their health.
	Health health.Sources
	// Usage reports how much of the GPUs processes use. Without it the agent does not watch that.
	Usage nvml.UsageReader

	Processes holders.Processes
	Parse     func(data []byte) (map[string]catalog.MIGConfig, error) // reads a file in mig-parted's format
	Plugin    catalog.PluginFormat
	// PluginFile is the path of the device plugin's config file for this process. If it is empty, the settings' path counts.
	PluginFile string
	Settings   config.Settings
	// Edited reports whether the settings' file has changed, or what is wrong with it. It may be nil.
	Edited   func() (other bool, wrong string)
	Clock    clock.WithTicker
	Events   record.EventRecorder
	Sources  []report.Source // of the status, besides the agent's monitors
	Metrics  *metrics.Metrics
	Liveness *report.Liveness
	Log      *zap.Logger
}

// New makes an Agent. Nothing happens before Run.
func New(o Options) *Agent {
	if o.Processes.Lanes == nil {
		o.Processes.Lanes = &holders.Lanes{}
	}
	objects := watch.NewObjects(watch.Options{Node: o.Node, Client: o.Client, Pods: o.Pods, ConfigMaps: o.Settings.ConfigMaps()})
	env := act.Env{
		Node:  o.Node,
		Nodes: nodewrite.Writer{Client: o.Client, Timeout: o.Settings.Timeouts.APICall, Saw: objects.SawNode, Startup: o.Settings.StartupTaints()},
		Fence: fence.Fence{
			Taint: state.FenceTaint(), StartupKeys: o.Settings.StartupTaints().Keys(), JournalKey: config.AnnotationJournal,
			KeepCordonedKey: config.AnnotationKeepCordoned, ReasonKey: config.AnnotationCordonReason, ReasonPrefix: config.CordonReasonPrefix,
		},
		Settings: o.Settings, Events: events.Recorder{To: o.Events}, Clock: monotonic.New(o.Clock), Log: o.Log,
	}
	a := &Agent{env: env, edited: o.Edited}
	a.observers = newObservers(o, env, objects)
	a.deciders = newDeciders(o, env)
	driver := a.addHealth(o)
	a.actors = newActors(o, driver, a)
	a.addMonitors(o)
	sources := o.Sources
	for _, m := range a.monitors {
		sources = append(slices.Clip(sources), m)
	}
	a.reporters = reporters{
		reporter: &report.Writer{
			Node: o.Node, Nodes: env.Nodes, Journal: a.actors.journal, Record: a.observers.record, Settings: o.Settings, Events: env.Events, Metrics: o.Metrics,
			Wall: o.Clock, Clock: env.Clock, Log: o.Log, Sources: sources,
		},
		metrics: o.Metrics, liveness: o.Liveness,
	}
	return a
}

func newObservers(o Options, env act.Env, objects *watch.Objects) observers {
	record := &journal.Keeper{Store: o.Record, Log: o.Log.Named("record")}
	wakes := &watch.Sources{Client: o.Client, Objects: objects, Clock: env.Clock, Log: o.Log}
	if o.Health.Driver == nil { // otherwise the health monitor listens to the driver, and wakes the loop
		wakes.Driver = o.Driver
	}
	sets := holders.NewDaemonSets(o.Client, env.Clock)
	return observers{
		client: o.Client, kubelet: o.Kubelet, objects: objects, wakes: wakes, record: record,
		sets:      sets,
		kernel:    &host.Kernel{Proc: o.Processes.Root},
		processes: &observe.Processes{Processes: o.Processes, Settings: o.Settings, Clock: env.Clock},
		leftovers: &observe.Leftovers{Record: record, Settings: o.Settings, Fence: env.Fence, Clock: env.Clock},
		claims:    &observe.Claims{Objects: objects, Client: o.Client, Clock: env.Clock, Timeout: o.Settings.Timeouts.APICall},
		files:     &observe.Files{Objects: objects, Settings: o.Settings},
		devicePlugin: &deviceplugin.Plugin{
			Objects: objects, Sets: sets, Processes: o.Processes, Format: o.Plugin,
			File:     deviceplugin.NewFile(cmp.Or(o.PluginFile, o.Settings.DevicePlugin.ConfigFile), o.Settings.DevicePlugin.ConfigFile),
			Settings: o.Settings, Clock: env.Clock, Log: o.Log,
		},
		ownership: &observe.Ownership{Clock: env.Clock},
	}
}

func newDeciders(o Options, env act.Env) deciders {
	return deciders{
		resolver: &decide.Resolver{Parse: o.Parse, Format: o.Plugin, Settings: o.Settings},
		gates:    &decide.Gate{Settings: o.Settings, Wall: o.Clock, Clock: env.Clock},
		retries:  decide.NewRetries(env.Clock, o.Settings),
	}
}

// addHealth makes the health monitor, and returns the driver for the agent to use. It goes through the monitor, so that the monitor recognizes the agent's own
// calls.
func (a *Agent) addHealth(o Options) nvml.Driver {
	if o.Health.Driver == nil {
		a.health = monitor.NoHealth{}
		return o.Driver
	}
	h := health.New(health.Options{
		Sources: o.Health, Settings: o.Settings.Health, Boot: a.observers.kernel.Boot, NodeEvent: a.env.Events.OfNode(o.Node), PodEvent: a.env.Events.Pod,
		Write: func(ctx context.Context, c []corev1.NodeCondition) error {
			return a.env.Nodes.Conditions(ctx, o.Node, c)
		},
		ComputesForOthers: a.observers.devicePlugin.ServesMPS, Clock: o.Clock, Log: o.Log.Named("health"),
	})
	a.health, a.monitors = h, append(a.monitors, h)
	return h.Through(o.Driver)
}

// newActors makes the actors, each after those that it depends on.
func newActors(o Options, driver nvml.Driver, a *Agent) actors {
	env := a.env
	writer := &journal.Writer{Record: a.observers.record, Nodes: env.Nodes, Fence: env.Fence, Clock: env.Clock}
	evictions := &evict.Evictions{
		Env: env, Evictor: drain.NewEvictor(o.Client, env.Clock, o.Log.Named("drain")), Journal: writer, Wakes: a.observers.wakes, Retries: a.deciders.retries,
		Metrics: o.Metrics,
	}
	handover := &plugin.Handover{Plugin: a.observers.devicePlugin, Client: o.Client, Nodes: env.Nodes, Evictions: evictions, Retries: a.deciders.retries}
	rebooter := &reboot.Rebooter{Env: env, Host: o.Host, Kernel: a.observers.kernel, Sentinel: &reboot.Sentinel{Path: o.Settings.Reboot.Sentinel}, Journal: writer}
	slot := &fleet.Slot{
		Slots: &fleet.Leases{
			Client: o.Client, Namespace: o.Settings.Maintenance.Namespace, Clock: env.Clock, Timeout: o.Settings.Timeouts.APICall,
			Log: o.Log.Named("fleet"), Startup: o.Settings.StartupTaints(),
		},
		Journal: writer, Namespace: o.Settings.Maintenance.Namespace, Clock: env.Clock, Log: o.Log,
	}
	timing, rules := &fencing.Timing{}, &fencing.Rules{Env: env, Client: o.Client.DeviceTaintRules()}
	fences := &fencing.Fencing{
		Env: env, Journal: writer, Record: a.observers.record, Slot: slot, Evictions: evictions, Processes: a.observers.processes, Handover: handover, Timing: timing,
		Retries: a.deciders.retries, Rules: rules,
	}
	return actors{
		journal: writer, evictions: evictions, handover: handover, rebooter: rebooter, slot: slot, timing: timing, fencing: fences,
		units: &units.Units{Env: env, Systemd: o.Units, Retries: a.deciders.retries, Journal: writer},
		hardware: &hardware.GPUs{
			Env: env, Driver: driver, Specs: o.Specs, Evictions: evictions, Processes: a.observers.processes, Rebooter: rebooter, Retries: a.deciders.retries, Journal: writer,
		},
		publisher: &nodekeys.Publisher{Env: env, Journal: writer},
		verifier:  &verify.Verifier{Env: env, DevicePlugin: a.observers.devicePlugin},
		upgrades:  &fencing.UpgradeWatch{Env: env, Driver: driver, Fencing: fences},
		taint:     &remedy.Taint{Nodes: env.Nodes, Effect: o.Settings.Health.Taint, NodeEvent: env.Events.OfNode(o.Node), Clock: env.Clock, Log: o.Log},
		rules:     rules,
		resets:    &remedy.Resets{Health: a.health, Clock: env.Clock, Began: env.Clock.Now()},
	}
}

// addMonitors makes the other monitors. A new monitor is one line here.
func (a *Agent) addMonitors(o Options) {
	owners := monitor.OwnerFinder{Processes: o.Processes, ComputesForOthers: a.observers.devicePlugin.ServesMPS, Log: o.Log.Named("occupants")}
	used := memory.New(memory.Options{
		Limits: o.Settings.MemoryPressure, Snapshot: a.actors.hardware.Snapshot, Owners: owners,
		PodEvent: a.env.Events.Pod, Clock: a.env.Clock, Former: a.actors.journal.FullMemory,
	})
	a.monitors, a.uses = append(a.monitors, used), used.Uses
	if o.Usage != nil {
		beside := owners
		beside.Processes = holders.Processes{Root: o.Processes.Root, Lanes: &holders.Lanes{}} // so that an observation that hangs here holds up no pass
		busy := idle.New(idle.Options{
			Settings: o.Settings.Idle, Reader: o.Usage, Owners: beside, PodEvent: a.env.Events.Pod, Clock: o.Clock, Log: o.Log.Named("idle"),
		})
		a.monitors = append(a.monitors, busy)
		a.uses = func() []api.Use {
			uses := used.Uses()
			busy.AddBusy(uses)
			return uses
		}
	}
	collectors := make([]prometheus.Collector, len(a.monitors))
	for i, m := range a.monitors {
		collectors[i] = m
	}
	o.Metrics.TakeOver(collectors)
}
