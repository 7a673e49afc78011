// Package agent keeps the GPUs of one node as the node's labels ask.
//
// It observes the node, lets agent/plan decide, performs at most one step, reports, and looks again. It owns the loop,
// the journal and everything that is written to the node object. It knows no NVIDIA library and no file format: the
// driver and the parser are handed in.
package agent

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/alive"
	"github.com/gpuslice/gpuslice/agent/fleet"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/pluginfile"
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
)

// FieldManager names the agent in the managedFields of what it writes.
const FieldManager = "gpuslice-agent"

// Kubelet answers which pod was given which device, and what may still be given out.
type Kubelet interface {
	Assignments(ctx context.Context) (holders.Assignments, error)
	Allocatable(ctx context.Context) (map[string][]string, error)
}

// Host answers for the machine below the node. All of it may be missing: host.ErrNoLogind.
type Host interface {
	// Inhibit keeps the host from shutting down until release is called. Once it is shutting down it is
	// host.ErrShuttingDown.
	Inhibit(ctx context.Context, why string) (release func(), err error)
	CanReboot(ctx context.Context) error
	Reboot(ctx context.Context) error
}

// Units are the units of the host's systemd. All of it may be missing: host.ErrNoSystemd.
type Units interface {
	// States gives the active state of each unit that the host has.
	States(ctx context.Context, names []string) (map[string]string, error)
	// Stop and Start wait for the unit's job as long as ctx lasts; host.ErrJobRunning if it goes on after that.
	Stop(ctx context.Context, name string) error
	Start(ctx context.Context, name string) error
}

// Specs are the CDI specs that tell container runtimes what GPUs and instances there are.
type Specs interface {
	// Stale names the specs that describe other instances than those that stand. Where no spec is in use there are none.
	Stale(ctx context.Context, gpus []nvml.GPU) ([]string, error)
	// Write writes those anew, each as a whole or not at all.
	Write(ctx context.Context, gpus []nvml.GPU) error
}

// Options is what an Agent works with.
type Options struct {
	Node      string // name of the node it runs on; it never touches another
	Client    kubernetes.Interface
	Driver    nvml.Driver
	Kubelet   Kubelet
	Host      Host
	Units     Units
	Specs     Specs
	Record    Records
	Processes holders.Processes
	Parse     func(data []byte) (map[string]config.MIGConfig, error) // reads a file in mig-parted's format
	Plugin    PluginConfigs
	// PluginFile is where this process sees the device plugin's config file; empty where the host does, by the settings.
	PluginFile string
	Settings   config.Settings
	Clock      clock.WithTicker
	Events     record.EventRecorder
	Metrics    *Metrics    // may be nil
	Alive      *alive.Loop // may be nil
	Log        *zap.Logger
}

