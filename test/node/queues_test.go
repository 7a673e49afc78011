package node_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/model"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/monitoring"
)

// barePools are beside those of deploy/examples/configmap-pools.yaml. Their nodes get neither labels nor taints by which pods could be kept apart.
const barePools = `  whole:
    mig: [{gpus: {model: "NVIDIA A100*"}, enabled: false}]
    sharing: none
  evaluation:
    mig: [{gpus: {model: "NVIDIA A100*"}, enabled: false}]
    sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}
`

// queuedPools are the pools of the day, with what a node of each offers as nvidia.com/gpu: shares, MIG devices, whole GPUs.
var queuedPools = map[string]struct{ gpus, offers int }{
	"research": {1, 3}, "evaluation": {1, 3}, "training": {1, 3}, "critical-agents": {1, 3}, "production-inference": {1, 2}, "whole": {2, 2},
}

// shared are the pools that Kueue may take one for the other.
var shared = []string{"evaluation", "research", "training"}

// isolated are the classes of the others.
var isolated = map[string]string{"critical-agents": "mig", "production-inference": "mig", "whole": "whole"}

// queueDay is a cluster with a node of each pool, Kueue, and the queues that render writes of them.
type queueDay struct {
	t         *testing.T
	cluster   *cluster.Cluster
	client    kubernetes.Interface
	objects   dynamic.Interface
	plugin    string // kubectl-gpuslice
	catalog   string // file with the profiles
	namespace string
	nodes     map[string]*rig // by the pool that they begin in
	kueue     kueueManager
	scrapes   scrapes           // of its metrics, one for each line about what became of a workload
	queues    map[string]string // by Job
	rows      []string
	classes   map[string]*classDay

	mu    sync.Mutex
	pools map[string]string // that a node's GPUs are cut and shared for, by node
	bound map[string]string // pool of the node of each pod that the scheduler has ever bound, as JOB/POD
}

// classDay counts what became of the workloads of one class of isolation, each time that it did.
type classDay struct{ submitted, own, fellBack, waited, preempted, pods, outside int }

// A day of workloads in a cluster with pools of each class, all of which offer nvidia.com/gpu. Kueue, the scheduler, NVIDIA's device plugin and the agent are
// real; the hours pass as soon as what they bring has come.
func TestQueuesKeepWorkloadsInTheirClass(t *testing.T) {
	if testing.Short() {
		t.Skip("some minutes, and Kueue takes minutes to compile")
	}
	t.Parallel()
	d := newQueueDay(t)

	d.submit(0, "research-1", "research", "research", 3)
	d.runs("research-1", "research")
	d.submit(1, "research-2", "research", "research", 2)
	d.runs("research-2", "evaluation") // its own pool is full
	d.submit(2, "research-3", "research", "research", 3)
	d.runs("research-3", "training") // and the next has one share left
	d.submit(4, "research-4", "research", "research", 2)
	d.waits("research-4", shared...) // and not in the three pools that are idle
	d.submit(6, "agents-1", "critical-agents", "critical-agents", 3)
	d.runs("agents-1", "critical-agents")
	d.submit(7, "agents-2", "critical-agents", "critical-agents", 1)
	d.waits("agents-2", "critical-agents") // while a share, MIG devices of another pool and whole GPUs are free
	d.submit(8, "inference-1", "production-inference", "research", 2)
	d.runs("inference-1", "production-inference")
	d.submit(9, "whole-1", "whole", "research", 2)
	d.runs("whole-1", "whole")
	d.submit(10, "whole-2", "whole", "research", 1)
	d.waits("whole-2", "whole")

	d.submit(12, "evaluation-1", "evaluation", "evaluation", 3)
	d.runs("evaluation-1", "evaluation")
	d.preempted("research-2", "InCohortReclamation")
	d.submit(13, "research-5", "research", "evaluation", 3)
	d.runs("research-5", "research")
	d.preempted("research-1", "InClusterQueue")
	d.submit(14, "evaluation-2", "evaluation", "evaluation", 3)
	d.runs("evaluation-2", "training") // its own pool and that of research have workloads of the same priority
	d.preempted("research-3", "InCohortReclaimWhileBorrowing")
	d.submit(15, "training-1", "training", "research", 3)
	d.runs("training-1", "training")
	d.preempted("evaluation-2", "InCohortReclamation") // of a higher priority, but in a pool that is not its own
	d.submit(16, "inference-2", "production-inference", "production-inference", 1)
	d.runs("inference-2", "production-inference")
	d.preempted("inference-1", "InClusterQueue")

	for _, job := range []string{"research-4", "evaluation-2"} { // which may come before those that were preempted
		d.end(17, job)
	}
	d.end(17, "agents-1")
	d.runs("agents-2", "critical-agents")
	d.end(18, "whole-1")
	d.runs("whole-2", "whole")
	for _, job := range []string{"research-5", "evaluation-1", "training-1"} {
		d.end(19, job)
	}
	d.runs("research-1", shared...)
	d.runs("research-2", shared...)
	d.runs("research-3", shared...)
	d.end(20, "inference-2")
	d.runs("inference-1", "production-inference")

	for _, job := range []string{"research-1", "research-2", "research-3"} {
		d.end(21, job)
	}
	d.relabelled(22)
	d.neverMixed()
	d.mixedByHand(24)
	d.onPanels()
}

