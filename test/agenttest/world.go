// Package agenttest is a cluster for tests of commands: the test plays the agents, and time passes when all wait.
package agenttest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/cluster"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// World is a cluster with nodes. A test plays their agents.
type World struct {
	commands []cluster.Command // which the test runs
	T        *testing.T
	Client   *fake.Clientset
	Said     *Output
	end      chan error
	Stop     context.CancelFunc
	// what agents answer at once when apply asks what they would do, by node; the others would begin
	Names map[string]api.Answer
}

// Output is what the command has written. A test may read it while the command writes.
type Output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

// String is all of it.
func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// InWorld runs a test of the commands in a bubble, where time passes when all wait.
func InWorld(t *testing.T, commands []cluster.Command, test func(w *World), nodes ...func() *corev1.Node) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &World{commands: commands, T: t, Client: fake.NewClientset(), Names: map[string]api.Answer{}}
		for _, n := range nodes {
			w.Create(n())
		}
		test(w)
	})
}

// GPUNode is a node of the pool. Its agent has reported NotRequested.
func GPUNode(name string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name, UID: types.UID(name), Labels: map[string]string{"pool": "research"}, Annotations: map[string]string{},
	}}
	return Says(n, api.Status{Phase: api.PhaseIdle, Reason: config.ReasonNotRequested}, "no config is asked for")
}

// GPU is such a node, made in the test's time.
func GPU(name string) func() *corev1.Node { return func() *corev1.Node { return GPUNode(name) } }

// Bare is a node that has never run an agent.
func Bare(name string, labels ...string) func() *corev1.Node {
	return func() *corev1.Node { return &corev1.Node{ObjectMeta: meta(name, labels...)} }
}

// Says is what an agent writes: the status, and the condition by it.
func Says(n *corev1.Node, s api.Status, message string) *corev1.Node {
	return Concludes(States(n, s), s, message)
}

// States writes the status alone.
func States(n *corev1.Node, s api.Status) *corev1.Node {
	if s.Since.IsZero() {
		s.Since = time.Now().UTC().Truncate(time.Second)
	}
	text, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	n.Annotations[config.AnnotationStatus] = string(text)
	return n
}

// Concludes writes the condition alone.
func Concludes(n *corev1.Node, s api.Status, message string) *corev1.Node {
	c := corev1.NodeCondition{
		Type: config.ConditionGPUPartitionReady, Status: corev1.ConditionFalse, Reason: string(s.Reason), Message: message,
		LastHeartbeatTime: metav1.Now(),
	}
	if s.Reason == config.ReasonConverged || s.Reason == config.ReasonNotRequested {
		c.Status = corev1.ConditionTrue
	}
	if s.Reason == config.ReasonDriverNotLoaded {
		c.Status = corev1.ConditionUnknown
	}
	n.Status.Conditions = []corev1.NodeCondition{c}
	return n
}

// Research is the status of an agent that has seen the request of most tests.
func Research(phase api.Phase, reason config.Reason, left int, blockers ...string) api.Status {
	return api.Status{Desired: "research", Label: config.LabelProfile, Phase: phase, Reason: reason, Left: left, Blockers: blockers}
}

// Done is the status of an agent that has fulfilled that request.
func Done() api.Status { return Research(api.PhaseIdle, config.ReasonConverged, 0) }

// Create makes a node.
func (w *World) Create(n *corev1.Node) {
	w.T.Helper()
	if _, err := w.Client.CoreV1().Nodes().Create(w.T.Context(), n, metav1.CreateOptions{}); err != nil {
		w.T.Fatal(err)
	}
}

// Node reads a node.
func (w *World) Node(name string) *corev1.Node {
	w.T.Helper()
	n, err := w.Client.CoreV1().Nodes().Get(w.T.Context(), name, metav1.GetOptions{})
	if err != nil {
		w.T.Fatal(err)
	}
	return n
}

// Edit writes the node, and waits until the command has seen it.
func (w *World) Edit(name string, change func(n *corev1.Node)) {
	w.T.Helper()
	synctest.Wait()
	n := w.Node(name)
	change(n)
	if _, err := w.Client.CoreV1().Nodes().Update(w.T.Context(), n, metav1.UpdateOptions{}); err != nil {
		w.T.Fatal(err)
	}
	synctest.Wait()
}

