package node_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/node"
)

var advicePods = flag.Int("advice", 20, "how many pending pods the tests of advice that is carried out draw, 15 for each node, which are 3 at least; from 100 on nodes have 8 GPUs")

const (
	labelDedicated = "nvidia.com/gpu" // key of the taint of some nodes
	labelPlugin    = "nvidia.com/gpu.deploy.device-plugin"
	notThere       = "7g.141gb" // profile of no model of these nodes
	// requestedByClaim is the device plugin's name for the device that a pod requests by a claim.
	requestedByClaim = "test.gpuslice.io/requested"
	// settles is how long the scheduler may take to look again at pods that fit now: its longest backoff and some more.
	settles = 45 * time.Second
)

// advisedMove and advisedProposal are what is read of `advise -o json`.
type advisedMove struct {
	Pod, Verdict, Reason, Node, Config, Command string
	Requests, Leave, Budgets, Notes, Rivals     []string
	Cuts                                        []json.RawMessage
}

type advisedProposal struct {
	Node, Config, Command string
	Pods, Leave           int
}

type advisedAll struct {
	Moves     []advisedMove
	Proposals []advisedProposal
	Notes     []string
}

// never reports whether the verdict is that no change that may begin lets the pod run.
func (m *advisedMove) never() bool {
	return slices.Contains([]string{"TooLarge", "Gated", "NotGPU"}, m.Verdict)
}

// adviceWalk are nodes with random GPUs and pods, and what advise says of pods that wait for them.
type adviceWalk struct {
	t          *testing.T
	random     *rand.Rand
	cluster    *cluster.Cluster
	client     kubernetes.Interface
	namespace  string
	owner      *corev1.ConfigMap // controller of pods that no one recreates
	pool       string
	gpus       int // of a node
	parts      node.Parts
	claims     bool // every third node has NVIDIA's DRA driver, and some pods ask by claims
	nodes      []*rig
	user       string // that asks
	kubeconfig string // of the user
	command    string
	scheduler  int // process id

	like      map[string]string // pending pods by name: what they ask for, and under which rules
	profiles  map[string][]string
	extended  map[string]bool   // resources that a DeviceClass stands for
	never     map[string]string // pods by namespace and name that were said to run after no change
	verdicts  map[string]int
	advised   int             // pods that were said to run
	certain   int             // of these that no other pod was said to run in the place of
	left      int             // pods that were said to leave, and did
	stayed    []string        // that were said to leave
	missed    []string        // what did not come
	displaced []string        // pods that wait because another runs in their place, as was said
	displaces map[string]bool // those that do
	took      time.Duration   // in the command, all its runs together
	asked     int
}

// newAdviceWalk starts the nodes with their agents, and pods on them.
func newAdviceWalk(t *testing.T, random *rand.Rand, pods int, claims bool) *adviceWalk {
	t.Helper()
	build(t)
	name, parts, more := "advice", common.parts, []string(nil)
	if claims {
		name, more = "advice-claims", []string{"manifests/dra-driver.yaml"}
		if err := parts.BuildDRADriver(t.Context(), binaries.Builder{Log: os.Stderr}); err != nil {
			t.Fatal(err)
		}
	}
	c := clustertest.Apart(t, name) // what else waits would be advised on, too
	if err := deploy(c, more...); err != nil {
		t.Fatal(err)
	}
	w := &adviceWalk{
		parts: parts, claims: claims, extended: map[string]bool{}, t: t, random: random, cluster: c, client: clustertest.ClientOf(t, c), namespace: clustertest.NamespaceOf(t, c),
		pool: fmt.Sprintf("advice-%d", rand.Uint32()), gpus: 3, user: "adviser", like: map[string]string{}, profiles: map[string][]string{},
		never: map[string]string{}, displaces: map[string]bool{}, verdicts: map[string]int{},
	}
	if pods >= 100 {
		w.gpus = 8
	}
	w.asAdviser()
	w.findScheduler()
	t.Cleanup(func() { w.signal(syscall.SIGCONT) })
	var err error
	if w.owner, err = w.client.CoreV1().ConfigMaps(w.namespace).Create(t.Context(), &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "owner"},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range max(3, pods/15) {
		w.addNode(claims && i%3 == 2)
	}
	if claims {
		w.defineClaims()
	}
	w.nodes[0].configMapOf(w.pool, map[string]string{maintenanceKey: maintenanceHeader})
	for _, r := range w.nodes {
		if w.byClaims(r) {
			r.awaitPublished(r.wholeAndCut())
		} else {
			r.await("what its GPUs are", func(n *corev1.Node) bool { return maps.Equal(offered(n), w.offers(r)) })
		}
		r.run()
	}
	for i, r := range w.nodes {
		r.awaitReason(config.ReasonNotRequested)
		w.occupy(r, i%4 == 0)
	}
	w.awaitReports()
	return w
}

