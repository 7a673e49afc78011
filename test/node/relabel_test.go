package node_test

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/gpuslice/gpuslice/config"
)

var labelled = flag.Int("relabels", 100, "how many labels TestTheLimitHoldsWhateverBecomesOfTheLabels changes")

// moves is a fleet on which users change at random the labels that request a config and choose a pool, while agents die.
type moves struct {
	*fleet
	random *rand.Rand
	limits map[string]int    // of each pool, by the value of labelPool that chooses it
	closed map[string]string // the pool, by its labels at that moment, of each node that has been closed since
	most   map[string]int    // nodes of the pool that were closed at once
	died   map[*rig]time.Time
	did    map[string]int // how often users and the test did what
}

// open reports whether the agent keeps no pods away from the node.
func open(n *corev1.Node) bool { return !n.Spec.Unschedulable && !fenced(n) }

// observe counts which nodes are closed, by the pool that each was in when its agent closed it.
func (m *moves) observe(e watch.Event) {
	m.t.Helper()
	n, ok := e.Object.(*corev1.Node)
	if !ok || e.Type == watch.Deleted {
		m.t.Fatalf("the watch of the nodes says %s %v", e.Type, e.Object)
	}
	m.seen[n.Name] = n
	_, was := m.closed[n.Name]
	switch {
	case open(n) && was:
		delete(m.closed, n.Name)
		m.did["change"]++
	case !open(n) && !was:
		m.closed[n.Name] = n.Labels[labelPool]
	}
	now := map[string][]string{}
	for name, pool := range m.closed {
		now[pool] = append(now[pool], name)
	}
	for pool, limit := range m.limits {
		m.most[pool] = max(m.most[pool], len(now[pool]))
		if len(now[pool]) > limit {
			m.t.Errorf("with version %s of node %s, %d nodes of pool %s are closed, and %d may be: %s",
				n.ResourceVersion, n.Name, len(now[pool]), pool, limit, strings.Join(now[pool], ", "))
		}
	}
}

// act does one thing at random.
func (m *moves) act() {
	m.t.Helper()
	pools := append(slices.Sorted(maps.Keys(m.limits)), "") // none: the node leaves its pool
	r := m.nodes[m.random.IntN(len(m.nodes))]
	switch what := m.random.IntN(10); {
	case what < 4:
		m.did["apply"]++
		r.label(config.LabelMIGConfig, []string{"all-1g.10gb", "all-balanced", "all-disabled"}[m.random.IntN(3)])
	case what < 6:
		m.did["apply --none"]++
		m.unlabel(r, config.LabelMIGConfig)
	case what < 8:
		m.did["another pool"]++
		if pool := pools[m.random.IntN(len(pools))]; pool != "" {
			r.label(labelPool, pool)
		} else {
			m.unlabel(r, labelPool)
		}
	default:
		m.kill()
	}
}

func (m *moves) unlabel(r *rig, key string) {
	m.t.Helper()
	if _, err := r.patch(m.t.Context(), map[string]any{"metadata": map[string]any{"labels": map[string]any{key: nil}}}); err != nil {
		m.t.Fatal(err)
	}
}

// kill kills an agent: of a node that is closed, if there is one whose agent lives.
func (m *moves) kill() {
	m.t.Helper()
	alive := slices.DeleteFunc(slices.Clone(m.nodes), func(r *rig) bool { return r.agents.running == nil })
	closed := slices.DeleteFunc(slices.Clone(alive), func(r *rig) bool { return open(m.seen[r.Name]) })
	if len(closed) > 0 {
		alive = closed
	}
	if len(alive) == 0 {
		return
	}
	r := alive[m.random.IntN(len(alive))]
	r.kill()
	m.died[r] = time.Now()
	m.did["SIGKILL"]++
}

// revive starts agents again that have been dead for long enough.
func (m *moves) revive(after time.Duration) {
	m.t.Helper()
	for r, died := range m.died {
		if time.Since(died) >= after {
			r.run()
			delete(m.died, r)
		}
	}
}

// others are the words of the nodes that are not as requested, or have something to restore.
func (m *moves) others() string {
	var all strings.Builder
	for name, n := range m.seen {
		requested := n.Labels[config.LabelMIGConfig]
		asRequested := converged(requested)(n)
		if requested == "" {
			asRequested = hasReason(n, config.ReasonNotRequested)
		}
		if !asRequested || !open(n) || n.Annotations[config.AnnotationJournal] != "" {
			fmt.Fprintf(&all, "\n%s in pool %q: %s", name, n.Labels[labelPool], words(n))
		}
	}
	return all.String()
}

// held returns what the Leases of the pools say of any node; empty if that is nothing.
func (m *moves) held(ctx context.Context) string {
	m.t.Helper()
	leases, err := m.client.CoordinationV1().Leases(agentNamespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		m.t.Fatal(err)
	}
	var all []string
	for _, l := range leases.Items {
		if pool, ours := strings.CutPrefix(l.Name, config.LeasePrefix); ours && m.limits[pool] > 0 {
			if s := m.slotsOf(&l); len(s.Holders)+len(s.Queue) > 0 {
				all = append(all, fmt.Sprintf("%s: %+v", l.Name, s))
			}
		}
	}
	return strings.Join(all, "; ")
}

// Promise 11. Labels choose a node's pool and its config, and users change both at any moment. By a watch on the nodes, never are more nodes of a pool
// closed than its limit allows, where a node is of the pool in which it was closed, until it is open. In the end no node at rest has a slot.
func TestTheLimitHoldsWhateverBecomesOfTheLabels(t *testing.T) {
	t.Parallel()
	seed, count := *seed, *labelled
	if seed == 0 {
		seed = rand.Uint64()
	}
	if testing.Short() {
		count = min(count, 15)
	}
	t.Logf("to draw the same: -seed %d -relabels %d", seed, count)
	f := fleetOf(t, 6, 1, func(pool string) string {
		return fmt.Sprintf(`pools:
- {name: %[1]s, selector: "%[2]s=%[1]s,%[3]s", maxUnavailable: 1, pauseAfter: 0}
- {name: %[1]s-two, selector: %[2]s=%[1]s-two, maxUnavailable: 2, pauseAfter: 0}
`, pool, labelPool, config.LabelMIGConfig)
	})
	f.run()
	m := &moves{
		fleet: f, random: rand.New(rand.NewPCG(seed, 6)), limits: map[string]int{f.pool: 1, f.pool + "-two": 2},
		closed: map[string]string{}, most: map[string]int{}, died: map[*rig]time.Time{}, did: map[string]int{},
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience+time.Duration(count)*time.Second)
	defer cancel()
	events := f.nodeEvents()
	next := time.After(0)
	for {
		select {
		case e := <-events:
			m.observe(e)
		case <-next:
			m.revive(3 * time.Second)
			next = time.After(time.Duration(m.random.Int64N(int64(time.Second))))
			if count > 0 {
				count--
				m.act()
				break
			}
			m.revive(0)
			if m.others() == "" && m.held(ctx) == "" {
				t.Logf("after %s: %v; closed at once, of the limits %v: %v", time.Since(began).Round(time.Second), m.did, m.limits, m.most)
				return
			}
		case <-ctx.Done():
			t.Fatalf("after %v the Leases say %q, and the nodes that are not at rest:%s", m.did, m.held(t.Context()), m.others())
		}
	}
}
