package fencing_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/agent/act"
	"github.com/gpuslice/gpuslice/agent/act/fencing"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/state"
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
	for _, r := range stored(t, client).Items {
		s := r.Spec.DeviceSelector
		out = append(out, fmt.Sprintf("%s/%s/%s %s:%s", *s.Driver, *s.Pool, *s.Device, r.Spec.Taint.Key, r.Spec.Taint.Effect))
	}
	slices.Sort(out)
	return out
}

// stored are the rules of the cluster, whatever the API server answers.
func stored(t *testing.T, client *fake.Clientset) *resourcev1.DeviceTaintRuleList {
	t.Helper()
	all, err := client.Tracker().List(resourcev1.SchemeGroupVersion.WithResource("devicetaintrules"), resourcev1.SchemeGroupVersion.WithKind("DeviceTaintRule"), "")
	list, is := all.(*resourcev1.DeviceTaintRuleList)
	if err != nil || !is {
		t.Fatal(all, err)
	}
	return list
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

// flooded has the API server answer as many pages of others' rules with the node's label before the agents' own. A rule is found by its name all the same.
func flooded(t *testing.T, client *fake.Clientset, pages int) (reads *int) {
	t.Helper()
	reads = new(int)
	client.PrependReactor("list", "devicetaintrules", func(a clienttesting.Action) (bool, runtime.Object, error) {
		*reads++
		list, is := a.(clienttesting.ListAction)
		if !is {
			t.Errorf("listed: %v", a)
			return false, nil, nil
		}
		out := &resourcev1.DeviceTaintRuleList{}
		name, named := list.GetListRestrictions().Fields.RequiresExactMatch("metadata.name")
		if !named && *reads <= pages {
			theirs := resourcev1.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "theirs", Labels: map[string]string{"gpuslice.io/node": "uid-a"}}}
			out.Continue, out.Items = "more", []resourcev1.DeviceTaintRule{theirs}
			return true, out, nil
		}
		for _, r := range stored(t, client).Items {
			if !named || r.Name == name {
				out.Items = append(out.Items, r)
			}
		}
		return true, out, nil
	})
	return reads
}

// Whoever has the right may create rules with the agent's label: the agent reads past some pages of them, and behind any number it finds its own by their names.
func TestRulesOfOthersWithTheAgentsLabelHideNone(t *testing.T) {
	wanted := closed(config.TaintGPUUnhealthy, "gpu-0", "gpu-1")
	for name, c := range map[string]struct {
		pages  int
		killed bool
	}{
		"on the second page": {1, false}, "behind all pages": {1000, false}, "behind all pages, for the agent after one that was killed": {1000, true},
	} {
		client, now := fake.NewClientset(), clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
		devices := func() []string { return []string{"gpu-0", "gpu-1"} }
		rules, _ := keeping(client, now)
		rules.Keep(t.Context(), "uid-a", wanted, devices)
		reads := flooded(t, client, c.pages)
		if c.killed {
			rules, _ = keeping(client, now)
		}
		now.Step(time.Hour)
		rules.Keep(t.Context(), "uid-a", wanted, devices)
		if n := len(closures(t, client)); n != 2 || *reads > 80 {
			t.Errorf("%s: %d rules after %d reads", name, n, *reads)
		}
		*reads = 0
		now.Step(time.Hour)
		rules.Keep(t.Context(), "uid-a", nil, devices)
		if left := closures(t, client); len(left) > 0 || *reads > 80 {
			t.Errorf("%s: after %d reads claims still do not get %v", name, *reads, left)
		}
		if err := rules.Clear(t.Context(), "uid-a"); (err != nil) != (c.pages > 1) || err != nil && !strings.Contains(err.Error(), deletes) {
			t.Errorf("%s: the node is given up: %v", name, err)
		}
	}
}

