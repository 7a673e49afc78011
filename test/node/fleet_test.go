package node_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/test/cluster/clustertest"
	"github.com/gpuslice/gpuslice/test/node"
)

var fleetSize = flag.Int("fleet", 20, "how many nodes TestNeverMoreThanTheLimitIsUnavailable has, but 15 at least")

const (
	// labelPool says which pool a node of these tests belongs to.
	labelPool = "test.gpuslice.io/pool"
	// labelFleet says which fleet a node of these tests belongs to, whatever its pool.
	labelFleet = "test.gpuslice.io/fleet"
)

// fleet is a pool of nodes with an agent on each, and what the API server has shown of it.
type fleet struct {
	t      *testing.T
	pool   string
	limit  int
	client kubernetes.Interface
	nodes  []*rig // in the order in which they are labelled

	seen map[string]*corev1.Node // as the last event has left them
	most int                     // so many were unavailable at once
}

// newFleet starts nodes of a pool with one GPU each, and no agent yet.
func newFleet(t *testing.T, n, limit int) *fleet {
	t.Helper()
	return fleetOf(t, n, limit, func(pool string) string {
		return fmt.Sprintf("pools:\n- {name: %[1]s, selector: %[2]s=%[1]s, maxUnavailable: %[3]d}\n", pool, labelPool, limit)
	})
}

// fleetOf starts nodes with one GPU each, and with a maintenance file for the pool that their labels choose at first.
func fleetOf(t *testing.T, n, limit int, file func(pool string) string) *fleet {
	t.Helper()
	f := &fleet{
		t: t, pool: fmt.Sprintf("pool-%d", rand.Uint32()), limit: limit, client: clustertest.Client(t), seen: map[string]*corev1.Node{},
	}
	began := time.Now()
	settings := "maintenance: {name: " + f.pool + "}\n"
	member := func(o *node.Options) { o.Labels = map[string]string{labelFleet: f.pool, labelPool: f.pool} }
	for range n {
		f.nodes = append(f.nodes, newRig(t, "gpus: [{model: H100-80GB}]", settings, member))
	}
	f.nodes[0].configMapOf(f.pool, map[string]string{maintenanceKey: maintenanceHeader + file(f.pool)})
	for _, r := range f.nodes {
		r.awaitOffered("nvidia.com/gpu", 1)
	}
	t.Logf("%d nodes after %s", n, time.Since(began).Round(100*time.Millisecond))
	return f
}

// Without a word in the settings or a maintenance file, nodes that are asked for the same are a pool, and a bare pod leaves only if whoever asks for
// the change allows it.
func TestByDefaultNodesThatAreAskedForTheSameTakeTurns(t *testing.T) {
	t.Parallel()
	name := fmt.Sprintf("alike-%d", rand.Uint32()) // of a profile that no other test asks for
	f := &fleet{t: t, pool: name, limit: 1, client: clustertest.Client(t), seen: map[string]*corev1.Node{}}
	for range 2 {
		f.nodes = append(f.nodes, newRig(t, "gpus: [{model: H100-80GB}]", "profiles: {name: "+name+"}\nmaintenance: {name: no-"+name+"}\ndrain: {}\n",
			func(o *node.Options) { o.Labels = map[string]string{labelFleet: name} }))
	}
	f.nodes[0].configMapOf(name, map[string]string{"profiles.yaml": "apiVersion: gpuslice.io/v1alpha1\nkind: Profiles\nprofiles: {" + name +
		": {mig: [{gpus: {all: true}, enabled: true, instances: {1g.10gb: 7}}]}}\n"})
	namespace := clustertest.Namespace(t)
	for i, r := range f.nodes {
		r.awaitOffered("nvidia.com/gpu", 1)
		pod := fmt.Sprintf("bare-%d", i)
		r.pod(namespace, pod, map[string]string{"nvidia.com/gpu": "1"})
		r.awaitRunning(namespace, pod)
	}
	f.run()
	events := f.nodeEvents()
	for _, r := range f.nodes {
		r.label(config.LabelProfile, name)
	}
	for _, r := range f.nodes {
		if said := condition(r.awaitReason(config.ReasonEvictionBlocked)).Message; !strings.Contains(said, "kubectl gpuslice apply "+r.Name+" --profile "+name+" --force-unmanaged; ") {
			t.Errorf("node %s says %s", r.Name, said)
		}
	}
	allowance := map[string]string{config.AnnotationAllowEviction: config.Allowance(config.LabelProfile, name, config.FieldUnmanagedPods)}
	for _, r := range f.nodes {
		if _, err := r.patch(t.Context(), map[string]any{"metadata": map[string]any{"annotations": allowance}}); err != nil {
			t.Fatal(err)
		}
	}
	f.until(events, func(n *corev1.Node) bool {
		return converged(name)(n) && !unavailable(n) && n.Annotations[config.AnnotationAllowEviction] == ""
	})
	if f.most != 1 {
		t.Errorf("%d nodes were unavailable at once", f.most)
	}
}