func newQueueDay(t *testing.T) *queueDay {
	t.Helper()
	c := clustertest.Apart(t, "kueue") // Kueue's webhooks are asked about Jobs of all namespaces
	build(t)
	if err := deploy(c); err != nil {
		t.Fatal(err)
	}
	objects, err := dynamic.NewForConfig(c.Config())
	if err != nil {
		t.Fatal(err)
	}
	d := &queueDay{
		t: t, cluster: c, client: clustertest.ClientOf(t, c), objects: objects, namespace: clustertest.NamespaceOf(t, c), catalog: filepath.Join(t.TempDir(), "profiles.yaml"),
		nodes: map[string]*rig{}, pools: map[string]string{}, queues: map[string]string{}, bound: map[string]string{},
		classes: map[string]*classDay{"shared": {}, "mig": {}, "whole": {}},
	}
	if d.plugin, err = (binaries.Builder{Log: os.Stderr}).Tool(t.Context(), "./cmd/kubectl-gpuslice"); err != nil {
		t.Fatal(err)
	}
	text := exampleProfiles(t) + barePools
	if err := os.WriteFile(d.catalog, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, pool := range slices.Sorted(maps.Keys(queuedPools)) {
		r := rigIn(t, c, fmt.Sprintf("gpus: [{model: A100-80GB, count: %d}]", queuedPools[pool].gpus), "profiles: {name: pools}\n", configFile)
		if len(d.nodes) == 0 {
			r.configMapOf("pools", map[string]string{"profiles.yaml": text})
		}
		d.nodes[pool], d.pools[r.Name] = r, pool
		r.label(config.LabelProfile, pool)
		r.run()
	}
	d.kueue = startKueue(t, c)
	for pool, r := range d.nodes {
		r.awaitConverged(pool)
		r.awaitOffered("nvidia.com/gpu", queuedPools[pool].offers)
	}
	d.apply("--priority", "critical-agents=1000", "--priority", "production-inference=1000", "--priority", "evaluation=500", "--priority", "research=100")
	if said, code := d.validate(); code != 0 || strings.Contains(said, "mixed") {
		t.Errorf("validate says of what render writes, with code %d:\n%s", code, said)
	}
	go d.watch()
	t.Cleanup(func() { // of a day that ended early, too
		var classes []string
		for _, class := range slices.Sorted(maps.Keys(d.classes)) {
			of := d.classes[class]
			classes = append(classes, fmt.Sprintf("%-6s %9d %8d %9d %6d %9d %10d %20d", class, of.submitted, of.own, of.fellBack, of.waited, of.preempted, of.pods, of.outside))
		}
		t.Logf("one day:\nhour  workload        queue                 priority              pods  what became of it\n%s\n\n"+
			"class  submitted own pool fell back waited preempted pods bound outside of its class\n%s", strings.Join(d.rows, "\n"), strings.Join(classes, "\n"))
	})
	return d
}

// class is that of a Job's queue, and of no queue that mixes them.
func (d *queueDay) class(job string) *classDay {
	switch class := isolated[d.queues[job]]; {
	case class != "":
		return d.classes[class]
	case slices.Contains(shared, d.queues[job]):
		return d.classes["shared"]
	}
	return &classDay{}
}

// allowed are the pools that a Job of a queue may run in.
func allowed(queue string) []string {
	if slices.Contains(shared, queue) {
		return shared
	}
	return []string{queue}
}

// exampleProfiles are those of deploy/examples/configmap-pools.yaml.
func exampleProfiles(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "deploy", "examples", "configmap-pools.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var m corev1.ConfigMap
	if err := yaml.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	return m.Data["profiles.yaml"]
}

// apply has Kueue take what render writes of the nodes as they are.
func (d *queueDay) apply(more ...string) {
	d.t.Helper()
	args := []string{"render", "kueue", "-f", d.catalog, "--nodes", config.LabelProfile, "--cohort", "all", "--kubeconfig", d.cluster.AdminKubeconfig()}
	for _, pool := range slices.Sorted(maps.Keys(queuedPools)) {
		if d.nodes[pool].node().Labels[config.LabelProfile] == pool {
			args = append(args, "--local-queue", d.namespace+"/"+pool+"="+pool)
		}
	}
	ctx, cancel := context.WithTimeout(d.t.Context(), patience)
	defer cancel()
	render := exec.CommandContext(ctx, d.plugin, append(args, more...)...)
	render.Stderr = os.Stderr
	text, err := render.Output()
	if err != nil {
		d.t.Fatalf("rendering queues: %v", err)
	}
	d.applyText(string(text))
	if _, err := d.cluster.RunKubectl(ctx, "wait", "--for=condition=Active", "--timeout=2m", "clusterqueues.v1beta2.kueue.x-k8s.io", "--all"); err != nil {
		d.t.Fatal(err)
	}
}

func (d *queueDay) applyText(text string) {
	d.t.Helper()
	file := filepath.Join(d.t.TempDir(), "queues.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		d.t.Fatal(err)
	}
	if err := d.cluster.Apply(d.t.Context(), file); err != nil {
		d.t.Fatal(err)
	}
}

func (d *queueDay) validate() (said string, code int) {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, d.plugin, "validate", "--against-cluster", "--kubeconfig", d.cluster.AdminKubeconfig())
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		d.t.Fatalf("running kubectl-gpuslice: %v", err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// watch notes where the scheduler binds pods, until the test has ended.
func (d *queueDay) watch() {
	open := func(ctx context.Context) (watch.Interface, error) {
		return d.client.CoreV1().Pods(d.namespace).Watch(ctx, metav1.ListOptions{})
	}
	_ = clustertest.Follow(d.t.Context(), open, nil, func(_ watch.EventType, p *corev1.Pod) bool { // it ends with the test
		if p.Spec.NodeName != "" {
			d.mu.Lock()
			d.bound[p.Labels[batchv1.JobNameLabel]+"/"+p.Name] = d.pools[p.Spec.NodeName]
			d.mu.Unlock()
		}
		return false
	})
}

// submit makes a Job with pods that request one nvidia.com/gpu each, and some cpu and memory.
func (d *queueDay) submit(hour int, name, queue, priority string, pods int32) {
	d.t.Helper()
	d.queues[name] = queue
	d.class(name).submitted++
	spec := (&rig{Node: d.nodes["whole"].Node, t: d.t}).podSpec(map[string]string{"nvidia.com/gpu": "1"})
	spec.NodeSelector, spec.RestartPolicy = nil, corev1.RestartPolicyNever
	spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("8Gi")}
	labels := map[string]string{"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/priority-class": priority}
	_, err := d.client.BatchV1().Jobs(d.namespace).Create(d.t.Context(), &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec:       batchv1.JobSpec{Parallelism: &pods, Completions: &pods, Template: corev1.PodTemplateSpec{Spec: spec}},
	}, metav1.CreateOptions{})
	if err != nil {
		d.t.Fatalf("submitting %s: %v", name, err)
	}
	d.rows = append(d.rows, fmt.Sprintf("%02d:00 %-15s %-21s %-21s %4d  submitted", hour, name, queue, priority, pods))
}

