package verify

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/observe/deviceplugin"
	"github.com/gpuslice/gpuslice/agent/offer"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// missing is why capacity is missing.
type missing struct {
	reason config.Reason
	advice string // what a user can do
	text   string
	known  bool // the cause
}

// missing says why capacity is missing.
func (v *Verifier) missing(seen *state.Observed, want state.Desired) missing {
	if seen.Kubelet.Err != nil {
		return missing{config.ReasonKubeletUnavailable, "see the node's kubelet, by journalctl -u kubelet", blockers(seen), true}
	}
	if n := len(seen.Capacity.Withdrawn); n > 0 && n == len(seen.Capacity.Missing) {
		reason, advice := stays(seen, want)
		return missing{reason, advice, blockers(seen), true}
	}
	if seen.DevicePlugin.Unconnected != "" {
		return missing{
			config.ReasonCapacityMismatch, "restart kubelet on this node, if the log of the device plugin's pod says that it is already connected", blockers(seen), true,
		}
	}
	offers := offer.Of(seen)
	if pods := offers.Pods(); seen.Journal == nil && !asksForGPUs(want) && v.outdated.times == 0 && len(pods) > 0 && offer.OffersGone(seen) {
		return missing{
			config.ReasonCapacityMismatch,
			fmt.Sprintf("delete pod %s/%s, which read the GPUs before they were cut: its DaemonSet starts another", pods[0].Namespace, pods[0].Name), blockers(seen), false,
		}
	}
	if why, advice := offers.Absent(); why != "" {
		return missing{config.ReasonNoDevicePlugin, advice, fmt.Sprintf("%s (%s)", why, blockers(seen)), true}
	}
	if under := offers.RunsUnder(); under != "" {
		return missing{config.ReasonWrongMIGStrategy, v.OtherStrategy(seen, under), blockers(seen), true}
	}
	return missing{config.ReasonCapacityMismatch, cmp.Or(v.DevicePlugin.Unstarted(seen), offer.Advice(seen)), blockers(seen), false}
}

// blockers returns, in one text, why the agent cannot verify the capacity yet.
func blockers(seen *state.Observed) string { return sanitize.Listed(seen.Capacity.Missing) }

// stays says why no plan evicts the pods with devices that kubelet allocates to others, and what a user can do.
func stays(seen *state.Observed, want state.Desired) (reason config.Reason, advice string) {
	switch {
	case !slices.ContainsFunc(seen.Capacity.Withdrawn, func(w state.Withdrawn) bool { return !w.Pod.Terminating }):
		return config.ReasonEvicting, ""
	case want.Name == "" || want.Label == "" || want.Plugin == nil && len(want.Targets) == 0:
		return config.ReasonCapacityMismatch, "delete the pods, or set a label that asks for what " + offer.Of(seen).Name() + " advertises: without one the agent evicts none"
	default:
		return config.ReasonCapacityMismatch, fmt.Sprintf("delete the pods, or mend the device plugin's config, since the agent evicts none before: %v", seen.Plugin.ParseErr)
	}
}

// causePatience is how long capacity is missing before the agent reports a cause in the middle of a change. By then kubelet has forgotten the former
// device plugin, and the next one has begun to advertise.
const causePatience = 10 * time.Second

// OtherStrategy names the strategy that explains what the device plugin advertises, and where a user sets the right one.
func (v *Verifier) OtherStrategy(seen *state.Observed, under config.MIGStrategy) string {
	set := decide.HowToSet(seen.Capacity.Strategy)
	switch own := seen.ExplicitStrategy(); {
	case v.Settings.MIGStrategy != config.MIGStrategyAuto:
		set = fmt.Sprintf("migStrategy of the agent's settings is %s: %s; or set migStrategy of the settings to auto", seen.Capacity.Strategy, set)
	case own != "":
		set = "its environment or arguments say so, but it does otherwise: see its log on this node"
	case seen.Plugin.Current != nil && seen.Plugin.Current.MIGStrategy == seen.Capacity.Strategy:
		set = "its config says so, but it has not read that: delete its pod on this node"
	}
	return fmt.Sprintf("the device plugin advertises as under MIG strategy %s, but the node needs %s: %s", under, seen.Capacity.Strategy, set)
}

