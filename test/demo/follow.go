package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	log := &tail{pattern: filepath.Join(s.nodes[s.index(mainNode)].Dir, "kubelet", "logs", "gpuslice_gpuslice-agent-*.log")}
	defer log.close()
	if _, err := log.lines(); err != nil { // what it said before the label
		return err
	}
	f := &follower{scene: s, gpu: -1, state: map[string]string{}}
	tick := time.NewTicker(logEvery)
	defer tick.Stop()
	for !f.released {
		select {
		case <-ctx.Done():
			return fmt.Errorf("the node was not given back: %w", ctx.Err())
		case event := <-pods.ResultChan():
			if pod, ok := event.Object.(*corev1.Pod); ok {
				f.pod(string(event.Type), pod)
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
	return s.until(ctx, "the node to be ready", func(ctx context.Context) (bool, error) {
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
	state    map[string]string // of pods
}

// read shows the steps in new lines of the agent's log.
func (f *follower) read(ctx context.Context, lines []string) error {
	for _, line := range lines {
		var e entry
		if json.Unmarshal([]byte(line), &e) != nil {
			continue
		}
		switch {
		case e.Msg == "starting" && f.killed:
			f.out.line("a new agent looks at the node and goes on")
		case e.Message != "" && e.Msg != "step done":
			f.out.word("%s: %s", e.Reason, e.Message)
		case e.Msg == "step done":
			if err := f.draw(ctx, e.Step); err != nil {
				return err
			}
			f.out.step(e.Step)
			f.released = f.released || strings.HasPrefix(e.Step, "release")
			if strings.Contains(e.Step, ": create ") {
				f.created++
			}
		}
	}
	if f.created >= killAfter && f.kill && !f.killed {
		f.killed = true
		pid, err := f.nodes[f.index(mainNode)].KillAgent()
		if err != nil {
			return err
		}
		f.out.shock("kill -9 %d: the agent is dead, in the middle of GPU %d", pid, f.gpu)
	}
	return nil
}

// draw shows the GPU that was worked on when the next step is about something else.
func (f *follower) draw(ctx context.Context, step string) error {
	next := -1
	if _, err := fmt.Sscanf(step, "GPU %d:", &next); err != nil {
		next = -1 // a step of the whole node
	}
	if next == f.gpu {
		return nil
	}
	last := f.gpu
	f.gpu = next
	if last < 0 {
		return nil
	}
	gpus, err := f.nodes[f.index(mainNode)].GPUs.Driver().Snapshot(ctx)
	if err != nil {
		return err
	}
	f.out.line("GPU %d  %s", last, picture.GPU(gpus[last], gpus[last].Geometry()))
	return nil
}

// pod shows what became of a pod.
func (f *follower) pod(event string, pod *corev1.Pod) {
	offers := (pod.Namespace == "kube-system" || pod.Namespace == "dra-driver-nvidia-gpu") && pod.Spec.NodeName == mainNode
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
	old, known := f.state[pod.Name]
	f.state[pod.Name] = state
	if state == "" || state == old || !known && event == "ADDED" && pod.Status.Phase == corev1.PodRunning {
		return
	}
	f.out.pod("pod %s %s", pod.Name, state)
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
