package node_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// shippedDefault is the ConfigMap by which an overlay of deploy/ sets the cluster's default.
func shippedDefault(t *testing.T, overlay string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../deploy/components", overlay, "config.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var m corev1.ConfigMap
	if err := sigsyaml.UnmarshalStrict(text, &m); err != nil {
		t.Fatal(err)
	}
	return m.Data
}

// The overlays are applied in turn to a node with one GPU and no label, while the two pods of the smoke test want a GPU each.
func TestEachOverlayIsTheDefaultOfANodeWithoutLabels(t *testing.T) {
	t.Parallel()
	const name = "overlays"
	r := newRig(t, "gpus: [{model: A100-80GB}]", "devicePlugin: {configMap: {name: "+name+"}, defaultConfig: default}\n", configFile)
	namespace := clustertest.Namespace(t)
	r.configMapOf(name, shippedDefault(t, "default"))
	r.awaitOffered("nvidia.com/gpu", 1)
	r.run()
	becomes := func(asked, overlay string, want map[string]int) {
		t.Helper()
		r.sharesByDefault(name, asked, overlay, want)
	}
	becomes("default", "default", map[string]int{"nvidia.com/gpu": 1})
	r.smokeTest(namespace)
	r.awaitSmokeTest(namespace, 1, 1)
	becomes("default", "time-sliced-2", map[string]int{"nvidia.com/gpu": 2})
	r.awaitSmokeTest(namespace, 2, 0)
	if !testing.Short() {
		becomes("default", "time-sliced-4", map[string]int{"nvidia.com/gpu": 4})
		becomes("default", "mps-2", map[string]int{"nvidia.com/gpu": 2})
		becomes("default", "mps-4", map[string]int{"nvidia.com/gpu": 4})
		r.awaitSmokeTest(namespace, 2, 0)
	}
	becomes("default", "mig-single", map[string]int{"nvidia.com/gpu": 1})
	r.label(config.LabelMIGConfig, "all-1g.10gb")
	becomes("all-1g.10gb + default", "mig-single", map[string]int{"nvidia.com/gpu": 7})
	r.awaitSmokeTest(namespace, 2, 0)
	becomes("all-1g.10gb + default", "mig-mixed", map[string]int{"nvidia.com/mig-1g.10gb": 7})
	r.awaitSmokeTest(namespace, 0, 2)
	r.label(config.LabelMIGConfig, "all-disabled")
	becomes("all-disabled + default", "default", map[string]int{"nvidia.com/gpu": 1})
	r.awaitSmokeTest(namespace, 1, 1)
}

// The overlays are for clusters of the GPU Operator, whose device plugin has a config manager that knows nothing of the settings' default.
func TestAnOverlayIsTheDefaultBesideAConfigManager(t *testing.T) {
	t.Parallel()
	const name = "overlays-beside-a-config-manager"
	r := newRig(t, "gpus: [{model: A100-80GB}]", "devicePlugin: {configMap: {name: "+name+"}, defaultConfig: default}\n", configManager)
	r.configMapOf(name, shippedDefault(t, "time-sliced-2"))
	r.awaitOffered("nvidia.com/gpu", 1)
	r.run()
	r.sharesByDefault(name, "default", "time-sliced-2", map[string]int{"nvidia.com/gpu": 2})
	r.sharesByDefault(name, "default", "default", map[string]int{"nvidia.com/gpu": 1})
	if !testing.Short() {
		r.sharesByDefault(name, "default", "mps-2", map[string]int{"nvidia.com/gpu": 2})
		r.label(config.LabelMIGConfig, "all-1g.10gb")
		r.sharesByDefault(name, "all-1g.10gb + default", "mig-single", map[string]int{"nvidia.com/gpu": 7})
		r.sharesByDefault(name, "all-1g.10gb + default", "mig-mixed", map[string]int{"nvidia.com/mig-1g.10gb": 7})
	}
}

// sharesByDefault writes the overlay's default into the ConfigMap, and waits until the node that asks for this offers so much by it.
func (r *rig) sharesByDefault(configMap, asked, overlay string, want map[string]int) {
	r.t.Helper()
	edit, err := json.Marshal(map[string]any{"data": shippedDefault(r.t, overlay)})
	if err == nil {
		_, err = r.client.CoreV1().ConfigMaps("gpuslice").Patch(r.t.Context(), configMap, types.MergePatchType, edit, metav1.PatchOptions{})
	}
	if err != nil {
		r.t.Fatal(err)
	}
	n := r.await(fmt.Sprintf("overlay %s: %v", overlay, want), func(n *corev1.Node) bool {
		return converged(asked)(n) && maps.Equal(offered(n), want)
	})
	r.givenBack(n)
}

// smokeTest deploys deploy/examples/smoke-test.yaml, for this node of the many that tests share.
func (r *rig) smokeTest(namespace string) {
	r.t.Helper()
	text, err := os.ReadFile("../../deploy/examples/smoke-test.yaml")
	if err != nil {
		r.t.Fatal(err)
	}
	var d appsv1.Deployment
	if err := sigsyaml.UnmarshalStrict(text, &d); err != nil {
		r.t.Fatal(err)
	}
	d.Spec.Template.Spec.NodeSelector = map[string]string{corev1.LabelHostname: r.Name}
	if _, err := r.client.AppsV1().Deployments(namespace).Create(r.t.Context(), &d, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
}

// awaitSmokeTest waits until so many of its pods run on the node, and so many find no room.
func (r *rig) awaitSmokeTest(namespace string, runs, waits int) {
	r.t.Helper()
	waiting := func(p *corev1.Pod) bool { return p.Spec.NodeName == "" && p.DeletionTimestamp == nil }
	r.awaitPods(namespace, fmt.Sprintf("%d pods of the smoke test to run and %d to find no room", runs, waits), func(pods map[types.UID]*corev1.Pod) bool {
		return len(those(pods, running)) == runs && len(those(pods, waiting)) == waits
	})
}
