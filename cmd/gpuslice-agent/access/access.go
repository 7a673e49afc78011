// Package access finds out the rights of an agent's account when the agent starts: whether the admission policies of deploy/policies confine it to
// its own node, what confines it to the pods of that node, and whether it has the rights that the settings need. It only reports this to users: the
// agent decides nothing by it.
//
// It sends the API server requests that the policies have to refuse, and that would change nothing if they did not (dryRun=All).
// It knows nothing of GPUs.
package access

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// Policy is a part of what deploy/policies confines.
type Policy string

// The policies that an agent can try: of the last two each where components have given it the right. It cannot try that for deletions of pods, which
// the API server asks about a pod that is there.
const (
	Nodes            Policy = "nodes"
	Evictions        Policy = "evictions"
	Leases           Policy = "leases"
	Events           Policy = "events"
	ConfigMaps       Policy = "configmaps"
	DeviceTaintRules Policy = "devicetaintrules"
)

// probe is the name in the requests. No policy allows it, and no object of that name is created.
const probe = "gpuslice-policies"

// The agent asks an API server that does not answer nine times, within about 45 minutes.
var again = wait.Backoff{Duration: 10 * time.Second, Factor: 2, Jitter: 0.2, Steps: 9}

// Policies that are installed with the agent take the API server some seconds until they act, so the agent asks again within about a minute before it
// reports that they do not.
var settles = []time.Duration{2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 30 * time.Second}

// Options is what a Checker works with.
type Options struct {
	Client    kube.Interface
	Node      string               // name of the node that the agent runs on
	Namespace string               // of the Leases of pools
	Deletes   bool                 // the settings ask for drain.afterDeadline: delete
	ConfigMap config.ConfigMapName // of the device plugin
	Access    config.PodAccess
	Pods      Pods          // by which Client makes its requests about pods
	Timeout   time.Duration // of one request
	Heartbeat time.Duration // between two observations while policies are missing
	// Version asks the API server for its version, as v1.37.1; nil if the agent does not ask.
	Version func(context.Context) (string, error)
	Events  record.EventRecorder
	Log     *zap.Logger
}

// Pods knows who sends requests about pods: the node or the agent's account.
type Pods interface {
	// Works reports whether the API server lets the agent make them in the name of its node. It is known once it has answered one.
	Works() (works, known bool)
}

// Findings are what an account may do.
type Findings struct {
	// Level is what confines the agent to the pods of its node: impersonation, policy or rbac. It is empty if that is not known.
	Level config.PodAccess
	// InForce says of each policy that the agent could try whether it refuses what it has to.
	InForce map[Policy]bool
	// Unbound is set if the policies refuse everything, since the token of this process does not name the node.
	Unbound bool
	// MayNotEvict is set if the account has no right to evict the pods of the node, and may not do it in the node's name either.
	MayNotEvict bool
	// MayNotDelete is set if the agent shall delete pods by its settings, and its account has no right to.
	MayNotDelete bool
}

// Checker finds out once, and keeps the findings for Prometheus.
type Checker struct {
	o Options

	mu       sync.Mutex
	found    Findings
	reported bool
}

var _ prometheus.Collector = (*Checker)(nil)

// New makes a Checker. Nothing happens before Run.
func New(o Options) *Checker { return &Checker{o: o} }

// Begin finds out what the account may do and reports it: in the log, by Events of the node, to Prometheus, in the status. If the API server
// does not answer within the time of one request, Begin reports nothing.
func (c *Checker) Begin(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, c.o.Timeout)
	defer cancel()
	if found, err := c.Find(ctx); err == nil {
		c.report(ctx, found)
	}
}