// asAdviser makes the credentials of who asks.
func (w *adviceWalk) asAdviser() {
	w.t.Helper()
	user, err := w.cluster.ConfigFor(w.user, "system:masters")
	w.kubeconfig = filepath.Join(w.t.TempDir(), "adviser.kubeconfig")
	if err == nil {
		err = cluster.WriteKubeconfig(w.kubeconfig, user)
	}
	if err == nil {
		w.command, err = (binaries.Builder{Log: os.Stderr}).Tool(w.t.Context(), "./cmd/kubectl-gpuslice")
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// findScheduler finds the process of the control plane's scheduler.
func (w *adviceWalk) findScheduler() {
	w.t.Helper()
	flag := "--kubeconfig=" + filepath.Join(w.cluster.Dir(), "kube-scheduler.kubeconfig")
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		w.t.Fatal(err)
	}
	for _, path := range all {
		text, err := os.ReadFile(path)
		if err == nil && slices.ContainsFunc(bytes.Split(text, []byte{0}), func(arg []byte) bool { return string(arg) == flag }) {
			w.scheduler, _ = strconv.Atoi(filepath.Base(filepath.Dir(path)))
			return
		}
	}
	w.t.Fatal("no process is the scheduler")
}

// signal stops the scheduler, or lets it go on.
func (w *adviceWalk) signal(s syscall.Signal) {
	w.t.Helper()
	if err := syscall.Kill(w.scheduler, s); err != nil {
		w.t.Fatal(err)
	}
}

// byClaims reports whether NVIDIA's DRA driver offers the node's GPUs.
func (w *adviceWalk) byClaims(r *rig) bool { return r.Parts.DRADriver != "" }

// defineClaims makes templates for the devices of all models, and DeviceClasses for half of their resources.
func (w *adviceWalk) defineClaims() {
	w.t.Helper()
	r := w.nodes[0]
	r.template(w.namespace, templateFor(""), "gpu.nvidia.com", "")
	r.template(w.namespace, "any-part", "mig.nvidia.com", "")
	w.extended[nvml.ResourceGPU] = true // by the driver's manifest
	all := []string{notThere}
	for _, profiles := range w.profiles {
		all = append(all, profiles...)
	}
	slices.Sort(all)
	for _, profile := range slices.Compact(all) {
		r.template(w.namespace, templateFor(profile), "mig.nvidia.com", profile)
		if w.random.IntN(2) == 0 {
			w.extended[resourceFor(profile)] = true
			r.class(resourceFor(profile), "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'mig' && "+
				"device.attributes['gpu.nvidia.com'].profile == '"+profile+"'")
		}
	}
}

// templateFor is the template of claims for a device of the profile; for none, for a whole GPU.
func templateFor(profile string) string {
	return strings.ReplaceAll(strings.TrimPrefix(resourceFor(profile), "nvidia.com/"), "+", ".")
}

// claim has the pod ask for a device by a claim. Template is that of the resource, or another.
func claim(p *metav1.ObjectMeta, spec *corev1.PodSpec, resourceName, template string) {
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	p.Annotations[requestedByClaim] = resourceName
	spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &template}}
	spec.Containers[0].Resources = corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}
}

// requested are the devices that a pod requests, by the device plugin's names; none for any part of a GPU.
func requested(p *corev1.Pod) map[string]int {
	out := map[string]int{}
	for name, n := range p.Spec.Containers[0].Resources.Requests {
		if strings.HasPrefix(string(name), "nvidia.com/") {
			out[string(name)] = int(n.Value())
		}
	}
	if name := p.Annotations[requestedByClaim]; name != "" {
		out[name]++
	}
	return out
}