// A name that is taken for health keeps no change from closing devices; one that is taken for a change keeps the agent from closing that device alone.
func TestWhatCannotBeClosedIsKnownByDeviceAndKey(t *testing.T) {
	theirs := func(name string) *resourcev1.DeviceTaintRule {
		return &resourcev1.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "gpuslice-uid-a-" + name}, Spec: resourcev1.DeviceTaintRuleSpec{}}
	}
	client, now := fake.NewClientset(theirs("gpu-0-gpu-unhealthy"), theirs("gpu-1-repartitioning")), clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
	rules, sent := keeping(client, now)
	observe := func() state.DRA {
		seen := state.Observed{Node: &corev1.Node{ObjectMeta: metav1.ObjectMeta{UID: "uid-a"}}}
		rules.Observe(t.Context(), &seen)
		return seen.DRA
	}
	sick := closed(config.TaintGPUUnhealthy, "gpu-0", "gpu-1", "gpu-2")
	rules.Keep(t.Context(), "uid-a", sick, func() []string { return nil })
	<-sent // what is closed
	if seen := observe(); seen.RulesUnusable || len(seen.Unclosable) > 0 {
		t.Errorf("a change cannot close %v, or nothing: %t", seen.Unclosable, seen.RulesUnusable)
	}
	for i, c := range sick {
		if err := rules.Open(c); (err != nil) != (i == 0) {
			t.Errorf("%s is open: %v", c.Device, err)
		}
	}
	if err := rules.Close(t.Context(), "uid-a", []string{"gpu-0", "gpu-1", "gpu-2"}); err != nil {
		t.Error(err)
	}
	if seen := observe(); seen.RulesUnusable || !slices.Equal(seen.Unclosable, []string{"gpu-1"}) {
		t.Errorf("a change cannot close %v, or nothing: %t", seen.Unclosable, seen.RulesUnusable)
	}
	for range 2 {
		rules.Report()
	}
	if n := len(sent); n != 1 || !strings.Contains(<-sent, "gpuslice-uid-a-gpu-0-gpu-unhealthy") {
		t.Errorf("%d Events", n)
	}
	now.Step(time.Hour) // it may be free by now
	if seen := observe(); len(seen.Unclosable) > 0 {
		t.Errorf("after an hour a change cannot close %v", seen.Unclosable)
	}
}

const deletes = "kubectl delete devicetaintrules -l gpuslice.io/node=uid-a"

// keeping are the rules of an agent that runs, and its Events.
func keeping(client *fake.Clientset, now *clocktesting.FakeClock) (*fencing.Rules, chan string) {
	settings := config.Default()
	settings.Health.DeviceTaint = config.DeviceTaintNoSchedule
	recorder := record.NewFakeRecorder(10)
	return &fencing.Rules{
		Env: act.Env{
			Node: "node-a", Settings: settings, Clock: monotonic.New(now), Log: zap.NewNop(), Events: events.Recorder{To: recorder},
		},
		Client: clientset.Of(client).DeviceTaintRules(),
	}, recorder.Events
}

// Rights can go before the rules do. A person then learns how to delete them, from the agent that runs and from the one that gives the node up. An agent that
// has not been asked for rules says nothing.
func TestPeopleLearnWhichRulesMayBeLeft(t *testing.T) {
	kind := resourcev1.Resource("devicetaintrules")
	forbidden := apierrors.NewForbidden(kind, "", errors.New("no right"))
	for name, c := range map[string]struct {
		verb         string
		says         error
		asks         bool // the settings ask for rules
		clears, runs bool // what says so
	}{
		"no right to see them":                         {"list", forbidden, true, true, true},
		"no right to see them, and no setting for any": {"list", forbidden, false, false, true},
		"no right to delete them":                      {"delete", forbidden, false, true, true},
		"a failing API server":                         {"delete", apierrors.NewInternalError(errors.New("down")), false, true, true},
		"there is no such kind":                        {"list", apierrors.NewNotFound(kind, ""), true, false, true},
	} {
		client, now := fake.NewClientset(), clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC))
		rules, sent := keeping(client, now)
		devices := func() []string { return nil }
		rules.Keep(t.Context(), "uid-a", closed(config.TaintGPUUnhealthy, "gpu-0", "gpu-1"), devices)
		<-sent // that they are closed
		client.PrependReactor(c.verb, "devicetaintrules", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, c.says })
		for range 10 {
			rules.Keep(t.Context(), "uid-a", nil, devices)
			rules.Report()
			now.Step(time.Hour)
		}
		if said := len(sent) == 1 && strings.Contains(<-sent, "devicetaintrules -l gpuslice.io/node=uid-a"); said != c.runs {
			t.Errorf("%s: an Event has said so: %t", name, said)
		}
		rules, _ = keeping(client, now)
		if !c.asks {
			rules.Settings.Health.DeviceTaint = config.DeviceTaintNone
		}
		err := rules.Clear(t.Context(), "uid-a")
		if said := err != nil && strings.Contains(err.Error(), deletes); said != c.clears {
			t.Errorf("%s: %v", name, err)
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
