package fencing

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// Rules close single devices of NVIDIA's DRA driver to claims, by one DeviceTaintRule for each device and key. A rule's name follows from node,
// device and key, so an agent finds the rules of a killed one. Rules remembers only to save requests.
type Rules struct {
	act.Env

	Client kube.DeviceTaintRules

	kept   []Closed  // by the last successful Keep
	asked  time.Time // when that was; zero if this process has not asked yet
	failed bool      // the last Keep has failed

	closed []string  // devices that are closed for a change, as last read
	readAt time.Time // when that was; zero if they have to be read

	unusable error // why the agent can have no rules; nil if it can
	reported bool  // an Event has said so
}

// Closed is a device that is closed to claims, and the key of the taint, which says why.
type Closed struct{ Device, Key string }

const (
	// maxRules bounds the rules of a node: with sixteen GPUs, NVIDIA's DRA driver can advertise 432 parts.
	maxRules = 512
	// maxRulesRead bounds how many rules with the node's label one pass reads. Anyone who may create rules may give them the label.
	maxRulesRead = 2 * maxRules

	labelRuleNode = "gpuslice.io/node" // its value is a hash: a node's name may be longer than the value of a label
	labelRuleName = "app.kubernetes.io/name"
	rulePrefix    = "gpuslice-"
	hashLength    = 32 // of 64 characters
)

const (
	rulesRetry  = 30 * time.Second // after a failure
	rulesRepeat = 10 * time.Minute // for rules that others have deleted
)

// Forget drops what depends on times that the clock gave.
func (r *Rules) Forget(time.Time) { r.asked, r.readAt = time.Time{}, time.Time{} }

// RetryIn is the time until Keep retries a failure; zero if there is none.
func (r *Rules) RetryIn() time.Duration {
	if !r.failed {
		return 0
	}
	return rulesRetry
}

// Unusable reports whether the agent may not create rules, or the API server serves none, as far as this process has seen.
func (r *Rules) Unusable() bool { return r.unusable != nil }

// Try asks the API server whether it serves rules to the agent: Unusable has the result. The error is why there is none.
func (r *Rules) Try(ctx context.Context) error {
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	_, err := r.own(call)
	return r.unlessUnusable(err)
}

// unlessUnusable returns the error, unless it says that the agent may have no rules: ReportUnusable reports that.
func (r *Rules) unlessUnusable(err error) error {
	if !apierrors.IsForbidden(err) && !apierrors.IsNotFound(err) {
		return err
	}
	r.unusable = err
	return nil
}

// ReportUnusable sends an Event, once, if the agent can have no rules although the settings ask for them.
func (r *Rules) ReportUnusable() {
	if r.unusable == nil || r.reported {
		return
	}
	r.reported = true
	r.Events.Node(r.Node, events.RulesUnusable(r.unusable))
}

// Keep makes the rules match those that are wanted, as Follow does. It asks the API server if the wanted rules have changed, and at the process's start for
// the rules of a killed agent. While there are rules it also asks now and then, since others may delete them.
func (r *Rules) Keep(ctx context.Context, wanted []Closed) {
	since := r.Clock.Since(r.asked)
	switch {
	case r.asked.IsZero():
	case r.failed && since < rulesRetry, !r.failed && slices.Equal(wanted, r.kept) && (len(wanted) == 0 || since < rulesRepeat):
		return
	}
	r.asked, r.readAt = r.Clock.Now(), time.Time{}
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	made, err := r.Follow(call, wanted)
	r.reportUnhealthy(made)
	if len(wanted)+len(r.kept) == 0 && (apierrors.IsForbidden(err) || apierrors.IsNotFound(err)) {
		err = nil // without the component, or before Kubernetes 1.37, there is nothing to find
	}
	if r.failed = err != nil; !r.failed {
		r.kept = slices.Clone(wanted)
		if len(made) > 0 {
			r.unusable, r.reported = nil, false
		}
		return
	}
	if err = r.unlessUnusable(err); err != nil {
		r.Log.Warn("keeping claims from devices of GPUs", zap.Error(err))
	}
}

// reportUnhealthy names the newly closed devices of GPUs that are not well. Close reports those of a change.
func (r *Rules) reportUnhealthy(made []Closed) {
	var devices []string
	for _, c := range made {
		if c.Key == config.TaintGPUUnhealthy {
			devices = append(devices, c.Device)
		}
	}
	if len(devices) == 0 {
		return
	}
	slices.Sort(devices)
	r.Log.Info("closed devices of GPUs that are not well to claims", zap.Strings("devices", devices))
	r.Events.Node(r.Node, events.UnhealthyDevices(devices))
}

// Clear deletes the rules of agents on this node, when no agent continues with them. Where agents may not create any, there are none.
func (r *Rules) Clear(ctx context.Context) error {
	if _, err := r.Follow(ctx, nil); err != nil && !apierrors.IsForbidden(err) && !apierrors.IsNotFound(err) {
		return err
	}
	return nil
}

// Close creates the rules for a change, and deletes none: Keep does, once the journal names other devices or is gone.
func (r *Rules) Close(ctx context.Context, devices []string) error {
	r.asked, r.readAt = time.Time{}, time.Time{}
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	var wanted []Closed
	for _, d := range devices {
		wanted = append(wanted, Closed{d, config.TaintRepartitioning})
	}
	_, _, err := r.add(call, wanted)
	return r.unlessUnusable(err)
}

// Observe reads which devices the rules close for the change in the journal, and sends no Event. It asks the API server again after some time, since users may
// delete rules.
func (r *Rules) Observe(ctx context.Context, seen *state.Observed) {
	if seen.Journal != nil && len(seen.Journal.Closed) > 0 {
		if since := r.Clock.Since(r.readAt); r.readAt.IsZero() || since < 0 || since >= rulesRetry {
			r.read(ctx)
		}
		seen.DRA.Closed = r.closed
	}
	seen.DRA.RulesUnusable = r.unusable != nil
}