// addNode starts a node of one model with GPUs that are whole, or cut at random.
func (w *adviceWalk) addNode(byClaims bool) {
	w.t.Helper()
	model := oneOf(w.random, "H100-80GB", "H100-80GB", "A100-40GB", "A30")
	spec := "gpus:\n"
	for range w.gpus {
		spec += fmt.Sprintf("- {model: %s, mig: %t}\n", model, w.random.IntN(5) > 0)
	}
	r := rigIn(w.t, w.cluster, spec, "maintenance: {name: "+w.pool+"}\n", func(o *node.Options) {
		o.Labels = map[string]string{labelPool: w.pool, "test.gpuslice.io/model": model, labelPlugin: "no"}
		if o.Parts = common.parts; byClaims {
			o.Parts = w.parts
		}
	})
	w.nodes = append(w.nodes, r)
	for _, gpu := range r.snapshot() {
		w.profiles[model] = nil
		// Before v0.20 NVIDIA's plugin has the same name for 1g.10gb+me as for 1g.10gb.
		gpu.Profiles = slices.DeleteFunc(gpu.Profiles, func(p nvml.Profile) bool { return strings.Contains(p.Name, "+") })
		for _, p := range gpu.Profiles {
			w.profiles[model] = append(w.profiles[model], p.Name)
		}
		if gpu.Enabled {
			w.cutAtRandom(r, gpu)
		}
	}
	labels := map[string]any{labelPlugin: nil}
	if byClaims {
		labels[node.DRADriverLabel] = node.DRAStatic
	}
	body := map[string]any{"metadata": map[string]any{"labels": labels}}
	if w.random.IntN(6) == 0 {
		body["spec"] = map[string]any{"taints": []corev1.Taint{{Key: labelDedicated, Effect: corev1.TaintEffectNoSchedule}}}
	}
	if _, err := r.patch(w.t.Context(), body); err != nil {
		w.t.Fatal(err)
	}
}

// cutAtRandom makes instances at random places, and leaves some free.
func (w *adviceWalk) cutAtRandom(r *rig, gpu nvml.GPU) {
	w.t.Helper()
	driver := r.GPUs.Driver()
	most := 1 + w.random.IntN(6)
	for made, tries := 0, 0; made < most && tries < 40; tries++ {
		p := gpu.Profiles[w.random.IntN(len(gpu.Profiles))]
		if p.Slices > 4 && w.random.IntN(4) > 0 || len(p.Placements) == 0 {
			continue
		}
		at := p.Placements[w.random.IntN(len(p.Placements))]
		if driver.Create(w.t.Context(), gpu.UUID, nvml.Placed{Profile: p.Name, Span: at}) == nil { // else its place is taken
			made++
		}
	}
}

// resourceFor is the device plugin's name for a profile; for none, that of a whole GPU.
func resourceFor(profile string) string {
	if profile == "" {
		return nvml.ResourceGPU
	}
	return nvml.ResourceMIGPrefix + profile
}

// offers are the resources of the node's GPUs as they are cut.
func (w *adviceWalk) offers(r *rig) map[string]int {
	out := map[string]int{}
	for _, gpu := range r.snapshot() {
		if !gpu.Enabled {
			out[nvml.ResourceGPU]++
		}
		for _, i := range gpu.Instances {
			out[resourceFor(i.Profile)]++
		}
	}
	return out
}