func (d *queueDay) end(hour int, name string) {
	d.t.Helper()
	background := metav1.DeletePropagationBackground
	if err := d.client.BatchV1().Jobs(d.namespace).Delete(d.t.Context(), name, metav1.DeleteOptions{PropagationPolicy: &background}); err != nil {
		d.t.Fatalf("ending %s: %v", name, err)
	}
	d.rows = append(d.rows, fmt.Sprintf("%02d:00 %-15s %49s  ended", hour, name, ""))
}

func (d *queueDay) became(name, format string, args ...any) {
	d.t.Helper()
	text, err := d.kueue.metrics.Get().AbsPath("/metrics").DoRaw(d.t.Context())
	if err != nil {
		d.t.Fatalf("scraping Kueue's metrics: %v", err)
	}
	d.scrapes.add(string(text))
	d.rows = append(d.rows, fmt.Sprintf("      %-15s %49s  %s", name, "", fmt.Sprintf(format, args...)))
}

// await waits until something has become of the Job. If it does not, the test fails with what is known of the Job.
func (d *queueDay) await(name, what string, done func(context.Context) (bool, error)) {
	d.t.Helper()
	var last error
	err := wait.PollUntilContextTimeout(d.t.Context(), 100*time.Millisecond, patience, true, func(ctx context.Context) (ok bool, err error) {
		select {
		case <-d.kueue.ended:
			return false, errors.New("the manager of Kueue has ended")
		default:
			ok, last = done(ctx)
			return ok && last == nil, nil
		}
	})
	if err != nil {
		d.t.Fatalf("waiting until %s %s: %v\n%s", name, what, errors.Join(err, last), d.seen(name))
	}
}

