package node_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/node"
)

var verdicts = flag.Int("verdicts", 6, "how many states TestTheFirstLineOfPlanAndApplyIsWhatComes draws")

// home is the label by which pods of a state find its node, and the node elsewhere: no change of a node publishes one of Kubernetes, so that changes of other
// states are nothing to these pods.
const home = "node.kubernetes.io/home"

// drawn is a state of a node and of its cluster.
type drawn struct {
	kind     string // of the pods
	emptyDir bool
	covers   *policyv1.PodDisruptionBudgetSpec
	gpus     int    // of the node elsewhere; -1 without one
	claims   bool   // it has them by a ResourceSlice
	spoilt   string // why it takes no pod; empty if it does
	gate     string // what holds changes up; empty for nothing
	settings string
	patience string // for pods to leave
	allows   []string
	config   string
	blind    bool // who asks may list no pods
	asks     bool // for pods x behind the cordon
}

// oneOf draws one of several.
func oneOf[T any](random *rand.Rand, of ...T) T { return of[random.IntN(len(of))] }

// draw draws a state.
func draw(random *rand.Rand) drawn {
	d := drawn{
		kind:     oneOf(random, "none", "bare", "one", "two", "two", "two", "two", "two", "one each", "one each", "one and a bare one"),
		emptyDir: random.IntN(8) == 0, gpus: random.IntN(4) - 1, claims: random.IntN(3) == 0,
		spoilt: oneOf(random, "", "", "", "cordoned", "tainted", "another label", "no memory"),
		gate:   oneOf(random, "", "", "", "", "", "", "", "", "held", "closed", "unreadable", "full"),
		config: oneOf(random, "all-1g.10gb", "all-balanced", "all-3g.40gb"), blind: random.IntN(6) == 0,
		patience: oneOf(random, "1m", "1h", "1h"),
	}
	if random.IntN(16) == 0 { // what is impossible hides the rest of the state
		d.config = "all-1g.11gb"
	}
	switch random.IntN(5) {
	case 0:
	case 1:
		d.covers = &policyv1.PodDisruptionBudgetSpec{MaxUnavailable: new(intstr.FromInt32(int32(random.IntN(2))))}
	default:
		d.covers = &policyv1.PodDisruptionBudgetSpec{MinAvailable: new(intstr.FromInt32(int32(oneOf(random, 0, 1, 1, 1, 1, 2))))}
	}
	for _, flag := range []string{"--force-unmanaged", "--delete-emptydir-data"} {
		if random.IntN(3) == 0 {
			d.allows = append(d.allows, flag)
		}
	}
	rules := ""
	if d.asks = random.IntN(8) == 0; d.asks {
		rules = ", rules: [{selector: app=x, action: ask, for: 8h}]"
	}
	d.settings = fmt.Sprintf("drain: {unmanagedPods: %s, emptyDir: %s, afterDeadline: %s%s}\ntimeouts: {drain: %s}\n",
		oneOf(random, "evict", "evict", "refuse"), oneOf(random, "evict", "evict", "refuse"), oneOf(random, "undo", "undo", "delete"), rules, d.patience)
	return d
}

// foretold is a node in such a state.
type foretold struct {
	*rig
	drawn
	namespace, elsewhere, plugin string
}

// newForetold brings about the state, with the agent running.
func newForetold(t *testing.T, c *cluster.Cluster, d drawn) *foretold {
	t.Helper()
	maintenance := fmt.Sprintf("verdict-%d", rand.Uint64())
	f := &foretold{drawn: d, rig: rigIn(t, c, twoH100, d.settings+"maintenance: {name: "+maintenance+"}\n", func(o *node.Options) {
		o.Labels = map[string]string{home: maintenance, labelPool: maintenance}
	})}
	f.namespace, f.elsewhere = clustertest.NamespaceOf(t, c), f.Name+"-b"
	f.awaitOffered("nvidia.com/gpu", 2)
	f.configMapOf(maintenance, map[string]string{maintenanceKey: f.maintenance(maintenance)})
	if f.gate == "held" {
		if _, err := f.patch(t.Context(), map[string]any{"metadata": map[string]any{"annotations": map[string]string{config.AnnotationHold: "by the test"}}}); err != nil {
			t.Fatal(err)
		}
	}
	f.startPods(maintenance)
	if f.gpus >= 0 || f.gate == "full" {
		f.addNode(maintenance)
	}
	if f.covers != nil {
		f.addBudget()
	}
	var err error
	if f.plugin, err = (binaries.Builder{Log: os.Stderr}).Tool(t.Context(), "./cmd/kubectl-gpuslice"); err != nil {
		t.Fatal(err)
	}
	f.run()
	f.awaitReason(config.ReasonNotRequested)
	return f
}

