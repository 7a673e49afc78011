package health

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/health/verdict"
	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// eventPause is how long after an Event the same is only counted.
	eventPause = 3 * time.Minute
	// mostEvents within eventPause: what comes beyond is counted by the metrics.
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
	for _, g := range m.lastPass.gpus {
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
	for _, h := range m.lastPass.holders {
		if h.UID != "" && h.Name != "" && slices.ContainsFunc(h.Devices, func(d string) bool { return slices.Contains(devices, d) }) {
			out = append(out, holder{types.NamespacedName{Namespace: h.Namespace, Name: h.Name}, h.UID})
		}
	}
	slices.SortFunc(out, func(a, b holder) int { return cmp.Compare(a.pod.String(), b.pod.String()) })
	return out
}

// tellXid tells of an Xid by Events: a program's own on its pod alone, others on the node too. The same one again is counted first, and so
// is what comes in a storm.
func (m *Monitor) tellXid(now time.Time, g *verdict.GPU, x verdict.Xid, e nvml.Event, o *verdict.Occurrence) {
	if o == nil {
		return
	}
	var on []int
	where := g.Name()
	if e.GI != nvml.WholeGPU {
		on = []int{e.GI}
		where = m.instanceName(g, e.GI) + " of " + where
	}
	pods := m.podsOn(g.UUID(), on)
	own := x.Class == verdict.ClassApplication && !x.Critical
	if own && len(pods) == 1 && x.Number != containedError {
		g.NoteProgramError(now, pods[0].uid)
	}
	if (x.Class == verdict.ClassInfo || x.Class == verdict.ClassState) && !x.Critical {
		return // a note, which the metrics count
	}
	again, due := m.eventDue(now, o)
	if !due {
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

// eventDue reports whether an Xid is to be told by Events now, and what is to be said of those that were not.
func (m *Monitor) eventDue(now time.Time, o *verdict.Occurrence) (again string, due bool) {
	if !o.EventDue(now, eventPause) || !m.counts.addEvent(now) {
		o.CountUntold()
		return "", false
	}
	if untold, since := o.NoteEvent(now); untold > 0 {
		again = fmt.Sprintf("; %d more since %s", untold, verdict.Moment(since))
	}
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

// readings are what the driver has last told of each GPU.
func (m *Monitor) readings() map[*verdict.GPU]nvml.Health {
	out := map[*verdict.GPU]nvml.Health{}
	for _, g := range m.node.GPUs() {
		if reading, has := g.Reading(); has {
			out[g] = reading
		}
	}
	return out
}

// tellChanges tells by Events what a look has changed.
func (m *Monitor) tellChanges(before map[*verdict.GPU]nvml.Health) {
	for _, g := range m.node.GPUs() {
		was, known := before[g]
		if !known {
			continue
		}
		now, _ := g.Reading()
		if is, was := now.Action, was.Action; is.Known && was.Known && is.Value != was.Value {
			kind := corev1.EventTypeWarning
			if is.Value == nvml.RecoverNothing {
				kind = corev1.EventTypeNormal
			}
			m.TellNode(kind, config.ReasonRecoveryActionChanged, "the driver recommends for %s: %v (recovery action %d), and before: %v",
				g.Name(), is.Value, int(is.Value), was.Value)
		}
		if is, was := now.Rows.Uncorrected, was.Rows.Uncorrected; is.Known && was.Known && is.Value > was.Value {
			m.TellNode(corev1.EventTypeNormal, config.ReasonRowRemapped, "%s has replaced %s of memory, %d in all", g.Name(),
				legible.Counted(int(is.Value-was.Value), "row"), is.Value) //nolint:gosec // few
		}
	}
}
