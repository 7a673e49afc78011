package node_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

var (
	kills = flag.Int("kills", 60, "how many agents TestKilledAtAnyInstantItEndsTheSame kills")
	seed  = flag.Uint64("seed", 0, "of its random instants; 0 is another one each time")
)

// stage is a node on which everything takes part in a change: a pod that holds what goes, pods that must not notice, the
// GPU Operator's operands, services of the host, and a reset or a reboot, since its GPUs are A100s.
type stage struct {
	*rig
	host      *machine
	namespace string
	unmoved   []*corev1.Pod // as they were when they came to run
	took      time.Duration // a change in which no one dies
	said      string        // the step that an agent has said last
	deaths    []string      // what was said before each death
	killed    int           // how many of them by us, and not by a reboot
	versions  []string      // programs of agents, one after the other; only the node's own if empty
}

// The configs of a stage change GPU 0 alone, and users are the deployments that want it one way or the other.
const stageConfigs = `version: v1
mig-configs:
  whole: [{devices: [0], mig-enabled: false}]
  cut: [{devices: [0], mig-enabled: true, mig-devices: {1g.10gb: 2, 2g.20gb: 1, 3g.40gb: 1}}]
`

// Calls take their time, so that an instant may well be within one of them. That of real ones is a few times longer.
const stageDelays = `delays: {SetMigMode: 500ms, Reset: 500ms, CreateGpuInstanceWithPlacement: 200ms, CreateComputeInstance: 100ms, ` +
	`GpuInstanceDestroy: 200ms, ComputeInstanceDestroy: 100ms}`

var users = map[string]string{"whole": "nvidia.com/gpu", "cut": "nvidia.com/mig-3g.40gb"}

// newStage starts one with its agent running, GPU 0 cut, and a user on it. Where it reboots, the GPUs cannot be reset, and
// all pods have to move now and then.
func newStage(t *testing.T, reboots bool) *stage {
	t.Helper()
	configMap := fmt.Sprintf("stage-%d", rand.Uint32())
	spec, settings := "gpus: [{model: A100-80GB, count: 2}]\n", "migConfigMap: {name: "+configMap+"}\n"
	if reboots {
		spec, settings = "gpus: [{model: A100-80GB, count: 2, passthrough: true}]\n", settings+"reboot: {policy: self}\n"
	}
	spec += stageDelays
	s := &stage{rig: newRig(t, spec, settings, operator)}
	s.host = s.onMachine()
	s.configMap(configMap, stageConfigs)
	s.namespace = clustertest.Namespace(t)
	s.awaitOffered("nvidia.com/gpu", 2)
	s.awaitOperands()
	s.run()
	s.change("cut", fate{})
	if !reboots { // the only whole GPU is the one that no config names
		for name, limits := range map[string]map[string]string{"gpu-1": {"nvidia.com/gpu": "1"}, "cpu": nil} {
			s.pod(s.namespace, name, limits)
			s.unmoved = append(s.unmoved, s.awaitPod(s.namespace, metav1.ListOptions{FieldSelector: "metadata.name=" + name}, running))
		}
	}
	for name, resource := range users {
		s.deployment(s.namespace, name, map[string]string{resource: "1"})
	}
	s.awaitUser("cut")
	return s
}

// awaitUser waits until the user of the config runs.
func (s *stage) awaitUser(requested string) {
	s.t.Helper()
	s.awaitPod(s.namespace, metav1.ListOptions{LabelSelector: "app=" + requested}, running)
}

// fate is when agents die in a change. In the zero value none does.
type fate struct {
	after  func() (time.Duration, bool) // asked whenever an agent starts: how long it has to live, if it is to die before the end
	border bool                         // each dies as soon as it has said that a step is done
}

// next is the end of an agent that starts now.
func (f fate) next() <-chan time.Time {
	if f.after == nil {
		return nil
	}
	if life, dies := f.after(); dies {
		return time.After(life)
	}
	return nil
}

// change asks for a config, lets agents die on the way as fate has it, and checks the node in the end.
func (s *stage) change(name string, f fate) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 2*patience)
	defer cancel()
	began, dies, down := time.Now(), f.next(), s.host.down(ctx)
	s.label(config.LabelMIGConfig, name)
	arrived := make(chan *corev1.Node, 1)
	go func() {
		n, ok := s.seek(ctx, converged(name))
		if !ok {
			s.t.Errorf("waiting for config %s: %v; the node says:\n%s", name, context.Cause(ctx), words(n))
		}
		arrived <- n
	}()
	for {
		select {
		case n := <-arrived:
			s.took = time.Since(began)
			s.check(name, n)
			return
		case step, runs := <-s.agents.running.steps:
			if !runs {
				s.t.Fatalf("the agent ended by itself after %q", s.said)
			}
			if s.said = step; f.border {
				s.die()
				dies = f.next()
			}
		case <-dies:
			s.die()
			dies = f.next()
		case <-down:
			s.kill()
			s.said = "reboot"
			s.deaths = append(s.deaths, s.said)
			s.host.boot()
			s.run()
			dies, down = f.next(), s.host.down(ctx)
		}
	}
}

// die kills the agent, and starts the next one.
func (s *stage) die() {
	s.t.Helper()
	unread := s.kill()
	if len(unread) > 0 {
		s.said = unread[len(unread)-1]
	}
	s.deaths = append(s.deaths, s.said)
	s.killed++
	if len(s.versions) > 0 {
		s.Parts.Agent = s.versions[s.killed%len(s.versions)]
	}
	s.run()
}