// maintenance is the maintenance file of the state.
func (f *foretold) maintenance(pool string) string {
	switch f.gate {
	case "closed":
		return file(farOff)
	case "unreadable":
		return "apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\nwindows: [\n"
	case "full":
		return fmt.Sprintf("apiVersion: gpuslice.io/v1alpha1\nkind: Maintenance\npools:\n- {name: %[1]s, selector: %[2]s=%[1]s, maxUnavailable: 1}\n", pool, labelPool)
	default:
		return maintenanceHeader
	}
}

// startPods runs the pods of the state, each with one GPU.
func (f *foretold) startPods(label string) {
	f.t.Helper()
	pod := corev1.PodTemplateSpec{Spec: f.podSpec(map[string]string{"nvidia.com/gpu": "1"})}
	pod.Spec.NodeSelector = map[string]string{home: label}
	pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")}
	if f.emptyDir {
		pod.Spec.Volumes = []corev1.Volume{{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "scratch", MountPath: "/scratch"}}
	}
	bare := func() {
		if _, err := f.client.CoreV1().Pods(f.namespace).Create(f.t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "bare", Labels: map[string]string{"app": "x", "of": "x"}}, Spec: pod.Spec,
		}, metav1.CreateOptions{}); err != nil {
			f.t.Fatal(err)
		}
	}
	running := 2
	switch f.kind {
	case "none":
		return
	case "bare":
		running = 1
		bare()
	case "one":
		running = 1
		f.deploymentOf(f.namespace, "x", 1, pod)
	case "two":
		f.deploymentOf(f.namespace, "x", 2, pod)
	case "one each":
		f.deploymentOf(f.namespace, "x", 1, pod)
		f.deploymentOf(f.namespace, "y", 1, pod)
	case "one and a bare one":
		f.deploymentOf(f.namespace, "x", 1, pod)
		bare()
	}
	clustertest.Eventually(f.t, "the pods run", func(context.Context) (bool, error) { return f.runningOn(f.Name) == running, nil }) //nolint:contextcheck // it has the test's
}

// runningOn counts the pods of the state that run on the node.
func (f *foretold) runningOn(name string) (n int) {
	for _, p := range f.podsOf(f.namespace) {
		if p.Spec.NodeName == name && running(p) {
			n++
		}
	}
	return n
}

// addNode makes the node elsewhere. It has no kubelet: the test runs what comes there.
func (f *foretold) addNode(label string) {
	f.t.Helper()
	count := resource.MustParse(fmt.Sprint(max(0, f.gpus)))
	offers := corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi"), corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourcePods: resource.MustParse("110")}
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: f.elsewhere, Labels: map[string]string{home: label, labelPool: label, "nvidia.com/gpu.deploy.device-plugin": "no"}}}
	switch f.spoilt {
	case "cordoned":
		n.Spec.Unschedulable = true
	case "tainted":
		n.Spec.Taints = []corev1.Taint{{Key: "example.com/dedicated", Effect: corev1.TaintEffectNoSchedule}}
	case "another label":
		n.Labels[home] = "another"
	case "no memory":
		offers[corev1.ResourceMemory] = resource.MustParse("1Mi")
	}
	n.Spec.Unschedulable = n.Spec.Unschedulable || f.gate == "full"
	if !f.claims {
		offers["nvidia.com/gpu"] = count
	}
	ctx := f.t.Context()
	made, err := f.client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
	if f.claims && f.gpus > 0 {
		f.addSlice()
	}
	beats, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	f.t.Cleanup(func() {
		stop()
		<-ended
		if err := f.client.CoreV1().Nodes().Delete(context.Background(), n.Name, metav1.DeleteOptions{}); err != nil {
			f.t.Error(err)
		}
	})
	made.Status.Capacity, made.Status.Allocatable = offers, offers
	go func() {
		defer close(ended)
		beat := time.Time{}
		err := wait.PollUntilContextCancel(beats, 200*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			if time.Since(beat) > 10*time.Second {
				beat = time.Now()
				made.ResourceVersion, made.Status.Conditions = "", []corev1.NodeCondition{{
					Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now(), LastTransitionTime: made.CreationTimestamp,
				}}
				if _, err := f.client.CoreV1().Nodes().UpdateStatus(ctx, made, metav1.UpdateOptions{}); err != nil {
					return false, err
				}
			}
			return false, f.playKubelet(ctx)
		})
		if beats.Err() == nil {
			f.t.Errorf("playing the kubelet of node %s: %v", n.Name, err)
		}
	}()
	f.awaitNode(n.Name, func(n *corev1.Node) bool {
		return ready(n) && !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeNotReady })
	})
}

