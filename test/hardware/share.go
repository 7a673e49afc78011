package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/cluster"
)

// resourceName is what the plugin offers whole GPUs and their shares as.
const resourceName = "nvidia.com/gpu"

// waits bounds each wait for something that takes seconds.
const waits = 3 * time.Minute

// pollEvery is the pause between two looks at something that is waited for.
const pollEvery = 100 * time.Millisecond

// sharing are configs of the device plugin, by the key that the node's label names.
var sharing = map[string]string{
	"none":           "version: v1\nflags: {migStrategy: none}\n",
	"time-slicing-2": "version: v1\nflags: {migStrategy: none}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n",
	"time-slicing-4": "version: v1\nflags: {migStrategy: none}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n",
}

// share has the agent share the GPUs, with pods on them.
func (t *trial) share(ctx context.Context) {
	var p *plane
	defer func() {
		if p == nil {
			return
		}
		t.report.alone("everything ends", func() (string, error) { return "", p.stop() })
	}()
	ready := t.report.alone("a control plane, NVIDIA's device plugin and the agent", func() (string, error) {
		if _, err := t.free(); err != nil {
			return "", err
		}
		if t.report.broken {
			return "", notHere(unmet)
		}
		var err error
		if p, err = t.start(ctx); err != nil {
			return "", err
		}
		return p.begin(ctx)
	})
	t.report.broken = ready != passed
	var shares []corev1.Pod
	t.report.check("none → 4 by label: who has a whole GPU leaves", func() (saw string, err error) {
		if err := p.run(ctx, "whole", computes); err != nil {
			return "", err
		}
		if saw, err = p.becomes(ctx, "time-slicing-4", 4); err != nil {
			return "", err
		}
		return saw, p.hasLeft(ctx, "whole")
	})
	t.report.check("four pods compute on each GPU", func() (saw string, err error) {
		shares, saw, err = p.occupy(ctx, 4)
		return saw, err
	})
	t.report.check("a pod's Xid 31 is reported on that pod, and the GPU is well", func() (saw string, err error) {
		if shares, err = p.makeRoom(ctx, shares); err != nil {
			return "", err
		}
		if err = errors.Join(p.run(ctx, faulty, errs), p.run(ctx, greedy, fills)); err != nil {
			return "", err
		}
		return p.errs(ctx)
	})
	t.report.check("a pod that fills a shared GPU is named", func() (string, error) { return p.fills(ctx) })
	t.report.check("4 → 2 by label: pods whose share goes leave, the others stay", func() (saw string, err error) {
		shares, saw, err = p.shrink(ctx, shares)
		return saw, err
	})
	t.report.check("2 → none by label: all shares leave", func() (saw string, err error) {
		if saw, err = p.becomes(ctx, "none", 1); err != nil {
			return "", err
		}
		for _, pod := range shares {
			err = errors.Join(err, p.hasLeft(ctx, pod.Name))
		}
		return fmt.Sprintf("%s; %s left", saw, counted(len(shares), "pod")), err
	})
	t.claims(ctx, p)
}

// begin has the plugin advertise the GPUs and the agent say that nothing is requested.
func (p *plane) begin(ctx context.Context) (string, error) {
	began := time.Now()
	var files []string
	for _, file := range manifests {
		files = append(files, p.programs.manifest(file))
	}
	if err := p.cluster.Apply(ctx, files...); err != nil {
		return "", err
	}
	data := map[string]string{}
	for name, text := range sharing {
		data[name] = text
	}
	_, err := p.client.CoreV1().ConfigMaps(own).Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: config.DefaultPluginConfigMap}, Data: data,
	}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	if err := p.await(ctx, "the plugin to offer the GPUs", func(n *corev1.Node) bool { return offered(n) == len(p.before) }); err != nil {
		return "", err
	}
	if err := p.startAgent(ctx); err != nil {
		return "", err
	}
	err = p.await(ctx, "the agent to say that all is well", func(n *corev1.Node) bool {
		ready, well := said(n, config.ConditionGPUPartitionReady), said(n, config.ConditionGPUUnhealthy)
		return ready.Reason == string(config.ReasonNotRequested) && well.Reason == string(config.ReasonGPUsHealthy)
	})
	return fmt.Sprintf("%s offered, %s, %s; all there after %s", counted(len(p.before), "GPU"), config.ReasonNotRequested, config.ReasonGPUsHealthy,
		short(time.Since(began))), err
}

