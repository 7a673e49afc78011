package health

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// quietFor is how long after an Event the same is only counted.
	quietFor = 3 * time.Minute
	// mostEvents within quietFor: what comes beyond is counted by the metrics.
	mostEvents = 30
	// mostPodsTold of one Xid get an Event.
	mostPodsTold = 8
)

// holder is a pod with a GPU or a part of one.
type holder struct {
	pod types.NamespacedName
	uid types.UID
}

// instances are those of the GPU, as last seen.
func (m *Monitor) instances(gpu nvml.UUID) []nvml.Instance {
	for _, g := range m.here.gpus {
		if g.UUID == gpu {
			return g.Instances
		}
	}
	return nil
}

func (m *Monitor) instance(gpu nvml.UUID, gi int) (nvml.Instance, bool) {
	all := m.instances(gpu)
	at := slices.IndexFunc(all, func(i nvml.Instance) bool { return i.ID == gi })
	if at < 0 {
		return nvml.Instance{}, false
	}
	return all[at], true
}

// podsOn are the pods that kubelet has given the GPU's instances, or, if none are named, any part of the GPU.
func (m *Monitor) podsOn(gpu nvml.UUID, instances []int) []holder {
	devices := []string{string(gpu)}
	for _, i := range m.instances(gpu) {
		if len(instances) > 0 && !slices.Contains(instances, i.ID) {
			continue
		}
		for _, d := range i.Devices {
			devices = append(devices, d.UUID)
		}
	}
	var out []holder
	for _, h := range m.here.holders {
		if h.UID != "" && h.Name != "" && slices.ContainsFunc(h.Devices, func(d string) bool { return slices.Contains(devices, d) }) {
			out = append(out, holder{types.NamespacedName{Namespace: h.Namespace, Name: h.Name}, h.UID})
		}
	}
	slices.SortFunc(out, func(a, b holder) int { return cmp.Compare(a.pod.String(), b.pod.String()) })
	return out
}

// tellXid tells of an Xid by Events: a program's own on its pod alone, others on the node too. The same one again is counted first, and so
// is what comes in a storm.
func (m *Monitor) tellXid(now time.Time, g *gpu, x Xid, e nvml.Event, o *occurrence) {
	if o == nil {
		return
	}
	var on []int
	where := g.name()
	if e.GI != nvml.WholeGPU {
		on = []int{e.GI}
		where = m.instanceName(g, e.GI) + " of " + where
	}
	pods := m.podsOn(g.uuid, on)
	own := x.Class == ClassApplication && !x.Critical
	if own && len(pods) == 1 && x.Number != containedError {
		g.erred(now, pods[0].uid)
	}
	if (x.Class == ClassInfo || x.Class == ClassState) && !x.Critical {
		return // a note, which the metrics count
	}
	again, may := m.mayTell(now, o)
	if !may {
		return
	}
	if own {
		did := "has made an error on"
		if x.Number == containedError {
			did = "was hit by it on"
		}
		m.tellPods(pods, config.ReasonApplicationXid, func(whose string) string {
			return fmt.Sprintf("Xid %d (%s): a program of %s %s %s, and was stopped%s", x.Number, x.Meaning, whose, did, where, again)
		})
		return
	}
	m.TellNode(corev1.EventTypeWarning, config.ReasonXidError, "Xid %d (%s) on %s%s", x.Number, x.Meaning, where, again)
	m.tellPods(pods, config.ReasonXidError, func(string) string {
		return fmt.Sprintf("Xid %d (%s) on %s, which this pod has%s", x.Number, x.Meaning, where, again)
	})
}

// containedError is the Xid of an error of memory that has hit one program, which is not its own fault.
const containedError = 94

// mayTell reports whether an Xid is to be told by Events now, and what is to be said of those that were not.
func (m *Monitor) mayTell(now time.Time, o *occurrence) (again string, may bool) {
	if !o.told.IsZero() && now.Sub(o.told) < quietFor || !m.counts.mayTell(now) {
		o.untold++
		return "", false
	}
	if o.untold > 0 {
		again = fmt.Sprintf("; %d more since %s", o.untold, moment(cmp.Or(o.told, o.first)))
	}
	o.told, o.untold = now, 0
	return again, true
}

func (m *Monitor) tellPods(pods []holder, reason config.Reason, text func(whose string) string) {
	whose := "this pod"
	if len(pods) > 1 {
		whose = fmt.Sprintf("one of %d pods", len(pods))
	}
	for _, p := range pods[:min(len(pods), mostPodsTold)] {
		m.TellPod(p.pod, p.uid, corev1.EventTypeWarning, reason, "%s", text(whose))
	}
}

// before is what a look may change that is told by Events.
type before struct {
	action nvml.Reading[nvml.RecoveryAction]
	rows   nvml.Reading[uint64]
}

func (m *Monitor) states() map[*gpu]before {
	out := map[*gpu]before{}
	for _, g := range m.node.gpus {
		if g.read {
			out[g] = before{g.reading.Action, g.reading.Rows.Uncorrected}
		}
	}
	return out
}

// tellChanges tells what a look has changed.
func (m *Monitor) tellChanges(were map[*gpu]before) {
	for _, g := range m.node.gpus {
		was, known := were[g]
		if !known {
			continue
		}
		if is := g.reading.Action; is.Known && was.action.Known && is.Value != was.action.Value {
			kind := corev1.EventTypeWarning
			if is.Value == nvml.RecoverNothing {
				kind = corev1.EventTypeNormal
			}
			m.TellNode(kind, config.ReasonRecoveryActionChanged, "the driver recommends for %s: %v (recovery action %d), and before: %v",
				g.name(), is.Value, int(is.Value), was.action.Value)
		}
		if is := g.reading.Rows.Uncorrected; is.Known && was.rows.Known && is.Value > was.rows.Value {
			m.TellNode(corev1.EventTypeNormal, config.ReasonRowRemapped, "%s has replaced %s of memory, %d in all", g.name(),
				counted(int(is.Value-was.rows.Value), "row"), is.Value) //nolint:gosec // few
		}
	}
}
