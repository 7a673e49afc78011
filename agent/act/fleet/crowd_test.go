package fleet_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// crowd is a pool of many nodes, with the part of an API server that their agents ask for slots. It compares resourceVersions, and takes
// its time, which is that of a synctest bubble.
type crowd struct {
	*testing.T
	limit    int
	onTheWay time.Duration // how long a request or its answer takes at most

	lock      sync.Mutex
	nodes     []corev1.Node
	lease     *coordinationv1.Lease
	version   int
	requests  int
	conflicts int
	censuses  int // reads of all nodes
	most      int // nodes that had a slot at once
}

func (c *crowd) RoundTrip(r *http.Request) (*http.Response, error) {
	defer c.travel()
	c.travel()
	c.lock.Lock()
	defer c.lock.Unlock()
	c.requests++
	code, body := c.serve(r)
	return &http.Response{
		StatusCode: code, Request: r, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)),
	}, nil
}

func (c *crowd) travel() { <-time.After(c.onTheWay/10 + rand.N(c.onTheWay*9/10)) }

func (c *crowd) serve(r *http.Request) (int, []byte) {
	switch {
	case r.URL.Path == "/api/v1/nodes":
		return http.StatusOK, c.encode(c.page(r.URL.Query()))
	case strings.HasPrefix(r.URL.Path, "/api/v1/nodes/"):
		return http.StatusOK, c.encode(nodeOf(path.Base(r.URL.Path)))
	case r.Method == http.MethodGet && c.lease == nil:
		return c.refuse(apierrors.NewNotFound(coordinationv1.Resource("leases"), leaseOfPool))
	case r.Method == http.MethodGet:
		return http.StatusOK, c.encode(c.lease)
	}
	var lease coordinationv1.Lease
	if err := json.NewDecoder(r.Body).Decode(&lease); err != nil {
		c.Error(err)
	}
	if c.lease != nil && lease.ResourceVersion != c.lease.ResourceVersion {
		c.conflicts++
		return c.refuse(apierrors.NewConflict(coordinationv1.Resource("leases"), leaseOfPool, io.EOF))
	}
	c.version++
	lease.TypeMeta = metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"}
	lease.ResourceVersion = strconv.Itoa(c.version)
	c.lease = &lease
	c.most = max(c.most, len(stateOf(c, &lease).Holders))
	return http.StatusOK, c.encode(&lease)
}

// page returns the part of the nodes that is asked for.
func (c *crowd) page(query url.Values) corev1.NodeList {
	from, _ := strconv.Atoi(query.Get("continue"))
	size, err := strconv.Atoi(query.Get("limit"))
	if err != nil {
		c.Errorf("a list of all nodes at once: %v", err)
	}
	if from == 0 {
		c.censuses++
	}
	list := corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, Items: c.nodes[from:min(from+size, len(c.nodes))]}
	if from+size < len(c.nodes) {
		list.Continue = strconv.Itoa(from + size)
	}
	return list
}

func (c *crowd) refuse(err *apierrors.StatusError) (int, []byte) {
	status := err.Status()
	status.APIVersion, status.Kind = "v1", "Status"
	return int(status.Code), c.encode(status)
}

func (c *crowd) encode(object any) []byte {
	text, err := json.Marshal(object)
	if err != nil {
		c.Error(err)
	}
	return text
}