// Agent keeps one node as its labels ask.
type Agent struct {
	node      string
	client    kubernetes.Interface
	driver    nvml.Driver
	kubelet   Kubelet
	host      Host
	units     Units
	specs     Specs
	kept      *hostRecord
	processes holders.Processes
	kernel    *host.Kernel
	sentinel  *sentinel
	parse     func(data []byte) (map[string]config.MIGConfig, error)
	settings  config.Settings

	pluginConfigs PluginConfigs
	pluginFile    *pluginfile.File

	wall    clock.PassiveClock // the host's, for windows alone
	clock   *steady
	slots   *fleet.Slots
	events  record.EventRecorder
	metrics *Metrics
	alive   *alive.Loop
	log     *zap.Logger
	evictor *drain.Evictor
	sets    *holders.DaemonSets
	fence   fence.Fence

	// All of the following may be lost at any moment: after a restart it is gathered anew.

	attempts     map[string]attempt   // of steps that fail
	done         map[string]int       // how often each step on the hardware has succeeded since a step of another kind
	unpicked     unpicked             // configs of the device plugin that nothing asks for
	agreed       int                  // looks in a row at which the capacity was right
	agreedAt     time.Time            // the last of them
	verifying    time.Time            // when the present wait for capacity began
	specFailures int                  // of writing CDI specs, in a row
	specTrouble  string               // why CDI specs could not be looked at, the last time
	logindNext   time.Time            // a logind that has not answered is not asked before
	systemdNext  time.Time            // the same of systemd
	foundFree    map[string]time.Time // when the process table was last seen to have no holder of the device, which goes
	started      map[string]start     // units of the host that were started again
	startedNext  time.Time            // they are not asked after before
	migManagerAt time.Time            // when a mig-manager was last seen here; before the first look, nobody knows
	strangers    told                 // who holds what is to go, and is of no pod
	waits        map[string]time.Time // when the waits began that have a time of their own, by what is waited for
	budgets      chan map[string]bool // namespaces of disruption budgets that are in the way
	staleSince   time.Time            // when labels of GPU feature discovery were first seen to lag behind the change
	nudged       bool                 // the device plugin was started anew, for want of capacity
	rebooting    bool                 // this process has asked logind for a reboot
	boot         string               // of the host, as it was last read
	bootTrouble  string               // why it could not be read, the last time
	busy         bool                 // the last look has found a change under way
	toldReaders  map[types.UID]string // who was told to read the device plugin's config file, and a hash of what it said then
	upgrading    time.Time            // since when labels say that the driver is being upgraded
	replaced     bool                 // the driver is another one than this process has loaded
	memory       *memory              // of what pods share
	claim        string               // operation for which a slot of the pool was taken
	full         *fleet.Full          // what people were told of why the node waits for one
	fullAt       time.Time            // and when
	learnt       *Status              // what the node was told for good at the end of a change, until the next word
	touchedAt    time.Time            // when the change that is under way first touched a GPU
	provenAt     time.Time            // when it was first seen to be done
	overran      string               // operation of which people know that it goes on beyond its window
	residents    residents            // who may be on it
	toldDropped  map[string]string    // units that are not started, as people were told
}

// New makes an Agent. Nothing happens before Run.
func New(o Options) *Agent {
	steady := newSteady(o.Clock)
	evictor := drain.NewEvictor(o.Client, steady, o.Log.Named("drain"))
	evictor.Again = retried.Do
	if o.Processes.Lanes == nil {
		o.Processes.Lanes = &holders.Lanes{}
	}
	return &Agent{
		node: o.Node, client: o.Client, driver: o.Driver, kubelet: o.Kubelet, parse: o.Parse, settings: o.Settings,
		host: o.Host, units: o.Units, specs: o.Specs, kept: &hostRecord{store: o.Record, log: o.Log.Named("record")},
		processes: o.Processes, kernel: &host.Kernel{Proc: o.Processes.Root}, sentinel: &sentinel{path: o.Settings.Reboot.Sentinel},
		wall: o.Clock, clock: steady, events: events{o.Events}, metrics: o.Metrics, alive: o.Alive, log: o.Log,
		memory: newMemory(o.Settings.MemoryPressure), evictor: evictor,
		sets: holders.NewDaemonSets(o.Client, steady),
		slots: &fleet.Slots{
			Client: o.Client, Namespace: o.Settings.Maintenance.Namespace, Clock: steady, Timeout: o.Settings.Timeouts.APICall, Log: o.Log.Named("fleet"),
		},
		fence: fence.Fence{
			Taint:           corev1.Taint{Key: config.TaintRepartitioning, Effect: corev1.TaintEffectNoSchedule},
			StartupKey:      config.TaintNotReady,
			JournalKey:      config.AnnotationJournal,
			KeepCordonedKey: config.AnnotationKeepCordoned,
		},
		pluginConfigs: o.Plugin,
		pluginFile:    pluginfile.New(cmp.Or(o.PluginFile, o.Settings.DevicePlugin.ConfigFile), o.Settings.DevicePlugin.ConfigFile),
		attempts:      map[string]attempt{}, done: map[string]int{}, waits: map[string]time.Time{}, started: map[string]start{}, foundFree: map[string]time.Time{},
	}
}