func (r *Rules) read(ctx context.Context) {
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	own, err := r.own(call)
	if err = r.unlessUnusable(err); err != nil {
		r.Log.Warn("reading which devices are closed to claims", zap.Error(err))
	}
	r.closed, r.readAt = nil, time.Time{}
	for _, rule := range own {
		if rule.Spec.Taint.Key == config.TaintRepartitioning {
			r.closed = append(r.closed, *rule.Spec.DeviceSelector.Device)
		}
	}
	if err == nil {
		r.readAt = r.Clock.Now()
	}
}

// Follow creates the rules that are wanted, and then deletes the other rules of agents on this node. It does not change the rules of others. It
// returns those that it has created. After an error some devices may be open or some old rules left; the rest stays done, and the next call
// continues.
func (r *Rules) Follow(ctx context.Context, wanted []Closed) (made []Closed, _ error) {
	unwanted, made, err := r.add(ctx, wanted)
	if err != nil {
		return made, err
	}
	for _, name := range slices.Sorted(maps.Keys(unwanted)) {
		err := r.Client.Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(unwanted[name].UID)}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // a conflict: another object has the name now
			return made, fmt.Errorf("deleting DeviceTaintRule %s: %w", name, err)
		}
	}
	return made, nil
}

// add creates the missing rules. It returns the unwanted ones, by their names, and those that it has created.
func (r *Rules) add(ctx context.Context, wanted []Closed) (unwanted map[string]*resourcev1.DeviceTaintRule, made []Closed, err error) {
	names := map[string]Closed{}
	for _, c := range wanted {
		// Devices are named by slices, which others may write.
		if len(validation.IsDNS1123Label(c.Device)) > 0 {
			return nil, nil, fmt.Errorf("cannot close device %q of node %s to claims: invalid name",
				sanitize.Cut(c.Device, validation.DNS1123LabelMaxLength), r.Node)
		}
		names[r.name(c)] = c
	}
	if len(names) > maxRules {
		return nil, nil, fmt.Errorf("cannot close %d devices of node %s to claims: the agent creates at most %d DeviceTaintRules", len(names), r.Node, maxRules)
	}
	if unwanted, err = r.own(ctx); err != nil {
		return nil, nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if _, is := unwanted[name]; is {
			delete(unwanted, name)
			continue
		}
		if err = r.create(ctx, name, names[name]); err != nil {
			break
		}
		made = append(made, names[name])
	}
	return unwanted, made, err
}

// own returns the rules that agents have created on this node, by their names.
func (r *Rules) own(ctx context.Context) (map[string]*resourcev1.DeviceTaintRule, error) {
	list, err := r.Client.List(ctx, metav1.ListOptions{LabelSelector: labelRuleNode + "=" + hash(r.Node), Limit: maxRulesRead})
	if err != nil {
		return nil, fmt.Errorf("listing DeviceTaintRules of node %s: %w", r.Node, err)
	}
	out := map[string]*resourcev1.DeviceTaintRule{}
	for i := range list.Items {
		if rule := &list.Items[i]; r.isOwn(rule) && rule.DeletionTimestamp == nil {
			out[rule.Name] = rule
		}
	}
	if list.Continue != "" {
		return nil, fmt.Errorf("node %s has more than %d DeviceTaintRules with label %s: delete those that no agent has created", r.Node, maxRulesRead, labelRuleNode)
	}
	return out, nil
}

// isOwn reports whether an agent has created the rule on this node, by all its fields: whoever may create rules may copy the labels by mistake.
func (r *Rules) isOwn(rule *resourcev1.DeviceTaintRule) bool {
	s := rule.Spec.DeviceSelector
	if s == nil || ptr.Deref(s.Driver, "") != holders.ClaimDriver || ptr.Deref(s.Pool, "") != r.Node || s.Device == nil {
		return false
	}
	t := rule.Spec.Taint
	return slices.Contains([]string{config.TaintRepartitioning, config.TaintGPUUnhealthy}, t.Key) && t.Effect == resourcev1.DeviceTaintEffectNoSchedule &&
		maps.Equal(rule.Labels, r.labels()) && rule.Name == r.name(Closed{*s.Device, t.Key})
}

func (r *Rules) create(ctx context.Context, name string, c Closed) error {
	_, err := r.Client.Create(ctx, &resourcev1.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: r.labels()},
		Spec: resourcev1.DeviceTaintRuleSpec{
			DeviceSelector: &resourcev1.DeviceTaintSelector{Driver: ptr.To(holders.ClaimDriver), Pool: &r.Node, Device: &c.Device},
			Taint:          resourcev1.DeviceTaint{Key: c.Key, Effect: resourcev1.DeviceTaintEffectNoSchedule},
		},
	}, metav1.CreateOptions{FieldManager: config.FieldManager})
	switch {
	case apierrors.IsAlreadyExists(err): // it was not among the agents' own
		return fmt.Errorf("delete DeviceTaintRule %s: it differs from an agent's, and claims still get device %s of node %s", name, c.Device, r.Node)
	case err != nil:
		return fmt.Errorf("creating a DeviceTaintRule for device %s of node %s: %w", c.Device, r.Node, err)
	}
	return nil
}

func (r *Rules) labels() map[string]string {
	return map[string]string{labelRuleName: "gpuslice", labelRuleNode: hash(r.Node)}
}

func (r *Rules) name(c Closed) string {
	return rulePrefix + hash(r.Node+"/"+c.Device+"/"+c.Key)
}

func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])[:hashLength]
}
