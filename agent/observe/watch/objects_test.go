package watch_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpuslice/gpuslice/agent/observe/watch"
	"github.com/gpuslice/gpuslice/test/clientset"
	"github.com/gpuslice/gpuslice/test/receive"
)

func node(version string, labels map[string]string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "gpu-1", UID: "uid", ResourceVersion: version, Labels: labels}}
}

// listed returns the pods of the API server, and counts the requests.
type listed struct {
	pods  []corev1.Pod
	asked int
}

func (l *listed) List(context.Context) ([]corev1.Pod, error) {
	l.asked++
	return l.pods, nil
}

// version looks at the node and returns its version.
func version(t *testing.T, o *watch.Objects) string {
	t.Helper()
	o.Begin(false)
	n, err := o.Node(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return n.ResourceVersion
}

func TestTheNodeIsAtLeastAsNewAsWhatTheAgentHasWritten(t *testing.T) {
	t.Parallel()
	o := watch.NewObjects(watch.Options{Node: "gpu-1", Client: clientset.Of(fake.NewClientset(node("20", nil))), Pods: &listed{}})
	if got := version(t, o); got != "20" || !o.AreFresh() {
		t.Errorf("before anything is watched, version %s was seen, fresh %t; want 20, read from the API server", got, o.AreFresh())
	}
	o.Show(node("9", nil)) // as text, 9 comes after 20
	if got := version(t, o); got != "20" || o.AreFresh() {
		t.Errorf("with a watch that is behind, version %s was seen, fresh %t; want 20 without a request", got, o.AreFresh())
	}
	o.SawNode(node("30", nil))
	if got := version(t, o); got != "30" {
		t.Errorf("after a write of version 30, version %s was seen", got)
	}
	o.SawNode(node("25", nil)) // an answer that came late
	if got := version(t, o); got != "30" {
		t.Errorf("after an answer that came late, version %s was seen", got)
	}
	o.Show(node("31", nil))
	if got := version(t, o); got != "31" {
		t.Errorf("when the watch has caught up, version %s was seen", got)
	}
}

// Its versions may be lower than before: a cluster that is restored from a backup counts them again.
func TestOfANodeThatIsRegisteredAgainTheAPIServersCounts(t *testing.T) {
	t.Parallel()
	former, present := node("40", nil), node("5", nil)
	present.UID = "another"
	for name, row := range map[string]struct{ saw, watch *corev1.Node }{
		"the watch is behind": {present, former},
		"the watch is ahead":  {former, present},
	} {
		o := watch.NewObjects(watch.Options{Node: "gpu-1", Client: clientset.Of(fake.NewClientset(present)), Pods: &listed{}})
		version(t, o) // the first observation reads again in any case
		o.SawNode(row.saw)
		o.Show(row.watch)
		for range 2 {
			if got := version(t, o); got != "5" {
				t.Errorf("%s: version %s was seen", name, got)
			}
		}
		caughtUp := present.DeepCopy()
		caughtUp.ResourceVersion = "6"
		o.Show(caughtUp)
		if got := version(t, o); got != "6" || o.AreFresh() {
			t.Errorf("%s: when the watch has caught up, version %s was seen, fresh %t; want 6 without a request", name, got, o.AreFresh())
		}
	}
}

func TestANodeThatIsGoneIsAskedFor(t *testing.T) {
	t.Parallel()
	o := watch.NewObjects(watch.Options{Node: "gpu-1", Client: clientset.Of(fake.NewClientset()), Pods: &listed{}})
	o.Show(nil)
	o.Begin(false)
	if n, err := o.Node(t.Context()); !apierrors.IsNotFound(err) {
		t.Errorf("got %v, %v", n, err)
	}
}

func TestReadAgainIsForOneObservation(t *testing.T) {
	t.Parallel()
	server := &listed{pods: []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "new"}}}}
	o := watch.NewObjects(watch.Options{Node: "gpu-1", Client: clientset.Of(fake.NewClientset(node("2", nil))), Pods: server})
	o.Show(node("1", nil), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "b"}}, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	observe := func() (names []string) {
		o.Begin(false)
		pods, err := o.Pods(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range pods {
			names = append(names, p.Name)
		}
		return names
	}
	if got := observe(); len(got) != 2 || got[0] != "a" || server.asked != 0 {
		t.Errorf("by the watch: %v, %d requests", got, server.asked)
	}
	o.ReadAgain()
	if got := observe(); len(got) != 1 || got[0] != "new" || server.asked != 1 || !o.AreFresh() {
		t.Errorf("after ReadAgain: %v, %d requests", got, server.asked)
	}
	if got := observe(); len(got) != 2 || server.asked != 1 || o.AreFresh() {
		t.Errorf("after that: %v, %d requests", got, server.asked)
	}
}

