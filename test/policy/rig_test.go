// Package policy_test asks a real API server what the token of one agent can do: it deploys deploy/ and tries to write what
// is not the agent's, without the admission policies and with them. The table of attempts stands in deploy/SECURITY.md.
//
// It runs no agent: test/node has agents work under the policies.
package policy_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

func TestMain(m *testing.M) { clustertest.MainWithoutKubelets(m) }

// patience bounds each wait. Most take a second; a machine may be busy with other tests.
const patience = 2 * time.Minute

// deployFolder is deploy/, as seen from this package.
const deployFolder = "../../deploy"

// scene is the cluster of testdata/scene.yaml.
type scene struct {
	t        *testing.T
	cluster  *cluster.Cluster
	admin    kubernetes.Interface
	attempts []attempt    // those that this version of Kubernetes has the fields for
	token    *rest.Config // of the agent's pod
	plugin   string       // name of the pod of the DaemonSet in kube-system
	uids     map[string]string
}

func newScene(t *testing.T) *scene {
	t.Helper()
	s := &scene{t: t, cluster: clustertest.Start(t), admin: clustertest.Client(t), uids: map[string]string{}}
	for _, name := range []string{"gpu-operator", "team"} {
		_, err := s.admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
	}
	return s
}

// fill makes the objects, once the namespaces and the accounts of pods are there.
func (s *scene) fill() {
	s.t.Helper()
	for _, namespace := range []string{"team", "kube-system"} {
		s.until("the account of pods in "+namespace, func(ctx context.Context) (bool, error) {
			_, err := s.admin.CoreV1().ServiceAccounts(namespace).Get(ctx, "default", metav1.GetOptions{})
			return err == nil, ignoring(err, apierrors.IsNotFound)
		})
	}
	s.kubectl("apply", "-f", "testdata/scene.yaml")
	s.applied()
	s.until("the DaemonSet's pod", func(ctx context.Context) (bool, error) {
		pods, err := s.admin.CoreV1().Pods("kube-system").List(ctx, metav1.ListOptions{LabelSelector: "app=plugin", FieldSelector: "spec.nodeName!="})
		if err != nil || len(pods.Items) == 0 {
			return false, err
		}
		s.plugin = pods.Items[0].Name
		return true, nil
	})
	pods, err := s.admin.CoreV1().Pods("").List(s.t.Context(), metav1.ListOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	for _, p := range pods.Items {
		s.uids[p.Name] = string(p.UID)
	}
}

// applied has a tool of people apply, on the API server's side, keys of its own beside those that the agents write; and somebody write one of
// the agents' keys and nothing else. kubectl would first make its own what it has applied on its side.
func (s *scene) applied() {
	s.t.Helper()
	_, err := s.admin.CoreV1().ConfigMaps("gpu-operator").Patch(s.t.Context(), "device-plugin-config", types.ApplyPatchType,
		[]byte(`{"apiVersion":"v1","kind":"ConfigMap","data":{"shared":"version: v1","gpuslice-7a8b9c":"version: v1"}}`), metav1.PatchOptions{FieldManager: "argocd"})
	if err != nil {
		s.t.Fatal(err)
	}
	_, err = s.admin.CoreV1().ConfigMaps("gpu-operator").Patch(s.t.Context(), "device-plugin-config", types.MergePatchType,
		[]byte(`{"data":{"gpuslice-0d1e2f":"version: v1"}}`), metav1.PatchOptions{FieldManager: "kubectl-edit"})
	if err != nil {
		s.t.Fatal(err)
	}
	_, err = s.admin.CoordinationV1().Leases("gpuslice").Patch(s.t.Context(), "gpuslice-pool-paused", types.ApplyPatchType,
		[]byte(`{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"annotations":{"gpuslice.io/slots":""}}}`), metav1.PatchOptions{FieldManager: "argocd"})
	if err != nil {
		s.t.Fatal(err)
	}
}

// apply deploys the operator's overlay with components, as people do.
func (s *scene) apply(components ...string) {
	s.kubectl("apply", "-k", kustomization(s.t, "gpu-operator", components...))
}

// kustomization writes one of an overlay with components, and returns its folder. kustomize takes relative paths alone.
func kustomization(t *testing.T, overlay string, components ...string) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	there, err := filepath.Abs(deployFolder)
	if err != nil {
		t.Fatal(err)
	}
	up, err := filepath.Rel(dir, there)
	if err != nil {
		t.Fatal(err)
	}
	text := "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n- " + filepath.Join(up, overlayFolder(overlay)) + "\n"
	if len(components) > 0 {
		text += "components:\n"
	}
	for _, c := range components {
		text += "- " + filepath.Join(up, "components", c) + "\n"
	}
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func overlayFolder(overlay string) string {
	if overlay == "base" {
		return overlay
	}
	return filepath.Join("overlays", overlay)
}

func (s *scene) kubectl(args ...string) string {
	s.t.Helper()
	cmd := exec.CommandContext(s.t.Context(), s.cluster.Kubectl(), append([]string{"--kubeconfig", s.cluster.AdminKubeconfig()}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		s.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// until waits for something, and says what for when it does not come.
func (s *scene) until(what string, done wait.ConditionWithContextFunc) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	if err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, done); err != nil {
		s.t.Fatalf("waiting for %s: %v", what, err)
	}
}

func ignoring(err error, is func(error) bool) error {
	if err != nil && is(err) {
		return nil
	}
	return err
}

// agent is how the agent's pod reaches the API server.
func (s *scene) agent() *rest.Config {
	s.t.Helper()
	pod, err := s.admin.CoreV1().Pods("gpuslice").Get(s.t.Context(), "agent", metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	c, err := s.cluster.PodConfig(s.t.Context(), pod)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// unbound is how somebody does with a token of the agent's account that no pod has.
func (s *scene) unbound() *rest.Config {
	s.t.Helper()
	c, err := s.cluster.ServiceAccountConfig(s.t.Context(), "gpuslice", "gpuslice-agent")
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// inTheNameOf is the same in the name of another user.
func inTheNameOf(c *rest.Config, user string, groups ...string) *rest.Config {
	c = rest.CopyConfig(c)
	c.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups}
	return c
}

// tries makes a client that changes nothing: admission is asked all the same.
func (s *scene) tries(c *rest.Config) kubernetes.Interface {
	s.t.Helper()
	c = rest.CopyConfig(c)
	c.UserAgent = nodewrite.FieldManager // the API server takes the name of a writer's fields from it
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return dryRun{next} })
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		s.t.Fatal(err)
	}
	return client
}

// dryRun has the API server do everything but write.
type dryRun struct{ next http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (d dryRun) RoundTrip(request *http.Request) (*http.Response, error) {
	if request.Method != http.MethodGet {
		request = request.Clone(request.Context())
		query := request.URL.Query()
		query.Set("dryRun", metav1.DryRunAll)
		request.URL.RawQuery = query.Encode()
	}
	return d.next.RoundTrip(request)
}

// denied tells a refusal from success. Any other answer, as to a request that makes no sense, fails the test.
func denied(err error) (bool, error) {
	switch {
	case err == nil:
		return false, nil
	case apierrors.IsForbidden(err), apierrors.IsConflict(err): // a conflict is with the UID that was named
		return true, nil
	default:
		return false, fmt.Errorf("neither done nor denied: %w", err)
	}
}
