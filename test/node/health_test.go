package node_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/gpusim/pods"
)

// tooSlow is more than what agent/monitor/health holds by a clock that no load of this machine slows: 5 s until a fault is reported, 10 s until it is over.
const tooSlow = time.Minute

// unhealthy is what the node says of its GPUs.
func unhealthy(n *corev1.Node) corev1.NodeCondition {
	for _, c := range n.Status.Conditions {
		if c.Type == config.ConditionGPUUnhealthy {
			return c
		}
	}
	return corev1.NodeCondition{}
}

// awaitHealth waits until the node says this of its GPUs, and says how long that took.
func (r *rig) awaitHealth(status corev1.ConditionStatus, reasons ...config.Reason) (corev1.NodeCondition, time.Duration) {
	r.t.Helper()
	began := time.Now()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	n, satisfied := r.seek(ctx, func(n *corev1.Node) bool {
		c := unhealthy(n)
		return c.Status == status && (len(reasons) == 0 || slices.Contains(reasons, config.Reason(c.Reason)))
	})
	if !satisfied {
		c := unhealthy(n)
		r.t.Fatalf("waiting for %s %s %v: the node says %s %s: %s", config.ConditionGPUUnhealthy, status, reasons, c.Status, c.Reason, c.Message)
	}
	return unhealthy(n), time.Since(began)
}

// awaitEvent waits for an Event about the object.
func (r *rig) awaitEvent(namespace, about string, reason config.Reason, words string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.CoreV1().Events(namespace).Watch(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + about + ",reason=" + string(reason)})
	}
	if err := clustertest.Follow(ctx, open, nil, func(_ watch.EventType, e *corev1.Event) bool { return strings.Contains(e.Message, words) }); err != nil {
		r.t.Fatalf("waiting for the Event %s on %s with %q: %v", reason, about, words, err)
	}
}

// scrape gives the metrics that the agent serves.
func (r *rig) scrape() (string, error) {
	request, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, "http://"+r.agents.metrics+"/metrics", nil)
	if err != nil {
		return "", err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return string(text), err
}

func (r *rig) metrics() string {
	r.t.Helper()
	text, err := r.scrape()
	if err != nil {
		r.t.Fatal(err)
	}
	return text
}

// serveMetrics has the next agent serve metrics at a port that is free now.
func (r *rig) serveMetrics() {
	r.t.Helper()
	l, err := new(net.ListenConfig).Listen(r.t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	r.agents.metrics = l.Addr().String()
	if err := l.Close(); err != nil {
		r.t.Fatal(err)
	}
}

// What happens to GPUs, one after the other on a GPU of its own each, by the agent's own program and NVIDIA's library as it is simulated.
// The agent is killed in the middle of each, and the next one says the same. Each is over without anybody's restart, and NVIDIA's device
// plugin, which gives out no GPU again that it took for unhealthy, is restarted by the agent.
func TestEachFaultOfAGPUIsReportedAndHeals(t *testing.T) {
	t.Parallel()
	faults := []fault{
		{"uncontained-ecc", []config.Reason{config.ReasonXidCritical, config.ReasonResetRequired}, config.ReasonResetRequired},
		{"contained-ecc", []config.Reason{config.ReasonXidCritical}, config.ReasonXidCritical},
		{"fallen-off", []config.Reason{config.ReasonXidCritical, config.ReasonGPULost}, config.ReasonGPULost},
		{"uncontained-ecc-settled", []config.Reason{config.ReasonXidCritical}, config.ReasonXidCritical},
		{"gsp-hang", []config.Reason{config.ReasonXidCritical, config.ReasonDriverUnresponsive}, ""},
		{"fallen-off-silently", []config.Reason{config.ReasonGPULost}, config.ReasonGPULost},
		{"remap-failure", []config.Reason{config.ReasonXidCritical, config.ReasonRowRemapFailed}, ""},
		{"nvlink", []config.Reason{config.ReasonXidCritical, config.ReasonResetRequired}, config.ReasonResetRequired},
		{"users-reset", []config.Reason{config.ReasonResetRequired}, config.ReasonResetRequired},
		{"gsp-hiccup", []config.Reason{config.ReasonXidCritical}, config.ReasonXidCritical},
		{"pmu-halt", []config.Reason{config.ReasonXidCritical, config.ReasonResetRequired}, config.ReasonResetRequired},
		{"context-switch-timeout", []config.Reason{config.ReasonXidCritical, config.ReasonResetRequired}, config.ReasonResetRequired},
		{"application", nil, ""},
		{"context-switch-timeout-settled", []config.Reason{config.ReasonXidCritical}, config.ReasonXidCritical},
		{"nvlink5", []config.Reason{config.ReasonDrainRequired}, config.ReasonDrainRequired},
		{"init-failure", []config.Reason{config.ReasonGPUMissing}, config.ReasonGPUMissing},
		{"dead", []config.Reason{config.ReasonXidCritical, config.ReasonGPULost, config.ReasonGPUMissing}, config.ReasonGPUMissing},
		{"contained-ecc-drain", []config.Reason{config.ReasonXidCritical, config.ReasonDrainRequired}, config.ReasonDrainRequired},
	}
	if testing.Short() {
		faults = faults[:3]
	}
	for some := range slices.Chunk(faults, 6) { // each node's take minutes
		t.Run(some[0].name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "gpus: [{model: H200, count: 8}]", "")
			r.awaitOffered("nvidia.com/gpu", 8)
			r.serveMetrics()
			r.run()
			r.awaitHealth(corev1.ConditionFalse, config.ReasonGPUsHealthy)
			for gpu, f := range some {
				if len(f.soon) == 0 {
					r.harmless(gpu, f.name, 31)
				} else {
					r.fault(gpu, f)
				}
			}
		})
	}
}

