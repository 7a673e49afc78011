package agent

import (
	"context"
	"errors"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/report/diagnosis"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/nvml"
)

// Diagnose explains the node's state, and changes nothing. Running says whether another process is this machine's agent: the caller has tried the lock. If
// the driver, kubelet or the API server does not answer, the diagnosis says so, and reports what the others have shown.
func (a *Agent) Diagnose(ctx context.Context, running bool) api.Diagnosis {
	e := a.evidence(ctx)
	e.Running, e.Agent.Runs = running, running
	return diagnosis.Of(&e)
}

// evidence observes the node once, for a diagnosis.
func (a *Agent) evidence(ctx context.Context) diagnosis.Evidence {
	seen, err := a.observe(ctx)
	e := diagnosis.Evidence{Observed: seen, Now: a.env.Clock.Stamp(), Settings: a.env.Settings, Sick: a.health.Causes()}
	switch {
	case seen.Node == nil:
		e.Unseen = append(e.Unseen, err.Error())
		a.observeMachine(ctx, &e)
		return e
	case err != nil:
		a.observeFurther(ctx, &e, err)
	}
	e.ReadNode()
	asked, _ := a.deciders.resolver.Asked(e.Node)
	e.Want.Label, e.Want.Name = asked.Label, asked.Name
	if e.Complete {
		a.addPlan(ctx, &e)
	}
	if e.Boot.Err != nil {
		e.Unseen = append(e.Unseen, e.Boot.Err.Error())
	}
	if e.Holders.Err != nil {
		e.Unseen = append(e.Unseen, e.Holders.Err.Error())
	}
	return e
}

// addPlan adds to a complete observation the plan for the node, why the agent does not begin it, and what holds its GPUs.
func (a *Agent) addPlan(ctx context.Context, e *diagnosis.Evidence) {
	to, err := a.plan(ctx, e.Observed)
	e.Want, e.Steps = to.want, to.steps
	e.Settings = a.env.Settings.With(e.Want.Drain)
	in := act.Input{Seen: e.Observed, Want: e.Want, Steps: e.Steps}
	if err == nil && e.Journal == nil && len(e.Steps) > 0 && !e.Steps[0].Traits().OnlyObserves {
		err = a.foresee(ctx, in)
	}
	_, failed := errors.AsType[*api.Failure](err)
	switch {
	case errors.As(err, &e.NotYet):
	case failed, refusal(err) != "":
		e.Refused, e.RefusedAs = err, refusal(err)
	case err != nil: // it may pass
		e.Unseen = append(e.Unseen, err.Error())
	}
	e.Verdicts = a.actors.evictions.Evictable(ctx, in)
	e.Processes = e.UnownedProcesses()
	e.Users = e.UsersOfNoListedPod(a.observers.processes.Users(ctx, e.Observed))
	offers := offer.Of(e.Observed)
	if absent, advice := offers.Absent(); absent != "" {
		e.PluginAdvice = advice
	} else if under := offers.RunsUnder(); under != "" {
		e.StrategyAdvice = a.actors.verifier.OtherStrategy(e.Observed, under)
	}
}

// observeFurther reads what is missing if observe ended early: a diagnosis lists the pods even without a driver.
func (a *Agent) observeFurther(ctx context.Context, e *diagnosis.Evidence, ended error) {
	var stalled *outcome.Stalled
	switch {
	case errors.As(ended, &stalled) && stalled.Journal != "":
		e.Unreadable = stalled.Journal
	case e.GPUs == nil && driverError(ended):
		e.Driver = ended.Error()
	default:
		e.Unseen = append(e.Unseen, ended.Error())
	}
	if e.Pods == nil {
		var err error
		if e.Pods, err = a.listPods(ctx, e.Node.UID); err != nil {
			e.Unseen = append(e.Unseen, err.Error())
		}
	}
	if e.GPUs == nil && e.Driver == "" {
		var err error
		if e.GPUs, err = a.actors.hardware.Snapshot(ctx); err != nil {
			e.Driver = err.Error()
		}
	}
	if e.Driver != "" {
		e.Unseen = append(e.Unseen, "the GPUs: "+e.Driver)
	}
	a.observeKubelet(ctx, e.Observed, e.Pods)
	a.observeOthers(e.Observed)
	if e.GPUs == nil {
		e.Capacity.Missing = nil // there are no GPUs to compare the capacity with
	}
}

// observeMachine reads what the machine shows without an API server.
func (a *Agent) observeMachine(ctx context.Context, e *diagnosis.Evidence) {
	var err error
	if e.GPUs, err = a.actors.hardware.Snapshot(ctx); err != nil {
		e.Unseen = append(e.Unseen, "the GPUs: "+err.Error())
	}
	call, cancel := context.WithTimeout(ctx, a.env.Settings.Timeouts.APICall)
	defer cancel()
	if _, err := a.observers.kubelet.Assignments(call); err != nil {
		e.KubeletSeen.Silent = err.Error()
	}
}

// driverError reports whether observe ended early because of the driver.
func driverError(err error) bool {
	var waiting *outcome.Waiting
	return errors.Is(err, nvml.ErrNoDriver) || errors.Is(err, nvml.ErrUnresponsive) || errors.Is(err, nvml.ErrReplaced) ||
		errors.As(err, &waiting) && waiting.For == outcome.ForDriver
}
