package fleet_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/act/fleet"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
)

// history holds all versions of the Lease and of the nodes of a pool, in the order in which etcd has them.
type history struct {
	mu     sync.Mutex
	events []watch.Event
	ends   chan struct{}
}

// record watches until a node "end" appears.
func (w *world) record() *history {
	w.Helper()
	h := &history{ends: make(chan struct{}, 2)}
	list, err := w.client.CoreV1().Nodes().List(w.Context(), metav1.ListOptions{LabelSelector: w.pool.Selector.String()})
	if err != nil {
		w.Fatal(err)
	}
	nodes, err := w.client.CoreV1().Nodes().Watch(w.Context(), metav1.ListOptions{
		ResourceVersion: list.ResourceVersion, LabelSelector: w.pool.Selector.String(),
	})
	if err != nil {
		w.Fatal(err)
	}
	leases, err := w.client.CoordinationV1().Leases(w.namespace).Watch(w.Context(), metav1.ListOptions{})
	if err != nil {
		w.Fatal(err)
	}
	for _, each := range []watch.Interface{nodes, leases} {
		w.Cleanup(each.Stop)
		go func() {
			defer func() { h.ends <- struct{}{} }()
			for event := range each.ResultChan() {
				h.mu.Lock()
				h.events = append(h.events, event)
				h.mu.Unlock()
				object, ok := event.Object.(metav1.Object)
				if !ok || strings.HasSuffix(object.GetName(), "end") {
					return
				}
			}
		}()
	}
	return h
}

// replay ends the record, and calls at for each moment with the nodes that had a slot, and those that had one or were unavailable.
func (h *history) replay(w *world, at func(holders, away []string)) {
	w.Helper()
	w.create("end")
	_, err := w.client.CoordinationV1().Leases(w.namespace).Create(w.Context(), &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "end"}}, metav1.CreateOptions{})
	if err != nil {
		w.Fatal(err)
	}
	<-h.ends
	<-h.ends
	version := func(e watch.Event) uint64 {
		object, ok := e.Object.(metav1.Object)
		if !ok {
			w.Fatalf("the watch ended: %v", apierrors.FromObject(e.Object))
		}
		n, err := strconv.ParseUint(object.GetResourceVersion(), 10, 64)
		if err != nil {
			w.Fatal(err)
		}
		return n
	}
	slices.SortFunc(h.events, func(a, b watch.Event) int { return int(version(a)) - int(version(b)) })
	unavailable := map[string]bool{}
	var holders []string
	for _, e := range h.events {
		switch object := e.Object.(type) {
		case *corev1.Node:
			unavailable[object.Name] = fleet.Unavailable(object, config.StartupTaints{}) != "" && e.Type != watch.Deleted
		case *coordinationv1.Lease:
			if object.Name == "end" {
				continue
			}
			holders = nil
			for _, each := range stateOf(w, object).Holders {
				holders = append(holders, each.Node)
			}
		}
		away := slices.Clone(holders)
		for name, is := range unavailable {
			if is && !slices.Contains(away, name) {
				away = append(away, name)
			}
		}
		at(holders, away)
	}
}

// until calls Take until it succeeds, as an agent does, but with shorter pauses.
func (a *agent) until(ctx context.Context) error {
	return wait.PollUntilContextCancel(ctx, 200*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		var full *fleet.Full
		err := a.Take(ctx, a.pool, a.change)
		if errors.As(err, &full) || errors.Is(err, fleet.ErrContended) {
			return false, nil
		}
		return err == nil, err
	})
}

