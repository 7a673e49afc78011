package health

import (
	"cmp"
	"slices"

	"github.com/gpuslice/gpuslice/agent/api"
)

// mostXidsInStatus bounds what the status has of one GPU.
const mostXidsInStatus = 4

// status is what tools find of the GPU; nil of one that is well.
func (m *Monitor) status(g *gpu) *api.GPUHealth {
	if len(g.findings) == 0 && len(g.xids) == 0 {
		return nil
	}
	out := &api.GPUHealth{}
	if a := g.reading.Action; a.Known {
		out.Recovery = int(a.Value)
	}
	if len(g.findings) > 0 {
		f := worst(g.findings)
		out.Reason, out.Severity, out.Action, out.Since = f.reason, string(f.severity()), string(f.action), f.since.UTC()
		for _, gi := range f.instances {
			out.Instances = append(out.Instances, m.instanceName(g, gi))
		}
	}
	var keys []xidKey
	for key := range g.xids {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b xidKey) int { // those that hold first, then the newest
		held := func(k xidKey) int {
			if g.xids[k].holds {
				return 0
			}
			return 1
		}
		return cmp.Or(cmp.Compare(held(a), held(b)), g.xids[b].last.Compare(g.xids[a].last), cmp.Compare(a.xid, b.xid), cmp.Compare(a.gi, b.gi))
	})
	for _, key := range keys[:min(len(keys), mostXidsInStatus)] {
		o := g.xids[key]
		// The last one is told by the minute, so that a node is not written for each.
		out.Xids = append(out.Xids, api.XidSeen{
			Number: key.xid, First: o.first.UTC(), Last: o.last.UTC().Truncate(recordEvery), GI: key.gi, CI: key.ci,
		})
	}
	if g.rows != nil && (g.rows.corrected+g.rows.uncorrected > 0 || g.pending || g.failed) {
		out.Remap = &api.Remap{Corrected: g.rows.corrected, Uncorrected: g.rows.uncorrected, Pending: g.pending, Failed: g.failed}
	}
	return out
}
