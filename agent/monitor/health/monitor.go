// Package health watches the health of the node's GPUs, and reports it by condition GPUUnhealthy, by Events, by metrics and in the status.
//
// A GPU's state decides; an error number of the driver, an Xid, is evidence. The monitor reports findings at once, and withdraws them by
// itself. A new process of the agent continues from its predecessor's record. The monitor calls the driver in its own lane, next to the
// agent's loop: if the driver hangs, it reports that. Package verdict decides, and calls nothing: a new signal of the driver is a field of
// nvml.Health, a reason in verdict.reasons, and the line of verdict's symptoms that finds it.
package health

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/agent/nodewrite"
	"github.com/gpuslice/gpuslice/agent/report"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// deadline bounds one observation. Reading what changes often takes one call per GPU, of less than a millisecond.
	deadline = 3 * time.Second
	// thoroughEvery and busEvery are the intervals of slow readings, or of values that change rarely. unwellEvery replaces thoroughEvery while a
	// GPU is not well, so that the monitor sees a recovery within seconds.
	thoroughEvery, busEvery, unwellEvery = time.Minute, 10 * time.Second, 4 * time.Second
	// writeAgain is the least time between two writes, of the node or of the record.
	writeAgain = time.Second
	// recordEvery is how often the record is written if only numbers have changed.
	recordEvery = time.Minute
	// skew is how far the clock of a person's machine may be ahead of this one's.
	skew = time.Minute
	// listenAgain is the pause before the driver is asked again for its events.
	listenAgain = 10 * time.Second
)

// Sources are what a Monitor reads, and its Store.
type Sources struct {
	Driver    nvml.HealthReader
	Bus       nvml.Bus  // may be nil
	KernelLog KernelLog // may be nil
	Processes Processes // may be nil
	Store     Store     // may be nil
}

// Options is what a Monitor works with.
type Options struct {
	Sources

	Settings config.Health
	// Boot is the id of the host's boot.
	Boot func(ctx context.Context) (string, error)
	// Write writes conditions of the node.
	Write func(ctx context.Context, conditions []corev1.NodeCondition) error
	// NodeEvent and PodEvent record Events.
	NodeEvent func(events.Event)
	PodEvent  func(pod types.NamespacedName, uid types.UID, e events.Event)
	// ComputesForOthers reports whether the pod's processes on a GPU belong to a server for other pods.
	ComputesForOthers func(pod *corev1.Pod) bool
	Clock             clock.WithTicker
	Log               *zap.Logger
}

// Monitor watches the GPUs. Watch does the work; the agent's loop calls the other methods while Watch runs.
type Monitor struct {
	Options

	mu       sync.Mutex
	node     *verdict.Node
	lastPass lastPass
	boot     string
	recalled bool

	shown        *corev1.NodeCondition // the condition on the node, as last seen or written
	nodeSeen     bool                  // at least once
	nvsentinel   string                // the sign that NVSentinel manages the node; empty if it does not
	refused      string                // why the agent resets no GPU, by the last pass; empty if it may
	reportedKey  string                // of the verdict that was last reported
	acknowledged acknowledgement       // until when a person has inspected the GPUs, by the annotation as last seen
	followed     acknowledgement       // as last followed
	resets       map[nvml.UUID]bool    // that the agent was to reset, by the last answer
	notClosed    map[nvml.UUID]string  // GPUs that the agent cannot close to claims, and why
	open         bool                  // there was one when the condition was last made
	openReported bool                  // and when it was last written

	savedKey string    // of the record that the disk has
	savedAt  time.Time // when

	readsLog     bool      // the kernel's log is read
	twice        sightings // Xids that the driver's events and the kernel's log both may report
	held         []heldXid // their Events wait for the kernel's log to name the process
	reportedPods map[reportedXid]lastReport

	blind bool // the last observation of the GPUs has failed

	counts  counts
	changed chan struct{} // there may be something to report
	readNow chan struct{} // the GPUs are to be read at once
	holds   chan struct{} // there is something in held
}