// seen is what the API server has of a Job: its conditions, those of its workload, and its pods.
func (d *queueDay) seen(name string) string {
	var out []string
	note := func(what string, conditions any) {
		text, err := json.Marshal(conditions)
		out = append(out, fmt.Sprintf("%s: %s", what, text))
		if err != nil {
			out = append(out, err.Error())
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.t.Context()), patience)
	defer cancel()
	if job, err := d.client.BatchV1().Jobs(d.namespace).Get(ctx, name, metav1.GetOptions{}); err == nil {
		note("Job", job.Status)
	} else {
		out = append(out, err.Error())
	}
	if w, err := d.workload(ctx, name); err == nil {
		note("workload", w.Status.Conditions)
	} else {
		out = append(out, err.Error())
	}
	list, err := d.podsOf(ctx, name)
	if err != nil {
		return strings.Join(append(out, err.Error()), "\n")
	}
	for i := range list {
		p := &list[i]
		note(fmt.Sprintf("pod %s in pool %q, %s %s %s", p.Name, d.pools[p.Spec.NodeName], p.Status.Phase, p.Status.Reason, p.Status.Message), p.Status.Conditions)
	}
	return strings.Join(out, "\n")
}

func (d *queueDay) podsOf(ctx context.Context, job string) ([]corev1.Pod, error) {
	list, err := d.client.CoreV1().Pods(d.namespace).List(ctx, metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + job})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// runs waits until all pods of the Job run, on nodes of these pools.