// Run does what Begin has not done. It returns when policies confine the agent, or when ctx ends, or when the API server has not answered nine times.
// As long as no policies do, it asks again and again; an agent that is confined asks nothing more.
func (c *Checker) Run(ctx context.Context) {
	c.mu.Lock()
	reported := c.reported
	c.mu.Unlock()
	if !reported {
		c.findOut(ctx)
	}
	for _, pause := range settles {
		if c.unconfined() == "" || !sleep(ctx, pause) {
			return
		}
		c.recheck(ctx)
	}
	warned := c.unconfined()
	if warned == "" {
		return
	}
	c.warn(config.ReasonUnconfined, warned)
	for c.unconfined() != "" {
		if !sleep(ctx, c.o.Heartbeat) {
			return
		}
		c.recheck(ctx)
	}
	const text = "admission policies confine this agent to its own node now"
	c.o.Log.Info(text)
	c.o.Events.Event(c.reference(), corev1.EventTypeNormal, string(config.ReasonUnconfined), text)
}

// recheck keeps what is found if all of it is.
func (c *Checker) recheck(ctx context.Context) {
	found, err := c.Find(ctx)
	if err != nil {
		c.o.Log.Debug("whether policies confine the agent is not known", zap.Error(err))
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.found = found
}

// sleep waits; it returns false if ctx ends first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// findOut asks an API server that does not answer again and again.
func (c *Checker) findOut(ctx context.Context) {
	var found Findings
	err := wait.ExponentialBackoffWithContext(ctx, again, func(ctx context.Context) (bool, error) {
		var err error
		if found, err = c.Find(ctx); err != nil {
			c.o.Log.Debug("the rights of the agent's account are not known yet", zap.Error(err))
		}
		return err == nil, nil
	})
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		c.o.Log.Warn("cannot tell the rights of the agent's account: the API server does not say; restart the agent to ask again")
	}
	c.report(ctx, found)
}

// Find asks the API server, with at most one request for each policy and two more. The error names the checks that it could not make; its findings are
// valid anyway.
func (c *Checker) Find(ctx context.Context) (Findings, error) {
	found := Findings{InForce: map[Policy]bool{}}
	errs := c.tryPolicies(ctx, &found)
	found.Level = c.level(found)
	if found.Level == config.PodAccessImpersonation {
		delete(found.InForce, Evictions) // the API server asks for the pod before the policy, and there is none
	}
	if found.InForce[Nodes] {
		err := c.bounded(ctx, func(ctx context.Context) error { return c.patch(ctx, `{}`) })
		if found.Unbound = refused(err); err != nil && !found.Unbound {
			errs = append(errs, fmt.Errorf("trying whether the token names node %s: %w", c.o.Node, err))
		}
	}
	if c.o.Deletes {
		err := c.bounded(ctx, func(ctx context.Context) error {
			may, err := c.mayDelete(ctx)
			found.MayNotDelete = !may && err == nil
			return err
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("asking whether pods may be deleted: %w", err))
		}
	}
	return found, errors.Join(errs...)
}

// tryPolicies fills in which policies are in force, and returns an error for each trial without a result.
func (c *Checker) tryPolicies(ctx context.Context, found *Findings) (errs []error) {
	for _, p := range []struct {
		policy Policy
		try    func(context.Context) error
	}{{Nodes, c.node}, {Evictions, c.eviction}, {Leases, c.lease}, {Events, c.event}, {ConfigMaps, c.configMap}, {DeviceTaintRules, c.deviceTaintRule}} {
		err := c.bounded(ctx, p.try)
		switch {
		case refused(err):
			found.InForce[p.policy] = true
		case p.policy.needsComponent() && (apierrors.IsForbidden(err) || apierrors.IsNotFound(err)): // there is nothing to confine
		case err == nil || apierrors.IsNotFound(err): // the pod of the eviction does not exist
			found.InForce[p.policy] = false
		case p.policy == Evictions && apierrors.IsForbidden(err) && c.asksForItself():
			found.MayNotEvict = true
		default:
			errs = append(errs, fmt.Errorf("trying the policy for %s: %w", p.policy, err))
		}
	}
	return errs
}

// needsComponent reports whether the agent has the right to write only where a component gives it.
func (p Policy) needsComponent() bool { return p == ConfigMaps || p == DeviceTaintRules }

// level is what confines the agent to the pods of its node. The trial of the policy for evictions has shown who sends such requests.
func (c *Checker) level(found Findings) config.PodAccess {
	if works, known := c.o.Pods.Works(); known && works {
		return config.PodAccessImpersonation
	}
	acts, tried := found.InForce[Evictions]
	switch {
	case !tried:
		return ""
	case acts:
		return config.PodAccessPolicy
	default:
		return config.PodAccessRBAC
	}
}

