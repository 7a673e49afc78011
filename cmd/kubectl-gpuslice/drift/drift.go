// Package drift compares what a cluster promises of its GPUs, by quotas, queues and hardware profiles, with what its nodes offer. No other
// program does: Kueue never compares a nominal quota with nodes, and a ResourceQuota may name what no node has.
//
// It only reads, and knows no profile.
package drift

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/dynamic"

	"github.com/gpuslice/gpuslice/cmd/internal/kinds"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/isolation"
	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/taints"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
)

// Bounds of what is read of one kind.
const (
	atATime = 500
	most    = 50_000
)

// Finding is one difference between what is promised and what is offered.
type Finding struct {
	About string // kind and name of the object that promises
	Text  string
	// Idle says that less is promised than offered, which may be meant; otherwise it is more.
	Idle bool
	// Mixed says that a queue gives pods of one class of isolation what is of another.
	Mixed bool
}

// Report is what a cluster promises and offers.
type Report struct {
	Findings []Finding
	Read     map[string]int // objects, by kind; a kind that the cluster does not serve is missing
	Changing []string       // nodes whose GPUs are being divided again: they count as they are now
	Static   []string       // nodes whose GPUs NVIDIA's DRA driver offers as they are cut
	Dynamic  []string       // nodes whose GPUs it cuts itself
	Unread   []string       // what the user may not read, and what follows from that
	Older    []string       // versions that were read since the cluster does not serve the newer one, of which render writes objects
}

// Known is what is known of the cluster beforehand.
type Known struct {
	Groups  Groups
	Startup config.StartupTaints
	// Autoscaled are names of ResourceFlavors and HardwareProfiles with nodes that an autoscaler creates on demand: too few of them, or none, are no
	// mistake.
	Autoscaled []string
	// Refused says why a node of NVIDIA's DRA driver cannot be as its labels ask; empty if it can.
	Refused func(ctx context.Context, labels map[string]string) (string, error)
}

// Find reads the cluster. The error is that it cannot be read, that there is more of a kind than is read, or that nothing of a name in
// Known.Autoscaled is there.
func Find(ctx context.Context, client kube.Interface, objects dynamic.Interface, known Known) (Report, error) {
	c := comparison{Report: Report{Read: map[string]int{}}, objects: objects, known: known, coming: corev1.ResourceList{}}
	if err := c.readNodes(ctx, client); err != nil {
		return Report{}, err
	}
	if err := c.readSlices(ctx); err != nil {
		return Report{}, err
	}
	if err := c.readObjects(ctx); err != nil {
		return Report{}, err
	}
	if err := c.checkAutoscaled(); err != nil {
		return Report{}, err
	}
	c.compareFlavors()
	c.compareQueues()
	c.compareClasses()
	c.compareQuotas()
	c.compareLocalQueues()
	c.compareHardwareProfiles()
	return c.Report, nil
}

// comparison has what is promised and what is offered.
type comparison struct {
	Report
	objects dynamic.Interface
	known   Known

	nodes    []node
	flavors  []kinds.ResourceFlavor
	queues   []kinds.ClusterQueue
	locals   []kinds.LocalQueue
	quotas   []corev1.ResourceQuota
	profiles []kinds.HardwareProfile
	outdated []kinds.HardwareProfile // of the group that is replaced, beside those of the group that replaces it

	coming corev1.ResourceList // what queues promise of flavors that are autoscaled, and nodes do not offer yet
}

// node is what one node offers of GPUs.
type node struct {
	name   string
	labels map[string]string
	taints []corev1.Taint
	offers corev1.ResourceList
	closed bool // the agent keeps pods off while it changes the node
}

