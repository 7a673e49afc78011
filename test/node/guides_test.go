package node_test

import (
	"context"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
)

// apply applies a manifest as it is written.
func (r *rig) apply(file string) {
	r.t.Helper()
	cmd := exec.CommandContext(r.t.Context(), r.cluster.Kubectl(), "--kubeconfig", r.cluster.AdminKubeconfig(), "apply", "-f", file)
	if out, err := cmd.CombinedOutput(); err != nil {
		r.t.Fatalf("kubectl apply -f %s: %v\n%s", file, err, out)
	}
}

// readable makes a namespace whose ConfigMaps the agent may read.
func (r *rig) readable(namespace string) {
	r.t.Helper()
	name := metav1.ObjectMeta{Name: "gpuslice-agent"}
	_, err := r.client.CoreV1().Namespaces().Create(r.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err == nil {
		_, err = r.client.RbacV1().Roles(namespace).Create(r.t.Context(), &rbacv1.Role{
			ObjectMeta: name, Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"get", "list", "watch"}}},
		}, metav1.CreateOptions{})
	}
	if err == nil {
		_, err = r.client.RbacV1().RoleBindings(namespace).Create(r.t.Context(), &rbacv1.RoleBinding{
			ObjectMeta: name, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name.Name},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "gpuslice", Name: "gpuslice-agent"}},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		err := r.client.CoreV1().Namespaces().Delete(context.Background(), namespace, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			r.t.Error(err)
		}
	})
}

// offersAfter asks by the labels, and waits until the agent has proven the config of this name.
func (r *rig) offersAfter(labels map[string]string, name string, want map[string]int) {
	r.t.Helper()
	r.labels(labels)
	n := r.awaitConverged(name)
	r.givenBack(n)
	if diff := cmp.Diff(want, offered(n)); diff != "" {
		r.t.Errorf("%s: allocatable (-want +got):\n%s", name, diff)
	}
}

// ConfigMaps that guides for users of NVIDIA's GPU Operator have, applied as they stand there, give what their text promises.
func TestConfigsOfGuidesGiveWhatTheyPromise(t *testing.T) {
	t.Parallel()
	t.Run("time-slicing-config", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, "gpus: [{model: T4}]", "devicePlugin: {configMap: {namespace: nvidia-gpu-operator, name: time-slicing-config}}\n", configFile)
		r.readable("nvidia-gpu-operator")
		r.awaitOffered("nvidia.com/gpu", 1)
		r.run()
		r.apply("testdata/time-slicing-config-any.yaml")
		r.offersAfter(map[string]string{config.LabelDevicePluginConfig: "any"}, "any", map[string]int{"nvidia.com/gpu": 4})
		r.awaitLabels(map[string]string{labelReplicas: "4", labelCount: "1", labelProduct: "Tesla-T4-SHARED"})
		r.apply("testdata/time-slicing-config-tesla-t4.yaml")
		r.offersAfter(map[string]string{config.LabelDevicePluginConfig: "tesla-t4"}, "tesla-t4", map[string]int{"nvidia.com/gpu": 4})
	})
	t.Run("device-plugin-config", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, "gpus: [{model: A100-80GB, count: 2}]",
			"devicePlugin: {configMap: {namespace: gpu-operator-resources, name: device-plugin-config}}\n", configFile)
		r.readable("gpu-operator-resources")
		r.awaitOffered("nvidia.com/gpu", 2)
		r.run()
		r.apply("testdata/device-plugin-config.yaml")
		r.offersAfter(map[string]string{config.LabelDevicePluginConfig: "config.yaml"}, "config.yaml", map[string]int{"nvidia.com/gpu": 6})
		r.awaitLabels(map[string]string{labelReplicas: "3", labelCount: "2", labelStrategy: "time-slicing"})
	})
	t.Run("seven slices, each for two", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, "gpus: [{model: A100-40GB}]", "devicePlugin: {configMap: {name: guide-slices}}\n", configFile)
		r.configMapOf("guide-slices", map[string]string{
			"a100": "version: v1\nflags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}]}}\n",
		})
		r.awaitOffered("nvidia.com/gpu", 1)
		r.run()
		r.offersAfter(map[string]string{config.LabelMIGConfig: "all-1g.5gb"}, "all-1g.5gb", map[string]int{"nvidia.com/mig-1g.5gb": 7})
		r.offersAfter(map[string]string{config.LabelDevicePluginConfig: "a100"}, "all-1g.5gb + a100", map[string]int{"nvidia.com/mig-1g.5gb": 14})
		r.awaitLabels(map[string]string{"nvidia.com/mig-1g.5gb.count": "7", "nvidia.com/mig-1g.5gb.replicas": "2"})
	})
}
