package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
)

// change performs a step on a GPU. It fails with StepHadNoEffect after retry.noEffect successes that left the plan as it was.
func (a *Agent) change(
	ctx context.Context, seen state.Observed, want state.Desired, step plan.Step, into func(*Agent, context.Context, plan.Step) error,
) error {
	if n := a.budget.Successes[step.String()]; n >= a.settings.Retry.NoEffect {
		if step.Kind == plan.RestorePersistence { // a change that is finished is not undone, and no node is kept, for want of it
			return a.abandonPersistence(ctx, seen, step, fmt.Errorf("%s reported success %d times and had no effect", step, n))
		}
		return &api.Failure{
			Wish: want.Fingerprint, Reason: config.ReasonStepHadNoEffect,
			Message: fmt.Sprintf("%s reported success %d times and had no effect, or somebody else undoes it", step, n),
		}
	}
	if !want.Undo && step.Traits().HoldersKnown {
		if err := a.requireHoldersKnown(seen, want, step); err != nil {
			return err
		}
	}
	if step.Kind == plan.SetComputeMode {
		if err := a.daemonsGone(seen, want, step); err != nil {
			return err
		}
	}
	release, err := a.inhibit(ctx, step)
	if err != nil {
		return err
	}
	err = a.drive(ctx, step, into)
	release()
	switch {
	case err == nil:
		a.budget.Successes[step.String()]++
		return nil
	case step.Kind == plan.RestorePersistence:
		return a.persistenceRefused(ctx, seen, step, err)
	case errors.Is(err, nvml.ErrInUse):
		return a.heldBy(ctx, seen, step, err)
	default:
		return err
	}
}

// drive makes the one call into the driver.
func (a *Agent) drive(ctx context.Context, step plan.Step, into func(*Agent, context.Context, plan.Step) error) error {
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.DriverCall)
	defer cancel()
	return into(a, call, step)
}

func (a *Agent) destroy(ctx context.Context, step plan.Step) error {
	if step.OnPart() {
		return a.driver.DestroyPart(ctx, step.GPU, step.Instance, step.Part)
	}
	return a.driver.Destroy(ctx, step.GPU, step.Instance)
}

func (a *Agent) create(ctx context.Context, step plan.Step) error {
	if step.OnPart() {
		return a.driver.CreatePart(ctx, step.GPU, step.Instance, step.Part)
	}
	return a.driver.Create(ctx, step.GPU, step.Instance)
}

// logindRetry is the pause before asking a logind again that has not answered in hostTimeout. Each step of a change asks,
// and a node of 8 GPUs takes more than 50: it shall be no minutes slower, and logind be asked again once it may be mended.
const logindRetry = 5 * time.Minute

// inhibit keeps the host from shutting down in the middle of the step, and the step from beginning while it is shutting
// down. Without logind, as on many immutable hosts, there is nobody to ask; one that does not answer is not waited for.
func (a *Agent) inhibit(ctx context.Context, step plan.Step) (release func(), err error) {
	nobody := func() {}
	if a.clock.Now().Before(a.logind.next) {
		return nobody, nil
	}
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	release, err = a.logind.host.Inhibit(call, step.String())
	switch {
	case err == nil:
		return release, nil
	case errors.Is(err, host.ErrShuttingDown):
		return nil, &outcome.Waiting{
			Reason: config.ReasonShuttingDown, After: rebootRetry,
			Message: "the node is shutting down: no further change to a GPU is begun",
		}
	case call.Err() != nil:
		a.logind.next = a.clock.Now().Add(logindRetry)
		a.log.Warn("logind does not answer: steps are not kept from a shutdown", zap.Duration("again", logindRetry), zap.Error(err))
		return nobody, nil
	default:
		a.log.Debug("no shutdown inhibitor", zap.Error(err))
		return nobody, nil
	}
}

