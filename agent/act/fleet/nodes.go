package fleet

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/pager"

	"github.com/gpuslice/gpuslice/agent/state/journal"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/managed"
	"github.com/gpuslice/gpuslice/nvml"
)

// page is how many nodes the agent reads by one request. A node takes some 20 KiB, or 256 KiB if its annotations are full.
const page = 50

// census is the nodes of a pool at one moment.
type census struct {
	left    int64                // state.Left of the Lease that the agent read before the nodes
	holders []holder             // of slots, by the last Lease that the agent has compared with the census
	all     map[string]types.UID // all nodes that were read, even those of other pools
	members []member             // nodes of the pool, in the order of their names
	asks    types.UID            // of the node that asks
}

type member struct {
	name   string
	uid    types.UID
	reason string // why the node is unavailable, or ""
}

// census reads the nodes from the API server, not from a cache.
func (s *Leases) census(ctx context.Context, pool Pool, asks types.UID) (*census, error) {
	c := &census{all: map[string]types.UID{}, asks: asks}
	var options metav1.ListOptions
	if pool.Selector != nil {
		options.LabelSelector = pool.Selector.String()
	}
	pages := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
		ctx, cancel := s.bounded(ctx)
		defer cancel()
		return s.Client.Nodes().List(ctx, o)
	})
	pages.PageSize, pages.PageBufferSize = page, 1
	err := pages.EachListItem(ctx, options, func(object runtime.Object) error {
		node, ok := object.(*corev1.Node)
		if !ok {
			return fmt.Errorf("the list has a %T", object)
		}
		c.all[node.Name] = node.UID
		if c.counts(node, pool) {
			c.members = append(c.members, member{name: node.Name, uid: node.UID, reason: Unavailable(node, s.Startup)})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing the nodes of pool %s: %w", pool.Name, err)
	}
	return c, nil
}

// reviewed is how many nodes review reads at most, one by one: about as many requests as a census of a large pool has.
const reviewed = 20

// review updates the census: it reads the nodes again that had a slot and have none by the Lease that was read now. In a large pool nodes
// leave all the time, and a census takes so long that it would begin again after each of them, for ever. If more nodes have left than the
// census can know of, review changes nothing. A node that got a slot and returned it since the last observation is not among the holders, but
// the Lease counts it.
func (s *Leases) review(ctx context.Context, pool Pool, c *census, r *record) error {
	var left []holder
	for _, h := range c.holders {
		if r.state.Left != c.left && !slices.ContainsFunc(r.before, func(b holder) bool { return b.UID == h.UID }) {
			left = append(left, h)
		}
	}
	if int64(len(left)) != r.state.Left-c.left || len(left) > reviewed {
		return nil
	}
	for _, h := range left {
		node, err := s.node(ctx, h.Node)
		if err != nil {
			return fmt.Errorf("reading node %s, which had a slot of pool %s: %w", h.Node, pool.Name, err)
		}
		c.replace(h.Node, node, pool, s.Startup)
	}
	c.left = r.state.Left
	return nil
}

// replace puts what was read of the node of this name in place of what the census has. Node is nil if there is none.
func (c *census) replace(name string, node *corev1.Node, pool Pool, startup config.StartupTaints) {
	delete(c.all, name)
	c.members = slices.DeleteFunc(c.members, func(m member) bool { return m.name == name })
	if node == nil || pool.Selector != nil && !pool.Selector.Matches(labels.Set(node.Labels)) {
		return
	}
	c.all[name] = node.UID
	if c.counts(node, pool) {
		i, _ := slices.BinarySearchFunc(c.members, name, func(m member, name string) int { return strings.Compare(m.name, name) })
		c.members = slices.Insert(c.members, i, member{name: name, uid: node.UID, reason: Unavailable(node, startup)})
	}
}

// counts reports whether the node is one of the pool's.
func (c *census) counts(node *corev1.Node, pool Pool) bool {
	return pool.selects(node) && (node.UID == c.asks || hasGPUs(node))
}

// hasGPUs reports whether the node has ever shown GPUs. Kubelet keeps the name of a resource that has no devices left, and the agent's condition outlives the
// agent. Labels say nothing, nor do startup taints: a node may be registered with any of them, and labels choose the pool. A node
// without GPUs that is cordoned would otherwise keep all others of the pool from changing.
func hasGPUs(node *corev1.Node) bool {
	for _, resources := range []corev1.ResourceList{node.Status.Capacity, node.Status.Allocatable} {
		for name := range resources {
			if nvml.GPUResource(string(name)) {
				return true
			}
		}
	}
	return fenced(node) || slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == config.ConditionGPUPartitionReady })
}