func (c *comparison) readNodes(ctx context.Context, client kube.Interface) error {
	options := metav1.ListOptions{Limit: atATime}
	for {
		page, err := client.Nodes().List(ctx, options)
		if err != nil {
			return fmt.Errorf("reading the nodes: %w", err)
		}
		for _, n := range page.Items {
			offers := corev1.ResourceList{}
			for name, quantity := range n.Status.Allocatable {
				if kinds.IsGPU(string(name)) && !quantity.IsZero() {
					offers[name] = quantity
				}
			}
			c.nodes = append(c.nodes, node{name: n.Name, labels: n.Labels, taints: n.Spec.Taints, offers: offers, closed: isChanging(n)})
			if isChanging(n) {
				c.Changing = append(c.Changing, n.Name)
			}
		}
		if len(c.nodes) > most {
			return fmt.Errorf("there are more than %d nodes", most)
		}
		if options.Continue = page.Continue; options.Continue == "" {
			return nil
		}
	}
}

// longestJournal is as much as the annotations of one object may have.
const longestJournal = 256 << 10

// isChanging reports whether the agent keeps pods from the node or from devices of it. A change of GPUs that NVIDIA's DRA driver allocates sets no taint, so
// the journal counts, if it can be read.
func isChanging(n corev1.Node) bool {
	if slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == config.TaintRepartitioning }) {
		return true
	}
	var journal struct {
		Cordoned bool              `json:"cordoned"`
		Closed   []json.RawMessage `json:"closed"`
	}
	text := n.Annotations[config.AnnotationJournal]
	return len(text) <= longestJournal && json.Unmarshal([]byte(text), &journal) == nil && (journal.Cordoned || len(journal.Closed) > 0)
}

func (c *comparison) idle(about, format string, args ...any) {
	c.Findings = append(c.Findings, Finding{About: about, Idle: true, Text: fmt.Sprintf(format, args...)})
}

func (c *comparison) promisesMore(about, format string, args ...any) {
	c.Findings = append(c.Findings, Finding{About: about, Text: fmt.Sprintf(format, args...)})
}

// selecting selects the nodes of a pool, those too that are being changed at the moment. It selects no node with a failed change.
func selecting(with map[string]string) func(of map[string]string) bool {
	state := with[config.LabelMIGConfigState]
	with = maps.Clone(with)
	delete(with, config.LabelMIGConfigState)
	selector := labels.SelectorFromSet(with)
	return func(of map[string]string) bool {
		failed := string(config.StateFailed)
		return selector.Matches(labels.Set(of)) && (state == "" || state == failed || of[config.LabelMIGConfigState] != failed)
	}
}

// offered adds up what the nodes with the labels offer.
func (c *comparison) offered(with map[string]string) (nodes int, total, ofNode corev1.ResourceList) {
	total, ofNode = corev1.ResourceList{}, corev1.ResourceList{}
	selects := selecting(with)
	for _, n := range c.nodes {
		if !selects(n.labels) {
			continue
		}
		nodes++
		for name, quantity := range n.offers {
			sum := total[name]
			sum.Add(quantity)
			total[name] = sum
			if quantity.Cmp(ofNode[name]) > 0 {
				ofNode[name] = quantity
			}
		}
	}
	return nodes, total, ofNode
}

// givesNoGPU reports whether queues use a flavor, and none of them for GPUs.
func (c *comparison) givesNoGPU(flavor string) bool {
	given := false
	for _, q := range c.queues {
		for _, group := range q.Spec.ResourceGroups {
			for _, f := range group.Flavors {
				if f.Name != flavor {
					continue
				}
				if slices.ContainsFunc(f.Resources, func(r kinds.ResourceShare) bool { return kinds.IsGPU(r.Name) }) {
					return false
				}
				given = true
			}
		}
	}
	return given
}