// lastPass has the node's GPUs and their pods, as the agent's last pass saw them.
type lastPass struct {
	gpus    []nvml.GPU
	holders []holders.Pod
	pods    []corev1.Pod // all of the node's
}

// New makes a Monitor that has seen nothing.
func New(o Options) *Monitor {
	return &Monitor{
		Options: o, node: verdict.New(o.Settings), counts: newCounts(), twice: sightings{}, reportedPods: map[reportedXid]lastReport{},
		changed: make(chan struct{}, 1), readNow: make(chan struct{}, 1), holds: make(chan struct{}, 1),
	}
}

// Watch watches until ctx ends. It calls poke when the agent's loop should observe.
func (m *Monitor) Watch(ctx context.Context, poke func()) {
	var all sync.WaitGroup
	m.recall(ctx)
	all.Go(func() { m.listen(ctx) })
	all.Go(func() { m.report(ctx, poke) })
	if m.KernelLog != nil && m.Settings.KernelLog != config.KernelLogNever {
		all.Go(func() { m.readKernelLog(ctx) })
		all.Go(func() { m.reportHeld(ctx) })
	}
	m.poll(ctx)
	all.Wait()
}

// recall loads the record of the previous process.
func (m *Monitor) recall(ctx context.Context) {
	boot, err := m.Boot(ctx)
	if err != nil {
		m.Log.Warn("cannot read the host's boot id: treating the record of the GPUs as one of another boot", zap.Error(err))
	}
	var r verdict.Record
	if m.Store != nil {
		data, err := m.Store.Read(ctx)
		if err == nil && data != nil {
			r, err = verdict.ParseRecord(data)
		}
		if err != nil {
			m.Log.Warn("cannot read the record of the GPUs: continuing without it", zap.Error(err))
			r = verdict.Record{}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boot, m.reportedKey, m.recalled = boot, r.Reported, true
	m.node.Recall(r, boot)
	m.node.LimitTimes(m.Clock.Now())
	m.readAcknowledgement() // a pass may have seen it before
}

// poll reads the GPUs every verdict.Interval, and at once when there is news.
func (m *Monitor) poll(ctx context.Context) {
	ticker := m.Clock.NewTicker(verdict.Interval)
	defer ticker.Stop()
	var thorough, bus time.Time
	for ctx.Err() == nil {
		now := m.Clock.Now()
		if m.Bus != nil && (bus.IsZero() || now.Sub(bus) >= busEvery) {
			m.readBus(ctx)
			bus = now
		}
		deep := thorough.IsZero() || now.Sub(thorough) >= m.thoroughAfter(now)
		if m.readGPUs(ctx, deep) && deep {
			thorough = now
		}
		select {
		case <-ctx.Done():
		case <-ticker.C():
		case <-m.readNow:
		}
	}
}

func (m *Monitor) thoroughAfter(now time.Time) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if v, known := m.node.Judge(now); known && v.Status == corev1.ConditionTrue {
		return unwellEvery
	}
	return thoroughEvery
}

func (m *Monitor) readBus(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	found, err := m.Bus.GPUs(ctx)
	if err != nil {
		m.Log.Debug("the PCI bus cannot be read", zap.Error(err))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.node.ObserveBus(found, err == nil)
}

// readGPUs reads the health of all GPUs, and reports whether the driver has answered.
func (m *Monitor) readGPUs(ctx context.Context, thorough bool) bool {
	call, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	began := m.Clock.Now()
	all, err := m.Driver.Health(call, thorough)
	if ctx.Err() != nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.Clock.Now()
	m.counts.addRead(now, now.Sub(began), err)
	m.logRead(err)
	if err != nil {
		m.node.ObserveError(now, err)
	} else {
		before := m.readings()
		m.node.ObserveGPUs(now, all, thorough)
		m.reportChanges(before)
	}
	m.signal(m.changed)
	return err == nil
}

// logRead logs the first of several readings that fail, and the first that succeeds again. The findings and their reasons stay until then, so
// only the log has the moment.
func (m *Monitor) logRead(err error) {
	switch {
	case err != nil && !m.blind:
		m.Log.Info("cannot observe the GPUs: findings stay until the driver answers", zap.Error(err))
	case err == nil && m.blind:
		m.Log.Info("observing the GPUs again")
	}
	m.blind = err != nil
}

// signal wakes the receiver, or ends its next wait at once.
func (m *Monitor) signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// listen records the driver's events until ctx ends.
func (m *Monitor) listen(ctx context.Context) {
	for failureReported := false; ctx.Err() == nil; {
		received, err := m.Driver.Events(ctx)
		m.mu.Lock()
		m.node.SetEvents(err == nil)
		answers := m.node.DriverAnswers()
		m.mu.Unlock()
		if err == nil {
			failureReported = false
			for e := range received {
				m.takeEvent(e)
			}
		} else if answers && !failureReported {
			m.NodeEvent(events.HealthNotWatched(err))
			failureReported = true
		}
		select {
		case <-ctx.Done():
		case <-m.Clock.After(listenAgain):
		}
	}
}

// takeEvent records one event of the driver.
func (m *Monitor) takeEvent(e nvml.Event) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.Clock.Now()
	if e.Kind == nvml.EventXid {
		m.takeXid(now, e)
		return
	}
	m.node.ObserveEvent(now, e)
	m.signal(m.changed)
	m.signal(m.readNow)
}

// takeXid records an Xid of the driver's events. The kernel's log may have reported it already.
func (m *Monitor) takeXid(now time.Time, e nvml.Event) {
	var x verdict.Xid
	if first, known := m.twice.pair(now, fromDriver, e, xidSource{}, m.readsLog); known {
		var g *verdict.GPU
		e.GI, e.CI = first.gi, first.ci
		if g, x = m.node.ConfirmLogged(now, e); g != nil {
			m.noteProgramError(now, xidReport{g: g, x: x, e: e, by: first.by})
		}
	} else if g, of, o := m.node.ObserveEvent(now, e); g != nil {
		x = of
		r := xidReport{g: g, x: x, e: e, o: o}
		m.counts.addXid(g, x)
		if o != nil {
			m.noteProgramError(now, r)
		}
		if !m.hold(now, r) {
			m.reportXid(now, r)
		}
	}
	m.follow(x)
}

// follow has the GPUs read after an Xid, since their state decides: at once, and again until the driver has had its time. An Xid of a program
// alone changes no state.
func (m *Monitor) follow(x verdict.Xid) {
	m.signal(m.changed)
	if x.Critical || x.Class != verdict.ClassApplication && x.Class != verdict.ClassInfo {
		m.signal(m.readNow)
	}
}

// report writes the record and the condition when they have changed, until ctx ends.
func (m *Monitor) report(ctx context.Context, poke func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.changed:
		}
		if m.resetsChanged() {
			poke()
		}
		old, c, key, differs := m.conditionToReport()
		saved := m.save(ctx, key)
		if !differs {
			if saved {
				m.pause(ctx)
			}
			continue
		}
		if err := m.Write(ctx, []corev1.NodeCondition{c}); err != nil {
			m.Log.Warn("reporting the health of the GPUs", zap.Error(err))
		} else {
			m.noteWritten(old, c, key)
			poke() // the GPUs are worth an observation of the loop, too
		}
		m.pause(ctx)
	}
}