func (d *queueDay) runs(name string, pools ...string) {
	d.t.Helper()
	var on []string
	d.await(name, "runs", func(ctx context.Context) (bool, error) {
		job, err := d.client.BatchV1().Jobs(d.namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		list, err := d.podsOf(ctx, name)
		if err != nil {
			return false, err
		}
		on = nil
		for i := range list {
			if running(&list[i]) {
				on = append(on, d.pools[list[i].Spec.NodeName])
			}
		}
		return len(on) == int(*job.Spec.Parallelism), nil
	})
	slices.Sort(on)
	on = slices.Compact(on)
	for _, pool := range on {
		if !slices.Contains(pools, pool) {
			d.t.Errorf("%s runs in pool %s, want %v", name, pool, pools)
		}
		if pool == d.queues[name] {
			d.class(name).own++
		} else {
			d.class(name).fellBack++
		}
	}
	d.became(name, "runs in %s", strings.Join(on, ", "))
}

// queuedWorkload is what the test reads of one.
type queuedWorkload struct {
	Status struct {
		Conditions []metav1.Condition `json:"conditions"`
	} `json:"status"`
}

func (d *queueDay) workload(ctx context.Context, name string) (w queuedWorkload, err error) {
	job, err := d.client.BatchV1().Jobs(d.namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return w, err
	}
	list, err := d.objects.Resource(schema.GroupVersionResource{Group: "kueue.x-k8s.io", Version: "v1beta2", Resource: "workloads"}).Namespace(d.namespace).
		List(ctx, metav1.ListOptions{LabelSelector: "kueue.x-k8s.io/job-uid=" + string(job.UID)})
	if err != nil || len(list.Items) != 1 {
		return w, err
	}
	text, err := list.Items[0].MarshalJSON()
	if err != nil {
		return w, err
	}
	return w, json.Unmarshal(text, &w)
}

// waits waits until Kueue has found no room for the Job, in the flavors of these pools and in no other's.
func (d *queueDay) waits(name string, pools ...string) {
	d.t.Helper()
	d.refused(name, "waits for the flavors of "+strings.Join(pools, ", "), func(said string) bool {
		for pool := range queuedPools {
			if strings.Contains(said, "in flavor "+pool) != slices.Contains(pools, pool) {
				return false
			}
		}
		return true
	})
	d.class(name).waited++
}

// refused waits until Kueue gives the Job no quota, and says so.
func (d *queueDay) refused(name, what string, says func(string) bool) {
	d.t.Helper()
	var said string
	d.await(name, what, func(ctx context.Context) (bool, error) {
		w, err := d.workload(ctx, name)
		c := meta.FindStatusCondition(w.Status.Conditions, "QuotaReserved")
		if err != nil || c == nil || c.Status != metav1.ConditionFalse {
			return false, err
		}
		said = c.Message
		return says(said), nil
	})
	d.became(name, "waits: %s", said)
}

// preempted waits until the Job has made room for another, for this reason, and has no quota. Kueue may not say then which flavors it has tried.
func (d *queueDay) preempted(name, reason string) {
	d.t.Helper()
	var said string
	d.await(name, "is preempted", func(ctx context.Context) (bool, error) {
		w, err := d.workload(ctx, name)
		c := meta.FindStatusCondition(w.Status.Conditions, "Preempted")
		if err != nil || c == nil || c.Status != metav1.ConditionTrue {
			return false, err
		}
		said = c.Reason
		return meta.IsStatusConditionFalse(w.Status.Conditions, "QuotaReserved"), nil
	})
	if said != reason {
		d.t.Errorf("%s is preempted for the reason %s, want %s", name, said, reason)
	}
	d.class(name).preempted++
	d.became(name, "preempted: %s", said)
}

// relabelled has a node that is to be of another class, and may not change yet: its label is that of whole GPUs, and its pods share one still.
func (d *queueDay) relabelled(hour int) {
	d.t.Helper()
	r := d.nodes["evaluation"]
	r.annotate(config.AnnotationHold, "until 23:00")
	r.label(config.LabelProfile, "whole")
	r.await("a change that is held up", func(n *corev1.Node) bool { return n.Labels[config.LabelMIGConfigState] == string(config.StatePending) })
	d.rows = append(d.rows, fmt.Sprintf("%02d:00 the node of evaluation is labelled whole, and held: three pods could share its GPU still", hour))
	d.apply()
	d.submit(hour, "whole-3", "whole", "research", 2)
	d.await("whole-3", "has one pod that runs, and one that has no node", func(ctx context.Context) (bool, error) {
		list, err := d.podsOf(ctx, "whole-3")
		if err != nil {
			return false, err
		}
		on, none := 0, 0
		for i := range list {
			p := &list[i]
			if p.Spec.NodeName == r.Name {
				d.t.Fatalf("pod %s is on the node that shares its GPU", p.Name)
			}
			if running(p) {
				on++
			}
			if slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable
			}) {
				none++
			}
		}
		return on == 1 && none == 1, nil
	})
	d.became("whole-3", "one pod runs in whole, and one has no node")
	d.mu.Lock()
	d.pools[r.Name] = "whole"
	d.mu.Unlock()
	r.annotate(config.AnnotationHold, nil)
	d.rows = append(d.rows, fmt.Sprintf("%02d:00 the node of evaluation may change", hour+1))
	d.runs("whole-3", "whole")
}