func (c *comparison) compareFlavors() {
	for _, f := range c.flavors {
		if c.givesNoGPU(f.Name) { // its nodes have nothing to do with GPUs, and may be made when they are needed
			continue
		}
		if nodes, _, _ := c.offered(f.Spec.NodeLabels); nodes == 0 {
			if c.isAutoscaled(f.Name) {
				c.idle("ResourceFlavor "+f.Name, "no node has its labels %s at the moment: admitted workloads wait for nodes that an autoscaler creates",
					labels.FormatLabels(f.Spec.NodeLabels))
				continue
			}
			c.promisesMore("ResourceFlavor "+f.Name,
				"no node has its labels %s: admitted workloads stay Pending; if an autoscaler creates its nodes on demand, say --autoscaled %s",
				labels.FormatLabels(f.Spec.NodeLabels), f.Name)
			continue
		}
		if nodes, closing := c.closing(f.Spec); len(closing) > 0 {
			c.promisesMore("ResourceFlavor "+f.Name,
				"pods cannot run on its %s: each has a taint that neither its tolerations nor its nodeTaints have; admitted workloads stay Pending; "+
					"add to its tolerations, which Kueue gives to pods: %s", sanitize.Counted(nodes, "node"), sanitize.Listed(closing))
		}
	}
}

// closing has the tolerations that pods of a flavor lack for all of its nodes; none if they come to any. A pod that Kueue admits by the flavor
// tolerates its nodeTaints.
func (c *comparison) closing(f kinds.FlavorSpec) (nodes int, lacking []string) {
	tolerations := f.Tolerated()
	selects := selecting(f.NodeLabels)
	lacks := map[string]bool{}
	for _, n := range c.nodes {
		if !selects(n.labels) {
			continue
		}
		nodes++
		closing := taints.KeepingOut(n.taints, tolerations, c.known.Startup)
		if len(closing) == 0 {
			return 0, nil
		}
		for _, t := range closing {
			lacks[taints.Toleration(t)] = true
		}
	}
	return nodes, slices.Sorted(maps.Keys(lacks))
}

// longestLabel bounds a label in a message, in characters.
const longestLabel = 150

// compareClasses finds queues, and hardware profiles that select nodes, with nodes of several classes of isolation.
func (c *comparison) compareClasses() {
	for _, q := range c.queues {
		c.compareClass("ClusterQueue "+q.Name, q, func(flavor string) *kinds.FlavorSpec {
			at := slices.IndexFunc(c.flavors, func(f kinds.ResourceFlavor) bool { return f.Name == flavor })
			if at < 0 {
				return nil
			}
			return &c.flavors[at].Spec
		})
	}
	for _, p := range c.profiles {
		if as, selects, is := p.AsQueue(); is {
			c.compareClass(profileName(p), as, func(string) *kinds.FlavorSpec { return &selects })
		}
	}
}

// compareClass goes by the nodes that each flavor selects. Labels of GPU feature discovery say how a node is now, whatever its other labels request. A node
// without them has no known class. Nodes with taints that a flavor does not tolerate are not the flavor's, and those that are being changed are not yet.
func (c *comparison) compareClass(about string, q kinds.ClusterQueue, flavors func(name string) *kinds.FlavorSpec) {
	var shared []string // nodes, each with the label that says so
	for _, text := range isolation.Mixed(q, func(flavor, resource string) (out []isolation.Class) {
		spec := flavors(flavor)
		if spec == nil {
			return nil
		}
		tolerations := spec.Tolerated()
		selector := labels.SelectorFromSet(spec.NodeLabels) // with the state of their change: it keeps pods off
		for _, n := range c.nodes {
			_, offers := n.offers[corev1.ResourceName(resource)]
			selected := selector.Matches(labels.Set(n.labels)) && len(taints.KeepingOut(n.taints, tolerations, c.known.Startup)) == 0
			if !offers || n.closed || !selected {
				continue
			}
			if by := isolation.SharedBy(n.labels, resource); by != "" {
				shared = append(shared, n.name+" by "+sanitize.Cut(by, longestLabel))
			}
			if class := isolation.OfNode(n.labels, resource); !slices.Contains(out, class) {
				out = append(out, class)
			}
		}
		return out
	}) {
		if len(shared) > 0 {
			slices.Sort(shared)
			text += "; these nodes share: " + sanitize.Listed(slices.Compact(shared))
		}
		c.Findings = append(c.Findings, Finding{About: about, Text: text, Mixed: true})
	}
}

