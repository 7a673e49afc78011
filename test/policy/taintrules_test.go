package policy_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/fencing"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// servesTaintRules is the minor version of Kubernetes from which on the API server serves DeviceTaintRules of resource.k8s.io/v1 by its defaults.
const servesTaintRules = 37

// newTaintRuleScene is a scene whose API server has the kind. The tests of policies run on each version that the agent supports, and older ones do not
// know it: there is nothing to confine then.
func newTaintRuleScene(t *testing.T) *scene {
	t.Helper()
	s := newScene(t)
	minor, err := s.cluster.Minor()
	if err != nil {
		t.Fatal(err)
	}
	if minor < servesTaintRules {
		t.Skipf("Kubernetes 1.%d does not serve DeviceTaintRules of resource.k8s.io/v1 by its defaults", minor)
	}
	return s
}

// taintRule is one that the agent of node own makes for a device, but for what is changed in it.
func (s *scene) taintRule(device string, change ...func(*resourcev1.DeviceTaintRule)) *resourcev1.DeviceTaintRule {
	r := &resourcev1.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{
			Name: "gpuslice-" + s.node + "-" + device + "-repartitioning", Labels: map[string]string{"app.kubernetes.io/name": "gpuslice", "gpuslice.io/node": s.node},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "own", UID: types.UID(s.node)}},
		},
		Spec: resourcev1.DeviceTaintRuleSpec{
			DeviceSelector: &resourcev1.DeviceTaintSelector{Driver: ptr.To("gpu.nvidia.com"), Pool: ptr.To("own"), Device: &device},
			Taint:          resourcev1.DeviceTaint{Key: "gpuslice.io/repartitioning", Effect: resourcev1.DeviceTaintEffectNoSchedule},
		},
	}
	for _, c := range change {
		c(r)
	}
	return r
}

func makesRule(change ...func(*resourcev1.DeviceTaintRule)) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		_, err := c.ResourceV1().DeviceTaintRules().Create(ctx, s.taintRule("gpu-0-mig-1g10gb-19-0", change...), metav1.CreateOptions{})
		return err
	}
}

func deletesRule(name string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		if device, of := strings.CutPrefix(name, "UID-"); of {
			name = s.taintRule(device).Name
		}
		return c.ResourceV1().DeviceTaintRules().Delete(ctx, name, inVain())
	}
}

// inVain has a deletion delete nothing: its body counts, and not the query.
func inVain() metav1.DeleteOptions { return metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}} }

func patchesRule(body string, sub ...string) func(context.Context, *scene, kubernetes.Interface) error {
	return func(ctx context.Context, s *scene, c kubernetes.Interface) error {
		_, err := c.ResourceV1().DeviceTaintRules().Patch(ctx, s.taintRule("made").Name, types.MergePatchType, []byte(body), metav1.PatchOptions{}, sub...)
		return err
	}
}

type rule = resourcev1.DeviceTaintRule

// manyFields says of so many labels with names of 100 characters that another has written them.
func manyFields(n int) []metav1.ManagedFieldsEntry {
	var fields []string
	for i := range n {
		fields = append(fields, fmt.Sprintf(`"f:%0100d":{}`, i))
	}
	return []metav1.ManagedFieldsEntry{entry("gpuslice-agent", "Update", "resource.k8s.io/v1", `{"f:metadata":{"f:labels":{`+strings.Join(fields, ",")+`}}}`)}
}