// occupy runs pods on two thirds of what the node offers: bare ones, some that a controller has, some with a budget, and one of a DaemonSet.
func (w *adviceWalk) occupy(r *rig, daemon bool) {
	w.t.Helper()
	all := w.offers(r)
	var names []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		for range all[name] {
			if w.random.IntN(3) == 0 {
				continue
			}
			pod := fmt.Sprintf("%s-%d", r.Name, len(names))
			names = append(names, pod)
			if daemon {
				daemon = false
				w.daemonSet(r, pod, name)
				continue
			}
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: pod, Labels: map[string]string{"app": pod}}, Spec: r.podSpec(map[string]string{name: "1"})}
			p.Spec.Tolerations = tolerated()
			w.occupyByClaim(r, &p.ObjectMeta, &p.Spec, name)
			if w.random.IntN(2) == 0 {
				p.OwnerReferences = []metav1.OwnerReference{*metav1.NewControllerRef(w.owner, corev1.SchemeGroupVersion.WithKind("ConfigMap"))}
			}
			w.create(p)
			if w.random.IntN(6) == 0 {
				r.budget(w.namespace, pod, 1)
			}
		}
	}
	clustertest.Eventually(w.t, "the pods of node "+r.Name+" run", func(context.Context) (bool, error) {
		n := 0
		for _, p := range r.pods() { //nolint:contextcheck // it has the test's
			if p.Namespace == w.namespace && running(&p) {
				n++
			}
		}
		return n == len(names), nil
	})
}

// occupyByClaim has a pod ask by a claim on a node of NVIDIA's DRA driver, where no DeviceClass stands for the resource, and half of the times where one does.
func (w *adviceWalk) occupyByClaim(r *rig, p *metav1.ObjectMeta, spec *corev1.PodSpec, resourceName string) {
	if w.byClaims(r) && (!w.extended[resourceName] || w.random.IntN(2) == 0) {
		claim(p, spec, resourceName, strings.TrimPrefix(resourceName, "nvidia.com/"))
	}
}

func tolerated() []corev1.Toleration {
	return []corev1.Toleration{{Key: labelDedicated, Operator: corev1.TolerationOpExists}}
}

