package fencing

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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

// Rules close single devices of NVIDIA's DRA driver to claims, by one DeviceTaintRule for each device and key. A rule's name follows from the node's UID,
// device and key, so an agent finds the rules of a killed one. Its name and label begin with that UID, and the admission policy lets no other node's
// agent write such a rule. The node owns it: if the node object goes, the rule goes with it. Rules remembers only to save requests.
type Rules struct {
	act.Env

	Client kube.DeviceTaintRules

	kept   []Closed  // by the last successful Keep
	asked  time.Time // when that was; zero if this process has not asked yet
	failed bool      // the last Keep has failed

	closed []string  // devices that are closed for a change, as last read
	readAt time.Time // when that was; zero if they have to be read

	unusable   error     // why the agent cannot have the rules of a change; nil if it can
	unusableAt time.Time // when that was
	reported   bool      // an Event has said so, or that Keep fails
	failure    error     // of the last Keep, if it left a device open
}

// Closed is a device that is closed to claims, and the key of the taint, which says why.
type Closed struct{ Device, Key string }

const (
	// maxRules bounds the rules of a node: with sixteen GPUs, NVIDIA's DRA driver can advertise 432 parts.
	maxRules = 512
	// maxPages bounds how many pages of maxRules rules with the node's label are read at a time. Users may create rules with that label, too.
	maxPages = 8

	labelRuleNode = "gpuslice.io/node" // its value is the UID of the node
	labelRuleName = "app.kubernetes.io/name"
	rulePrefix    = "gpuslice-"
	hashLength    = 32 // of 64 characters
)

const (
	rulesRetry  = 30 * time.Second // after a failure
	rulesRepeat = 10 * time.Minute // for rules that others have deleted
)

// Forget drops what depends on times that the clock gave.
func (r *Rules) Forget(time.Time) {
	r.asked, r.readAt, r.unusableAt = time.Time{}, time.Time{}, time.Time{}
}

// RetryIn is the time until Keep retries a failure; zero if there is none.
func (r *Rules) RetryIn() time.Duration {
	if !r.failed {
		return 0
	}
	return rulesRetry
}

// Unusable reports whether the agent may not create rules, the API server serves none, or another program's rule has the name of one, as far as this
// process has seen.
func (r *Rules) Unusable() bool { return r.unusable != nil }

// Try asks the API server whether it serves rules to the agent: Unusable has the result. The error is why there is none.
func (r *Rules) Try(ctx context.Context, node types.UID) error {
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	_, err := r.own(call, node)
	return r.unlessUnusable(err)
}

// errTaken means that another program's rule has the name of one of the agent's.
var errTaken = errors.New("it differs from an agent's")

func isMissing(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsNotFound(err) }