// has reports whether the node with this name and UID is of the pool.
func (c *census) has(name string, uid types.UID) bool {
	return slices.ContainsFunc(c.members, func(m member) bool { return m.name == name && m.uid == uid })
}

func (c *census) mustHave(change Change, pool Pool) error {
	if c.has(change.Node, change.UID) {
		return nil
	}
	return fmt.Errorf("node %s (uid %s) is not among the %d nodes of pool %s: it was deleted, or its labels have changed",
		change.Node, change.UID, len(c.members), pool.Name)
}

// unavailableNodes returns, with the reason, the nodes that are unavailable or have a slot, without the one that asks. Stuck is the first of them that no
// agent changes.
func (c *census) unavailableNodes(holders []holder, but Change) (unavailable []string, stuck string) {
	unavailable = []string{}
	holds := map[types.UID]bool{but.UID: true}
	for _, h := range holders {
		if h.UID != but.UID {
			unavailable = append(unavailable, h.Node+": "+managed.Changing)
		}
		holds[h.UID] = true
	}
	for _, m := range c.members {
		if m.reason != "" && !holds[m.uid] {
			unavailable = append(unavailable, m.name+": "+m.reason)
			if m.reason != managed.Changing {
				stuck = cmp.Or(stuck, m.name)
			}
		}
	}
	return unavailable, stuck
}

// deletedNodes returns the holders of slots with a node that was deleted, or created again under the same name. It asks the API server only
// for nodes that are not among the known ones. A node that no longer matches the pool's selector may still be in the middle of its change.
func (s *Leases) deletedNodes(ctx context.Context, pool Pool, known map[string]types.UID, holders []holder) ([]types.UID, error) {
	var gone []types.UID
	for _, h := range holders {
		uid, read := known[h.Node]
		if !read {
			var err error
			if uid, err = s.uid(ctx, h.Node); err != nil {
				return nil, fmt.Errorf("reading node %s, which has a slot of pool %s: %w", h.Node, pool.Name, err)
			}
		}
		if uid != h.UID {
			gone = append(gone, h.UID)
		}
	}
	return gone, nil
}

// uid returns the UID of the node of this name, or "" if there is no such node.
func (s *Leases) uid(ctx context.Context, name string) (types.UID, error) {
	node, err := s.node(ctx, name)
	if node == nil {
		return "", err
	}
	return node.UID, nil
}

// node returns the node of this name, or nil if there is no such node.
func (s *Leases) node(ctx context.Context, name string) (*corev1.Node, error) {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	node, err := s.Client.Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return node, nil
}

// fenced reports whether an agent keeps pods from the node or from devices of it, or has paused operands. A change that only cordons, or closes devices by
// rules, shows no taint. Its slot can be lost: another agent's token may remove it from the Lease, and it ends when its own agent is gone. So its journal
// counts, if it can be read.
func fenced(node *corev1.Node) bool {
	if slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == config.TaintRepartitioning }) {
		return true
	}
	j, err := journal.Parse(node.Annotations[config.AnnotationJournal])
	return err == nil && j != nil && j.Disturbs()
}

// Unavailable returns why a node takes no pods, or "" if it does.
func Unavailable(node *corev1.Node, startup config.StartupTaints) string {
	return managed.Unavailable(node, fenced(node), startup.Has)
}
