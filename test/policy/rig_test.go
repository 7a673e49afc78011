// Package policy_test asks a real API server what the token of one agent can do: it deploys deploy/ and tries to write what
// is not the agent's, without the admission policies and with them. The table of attempts is deploy/ATTEMPTS.md.
//
// It runs no agent: test/node has agents work under the policies.
package policy_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/kustomize"
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
	needed   []attempt    // the same of what the agent does
	token    *rest.Config // of the agent's pod
	plugin   string       // name of the pod of the DaemonSet in kube-system
	uids     map[string]string
	node     string // UID of node own
}

// keyed puts the UID of node own into the keys of a text.
func (s *scene) keyed(text string) string {
	return strings.ReplaceAll(text, ownKey, config.OwnPluginKey+s.node+"-")
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
	s.putFile("scene.yaml")
	own, err := s.admin.CoreV1().Nodes().Get(s.t.Context(), "own", metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	s.node = string(own.UID)
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

// applied has a tool of people apply, on the API server's side, keys of its own beside those that the agents write; and someone write one of
// the agents' keys and nothing else. kubectl would first make its own what it has applied on its side.
func (s *scene) applied() {
	s.t.Helper()
	_, err := s.admin.CoreV1().ConfigMaps("gpu-operator").Patch(s.t.Context(), "device-plugin-config", types.ApplyPatchType,
		[]byte(s.keyed(`{"apiVersion":"v1","kind":"ConfigMap","data":{"shared":"version: v1","gpuslice-UID-7a8b9c":"version: v1"}}`)), metav1.PatchOptions{FieldManager: "argocd"})
	if err != nil {
		s.t.Fatal(err)
	}
	_, err = s.admin.CoreV1().ConfigMaps("gpu-operator").Patch(s.t.Context(), "device-plugin-config", types.MergePatchType,
		[]byte(s.keyed(`{"data":{"gpuslice-UID-0d1e2f":"version: v1"}}`)), metav1.PatchOptions{FieldManager: "kubectl-edit"})
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
	s.t.Helper()
	s.put(s.build(kustomize.Over("overlays/gpu-operator", components...)))
}

// build is what kubectl makes of a kustomization of deploy/.
func (s *scene) build(files kustomize.Files) string {
	s.t.Helper()
	out, err := kustomize.Build(s.t, deployFolder, files)
	if err != nil {
		s.t.Fatal(err)
	}
	return out
}

// applies is the name by which kubectl apply writes.
const applies = "kubectl-client-side-apply"

// putFile writes the manifests of a file.
func (s *scene) putFile(name string) {
	s.t.Helper()
	manifests, err := os.ReadFile("testdata/" + name)
	if err != nil {
		s.t.Fatal(err)
	}
	s.put(string(manifests))
}

// put writes manifests under the name of kubectl apply, which itself takes a second of processor time for them. A field that the API server does
// not know fails the test.
func (s *scene) put(manifests string) {
	s.t.Helper()
	client, err := dynamic.NewForConfig(s.cluster.Config())
	if err != nil {
		s.t.Fatal(err)
	}
	groups, err := restmapper.GetAPIGroupResources(s.admin.Discovery())
	if err != nil {
		s.t.Fatal(err)
	}
	kinds := restmapper.NewDiscoveryRESTMapper(groups)
	decoder := yaml.NewYAMLOrJSONDecoder(strings.NewReader(manifests), 4096)
	for {
		object := &unstructured.Unstructured{}
		if err := decoder.Decode(object); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			s.t.Fatal(err)
		}
		kind := object.GroupVersionKind()
		mapping, err := kinds.RESTMapping(kind.GroupKind(), kind.Version)
		if err != nil {
			s.t.Fatal(err)
		}
		objects := client.Resource(mapping.Resource).Namespace(object.GetNamespace())
		if mapping.Scope.Name() == meta.RESTScopeNameRoot { // kustomize gives a policy a namespace all the same
			objects = client.Resource(mapping.Resource).Namespace("")
		}
		stored, err := objects.Create(s.t.Context(), object, metav1.CreateOptions{FieldManager: applies, FieldValidation: metav1.FieldValidationStrict})
		if apierrors.IsAlreadyExists(err) {
			err = s.patch(objects, object)
		} else if err == nil && kind.Group == "admissionregistration.k8s.io" && !equality.Semantic.DeepEqual(stored.Object["spec"], object.Object["spec"]) {
			// A default that the API server adds to a list is a difference for kubectl apply and for GitOps tools, each time.
			err = fmt.Errorf("the API server adds to the spec: %s", cmp.Diff(object.Object["spec"], stored.Object["spec"]))
		}
		if err != nil {
			s.t.Fatalf("applying %s %s: %v", object.GetKind(), object.GetName(), err)
		}
	}
}

// patch changes an object to what its manifest says. In a list that the API server merges by a key, elements that the manifest no longer has stay.
func (s *scene) patch(objects dynamic.ResourceInterface, object *unstructured.Unstructured) error {
	body, err := object.MarshalJSON()
	if err != nil {
		return err
	}
	_, err = objects.Patch(s.t.Context(), object.GetName(), types.StrategicMergePatchType, body,
		metav1.PatchOptions{FieldManager: applies, FieldValidation: metav1.FieldValidationStrict})
	return err
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

// unbound is how a person does with a token of the agent's account that no pod has.
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
	c.UserAgent = config.FieldManager // the API server takes the name of a writer's fields from it
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

// denied distinguishes a refusal from success. Any other answer, as to a request that makes no sense, fails the test.
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