// heldBy adds to an error who holds the GPU. That nobody can be found is added too: a client that no list shows is what
// people look for longest.
func (a *Agent) heldBy(ctx context.Context, seen state.Observed, step plan.Step, held error) error {
	gpu, ok := seen.GPU(step.GPU)
	if !ok {
		return held
	}
	reported := reportedOn(gpu, step)
	search, cancel := context.WithTimeout(ctx, a.settings.Timeouts.DriverCall) // of a table with any number of processes
	defer cancel()
	clients, err := a.clients.processes.Holders(search, []holders.Sought{{Device: string(gpu.UUID), Reported: reported, Minor: gpu.Minor}})
	clients = slices.DeleteFunc(clients, func(c holders.Client) bool {
		return c.Self || step.Kind == plan.Destroy && len(reported) > 0 && !slices.Contains(reported, c.PID)
	})
	names := holders.NameClients(clients, seen.Pods)
	said := map[string]bool{"": true}
	for i, c := range clients {
		if remedy := c.Remedy(); !said[remedy] {
			names[i] += " (" + remedy + ")"
			said[remedy] = true
		}
	}
	switch {
	case err != nil && len(names) == 0:
		return fmt.Errorf("%w; who holds it is not known: %w", held, err)
	case err != nil:
		return fmt.Errorf("%w; held by %s, and perhaps by others: %w", held, strings.Join(names, ", "), err)
	case len(names) == 0:
		return fmt.Errorf("%w; no process of this node has GPU %d open, so that it is a part of the driver that holds it", held, gpu.Index)
	default:
		return fmt.Errorf("%w; held by %s", held, strings.Join(names, ", "))
	}
}

// reportedOn lists the processes that the driver reports in the way of the step. A process of another instance does not
// hold one that is to be destroyed, nor does one of another part.
func reportedOn(gpu nvml.GPU, step plan.Step) []int {
	found := nvml.PIDs(gpu.Processes)
	for _, i := range gpu.Instances {
		if step.Kind == plan.Destroy && (i.Profile != step.Instance.Profile || i.Span != step.Instance.Span) {
			continue
		}
		found = append(found, nvml.PIDs(inTheWay(i, step))...)
	}
	return found
}

// inTheWay are the processes of an instance that are in the way of the step.
func inTheWay(i nvml.Instance, step plan.Step) []nvml.Process {
	if at := slices.IndexFunc(i.Devices, func(d nvml.Device) bool { return d.Part == step.Part }); step.OnPart() && at >= 0 {
		return i.ProcessesOn(i.Devices[at])
	}
	return i.Processes
}

// persistenceRefused lets it be tried again until the budget is used up. All errors use it up but those that a driver
// gives which is not there, or is another one: then everything has to wait.
func (a *Agent) persistenceRefused(ctx context.Context, seen state.Observed, step plan.Step, err error) error {
	switch {
	case errors.Is(err, nvml.ErrNoDriver), errors.Is(err, nvml.ErrReplaced):
		return err
	case errors.Is(err, nvml.ErrNotSupported), a.budget.Attempts[step.String()].Failures+1 >= a.settings.Retry.Failures:
		return a.abandonPersistence(ctx, seen, step, err)
	case errors.Is(err, nvml.ErrUnresponsive):
		tried := a.budget.Attempts[step.String()]
		tried.Failures++
		a.budget.Attempts[step.String()] = tried
		return err
	default:
		return errors.New(err.Error()) // without its kind: what is in use is waited for without a budget
	}
}

// abandonPersistence strikes from the journal what cannot be given back. The GPU works as well without.
func (a *Agent) abandonPersistence(ctx context.Context, seen state.Observed, step plan.Step, err error) error {
	a.log.Warn("persistence mode cannot be turned on again", zap.Int("gpu", step.Index), zap.Error(err))
	j := *seen.Journal
	j.Previous = nil
	for _, c := range seen.Journal.Previous {
		c.Persistent = c.Persistent && c.GPU != step.GPU
		j.Previous = append(j.Previous, c)
	}
	j.Persistent = slices.DeleteFunc(slices.Clone(j.Persistent), func(gpu nvml.UUID) bool { return gpu == step.GPU })
	return a.amend(ctx, seen, j)
}
