package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml/picture"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/node"
)

// The nodes of the demo. The second one has room for the pods that must leave the first.
const (
	mainNode  = "gpu-1"
	spareNode = "gpu-2"
	namespace = "team-a"
)

// gpus is how many each node has.
var gpus = map[string]int{mainNode: 8, spareNode: 4}

// pollEvery is the pause between two looks at something that the demo waits for.
const pollEvery = 200 * time.Millisecond

// hardware are the GPUs of a node. A real H100 takes some seconds for a mode change; a second is enough to watch.
const hardware = `
delays: {SetMigMode: 1s, CreateGpuInstanceWithPlacement: 100ms}
gpus:
- model: H100-80GB
  count: %d
`

// scene is everything that runs for the demo.
type scene struct {
	options
	out   *screen
	parts node.Parts
	dir   string

	cluster *cluster.Cluster
	client  kubernetes.Interface
	nodes   []*node.Node
}

// setUp brings up the cluster, the nodes, NVIDIA's device plugin, the agent and the pods.
func (s *scene) setUp(ctx context.Context) error {
	s.out.section("Starting a cluster with two simulated GPU nodes")
	began := time.Now()
	var err error
	s.cluster, err = cluster.Start(ctx, cluster.Options{Dir: filepath.Join(s.dir, "cluster"), Binaries: s.parts.Kube})
	if err != nil {
		return err
	}
	if s.client, err = kubernetes.NewForConfig(s.cluster.Config()); err != nil {
		return fmt.Errorf("connecting to the cluster: %w", err)
	}
	s.out.line("etcd, kube-apiserver, kube-controller-manager, kube-scheduler: %.1fs", time.Since(began).Seconds())
	for name, count := range gpus {
		if err := s.join(ctx, name, count); err != nil {
			return err
		}
	}
	apply := []string{"test/node/manifests/device-plugin.yaml", manifests}
	if s.dra {
		apply = []string{"test/node/manifests/dra-driver.yaml", draManifests}
	}
	if err := s.cluster.Apply(ctx, apply...); err != nil {
		return err
	}
	for name, count := range gpus {
		if err := s.until(ctx, fmt.Sprintf("%d GPUs on %s", count, name), func(ctx context.Context) (bool, error) {
			offer, err := s.offer(ctx, name)
			return err == nil && offer["nvidia.com/gpu"]+offer[classGPU] == count, err
		}); err != nil {
			return err
		}
	}
	if err := s.cluster.Apply(ctx, "test/demo/workload.yaml"); err != nil {
		return err
	}
	if err := s.until(ctx, "five running pods and an agent", s.settled); err != nil {
		return err
	}
	s.out.line("NVIDIA's %s, the agent and the pods run: %.1fs", s.offerer(), time.Since(began).Seconds())
	return nil
}

func (s *scene) join(ctx context.Context, name string, count int) error {
	spec, err := gpusim.ParseSpec(fmt.Appendf(nil, hardware, count))
	if err != nil {
		return err
	}
	labels := map[string]string{corev1.LabelHostname: name, "nvidia.com/gpu.present": "true"}
	if s.dra {
		labels[node.DRADriverLabel] = node.DRAStatic
	}
	n, err := node.Start(ctx, s.cluster, node.Options{Name: name, Dir: filepath.Join(s.dir, name), GPUs: spec, Parts: s.parts, Labels: labels})
	if err != nil {
		return err
	}
	s.nodes = append(s.nodes, n)
	return nil
}

// settled reports whether all pods of the team run and the agent has said its first word on both nodes.
func (s *scene) settled(ctx context.Context) (bool, error) {
	pods, err := s.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return false, err
	}
	running := 0
	for _, p := range pods.Items {
		if p.Status.Phase == corev1.PodRunning {
			running++
		}
	}
	nodes, err := s.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return false, err
	}
	return running == 5 && !slices.ContainsFunc(nodes.Items, func(n corev1.Node) bool {
		return ready(n.Status.Conditions) != corev1.ConditionTrue
	}), nil
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
	if err := s.unharmed(before, after); err != nil {
		return err
	}
	s.out.title(fmt.Sprintf("Done in %.1f s: the node is cut as asked, proven, and schedulable; CPU pods never noticed.", took.Seconds()))
	return nil
}

