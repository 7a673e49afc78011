package fence_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/managed"
)

var theFence = fence.Fence{
	Taint:           corev1.Taint{Key: "example.io/repartitioning", Effect: corev1.TaintEffectNoSchedule},
	StartupKeys:     []string{"example.io/not-ready", "autoscaler.example.io/not-ready"},
	JournalKey:      "example.io/journal",
	KeepCordonedKey: "example.io/keep-cordoned",
}

var (
	foreignTaint  = corev1.Taint{Key: "team", Value: "ml", Effect: corev1.TaintEffectNoSchedule}
	cordonTime    = metav1.NewTime(time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	cordonTaint   = corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule, TimeAdded: &cordonTime}
	timedTaint    = corev1.Taint{Key: theFence.Taint.Key, Effect: theFence.Taint.Effect, TimeAdded: &cordonTime}
	startupTaint  = corev1.Taint{Key: theFence.StartupKeys[0], Value: "registered", Effect: corev1.TaintEffectNoExecute}
	secondTaint   = corev1.Taint{Key: theFence.StartupKeys[1], Effect: corev1.TaintEffectNoSchedule}
	outdatedTaint = corev1.Taint{Key: theFence.Taint.Key, Value: "old", Effect: corev1.TaintEffectNoExecute}
)

func node(change ...func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "u1", ResourceVersion: "7"}}
	for _, c := range change {
		c(n)
	}
	return n
}

func cordoned(n *corev1.Node) { n.Spec.Unschedulable = true }

func tainted(taints ...corev1.Taint) func(*corev1.Node) {
	return func(n *corev1.Node) { n.Spec.Taints = append(n.Spec.Taints, taints...) }
}

func annotated(key, value string) func(*corev1.Node) {
	return func(n *corev1.Node) { metav1.SetMetaDataAnnotation(&n.ObjectMeta, key, value) }
}

func raise(n *corev1.Node) ([]byte, error)       { return theFence.Raise(n, "J") }
func cordon(n *corev1.Node) ([]byte, error)      { return theFence.Cordon(n, "J") }
func record(n *corev1.Node) ([]byte, error)      { return theFence.Record(n, "J") }
func lift(n *corev1.Node) ([]byte, error)        { return theFence.Lift(n, true) }
func liftUnready(n *corev1.Node) ([]byte, error) { return theFence.LiftUnready(n, true, startupTaint) }

func liftUnreadyOfBoth(n *corev1.Node) ([]byte, error) {
	return theFence.LiftUnready(n, true, secondTaint, startupTaint)
}
func park(n *corev1.Node) ([]byte, error) { return theFence.Park(n, "J2", true) }
func parkUnready(n *corev1.Node) ([]byte, error) {
	return theFence.Park(n, "J2", true, startupTaint)
}

func openFormer(n *corev1.Node) ([]byte, error) {
	return theFence.Registered([]string{"former.example.io/not-ready"}).Open(n)
}
func keepCordon(n *corev1.Node) ([]byte, error) { return theFence.Lift(n, false) }

