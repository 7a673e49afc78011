package agent

import (
	"cmp"
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/act/evict"
	"github.com/gpuslice/gpuslice/agent/act/fencing"
	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/act/hardware"
	"github.com/gpuslice/gpuslice/agent/act/nodekeys"
	"github.com/gpuslice/gpuslice/agent/act/plugin"
	"github.com/gpuslice/gpuslice/agent/act/reboot"
	"github.com/gpuslice/gpuslice/agent/act/units"
	"github.com/gpuslice/gpuslice/agent/act/verify"
	"github.com/gpuslice/gpuslice/agent/decide"
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
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml"
)

// Kubelet tells, by its pod-resources API, which pod it has given which device, and which devices it may still give out.
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
	// Health is what the agent learns the health of GPUs from. Without a driver in it the agent does not watch their health.
	Health health.Sources
	// Usage tells how much processes use of the GPUs. Without it the agent does not watch that.
	Usage nvml.UsageReader

	Processes holders.Processes
	Parse     func(data []byte) (map[string]config.MIGConfig, error) // reads a file in mig-parted's format
	Plugin    deviceplugin.Configs
	// PluginFile is the path of the device plugin's config file in this process. If it is empty, it is that on the host, by the settings.
	PluginFile string
	Settings   config.Settings
	// Edited reports whether the file of the settings has other ones by now, or what is wrong with it. It may be nil.
	Edited   func() (other bool, wrong string)
	Clock    clock.WithTicker
	Events   record.EventRecorder
	Sources  []report.Source  // of the status, beside the agent's own parts
	Metrics  *metrics.Metrics // may be nil
	Liveness *report.Liveness // may be nil
	Log      *zap.Logger
}

// New makes an Agent. Nothing happens before Run.
func New(o Options) *Agent {
	c := monotonic.New(o.Clock)
	if o.Processes.Lanes == nil {
		o.Processes.Lanes = &holders.Lanes{}
	}
	objects := watch.NewObjects(watch.Options{Node: o.Node, Client: o.Client, Pods: o.Pods, ConfigMaps: o.Settings.ConfigMaps()})
	a := &Agent{
		node: o.Node, client: o.Client, kubelet: o.Kubelet, settings: o.Settings, clock: c, metrics: o.Metrics, liveness: o.Liveness, log: o.Log,
		events: report.Events{To: o.Events},
		sets:   holders.NewDaemonSets(o.Client, c),
		marks: fence.Fence{
			Taint: state.FenceTaint(), StartupKeys: o.Settings.StartupTaints().Keys(), JournalKey: config.AnnotationJournal, KeepCordonedKey: config.AnnotationKeepCordoned,
		},
		edited:    o.Edited,
		objects:   objects,
		nodes:     nodewrite.Writer{Client: o.Client, Timeout: o.Settings.Timeouts.APICall, Saw: objects.SawNode, Startup: o.Settings.StartupTaints()},
		wakes:     &watch.Sources{Client: o.Client, Objects: objects, Driver: o.Driver, Clock: c, Log: o.Log},
		record:    &journal.Keeper{Store: o.Record, Log: o.Log.Named("record")},
		retries:   decide.NewRetries(c, o.Settings),
		processes: &observe.Processes{Processes: o.Processes, Settings: o.Settings, Clock: c},
		timing:    &fencing.Timing{},
	}
	a.journal = &journal.Writer{Record: a.record, Nodes: a.nodes, Fence: a.marks, Units: o.Settings.Units, Clock: c}
	a.addSteps(o)
	a.addDecisions(o)
	a.reporter = &report.Writer{
		Node: o.Node, Nodes: a.nodes, Journal: a.journal, Record: a.record, Settings: o.Settings, Events: a.events, Metrics: o.Metrics, Wall: o.Clock,
		Clock: c, Log: o.Log, Sources: o.Sources,
	}
	a.addMonitors(o)
	return a
}

