package node_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/gpusim"
)

// Why nodes are found cordoned, cause by cause. Each is provoked for real, and it is measured how long the node is kept after
// it. README.md has the table, with the causes that other tests show.

// impatient gives pods the shortest time that the settings allow.
const impatient = "timeouts: {drain: 1m}\n"

func TestCauseAgentDiedBetweenCordonAndDrainEnd(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.user(namespace, "train", slow(5*time.Second))
	p := r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	r.awaitSteps(p, "evict train")
	r.kill()
	given := r.cause()
	if n := r.node(); !n.Spec.Unschedulable || n.Annotations[config.AnnotationJournal] == "" {
		t.Fatal("the agent died before the cordon")
	}
	r.run()
	given(r.awaitConverged("all-balanced"))
}

func TestCauseAgentDiedWhileMutating(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.runToTheMiddle("all-balanced")
	r.kill()
	given := r.cause()
	r.run()
	given(r.awaitConverged("all-balanced"))
}

// Hopper loses MIG mode with the boot, and all GPUs their instances.
func TestCauseRebootInTheMiddle(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.runToTheMiddle("all-balanced")
	r.kill()
	if err := r.Reboot(t.Context()); err != nil {
		t.Fatal(err)
	}
	given := r.cause()
	r.run()
	given(r.awaitConverged("all-balanced"))
}

// Each of the two pods may go, as a dry run says. When one is gone, the other may not.
func TestCauseDrainBlockedByABudget(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, impatient)
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	for _, name := range []string{"api-0", "api-1"} {
		r.user(namespace, name, func(p *corev1.Pod) { p.Labels["app"] = "api" })
	}
	r.budget(namespace, "api", 1)
	r.awaitBudget(namespace, "api", 1)
	before := r.geometry()
	r.run()
	given := r.cause()
	r.label(config.LabelMIGConfig, "all-balanced")
	r.awaitReason(config.ReasonEvictionBlocked)
	given(r.awaitGivenUp(config.ReasonEvictionBlocked, namespace+"/api-", "PDB "+namespace+"/api: needs 1 healthy pod and has 1"))
	if after := r.geometry(); after != before {
		t.Errorf("the GPUs have changed from %s to %s", before, after)
	}
}

// What counts is what the pod holds: once its containers have ended, nobody waits for what keeps its object.
func TestCausePodTerminatingForEverByAFinalizer(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, impatient)
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.user(namespace, "train", func(p *corev1.Pod) { p.Finalizers = []string{"team.example/backup"} })
	r.run()
	given := r.cause()
	r.label(config.LabelMIGConfig, "all-balanced")
	given(r.awaitConverged("all-balanced"))
	p, err := r.client.CoreV1().Pods(namespace).Get(t.Context(), "train", metav1.GetOptions{})
	if err != nil || p.DeletionTimestamp == nil || len(p.Finalizers) != 1 {
		t.Errorf("the pod does not keep terminating: %v", err)
	}
	body := []byte(`{"metadata":{"finalizers":null}}`)
	if _, err := r.client.CoreV1().Pods(namespace).Patch(t.Context(), "train", types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

func TestCausePodTerminatingForEverWithItsContainers(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, impatient)
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.user(namespace, "train", slow(24*time.Hour))
	before := r.geometry()
	r.run()
	given := r.cause()
	r.label(config.LabelMIGConfig, "all-balanced")
	given(r.awaitGivenUp(config.ReasonEvictionBlocked, namespace+"/train: terminating, its grace ends at "))
	if after := r.geometry(); after != before {
		t.Errorf("the GPUs have changed from %s to %s", before, after)
	}
}

