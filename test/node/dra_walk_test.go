package node_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/cluster/kubelet"
	"github.com/gpuslice/gpuslice/test/node"
)

var changes = flag.Int("changes", 30, "how many changes TestInRandomChangesOnlyClaimantsOfWhatGoesLeave makes, on four nodes together")

// walkGPUs is how many GPUs a node of a walk has.
const walkGPUs = 3

// walkCuts are the ways to cut an H100; the first is not to.
var walkCuts = []map[string]int{
	nil,
	{"7g.80gb": 1},
	{"3g.40gb": 2},
	{"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1},
	{"3g.40gb": 1, "1g.10gb": 4},
	{"4g.40gb": 1, "1g.10gb": 3},
	{"2g.20gb": 3, "1g.10gb": 1},
	{"1g.10gb": 7},
}

// walk is a node on which NVIDIA's DRA driver gives out the GPUs and pods ask for all of them by claims, while one change follows another and what takes
// part in them ends, starts again or is slow.
type walk struct {
	*rig
	random    *rand.Rand
	namespace string
	daemonSet string // of the driver, for this node alone
	proxy     *cluster.Proxy
	configs   map[string]map[int]map[string]int // by name: the cut of each GPU that it names

	mu     sync.Mutex
	had    map[types.UID]string // UUID of the device that the claim of a pod has been given
	left   map[types.UID]string // name of each pod that was to end
	judged map[types.UID]bool   // those of them that have been looked at

	began  time.Time // of the change
	events []string  // what has happened since
	did    map[string]int
	took   []time.Duration
	stayed int
}

// newWalk starts one with its agent running.
func newWalk(t *testing.T, random *rand.Rand) *walk {
	t.Helper()
	mode := "walk-" + strconv.FormatUint(rand.Uint64(), 36)
	w := &walk{
		rig:    newDRARig(t, fmt.Sprintf("gpus: [{model: H100-80GB, count: %d}]", walkGPUs), "migConfigMap: {name: "+mode+"}\n", mode),
		random: random, daemonSet: mode, configs: map[string]map[int]map[string]int{},
		had: map[types.UID]string{}, left: map[types.UID]string{}, judged: map[types.UID]bool{}, did: map[string]int{},
	}
	w.configMap(mode, w.draw(mode))
	w.driverOfItsOwn()
	w.awaitPublished(w.wholeAndCut())
	w.namespace = clustertest.NamespaceOf(t, w.cluster)
	w.follow()
	for _, of := range []struct {
		name, class, profile string
		count                int32
		ends                 time.Duration // how long its pods take to
	}{
		{"whole", "gpu.nvidia.com", "", 2, 0},
		{"small", "mig.nvidia.com", "1g.10gb", 6, 0},
		{"middle", "mig.nvidia.com", "2g.20gb", 3, 6 * time.Second},
		{"large", "mig.nvidia.com", "3g.40gb", 2, 3 * time.Second},
	} {
		w.template(w.namespace, of.name, of.class, of.profile)
		pod := corev1.PodTemplateSpec{Spec: w.podSpec(nil)}
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &of.name}}
		pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
		if of.ends > 0 {
			pod.Annotations = map[string]string{kubelet.TerminationDelayAnnotation: of.ends.String()}
			pod.Spec.TerminationGracePeriodSeconds = new(int64(30))
		}
		w.deploymentOf(w.namespace, of.name, of.count, pod)
	}
	w.deploymentOf(w.namespace, "any-whole", 1, corev1.PodTemplateSpec{Spec: w.podSpec(map[string]string{"nvidia.com/gpu": "1"})})
	slice := map[string]string{"deviceclass.resource.kubernetes.io/mig.nvidia.com": "1"}
	w.deploymentOf(w.namespace, "any-slice", 2, corev1.PodTemplateSpec{Spec: w.podSpec(slice)})
	w.proxy = w.behindProxy()
	w.run()
	w.awaitReason(config.ReasonNotRequested)
	return w
}

// draw makes configs that name one or two GPUs each, and returns them as a ConfigMap has them.
func (w *walk) draw(prefix string) string {
	var text strings.Builder
	text.WriteString("version: v1\nmig-configs:\n")
	for i := range 16 {
		name, cuts := fmt.Sprintf("%s-%d", prefix, i), map[int]map[string]int{}
		fmt.Fprintf(&text, "  %s:\n", name)
		for _, gpu := range w.random.Perm(walkGPUs)[:1+w.random.IntN(2)] {
			cut := walkCuts[w.random.IntN(len(walkCuts))]
			cuts[gpu] = cut
			fmt.Fprintf(&text, "  - {devices: [%d], mig-enabled: %t, mig-devices: {", gpu, cut != nil)
			for _, profile := range slices.Sorted(maps.Keys(cut)) {
				fmt.Fprintf(&text, "%s: %d, ", profile, cut[profile])
			}
			text.WriteString("}}\n")
		}
		w.configs[name] = cuts
	}
	return text.String()
}

