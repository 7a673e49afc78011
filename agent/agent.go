// Package agent keeps the GPUs of one node as the node's labels ask.
//
// It observes the node, lets agent/plan decide, performs at most one step, reports, and looks again. It owns the loop and
// everything that is written to the node object. What needs neither is in packages below it: the plan, the journal, the
// comparison of capacity, the parts that watch something besides. It knows no NVIDIA library and no file format: the driver
// and the parser are handed in.
package agent

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/alive"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/budget"
	"github.com/gpuslice/gpuslice/agent/capacity"
	"github.com/gpuslice/gpuslice/agent/fleet"
	"github.com/gpuslice/gpuslice/agent/hostrecord"
	"github.com/gpuslice/gpuslice/agent/memory"
	"github.com/gpuslice/gpuslice/agent/metrics"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/pluginfile"
	"github.com/gpuslice/gpuslice/agent/retried"
	"github.com/gpuslice/gpuslice/agent/sentinel"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/steady"
	"github.com/gpuslice/gpuslice/agent/wake"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
)

// Kubelet answers which pod was given which device, and what may still be given out.
type Kubelet interface {
	Assignments(ctx context.Context) (holders.Assignments, error)
	Allocatable(ctx context.Context) (map[string][]string, error)
}

// Pods lists the pods of the node, as the API server has them now.
type Pods interface {
	List(ctx context.Context) ([]corev1.Pod, error)
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
	Pods      Pods
	Kubelet   Kubelet
	Host      Host
	Units     Units
	Specs     Specs
	Record    hostrecord.Store
	Processes holders.Processes
	Parse     func(data []byte) (map[string]config.MIGConfig, error) // reads a file in mig-parted's format
	Plugin    PluginConfigs
	// PluginFile is where this process sees the device plugin's config file; empty where the host does, by the settings.
	PluginFile string
	Settings   config.Settings
	Clock      clock.WithTicker
	Events     record.EventRecorder
	Metrics    *metrics.Set // may be nil
	Alive      *alive.Loop  // may be nil
	Log        *zap.Logger
}

// Agent keeps one node as its labels ask.
type Agent struct {
	node     string
	client   kubernetes.Interface
	nodes    nodewrite.Writer
	driver   nvml.Driver
	podList  Pods
	kubelet  Kubelet
	parse    func(data []byte) (map[string]config.MIGConfig, error)
	settings config.Settings
	wall     clock.PassiveClock // the host's, for windows alone
	clock    *steady.Clock
	events   record.EventRecorder
	metrics  *metrics.Set
	alive    *alive.Loop
	log      *zap.Logger

	evictor  *drain.Evictor
	sets     *holders.DaemonSets
	fence    fence.Fence
	sentinel *sentinel.File

	// Each part keeps what it remembers. All of that may be lost at any moment: after a restart it is gathered anew.

	record       *hostrecord.Keeper
	budget       budget.Budget
	clients      clients
	systemd      systemd
	logind       logind
	boots        boots
	cdi          cdi
	plugin       plugin
	leftovers    leftovers
	upgrade      upgrade
	proof        capacity.Proof
	verification verification
	turn         turn
	times        times
	wakes        *wake.Sources

	parts []Part

	busy     bool // the last look has found a change under way
	replaced bool // the driver is another one than this process has loaded
}

// Part watches something of the node besides the change, and tells of it by conditions of its own, by Events and by metrics.
type Part interface {
	// Look takes a look, in each pass that has seen all of the node.
	Look(ctx context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod)
	// LookAgain takes a look between two passes, and reports whether there is something to tell.
	LookAgain(ctx context.Context) bool
	// Conditions are those that differ from what the node shows, or, on beat, all. Complete means that all of the node was seen; silent is
	// why nothing can be said of the GPUs, or empty.
	Conditions(node *corev1.Node, complete bool, silent string, beat bool) []corev1.NodeCondition
	// Forget drops what depends on times that the clock gave.
	Forget(now time.Time)
	prometheus.Collector
}

// forgetter remembers by the clock.
type forgetter interface {
	// Forget drops what depends on times that the clock gave, as if the process began now.
	Forget(now time.Time)
}

// forgetters are all of them.
func (a *Agent) forgetters() []forgetter {
	return []forgetter{
		&a.budget, &a.clients, &a.systemd, &a.logind, &a.plugin, &a.leftovers, &a.upgrade, &a.proof, &a.verification, &a.turn, &a.times,
	}
}