// Run keeps the node as desired until ctx ends. A step that has begun is brought to its end first. The error is
// nvml.ErrReplaced: NVIDIA's driver is another one than this process has loaded, and only a new process can go on.
func (a *Agent) Run(ctx context.Context) error {
	wake := a.watch(ctx)
	a.begin()
	a.log.Info("watching", zap.String("node", a.node))
	for ctx.Err() == nil {
		// Cutting a step off in the middle gains nothing: each has a deadline, and a restart resumes anyway.
		a.alive.Begin()
		next := a.pass(context.WithoutCancel(ctx))
		a.alive.End(next)
		a.metrics.passed()
		if a.replaced {
			a.log.Info("the driver was replaced", zap.String("node", a.node))
			return nvml.ErrReplaced
		}
		a.rest(ctx, wake, a.settle(ctx, next))
	}
	a.log.Info("stopping", zap.String("node", a.node))
	return nil
}

// settleTime is the least time between two passes of a node at which nothing is being done. Others may write to the node and its pods
// many times in a second, and each pass reads both.
const settleTime = time.Second

// settle waits for that time, whatever wakes the loop meanwhile, and returns what is left of the rest. What is being done is not slowed down
// by it, nor what is to be tried again sooner.
func (a *Agent) settle(ctx context.Context, rest time.Duration) time.Duration {
	if a.busy || rest <= 0 {
		return rest
	}
	pause := min(rest, settleTime+rand.N(settleTime/4)) // many nodes must not come at once
	timer := a.clock.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C():
	}
	return rest - pause
}

// begin notes what a new process cannot know: a mig-manager may have been here a moment ago.
func (a *Agent) begin() { a.migManagerAt = a.clock.Now() }

// pass observes, decides, and performs at most one step. It returns how long the loop may sleep.
// It is safe to be killed anywhere inside it.
func (a *Agent) pass(ctx context.Context) time.Duration {
	seen, err := a.observe(ctx)
	a.busy = seen.journal != nil
	a.answer(ctx, seen, err)
	if err != nil {
		a.giveWay(ctx, seen)
		if j := seen.journal; j != nil && (j.Cordoned || len(j.Paused) > 0) { // the pool does without the node all the same
			a.renewSlot(ctx, seen)
		}
		return a.conclude(ctx, seen, wish{}, nil, err)
	}
	delete(a.attempts, look.String())
	a.tidyRecord(ctx, seen)
	a.setClock(seen)
	a.renewSlot(ctx, seen)
	a.withdrawReboot(ctx, seen)
	want, steps, err := a.plan(ctx, &seen)
	if err == nil && len(steps) > 0 {
		err = a.execute(ctx, seen, want, steps)
		want, steps, err = a.meanwhile(ctx, seen, want, steps, err)
	}
	return a.conclude(ctx, seen, want, steps, err)
}

// meanwhile begins to give back what an agent has left on the node without a journal, where the change that would give it back has to
// wait itself: for a window that may be days.
func (a *Agent) meanwhile(ctx context.Context, seen observed, want wish, steps []plan.Step, err error) (wish, []plan.Step, error) {
	var wait *Waiting
	// Where nobody knows whose the cordon is, only our taint says that it is ours.
	taint := seen.fenced && (!seen.node.Spec.Unschedulable || seen.foreignCordon())
	if seen.journal != nil || !seen.orphan.is() && !taint || !errors.As(err, &wait) {
		return want, steps, err
	}
	rest, failed := a.clearAway(ctx, &seen, want, err)
	if failed != nil {
		return want, steps, err
	}
	want.left = seen.putOff(want, wait.Reason, "what an agent has left is given back first, and "+wait.Message)
	return want, rest, a.execute(ctx, seen, want, rest)
}