// resetsChanged reports whether the GPUs to reset have changed.
func (m *Monitor) resetsChanged() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.toReset()
	defer func() { m.resets = now }()
	return !maps.Equal(now, m.resets)
}

// pause keeps writes apart.
func (m *Monitor) pause(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-m.Clock.After(writeAgain):
	}
	m.signal(m.changed)
}

// conditionToReport returns the condition to write, with the key of its verdict; differs says whether it differs from old, the node's
// condition.
func (m *Monitor) conditionToReport() (old *corev1.NodeCondition, c corev1.NodeCondition, key string, differs bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c, key, known := m.condition()
	if !known || !m.nodeSeen {
		return nil, c, m.reportedKey, false
	}
	old = m.shown
	m.open = len(m.notClosed) > 0
	return old, c, key, old == nil || old.Status != c.Status || old.Reason != c.Reason || key != m.reportedKey || m.open != m.openReported
}

// condition returns the condition to report now, with the key of its verdict; false while too little is known.
func (m *Monitor) condition() (corev1.NodeCondition, string, bool) {
	now := m.Clock.Now()
	v, known := m.node.Judge(now)
	if !known || !m.recalled {
		return corev1.NodeCondition{}, "", false
	}
	return report.After(m.shown, config.ConditionGPUUnhealthy, v.Status, v.Reason, m.message(v, now), now), v.Key(), true
}