// promise is how much of a resource the queues may admit by one flavor.
type promise struct {
	sum    resource.Quantity
	queues []string
}

// promises are those of all queues, by flavor.
func (c *comparison) promises() map[string]map[corev1.ResourceName]promise {
	byFlavor := map[string]map[corev1.ResourceName]promise{}
	for _, q := range c.queues {
		for _, group := range q.Spec.ResourceGroups {
			for _, flavor := range group.Flavors {
				if byFlavor[flavor.Name] == nil {
					byFlavor[flavor.Name] = map[corev1.ResourceName]promise{}
				}
				for _, share := range flavor.Resources {
					if !kinds.IsGPU(share.Name) {
						continue
					}
					name := corev1.ResourceName(share.Name)
					p := byFlavor[flavor.Name][name]
					p.sum.Add(share.NominalQuota)
					p.queues = append(p.queues, q.Name)
					byFlavor[flavor.Name][name] = p
				}
			}
		}
	}
	return byFlavor
}

func (c *comparison) compareQueues() {
	byFlavor := c.promises()
	var pools []promised
	found := len(c.Findings)
	for _, name := range slices.Sorted(maps.Keys(byFlavor)) {
		c.compareFlavor(name, byFlavor[name])
		nodes, offers := c.offeredBy(name)
		pool := promised{flavor: name, nodes: nodes, offers: offers, by: map[corev1.ResourceName]promise{}}
		for resource, p := range byFlavor[name] {
			if has := offers[resource]; c.isAutoscaled(name) && p.sum.Cmp(has) > 0 {
				rest := p.sum.DeepCopy()
				rest.Sub(has)
				add(c.coming, resource, rest)
				p.sum = has
			}
			pool.by[resource] = p
		}
		if len(nodes) > 0 { // of one without nodes it is said already
			pools = append(pools, pool)
		}
	}
	mistaken := func() bool { return slices.ContainsFunc(c.Findings[found:], func(f Finding) bool { return !f.Idle }) }
	if mistaken() {
		return // it is said flavor by flavor
	}
	for i, p := range pools {
		if !slices.ContainsFunc(pools[:i], func(before promised) bool { return maps.Equal(before.nodes, p.nodes) }) {
			c.compareTogether(p, pools)
		}
	}
	if !mistaken() {
		_, total, _ := c.offered(nil)
		all := promised{offers: total, nodes: map[string]bool{}}
		for _, n := range c.nodes {
			all.nodes[n.name] = true
		}
		c.compareTogether(all, pools)
	}
}

// promised is what queues promise of the nodes of a flavor; of all nodes without one.
type promised struct {
	flavor string
	nodes  map[string]bool
	offers corev1.ResourceList
	by     map[corev1.ResourceName]promise
}

// compareTogether adds up what flavors promise of a pool's nodes: its own flavor, and each that selects only nodes of the pool.
func (c *comparison) compareTogether(of promised, pools []promised) {
	together := map[corev1.ResourceName]promise{}
	var flavors []string
	for _, p := range pools {
		if !within(p.nodes, of.nodes) {
			continue
		}
		flavors = append(flavors, p.flavor)
		for name, more := range p.by {
			one := together[name]
			one.sum.Add(more.sum)
			one.queues = slices.Concat(one.queues, more.queues)
			together[name] = one
		}
	}
	if len(flavors) < 2 {
		return
	}
	who, where := "flavors "+sanitize.Listed(flavors), fmt.Sprintf("the %s of flavor %s %s", sanitize.Counted(len(of.nodes), "node"), of.flavor, offer(len(of.nodes)))
	if of.flavor == "" {
		who, where = "all flavors", "all nodes offer"
	}
	for _, name := range slices.Sorted(maps.Keys(together)) {
		if p, offers := together[name], of.offers[name]; p.sum.Cmp(offers) > 0 {
			c.promisesMore(queuesOf(p.queues), "%s of %s may be admitted by %s together, and %s %s: some nodes have the labels of several flavors",
				p.sum.String(), name, who, where, offers.String())
		}
	}
}

