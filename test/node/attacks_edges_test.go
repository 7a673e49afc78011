package node_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// traffic is what the agent asks the API server for.
type traffic struct {
	asked  atomic.Int64
	failed atomic.Int64
	// failsHalf has every second request fail.
	failsHalf atomic.Bool
}

// counted has the next agent reach the API server by a proxy that counts.
func (r *rig) counted() *traffic {
	r.t.Helper()
	t := &traffic{}
	r.behind(func(onward http.Handler, w http.ResponseWriter, request *http.Request) {
		if n := t.asked.Add(1); t.failsHalf.Load() && n%2 == 0 {
			t.failed.Add(1)
			http.Error(w, "no upstream", http.StatusServiceUnavailable)
			return
		}
		onward.ServeHTTP(w, request)
	})
	return t
}

// annotate merges annotations into the node's. That there is no room for them is told.
func (r *rig) annotate(ctx context.Context, values string) error {
	body := []byte(`{"metadata":{"annotations":{` + values + `}}}`)
	_, err := r.client.CoreV1().Nodes().Patch(ctx, r.Name, types.MergePatchType, body, metav1.PatchOptions{FieldManager: "mallory"})
	return err
}

// storm writes another annotation of the node 50 times a second until the returned function is called, which counts the writes.
func (r *rig) storm() (end func() int) {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.t.Context())
	var writes int
	var work sync.WaitGroup
	work.Go(func() {
		tick := time.NewTicker(time.Second / 50)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			switch err := r.annotate(ctx, fmt.Sprintf(`"example.com/storm":"%d"`, writes)); {
			case err == nil:
				writes++
			case ctx.Err() == nil:
				r.t.Error(err)
				return
			}
		}
	})
	r.t.Cleanup(cancel)
	return func() int {
		cancel()
		work.Wait()
		return writes
	}
}

// fill leaves no more room for annotations on the node than a few bytes.
func (r *rig) fill() {
	r.t.Helper()
	for size := 128 << 10; size >= 64; {
		name := fmt.Sprintf("example.com/fill-%d", size)
		switch err := r.annotate(r.t.Context(), fmt.Sprintf("%q:%q", name, strings.Repeat("x", size))); {
		case err == nil, apierrors.IsInvalid(err):
			size /= 2
		default:
			r.t.Fatal(err)
		}
	}
}

// Promises 14 and 16. Whoever may patch nodes, and an API server in trouble, make a change slower and dearer, and it ends all the same.
// The table of README.md has the figures.
func TestAChangeEndsDespiteOthersWritesAndAFailingAPIServer(t *testing.T) {
	t.Parallel()
	for name, trouble := range map[string]func(r *rig, all *traffic) (mend func() string){
		"undisturbed": func(*rig, *traffic) func() string { return func() string { return "" } },
		"50 annotations a second": func(r *rig, _ *traffic) func() string {
			end := r.storm()
			return func() string { return fmt.Sprintf(", %d writes of others", end()) }
		},
		"half of all requests fail": func(_ *rig, all *traffic) func() string {
			all.failsHalf.Store(true)
			return func() string { return fmt.Sprintf(", of which %d failed", all.failed.Load()) }
		},
		"annotations are full": func(r *rig, _ *traffic) func() string { // before it begins, nothing could be noted, so nothing would be begun
			r.await("the journal", func(n *corev1.Node) bool { return n.Annotations[config.AnnotationJournal] != "" })
			r.fill()
			return func() string { return "" }
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, twoH100, "")
			r.awaitOffered("nvidia.com/gpu", 2)
			namespace := clustertest.Namespace(t)
			r.user(namespace, "train", nil)
			all := r.counted()
			p := r.run()
			r.awaitReason(config.ReasonNotRequested)
			began, asked := time.Now(), all.asked.Load()
			r.label(config.LabelMIGConfig, "all-balanced")
			mend := trouble(r, all)
			n := r.awaitConverged("all-balanced")
			took, requests := time.Since(began), all.asked.Load()-asked
			t.Logf("%.1f s, %d requests%s, at most %d MiB", took.Seconds(), requests, mend(), r.resident(p, "VmHWM")>>10)
			r.givenBack(n)
		})
	}
}
