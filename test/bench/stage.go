package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/node"
)

// Namespaces of the cluster.
const (
	operatorNamespace = "gpu-operator" // the device plugin and the MIG manager
	agentNamespace    = "gpuslice"
	usersNamespace    = "users" // pods that hold instances
)

// Labels of nodes and pods.
const (
	labelConfig = "nvidia.com/mig.config"
	labelState  = "nvidia.com/mig.config.state"
	labelPlugin = "nvidia.com/gpu.deploy.device-plugin" // of the node: the device plugin's DaemonSet selects by it
	labelApp    = "app"
	pluginApp   = "nvidia-device-plugin-daemonset"
)

// stage is the cluster that all runs share. Each run has its own node in it.
type stage struct {
	cluster *cluster.Cluster
	client  kubernetes.Interface
	parts   node.Parts
}

// setUp starts the control plane and deploys what both sides need.
func setUp(ctx context.Context, dir string, parts node.Parts) (*stage, error) {
	c, err := cluster.Start(ctx, cluster.Options{Dir: filepath.Join(dir, "cluster"), Binaries: parts.Kube})
	if err != nil {
		return nil, err
	}
	st := &stage{cluster: c, parts: parts}
	if st.client, err = kubernetes.NewForConfig(c.Config()); err != nil {
		return nil, errors.Join(fmt.Errorf("connecting to the cluster: %w", err), c.Stop())
	}
	if err := st.deploy(ctx); err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	return st, nil
}

func (st *stage) deploy(ctx context.Context) error {
	if err := st.cluster.Apply(ctx,
		"test/bench/manifests/incumbent.yaml", "test/node/manifests/config-manager.yaml",
		"deploy/base/namespace.yaml", "deploy/base/serviceaccount.yaml", "deploy/base/rbac.yaml",
		"deploy/overlays/device-plugin/device-plugin.yaml", "deploy/overlays/device-plugin/gpu-feature-discovery.yaml",
	); err != nil {
		return err
	}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: usersNamespace}}
	if _, err := st.client.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("making namespace %s: %w", usersNamespace, err)
	}
	return st.until(ctx, "the service account of pods in namespace "+usersNamespace, func(ctx context.Context) (bool, error) {
		_, err := st.client.CoreV1().ServiceAccounts(usersNamespace).Get(ctx, "default", metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return err == nil, err
	})
}

// deployDRA deploys NVIDIA's DRA driver. Pods request its MIG devices by the same names as the device plugin's.
func (st *stage) deployDRA(ctx context.Context) error {
	if err := st.cluster.Apply(ctx, "test/node/manifests/dra-driver.yaml"); err != nil {
		return err
	}
	_, err := st.cluster.RunKubectl(ctx, "apply", "--namespace", usersNamespace, "--filename", "deploy/examples/dra.yaml")
	return err
}

// deployment is how a node has its device plugin, or NVIDIA's DRA driver.
type deployment struct {
	labels              map[string]string // of the node, by which it gets it
	namespace, selector string            // of the plugin's pods
}

// operators is as the GPU Operator deploys the plugin, without a config.
var operators = deployment{
	labels:    map[string]string{labelPlugin: "true"},
	namespace: operatorNamespace, selector: labelApp + "=" + pluginApp,
}

// draDriver is NVIDIA's DRA driver in its static mode, as its own chart deploys it.
var draDriver = deployment{
	labels:    map[string]string{node.DRADriverLabel: node.DRAStatic},
	namespace: "dra-driver-nvidia-gpu", selector: "dra-driver-nvidia-gpu-component=kubelet-plugin",
}

// site is the node of one run.
type site struct {
	*stage
	*node.Node
	scenario scenario
	plugin   deployment
	watch    *watch
	account  string // the user as whom the program asks the API server; empty for none of its own
}

// open joins a node with the scenario's GPUs to the cluster, with the device plugin and pods on it.
func (st *stage) open(ctx context.Context, dir string, s scenario, plugin deployment) (_ *site, err error) {
	n, err := node.Start(ctx, st.cluster, node.Options{
		Name: filepath.Base(dir), Dir: dir, GPUs: s.spec(), Parts: st.parts,
	})
	if err != nil {
		return nil, err
	}
	at := &site{stage: st, Node: n, scenario: s, plugin: plugin}
	defer func() {
		if err != nil {
			err = errors.Join(err, at.close(ctx))
		}
	}()
	if err := prepare(ctx, n.GPUs, s.start); err != nil {
		return nil, err
	}
	if at.watch, err = watchNode(ctx, st.client, n.Name, s.dra); err != nil {
		return nil, err
	}
	if err := at.label(ctx, plugin.labels); err != nil {
		return nil, err
	}
	if err := at.watch.until(ctx, "the device plugin or driver", at.offers(s.capacity)); err != nil {
		return nil, err
	}
	return at, at.startUsers(ctx)
}

func (at *site) close(ctx context.Context) error {
	if at.watch != nil {
		at.watch.stop()
	}
	ctx = context.WithoutCancel(ctx)
	pods := at.client.CoreV1().Pods(usersNamespace)
	now := int64(0)
	err := pods.DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{FieldSelector: "spec.nodeName=" + at.Name})
	return errors.Join(err, at.Stop(ctx))
}

