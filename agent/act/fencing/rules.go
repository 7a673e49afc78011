package fencing

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
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
// device and key, so an agent finds the rules of a killed one. The admission policy lets no other node's agent write a rule of that name, or with the label
// of this node. The node owns it: if the node object goes, the rule goes with it. Rules remembers only to save requests.
type Rules struct {
	act.Env

	Client kube.DeviceTaintRules

	kept   []Closed  // by the last successful Keep
	asked  time.Time // when that was; zero if this process has not asked yet
	failed bool      // the last Keep has failed

	closed []string  // devices that are closed for a change, as last read
	readAt time.Time // when that was; zero if they have to be read

	open     map[Closed]failure // what the agent cannot close; of everything, all devices
	reported bool               // an Event has said so
	left     error              // why the last Keep has not deleted a rule
	hidden   bool               // the last Keep has perhaps not found all rules
	said     bool               // an Event, or the log, has said that rules are or may be left
}

// failure is why a device is open.
type failure struct {
	err error
	at  time.Time
}

// everything stands for all devices in Rules.open.
var everything = Closed{}

// Closed is a device that is closed to claims, and the key of the taint, which says why.
type Closed struct{ Device, Key string }

const (
	// maxRules bounds the rules of a node: with sixteen GPUs, NVIDIA's DRA driver can advertise 432 parts.
	maxRules = 512
	// page is how many rules are read at a time: others can fill a rule up to 1.5 MiB. maxPages bounds the pages: others can create rules with the
	// node's label, too.
	page, maxPages = 16, 64

	labelRuleNode = "gpuslice.io/node" // its value is the UID of the node
	labelRuleName = "app.kubernetes.io/name"
	rulePrefix    = "gpuslice-"
)

const (
	rulesRetry  = 30 * time.Second // after a failure
	rulesRepeat = 10 * time.Minute // for rules that others have deleted
)

// Forget drops what depends on times that the clock gave.
func (r *Rules) Forget(time.Time) {
	r.asked, r.readAt, r.open = time.Time{}, time.Time{}, nil
}

// RetryIn is the time until Keep retries a failure; zero if there is none.
func (r *Rules) RetryIn() time.Duration {
	if !r.failed {
		return 0
	}
	return rulesRetry
}

// Unusable reports whether the agent can close no device: it may not create rules, the API server serves none, or has failed to list them.
func (r *Rules) Unusable() bool { return r.open[everything].err != nil }

// Open returns why the device is not closed; nil if it is, or need not be.
func (r *Rules) Open(c Closed) error {
	if err := r.open[c].err; err != nil {
		return err
	}
	return r.open[everything].err
}

// Try asks the API server whether it serves rules to the agent: Unusable has the result. The error is that the context has ended.
func (r *Rules) Try(ctx context.Context, node types.UID) error {
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	_, _, err := r.own(call, node, func() []Closed { return nil })
	if ctx.Err() == nil {
		r.note(everything, err)
	}
	return ctx.Err()
}

// errTaken means that another program's rule has the name of one of the agent's.
var errTaken = errors.New("it differs from an agent's")

func isMissing(err error) bool { return apierrors.IsForbidden(err) || apierrors.IsNotFound(err) }

// note records why a device, or everything, is open; without an error, that it is not.
func (r *Rules) note(c Closed, err error) {
	if err == nil {
		delete(r.open, c)
		return
	}
	if r.open == nil {
		r.open = map[Closed]failure{}
	}
	r.open[c] = failure{err, r.Clock.Now()}
}

// noteAll records what add has not closed, and why.
func (r *Rules) noteAll(wanted []Closed, open map[Closed]error, err error) {
	r.note(everything, err)
	for _, c := range wanted {
		r.note(c, open[c])
	}
}

// Report sends an Event, once, if devices are open to claims although the settings ask for rules, and one if the agent cannot delete a rule.
func (r *Rules) Report() {
	if len(r.open) > 0 && !r.reported {
		r.reported = true
		first := slices.SortedFunc(maps.Keys(r.open), compareClosed)[0] // everything is the first
		err := r.open[first].err
		r.Events.Node(r.Node, events.DevicesNotClosed(err, isMissing(err)))
	}
	if r.left != nil && !r.said {
		r.said = true
		r.Events.Node(r.Node, events.DevicesLeftClosed(r.left, isMissing(r.left)))
	}
}