func TestRequestsAreWhatTheLabelsOfTheNodeAskFor(t *testing.T) {
	t.Parallel()
	o := watch.NewObjects(watch.Options{Node: "gpu-1", Client: clientset.Of(fake.NewClientset()), Pods: &listed{}})
	requested := func() bool {
		o.Begin(false)
		o.TakeRequest()
		o.Begin(false)
		return o.AreFresh()
	}
	o.Show(node("1", nil))
	o.Begin(false)
	a, b := node("1", map[string]string{"nvidia.com/mig.config": "all-1g.10gb"}), node("2", map[string]string{"nvidia.com/mig.config": "all-3g.40gb"})
	for _, c := range []struct {
		what          string
		before, after any
		request       bool
	}{
		{"nothing", a, a, false},
		{"another config", a, b, true},
		{"no config", a, node("2", nil), true},
		{"a profile", node("1", nil), node("2", map[string]string{"gpuslice.io/profile": "a"}), true},
		{"a config of the device plugin", node("1", nil), node("2", map[string]string{"nvidia.com/device-plugin.config": "a"}), true},
		{"a label of others", node("1", nil), node("2", map[string]string{"team": "a"}), false},
		{"the agent's answer", node("1", nil), node("2", map[string]string{"nvidia.com/mig.config.state": "success"}), false},
		{"a pod", &corev1.Pod{}, &corev1.Pod{}, false},
	} {
		o.NoteRequest(c.before, c.after)
		if got := requested(); got != c.request {
			t.Errorf("%s: a request is noted: %t, want %t", c.what, got, c.request)
		}
	}
	o.NoteRequest(a, b)
	o.NoteRequest(b, a) // the loop has not seen the first
	if !requested() || requested() {
		t.Error("two requests before an observation are not one")
	}
}

// A change wakes the loop only if the agent decides by it, and not if other programs write it again and again.
func TestAChangeThatDecidesNothingWakesNoLoop(t *testing.T) {
	t.Parallel()
	pod := func(change func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", ResourceVersion: "1", Annotations: map[string]string{"kubernetes.io/config.hash": "h"}}}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", RestartCount: 1}}
		change(p)
		return p
	}
	at := func(change func(*corev1.Node)) *corev1.Node {
		n := node("1", map[string]string{"nvidia.com/mig.config": "all-1g.10gb"})
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		change(n)
		return n
	}
	files := func(change func(*corev1.ConfigMap)) *corev1.ConfigMap {
		c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "configs", ResourceVersion: "1"}, Data: map[string]string{"config.yaml": "a"}}
		change(c)
		return c
	}
	for _, c := range []struct {
		what          string
		before, after any
		alike         bool
	}{
		{"another annotation of a pod", pod(func(*corev1.Pod) {}), pod(func(p *corev1.Pod) { p.ResourceVersion, p.Annotations["example.com/a"] = "2", "b" }), true},
		{"kubelet's annotation of a static pod", pod(func(*corev1.Pod) {}), pod(func(p *corev1.Pod) { p.Annotations["kubernetes.io/config.hash"] = "i" }), false},
		{"a restart of a container", pod(func(*corev1.Pod) {}), pod(func(p *corev1.Pod) { p.Status.ContainerStatuses[0].RestartCount++ }), false},
		{"a pod that is leaving", pod(func(*corev1.Pod) {}), pod(func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)} }), false},
		{"a heartbeat of kubelet", at(func(*corev1.Node) {}), at(func(n *corev1.Node) {
			n.ResourceVersion, n.Status.Conditions[0].LastHeartbeatTime = "2", metav1.Unix(9, 0)
		}), true},
		{"an image that was pulled", at(func(*corev1.Node) {}), at(func(n *corev1.Node) { n.Status.Images = []corev1.ContainerImage{{SizeBytes: 1}} }), true},
		{"a label", at(func(*corev1.Node) {}), at(func(n *corev1.Node) { n.Labels["nvidia.com/mig.config"] = "all-3g.40gb" }), false},
		{"a cordon", at(func(*corev1.Node) {}), at(func(n *corev1.Node) { n.Spec.Unschedulable = true }), false},
		{"capacity", at(func(*corev1.Node) {}), at(func(n *corev1.Node) {
			n.Status.Allocatable = corev1.ResourceList{"nvidia.com/gpu": *resource.NewQuantity(1, resource.DecimalSI)}
		}), false},
		{"an annotation of a ConfigMap", files(func(*corev1.ConfigMap) {}), files(func(c *corev1.ConfigMap) { c.Annotations = map[string]string{"a": "b"} }), true},
		{"a file", files(func(*corev1.ConfigMap) {}), files(func(c *corev1.ConfigMap) { c.Data["config.yaml"] = "b" }), false},
	} {
		if got := watch.DecidesAlike(c.before, c.after); got != c.alike {
			t.Errorf("%s: decided alike: %t, want %t", c.what, got, c.alike)
		}
	}
}

