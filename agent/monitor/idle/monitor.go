// Package idle watches how busy pods keep their GPUs and instances. It reports that by metrics, in answers to users, and by an Event on a pod
// that has had one for long without using it.
//
// It asks the driver in its own lane, next to the agent's loop, and never while the loop finds the driver silent: it may be about to be
// replaced. Everything that it remembers may be lost at any moment: a new process counts again, and reports times as "at least" as long as it
// has observed.
package idle

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monitor"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// deadline bounds one observation: sampling all instances of a large node takes half a second.
	deadline = 5 * time.Second
	// recently is the time that metrics and answers cover.
	recently = 5 * time.Minute
	// mostHistories bounds the histories: 16 GPUs of 7 instances, or 8 GPUs that a hundred pods share. A history takes a kilobyte.
	mostHistories = 1024
	// mostEvents bounds the Events of one observation; the others are reported after the next.
	mostEvents = 16
	// forgetAfter is how long a pod may be missing from a device before the monitor forgets it: kubelet may not report allocations for a while.
	forgetAfter = 10 * time.Minute
)

// Options is what a Monitor works with.
type Options struct {
	Settings config.Idle
	Reader   nvml.UsageReader
	Owners   monitor.OwnerFinder
	PodEvent func(pod types.NamespacedName, uid types.UID, e events.Event)
	Clock    clock.WithTicker
	Log      *zap.Logger
}

// Monitor watches the GPUs. Watch does the work; the agent's loop calls the other methods while Watch runs.
type Monitor struct {
	Options
	began time.Time // all times are compared by what has elapsed, so that a step of the host's clock changes nothing

	mu        sync.Mutex
	pass      *pass     // nil while the loop has seen none, or the driver is silent
	last      time.Time // the last observation
	complete  bool      // kubelet had reported its allocations by then
	histories map[key]*history
	devices   map[string]*deviceHistory // by Device.ID
}

// pass is what the last pass of the loop has observed.
type pass struct {
	devices  []monitor.Device
	pods     []corev1.Pod
	holders  []holders.Pod
	changing bool // a change of the GPUs is under way
	complete bool // kubelet has reported its allocations
}

// deviceHistory is how busy all processes kept a device.
type deviceHistory struct {
	gpu    nvml.UUID
	recent window
}

// New makes a Monitor that has seen nothing.
func New(o Options) *Monitor {
	return &Monitor{Options: o, began: o.Clock.Now(), histories: map[key]*history{}, devices: map[string]*deviceHistory{}}
}

// Watch watches until ctx ends.
func (m *Monitor) Watch(ctx context.Context, _ func()) {
	if m.Settings.Every == 0 {
		return
	}
	ticker := m.Clock.NewTicker(m.Settings.Every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
		m.read(ctx)
	}
}

// read takes one observation.
func (m *Monitor) read(ctx context.Context) {
	m.mu.Lock()
	seen := m.pass
	m.mu.Unlock()
	if seen == nil {
		return
	}
	call, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	usages, err := m.Reader.Usage(call, m.sampled(seen))
	if err != nil {
		m.Log.Debug("cannot read how busy the GPUs are", zap.Error(err))
		return
	}
	owners := m.owners(ctx, seen, usages)
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.Clock.Now()
	m.take(now, seen, usages, owners)
	m.report(now, seen, usages)
}

// unsampled says why no instance is sampled; empty if they are. A change that is under way may be about to destroy one.
func (m *Monitor) unsampled(seen *pass) string {
	switch {
	case m.Settings.Instances != config.IdleInstancesSample:
		return unknownSkipped
	case seen.changing:
		return unknownChanged
	default:
		return ""
	}
}

// sampled returns the instances to sample.
func (m *Monitor) sampled(seen *pass) map[nvml.UUID][]int {
	if m.unsampled(seen) != "" {
		return nil
	}
	out := map[nvml.UUID][]int{}
	for _, d := range seen.devices {
		if !d.IsWhole() && len(d.Holders(seen.holders)) > 0 {
			out[d.GPU] = append(out[d.GPU], d.GI)
		}
	}
	return out
}

// owners returns, by pid, the pods of the processes that may be busy. It leaves out processes on instances: for these only the load of the
// instance is known.
func (m *Monitor) owners(ctx context.Context, seen *pass, usages []nvml.Usage) map[int]*corev1.Pod {
	reported := map[string][]int{}
	for _, u := range usages {
		for _, p := range u.Processes.Value {
			if p.GI == nvml.WholeGPU && (!p.Busy.Known || p.Busy.Value > 0) {
				reported[string(u.UUID)] = append(reported[string(u.UUID)], p.PID)
			}
		}
	}
	if len(reported) == 0 {
		return nil
	}
	return m.Owners.Owners(ctx, reported, seen.pods)
}