func compareClosed(a, b Closed) int {
	return cmp.Or(cmp.Compare(a.Device, b.Device), cmp.Compare(a.Key, b.Key))
}

// Keep makes the rules match those that are wanted, as Follow does. It asks the API server if the wanted rules have changed, and at the process's start for
// the rules of a killed agent. While there are rules it also asks now and then, since others may delete them. Devices returns those of the node: however many
// rules of others have the node's label, no rule that an agent has left keeps one of these closed.
func (r *Rules) Keep(ctx context.Context, node types.UID, wanted []Closed, devices func() []string) {
	if !r.isDue(wanted) {
		return
	}
	r.asked, r.readAt = r.Clock.Now(), time.Time{}
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	found, err := r.follow(call, node, wanted, func() []Closed {
		known := slices.Clone(r.kept)
		for _, d := range devices() {
			known = append(known, Closed{d, config.TaintRepartitioning}, Closed{d, config.TaintGPUUnhealthy})
		}
		return known
	})
	if ctx.Err() != nil {
		return
	}
	r.reportUnhealthy(found.made)
	maps.DeleteFunc(r.open, func(c Closed, _ failure) bool { return !slices.Contains(wanted, c) })
	if len(wanted) > 0 {
		r.noteAll(wanted, found.open, err)
	} else {
		err = r.leftBy(node, err)
		found.left = cmp.Or(found.left, err)
	}
	r.left, r.hidden = found.left, found.hidden
	if err = found.errOr(err); err != nil {
		r.failed = true
		r.Log.Warn("keeping claims from devices of GPUs", zap.Error(err))
		return
	}
	r.kept, r.failed, r.said = slices.Clone(wanted), false, false
	r.reported = r.reported && len(found.made) == 0
}

// isDue reports whether Keep has to ask the API server.
func (r *Rules) isDue(wanted []Closed) bool {
	since := r.Clock.Since(r.asked)
	switch {
	case r.asked.IsZero():
		return true
	case r.failed:
		return since >= rulesRetry
	default:
		return !slices.Equal(wanted, r.kept) || (len(wanted) > 0 || r.hidden) && since >= rulesRepeat
	}
}

