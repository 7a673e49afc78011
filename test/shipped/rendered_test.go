package shipped_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/drift"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

var defined sync.Once

// start gives the control plane with the kinds and the namespaces of the manifests: Kueue's kinds from its own definitions, those of
// OpenShift from definitions written after its documentation. No controller of theirs runs.
func start(t *testing.T) *cluster.Cluster {
	t.Helper()
	c := clustertest.Start(t)
	defined.Do(func() {
		crds := filepath.Join(kueue(t), "config", "components", "crd", "bases")
		names := []string{"hardwareprofiles.infrastructure.opendatahub.io", "kueues.kueue.openshift.io"}
		args := []string{"create", "-f", filepath.Join("testdata", "hardwareprofiles.yaml"), "-f", filepath.Join("testdata", "kueues.yaml")}
		for _, plural := range []string{"resourceflavors", "clusterqueues", "localqueues", "workloadpriorityclasses"} {
			args = append(args, "-f", filepath.Join(crds, "kueue.x-k8s.io_"+plural+".yaml"))
			names = append(names, plural+".kueue.x-k8s.io")
		}
		must(t, c, args...)
		must(t, c, append([]string{"wait", "--for=condition=Established", "--timeout=2m", "crd"}, names...)...)
		for _, namespace := range []string{"team", "production", "redhat-ods-applications"} {
			if out, err := kubectl(t, c, "create", "namespace", namespace); err != nil && !strings.Contains(out, "already exists") { // by another test
				t.Fatalf("%v: %s", err, out)
			}
		}
	})
	return c
}

// kueue is the folder of Kueue's module, at the version that test/kueue pins.
func kueue(t *testing.T) string {
	t.Helper()
	for _, args := range [][]string{{"mod", "download", "sigs.k8s.io/kueue"}, {"list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kueue"}} {
		tool := exec.CommandContext(t.Context(), "go", args...)
		tool.Dir = filepath.Join("..", "kueue")
		tool.Stderr = os.Stderr
		out, err := tool.Output()
		if err != nil {
			t.Fatalf("go %s: %v", strings.Join(args, " "), err)
		}
		if dir := strings.TrimSpace(string(out)); dir != "" {
			return dir
		}
	}
	t.Fatal("the Go command does not say where Kueue's module is")
	return ""
}

func kubectl(t *testing.T, c *cluster.Cluster, args ...string) (string, error) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), c.Kubectl(), append([]string{"--kubeconfig", c.AdminKubeconfig()}, args...)...).CombinedOutput()
	return string(out), err
}

func must(t *testing.T, c *cluster.Cluster, args ...string) {
	t.Helper()
	if out, err := kubectl(t, c, args...); err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// The manifests are those that the tests of the command hold it to.
func TestAnAPIServerTakesWhatIsRendered(t *testing.T) {
	c := start(t)
	files, err := filepath.Glob(filepath.Join("..", "..", "cmd", "kubectl-gpuslice", "render", "testdata", "objects", "*.yaml"))
	if err != nil || len(files) < 5 {
		t.Fatalf("%d manifests, error %v", len(files), err)
	}
	for _, file := range files {
		if strings.HasPrefix(filepath.Base(file), "prices") {
			continue // of a kind of Prometheus' operator: promtool takes its rules
		}
		if out, err := kubectl(t, c, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", file); err != nil {
			t.Errorf("%s is refused: %v\n%s", filepath.Base(file), err, out)
		}
	}
}

// A dry run that takes everything would show nothing.
func TestTheAPIServerIsStrict(t *testing.T) {
	c := start(t)
	const operator = "apiVersion: kueue.openshift.io/v1\nkind: Kueue\nmetadata: {name: cluster}\n"
	for name, text := range map[string]string{
		"a field that no version has": "apiVersion: infrastructure.opendatahub.io/v1\nkind: HardwareProfile\nmetadata: {name: a, namespace: team}\n" +
			"spec: {displayName: A, identifiers: []}\n",
		"a queue beside a selector": "apiVersion: infrastructure.opendatahub.io/v1\nkind: HardwareProfile\nmetadata: {name: a, namespace: team}\n" +
			"spec: {scheduling: {type: Queue, kueue: {localQueueName: a}, node: {}}}\n",
		"a group without its flavors": "apiVersion: kueue.x-k8s.io/v1beta2\nkind: ClusterQueue\nmetadata: {name: a}\n" +
			"spec: {resourceGroups: [{coveredResources: [nvidia.com/gpu], flavors: []}]}\n",
		"a field of v1beta1":          "apiVersion: kueue.x-k8s.io/v1beta2\nkind: ClusterQueue\nmetadata: {name: a}\nspec: {cohort: all}\n",
		"a field of Kueue's config":   operator + "spec: {config: {integrations: {frameworks: [BatchJob]}, resources: {quotaCheckStrategy: IgnoreUndeclared}}}\n",
		"a framework by Kueue's name": operator + "spec: {config: {integrations: {frameworks: [batch/job]}}}\n",
		"a class in two mappings": operator + "spec: {config: {integrations: {frameworks: [BatchJob]}, resources: {deviceClassMappings: " +
			"[{name: a, deviceClassNames: [x]}, {name: b, deviceClassNames: [x]}]}}}\n",
		"a source as Kueue's config has it": operator + "spec: {config: {integrations: {frameworks: [BatchJob]}, resources: {deviceClassMappings: " +
			"[{name: a, deviceClassNames: [x], sources: [{counter: {name: memory, driver: gpu.nvidia.com, deviceSelector: {cel: {expression: 'true'}}}}]}]}}}\n",
	} {
		file := filepath.Join(t.TempDir(), "manifest.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := kubectl(t, c, "create", "--dry-run=server", "--validate=strict", "-f", file); err == nil {
			t.Errorf("%s is taken:\n%s", name, out)
		}
	}
}

// offering makes two nodes that offer 56 slices each, one of which is kept from pods.
func offering(t *testing.T, client kubernetes.Interface) {
	t.Helper()
	for name, offers := range map[string]string{"slices-1": "56", "slices-2": "56"} {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"gpuslice.io/profile": "small-inference"}}}
		if name == "slices-2" {
			node.Spec.Taints = []corev1.Taint{{Key: "gpuslice.io/repartitioning", Effect: corev1.TaintEffectNoSchedule}}
		}
		if _, err := client.CoreV1().Nodes().Create(t.Context(), node, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		status := []byte(`{"status": {"allocatable": {"cpu": "64", "nvidia.com/mig-1g.10gb": "` + offers + `"}}}`)
		if _, err := client.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, status, metav1.PatchOptions{}, "status"); err != nil {
			t.Fatal(err)
		}
	}
}