// until looks at the events about nodes until each node is as wanted.
func (f *fleet) until(events <-chan watch.Event, wanted func(*corev1.Node) bool) {
	f.t.Helper()
	timeout := time.After(patience)
	for slices.ContainsFunc(slices.Collect(maps.Values(f.seen)), func(n *corev1.Node) bool { return !wanted(n) }) {
		select {
		case e := <-events:
			f.observe(e)
		case <-timeout:
			f.t.Fatal("the nodes take too long")
		}
	}
}

// run starts the agents.
func (f *fleet) run() {
	f.t.Helper()
	began := time.Now()
	for _, r := range f.nodes {
		r.run()
	}
	for _, r := range f.nodes {
		r.awaitReason(config.ReasonNotRequested)
	}
	f.t.Logf("%d agents after %s", len(f.nodes), time.Since(began).Round(100*time.Millisecond))
}

// unavailable reports whether a node takes no pods, whoever keeps it from that.
func unavailable(n *corev1.Node) bool { return n.Spec.Unschedulable || !ready(n) || fenced(n) }

// fenced is true of a node that an agent keeps for itself.
func fenced(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == config.TaintRepartitioning })
}

// nodeEvents lists the nodes of the fleet, and then follows them without a gap.
func (f *fleet) nodeEvents() <-chan watch.Event {
	f.t.Helper()
	list := cache.NewFilteredListWatchFromClient(f.client.CoreV1().RESTClient(), "nodes", metav1.NamespaceAll,
		func(o *metav1.ListOptions) { o.LabelSelector = labelFleet + "=" + f.pool })
	first, err := list.ListWithContext(f.t.Context(), metav1.ListOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
	all := first.(*corev1.NodeList)
	for i := range all.Items {
		f.seen[all.Items[i].Name] = &all.Items[i]
	}
	return f.follow(list, all.ResourceVersion)
}

// leaseEvents follows the pool's Lease, which need not be there yet, without a gap.
func (f *fleet) leaseEvents() <-chan watch.Event {
	f.t.Helper()
	list := cache.NewListWatchFromClient(f.client.CoordinationV1().RESTClient(), "leases", agentNamespace,
		fields.OneTermEqualSelector("metadata.name", f.lease()))
	first, err := list.ListWithContext(f.t.Context(), metav1.ListOptions{})
	if err != nil {
		f.t.Fatal(err)
	}
	all := first.(*coordinationv1.LeaseList)
	return f.follow(list, all.ResourceVersion)
}

func (f *fleet) follow(list *cache.ListWatch, from string) <-chan watch.Event {
	f.t.Helper()
	w, err := watchtools.NewRetryWatcherWithContext(f.t.Context(), from, list)
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(w.Stop)
	return w.ResultChan()
}

const agentNamespace = "gpuslice"

func (f *fleet) lease() string { return config.LeasePrefix + f.pool }

// observe takes notice of what has become of a node. Never are more unavailable than may be, whoever keeps them so.
func (f *fleet) observe(e watch.Event) {
	f.t.Helper()
	n, ok := e.Object.(*corev1.Node)
	switch {
	case !ok:
		f.t.Errorf("the watch of the nodes says %s %v", e.Type, e.Object)
		return
	case e.Type == watch.Deleted:
		delete(f.seen, n.Name)
	default:
		f.seen[n.Name] = n
	}
	var out []string
	for name, n := range f.seen {
		if unavailable(n) {
			out = append(out, fmt.Sprintf("%s (ready %t, cordoned %t, fenced %t)", name, ready(n), n.Spec.Unschedulable, fenced(n)))
		}
	}
	f.most = max(f.most, len(out))
	if len(out) > f.limit {
		f.t.Errorf("with an event about node %s %d nodes are unavailable, and %d may be: %s", n.Name, len(out), f.limit, strings.Join(out, ", "))
	}
}

// slots is what the Lease of a pool says.
type slots struct {
	Holders, Queue []slot
	paused         bool
	why            string
}

type slot struct{ Node string }

func (s slots) holds(name string) bool {
	for _, h := range s.Holders {
		if h.Node == name {
			return true
		}
	}
	return false
}

func (f *fleet) slotsOf(l *coordinationv1.Lease) slots {
	f.t.Helper()
	var s slots
	if text, ok := l.Annotations[config.AnnotationSlots]; ok {
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			f.t.Fatal(err)
		}
	}
	s.why, s.paused = l.Annotations[config.AnnotationPaused]
	return s
}

