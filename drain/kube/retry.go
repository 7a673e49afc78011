package kube

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// tries is how often Retry sends a request at most. If half of all requests fail, one in sixty does not succeed.
	tries = 6
	// firstPause is the pause before the second try. It doubles with each further one.
	firstPause = 50 * time.Millisecond
)

// Retry sends the request until it succeeds, fails for a permanent cause, has been sent six times, or ctx ends. In the last two cases the error is an
// *UnansweredError. The pauses add up to some two seconds, and more if the server requests it. While the server fails all requests like this one, it
// is not asked so soon, and Retry returns at once. The server may have performed a request that failed: so the request must be one that can be sent
// twice.
func Retry(ctx context.Context, request func() error) error {
	pause := firstPause
	for try := 1; ; try++ {
		err := request()
		if errors.Is(err, context.DeadlineExceeded) {
			return &UnansweredError{err}
		}
		if !transient(err) {
			return err
		}
		if try == tries || ctx.Err() != nil {
			return &UnansweredError{err}
		}
		wait := pause/2 + rand.N(pause) // the agents of many nodes must not ask at once
		if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
			wait = max(wait, time.Duration(seconds)*time.Second)
		}
		if paused, is := errors.AsType[*PausedError](err); is {
			if paused.Times >= tries {
				return &UnansweredError{err}
			}
			wait = max(wait, time.Until(paused.Until))
		}
		if until, ok := ctx.Deadline(); ok && time.Until(until) < wait {
			return &UnansweredError{err}
		}
		select {
		case <-ctx.Done():
			return &UnansweredError{err}
		case <-time.After(wait):
		}
		pause *= 2
	}
}

// UnansweredError is the error of a request that has failed for a transient cause each time, or has had no answer within its deadline.
type UnansweredError struct{ error }

// Unwrap returns the last error.
func (u *UnansweredError) Unwrap() error { return u.error }

// transient reports whether the same request may succeed a moment later.
func transient(err error) bool {
	var status apierrors.APIStatus
	answered := errors.As(err, &status)
	switch {
	case err == nil || errors.Is(err, context.Canceled):
		return false
	case !answered: // there was no answer, or an unreadable one
		return true
	case apierrors.IsTooManyRequests(err) || apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err):
		return true
	default:
		return status.Status().Code >= 500
	}
}

// GetConfigMap reads a GetConfigMap, and repeats the request as Retry does.
func GetConfigMap(ctx context.Context, client Interface, namespace, name string) (object *corev1.ConfigMap, err error) {
	err = Retry(ctx, func() (err error) {
		object, err = client.ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
		return err
	})
	return object, err
}
