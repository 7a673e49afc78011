package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/picture"
)

// killAfter is the number of instances after which the agent is killed: in the middle of the second GPU.
const killAfter = 6

// logEvery is the pause between two looks at the agent's log.
const logEvery = 50 * time.Millisecond

// entry is a line of the agent's log, as far as the demo shows it.
type entry struct {
	Msg     string `json:"msg"`
	Step    string `json:"step"`    // of a finished step
	Reason  string `json:"reason"`  // of a new word in the node's condition
	Message string `json:"message"` // of the same
	Look    int    `json:"look"`    // which in a row it was at which hardware, kubelet and node agree
	Of      int    `json:"of"`      // so many verify the change
}

// expected are the reasons of the node's condition that say what pods, budgets and steps show already.
var expected = map[config.Reason]bool{
	config.ReasonEvictionBlocked: true, config.ReasonEvicting: true, config.ReasonRepartitioning: true, config.ReasonAwaitingCapacity: true, config.ReasonConverged: true,
}

// follow shows what the agent, the pods and the GPUs do until the agent releases the node.
func (s *scene) follow(ctx context.Context) error {
	watching, cancel := context.WithCancel(ctx)
	defer cancel()
	pods, err := s.client.CoreV1().Pods(metav1.NamespaceAll).Watch(watching, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("watching pods: %w", err)
	}
	defer pods.Stop()
	budgets, err := s.client.PolicyV1().PodDisruptionBudgets(namespace).Watch(watching, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("watching budgets: %w", err)
	}
	defer budgets.Stop()
	log := &tail{pattern: filepath.Join(s.node(mainNode).Dir, "kubelet", "logs", "gpuslice_gpuslice-agent-*.log")}
	defer log.close()
	if _, err := log.lines(); err != nil { // what it said before the label
		return err
	}
	f := &follower{scene: s, gpu: -1, state: map[string]string{}}
	if err := f.draw(ctx); err != nil {
		return err
	}
	if err := f.watch(ctx, pods.ResultChan(), budgets.ResultChan(), log); err != nil {
		return err
	}
	s.out.keep()
	return until(ctx, "the node to be ready", func(ctx context.Context) (bool, error) {
		object, err := s.client.CoreV1().Nodes().Get(ctx, mainNode, metav1.GetOptions{})
		return err == nil && ready(object.Status.Conditions) == corev1.ConditionTrue && !object.Spec.Unschedulable, err
	})
}

// follower is what has been shown so far.
type follower struct {
	*scene
	created  int
	killed   bool
	released bool
	gpu      int               // that the last step was about, -1 for none
	state    map[string]string // of pods, and of what else changes
}

// watch shows what comes, until the agent releases the node.
func (f *follower) watch(ctx context.Context, pods, budgets <-chan watch.Event, log *tail) error {
	tick := time.NewTicker(logEvery)
	defer tick.Stop()
	for !f.released {
		select {
		case <-ctx.Done():
			return fmt.Errorf("the node was not given back: %w", ctx.Err())
		case event := <-pods:
			if pod, ok := event.Object.(*corev1.Pod); ok {
				f.pod(string(event.Type), pod)
			}
		case event := <-budgets:
			if budget, ok := event.Object.(*policyv1.PodDisruptionBudget); ok {
				f.budget(budget)
			}
		case <-tick.C:
			lines, err := log.lines()
			if err != nil {
				return err
			}
			if err := f.read(ctx, lines); err != nil {
				return err
			}
		}
	}
	return nil
}

// changed reports whether the state of something is another than before.
func (f *follower) changed(what, state string) bool {
	old, known := f.state[what]
	f.state[what] = state
	return !known || old != state
}

// read shows what new lines of the agent's log say.
func (f *follower) read(ctx context.Context, lines []string) error {
	for _, line := range lines {
		var e entry
		if json.Unmarshal([]byte(line), &e) != nil {
			continue
		}
		if err := f.logged(ctx, e); err != nil {
			return err
		}
	}
	if f.created < killAfter || !f.kill || f.killed {
		return nil
	}
	f.killed = true
	pid, err := f.node(mainNode).KillAgent()
	if err != nil {
		return err
	}
	f.out.shock("kill -9 %d: the agent is dead, in the middle of GPU %d", pid, f.gpu)
	return nil
}

func (f *follower) logged(ctx context.Context, e entry) error {
	switch {
	case e.Msg == "starting" && f.killed:
		f.out.line("a new agent looks at the node, and goes on")
	case e.Msg == "step done":
		return f.step(ctx, e.Step)
	case e.Look > 0:
		if err := f.done(ctx); err != nil {
			return err
		}
		f.out.step("look %d of %d: hardware, kubelet and node agree on %s", e.Look, e.Of, f.config)
	case e.Msg == "reporting" && !expected[config.Reason(e.Reason)] && f.changed("reason", e.Reason):
		f.out.line("%s: %s", e.Reason, e.Message)
	}
	return nil
}

