package metrics

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/drain/kube"
)

func TestRequestsToTheAPIServerAreCounted(t *testing.T) {
	t.Parallel()
	m := New(clock.RealClock{})
	m.CountRequests()
	server := httptest.NewServer(http.NotFoundHandler())
	client, err := kube.New(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := client.Nodes().Get(t.Context(), "node", metav1.GetOptions{}); err == nil {
			t.Fatal("a server that has nothing has a node")
		}
	}
	server.Close()
	if err := client.Pods("default").Delete(t.Context(), "pod", metav1.DeleteOptions{}); err == nil {
		t.Fatal("a server that is closed has answered")
	}
	want := strings.NewReader(`
# HELP gpuslice_api_requests_total The number of requests to the API server by HTTP verb and class of the answer: 2xx, 4xx, none. Requests that the agent holds back while the API server fails count as none, too.
# TYPE gpuslice_api_requests_total counter
gpuslice_api_requests_total{code="4xx",verb="GET"} 3
gpuslice_api_requests_total{code="none",verb="DELETE"} 1
`)
	if err := testutil.GatherAndCompare(m.Gatherer(), want, "gpuslice_api_requests_total"); err != nil {
		t.Error(err)
	}
}