func nodeOf(name string) *corev1.Node {
	return &corev1.Node{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-of-" + name)},
		Status: corev1.NodeStatus{Capacity: oneGPU, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
}

// rollOut changes all nodes, which are labelled at the same moment: each agent asks until it has a slot, and returns it after the change.
func (c *crowd) rollOut(nodes int, change time.Duration) {
	c.Helper()
	for i := range nodes {
		c.nodes = append(c.nodes, *nodeOf(fmt.Sprintf("n%04d", i)))
	}
	pool := fleet.Pool{Name: "research", Limit: &maintenance.Limit{Nodes: c.limit}}
	asked := time.Now()
	var agents sync.WaitGroup
	for i := range c.nodes {
		node := &c.nodes[i]
		agents.Go(func() {
			client, err := kube.New(&rest.Config{
				Host: "http://api", Transport: c, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"},
			})
			if err != nil {
				c.Error(err)
				return
			}
			s := fleet.Leases{Client: client, Namespace: "gpuslice", Clock: clock.RealClock{}, Timeout: 10 * time.Second, Log: zap.NewNop()}
			one := fleet.Change{Node: node.Name, UID: node.UID, Operation: uuid.NewString(), Since: asked}
			if err := pass(c.Context(), &s, pool, one, change); err != nil {
				c.Errorf("%s: %v", node.Name, err)
			}
		})
	}
	agents.Wait()
	if c.most > c.limit {
		c.Errorf("%d nodes had a slot at once, with a limit of %d", c.most, c.limit)
	}
	if st := stateOf(c, c.lease); len(st.Holders)+len(st.Queue) > 0 {
		c.Errorf("at the end the Lease says %+v", st)
	}
}

// pass takes the node through a change, as agent/act/fleet does.
func pass(ctx context.Context, s *fleet.Leases, pool fleet.Pool, c fleet.Change, change time.Duration) error {
	again := func(err error) time.Duration {
		var full *fleet.Full
		switch {
		case errors.As(err, &full):
			return full.Retry
		case errors.Is(err, fleet.ErrContended):
			return time.Second + rand.N(time.Second)
		}
		return 0
	}
	for {
		err := s.Take(ctx, pool, c)
		if err == nil {
			break
		}
		after := again(err)
		if after == 0 {
			return err
		}
		<-time.After(after)
	}
	for began := time.Now(); time.Since(began) < change; <-time.After(time.Second) {
		if err := s.Renew(ctx, pool, c); err != nil && again(err) == 0 {
			return err
		}
	}
	for {
		err := s.Release(ctx, pool, c)
		after := again(err)
		if after == 0 {
			return err
		}
		<-time.After(after)
	}
}

func TestConflictsAndCensusesGrowNoFasterThanThePool(t *testing.T) {
	for name, row := range map[string]struct {
		nodes    int
		onTheWay time.Duration
		most     int // conflicts of an agent in a change
		censuses int // of all agents
	}{
		"30 nodes": {30, 10 * time.Millisecond, 6, 60}, "100 nodes": {100, 10 * time.Millisecond, 6, 140}, "300 nodes": {300, 10 * time.Millisecond, 6, 400},
		"200 nodes at a slow API server": {200, 100 * time.Millisecond, 12, 300},
	} {
		t.Run(name, func(t *testing.T) {
			if row.nodes > 100 {
				if testing.Short() {
					t.Skip("pools of 30 and 100 nodes")
				}
			}
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				c := &crowd{T: t, limit: row.nodes / 10, onTheWay: row.onTheWay}
				c.rollOut(row.nodes, 20*time.Second)
				each := func(n int) float64 { return float64(n) / float64(row.nodes) }
				t.Logf("%.2f conflicts, %.1f requests, %.2f censuses of an agent, in %s", each(c.conflicts), each(c.requests), each(c.censuses), time.Since(began))
				if c.conflicts > row.most*row.nodes {
					t.Errorf("%d conflicts, more than %d of an agent", c.conflicts, row.most)
				}
				if c.censuses > row.censuses {
					t.Errorf("agents have read all nodes %d times, more than %d: each has to once, and few in vain", c.censuses, row.censuses)
				}
			})
		})
	}
}

func TestANodeThatIsAloneWaitsForNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		c := &crowd{T: t, limit: 1, onTheWay: 10 * time.Millisecond}
		c.rollOut(1, 0)
		if took := time.Since(began); took > time.Duration(c.requests)*2*c.onTheWay {
			t.Errorf("%d requests took %s", c.requests, took)
		}
	})
}