func TestAStepThatTakesNothingRestsOnTheWatches(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ step, next, may, reads bool }{
		"a step that takes something":           {step: true, reads: true},
		"before another one that does":          {step: true, next: true, reads: true},
		"a step that restores":                  {may: true},
		"a step that restores before one takes": {next: true, may: true, reads: true},
	} {
		o := watch.NewObjects(watch.Options{Node: "gpu-1", Client: clientset.Of(fake.NewClientset(node("20", nil))), Pods: &listed{}})
		o.Show(node("20", nil))
		o.Begin(false)
		if may := o.FreshFor(c.step, c.next); may != c.may {
			t.Errorf("%s: it may rest on a look by the watches: %t", name, may)
		}
		o.Begin(false)
		if o.AreFresh() != c.reads {
			t.Errorf("%s: the next observation reads the API server: %t", name, o.AreFresh())
		}
		if o.AreFresh() && !o.FreshFor(true, false) {
			t.Errorf("%s: an observation that has read the API server is not enough", name)
		}
	}
}

func TestAnObservationThatIsDueReadsTheAPIServer(t *testing.T) {
	t.Parallel()
	o := watch.NewObjects(watch.Options{Node: "gpu-1", Client: clientset.Of(fake.NewClientset(node("20", nil))), Pods: &listed{}})
	o.Show(node("20", nil))
	due := false
	for _, due = range []bool{false, true, false} {
		if o.Begin(due); o.AreFresh() != due {
			t.Errorf("an observation that is due is %t reads the API server: %t", due, o.AreFresh())
		}
	}
}

// slow answers once it may.
type slow struct {
	asked chan struct{}
	may   chan struct{}
}

func (s *slow) List(context.Context) ([]corev1.Pod, error) {
	close(s.asked)
	<-s.may
	return []corev1.Pod{{}}, nil
}

func TestThePodsAreAskedForWhileTheRestIsRead(t *testing.T) {
	t.Parallel()
	server := &slow{asked: make(chan struct{}), may: make(chan struct{})}
	o := watch.NewObjects(watch.Options{Node: "gpu-1", Client: clientset.Of(fake.NewClientset(node("20", nil))), Pods: server})
	if got := version(t, o); got != "20" {
		t.Errorf("version %s was seen", got)
	}
	receive.From(t, server.asked)
	close(server.may)
	if pods, err := o.Pods(t.Context()); err != nil || len(pods) != 1 {
		t.Errorf("the pods are %v: %v", pods, err)
	}
}

// Kubelet reports up to fifty images, and any number of volumes.
func TestWhatTheAgentDoesNotReadOfItsNodeIsNotKept(t *testing.T) {
	t.Parallel()
	n := node("7", map[string]string{"a": "b"})
	n.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubectl-cordon"}}
	want := n.DeepCopy()
	n.Status.Images = []corev1.ContainerImage{{Names: []string{"registry.example/team/web:1"}}}
	n.Status.VolumesInUse, n.Status.VolumesAttached = []corev1.UniqueVolumeName{"a"}, []corev1.AttachedVolume{{Name: "a"}}
	got, err := watch.Shortened(n)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("kept of the node (-want +got):\n%s", diff)
	}
}
