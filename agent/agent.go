// Package agent keeps the GPUs of one node as the node's labels request.
//
// It observes the node. Package agent/decide finds the goal, and agent/plan lists the steps to it. The agent performs at most one step, reports, and
// observes again. It owns the loop; each package below it has one subject, and gets its dependencies in new.go. cmd hands it the driver and the parsers: it
// knows neither NVIDIA's library nor file formats.
package agent

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

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
	"github.com/gpuslice/gpuslice/agent/monitor/remedy"
	"github.com/gpuslice/gpuslice/agent/observe"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/nvml"
)

// Agent keeps one node as its labels request. Its parts remember things in memory: a restart loses them, and the next passes gather them again.
type Agent struct {
	env       act.Env
	observers observers
	deciders  deciders
	actors    actors
	reporters reporters

	monitors monitor.Monitors
	health   monitor.Health   // one of the monitors
	uses     func() []api.Use // how much each pod uses of which GPU or instance, from the monitors

	edited func() (other bool, wrong string) // of the settings; nil if they are in no file

	answered       time.Time // when a request on the node was last answered
	hasObserved    bool      // this process has observed the node once
	resumes        bool      // this process has found a change under way, and has not gone on with it yet
	changeUnderway bool      // the last pass observed a change under way
	driverReplaced bool      // the driver is no longer the one that this process has loaded
}

// observers read the node, the host and the GPUs. Actors read the rest of an observation; observe.go has all of it.
type observers struct {
	client       kube.Interface
	kubelet      Kubelet
	objects      *watch.Objects
	wakes        *watch.Sources
	record       *journal.Keeper
	sets         *holders.DaemonSets
	kernel       *host.Kernel
	processes    *observe.Processes
	claims       *observe.Claims
	leftovers    *observe.Leftovers
	files        *observe.Files
	devicePlugin *deviceplugin.Plugin
	ownership    *observe.Ownership
}

// deciders decide.
type deciders struct {
	resolver *decide.Resolver
	gates    *decide.Gate
	retries  *decide.Retries
}

// actors perform the steps, and do the upkeep. For an observation they read what only they need, or add what they remember: journal, slot, fencing,
// upgrades, units, rebooter, hardware, verifier, rules and resets.
type actors struct {
	journal   *journal.Writer
	slot      *fleet.Slot
	timing    *fencing.Timing
	fencing   *fencing.Fencing
	upgrades  *fencing.UpgradeWatch
	evictions *evict.Evictions
	handover  *plugin.Handover
	units     *units.Units
	rebooter  *reboot.Rebooter
	hardware  *hardware.GPUs
	publisher *nodekeys.Publisher
	verifier  *verify.Verifier
	taint     *remedy.Taint
	rules     *fencing.Rules
	resets    *remedy.Resets
}

// reporters report.
type reporters struct {
	reporter *report.Writer
	metrics  *metrics.Metrics
	liveness *report.Liveness
}

// forgetter keeps times of the host's clock in memory.
type forgetter interface {
	// Forget drops everything computed from earlier times of the clock, as if the process began now.
	Forget(now time.Time)
}

// forgetters lists every part of the agent that remembers times.
func (a *Agent) forgetters() []forgetter {
	return []forgetter{
		a.observers.record, a.observers.sets, a.observers.claims, a.deciders.retries, a.observers.processes, a.actors.units, a.actors.rebooter, a.observers.devicePlugin, a.actors.handover, a.observers.leftovers,
		a.actors.upgrades, a.actors.taint, a.actors.rules, a.actors.resets, a.actors.verifier, a.actors.slot, a.actors.timing,
		a.actors.fencing, a.monitors, a.observers.ownership,
	}
}

// ErrEdited says that someone has edited the settings since this process read them, without a mistake: a new process has to take over.
var ErrEdited = errors.New("the settings were edited")

