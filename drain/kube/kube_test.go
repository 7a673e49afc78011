package kube_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// requests notes each request, and answers none.
type requests []string

var errSilent = errors.New("there is no API server")

// RoundTrip implements http.RoundTripper.
func (r *requests) RoundTrip(request *http.Request) (*http.Response, error) {
	var body []byte
	if request.Body != nil {
		var err error
		if body, err = io.ReadAll(request.Body); err != nil {
			return nil, err
		}
	}
	*r = append(*r, strings.Join([]string{
		request.Method, request.URL.String(), request.Header.Get("Accept"), request.Header.Get("Content-Type"), request.Header.Get("User-Agent"), string(body),
	}, "\n"))
	return nil, errSilent
}

// ask sends each request that the client can send.
func ask(ctx context.Context, c kube.Interface) {
	get, patch, create := metav1.GetOptions{ResourceVersion: "0"}, metav1.PatchOptions{FieldManager: "test"}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	list, body := metav1.ListOptions{LabelSelector: "a=b", Limit: 5}, []byte("{}")
	event := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "event"}}
	meta := metav1.ObjectMeta{Name: "lease", Namespace: "team"}
	for _, request := range []func() error{
		func() error { _, err := c.ConfigMaps("team").Get(ctx, "map", get); return err },
		func() error {
			_, err := c.ConfigMaps("team").Patch(ctx, "map", types.MergePatchType, body, patch)
			return err
		},
		func() error { _, err := c.DaemonSets("team").Get(ctx, "set", get); return err },
		func() error { _, err := c.Events("team").Create(ctx, event, create); return err },
		func() error {
			_, err := c.Events("team").Patch(ctx, "event", types.MergePatchType, body, patch)
			return err
		},
		func() error { _, err := c.Leases("team").Get(ctx, "lease", get); return err },
		func() error {
			_, err := c.Leases("team").Create(ctx, &coordinationv1.Lease{ObjectMeta: meta}, create)
			return err
		},
		func() error {
			_, err := c.Leases("team").Update(ctx, &coordinationv1.Lease{ObjectMeta: meta}, metav1.UpdateOptions{})
			return err
		},
		func() error {
			return c.Leases("team").Delete(ctx, "lease", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
		},
		func() error { _, err := c.Nodes().Get(ctx, "node", get); return err },
		func() error { _, err := c.Nodes().List(ctx, list); return err },
		func() error { _, err := c.Nodes().Watch(ctx, list); return err },
		func() error {
			_, err := c.Nodes().Patch(ctx, "node", types.StrategicMergePatchType, body, patch, "status")
			return err
		},
		func() error { _, err := c.PodDisruptionBudgets("team").List(ctx, list); return err },
		func() error { _, err := c.Pods("team").Get(ctx, "pod", get); return err },
		func() error { _, err := c.Pods("").List(ctx, list); return err },
		func() error {
			return c.Pods("team").Delete(ctx, "pod", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
		},
		func() error {
			return c.Pods("team").EvictV1(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: "pod", Namespace: "team"}})
		},
		func() error {
			_, err := c.SelfSubjectAccessReviews().Create(ctx, &authorizationv1.SelfSubjectAccessReview{}, create)
			return err
		},
		func() error {
			_, err := c.SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{}, create)
			return err
		},
		func() error {
			_, err := c.TokenReviews().Create(ctx, &authenticationv1.TokenReview{}, create)
			return err
		},
		func() error {
			return c.RawCore().Get().Resource("pods").VersionedParams(&list, metav1.ParameterCodec).Do(ctx).Error()
		},
		func() error { return c.RawPolicy().Get().Resource("poddisruptionbudgets").Do(ctx).Error() },
	} {
		_ = request() // its answer is errSilent
	}
}

// The API server sees no difference between this client and client-go's own that speaks protobuf.
func TestTheRequestsAreThoseOfClientGosOwnClient(t *testing.T) {
	t.Parallel()
	config := &rest.Config{Host: "https://server.example", UserAgent: "test/1"}
	var want, got requests
	speaks := rest.CopyConfig(config)
	speaks.ContentType, speaks.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	theirs, err := kubernetes.NewForConfigAndClient(speaks, &http.Client{Transport: &want})
	if err != nil {
		t.Fatal(err)
	}
	ours, err := kube.NewThrough(config, &http.Client{Transport: &got})
	if err != nil {
		t.Fatal(err)
	}
	ask(t.Context(), clientset.Of(theirs))
	ask(t.Context(), ours)
	if diff := cmp.Diff(want, got); diff != "" || len(got) != 23 {
		t.Errorf("%d requests (-client-go's own +ours):\n%s", len(got), diff)
	}
}

// A recorder's Events go to their own namespace, in the form of the other requests.
func TestEventsAreSentToTheirNamespace(t *testing.T) {
	t.Parallel()
	var got requests
	client, err := kube.NewThrough(&rest.Config{Host: "https://server.example"}, &http.Client{Transport: &got})
	if err != nil {
		t.Fatal(err)
	}
	sink, event := kube.EventSink{Client: client}, &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "event"}}
	_, first := sink.Create(event)
	_, again := sink.Patch(event, []byte("{}"))
	if !errors.Is(first, errSilent) || !errors.Is(again, errSilent) || len(got) != 2 {
		t.Fatalf("got %v and %v of %q, want the errors of two requests", first, again, got)
	}
	for i, want := range []string{"POST\nhttps://server.example/api/v1/namespaces/team/events\n", "PATCH\nhttps://server.example/api/v1/namespaces/team/events/event\n"} {
		if !strings.HasPrefix(got[i], want) {
			t.Errorf("sent %q, want %q", got[i], want)
		}
	}
	if _, err := sink.Update(event); !errors.Is(err, errors.ErrUnsupported) || len(got) != 2 {
		t.Errorf("an update: %v", err)
	}
}

func TestAConfigThatCannotBeMeantIsRefused(t *testing.T) {
	t.Parallel()
	for _, config := range []*rest.Config{{Host: "https://:a:b"}, {Host: "https://server.example", TLSClientConfig: rest.TLSClientConfig{CAFile: "/nothing"}}, {QPS: 5}} {
		if _, err := kube.New(config); err == nil {
			t.Errorf("a client is made of %v", config)
		}
	}
}