// The pod has ended with its kubelet, and nobody says so: it is not believed to be gone, and no GPU is touched.
func TestCauseNodeUnreachable(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.user(namespace, "train", slow(30*time.Second))
	before := r.geometry()
	p := r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	r.awaitSteps(p, "evict train")
	r.Kubelet.Stop()
	n := r.await("NotReady", func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(config.ReasonKubeletUnavailable) && !ready(n)
	})
	if !n.Spec.Unschedulable {
		t.Error("the fence is gone")
	}
	if after := r.geometry(); after != before {
		t.Errorf("the GPUs were cut from %s to %s while nobody knew who has them", before, after)
	}
	given := r.cause()
	if err := r.StartKubelet(t.Context()); err != nil {
		t.Fatal(err)
	}
	given(r.awaitConverged("all-balanced"))
}

// Somebody has ended the DRA driver before the pods that hold its claims. Kubelet cannot give those back without it, and so does not
// let the pod end. The agent does not know which GPU a claim is of, and touches none. A pod that only says that it is the driver is not
// believed: it is of no DaemonSet that exists.
func TestCauseDRADriverStoppedBeforeClaimHolders(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		cured bool
	}{{"and started again", true}, {"for good", false}} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			settings := impatient
			if row.cured {
				settings = "" // the driver is to be back before the change is given up
			}
			r := newRig(t, twoH100, settings)
			r.awaitOffered("nvidia.com/gpu", 2)
			namespace := clustertest.Namespace(t)
			driver := r.claimDriver(namespace)
			driver.start()
			r.claimant(namespace, "train")
			driver.stop()
			driver.pretend()
			before := r.geometry()
			r.run()
			given := r.cause()
			r.label(config.LabelMIGConfig, "all-balanced")
			const says = "/train: terminating, its grace ended at "
			away := "cannot give its resource claims back (train): their DRA driver gpu.nvidia.com does not run on this node; start it"
			n := r.await("what keeps the pod", func(n *corev1.Node) bool {
				c := condition(n)
				return c != nil && c.Reason == string(config.ReasonEvicting) && strings.Contains(c.Message, away)
			})
			for _, want := range []string{namespace + says, "; since ", "Z the change is given up"} {
				if !strings.Contains(condition(n).Message, want) {
					t.Errorf("the message does not say %q: %s", want, condition(n).Message)
				}
			}
			d := r.diagnosis(exitGivenBack)
			if !slices.ContainsFunc(d.Causes, func(f api.Finding) bool {
				return f.Cause == api.CauseClaimDriverGone && strings.Contains(f.Evidence, away)
			}) {
				t.Errorf("the diagnosis does not name the driver: %+v", d.Causes)
			}
			if after := r.geometry(); after != before {
				t.Errorf("the GPUs were cut from %s to %s while a pod had one of them", before, after)
			}
			if row.cured {
				given = r.cause()
				driver.start()
				given(r.awaitConverged("all-balanced"))
				return
			}
			given(r.awaitGivenUp(config.ReasonEvictionBlocked, namespace+says, away))
			if after := r.geometry(); after != before {
				t.Errorf("the GPUs have changed from %s to %s", before, after)
			}
			driver.start() // the pod's end is awaited with the namespace
		})
	}
}

// The other side: the driver's own pod is there, and its program answers kubelet no more. To start the driver would be no help.
func TestADRADriverIsKnownByItsDaemonSet(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, impatient)
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	driver := r.claimDriver(namespace)
	driver.start()
	r.claimant(namespace, "train")
	driver.hang()
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	n := r.await("what keeps the pod", func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(config.ReasonEvicting) && strings.Contains(c.Message, "its containers have ended")
	})
	if !strings.Contains(condition(n).Message, "kubelet is still cleaning up") || strings.Contains(condition(n).Message, "does not run") {
		t.Errorf("the message says otherwise: %s", condition(n).Message)
	}
	r.awaitGivenUp(config.ReasonEvictionBlocked, namespace+"/train: terminating, its grace ended at ")
	driver.restart() // the pod's end is awaited with the namespace
}