// Run keeps the node as desired until ctx ends. It completes a step that has begun before it returns. The error is nvml.ErrReplaced if NVIDIA's driver is no
// longer the one that this process has loaded, so only a new process can go on; or ErrEdited.
func (a *Agent) Run(ctx context.Context) error {
	wake := a.observers.wakes.Watch(ctx)
	for _, m := range a.monitors {
		a.observers.wakes.Beside(ctx, m.Watch)
	}
	a.observers.leftovers.Forget(a.env.Clock.Now())
	a.env.Log.Info("watching", zap.String("node", a.env.Node))
	for ctx.Err() == nil {
		if other, _ := a.checkSettings(); other {
			a.env.Log.Info("the settings were edited", zap.String("node", a.env.Node))
			return ErrEdited
		}
		// Cancelling a step in its middle gains nothing: each step has a deadline, and the agent resumes after a restart anyway.
		a.reporters.liveness.Begin()
		a.observers.objects.TakeRequest()
		failures := a.observers.client.Failures()
		next := a.pass(context.WithoutCancel(ctx))
		calm := a.pauseAfterFailures(next, a.observers.client.Failures() > failures)
		next = max(next, calm)
		a.reporters.liveness.End(next)
		a.reporters.metrics.Passed()
		if a.driverReplaced {
			a.env.Log.Info("the driver was replaced", zap.String("node", a.env.Node))
			return nvml.ErrReplaced
		}
		if calm > 0 {
			a.waitForNextPass(ctx, nil, calm)
		}
		a.waitForNextPass(ctx, wake, a.pauseAfterPass(ctx, next-calm))
	}
	a.env.Log.Info("stopping", zap.String("node", a.env.Node))
	return nil
}

// checkSettings compares the settings' file with the settings of this process. Other: they differ, and the file has no mistake. News: that, or the condition
// reports other mistakes of the file than before. Mistakes have no other effect.
func (a *Agent) checkSettings() (other, news bool) {
	if a.edited == nil {
		return false, false
	}
	other, wrong := a.edited()
	news = other || wrong != a.reporters.reporter.WrongSettings
	a.reporters.reporter.WrongSettings = wrong
	return other, news
}

// pauseAfterFailures returns a pause that nothing interrupts, for a pass with failed requests to the API server. There is none if the next pass is due at
// once: a change goes on as fast as the API server answers.
func (a *Agent) pauseAfterFailures(rest time.Duration, failed bool) time.Duration {
	switch {
	case failed && rest > 0:
		return a.deciders.retries.Unanswered()
	case !failed && a.observers.objects.AreFresh():
		a.deciders.retries.Answered()
	}
	return 0
}

// settleTime is the least time between two passes while no change is under way. Kubelet and controllers may write to the node and
// its pods many times in a second, and each pass reads both.
const settleTime = time.Second

// pauseAfterPass waits for settleTime, and returns what is left of the rest. No watch interrupts it. It does not wait while a change is under way, and no
// longer than the rest. A new request in the node's labels ends it, but not twice in a row.
func (a *Agent) pauseAfterPass(ctx context.Context, rest time.Duration) time.Duration {
	if a.changeUnderway || rest <= 0 {
		return rest
	}
	pause := min(rest, settleTime+rand.N(settleTime/4)) // the agents of many nodes must not ask the API server at once
	timer := a.env.Clock.NewTimer(pause)
	defer timer.Stop()
	if a.observers.objects.RequestedBefore(ctx, timer.C()) {
		return 0
	}
	return rest - pause
}

// pollInterval is the time between two observations of the monitors. A program fills a GPU within seconds, but only a GPU that stays full matters, and an
// observation costs some ten driver calls a GPU.
const pollInterval = 15 * time.Second

// waitForNextPass waits until a watch wakes the loop, at most for d. The monitors poll while it waits, which costs the API server no request; the wait
// ends when a monitor has something to report.
func (a *Agent) waitForNextPass(ctx context.Context, wake <-chan struct{}, d time.Duration) {
	timer := a.env.Clock.NewTimer(d)
	defer timer.Stop()
	polls := a.env.Clock.NewTicker(pollInterval)
	defer polls.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-wake:
			return
		case <-timer.C():
			return
		case <-polls.C():
		}
		if _, news := a.checkSettings(); news {
			return
		}
		if a.monitors.Poll(context.WithoutCancel(ctx)) {
			return
		}
	}
}

// pass observes, does the upkeep, decides, performs at most one step, and reports. It returns how long the loop may sleep. Where
// another pass follows at once, by a fresh observation, it does not report. The agent may be killed anywhere inside it.
func (a *Agent) pass(ctx context.Context) time.Duration {
	seen, err := a.observe(ctx)
	if err = a.upkeep(ctx, seen, err); err != nil {
		return a.conclude(ctx, seen, state.Desired{}, nil, err)
	}
	to, err := a.plan(ctx, seen)
	if failure := a.deciders.retries.Refused(seen, to.want, decide.Goal{Kind: to.goal, Why: to.why}, refusal(to.why)); failure != nil {
		to.want.Undo, to.steps, err = false, nil, failure // it is recorded before the undo goes on
	}
	in := act.Input{Seen: seen, Want: to.want, Steps: to.steps}
	a.actors.verifier.Follow(seen, to.want)
	a.deciders.resolver.Remember(seen, to.want)
	a.learn(ctx, seen, to.want, to.steps)
	if err == nil {
		in, err = a.act(ctx, in)
	}
	if errors.Is(err, errNotFresh) || errors.Is(err, outcome.ErrPlanAgain) {
		return 0
	}
	return a.conclude(ctx, in.Seen, in.Want, in.Steps, err)
}