// fault is a sequence of the simulator, and what the node says of it.
type fault struct {
	name  string
	soon  []config.Reason // one of them at first; none if it is harmless
	later config.Reason   // then, also after the agent was killed; empty if it may be over by then
}

// harmless plays a sequence that begins with the Xid, and of which the node says nothing.
func (r *rig) harmless(gpu int, name string, xid int) {
	r.t.Helper()
	r.awaitMetric("gpuslice_health_events_watched 1")
	since := unhealthy(r.node()).LastTransitionTime
	if err := r.GPUs.Play(r.t.Context(), gpu, gpusim.NoInstance, name); err != nil {
		r.t.Fatal(err)
	}
	r.awaitMetric(fmt.Sprintf("gpuslice_gpu_xid_events_total{class=%q,gpu=%q,xid=\"%d\"} 1", "application", r.GPUs.UUIDs()[gpu], xid))
	if c := unhealthy(r.node()); c.Status != corev1.ConditionFalse || !c.LastTransitionTime.Equal(&since) {
		r.t.Errorf("%s: the node says %s %s: %s", name, c.Status, c.Reason, c.Message)
	}
}

func (r *rig) fault(gpu int, f fault) {
	r.t.Helper()
	name := f.name
	r.awaitMetric("gpuslice_health_events_watched 1")
	if err := r.GPUs.Play(r.t.Context(), gpu, gpusim.NoInstance, name); err != nil {
		r.t.Fatal(err)
	}
	uuid := r.GPUs.UUIDs()[gpu]
	c, reported := r.awaitHealth(corev1.ConditionTrue, f.soon...)
	if !strings.Contains(c.Message, uuid) {
		r.t.Errorf("%s: the message does not name %s: %s", name, uuid, c.Message)
	}
	r.awaitEvent(metav1.NamespaceDefault, r.Name, config.ReasonGPUUnhealthy, uuid)
	if f.later != "" {
		r.awaitHealth(corev1.ConditionTrue, f.later)
	}
	if name != "gsp-hang" { // no status is written of GPUs that cannot be looked at
		r.await("the status of "+name, func(n *corev1.Node) bool { return statusHas(n, uuid) })
	}
	for _, want := range []string{fmt.Sprintf("gpuslice_gpu_healthy{gpu=%q} 0", uuid), fmt.Sprintf("gpuslice_gpu_problem{gpu=%q,reason=", uuid)} {
		if text := r.metrics(); !strings.Contains(text, want) {
			r.t.Errorf("%s: the metrics do not have %s", name, want)
		}
	}
	r.nextSaysTheSame(name)
	if name == "uncontained-ecc" { // one of those that the plugin knows
		r.awaitOffered(nvml.ResourceGPU, 7)
	}
	if err := r.GPUs.Cure(r.t.Context(), gpu, name); err != nil {
		r.t.Fatal(err)
	}
	_, healed := r.awaitHealth(corev1.ConditionFalse, config.ReasonGPUsHealthy)
	r.awaitOffered(nvml.ResourceGPU, 8) // which takes another device plugin, wherever this one took the GPU for unhealthy
	r.t.Logf("%s: reported after %s, over after %s", name, reported.Round(10*time.Millisecond), healed.Round(10*time.Millisecond))
	if limit := tooSlow; reported > limit || healed > limit && !strings.HasSuffix(name, "settled") && name != "gsp-hiccup" {
		r.t.Errorf("%s: reported after %s, over after %s, want less than %s", name, reported, healed, limit)
	}
}

