package access_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/access"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// errByRBAC and errByPolicy are the API server's refusals. A test in test/policy asks a real one.
var (
	errByRBAC   = apierrors.NewForbidden(schema.GroupResource{Resource: "any"}, "any", errors.New("no right"))
	errByPolicy = func() error {
		err := apierrors.NewForbidden(schema.GroupResource{Resource: "any"}, "any", errors.New("denied"))
		err.ErrStatus.Details.Causes = []metav1.StatusCause{{Message: "denied"}}
		return err
	}()
	// errWithoutParameters is that of a policy whose parameters are pods, in a namespace without any.
	errWithoutParameters = &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusUnprocessableEntity, Reason: metav1.StatusReasonInvalid, Details: &metav1.StatusDetails{
			Causes: []metav1.StatusCause{{Message: "ValidatingAdmissionPolicy 'gpuslice-agent-evictions' with binding 'gpuslice-agent-evictions' " +
				"denied request: failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction"}},
		},
	}}
	errNoAnswer = errors.New("connection refused")
)

// server answers each request with what the function returns; nil accepts it.
func server(answer func(clienttesting.Action) error, mayDelete bool) *fake.Clientset {
	client := fake.NewClientset()
	client.PrependReactor("*", "*", func(action clienttesting.Action) (bool, runtime.Object, error) {
		if action.GetResource().Resource == "selfsubjectaccessreviews" {
			return true, &authorizationv1.SelfSubjectAccessReview{Status: authorizationv1.SubjectAccessReviewStatus{Allowed: mayDelete}}, nil
		}
		return true, nil, answer(action)
	})
	return client
}

// policiesAct refuses the requests by which the agent tries the policies, and accepts those that it needs.
func policiesAct(action clienttesting.Action) error {
	if patch, ok := action.(clienttesting.PatchAction); ok && string(patch.GetPatch()) == "{}" {
		return nil
	}
	return errByPolicy
}

// evictionsOfNoPod refuses all but evictions, and finds no pod for those.
func evictionsOfNoPod(action clienttesting.Action) error {
	if action.GetSubresource() == "eviction" {
		return apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "gpuslice-policies")
	}
	return policiesAct(action)
}

// evictionsWithoutParameters has no pod in the namespace that the agent tries to evict from.
func evictionsWithoutParameters(action clienttesting.Action) error {
	if action.GetSubresource() == "eviction" {
		return errWithoutParameters
	}
	return policiesAct(action)
}

// noComponents gives no right to ConfigMaps and DeviceTaintRules.
func noComponents(answer func(clienttesting.Action) error) func(clienttesting.Action) error {
	return func(action clienttesting.Action) error {
		if r := action.GetResource().Resource; r == "configmaps" || r == "devicetaintrules" {
			return errByRBAC
		}
		return answer(action)
	}
}

// noEvictions gives no right to them.
func noEvictions(action clienttesting.Action) error {
	if action.GetSubresource() == "eviction" {
		return errByRBAC
	}
	return policiesAct(action)
}

// pods is an API server that lets the agent ask in the name of its node, or not.
type pods struct{ works, known bool }

func (p pods) Works() (works, known bool) { return p.works, p.known }

// want is what the settings say.
type want struct {
	deletes bool
	access  config.PodAccess
	pods    pods
}

