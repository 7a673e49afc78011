package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/gpusim"
	"github.com/gpuslice/gpuslice/test/node"
)

// pollEvery is the pause between two looks at something that is waited for.
const pollEvery = 200 * time.Millisecond

// machine is a node with simulated GPUs.
type machine struct {
	name   string
	gpus   string // of test/gpusim's spec
	labels map[string]string
}

// The names of nodes that the demo shows.
const (
	mainNode  = "h100-1"
	spareNode = "h100-2"
	claimNode = "dra-1"
)

// hardware is the spec of a node. A real GPU takes some seconds for a change of its mode; a second is enough to watch.
const hardware = `
delays: {SetMigMode: 1s, CreateGpuInstanceWithPlacement: 100ms}
gpus: [%s]
`

// byClaims are the labels of a node of NVIDIA's DRA driver: the driver comes there, and neither NVIDIA's device plugin nor its GPU feature discovery.
func byClaims() map[string]string {
	return map[string]string{
		node.DRADriverLabel: node.DRAStatic, "nvidia.com/gpu.deploy.device-plugin": "false", "nvidia.com/gpu.deploy.gpu-feature-discovery": "false",
	}
}

// machines are the nodes of the playground.
func machines() []machine {
	return []machine{
		{name: mainNode, gpus: "{model: H100-80GB, count: 8}"},
		{name: spareNode, gpus: "{model: H100-80GB, count: 8}", labels: map[string]string{"pool": "night"}},
		{name: "a100-1", gpus: "{model: A100-40GB, count: 4}, {model: A100-80GB, count: 4}"},
		{name: "l4-1", gpus: "{model: L4, count: 4}"},
		{name: claimNode, gpus: "{model: H100-80GB, count: 6}", labels: byClaims()}, // more than there are pods: here they have room whatever the menu cuts
	}
}

func (m machine) spec() (gpusim.Spec, error) {
	return gpusim.ParseSpec(fmt.Appendf(nil, hardware, m.gpus))
}

func (m machine) dra() bool { return m.labels[node.DRADriverLabel] != "" }

// world is a control plane with nodes.
type world struct {
	programs
	dir     string
	cluster *cluster.Cluster
	client  kubernetes.Interface
	nodes   []*node.Node
}

// start brings up the control plane and the nodes.
func (w *world) start(ctx context.Context, machines []machine) error {
	var err error
	w.cluster, err = cluster.Start(ctx, cluster.Options{Dir: filepath.Join(w.dir, "cluster"), Binaries: w.parts.Kube})
	if err != nil {
		return err
	}
	if w.client, err = kubernetes.NewForConfig(w.cluster.Config()); err != nil {
		return fmt.Errorf("connecting to the cluster: %w", err)
	}
	for _, m := range machines {
		if err := w.join(ctx, m); err != nil {
			return err
		}
	}
	return nil
}

func (w *world) join(ctx context.Context, m machine) error {
	spec, err := m.spec()
	if err != nil {
		return err
	}
	labels := map[string]string{corev1.LabelHostname: m.name, "nvidia.com/gpu.present": "true"}
	for key, value := range m.labels {
		labels[key] = value
	}
	parts := w.parts
	if !m.dra() {
		parts.DRADriver = ""
	}
	n, err := node.Start(ctx, w.cluster, node.Options{Name: m.name, Dir: filepath.Join(w.dir, m.name), GPUs: spec, Parts: parts, Labels: labels})
	if err != nil {
		return err
	}
	w.nodes = append(w.nodes, n)
	return nil
}

// node is the one of the name.
func (w *world) node(name string) *node.Node {
	return w.nodes[slices.IndexFunc(w.nodes, func(n *node.Node) bool { return n.Name == name })]
}

// settled waits until the agents have said their first word, all nodes offer their GPUs, and so many pods of the teams run.
func (w *world) settled(ctx context.Context, machines []machine, pods int) error {
	for _, m := range machines {
		spec, err := m.spec()
		if err != nil {
			return err
		}
		want := 0
		for _, g := range spec.GPUs {
			want += max(1, g.Count)
		}
		if err := until(ctx, fmt.Sprintf("%d GPUs on %s", want, m.name), func(ctx context.Context) (bool, error) {
			offer, err := w.offer(ctx, m)
			return err == nil && offer["nvidia.com/gpu"]+offer[classGPU] >= want, err
		}); err != nil {
			return err
		}
	}
	return until(ctx, "the agents and the pods", func(ctx context.Context) (bool, error) {
		list, err := w.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		running := 0
		for _, p := range list.Items {
			if p.Status.Phase == corev1.PodRunning {
				running++
			}
		}
		nodes, err := w.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		return running == pods && !slices.ContainsFunc(nodes.Items, func(n corev1.Node) bool { return ready(n.Status.Conditions) != corev1.ConditionTrue }), nil
	})
}

// namespace has the pods of a team.
const namespace = "team-a"

// end stops everything that was started.
func (w *world) end() error {
	for _, n := range w.nodes {
		n.Kubelet.Stop()
	}
	if w.cluster == nil {
		return nil
	}
	return w.cluster.Stop()
}

// until waits for something, and says what for when it does not come.
func until(ctx context.Context, what string, done wait.ConditionWithContextFunc) error {
	if err := wait.PollUntilContextCancel(ctx, pollEvery, true, done); err != nil {
		return fmt.Errorf("waiting for %s: %w", what, errors.Join(context.Cause(ctx), err))
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

// classGPU is the DeviceClass of whole GPUs.
const classGPU = "gpu.nvidia.com"

// offer counts the devices that pods can get on the node, by resource. They are those that the device plugin advertises to kubelet,
// or those in the DRA driver's slices, as its DeviceClasses name them.
func (w *world) offer(ctx context.Context, m machine) (map[string]int, error) {
	out := map[string]int{}
	if !m.dra() {
		object, err := w.client.CoreV1().Nodes().Get(ctx, m.name, metav1.GetOptions{})
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
	list, err := w.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + m.name})
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
