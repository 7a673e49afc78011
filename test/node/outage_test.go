package node_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/systemd"
)

// behindProxy has the agent reach the API server by way of a proxy.
func (r *rig) behindProxy() *cluster.Proxy {
	r.t.Helper()
	p, err := r.cluster.Proxy(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(p.Close)
	if err := cluster.WriteKubeconfig(r.agents.kubeconfig, p.Config(r.account)); err != nil {
		r.t.Fatal(err)
	}
	return p
}

// awaitStep waits until the agent says that a step is done whose text begins like this.
func (r *rig) awaitStep(prefix string) {
	r.t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case step, runs := <-r.agents.running.steps:
			if !runs {
				r.t.Fatalf("the agent ended by itself before %q", prefix)
			}
			if strings.HasPrefix(step, prefix) {
				return
			}
		case <-timeout:
			n, _ := r.client.CoreV1().Nodes().Get(r.t.Context(), r.Name, metav1.GetOptions{})
			r.t.Fatalf("no step %q in %s; the node says:\n%s", prefix, patience, words(n))
		}
	}
}

// The API server is away for two minutes in each phase of a change with everything in it. The agent waits, does then what is
// left to do, and nothing twice.
func TestTheAPIServerIsAwayForTwoMinutesInAPhaseOfAChange(t *testing.T) {
	t.Parallel()
	outage := 2 * time.Minute // connections are given up within it, and so are watches
	if testing.Short() {
		outage = 45 * time.Second
	}
	for _, row := range []struct {
		phase  string // which would have come next
		away   cluster.Cut
		before func(*rig) // waits for that moment
	}{
		{"fence", cluster.Refused, func(r *rig) { r.awaitReason(config.ReasonEvictionBlocked) }},
		{"evict", cluster.Silent, func(r *rig) { r.awaitStep("fence") }},
		{"pause operands", cluster.Deaf, func(r *rig) { r.awaitStep("evict") }},
		{"stop services", cluster.Refused, func(r *rig) { r.awaitStep("pause " + deploysPlugin) }},
		{"change the mode", cluster.Deaf, func(r *rig) { r.awaitStep("stop unit nvidia-persistenced.service") }},
		{"create instances", cluster.Silent, func(r *rig) { r.awaitStep("GPU 0: create") }},
		{"resume operands", cluster.Refused, func(r *rig) { r.awaitStep("start unit nvsm.service") }},
		{"verify", cluster.Silent, func(r *rig) { r.awaitStep("resume " + deploysExporter) }},
		{"release", cluster.Deaf, func(r *rig) {
			// On a busy machine the capacity has been proven by the time of the last step, and no word comes between that and the release.
			r.await("the first proof", func(n *corev1.Node) bool {
				c := condition(n)
				return c != nil && (strings.Contains(c.Message, "verifying it once more") || c.Reason == string(config.ReasonConverged))
			})
		}},
	} {
		t.Run(fmt.Sprintf("%s, %s", row.phase, row.away), func(t *testing.T) {
			t.Parallel()
			if row.phase != "evict" {
				if testing.Short() {
					t.Skip("one phase")
				}
			}
			r := newRig(t, oneA100, "", operator)
			host, proxy, namespace := r.onMachine(), r.behindProxy(), clustertest.Namespace(t)
			r.awaitOffered("nvidia.com/gpu", 1)
			r.awaitOperands()
			r.pod(namespace, "gpu", map[string]string{"nvidia.com/gpu": "1"})
			r.pod(namespace, "cpu", nil)
			r.awaitRunning(namespace, "gpu")
			r.awaitRunning(namespace, "cpu")
			r.budget(namespace, "gpu", 1)
			pods, started := r.count(), r.run()
			r.label(config.LabelMIGConfig, "all-balanced")
			r.awaitReason(config.ReasonEvictionBlocked)
			if row.phase != "fence" {
				r.relax(namespace, "gpu")
			}
			row.before(r)
			if err := proxy.Cut(t.Context(), row.away); err != nil {
				t.Fatal(err)
			}
			if row.phase == "fence" {
				r.relax(namespace, "gpu")
			}
			idle(t, outage)
			if err := proxy.Cut(t.Context(), cluster.Mended); err != nil {
				t.Fatal(err)
			}
			mended := time.Now()
			n := r.awaitConverged("all-balanced")
			t.Logf("done %s after the API server came back", time.Since(mended).Round(100*time.Millisecond))
			r.givenBack(n)
			r.operandsBack(n)
			host.asBefore()
			if got, want := r.snapshot()[0].Geometry().String(), "1g.10gb@0 1g.10gb@1 2g.20gb@2 3g.40gb@4"; got != want {
				t.Errorf("the GPU is cut as %s, want %s", got, want)
			}
			r.onceEach(host)
			r.awaitOperands()
			pods.check(map[string]int{
				"gpu": 1, "cpu": 1, // and what a label has sent away, and let back
				"nvidia-device-plugin-daemonset": 2, "nvidia-dcgm": 2, "nvidia-dcgm-exporter": 2, "gpu-feature-discovery": 2,
			})
			if err := started.cmd.Process.Signal(syscall.Signal(0)); err != nil {
				t.Errorf("the agent has ended: %v", err)
			}
		})
	}
}

