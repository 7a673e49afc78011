// Package hardware changes the GPUs of the node, one call into the driver at a time, and writes their CDI specs again.
package hardware

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/evict"
	"github.com/gpuslice/gpuslice/agent/act/reboot"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/observe"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Specs are the CDI specs that describe to container runtimes what GPUs and instances there are.
type Specs interface {
	// Stale names the specs that describe other instances than the present ones. It names none if no spec is in use.
	Stale(ctx context.Context, gpus []nvml.GPU) ([]string, error)
	// Write writes the stale specs again, each as a whole or not at all.
	Write(ctx context.Context, gpus []nvml.GPU) error
}

// GPUs are the GPUs of one node.
type GPUs struct {
	act.Env

	Driver    nvml.Driver
	Specs     Specs
	Evictions *evict.Evictions
	Processes *observe.Processes
	Rebooter  *reboot.Rebooter
	Retries   *decide.Retries
	Journal   *journal.Writer

	failures int         // of writing the specs, in a row
	trouble  string      // why the agent could not read the specs, the last time
	shaped   bool        // a call has changed what a device plugin reads at its start, and Early has not seen the plugin's pods since
	early    []types.UID // pods that Early has then seen
}

// SpecsAbandoned reports whether writing the specs has failed so often that the agent does not keep the node for them.
func (g *GPUs) SpecsAbandoned() bool { return g.failures >= g.Settings.Retry.Failures }

// Change performs a step on a GPU. It fails with StepHadNoEffect after retry.noEffect successes that did not change the plan.
func (g *GPUs) Change(ctx context.Context, in act.Input) error {
	if failure := g.Retries.InVain(in.Want, in.Step()); failure != nil {
		if in.Step().Kind == plan.RestorePersistence { // the agent neither undoes a finished change nor keeps the node for that
			return g.abandonPersistence(ctx, in, failure)
		}
		return failure
	}
	if failure := foreignOwner(in); failure != nil {
		return failure
	}
	if !in.Want.Undo && in.Step().Traits().HoldersKnown {
		if err := g.Evictions.RequireHoldersKnown(in.Seen, in.Want, in.Step()); err != nil {
			return err
		}
	}
	release, err := g.Rebooter.Inhibit(ctx, in.Step())
	if err != nil {
		return err
	}
	err = g.drive(ctx, in.Step())
	if in.Step().Traits().ShapesPlugin {
		g.shaped = true
	}
	release()
	switch {
	case err == nil:
		return nil
	case in.Step().Kind == plan.RestorePersistence:
		return g.persistenceRefused(ctx, in, err)
	case errors.Is(err, nvml.ErrInUse):
		return g.Processes.HeldBy(ctx, in.Seen, in.Step(), err)
	default:
		return err
	}
}

// foreignOwner returns why the agent leaves GPUs alone that were its own when the change began; nil if they still are.
func foreignOwner(in act.Input) error {
	owner := in.Seen.Owner
	if in.Want.Undo || owner.MayCut() || switchesMode(in) {
		return nil
	}
	who := owner.Driver
	switch {
	case owner.Other != "":
		who = owner.Other
	case owner.Kind == api.OwnerBoth:
		who += ", next to a device plugin,"
	}
	return &api.Failure{
		Fingerprint: in.Want.Fingerprint, Reason: config.ReasonForeignOwner, Later: true,
		Message: fmt.Sprintf("not touching the GPUs: %s manages them now", who),
	}
}

// switchesMode reports whether the step is of a change that only switches MIG modes, for NVIDIA's DRA driver that cuts the GPUs itself.
func switchesMode(in act.Input) bool {
	cuts := in.Step().Kind == plan.Destroy || in.Step().Kind == plan.Create
	return in.Seen.Owner.Kind == api.OwnerDRADynamic && in.Seen.Journal != nil && in.Seen.Journal.ModesOnly && !cuts
}