// driverOfItsOwn deploys the driver to this node by a DaemonSet that is rolled out for it alone: other tests have theirs by a shared one.
func (w *walk) driverOfItsOwn() {
	w.t.Helper()
	sets := w.client.AppsV1().DaemonSets("dra-driver-nvidia-gpu")
	ds, err := sets.Get(w.t.Context(), "dra-driver-nvidia-gpu-kubelet-plugin", metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	ds.ObjectMeta = metav1.ObjectMeta{Name: w.daemonSet}
	labels := map[string]string{"dra-driver-nvidia-gpu-component": w.daemonSet}
	ds.Spec.Selector, ds.Spec.Template.Labels = &metav1.LabelSelector{MatchLabels: labels}, labels
	ds.Spec.Template.Spec.NodeSelector = map[string]string{node.DRADriverLabel: w.daemonSet}
	if _, err := sets.Create(w.t.Context(), ds, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if err := sets.Delete(context.Background(), w.daemonSet, metav1.DeleteOptions{}); err != nil {
			w.t.Error(err)
		}
	})
}

// follow notes what the claims of pods are given, and which pods are to end. No one but the agent has any end.
func (w *walk) follow() {
	ctx := w.t.Context()
	claims := func(ctx context.Context) (watch.Interface, error) {
		return w.client.ResourceV1().ResourceClaims(w.namespace).Watch(ctx, metav1.ListOptions{})
	}
	pods := func(ctx context.Context) (watch.Interface, error) {
		return w.client.CoreV1().Pods(w.namespace).Watch(ctx, metav1.ListOptions{})
	}
	ended := func(err error) {
		if ctx.Err() == nil {
			w.t.Errorf("watching namespace %s: %v", w.namespace, err)
		}
	}
	go func() {
		ended(clustertest.Follow(ctx, claims, nil, func(_ watch.EventType, c *resourcev1.ResourceClaim) bool { //nolint:contextcheck // it has the test's, as all of a rig
			w.allocated(c)
			return false
		}))
	}()
	go func() {
		ended(clustertest.Follow(ctx, pods, nil, func(did watch.EventType, p *corev1.Pod) bool {
			if did == watch.Deleted || p.DeletionTimestamp != nil {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.left[p.UID] = p.Name
			}
			return false
		}))
	}()
}

// allocated notes the device of a claim for each pod that may use it.
func (w *walk) allocated(c *resourcev1.ResourceClaim) {
	if c.Status.Allocation == nil {
		return
	}
	var uuid string
	for _, device := range c.Status.Allocation.Devices.Results {
		uuid = w.uuidOf(device.Device)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, pod := range c.Status.ReservedFor {
		if w.had[pod.UID] == "" {
			w.had[pod.UID] = uuid
		}
	}
}

// devices are the UUIDs of what can be given out, by the GPU's minor number and the first slice, which is -1 of a whole GPU.
func (w *walk) devices() map[[2]int]string {
	gpus, err := w.GPUs.Driver().Snapshot(w.t.Context())
	if err != nil && w.t.Context().Err() == nil {
		w.t.Error(err)
	}
	all := map[[2]int]string{}
	for _, gpu := range gpus {
		if !gpu.Enabled {
			all[[2]int{gpu.Minor, -1}] = string(gpu.UUID)
		}
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				all[[2]int{gpu.Minor, i.Start}] = d.UUID
			}
		}
	}
	return all
}

// uuidOf returns the UUID of the device that has this name now, or a text that says that there is none.
func (w *walk) uuidOf(name string) string {
	gpu, of, cut := strings.Cut(name, "-mig-")
	minor, err := strconv.Atoi(strings.TrimPrefix(gpu, "gpu-"))
	start := -1
	if cut && err == nil {
		start, err = strconv.Atoi(of[strings.LastIndex(of, "-")+1:])
	}
	if err != nil {
		w.t.Errorf("device %s: %v", name, err)
	}
	return cmp.Or(w.devices()[[2]int{minor, start}], "none by the name of "+name)
}

// say notes an event of the change.
func (w *walk) say(format string, args ...any) {
	w.events = append(w.events, fmt.Sprintf("%6.2fs ", time.Since(w.began).Seconds())+fmt.Sprintf(format, args...))
}

