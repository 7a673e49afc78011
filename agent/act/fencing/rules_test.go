package fencing_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/fencing"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/clientset"
)

func closed(key string, devices ...string) (out []fencing.Closed) {
	for _, d := range devices {
		out = append(out, fencing.Closed{Device: d, Key: key})
	}
	return out
}

// closures are what the rules of the cluster say, sorted.
func closures(t *testing.T, client *fake.Clientset) (out []string) {
	t.Helper()
	list, err := client.ResourceV1().DeviceTaintRules().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range list.Items {
		s := r.Spec.DeviceSelector
		out = append(out, fmt.Sprintf("%s/%s/%s %s:%s", *s.Driver, *s.Pool, *s.Device, r.Spec.Taint.Key, r.Spec.Taint.Effect))
	}
	slices.Sort(out)
	return out
}

func rulesOf(client *fake.Clientset, node string) *fencing.Rules {
	return &fencing.Rules{Env: act.Env{Node: node}, Client: clientset.Of(client).DeviceTaintRules()}
}

func TestRulesAreMadeForTheDevicesThatAreClosedAndDeletedWithTheLastReason(t *testing.T) {
	client := fake.NewClientset()
	rules := rulesOf(client, "node-a")
	follow := func(wanted []fencing.Closed, want ...string) {
		t.Helper()
		if _, err := rules.Follow(t.Context(), "uid-a", wanted); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, closures(t, client)); diff != "" {
			t.Errorf("rules (-want +got):\n%s", diff)
		}
	}
	const changes, unwell = "gpu.nvidia.com/node-a/gpu-0 gpuslice.io/repartitioning:NoSchedule", "gpu.nvidia.com/node-a/gpu-0 gpuslice.io/gpu-unhealthy:NoSchedule"
	follow(nil)
	follow(closed(config.TaintRepartitioning, "gpu-0"), changes)
	both := slices.Concat(closed(config.TaintRepartitioning, "gpu-0"), closed(config.TaintGPUUnhealthy, "gpu-0"))
	follow(both, unwell, changes)
	client.ClearActions()
	follow(both, unwell, changes)
	if writes := slices.DeleteFunc(client.Actions(), func(a clienttesting.Action) bool { return a.GetVerb() == "list" }); len(writes) > 0 {
		t.Errorf("what is there already is written: %v", writes)
	}
	follow(closed(config.TaintGPUUnhealthy, "gpu-0"), unwell) // the change is over, and the GPU not well
	follow(nil)
}

// Killed after each of its requests, an agent leaves what the next one finishes or takes back.
func TestTheNextAgentTakesBackWhatOneHasMadeThatWasKilled(t *testing.T) {
	devices := []string{"gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1", "gpu-0-mig-3g40gb-9-4"}
	for killed := range len(devices) + 2 {
		client := fake.NewClientset()
		writes, gone := 0, errors.New("killed")
		client.PrependReactor("*", "devicetaintrules", func(a clienttesting.Action) (bool, runtime.Object, error) {
			if a.GetVerb() == "list" {
				return false, nil, nil
			}
			writes++
			return writes > killed, nil, gone
		})
		if _, err := rulesOf(client, "node-a").Follow(t.Context(), "uid-a", closed(config.TaintRepartitioning, devices...)); (err != nil) != (killed < len(devices)) {
			t.Errorf("killed after %d writes: %v", killed, err)
		}
		client.ReactionChain = client.ReactionChain[1:]
		if n := len(closures(t, client)); n != min(killed, len(devices)) {
			t.Errorf("killed after %d writes: %d rules", killed, n)
		}
		if _, err := rulesOf(client, "node-a").Follow(t.Context(), "uid-a", nil); err != nil {
			t.Error(err)
		}
		if left := closures(t, client); len(left) > 0 {
			t.Errorf("killed after %d writes: left %v", killed, left)
		}
	}
}