// awaitNode waits until another node is as wanted.
func (f *foretold) awaitNode(name string, wanted func(*corev1.Node) bool) {
	f.t.Helper()
	clustertest.Eventually(f.t, "node "+name+" is ready", func(ctx context.Context) (bool, error) {
		n, err := f.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		return err == nil && wanted(n), err
	})
}

// playKubelet runs the pods that the scheduler sends elsewhere, and ends those that are to end.
func (f *foretold) playKubelet(ctx context.Context) error {
	pods := f.client.CoreV1().Pods(f.namespace)
	list, err := pods.List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + f.elsewhere})
	if err != nil {
		return err
	}
	for i := range list.Items {
		p := &list.Items[i]
		var err error
		switch {
		case p.DeletionTimestamp != nil:
			err = pods.Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))})
		case p.Status.Phase != corev1.PodRunning:
			p.Status.Phase = corev1.PodRunning
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue})
			_, err = pods.UpdateStatus(ctx, p, metav1.UpdateOptions{})
		}
		if err != nil && ctx.Err() == nil {
			f.t.Logf("pod %s: %v", p.Name, err) // the next time it is tried again
		}
	}
	return nil
}

// addSlice has a DRA driver offer the GPUs elsewhere.
func (f *foretold) addSlice() {
	f.t.Helper()
	s := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: f.elsewhere}, Spec: resourcev1.ResourceSliceSpec{
		Driver: "gpu.example.com", NodeName: &f.elsewhere, Pool: resourcev1.ResourcePool{Name: f.elsewhere, ResourceSliceCount: 1},
	}}
	for i := range f.gpus {
		s.Spec.Devices = append(s.Spec.Devices, resourcev1.Device{Name: fmt.Sprintf("gpu-%d", i)})
	}
	slices := f.client.ResourceV1().ResourceSlices()
	if _, err := slices.Create(f.t.Context(), s, metav1.CreateOptions{}); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = slices.Delete(context.Background(), s.Name, metav1.DeleteOptions{}) }) // the garbage collector may be first
}

// addBudget makes the budget, which is about the pods of deployment x and the bare one, and waits until it is counted.
func (f *foretold) addBudget() {
	f.t.Helper()
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "x"}, Spec: *f.covers}
	budget.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}}
	budgets := f.client.PolicyV1().PodDisruptionBudgets(f.namespace)
	if _, err := budgets.Create(f.t.Context(), budget, metav1.CreateOptions{}); err != nil {
		f.t.Fatal(err)
	}
	clustertest.Eventually(f.t, "the budget is counted", func(ctx context.Context) (bool, error) {
		b, err := budgets.Get(ctx, "x", metav1.GetOptions{})
		return err == nil && b.Status.ObservedGeneration == b.Generation && b.Status.CurrentHealthy == int32(f.covered()), err //nolint:contextcheck // it has the test's
	})
}

// covered counts the pods of the budget.
func (f *foretold) covered() (n int) {
	for _, p := range f.podsOf(f.namespace) {
		if p.Labels["app"] == "x" {
			n++
		}
	}
	return n
}

// ask runs a command of the plugin, and returns the words about this node, without those that only a dry run has, and its exit code.
func (f *foretold) ask(verb string, flags ...string) (line string, code int) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, f.plugin, append([]string{verb, f.Name, "--mig-config", f.config}, flags...)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+f.kubeconfig())
	out, err := cmd.CombinedOutput()
	if err != nil {
		exit, is := errors.AsType[*exec.ExitError](err)
		if !is {
			f.t.Fatal(err)
		}
		code = exit.ExitCode()
	}
	f.t.Logf("%s: exit code %d:\n%s", verb, code, out)
	for text := range strings.Lines(string(out)) {
		for _, before := range []string{f.Name + ": ", f.Name + "  labelled nvidia.com/mig.config=" + f.config + ": "} {
			if words, is := strings.CutPrefix(strings.TrimSpace(text), before); is {
				return strings.TrimPrefix(words, "would be "), code
			}
		}
	}
	f.t.Fatalf("%s says nothing of the node:\n%s", verb, out)
	return "", 0
}