func TestFencePatchesAreGuardedAndTouchOnlyWhatIsOurs(t *testing.T) {
	const guard = `"uid":"u1","resourceVersion":"7"`
	fenced := func(n *corev1.Node) {
		annotated(theFence.JournalKey, "J")(n)
		cordoned(n)
		tainted(theFence.Taint)(n)
	}
	for _, c := range []struct {
		name  string
		node  *corev1.Node
		patch func(*corev1.Node) ([]byte, error)
		want  string
	}{
		{
			"raises journal, cordon and taint in one patch", node(), raise,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J"}},` +
				`"spec":{"taints":[{"key":"example.io/repartitioning","effect":"NoSchedule"}],"unschedulable":true}}`,
		},
		{
			"cordons without the taint", node(tainted(foreignTaint)), cordon,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J"}},"spec":{"unschedulable":true}}`,
		},
		{
			"leaves the taint that stands when it cordons", node(tainted(theFence.Taint)), cordon,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J"}},"spec":{"unschedulable":true}}`,
		},
		{
			"keeps foreign taints when it raises", node(tainted(foreignTaint)), raise,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J"}},` +
				`"spec":{"taints":[{"key":"team","value":"ml","effect":"NoSchedule"},` +
				`{"key":"example.io/repartitioning","effect":"NoSchedule"}],"unschedulable":true}}`,
		},
		{
			"leaves a cordon that stands to its owner", node(cordoned), raise,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J"}},` +
				`"spec":{"taints":[{"key":"example.io/repartitioning","effect":"NoSchedule"}]}}`,
		},
		{
			"raises a fence that stands by its journal alone", node(fenced), raise,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J"}}}`,
		},
		{
			"keeps the time of its own taint when it raises beside another", node(tainted(timedTaint, foreignTaint)), raise,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J"}},"spec":{"taints":[{"key":"team","value":"ml","effect":"NoSchedule"},` +
				`{"key":"example.io/repartitioning","effect":"NoSchedule","timeAdded":"2026-03-01T12:00:00Z"}],"unschedulable":true}}`,
		},
		{
			"takes spent annotations away in the patch that raises", node(cordoned, annotated("example.io/force", "now")),
			func(n *corev1.Node) ([]byte, error) { return theFence.Raise(n, "J", "example.io/force") },
			`{"metadata":{` + guard + `,"annotations":{"example.io/force":null,"example.io/journal":"J"}},` +
				`"spec":{"taints":[{"key":"example.io/repartitioning","effect":"NoSchedule"}]}}`,
		},
		{
			"replaces what another version left under its key", node(cordoned, tainted(outdatedTaint)), raise,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J"}},` +
				`"spec":{"taints":[{"key":"example.io/repartitioning","effect":"NoSchedule"}]}}`,
		},
		{
			"records the journal alone", node(), record,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J"}}}`,
		},
		{
			"opens by the taint alone", node(fenced, tainted(foreignTaint)), theFence.Open,
			`{"metadata":{` + guard + `},"spec":{"taints":[{"key":"team","value":"ml","effect":"NoSchedule"}]}}`,
		},
		{
			"cordons again when it opens a node that someone uncordoned", node(tainted(theFence.Taint)), theFence.Open,
			`{"metadata":{` + guard + `},"spec":{"taints":null,"unschedulable":true}}`,
		},
		{
			"lifts journal, cordon and taint in one patch", node(fenced), lift,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":null}},"spec":{"taints":null,"unschedulable":false}}`,
		},
		{
			"lifts a fence that was opened before", node(annotated(theFence.JournalKey, "J"), cordoned), lift,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":null}},"spec":{"unschedulable":false}}`,
		},
		{
			"lifts without uncordoning a node that was cordoned before", node(fenced), keepCordon,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":null}},"spec":{"taints":null}}`,
		},
		{
			"lifts without uncordoning when people ask for it", node(fenced, annotated(theFence.KeepCordonedKey, "")), lift,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":null}},"spec":{"taints":null}}`,
		},
		{
			"keeps the time of the control plane's own taint", node(fenced, tainted(cordonTaint)), keepCordon,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":null}},"spec":{"taints":[` +
				`{"key":"node.kubernetes.io/unschedulable","effect":"NoSchedule","timeAdded":"2026-03-01T12:00:00Z"}]}}`,
		},
		{
			"keeps the startup taint when it raises", node(tainted(startupTaint)), raise,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J"}},` +
				`"spec":{"taints":[{"key":"example.io/not-ready","value":"registered","effect":"NoExecute"},` +
				`{"key":"example.io/repartitioning","effect":"NoSchedule"}],"unschedulable":true}}`,
		},
		{
			"takes the startup taint away, whatever its effect, when it opens", node(fenced, tainted(startupTaint)), theFence.Open,
			`{"metadata":{` + guard + `},"spec":{"taints":null}}`,
		},
		{
			"puts the startup taint back on a node that is not ready", node(annotated(theFence.JournalKey, "J"), cordoned, tainted(foreignTaint)), liftUnready,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":null}},"spec":{"taints":[` +
				`{"key":"team","value":"ml","effect":"NoSchedule"},{"key":"example.io/not-ready","value":"registered","effect":"NoExecute"}],"unschedulable":false}}`,
		},
		{
			"takes all startup taints away, also two of one key, when it opens",
			node(fenced, tainted(startupTaint, foreignTaint, secondTaint, corev1.Taint{Key: startupTaint.Key, Effect: corev1.TaintEffectNoSchedule})), theFence.Open,
			`{"metadata":{` + guard + `},"spec":{"taints":[{"key":"team","value":"ml","effect":"NoSchedule"}]}}`,
		},
		{
			"takes a startup taint away that the settings name no more", node(fenced, tainted(corev1.Taint{Key: "former.example.io/not-ready", Effect: "NoSchedule"})), openFormer,
			`{"metadata":{` + guard + `},"spec":{"taints":null}}`,
		},
		{
			"puts all startup taints back", node(annotated(theFence.JournalKey, "J"), cordoned), liftUnreadyOfBoth,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":null}},"spec":{"taints":[` +
				`{"key":"autoscaler.example.io/not-ready","effect":"NoSchedule"},{"key":"example.io/not-ready","value":"registered","effect":"NoExecute"}],"unschedulable":false}}`,
		},
		{
			"keeps a startup taint that has come since, beside those that it puts back",
			node(annotated(theFence.JournalKey, "J"), cordoned, tainted(secondTaint, corev1.Taint{Key: startupTaint.Key, Value: "later", Effect: startupTaint.Effect})), parkUnready,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J2"}},"spec":{"taints":[` +
				`{"key":"autoscaler.example.io/not-ready","effect":"NoSchedule"},{"key":"example.io/not-ready","value":"registered","effect":"NoExecute"}],"unschedulable":false}}`,
		},
		{
			"parks without uncordoning when people ask for it", node(fenced, annotated(theFence.KeepCordonedKey, "")), park,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J2"}},"spec":{"taints":null}}`,
		},
		{
			"parks a change with a journal of what is still to be restored", node(fenced), park,
			`{"metadata":{` + guard + `,"annotations":{"example.io/journal":"J2"}},"spec":{"taints":null,"unschedulable":false}}`,
		},
		{"lifts nothing off a node that is free", node(), lift, `{"metadata":{` + guard + `}}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := c.node.DeepCopy()
			got, err := c.patch(c.node)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(c.want, string(got)); diff != "" {
				t.Errorf("patch (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, c.node); diff != "" {
				t.Errorf("the node was changed (-before +after):\n%s", diff)
			}
		})
	}
}

func TestFenceRefusesAPatchThatWouldNotBeGuardedOrOwned(t *testing.T) {
	for _, c := range []struct {
		name  string
		patch func() ([]byte, error)
		want  string
	}{
		{"without a journal", func() ([]byte, error) { return theFence.Raise(node(), "") }, "the journal is empty"},
		{"recording nothing", func() ([]byte, error) { return theFence.Record(node(), "") }, "the journal is empty"},
		{"parking without a journal", func() ([]byte, error) { return theFence.Park(node(), "", true) }, "the journal is empty"},
		{"opening without a uid", func() ([]byte, error) {
			return theFence.Open(node(func(n *corev1.Node) { n.UID = "" }))
		}, `uid is ""`},
		{"without a uid", func() ([]byte, error) {
			return theFence.Raise(node(func(n *corev1.Node) { n.UID = "" }), "J")
		}, `uid is ""`},
		{"without a resourceVersion", func() ([]byte, error) {
			return theFence.Lift(node(func(n *corev1.Node) { n.ResourceVersion = "" }), true)
		}, `resourceVersion ""`},
		{"without keys", func() ([]byte, error) { return fence.Fence{}.Open(node()) }, "needs a journal key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			patch, err := c.patch()
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "n1") {
				t.Errorf("error is %v, want one about n1 that says %q", err, c.want)
			}
			if patch != nil {
				t.Errorf("patch is %s, want none", patch)
			}
		})
	}
}

func TestFenceGivesTheNodeBackAsItWas(t *testing.T) {
	for _, before := range []*corev1.Node{
		node(),
		node(tainted(foreignTaint)),
		node(annotated("note", "keep"), tainted(foreignTaint, cordonTaint)),
	} {
		client := fake.NewClientset(before)
		nodes := client.CoreV1().Nodes()
		now := before
		for _, step := range []func(*corev1.Node) ([]byte, error){raise, theFence.Open, lift} {
			patch, err := step(now)
			if err != nil {
				t.Fatal(err)
			}
			if now, err = nodes.Patch(t.Context(), "n1", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
				t.Fatalf("applying %s: %v", patch, err)
			}
		}
		want, got := before.DeepCopy(), now.DeepCopy()
		for _, n := range []*corev1.Node{want, got} {
			n.ManagedFields, n.ResourceVersion = nil, ""
			if len(n.Annotations) == 0 {
				n.Annotations = nil
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("node (-before +after):\n%s", diff)
		}
	}
}

func TestFenceStandsByItsOwnTaintOnly(t *testing.T) {
	for _, c := range []struct {
		name string
		node *corev1.Node
		want bool
	}{
		{"free", node(), false},
		{"cordoned by someone", node(cordoned, tainted(cordonTaint)), false},
		{"tainted by someone", node(tainted(foreignTaint)), false},
		{"fenced", node(cordoned, tainted(foreignTaint, theFence.Taint)), true},
		{"fenced, and uncordoned by someone", node(tainted(theFence.Taint)), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := theFence.IsRaised(c.node); got != c.want {
				t.Errorf("IsRaised is %v, want %v", got, c.want)
			}
		})
	}
}

func managedBy(by, fields string, at time.Time) func(*corev1.Node) {
	return func(n *corev1.Node) {
		when := metav1.NewTime(at)
		entry := metav1.ManagedFieldsEntry{Manager: by, Operation: metav1.ManagedFieldsOperationUpdate, Time: &when, FieldsV1: &metav1.FieldsV1{}}
		entry.FieldsV1.SetRawString(fields)
		n.ManagedFields = append(n.ManagedFields, entry)
	}
}

func TestCordonerIsTheOwnerOfUnschedulable(t *testing.T) {
	early, late := cordonTime.Add(-time.Hour), cordonTime.Add(time.Hour)
	labels := managedBy("kubelet", `{"f:metadata":{"f:labels":{"f:unschedulable":{}}}}`, early)
	taints := managedBy("kube-controller-manager", `{"f:spec":{"f:taints":{}}}`, early)
	cordon := managedBy("kubectl", `{"f:spec":{"f:unschedulable":{}}}`, late)
	for _, c := range []struct {
		name  string
		node  *corev1.Node
		who   string
		since time.Time
		ok    bool
	}{
		{"a node that is not cordoned", node(cordon), "", time.Time{}, false},
		{"the taint has the time", node(cordoned, labels, taints, cordon, tainted(cordonTaint)), "kubectl", cordonTime.Time, true},
		{"the manager's entry has the time until the taint is there", node(cordoned, labels, taints, cordon), "kubectl", late, true},
		{
			"several owners are all named, since the first", node(cordoned, cordon, managedBy("argocd", `{"f:spec":{"f:unschedulable":{}}}`, early)),
			"kubectl, argocd", early, true,
		},
		{"a cache that drops managedFields", node(cordoned, tainted(cordonTaint)), "", cordonTime.Time, true},
		{"fields in an unknown form", node(cordoned, managedBy("kubectl", `[]`, late)), "", time.Time{}, true},
		{"an entry without fields", node(cordoned, func(n *corev1.Node) {
			n.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubectl"}}
		}), "", time.Time{}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			who, since, ok := managed.Cordoner(c.node)
			if who != c.who || !since.Equal(c.since) || ok != c.ok {
				t.Errorf("Cordoner is %q since %v, %v; want %q since %v, %v", who, since, ok, c.who, c.since, c.ok)
			}
		})
	}
}

func TestUncordonerIsWhoWroteUnschedulableAtThatTime(t *testing.T) {
	at := cordonTime.Time
	lifted := managedBy("kube-controller-manager", `{"f:spec":{"f:taints":{}}}`, at)
	other := func(by string, when time.Time) func(*corev1.Node) {
		return managedBy(by, `{"f:metadata":{"f:annotations":{}}}`, when)
	}
	applied := func(by string, when time.Time) func(*corev1.Node) {
		return managedBy(by, `{"f:spec":{"f:unschedulable":{}}}`, when)
	}
	status := func(n *corev1.Node) {
		managedBy("kubelet", `{"f:status":{}}`, at)(n)
		n.ManagedFields[len(n.ManagedFields)-1].Subresource = "status"
	}
	for _, c := range []struct {
		name string
		node *corev1.Node
		who  string
		when time.Time
	}{
		{"a person with kubectl", node(lifted, status, other("agent", at), other("argocd", at.Add(-time.Hour))), "", at},
		{"a controller that notes the end of its work", node(lifted, status, other("machine-config-controller", at.Add(-time.Second))), "", at},
		{"a label that kubectl-gpuslice wrote just before", node(lifted, managedBy("kubectl-gpuslice", `{"f:metadata":{"f:labels":{}}}`, at)), "", at},
		{"a tool that applied it", node(lifted, other("x", at), applied("gitops", at)), "gitops", at},
		{"a tool that applied it before", node(lifted, applied("gitops", at.Add(-time.Hour))), "", at},
		{"two that wrote it at that time", node(lifted, applied("a", at), applied("b", at.Add(time.Second)), applied("a", at)), "a, b", at},
		{"a node that is cordoned", node(lifted, cordoned), "", time.Time{}},
		{"a taint that is still there", node(lifted, tainted(cordonTaint)), "", time.Time{}},
		{"taints that another user has written since", node(managedBy("agent", `{"f:spec":{"f:taints":{}}}`, at), other("x", at)), "", time.Time{}},
		{"a control plane that wrote anything but taints", node(other("kube-controller-manager", at), other("x", at)), "", time.Time{}},
		{"entries without a time", node(lifted, func(n *corev1.Node) {
			n.ManagedFields = append(n.ManagedFields, metav1.ManagedFieldsEntry{Manager: "old"})
		}), "", at},
		{"a cache that drops managedFields", node(), "", time.Time{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if who, when := fence.Uncordoner(c.node, "agent"); who != c.who || !when.Equal(c.when) {
				t.Errorf("Uncordoner is %q at %v, want %q at %v", who, when, c.who, c.when)
			}
		})
	}
}

func TestCordonTaintIsThatOfTheControlPlane(t *testing.T) {
	n := node(tainted(foreignTaint, cordonTaint))
	if got := managed.CordonTaint(n); got != &n.Spec.Taints[1] {
		t.Errorf("CordonTaint is %v, want %v", got, cordonTaint)
	}
	if got := managed.CordonTaint(node(cordoned, tainted(foreignTaint))); got != nil {
		t.Errorf("CordonTaint of a node that was cordoned a moment ago is %v, want none", got)
	}
}

// Annotations by which autoscalers let the node be come with the fence and go with it. What others have set stays as it is.
func TestFenceKeepsAutoscalersAwayWhileItIsUp(t *testing.T) {
	const theirs, ours, why = "karpenter.example/theirs", "autoscaler.example/ours", "slurm.example/why"
	f := theFence
	f.ReasonKey, f.ReasonPrefix = why, "agent: "
	before := node(annotated(theirs, "false"))
	client := fake.NewClientset(before)
	now := before
	for _, step := range []struct {
		patch func(*corev1.Node) ([]byte, error)
		want  map[string]string
	}{
		{
			func(n *corev1.Node) ([]byte, error) {
				return f.Keeps([]string{theirs, ours, why}, "change to a").Raise(n, "J")
			},
			map[string]string{theirs: "false", ours: "true", why: "agent: change to a", f.JournalKey: "J"},
		},
		{
			func(n *corev1.Node) ([]byte, error) { return f.Keeps([]string{ours, why}, "change to a").Open(n) },
			map[string]string{theirs: "false", ours: "true", why: "agent: change to a", f.JournalKey: "J"},
		},
		{
			func(n *corev1.Node) ([]byte, error) {
				return f.Keeps([]string{ours, why}, "change to b").Park(n, "J2", true)
			},
			map[string]string{theirs: "false", f.JournalKey: "J2"},
		},
		{
			func(n *corev1.Node) ([]byte, error) {
				return f.Keeps([]string{ours, why}, "change to b").Raise(n, "J3")
			},
			map[string]string{theirs: "false", ours: "true", why: "agent: change to b", f.JournalKey: "J3"},
		},
		{
			func(n *corev1.Node) ([]byte, error) { return f.Keeps([]string{theirs, ours, why}, "").Lift(n, true) },
			map[string]string{theirs: "false"},
		},
		{
			func(*corev1.Node) ([]byte, error) {
				return []byte(`{"metadata":{"annotations":{"` + why + `":"disk 3"}}}`), nil
			},
			map[string]string{theirs: "false", why: "disk 3"},
		},
		{
			func(n *corev1.Node) ([]byte, error) { return f.Keeps([]string{why}, "").Lift(n, true) },
			map[string]string{theirs: "false", why: "disk 3"},
		},
	} {
		patch, err := step.patch(now)
		if err != nil {
			t.Fatal(err)
		}
		if now, err = client.CoreV1().Nodes().Patch(t.Context(), "n1", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			t.Fatalf("applying %s: %v", patch, err)
		}
		if diff := cmp.Diff(step.want, now.Annotations); diff != "" {
			t.Errorf("annotations after %s (-want +got):\n%s", patch, diff)
		}
	}
}

func TestAnAnnotationIsOfTheManagerThatHasSetIt(t *testing.T) {
	n := node(annotated("a", "true"), annotated("b", "true"), annotated("c", "false"))
	n.ManagedFields = []metav1.ManagedFieldsEntry{
		{Manager: "agent", FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{"f:a":{},"f:c":{}}}}`)},
		{Manager: "kubectl", FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{"f:b":{}}}}`)},
	}
	if diff := cmp.Diff([]string{"a"}, theFence.KeptBy(n, "agent", []string{"a", "b", "c", "d"})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
