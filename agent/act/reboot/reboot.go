// Package reboot reboots the host if a change of the MIG mode needs that: by logind, or by a sentinel file, which kured and other tools look for. It
// also keeps the host from shutting down in the middle of a step.
package reboot

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
)

// Host is the machine's logind. On a host without it, each method returns host.ErrNoLogind.
type Host interface {
	// Inhibit keeps the host from shutting down until release is called. The error is host.ErrShuttingDown if the host is already
	// shutting down.
	Inhibit(ctx context.Context, why string) (release func(), err error)
	CanReboot(ctx context.Context) error
	Reboot(ctx context.Context) error
}

// Rebooter asks for reboots of one node, and knows its boots.
type Rebooter struct {
	act.Env

	Host     Host
	Kernel   *host.Kernel
	Sentinel *Sentinel
	Journal  *journal.Writer

	next      time.Time // when the agent may ask a logind again that has not answered
	rebooting bool      // this process has asked logind for a reboot
	id        string    // the boot id, as last read
	trouble   string    // why the agent could not read it last time
}

// Forget drops what depends on times that the clock gave.
func (r *Rebooter) Forget(time.Time) { r.next = time.Time{} }

const (
	// retry is the pause between two observations whether the node has been rebooted: each reboot starts the agent again.
	retry = 30 * time.Second
	// maxReboots and maxRebootsUndo bound the reboots of one change. A mode that is still pending after one reboot
	// would be so after the next; an undo may need its own.
	maxReboots     = 1
	maxRebootsUndo = 2
)

// NoteNoReset notes in the journal that the driver does not reset the GPU: from now on its mode changes by a reboot.
func (r *Rebooter) NoteNoReset(ctx context.Context, in act.Input, gpu nvml.UUID, err error) time.Duration {
	j := *in.Seen.Journal
	j.NoReset = &journal.NoReset{Boot: in.Seen.Boot.ID, GPUs: []nvml.UUID{gpu}}
	if known := in.Seen.Refusal(); known != nil && known.Boot == j.NoReset.Boot {
		j.NoReset.GPUs = append(slices.Clone(known.GPUs), gpu)
	}
	if err := r.Journal.Amend(ctx, in.Seen.Writing(in.Want, plan.Reset), j); err != nil {
		r.Log.Warn("recording that a GPU is not reset here", zap.Error(err))
		return r.Settings.Retry.First
	}
	r.Log.Info("a mode change takes a reboot here", zap.Error(err), zap.String("operation", j.Operation))
	return 0
}

// Ask writes the sentinel file.
func (r *Rebooter) Ask(ctx context.Context, in act.Input) error {
	if err := r.Sentinel.Ask(ctx, fmt.Sprintf("MIG mode of GPUs of node %s changes for %s at the next reboot", r.Node, in.Want.Name)); err != nil {
		return err
	}
	r.Events.Node(r.Node, events.AskedForReboot(r.Sentinel.Path))
	return nil
}

// Withdraw removes the agent's sentinel file as soon as no mode is pending, whatever the labels then request: a needless reboot would destroy
// the instances of all GPUs.
func (r *Rebooter) Withdraw(ctx context.Context, seen *state.Observed) {
	pending := slices.ContainsFunc(seen.GPUs, func(gpu nvml.GPU) bool { return !gpu.Lost && gpu.Pending != gpu.Enabled })
	if seen.Reboots.Asked != plan.AskedByUs || pending && r.Settings.Reboot.Policy == config.RebootDelegate {
		return
	}
	if err := r.Sentinel.Withdraw(ctx); err != nil {
		r.Log.Warn("cannot withdraw the request for a reboot that is not needed", zap.Error(err))
	}
}

