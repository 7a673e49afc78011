package cluster_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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
			continue // it ended in the meantime, or is another's
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