// await looks at the node until done is satisfied with it.
func (p *plane) await(ctx context.Context, what string, done func(*corev1.Node) bool) error {
	var last *corev1.Node
	err := p.poll(ctx, what, func(ctx context.Context) (bool, error) {
		n, err := p.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err == nil {
			last = n
		}
		return err == nil && done(n), err
	})
	if err == nil || last == nil {
		return err
	}
	var words []string
	for _, condition := range []string{config.ConditionGPUPartitionReady, config.ConditionGPUUnhealthy, config.ConditionGPUMemoryPressure} {
		c := said(last, condition)
		words = append(words, fmt.Sprintf("%s %s %s: %s", condition, c.Status, c.Reason, c.Message))
	}
	return fmt.Errorf("%w; %s is offered %d times; the node says: %s", err, resourceName, offered(last), strings.Join(words, "; "))
}

// poll waits for something, and says what for when it does not come.
func (p *plane) poll(ctx context.Context, what string, done wait.ConditionWithContextFunc) error {
	ctx, cancel := context.WithTimeout(ctx, waits)
	defer cancel()
	if err := wait.PollUntilContextCancel(ctx, pollEvery, true, done); err != nil {
		return fmt.Errorf("waiting for %s: %w", what, cmp.Or(context.Cause(ctx), err))
	}
	return nil
}

// said is a condition of the node; empty if it has none of that type.
func said(n *corev1.Node, condition string) corev1.NodeCondition {
	for _, c := range n.Status.Conditions {
		if string(c.Type) == condition {
			return c
		}
	}
	return corev1.NodeCondition{}
}

// offered is how many GPUs or shares the node advertises.
func offered(n *corev1.Node) int {
	q := n.Status.Allocatable[resourceName]
	return int(q.Value())
}

// becomes requests a sharing by the node's label, and verifies it. The agent says that it is done and has released the node, and
// kubelet advertises each GPU that often.
func (p *plane) becomes(ctx context.Context, key string, replicas int) (string, error) {
	began := time.Now()
	if err := p.patch(ctx, "labels", config.LabelDevicePluginConfig, key); err != nil {
		return "", err
	}
	want := len(p.before) * replicas
	err := p.await(ctx, "the agent to prove "+key, func(n *corev1.Node) bool {
		return p.converged(n, key) && offered(n) == want
	})
	if err != nil {
		return "", err
	}
	took := time.Since(began)
	kubelet := holders.DialKubelet(p.kubelet.PodResourcesSocket())
	defer kubelet.Close()
	found, err := kubelet.Allocatable(ctx)
	if err != nil {
		return "", err
	}
	slices.Sort(found[resourceName])
	if diff := gocmp.Diff(p.ids(replicas), found[resourceName]); diff != "" {
		return "", fmt.Errorf("what kubelet gives out for %s (-want +got):\n%s", key, diff)
	}
	return fmt.Sprintf("proven after %s, kubelet gives out %d", short(took), want), nil
}

// converged reports whether the agent says that the node has what is requested by this name, and has released it.
func (p *plane) converged(n *corev1.Node, key string) bool {
	c := said(n, config.ConditionGPUPartitionReady)
	_, pending := n.Annotations[config.AnnotationJournal]
	return c.Status == corev1.ConditionTrue && strings.HasPrefix(c.Message, key+":") && !n.Spec.Unschedulable && !pending
}

// ids are the names under which the plugin offers each GPU so often.
func (p *plane) ids(replicas int) []string {
	var ids []string
	for _, g := range p.before {
		if replicas == 1 {
			ids = append(ids, string(g.UUID))
			continue
		}
		for i := range replicas {
			ids = append(ids, fmt.Sprintf("%s::%d", g.UUID, i))
		}
	}
	slices.Sort(ids)
	return ids
}

// run runs a pod with one GPU or share, until it computes, or has ended by itself.
func (p *plane) run(ctx context.Context, name, does string) error {
	pod := worker(name, does)
	pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{resourceName: resource.MustParse("1")}
	if _, err := p.client.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return err
	}
	if does == computes {
		return p.poll(ctx, "pod "+name+" on a GPU", func(ctx context.Context) (bool, error) { return p.computing(ctx, name) })
	}
	return nil
}

