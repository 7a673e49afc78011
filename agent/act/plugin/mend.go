package plugin

import (
	"cmp"
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
)

// unmended is a key that the agent could not rewrite.
type unmended struct {
	err      error
	failures int       // in a row
	next     time.Time // when the agent tries again
}

// Mend rewrites the agent's key that the node's label names, if another program has removed or changed it. The plugin has already read the key, so
// nothing changes for the node's pods. It returns what it has done, or, the first time, why it failed; news is empty if there is nothing to say.
func (h *Handover) Mend(ctx context.Context, seen *state.Observed, want state.Desired) (news string, err error) {
	m, key := seen.Plugin.Manager, seen.Plugin.Text
	switch {
	case m == nil || m.ReadErr != nil:
		return "", nil //nolint:nilerr // the observation reports what it cannot read
	case !m.Damaged:
		h.unmended = unmended{}
		return "", nil
	}
	text := m.Files[key] // the text that this process has read before; else the requested one, if it has the same name
	if text == "" && want.Plugin != nil && want.Plugin.Text == key {
		text = want.Plugin.KeyContent
	}
	if text == "" || h.MendsIn() > 0 {
		return "", h.unmended.err
	}
	err = h.patchConfigMap(ctx, m, key, &text)
	if err == nil {
		h.unmended = unmended{}
		return m.KeyName(key) + " was removed or changed by another program: the agent has rewritten it, and no pod has to leave. " +
			"Without the admission policy gpuslice-agent-configmaps the agents of all nodes can write it: kubectl apply -k deploy/policies", nil
	}
	h.Log.Warn("rewriting the agent's key of the device plugin's configs", zap.Error(err))
	failures := h.unmended.failures + 1
	h.unmended = unmended{err: err, failures: failures, next: h.Clock.Now().Add(h.Retries.PauseAfter(failures))}
	if failures == 1 {
		news = cmp.Or(whyRefused(m, err), err.Error()) + "; " + m.KeyName(key) + " was removed or changed by another program: " +
			"the device plugin runs with what it has read, and would not restart with it"
	}
	return news, err
}

// MendsIn returns the time until the agent retries to write the key; not positive if it does not wait for that.
func (h *Handover) MendsIn() time.Duration { return h.unmended.next.Sub(h.Clock.Now()) }

// RequireKey returns a wait if the step needs the key that the agent could not rewrite. One kind of step starts the plugin, which would not run
// without the key, or with another's text. Another begins a change that needs such a start for its undo. All other steps go on.
func (h *Handover) RequireKey(in act.Input) error {
	m, err := in.Seen.Plugin.Manager, h.unmended.err
	if m == nil || err == nil {
		return nil
	}
	starts := in.Step().Traits().StartsPlugin && (in.Step().Kind != plan.ResumeOperands || m.Pod.UID == "")
	begins := !in.Want.Undo && !in.Seen.HardwareOrPluginTouched() &&
		(plan.Has(in.Steps, plan.WriteSharing) || plan.Any(in.Steps, func(t plan.Traits) bool { return t.ShapesPlugin }))
	if !starts && !begins {
		return nil
	}
	why := whyRefused(m, err)
	wait := &outcome.Waiting{
		Reason: config.ReasonNoHandover, After: max(0, h.MendsIn()), Message: cmp.Or(why, err.Error()),
		Else: "the device plugin runs with what it has read of its key, and would not restart",
	}
	if why == "" {
		wait.Reason, wait.For = config.ReasonRetrying, outcome.ForRetry
	}
	wait.Since = in.Seen.Since(wait.Reason, h.Clock.Stamp())
	return wait
}