// nextSaysTheSame kills the agent, and lets the next one look.
func (r *rig) nextSaysTheSame(name string) {
	r.t.Helper()
	since := unhealthy(r.node()).LastTransitionTime
	r.kill()
	r.run()
	r.awaitMetric("gpuslice_health_last_success_timestamp_seconds", "gpuslice_nvml_errors_total{")
	if c := unhealthy(r.node()); c.Status != corev1.ConditionTrue || !c.LastTransitionTime.Equal(&since) {
		r.t.Fatalf("%s: after a restart of the agent the node says %s %s since %s: %s; before it was True since %s", name, c.Status, c.Reason,
			c.LastTransitionTime, c.Message, since)
	}
}

// awaitMetric waits until the agent serves metrics with one of the words.
func (r *rig) awaitMetric(words ...string) {
	r.t.Helper()
	deadline := time.After(patience)
	for {
		text, err := r.scrape()
		if err == nil && slices.ContainsFunc(words, func(w string) bool { return strings.Contains(text, w) }) {
			return
		}
		select {
		case <-deadline:
			r.t.Fatalf("the metrics do not come to have %q: %v\n%s", words, err, text)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func statusHas(n *corev1.Node, uuid string) bool {
	var s api.Status
	if err := json.Unmarshal([]byte(n.Annotations[config.AnnotationStatus]), &s); err != nil {
		return false
	}
	return slices.ContainsFunc(s.GPUs, func(g api.StatusGPU) bool {
		return string(g.UUID) == uuid && g.Health != nil && len(g.Health.Reason) > 0
	})
}

// Two pods on one GPU, by NVIDIA's own plugin: the kernel's log names the process, and a program that writes there what the driver does is
// not believed.
func TestAProgramsErrorOnASharedGPUIsReportedOnItsPodAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus: [{model: T4}]", "", configFile)
	namespace := clustertest.Namespace(t)
	r.awaitOffered("nvidia.com/gpu", 1)
	r.awaitLabels(map[string]string{labelCount: "1"})
	r.writeConfig(r.pluginConfigs()["time-slicing-4"])
	r.awaitOffered("nvidia.com/gpu", 4)
	one := map[string]string{"nvidia.com/gpu": "1"}
	r.pod(namespace, "modest", one)
	greedy := r.pod(namespace, "greedy", one)
	r.awaitRunning(namespace, "modest")
	r.awaitRunning(namespace, "greedy")
	r.serveMetrics()
	r.run()
	r.awaitHealth(corev1.ConditionFalse)
	r.awaitReason(config.ReasonNotRequested)
	r.awaitMetric("gpuslice_health_kernel_log_read 1")
	culprit := pods.Process{PID: 4_194_305, Command: "python3", Cgroup: pods.OfPod(greedy)} // above the largest pid of Linux
	if err := r.Users.Start(culprit, r.GPUs.UUIDs()[0]); err != nil {
		t.Fatal(err)
	}
	const user, kernel = 1, 0
	line := func(xid int) string {
		return fmt.Sprintf("NVRM: Xid (PCI:0000:07:00): %d, pid=%d, name=python3, Ch 00000008", xid, culprit.PID)
	}
	for _, written := range []error{r.Printk(user, line(79)), r.Printk(kernel, line(31)), r.GPUs.Xid(0, 31)} {
		if written != nil {
			t.Fatal(written)
		}
	}
	r.awaitEvent(namespace, "greedy", config.ReasonApplicationXid, "a program of this pod made an error")
	r.awaitMetric(fmt.Sprintf("gpuslice_gpu_xid_events_total{class=%q,gpu=%q,xid=\"31\"} 1", "application", r.GPUs.UUIDs()[0]))
	heard, err := r.client.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range heard.Items {
		if e.InvolvedObject.Namespace == namespace && e.InvolvedObject.Name == "modest" && e.Reason == string(config.ReasonApplicationXid) || e.InvolvedObject.Name == r.Name && e.Reason == string(config.ReasonXidError) {
			t.Errorf("%s hears: %s %s", e.InvolvedObject.Name, e.Reason, e.Message)
		}
	}
	if text := r.metrics(); strings.Contains(text, `xid="79"`) {
		t.Error("what a program has written into the kernel's log counts")
	}
}

// Xid 69 is a program's own error, which NVIDIA's device plugin takes for a fault of the GPU. A tenant makes one every twelve seconds.
func TestATenantsErrorsRestartThePluginSeldom(t *testing.T) {
	if testing.Short() {
		t.Skip("156 seconds of errors; agent/act/verify has the pauses by a clock of its own")
	}
	t.Parallel()
	r := newRig(t, twoH100, "")
	r.awaitOffered("nvidia.com/gpu", 2)
	namespace := clustertest.Namespace(t)
	r.user(namespace, "tenant", nil)
	r.run()
	r.awaitHealth(corev1.ConditionFalse)
	on := slices.Index(r.GPUs.UUIDs(), r.assignments(namespace)["tenant"][0])
	plugins := map[types.UID]bool{r.plugin().UID: true}
	mistakes, ticker := time.NewTicker(12*time.Second), time.NewTicker(500*time.Millisecond)
	defer mistakes.Stop()
	defer ticker.Stop()
	made := 0
	for end := time.After(156 * time.Second); end != nil; {
		select {
		case <-mistakes.C:
			if err := r.GPUs.Xid(on, 69); err != nil {
				t.Fatal(err)
			}
			made++
		case <-ticker.C:
			for _, p := range r.pods() {
				if slices.ContainsFunc(p.Spec.Containers, isPlugin) {
					plugins[p.UID] = true
				}
			}
		case <-end:
			end = nil
		}
	}
	t.Logf("%d errors, and the plugin was restarted %d times", made, len(plugins)-1)
	if restarted := len(plugins) - 1; restarted < 1 || restarted > 2 {
		t.Errorf("the plugin was restarted %d times, want once or twice", restarted)
	}
	r.awaitEvent(namespace, "tenant", config.ReasonApplicationXid, "NVIDIA's device plugin withholds the GPU from new pods")
}

// 500 Xids a second from 8 GPUs, by the library that the agent has loaded.
func TestPromise16AStormOfXidsIsTakenInAFewWrites(t *testing.T) {
	t.Parallel()
	r := newRig(t, "gpus: [{model: H200, count: 8}]", "")
	r.awaitOffered("nvidia.com/gpu", 8)
	r.serveMetrics()
	p := r.run()
	r.awaitHealth(corev1.ConditionFalse)
	r.awaitReason(config.ReasonNotRequested)
	before, memory := len(r.writes("")), r.resident(p, "VmRSS")
	const perSecond = 500
	seconds := 60
	if testing.Short() {
		seconds = 10
	}
	ticker := time.NewTicker(time.Second / 50)
	defer ticker.Stop()
	numbers := []uint64{13, 31, 43, 45, 48, 63, 74, 79, 94, 95, 109, 119, 120, 154, 8, 69, 140, 175, 1234, 999}
	began := time.Now()
	for n := 0; n < perSecond*seconds; {
		<-ticker.C
		for range perSecond / 50 {
			if err := r.GPUs.Xid(n%8, numbers[(n/8)%len(numbers)]); err != nil {
				t.Fatal(err)
			}
			n++
		}
	}
	took := time.Since(began)
	r.awaitHealth(corev1.ConditionTrue)
	writes := r.writes("")[before:]
	counted := 0
	for line := range strings.Lines(r.metrics()) {
		if strings.HasPrefix(line, "gpuslice_gpu_xid_events_total{") {
			counted++
		}
	}
	t.Logf("%d Xids in %s: %d writes to the node, %d series, %d KiB resident before, %d after, %d at most", perSecond*seconds, took.Round(time.Second),
		len(writes), counted, memory, r.resident(p, "VmRSS"), r.resident(p, "VmHWM"))
	if most := 15 + 4*int(took.Seconds()); len(writes) > most {
		t.Errorf("%d writes to the node, at most %d: %v", len(writes), most, writes)
	}
	if most := r.resident(p, "VmHWM"); most > agentMemory {
		t.Errorf("the agent took up to %d KiB, and its container may have %d", most, agentMemory)
	}
	if counted > 8*len(numbers) {
		t.Errorf("%d series for %d numbers of 8 GPUs", counted, len(numbers))
	}
}

// agentMemory is the memory limit that deploy/base gives the agent, in KiB.
const agentMemory = 256 << 10

// resident reads a figure of the agent's memory, in KiB, as the kernel counts it: VmRSS is now, VmHWM the most ever.
func (r *rig) resident(p *process, figure string) int {
	r.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		r.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), figure+":")
	text, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	kib, err := strconv.Atoi(text)
	if err != nil {
		r.t.Fatalf("reading %s of the agent: %v", figure, err)
	}
	return kib
}
