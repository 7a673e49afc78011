package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/agent/report/preview"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Preview plans the change that the label would request of the present node, and changes nothing. Label and name are those of an Ask. The error is the
// refusal that the node's condition would show.
func (a *Agent) Preview(ctx context.Context, label, name string) (preview.Result, error) {
	seen, err := a.observe(ctx)
	if err != nil {
		return heldUp(preview.Result{}, err)
	}
	node := seen.Node.DeepCopy()
	preview.SetLabels(node, label, name)
	return a.previewOf(ctx, seen, node)
}

// previewOf plans as a pass would for the node with other labels and annotations, from the caller's observation, and says what would keep the change.
func (a *Agent) previewOf(ctx context.Context, now *state.Observed, node *corev1.Node) (preview.Result, error) {
	seen := a.observedWith(ctx, now, node)
	to, err := a.plan(ctx, seen)
	if err == nil {
		err = notWanted(seen, to)
	}
	if err != nil {
		return heldUp(preview.Result{}, err)
	}
	want, offers := to.want, offer.Of(seen)
	p := preview.Of(want.Planned(want.Targets), decide.Planned(seen, want, a.env.Settings), to.steps)
	p.MIGStrategy, p.Beyond = offers.Strategy(a.env.Settings.MIGStrategy, want.Plugin), want.MissingPositions
	if cordon := report.CordonOfOthers(seen); cordon != "" && seen.ForeignCordon() {
		p.Notes = append(p.Notes, cordon)
	}
	if len(p.Steps) == 0 {
		return p, nil
	}
	p.Notes = append(p.Notes, offers.Notes(p.Before, p.After)...)
	p.Offers = offers.After(preview.Named(p.After), want.Plugin, p.MIGStrategy)
	p.Takes, p.Measured = decide.Estimate(seen)
	p.Lost, p.Patience = preview.Losses(seen, p.Steps), a.actors.evictions.Patience(seen, want, p.Steps)
	p.Unsure = cmp.Or(preview.Unsure(a.health.Causes(), p.Steps), preview.Staying(seen, p.Steps, p.Patience, a.env.Clock.Stamp()))
	if foretold(seen, want) && p.Unsure == "" {
		p.Unsure = preview.Overstaying(seen.Holders.Pods, a.env.Clock.Stamp())
	}
	p.Asked = a.actors.evictions.Asked(seen, want, p.Steps)
	in := act.Input{Seen: seen, Want: want, Steps: p.Steps}
	waits := a.foresee(ctx, in)
	p.Runs = a.deciders.gates.Runs(seen, want, p.Steps, waits == nil && in.Step().Kind == plan.AcquireSlot)
	if p, err = heldUp(p, waits); err != nil {
		return p, err
	}
	return withNext(p, a.beyondGate(ctx, in, waits)), nil
}

// withNext adds what keeps the change once the gate lets it pass, in place of the gate's own advice: a user who follows that alone gets no change.
func withNext(p preview.Result, next error) preview.Result {
	if next == nil {
		return p
	}
	switch then, err := heldUp(preview.Result{}, next); {
	case err == nil:
		p.HeldUp = fmt.Sprintf("%s; and then, as the node is now, %s: %s", p.Runs, then.Reason, then.HeldUp)
	case refusal(err) != "":
		p.HeldUp = fmt.Sprintf("%s; and then %s: %v", p.Runs, refusal(err), err)
	default:
		p.HeldUp += fmt.Sprintf("; what would keep the change then is not known: %v", err)
	}
	return p
}

// foretold reports whether the config manager gives the device plugin another config as soon as the label is set. No gate of the agent comes before that.
func foretold(seen *state.Observed, want state.Desired) bool {
	return seen.Plugin.Foretold && want.Plugin != nil && want.Plugin.UserManaged
}

// heldUp adds to a preview what the agent would wait for. Any other error is a refusal, or without a reason a failed observation.
func heldUp(p preview.Result, err error) (preview.Result, error) {
	var waiting *outcome.Waiting
	var failure *api.Failure
	switch {
	case err == nil:
	case errors.As(err, &waiting):
		said := *waiting
		said.Since = time.Time{} // it has not begun to wait
		said.Else = ""           // and no label asks for the change yet
		p.HeldUp, p.Reason = said.Error(), said.Reason
	case errors.As(err, &failure) && failure.Later:
		p.HeldUp, p.Reason = failure.Message, failure.Reason
	case driverError(err):
		p.HeldUp, p.Reason = err.Error(), config.ReasonDriverNotLoaded
		if errors.Is(err, nvml.ErrUnresponsive) {
			p.Reason = config.ReasonDriverUnresponsive
		}
	default:
		return p, err
	}
	return p, nil
}

// observedWith returns the observation with another node object: with the pool that its labels choose, and the config that the device plugin's config manager
// chooses by them.
func (a *Agent) observedWith(ctx context.Context, now *state.Observed, node *corev1.Node) *state.Observed {
	seen := *now
	seen.Node = node
	if seen.ChoosePool(); seen.Pool.Name != now.Pool.Name {
		seen.Pool.Slot = state.Slot{}
	}
	if _, err := a.deciders.resolver.Resolve(&seen); seen.Plugin.Read || decide.NeedsPlugin(err) {
		a.observers.devicePlugin.ObserveWithLabels(ctx, &seen)
	}
	key := node.Labels[config.LabelDevicePluginConfig]
	seen.Plugin.Foretold = key != "" && key != now.Node.Labels[config.LabelDevicePluginConfig]
	return &seen
}