// kubeconfig is the administrator's, or of someone who may not list pods.
func (f *foretold) kubeconfig() string {
	if !f.blind {
		return f.cluster.AdminKubeconfig()
	}
	path := filepath.Join(f.Dir, "blind.kubeconfig")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	user, err := f.cluster.ConfigFor("roll-out-" + f.Name)
	if err == nil {
		err = cluster.WriteKubeconfig(path, user)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	f.rollsOut()
	return path
}

// comes fails the test unless what is said comes.
func (f *foretold) comes(said string, code int) {
	f.t.Helper()
	head, rest, _ := strings.Cut(said, ": ")
	switch {
	case strings.HasPrefix(said, "begins "):
		unsure := code == 5 || strings.Contains(said, "it is not known whether there are any")
		if !unsure && strings.Contains(said, "deletes the pods") && (f.patience == "1h" || f.asks) { // the rule asks for hours
			f.await("a change that the budget keeps", func(n *corev1.Node) bool {
				return fenced(n) && strings.Contains(condition(n).Message, f.namespace+"/x")
			})
			f.stays(fenced)
			return
		}
		if unsure {
			f.await("a change that begins", func(n *corev1.Node) bool { return fenced(n) || converged(f.config)(n) })
			return
		}
		f.givenBack(f.awaitConverged(f.config))
	case strings.HasPrefix(said, "would give up after "):
		f.await("a change that begins", fenced)
		budget := strings.Fields(rest)[1]
		f.await("a change that the budget keeps", func(n *corev1.Node) bool {
			return condition(n) != nil && strings.Contains(condition(n).Message, budget)
		})
		if f.patience == "1m" {
			f.givenBack(f.await("a change that is given up", func(n *corev1.Node) bool { return !unavailable(n) }))
		} else {
			f.stays(fenced)
		}
		if f.runningOn(f.Name) == 0 {
			f.t.Error("no pod has stayed")
		}
	case head == "held up", head == "refused":
		reason, _, _ := strings.Cut(rest, ": ")
		f.label(config.LabelMIGConfig, f.config) // apply does not, where all refuse
		f.awaitReason(config.Reason(reason))
		f.stays(func(n *corev1.Node) bool { return hasReason(n, config.Reason(reason)) })
		f.neverFenced()
	default:
		f.t.Errorf("it says %q", said)
	}
}

// stays fails the test if the node does not stay so for some seconds.
func (f *foretold) stays(so func(*corev1.Node) bool) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.t.Context(), 4*time.Second)
	defer cancel()
	if n, other := f.seek(ctx, func(n *corev1.Node) bool { return !so(n) }); other {
		f.t.Errorf("it does not stay so: %s", words(n))
	}
}

// Promise 22: the first line of plan, and of apply, is what the agent then does, in random states of node, pods, budget and cluster. What is said to begin
// begins and ends; what is said to be held up, or to be given up, is held up by that; and where the end is not known, plan ends with 5.
func TestTheFirstLineOfPlanAndApplyIsWhatComes(t *testing.T) {
	if testing.Short() {
		t.Skip("some minutes")
	}
	t.Parallel()
	c := clustertest.Apart(t, "verdicts") // a class that offers nvidia.com/gpu would change what other tests see
	build(t)
	if err := deploy(c); err != nil {
		t.Fatal(err)
	}
	_, err := clustertest.ClientOf(t, c).ResourceV1().DeviceClasses().Create(t.Context(), &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: "gpu.example.com"}, Spec: resourcev1.DeviceClassSpec{
			ExtendedResourceName: new("nvidia.com/gpu"),
			Selectors:            []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: "device.driver == 'gpu.example.com'"}}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	first := *seed
	if first == 0 {
		first = rand.Uint64N(1 << 32)
	}
	for i := range *verdicts {
		at := first + uint64(i)
		t.Run(fmt.Sprintf("seed %d", at), func(t *testing.T) {
			t.Parallel()
			d := draw(rand.New(rand.NewPCG(at, 0)))
			t.Logf("to draw the same: -seed %d -verdicts 1: %+v", at, d)
			f := newForetold(t, c, d)
			planned, code := f.ask("plan", f.allows...)
			applied, _ := f.ask("apply", f.allows...)
			if strings.HasPrefix(planned, "held up: ") {
				planned, applied = upToTime(planned), upToTime(applied)
			}
			if planned != applied && !strings.HasPrefix(applied, "not known: its agent has not answered within ") { // as on a busy machine
				t.Errorf("plan says %q, and apply %q", planned, applied)
			}
			if unsure := strings.Contains(planned, "whether it ends is not known"); unsure != (code == 5) {
				t.Errorf("exit code %d of %q", code, planned)
			}
			f.comes(planned, code)
		})
	}
}

// upToTime cuts a verdict before what changes from one second to the next.
func upToTime(said string) string {
	text, _, _ := strings.Cut(said, "; since ")
	return text
}