func within(some, all map[string]bool) bool {
	for name := range some {
		if !all[name] {
			return false
		}
	}
	return true
}

func add(to corev1.ResourceList, name corev1.ResourceName, more resource.Quantity) {
	sum := to[name]
	sum.Add(more)
	to[name] = sum
}

func (c *comparison) offeredBy(flavor string) (nodes map[string]bool, total corev1.ResourceList) {
	at := slices.IndexFunc(c.flavors, func(f kinds.ResourceFlavor) bool { return f.Name == flavor })
	if at < 0 {
		return nil, nil
	}
	selects := selecting(c.flavors[at].Spec.NodeLabels)
	nodes = map[string]bool{}
	for _, n := range c.nodes {
		if selects(n.labels) {
			nodes[n.name] = true
		}
	}
	_, total, _ = c.offered(c.flavors[at].Spec.NodeLabels)
	return nodes, total
}

func (c *comparison) compareFlavor(name string, promised map[corev1.ResourceName]promise) {
	at := slices.IndexFunc(c.flavors, func(f kinds.ResourceFlavor) bool { return f.Name == name })
	resources := slices.Sorted(maps.Keys(promised))
	if at < 0 {
		if len(resources) > 0 {
			c.promisesMore(queuesOf(promised[resources[0]].queues), "flavor %s is not there", name)
		}
		return
	}
	nodes, offers, _ := c.offered(c.flavors[at].Spec.NodeLabels)
	if nodes == 0 {
		return // it is said of the flavor
	}
	for _, of := range resources {
		p, has := promised[of], offers[of]
		left := p.sum.DeepCopy()
		left.Sub(has)
		switch {
		case left.Sign() > 0 && c.isAutoscaled(name) && !has.IsZero(): // nodes that offer none of it are of another kind than the queue takes them for
			c.idle(queuesOf(p.queues), "%s of %s may be admitted by flavor %s, and its %s %s %s at the moment: the rest waits for nodes that an autoscaler makes",
				p.sum.String(), of, name, sanitize.Counted(nodes, "node"), offer(nodes), has.String())
		case left.Sign() > 0:
			c.promisesMore(queuesOf(p.queues), "%s of %s may be admitted by flavor %s, and its %s %s %s: pods of admitted workloads stay Pending",
				p.sum.String(), of, name, sanitize.Counted(nodes, "node"), offer(nodes), has.String())
		case left.Sign() < 0:
			left.Neg()
			c.idle(queuesOf(p.queues), "%s of %s that the %s of flavor %s %s can be admitted by no queue", left.String(),
				of, sanitize.Counted(nodes, "node"), name, offer(nodes))
		}
	}
}

func offer(nodes int) string {
	if nodes == 1 {
		return "offers"
	}
	return "offer"
}

func queuesOf(names []string) string {
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) == 1 {
		return "ClusterQueue " + names[0]
	}
	return "ClusterQueues " + sanitize.Listed(names)
}

func (c *comparison) compareQuotas() {
	_, total, _ := c.offered(nil)
	for _, q := range c.quotas {
		for _, key := range slices.Sorted(maps.Keys(q.Spec.Hard)) {
			name, isRequest := strings.CutPrefix(string(key), corev1.DefaultResourceRequestsPrefix)
			if !isRequest || !kinds.IsGPU(name) {
				continue
			}
			hard, offers := q.Spec.Hard[key], total[corev1.ResourceName(name)]
			coming := c.coming[corev1.ResourceName(name)]
			later := offers.DeepCopy()
			later.Add(coming)
			switch {
			case hard.Cmp(later) <= 0 && hard.Cmp(offers) > 0:
				c.idle("ResourceQuota "+q.Namespace+"/"+q.Name,
					"%s allows %s, and all nodes offer %s at the moment: queues promise %s more of nodes that an autoscaler makes",
					key, hard.String(), offers.String(), coming.String())
			case hard.Cmp(offers) > 0:
				c.promisesMore("ResourceQuota "+q.Namespace+"/"+q.Name, "%s allows %s, and all nodes offer %s", key, hard.String(), offers.String())
			}
		}
	}
}