func TestAClusterThatPromisesTooMuchIsFoundOut(t *testing.T) {
	c := start(t)
	client := clustertest.Client(t)
	offering(t, client)
	objects, err := dynamic.NewForConfig(c.Config())
	if err != nil {
		t.Fatal(err)
	}
	programs, err := kube.New(c.Config())
	if err != nil {
		t.Fatal(err)
	}
	report := func() drift.Report {
		found, err := drift.Find(t.Context(), programs, objects, drift.Known{Groups: drift.GroupsOf(programs)})
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if got := report(); len(got.Findings) != 0 {
		t.Errorf("a cluster that promises nothing: %v", got.Findings)
	}
	promises := filepath.Join("testdata", "promises.yaml")
	t.Cleanup(func() {
		for _, name := range []string{"slices-1", "slices-2"} {
			if err := client.CoreV1().Nodes().Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
		}
	})
	must(t, c, "create", "-f", promises)
	defer must(t, c, "delete", "-f", promises)
	got := report()
	var said []string
	for _, f := range got.Findings {
		verdict := "drift "
		if f.Idle {
			verdict = "idle "
		}
		said = append(said, verdict+f.About+": "+f.Text)
	}
	want := []string{
		"drift ResourceFlavor gone: no node has its labels gpuslice.io/profile=gone: admitted workloads stay Pending; if an autoscaler creates its nodes on demand, say --autoscaled gone",
		"drift ClusterQueue gpus: flavor missing is not there",
		"drift ClusterQueue gpus: 120 of nvidia.com/mig-1g.10gb may be admitted by flavor small-inference, and its 2 nodes offer 112: pods of admitted workloads stay Pending",
		"drift ResourceQuota team/gpus: requests.nvidia.com/gpu allows 8, and all nodes offer 0",
		"drift HardwareProfile team/elsewhere: identifier nvidia.com/mig-1g.10gb: no node with its labels gpuslice.io/profile=gone offers it",
		"drift HardwareProfile team/large: identifier nvidia.com/mig-1g.10gb: its workloads ask for at least 60, and no node offers more than 56",
		"drift HardwareProfile team/small: identifier nvidia.com/mig-1g.5gb: no node offers it",
	}
	if diff := cmp.Diff(want, said); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]int{"ClusterQueue": 1, "HardwareProfile": 5, "LocalQueue": 1, "ResourceFlavor": 2, "ResourceQuota": 1}, got.Read); diff != "" {
		t.Errorf("read (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"slices-2"}, got.Changing); diff != "" {
		t.Errorf("nodes that change (-want +got):\n%s", diff)
	}
}
