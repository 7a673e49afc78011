// Package retried sends a request to the API server again that has failed for a cause of the moment: too many requests, an error of the
// server or of what stands before it, an answer of which the end is missing.
package retried

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

const (
	// tries is how often a request is sent at most. Where half of all fail, one in sixty does not come through.
	tries = 6
	// firstPause is the pause before the second try. It doubles with each further one.
	firstPause = 50 * time.Millisecond
)

// Do sends the request until it succeeds, fails for a cause that stays, or has been sent six times, for as long as ctx lasts; then the
// error is an *Unanswered. The pauses
// are together some two seconds, and longer where the server asks for it. The request may have been done though it failed: it has to be one
// that can be sent twice.
func Do(ctx context.Context, request func() error) error {
	pause := firstPause
	for try := 1; ; try++ {
		err := request()
		if !transient(err) {
			return err
		}
		if try == tries || ctx.Err() != nil {
			return &Unanswered{err}
		}
		wait := pause/2 + rand.N(pause) // many nodes must not come at once
		if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
			wait = max(wait, time.Duration(seconds)*time.Second)
		}
		if until, ok := ctx.Deadline(); ok && time.Until(until) < wait {
			return &Unanswered{err}
		}
		select {
		case <-ctx.Done():
			return &Unanswered{err}
		case <-time.After(wait):
		}
		pause *= 2
	}
}

// Unanswered is a request that has failed for a cause of the moment each time.
type Unanswered struct{ error }

// Unwrap is how it failed the last time.
func (u *Unanswered) Unwrap() error { return u.error }

// transient reports whether the same request may well succeed a moment later.
func transient(err error) bool {
	var status apierrors.APIStatus
	told := errors.As(err, &status)
	switch {
	case err == nil || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded):
		return false
	case !told: // it was not answered, or by nothing that could be read
		return true
	case apierrors.IsTooManyRequests(err) || apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err):
		return true
	default:
		return status.Status().Code >= 500
	}
}

// ConfigMap reads a ConfigMap, and asks again as Do does.
func ConfigMap(ctx context.Context, client kubernetes.Interface, namespace, name string) (object *corev1.ConfigMap, err error) {
	err = Do(ctx, func() (err error) {
		object, err = client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		return err
	})
	return object, err
}