// Says is what an agent says a second later.
func (w *World) Says(name string, s api.Status, message string) {
	w.T.Helper()
	<-time.After(time.Second)
	w.Edit(name, func(n *corev1.Node) { Says(n, s, message) })
}

// Remove deletes a node, and waits until the command has seen it.
func (w *World) Remove(name string) {
	w.T.Helper()
	synctest.Wait()
	if err := w.Client.CoreV1().Nodes().Delete(w.T.Context(), name, metav1.DeleteOptions{}); err != nil {
		w.T.Fatal(err)
	}
	synctest.Wait()
}

// Start begins a command, and returns when it waits for something.
func (w *World) Start(args ...string) {
	w.T.Helper()
	if args[0] == "apply" && !slices.Contains(args, "--dry-run") {
		w.Client.PrependReactor("patch", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) { return w.AnswersAtOnce(a) })
	}
	o := cluster.Options{Invoked: args, Connect: func() (kube.Interface, error) { return clientset.Of(w.Client), nil }}
	c := o.Root(w.commands...)
	w.Said, w.end = &Output{}, make(chan error, 1)
	c.SetOut(w.Said)
	c.SetErr(w.Said)
	c.SetArgs(args)
	var ctx context.Context
	ctx, w.Stop = context.WithCancel(w.T.Context())
	go func() { w.end <- c.ExecuteContext(ctx) }()
	synctest.Wait()
}

// Run runs one to its end.
func (w *World) Run(args ...string) (said string, code int) {
	w.T.Helper()
	w.Start(args...)
	return w.Ended()
}

// Ended is what the command has said at its end, with its error as main writes it, and the exit code.
func (w *World) Ended() (said string, code int) {
	w.T.Helper()
	err := <-w.end
	w.Stop()
	if err == nil {
		return w.Said.String(), 0
	}
	code = 1
	if exit, own := errors.AsType[interface {
		error
		ExitCode() int
	}](err); own {
		code = exit.ExitCode()
	}
	return w.Said.String() + "error: " + err.Error() + "\n", code
}

// Is compares what the command has said.
func (w *World) Is(want string, code int) {
	w.T.Helper()
	got, ended := w.Ended()
	if diff := cmp.Diff(strings.TrimPrefix(want, "\n"), got); diff != "" || code != ended {
		w.T.Errorf("exit code %d, want %d; what is said (-want +got):\n%s", ended, code, diff)
	}
}

// Runs reports whether the command has not ended.
func (w *World) Runs() bool {
	synctest.Wait()
	select {
	case err := <-w.end:
		w.end <- err
		return false
	default:
		return true
	}
}

// ErrRefused is the error of a call when no API server is there.
var ErrRefused = errors.New("connection refused")

// meta is a node's, with labels.
func meta(name string, labels ...string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: map[string]string{}}
	for i := 0; i < len(labels); i += 2 {
		m.Labels[labels[i]] = labels[i+1]
	}
	return m
}

// Answers lets the node's agent answer a request with a.
func (w *World) Answers(name string, a api.Answer) {
	w.T.Helper()
	w.Edit(name, func(n *corev1.Node) {
		asked, there := n.Annotations[config.AnnotationPreview]
		if _, answered := n.Annotations[config.AnnotationPlan]; !there || answered {
			w.T.Errorf("%s: asked %t, answered already %t", name, there, answered)
		}
		a.For = asked
		text, err := json.Marshal(a)
		if err != nil {
			w.T.Fatal(err)
		}
		n.Annotations[config.AnnotationPlan] = string(text)
	})
}

// Untouched fails the test if a request, an answer or a label is left.
func (w *World) Untouched(names ...string) {
	w.T.Helper()
	for _, name := range names {
		n := w.Node(name)
		for _, key := range []string{config.AnnotationPreview, config.AnnotationPlan} {
			if text, there := n.Annotations[key]; there {
				w.T.Errorf("%s: annotation %s is left: %s", name, key, text)
			}
		}
		if label, there := n.Labels[config.LabelProfile]; there {
			w.T.Errorf("%s is labelled %s", name, label)
		}
	}
}