func (w *adviceWalk) daemonSet(r *rig, name, resourceName string) {
	w.t.Helper()
	labels := map[string]string{"app": name}
	pod := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: r.podSpec(map[string]string{resourceName: "1"})}
	pod.Spec.Tolerations = tolerated()
	w.occupyByClaim(r, &pod.ObjectMeta, &pod.Spec, resourceName)
	if _, err := w.client.AppsV1().DaemonSets(w.namespace).Create(w.t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: pod,
		},
	}, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *adviceWalk) create(p *corev1.Pod) {
	w.t.Helper()
	if _, err := w.client.CoreV1().Pods(w.namespace).Create(w.t.Context(), p, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// awaitReports waits until the agents have reported which pod has what.
func (w *adviceWalk) awaitReports() {
	w.t.Helper()
	for _, r := range w.nodes {
		clustertest.Eventually(w.t, "the agent of node "+r.Name+" has reported who has what", func(context.Context) (bool, error) {
			var s api.Status
			if err := json.Unmarshal([]byte(r.node().Annotations[config.AnnotationStatus]), &s); err != nil { //nolint:contextcheck // it has the test's
				return false, err
			}
			for _, p := range r.pods() { //nolint:contextcheck // it has the test's
				at := slices.IndexFunc(s.Held, func(h api.Held) bool { return h.Pod == p.UID })
				reported := at >= 0 && len(s.Held[at].On) > 0
				if p.Namespace == w.namespace && p.DeletionTimestamp == nil && !reported {
					return false, nil
				}
			}
			return true, nil
		})
	}
}

// drawPending makes a pod that waits, or that runs at once where it fits.
func (w *adviceWalk) drawPending(i int) {
	w.t.Helper()
	models := slices.Sorted(maps.Keys(w.profiles))
	model := models[w.random.IntN(len(models))]
	profile := w.profiles[model][w.random.IntN(len(w.profiles[model]))]
	count, cpu := "1", ""
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pending-%03d", i), Labels: map[string]string{"asks": "yes"}}}
	p.Spec.TerminationGracePeriodSeconds = new(int64(2))
	if w.random.IntN(6) == 0 {
		p.Spec.Tolerations = tolerated()
	}
	switch kind := w.random.IntN(100); {
	case kind < 55:
	case kind < 60:
		count = "2"
	case kind < 70:
		profile = ""
	case kind < 73:
		profile, count = "", "2"
	case kind < 80:
		p.Spec.NodeSelector = map[string]string{"test.gpuslice.io/model": model}
	case kind < 84:
		profile = oneOf(w.random, notThere, "1g.7gb", "4g.96gb")
	case kind < 87:
		profile, count = "", "9"
	case kind < 91:
		cpu = "1000"
	case kind < 95:
		p.Spec.NodeSelector = map[string]string{"test.gpuslice.io/model": "none"}
	default:
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/quota"}}
	}
	w.createPending(p, profile, count, cpu, slices.Contains(w.profiles[model], profile) || profile == "" || profile == notThere)
}

// createPending makes the pod. It may ask by a claim if there are templates for that.
func (w *adviceWalk) createPending(p *corev1.Pod, profile, count, cpu string, templates bool) {
	w.t.Helper()
	limits := corev1.ResourceList{corev1.ResourceName(resourceFor(profile)): resource.MustParse(count)}
	if cpu != "" {
		limits[corev1.ResourceCPU] = resource.MustParse(cpu)
	}
	p.Spec.Containers = []corev1.Container{{Name: "c", Image: "team/app:1", Resources: corev1.ResourceRequirements{Limits: limits}}}
	by := ""
	if w.claims && templates && count == "1" && cpu == "" {
		by = w.asksByClaim(p, profile)
	}
	w.create(p)
	w.like[p.Name] = fmt.Sprint(by, resourceFor(profile), count, cpu, p.Spec.NodeSelector, p.Spec.Tolerations, p.Spec.SchedulingGates)
}

// asksByClaim has half of the pods ask by a claim in place of a resource, and some of these by one for any part of a GPU. It says how.
func (w *adviceWalk) asksByClaim(p *corev1.Pod, profile string) string {
	switch kind := w.random.IntN(16); {
	case kind < 8:
		return ""
	case kind < 9:
		claim(&p.ObjectMeta, &p.Spec, "", "any-part")
		return "by claim, for any part in place of "
	default:
		claim(&p.ObjectMeta, &p.Spec, resourceFor(profile), templateFor(profile))
		return "by claim, "
	}
}

// ask runs the command.
func (w *adviceWalk) ask() (out advisedAll) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, w.command, "advise", "-o", "json")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+w.kubeconfig)
	began := time.Now()
	text, err := cmd.Output()
	w.took += time.Since(began)
	w.asked++
	exit, is := errors.AsType[*exec.ExitError](err)
	if err != nil && (!is || !slices.Contains([]int{4, 5}, exit.ExitCode())) {
		if is {
			w.t.Logf("%s", exit.Stderr)
		}
		w.t.Fatalf("advise: %v", err)
	}
	if err := json.Unmarshal(text, &out); err != nil {
		w.t.Fatalf("%v:\n%s", err, text)
	}
	for i := range out.Moves {
		m := &out.Moves[i]
		w.verdicts[m.Verdict]++
		if m.never() {
			w.never[m.Pod] = m.Verdict + ": " + m.Reason
		}
		if m.Verdict == "NotKnown" {
			w.t.Logf("not known: %s: %s", m.Pod, m.Reason)
		}
	}
	return out
}

// now are the pods of the test, by namespace and name.
func (w *adviceWalk) now() map[string]*corev1.Pod {
	out := map[string]*corev1.Pod{}
	for _, p := range w.nodes[0].podsOf(w.namespace) {
		out[p.Namespace+"/"+p.Name] = p
	}
	return out
}

// placedOn reports whether the pod has a node and stays.
func placedOn(p *corev1.Pod) bool {
	return p != nil && p.Spec.NodeName != "" && p.DeletionTimestamp == nil
}

