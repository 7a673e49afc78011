package holders_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	k8stesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// daemonPod is a pod of the namespace team that says it is of a DaemonSet.
func daemonPod(name, apiVersion, daemonSet string, uid types.UID) corev1.Pod {
	return corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "team", Name: name,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: apiVersion, Kind: "DaemonSet", Name: daemonSet, UID: uid, Controller: ptr.To(true)}},
	}}
}

// ofDaemonSets names the pods that are of a DaemonSet, by what is left of their owners.
func ofDaemonSets(pods []corev1.Pod) string {
	var out []string
	for i := range pods {
		if holders.Describe(&pods[i]).Daemon {
			out = append(out, pods[i].Name)
		}
	}
	return strings.Join(out, " ")
}

// Promise 15: Believe only what this host's agent wrote. A user who may create pods may write any owner into one.
func TestAPodIsOfADaemonSetThatExists(t *testing.T) {
	client := fake.NewClientset(
		&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "monitor", UID: "1"}},
		&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "proxy", UID: "2"}},
	)
	pods := []corev1.Pod{
		daemonPod("real", "apps/v1", "monitor", "1"),
		daemonPod("of-another-uid", "apps/v1", "monitor", "3"),
		daemonPod("of-no-uid", "apps/v1", "monitor", ""),
		daemonPod("of-another-namespace", "apps/v1", "proxy", "2"),
		daemonPod("of-none", "apps/v1", "none", "1"),
		daemonPod("of-another-group", "none.example/v1", "monitor", "1"),
		daemonPod("of-an-old-group", "extensions/v1beta1", "monitor", "1"),
	}
	before := slices.Clone(pods)
	got, err := holders.NewDaemonSets(clientset.Of(client), clocktesting.NewFakePassiveClock(time.Now())).Believe(t.Context(), "node", pods)
	if err != nil {
		t.Fatal(err)
	}
	if d := ofDaemonSets(got); d != "real" {
		t.Errorf("of DaemonSets are %q, want the real one", d)
	}
	if len(holders.Drainable(got)) != len(pods)-1 {
		t.Errorf("%d pods leave before a reboot, want all but the real one", len(holders.Drainable(got)))
	}
	for i := range before {
		if len(pods[i].OwnerReferences) != 1 {
			t.Errorf("pod %s was changed", pods[i].Name)
		}
	}
}

// The API server takes any text as the name of an owner, while a client sends no request for a name that no object can have: a path,
// and one that is longer than a line of HTTP.
func TestAnOwnerWhoseNameNoDaemonSetCanHaveIsNone(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { t.Errorf("asked for %.100s", r.URL.Path) }))
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	sets := holders.NewDaemonSets(clientset.Of(client), clocktesting.NewFakePassiveClock(time.Now()))
	for _, name := range []string{"../pods", ".", "..", "a%2fb", "Monitor", "a\nb", strings.Repeat("x", 1<<20)} {
		got, err := sets.Believe(t.Context(), "node", []corev1.Pod{daemonPod("a", "apps/v1", name, "1")})
		if err != nil || ofDaemonSets(got) != "" {
			t.Errorf("%.20q: of DaemonSets are %q, error %.200v", name, ofDaemonSets(got), err)
		}
	}
}

// Whoever may create a DaemonSet writes its selector, and so how long it is.
func TestTheSelectorOfAPodsDaemonSetIsRemembered(t *testing.T) {
	selects := func(value string) *metav1.LabelSelector {
		return &metav1.LabelSelector{
			MatchLabels:      map[string]string{"app.kubernetes.io/name": "hami", "app.kubernetes.io/component": value},
			MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "canary", Operator: metav1.LabelSelectorOpDoesNotExist}},
		}
	}
	for name, row := range map[string]struct {
		selector *metav1.LabelSelector
		uid      types.UID
		want     string
	}{
		"of several labels": {selects("device-plugin"), "1", "app.kubernetes.io/component=device-plugin,app.kubernetes.io/name=hami,!canary"},
		"of many letters":   {selects(strings.Repeat("x", 1<<20)), "1", ""},
		"of none":           {nil, "1", ""},
		"of another one":    {selects("device-plugin"), "2", ""},
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "monitor", UID: "1"}, Spec: appsv1.DaemonSetSpec{Selector: row.selector}})
			sets := holders.NewDaemonSets(clientset.Of(client), clocktesting.NewFakePassiveClock(time.Now()))
			pods, err := sets.Believe(t.Context(), "node", []corev1.Pod{daemonPod("a", "apps/v1", "monitor", row.uid)})
			if err != nil {
				t.Fatal(err)
			}
			if got := sets.SelectorOf(&pods[0]); got != row.want {
				t.Errorf("the selector is %.200q, want %q", got, row.want)
			}
		})
	}
}