// offers reports whether the node offers exactly what its GPUs have to give.
func (at *site) offers(of func([]nvml.GPU) map[string]int) func(context.Context, sample) (bool, error) {
	return func(ctx context.Context, s sample) (bool, error) {
		gpus, err := at.GPUs.Outside().Snapshot(ctx)
		if err != nil {
			return false, fmt.Errorf("looking at the GPUs: %w", err)
		}
		return maps.Equal(s.offers, of(gpus)), nil
	}
}

// offered is what the node advertises of NVIDIA's resources, without those at 0.
func offered(n *corev1.Node) map[string]int {
	out := map[string]int{}
	for name, q := range n.Status.Allocatable {
		if strings.HasPrefix(string(name), "nvidia.com/") && !q.IsZero() {
			out[string(name)] = int(q.Value())
		}
	}
	return out
}

// published are the devices in slices of NVIDIA's DRA driver, by UUID.
func published(slices map[string]*resourcev1.ResourceSlice) map[string]int {
	out := map[string]int{}
	for _, s := range slices {
		for _, d := range s.Spec.Devices {
			if uuid := d.Attributes["uuid"].StringValue; uuid != nil {
				out[*uuid]++
			}
		}
	}
	return out
}

// label sets labels of the node, all at once.
func (at *site) label(ctx context.Context, labels map[string]string) error {
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels}})
	if err != nil {
		return err
	}
	_, err = at.client.CoreV1().Nodes().Patch(ctx, at.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: "bench"})
	if err != nil {
		return fmt.Errorf("labelling node %s with %v: %w", at.Name, labels, err)
	}
	return nil
}

// startUsers makes the pods that hold instances, and returns when all run.
func (at *site) startUsers(ctx context.Context) error {
	all := 0
	for profile, n := range at.scenario.users {
		for i := range n {
			all++
			pod := &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%s-%d", at.Name, strings.ReplaceAll(profile, ".", "-"), i)},
				Spec: corev1.PodSpec{
					NodeSelector: map[string]string{corev1.LabelHostname: at.Name},
					Containers: []corev1.Container{{
						Name: "user", Image: "team/inference:1",
						Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{
							corev1.ResourceName("nvidia.com/mig-" + profile): resource.MustParse("1"),
						}},
					}},
				},
			}
			if _, err := at.client.CoreV1().Pods(usersNamespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
				return fmt.Errorf("making a pod with a %s: %w", profile, err)
			}
		}
	}
	return at.until(ctx, fmt.Sprintf("%d pods to run on node %s", all, at.Name), func(ctx context.Context) (bool, error) {
		running, err := at.users(ctx)
		return len(running) == all, err
	})
}

// users are the pods that hold instances and run, by UID.
func (at *site) users(ctx context.Context) (map[types.UID]string, error) {
	return at.running(ctx, usersNamespace, "")
}

// plugins are the pods of the device plugin or the DRA driver, by UID.
func (at *site) plugins(ctx context.Context) (map[types.UID]string, error) {
	return at.running(ctx, at.plugin.namespace, at.plugin.selector)
}

func (at *site) running(ctx context.Context, namespace, selector string) (map[types.UID]string, error) {
	pods, err := at.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
		FieldSelector: "spec.nodeName=" + at.Name, LabelSelector: selector,
	})
	if err != nil {
		return nil, fmt.Errorf("listing pods of namespace %s: %w", namespace, err)
	}
	out := map[types.UID]string{}
	for _, pod := range pods.Items {
		if pod.Status.Phase == corev1.PodRunning && pod.DeletionTimestamp == nil {
			out[pod.UID] = pod.Name
		}
	}
	return out, nil
}

// evicted are the names of users' pods that the Eviction API has evicted. Dry runs do not count.
func (at *site) evicted() (map[string]bool, error) {
	events, err := at.cluster.Requests(func(e cluster.AuditEvent) bool {
		return e.Resource == "pods/eviction" && e.Namespace == usersNamespace && e.Code < 300 &&
			!strings.Contains(e.Body, "dryRun") && !strings.Contains(e.URI, "dryRun")
	})
	if err != nil {
		return nil, fmt.Errorf("reading the audit log: %w", err)
	}
	out := map[string]bool{}
	for _, e := range events {
		out[e.Name] = true
	}
	return out, nil
}

// leftovers are what a program has not restored, in words.
func leftovers(o *corev1.Node) []string {
	var out []string
	if o.Spec.Unschedulable {
		out = append(out, "cordoned")
	}
	for _, taint := range o.Spec.Taints {
		if strings.HasPrefix(taint.Key, "gpuslice.io/") {
			out = append(out, "tainted "+taint.Key)
		}
	}
	paused := 0
	for _, value := range o.Labels {
		if strings.HasPrefix(value, "paused-for-") {
			paused++
		}
	}
	if paused > 0 {
		out = append(out, fmt.Sprintf("with %d labels that pause operands", paused))
	}
	return out
}