// holds counts the pods that were said to run when the pods were as before, and notes those of them that do not: another pod may run in the place of one that
// was said to have rivals.
func (w *adviceWalk) holds(of advisedAll, before map[string]*corev1.Pod, said map[string]string) {
	w.t.Helper()
	var left []string // waits for pods to be scheduled, but not for ever: others may have taken what they were to get
	after := w.now()
	_ = wait.PollUntilContextTimeout(w.t.Context(), 500*time.Millisecond, settles, true, func(context.Context) (bool, error) {
		after = w.now() //nolint:contextcheck // it has the test's
		left = slices.DeleteFunc(slices.Sorted(maps.Keys(said)), func(name string) bool { return placedOn(after[name]) })
		return len(left) == 0, nil
	})
	rivals := map[string][]string{}
	for _, m := range of.Moves {
		rivals[m.Pod] = m.Rivals
	}
	w.advised += len(said)
	for name := range said {
		if len(rivals[name]) == 0 {
			w.certain++
		}
	}
	w.haveDevices(before, after, said)
	for _, name := range left {
		like := w.like[strings.TrimPrefix(name, w.namespace+"/")]
		instead := func(rival string) bool {
			return placedOn(after[rival]) && !placedOn(before[rival]) && !w.displaces[rival]
		}
		if at := slices.IndexFunc(rivals[name], instead); at >= 0 && after[name] != nil {
			by := rivals[name][at]
			w.displaces[by] = true
			w.displaced = append(w.displaced, fmt.Sprintf("%s (%s) waits: %s (%s), which may run in its place, runs on %s", name, like, by, w.like[after[by].Name], after[by].Spec.NodeName))
			continue
		}
		why := "it is gone"
		if p := after[name]; p != nil && len(p.Status.Conditions) > 0 {
			why = p.Status.Conditions[0].Message
		}
		w.missed = append(w.missed, fmt.Sprintf("%s (%s) was said to run on %s: %s\n%s%s", name, like, said[name], why, w.elsewhere(before, after, said), w.sayings(of, said[name], name)))
	}
}

// haveDevices notes nodes that lack devices for pods which were said to run there: they are neither free, nor with pods that waited.
func (w *adviceWalk) haveDevices(before, after map[string]*corev1.Pod, said map[string]string) {
	w.t.Helper()
	lacks := map[string]int{} // by node and resource
	count := func(nodeName string, p *corev1.Pod, times int) {
		for name, n := range requested(p) {
			lacks[nodeName+" "+name] += times * n
		}
	}
	for name, nodeName := range said {
		if after[name] != nil {
			count(nodeName, after[name], 1)
		}
	}
	for name, p := range after {
		switch waited := p.Labels["asks"] == "yes" || said[name] != ""; {
		case !placedOn(p) || waited && !placedOn(before[name]): // its device counts for those that were said
		default:
			count(p.Spec.NodeName, p, 1)
		}
	}
	for _, r := range w.nodes {
		for name, n := range w.offers(r) {
			lacks[r.Name+" "+name] -= n
		}
	}
	for where, n := range lacks {
		if nodeName, name, _ := strings.Cut(where, " "); n > 0 && strings.HasPrefix(name, "nvidia.com/") {
			w.missed = append(w.missed, fmt.Sprintf("node %s has %d too few %s for what was said to run there", nodeName, n, name))
		}
	}
}

// elsewhere are the pods that run where they were not said to.
func (w *adviceWalk) elsewhere(before, after map[string]*corev1.Pod, said map[string]string) (out string) {
	for name, p := range after {
		if placedOn(p) && !placedOn(before[name]) && said[name] != p.Spec.NodeName {
			out += fmt.Sprintf("%s (%s) runs on %s, and was said to on %q\n", name, w.like[p.Name], p.Spec.NodeName, said[name])
		}
	}
	return out
}

// sayings is what was said of the pod and of its node, and how the node is now.
func (w *adviceWalk) sayings(of advisedAll, nodeName, pod string) string {
	var all []string
	for _, m := range of.Moves {
		if m.Pod == pod || m.Node == nodeName {
			text, err := json.Marshal(m)
			if err != nil {
				w.t.Error(err)
			}
			all = append(all, string(text))
		}
	}
	for _, r := range w.nodes {
		if r.Name == nodeName {
			all = append(all, words(r.node()), r.GPUs.String())
		}
	}
	return strings.Join(all, "\n")
}

// round has more pods wait. It asks while the scheduler stands still, so that some have room, and again once it has done what it can.
func (w *adviceWalk) round(first, pods int) {
	w.t.Helper()
	w.signal(syscall.SIGSTOP)
	for i := range pods {
		w.drawPending(first + i)
	}
	before, fit := w.now(), map[string]string{}
	all := w.ask()
	for _, m := range all.Moves {
		if m.Verdict == "WillFit" {
			fit[m.Pod] = m.Node
		}
	}
	w.signal(syscall.SIGCONT)
	w.holds(all, before, fit)
	w.t.Logf("%d pods more: %d have room", pods, len(fit))
	for range 8 {
		if !w.carryOut() {
			return
		}
	}
	w.t.Error("after eight times there are still proposals")
}