func (c *comparison) compareLocalQueues() {
	for _, q := range c.locals {
		if !slices.ContainsFunc(c.queues, func(of kinds.ClusterQueue) bool { return of.Name == q.Spec.ClusterQueue }) {
			c.promisesMore("LocalQueue "+q.Namespace+"/"+q.Name, "ClusterQueue %s is not there: no workload of the queue is ever admitted", q.Spec.ClusterQueue)
		}
	}
}

func (c *comparison) compareHardwareProfiles() {
	for _, p := range c.outdated {
		c.promisesMore(profileName(p), "is of %s, a group that is replaced: make it again as %s", formerProfiles, kinds.HardwareProfileVersion)
	}
	for _, p := range c.profiles {
		if p.Annotations[kinds.AnnotationDisabled] == "true" {
			continue
		}
		var with map[string]string
		where := "no node offers it"
		if s := p.Spec.Scheduling; s != nil && s.Node != nil && len(s.Node.NodeSelector) > 0 {
			with = s.Node.NodeSelector
			where = "no node with its labels " + labels.FormatLabels(with) + " offers it"
		}
		if s := p.Spec.Scheduling; s != nil && s.Kueue != nil &&
			!slices.ContainsFunc(c.locals, func(q kinds.LocalQueue) bool { return q.Name == s.Kueue.LocalQueueName }) {
			c.promisesMore(profileName(p), "scheduling.kueue.localQueueName is %s, and no namespace has a LocalQueue of that name: its workloads are never admitted", s.Kueue.LocalQueueName)
		}
		_, _, ofNode := c.offered(with)
		for _, id := range p.Spec.Identifiers {
			switch _, there := ofNode[corev1.ResourceName(id.Identifier)]; {
			case !kinds.IsGPU(id.Identifier):
			case !there && c.comes(p.Name, with, id.Identifier):
				c.idle(profileName(p), "identifier %s: %s at the moment: its workloads wait for nodes that an autoscaler makes", id.Identifier, where)
			default:
				c.compareIdentifier(p, id, ofNode, where)
			}
		}
	}
}

// compareIdentifier compares what one pod may ask for with what the node offers that has most of it.
func (c *comparison) compareIdentifier(p kinds.HardwareProfile, id kinds.Identifier, ofNode corev1.ResourceList, where string) {
	least, leastErr := resource.ParseQuantity(cmp.Or(id.MinCount.String(), "0"))
	most, mostErr := resource.ParseQuantity(mostOf(id))
	offers, there := ofNode[corev1.ResourceName(id.Identifier)]
	switch {
	case !there:
		c.promisesMore(profileName(p), "identifier %s: %s", id.Identifier, where)
	case leastErr == nil && least.Cmp(offers) > 0:
		c.promisesMore(profileName(p), "identifier %s: its workloads ask for at least %s, and no node offers more than %s",
			id.Identifier, least.String(), offers.String())
	case mostErr == nil && most.Cmp(offers) > 0:
		c.promisesMore(profileName(p), "identifier %s: its workloads may ask for %s, and no node offers more than %s: lower maxCount",
			id.Identifier, most.String(), offers.String())
	}
}

// mostOf is the most that a workload may ask for; without a maxCount at least what it asks for by itself.
func mostOf(id kinds.Identifier) string {
	if id.MaxCount != nil {
		return id.MaxCount.String()
	}
	return id.DefaultCount.String()
}

func profileName(p kinds.HardwareProfile) string {
	return "HardwareProfile " + p.Namespace + "/" + p.Name
}