// Diagnoses is an agent's answer.
func (w *World) Diagnoses(name string, d api.Diagnosis) {
	w.T.Helper()
	d.Node, d.At = name, time.Now()
	w.Answers(name, api.Answer{Diagnosis: &d})
}

// RunsOn makes a pod on the node that asks for an instance.
func (w *World) RunsOn(node, name string, labels ...string) *corev1.Pod {
	w.T.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("team/" + name), Labels: meta("", labels...).Labels, OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "team", Controller: new(true)},
		}},
		Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{"nvidia.com/mig-1g.10gb": resource.MustParse("1")}},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
	if _, err := w.Client.CoreV1().Pods("team").Create(w.T.Context(), p, metav1.CreateOptions{}); err != nil {
		w.T.Fatal(err)
	}
	return p
}

// Asked counts the requests of the command, by verb and resource.
func (w *World) Asked() map[string]int {
	out := map[string]int{}
	for _, a := range w.Client.Actions() {
		out[a.GetVerb()+" "+a.GetResource().Resource]++
	}
	return out
}

// Fifty are nodes that run agents, and their names.
func Fifty() (nodes []func() *corev1.Node, names []string) {
	for i := range 50 {
		name := fmt.Sprintf("gpu-%02d", i)
		nodes, names = append(nodes, GPU(name)), append(names, name)
	}
	return nodes, names
}

// KeepsSilent in place of a request is an agent that does not answer.
const KeepsSilent = "silent"

// AnswersAtOnce is an agent that answers a request at once: as w.Names has it, by a change that begins, or with a diagnosis.
func (w *World) AnswersAtOnce(a k8stesting.Action) (bool, runtime.Object, error) {
	patch, ok := a.(k8stesting.PatchAction)
	var asks struct {
		Metadata struct{ Annotations map[string]*string }
	}
	if !ok {
		return false, nil, nil
	}
	if err := json.Unmarshal(patch.GetPatch(), &asks); err != nil {
		return true, nil, err
	}
	request := asks.Metadata.Annotations[config.AnnotationPreview]
	given, special := w.Names[patch.GetName()]
	if request != nil && given.Reason == config.ReasonOlderRequest && strings.HasSuffix(*request, config.AskedAgain) {
		given, special = api.Answer{}, false
	}
	switch {
	case request == nil, given.For == KeepsSilent:
		return false, nil, nil
	case !special && *request == config.RequestDiagnosis:
		given.Diagnosis = &api.Diagnosis{Node: patch.GetName()}
	case !special:
		given.Steps = []string{"fence: journal, cordon, taint"}
	}
	given.For = *request
	object, err := w.Client.Tracker().Get(a.GetResource(), "", patch.GetName())
	if err != nil {
		return true, nil, err
	}
	node, ok := object.(*corev1.Node)
	if !ok {
		return true, nil, fmt.Errorf("the node is a %T", object)
	}
	answer, err := json.Marshal(given)
	n := node.DeepCopy()
	n.Annotations[config.AnnotationPreview], n.Annotations[config.AnnotationPlan] = *request, string(answer)
	if err == nil {
		err = w.Client.Tracker().Update(a.GetResource(), n, "")
	}
	return true, n, err
}

// ByClaim is what makes a pod one that asks for its devices by claims.
var ByClaim = map[string]func(p *corev1.Pod){
	"a claim of the spec": func(p *corev1.Pod) {
		p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: new("mig-1g.10gb")}}
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: "gpu"}}}
	},
	"a claim by the scheduler": func(p *corev1.Pod) {
		p.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "made"}
	},
	"a resource of a class's own name": func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"deviceclass.resource.kubernetes.io/gpu.nvidia.com": resource.MustParse("1")}
	},
	"a resource that a class names": func(p *corev1.Pod) {
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"example.com/slice": resource.MustParse("1")}
	},
}

// AsksBy makes a pod on gpu-1, as runsOn, and changes it.
func (w *World) AsksBy(name string, change func(p *corev1.Pod)) {
	w.T.Helper()
	p := w.RunsOn("gpu-1", name, "app", "x")
	change(p)
	if _, err := w.Client.CoreV1().Pods("team").Update(w.T.Context(), p, metav1.UpdateOptions{}); err != nil {
		w.T.Fatal(err)
	}
}