// crowd is a fleet on which much goes on: its nodes are labelled one after the other, agents die, and others take nodes and give them
// back.
type crowd struct {
	*fleet
	requested string
	random    *rand.Rand
	last      slots                // as the last event about the Lease has left them
	labelled  int                  // so many nodes
	died      map[string]time.Time // when the agent of a node was killed last
	dead      []*rig               // nodes whose agent was killed, and was not started again yet
	killed    int
	passed    int      // times that a younger node went before one whose agent had died
	jumped    []string // times that one went before one that was alive
	hands     []hand
	kept      map[string]bool // nodes that others keep for a while: to change one takes nothing more from the pool
}

// hand is what someone does when so many nodes are as asked, and the Lease lets them.
type hand struct {
	at  int
	may func() bool // nil for always
	do  func()
}

// granted notes who gets a slot although older ones wait, by the age of their requests in seconds, and there is not room for all of them.
// Who has died lately may be passed by.
func (c *crowd) granted(e watch.Event) {
	c.t.Helper()
	l, ok := e.Object.(*coordinationv1.Lease)
	if !ok || e.Type == watch.Deleted {
		c.t.Fatalf("the watch of the Lease says %s %v", e.Type, e.Object)
	}
	before, now := c.last, c.slotsOf(l)
	c.last = now
	for _, h := range now.Holders {
		if before.holds(h.Node) || c.kept[h.Node] {
			continue
		}
		var dead int
		var alive []string
		for name, n := range c.seen {
			if !hasReason(n, config.ReasonAwaitingSlot) || now.holds(name) || !asked(n).Before(asked(c.seen[h.Node])) {
				continue
			}
			if died, ever := c.died[name]; ever && time.Since(died) < mourning {
				dead++
				continue
			}
			alive = append(alive, fmt.Sprintf("%s, since %s", name, asked(n).Format(time.TimeOnly)))
		}
		switch room := c.room(now); {
		case len(alive) > room:
			c.jumped = append(c.jumped, fmt.Sprintf("node %s, which asks since %s, got a slot with room for %d more before %d that wait: %s",
				h.Node, asked(c.seen[h.Node]).Format(time.TimeOnly), room, len(alive), strings.Join(alive, "; ")))
		case len(alive)+dead > room:
			c.passed++
		}
	}
}

// room is how many more nodes may be unavailable, when those are that have a slot.
func (c *crowd) room(s slots) int {
	room := c.limit
	for name, n := range c.seen {
		if unavailable(n) || s.holds(name) {
			room--
		}
	}
	return room
}

// mourning is for how long a node whose agent was killed may be passed by: as long as the agents are patient with it, and until it is
// in line again.
const mourning = 15 * time.Second

// asked is since when the agent knows of the request, as far as the order goes by it.
func asked(n *corev1.Node) time.Time {
	var status struct{ Asked struct{ Since time.Time } }
	if err := json.Unmarshal([]byte(n.Annotations[config.AnnotationStatus]), &status); err != nil {
		return time.Time{}
	}
	return status.Asked.Since.Truncate(time.Second)
}