// Allowed returns why the agent may not reboot the node for the change. It asks before the change begins, and before it evicts pods for the reboot.
func (r *Rebooter) Allowed(ctx context.Context, in act.Input) error {
	limit := maxReboots
	if in.Want.Undo {
		limit = maxRebootsUndo
	}
	var reboots []string
	if in.Seen.Journal != nil {
		reboots = in.Seen.Journal.Reboots
	}
	var err error
	switch {
	case in.Seen.Boot.Err != nil:
		err = fmt.Errorf("not rebooting the host: %w", in.Seen.Boot.Err)
	case r.Settings.Reboot.Policy == config.RebootNever:
		err = plan.ErrNeedsReboot
	case !slices.Contains(reboots, in.Seen.Boot.ID) && len(reboots) >= limit:
		err = plan.ErrStillPending
	case r.Settings.Reboot.Policy == config.RebootSelf:
		call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
		defer cancel()
		err = r.Host.CanReboot(call)
	}
	if err != nil {
		return &api.Failure{Fingerprint: in.Want.Fingerprint, Reason: config.ReasonNeedsReboot, Message: err.Error()}
	}
	return nil
}

// Reboot asks another tool for one reboot, or asks logind, and waits for it. It never returns nil: only the next boot of the
// node ends the step.
func (r *Rebooter) Reboot(ctx context.Context, in act.Input) error {
	j := *in.Seen.Journal
	bootUnknown := in.Seen.Boot.Err != nil && len(j.Reboots) > 0
	if bootUnknown || slices.Contains(j.Reboots, in.Seen.Boot.ID) {
		if r.Clock.Since(j.RebootAsked) > r.Settings.Timeouts.Reboot {
			return &api.Failure{
				Fingerprint: in.Want.Fingerprint, Reason: config.ReasonNeedsReboot,
				Message: fmt.Sprintf("the node was not rebooted within %s of the request", r.Settings.Timeouts.Reboot),
			}
		}
		if r.rebooting || bootUnknown || r.Settings.Reboot.Policy != config.RebootSelf {
			return r.await(j)
		}
	}
	if err := r.Allowed(ctx, in); err != nil {
		return err
	}
	if !slices.Contains(j.Reboots, in.Seen.Boot.ID) {
		if err := r.note(ctx, in, &j); err != nil {
			return err
		}
	}
	if r.Settings.Reboot.Policy != config.RebootSelf {
		return r.await(j)
	}
	// If the agent is killed here, the next one asks logind again, which does no harm: logind says if it is rebooting already.
	r.rebooting = true
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	err := r.Host.Reboot(call)
	if errors.Is(err, host.ErrNoLogind) || errors.Is(err, host.ErrLogindRefuses) || errors.Is(err, host.ErrRebootInhibited) {
		return &api.Failure{Fingerprint: in.Want.Fingerprint, Reason: config.ReasonNeedsReboot, Message: err.Error()}
	}
	return r.await(j) // after any other error the host may still go down
}

// note writes into the journal that the agent requests a reboot in this boot. It adds the layout of the GPUs that the label does not name,
// since the reboot destroys it.
func (r *Rebooter) note(ctx context.Context, in act.Input, j *journal.Journal) error {
	j.Reboots = append(slices.Clone(j.Reboots), in.Seen.Boot.ID)
	j.RebootAsked = r.Clock.Now().UTC().Truncate(time.Second)
	j.Previous = slices.Clone(j.Previous)
	for _, gpu := range in.Seen.GPUs {
		if _, asked := in.Want.Targets[gpu.UUID]; !asked && gpu.Enabled && !j.Cut()[gpu.UUID] {
			j.RecordLayout(gpu)
			j.Previous[len(j.Previous)-1].Foreign = true
		}
	}
	if err := r.Journal.Amend(ctx, in.Seen.Writing(in.Want, plan.Reboot), *j); err != nil {
		return err
	}
	r.Events.Node(r.Node, events.Rebooting(in.Want.Name))
	return nil
}

func (r *Rebooter) await(j journal.Journal) error {
	until := j.RebootAsked.Add(r.Settings.Timeouts.Reboot)
	who := "the tool that answers " + r.Sentinel.Path
	if r.Settings.Reboot.Policy == config.RebootSelf {
		who = "logind"
	}
	return &outcome.Waiting{
		Reason: config.ReasonNeedsReboot, For: outcome.ForReboot, After: retry,
		Message: fmt.Sprintf("waiting for %s to reboot the node, requested at %s, given up at %s",
			who, j.RebootAsked.Format(time.RFC3339), until.Format(time.RFC3339)),
	}
}
