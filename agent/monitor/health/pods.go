package health

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// eventPause is how long after an Event the same Xid is only counted.
	eventPause = 3 * time.Minute
	// mostEvents are sent within eventPause; the metrics count the others.
	mostEvents = 30
	// mostPodsReported is how many pods get an Event about one Xid.
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

// instances returns the GPU's instances, as last seen.
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

// podsOn returns the pods that have the instances by kubelet's report, or, if none are named, any part of the GPU.
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

// xidReport is an Xid to report.
type xidReport struct {
	g      *verdict.GPU
	x      verdict.Xid
	e      nvml.Event
	o      *verdict.Occurrence // nil if the Xid follows from another, or is one too many
	by     xidSource
	logged bool // the kernel's log has reported it, the driver's events have not yet
}

// own reports whether the Xid is a program's own error.
func (r xidReport) own() bool { return r.x.Class == verdict.ClassApplication && !r.x.Critical }

// on returns the instance that the Xid is about; none for the whole GPU.
func (r xidReport) on() []int {
	if r.e.GI == nvml.WholeGPU {
		return nil
	}
	return []int{r.e.GI}
}

// podsOf returns the pods that have the GPU or the instance. For a program's own error it returns only the program's pod, if that is known.
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

// noteProgramError notes which pod's program made an error, where that is certain.
func (m *Monitor) noteProgramError(now time.Time, r xidReport) {
	if !r.own() || r.x.Number == containedError {
		return
	}
	if pods := m.podsOf(r); len(pods) == 1 {
		r.g.NoteProgramError(now, pods[0].uid)
	}
}

// reportXid reports an Xid by Events: a program's own error on its pod alone, others on the node too. It only counts early repetitions, and
// Xids beyond mostEvents.
func (m *Monitor) reportXid(now time.Time, r xidReport) {
	if r.o == nil || (r.x.Class == verdict.ClassInfo || r.x.Class == verdict.ClassState) && !r.x.Critical {
		return // the metrics count consequences and notes
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
		m.NodeEvent(events.XidOfProcess(r.x.Number, r.x.Meaning, r.by.pid, where, again))
	case r.own():
		did := "made an error on"
		if r.x.Number == containedError {
			did = "was hit by it on"
		}
		m.reportPods(pods, config.ReasonApplicationXid, func(owner string) string {
			return fmt.Sprintf("Xid %d (%s): a program of %s %s %s and was stopped%s%s", r.x.Number, r.x.Meaning, owner, did, where, again, withheldBy(r.x))
		})
	default:
		m.NodeEvent(events.Xid(r.x.Number, r.x.Meaning, where, source, again))
		m.reportPods(pods, config.ReasonXidError, func(string) string {
			return fmt.Sprintf("Xid %d (%s) on %s, held by this pod%s%s", r.x.Number, r.x.Meaning, where, source, again)
		})
	}
}

// ignoredByPlugin are the Xids that NVIDIA's device plugin does not count as faults of the GPU.
var ignoredByPlugin = []uint64{13, 31, 43, 45, 68, 109}

// withheldBy says how NVIDIA's device plugin reacts to a program's error, since other pods then wait for the GPU.
func withheldBy(x verdict.Xid) string {
	if slices.Contains(ignoredByPlugin, x.Number) {
		return ""
	}
	return "; NVIDIA's device plugin withholds the GPU from new pods until the agent restarts the plugin: at once the first time, then after up to an hour"
}

// containedError is the Xid of a memory error that hits one program through no fault of its own.
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

// eventDue reports whether Events are to report an Xid now, and returns the text about those that they did not report.
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

// podEventDue is eventDue for a known pod. An Event about another pod on the same GPU does not hold this one back.
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

func (m *Monitor) reportPods(pods []holder, reason config.Reason, text func(owner string) string) {
	owner := "this pod"
	if len(pods) > 1 {
		owner = fmt.Sprintf("one of %d pods", len(pods))
	}
	for _, p := range pods[:min(len(pods), mostPodsReported)] {
		m.PodEvent(p.pod, p.uid, events.XidOfPod(reason, text(owner)))
	}
}

// readings returns the driver's last report on each GPU.
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
			m.NodeEvent(events.RecoveryActionChanged(is.Value == nvml.RecoverNothing, g.Name(), is.Value.String(), int(is.Value), was.Value.String()))
		}
		if is, was := now.Rows.Uncorrected, was.Rows.Uncorrected; is.Known && was.Known && is.Value > was.Value {
			m.NodeEvent(events.RowsRemapped(g.Name(), int(is.Value-was.Value), int(is.Value))) //nolint:gosec // few
		}
	}
}
