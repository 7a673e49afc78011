package node_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
)

// gate stands between the agent and the API server, and counts what the agent asks.
type gate struct {
	asked  atomic.Int64
	failed atomic.Int64
	fails  atomic.Bool // every second request from now on
}

// through has the next agent reach the API server by a gate.
func (r *rig) through() *gate {
	r.t.Helper()
	transport, err := rest.TransportFor(r.account)
	if err != nil {
		r.t.Fatal(err)
	}
	to, err := url.Parse(r.account.Host)
	if err != nil {
		r.t.Fatal(err)
	}
	g := &gate{}
	onward := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1, // watches are answered bit by bit
		Rewrite: func(p *httputil.ProxyRequest) { p.SetURL(to) },
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if n := g.asked.Add(1); g.fails.Load() && n%2 == 0 {
			g.failed.Add(1)
			http.Error(w, "no upstream", http.StatusServiceUnavailable)
			return
		}
		onward.ServeHTTP(w, request)
	}))
	r.t.Cleanup(func() {
		if r.agents.running != nil {
			r.kill() // it would watch on
		}
		server.Close()
	})
	if err := cluster.WriteKubeconfig(r.agents.kubeconfig, &rest.Config{Host: server.URL}); err != nil {
		r.t.Fatal(err)
	}
	return g
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
func TestAChangeEndsWhateverGoesOnAroundIt(t *testing.T) {
	t.Parallel()
	for name, trouble := range map[string]func(r *rig, g *gate) (mend func() string){
		"nothing goes on": func(*rig, *gate) func() string { return func() string { return "" } },
		"50 annotations a second": func(r *rig, _ *gate) func() string {
			end := r.storm()
			return func() string { return fmt.Sprintf(", %d writes of others", end()) }
		},
		"half of all requests fail": func(_ *rig, g *gate) func() string {
			g.fails.Store(true)
			return func() string { return fmt.Sprintf(", of which %d failed", g.failed.Load()) }
		},
		"annotations are full": func(r *rig, _ *gate) func() string { // before it begins, nothing could be noted, so nothing would be begun
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
			g := r.through()
			p := r.run()
			r.awaitReason(config.ReasonNoWish)
			began, asked := time.Now(), g.asked.Load()
			r.label(config.LabelMIGConfig, "all-balanced")
			mend := trouble(r, g)
			n := r.awaitConverged("all-balanced")
			took, requests := time.Since(began), g.asked.Load()-asked
			t.Logf("%.1f s, %d requests%s, at most %d MiB", took.Seconds(), requests, mend(), r.resident(p, "VmHWM")>>10)
			r.givenBack(n)
		})
	}
}