// neverMixed looks at all pods of the day.
func (d *queueDay) neverMixed() {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for pod, pool := range d.bound {
		job, _, _ := strings.Cut(pod, "/")
		d.class(job).pods++
		if may := allowed(d.queues[job]); !slices.Contains(may, pool) {
			d.class(job).outside++
			d.t.Errorf("pod %s was on a node of pool %s, want %v", pod, pool, may)
		}
	}
	d.rows = append(d.rows, fmt.Sprintf("      %d pods were bound, each to a node of its class", len(d.bound)))
}

// mixedByHand has the one queue that render wrote before: it admits no pod that requests cpu. As soon as it covers that, it gives a shared workload MIG
// devices, and validate finds it.
func (d *queueDay) mixedByHand(hour int) {
	d.t.Helper()
	d.end(hour, "agents-2")
	d.oneQueue("", "")
	d.submit(hour, "research-6", "gpus", "research", 3)
	d.refused("research-6", "is refused for its cpu or memory", func(said string) bool {
		return strings.Contains(said, "resource cpu unavailable in ClusterQueue") || strings.Contains(said, "resource memory unavailable in ClusterQueue")
	})
	d.oneQueue(", cpu, memory", ", {name: cpu, nominalQuota: 64}, {name: memory, nominalQuota: 512Gi}")
	d.runs("research-6", "research")
	d.submit(hour, "research-7", "gpus", "research", 1)
	d.runs("research-7", "critical-agents")
	const want = "mixed  ClusterQueue gpus: nvidia.com/gpu is MIG 2g.20gb by critical-agents; shared by research: a pod that is to have one may get the other; "
	said, code := d.validate()
	if code != 1 || !strings.Contains(said, want) {
		d.t.Errorf("validate says, with code %d:\n%s\nwant %q", code, said, want)
	}
	d.rows = append(d.rows, "      validate --against-cluster:\n"+said)
}

// oneQueue has a queue of pools of two classes, with more than the GPUs as it is given.
func (d *queueDay) oneQueue(resources, quotas string) {
	d.t.Helper()
	d.applyText(fmt.Sprintf(`apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: gpus}
spec:
  namespaceSelector: {}
  resourceGroups:
  - coveredResources: [nvidia.com/gpu%[2]s]
    flavors:
    - {name: research, resources: [{name: nvidia.com/gpu, nominalQuota: 3}%[3]s]}
    - {name: critical-agents, resources: [{name: nvidia.com/gpu, nominalQuota: 3}%[3]s]}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: gpus, namespace: %[1]s}
spec: {clusterQueue: gpus}
`, d.namespace, resources, quotas))
}

// onPanels puts the day before the panels of Kueue. Each shows something of it, and the counts of workloads have been right at 16:00, when most wait. Each
// metric of Kueue that the dashboards ask for has all the labels that are known of it.
func (d *queueDay) onPanels() {
	d.t.Helper()
	component := monitoring.Of("../..")
	queries := panels(d.t, component, "kueue_")
	expressions := append(slices.Collect(maps.Values(queries)), fmt.Sprintf(
		"(%s) == 8 and (%s) == 6", queries["gpuslice-demand.json: Workloads pending, A"], queries["gpuslice-demand.json: Workloads admitted, A"],
	))
	for metric, labels := range monitoring.Kueue() {
		expressions = append(expressions, metric+"{"+strings.Join(labels, `!="",`)+`!=""}`)
	}
	target := model.Metric{"job": "kueue-controller-manager-metrics-service", "namespace": "kueue-system", "pod": "kueue-0", "instance": "kueue-0:8443"}
	shown(d.t, component, d.scrapes.series(d.t, "kueue_", target), len(d.scrapes), expressions)
}