// Promise 24. With the component the agent keeps claims from single devices of its own node, by NoSchedule alone, and takes away what agents have made there.
func TestDeviceTaintRulesAreTheAgentsForDevicesOfItsOwnNode(t *testing.T) {
	s := newTaintRuleScene(t)
	s.apply()
	s.fill()
	rules := s.admin.ResourceV1().DeviceTaintRules()
	for _, r := range []*rule{
		s.taintRule("made"),
		s.taintRule("other", func(r *rule) { r.Spec.DeviceSelector.Pool = ptr.To("other") }),
		s.taintRule("gpu-0", func(r *rule) { r.Name = "gpuslice-another-uid-made" }),
		s.taintRule("label", func(r *rule) { r.Labels["gpuslice.io/node"] = "another-uid" }),
		s.taintRule("people", func(r *rule) { r.Labels = nil }),
		s.taintRule("gpu-0", func(r *rule) { r.Name = "people" }),
		s.taintRule("name", func(r *rule) { r.Spec.DeviceSelector.Device = ptr.To("gpu-1") }),
		s.taintRule("key", func(r *rule) { r.Spec.Taint.Key = "team/repair" }),
		s.taintRule("pool", func(r *rule) { r.Spec.DeviceSelector.Device = nil }),
		s.taintRule("all", func(r *rule) { r.Spec.DeviceSelector = nil }),
		s.taintRule("execute", func(r *rule) { r.Spec.Taint.Effect = resourcev1.DeviceTaintEffectNoExecute }),
	} {
		if _, err := rules.Create(t.Context(), r, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := rules.Delete(context.WithoutCancel(t.Context()), r.Name, metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		})
	}
	agent, unbound := s.tries(s.agent()), s.tries(s.unbound())
	goes := func(what string, c kubernetes.Interface, do func(context.Context, *scene, kubernetes.Interface) error, want bool) {
		t.Helper()
		s.until(fmt.Sprintf("%s: goes through %t", what, want), func(ctx context.Context) (bool, error) {
			no, err := denied(do(ctx, s, c))
			return no != want, err
		})
	}
	goes("without the component: make a rule", agent, makesRule(), false)
	s.apply("device-taint-rules")
	// That a forbidden rule is refused shows the policy in force; until then the rights alone let it through.
	goes("make a rule for another node", agent, makesRule(func(r *rule) { r.Spec.DeviceSelector.Pool = ptr.To("other") }), false)

	for what, do := range map[string]func(context.Context, *scene, kubernetes.Interface) error{
		"make a rule for a device that changes": makesRule(),
		"make a rule for a GPU that is not well": makesRule(func(r *rule) {
			r.Spec.Taint.Key, r.Name = "gpuslice.io/gpu-unhealthy", strings.TrimSuffix(r.Name, "repartitioning")+"gpu-unhealthy"
		}),
		"delete one that an agent has made": deletesRule("UID-made"),
		"make a rule without an owner":      makesRule(func(r *rule) { r.OwnerReferences = nil }),
		"list": func(ctx context.Context, s *scene, c kubernetes.Interface) error {
			_, err := c.ResourceV1().DeviceTaintRules().List(ctx, metav1.ListOptions{LabelSelector: "gpuslice.io/node=" + s.node})
			return err
		},
	} {
		goes(what, agent, do, true)
	}
	for what, do := range map[string]func(context.Context, *scene, kubernetes.Interface) error{
		"make one of another device's name":             makesRule(func(r *rule) { r.Spec.DeviceSelector.Device = ptr.To("gpu-1") }),
		"make one of another key's name":                makesRule(func(r *rule) { r.Spec.Taint.Key = "gpuslice.io/gpu-unhealthy" }),
		"make one of 400 KB, by its managedFields":      makesRule(func(r *rule) { r.ManagedFields = manyFields(4000) }),
		"make one for any node":                         makesRule(func(r *rule) { r.Spec.DeviceSelector.Pool = nil }),
		"make one for all devices":                      makesRule(func(r *rule) { r.Spec.DeviceSelector = nil }),
		"make one for the whole pool":                   makesRule(func(r *rule) { r.Spec.DeviceSelector.Device = nil }),
		"make one for another driver":                   makesRule(func(r *rule) { r.Spec.DeviceSelector.Driver = ptr.To("nic.example.com") }),
		"make one for any driver":                       makesRule(func(r *rule) { r.Spec.DeviceSelector.Driver = nil }),
		"make one with NoExecute":                       makesRule(func(r *rule) { r.Spec.Taint.Effect = resourcev1.DeviceTaintEffectNoExecute }),
		"make one with None":                            makesRule(func(r *rule) { r.Spec.Taint.Effect = resourcev1.DeviceTaintEffectNone }),
		"make one with a foreign key":                   makesRule(func(r *rule) { r.Spec.Taint.Key = "team/repair" }),
		"make one with a key like ours":                 makesRule(func(r *rule) { r.Spec.Taint.Key = "gpuslice.io.evil.example/repartitioning" }),
		"make one of another name":                      makesRule(func(r *rule) { r.Name = "people-2" }),
		"take a name of another agent's":                makesRule(func(r *rule) { r.Name = "gpuslice-another-uid-new" }),
		"make one that another agent takes for its own": makesRule(func(r *rule) { r.Labels["gpuslice.io/node"] = "another-uid" }),
		"make one of another node's agent":              makesRule(func(r *rule) { r.Name, r.Labels["gpuslice.io/node"] = "gpuslice-another-uid-new", "another-uid" }),
		"make one without the node's label":             makesRule(func(r *rule) { delete(r.Labels, "gpuslice.io/node") }),
		"delete one with the name of another agent's":   deletesRule("gpuslice-another-uid-made"),
		"delete one with the label of another agent's":  deletesRule("UID-label"),
		"delete one of another device's name":           deletesRule("UID-name"),
		"make one that goes with another node":          makesRule(func(r *rule) { r.OwnerReferences[0].UID = "another-uid" }),
		"make one of a generated name":                  makesRule(func(r *rule) { r.Name, r.GenerateName = "", "gpuslice-" }),
		"make one without the label":                    makesRule(func(r *rule) { delete(r.Labels, "app.kubernetes.io/name") }),
		"make one with further labels":                  makesRule(func(r *rule) { r.Labels["team"] = "a" }),
		"make one with annotations":                     makesRule(func(r *rule) { r.Annotations = map[string]string{"a": strings.Repeat("a", 1000)} }),
		"make one that cannot go":                       makesRule(func(r *rule) { r.Finalizers = []string{"gpuslice.io/keep"} }),
		"make one that is collected": makesRule(func(r *rule) {
			r.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: "none", UID: "none"}}
		}),
		"change one to NoExecute":           patchesRule(`{"spec":{"taint":{"effect":"NoExecute"}}}`),
		"change its status":                 patchesRule(`{"status":{"conditions":[]}}`, "status"),
		"delete another node's":             deletesRule("UID-other"),
		"delete one of people by its label": deletesRule("UID-people"),
		"delete one of people by its name":  deletesRule("people"),
		"delete one with a foreign key":     deletesRule("UID-key"),
		"delete one of the whole pool":      deletesRule("UID-pool"),
		"delete one of all devices":         deletesRule("UID-all"),
		"delete one with NoExecute":         deletesRule("UID-execute"),
		"delete all at once": func(ctx context.Context, _ *scene, c kubernetes.Interface) error {
			return c.ResourceV1().DeviceTaintRules().DeleteCollection(ctx, inVain(), metav1.ListOptions{})
		},
	} {
		goes(what, agent, do, false)
	}
	goes("make one with a token that is bound to no pod", unbound, makesRule(), false)
	goes("delete one with a token that is bound to no pod", unbound, deletesRule("UID-made"), false)
}