// act mends the device plugin's key, and performs at most one step. It returns the input to report: its own, or that of
// cleanUpWhileWaiting.
func (a *Agent) act(ctx context.Context, in act.Input) (act.Input, error) {
	a.mendPluginKey(ctx, in.Seen, in.Want)
	if len(in.Steps) == 0 {
		return in, nil
	}
	err := a.correct(in)
	if err == nil {
		err = a.execute(ctx, in)
	}
	if !decide.CleansUpWhileWaiting(in.Seen, err) {
		return in, err
	}
	return a.cleanUpWhileWaiting(ctx, in, err)
}

// correct returns a wait of no length if an earlier process was killed before it reported its change, so that the node still says that nothing is under way.
// This pass reports, and the next one performs the step. Otherwise an agent that is killed after each step would cut the GPUs while the condition stays True.
// A process does so once: a condition that cannot be written must not hold up a change.
func (a *Agent) correct(in act.Input) error {
	resumes := a.resumes
	a.resumes = false
	ready := report.PartitionReady(in.Seen.Node)
	if !resumes || ready == nil || ready.Status != corev1.ConditionTrue {
		return nil
	}
	reason, _ := report.Progress(in.Steps, in.Want)
	return &outcome.Waiting{Reason: reason, Message: "the agent continues the interrupted change", For: outcome.ForStep}
}

// upkeep does what each pass does whatever the labels ask for. Each chore is idempotent. Err is why the observation has ended early; upkeep returns it,
// or why the pass cannot go on.
func (a *Agent) upkeep(ctx context.Context, seen *state.Observed, err error) error {
	a.changeUnderway = seen.Journal != nil
	a.reporters.liveness.Saw(seen.Node)
	a.beginRecord(ctx, seen)
	a.answer(ctx, seen, err)
	a.taintUnhealthy(ctx, seen)
	a.keepRules(ctx, seen)
	a.actors.rules.Report()
	if failed := a.actors.upgrades.ReleaseDriver(ctx, seen); failed != nil {
		err = failed
	}
	if err != nil {
		a.actors.upgrades.ReleaseNode(ctx, seen)
		a.renewWhileUnavailable(ctx, seen)
		return err
	}
	for _, chore := range []func(context.Context, *state.Observed){
		a.noteObserved, a.shareObserved, a.reportUnreadClaims, a.tidyRecord, a.setClock, a.actors.slot.LeaveFormer, a.actors.slot.Renew, a.actors.rebooter.Withdraw,
	} {
		chore(ctx, seen)
	}
	return nil
}

// beginRecord makes the record of a host that has none, before the agent writes anything on the node: the next process then knows that an agent was here.
func (a *Agent) beginRecord(ctx context.Context, seen *state.Observed) {
	if seen.Node != nil && seen.Record.First {
		seen.Record.Learnt = a.actors.journal.Begin(ctx, seen.Record.Learnt.Found)
	}
}

// learn records what the next process has to know: which requests users have made since the first agent came, which GPUs another program has changed, and
// which devices a restart of the device plugin has not cured.
func (a *Agent) learn(ctx context.Context, seen *state.Observed, want state.Desired, steps []plan.Step) {
	found := seen.StillFound(want)
	foreign, changed := decide.Foreign(seen, want, steps, a.env.Clock.Stamp())
	uncured := a.actors.verifier.Uncured()
	if !changed && len(found) == len(seen.Record.Learnt.Found) && uncured == seen.Record.Learnt.Uncured {
		return
	}
	learnt := a.observers.record.Now().Learnt
	learnt.Found, learnt.Uncured = found, uncured
	if changed {
		learnt.Foreign = &foreign
	}
	a.actors.journal.Learn(ctx, learnt)
	seen.Record.Learnt.Found, seen.Record.Learnt.Foreign, seen.Record.Learnt.Uncured = learnt.Found, learnt.Foreign, uncured
}