// isRefused reports whether a retry is useless: the API server serves no rules, the agent lacks the right, an admission webhook refuses the rule, or
// another program's rule has its name.
func isRefused(err error) bool {
	return isMissing(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsMethodNotSupported(err) || errors.Is(err, errTaken)
}

// unlessUnusable returns the error, unless it says that the agent cannot have its rules: the agent then fences the node, and Report reports that.
func (r *Rules) unlessUnusable(err error) error {
	if !isRefused(err) {
		return err
	}
	r.unusable, r.unusableAt = err, r.Clock.Now()
	return nil
}

// Report sends an Event, once, if devices are open to claims although the settings ask for rules.
func (r *Rules) Report() {
	err := r.unusable
	if err == nil {
		err = r.failure
	}
	if err == nil || r.reported {
		return
	}
	r.reported = true
	r.Events.Node(r.Node, events.DevicesNotClosed(err, isMissing(err)))
}

// Keep makes the rules match those that are wanted, as Follow does. It asks the API server if the wanted rules have changed, and at the process's start for
// the rules of a killed agent. While there are rules it also asks now and then, since others may delete them.
func (r *Rules) Keep(ctx context.Context, node types.UID, wanted []Closed) {
	since := r.Clock.Since(r.asked)
	switch {
	case r.asked.IsZero():
	case r.failed && since < rulesRetry, !r.failed && slices.Equal(wanted, r.kept) && (len(wanted) == 0 || since < rulesRepeat):
		return
	}
	r.asked, r.readAt = r.Clock.Now(), time.Time{}
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	made, err := r.Follow(call, node, wanted)
	r.reportUnhealthy(made)
	if len(wanted)+len(r.kept) == 0 && isMissing(err) {
		err = nil // without the component, or before Kubernetes 1.37, there is nothing to find
	}
	if r.failed = err != nil; !r.failed {
		r.kept, r.failure = slices.Clone(wanted), nil
		if len(made) > 0 {
			r.unusable, r.reported = nil, false
		}
		return
	}
	if len(wanted) > 0 {
		r.failure = err
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
func (r *Rules) Clear(ctx context.Context, node types.UID) error {
	if _, err := r.Follow(ctx, node, nil); err != nil && !isMissing(err) {
		return err
	}
	return nil
}

// Close creates the rules for a change, and deletes none: Keep does, once the journal names other devices or is gone.
func (r *Rules) Close(ctx context.Context, node types.UID, devices []string) error {
	r.asked, r.readAt = time.Time{}, time.Time{}
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	var wanted []Closed
	for _, d := range devices {
		wanted = append(wanted, Closed{d, config.TaintRepartitioning})
	}
	_, _, err := r.add(call, node, wanted)
	return r.unlessUnusable(err)
}

// Observe reads which devices the rules close for the change in the journal, and sends no Event. It asks the API server again after some time, since users may
// delete rules.
func (r *Rules) Observe(ctx context.Context, seen *state.Observed) {
	if seen.Journal != nil && len(seen.Journal.Closed) > 0 {
		if since := r.Clock.Since(r.readAt); r.readAt.IsZero() || since < 0 || since >= rulesRetry {
			r.read(ctx, seen.Node.UID)
		}
		seen.DRA.Closed = r.closed
	}
	if r.unusable != nil && r.Clock.Since(r.unusableAt) >= rulesRepeat {
		r.unusable = nil // it may have been mended
	}
	seen.DRA.RulesUnusable = r.unusable != nil
}

func (r *Rules) read(ctx context.Context, node types.UID) {
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	own, err := r.own(call, node)
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
func (r *Rules) Follow(ctx context.Context, node types.UID, wanted []Closed) (made []Closed, _ error) {
	unwanted, made, open := r.add(ctx, node, wanted)
	for _, name := range slices.Sorted(maps.Keys(unwanted)) {
		err := r.Client.Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(unwanted[name].UID)}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // a conflict: another object has the name now
			return made, errors.Join(open, fmt.Errorf("deleting DeviceTaintRule %s: %w", name, err))
		}
	}
	return made, open
}

// add creates the missing rules. It returns the unwanted ones, by their names, and those that it has created. A device that it cannot close does not
// keep the others open: the error names the first that is refused, or else the first.
func (r *Rules) add(ctx context.Context, node types.UID, wanted []Closed) (unwanted map[string]*resourcev1.DeviceTaintRule, made []Closed, err error) {
	names := map[string]Closed{}
	var open []error
	for _, c := range wanted {
		if len(validation.IsDNS1123Label(c.Device)) > 0 { // devices are named by slices, which others may write
			open = append(open, fmt.Errorf("cannot close device %q of node %s to claims: invalid name",
				sanitize.Cut(c.Device, validation.DNS1123LabelMaxLength), r.Node))
			continue
		}
		names[nameOf(node, c)] = c
	}
	if len(names) > maxRules {
		return nil, nil, fmt.Errorf("cannot close %d devices of node %s to claims: the agent creates at most %d DeviceTaintRules", len(names), r.Node, maxRules)
	}
	if unwanted, err = r.own(ctx, node); err != nil {
		return nil, nil, err
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if _, is := unwanted[name]; is {
			delete(unwanted, name)
			continue
		}
		switch err := r.create(ctx, node, name, names[name]); {
		case err == nil:
			made = append(made, names[name])
		case isMissing(err), ctx.Err() != nil: // so would be all others
			return unwanted, made, err
		default:
			open = append(open, err)
		}
	}
	named := open[max(0, slices.IndexFunc(open, isRefused)):]
	switch {
	case len(open) == 0:
		return unwanted, made, nil
	case len(open) == 1:
		return unwanted, made, named[0]
	default:
		return unwanted, made, fmt.Errorf("%w; and %s more", named[0], sanitize.Counted(len(open)-1, "device"))
	}
}

// own returns the rules that agents have created on this node, by their names. It passes over those of others, however many have the label.
func (r *Rules) own(ctx context.Context, node types.UID) (map[string]*resourcev1.DeviceTaintRule, error) {
	out := map[string]*resourcev1.DeviceTaintRule{}
	o := metav1.ListOptions{LabelSelector: labelRuleNode + "=" + string(node), Limit: maxRules}
	for range maxPages {
		list, err := r.Client.List(ctx, o)
		if err != nil {
			return nil, fmt.Errorf("listing DeviceTaintRules of node %s: %w", r.Node, err)
		}
		for i := range list.Items {
			if rule := &list.Items[i]; r.isOwn(node, rule) && rule.DeletionTimestamp == nil {
				out[rule.Name] = rule
			}
		}
		if o.Continue = list.Continue; o.Continue == "" {
			break
		}
	}
	return out, nil
}

// isOwn reports whether an agent has created the rule on this node, by all its fields: whoever may create rules may copy the labels by mistake.
func (r *Rules) isOwn(node types.UID, rule *resourcev1.DeviceTaintRule) bool {
	s := rule.Spec.DeviceSelector
	if s == nil || ptr.Deref(s.Driver, "") != holders.ClaimDriver || ptr.Deref(s.Pool, "") != r.Node || s.Device == nil {
		return false
	}
	t := rule.Spec.Taint
	return slices.Contains([]string{config.TaintRepartitioning, config.TaintGPUUnhealthy}, t.Key) && t.Effect == resourcev1.DeviceTaintEffectNoSchedule &&
		maps.Equal(rule.Labels, labelsOf(node)) && rule.Name == nameOf(node, Closed{*s.Device, t.Key})
}

func (r *Rules) create(ctx context.Context, node types.UID, name string, c Closed) error {
	_, err := r.Client.Create(ctx, &resourcev1.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{
			Name: name, Labels: labelsOf(node),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: r.Node, UID: node}},
		},
		Spec: resourcev1.DeviceTaintRuleSpec{
			DeviceSelector: &resourcev1.DeviceTaintSelector{Driver: ptr.To(holders.ClaimDriver), Pool: &r.Node, Device: &c.Device},
			Taint:          resourcev1.DeviceTaint{Key: c.Key, Effect: resourcev1.DeviceTaintEffectNoSchedule},
		},
	}, metav1.CreateOptions{FieldManager: config.FieldManager})
	switch {
	case apierrors.IsAlreadyExists(err):
		return r.unlessOwn(ctx, node, name, c)
	case err != nil:
		return fmt.Errorf("creating a DeviceTaintRule for device %s of node %s: %w", c.Device, r.Node, err)
	}
	return nil
}

// unlessOwn returns an error unless the rule of this name, which own has not found, is the agents' own: a user has created too many with the label.
func (r *Rules) unlessOwn(ctx context.Context, node types.UID, name string, c Closed) error {
	list, err := r.Client.List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + name, Limit: 1})
	if err != nil {
		return fmt.Errorf("reading DeviceTaintRule %s of node %s: %w", name, r.Node, err)
	}
	for i := range list.Items {
		if rule := &list.Items[i]; rule.Name == name && r.isOwn(node, rule) && rule.DeletionTimestamp == nil {
			return nil
		}
	}
	return fmt.Errorf("delete DeviceTaintRule %s: %w, and claims still get device %s of node %s", name, errTaken, c.Device, r.Node)
}

func labelsOf(node types.UID) map[string]string {
	return map[string]string{labelRuleName: "gpuslice", labelRuleNode: string(node)}
}

// nameOf is the name of a rule. The admission policy compares its beginning with the UID of the node in the agent's token.
func nameOf(node types.UID, c Closed) string {
	sum := sha256.Sum256([]byte(c.Device + "/" + c.Key))
	return rulePrefix + string(node) + "-" + hex.EncodeToString(sum[:])[:hashLength]
}