// disturbances are what happens in a change; one with twice the weight happens twice as often. With -short the last, after which the driver's slices are
// away for half a minute, is left out.
var disturbances = []struct {
	name   string
	weight int
	does   func(*walk)
}{
	{"the driver is rolled out", 8, (*walk).rollOut},
	{"the agent is killed", 4, (*walk).again},
	{"the API server is slow", 4, func(w *walk) { w.proxy.Slow(time.Duration(50+w.random.IntN(450)) * time.Millisecond) }},
	{"the driver is killed", 2, func(w *walk) {
		if pid, runs := w.driverProcess(); runs {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				w.t.Error(err)
			}
		}
	}},
	{"kubelet restarts", 1, func(w *walk) {
		if err := w.Kubelet.Restart(w.t.Context()); err != nil {
			w.t.Error(err)
		}
	}},
}

// disturb has one of them happen.
func (w *walk) disturb() {
	all, weights := disturbances, 0
	if testing.Short() {
		all = all[:len(all)-1]
	}
	for _, d := range all {
		weights += d.weight
	}
	drawn := w.random.IntN(weights)
	for _, d := range all {
		if drawn -= d.weight; drawn < 0 {
			w.did[d.name]++
			w.say("%s", d.name)
			d.does(w)
			return
		}
	}
}