// picture prints what kubelet offers, how the GPUs are cut, and which pods run where.
func (s *scene) picture(ctx context.Context, when string) ([]corev1.Pod, error) {
	s.out.section(when)
	offer, err := s.offer(ctx, mainNode)
	if err != nil {
		return nil, err
	}
	gpus, err := s.nodes[s.index(mainNode)].GPUs.Driver().Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	for _, gpu := range gpus {
		s.out.line("GPU %d  %s", gpu.Index, picture.GPU(gpu, gpu.Geometry()))
	}
	s.out.line("%s: %s", s.where(), offered(offer))
	pods, err := s.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, p := range pods.Items {
		s.out.line("pod %-28s %s", p.Name, p.Spec.NodeName)
	}
	return pods.Items, nil
}

func (s *scene) index(name string) int {
	return slices.IndexFunc(s.nodes, func(n *node.Node) bool { return n.Name == name })
}

// unharmed checks what the last line claims.
func (s *scene) unharmed(before, after []corev1.Pod) error {
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

// stay keeps everything up until ctx ends.
func (s *scene) stay(ctx context.Context) {
	s.out.section("Still up: Ctrl-C ends it")
	s.out.line("export KUBECONFIG=%s", s.cluster.AdminKubeconfig())
	s.out.line("alias kubectl=%s", s.cluster.Kubectl())
	s.out.line("export GPUSIM_NODE=%s", s.nodes[s.index(mainNode)].GPUs.Dir())
	<-ctx.Done()
}

// end stops everything that was started.
func (s *scene) end() error {
	for _, n := range s.nodes {
		n.Kubelet.Stop()
	}
	if s.cluster == nil {
		return nil
	}
	return s.cluster.Stop()
}

// until waits for something, and says what for when it does not come.
func (s *scene) until(ctx context.Context, what string, done wait.ConditionWithContextFunc) error {
	if err := wait.PollUntilContextCancel(ctx, pollEvery, true, done); err != nil {
		return fmt.Errorf("waiting for %s: %w", what, err)
	}
	return nil
}

func ready(conditions []corev1.NodeCondition) corev1.ConditionStatus {
	for _, c := range conditions {
		if c.Type == config.ConditionGPUPartitionReady {
			return c.Status
		}
	}
	return corev1.ConditionUnknown
}

// offer counts the devices that pods can get on the node, by resource. They are those that the device plugin advertises to kubelet,
// or those in the DRA driver's slices, as its DeviceClasses name them.
func (s *scene) offer(ctx context.Context, name string) (map[string]int, error) {
	out := map[string]int{}
	if !s.dra {
		object, err := s.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		for resource, q := range object.Status.Allocatable {
			if strings.HasPrefix(string(resource), "nvidia.com/") {
				out[string(resource)] = int(q.Value())
			}
		}
		return out, nil
	}
	list, err := s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + name})
	if err != nil {
		return nil, err
	}
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			if profile := d.Attributes["profile"].StringValue; profile != nil {
				out["mig.nvidia.com "+*profile]++
			} else {
				out[classGPU]++
			}
		}
	}
	return out, nil
}

// classGPU is the DeviceClass of whole GPUs.
const classGPU = "gpu.nvidia.com"

// where is what offer reads.
func (s *scene) where() string {
	if s.dra {
		return "devices in the ResourceSlice of " + mainNode
	}
	return "allocatable of " + mainNode
}

// offered lists what offer has counted, also resources that kubelet keeps at 0.
func offered(offer map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(offer)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, offer[name]))
	}
	return strings.Join(parts, ", ")
}