// New makes an Agent. Nothing happens before Run.
func New(o Options) *Agent {
	c := steady.New(o.Clock)
	evictor := drain.NewEvictor(o.Client, c, o.Log.Named("drain"))
	evictor.Again = retried.Do
	if o.Processes.Lanes == nil {
		o.Processes.Lanes = &holders.Lanes{}
	}
	a := &Agent{
		node: o.Node, client: o.Client, nodes: nodewrite.Writer{Client: o.Client, Timeout: o.Settings.Timeouts.APICall}, driver: o.Driver, podList: o.Pods, kubelet: o.Kubelet, parse: o.Parse, settings: o.Settings,
		wall: o.Clock, clock: c, events: events{o.Events}, metrics: o.Metrics, alive: o.Alive, log: o.Log,
		evictor: evictor, sets: holders.NewDaemonSets(o.Client, c), sentinel: &sentinel.File{Path: o.Settings.Reboot.Sentinel},
		fence: fence.Fence{
			Taint:           state.FenceTaint(),
			StartupKey:      config.TaintNotReady,
			JournalKey:      config.AnnotationJournal,
			KeepCordonedKey: config.AnnotationKeepCordoned,
		},
		record:  &hostrecord.Keeper{Store: o.Record, Log: o.Log.Named("record")},
		budget:  budget.New(c),
		wakes:   &wake.Sources{Client: o.Client, Node: o.Node, Settings: o.Settings, Driver: o.Driver, Clock: c, Log: o.Log},
		clients: clients{processes: o.Processes, foundFree: map[string]time.Time{}},
		systemd: systemd{units: o.Units, started: map[string]start{}},
		logind:  logind{host: o.Host},
		boots:   boots{kernel: &host.Kernel{Proc: o.Processes.Root}},
		cdi:     cdi{specs: o.Specs},
		plugin: plugin{
			configs: o.Plugin,
			file:    pluginfile.New(cmp.Or(o.PluginFile, o.Settings.DevicePlugin.ConfigFile), o.Settings.DevicePlugin.ConfigFile),
		},
		turn: turn{slots: &fleet.Slots{
			Client: o.Client, Namespace: o.Settings.Maintenance.Namespace, Clock: c, Timeout: o.Settings.Timeouts.APICall, Log: o.Log.Named("fleet"),
		}},
	}
	a.parts = []Part{
		memory.New(memory.Options{
			Limits: o.Settings.MemoryPressure, Snapshot: a.snapshot, Processes: o.Processes, ComputesForOthers: a.servesMPS, Tell: a.podEventf,
			Clock: c, Log: o.Log.Named("memory"),
		}),
	}
	collectors := make([]prometheus.Collector, len(a.parts))
	for i, part := range a.parts {
		collectors[i] = part
	}
	a.metrics.TakeOver(collectors)
	return a
}

// Run keeps the node as desired until ctx ends. A step that has begun is brought to its end first. The error is
// nvml.ErrReplaced: NVIDIA's driver is another one than this process has loaded, and only a new process can go on.
func (a *Agent) Run(ctx context.Context) error {
	wake := a.wakes.Watch(ctx)
	a.begin()
	a.log.Info("watching", zap.String("node", a.node))
	for ctx.Err() == nil {
		// Cutting a step off in the middle gains nothing: each has a deadline, and a restart resumes anyway.
		a.alive.Begin()
		next := a.pass(context.WithoutCancel(ctx))
		a.alive.End(next)
		a.metrics.Passed()
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

// partsLook is the time between two looks of the parts. A program fills a GPU within seconds, but what matters is one that stays full, and a
// look takes the driver some ten calls a GPU.
const partsLook = 15 * time.Second

// rest waits for the next pass: until something wakes it, at most for d. Meanwhile the parts look, which takes nothing of the API server; it
// ends when one has something to tell.
func (a *Agent) rest(ctx context.Context, wake <-chan struct{}, d time.Duration) {
	timer := a.clock.NewTimer(d)
	defer timer.Stop()
	looks := a.clock.NewTicker(partsLook)
	defer looks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-wake:
			return
		case <-timer.C():
			return
		case <-looks.C():
		}
		if slices.ContainsFunc(a.parts, func(p Part) bool { return p.LookAgain(context.WithoutCancel(ctx)) }) {
			return
		}
	}
}

// begin notes what a new process cannot know.
func (a *Agent) begin() { a.leftovers.Forget(a.clock.Now()) }

// pass observes, decides, and performs at most one step. It returns how long the loop may sleep.
// It is safe to be killed anywhere inside it.
func (a *Agent) pass(ctx context.Context) time.Duration {
	seen, err := a.observe(ctx)
	a.busy = seen.Journal != nil
	a.answer(ctx, seen, err)
	if failed := a.followUpgrade(ctx, seen); failed != nil {
		err = failed
	}
	if err != nil {
		a.giveWay(ctx, seen)
		if j := seen.Journal; j != nil && (j.Cordoned || len(j.Paused) > 0) { // the pool does without the node all the same
			a.renewSlot(ctx, seen)
		}
		return a.conclude(ctx, seen, state.Desired{}, nil, err)
	}
	delete(a.budget.Attempts, noStep)
	a.follow(ctx, seen)
	a.tidyRecord(ctx, seen)
	a.setClock(seen)
	a.renewSlot(ctx, seen)
	a.withdrawReboot(ctx, seen)
	want, steps, err := a.plan(ctx, &seen)
	a.proof = seen.Capacity.Proof
	if err == nil && len(steps) > 0 {
		err = a.execute(ctx, seen, want, steps)
		want, steps, err = a.cleanUpWhileWaiting(ctx, seen, want, steps, err)
	}
	return a.conclude(ctx, seen, want, steps, err)
}