// rollOut has the DaemonSet of the driver replace its pod.
func (w *walk) rollOut() {
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"example.com/rolled-out":"%d"}}}}}`, w.random.Uint64())
	sets := w.client.AppsV1().DaemonSets("dra-driver-nvidia-gpu")
	if _, err := sets.Patch(w.t.Context(), w.daemonSet, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		w.t.Error(err)
	}
}

func (w *walk) again() {
	for _, step := range w.kill() {
		w.say("step done: %s", step)
	}
	w.run()
}

// change asks for a config, disturbs what carries it out, and holds the end against what is promised.
func (w *walk) change() {
	w.t.Helper()
	asked := w.node().Labels[config.LabelMIGConfig]
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(w.configs)), func(name string) bool { return name == asked })
	name := names[w.random.IntN(len(names))]
	w.began, w.events = time.Now(), nil
	w.say("%s: %v, of %s", name, w.configs[name], w.cutNow())
	before, geometry, claimed := w.runningPods(), w.snapshot(), w.claimed(w.namespace)
	ctx, cancel := context.WithTimeout(w.t.Context(), 2*patience)
	defer cancel()
	arrived := make(chan *corev1.Node, 1)
	w.label(config.LabelMIGConfig, name)
	go func() {
		n, ok := w.seek(ctx, w.arrives(name)) //nolint:contextcheck // what it looks at has the test's context
		if !ok {
			w.t.Errorf("waiting for config %s: %v; the node says:\n%s", name, context.Cause(ctx), words(n))
		}
		arrived <- n
	}()
	left := 1 + w.random.IntN(4)
	at := w.soon()
	for {
		select {
		case n := <-arrived:
			w.say("%s", words(n))
			w.took = append(w.took, time.Since(w.began))
			w.proxy.Slow(0)
			w.givenBack(n)
			w.freeSlots()
			w.asAsked(name, geometry)
			w.judge(before, claimed)
			return
		case step, runs := <-w.agents.running.steps:
			if !runs {
				w.t.Fatalf("the agent ended by itself:\n%s", strings.Join(w.events, "\n"))
			}
			w.say("step done: %s", step)
		case <-at:
			if c := condition(w.node()); c == nil || c.Status == corev1.ConditionTrue { // nothing is under way yet, or any more
				at = time.After(50 * time.Millisecond)
				break
			}
			w.disturb()
			if left--; left > 0 {
				at = w.soon()
			}
		}
	}
}

// soon is within a third of the time that a change takes, or half.
func (w *walk) soon() <-chan time.Time {
	return time.After(time.Duration(w.random.Int64N(int64(3 * time.Second))))
}

// arrives recognizes a node that is as asked and given back. It fails the test if the node goes on to say so for five seconds beside slices that differ from
// the GPUs.
func (w *walk) arrives(name string) func(*corev1.Node) bool {
	return func(n *corev1.Node) bool {
		if !converged(name)(n) {
			return false
		}
		agrees, diff := false, ""
		err := wait.PollUntilContextTimeout(w.t.Context(), 100*time.Millisecond, 5*time.Second, true, func(context.Context) (bool, error) {
			want := w.wholeAndCut() //nolint:contextcheck // it has the test's, as all of a rig
			slices.Sort(want)
			diff = gocmp.Diff(want, w.publishedNow()) //nolint:contextcheck // the same
			agrees = diff == ""
			return agrees || !converged(name)(w.node()), nil //nolint:contextcheck // the same
		})
		if err != nil {
			w.t.Errorf("the node says %s, and the driver's devices are (-want +got):\n%s", words(w.node()), diff)
			return true
		}
		return agrees
	}
}

func (w *walk) cutNow() string {
	var all []string
	for _, gpu := range w.snapshot() {
		all = append(all, gpu.Geometry().String())
	}
	return strings.Join(all, " | ")
}

// runningPods are those of the namespace, by their names.
func (w *walk) runningPods() map[string]*corev1.Pod {
	all := map[string]*corev1.Pod{}
	for _, pod := range w.podsOf(w.namespace) {
		if running(pod) {
			all[pod.Name] = pod
		}
	}
	return all
}

// freeSlots fails the test unless no pool keeps a slot for the node.
func (w *walk) freeSlots() {
	w.t.Helper()
	clustertest.Eventually(w.t, "the node has no slot of a pool", func(ctx context.Context) (bool, error) {
		leases, err := w.client.CoordinationV1().Leases(agentNamespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		return !slices.ContainsFunc(leases.Items, func(l coordinationv1.Lease) bool {
			return strings.Contains(l.Annotations[config.AnnotationSlots], w.Name)
		}), nil
	})
}

// asAsked fails the test unless the GPUs that the config names are cut as it says, and others as before.
func (w *walk) asAsked(name string, before []nvml.GPU) {
	w.t.Helper()
	for i, gpu := range w.snapshot() {
		cut, named := w.configs[name][i]
		switch {
		case !named:
			if diff := gocmp.Diff(before[i].Geometry().String(), gpu.Geometry().String()); diff != "" || gpu.Enabled != before[i].Enabled {
				w.t.Errorf("%s names no GPU %d, and it is another (-before +after):\n%s", name, i, diff)
			}
		case gpu.Enabled != (cut != nil):
			w.t.Errorf("%s: MIG mode of GPU %d is %t", name, i, gpu.Enabled)
		default:
			if diff := gocmp.Diff(cut, counts(gpu), cmpopts.EquateEmpty()); diff != "" {
				w.t.Errorf("%s: GPU %d has other instances (-want +got):\n%s", name, i, diff)
			}
		}
	}
}

// judge fails the test if a pod has left whose device is there, or if one that ran before and whose device is there was disturbed.
func (w *walk) judge(before map[string]*corev1.Pod, claimed map[string][]string) {
	w.t.Helper()
	stands := map[string]bool{}
	for _, uuid := range w.devices() {
		stands[uuid] = true
	}
	w.mu.Lock()
	for uid, name := range w.left {
		if w.judged[uid] {
			continue
		}
		w.judged[uid] = true
		w.did["evicted"]++
		w.say("pod %s has left, which had %s", name, w.had[uid])
		if w.had[uid] == "" || stands[w.had[uid]] {
			w.t.Errorf("pod %s has left, and had %q, which is there", name, w.had[uid])
		}
	}
	maps.DeleteFunc(before, func(_ string, pod *corev1.Pod) bool { return !stands[w.had[pod.UID]] })
	w.mu.Unlock()
	w.stayed += len(before)
	w.keepClaims(w.namespace, before, claimed)
}

// settle waits until each pod on the node runs.
func (w *walk) settle() {
	w.t.Helper()
	clustertest.Eventually(w.t, "each pod on the node runs", func(context.Context) (bool, error) {
		for _, pod := range w.podsOf(w.namespace) { //nolint:contextcheck // it has the test's, as all of a rig
			if pod.Spec.NodeName != "" && !running(pod) {
				return false, nil
			}
		}
		return true, nil
	})
}

// Promises 3, 8, 9, 10 and 23: one random change after another, while the driver's DaemonSet is rolled out, the driver and the agent are killed, kubelet
// restarts and the API server answers late. No pod leaves whose device is there in the end, each change arrives, and nothing is kept back on the node.
func TestInRandomChangesOnlyClaimantsOfWhatGoesLeave(t *testing.T) {
	t.Parallel()
	seed, count, nodes := *seed, *changes, 4
	if seed == 0 {
		seed = rand.Uint64()
	}
	if testing.Short() {
		count, nodes = min(count, 3), 1
	}
	t.Logf("to draw the same: -seed %d -changes %d", seed, count)
	for i := range nodes {
		t.Run(fmt.Sprintf("node %d", i), func(t *testing.T) {
			t.Parallel()
			w := newWalk(t, rand.New(rand.NewPCG(seed, uint64(i))))
			began := time.Now()
			for at := range count/nodes + min(1, max(0, count%nodes-i)) {
				if w.random.IntN(3) > 0 { // else pods are about to start when the next change comes
					w.settle()
				}
				if w.change(); t.Failed() {
					t.Fatalf("in change %d:\n%s", at, strings.Join(w.events, "\n"))
				}
			}
			w.settle()
			slices.Sort(w.took)
			within := func(of int) time.Duration { return w.took[(len(w.took)-1)*of/100].Round(100 * time.Millisecond) }
			t.Logf("%d changes in %s: half of them within %s, nine of ten within %s, all within %s; %v; pods stayed %d times",
				len(w.took), time.Since(began).Round(time.Second), within(50), within(90), within(100), w.did, w.stayed)
		})
	}
}
