package node_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/node"
)

// A tenant without any GPU may create pods and nothing else. It binds some to the node itself, whose claims are to be made of a template that is not there:
// kubelet starts none of them, and no quota counts them. Two pods of another tenant have a GPU each, and the changes are of one of these.
func TestATenantsClaimsThatNobodyMakesForbidNoChange(t *testing.T) {
	t.Parallel()
	t.Run("device plugin", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, twoH100, "migConfigMap: {name: unmade-plugin}\n")
		r.awaitOffered("nvidia.com/gpu", 2)
		r.unmadeClaims("unmade-plugin", r.assignments, func(gpu int) string { return r.GPUs.UUIDs()[gpu] })
	})
	t.Run("DRA driver", func(t *testing.T) {
		t.Parallel()
		r := newDRARig(t, twoH100, "migConfigMap: {name: unmade-dra}\n", node.DRAStatic)
		r.awaitPublished(r.wholeAndCut())
		r.unmadeClaims("unmade-dra", r.claimed, func(gpu int) string { return fmt.Sprintf("gpu-%d", gpu) })
	})
}

// unmadeClaims changes the GPU of one pod beside such pods. Has returns the devices of each pod of a namespace, and whole the name of a GPU's device.
func (r *rig) unmadeClaims(configMap string, has func(namespace string) map[string][]string, whole func(gpu int) string) {
	t := r.t
	t.Helper()
	owner, tenant := clustertest.NamespaceOf(t, r.cluster), clustertest.NamespaceOf(t, r.cluster)
	for _, app := range []string{"train", "serve"} {
		r.deployment(owner, app, map[string]string{"nvidia.com/gpu": "1"})
	}
	runs := func(app string) *corev1.Pod {
		t.Helper()
		return r.awaitPod(owner, metav1.ListOptions{LabelSelector: "app=" + app}, running)
	}
	train, serve := runs("train"), runs("serve")
	clustertest.Eventually(t, "kubelet lists both GPUs", func(context.Context) (bool, error) { return len(has(owner)) == 2, nil })
	gpu := 0
	if has(owner)[train.Name][0] == whole(1) {
		gpu = 1
	}
	r.configMap(configMap, fmt.Sprintf("version: v1\nmig-configs:\n"+
		"  cut: [{devices: [%d], mig-enabled: true, mig-devices: {1g.10gb: 7}}]\n  whole: [{devices: [%[1]d], mig-enabled: false}]\n", gpu))
	defaults := "migConfigMap: {name: " + configMap + "}\n" + impatient
	leave, stay, devices := map[types.UID]string{}, map[types.UID]*corev1.Pod{serve.UID: serve}, has(owner)[serve.Name]
	for _, row := range []struct {
		name       string
		replicated bool
		volumes    []corev1.Volume
		drain      string
	}{
		{name: "bare", drain: "{}"},
		{
			name: "emptydir", replicated: true, drain: "{}",
			volumes: []corev1.Volume{{Name: "files", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
		},
		{name: "replicated", replicated: true, drain: "{}"},
		{name: "deletable", replicated: true, drain: "{afterDeadline: delete, rules: [{selector: app=deletable, action: evict}]}"},
	} {
		r.unstarted(tenant, row.name, row.replicated, row.volumes)
		train = runs("train")
		leave[train.UID] = train.Name
		r.set(defaults + "drain: " + row.drain + "\n")
		r.run()
		given := r.cause()
		r.label(config.LabelMIGConfig, "cut")
		given(r.awaitConverged("cut"))
		r.label(config.LabelMIGConfig, "whole")
		given(r.awaitConverged("whole"))
		r.kill()
		if diff := cmp.Diff(leave, r.evictions(owner)); diff != "" {
			t.Errorf("%s: evicted (-pods on the GPU +asked for):\n%s", row.name, diff)
		}
		if evicted := r.evictions(tenant); len(evicted) > 0 {
			t.Errorf("%s: pods that hold nothing were evicted: %v", row.name, evicted)
		}
		r.undisturbed(owner, stay, r.assignments(owner))
		if diff := cmp.Diff(devices, has(owner)[serve.Name]); diff != "" {
			t.Errorf("%s: devices of the pod on the other GPU (-before +after):\n%s", row.name, diff)
		}
	}
}

// unstarted makes a pod on the node, or a ReplicaSet of one, that kubelet does not start, since its claim is not there. It waits until kubelet has tried.
func (r *rig) unstarted(namespace, app string, replicated bool, volumes []corev1.Volume) {
	r.t.Helper()
	template, labels := "there-is-none", map[string]string{"app": app}
	spec := r.podSpec(nil)
	spec.NodeName, spec.NodeSelector, spec.Volumes = r.Name, nil, volumes
	spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "x", ResourceClaimTemplateName: &template}}
	var err error
	if replicated {
		_, err = r.client.AppsV1().ReplicaSets(namespace).Create(r.t.Context(), &appsv1.ReplicaSet{
			ObjectMeta: metav1.ObjectMeta{Name: app},
			Spec: appsv1.ReplicaSetSpec{
				Replicas: new(int32(1)), Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: spec},
			},
		}, metav1.CreateOptions{})
	} else {
		_, err = r.client.CoreV1().Pods(namespace).Create(r.t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: app, Labels: labels}, Spec: spec}, metav1.CreateOptions{})
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.awaitPod(namespace, metav1.ListOptions{LabelSelector: "app=" + app}, func(p *corev1.Pod) bool { return p.Status.StartTime != nil })
}