// runChecker runs a checker to its end, and returns the Events and the metrics.
func runChecker(t *testing.T, client *fake.Clientset, w want) (events []string, metrics string) {
	t.Helper()
	recorder := record.NewFakeRecorder(10)
	checker := access.New(access.Options{
		Client: clientset.Of(client), Node: "gpu-1", Namespace: "gpuslice", Deletes: w.deletes,
		ConfigMap: config.ConfigMapName{Namespace: "gpu-operator", Name: "device-plugin-config"}, Access: w.access, Pods: w.pods, Timeout: time.Second, Heartbeat: 5 * time.Minute,
		Events: recorder, Log: zap.NewNop(),
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	checker.Begin(ctx)
	checker.Run(ctx)
	close(recorder.Events)
	for e := range recorder.Events {
		events = append(events, e)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(checker)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var text []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			text = append(text, m.GetLabel()[0].GetValue()+map[float64]string{0: "=0", 1: "=1"}[m.GetGauge().GetValue()])
		}
	}
	var status api.Status
	checker.Report(&status)
	if status.PodAccess != "" && !slices.Contains(text, string(status.PodAccess)+"=1") {
		t.Errorf("the status says %q, and the metrics %q", status.PodAccess, text)
	}
	return events, strings.Join(text, " ")
}

func TestUsersLearnWhatTheAccountMayDo(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer    func(clienttesting.Action) error
		want      want
		mayDelete bool
		events    []string // parts of each
		metrics   string
	}{
		"policies act": {
			answer: policiesAct, want: want{deletes: true}, mayDelete: true, metrics: "events=1 evictions=1 leases=1 nodes=1 policy=1",
		},
		"none is there": {
			answer: func(clienttesting.Action) error { return nil }, events: []string{"Unconfined"}, metrics: "events=0 evictions=0 leases=0 nodes=0 rbac=1",
		},
		"that for evictions has no parameter": {answer: evictionsWithoutParameters, metrics: "events=1 evictions=1 leases=1 nodes=1 policy=1"},
		"that for evictions is missing": {
			answer: evictionsOfNoPod,
			events: []string{"for: evictions;"}, metrics: "events=1 evictions=0 leases=1 nodes=1 rbac=1",
		},
		"the token names no node": {
			answer: func(clienttesting.Action) error { return errByPolicy }, events: []string{"does not name node gpu-1"},
			metrics: "events=1 evictions=1 leases=1 nodes=1 policy=1",
		},
		"the settings ask for a right that is missing": {
			answer: policiesAct, want: want{deletes: true}, events: []string{"delete-after-deadline"},
			metrics: "events=1 evictions=1 leases=1 nodes=1 policy=1",
		},
		"the API server lets it ask in the name of its node": {
			answer: evictionsOfNoPod, want: want{access: config.PodAccessAuto, pods: pods{works: true, known: true}},
			metrics: "events=1 leases=1 nodes=1 impersonation=1",
		},
		"the API server does not, and the settings want nothing else": {
			answer: policiesAct, want: want{access: config.PodAccessImpersonation, pods: pods{known: true}},
			events: []string{"components/impersonation"}, metrics: "events=1 evictions=1 leases=1 nodes=1 policy=1",
		},
		"the API server does not, and the account has no right of its own": {
			answer: noEvictions, want: want{access: config.PodAccessAuto, pods: pods{known: true}},
			events: []string{"deploy it without components/impersonation"}, metrics: "events=1 leases=1 nodes=1",
		},
		"the settings leave evictions to a policy, and the account has no right": {
			answer: noEvictions, want: want{access: config.PodAccessPolicy},
			events: []string{"deploy it without components/impersonation"}, metrics: "events=1 leases=1 nodes=1",
		},
		"the settings leave evictions to RBAC": {
			answer: evictionsOfNoPod, want: want{access: config.PodAccessRBAC}, metrics: "events=1 leases=1 nodes=1 rbac=1",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var events []string
			var metrics string
			synctest.Test(t, func(t *testing.T) {
				events, metrics = runChecker(t, server(noComponents(c.answer), c.mayDelete), c.want)
			})
			if len(events) != len(c.events) {
				t.Fatalf("events: %q, want %d", events, len(c.events))
			}
			for i, part := range c.events {
				if !strings.Contains(events[i], part) {
					t.Errorf("event %q does not say %q", events[i], part)
				}
			}
			if diff := cmp.Diff(c.metrics, metrics); diff != "" {
				t.Errorf("metrics (-want +got):\n%s", diff)
			}
		})
	}
}

