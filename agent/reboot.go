package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/journal"
	"github.com/gpuslice/gpuslice/agent/outcome"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// rebootRetry is the pause between two looks whether the node has been rebooted: each reboot starts the agent anew.
	rebootRetry = 30 * time.Second
	// maxReboots and maxRebootsUndo bound how many reboots one change may take. A mode that is still pending after one
	// would be so after the next; the way back may need one of its own.
	maxReboots     = 1
	maxRebootsUndo = 2
)

// logind is the host's, and what it has been asked for.
type logind struct {
	host      Host
	next      time.Time // one that has not answered is not asked before
	rebooting bool      // this process has asked it for a reboot
}

// Forget implements forgetter.
func (l *logind) Forget(time.Time) { l.next = time.Time{} }

// boots is what is known of the host's boot.
type boots struct {
	kernel  *host.Kernel
	id      string // as it was last read
	trouble string // why it could not be read, the last time
}

// observeBoot reads the host's boot id. If it can no longer be read, the last one still holds, since a reboot would have ended this process.
// If it was never read, the agent takes nothing for a reboot.
func (a *Agent) observeBoot(ctx context.Context, seen *state.Observed) {
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	boot, err := a.boots.kernel.Boot(call)
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != "" && text != a.boots.trouble {
		a.log.Warn("it cannot be told whether the host is rebooted", zap.Error(err))
	}
	a.boots.id, a.boots.trouble = cmp.Or(boot, a.boots.id), text
	if seen.Boot.ID = a.boots.id; seen.Boot.ID == "" {
		seen.Boot.Err = err
	}
}

// observeReboots looks which mode changes take a reboot here, and what is known of one.
func (a *Agent) observeReboots(ctx context.Context, seen *state.Observed, pods []corev1.Pod) {
	boot := seen.Boot.ID
	known := seen.Refusal()
	seen.Reboots = plan.Reboots{
		NoReset:   map[nvml.UUID]bool{},
		Suspected: map[nvml.UUID]bool{},
		Policy:    plan.RebootPolicy(a.settings.Reboot.Policy),
		Asked:     a.sentinel.State(ctx),
	}
	if known != nil {
		for _, gpu := range known.GPUs {
			seen.Reboots.Suspected[gpu] = true
			seen.Reboots.NoReset[gpu] = boot != "" && known.Boot == boot
		}
	}
	j := seen.Journal
	seen.Reboots.InVain = j != nil && j.NoReset != nil && boot != "" && j.NoReset.Boot != boot
	for _, p := range pods {
		// Pods that came behind the fence tolerate everything, and would come back as often as they are evicted.
		if j != nil && j.Cordoned && p.CreationTimestamp.After(j.Started) {
			continue
		}
		seen.Holders.BeforeReboot = append(seen.Holders.BeforeReboot, holders.Drainable([]corev1.Pod{p})...)
	}
	for _, p := range seen.Holders.BeforeReboot {
		seen.Reboots.Others = append(seen.Reboots.Others, state.PlannedPod(p))
	}
}

// noteNoReset keeps in the journal that the GPU is not reset here: from now on its way leads over a reboot.
func (a *Agent) noteNoReset(ctx context.Context, seen state.Observed, gpu nvml.UUID, err error) time.Duration {
	j := *seen.Journal
	j.NoReset = &api.NoReset{Boot: seen.Boot.ID, GPUs: []nvml.UUID{gpu}}
	if known := seen.Refusal(); known != nil && known.Boot == j.NoReset.Boot {
		j.NoReset.GPUs = append(slices.Clone(known.GPUs), gpu)
	}
	if err := a.amend(ctx, seen, j); err != nil {
		a.log.Warn("recording that a GPU is not reset here", zap.Error(err))
		return a.settings.Retry.First
	}
	a.log.Info("a mode change takes a reboot here", zap.Error(err), zap.String("operation", j.Operation))
	return 0
}

// askForReboot writes the sentinel file.
func (a *Agent) askForReboot(ctx context.Context, seen state.Observed, want state.Desired) error {
	if err := a.sentinel.Ask(ctx, fmt.Sprintf("MIG mode of GPUs of node %s changes for %s at the next reboot", a.node, want.Name)); err != nil {
		return err
	}
	a.eventf(seen.Node, corev1.EventTypeNormal, config.ReasonNeedsReboot, "asked for a reboot by %s", a.sentinel.Path)
	return nil
}

// withdrawReboot removes our sentinel file as soon as no mode is pending, whatever is asked of the node by then: a reboot that
// nobody needs would take the geometry of all GPUs away.
func (a *Agent) withdrawReboot(ctx context.Context, seen state.Observed) {
	pending := slices.ContainsFunc(seen.GPUs, func(gpu nvml.GPU) bool { return !gpu.Lost && gpu.Pending != gpu.Enabled })
	if seen.Reboots.Asked != plan.AskedByUs || pending && a.settings.Reboot.Policy == config.RebootDelegate {
		return
	}
	if err := a.sentinel.Withdraw(ctx); err != nil {
		a.log.Warn("a reboot is still asked for, and not needed", zap.Error(err))
	}
}