// RemoveStaleResources removes resources of former configs from the node object, if the settings say so. It removes only resources with capacity 0:
// kubelet has forgotten those after five minutes, and does not put them back.
func (v *Verifier) RemoveStaleResources(ctx context.Context, seen *state.Observed, converged bool) {
	if v.Settings.StaleResources != config.StaleResourcesRemove || !converged {
		return
	}
	var names []string
	for _, name := range capacity.StaleResources(seen.Kubelet.Offered, seen.Node.Status.Allocatable) {
		if capacity.Count(seen.Node.Status.Capacity, name) == 0 {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return
	}
	if err := v.Nodes.RemoveEmptyResources(ctx, seen.Node.Name, names); err != nil {
		v.Log.Warn("removing resources of former configs from the node", zap.Strings("resources", names), zap.Error(err))
		return
	}
	v.Events.Node(v.Node, events.RemovedStaleResources(names))
}

// Lacks returns what is missing of the capacity if no change is needed; nil if nothing is missing.
func (v *Verifier) Lacks(seen *state.Observed, want state.Desired) error {
	if len(seen.Capacity.Missing) == 0 {
		return nil
	}
	lacks := v.missing(seen, want)
	wait := &outcome.Waiting{Reason: lacks.reason, Advice: lacks.advice, Message: lacks.text, After: deviceplugin.AwaitsMPS(seen, outcome.DriverRetry)}
	if absent, _ := offer.Of(seen).Absent(); absent != "" {
		wait.For = offer.AbsentFor(seen)
	}
	return wait
}

// Await returns what is missing, until an observation finds nothing missing.
func (v *Verifier) Await(_ context.Context, in act.Input) error {
	now := v.Clock.Now()
	if v.began.IsZero() {
		v.began = now
	}
	if len(in.Seen.Capacity.Missing) == 0 {
		return &outcome.Waiting{
			Reason: config.ReasonAwaitingCapacity, For: outcome.ForStep, After: capacity.VerifyInterval,
			Message: "capacity is right; verifying it once more: " + offer.Of(in.Seen).Text(in.Want),
		}
	}
	if in.Seen.Journal == nil {
		return v.Lacks(in.Seen, in.Want)
	}
	lacks := v.missing(in.Seen, in.Want)
	fresh := isFresh(in.Seen, in.Want)
	until := v.until()
	if fails, forGood := v.failing(in.Seen, in.Want); forGood || fails != "" && !fresh && !now.Before(until) {
		return &api.Failure{
			Fingerprint: in.Want.Fingerprint, Reason: config.ReasonPluginFailed,
			Message: "the device plugin does not run with its new config: " + fails,
		}
	}
	if !fresh {
		v.noteLate(in.Seen, now)
	}
	endless := fresh || restoresAfterReboot(in)
	if endless || now.Before(until) {
		wait := &outcome.Waiting{
			Reason: config.ReasonAwaitingCapacity, For: outcome.ForStep, Message: "waiting for kubelet and " + offer.Of(in.Seen).Name() + ": " + blockers(in.Seen),
			After: deviceplugin.AwaitsMPS(in.Seen, capacity.VerifyInterval), Blockers: in.Seen.Capacity.Missing,
		}
		if lacks.known && now.Sub(v.began) >= causePatience {
			wait.Advice, wait.Message = lacks.advice, "waiting for kubelet and "+offer.Of(in.Seen).Name()+": "+lacks.text
		}
		if !endless {
			wait.Since, wait.Until, wait.Then = v.began, until, in.Seen.DeadlineText(in.Want)
		}
		return wait
	}
	return v.notBack(in, lacks)
}

// notBack ends the wait for capacity.
func (v *Verifier) notBack(in act.Input, lacks missing) error {
	if in.Want.Undo {
		return &outcome.Stalled{
			Reason: lacks.reason,
			Message: outcome.Clauses(lacks.advice,
				fmt.Sprintf("the GPUs are restored, but their capacity is not back after %s: %s", v.Settings.Timeouts.Capacity, lacks.text)),
		}
	}
	return &api.Failure{
		Fingerprint: in.Want.Fingerprint, Reason: lacks.reason,
		Message: outcome.Clauses(lacks.advice, fmt.Sprintf("capacity not verified after %s: %s", v.Settings.Timeouts.Capacity, lacks.text)),
	}
}

// noteLate remembers the device plugin's pods after half of the wait for capacity: they are late, and their replacements are not.
func (v *Verifier) noteLate(seen *state.Observed, now time.Time) {
	if v.late != nil || !now.After(v.half()) {
		return
	}
	for _, pod := range offer.Of(seen).Pods() {
		v.late = append(v.late, pod.UID)
	}
	v.Log.Info("capacity has been missing for long", zap.Strings("missing", seen.Capacity.Missing))
}

// isFresh reports whether the node has just been registered. Such a node has no former config, and its first plugin may wait for a
// driver that is still being installed.
func isFresh(seen *state.Observed, want state.Desired) bool {
	return len(seen.Journal.Startup()) > 0 && !want.Undo
}

// restoresAfterReboot reports whether the change restores what a reboot has taken. Its undo would bring back what the reboot has left: nothing.
func restoresAfterReboot(in act.Input) bool {
	return !in.Want.Undo && in.Seen.RebootedSinceVerified() && in.Seen.Restores(in.Want)
}

// failing returns why the device plugin does not run with the change's config, and whether that is for good; empty if it does, or there is none.
func (v *Verifier) failing(seen *state.Observed, want state.Desired) (why string, forGood bool) {
	if want.Undo || !seen.Journal.ChangesPlugin() {
		return "", false
	}
	return v.DevicePlugin.Fails(seen)
}

func (v *Verifier) until() time.Time { return v.began.Add(v.Settings.Timeouts.Capacity) }

func (v *Verifier) half() time.Time { return v.began.Add(v.Settings.Timeouts.Capacity / 2) }

// lateNow returns the pods of the device plugin that have run for half of the wait for capacity, while capacity is still missing. After the
// wait's end none is late any more, so that the end comes although a budget keeps the pod.
func (v *Verifier) lateNow(seen *state.Observed, want state.Desired) []types.UID {
	if seen.Journal == nil || v.began.IsZero() || len(seen.Capacity.Missing) == 0 || isFresh(seen, want) {
		return nil
	}
	if fails, _ := v.failing(seen, want); fails != "" {
		return nil
	}
	if now := v.Clock.Now(); !now.After(v.half()) || !now.Before(v.until()) {
		return nil
	}
	return v.late
}

// Within adds the end of the wait for capacity to a wait for late plugins to leave.
func (v *Verifier) Within(in act.Input, err error) error {
	if wait, is := errors.AsType[*outcome.Waiting](err); is {
		wait.Since, wait.Until, wait.Then = v.began, v.until(), in.Seen.DeadlineText(in.Want)
	}
	return err
}