func TestRulesOfOthersStay(t *testing.T) {
	client := fake.NewClientset()
	if _, err := rulesOf(client, "node-a").Follow(t.Context(), "uid-a", closed(config.TaintRepartitioning, "gpu-0")); err != nil {
		t.Fatal(err)
	}
	all, err := client.ResourceV1().DeviceTaintRules().List(t.Context(), metav1.ListOptions{})
	if err != nil || len(all.Items) != 1 {
		t.Fatal(all, err)
	}
	ours := all.Items[0]
	for name, change := range map[string]func(*resourcev1.DeviceTaintRule){
		"another name":   func(r *resourcev1.DeviceTaintRule) { r.Name += "0" },
		"another device": func(r *resourcev1.DeviceTaintRule) { r.Spec.DeviceSelector.Device = ptr.To("gpu-1") },
		"another pool":   func(r *resourcev1.DeviceTaintRule) { r.Spec.DeviceSelector.Pool = ptr.To("node-b") },
		"another driver": func(r *resourcev1.DeviceTaintRule) { r.Spec.DeviceSelector.Driver = ptr.To("nic.example.com") },
		"whole pool":     func(r *resourcev1.DeviceTaintRule) { r.Spec.DeviceSelector.Device = nil },
		"all devices":    func(r *resourcev1.DeviceTaintRule) { r.Spec.DeviceSelector = nil },
		"another key":    func(r *resourcev1.DeviceTaintRule) { r.Spec.Taint.Key = "team/repair" },
		"another effect": func(r *resourcev1.DeviceTaintRule) { r.Spec.Taint.Effect = resourcev1.DeviceTaintEffectNoExecute },
		"another label":  func(r *resourcev1.DeviceTaintRule) { r.Labels["team"] = "a" },
		"no label":       func(r *resourcev1.DeviceTaintRule) { delete(r.Labels, "app.kubernetes.io/name") },
	} {
		t.Run(name, func(t *testing.T) {
			theirs := ours.DeepCopy()
			change(theirs)
			client := fake.NewClientset(theirs)
			if _, err := rulesOf(client, "node-a").Follow(t.Context(), "uid-a", nil); err != nil {
				t.Error(err)
			}
			if _, err := client.ResourceV1().DeviceTaintRules().Get(t.Context(), theirs.Name, metav1.GetOptions{}); err != nil {
				t.Error(err)
			}
			// Under the name that the agent would give its own, it keeps no claim from the device: the agent must not believe so.
			_, err := rulesOf(client, "node-a").Follow(t.Context(), "uid-a", closed(config.TaintRepartitioning, "gpu-0"))
			if taken := theirs.Name == ours.Name; (err != nil) != taken || taken && !strings.Contains(err.Error(), ours.Name) {
				t.Errorf("with the name taken %t: %v", taken, err)
			}
		})
	}
	if _, err := rulesOf(client, "node-b").Follow(t.Context(), "uid-b", nil); err != nil {
		t.Error(err)
	}
	if n := len(closures(t, client)); n != 1 {
		t.Errorf("the agent of another node leaves %d rules, want 1", n)
	}
}

func TestARuleIsDeletedByItsUID(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("create", "devicetaintrules", func(a clienttesting.Action) (bool, runtime.Object, error) {
		made, is := a.(clienttesting.CreateAction).GetObject().(*resourcev1.DeviceTaintRule)
		if !is {
			t.Errorf("created: %v", a)
			return false, nil, nil
		}
		made.UID = "first"
		return false, nil, nil
	})
	rules := rulesOf(client, "node-a")
	if _, err := rules.Follow(t.Context(), "uid-a", closed(config.TaintRepartitioning, "gpu-0")); err != nil {
		t.Fatal(err)
	}
	var asked []types.UID
	client.PrependReactor("delete", "devicetaintrules", func(a clienttesting.Action) (bool, runtime.Object, error) {
		d := a.(clienttesting.DeleteAction)
		asked = append(asked, ptr.Deref(d.GetDeleteOptions().Preconditions.UID, ""))
		return true, nil, apierrors.NewConflict(resourcev1.Resource("devicetaintrules"), d.GetName(), errors.New("another UID"))
	})
	if _, err := rules.Follow(t.Context(), "uid-a", nil); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff([]types.UID{"first"}, asked); diff != "" {
		t.Errorf("UIDs asked for (-want +got):\n%s", diff)
	}
}