// calls has the call into the driver of each kind of step that has one.
var calls = map[plan.Kind]func(ctx context.Context, driver nvml.Driver, s plan.Step) error{
	plan.SetMode: func(ctx context.Context, driver nvml.Driver, s plan.Step) error {
		return driver.SetMode(ctx, s.GPU, s.On)
	},
	plan.DropPersistence: func(ctx context.Context, driver nvml.Driver, s plan.Step) error {
		return driver.SetPersistence(ctx, s.GPU, false)
	},
	plan.RestorePersistence: func(ctx context.Context, driver nvml.Driver, s plan.Step) error {
		return driver.SetPersistence(ctx, s.GPU, true)
	},
	plan.SetComputeMode: func(ctx context.Context, driver nvml.Driver, s plan.Step) error {
		return driver.SetComputeMode(ctx, s.GPU, nvml.ComputeDefault)
	},
	plan.Reset: func(ctx context.Context, driver nvml.Driver, s plan.Step) error { return driver.Reset(ctx, s.GPU) },
	plan.Heal:  func(ctx context.Context, driver nvml.Driver, s plan.Step) error { return driver.Reset(ctx, s.GPU) },
	plan.Destroy: func(ctx context.Context, driver nvml.Driver, s plan.Step) error {
		if s.OnPart() {
			return driver.DestroyPart(ctx, s.GPU, s.Instance, s.Part)
		}
		return driver.Destroy(ctx, s.GPU, s.Instance)
	},
	plan.Create: func(ctx context.Context, driver nvml.Driver, s plan.Step) error {
		if s.OnPart() {
			return driver.CreatePart(ctx, s.GPU, s.Instance, s.Part)
		}
		return driver.Create(ctx, s.GPU, s.Instance)
	},
}

// drive makes the call into the driver for the step.
func (g *GPUs) drive(ctx context.Context, step plan.Step) error {
	call, cancel := context.WithTimeout(ctx, g.Settings.Timeouts.DriverCall)
	defer cancel()
	return calls[step.Kind](call, g.Driver, step)
}

// persistenceRefused lets the agent try again to turn persistence mode on, until the budget is used up. An error of a driver that is not
// loaded, or was replaced, does not count: then everything has to wait.
func (g *GPUs) persistenceRefused(ctx context.Context, in act.Input, err error) error {
	switch {
	case errors.Is(err, nvml.ErrNoDriver), errors.Is(err, nvml.ErrReplaced):
		return err
	case errors.Is(err, nvml.ErrNotSupported), g.Retries.OneMoreIsTooMany(in.Step()):
		return g.abandonPersistence(ctx, in, err)
	case errors.Is(err, nvml.ErrUnresponsive):
		g.Retries.CountFailure(in.Step())
		return err
	default:
		return errors.New(err.Error()) // without its kind: for ErrInUse the agent would wait without a budget
	}
}

// abandonPersistence removes the GPU's persistence mode from the journal, since the agent cannot restore it. The GPU works as well without it.
func (g *GPUs) abandonPersistence(ctx context.Context, in act.Input, why error) error {
	g.Log.Warn("cannot turn persistence mode on again", zap.Int("gpu", in.Step().Index), zap.Error(why))
	j := *in.Seen.Journal
	j.Previous = nil
	for _, c := range in.Seen.Journal.Previous {
		c.Persistent = c.Persistent && c.GPU != in.Step().GPU
		j.Previous = append(j.Previous, c)
	}
	j.Persistent = slices.DeleteFunc(slices.Clone(j.Persistent), func(gpu nvml.UUID) bool { return gpu == in.Step().GPU })
	if err := g.Journal.Amend(ctx, in.Seen.Writing(in.Want, in.Step().Kind), j); err != nil {
		return err
	}
	reason := config.ReasonHardwareFailure
	if failure, is := errors.AsType[*api.Failure](why); is {
		reason = failure.Reason
	}
	g.Events.Node(g.Node, events.PersistenceLost(in.Step().Index, reason, why))
	return outcome.ErrPlanAgain
}

// Early returns the pods of what offers the GPUs that were there right after the last call that changes what such a pod reads at its start. Some of them may
// have started within the call.
func (g *GPUs) Early(pods []corev1.Pod) []types.UID {
	if g.shaped {
		g.shaped, g.early = false, nil
		for _, p := range pods {
			g.early = append(g.early, p.UID)
		}
	}
	return g.early
}

// Snapshot reads the present state of the GPUs.
func (g *GPUs) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	call, cancel := context.WithTimeout(ctx, g.Settings.Timeouts.DriverCall)
	defer cancel()
	return g.Driver.Snapshot(call)
}