// worker is a pod of this program, that asks for nothing.
func worker(name, does string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			RestartPolicy: corev1.RestartPolicyNever,
			Containers:    []corev1.Container{{Name: "work", Image: workImage, Command: []string{"hardware", "work", does}}},
		},
	}
}

// computing reports whether the driver shows a process of the pod.
func (p *plane) computing(ctx context.Context, name string) (bool, error) {
	pod, err := p.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return false, err
	}
	if pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		return false, fmt.Errorf("pod %s has ended: %s %s; its log is below %s", name, pod.Status.Phase, pod.Status.Message, p.dir)
	}
	return pod.Status.Phase == corev1.PodRunning, nil
}

// hasLeft reports a pod that is still there, or that something other than the Eviction API has removed.
func (p *plane) hasLeft(ctx context.Context, name string) error {
	if _, err := p.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return fmt.Errorf("pod %s, whose device is offered no more, is still there: %w", name, cmpOr(err, errThere))
	}
	evictions, err := p.cluster.Requests(func(e cluster.AuditEvent) bool { //nolint:contextcheck // it reads a file, and bounds the one request that it makes
		return e.Namespace == namespace && e.Resource == "pods/eviction"
	})
	if err != nil {
		return err
	}
	for _, e := range evictions {
		var asked policyv1.Eviction
		if err := json.Unmarshal([]byte(e.Body), &asked); err != nil {
			return fmt.Errorf("reading %s: %w", e, err)
		}
		if o := asked.DeleteOptions; o != nil && len(o.DryRun) == 0 && asked.Name == name {
			return nil
		}
	}
	return fmt.Errorf("pod %s is gone without an eviction", name)
}

var errThere = errors.New("it was found")

// occupy has a pod on each share, and sees that the driver and nvidia-smi show a process of each.
func (p *plane) occupy(ctx context.Context, replicas int) ([]corev1.Pod, string, error) {
	for i := range len(p.before) * replicas {
		if err := p.run(ctx, "share-"+strconv.Itoa(i), computes); err != nil {
			return nil, "", err
		}
	}
	var seen map[string]int
	err := p.poll(ctx, "processes of all pods on the GPUs", func(ctx context.Context) (bool, error) {
		gpus, err := p.driver.Snapshot(ctx)
		if err != nil {
			return false, err
		}
		seen = map[string]int{}
		for _, g := range gpus {
			for _, process := range g.Processes {
				seen[fmt.Sprintf("%s %d", g.UUID, process.PID)] = process.UsedMiB
			}
			if len(g.Processes) != replicas {
				return false, nil
			}
		}
		return true, nil
	})
	if err != nil {
		return nil, "", fmt.Errorf("%w; they are %v", err, seen)
	}
	rows, err := p.query(ctx, "--query-compute-apps=gpu_uuid,pid")
	if err != nil {
		return nil, "", err
	}
	least, most := 1<<30, 0
	for _, r := range rows {
		mib, there := seen[strings.Join(r, " ")]
		if !there {
			return nil, "", fmt.Errorf("nvidia-smi shows %v, and the driver %v", rows, seen)
		}
		least, most = min(least, mib), max(most, mib)
	}
	if len(rows) != len(seen) {
		return nil, "", fmt.Errorf("nvidia-smi shows %v, and the driver %v", rows, seen)
	}
	pods, err := p.pods(ctx)
	return pods, fmt.Sprintf("%d processes, %d to %d MiB each, as nvidia-smi shows them", len(seen), least, most), err
}

// pods are those that use GPUs, by their names.
func (p *plane) pods(ctx context.Context) ([]corev1.Pod, error) {
	list, err := p.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(list.Items, func(a, b corev1.Pod) int { return cmp.Compare(a.Name, b.Name) })
	return list.Items, nil
}

// staying are the pods that keep their shares when each GPU has two.
func (p *plane) staying(pods []corev1.Pod) map[string]bool {
	out := map[string]bool{}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pod := range pods {
		for _, id := range p.given[pod.UID] {
			out[pod.Name] = slices.Contains(p.ids(2), id)
		}
	}
	return out
}