// noteWritten records that the node has the condition in place of old, and sends an Event if that is a change. A pass of the loop may have
// seen the write before its answer arrived, so m.shown need not be old any more.
func (m *Monitor) noteWritten(old *corev1.NodeCondition, c corev1.NodeCondition, key string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	was := old != nil && old.Status == corev1.ConditionTrue
	is := c.Status == corev1.ConditionTrue
	switch {
	case is && (!was || verdict.Worse(config.Reason(c.Reason), config.Reason(old.Reason))):
		m.NodeEvent(events.GPUUnhealthy(c.Reason, c.Message))
	case was && c.Status == corev1.ConditionFalse:
		m.NodeEvent(events.GPUHealthy(c.Message))
	}
	if old == nil || old.Status != c.Status || old.Reason != c.Reason {
		m.Log.Info("reporting the health of the GPUs", zap.String("status", string(c.Status)), zap.String("reason", c.Reason), zap.String("message", c.Message))
	}
	m.shown, m.reportedKey, m.openReported = &c, key, m.open
}

// save writes the record if it has changed. It does so before the node is written, so that the next process knows the verdict even if this one
// is killed in between. The monitor reports even if the disk refuses the record. save returns whether it has tried.
func (m *Monitor) save(ctx context.Context, verdictKey string) bool {
	if m.Store == nil {
		return false
	}
	m.mu.Lock()
	now := m.Clock.Now()
	r := m.node.Record(m.boot, verdictKey)
	key := r.Key()
	skip := !m.recalled || !m.node.Observed() && len(r.GPUs) == 0 || key == m.savedKey && now.Sub(m.savedAt) < recordEvery
	m.mu.Unlock()
	if skip {
		return false
	}
	data, err := json.Marshal(r)
	if err == nil {
		_, err = verdict.ParseRecord(data) // write only what the next process can read
	}
	if err == nil {
		err = m.Store.Write(ctx, data)
	}
	if err != nil {
		m.Log.Debug("cannot write the record of the GPUs", zap.Error(err))
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.savedKey, m.savedAt = key, now
	return true
}

// Observe records what a pass has seen.
func (m *Monitor) Observe(_ context.Context, node *corev1.Node, gpus []nvml.GPU, pods []corev1.Pod, with []holders.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.nvsentinel = fence.NVSentinel(node)
	m.lastPass = lastPass{gpus: gpus, holders: with, pods: pods}
	for _, known := range gpus {
		if g := m.node.GPU(known.UUID); g != nil {
			g.NoteArchitecture(known.ComputeCapability)
		}
	}
	acknowledged := acknowledgementOf(node)
	if acknowledged.seen = m.Clock.Now(); acknowledged.text == m.acknowledged.text {
		acknowledged.seen = m.acknowledged.seen
	}
	m.acknowledged = acknowledged
	m.readAcknowledgement()
}

// acknowledgement is the annotation that a person has inspected the GPUs.
type acknowledgement struct {
	text string
	by   string    // the managers that have written it, by managedFields; empty if that is not known
	at   time.Time // when; zero if that is not known
	seen time.Time // when this agent first saw it
}

func acknowledgementOf(node *corev1.Node) acknowledgement {
	text := node.Annotations[config.AnnotationHealthAck]
	if text == "" {
		return acknowledgement{}
	}
	by, at := fence.Annotators(node, config.AnnotationHealthAck)
	return acknowledgement{text: sanitize.Cut(text, 64), by: nodewrite.Others(by), at: at}
}

// readAcknowledgement drops what a person has acknowledged by the annotation.
func (m *Monitor) readAcknowledgement() {
	a := m.acknowledged
	if a.text == "" || a.text == m.followed.text || !m.recalled {
		return
	}
	now := m.Clock.Now()
	until, err := time.Parse(time.RFC3339, a.text)
	if err != nil || until.After(now.Add(skew)) {
		return
	}
	// No person can have seen what happens after the annotation was written, even if a clock that is ahead dates it earlier. Whoever may patch
	// the node can remove the time of the write, but not the time when this agent first saw it.
	for _, latest := range []time.Time{now, a.at, a.seen} {
		if !latest.IsZero() && until.After(latest) {
			until = latest
		}
	}
	m.followed = a
	if dropped := m.node.Acknowledge(until); len(dropped) > 0 {
		m.NodeEvent(events.HealthAcknowledged(cmp.Or(a.by, "a program missing from managedFields"), verdict.Moment(until), sanitize.Listed(dropped)))
	}
	m.signal(m.readNow)
}

// Poll is for monitors that nothing else wakes.
func (m *Monitor) Poll(context.Context) bool { return false }

// Conditions records the condition that the node shows, and returns it again on beat. If another program has changed it, report writes it.
func (m *Monitor) Conditions(node *corev1.Node, _ bool, _ string, beat bool) []corev1.NodeCondition {
	m.mu.Lock()
	defer m.mu.Unlock()
	shown := report.Find(node, config.ConditionGPUUnhealthy)
	if !m.nodeSeen || shown == nil || m.shown == nil || !shown.LastHeartbeatTime.Before(&m.shown.LastHeartbeatTime) {
		m.shown = shown.DeepCopy() // unless it was observed before the last write
	}
	m.nodeSeen, m.nvsentinel = true, fence.NVSentinel(node)
	m.signal(m.changed)
	if m.shown == nil || !beat {
		return nil
	}
	c, key, known := m.condition()
	if !known || key != m.reportedKey { // report writes that one
		return nil
	}
	m.shown = &c
	return []corev1.NodeCondition{c}
}

// Forget sets times that lie in the future of the host's clock to now. It drops nothing: no record is worth losing for that.
func (m *Monitor) Forget(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.node.LimitTimes(now)
	if m.acknowledged.seen.After(now) {
		m.acknowledged.seen = now
	}
}

// Report adds the health of the GPUs to the status.
func (m *Monitor) Report(s *api.Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.recalled {
		return
	}
	s.Boot, s.Watched = m.boot, m.node.HasEvents()
	for i := range s.GPUs {
		if g := m.node.GPU(s.GPUs[i].UUID); g != nil {
			s.GPUs[i].Health = m.status(g)
		}
	}
	if !m.node.Observed() {
		return
	}
	for _, g := range m.node.GPUs() {
		if index, missing := g.Missing(); missing &&
			!slices.ContainsFunc(s.GPUs, func(known api.StatusGPU) bool { return g.UUID() != "" && known.UUID == g.UUID() }) {
			s.GPUs = append(s.GPUs, api.StatusGPU{Index: index, UUID: g.UUID(), PCI: g.PCI(), Missing: true, Health: m.status(g)})
		}
	}
}