// leftBy adds to an error what a person can do about rules that the agent no longer wants and cannot find. Without the component, or before Kubernetes
// 1.37, a process that has made no rule has left none.
func (r *Rules) leftBy(node types.UID, err error) error {
	switch {
	case err == nil:
		return nil
	case len(r.kept) > 0 || !isMissing(err):
		return fmt.Errorf("%w; see %s", err, command("get", node))
	case apierrors.IsForbidden(err):
		r.Log.Info("the agent may not see whether an earlier one has left devices closed to claims", zap.Error(err), zap.String("see", command("get", node)))
	}
	return nil
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

// Clear deletes the rules of agents on this node, when no agent continues with them. The error says which are left, and how a person deletes them. Where
// the API server serves no rules, and where neither the settings nor this process have asked for any, there are none to look for.
func (r *Rules) Clear(ctx context.Context, node types.UID) error {
	found, err := r.follow(ctx, node, nil, nil)
	if err == nil && found.hidden {
		err = fmt.Errorf("more than %d DeviceTaintRules have its label, and not all of them are an agent's", page*maxPages)
	}
	err = found.errOr(err)
	asks := r.Settings.Drain.Fence == config.DrainFenceDevices || r.Settings.Health.DeviceTaint == config.DeviceTaintNoSchedule || len(r.kept) > 0
	switch {
	case err == nil, found.left == nil && (apierrors.IsNotFound(err) || apierrors.IsForbidden(err) && !asks):
		return nil
	case found.left != nil: // it names the command
		return err
	default:
		return fmt.Errorf("devices of node %s may still be closed to claims: %w; delete the rules that are left: %s", r.Node, err, command("delete", node))
	}
}

// command is how a person does something with the agents' rules of this node.
func command(verb string, node types.UID) string {
	return "kubectl " + verb + " devicetaintrules -l " + labelRuleNode + "=" + string(node)
}

// Close creates the rules for a change, and deletes none: Keep does, once the journal names other devices or is gone. What it cannot close, Open and Unusable
// report, and the next plan fences the node. The error is that the context has ended.
func (r *Rules) Close(ctx context.Context, node types.UID, devices []string) error {
	r.asked, r.readAt = time.Time{}, time.Time{}
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	wanted := forChange(devices)
	found, err := r.add(call, node, wanted, nil)
	if ctx.Err() == nil {
		r.noteAll(wanted, found.open, err)
	}
	return ctx.Err()
}

func forChange(devices []string) (out []Closed) {
	for _, d := range devices[:min(len(devices), maxRules+1)] { // of more, none is closed
		out = append(out, Closed{d, config.TaintRepartitioning})
	}
	return out
}

// Observe reads which devices the rules close for the change in the journal, and sends no Event. It asks the API server again after some time, since users may
// delete rules.
func (r *Rules) Observe(ctx context.Context, seen *state.Observed) {
	if seen.Journal != nil && len(seen.Journal.Closed) > 0 {
		if since := r.Clock.Since(r.readAt); r.readAt.IsZero() || since < 0 || since >= rulesRetry {
			r.read(ctx, seen.Node.UID, seen.Journal.Closed)
		}
		seen.DRA.Closed = r.closed
	}
	maps.DeleteFunc(r.open, func(c Closed, f failure) bool { // it may have been mended; Keep tries the others itself
		return c.Key != config.TaintGPUUnhealthy && r.Clock.Since(f.at) >= rulesRepeat
	})
	seen.DRA.RulesUnusable = r.Unusable()
	for c := range r.open {
		if c.Key == config.TaintRepartitioning {
			seen.DRA.Unclosable = append(seen.DRA.Unclosable, c.Device)
		}
	}
}

func (r *Rules) read(ctx context.Context, node types.UID, devices []string) {
	call, cancel := context.WithTimeout(ctx, r.Settings.Timeouts.APICall)
	defer cancel()
	own, _, err := r.own(call, node, func() []Closed { return forChange(devices) })
	if isMissing(err) {
		r.note(everything, err)
	}
	r.closed, r.readAt = nil, time.Time{}
	for _, rule := range own {
		if rule.Spec.Taint.Key == config.TaintRepartitioning {
			r.closed = append(r.closed, *rule.Spec.DeviceSelector.Device)
		}
	}
	if err != nil {
		r.Log.Warn("reading which devices are closed to claims", zap.Error(err))
		return
	}
	r.readAt = r.Clock.Now()
}

// Follow creates the rules that are wanted, and then deletes the other rules of agents on this node. It does not change the rules of others. It
// returns those that it has created. After an error some devices may be open or some old rules left; the rest stays done, and the next call
// continues.
func (r *Rules) Follow(ctx context.Context, node types.UID, wanted []Closed) (made []Closed, _ error) {
	found, err := r.follow(ctx, node, wanted, nil)
	return found.made, found.errOr(err)
}

// follow is Follow. Known returns what rules may close; nil for nothing.
func (r *Rules) follow(ctx context.Context, node types.UID, wanted []Closed, known func() []Closed) (found, error) {
	out, err := r.add(ctx, node, wanted, known)
	if err != nil {
		return out, err
	}
	for _, name := range slices.Sorted(maps.Keys(out.unwanted)) {
		err := r.Client.Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: ptr.To(out.unwanted[name].UID)}})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // a conflict: another object has the name now
			out.left = fmt.Errorf("deleting DeviceTaintRule %s of node %s: %w; until it is gone, no claim gets device %s: %s",
				name, r.Node, err, *out.unwanted[name].Spec.DeviceSelector.Device, command("delete", node))
			break
		}
	}
	return out, nil
}

// found is what add and follow have found and done.
type found struct {
	unwanted map[string]*resourcev1.DeviceTaintRule // by their names
	hidden   bool                                   // there may be more of them
	made     []Closed
	open     map[Closed]error
	left     error // why an unwanted one is left
}

// errOr returns the error, or else one that names the first device that is open, and what is left.
func (f found) errOr(err error) error {
	if err != nil || len(f.open) == 0 {
		return cmp.Or(err, f.left)
	}
	err = f.open[slices.SortedFunc(maps.Keys(f.open), compareClosed)[0]]
	if more := len(f.open) - 1; more > 0 {
		err = fmt.Errorf("%w; and %s more", err, sanitize.Counted(more, "device"))
	}
	return errors.Join(err, f.left)
}

