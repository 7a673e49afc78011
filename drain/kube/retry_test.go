package kube_test

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/gpuslice/gpuslice/drain/kube"
)

var nodes = schema.GroupResource{Resource: "nodes"}

func TestOnlyWhatMayPassIsTriedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want int
	}{
		"too many requests": {apierrors.NewTooManyRequestsError("wait"), 6},
		"server's fault":    {apierrors.NewInternalError(io.EOF), 6},
		"unavailable":       {apierrors.NewServiceUnavailable("overloaded"), 6},
		"half an answer":    {io.ErrUnexpectedEOF, 6},
		"not found":         {apierrors.NewNotFound(nodes, "n"), 1},
		"conflict":          {apierrors.NewConflict(nodes, "n", io.EOF), 1},
		"forbidden":         {apierrors.NewForbidden(nodes, "n", io.EOF), 1},
		"too late":          {context.DeadlineExceeded, 1},
		"called off":        {context.Canceled, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			tried := 0
			began := time.Now()
			err := kube.Retry(t.Context(), func() error { tried++; return c.err })
			if !errors.Is(err, c.err) || tried != c.want {
				t.Errorf("%s: tried %d times, want %d: %v", name, tried, c.want, err)
			}
			_, unanswered := errors.AsType[*kube.UnansweredError](err)
			if want := c.want > 1 || name == "too late"; unanswered != want {
				t.Errorf("%s: counts as unanswered: %t, want %t", name, unanswered, want)
			}
			if took := time.Since(began); took > 3*time.Second {
				t.Errorf("%s: took %s", name, took)
			}
		})
	}
}

func TestTheServerSaysWhenToComeAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		tried := 0
		began := time.Now()
		err := kube.Retry(ctx, func() error {
			if tried++; tried == 1 {
				return apierrors.NewTooManyRequests("wait", 4)
			}
			return nil
		})
		if took := time.Since(began); err != nil || took < 4*time.Second {
			t.Errorf("%v after %s", err, took)
		}
		tried = 0
		if err := kube.Retry(ctx, func() error { tried++; return apierrors.NewTooManyRequests("wait", 60) }); err == nil || tried != 1 {
			t.Errorf("what would come after the deadline is waited for: %d tries, %v", tried, err)
		}
	})
}