func TestCausePolicyRefusesAPod(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "drain: {unmanagedPods: refuse}\n")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.user(namespace, "notebook", nil)
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	n := r.awaitReason(config.ReasonEvictionBlocked)
	for _, want := range []string{namespace + "/notebook", "drain.unmanagedPods"} {
		if !strings.Contains(condition(n).Message, want) {
			t.Errorf("the message does not say %q: %s", want, condition(n).Message)
		}
	}
	r.givenBack(n)
	if evicted := r.evictions(namespace); len(evicted) > 0 {
		t.Errorf("the pod was evicted: %v", evicted)
	}
	given := r.cause()
	if err := r.client.CoreV1().Pods(namespace).Delete(t.Context(), "notebook", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	given(r.awaitConverged("all-balanced"))
}

// Somebody has removed the journal and the label by hand, and left the cordon and the taint.
func TestCauseOwnCordonWithoutAJournal(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.runToTheMiddle("all-balanced")
	r.kill()
	r.kubectl("annotate", "node", r.Name, config.AnnotationJournal+"-")
	r.kubectl("label", "node", r.Name, config.LabelMIGConfig+"-")
	if n := r.node(); !n.Spec.Unschedulable {
		t.Fatal("there is no cordon left behind")
	}
	given := r.cause()
	r.run()
	given(r.await("the end", func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(config.ReasonNotRequested) && !n.Spec.Unschedulable
	}))
}

func TestCauseLabelRemovedAndCordonLeft(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	before := r.geometry()
	r.runToTheMiddle("all-balanced")
	r.kill()
	r.kubectl("label", "node", r.Name, config.LabelMIGConfig+"-")
	given := r.cause()
	r.run()
	given(r.await("the end", func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(config.ReasonNotRequested) && n.Annotations[config.AnnotationJournal] == ""
	}))
	if after := r.geometry(); after != before {
		t.Errorf("the GPUs are cut as %s, and were as %s", after, before)
	}
}

// That the cordon stays in other cases is shown by other tests. Here it is said whose it is.
func TestCauseAdministratorCordoned(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.kubectl("cordon", r.Name)
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	n := r.awaitConverged("all-balanced")
	if who, _, on := fence.Cordoner(n); !on || who != "kubectl" {
		t.Errorf("the node is cordoned %t by %q, want the administrator's cordon", on, who)
	}
	if message := condition(n).Message; !strings.Contains(message, "cordoned by kubectl since ") {
		t.Errorf("the message does not say whose cordon it is: %s", message)
	}
	given := r.cause()
	r.kubectl("uncordon", r.Name)
	given(r.await("schedulable", func(n *corev1.Node) bool { return !n.Spec.Unschedulable }))
}

func TestCauseAnotherControllerCordoned(t *testing.T) {
	t.Parallel()
	const mark = "weave.works/kured-reboot-in-progress"
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.user(clustertest.Namespace(t), "train", nil)
	r.kubectl("cordon", r.Name)
	r.kubectl("annotate", "node", r.Name, mark+"=2026-11-21T02:00:00Z")
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	n := r.awaitReason(config.ReasonOtherMaintenance)
	if message := condition(n).Message; !strings.Contains(message, "kured") || !strings.Contains(message, mark) {
		t.Errorf("the message does not name kured: %s", message)
	}
	if n.Annotations[config.AnnotationJournal] != "" {
		t.Error("a change was begun")
	}
	given := r.cause()
	r.kubectl("annotate", "node", r.Name, mark+"-")
	r.kubectl("uncordon", r.Name)
	given(r.awaitConverged("all-balanced"))
}

// The API server says yes to the uncordon, and does nothing.
func TestCauseUncordonDidNotStick(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	lies := r.behindALiar()
	r.run()
	r.label(config.LabelMIGConfig, "all-balanced")
	n := r.awaitConverged("all-balanced")
	if lies.Load() != 2 {
		t.Errorf("the API server has lied %d times, want 2", lies.Load())
	}
	r.givenBack(n)
}

