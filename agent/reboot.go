package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// hostTimeout bounds one request to the host's logind, which answers in milliseconds if it answers.
	hostTimeout = 5 * time.Second
	// rebootRetry is the pause between two looks whether the node has been rebooted: each reboot starts the agent anew.
	rebootRetry = 30 * time.Second
	// maxReboots and maxRebootsUndo bound how many reboots one change may take. A mode that is still pending after one
	// would be so after the next; the way back may need one of its own.
	maxReboots     = 1
	maxRebootsUndo = 2
)

// observeReboots looks whether a mode change takes a reboot here, and what is known of one.
func (a *Agent) observeReboots(seen *observed, pods []corev1.Pod) {
	seen.reboots = plan.Reboots{
		Needed: seen.withoutReset() != "",
		Policy: plan.RebootPolicy(a.settings.Reboot.Policy),
		Asked:  a.sentinel.state(),
	}
	seen.drainable = drain.Drainable(pods)
	for _, p := range seen.drainable {
		seen.reboots.Others = append(seen.reboots.Others, plannedPod(p))
	}
}

// withoutReset is the boot in which the driver has refused to reset a GPU, if that is the present one.
func (s observed) withoutReset() string {
	boot := s.node.Status.NodeInfo.BootID
	if boot != "" && (s.status.WithoutReset == boot || s.journal != nil && s.journal.WithoutReset == boot) {
		return boot
	}
	return ""
}

// noteWithoutReset keeps in the journal that GPUs are not reset here: from now on the way leads over a reboot.
func (a *Agent) noteWithoutReset(ctx context.Context, seen observed, err error) time.Duration {
	j := *seen.journal
	j.WithoutReset = seen.node.Status.NodeInfo.BootID
	if err := a.amend(ctx, seen, j); err != nil {
		a.log.Warn("recording that GPUs are not reset here", zap.Error(err))
		return a.settings.Retry.First
	}
	a.log.Info("a mode change takes a reboot here", zap.Error(err), zap.String("operation", j.Operation))
	return 0
}

// ask writes the sentinel file, or removes it.
func (a *Agent) ask(seen observed, want wish, on bool) error {
	if !on {
		return a.sentinel.withdraw()
	}
	if err := a.sentinel.ask(fmt.Sprintf("MIG mode of GPUs of node %s changes for %s at the next reboot", a.node, want.name)); err != nil {
		return err
	}
	a.eventf(seen.node, corev1.EventTypeNormal, config.ReasonNeedsReboot, "asked for a reboot by %s", a.sentinel.path)
	return nil
}

// reboot asks for one reboot for the change, or does it, and waits for it. It never returns nil: only the next boot of the
// node ends the step.
func (a *Agent) reboot(ctx context.Context, seen observed, want wish) error {
	j := *seen.journal
	boot := seen.node.Status.NodeInfo.BootID
	limit := maxReboots
	if want.undo {
		limit = maxRebootsUndo
	}
	failed := func(format string, args ...any) error {
		return &Failure{Wish: want.fingerprint, Reason: config.ReasonNeedsReboot, Message: fmt.Sprintf(format, args...)}
	}
	self := a.settings.Reboot.Policy == config.RebootSelf
	switch {
	case a.settings.Reboot.Policy == config.RebootNever:
		return failed("%v", plan.ErrNeedsReboot)
	case slices.Contains(j.Reboots, boot):
		if waited := a.clock.Since(j.RebootAsked); waited > a.settings.Timeouts.Reboot {
			return failed("the node has not been rebooted in the %s since that was asked for", a.settings.Timeouts.Reboot)
		}
		return a.awaitReboot(j)
	case len(j.Reboots) >= limit:
		return failed("MIG mode is still pending after a reboot of the node; see the kernel's log for messages of NVRM")
	case self:
		if err := a.host1(ctx, a.host.CanReboot); err != nil {
			return failed("%v", err)
		}
	}
	// Once for each boot, whatever happens: it is written before it is done.
	j.Reboots = append(slices.Clone(j.Reboots), boot)
	j.RebootAsked = a.clock.Now().UTC().Truncate(time.Second)
	if err := a.amend(ctx, seen, j); err != nil {
		return err
	}
	if self {
		a.eventf(seen.node, corev1.EventTypeNormal, config.ReasonNeedsReboot, "rebooting the node for %s: MIG mode is pending", want.name)
		if err := a.host1(ctx, a.host.Reboot); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return failed("%v", err)
		}
	}
	return a.awaitReboot(j)
}

func (a *Agent) awaitReboot(j Journal) error {
	until := j.RebootAsked.Add(a.settings.Timeouts.Reboot)
	who := "whoever answers " + a.sentinel.path
	if a.settings.Reboot.Policy == config.RebootSelf {
		who = "logind"
	}
	return &Waiting{
		Reason: config.ReasonNeedsReboot, After: rebootRetry,
		Message: fmt.Sprintf("waiting for %s to reboot the node, asked for at %s, given up at %s",
			who, j.RebootAsked.Format(time.RFC3339), until.Format(time.RFC3339)),
	}
}

// host1 makes one request of the host, with a deadline.
func (a *Agent) host1(ctx context.Context, request func(context.Context) error) error {
	call, cancel := context.WithTimeout(ctx, hostTimeout)
	defer cancel()
	return request(call)
}

// atReboot tells what the next reboot will bring; empty if nothing waits for one.
func (s observed) atReboot(want wish) string {
	gpus := plan.AtReboot(s.planned(want), want.targets)
	if len(gpus) == 0 || want.undo {
		return ""
	}
	text := fmt.Sprintf("%s: %s MIG mode on at the node's next reboot, since this machine does not let the driver reset a GPU; "+
		"until then the node is given back, and the change goes on by itself after it", want.name, turns(gpus))
	if s.reboots.Policy == plan.RebootDelegate {
		return text + ". A reboot is asked for by the sentinel file"
	}
	return text + ". Reboot the node when it suits you, or set reboot.policy in the settings"
}

// rebootState is the state of a change that waits for a reboot: one that is left to people is none that a tool should go
// on waiting for.
func (s observed) rebootState() config.State {
	if s.reboots.Policy == plan.RebootDelegate {
		return config.StateRebooting
	}
	return config.StateFailed
}

func turns(gpus []nvml.GPU) string {
	names := make([]string, len(gpus))
	for i, gpu := range gpus {
		names[i] = fmt.Sprint(gpu.Index)
	}
	if len(names) == 1 {
		return "GPU " + names[0] + " turns"
	}
	return "GPUs " + strings.Join(names, ", ") + " turn"
}