// settle waits until the scheduler has looked at each pod, and the agents have reported what each has.
func (w *adviceWalk) settle() {
	w.t.Helper()
	clustertest.Eventually(w.t, "the scheduler has looked at each pod", func(context.Context) (bool, error) {
		for _, p := range w.now() { //nolint:contextcheck // it has the test's
			if p.Spec.NodeName == "" && p.DeletionTimestamp == nil && len(p.Status.Conditions) == 0 || p.Spec.NodeName != "" && !running(p) {
				return false, nil
			}
		}
		return true, nil
	})
	w.awaitReports()
}

// carryOut does once what advise proposes, and judges by what it says; false if it proposes nothing.
func (w *adviceWalk) carryOut() bool {
	w.t.Helper()
	w.settle()
	before := w.now()
	all := w.ask()
	said, leave, kept := w.proposed(all)
	w.t.Logf("%d pods wait, %d changes of nodes are said to let %d run; %d pods have to leave; budgets keep %d changes",
		len(all.Moves), len(all.Proposals), len(said), len(leave), len(kept))
	began := time.Now()
	byName := map[string]*rig{}
	for _, r := range w.nodes {
		byName[r.Name] = r
	}
	for _, p := range all.Proposals {
		byName[p.Node].label(config.LabelMIGConfig, p.Config)
	}
	for _, p := range all.Proposals {
		if !kept[p.Node] {
			byName[p.Node].awaitConverged(p.Config)
		}
	}
	for _, p := range all.Proposals {
		if kept[p.Node] {
			if converged(p.Config)(byName[p.Node].node()) {
				w.missed = append(w.missed, fmt.Sprintf("node %s is cut as %s although a budget was said to keep its pods", p.Node, p.Config))
			}
		}
	}
	w.relax(leave)
	for _, p := range all.Proposals {
		byName[p.Node].awaitConverged(p.Config)
	}
	w.t.Logf("carried out in %s", time.Since(began).Round(100*time.Millisecond))
	w.holds(all, before, said)
	w.stays(all, before, leave)
	return len(all.Proposals) > 0
}

