package show

import (
	"cmp"
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuslice/gpuslice/cmd/kubectl-gpuslice/judge"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/maintenance"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/kube"
	"github.com/gpuslice/gpuslice/drain/managed"
)

// begins reads when changes may begin; nil if that is not known. The agents alone know how long their changes take, and which moment after an opening is
// theirs.
func (a *advice) begins(ctx context.Context, client kube.Interface, nodes []corev1.Node, out *advised) (func(*corev1.Node) judge.Beginning, error) {
	schedule, file := maintenance.Without(), a.agents.Maintenance
	where := fmt.Sprintf("ConfigMap %s/%s", file.Namespace, file.Name)
	if file.Name != "" {
		m, err := client.ConfigMaps(file.Namespace).Get(ctx, file.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case apierrors.IsForbidden(err):
			out.note("when windows let changes begin is not known: reading %s needs rights that you lack", where)
			return nil, nil
		case err != nil:
			return nil, fmt.Errorf("reading %s: %w", where, err)
		default:
			if schedule, err = maintenance.Parse([]byte(m.Data[file.Key])); err != nil {
				not := fmt.Sprintf("no change begins before %s can be read: %s", where, sanitize.Message(err.Error(), sanitize.Longest))
				return func(*corev1.Node) judge.Beginning { return judge.Beginning{Not: not} }, nil
			}
		}
	}
	paused, members := map[string]string{}, map[string][]member{} // by the pool
	return func(n *corev1.Node) judge.Beginning {
		pool := schedule.For(n)
		if pool.Name != "" {
			if _, read := paused[pool.Name]; !read {
				paused[pool.Name], members[pool.Name] = a.paused(ctx, client, pool, out), a.members(schedule, pool, nodes)
			}
			if not := cmp.Or(paused[pool.Name], full(pool, n, members[pool.Name])); not != "" {
				return judge.Beginning{Not: not}
			}
		}
		may := a.opens(pool, n)
		if pool.Name == "" && pool.MaxUnavailable != nil && pool.MaxUnavailable.Of(1) == 0 {
			may.Stay = "no change outside of pools begins that evicts pods: maxUnavailable of " + where + " is 0"
		}
		return may
	}, nil
}

// opens is when a window lets a change of the node begin.
func (a *advice) opens(pool maintenance.Pool, n *corev1.Node) judge.Beginning {
	if o, open := pool.Schedule.At(a.now); open && (o.End.IsZero() || o.End.Sub(a.now) >= pool.Estimate) {
		return judge.Beginning{At: a.now}
	}
	o, ever := pool.Schedule.Next(a.now, pool.Estimate)
	if !ever {
		return judge.Beginning{Not: "no window of node " + n.Name + " opens again"}
	}
	return judge.Beginning{At: o.Start}
}

// paused says that the agents have paused the pool, or a user has; empty if not.
func (a *advice) paused(ctx context.Context, client kube.Interface, pool maintenance.Pool, out *advised) string {
	lease, err := client.Leases(a.agents.Maintenance.Namespace).Get(ctx, config.LeasePrefix+pool.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return ""
	case err != nil:
		out.note("whether pool %s is paused is not known: %s", pool.Name, sanitize.Message(err.Error(), sanitize.Longest))
		return ""
	}
	why, is := lease.Annotations[config.AnnotationPaused]
	if !is {
		return ""
	}
	return fmt.Sprintf("pool %s is paused, and no change begins before annotation %s of Lease %s/%s is removed: %s", pool.Name, config.AnnotationPaused,
		lease.Namespace, lease.Name, sanitize.Message(why, sanitize.Longest))
}

// member is a node that counts against the limit of its pool while it is unavailable.
type member struct{ name, unavailable string }

// members are the nodes of a pool that has a limit.
func (a *advice) members(schedule maintenance.Maintenance, pool maintenance.Pool, nodes []corev1.Node) (out []member) {
	startup := a.agents.StartupTaints().Has
	for i := range nodes {
		if n := &nodes[i]; pool.MaxUnavailable != nil && judge.HasGPUs(n) && schedule.For(n).Name == pool.Name {
			out = append(out, member{n.Name, managed.Unavailable(n, judge.IsChanging(n), startup)})
		}
	}
	return out
}

// full says which other nodes of the pool are unavailable, if they are as many as its limit; empty if not.
func full(pool maintenance.Pool, but *corev1.Node, of []member) string {
	if pool.MaxUnavailable == nil {
		return ""
	}
	var unavailable []string
	all := 1 // the node itself counts, whatever it shows
	for _, m := range of {
		if m.name == but.Name {
			continue
		}
		all++
		if m.unavailable != "" {
			unavailable = append(unavailable, m.name+": "+m.unavailable)
		}
	}
	switch limit := pool.MaxUnavailable.Of(all); {
	case limit > len(unavailable):
		return ""
	case limit <= 0:
		return fmt.Sprintf("no node of pool %s may be unavailable: its maxUnavailable is 0", pool.Name)
	default:
		return fmt.Sprintf("pool %s lets %s be unavailable at once, and no further change begins before one is back: %s", pool.Name, pool.MaxUnavailable,
			sanitize.Names(unavailable))
	}
}