// What only a component lets the agent write is tried where it may: what else a policy confines can be in force without the component's.
func TestThePoliciesOfComponentsAreTried(t *testing.T) {
	t.Parallel()
	accepts := func(resources ...string) func(clienttesting.Action) error {
		return func(action clienttesting.Action) error {
			if slices.Contains(resources, action.GetResource().Resource) {
				return nil
			}
			return policiesAct(action)
		}
	}
	for name, c := range map[string]struct {
		answer  func(clienttesting.Action) error
		event   string // a part of it
		metrics string
	}{
		"both act":                {policiesAct, "", "configmaps=1 devicetaintrules=1"},
		"that for rules does not": {accepts("devicetaintrules"), "apply deploy/components/device-taint-rules (deploy/SECURITY.md): no admission policy confines this agent's writes to its own node, for: devicetaintrules;", "configmaps=1 devicetaintrules=0"},
		"none does": {
			accepts("devicetaintrules", "configmaps"), "apply deploy/policies (deploy/SECURITY.md): no admission policy confines this agent's writes to its own node, for: configmaps, devicetaintrules;",
			"configmaps=0 devicetaintrules=0",
		},
		"the API server has neither": {func(action clienttesting.Action) error {
			if r := action.GetResource(); r.Resource == "configmaps" || r.Resource == "devicetaintrules" {
				return apierrors.NewNotFound(r.GroupResource(), "")
			}
			return policiesAct(action)
		}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				events, metrics := runChecker(t, server(c.answer, false), want{})
				if text := strings.Join(events, "\n"); (c.event == "") != (text == "") || !strings.Contains(text, c.event) {
					t.Errorf("Events %q, want %q", events, c.event)
				}
				if want := strings.TrimSpace(c.metrics + " events=1 evictions=1 leases=1 nodes=1 policy=1"); metrics != want {
					t.Errorf("metrics %q, want %q", metrics, want)
				}
			})
		})
	}
}

// A correct install applies the policies beside the agent, and the API server takes some seconds until they act. A finding that is no longer so is taken
// back, and an agent that is confined asks nothing more.
func TestPoliciesThatActLaterAreFound(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		after  time.Duration
		events []string
		asks   int // the bound of requests in an hour
	}{
		"at once":            {0, nil, 12},
		"within a minute":    {20 * time.Second, nil, 48},
		"after half an hour": {30 * time.Minute, []string{"Warning Unconfined", "Normal Unconfined"}, 100},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				client := server(noComponents(func(action clienttesting.Action) error {
					if time.Since(began) < row.after {
						return nil
					}
					return policiesAct(action)
				}), false)
				events, metrics := runChecker(t, client, want{})
				if !slices.EqualFunc(events, row.events, strings.HasPrefix) {
					t.Errorf("events %q, want %q", events, row.events)
				}
				if want := "events=1 evictions=1 leases=1 nodes=1 policy=1"; metrics != want {
					t.Errorf("metrics %q, want %q", metrics, want)
				}
				if n := len(client.Actions()); n > row.asks {
					t.Errorf("the API server was asked %d times, want at most %d", n, row.asks)
				}
			})
		})
	}
}

// A refusal by RBAC shows nothing about the policies. The agent asks an API server that does not answer a bounded number of times, and
// reports nothing that it does not know.
func TestWhatIsNotKnownIsNotReported(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]error{"no right to try": errByRBAC, "no answer": errNoAnswer} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				client := server(func(clienttesting.Action) error { return answer }, false)
				events, metrics := runChecker(t, client, want{})
				if len(events) > 0 || metrics != "" {
					t.Errorf("got %q %q", events, metrics)
				}
				if n := len(client.Actions()); n == 0 || n > 70 {
					t.Errorf("the API server was asked %d times", n)
				}
			})
		})
	}
}

// silent is an API server that takes a request and never answers.
type silent struct{}

func (silent) RoundTrip(request *http.Request) (*http.Response, error) {
	<-request.Context().Done()
	return nil, request.Context().Err()
}

// Promise 14: each request has a deadline, and the checker ends with the agent.
func TestASilentAPIServerHoldsNothingUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		client, err := kube.NewThrough(&rest.Config{Host: "https://silent.example"}, &http.Client{Transport: silent{}})
		if err != nil {
			t.Fatal(err)
		}
		recorder := record.NewFakeRecorder(1)
		checker := access.New(access.Options{
			Client: client, Node: "gpu-1", Namespace: "gpuslice", Pods: pods{}, Timeout: 15 * time.Second, Events: recorder, Log: zap.NewNop(),
		})
		began := time.Now()
		if _, err := checker.Find(t.Context()); err == nil {
			t.Error("something was found out")
		}
		if took := time.Since(began); took > 5*15*time.Second {
			t.Errorf("it took %s", took)
		}
		checker.Begin(t.Context())
		if took := time.Since(began); took > 6*15*time.Second {
			t.Errorf("with the start of an agent it took %s", took)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		checker.Run(ctx)
		if took := time.Since(began); took > 7*15*time.Second+5*time.Second {
			t.Errorf("it did not end with the agent, but after %s", took)
		}
	})
}
