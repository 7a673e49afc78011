package admit_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/gpuslice/gpuslice/cmd/gpuslice-agent/admit"
	"github.com/gpuslice/gpuslice/test/clientset"
)

// server is an API server that knows some tokens. A test in test/shipped asks a real one.
type server struct {
	*fake.Clientset
	users   map[string]string // by token
	rights  map[string]bool   // by user
	away    bool
	reviews atomic.Int32 // of tokens
}

func newServer(t *testing.T) (*server, http.Handler) {
	t.Helper()
	s := &server{Clientset: fake.NewClientset(), users: map[string]string{"prometheus": "p", "tenant": "t"}, rights: map[string]bool{"p": true}}
	s.PrependReactor("create", "tokenreviews", func(action k8stesting.Action) (bool, runtime.Object, error) {
		s.reviews.Add(1)
		if s.away {
			return true, nil, apierrors.NewInternalError(context.DeadlineExceeded)
		}
		review := action.(k8stesting.CreateAction).GetObject().(*authenticationv1.TokenReview) //nolint:errcheck // it is
		user, known := s.users[review.Spec.Token]
		review.Status = authenticationv1.TokenReviewStatus{Authenticated: known, User: authenticationv1.UserInfo{
			Username: user, UID: "1", Groups: []string{"g"}, Extra: map[string]authenticationv1.ExtraValue{"k": {"v"}},
		}}
		return true, review, nil
	})
	s.PrependReactor("create", "subjectaccessreviews", func(action k8stesting.Action) (bool, runtime.Object, error) {
		review := action.(k8stesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview) //nolint:errcheck // it is
		if got := fmt.Sprint(review.Spec.UID, review.Spec.Groups, review.Spec.Extra, *review.Spec.NonResourceAttributes); got != "1[g] map[k:[v]] {/metrics get}" {
			t.Errorf("asked about %s", got)
		}
		review.Status.Allowed = s.rights[review.Spec.User]
		return true, review, nil
	})
	door, err := admit.New(admit.Options{Client: clientset.Of(s), Log: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	return s, door.Before(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "metrics") }))
}

// ask sends the header, and returns the status of the answer.
func ask(ctx context.Context, t *testing.T, h http.Handler, authorization string) int {
	t.Helper()
	return askFrom(ctx, t, h, "192.0.2.1:1234", authorization)
}

func askFrom(ctx context.Context, t *testing.T, h http.Handler, peer, authorization string) int {
	t.Helper()
	r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/metrics", http.NoBody)
	r.RemoteAddr = peer
	if authorization != "" {
		r.Header.Set("Authorization", authorization)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if admitted := w.Body.String() == "metrics"; admitted != (w.Code == http.StatusOK) {
		t.Errorf("status %d, and the answer is %q", w.Code, w.Body)
	}
	return w.Code
}

func TestOnlyClientsWithTheRightAreLetIn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, h := newServer(t)
		for authorization, want := range map[string]int{
			"": 401, "Bearer": 401, "Bearer ": 401, "Basic prometheus": 401, "prometheus": 401, "Bearer made-up": 401,
			"Bearer " + strings.Repeat("x", 7<<10): 401, "Bearer tenant": 403, "Bearer prometheus": 200, "bearer prometheus": 200,
		} {
			if got := ask(t.Context(), t, h, authorization); got != want {
				t.Errorf("%.30q gets %d, want %d", authorization, got, want)
			}
		}
		if s.reviews.Load() != 3 {
			t.Errorf("the API server was asked %d times about three tokens", s.reviews.Load())
		}
	})
}

func TestARightThatIsTakenAwayIsGoodForAMinute(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, h := newServer(t)
		said := func() string {
			return fmt.Sprint(ask(t.Context(), t, h, "Bearer prometheus"), " after ", s.reviews.Load())
		}
		if got := said() + ", " + said(); got != "200 after 1, 200 after 1" {
			t.Error(got)
		}
		<-time.After(59 * time.Second)
		s.rights["p"] = false
		if got := said(); got != "200 after 1" {
			t.Error(got)
		}
		<-time.After(time.Second)
		if got := said() + ", " + said(); got != "403 after 2, 403 after 3" {
			t.Error(got)
		}
		s.rights["p"] = true
		if got := said(); got != "200 after 4" {
			t.Error(got)
		}
	})
}

func TestNoClientIsLetInWhileTheAPIServerIsAway(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, h := newServer(t)
		ask(t.Context(), t, h, "Bearer prometheus")
		s.away = true
		if got := ask(t.Context(), t, h, "Bearer prometheus"); got != 200 {
			t.Errorf("within the minute %d", got)
		}
		<-time.After(time.Minute)
		if got := ask(t.Context(), t, h, "Bearer prometheus"); got != 503 {
			t.Errorf("after it %d", got)
		}
		s.away = false
		if got := ask(t.Context(), t, h, "Bearer prometheus"); got != 200 {
			t.Errorf("when it is back %d", got)
		}
	})
}

// TestPromise16TokensThatAreMadeUpKeepNoPrometheusOut: as many clients as there may be connections ask again and again, each with another token. The
// API server gets one review a second, and the agent answers Prometheus at once in the meantime.
func TestPromise16TokensThatAreMadeUpKeepNoPrometheusOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, h := newServer(t)
		ask(t.Context(), t, h, "Bearer prometheus")
		ctx, stop := context.WithCancel(t.Context())
		for n := range 64 {
			go func() {
				for i := 0; ctx.Err() == nil; i++ {
					if got := ask(ctx, t, h, fmt.Sprintf("Bearer %d-%d", n, i)); got != 401 && got != 503 {
						t.Errorf("a token that is made up gets %d", got)
					}
				}
			}()
		}
		began, before := time.Now(), s.reviews.Load()
		for range 20 {
			<-time.After(30 * time.Second)
			if asked := time.Now(); ask(t.Context(), t, h, "Bearer prometheus") != 200 || time.Since(asked) > 0 {
				t.Errorf("Prometheus waits for %v", time.Since(asked))
			}
		}
		stop()
		synctest.Wait()
		if most := int32(time.Since(began).Seconds()) + 30; s.reviews.Load()-before > most {
			t.Errorf("the API server was asked %d times in %v", s.reviews.Load()-before, time.Since(began))
		}
	})
}

// The agent knows no token when it starts. Prometheus, which asks from an address of its own, waits for no more than the review that is under way.
func TestATokenThatIsNotKnownYetIsReviewedBeforeThoseOfAddressesThatWereRefused(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		_, h := newServer(t)
		ctx, stop := context.WithCancel(t.Context())
		for n := range 16 {
			go func() {
				for i := 0; ctx.Err() == nil; i++ {
					askFrom(ctx, t, h, fmt.Sprintf("192.0.2.%d:%d", n+1, i+1), fmt.Sprintf("Bearer %d-%d", n, i))
				}
			}()
		}
		<-time.After(30 * time.Second)
		began := time.Now()
		if got := askFrom(t.Context(), t, h, "192.0.2.200:1", "Bearer prometheus"); got != 200 || time.Since(began) > 2*time.Second {
			t.Errorf("it gets %d after %s", got, time.Since(began))
		}
		stop()
		synctest.Wait()
	})
}