// What the agent's rules close is given to no claim, while the node's other GPUs are: by its own token, under the policy, with the real scheduler. A rule
// is there before its device is in a slice.
func TestClaimsGetOtherDevicesThanTheAgentsRulesClose(t *testing.T) {
	s := newTaintRuleScene(t)
	s.apply("device-taint-rules")
	s.fill()
	client, err := kube.New(s.agent())
	if err != nil {
		t.Fatal(err)
	}
	rules := &fencing.Rules{Env: act.Env{Node: "own"}, Client: client.DeviceTaintRules()}
	follow := func(closed ...fencing.Closed) {
		t.Helper()
		s.until(fmt.Sprintf("rules for %v", closed), func(ctx context.Context) (bool, error) {
			_, err := rules.Follow(ctx, types.UID(s.node), closed)
			return err == nil, ignoring(err, apierrors.IsForbidden) // the rights come a moment after the role
		})
	}
	follow(fencing.Closed{Device: "gpu-0", Key: config.TaintRepartitioning}, fencing.Closed{Device: "gpu-0-mig-1g10gb-19-0", Key: config.TaintRepartitioning})
	t.Cleanup(func() {
		if _, err := rules.Follow(context.WithoutCancel(t.Context()), types.UID(s.node), nil); err != nil {
			t.Error(err)
		}
	})
	namespace := clustertest.Namespace(t)
	class := "taint-rules.example.com"
	slice := &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "own-gpu.nvidia.com"},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: "gpu.nvidia.com", NodeName: ptr.To("own"), Pool: resourcev1.ResourcePool{Name: "own", Generation: 1, ResourceSliceCount: 1},
			Devices: []resourcev1.Device{{Name: "gpu-0"}, {Name: "gpu-1"}},
		},
	}
	every := &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: class}}
	if _, err := s.admin.ResourceV1().DeviceClasses().Create(t.Context(), every, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		err := errors.Join(
			s.admin.ResourceV1().ResourceSlices().Delete(ctx, slice.Name, metav1.DeleteOptions{}),
			s.admin.ResourceV1().DeviceClasses().Delete(ctx, class, metav1.DeleteOptions{}))
		if err != nil {
			t.Error(err)
		}
	})
	for _, name := range []string{"one", "two"} {
		s.claims(namespace, name, class)
	}
	if _, err := s.admin.ResourceV1().ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.until("a claim that has GPU 1, and a pod that has to wait", func(ctx context.Context) (bool, error) {
		got, err := s.devices(ctx, namespace)
		if err == nil && slices.Contains(got, "gpu-0") {
			err = fmt.Errorf("claims have %v", got)
		}
		if err != nil || !slices.Equal(got, []string{"", "gpu-1"}) {
			return false, err
		}
		return s.waits(ctx, namespace)
	})
	follow()
	s.until("claims that have both GPUs", func(ctx context.Context) (bool, error) {
		got, err := s.devices(ctx, namespace)
		return slices.Equal(got, []string{"gpu-0", "gpu-1"}), err
	})
}