func TestMoreDevicesThanANodeHasAreNotClosed(t *testing.T) {
	client := fake.NewClientset()
	var many []string
	for i := range 513 {
		many = append(many, fmt.Sprintf("gpu-%d", i))
	}
	if _, err := rulesOf(client, "node-a").Follow(t.Context(), "uid-a", closed(config.TaintRepartitioning, many...)); err == nil || len(client.Actions()) > 0 {
		t.Errorf("%v, after %d requests to the API server", err, len(client.Actions()))
	}
}

// What others have written, in a slice or under the name of a rule, keeps no other device open.
func TestADeviceThatCannotBeClosedKeepsNoOtherOpen(t *testing.T) {
	theirs := &resourcev1.DeviceTaintRule{Spec: resourcev1.DeviceTaintRuleSpec{DeviceSelector: &resourcev1.DeviceTaintSelector{Pool: ptr.To("thief")}}}
	first := fake.NewClientset()
	if _, err := rulesOf(first, "node-a").Follow(t.Context(), "uid-a", closed(config.TaintRepartitioning, "gpu-0")); err != nil {
		t.Fatal(err)
	}
	list, err := first.ResourceV1().DeviceTaintRules().List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	theirs.Name = list.Items[0].Name
	for name, devices := range map[string][]string{
		"no name of a device": {"gpu-1/../../nodes", "gpu-2"}, "too long a name": {strings.Repeat("g", 64), "gpu-2"}, "no name": {"", "gpu-2"}, "a name that is taken": {"gpu-0", "gpu-2"},
	} {
		client := fake.NewClientset(theirs.DeepCopy())
		made, err := rulesOf(client, "node-a").Follow(t.Context(), "uid-a", closed(config.TaintRepartitioning, devices...))
		if err == nil || len(err.Error()) > 300 {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(closed(config.TaintRepartitioning, "gpu-2"), made); diff != "" {
			t.Errorf("%s: closed (-want +got):\n%s", name, diff)
		}
	}
}

// Anyone with the right may create rules with the agent's label: the agent reads past a page of them, and finds a rule of its own by its name behind any number.
func TestRulesOfOthersWithTheAgentsLabelHideNone(t *testing.T) {
	for name, pages := range map[string]int{"on the second page": 1, "behind all pages that are read": 100} {
		client := fake.NewClientset()
		if _, err := rulesOf(client, "node-a").Follow(t.Context(), "uid-a", closed(config.TaintRepartitioning, "gpu-0")); err != nil {
			t.Fatal(err)
		}
		read := 0
		client.PrependReactor("list", "devicetaintrules", func(a clienttesting.Action) (bool, runtime.Object, error) {
			list, is := a.(clienttesting.ListAction)
			if read++; read > pages || !is || !strings.Contains(list.GetListRestrictions().Labels.String(), "uid-a") {
				return false, nil, nil
			}
			theirs := resourcev1.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "theirs", Labels: map[string]string{"gpuslice.io/node": "uid-a"}}}
			return true, &resourcev1.DeviceTaintRuleList{ListMeta: metav1.ListMeta{Continue: "more"}, Items: []resourcev1.DeviceTaintRule{theirs}}, nil
		})
		if made, err := rulesOf(client, "node-a").Follow(t.Context(), "uid-a", closed(config.TaintRepartitioning, "gpu-0")); err != nil || read > 10 {
			t.Errorf("%s: created %v after %d reads: %v", name, made, read, err)
		}
	}
}

// The callers fall back to the cordon: they have to know that no rule keeps claims away.
func TestRulesThatTheAPIServerDoesNotServeOrAllowAreAnError(t *testing.T) {
	kind := resourcev1.Resource("devicetaintrules")
	for _, says := range []error{apierrors.NewNotFound(kind, ""), apierrors.NewForbidden(kind, "", errors.New("no right"))} {
		for _, verb := range []string{"list", "create"} {
			client := fake.NewClientset()
			client.PrependReactor(verb, "devicetaintrules", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, says })
			if _, err := rulesOf(client, "node-a").Follow(t.Context(), "uid-a", closed(config.TaintRepartitioning, "gpu-0")); !errors.Is(err, says) {
				t.Errorf("%s answered by %v: %v", verb, says, err)
			}
		}
	}
}