// step shows a step that is done: one of a GPU in the GPU's line, one of the node in its own.
func (f *follower) step(ctx context.Context, step string) error {
	var gpu int
	if _, err := fmt.Sscanf(step, "GPU %d:", &gpu); err != nil {
		if err := f.done(ctx); err != nil {
			return err
		}
		f.out.step("%s", step)
		f.released = strings.HasPrefix(step, "release")
		return nil
	}
	if strings.Contains(step, ": create ") {
		f.created++
	}
	if gpu != f.gpu {
		if err := f.done(ctx); err != nil {
			return err
		}
	}
	f.gpu = gpu
	return f.draw(ctx)
}

// done shows the GPU that was worked on, where lines do not change in place.
func (f *follower) done(ctx context.Context) error {
	last := f.gpu
	f.gpu = -1
	if last < 0 || f.out.lasting {
		return nil
	}
	gpus, err := f.node(mainNode).GPUs.Driver().Snapshot(ctx)
	if err != nil {
		return err
	}
	f.out.raw(drawing(gpus[last]))
	return nil
}

// draw shows all GPUs, where lines change in place.
func (f *follower) draw(ctx context.Context) error {
	if !f.out.lasting {
		return nil
	}
	gpus, err := f.node(mainNode).GPUs.Driver().Snapshot(ctx)
	if err != nil {
		return err
	}
	lines := make([]string, len(gpus))
	for i, g := range gpus {
		lines[i] = drawing(g)
	}
	f.out.grow(lines)
	return nil
}

func drawing(g nvml.GPU) string {
	return fmt.Sprintf("  GPU %d  %s", g.Index, picture.GPU(g, g.Geometry()))
}

// budget shows how many pods the budget lets go.
func (f *follower) budget(b *policyv1.PodDisruptionBudget) {
	if b.Status.ExpectedPods == 0 {
		return
	}
	allowed := b.Status.DisruptionsAllowed
	if allowed != max(0, b.Status.CurrentHealthy-b.Status.DesiredHealthy) {
		return // it has let one go that is still counted as healthy
	}
	lets := "none may leave now"
	if allowed > 0 {
		lets = fmt.Sprintf("%d may leave", allowed)
	}
	says := fmt.Sprintf("%d pods are healthy, %d needed: %s", b.Status.CurrentHealthy, b.Status.DesiredHealthy, lets)
	if f.changed("budget", says) {
		f.out.pod("budget %s: %s", b.Name, says)
	}
}

// pod shows what became of a pod.
func (f *follower) pod(event string, pod *corev1.Pod) {
	offers := pod.Spec.NodeName == mainNode && strings.Contains(pod.Name, "-plugin-") // NVIDIA's device plugin, or its DRA driver's
	if pod.Namespace != namespace && !offers {
		return
	}
	state := ""
	switch {
	case event == "DELETED":
		state = "has left"
	case pod.DeletionTimestamp != nil:
		state = "is asked to leave"
	case pod.Status.Phase == corev1.PodRunning:
		state = "runs on " + pod.Spec.NodeName
	}
	_, known := f.state[pod.Name]
	if !f.changed(pod.Name, state) || state == "" || !known && event == "ADDED" && pod.Status.Phase == corev1.PodRunning {
		return
	}
	f.out.pod("pod %s %s", pod.Name, state)
}

// offered lists what offer has counted, also resources that kubelet keeps at 0.
func offered(offer map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(offer)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, offer[name]))
	}
	return strings.Join(parts, ", ")
}

// tail reads what is added to the newest file of a pattern. A container that is restarted goes on in the same file.
type tail struct {
	pattern string
	file    *os.File
	reader  *bufio.Reader
	partial string
}

func (t *tail) lines() ([]string, error) {
	if t.file == nil {
		names, err := filepath.Glob(t.pattern)
		if err != nil || len(names) == 0 {
			return nil, err
		}
		if t.file, err = os.Open(names[0]); err != nil {
			return nil, fmt.Errorf("opening the agent's log: %w", err)
		}
		t.reader = bufio.NewReader(t.file)
	}
	var out []string
	for {
		line, err := t.reader.ReadString('\n')
		t.partial += line
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("reading the agent's log: %w", err)
		}
		out = append(out, t.partial)
		t.partial = ""
	}
}

func (t *tail) close() {
	if t.file != nil {
		_ = t.file.Close() // it was only read
	}
}
