package agent_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
)

// fullWorld is a node of NVIDIA's DRA driver with a pod on each seventh of its three GPUs. Config "three" cuts GPU 0 again.
func fullWorld(t *testing.T, change ...func(*corev1.Pod)) *world {
	t.Helper()
	w := newWorld(t, "gpus: [{model: H100-80GB, count: 3}]")
	w.noPlugin, w.draDriver = true, true
	w.setConfigs(map[string]catalog.MIGConfig{
		"seven": {{All: true, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
		"three": {{Indices: []int{0}, MIG: true, Devices: map[string]int{"3g.40gb": 2}}, {Indices: []int{1, 2}, MIG: true, Devices: map[string]int{"1g.10gb": 7}}},
	})
	w.spend(time.Minute)
	w.converge("seven")
	for gpu := range 3 {
		for i := range 7 {
			w.podWithClaim(fmt.Sprintf("pod-%d-%d", gpu, i), fmt.Sprintf("gpu-%d-mig-1g10gb-%d", gpu, i), change...)
		}
	}
	return w
}

// expectRunning fails the test unless so many of the pods on each GPU are there.
func (w *world) expectRunning(onGPU0, onOthers int) {
	w.t.Helper()
	var zero, others int
	for _, p := range w.podsIn("team") {
		if strings.HasPrefix(p.Name, "pod-0-") {
			zero++
		} else {
			others++
		}
	}
	if zero != onGPU0 || others != onOthers {
		c := w.condition()
		w.t.Errorf("%d pods are on GPU 0, want %d; %d on others, want %d; the node says %s: %s", zero, onGPU0, others, onOthers, c.Reason, c.Message)
	}
}

// Promise 3. A claim that cannot be read is a reason to wait, and none to evict a pod; where kubelet names the devices, it is none either.
func TestAClaimThatCannotBeReadEvictsNoPod(t *testing.T) {
	t.Parallel()
	takes := func(d time.Duration) func(context.Context, string) error {
		return func(ctx context.Context, _ string) error {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(d):
				return nil
			}
		}
	}
	forbidden := func(_ context.Context, name string) error {
		return apierrors.NewForbidden(resourcev1.Resource("resourceclaims"), name, errors.New("no right"))
	}
	unprepared := func(p *corev1.Pod) { delete(p.Annotations, "device") } // as kubelet before Kubernetes 1.34 lists a pod
	for name, row := range map[string]struct {
		kubelet []func(*corev1.Pod)
		reads   func(w *world) func(context.Context, string) error
		waits   bool // until the deadline
	}{
		"one is refused for 5 seconds":                          {nil, refusedFor(5 * time.Second), false},
		"each takes a second":                                   {nil, func(*world) func(context.Context, string) error { return takes(time.Second) }, false},
		"each takes 9 seconds":                                  {nil, func(*world) func(context.Context, string) error { return takes(9 * time.Second) }, false},
		"the agent has no right":                                {nil, func(*world) func(context.Context, string) error { return forbidden }, false},
		"one is refused for 5 seconds, kubelet names no device": {[]func(*corev1.Pod){unprepared}, refusedFor(5 * time.Second), false},
		"one is refused for 5 minutes, kubelet names no device": {[]func(*corev1.Pod){unprepared}, refusedFor(5 * time.Minute), false},
		"each takes a second, kubelet names no device": {
			[]func(*corev1.Pod){unprepared}, func(*world) func(context.Context, string) error { return takes(time.Second) }, false,
		},
		"each takes 9 seconds, kubelet names no device": {
			[]func(*corev1.Pod){unprepared}, func(*world) func(context.Context, string) error { return takes(9 * time.Second) }, false,
		},
		"the agent has no right, kubelet names no device": {[]func(*corev1.Pod){unprepared}, func(*world) func(context.Context, string) error { return forbidden }, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := fullWorld(t, row.kubelet...)
				w.restart() // which has read no claim
				w.readsClaim = row.reads(w)
				fences := w.recordCordons()
				w.label("three")
				if row.waits {
					w.spend(2 * time.Hour)
					w.expectRunning(7, 14)
					c := w.condition()
					if c.Reason != string(config.ReasonHoldersUnknown) || !strings.Contains(c.Message, "grant the agent get on resourceclaims") || len(*fences) > 0 {
						t.Errorf("the node was fenced %d times, and says %s: %s", len(*fences), c.Reason, c.Message)
					}
					w.readsClaim = nil
				}
				w.reach("three")
				w.expectRunning(0, 14)
			})
		})
	}
}

// refusedFor has the API server refuse to read one claim, of a pod that stays, for as long from the first read on.
func refusedFor(d time.Duration) func(w *world) func(context.Context, string) error {
	return func(*world) func(context.Context, string) error {
		var first time.Time
		return func(_ context.Context, name string) error {
			if name != "pod-1-3-gpu" {
				return nil
			}
			if first.IsZero() {
				first = time.Now()
			}
			if time.Since(first) < d {
				return apierrors.NewTooManyRequests("not now", 1)
			}
			return nil
		}
	}
}

// A claim that had no device when the change began may have one when the GPU is cut: what has changed since then counts.
func TestAClaimIsReadAgainRightBeforeTheFirstCut(t *testing.T) {
	t.Parallel()
	for name, late := range map[string]func(w *world, claim *resourcev1.ResourceClaim){
		"it had no device": func(*world, *resourcev1.ResourceClaim) {},
		"it was not there": func(w *world, claim *resourcev1.ResourceClaim) {
			if err := w.client.Tracker().Delete(claimResource, claim.Namespace, claim.Name); err != nil {
				w.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newDrainingWorld(t)
				w.settings.Drain.Fence = config.DrainFenceNode
				w.restart()
				w.podWithClaim("by-hand", "gpu-0-mig-3g40gb-4", bound)
				claim, err := w.client.ResourceV1().ResourceClaims("team").Get(t.Context(), "by-hand-gpu", metav1.GetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				free := claim.DeepCopy()
				free.Status = resourcev1.ResourceClaimStatus{}
				if err := w.client.Tracker().Update(claimResource, free, "team"); err != nil {
					t.Fatal(err)
				}
				late(w, free)
				w.label("seven")
				w.untilCordoned()
				if !w.runs("by-hand") {
					t.Fatal("a pod has left whose claim has no device")
				}
				if err := w.client.Tracker().Delete(claimResource, "team", claim.Name); err != nil && !apierrors.IsNotFound(err) {
					t.Fatal(err)
				}
				if err := w.client.Tracker().Add(claim); err != nil {
					t.Fatal(err)
				}
				w.passes("the first cut", w.gpu0Changed)
				if w.runs("by-hand") {
					t.Error("a GPU was cut while a pod had a claim of it")
				}
				w.expectNothingLeft("seven")
			})
		})
	}
}

var claimResource = resourcev1.SchemeGroupVersion.WithResource("resourceclaims")