// grown is how old an agent is before it dies, so that a change comes to its end.
const grown = 8 * time.Second

// deathsPerChange bounds the deaths by what the changes have come to: so many for each node that is as asked, and for each that
// may be unavailable. On a busy machine, agents that die by the clock alone do little but start.
const deathsPerChange = 4

// die kills the agent of a node, half of the times of one that is being changed.
func (c *crowd) die() {
	c.t.Helper()
	if c.killed >= deathsPerChange*(c.done()+c.limit) {
		return
	}
	alive := slices.DeleteFunc(slices.Clone(c.nodes), func(r *rig) bool {
		return r.agents.running == nil || time.Since(c.died[r.Name]) < grown
	})
	changing := slices.DeleteFunc(slices.Clone(alive), func(r *rig) bool { return c.seen[r.Name].Annotations[config.AnnotationJournal] == "" })
	if len(changing) > 0 && c.random.IntN(2) == 0 {
		alive = changing
	}
	if len(alive) == 0 {
		return
	}
	r := alive[c.random.IntN(len(alive))]
	r.kill()
	c.killed++
	c.died[r.Name] = time.Now()
	c.dead = append(c.dead, r)
}

// revive starts agents again that have been missed for a while, three seconds at the most.
func (c *crowd) revive() {
	c.t.Helper()
	c.dead = slices.DeleteFunc(c.dead, func(r *rig) bool {
		if time.Since(c.died[r.Name]) < time.Duration(c.random.Int64N(int64(3*time.Second))) {
			return false
		}
		r.run()
		return true
	})
}

// done counts the nodes that are as asked.
func (c *crowd) done() int {
	is, n := converged(c.requested), 0
	for _, node := range c.seen {
		if is(node) {
			n++
		}
	}
	return n
}

// step lets the next hand do its work, if it is its time.
func (c *crowd) step() {
	for len(c.hands) > 0 && c.done() >= c.hands[0].at && (c.hands[0].may == nil || c.hands[0].may()) {
		c.hands[0].do()
		c.hands = c.hands[1:]
	}
}

// live lets it all go on until every node is as asked, and every hand has done its work.
func (c *crowd) live() {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 5*patience)
	defer cancel()
	nodes, lease := c.nodeEvents(), c.leaseEvents()
	labels, deaths := time.NewTicker(200*time.Millisecond), time.NewTicker(500*time.Millisecond)
	defer labels.Stop()
	defer deaths.Stop()
	for c.done() < len(c.nodes) || len(c.hands) > 0 {
		select {
		case e := <-nodes:
			c.observe(e)
			c.step()
		case e := <-lease:
			for behind := true; behind; { // by the nodes as they were when this was written
				select {
				case e := <-nodes:
					c.observe(e)
				default:
					behind = false
				}
			}
			c.granted(e)
			c.step()
		case <-labels.C:
			if c.labelled < len(c.nodes) {
				c.nodes[c.labelled].label(config.LabelMIGConfig, c.requested)
				c.labelled++
			}
		case <-deaths.C:
			c.revive()
			c.die()
		case <-ctx.Done():
			c.t.Fatalf("%d of %d nodes are as asked, %d hands are left; the Lease says %+v; the others:\n%s", c.done(), len(c.nodes), len(c.hands),
				c.last, c.others())
		}
	}
}

// others are the words of the nodes that are not as asked.
func (c *crowd) others() string {
	var all []string
	for name, n := range c.seen {
		if !converged(c.requested)(n) {
			all = append(all, name+": "+words(n))
		}
	}
	return strings.Join(all, "\n")
}