// renewWhileUnavailable renews the slot of a node that counts as unavailable in its pool, even if the agent can see nothing else of it.
func (a *Agent) renewWhileUnavailable(ctx context.Context, seen *state.Observed) {
	if j := seen.Journal; j != nil && j.Disturbs() {
		a.actors.slot.Renew(ctx, seen)
	}
}

// taintUnhealthy keeps the node tainted while a GPU is unhealthy, even if the agent can see nothing else of the node.
func (a *Agent) taintUnhealthy(ctx context.Context, seen *state.Observed) {
	if seen.Node == nil {
		return
	}
	critical, known := a.health.Critical()
	a.actors.taint.Follow(ctx, seen.Node, len(critical) > 0, known)
}

// keepRules keeps claims from the devices of an unhealthy GPU, if the settings say so, and from those that the journal names. While the agent does not know
// these devices, as after a restart of NVIDIA's DRA driver, it leaves the rules unchanged.
func (a *Agent) keepRules(ctx context.Context, seen *state.Observed) {
	if !seen.DRA.Complete {
		return
	}
	var closed []fencing.Closed
	var critical map[nvml.UUID]bool
	if a.env.Settings.Health.DeviceTaint == config.DeviceTaintNoSchedule {
		var known bool
		if critical, known = a.health.Critical(); !known {
			return
		}
		for _, device := range seen.DRA.DevicesOf(a.env.Node, critical) {
			closed = append(closed, fencing.Closed{Device: device, Key: config.TaintGPUUnhealthy})
		}
	}
	if seen.Journal != nil {
		for _, device := range seen.Journal.Closed {
			closed = append(closed, fencing.Closed{Device: device, Key: config.TaintRepartitioning})
		}
	}
	a.actors.rules.Keep(ctx, seen.Node.UID, closed, func() []string {
		all := map[nvml.UUID]bool{}
		for _, gpu := range seen.GPUs {
			all[gpu.UUID] = true
		}
		return seen.DRA.DevicesOf(a.env.Node, all)
	})
	a.health.NotClosed(a.notClosed(seen, critical))
}

// notClosed says of each of these GPUs why a device of it is open to claims, although the settings ask for a rule.
func (a *Agent) notClosed(seen *state.Observed, critical map[nvml.UUID]bool) map[nvml.UUID]string {
	out := map[nvml.UUID]string{}
	for gpu := range critical {
		for _, device := range seen.DRA.DevicesOf(a.env.Node, map[nvml.UUID]bool{gpu: true}) {
			if err := a.actors.rules.Open(fencing.Closed{Device: device, Key: config.TaintGPUUnhealthy}); err != nil {
				out[gpu] = err.Error()
				break
			}
		}
	}
	return out
}

// noteObserved ends the pauses after failed observations. If a change was under way when this process began, it counts that in the metrics.
func (a *Agent) noteObserved(_ context.Context, seen *state.Observed) {
	a.deciders.retries.ForgetObservations()
	if !a.hasObserved && seen.Journal != nil {
		a.reporters.metrics.Resumed()
		a.resumes = true
	}
	a.hasObserved = true
}

// shareObserved hands the observation to the monitors, and to the packages that remember some of it. They may send Events.
func (a *Agent) shareObserved(ctx context.Context, seen *state.Observed) {
	if seen.Leftovers.MIGManager {
		a.observers.leftovers.SawMIGManager()
	}
	a.health.RefuseResets(offer.ResetsRefused(seen))
	a.monitors.Observe(ctx, seen.Node, seen.GPUs, seen.Pods, seen.Holders.Pods)
	a.actors.units.ReportNotRunning(seen)
}

// reportUnreadClaims says why the agent does not know which devices claims have, when that is news.
func (a *Agent) reportUnreadClaims(_ context.Context, seen *state.Observed) {
	err := a.observers.claims.News(seen)
	if err == nil {
		return
	}
	a.env.Log.Warn("it is not known which devices resource claims have", zap.Error(err))
	if apierrors.IsForbidden(err) {
		a.env.Events.Node(a.env.Node, events.UnreadClaims(err))
	}
}

// tidyRecord removes a change from the host's record once it has nothing left to restore.
func (a *Agent) tidyRecord(ctx context.Context, seen *state.Observed) {
	pending := seen.Record.Pending
	a.actors.journal.Tidy(ctx, seen.Journal != nil || seen.Record.StrangeJournal || len(pending.Stopped)+len(pending.Persistent) > 0)
}