func TestADaemonSetIsAskedForOnceInAWhile(t *testing.T) {
	client := fake.NewClientset(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "monitor", UID: "1"}})
	asked := 0
	client.PrependReactor("get", "daemonsets", func(k8stesting.Action) (bool, runtime.Object, error) {
		asked++
		return false, nil, nil
	})
	clock := clocktesting.NewFakePassiveClock(time.Now())
	sets := holders.NewDaemonSets(clientset.Of(client), clock)
	pods := []corev1.Pod{daemonPod("a", "apps/v1", "monitor", "1"), daemonPod("b", "apps/v1", "monitor", "1"), daemonPod("c", "apps/v1", "monitor", "forged")}
	observe := func(pods []corev1.Pod, want int) {
		t.Helper()
		if _, err := sets.Believe(t.Context(), "node", pods); err != nil {
			t.Fatal(err)
		}
		if asked != want {
			t.Errorf("asked %d times, want %d", asked, want)
		}
	}
	observe(pods, 2)
	observe(pods, 2)
	clock.SetTime(clock.Now().Add(2 * time.Hour))
	observe(pods, 3) // what does not exist never will
	observe(nil, 3)
	observe(pods, 5) // what no pod names is forgotten
}

func TestAnOwnerThatCannotBeLookedForIsNotGuessed(t *testing.T) {
	for name, cause := range map[string]error{
		"no right to":       apierrors.NewForbidden(schema.GroupResource{Group: "apps", Resource: "daemonsets"}, "monitor", errors.New("no")),
		"no answer":         apierrors.NewInternalError(errors.New("etcd is away")),
		"too many requests": apierrors.NewTooManyRequestsError("later"),
	} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset()
			client.PrependReactor("get", "daemonsets", func(k8stesting.Action) (bool, runtime.Object, error) { return true, nil, cause })
			sets := holders.NewDaemonSets(clientset.Of(client), clocktesting.NewFakePassiveClock(time.Now()))
			pods, err := sets.Believe(t.Context(), "node", []corev1.Pod{daemonPod("a", "apps/v1", "monitor", "1")})
			if pods != nil || !errors.Is(err, cause) || !strings.Contains(err.Error(), "team/monitor") {
				t.Errorf("got %d pods and %v", len(pods), err)
			}
		})
	}
}

// Any pod may name a DaemonSet as its owner: one failed request must not end the observation.
func TestADaemonSetIsAskedForAgainWhereTheAPIServerFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "monitor", UID: "1"}})
		asked := 0
		client.PrependReactor("get", "daemonsets", func(k8stesting.Action) (bool, runtime.Object, error) {
			if asked++; asked == 1 {
				return true, nil, apierrors.NewInternalError(apierrors.NewServiceUnavailable("no upstream"))
			}
			return false, nil, nil
		})
		sets := holders.NewDaemonSets(clientset.Of(client), clocktesting.NewFakePassiveClock(time.Now()))
		pods, err := sets.Believe(t.Context(), "node", []corev1.Pod{daemonPod("a", "apps/v1", "monitor", "1")})
		if err != nil || len(pods) != 1 || asked != 2 {
			t.Errorf("after %d requests: %d pods, %v", asked, len(pods), err)
		}
	})
}

// A mirror pod's owner is the node with the UID that the node has: any user may write the annotation and the node's name.
func TestAMirrorPodIsOfThisNode(t *testing.T) {
	pods := make([]corev1.Pod, 3)
	for i, uid := range []types.UID{"node", "another", ""} {
		pods[i].Name, pods[i].Spec.NodeName = "of "+string(uid), "gpu-1"
		pods[i].Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
		pods[i].OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "gpu-1", UID: uid, Controller: ptr.To(true)}}
	}
	got, err := holders.NewDaemonSets(clientset.Of(fake.NewClientset()), clocktesting.NewFakePassiveClock(time.Now())).Believe(t.Context(), "node", pods)
	if err != nil {
		t.Fatal(err)
	}
	for i := range got {
		if p := holders.Describe(&got[i]); p.Mirror != (i == 0) || len(pods[i].OwnerReferences) != 1 {
			t.Errorf("pod %q is a mirror pod: %t, and the one that was passed in has %d owners", p.Name, p.Mirror, len(pods[i].OwnerReferences))
		}
	}
}