// mayReboot reports why the node may not be rebooted for the change: nobody is evicted for a reboot that cannot be.
func (a *Agent) mayReboot(ctx context.Context, seen state.Observed, want state.Desired) error {
	limit := maxReboots
	if want.Undo {
		limit = maxRebootsUndo
	}
	var err error
	switch {
	case seen.Boot.Err != nil:
		err = fmt.Errorf("the host is not rebooted for it: %w", seen.Boot.Err)
	case a.settings.Reboot.Policy == config.RebootNever:
		err = plan.ErrNeedsReboot
	case !slices.Contains(seen.Journal.Reboots, seen.Boot.ID) && len(seen.Journal.Reboots) >= limit:
		err = plan.ErrStillPending
	case a.settings.Reboot.Policy == config.RebootSelf:
		call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
		defer cancel()
		err = a.logind.host.CanReboot(call)
	}
	if err != nil {
		return &api.Failure{Wish: want.Fingerprint, Reason: config.ReasonNeedsReboot, Message: err.Error()}
	}
	return nil
}

// reboot asks for one reboot for the change, or does it, and waits for it. It never returns nil: only the next boot of the
// node ends the step.
func (a *Agent) reboot(ctx context.Context, seen state.Observed, want state.Desired) error {
	j := *seen.Journal
	bootUnknown := seen.Boot.Err != nil && len(j.Reboots) > 0
	if bootUnknown || slices.Contains(j.Reboots, seen.Boot.ID) {
		if a.clock.Since(j.RebootAsked) > a.settings.Timeouts.Reboot {
			return &api.Failure{
				Wish: want.Fingerprint, Reason: config.ReasonNeedsReboot,
				Message: fmt.Sprintf("the node has not been rebooted in the %s since that was asked for", a.settings.Timeouts.Reboot),
			}
		}
		if a.logind.rebooting || bootUnknown || a.settings.Reboot.Policy != config.RebootSelf {
			return a.awaitReboot(j)
		}
	}
	if err := a.mayReboot(ctx, seen, want); err != nil {
		return err
	}
	if !slices.Contains(j.Reboots, seen.Boot.ID) {
		if err := a.noteReboot(ctx, seen, want, &j); err != nil {
			return err
		}
	}
	if a.settings.Reboot.Policy != config.RebootSelf {
		return a.awaitReboot(j)
	}
	// An agent that was killed before this line is followed by one that asks again, which does no harm: logind tells if it is
	// rebooting already.
	a.logind.rebooting = true
	call, cancel := context.WithTimeout(ctx, outcome.HostTimeout)
	defer cancel()
	err := a.logind.host.Reboot(call)
	if errors.Is(err, host.ErrNoLogind) || errors.Is(err, host.ErrLogindRefuses) || errors.Is(err, host.ErrRebootInhibited) {
		return &api.Failure{Wish: want.Fingerprint, Reason: config.ReasonNeedsReboot, Message: err.Error()}
	}
	return a.awaitReboot(j) // any other error leaves open whether the host goes down
}

// noteReboot writes into the journal that a reboot is asked for in this boot, and what it takes from GPUs of which nothing is
// asked.
func (a *Agent) noteReboot(ctx context.Context, seen state.Observed, want state.Desired, j *journal.Journal) error {
	j.Reboots = append(slices.Clone(j.Reboots), seen.Boot.ID)
	j.RebootAsked = a.clock.Now().UTC().Truncate(time.Second)
	j.Previous = slices.Clone(j.Previous)
	for _, gpu := range seen.GPUs {
		if _, asked := want.Targets[gpu.UUID]; !asked && gpu.Enabled && !j.Cut()[gpu.UUID] {
			j.RecordLayout(gpu)
			j.Previous[len(j.Previous)-1].Foreign = true
		}
	}
	if err := a.amend(ctx, seen, *j); err != nil {
		return err
	}
	a.eventf(seen.Node, corev1.EventTypeNormal, config.ReasonNeedsReboot, "the node is to be rebooted for %s: MIG mode is pending", want.Name)
	return nil
}

func (a *Agent) awaitReboot(j journal.Journal) error {
	until := j.RebootAsked.Add(a.settings.Timeouts.Reboot)
	who := "whoever answers " + a.sentinel.Path
	if a.settings.Reboot.Policy == config.RebootSelf {
		who = "logind"
	}
	return &outcome.Waiting{
		Reason: config.ReasonNeedsReboot, For: outcome.ForReboot, After: rebootRetry,
		Message: fmt.Sprintf("waiting for %s to reboot the node, asked for at %s, given up at %s",
			who, j.RebootAsked.Format(time.RFC3339), until.Format(time.RFC3339)),
	}
}

// park gives the node back until it is rebooted. The journal stays: the modes that are pending are taken back if the wish goes. Operands
// and units are back by now, and whoever stops one until the reboot means it.
func (a *Agent) park(ctx context.Context, seen state.Observed, want state.Desired) error {
	j := *seen.Journal
	uncordon := j.Cordoned && !seen.ForeignCordon()
	j.Cordoned, j.Paused, j.Stopped, j.Parked = false, nil, nil, true
	var startup []corev1.Taint // no pods are wanted on what a fresh node is until then
	if j.Startup != nil {
		startup = append(startup, j.Startup.Taint())
	}
	if _, err := a.recorded(ctx, seen, j, func(node *corev1.Node, text string) ([]byte, error) {
		return a.fence.Park(node, text, uncordon, startup...)
	}); err != nil {
		return err
	}
	a.leavePool(ctx, seen) // whether it succeeds shows after the reboot
	a.eventf(seen.Node, corev1.EventTypeNormal, config.ReasonNeedsReboot, "node given back until it is rebooted for %s", want.Name)
	return nil
}