// take records an observation.
func (m *Monitor) take(now time.Time, seen *pass, usages []nvml.Usage, owners map[int]*corev1.Pod) {
	gap := now.Sub(m.last)
	follows := !m.last.IsZero() && gap <= 3*m.Settings.Every+deadline
	if !follows {
		gap = m.Settings.Every // nothing is known about the time before
	}
	at := now.Sub(m.began)
	devices := map[string]*deviceHistory{}
	for _, d := range seen.devices {
		i := slices.IndexFunc(usages, func(u nvml.Usage) bool { return u.UUID == d.GPU })
		if i < 0 || len(devices) >= mostHistories {
			continue
		}
		pods := d.Holders(seen.holders)
		all, each := busyOn(d, usages[i], pods, owners, m.unsampled(seen))
		history := m.devices[d.ID]
		if history == nil {
			history = &deviceHistory{gpu: d.GPU, recent: newWindow(recently)}
		} else if all.unknown == "" {
			history.recent.add(at, gap, all.percent)
		}
		devices[d.ID] = history
		for _, p := range pods {
			m.takePod(now, gap, follows && m.complete, d, p, each[p.UID])
		}
	}
	m.devices, m.last, m.complete = devices, now, seen.complete
	m.forget(now, seen)
}

// takePod records how busy a pod has kept a device during the gap. Exactly means that a new pod did not have it before.
func (m *Monitor) takePod(now time.Time, gap time.Duration, exactly bool, d monitor.Device, p holders.Pod, b busyness) {
	k := key{device: d.ID, pod: p.UID}
	h := m.histories[k]
	if h == nil {
		if len(m.histories) >= mostHistories {
			return
		}
		m.histories[k] = &history{
			pod: types.NamespacedName{Namespace: p.Namespace, Name: p.Name}, gpu: d.GPU, instance: d.Instance(), name: nameOf(d), since: now,
			exactly: exactly, seen: now, long: newWindow(m.Settings.After), recent: newWindow(recently), unknown: unknownYet,
		}
		return
	}
	h.seen, h.unknown = now, b.unknown
	if b.unknown == "" {
		at := now.Sub(m.began)
		h.long.add(at, gap, b.percent)
		h.recent.add(at, gap, b.percent)
	}
}

// forget drops the histories of pods that are gone, or no longer have the device.
func (m *Monitor) forget(now time.Time, seen *pass) {
	here := map[types.UID]bool{}
	for i := range seen.pods {
		here[seen.pods[i].UID] = true
	}
	maps.DeleteFunc(m.histories, func(k key, h *history) bool { return !here[k.pod] || now.Sub(h.seen) > forgetAfter })
}

// report judges each pod, and sends an Event to those that do not use their device.
func (m *Monitor) report(now time.Time, seen *pass, usages []nvml.Usage) {
	at, sent := now.Sub(m.began), 0
	for _, k := range slices.SortedFunc(maps.Keys(m.histories), func(a, b key) int {
		return cmp.Or(cmp.Compare(a.device, b.device), cmp.Compare(a.pod, b.pod))
	}) {
		h := m.histories[k]
		var percent float64
		h.idle, percent = h.judge(now, at, m.Settings.After, m.Settings.Below)
		switch {
		case h.idle == inUse:
			h.reported = time.Time{}
		case h.idle != idle || h.seen != now || !h.reported.IsZero() && now.Sub(h.reported) < m.Settings.After || sent >= mostEvents:
		default:
			h.reported = now
			sent++
			m.PodEvent(h.pod, k.pod, events.Idle(m.message(now, k, h, percent, seen, usages)))
		}
	}
}

// Observe records what a pass has observed.
func (m *Monitor) Observe(_ context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod) {
	_, changing := node.Annotations[config.AnnotationJournal]
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pass = &pass{
		devices: monitor.Devices(gpus), pods: pods, holders: with, changing: changing,
		// Kubelet need not have allocated devices to a pod that does not run yet.
		complete: !slices.ContainsFunc(with, func(p holders.Pod) bool { return !p.DevicesKnown && len(p.Running) > 0 }),
	}
}

// Poll is for monitors that nothing else wakes.
func (m *Monitor) Poll(context.Context) bool { return false }

// Conditions returns none. While the driver is silent it drops the last pass.
func (m *Monitor) Conditions(_ *corev1.Node, _ bool, silent string, _ bool) []corev1.NodeCondition {
	if silent != "" {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.pass = nil
	}
	return nil
}

// Forget is for what depends on the time of day: nothing here does.
func (m *Monitor) Forget(time.Time) {}

// Report implements monitor.Monitor. The status does not say how busy pods are: kubectl gpuslice top asks for it.
func (m *Monitor) Report(*api.Status) {}

// AddBusy adds to the uses of pods how busy they are, and since when they have their device.
func (m *Monitor) AddBusy(uses []api.Use) {
	m.mu.Lock()
	defer m.mu.Unlock()
	type had struct {
		pod      types.NamespacedName
		gpu      nvml.UUID
		instance string
	}
	byUse := map[had]*history{}
	for _, h := range m.histories {
		byUse[had{h.pod, h.gpu, h.instance}] = h
	}
	now := m.Clock.Now()
	for i := range uses {
		u := &uses[i]
		if m.Settings.Every == 0 {
			u.Unknown = "setting idle.every is 0"
			continue
		}
		h := byUse[had{types.NamespacedName{Namespace: u.Namespace, Name: u.Pod}, u.UUID, u.Instance}]
		if h == nil {
			u.Unknown = unknownYet
			continue
		}
		u.Since = h.since.UTC().Truncate(time.Second)
		u.Unknown = h.unknown
		if ratio, known := lately(&h.recent, now.Sub(m.began), min(recently, now.Sub(h.since))); known {
			percent := math.Round(1000*ratio) / 10
			u.Busy, u.Unknown = &percent, ""
		} else if h.unknown == "" {
			u.Unknown = unknownYet
		}
	}
}