// addSteps makes the packages that perform steps, each after those that it depends on.
func (a *Agent) addSteps(o Options) {
	evictor := drain.NewEvictor(o.Client, a.clock, o.Log.Named("drain"))
	evictor.Again, a.sets.Again = kube.Retry, kube.Retry
	a.evictions = &evict.Evictions{
		Node: o.Node, Nodes: a.nodes, Evictor: evictor, Wakes: a.wakes, Retries: a.retries, Metrics: o.Metrics, Settings: o.Settings, Events: a.events, Clock: a.clock,
	}
	a.devicePlugin = &deviceplugin.Plugin{
		Objects: a.objects, Processes: o.Processes, Configs: o.Plugin,
		File:     deviceplugin.NewFile(cmp.Or(o.PluginFile, o.Settings.DevicePlugin.ConfigFile), o.Settings.DevicePlugin.ConfigFile),
		Settings: o.Settings, Clock: a.clock, Log: o.Log,
	}
	a.handover = &plugin.Handover{Plugin: a.devicePlugin, Client: o.Client, Nodes: a.nodes, Evictions: a.evictions, Retries: a.retries}
	a.units = &units.Units{
		Systemd: o.Units, Settings: o.Settings, Retries: a.retries, Journal: a.journal, Events: a.events, Clock: a.clock, Log: o.Log,
	}
	a.rebooter = &reboot.Rebooter{
		Node: o.Node, Host: o.Host, Kernel: &host.Kernel{Proc: o.Processes.Root}, Sentinel: &reboot.Sentinel{Path: o.Settings.Reboot.Sentinel},
		Settings: o.Settings, Journal: a.journal, Events: a.events, Clock: a.clock, Log: o.Log,
	}
	a.hardware = &hardware.GPUs{
		Driver: o.Driver, Specs: o.Specs, Evictions: a.evictions, Processes: a.processes, Rebooter: a.rebooter, Retries: a.retries, Journal: a.journal,
		Settings: o.Settings, Log: o.Log,
	}
	a.publisher = &nodekeys.Publisher{Nodes: a.nodes, Record: a.record, Journal: a.journal, Clock: a.clock}
	a.verifier = &verify.Verifier{
		Nodes: a.nodes, DevicePlugin: a.devicePlugin, Settings: o.Settings, Events: a.events, Clock: a.clock, Log: o.Log,
	}
	a.objects.Due = a.verifier.LastLookDue
	a.slot = &fleet.Slot{
		Slots: &fleet.Leases{
			Client: o.Client, Namespace: o.Settings.Maintenance.Namespace, Clock: a.clock, Timeout: o.Settings.Timeouts.APICall, Log: o.Log.Named("fleet"),
			Startup: o.Settings.StartupTaints(),
		},
		Namespace: o.Settings.Maintenance.Namespace, Clock: a.clock, Log: o.Log,
	}
	a.fencing = &fencing.Fencing{
		Nodes: a.nodes, Fence: a.marks, Journal: a.journal, Record: a.record, Slot: a.slot, Evictions: a.evictions, Processes: a.processes,
		Handover: a.handover, Timing: a.timing, Retries: a.retries, Events: a.events, Clock: a.clock,
	}
	a.upgrades = &fencing.UpgradeWatch{
		Node: o.Node, Nodes: a.nodes, Driver: o.Driver, Fence: a.marks, Fencing: a.fencing, Settings: o.Settings, Events: a.events, Clock: a.clock,
		Log: o.Log,
	}
	a.taint = &remedy.Taint{Nodes: a.nodes, Effect: o.Settings.Health.Taint, Tell: a.events.Of(o.Node), Clock: a.clock, Log: o.Log}
}

// addDecisions makes the packages that find the desired state, and those that say whether a change may begin now.
func (a *Agent) addDecisions(o Options) {
	a.leftovers = &observe.Leftovers{Record: a.record, Settings: o.Settings, Clock: a.clock}
	a.resolver = &decide.Resolver{Parse: o.Parse, DevicePlugin: a.devicePlugin, Settings: o.Settings}
	a.files = &observe.Files{Objects: a.objects, Settings: o.Settings}
	a.gates = &decide.Gate{Settings: o.Settings, Wall: o.Clock, Clock: a.clock}
}

// addMonitors makes the monitors, and hands them to the reporter. A new monitor is one line here.
func (a *Agent) addMonitors(o Options) {
	owners := monitor.OwnerFinder{Processes: o.Processes, ComputesForOthers: a.devicePlugin.ServesMPS, Log: o.Log.Named("occupants")}
	a.monitors = monitor.Monitors{
		memory.New(memory.Options{Limits: o.Settings.MemoryPressure, Snapshot: a.hardware.Snapshot, Owners: owners, Tell: a.events.Podf, Clock: a.clock}),
	}
	if o.Usage != nil {
		beside := owners
		beside.Processes = holders.Processes{Root: o.Processes.Root, Lanes: &holders.Lanes{}} // a look that hangs there holds up no pass
		a.monitors = append(a.monitors, idle.New(idle.Options{
			Settings: o.Settings.Idle, Reader: o.Usage, Owners: beside, Tell: a.events.Podf, Clock: o.Clock, Log: o.Log.Named("idle"),
		}))
	}
	if o.Health.Driver != nil {
		a.monitors = append(a.monitors, health.New(health.Options{
			Sources: o.Health, Settings: o.Settings.Health, Boot: a.rebooter.Kernel.Boot, Write: a.reporter.Write, TellNode: a.events.Of(o.Node),
			TellPod: a.events.Podf, ComputesForOthers: a.devicePlugin.ServesMPS, Clock: o.Clock, Log: o.Log.Named("health"),
		}))
	}
	a.resets = &remedy.Resets{Monitors: a.monitors, Clock: a.clock, Began: a.clock.Now()}
	collectors := make([]prometheus.Collector, len(a.monitors))
	for i, p := range a.monitors {
		collectors[i] = p
		a.reporter.Sources = append(a.reporter.Sources, p)
		if w, watches := p.(monitor.DriverWatcher); watches {
			a.hardware.Driver, a.wakes.Driver = w.Through(a.hardware.Driver), nil
		}
	}
	a.metrics.TakeOver(collectors)
}
