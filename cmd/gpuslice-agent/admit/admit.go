// Package admit asks the API server whether a client may read the agent's metrics. It knows nothing of metrics.
//
// It sends the two reviews by client-go, and keeps the answers. The control plane's own programs use k8s.io/apiserver for this, which (v0.37) would
// link 187 more packages into the agent, CEL and OpenTelemetry's exporters among them.
package admit

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/drain/kube"
)

const (
	// Path is the path of the metrics, and the right that a client needs: nonResourceURLs in RBAC, with the verb get.
	Path = "/metrics"

	// goodFor is how long the agent keeps an answer of the API server. A client that loses its right may read as long.
	goodFor = time.Minute
	// knownFor is how long a token that was good is reviewed before tokens that the agent does not know. Prometheus must scrape more often.
	knownFor = time.Hour
	// mostKnown is enough for two Prometheus servers, with the tokens that they had before.
	mostKnown = 16
	// reviewTime is for both reviews together: Prometheus waits for ten seconds.
	reviewTime = 5 * time.Second
	// betweenStrangers is the least time between two reviews of unknown tokens. So all agents of a large cluster together send the API server
	// fewer requests than its own clients do, however many tokens a client makes up.
	betweenStrangers = time.Second
	// longestToken is several times the length of a service account's token.
	longestToken = 6 << 10 // bytes
)

var (
	errNoToken  = errors.New("there is no bearer token")
	errStranger = errors.New("the API server does not know the token")
	errNoRight  = errors.New("the token's user has no right to get " + Path)
	errTooMany  = errors.New("too many concurrent requests with unknown tokens")
)

// Options are what a Door needs.
type Options struct {
	// Client has the right to create tokenreviews and subjectaccessreviews. It has its own rate limit, so that reviews do not delay the
	// agent's other requests.
	Client kube.Interface
	// Admitted is called with the address of each client that is let in, as http.Request has it; may be nil.
	Admitted func(peer string)
	Log      *zap.Logger
}

// Door lets clients in that have the right.
type Door struct {
	o    Options
	salt [sha256.Size]byte
	// At most one known token and one unknown token are under review at a time: a client that makes tokens up keeps no Prometheus out.
	known, strangers line

	asked time.Time // when an unknown token was last reviewed; the goroutine that holds strangers may use it

	mu sync.Mutex
	in map[[sha256.Size]byte]time.Time // when each token was found good
}

// New makes a Door that knows no token.
func New(o Options) (*Door, error) {
	d := &Door{o: o, in: map[[sha256.Size]byte]time.Time{}}
	if _, err := rand.Read(d.salt[:]); err != nil {
		return nil, fmt.Errorf("reading random bytes: %w", err)
	}
	return d, nil
}

// Before lets next answer clients that have the right. It answers others that they need a token (401), that theirs has no right (403), or that
// the API server, or the agent, has no time for a review (503).
func (d *Door) Before(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := d.admits(r)
		switch {
		case err == nil:
			if d.o.Admitted != nil {
				d.o.Admitted(r.RemoteAddr)
			}
			next.ServeHTTP(w, r)
			return
		case errors.Is(err, errNoToken), errors.Is(err, errStranger):
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, err.Error(), http.StatusUnauthorized)
		case errors.Is(err, errNoRight):
			http.Error(w, err.Error(), http.StatusForbidden)
		default:
			http.Error(w, "whether you may ask cannot be found out now", http.StatusServiceUnavailable)
		}
		d.o.Log.Debug("metrics were refused", zap.String("peer", r.RemoteAddr), zap.Error(err))
	})
}

func (d *Door) admits(r *http.Request) (err error) {
	kind, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if token = strings.TrimSpace(token); !strings.EqualFold(kind, "Bearer") || token == "" || len(token) > longestToken {
		return errNoToken
	}
	key := sha256.Sum256(append(d.salt[:], token...)) // no token stays in memory longer than its request
	if d.age(key) < goodFor {
		return nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), reviewTime)
	defer cancel()
	turn := &d.strangers
	if d.age(key) < knownFor {
		turn = &d.known
	}
	peer, _, _ := net.SplitHostPort(r.RemoteAddr)
	if err := turn.enter(ctx, peer); err != nil {
		return err
	}
	defer func() { turn.leave(peer, errors.Is(err, errStranger) || errors.Is(err, errNoRight)) }()
	if d.age(key) < goodFor { // the request before has had the same token reviewed
		return nil
	}
	if turn == &d.strangers {
		if err := d.pace(ctx); err != nil {
			return err
		}
	}
	began := time.Now()
	err = d.review(ctx, token)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case err == nil:
		d.remember(key, began)
	case errors.Is(err, errStranger), errors.Is(err, errNoRight):
		delete(d.in, key)
	}
	return err
}

// age returns the time since the token was found good; a very long time for other tokens.
func (d *Door) age(key [sha256.Size]byte) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	if at, ok := d.in[key]; ok {
		return time.Since(at)
	}
	return knownFor
}

// pace waits until an unknown token may be reviewed. Only the goroutine that holds strangers calls it.
func (d *Door) pace(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return errTooMany
	case <-time.After(betweenStrangers - time.Since(d.asked)):
		d.asked = time.Now()
		return nil
	}
}

// remember notes a token that is good. If there are too many, it drops the oldest.
func (d *Door) remember(key [sha256.Size]byte, at time.Time) {
	d.in[key] = at
	if len(d.in) <= mostKnown {
		return
	}
	oldest := key
	for k, of := range d.in {
		if of.Before(d.in[oldest]) {
			oldest = k
		}
	}
	delete(d.in, oldest)
}

// review asks the API server which user the token is of, and whether that user has the right.
func (d *Door) review(ctx context.Context, token string) error {
	who, err := d.o.Client.TokenReviews().Create(ctx, &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("asking who owns a token: %w", err)
	}
	if !who.Status.Authenticated {
		return errStranger
	}
	user := who.Status.User
	extra := map[string]authorizationv1.ExtraValue{}
	for key, values := range user.Extra {
		extra[key] = authorizationv1.ExtraValue(values)
	}
	may, err := d.o.Client.SubjectAccessReviews().Create(ctx, &authorizationv1.SubjectAccessReview{
		Spec: authorizationv1.SubjectAccessReviewSpec{
			User: user.Username, Groups: user.Groups, UID: user.UID, Extra: extra,
			NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: Path, Verb: "get"},
		},
	}, metav1.CreateOptions{})
	switch {
	case err != nil:
		return fmt.Errorf("asking whether a user may get %s: %w", Path, err)
	case !may.Status.Allowed || may.Status.Denied:
		return errNoRight
	}
	return nil
}