// changes takes and returns slots, with a cordon in between, as an agent does that is killed now and then.
func (a *agent) changes(ctx context.Context, rounds int, taken func(context.Context) error) error {
	a.Leases.Clock = clock.RealClock{}
	for range rounds {
		a.change.Since = time.Now()
		if err := a.until(ctx); err != nil {
			return err
		}
		if err := taken(ctx); err != nil {
			return err
		}
		if rand.IntN(3) == 0 { // killed before the fence
			a.restart()
			a.Leases.Clock = clock.RealClock{}
			if err := a.until(ctx); err != nil {
				return err
			}
		}
		for _, cordon := range []bool{true, false} {
			patch := fmt.Sprintf(`{"spec":{"unschedulable":%t}}`, cordon)
			_, err := a.client.CoreV1().Nodes().Patch(ctx, a.change.Node, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
			if err != nil {
				return err
			}
		}
		end := a.Release
		if rand.IntN(3) == 0 {
			end = a.Leave
		}
		if err := end(ctx, a.pool, a.change); err != nil {
			return err
		}
	}
	return nil
}

func TestNeverAreMoreNodesUnavailableThanTheLimitAllows(t *testing.T) {
	for name, unnamed := range map[string]bool{"of a named pool": false, "of a pool with a Lease that comes and goes": true} {
		t.Run(name, func(t *testing.T) { neverMoreThanTheLimit(t, unnamed) })
	}
}

func neverMoreThanTheLimit(t *testing.T, unnamed bool) {
	t.Helper()
	const nodes, rounds, limit = 20, 3, 3
	w := newWorld(t, atMost(limit))
	w.pool.Unnamed = unnamed
	agents := make([]*agent, nodes)
	for i := range agents {
		agents[i] = w.node(fmt.Sprintf("n%02d", i), 0)
	}
	history := w.record()
	// The first agents keep their slots until all slots are taken.
	var took atomic.Int64
	all := make(chan struct{})
	taken := func(ctx context.Context) error {
		if took.Add(1) == limit {
			close(all)
		}
		select {
		case <-all:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("waiting until %d have a slot: %w", limit, ctx.Err())
		}
	}
	bounded, cancel := context.WithTimeout(t.Context(), 20*time.Minute)
	defer cancel()
	group, ctx := errgroup.WithContext(bounded)
	for _, a := range agents {
		group.Go(func() error { return a.changes(ctx, rounds, taken) })
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	times := map[string]int{}
	var before []string
	history.replay(w, func(holders, away []string) {
		if len(away) > limit {
			t.Errorf("%d nodes are unavailable or have a slot: %s", len(away), w.short(strings.Join(away, " ")))
		}
		for _, h := range holders {
			if !slices.Contains(before, h) {
				times[h]++
			}
		}
		before = holders
	})
	for _, a := range agents {
		if times[a.change.Node] < rounds { // who is killed between its slot and its fence asks again, and may have to let another go first
			t.Errorf("%s had a slot %d times, want at least %d", w.short(a.change.Node), times[a.change.Node], rounds)
		}
	}
	if gone := w.leaseIsGone(); gone != unnamed {
		t.Errorf("at the end the Lease is gone: %t", gone)
	} else if line, holders := w.ends(); line != "" || holders != "" {
		t.Errorf("at the end have a slot: %q, and wait: %q", holders, line)
	}
}

// ends returns the nodes that wait and that have a slot; none where there is no Lease.
func (w *world) ends() (line, holders string) {
	w.Helper()
	if w.leaseIsGone() {
		return "", ""
	}
	return w.line(), w.holders()
}

func TestNodesThatAreUnavailableForOtherReasonsCount(t *testing.T) {
	const paused = `{"spec":{"taints":[{"key":%q,"effect":"NoSchedule"}]}}`
	for name, row := range map[string]struct {
		make func(w *world)
		said string
	}{
		"cordoned":  {func(w *world) { w.cordon("other", true) }, "cordoned by someone"},
		"not Ready": {func(w *world) { w.ready("other", corev1.ConditionFalse) }, "not Ready since 2026-12-01T11:30:00Z"},
		"unknown":   {func(w *world) { w.ready("other", corev1.ConditionUnknown) }, "not Ready since 2026-12-01T11:30:00Z"},
		"fenced":    {func(w *world) { w.patch("other", fmt.Sprintf(paused, config.TaintRepartitioning)) }, "being changed by gpuslice"},
		"devices closed to claims": {func(w *world) {
			w.patch("other", `{"metadata":{"annotations":{"gpuslice.io/journal":"{\"version\":1,\"operation\":\"a\",\"closed\":[\"gpu-0\"]}"}}}`)
		}, "being changed by gpuslice"},
		"not made ready": {func(w *world) { w.patch("other", fmt.Sprintf(paused, config.TaintNotReady)) }, "not yet made ready, it has the taint gpuslice.io/not-ready"},
		"not made ready, by a taint of the settings": {
			func(w *world) { w.patch("other", fmt.Sprintf(paused, "example.com/fresh")) }, "not yet made ready, it has the taint example.com/fresh",
		},
		"being deleted": {func(w *world) {
			w.patch("other", `{"metadata":{"finalizers":["example.com/kept"]}}`)
			w.deleteNode("other")
			w.Cleanup(func() {
				patch := []byte(`{"metadata":{"finalizers":null}}`)
				if _, err := w.client.CoreV1().Nodes().Patch(context.WithoutCancel(w.Context()), w.named("other"), types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
					w.Error(err)
				}
			})
		}, "being deleted"},
		"never reported": {func(w *world) {
			w.patch("other", `{"status":{"conditions":[{"type":"Ready","$patch":"delete"}]}}`, "status")
		}, "not Ready, kubelet has not reported yet"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, atMost(1))
			a := w.node("a", 0)
			w.create("other")
			row.make(w)
			a.wantRefused("pool research: 1 node may be unavailable at once; other: " + row.said)
			w.pool.Limit = atMost(2)
			a.mustTake()
		})
	}
}

