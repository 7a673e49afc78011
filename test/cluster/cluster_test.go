package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/test/binaries"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

func TestMain(m *testing.M) { clustertest.MainWithoutKubelets(m) }

func clientFor(t *testing.T, config *rest.Config, err error) kubernetes.Interface {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

// eventually fails the test when the condition does not come true within five minutes.
func eventually(t *testing.T, what string, condition func(context.Context) (bool, error)) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 20*time.Millisecond, 5*time.Minute, true, condition); err != nil {
		t.Fatalf("waiting until %s: %v", what, err)
	}
}

func TestItIsTheVersionThatItsModuleNames(t *testing.T) {
	version, err := clustertest.Client(t).Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	if version.GitVersion != "v1.37.1" {
		t.Errorf("the API server is %s, want v1.37.1", version.GitVersion)
	}
}

func TestAUserWithoutABindingIsForbidden(t *testing.T) {
	c := clustertest.Start(t)
	config, err := c.ConfigFor("mallory", "strangers")
	_, err = clientFor(t, config, err).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), `User "mallory"`) {
		t.Errorf("listing nodes as a user without a binding: %v, want that mallory is forbidden to", err)
	}
	config, err = c.ServiceAccountConfig(t.Context(), clustertest.Namespace(t), "default")
	_, err = clientFor(t, config, err).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "system:serviceaccount:") {
		t.Errorf("listing nodes as a service account without a binding: %v, want that it is forbidden to", err)
	}
}