// follow takes over what the look has found for the parts that remember it.
func (a *Agent) follow(ctx context.Context, seen state.Observed) {
	if seen.Leftovers.MIGManager {
		a.leftovers.migManagerAt = a.clock.Now()
	}
	for _, part := range a.parts {
		part.Look(ctx, seen.Node, seen.GPUs, seen.Pods, seen.Holders.Pods)
	}
	a.followStarted(seen)
}

// cleanUpWhileWaiting restores now what an earlier agent has left without a journal, if the change that would restore it must wait, perhaps
// for days.
func (a *Agent) cleanUpWhileWaiting(ctx context.Context, seen state.Observed, want state.Desired, steps []plan.Step, err error) (state.Desired, []plan.Step, error) {
	var wait *outcome.Waiting
	// Where nobody knows whose the cordon is, only our taint says that it is ours.
	taint := seen.Marks.Fenced && (!seen.Node.Spec.Unschedulable || seen.ForeignCordon())
	if seen.Journal != nil || !seen.Leftovers.Orphan.Is() && !taint || !errors.As(err, &wait) {
		return want, steps, err
	}
	rest, failed := a.clearAway(ctx, &seen, want, err)
	if failed != nil {
		return want, steps, err
	}
	want.Left = seen.PutOff(want, wait.Reason, "what an agent has left is given back first, and "+wait.Message)
	return want, rest, a.execute(ctx, seen, want, rest)
}

// setClock follows a step of the host's clock when nothing is under way that a deadline counts for. What was remembered by the clock
// of before is forgotten, as by a new process.
func (a *Agent) setClock(seen state.Observed) {
	if seen.Journal != nil {
		return
	}
	step := a.clock.Step()
	if step == 0 {
		return
	}
	a.log.Info("the host's clock was set", zap.Duration("by", step))
	for _, part := range a.forgetters() {
		part.Forget(a.clock.Now())
	}
	for _, part := range a.parts {
		part.Forget(a.clock.Now())
	}
}

// plan lists the steps to what the labels ask for; or, where that cannot be and something was begun already, the steps
// back to what was before.
func (a *Agent) plan(ctx context.Context, seen *state.Observed) (state.Desired, []plan.Step, error) {
	want, err := a.resolve(ctx, seen)
	a.prove(seen, want.Plugin)
	var steps []plan.Step
	if err == nil {
		want.KeepForeign(seen.Journal)
		steps, err = a.steps(ctx, seen, want, want.Targets)
	}
	switch {
	case outcome.IsUnseen(err):
		return want, nil, err
	case err == nil && a.calledOff(*seen, want, steps):
		return want, nil, seen.Cancelled(want)
	case err != nil && seen.Journal == nil:
		steps, err = a.clearAway(ctx, seen, want, err)
		return want, steps, err
	case seen.Journal == nil || err == nil && !seen.GivenUp(want):
		return want, steps, err
	case errors.Is(err, plan.ErrStillPending) && seen.Journal.Undo == nil:
		return want, nil, &api.Failure{Wish: want.Fingerprint, Reason: config.ReasonNeedsReboot, Message: err.Error()}
	}
	want.Undo, want.UndoCause, want.Plugin = true, err, a.former(seen)
	a.prove(seen, want.Plugin)
	if a.cdi.failures >= a.settings.Retry.Failures { // on the way back they keep no node
		seen.Specs = nil
	}
	steps, err = a.steps(ctx, seen, want, seen.Journal.Targets(seen.GPUs))
	return want, steps, err
}

// clearAway plans to give back what an agent has left, where what is asked for cannot be: that is no reason to keep it.
func (a *Agent) clearAway(ctx context.Context, seen *state.Observed, want state.Desired, err error) ([]plan.Step, error) {
	if !seen.Leftovers.Orphan.Is() && !seen.Marks.Fenced && !seen.Pool.Slot.Held && !seen.Pool.Slot.Waiting {
		return nil, err
	}
	want.Plugin, want.Keys = nil, nil
	steps, planning := a.steps(ctx, seen, want, nil)
	if planning != nil || len(steps) == 0 {
		return nil, err
	}
	return steps, nil
}

// calledOff reports whether somebody has lifted our cordon while pods and GPUs are still to be touched. After that it hurts
// nobody: what is left is proof. What was asked for since is not meant by it, and gets a cordon of its own.
func (a *Agent) calledOff(seen state.Observed, want state.Desired, steps []plan.Step) bool {
	changes := plan.Disrupts(steps) || plan.Has(steps, plan.Create)
	return a.settingsFor(want).Drain.OnUncordon == config.UncordonCancel && seen.Uncordoned() && changes && !seen.Other(want) && !seen.GivenUp(want)
}
