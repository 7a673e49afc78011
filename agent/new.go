package agent

import (
	"cmp"
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/alive"
	"github.com/gpuslice/gpuslice/agent/budget"
	"github.com/gpuslice/gpuslice/agent/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/draining"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/fencing"
	"github.com/gpuslice/gpuslice/agent/files"
	"github.com/gpuslice/gpuslice/agent/fleet"
	"github.com/gpuslice/gpuslice/agent/gate"
	"github.com/gpuslice/gpuslice/agent/handover"
	"github.com/gpuslice/gpuslice/agent/hardware"
	"github.com/gpuslice/gpuslice/agent/health"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/idle"
	"github.com/gpuslice/gpuslice/agent/ledger"
	"github.com/gpuslice/gpuslice/agent/leftovers"
	"github.com/gpuslice/gpuslice/agent/measure"
	"github.com/gpuslice/gpuslice/agent/memory"
	"github.com/gpuslice/gpuslice/agent/metrics"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/occupants"
	"github.com/gpuslice/gpuslice/agent/part"
	"github.com/gpuslice/gpuslice/agent/pluginfile"
	"github.com/gpuslice/gpuslice/agent/processes"
	"github.com/gpuslice/gpuslice/agent/proving"
	"github.com/gpuslice/gpuslice/agent/publish"
	"github.com/gpuslice/gpuslice/agent/reboot"
	"github.com/gpuslice/gpuslice/agent/remedy"
	"github.com/gpuslice/gpuslice/agent/resolve"
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/agent/sentinel"
	"github.com/gpuslice/gpuslice/agent/slot"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/steady"
	"github.com/gpuslice/gpuslice/agent/tell"
	"github.com/gpuslice/gpuslice/agent/units"
	"github.com/gpuslice/gpuslice/agent/upgrade"
	"github.com/gpuslice/gpuslice/agent/wake"
	"github.com/gpuslice/gpuslice/agent/watched"
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
	Pods    watched.Pods
	Kubelet Kubelet
	Host    reboot.Host
	Units   units.Systemd
	Specs   hardware.Specs
	Record  hostrecord.Store
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
	Edited  func() (other bool, wrong string)
	Clock   clock.WithTicker
	Events  record.EventRecorder
	Sources []tell.Source // of the status, beside the agent's own parts
	Metrics *metrics.Set  // may be nil
	Alive   *alive.Loop   // may be nil
	Log     *zap.Logger
}

// New makes an Agent. Nothing happens before Run.
func New(o Options) *Agent {
	c := steady.New(o.Clock)
	if o.Processes.Lanes == nil {
		o.Processes.Lanes = &holders.Lanes{}
	}
	objects := watched.New(watched.Options{Node: o.Node, Client: o.Client, Pods: o.Pods, ConfigMaps: o.Settings.ConfigMaps()})
	a := &Agent{
		node: o.Node, client: o.Client, kubelet: o.Kubelet, settings: o.Settings, clock: c, metrics: o.Metrics, alive: o.Alive, log: o.Log,
		events: events.Recorder{To: o.Events},
		sets:   holders.NewDaemonSets(o.Client, c),
		marks: fence.Fence{
			Taint: state.FenceTaint(), StartupKeys: o.Settings.StartupTaints().Keys(), JournalKey: config.AnnotationJournal, KeepCordonedKey: config.AnnotationKeepCordoned,
		},
		edited:    o.Edited,
		objects:   objects,
		nodes:     nodewrite.Writer{Client: o.Client, Timeout: o.Settings.Timeouts.APICall, Saw: objects.SawNode, Startup: o.Settings.StartupTaints()},
		wakes:     &wake.Sources{Client: o.Client, Objects: objects, Driver: o.Driver, Clock: c, Log: o.Log},
		record:    &hostrecord.Keeper{Store: o.Record, Log: o.Log.Named("record")},
		budget:    budget.New(c, o.Settings),
		processes: &processes.Finder{Processes: o.Processes, Settings: o.Settings, Clock: c},
		change:    &measure.Change{},
	}
	a.ledger = &ledger.Ledger{Record: a.record, Nodes: a.nodes, Fence: a.marks, Units: o.Settings.Units, Clock: c}
	a.addSteps(o)
	a.addDecisions(o)
	a.teller = &tell.Teller{
		Node: o.Node, Nodes: a.nodes, Ledger: a.ledger, Record: a.record, Settings: o.Settings, Events: a.events, Metrics: o.Metrics, Wall: o.Clock,
		Clock: c, Log: o.Log, Sources: o.Sources,
	}
	a.addParts(o)
	return a
}

