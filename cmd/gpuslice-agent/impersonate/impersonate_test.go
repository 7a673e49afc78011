package impersonate_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/zap"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/impersonate"
	"github.com/gpuslice/gpuslice/config"
)

// server is an API server that answers with the status that the function gives, and notes who has asked for what.
type server struct {
	status func(*http.Request) int

	mu    sync.Mutex
	asked []string
}

// RoundTrip implements http.RoundTripper.
func (s *server) RoundTrip(request *http.Request) (*http.Response, error) {
	who := "account"
	if as := request.Header.Get("Impersonate-User"); as != "" {
		who = as
	}
	s.mu.Lock()
	s.asked = append(s.asked, who+": "+request.Method+" "+request.URL.RequestURI())
	s.mu.Unlock()
	code := s.status(request)
	if code == 0 {
		<-request.Context().Done()
		return nil, request.Context().Err()
	}
	answer := httptest.NewRecorder()
	answer.Header().Set("Content-Type", "application/json")
	answer.WriteHeader(code)
	if code == http.StatusOK {
		fmt.Fprint(answer, `{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[]}`)
	} else {
		fmt.Fprintf(answer, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d,"reason":%q}`, code,
			map[int]metav1.StatusReason{403: metav1.StatusReasonForbidden, 404: metav1.StatusReasonNotFound}[code])
	}
	return answer.Result(), nil
}

// takeAsked returns what was asked since the last time.
func (s *server) takeAsked() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	asked := s.asked
	s.asked = nil
	return asked
}

const (
	askOwn = "system:node:gpu-1: GET /api/v1/pods?fieldSelector=spec.nodeName%3Dgpu-1&resourceVersion=0"
	askAll = "system:node:gpu-1: GET /api/v1/pods?limit=1"
)

// confines is an API server that lets nodes read and evict their own pods.
func confines(request *http.Request) int {
	switch {
	case request.Header.Get("Impersonate-User") == "", !strings.HasSuffix(request.URL.Path, "/pods"), strings.Contains(request.URL.RawQuery, "spec.nodeName"):
		return http.StatusOK
	default:
		return http.StatusForbidden
	}
}

// refuses is one that knows no impersonation, or has given no right to it.
func refuses(request *http.Request) int {
	if request.Header.Get("Impersonate-User") != "" {
		return http.StatusForbidden
	}
	return http.StatusOK
}

// shows is one without what confines nodes.
func shows(*http.Request) int { return http.StatusOK }

func client(t *testing.T, s *server, access config.PodAccess) (kubernetes.Interface, *impersonate.Sender) {
	t.Helper()
	sender := impersonate.New(impersonate.Options{Node: "gpu-1", Access: access, Timeout: 15 * time.Second, Log: zap.NewNop()})
	c, err := kubernetes.NewForConfigAndClient(&rest.Config{Host: "https://server.example"}, &http.Client{Transport: sender.Wrap(s)})
	if err != nil {
		t.Fatal(err)
	}
	return c, sender
}

func list(ctx context.Context, c kubernetes.Interface) error {
	_, err := c.CoreV1().Pods("team").List(ctx, metav1.ListOptions{})
	return err
}

// What a node may read besides: the claims of its pods, and its slices. Nothing else of the group goes out in its name.
func TestClaimsAndSlicesAreReadInTheNameOfTheNode(t *testing.T) {
	t.Parallel()
	const node, account = "system:node:gpu-1: ", "account: "
	for _, row := range []struct{ method, path, who string }{
		{http.MethodGet, "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/c", node},
		{http.MethodGet, "/apis/resource.k8s.io/v1/resourceslices", node},
		{http.MethodGet, "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims", account},
		{http.MethodGet, "/apis/resource.k8s.io/v1/resourceclaims", account},
		{http.MethodGet, "/apis/resource.k8s.io/v1/resourceslices/s", account},
		{http.MethodPut, "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/c", account},
		{http.MethodPost, "/apis/resource.k8s.io/v1/resourceslices", account},
		{http.MethodPut, "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/c/status", account},
		{http.MethodGet, "/apis/resource.k8s.io/v1/deviceclasses", account},
	} {
		s := &server{status: confines}
		c, _ := client(t, s, config.PodAccessAuto)
		_ = c.CoreV1().RESTClient().Verb(row.method).AbsPath(row.path).Do(t.Context()).Error() // the answer is the test's own
		want := []string{row.who + row.method + " " + row.path}
		if row.who == node {
			want = append([]string{askOwn, askAll}, want...)
		}
		if diff := cmp.Diff(want, s.takeAsked()); diff != "" {
			t.Errorf("%s %s: requests (-want +got):\n%s", row.method, row.path, diff)
		}
	}
}

func TestPodsAreReadInTheNameOfTheNodeWhereThatConfines(t *testing.T) {
	t.Parallel()
	const asNode, asAccount = "system:node:gpu-1: GET /api/v1/namespaces/team/pods", "account: GET /api/v1/namespaces/team/pods"
	for name, test := range map[string]struct {
		access config.PodAccess
		status func(*http.Request) int
		want   []string
		works  bool
		known  bool
	}{
		"the API server confines nodes":        {config.PodAccessAuto, confines, []string{askOwn, askAll, asNode}, true, true},
		"it does not let the agent":            {config.PodAccessAuto, refuses, []string{askOwn, asAccount}, false, true},
		"it shows all pods to nodes":           {config.PodAccessAuto, shows, []string{askOwn, askAll, asAccount}, false, true},
		"the settings want nothing else":       {config.PodAccessImpersonation, refuses, []string{askOwn, asNode}, false, true},
		"the settings leave it to a policy":    {config.PodAccessPolicy, confines, []string{asAccount}, false, false},
		"the settings leave it to RBAC":        {config.PodAccessRBAC, confines, []string{asAccount}, false, false},
		"the settings want it, and it is open": {config.PodAccessImpersonation, confines, []string{askOwn, askAll, asNode}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &server{status: test.status}
			c, sender := client(t, s, test.access)
			if works, known := sender.Works(); works || known {
				t.Error("it is known before anything was asked")
			}
			_ = list(t.Context(), c) // the answer is the test's own
			if diff := cmp.Diff(test.want, s.takeAsked()); diff != "" {
				t.Errorf("requests (-want +got):\n%s", diff)
			}
			if works, known := sender.Works(); works != test.works || known != test.known {
				t.Errorf("works %t, known %t", works, known)
			}
			_ = list(t.Context(), c)
			if diff := cmp.Diff(test.want[len(test.want)-1:], s.takeAsked()); diff != "" {
				t.Errorf("requests of the second time (-want +got):\n%s", diff)
			}
		})
	}
}

// What else the agent asks for is asked in the name of its account: the API server refuses all of it to nodes, or would take other care.
func TestWhatIsNotAboutPodsIsAskedByTheAccount(t *testing.T) {
	t.Parallel()
	s := &server{status: confines}
	c, _ := client(t, s, config.PodAccessAuto)
	ctx := t.Context()
	_ = list(ctx, c)
	s.takeAsked()
	_, _ = c.CoreV1().Nodes().Get(ctx, "pods", metav1.GetOptions{})
	_, _ = c.CoreV1().ConfigMaps("pods").Get(ctx, "pods", metav1.GetOptions{})
	_, _ = c.PolicyV1().PodDisruptionBudgets("team").List(ctx, metav1.ListOptions{})
	_, _ = c.AppsV1().DaemonSets("team").Get(ctx, "pods", metav1.GetOptions{})
	_ = c.CoreV1().Pods("team").Delete(ctx, "a", metav1.DeleteOptions{})
	_ = c.CoreV1().RESTClient().Get().Namespace("team").Resource("pods").Name("a").SubResource("log").Do(ctx).Error()
	wantAll := func(who string, requests int) {
		t.Helper()
		asked := s.takeAsked()
		if len(asked) != requests || slices.ContainsFunc(asked, func(a string) bool { return !strings.HasPrefix(a, who+": ") }) {
			t.Errorf("the API server was asked\n%s\nwant %d requests of %s", strings.Join(asked, "\n"), requests, who)
		}
	}
	wantAll("account", 6)
	_, _ = c.CoreV1().Pods("team").Get(ctx, "a", metav1.GetOptions{})
	_ = c.CoreV1().Pods("team").EvictV1(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "a"}})
	wantAll("system:node:gpu-1", 2)
}

// An administrator gives other rights while the agent runs: a minute after a refusal, at most, it asks again.
func TestOtherRightsAreFoundOutWithoutARestart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &server{status: refuses}
		c, sender := client(t, s, config.PodAccessAuto)
		if err := list(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		s.status = func(request *http.Request) int { // now the account has no right to pods
			if request.Header.Get("Impersonate-User") == "" {
				return http.StatusForbidden
			}
			return confines(request)
		}
		<-time.After(2 * time.Minute)
		if err := list(t.Context(), c); !apierrors.IsForbidden(err) {
			t.Errorf("error %v", err)
		}
		_ = list(t.Context(), c)
		if works, known := sender.Works(); !works || !known {
			t.Errorf("works %t, known %t", works, known)
		}
		// Refusals of other kinds cost the API server no more than two questions a minute.
		s.takeAsked()
		for range 600 {
			_ = list(t.Context(), c)
			<-time.After(time.Second)
		}
		questions := len(slices.DeleteFunc(s.takeAsked(), func(asked string) bool { return asked != askOwn && asked != askAll }))
		if questions == 0 || questions > 2*10 {
			t.Errorf("%d questions in ten minutes", questions)
		}
	})
}

// Promise 14: a question has a deadline, and who waits for the answer to it has its own.
func TestPromise14ASilentAPIServerKeepsNoRequestBeyondItsDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := &server{status: func(*http.Request) int { return 0 }}
		c, sender := client(t, s, config.PodAccessAuto)
		began := time.Now()
		first := make(chan error)
		go func() { first <- list(t.Context(), c) }()
		synctest.Wait()
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := list(short, c); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > time.Second {
			t.Errorf("who came second: %v after %s", err, time.Since(began))
		}
		if err := <-first; !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > 15*time.Second {
			t.Errorf("who came first: %v after %s", err, time.Since(began))
		}
		if _, known := sender.Works(); known {
			t.Error("what was not answered is known")
		}
	})
}

func TestAnAnswerThatIsNeitherYesNorNoDecidesNothing(t *testing.T) {
	t.Parallel()
	s := &server{status: func(*http.Request) int { return http.StatusUnauthorized }}
	c, sender := client(t, s, config.PodAccessAuto)
	if err := list(t.Context(), c); err == nil || !strings.Contains(err.Error(), "401") {
		t.Errorf("error %v", err)
	}
	if _, known := sender.Works(); known {
		t.Error("it is known")
	}
}