// setClock follows a step of the host's clock when nothing is under way that a deadline counts for. What was remembered by the clock
// of before is forgotten, as by a new process.
func (a *Agent) setClock(seen observed) {
	if seen.journal != nil {
		return
	}
	step := a.clock.step()
	if step == 0 {
		return
	}
	a.log.Info("the host's clock was set", zap.Duration("by", step))
	clear(a.attempts)
	clear(a.waits)
	clear(a.started)
	clear(a.foundFree)
	a.verifying, a.agreedAt, a.staleSince = time.Time{}, time.Time{}, time.Time{}
	a.logindNext, a.systemdNext, a.startedNext = time.Time{}, time.Time{}, time.Time{}
	a.strangers, a.full, a.touchedAt, a.provenAt, a.agreed = told{}, nil, time.Time{}, time.Time{}, 0
	a.slots.Forget()
	a.begin()
}

// plan lists the steps to what the labels ask for; or, where that cannot be and something was begun already, the steps
// back to what was before.
func (a *Agent) plan(ctx context.Context, seen *observed) (wish, []plan.Step, error) {
	want, err := a.desired(ctx, seen)
	a.prove(seen, want.plugin)
	var steps []plan.Step
	if err == nil {
		want.keepForeign(seen.journal)
		steps, err = a.steps(ctx, seen, want, want.targets)
	}
	switch {
	case isUnseen(err):
		return want, nil, err
	case err == nil && a.calledOff(*seen, want, steps):
		return want, nil, seen.cancelled(want)
	case err != nil && seen.journal == nil:
		steps, err = a.clearAway(ctx, seen, want, err)
		return want, steps, err
	case seen.journal == nil || err == nil && !seen.givenUp(want):
		return want, steps, err
	case errors.Is(err, plan.ErrStillPending) && seen.journal.Undo == nil:
		return want, nil, &Failure{Wish: want.fingerprint, Reason: config.ReasonNeedsReboot, Message: err.Error()}
	}
	want.undo, want.why, want.plugin = true, err, a.former(seen)
	a.prove(seen, want.plugin)
	if a.specFailures >= a.settings.Retry.Failures { // on the way back they keep no node
		seen.specs = nil
	}
	steps, err = a.steps(ctx, seen, want, seen.journal.previous(seen.gpus))
	return want, steps, err
}

// clearAway plans to give back what an agent has left, where what is asked for cannot be: that is no reason to keep it.
func (a *Agent) clearAway(ctx context.Context, seen *observed, want wish, err error) ([]plan.Step, error) {
	if !seen.orphan.is() && !seen.fenced && !seen.slot.Held && !seen.slot.Waiting {
		return nil, err
	}
	want.plugin, want.keys = nil, nil
	steps, planning := a.steps(ctx, seen, want, nil)
	if planning != nil || len(steps) == 0 {
		return nil, err
	}
	return steps, nil
}

// calledOff reports whether somebody has lifted our cordon while pods and GPUs are still to be touched. After that it hurts
// nobody: what is left is proof. What was asked for since is not meant by it, and gets a cordon of its own.
func (a *Agent) calledOff(seen observed, want wish, steps []plan.Step) bool {
	changes := plan.Disrupts(steps) || plan.Has(steps, plan.Create)
	return a.settingsFor(want).Drain.OnUncordon == config.UncordonCancel && seen.uncordoned() && changes && !seen.other(want) && !seen.givenUp(want)
}

// cancelled is the end of a change whose cordon somebody else has lifted. Kubectl leaves no name when it does.
func (s observed) cancelled(want wish) *Failure {
	text := "somebody has uncordoned the node"
	who, when := fence.Uncordoner(s.node, FieldManager)
	if !when.IsZero() {
		text += " at " + moment(when)
	}
	if who != "" {
		text += " (perhaps " + who + ", which wrote to it then)"
	}
	return &Failure{
		Wish: want.fingerprint, Reason: config.ReasonCancelled, Message: text + " in the middle of the change, which calls it off",
	}
}
