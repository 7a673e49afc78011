package health

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// eventPause is how long after an Event the same is only counted.
	eventPause = 3 * time.Minute
	// mostEvents within eventPause: what comes beyond is counted by the metrics.
	mostEvents = 30
	// mostPodsReported of one Xid get an Event.
	mostPodsReported = 8
)

// holder is a pod with a GPU or a part of one.
type holder struct {
	pod types.NamespacedName
	uid types.UID
}

func holderOf(pod *corev1.Pod) holder {
	return holder{types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, pod.UID}
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

// xidReport is an Xid that is to be reported.
type xidReport struct {
	g      *verdict.GPU
	x      verdict.Xid
	e      nvml.Event
	o      *verdict.Occurrence // nil of one that follows from another, and of one too many
	by     culprit
	logged bool // by the kernel's log, and by no event of the driver yet
}

// own reports whether it is a program's own error.
func (r xidReport) own() bool { return r.x.Class == verdict.ClassApplication && !r.x.Critical }

// on is the instance that it is about; none for the whole GPU.
func (r xidReport) on() []int {
	if r.e.GI == nvml.WholeGPU {
		return nil
	}
	return []int{r.e.GI}
}

// podsOf are the pods that have the GPU or the instance, or, of a program's own error, the one whose program it is if that is known.
func (m *Monitor) podsOf(r xidReport) []holder {
	switch {
	case !r.own() || !r.by.known:
		return m.podsOn(r.g.UUID(), r.on())
	case r.by.ofPod:
		return []holder{r.by.pod}
	case r.by.unseen != "": // a pass may have seen it since
		for i := range m.lastPass.pods {
			if pod := &m.lastPass.pods[i]; pod.UID == r.by.unseen {
				return []holder{holderOf(pod)}
			}
		}
		return nil
	default:
		return nil
	}
}

// noteProgramError notes whose program has made an error, where that is certain.
func (m *Monitor) noteProgramError(now time.Time, r xidReport) {
	if !r.own() || r.x.Number == containedError {
		return
	}
	if pods := m.podsOf(r); len(pods) == 1 {
		r.g.NoteProgramError(now, pods[0].uid)
	}
}

// reportXid reports an Xid by Events: a program's own on its pod alone, others on the node too. The same one again is counted first, and so
// is what comes in a storm.
func (m *Monitor) reportXid(now time.Time, r xidReport) {
	if r.o == nil || (r.x.Class == verdict.ClassInfo || r.x.Class == verdict.ClassState) && !r.x.Critical {
		return // a consequence, or a note, which the metrics count
	}
	again, due := m.eventDue(now, r)
	if !due {
		return
	}
	where := r.g.Name()
	if r.e.GI != nvml.WholeGPU {
		where = m.instanceName(r.g, r.e.GI) + " of " + where
	}
	source := ""
	if r.logged {
		source = ", by the kernel's log"
	}
	pods := m.podsOf(r)
	switch {
	case r.own() && r.by.known && !r.by.ofPod:
		m.NodeEvent(corev1.EventTypeWarning, config.ReasonXidError, "Xid %d (%s): process %d, which is of no pod, has made an error on %s, and was stopped%s",
			r.x.Number, r.x.Meaning, r.by.pid, where, again)
	case r.own():
		did := "has made an error on"
		if r.x.Number == containedError {
			did = "was hit by it on"
		}
		m.reportPods(pods, config.ReasonApplicationXid, func(whose string) string {
			return fmt.Sprintf("Xid %d (%s): a program of %s %s %s, and was stopped%s%s", r.x.Number, r.x.Meaning, whose, did, where, again, withheldBy(r.x))
		})
	default:
		m.NodeEvent(corev1.EventTypeWarning, config.ReasonXidError, "Xid %d (%s) on %s%s%s", r.x.Number, r.x.Meaning, where, source, again)
		m.reportPods(pods, config.ReasonXidError, func(string) string {
			return fmt.Sprintf("Xid %d (%s) on %s, which this pod has%s%s", r.x.Number, r.x.Meaning, where, source, again)
		})
	}
}

// ignoredByPlugin are the Xids that NVIDIA's device plugin takes for no fault of the GPU.
var ignoredByPlugin = []uint64{13, 31, 43, 45, 68, 109}

// withheldBy says what NVIDIA's device plugin makes of a program's error, since other pods wait for the GPU then.
func withheldBy(x verdict.Xid) string {
	if slices.Contains(ignoredByPlugin, x.Number) {
		return ""
	}
	return "; NVIDIA's device plugin withholds the GPU from new pods then, until the agent restarts it: at once the first time, then after pauses of up to an hour"
}

// containedError is the Xid of an error of memory that has hit one program, which is not its own fault.
const containedError = 94

// reportedXid is an Xid of a pod's own program, and lastReport when an Event last reported it.
type (
	reportedXid struct {
		gpu nvml.UUID
		xid uint64
		pod types.UID
	}
	lastReport struct {
		at         time.Time
		unreported int
	}
)

// eventDue reports whether an Xid is to be reported by Events now, and what is to be said of those that were not.
func (m *Monitor) eventDue(now time.Time, r xidReport) (again string, due bool) {
	if r.own() && r.by.ofPod {
		return m.podEventDue(now, reportedXid{r.g.UUID(), r.x.Number, r.by.pod.uid})
	}
	if !r.o.EventDue(now, eventPause) || !m.counts.addEvent(now) {
		r.o.CountUnreported()
		return "", false
	}
	return moreSince(r.o.NoteEvent(now)), true
}

// podEventDue is eventDue for a pod that is known: that another one on the same GPU was reported is no reason to leave it out.
func (m *Monitor) podEventDue(now time.Time, of reportedXid) (again string, due bool) {
	was := m.reportedPods[of]
	if !was.at.IsZero() && now.Sub(was.at) < eventPause {
		was.unreported++
		m.reportedPods[of] = was
		return "", false
	}
	if len(m.reportedPods) >= mostEvents {
		maps.DeleteFunc(m.reportedPods, func(_ reportedXid, t lastReport) bool { return now.Sub(t.at) >= 2*eventPause })
	}
	if len(m.reportedPods) >= 2*mostEvents || !m.counts.addEvent(now) {
		return "", false
	}
	m.reportedPods[of] = lastReport{at: now}
	return moreSince(was.unreported, was.at), true
}

func moreSince(unreported int, since time.Time) string {
	if unreported == 0 {
		return ""
	}
	return fmt.Sprintf("; %d more since %s", unreported, verdict.Moment(since))
}

func (m *Monitor) reportPods(pods []holder, reason config.Reason, text func(whose string) string) {
	whose := "this pod"
	if len(pods) > 1 {
		whose = fmt.Sprintf("one of %d pods", len(pods))
	}
	for _, p := range pods[:min(len(pods), mostPodsReported)] {
		m.PodEvent(p.pod, p.uid, corev1.EventTypeWarning, reason, "%s", text(whose))
	}
}

// readings are what the driver has last reported of each GPU.
func (m *Monitor) readings() map[*verdict.GPU]nvml.Health {
	out := map[*verdict.GPU]nvml.Health{}
	for _, g := range m.node.GPUs() {
		if reading, has := g.Reading(); has {
			out[g] = reading
		}
	}
	return out
}

// reportChanges reports by Events what a reading has changed.
func (m *Monitor) reportChanges(before map[*verdict.GPU]nvml.Health) {
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
			m.NodeEvent(kind, config.ReasonRecoveryActionChanged, "the driver recommends for %s: %v (recovery action %d), and before: %v",
				g.Name(), is.Value, int(is.Value), was.Value)
		}
		if is, was := now.Rows.Uncorrected, was.Rows.Uncorrected; is.Known && was.Known && is.Value > was.Value {
			m.NodeEvent(corev1.EventTypeNormal, config.ReasonRowRemapped, "%s has replaced %s of memory, %d in all", g.Name(),
				sanitize.Counted(int(is.Value-was.Value), "row"), is.Value) //nolint:gosec // few
		}
	}
}