// Whoever may create rules can give any number of them the node's label: the agent closes its devices all the same, and one after it opens them again.
func TestTheAgentFindsItsRulesAmongThoseOfOthers(t *testing.T) {
	if testing.Short() {
		t.Skip("it creates more than a thousand rules")
	}
	s := newTaintRuleScene(t)
	s.apply("device-taint-rules")
	s.fill()
	admin := rest.CopyConfig(s.cluster.Config())
	admin.QPS = -1
	others, err := kubernetes.NewForConfig(admin)
	if err != nil {
		t.Fatal(err)
	}
	all := others.ResourceV1().DeviceTaintRules()
	theirs := metav1.ListOptions{LabelSelector: "flood=" + s.node}
	t.Cleanup(func() {
		if err := all.DeleteCollection(context.WithoutCancel(t.Context()), metav1.DeleteOptions{}, theirs); err != nil {
			t.Error(err)
		}
	})
	for n := range 1100 {
		if _, err := all.Create(t.Context(), s.taintRule("gpu-9", func(r *rule) {
			r.Name, r.Labels["flood"] = fmt.Sprintf("flood-%d", n), s.node // before the agents' own, by their names
		}), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	client, err := kube.New(s.agent())
	if err != nil {
		t.Fatal(err)
	}
	// agent is a process, which keeps rules for these devices and the node's others.
	agent := func() *fencing.Rules {
		return &fencing.Rules{
			Env: act.Env{
				Node: "own", Settings: config.Default(), Clock: monotonic.New(clock.RealClock{}), Log: zap.NewNop(),
				Events: events.Recorder{To: record.NewFakeRecorder(100)},
			},
			Client: client.DeviceTaintRules(),
		}
	}
	for _, wanted := range [][]fencing.Closed{{{Device: "gpu-0", Key: config.TaintGPUUnhealthy}, {Device: "gpu-1", Key: config.TaintRepartitioning}}, nil} {
		s.until(fmt.Sprintf("rules for %v", wanted), func(ctx context.Context) (bool, error) {
			agent().Keep(ctx, types.UID(s.node), wanted, func() []string { return []string{"gpu-0", "gpu-1"} })
			list, err := all.List(ctx, metav1.ListOptions{LabelSelector: "gpuslice.io/node=" + s.node + ",!flood"})
			return err == nil && len(list.Items) == len(wanted), err
		})
	}
	if list, err := all.List(t.Context(), theirs); err != nil || len(list.Items) != 1100 {
		t.Errorf("%d rules of others are left: %v", len(list.Items), err)
	}
}

// claims makes a claim of one device, and the pod that it is for.
func (s *scene) claims(namespace, name, class string) {
	s.t.Helper()
	claim := &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{
			{Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: class}},
		}}},
	}
	if _, err := s.admin.ResourceV1().ResourceClaims(namespace).Create(s.t.Context(), claim, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			Containers:     []corev1.Container{{Name: "main", Image: "none", Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}}},
			ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}},
			Tolerations:    []corev1.Toleration{{Operator: corev1.TolerationOpExists}}, // the node has no kubelet
		},
	}
	if _, err := s.admin.CoreV1().Pods(namespace).Create(s.t.Context(), pod, metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// devices are those that claims have got, sorted; "" for one that has none.
func (s *scene) devices(ctx context.Context, namespace string) (out []string, _ error) {
	list, err := s.admin.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, c := range list.Items {
		device := ""
		if c.Status.Allocation != nil {
			device = c.Status.Allocation.Devices.Results[0].Device
		}
		out = append(out, device)
	}
	slices.Sort(out)
	return out, nil
}

// waits reports whether one pod has a place, and the scheduler has tried in vain to find one for the other.
func (s *scene) waits(ctx context.Context, namespace string) (bool, error) {
	pods, err := s.admin.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return false, err
	}
	placed, refused := 0, 0
	for _, p := range pods.Items {
		for _, c := range p.Status.Conditions {
			switch {
			case c.Type != corev1.PodScheduled:
			case c.Status == corev1.ConditionTrue:
				placed++
			case strings.Contains(c.Message, "cannot allocate all claims"):
				refused++
			}
		}
	}
	return placed == 1 && refused == 1, nil
}