// check holds the node, when a change is over, against how it was before the first.
func (s *stage) check(name string, n *corev1.Node) {
	s.t.Helper()
	s.givenBack(n)
	s.operandsBack(n)
	s.host.asBefore()
	want := map[string]string{"whole": "-", "cut": "1g.10gb@0 1g.10gb@1 2g.20gb@2 3g.40gb@4"}[name]
	gpus := s.snapshot()
	if got := gpus[0].Geometry().String(); got != want || gpus[0].Enabled != (want != "-") {
		s.t.Errorf("%s: GPU 0 has MIG %t and is cut as %q", name, gpus[0].Enabled, got)
	}
	if gpus[1].Enabled || gpus[1].Pending {
		s.t.Errorf("%s: MIG mode of GPU 1, which nothing is asked of, is %t and will be %t", name, gpus[1].Enabled, gpus[1].Pending)
	}
	now := map[string]corev1.Pod{}
	for _, pod := range s.pods() {
		now[pod.Namespace+"/"+pod.Name] = pod
	}
	for _, was := range s.unmoved {
		is := now[was.Namespace+"/"+was.Name]
		if is.UID != was.UID || is.DeletionTimestamp != nil || is.Status.ContainerStatuses[0].RestartCount != 0 {
			s.t.Errorf("%s: pod %s was disturbed: it was %s, and is %s, restarted %+v", name, was.Name, was.UID, is.UID, is.Status.ContainerStatuses)
		}
	}
}

// Promise 8, at each border between two steps of a change: one agent does each step.
func TestKilledAtEachBorderOfAFullChangeItEndsTheSame(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		reboots bool
		kinds   []string // steps that there must be
	}{
		"with a reset":  {false, []string{"fence", "evict", "pause", "stop unit", "turn MIG", "reset", "create", "start unit", "resume", "release"}},
		"with a reboot": {true, []string{"fence", "evict", "pause", "turn MIG", "reboot", "create", "resume", "release"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if row.reboots && testing.Short() {
				t.Skip("some twenty agents, each of which waits for a boot; TestTheAgentRebootsAVirtualMachineThroughLogind reboots a node")
			}
			s := newStage(t, row.reboots)
			for _, requested := range []string{"whole", "cut"} {
				s.deaths = nil
				// In a short run the agents die on the way to the cut GPU alone, which takes steps of all kinds.
				s.change(requested, fate{border: !testing.Short() || requested == "cut"})
				t.Logf("%s after %d deaths: %s", requested, len(s.deaths), strings.Join(s.deaths, "; "))
				s.awaitUser(requested)
			}
			for _, kind := range row.kinds {
				if !slices.ContainsFunc(s.deaths, func(step string) bool { return strings.Contains(step, kind) }) {
					t.Errorf("no agent died after a step of the kind %q", kind)
				}
			}
		})
	}
}

// Promise 8, at any instant. An agent lives for a random part of the time that a whole change takes. Then the next one
// starts, and it too may die before the change is over.
func TestKilledAtAnyInstantItEndsTheSame(t *testing.T) {
	if testing.Short() {
		t.Skip("agents die for two minutes on eight nodes; TestKilledAtEachBorderOfAFullChangeItEndsTheSame kills one after each step")
	}
	t.Parallel()
	seed := *seed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("to draw the same instants: -seed %d", seed)
	const nodes, reboots = 8, 3 // every third node reboots: a fifth of the deaths takes them as long as the rest takes the others
	var budget [2]atomic.Int64
	budget[1].Store(int64(*kills / 5))
	budget[0].Store(int64(*kills) - budget[1].Load())
	for i := range nodes {
		t.Run(fmt.Sprintf("node %d", i), func(t *testing.T) {
			t.Parallel()
			left := &budget[0]
			if i%reboots == 0 {
				left = &budget[1]
			}
			s := newStage(t, i%reboots == 0)
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			s.change("whole", fate{})
			took := s.took
			for at := 0; left.Load() > 0 && !t.Failed(); at++ {
				before := []string{"whole", "cut"}[at%2]
				s.awaitUser(before)
				died := s.killed
				s.change([]string{"cut", "whole"}[at%2], fate{after: func() (time.Duration, bool) {
					return time.Duration(random.Int64N(int64(took))), left.Load() > int64(s.killed-died)
				}})
				left.Add(int64(died - s.killed))
			}
			t.Logf("a change takes %s; %d were killed: %s", took.Round(time.Millisecond), s.killed, strings.Join(s.deaths, "; "))
		})
	}
}

// deployment has one pod, which belongs on this node.
func (r *rig) deployment(namespace, name string, limits map[string]string) {
	r.t.Helper()
	r.deploymentOf(namespace, name, 1, corev1.PodTemplateSpec{Spec: r.podSpec(limits)})
}

// deploymentOf has so many pods.
func (r *rig) deploymentOf(namespace, name string, count int32, pod corev1.PodTemplateSpec) {
	r.t.Helper()
	labels := map[string]string{"app": name}
	pod.Labels = labels
	_, err := r.client.AppsV1().Deployments(namespace).Create(r.t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &count, Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: pod,
		},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
}