// relax lets go of the pods that are to leave.
func (w *adviceWalk) relax(leave map[string]bool) {
	w.t.Helper()
	budgets, err := w.client.PolicyV1().PodDisruptionBudgets(w.namespace).List(w.t.Context(), metav1.ListOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, b := range budgets.Items {
		if leave[b.Namespace+"/"+b.Name] { // each has the name of its pod
			w.nodes[0].relax(b.Namespace, b.Name)
		}
	}
}

// proposed are the pods that the proposals are said to let run, by the node that each gets, the pods that are said to leave, and nodes whose change a budget
// keeps.
func (w *adviceWalk) proposed(all advisedAll) (said map[string]string, leave, kept map[string]bool) {
	said, leave, kept = map[string]string{}, map[string]bool{}, map[string]bool{}
	last := map[string]int{} // the move up to which the node's label spells the changes
	for i, m := range all.Moves {
		if m.Command != "" {
			last[m.Node] = i
		}
	}
	for i, m := range all.Moves {
		at, changes := last[m.Node]
		switch {
		case m.Verdict == "WillFit":
			said[m.Pod] = m.Node
		case m.Node == "" || !changes:
		case i > at && len(m.Cuts) > 0:
			last[m.Node] = -1 // what comes after counts on what no label spells
		case i <= at || at >= 0:
			said[m.Pod] = m.Node
			for _, p := range m.Leave {
				leave[p] = true
			}
			kept[m.Node] = kept[m.Node] || len(m.Budgets) > 0
		}
	}
	maps.DeleteFunc(kept, func(_ string, is bool) bool { return !is })
	return said, leave, kept
}

// stays notes pods that have left although they were not said to, and those that were said to and have not.
func (w *adviceWalk) stays(of advisedAll, before map[string]*corev1.Pod, leave map[string]bool) {
	w.t.Helper()
	after := w.now()
	for name, p := range before {
		if !placedOn(p) {
			continue
		}
		now := after[name]
		switch gone := now == nil || now.UID != p.UID || now.DeletionTimestamp != nil; {
		case gone && leave[name]:
			w.left++
		case gone:
			w.missed = append(w.missed, fmt.Sprintf("%s has left, and was not said to:\n%s", name, w.sayings(of, p.Spec.NodeName, name)))
		case leave[name]:
			w.stayed = append(w.stayed, name)
		}
	}
}

// writesNothing fails the test if the user has changed something, and returns how often it has read what.
func (w *adviceWalk) writesNothing() map[string]int {
	w.t.Helper()
	all, err := w.cluster.Requests(func(e cluster.AuditEvent) bool { return e.User == w.user })
	if err != nil {
		w.t.Fatal(err)
	}
	reads := map[string]int{}
	for _, e := range all {
		if e.Verb != "get" && e.Verb != "list" {
			w.t.Errorf("advise has sent %s", e)
		}
		reads[e.Verb+" "+e.Resource]++
	}
	return reads
}

// What advise says comes: on real nodes, as far as GPUs can be simulated, with the real scheduler, what is said to have room runs, what is said to run after
// a change runs once that is carried out, no other pod leaves for it than those that are named, and what is said to run after no change does not.
func TestAdviceThatIsCarriedOutLetsPodsRun(t *testing.T) {
	t.Parallel()
	carryOutAdvice(t, false)
}

// The same where every third node has NVIDIA's DRA driver: pods ask by claims, and by resources that a node has from its device plugin or from a DeviceClass.
func TestAdviceThatIsCarriedOutLetsPodsWithClaimsRun(t *testing.T) {
	t.Parallel()
	carryOutAdvice(t, true)
}

func carryOutAdvice(t *testing.T, claims bool) {
	t.Helper()
	if testing.Short() {
		t.Skip("some minutes")
	}
	seed := *seed
	if seed == 0 {
		seed = rand.Uint64N(1 << 32)
	}
	t.Logf("to draw the same: -seed %d -advice %d", seed, *advicePods)
	began := time.Now()
	w := newAdviceWalk(t, rand.New(rand.NewPCG(seed, 0)), *advicePods, claims)
	t.Logf("%d nodes with %d GPUs each and %d pods after %s", len(w.nodes), w.gpus, len(w.now()), time.Since(began).Round(time.Second))
	half := *advicePods / 2
	w.round(0, half)
	w.round(half, *advicePods-half)

	after := w.now()
	for name, why := range w.never {
		if placedOn(after[name]) {
			w.missed = append(w.missed, fmt.Sprintf("%s runs on %s, and was said not to: %s", name, after[name].Spec.NodeName, why))
		}
	}
	reads := w.writesNothing()
	t.Logf("%d pods were drawn; asked %d times, in %s on average; requests: %v; answers: %v", *advicePods, w.asked,
		(w.took / time.Duration(w.asked)).Round(time.Millisecond), reads, w.verdicts)
	t.Logf("%d pods were said to run, %d of them for certain; %d wait because a pod runs in their place that was said to be able to; %d were said to run after no change; %d left as said, %d stayed: %v",
		w.advised, w.certain, len(w.displaced), len(w.never), w.left, len(w.stayed), w.stayed)
	for _, m := range slices.Concat(w.displaced, w.missed) {
		t.Log(m)
	}
	if w.certain == 0 || len(w.never) == 0 {
		t.Error("nothing was advised")
	}
	if len(w.missed)*100 > w.certain {
		t.Errorf("%d of %d did not come", len(w.missed), w.certain)
	}
	lists := w.asked * 4 // with budgets and DeviceClasses
	if claims {
		lists = w.asked * 7 // with slices, claims and taint rules
	}
	if reads["list nodes"] != w.asked || total(reads) > lists+w.asked {
		t.Errorf("%d times asked took these requests: %v", w.asked, reads)
	}
}

func total(of map[string]int) (n int) {
	for _, m := range of {
		n += m
	}
	return n
}