// Users give labels, and whoever registers nodes gives labels and taints, to nodes that have no GPU and that no agent will ever return.
func TestOnlyNodesWithGPUsCount(t *testing.T) {
	status := func(text string) func(w *world) {
		return func(w *world) { w.patch("other", `{"status":`+text+`}`, "status") }
	}
	for name, row := range map[string]struct {
		make   func(w *world)
		counts bool
	}{
		"neither GPUs nor an agent":    {func(*world) {}, false},
		"the label of nodes with GPUs": {func(w *world) { w.patch("other", `{"metadata":{"labels":{"nvidia.com/gpu.present":"true"}}}`) }, false},
		"the startup taint": {func(w *world) {
			w.patch("other", `{"spec":{"taints":[{"key":"gpuslice.io/not-ready","effect":"NoSchedule"}]}}`)
		}, false},
		"another device of the same vendor": {status(`{"capacity":{"nvidia.com/rdma":"1"}}`), false},
		"GPUs":                              {status(`{"capacity":{"nvidia.com/gpu":"8"}}`), true},
		"GPUs of which none is left":        {status(`{"allocatable":{"nvidia.com/gpu":"0"}}`), true},
		"shared GPUs":                       {status(`{"capacity":{"nvidia.com/gpu.shared":"16"}}`), true},
		"parts of GPUs":                     {status(`{"capacity":{"nvidia.com/mig-1g.10gb":"7"}}`), true},
		"an agent's condition, under a driver that advertises no resource": {status(`{"conditions":[{"type":"GPUPartitionReady","status":"True"}]}`), true},
		"an agent's fence": {func(w *world) {
			w.patch("other", fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"effect":"NoSchedule"}]}}`, config.TaintRepartitioning))
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, atMost(1))
			a := w.node("a", 0)
			w.create("other")
			w.patch("other", `{"status":{"capacity":{"nvidia.com/gpu":null},"allocatable":{"nvidia.com/gpu":null}}}`, "status")
			w.cordon("other", true)
			row.make(w)
			if err := a.take(); (err != nil) != row.counts {
				t.Errorf("a cordoned node with %s counts: %t, want %t (%v)", name, err != nil, row.counts, err)
			}
		})
	}
	t.Run("in a percentage", func(t *testing.T) {
		w := newWorld(t, &maintenance.Limit{Percent: 20})
		a, b := w.node("a", 0), w.node("b", 0)
		for i := range 8 {
			name := fmt.Sprint("cpu", i)
			w.create(name)
			w.patch(name, `{"status":{"capacity":{"nvidia.com/gpu":null},"allocatable":{"nvidia.com/gpu":null}}}`, "status")
		}
		a.mustTake()
		b.wantRefused("pool research: 1 node may be unavailable at once; a: being changed by gpuslice")
	})
}

func TestANodeThatIsItselfUnavailableCountsOnce(t *testing.T) {
	w := newWorld(t, atMost(1))
	a := w.node("a", 0)
	w.cordon("a", true)
	a.mustTake()
	a.restart()
	a.mustTake()
}

func TestNodesOfOtherPoolsDoNotCount(t *testing.T) {
	w := newWorld(t, nil)
	a := w.node("a", 0)
	w.create("first")
	w.patch("first", `{"metadata":{"labels":{"first":"yes"}}}`)
	w.cordon("first", true)
	selector := func(text string) labels.Selector {
		s, err := labels.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	file := maintenance.Maintenance{Pools: []maintenance.Pool{
		{Name: "first", Selector: selector("first=yes"), MaxUnavailable: atMost(1)},
		{Name: "research", Selector: selector(poolLabel + "=" + w.namespace), MaxUnavailable: atMost(1), PauseAfter: 2},
	}}
	w.pool = fleet.PoolOf(file, file.Pools[1])
	a.mustTake()
	if w.pool.PauseAfter != 2 || w.pool.Name != "research" {
		t.Errorf("the pool is %+v", w.pool)
	}
}

func TestLimitsInPercent(t *testing.T) {
	w := newWorld(t, &maintenance.Limit{Percent: 20})
	var agents []*agent
	for i := range 4 {
		agents = append(agents, w.node(fmt.Sprint("n", i), 0))
	}
	agents[0].mustTake() // 20 % of 4 is none, which is one all the same
	agents[1].wantRefused("pool research: 1 node may be unavailable at once; n0: being changed by gpuslice")
	for i := range 6 {
		w.create(fmt.Sprint("new", i))
	}
	agents[1].mustTake() // 20 % of 10
	agents[2].wantRefused("pool research: 2 nodes may be unavailable at once; n0: being changed by gpuslice, n1: being changed by gpuslice")
	for i := range 6 {
		w.deleteNode(fmt.Sprint("new", i))
	}
	agents[2].wantRefused("pool research: 1 node may be unavailable at once; n0: being changed by gpuslice, n1: being changed by gpuslice")
	agents[0].release()
	agents[2].refused()
	agents[1].release()
	agents[2].mustTake()
}

func TestALimitOfNoneLetsNoNodeBegin(t *testing.T) {
	w := newWorld(t, atMost(0))
	a := w.node("a", 0)
	a.wantRefused("pool research: no node may be unavailable, its maxUnavailable is 0")
	a.pass(time.Hour)
	a.refused()
	if lists := w.wire.lists.Load(); lists != 0 {
		t.Errorf("the nodes were read %d times for a limit of 0", lists)
	}
}

func TestWithoutALimitAllHaveSlotsAndNoAgentReadsTheNodes(t *testing.T) {
	w := newWorld(t, nil)
	for i := range 3 {
		w.node(fmt.Sprint("n", i), 0).mustTake()
	}
	if holders := w.holders(); holders != "n0 n1 n2" {
		t.Errorf("slots have %q", holders)
	}
	if lists := w.wire.lists.Load(); lists != 0 {
		t.Errorf("the nodes were read %d times without a limit", lists)
	}
}

func TestASlotWhoseNodeIsGoneIsFreeAtOnce(t *testing.T) {
	for name, again := range map[string]bool{"deleted": false, "registered again": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, atMost(2))
			a, b, c := w.node("a", 0), w.node("b", 0), w.node("c", 0)
			a.mustTake()
			b.mustTake()
			c.refused()
			w.deleteNode("b")
			if again {
				w.create("b")
			}
			c.mustTake()
			if holders := w.holders(); holders != "a c" {
				t.Errorf("slots have %q", holders)
			}
		})
	}
}

func TestASlotIsKeptForANodeOfWhichTheLabelsHaveChanged(t *testing.T) {
	w := newWorld(t, atMost(2))
	a, b, c := w.node("a", 0), w.node("b", 0), w.node("c", 0)
	a.mustTake()
	w.patch("a", `{"metadata":{"labels":{"pool":"another"}}}`)
	b.mustTake()
	c.wantRefused("pool research: 2 nodes may be unavailable at once; a: being changed by gpuslice, b: being changed by gpuslice")
	if got := a.observe(); !got.Held {
		t.Errorf("a observes %+v", got)
	}
	a.release()
	if got := a.refused(); !strings.Contains(got, "is not among the 2 nodes of pool research") {
		t.Errorf("a node of another pool reads %q", got)
	}
}

// The agent of a node that has left the pool is gone in the middle of its change: the pool's list of nodes no longer shows the fence.
func TestAFencedNodeOfWhichTheLabelsHaveChangedKeepsItsSlotWithoutItsAgent(t *testing.T) {
	w := newWorld(t, atMost(1))
	a, b := w.node("a", 0), w.node("b", 0)
	a.mustTake()
	w.patch("a", fmt.Sprintf(`{"metadata":{"labels":{"pool":"another"}},"spec":{"taints":[{"key":%q,"effect":"NoSchedule"}]}}`, config.TaintRepartitioning))
	b.refused()
	b.pass(10 * fleet.Duration)
	b.wantRefused("pool research: 1 node may be unavailable at once; a: being changed by gpuslice")
	w.patch("a", `{"spec":{"taints":[]}}`)
	b.mustTake()
	if holders := w.holders(); holders != "b" {
		t.Errorf("slots have %q", holders)
	}
}

// Each request that a label has ever named would leave a Lease for ever.
func TestTheLeaseOfAPoolThatNoFileNamesGoesWhenItIsEmpty(t *testing.T) {
	for name, row := range map[string]struct {
		before func(a, other *agent) // what happens while a has its slot
		during func(a, other *agent) // what happens right before a deletes the Lease
		named  bool
		stays  bool
	}{
		"the last node returns its slot": {},
		"another node waits":             {before: func(_, other *agent) { other.refused() }, stays: true},
		"a user pauses the pool":         {before: func(a, _ *agent) { a.annotate(config.AnnotationPaused, "an audit") }, stays: true},
		"a user writes an annotation":    {before: func(a, _ *agent) { a.annotate("example.com/owner", "team-a") }, stays: true},
		"a change has failed":            {before: func(a, _ *agent) { a.fail() }, stays: true},
		"a file names the pool":          {named: true, stays: true},
		"another node takes its slot right before": {
			during: func(_, other *agent) { other.mustTake() }, stays: true,
		},
		"a user pauses the pool right before": {during: func(a, _ *agent) { a.annotate(config.AnnotationPaused, "an audit") }, stays: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, atMost(1))
			w.pool.Unnamed = !row.named
			a, other := w.node("a", 0), w.node("other", 0)
			a.mustTake()
			if row.before != nil {
				row.before(a, other)
			}
			if row.during != nil {
				second := func() { row.during(a, other) }
				first := func() { w.wire.before.Store(&second) } // the write of the Lease without a's slot
				w.wire.before.Store(&first)
			}
			a.release()
			if gone := w.leaseIsGone(); gone == row.stays {
				t.Fatalf("the Lease is gone: %t", gone)
			}
			if row.stays {
				w.annotate(config.AnnotationPaused, "")
			}
			other.mustTake()
			a.refused()
		})
	}
}

func TestANodeThatDoesNotRenewLosesTheSlotByWhatOthersSeeAndNotByTheClock(t *testing.T) {
	for _, off := range []time.Duration{-3 * time.Hour, 0, 3 * time.Hour} {
		t.Run(off.String(), func(t *testing.T) {
			w := newWorld(t, atMost(1))
			a, b := w.node("a", 0), w.node("b", 0)
			a.pass(off)
			a.mustTake()
			b.refused()
			b.pass(fleet.Duration - time.Second)
			b.refused()
			a.pass(fleet.Duration / 3)
			a.renew()
			b.pass(time.Second)
			b.refused() // b sees the renewal
			b.pass(fleet.Duration - time.Second)
			b.refused()
			b.pass(time.Second)
			b.mustTake()
			if got := a.observe(); got.Held {
				t.Errorf("a observes %+v", got)
			}
			a.wantRefused("pool research: 1 node may be unavailable at once; b: being changed by gpuslice")
		})
	}
}

func TestTheFirstObservationStartsTheClockOfAnObserver(t *testing.T) {
	w := newWorld(t, atMost(1))
	a, b := w.node("a", 0), w.node("b", 0)
	a.mustTake()
	b.pass(time.Hour)
	b.refused()
	b.restart()
	b.pass(fleet.Duration - time.Second)
	b.refused()
	b.pass(fleet.Duration - time.Second)
	b.refused()
	b.pass(time.Second)
	b.mustTake()
}

func TestASlotThatWasTakenAgainIsNotTakenForAnOldOne(t *testing.T) {
	w := newWorld(t, atMost(1))
	a, b := w.node("a", 0), w.node("b", 0)
	a.mustTake()
	b.observe()
	a.release()
	b.pass(fleet.Duration)
	a.mustTake()
	b.refused()
}

func TestASlotThatWasNotedAgainIsNotTakenForAnOldOne(t *testing.T) {
	w := newWorld(t, nil)
	a, b := w.node("a", 0), w.node("b", 0)
	a.mustTake()
	b.observe()
	if err := w.client.CoordinationV1().Leases(w.namespace).Delete(t.Context(), leaseOfPool, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.pass(fleet.Duration)
	a.pass(fleet.Duration / 3)
	a.renew()
	w.pool.Limit = atMost(1)
	b.refused()
}

func TestANodeThatLostItsSlotStillCountsWhileItIsFenced(t *testing.T) {
	w := newWorld(t, atMost(1))
	a, b := w.node("a", 0), w.node("b", 0)
	a.mustTake()
	w.cordon("a", true)
	b.refused()
	b.pass(fleet.Duration)
	b.wantRefused("pool research: 1 node may be unavailable at once; a: cordoned by someone")
	if holders := w.holders(); holders != "" {
		t.Errorf("slots have %q", holders)
	}
	a.pass(fleet.Duration)
	a.renew()
	if holders := w.holders(); holders != "a" {
		t.Errorf("after a is back, slots have %q", holders)
	}
	w.cordon("a", false)
	b.refused()
	a.release()
	b.mustTake()
}

func TestRenewalsAreRare(t *testing.T) {
	w := newWorld(t, atMost(1))
	a := w.node("a", 0)
	a.mustTake()
	before := w.wire.requests.Load()
	a.renew()
	a.pass(fleet.Duration/3 - time.Second)
	a.renew()
	if sent := w.wire.requests.Load() - before; sent != 0 {
		t.Errorf("%d requests before a third of the time is over", sent)
	}
	a.pass(time.Second)
	a.renew()
	a.renew()
	if sent := w.wire.requests.Load() - before; sent != 2 {
		t.Errorf("%d requests for one renewal, want 2", sent)
	}
}

func TestTheOldestGoesFirst(t *testing.T) {
	w := newWorld(t, atMost(1))
	a := w.node("a", 0)
	a.mustTake()
	young, old, same := w.node("young", time.Minute), w.node("old", time.Hour), w.node("same", time.Minute)
	young.refused()
	old.refused()
	same.refused()
	if line := w.line(); line != "old same young" {
		t.Errorf("the line is %q", line)
	}
	a.release()
	young.wantRefused("pool research: 1 node may be unavailable at once; old: waits longer; 2 nodes wait longer")
	same.wantRefused("pool research: 1 node may be unavailable at once; old: waits longer; 1 node waits longer")
	old.mustTake()
	old.release()
	young.refused()
	same.mustTake()
	same.release()
	young.mustTake()
	if line := w.line(); line != "" {
		t.Errorf("the line is %q", line)
	}
}

func TestANodeThatLetsASlotPassIsPassedOverAndComesBackWithItsAge(t *testing.T) {
	w := newWorld(t, atMost(1))
	a := w.node("a", 0)
	a.mustTake()
	silent, b, c := w.node("silent", 3*time.Hour), w.node("b", 2*time.Hour), w.node("c", time.Hour)
	for _, each := range []*agent{silent, b, c} {
		each.refused()
	}
	b.pass(time.Hour)
	b.refused() // no slot was free that silent could have taken
	a.release()
	b.refused()
	b.pass(fleet.Patience - time.Second)
	b.refused()
	c.pass(time.Hour)
	c.refused()
	b.pass(time.Second)
	b.mustTake()
	if line := w.line(); line != "c" {
		t.Errorf("the line is %q", line)
	}
	silent.refused()
	if line := w.line(); line != "silent c" {
		t.Errorf("when it comes back the line is %q", line)
	}
	b.release()
	c.refused()
	silent.mustTake()
}

func TestNoNodeLosesPatienceWhileThereIsNoRoomOrThePoolIsPaused(t *testing.T) {
	w := newWorld(t, atMost(1))
	front, b := w.node("front", time.Hour), w.node("b", 0)
	w.create("other")
	w.cordon("other", true)
	front.refused()
	for range 3 {
		b.refused() // b finds out now and then that no slot is free after all
		b.pass(fleet.Patience)
	}
	b.refused()
	w.cordon("other", false)
	b.refused()
	w.annotate(config.AnnotationPaused, "tests")
	b.pass(fleet.Patience)
	b.refused()
	w.annotate(config.AnnotationPaused, "")
	b.refused()
	front.mustTake()
}

func TestANodeThatLeavesIsNotWaitedFor(t *testing.T) {
	w := newWorld(t, atMost(1))
	a, old, young := w.node("a", 0), w.node("old", time.Hour), w.node("young", 0)
	a.mustTake()
	old.refused()
	young.refused()
	if got := old.observe(); !got.Waiting || got.Held {
		t.Errorf("it observes %+v", got)
	}
	old.leave()
	a.release()
	young.mustTake()
	before := w.wire.requests.Load()
	old.leave()
	if sent := w.wire.requests.Load() - before; sent != 0 {
		t.Errorf("%d requests to leave what it has left", sent)
	}
}

func TestWaitersWhoseNodeIsGoneLeaveTheQueue(t *testing.T) {
	w := newWorld(t, atMost(1))
	a, gone, young := w.node("a", 0), w.node("gone", time.Hour), w.node("young", 0)
	a.mustTake()
	gone.refused()
	young.refused()
	w.deleteNode("gone")
	w.pool.Limit = atMost(3)
	young.mustTake()
	if line := w.line(); line != "" {
		t.Errorf("the line is %q", line)
	}
}

func TestANodeJoinsTheQueueBeforeItReadsTheNodes(t *testing.T) {
	w := newWorld(t, atMost(1))
	a := w.node("a", 0)
	early := int64(-1)
	between := func() { early = w.wire.lists.Load() }
	w.wire.before.Store(&between)
	a.mustTake()
	if early != 0 || w.wire.lists.Load() != 1 {
		t.Errorf("the nodes were read %d times before it was in line, and %d times in all", early, w.wire.lists.Load())
	}
}

func TestOnlyTheFrontOfTheQueueReadsTheNodes(t *testing.T) {
	const limit = 2
	w := newWorld(t, atMost(limit))
	var agents []*agent
	for i := range 12 {
		agents = append(agents, w.node(fmt.Sprintf("n%02d", i), time.Duration(60-i)*time.Minute))
	}
	for _, a := range agents[:limit] {
		a.mustTake()
	}
	before := w.wire.lists.Load()
	for _, a := range agents[limit:] {
		a.refused()
	}
	if lists := w.wire.lists.Load() - before; lists != 0 {
		t.Errorf("the nodes were read %d times while all slots are taken", lists)
	}
	for _, a := range agents[:limit] {
		a.release()
	}
	before = w.wire.lists.Load()
	for _, a := range slices.Backward(agents[limit:]) {
		if err := a.take(); err == nil && !slices.Contains(agents[:2*limit], a) {
			t.Errorf("%s has a slot before its turn", w.short(a.change.Node))
		}
	}
	if lists := w.wire.lists.Load() - before; lists != limit {
		t.Errorf("the nodes were read %d times for %d slots", lists, limit)
	}
}

func TestANodeFarBehindAsksRarelyAndItsMessageStaysTheSame(t *testing.T) {
	w := newWorld(t, atMost(1))
	w.node("a", 2*time.Hour).mustTake()
	var first, last *fleet.Full
	for i := range 16 {
		a := w.node(fmt.Sprintf("n%02d", i), time.Duration(60-i)*time.Minute)
		err := a.take()
		if !errors.As(err, &last) {
			t.Fatal(err)
		}
		if i == 0 {
			first = last
		}
	}
	if first.Ahead != 0 || first.Retry > 2*time.Second || first.Retry < time.Second {
		t.Errorf("the first has %d ahead and asks again after %v", first.Ahead, first.Retry)
	}
	if last.Ahead != 15 || last.Retry > 75*time.Second || last.Retry < 50*time.Second {
		t.Errorf("the last has %d ahead and asks again after %v", last.Ahead, last.Retry)
	}
	if got, want := last.Error(), "pool research: 1 node may be unavailable at once; more than 10 nodes wait longer"; got != want {
		t.Errorf("the last reads %q, want %q", got, want)
	}
}

// In a pool whose limit is a number, nodes wait the longer the larger it is. If they asked as often all the time, their requests would grow with the square.
func TestANodeAsksTheMoreRarelyTheLongerTheQueueIs(t *testing.T) {
	for _, row := range []struct {
		ahead, limit   int
		sooner, latest time.Duration
	}{
		{40, 1, 2 * time.Minute, 4 * time.Minute},
		{300, 1, 6 * time.Minute, 10 * time.Minute},
		{300, 10, time.Minute, 3 * time.Minute},
		{fleet.MaxNodes, 10, 2 * time.Minute, 5 * time.Minute},
		{fleet.MaxNodes, 100, time.Minute, 2 * time.Minute}, // no room for it in the queue
	} {
		t.Run(fmt.Sprintf("%d ahead of it, %d at a time", row.ahead, row.limit), func(t *testing.T) {
			w := newWorld(t, atMost(row.limit))
			w.node("a", 2*time.Hour).mustTake()
			last := w.node("b", 0)
			var changed, wait []string
			for i := range row.limit {
				changed = append(changed, fmt.Sprintf(`{"node":"c%d","uid":"c%d","operation":"o","since":"2026-01-01T00:00:00Z","renewed":1}`, i, i))
			}
			for i := range row.ahead {
				wait = append(wait, fmt.Sprintf(`{"node":"w%d","uid":"w%d","since":"2026-01-01T00:00:00Z"}`, i, i))
			}
			w.annotate(config.AnnotationSlots, fmt.Sprintf(`{"version":1,"turn":1,"left":0,"holders":[%s],"queue":[%s]}`,
				strings.Join(changed, ","), strings.Join(wait, ",")))
			var full *fleet.Full
			if err := last.take(); !errors.As(err, &full) || full.Ahead != row.ahead || full.Retry < row.sooner || full.Retry > row.latest {
				t.Errorf("%d nodes are ahead, and it asks again after %v (%v)", full.Ahead, full.Retry, err)
			}
		})
	}
}

// Any agent can write the Lease: the next process knows of no slot that it has taken, and asks for it as if it had none.
func TestAnyRestartAsksForItsOwnSlotAgain(t *testing.T) {
	w := newWorld(t, atMost(1))
	a, b := w.node("a", 0), w.node("b", 0)
	a.mustTake()
	a.fail()
	before := a.change.Operation
	a.restart()
	w.annotate(config.AnnotationPaused, "tests")
	if got, want := a.observe(), (state.Slot{Held: true, Operation: before, Paused: "tests"}); got != want {
		t.Errorf("after the restart it sees %+v, want %+v", got, want)
	}
	a.wantRefused("pool research is paused: tests")
	w.annotate(config.AnnotationPaused, "")
	b.refused()
	a.mustTake()
	if got, want := a.observe(), (state.Slot{Held: true, Operation: a.change.Operation}); got != want {
		t.Errorf("after it took it sees %+v, want %+v", got, want)
	}
	b.refused()
}

func TestThePoolIsPausedByFailuresInARow(t *testing.T) {
	w := newWorld(t, atMost(4))
	a, b, c := w.node("a", 0), w.node("b", 0), w.node("c", 0)
	one := func(each *agent, ends func()) {
		t.Helper()
		each.restart()
		each.mustTake()
		ends()
		each.release()
	}
	failing := func(each *agent) func() {
		return func() { t.Helper(); each.fail(); each.fail() } // reported twice, counted once
	}
	one(a, failing(a))
	one(b, failing(b))
	one(c, func() {}) // a success
	one(a, failing(a))
	one(a, failing(a))
	one(b, func() { b.leave() }) // postponed: neither
	if got := c.observe().Paused; got != "" {
		t.Fatalf("after two failures in a row it is paused: %s", got)
	}
	b.restart()
	b.mustTake() // b is at its change when the third fails
	one(a, failing(a))
	want := "3 changes in a row failed; to go on: kubectl -n " + w.namespace + " annotate lease gpuslice-pool-research gpuslice.io/paused-; " +
		"failed are a (HardwareFailure), a (HardwareFailure), a (HardwareFailure)"
	if got := w.short(c.observe().Paused); got != want {
		t.Errorf("it is paused:\n%s\nwant\n%s", got, want)
	}
	c.wantRefused("pool research is paused: " + want)
	b.renew()
	b.mustTake()
	b.fail()
	b.release()
	if got := w.short(c.observe().Paused); got != want {
		t.Errorf("after one more failure it is paused: %s", got)
	}
	w.annotate(config.AnnotationPaused, "")
	c.mustTake()
	if n := w.state().Failed; n != 0 {
		t.Errorf("%d failures are counted after an administrator let it go on", n)
	}
}

func TestAPauseByHandHolds(t *testing.T) {
	w := newWorld(t, nil)
	a, b := w.node("a", 0), w.node("b", 0)
	a.mustTake()
	w.annotate(config.AnnotationPaused, "power is cut on Sunday")
	b.wantRefused("pool research is paused: power is cut on Sunday")
	w.pool.PauseAfter = 1
	a.fail()
	a.release()
	b.wantRefused("pool research is paused: power is cut on Sunday")
	w.annotate(config.AnnotationPaused, "")
	b.mustTake()
}

func TestAPoolThatIsNeverPausedCountsNoFailures(t *testing.T) {
	w := newWorld(t, nil)
	w.pool.PauseAfter = 0
	a := w.node("a", 0)
	for range 4 {
		a.restart()
		a.mustTake()
		a.fail()
		a.release()
	}
	if n := w.state().Failed; n != 0 || a.observe().Paused != "" {
		t.Errorf("%d failures are counted, and it is paused: %q", n, a.observe().Paused)
	}
}

func TestAStateThatCannotBeReadIsLeftAsItIs(t *testing.T) {
	for name, row := range map[string]struct{ state, said string }{
		"no JSON":          {"{oops", "invalid character 'o'"},
		"no state":         {"[]", "cannot unmarshal array"},
		"another version":  {`{"version":2,"turn":1,"left":1}`, "its version is 2, and this agent knows version 1"},
		"a field too many": {`{"version":1,"turn":1,"left":1,"reserved":["a"]}`, `unknown field "reserved"`},
		"one twice":        {`{"version":1,"turn":1,"turn":2,"left":1}`, `duplicate field "turn"`},
		"a holder's name":  {`{"version":1,"turn":1,"left":1,"holders":[{"node":"a"}]}`, `holders[0]: node is "a" and uid ""`},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, atMost(2))
			a, b := w.node("a", 0), w.node("b", 0)
			a.mustTake()
			w.annotate(config.AnnotationSlots, row.state)
			a.pass(fleet.Duration)
			for call, err := range map[string]error{
				"Take": b.take(), "Renew": a.Renew(t.Context(), w.pool, a.change), "Fail": a.Fail(t.Context(), w.pool, a.change, "why"),
				"Release": a.Release(t.Context(), w.pool, a.change), "Leave": a.Leave(t.Context(), w.pool, a.change),
			} {
				var unreadable *fleet.Unreadable
				mend := "kubectl -n " + w.namespace + " annotate lease gpuslice-pool-research gpuslice.io/slots-"
				if !errors.As(err, &unreadable) || !strings.Contains(err.Error(), row.said) || !strings.Contains(err.Error(), mend) {
					t.Errorf("%s says %v, want something with %q and %q", call, err, row.said, mend)
				}
			}
			if got := w.lease().Annotations[config.AnnotationSlots]; got != row.state {
				t.Errorf("the state became %s", got)
			}
			w.annotate(config.AnnotationSlots, "")
			b.mustTake()
			a.renew()
			if holders := w.holders(); holders != "b a" {
				t.Errorf("after it was mended slots have %q", holders)
			}
		})
	}
}

func TestConflictsAreTriedAgain(t *testing.T) {
	w := newWorld(t, atMost(1))
	a := w.node("a", 0)
	for _, call := range []func(){a.mustTake, func() { a.pass(fleet.Duration); a.renew() }, a.fail, a.release} {
		w.wire.conflicts.Store(10)
		call()
	}
	if got := a.observe(); got != (state.Slot{}) || w.state().Failed != 1 {
		t.Errorf("it observes %+v; %d failures", got, w.state().Failed)
	}
}

func TestNodesAreReadAgainWhenANodeHasLeftSince(t *testing.T) {
	w := newWorld(t, atMost(2))
	x, y, z := w.node("x", 0), w.node("y", 0), w.node("z", 0)
	x.mustTake()
	w.pool.Limit = atMost(0)
	z.refused() // z joins the queue
	w.pool.Limit = atMost(2)
	between := func() { // z has read that x looks fine
		w.cordon("x", true)
		x.leave()
		y.mustTake()
	}
	y.change.Since = z.change.Since.Add(-time.Hour)
	w.wire.before.Store(&between)
	z.wantRefused("pool research: 2 nodes may be unavailable at once; y: being changed by gpuslice, x: cordoned by someone")
}

func TestNodesAreReadOnceWhileNoNodeLeaves(t *testing.T) {
	w := newWorld(t, atMost(2))
	a, b := w.node("a", 0), w.node("b", 0)
	a.mustTake()
	w.pool.Limit = atMost(0)
	b.refused()
	w.pool.Limit = atMost(2)
	w.wire.conflicts.Store(10)
	before := w.wire.lists.Load()
	b.mustTake()
	if lists := w.wire.lists.Load() - before; lists != 1 {
		t.Errorf("the nodes were read %d times", lists)
	}
}

func TestConflictsWithoutEndAreGivenUp(t *testing.T) {
	w := newWorld(t, atMost(1))
	a := w.node("a", 0)
	w.wire.conflicts.Store(1 << 30)
	if err := a.take(); !errors.Is(err, fleet.ErrContended) {
		t.Errorf("it says %v", err)
	}
	w.wire.conflicts.Store(0)
	w.node("b", 0).mustTake()
	w.wire.conflicts.Store(1 << 30)
	var full *fleet.Full
	if err := a.take(); !errors.As(err, &full) {
		t.Errorf("where there is no room it says %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Take(ctx, w.pool, a.change); !errors.Is(err, context.Canceled) {
		t.Errorf("without time it says %v", err)
	}
}

func TestUsersSeeWhichNodesHaveASlot(t *testing.T) {
	w := newWorld(t, nil)
	for i := range 7 {
		w.node(fmt.Sprint("n", i), 0).mustTake()
	}
	spec := w.lease().Spec
	if got, want := w.short(*spec.HolderIdentity), "n0,n1,n2,n3,n4,and 2 more"; got != want {
		t.Errorf("holders are %q, want %q", got, want)
	}
	if *spec.LeaseDurationSeconds != 90 || *spec.LeaseTransitions != 7 || spec.RenewTime == nil || spec.AcquireTime == nil {
		t.Errorf("the Lease says %+v", spec)
	}
}

// Nodes with the longest names that the API server accepts, as holders and in the queue: it refuses annotations of more than 256 KiB.
func TestTheQueueEndsWhereLongNamesFillTheLease(t *testing.T) {
	w := newWorld(t, atMost(1))
	long := func(name string) string {
		return name + strings.Repeat(".x", 126)[:253-len(w.named(name))-1] + "x"
	}
	w.node("first", time.Hour).mustTake()
	var st map[string]any
	if err := json.Unmarshal([]byte(w.lease().Annotations[config.AnnotationSlots]), &st); err != nil {
		t.Fatal(err)
	}
	entry := func(kind string, i int) map[string]any {
		return map[string]any{
			"node": w.named(long(fmt.Sprintf("%s%03d", kind, i))), "uid": fmt.Sprintf("8f2c1a6e-0000-4000-%s000-%012d", kind, i),
			"since": noon.Add(-time.Hour).Format(time.RFC3339),
		}
	}
	var holders, queue []map[string]any
	for i := range fleet.MaxNodes {
		h := entry("b", i)
		h["operation"], h["renewed"] = "0123456789ab", 1
		holders = append(holders, h)
	}
	for i := range 115 {
		queue = append(queue, entry("c", i))
	}
	st["holders"], st["queue"] = holders, queue
	text, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	w.annotate(config.AnnotationSlots, string(text))
	const asking = 25
	var young *agent
	for i := range asking {
		young = w.node(long(fmt.Sprintf("d%03d", i)), -time.Duration(i)*time.Second)
		young.refused()
	}
	slots, line := len(w.lease().Annotations[config.AnnotationSlots]), len(w.state().Queue)
	if slots > 240<<10 || line <= len(queue) || line >= len(queue)+asking {
		t.Errorf("the annotation has %d bytes and a line of %d: want at most 240 KiB, and as many as have room", slots, line)
	}
	before := w.lease().ResourceVersion
	young.refused()
	if young.observe().Waiting || w.lease().ResourceVersion != before {
		t.Error("a node for which the line has no room writes the Lease")
	}
}

func TestTheQueueHasAnEnd(t *testing.T) {
	w := newWorld(t, atMost(1))
	a, young, old := w.node("a", 0), w.node("young", -time.Minute), w.node("old", time.Hour)
	a.mustTake()
	var st map[string]any
	if err := json.Unmarshal([]byte(w.lease().Annotations[config.AnnotationSlots]), &st); err != nil {
		t.Fatal(err)
	}
	var queue []map[string]any
	for i := range fleet.MaxNodes {
		queue = append(queue, map[string]any{"node": fmt.Sprintf("w%03d", i), "uid": fmt.Sprint(i), "since": noon.Format(time.RFC3339)})
	}
	st["queue"] = queue
	text, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	w.annotate(config.AnnotationSlots, string(text))
	young.wantRefused("pool research: 1 node may be unavailable at once; more than 10 nodes wait longer")
	if n := len(w.state().Queue); young.observe().Waiting || n != fleet.MaxNodes {
		t.Errorf("%d are in line, and the youngest is: %t", n, young.observe().Waiting)
	}
	old.refused()
	if n := len(w.state().Queue); !old.observe().Waiting || n != fleet.MaxNodes {
		t.Errorf("%d are in line, and the oldest is: %t", n, old.observe().Waiting)
	}
}