func TestANodeWritesItselfAndNoOther(t *testing.T) {
	c := clustertest.Start(t)
	config, err := c.ConfigFor("system:node:own", "system:nodes")
	nodes := clientFor(t, config, err).CoreV1().Nodes()
	if _, err := nodes.Create(t.Context(), node("own"), metav1.CreateOptions{}); err != nil {
		t.Errorf("creating its own node: %v", err)
	}
	t.Cleanup(func() {
		if err := clustertest.Client(t).CoreV1().Nodes().Delete(context.WithoutCancel(t.Context()), "own", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	if _, err := nodes.Create(t.Context(), node("another"), metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("creating another node: %v, want that it is forbidden", err)
	}
}

func TestAnEvictionIsRefusedUntilTheBudgetAllowsIt(t *testing.T) {
	client, namespace := clustertest.Client(t), clustertest.Namespace(t)
	readyNode(t, client, "worker")
	deploy(t, client, namespace, "web", 2)
	budget(t, client, namespace, "web", 2)
	pods := runPods(t, client, namespace, 2)
	eventually(t, "the budget counts two healthy pods", func(ctx context.Context) (bool, error) {
		b, err := client.PolicyV1().PodDisruptionBudgets(namespace).Get(ctx, "web", metav1.GetOptions{})
		return err == nil && b.Status.CurrentHealthy == 2 && b.Status.ObservedGeneration == b.Generation, err
	})

	err := evict(t.Context(), client, namespace, pods[0])
	if !apierrors.IsTooManyRequests(err) || !apierrors.HasStatusCause(err, policyv1.DisruptionBudgetCause) {
		t.Fatalf("evicting with a budget of 2 of 2: %v, want 429 for the disruption budget", err)
	}

	patch := []byte(`{"spec":{"minAvailable":1}}`)
	if _, err := client.PolicyV1().PodDisruptionBudgets(namespace).Patch(t.Context(), "web", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the budget allows a disruption", func(ctx context.Context) (bool, error) {
		b, err := client.PolicyV1().PodDisruptionBudgets(namespace).Get(ctx, "web", metav1.GetOptions{})
		return err == nil && b.Status.DisruptionsAllowed == 1, err
	})
	if err := evict(t.Context(), client, namespace, pods[0]); err != nil {
		t.Errorf("evicting with a budget of 1 of 2: %v", err)
	}

	events, err := clustertest.Start(t).Requests(func(e cluster.AuditEvent) bool {
		return e.Resource == "pods/eviction" && e.Namespace == namespace
	})
	if err != nil {
		t.Fatal(err)
	}
	var codes []int
	for _, e := range events {
		codes = append(codes, e.Code)
	}
	if diff := cmp.Diff([]int{http.StatusTooManyRequests, http.StatusCreated}, codes); diff != "" {
		t.Errorf("answers to evictions in the audit log (-want +got):\n%s", diff)
	}
}

func TestTheAuditLogCountsTheWritesOfAUser(t *testing.T) {
	c, namespace := clustertest.Start(t), clustertest.Namespace(t)
	user := "auditor-of-" + namespace
	config, err := c.ConfigFor(user, "system:masters")
	maps := clientFor(t, config, err).CoreV1().ConfigMaps(namespace)
	if _, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := maps.Get(t.Context(), "a", metav1.GetOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := maps.Patch(t.Context(), "a", types.MergePatchType, []byte(`{"data":{"k":"v"}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := maps.Delete(t.Context(), "b", metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	events, err := c.Writes(user)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range events {
		got = append(got, strings.ReplaceAll(e.String(), namespace, "NS"))
	}
	want := []string{"create configmaps NS/a: 201", "patch configmaps NS/a: 200", "delete configmaps NS/b: 404"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("writes in the audit log (-want +got):\n%s", diff)
	}
}

func TestKubectlWorksWithTheKubeconfig(t *testing.T) {
	out, err := clustertest.Start(t).RunKubectl(t.Context(), "get", "namespace", "default", "-oname")
	if got := strings.TrimSpace(out); err != nil || got != "namespace/default" {
		t.Errorf("kubectl get namespace default: %q, %v", got, err)
	}
}

func TestStopLeavesNoProcessAndNoFile(t *testing.T) {
	c, err := cluster.Start(t.Context(), cluster.Options{})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"}
	if diff := cmp.Diff(want, processesIn(t, c.Dir())); diff != "" {
		t.Errorf("processes that run (-want +got):\n%s", diff)
	}
	began := time.Now()
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took > 5*time.Minute {
		t.Errorf("stopping took %s", took)
	}
	if left := processesIn(t, c.Dir()); len(left) > 0 {
		t.Errorf("processes left: %v", left)
	}
	if _, err := os.Stat(c.Dir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its directory after Stop: %v, want that it is gone", err)
	}
}

func TestAComponentThatDiesIsReportedWithTheEndOfItsLog(t *testing.T) {
	kube, err := binaries.Builder{}.Kube(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	broken := t.TempDir()
	for _, name := range []string{"etcd", "kube-controller-manager", "kube-scheduler"} {
		if err := os.Symlink(filepath.Join(kube, name), filepath.Join(broken, name)); err != nil {
			t.Fatal(err)
		}
	}
	script := "#!/bin/sh\necho 'error: --no-such-flag is unknown' >&2\nexit 3\n"
	if err := os.WriteFile(filepath.Join(broken, "kube-apiserver"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	_, err = cluster.Start(t.Context(), cluster.Options{Dir: dir, Binaries: broken})
	if err == nil {
		t.Fatal("a control plane without an API server started")
	}
	for _, want := range []string{"kube-apiserver ended by itself: exit status 3", "--no-such-flag is unknown", filepath.Join(dir, "kube-apiserver.log")} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q:\n%v", want, err)
		}
	}
	if left := processesIn(t, dir); len(left) > 0 {
		t.Errorf("processes left: %v", left)
	}
}

// processesIn names the processes whose arguments mention dir, sorted.
func processesIn(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(line), dir) {
			continue // it ended meanwhile, or is another's
		}
		program, _, _ := strings.Cut(string(line), "\x00")
		names = append(names, filepath.Base(program))
	}
	slices.Sort(names)
	return names
}

func node(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// readyNode makes a node on which the scheduler places pods; no kubelet stands behind it.
func readyNode(t *testing.T, client kubernetes.Interface, name string) {
	t.Helper()
	if _, err := client.CoreV1().Nodes().Create(t.Context(), node(name), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := client.CoreV1().Nodes().Delete(context.WithoutCancel(t.Context()), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	patch := []byte(`{"status":{"allocatable":{"cpu":"4","pods":"10"},"conditions":[{"type":"Ready","status":"True"}]}}`)
	if _, err := client.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
}

func deploy(t *testing.T, client kubernetes.Interface, namespace, name string, replicas int32) {
	t.Helper()
	labels := map[string]string{"app": name}
	_, err := client.AppsV1().Deployments(namespace).Create(t.Context(), &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: name, Image: "none"}}},
			},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

func budget(t *testing.T, client kubernetes.Interface, namespace, name string, available int) {
	t.Helper()
	minimum := intstr.FromInt(available)
	_, err := client.PolicyV1().PodDisruptionBudgets(namespace).Create(t.Context(), &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &minimum,
			Selector:     &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
}

// runPods waits until so many pods are scheduled, and reports them running and ready as a kubelet would.
func runPods(t *testing.T, client kubernetes.Interface, namespace string, count int) []string {
	t.Helper()
	var names []string
	eventually(t, fmt.Sprintf("%d pods are scheduled", count), func(ctx context.Context) (bool, error) {
		pods, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		names = nil
		for _, pod := range pods.Items {
			if pod.Spec.NodeName != "" {
				names = append(names, pod.Name)
			}
		}
		return len(names) == count, nil
	})
	patch := []byte(`{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"}]}}`)
	for _, name := range names {
		if _, err := client.CoreV1().Pods(namespace).Patch(t.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{}, "status"); err != nil {
			t.Fatal(err)
		}
	}
	return names
}

func evict(ctx context.Context, client kubernetes.Interface, namespace, pod string) error {
	return client.PolicyV1().Evictions(namespace).Evict(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: pod, Namespace: namespace}})
}