// It is the controller manager that takes the taint of a cordon away, some time after the uncordon.
func TestCauseTaintOutlivesTheCordon(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.runToTheMiddle("all-balanced")
	r.await("the taint of the cordon", closed)
	r.await("the uncordon", func(n *corev1.Node) bool { return !n.Spec.Unschedulable })
	began := time.Now()
	r.recover(exitGivenBack)
	if closed(r.node()) {
		t.Error("recover says that the node is given back, and pods are kept away")
	}
	t.Logf("recover waited for %s", time.Since(began).Round(time.Millisecond))
}

func TestCauseRepartitionFailedForGood(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "retry: {failures: 3, first: 1s}\n")
	r.awaitOffered("nvidia.com/gpu", 2)
	before := r.geometry()
	r.runToTheMiddle("all-balanced")
	given := r.cause()
	if err := r.GPUs.Fail(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Unknown, Times: 3}); err != nil {
		t.Fatal(err)
	}
	given(r.awaitGivenUp(config.ReasonHardwareFailure, "given up after 3 attempts"))
	if after := r.geometry(); after != before {
		t.Errorf("the GPUs are cut as %s, and were as %s", after, before)
	}
}

// Ours are given back. Those of others are theirs.
func TestCauseOperandsLeftPaused(t *testing.T) {
	t.Parallel()
	const ours, theirs = config.LabelOperandPrefix + "dcgm", config.LabelOperandPrefix + "gpu-feature-discovery"
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.label(ours, fence.PausedValue)
	r.label(theirs, "paused-for-mig-change")
	given := r.cause()
	r.run()
	n := r.await("the label", func(n *corev1.Node) bool {
		return n.Labels[ours] == "true" && n.Annotations[config.AnnotationJournal] == ""
	})
	given(n)
	if got := n.Labels[theirs]; got != "paused-for-mig-change" {
		t.Errorf("another tool's label is %q", got)
	}
}

// A change that has failed, a wish that is withdrawn, an agent that is restarted: once the node is given back, nothing takes it
// again.
func TestCauseTheWayBackCordonsAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t, twoH100, "retry: {failures: 3, first: 1s}\n")
	r.awaitOffered("nvidia.com/gpu", 2)
	r.runToTheMiddle("all-balanced")
	if err := r.GPUs.Fail(gpusim.CreateGpuInstanceWithPlacement, gpusim.Fault{Return: gpusim.Unknown, Times: 3}); err != nil {
		t.Fatal(err)
	}
	r.awaitGivenUp(config.ReasonHardwareFailure, "given up after 3 attempts")
	r.kill()
	r.run()
	r.awaitGivenUp(config.ReasonHardwareFailure, "given up after 3 attempts")
	r.kubectl("label", "node", r.Name, config.LabelMIGConfig+"-")
	n := r.awaitReason(config.ReasonNotRequested)
	r.givenBack(n)
	if cordons := r.cordons(); cordons != 1 {
		t.Errorf("the node was cordoned %d times for one change", cordons)
	}
}

// cause is the moment from which it is counted how long the node is kept. Given checks that it is back, and says how long it took.
func (r *rig) cause() (given func(*corev1.Node)) {
	r.t.Helper()
	began := time.Now()
	return func(n *corev1.Node) {
		r.t.Helper()
		r.givenBack(n)
		r.t.Logf("given back after %s", time.Since(began).Round(100*time.Millisecond))
	}
}

// user is a pod that holds a GPU.
func (r *rig) user(namespace, name string, change func(*corev1.Pod)) {
	r.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec:       r.podSpec(map[string]string{"nvidia.com/gpu": "1"}),
	}
	if change != nil {
		change(p)
	}
	if _, err := r.client.CoreV1().Pods(namespace).Create(r.t.Context(), p, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
	r.awaitRunning(namespace, name)
}

// slow lets the containers of a pod take their time to end.
func slow(d time.Duration) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Annotations = map[string]string{kubelet.TerminationDelayAnnotation: d.String()}
		p.Spec.TerminationGracePeriodSeconds = new(int64(d.Seconds()))
	}
}

