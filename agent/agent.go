// Package agent keeps the GPUs of one node as the node's labels ask.
//
// It observes the node, lets agent/plan decide, performs at most one step, reports, and looks again. It owns the loop,
// the journal and everything that is written to the node object. It knows no NVIDIA library and no file format: the
// driver and the parser are handed in.
package agent

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/nvml"
)

// FieldManager names the agent in the managedFields of what it writes.
const FieldManager = "gpuslice-agent"

// Kubelet answers which pod was given which device, and what may still be given out.
type Kubelet interface {
	Assignments(ctx context.Context) (drain.Assignments, error)
	Allocatable(ctx context.Context) (map[string][]string, error)
}

// Host answers for the machine below the node. All of it may be missing: drain.ErrNoLogind.
type Host interface {
	// Inhibit keeps the host from shutting down until release is called. Once it is shutting down it is
	// drain.ErrShuttingDown.
	Inhibit(ctx context.Context, why string) (release func(), err error)
	CanReboot(ctx context.Context) error
	Reboot(ctx context.Context) error
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
	Specs     Specs
	Processes drain.Processes
	Parse     func(data []byte) (map[string]config.MIGConfig, error) // reads a file in mig-parted's format
	Settings  config.Settings
	Clock     clock.WithTicker
	Events    record.EventRecorder
	Log       *zap.Logger
}

// Agent keeps one node as its labels ask.
type Agent struct {
	node      string
	client    kubernetes.Interface
	driver    nvml.Driver
	kubelet   Kubelet
	host      Host
	specs     Specs
	processes drain.Processes
	sentinel  sentinel
	parse     func(data []byte) (map[string]config.MIGConfig, error)
	settings  config.Settings
	clock     clock.WithTicker
	events    record.EventRecorder
	log       *zap.Logger
	evictor   *drain.Evictor
	fence     drain.Fence

	// All of the following may be lost at any moment: after a restart it is gathered anew.

	attempts     map[string]attempt // of steps that fail
	done         map[string]int     // how often each step on the hardware has succeeded since a step of another kind
	agreed       int                // looks in a row at which the capacity was right
	agreedAt     time.Time          // the last of them
	verifying    time.Time          // when the present wait for capacity began
	specFailures int                // of writing CDI specs, in a row
	specTrouble  string             // why CDI specs could not be looked at, the last time
	logindNext   time.Time          // a logind that has not answered is not asked before
	rebooting    bool               // this process has asked logind for a reboot
	replaced     bool               // the driver is another one than this process has loaded
}

// New makes an Agent. Nothing happens before Run.
func New(o Options) *Agent {
	return &Agent{
		node: o.Node, client: o.Client, driver: o.Driver, kubelet: o.Kubelet, parse: o.Parse, settings: o.Settings,
		host: o.Host, specs: o.Specs, processes: o.Processes, sentinel: sentinel{path: o.Settings.Reboot.Sentinel},
		clock: o.Clock, events: o.Events, log: o.Log,
		evictor: drain.NewEvictor(o.Client, o.Clock, o.Log.Named("drain")),
		fence: drain.Fence{
			Taint:           corev1.Taint{Key: config.TaintRepartitioning, Effect: corev1.TaintEffectNoSchedule},
			StartupKey:      config.TaintNotReady,
			JournalKey:      config.AnnotationJournal,
			KeepCordonedKey: config.AnnotationKeepCordoned,
		},
		attempts: map[string]attempt{}, done: map[string]int{},
	}
}

// Run keeps the node as desired until ctx ends. A step that has begun is brought to its end first. The error is
// nvml.ErrReplaced: NVIDIA's driver is another one than this process has loaded, and only a new process can go on.
func (a *Agent) Run(ctx context.Context) error {
	wake := a.watch(ctx)
	a.log.Info("watching", zap.String("node", a.node))
	for ctx.Err() == nil {
		// Cutting a step off in the middle gains nothing: each has a deadline, and a restart resumes anyway.
		next := a.pass(context.WithoutCancel(ctx))
		if a.replaced {
			a.log.Info("the driver was replaced", zap.String("node", a.node))
			return nvml.ErrReplaced
		}
		timer := a.clock.NewTimer(next)
		select {
		case <-ctx.Done():
		case <-wake:
		case <-timer.C():
		}
		timer.Stop()
	}
	a.log.Info("stopping", zap.String("node", a.node))
	return nil
}

// pass observes, decides, and performs at most one step. It returns how long the loop may sleep.
// It is safe to be killed anywhere inside it.
func (a *Agent) pass(ctx context.Context) time.Duration {
	seen, err := a.observe(ctx)
	if err != nil {
		return a.conclude(ctx, seen, wish{}, nil, err)
	}
	delete(a.attempts, look.String())
	a.withdrawReboot(seen)
	want, steps, err := a.plan(seen)
	if err == nil && len(steps) > 0 {
		err = a.execute(ctx, seen, want, steps)
	}
	return a.conclude(ctx, seen, want, steps, err)
}

// plan lists the steps to what the labels ask for; or, where that cannot be and something was begun already, the steps
// back to what was before.
func (a *Agent) plan(seen observed) (wish, []plan.Step, error) {
	want, err := a.desired(seen)
	var steps []plan.Step
	if err == nil {
		want.keepForeign(seen.journal)
		steps, err = plan.Make(seen.planned(want), want.targets)
	}
	switch {
	case seen.journal == nil || err == nil && !seen.givenUp(want):
		return want, steps, err
	case errors.Is(err, plan.ErrStillPending) && seen.journal.Undo == nil:
		return want, nil, &Failure{Wish: want.fingerprint, Reason: config.ReasonNeedsReboot, Message: err.Error()}
	}
	want.undo, want.why = true, err
	if a.specFailures >= a.settings.Retry.Failures { // on the way back they keep no node
		seen.specs = nil
	}
	steps, err = plan.Make(seen.planned(want), seen.journal.previous(seen.gpus))
	return want, steps, err
}