// add creates the missing rules. A device that it cannot close does not keep the others open. The error is that it could close no more.
func (r *Rules) add(ctx context.Context, node types.UID, wanted []Closed, known func() []Closed) (found, error) {
	out := found{open: map[Closed]error{}}
	var valid []Closed
	for _, c := range wanted {
		if len(validation.IsDNS1123Label(c.Device)) > 0 { // devices are named by slices, which others may write
			out.open[c] = fmt.Errorf("cannot close device %q of node %s to claims: invalid name", sanitize.Cut(c.Device, validation.DNS1123LabelMaxLength), r.Node)
			continue
		}
		valid = append(valid, c)
	}
	if len(valid) > maxRules {
		return out, fmt.Errorf("cannot close %d devices of node %s to claims: the agent creates at most %d DeviceTaintRules", len(valid), r.Node, maxRules)
	}
	own, all, err := r.own(ctx, node, func() []Closed {
		if known == nil {
			return valid
		}
		return slices.Concat(valid, known())
	})
	if err != nil {
		return out, err
	}
	out.unwanted, out.hidden = maps.Clone(own), !all
	for _, c := range valid {
		name := nameOf(node, c)
		delete(out.unwanted, name)
		if own[name] != nil {
			continue
		}
		switch err := r.create(ctx, node, name, c); {
		case err == nil:
			out.made = append(out.made, c)
		case isMissing(err), ctx.Err() != nil: // so would be all others
			return out, err
		default:
			out.open[c] = err
		}
	}
	return out, nil
}

// own returns the rules that agents have created on this node, by their names. It passes over those of others. If these are too many, all is false, and own
// asks for the rules of what is known one by one.
func (r *Rules) own(ctx context.Context, node types.UID, known func() []Closed) (own map[string]*resourcev1.DeviceTaintRule, all bool, _ error) {
	own = map[string]*resourcev1.DeviceTaintRule{}
	read := func(o metav1.ListOptions) (more string, _ error) {
		list, err := r.Client.List(ctx, o)
		if err != nil {
			return "", fmt.Errorf("listing DeviceTaintRules of node %s: %w", r.Node, err)
		}
		for i := range list.Items {
			if rule := &list.Items[i]; r.isOwn(node, rule) && rule.DeletionTimestamp == nil {
				own[rule.Name] = &resourcev1.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: rule.Name, UID: rule.UID}, Spec: rule.Spec} // not what others can fill
			}
		}
		return list.Continue, nil
	}
	o := metav1.ListOptions{LabelSelector: labelRuleNode + "=" + string(node), Limit: page}
	for range maxPages {
		more, err := read(o)
		if err != nil {
			return nil, false, err
		}
		if more == "" {
			return own, true, nil
		}
		o.Continue = more
	}
	for _, c := range known() {
		name := nameOf(node, c)
		if own[name] != nil || len(validation.IsDNS1123Label(c.Device)) > 0 {
			continue
		}
		if _, err := read(metav1.ListOptions{FieldSelector: "metadata.name=" + name, Limit: 1}); err != nil {
			return nil, false, err
		}
	}
	return own, false, nil
}

// isOwn reports whether an agent has created the rule on this node: whoever may create rules may copy the labels by mistake. Tools may have added labels.
func (r *Rules) isOwn(node types.UID, rule *resourcev1.DeviceTaintRule) bool {
	s := rule.Spec.DeviceSelector
	if s == nil || ptr.Deref(s.Driver, "") != holders.ClaimDriver || ptr.Deref(s.Pool, "") != r.Node || s.Device == nil {
		return false
	}
	t := rule.Spec.Taint
	return slices.Contains([]string{config.TaintRepartitioning, config.TaintGPUUnhealthy}, t.Key) && t.Effect == resourcev1.DeviceTaintEffectNoSchedule &&
		rule.Labels[labelRuleName] == "gpuslice" && rule.Labels[labelRuleNode] == string(node) && rule.Name == nameOf(node, Closed{*s.Device, t.Key})
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
		return fmt.Errorf("delete DeviceTaintRule %s: %w, and claims still get device %s of node %s", name, errTaken, c.Device, r.Node)
	case err != nil:
		return fmt.Errorf("creating a DeviceTaintRule for device %s of node %s: %w", c.Device, r.Node, err)
	}
	return nil
}

func labelsOf(node types.UID) map[string]string {
	return map[string]string{labelRuleName: "gpuslice", labelRuleNode: string(node)}
}

// nameOf is the name of a rule. The admission policy compares it with the UID of the node in the agent's token, and with device and key.
func nameOf(node types.UID, c Closed) string {
	return rulePrefix + string(node) + "-" + c.Device + "-" + strings.TrimPrefix(c.Key, "gpuslice.io/")
}