// onceEach fails the test if something of a change of one GPU was done twice, or not at all.
func (r *rig) onceEach(host *machine) {
	r.t.Helper()
	calls := r.GPUs.Calls()
	for call, want := range map[string]int{
		gpusim.SetMigMode:                     2, // which asks for the mode, and then for the reset that makes it current
		gpusim.CreateGpuInstanceWithPlacement: 4, gpusim.GpuInstanceDestroy: 0, gpusim.ComputeInstanceDestroy: 0,
	} {
		if calls[call] != want {
			r.t.Errorf("%d calls of %s, want %d", calls[call], call, want)
		}
	}
	for _, method := range []string{systemd.StopUnit, systemd.StartUnit} {
		units := host.jobs(method)
		slices.Sort(units)
		if diff := cmp.Diff([]string{"nvidia-dcgm.service", "nvidia-persistenced.service", "nvsm.service"}, units); diff != "" {
			r.t.Errorf("%s (-want +got):\n%s", method, diff)
		}
	}
}

// census counts the pods that there have been on a node.
type census struct {
	rig  *rig
	mu   sync.Mutex
	seen map[string]map[types.UID]bool // by the label app
}

// count begins one, which goes on until the test ends.
func (r *rig) count() *census {
	r.t.Helper()
	c := &census{rig: r, seen: map[string]map[types.UID]bool{}}
	ctx := r.t.Context()
	open := func(ctx context.Context) (watch.Interface, error) {
		return r.client.CoreV1().Pods(metav1.NamespaceAll).Watch(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + r.Name})
	}
	go func() {
		err := clustertest.Follow(ctx, open, nil, func(_ watch.EventType, pod *corev1.Pod) bool { c.see(pod); return false })
		if err != nil && ctx.Err() == nil {
			r.t.Errorf("watching the pods of node %s: %v", r.Name, err)
		}
	}()
	return c
}

func (c *census) see(pod *corev1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	app := pod.Labels["app"]
	if c.seen[app] == nil {
		c.seen[app] = map[types.UID]bool{}
	}
	c.seen[app][pod.UID] = true
}

// check fails the test if there were other numbers of pods, or if one of those that are there has been restarted.
func (c *census) check(want map[string]int) {
	c.rig.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	got := map[string]int{}
	for app, pods := range c.seen {
		got[app] = len(pods)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		c.rig.t.Errorf("pods that there have been (-want +got):\n%s", diff)
	}
	for _, pod := range c.rig.pods() {
		for _, container := range pod.Status.ContainerStatuses {
			if container.RestartCount != 0 {
				c.rig.t.Errorf("pod %s/%s was restarted %d times", pod.Namespace, pod.Name, container.RestartCount)
			}
		}
	}
}