// awaitBudget waits until the controller manager has counted so many pods that may go.
func (r *rig) awaitBudget(namespace, name string, allowed int32) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.PolicyV1().PodDisruptionBudgets(namespace).Watch(ctx, metav1.SingleObject(metav1.ObjectMeta{Name: name}))
	}
	err := clustertest.Follow(ctx, open, nil, func(_ watch.EventType, b *policyv1.PodDisruptionBudget) bool {
		return b.Status.DisruptionsAllowed == allowed
	})
	if err != nil {
		r.t.Fatalf("waiting for budget %s to let %d pods go: %v", name, allowed, err)
	}
}

// awaitSteps waits until the agent says that it has done the step.
func (r *rig) awaitSteps(p *process, want string) {
	r.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case step, ok := <-p.steps:
			if !ok {
				r.t.Fatalf("the agent ended by itself before %q", want)
			}
			if step == want {
				return
			}
		case <-timeout:
			r.t.Fatalf("no step %q in %s; the node says:\n%s", want, patience, words(r.node()))
		}
	}
}

// awaitGivenUp waits until the change is undone, and checks that the node says why.
func (r *rig) awaitGivenUp(reason config.Reason, says ...string) *corev1.Node {
	r.t.Helper()
	n := r.await("the end of the change", func(n *corev1.Node) bool {
		c := condition(n)
		return c != nil && c.Reason == string(reason) && n.Annotations[config.AnnotationJournal] == "" &&
			n.Labels[config.LabelMIGConfigState] == string(config.StateFailed)
	})
	for _, want := range says {
		if !strings.Contains(condition(n).Message, want) {
			r.t.Errorf("the message does not say %q: %s", want, condition(n).Message)
		}
	}
	return n
}

// behindALiar has the agent reach the API server by way of a proxy that twice swallows an uncordon, and answers with the node
// as it would be.
func (r *rig) behindALiar() *atomic.Int32 {
	r.t.Helper()
	lies := &atomic.Int32{}
	r.behind(func(onward http.Handler, w http.ResponseWriter, request *http.Request) {
		body, err := io.ReadAll(request.Body)
		if err != nil {
			return // the agent has given it up
		}
		request.Body = io.NopCloser(bytes.NewReader(body))
		if request.Method == http.MethodPatch && bytes.Contains(body, []byte(`"unschedulable":false`)) && lies.Load() < 2 {
			lies.Add(1)
			query := request.URL.Query()
			query.Set("dryRun", metav1.DryRunAll)
			request.URL.RawQuery = query.Encode()
		}
		onward.ServeHTTP(w, request)
	})
	return lies
}

// behind has the next agent reach the API server by way of serve, which has a request answered by onward.
func (r *rig) behind(serve func(onward http.Handler, w http.ResponseWriter, request *http.Request)) {
	r.t.Helper()
	transport, err := rest.TransportFor(r.account)
	if err != nil {
		r.t.Fatal(err)
	}
	to, err := url.Parse(r.account.Host)
	if err != nil {
		r.t.Fatal(err)
	}
	onward := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1, // watches are answered bit by bit
		Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(to) },
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) { serve(onward, w, request) }))
	r.t.Cleanup(func() {
		if r.agents.running != nil {
			r.kill() // it would watch on
		}
		server.Close()
	})
	if err := cluster.WriteKubeconfig(r.agents.kubeconfig, &rest.Config{Host: server.URL}); err != nil {
		r.t.Fatal(err)
	}
}

// geometry is how the GPUs are cut.
func (r *rig) geometry() string {
	r.t.Helper()
	var out []string
	for _, gpu := range r.snapshot() {
		out = append(out, fmt.Sprintf("GPU %d MIG %t %s", gpu.Index, gpu.Enabled, gpu.Geometry()))
	}
	return strings.Join(out, ", ")
}

func ready(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// closed reports whether the taint of a cordon keeps pods away. The node lifecycle controller writes it, and takes it away some time after the cordon.
func closed(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeUnschedulable })
}