// makeRoom removes two pods: one that would keep its share when each GPU has two, and one that would lose it. It returns the others.
func (p *plane) makeRoom(ctx context.Context, pods []corev1.Pod) ([]corev1.Pod, error) {
	stays := p.staying(pods)
	left := slices.Clone(pods)
	for _, stayed := range []bool{true, false} {
		at := slices.IndexFunc(left, func(pod corev1.Pod) bool { return stays[pod.Name] == stayed })
		if at < 0 {
			return nil, fmt.Errorf("of %v no pod has a share that is offered still, or none has another", stays)
		}
		if err := p.remove(ctx, left[at].Name); err != nil {
			return nil, err
		}
		left = slices.Delete(left, at, at+1)
	}
	return left, nil
}

// shrink takes the GPUs from four shares to two.
func (p *plane) shrink(ctx context.Context, before []corev1.Pod) ([]corev1.Pod, string, error) {
	stays := p.staying(before)
	saw, err := p.becomes(ctx, "time-slicing-2", 2)
	if err != nil {
		return nil, "", err
	}
	after, err := p.pods(ctx)
	if err != nil {
		return nil, "", err
	}
	left := 0
	for _, pod := range before {
		if !stays[pod.Name] {
			left++
			if err := p.hasLeft(ctx, pod.Name); err != nil {
				return nil, "", err
			}
			continue
		}
		if !slices.ContainsFunc(after, func(a corev1.Pod) bool { return a.UID == pod.UID && a.DeletionTimestamp == nil }) {
			return nil, "", fmt.Errorf("pod %s, whose share is offered still, had to leave", pod.Name)
		}
	}
	return after, fmt.Sprintf("%s; %d of %s left", saw, left, counted(len(before), "pod")), nil
}

// remove deletes a pod, and waits until it is gone.
func (p *plane) remove(ctx context.Context, name string) error {
	err := p.client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{})
	if err != nil {
		return err
	}
	return p.poll(ctx, "pod "+name+" to end", func(ctx context.Context) (bool, error) {
		_, err := p.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return true, nil
		}
		return false, err
	})
}

// The pods that do what is to be reported.
const faulty, greedy = "faulty", "greedy"

// fills checks that the node names the pod that fills a GPU until that pod is gone.
func (p *plane) fills(ctx context.Context) (string, error) {
	var condition corev1.NodeCondition
	if err := p.await(ctx, "memory pressure", func(n *corev1.Node) bool {
		condition = said(n, config.ConditionGPUMemoryPressure)
		return condition.Status == corev1.ConditionTrue
	}); err != nil {
		return "", err
	}
	// The pod that has most comes first.
	if _, shared, found := strings.Cut(condition.Message, "shared by "); !found || !strings.HasPrefix(shared, namespace+"/"+greedy+" ") {
		return "", fmt.Errorf("the node does not name the pod first: %s", condition.Message)
	}
	if err := p.remove(ctx, greedy); err != nil {
		return "", err
	}
	err := p.await(ctx, "the end of memory pressure", func(n *corev1.Node) bool {
		return said(n, config.ConditionGPUMemoryPressure).Status == corev1.ConditionFalse
	})
	what, _, _ := strings.Cut(condition.Message, ";")
	return what, err
}

// errs sees that a pod's error is reported as its own.
func (p *plane) errs(ctx context.Context) (string, error) {
	var message string
	err := p.poll(ctx, fmt.Sprintf("the Event %s on the pod", config.ReasonApplicationXid), func(ctx context.Context) (bool, error) {
		list, err := p.client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + faulty})
		if err != nil {
			return false, err
		}
		for _, e := range list.Items {
			if e.Reason == string(config.ReasonApplicationXid) {
				message = e.Message
			}
		}
		return message != "", nil
	})
	if err != nil {
		return "", err
	}
	text, err := p.agent.scrape(ctx)
	if err != nil {
		return "", err
	}
	if want := fmt.Sprintf("xid=\"%d\"} 1\n", mmuFault); !slices.ContainsFunc(slices.Collect(strings.Lines(text)), func(line string) bool {
		return strings.HasPrefix(line, "gpuslice_gpu_xid_events_total{class=\"application\",") && strings.HasSuffix(line, want)
	}) {
		return "", fmt.Errorf("no metric counts it as an application's: %s", text)
	}
	n, err := p.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	if c := said(n, config.ConditionGPUUnhealthy); c.Status != corev1.ConditionFalse {
		return "", fmt.Errorf("the node says %s %s: %s", c.Status, c.Reason, c.Message)
	}
	return message, p.remove(ctx, faulty)
}