// mendPluginKey rewrites the agent's key of the device plugin's configs if someone has changed it. If it cannot, the pass goes on: the plugin has read the
// key, and mayPerform checks it for the steps that need it.
func (a *Agent) mendPluginKey(ctx context.Context, seen *state.Observed, want state.Desired) {
	news, err := a.actors.handover.Mend(ctx, seen, want)
	if news != "" {
		e := events.MendedKey(news)
		if err != nil {
			e = events.KeyNotMended(news)
		}
		a.env.Events.Node(a.env.Node, e)
	}
}

// cleanUpWhileWaiting restores now what an earlier agent has left without a journal: the change that would restore it must wait, perhaps for days. Err is
// that wait.
func (a *Agent) cleanUpWhileWaiting(ctx context.Context, in act.Input, err error) (act.Input, error) {
	var wait *outcome.Waiting
	errors.As(err, &wait)
	left := *in.Seen
	rest, failed := a.planTo(ctx, &left, in.Want, decide.Goal{Kind: decide.CleanUp, Why: err})
	if failed != nil {
		return in, err
	}
	in.Want.Left = left.Postponed(in.Want, wait.Reason, "the agent first restores what an earlier change left; then "+wait.Message)
	in.Steps = rest
	return in, a.execute(ctx, act.Input{Seen: &left, Want: in.Want, Steps: rest})
}

// setClock sets the agent's clock by the host's clock if that was set, and makes all parts forget times of the former clock. During a change the agent keeps
// its clock, and with it the deadlines.
func (a *Agent) setClock(_ context.Context, seen *state.Observed) {
	if seen.Journal != nil {
		return
	}
	step := a.env.Clock.Step()
	if step == 0 {
		return
	}
	a.env.Log.Info("the host's clock was set", zap.Duration("by", step))
	for _, f := range a.forgetters() {
		f.Forget(a.env.Clock.Now())
	}
}

// course is what a pass works towards, and the steps to it.
type course struct {
	goal  decide.Kind
	want  state.Desired
	steps []plan.Step
	why   error // why the request is not the goal, even if there are steps; nil if it is
}

// plan lists the steps to the goal of the pass. A node that is as desired has neither steps nor an error. The error says why the pass has no plan. Plan reads
// who uses the devices that the steps take: see planned.
func (a *Agent) plan(ctx context.Context, seen *state.Observed) (course, error) {
	want, err := a.deciders.resolver.Desired(seen)
	if err == nil {
		want.Restore(seen)
		err = plan.Refuse(plan.Observed{GPUs: seen.GPUs, Sick: seen.Sick, Reboots: seen.Reboots}, want.Planned(want.Targets))
	}
	under := offer.Of(seen).Strategy(a.env.Settings.MIGStrategy, want.Plugin)
	goal := decide.GoalOf(seen, want, err, under)
	if goal.Kind == decide.Undo {
		want.Undo, want.UndoCause, want.Plugin = true, goal.Why, a.deciders.resolver.Former(seen)
	}
	a.actors.verifier.Compare(seen, want)
	steps, err := a.planTo(ctx, seen, want, goal)
	revised := goal.Revised(seen, want, steps, a.env.Settings.With(want.Drain).Drain.OnUncordon, under)
	if revised.Kind == goal.Kind {
		return course{goal.Kind, want, steps, goal.Why}, err
	}
	if want.Unread != nil {
		want, _ = a.deciders.resolver.Asked(seen.Node) // the files could not be read: only the labels are certain
	}
	steps, err = a.planTo(ctx, seen, want, revised)
	return course{revised.Kind, want, steps, revised.Why}, err
}

// planTo lists the steps to the goal, or returns why it has no plan.
func (a *Agent) planTo(ctx context.Context, seen *state.Observed, want state.Desired, goal decide.Goal) ([]plan.Step, error) {
	switch goal.Kind {
	case decide.StandStill, decide.Cancel:
		return nil, goal.Why
	case decide.CleanUp:
		want.Plugin, want.Keys = nil, nil
	case decide.Undo:
		if a.actors.hardware.SpecsAbandoned() { // CDI files that cannot be written must not block the way back
			seen.Specs = nil
		}
	case decide.Wanted:
	}
	steps, err := plan.Make(a.planned(ctx, seen, want, goal.Targets), want.Planned(goal.Targets))
	switch {
	case goal.Kind == decide.CleanUp && (err != nil || len(steps) == 0):
		return nil, goal.Why
	case goal.Kind == decide.Undo:
		return a.deciders.retries.OthersFirst(steps), err
	}
	return steps, err
}