// addSteps makes the packages that perform steps, each after those that it depends on.
func (a *Agent) addSteps(o Options) {
	evictor := drain.NewEvictor(o.Client, a.clock, o.Log.Named("drain"))
	evictor.Again, a.sets.Again = retried.Do, retried.Do
	a.draining = &draining.Draining{
		Node: o.Node, Nodes: a.nodes, Evictor: evictor, Wakes: a.wakes, Budget: a.budget, Metrics: o.Metrics, Settings: o.Settings, Events: a.events, Clock: a.clock,
	}
	a.devicePlugin = &deviceplugin.Plugin{
		Objects: a.objects, Processes: o.Processes, Configs: o.Plugin,
		File:     pluginfile.New(cmp.Or(o.PluginFile, o.Settings.DevicePlugin.ConfigFile), o.Settings.DevicePlugin.ConfigFile),
		Settings: o.Settings, Clock: a.clock, Log: o.Log,
	}
	a.handover = &handover.Handover{Plugin: a.devicePlugin, Client: o.Client, Nodes: a.nodes, Draining: a.draining, Budget: a.budget}
	a.units = &units.Units{
		Systemd: o.Units, Settings: o.Settings, Budget: a.budget, Ledger: a.ledger, Events: a.events, Clock: a.clock, Log: o.Log,
	}
	a.rebooter = &reboot.Rebooter{
		Node: o.Node, Host: o.Host, Kernel: &host.Kernel{Proc: o.Processes.Root}, Sentinel: &sentinel.File{Path: o.Settings.Reboot.Sentinel},
		Settings: o.Settings, Ledger: a.ledger, Events: a.events, Clock: a.clock, Log: o.Log,
	}
	a.hardware = &hardware.GPUs{
		Driver: o.Driver, Specs: o.Specs, Draining: a.draining, Processes: a.processes, Rebooter: a.rebooter, Budget: a.budget, Ledger: a.ledger,
		Settings: o.Settings, Log: o.Log,
	}
	a.publisher = &publish.Publisher{Nodes: a.nodes, Record: a.record, Ledger: a.ledger, Clock: a.clock}
	a.prover = &proving.Prover{
		Nodes: a.nodes, DevicePlugin: a.devicePlugin, Settings: o.Settings, Events: a.events, Clock: a.clock, Log: o.Log,
	}
	a.objects.Due = a.prover.LastLookDue
	a.turn = &slot.Turn{
		Slots: &fleet.Slots{
			Client: o.Client, Namespace: o.Settings.Maintenance.Namespace, Clock: a.clock, Timeout: o.Settings.Timeouts.APICall, Log: o.Log.Named("fleet"),
			Startup: o.Settings.StartupTaints(),
		},
		Namespace: o.Settings.Maintenance.Namespace, Clock: a.clock, Log: o.Log,
	}
	a.fencing = &fencing.Fencing{
		Nodes: a.nodes, Fence: a.marks, Ledger: a.ledger, Record: a.record, Turn: a.turn, Draining: a.draining, Processes: a.processes,
		Handover: a.handover, Change: a.change, Budget: a.budget, Events: a.events, Clock: a.clock,
	}
	a.upgrades = &upgrade.Watch{
		Node: o.Node, Nodes: a.nodes, Driver: o.Driver, Fence: a.marks, Fencing: a.fencing, Settings: o.Settings, Events: a.events, Clock: a.clock,
		Log: o.Log,
	}
	a.taint = &remedy.Taint{Nodes: a.nodes, Effect: o.Settings.Health.Taint, Tell: a.events.Of(o.Node), Clock: a.clock, Log: o.Log}
}

// addDecisions makes the packages that find the desired state, and those that say whether a change may begin now.
func (a *Agent) addDecisions(o Options) {
	a.leftovers = &leftovers.Finder{Record: a.record, Settings: o.Settings, Clock: a.clock}
	a.resolver = &resolve.Resolver{Parse: o.Parse, DevicePlugin: a.devicePlugin, Settings: o.Settings}
	a.files = &files.Files{Objects: a.objects, Settings: o.Settings}
	a.gates = &gate.Gate{Settings: o.Settings, Wall: o.Clock, Clock: a.clock}
}

// addParts makes the parts, and the teller that reports on them. A new part is one line here.
func (a *Agent) addParts(o Options) {
	owners := occupants.Finder{Processes: o.Processes, ComputesForOthers: a.devicePlugin.ServesMPS, Log: o.Log.Named("occupants")}
	a.parts = part.All{
		memory.New(memory.Options{Limits: o.Settings.MemoryPressure, Snapshot: a.hardware.Snapshot, Owners: owners, Tell: a.events.Podf, Clock: a.clock}),
	}
	if o.Usage != nil {
		beside := owners
		beside.Processes = holders.Processes{Root: o.Processes.Root, Lanes: &holders.Lanes{}} // a look that hangs there holds up no pass
		a.parts = append(a.parts, idle.New(idle.Options{
			Settings: o.Settings.Idle, Reader: o.Usage, Owners: beside, Tell: a.events.Podf, Clock: o.Clock, Log: o.Log.Named("idle"),
		}))
	}
	if o.Health.Driver != nil {
		a.parts = append(a.parts, health.New(health.Options{
			Sources: o.Health, Settings: o.Settings.Health, Boot: a.rebooter.Kernel.Boot, Write: a.teller.Write, TellNode: a.events.Of(o.Node),
			TellPod: a.events.Podf, ComputesForOthers: a.devicePlugin.ServesMPS, Clock: o.Clock, Log: o.Log.Named("health"),
		}))
	}
	a.resets = &remedy.Resets{Parts: a.parts, Clock: a.clock, Began: a.clock.Now()}
	collectors := make([]prometheus.Collector, len(a.parts))
	for i, p := range a.parts {
		collectors[i] = p
		a.teller.Sources = append(a.teller.Sources, p)
		if w, watches := p.(part.DriverWatcher); watches {
			a.hardware.Driver, a.wakes.Driver = w.Through(a.hardware.Driver), nil
		}
	}
	a.metrics.TakeOver(collectors)
}
