package node_test

import (
	"context"
	"maps"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/test/cluster/claimdriver"
)

// claimDriver is NVIDIA's DRA driver on the node: its pod, as the cluster sees it, and its plugin, as kubelet does.
type claimDriver struct {
	rig       *rig
	namespace string
	plugin    *claimdriver.Driver
}

// claimDriver offers one GPU of the node for claims, as the driver does before anything else. The scheduler gives it out.
func (r *rig) claimDriver(namespace string) *claimDriver {
	r.t.Helper()
	class := &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: r.Name}}
	slice := &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: r.Name + "-gpus"},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: holders.ClaimDriver, NodeName: &r.Name, Pool: resourcev1.ResourcePool{Name: r.Name, ResourceSliceCount: 1},
			Devices: []resourcev1.Device{{Name: "gpu-0"}},
		},
	}
	api := r.client.ResourceV1()
	if _, err := api.DeviceClasses().Create(r.t.Context(), class, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
	if _, err := api.ResourceSlices().Create(r.t.Context(), slice, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
	d := &claimDriver{rig: r, namespace: namespace}
	r.t.Cleanup(func() {
		if d.plugin != nil {
			d.plugin.Stop()
		}
		for _, err := range []error{
			api.DeviceClasses().Delete(context.Background(), class.Name, metav1.DeleteOptions{}),
			api.ResourceSlices().Delete(context.Background(), slice.Name, metav1.DeleteOptions{}),
		} {
			if err != nil {
				r.t.Error(err)
			}
		}
	})
	return d
}

// claimDriverPod are the labels by which the driver's pod says what it is. Anybody's pod may have them.
var claimDriverPod = map[string]string{"dra-driver-nvidia-gpu-component": "kubelet-plugin"}

// start runs it by a DaemonSet, which is where the agent knows it from.
func (d *claimDriver) start() {
	d.rig.t.Helper()
	d.restart()
	_, err := d.rig.client.AppsV1().DaemonSets(d.namespace).Create(d.rig.t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "dra-driver"},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: claimDriverPod},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: claimDriverPod}, Spec: d.podSpec()},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		d.rig.t.Fatal(err)
	}
	d.rig.awaitPod(d.namespace, metav1.ListOptions{LabelSelector: labels.FormatLabels(claimDriverPod)}, running)
}

// restart has its program answer kubelet.
func (d *claimDriver) restart() {
	d.rig.t.Helper()
	var err error
	if d.plugin, err = claimdriver.Start(d.rig.t.Context(), d.rig.Kubelet.Dir, holders.ClaimDriver); err != nil {
		d.rig.t.Fatal(err)
	}
}

// podSpec is of a pod that comes also to a node that is fenced, as a DaemonSet's do.
func (d *claimDriver) podSpec() corev1.PodSpec {
	spec := d.rig.podSpec(nil)
	spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	return spec
}

// hang has it answer kubelet no more, while its pod goes on.
func (d *claimDriver) hang() {
	d.plugin.Stop()
	d.plugin = nil
}

// stop ends it, whoever still needs it.
func (d *claimDriver) stop() {
	d.rig.t.Helper()
	d.hang()
	err := d.rig.client.AppsV1().DaemonSets(d.namespace).Delete(d.rig.t.Context(), "dra-driver", metav1.DeleteOptions{
		PropagationPolicy: new(metav1.DeletePropagationForeground),
	})
	if err != nil {
		d.rig.t.Fatal(err)
	}
	d.rig.awaitPods(d.namespace, "the driver's end", func(pods map[types.UID]*corev1.Pod) bool {
		return len(those(pods, func(p *corev1.Pod) bool { return p.Labels["app"] == "" })) == 0
	})
}

// pretend runs a pod that has the driver's labels, and is of no DaemonSet.
func (d *claimDriver) pretend() {
	d.rig.t.Helper()
	d.rig.user(d.namespace, "pretender", func(p *corev1.Pod) {
		maps.Copy(p.Labels, claimDriverPod)
		p.Spec = d.podSpec()
	})
}

// claimant is a pod that has a GPU by a claim of its own name.
func (r *rig) claimant(namespace, name string) {
	r.t.Helper()
	_, err := r.client.ResourceV1().ResourceClaims(namespace).Create(r.t.Context(), &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
			Requests: []resourcev1.DeviceRequest{{Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: r.Name}}},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	spec := r.podSpec(nil)
	spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}}
	spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
	_, err = r.client.CoreV1().Pods(namespace).Create(r.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}}, Spec: spec,
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	r.awaitRunning(namespace, name)
}
