package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/test/node"
	"github.com/gpuslice/gpuslice/test/program"
	"github.com/gpuslice/gpuslice/test/sandbox"
)

// options are the flags of the demo.
type options struct {
	from   string
	config string
	dra    bool
	kill   bool
}

// demo shows the main job from nothing. A node is labelled, drained, cut into MIG instances, verified and released. Its agent is killed in the middle of it.
func demo() *cobra.Command {
	var o options
	c := program.New("demo", "Show a simulated node of eight H100s being cut and given back", nil)
	c.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if o.from, err = cmd.Flags().GetString(bundleFlag); err != nil {
			return err
		}
		return o.show(cmd.Context(), newScreen(os.Stdout))
	}
	c.Flags().StringVar(&o.config, "config", "all-balanced", "MIG config to ask for")
	c.Flags().BoolVar(&o.dra, "dra", false, "with NVIDIA's DRA driver in place of its device plugin")
	c.Flags().BoolVar(&o.kill, "kill", true, "kill the agent in the middle")
	return c
}

func (o options) show(ctx context.Context, out *screen) error {
	if err := sandbox.Possible(); err != nil {
		return err
	}
	out.title("gpuslice: eight simulated H100s, a real control plane, NVIDIA's own " + o.offerer())
	// An error in the config shows here, not after minutes of building.
	if err := o.foresee(ctx, out); err != nil {
		return err
	}
	if o.from == "" {
		out.section("Building what is missing")
	}
	nodes := node.Build
	if o.dra {
		nodes = node.BuildByClaims
	}
	p, err := load(ctx, out, o.from, nodes)
	if err != nil {
		return err
	}
	return inDir(out, func(dir string) error {
		return (&scene{world: world{programs: p, dir: dir}, options: o, out: out}).play(ctx)
	})
}

// offerer is what offers the GPUs to pods.
func (o options) offerer() string {
	if o.dra {
		return "DRA driver"
	}
	return "device plugin"
}

// machines are the nodes of the demo. The second one has room for the pods that must leave the first.
func (o options) machines() []machine {
	nodes := []machine{{name: mainNode, gpus: "{model: H100-80GB, count: 8}"}, {name: spareNode, gpus: "{model: H100-80GB, count: 4}"}}
	if o.dra {
		for i := range nodes {
			nodes[i].labels = byClaims()
		}
	}
	return nodes
}

// scene is everything that runs for the demo.
type scene struct {
	world
	options
	out *screen
}

// play goes through the scene, and ends all that it has started.
func (s *scene) play(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	defer func() { err = errors.Join(err, s.end()) }()
	if err := s.setUp(ctx); err != nil {
		return err
	}
	return s.change(ctx)
}

// setUp brings up the cluster, the nodes, NVIDIA's device plugin, the agent and the pods.
func (s *scene) setUp(ctx context.Context) error {
	s.out.section("Starting a cluster with two simulated GPU nodes")
	began := time.Now()
	if err := s.start(ctx, s.machines()); err != nil {
		return err
	}
	s.out.line("etcd, kube-apiserver, kube-controller-manager, kube-scheduler: %.1fs", time.Since(began).Seconds())
	if err := s.writeTries(began); err != nil {
		return err
	}
	apply := []string{filepath.Join(s.root, "deploy/overlays/device-plugin")}
	if s.dra {
		apply = []string{filepath.Join(s.root, draDriver), filepath.Join(s.root, "deploy/overlays/dra")}
	}
	if err := s.cluster.Apply(ctx, append(apply, s.tries("pods.yaml"))...); err != nil {
		return err
	}
	const running = 5 // of pods.yaml
	if err := s.settled(ctx, s.machines(), running); err != nil {
		return err
	}
	s.out.line("NVIDIA's %s, the agent and five pods run: %.1fs", s.offerer(), time.Since(began).Seconds())
	return nil
}

// change labels the node and shows what happens until the agent releases it.
func (s *scene) change(ctx context.Context) error {
	before, err := s.picture(ctx, "Before")
	if err != nil {
		return err
	}
	s.out.section(fmt.Sprintf("kubectl label node %s nvidia.com/mig.config=%s", mainNode, s.config))
	s.out.startClock()
	if _, err := s.cluster.RunKubectl(ctx, "label", "node", mainNode, "nvidia.com/mig.config="+s.config); err != nil {
		return err
	}
	if err := s.follow(ctx); err != nil {
		return err
	}
	took := s.out.stopClock()
	after, err := s.picture(ctx, "After")
	if err != nil {
		return err
	}
	if err := unharmed(before, after); err != nil {
		return err
	}
	s.out.title(fmt.Sprintf("Done in %.1f s: %s is cut as asked, verified, and schedulable; the CPU pods ran on.", took.Seconds(), mainNode))
	s.out.line("Next: make playground: a shell on such a cluster, and ten things to try")
	s.out.line("      a cluster of yours: README.md, Install")
	return nil
}

// picture prints what pods can get on the node, and which pods run where.
func (s *scene) picture(ctx context.Context, when string) ([]corev1.Pod, error) {
	s.out.section(when)
	nodes := s.machines()
	offer, err := s.offer(ctx, nodes[0])
	if err != nil {
		return nil, err
	}
	s.out.line("%s: %s", s.where(), offered(offer))
	pods, err := s.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, m := range nodes {
		var names []string
		for _, p := range pods.Items {
			if p.Spec.NodeName == m.name {
				names = append(names, p.Name)
			}
		}
		s.out.line("pods on %s: %s", m.name, strings.Join(append(names, []string{"none"}[min(len(names), 1):]...), ", "))
	}
	return pods.Items, nil
}

// unharmed checks what the last line claims.
func unharmed(before, after []corev1.Pod) error {
	var errs []error
	for _, b := range before {
		stayed := slices.ContainsFunc(after, func(a corev1.Pod) bool { return a.UID == b.UID })
		if strings.HasPrefix(b.Name, "web-") && !stayed {
			errs = append(errs, fmt.Errorf("CPU pod %s had to leave", b.Name))
		}
	}
	if len(after) != len(before) {
		errs = append(errs, fmt.Errorf("%d pods before, %d after", len(before), len(after)))
	}
	return errors.Join(errs...)
}

// where is what offer reads.
func (s *scene) where() string {
	if s.dra {
		return "devices in the ResourceSlice of " + mainNode
	}
	return "allocatable of " + mainNode
}