// Promises 8 and 11. Fifty nodes are labelled one after the other, and five may be unavailable, those included that others keep. Agents
// die all the time. It is one watch that counts, from before the first label.
func TestNeverMoreThanTheLimitIsUnavailable(t *testing.T) {
	if testing.Short() {
		t.Skip("20 nodes with their agents, for minutes; agent/act/fleet holds the limit with many nodes against a real API server, without agents")
	}
	t.Parallel()
	seed := *seed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("to draw the same deaths: -seed %d", seed)
	const limit = 5
	n := max(*fleetSize, 3*limit)
	f := newFleet(t, n, limit)
	f.run()
	cordoned, lost, taken := []*rig{f.nodes[n/7], f.nodes[n/3]}, f.nodes[n/2], []*rig{f.nodes[1], f.nodes[2]}
	c := &crowd{
		fleet: f, requested: "all-balanced", random: rand.New(rand.NewPCG(seed, uint64(n))), died: map[string]time.Time{}, kept: map[string]bool{},
	}
	for _, r := range cordoned {
		r.kubectl("cordon", r.Name)
	}
	lost.Kubelet.Stop()
	lost.notReady()
	for _, r := range slices.Concat(cordoned, taken, []*rig{lost}) {
		c.kept[r.Name] = true
	}
	uncordon := func(r *rig) func() { return func() { r.kubectl("uncordon", r.Name) } }
	c.hands = []hand{
		{at: n / 10, do: uncordon(cordoned[0])},
		{at: n / 5, do: func() {
			if err := lost.StartKubelet(t.Context()); err != nil {
				t.Fatal(err)
			}
		}},
		{at: n / 3, do: uncordon(cordoned[1])},
		// Whoever wants nodes for himself asks the pool to begin nothing, and takes them when no one has a slot any more.
		{at: n / 2, do: func() { f.kubectlLease("annotate", config.AnnotationPaused+"=for the electrician") }},
		{at: n / 2, may: func() bool { return c.last.paused && len(c.last.Holders) == 0 }, do: func() {
			for _, r := range taken {
				r.kubectl("cordon", r.Name)
			}
			f.kubectlLease("annotate", config.AnnotationPaused+"-")
		}},
		{at: 3 * n / 4, do: uncordon(taken[0])},
		{at: n, do: uncordon(taken[1])},
	}
	began := time.Now()
	c.live()
	t.Logf("all %d nodes after %s; %d agents were killed, %d were unavailable at once, %d times one was passed by", n,
		time.Since(began).Round(100*time.Millisecond), c.killed, f.most, c.passed)
	for _, jump := range c.jumped {
		t.Log(jump)
	}
	// On a machine that has much else to do, an agent may look again too late for the patience of the others; where the order is
	// wrong, it is so for every second node.
	if len(c.jumped)+c.passed > max(n/3, 6) {
		t.Errorf("%d times a node went before an older one that was alive, and %d times before one that had died", len(c.jumped), c.passed)
	}
	if f.most != limit {
		t.Errorf("%d nodes were unavailable at once, and %d could have been", f.most, limit)
	}
	c.revive()
	for _, r := range f.nodes {
		r.await("its end", func(n *corev1.Node) bool { return !unavailable(n) })
		r.givenBack(r.awaitConverged(c.requested))
		if got, want := r.snapshot()[0].Geometry().String(), "1g.10gb@0 1g.10gb@1 2g.20gb@2 3g.40gb@4"; got != want {
			t.Errorf("node %s is cut as %s, want %s", r.Name, got, want)
		}
	}
}

// notReady has the node say what kubelet says last of all, and does not wait until the node lifecycle controller notices that it has gone.
func (r *rig) notReady() {
	r.t.Helper()
	c := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Reason: "KubeletNotReady", Message: "container runtime is down"}
	if _, err := r.patch(r.t.Context(), map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{c}}}, "status"); err != nil {
		r.t.Fatal(err)
	}
}

// kubectlLease is what an administrator does to the pool's Lease.
func (f *fleet) kubectlLease(verb string, args ...string) {
	f.t.Helper()
	f.nodes[0].kubectl(append([]string{verb, "-n", agentNamespace, "lease", f.lease()}, args...)...)
}

func (r *rig) patch(ctx context.Context, body map[string]any, subresources ...string) (*corev1.Node, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	return r.client.CoreV1().Nodes().Patch(ctx, r.Name, types.StrategicMergePatchType, text, metav1.PatchOptions{}, subresources...)
}