// asksForItself reports whether it is settled that requests about pods are made in the name of the account.
func (c *Checker) asksForItself() bool {
	works, known := c.o.Pods.Works()
	return known && !works && c.o.Access != config.PodAccessImpersonation || c.o.Access == config.PodAccessPolicy || c.o.Access == config.PodAccessRBAC
}

func (c *Checker) bounded(ctx context.Context, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, c.o.Timeout)
	defer cancel()
	return ask(ctx)
}

// refused reports whether an admission policy has refused a request. A refusal by RBAC has no causes. Where a policy has no parameters, as that for
// evictions in a namespace without pods, it refuses all, and the API server calls the request invalid, without naming a field of it.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return false
	}
	causes := status.Status().Details.Causes
	return apierrors.IsForbidden(err) && len(causes) > 0 ||
		apierrors.IsInvalid(err) && slices.ContainsFunc(causes, func(c metav1.StatusCause) bool { return c.Type == "" && c.Field == "" })
}

func (c *Checker) node(ctx context.Context) error {
	return c.patch(ctx, `{"metadata":{"annotations":{"gpuslice.io/policies":"`+probe+`"}}}`)
}

func (c *Checker) patch(ctx context.Context, body string) error {
	_, err := c.o.Client.Nodes().Patch(ctx, c.o.Node, types.MergePatchType, []byte(body), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
	return err
}

// eviction evicts a pod that does not exist, without a UID: the policy refuses any eviction without one.
func (c *Checker) eviction(ctx context.Context) error {
	return c.o.Client.Pods(c.o.Namespace).EvictV1(ctx, &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: c.o.Namespace, Name: probe},
		DeleteOptions: &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}},
	})
}

func (c *Checker) lease(ctx context.Context) error {
	_, err := c.o.Client.Leases(c.o.Namespace).Create(ctx,
		&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: probe}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	return err
}

func (c *Checker) event(ctx context.Context) error {
	_, err := c.o.Client.Events(metav1.NamespaceDefault).Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: probe},
		InvolvedObject: *c.reference(), Source: corev1.EventSource{Component: probe, Host: c.o.Node},
	}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	return err
}

// configMap adds a key that no agent may add. There is nothing to try if the settings name no ConfigMap.
func (c *Checker) configMap(ctx context.Context) error {
	if c.o.ConfigMap.Name == "" {
		return apierrors.NewNotFound(corev1.Resource("configmaps"), "")
	}
	_, err := c.o.Client.ConfigMaps(c.o.ConfigMap.Namespace).Patch(ctx, c.o.ConfigMap.Name, types.MergePatchType,
		[]byte(`{"data":{"`+probe+`":""}}`), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
	return err
}

// deviceTaintRule closes a device that is not there, by a rule of another name than the agents'.
func (c *Checker) deviceTaintRule(ctx context.Context) error {
	_, err := c.o.Client.DeviceTaintRules().Create(ctx, &resourcev1.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: probe},
		Spec: resourcev1.DeviceTaintRuleSpec{
			DeviceSelector: &resourcev1.DeviceTaintSelector{Driver: ptr.To(holders.ClaimDriver), Pool: &c.o.Node, Device: ptr.To(probe)},
			Taint:          resourcev1.DeviceTaint{Key: config.TaintGPUUnhealthy, Effect: resourcev1.DeviceTaintEffectNoSchedule},
		},
	}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	return err
}

func (c *Checker) mayDelete(ctx context.Context) (bool, error) {
	review, err := c.o.Client.SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{
		Spec: authorizationv1.SelfSubjectAccessReviewSpec{
			ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: "delete", Resource: "pods"},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return false, err
	}
	return review.Status.Allowed, nil
}

// reference names the node with its UID: kubectl describe finds Events by that.
func (c *Checker) reference() *corev1.ObjectReference {
	return &corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: c.o.Node, UID: types.UID(c.o.Node)}
}

// report reports what users have to know, and what they can do.
func (c *Checker) report(ctx context.Context, found Findings) {
	c.mu.Lock()
	c.found, c.reported = found, true
	c.mu.Unlock()
	c.logLacks(ctx)
	if found.Level != "" {
		c.o.Log.Info("what confines this agent to the pods of its node is found", zap.String("podAccess", string(found.Level)))
	}
	if works, known := c.o.Pods.Works(); c.o.Access == config.PodAccessImpersonation && known && !works {
		c.warn(config.ReasonMissingRight, "the settings say podAccess: impersonation, and the API server lets this agent not ask in the name of node "+
			c.o.Node+", so that it sees no pod: deploy it with components/impersonation, on Kubernetes 1.36 or newer, or set podAccess to auto")
	}
	if len(found.InForce) > 0 && c.unconfined() == "" {
		c.o.Log.Info("admission policies confine this agent to its own node")
	}
	if found.MayNotEvict {
		c.warn(config.ReasonMissingRight, "this agent has no right to read and evict pods, and the API server does not let it ask in the name of node "+
			c.o.Node+", which takes Kubernetes 1.36 or newer: deploy it without components/impersonation there, and with podAccess auto")
	}
	if found.MayNotDelete {
		c.warn(config.ReasonMissingRight, "the settings say drain.afterDeadline: delete, and this agent has no right to delete pods: "+
			"those that are still there at the deadline stay; deploy it with components/delete-after-deadline")
	}
}

// unconfined says what no policy confines, or that the policies refuse all; empty if they do what they have to, or if that is not known.
func (c *Checker) unconfined() string {
	c.mu.Lock()
	found := c.found
	c.mu.Unlock()
	var missing []string
	for _, policy := range slices.Sorted(maps.Keys(found.InForce)) {
		if !found.InForce[policy] && !c.leftOut(policy) {
			missing = append(missing, string(policy))
		}
	}
	switch {
	case len(missing) > 0:
		apply := "deploy/policies"
		if slices.Equal(missing, []string{string(DeviceTaintRules)}) {
			apply = "deploy/components/device-taint-rules"
		}
		return "apply " + apply + " (deploy/SECURITY.md): no admission policy confines this agent's writes to its own node, for: " + strings.Join(missing, ", ") +
			"; a program that takes its token can change other nodes"
	case found.Unbound: // the policies refuse the Event, too
		return "the admission policies refuse all that this agent writes, since its token does not name node " + c.o.Node +
			": run it as a pod of that node, on Kubernetes 1.32 or newer, or deploy it with components/without-policies"
	default:
		return ""
	}
}

// leftOut reports whether the settings do without the policy.
func (c *Checker) leftOut(policy Policy) bool {
	return policy == Evictions && c.o.Access == config.PodAccessRBAC
}

func (c *Checker) warn(reason config.Reason, message string) {
	c.o.Log.Warn(message, zap.String("reason", string(reason)))
	c.o.Events.Event(c.reference(), corev1.EventTypeWarning, string(reason), message)
}

// Conditions implements report.Source. An account's rights are no condition of the node.
func (c *Checker) Conditions(*corev1.Node, bool, string, bool) []corev1.NodeCondition { return nil }

// Report implements report.Source.
func (c *Checker) Report(status *api.Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	status.PodAccess = c.found.Level
}

var (
	// descPolicy has a value for each policy that the agent could try, but for one that is missing and that the settings do without.
	descPolicy = metrics.Desc(config.MetricAdmissionPolicy)
	descLevel  = metrics.Desc(config.MetricPodAccess)
)

// Describe implements prometheus.Collector.
func (c *Checker) Describe(out chan<- *prometheus.Desc) {
	out <- descPolicy
	out <- descLevel
}

// Collect implements prometheus.Collector.
func (c *Checker) Collect(out chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.found.Level != "" {
		out <- prometheus.MustNewConstMetric(descLevel, prometheus.GaugeValue, 1, string(c.found.Level))
	}
	for policy, acts := range c.found.InForce {
		value := 0.0
		switch {
		case acts:
			value = 1
		case c.leftOut(policy):
			continue
		}
		out <- prometheus.MustNewConstMetric(descPolicy, prometheus.GaugeValue, value, string(policy))
	}
}
