package health

import (
	"context"
	"maps"
	"slices"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/monitor/health/kernellog"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// KernelLog is the log of the node's kernel, as far as it has Xids. *kernellog.Log is one.
type KernelLog interface {
	// Xids hands out what the driver writes from now on, until ctx ends or the log cannot be read any more, then closes the channel.
	Xids(ctx context.Context) (<-chan kernellog.Xid, error)
}

// Processes are the host's.
type Processes interface {
	// Holders finds the processes that have a device, and those that are said to have it.
	Holders(ctx context.Context, sought []holders.Sought) ([]holders.Client, error)
}

const (
	// logLag is how long the Event of a program's error waits for the kernel's log to name the process. The driver writes the log first.
	logLag = time.Second
	// mostHeld Events wait; the others are sent without.
	mostHeld = 64
	// pairWindow is how far apart the driver's event and the line of the log about one Xid may come.
	pairWindow = 10 * time.Second
	// mostSightings bounds what waits for its other half.
	mostSightings = 256
	// lookupTime is what finding a process may take, and mostLookups how many are looked for within a second.
	lookupTime, mostLookups = time.Second, 50
)

// culprit is whose process has made an error.
type culprit struct {
	known  bool
	ofPod  bool
	pod    holder    // if ofPod
	unseen types.UID // of a pod that no pass had seen when the error was made
	pid    int
}

// readKernelLog takes the Xids of the kernel's log until ctx ends.
func (m *Monitor) readKernelLog(ctx context.Context) {
	lookups := lookupBudget{}
	for known := false; ctx.Err() == nil; {
		xids, err := m.KernelLog.Xids(ctx)
		m.setReadsLog(err == nil)
		if err == nil {
			for x := range xids {
				m.takeLogged(x, m.culprit(ctx, x.PID, &lookups))
			}
			m.setReadsLog(false)
		} else if !known {
			m.Log.Info("errors of GPUs are taken from the driver's library alone, without the processes whose they are", zap.Error(err))
			known = true
		}
		select {
		case <-ctx.Done():
		case <-m.Clock.After(listenAgain):
		}
	}
}

func (m *Monitor) setReadsLog(is bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.readsLog = is
}

// lookupBudget bounds how often the monitor searches for processes.
type lookupBudget struct {
	since time.Time
	n     int
}

func (l *lookupBudget) allows(now time.Time) bool {
	if now.Sub(l.since) >= time.Second {
		l.since, l.n = now, 0
	}
	l.n++
	return l.n <= mostLookups
}

// culprit finds whose process it is. One that has ended is not known any more.
func (m *Monitor) culprit(ctx context.Context, pid int, budget *lookupBudget) culprit {
	if pid == 0 || m.Processes == nil || !budget.allows(m.Clock.Now()) {
		return culprit{}
	}
	m.mu.Lock()
	pods := m.lastPass.pods
	m.mu.Unlock()
	call, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	clients, err := m.Processes.Holders(call, []holders.Sought{{Device: "a GPU", Reported: []int{pid}, Minor: holders.NoFiles}})
	if err != nil || len(clients) != 1 || clients[0].Unlisted {
		return culprit{}
	}
	c := clients[0]
	switch pod := holders.PodsOf(clients, pods)[pid]; {
	case pod != nil && m.ComputesForOthers != nil && m.ComputesForOthers(pod): // whose client it was is not known
		return culprit{}
	case pod != nil:
		return culprit{known: true, ofPod: true, pod: holderOf(pod), pid: pid}
	case c.PodUID != "": // it is none of those that a pass has seen on the GPU
		return culprit{known: true, unseen: c.PodUID, pid: pid}
	default: // whose container it is is not known
		return culprit{known: c.Container == "", pid: pid}
	}
}

// takeLogged takes over an Xid of the kernel's log.
//
// The log is evidence: it says what has happened to a GPU that its state shows not to be well, and on which pod a program's error is to be
// reported. It makes no GPU unhealthy: that takes the driver's library, by an event or by what it reads.
func (m *Monitor) takeLogged(l kernellog.Xid, by culprit) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.node.GPUAt(l.PCI)
	if g == nil || g.UUID() == "" {
		return
	}
	now := m.Clock.Now()
	e := nvml.Event{GPU: g.UUID(), Kind: nvml.EventXid, Xid: l.Number, GI: l.GI, CI: l.CI}
	if _, known := m.twice.pair(now, fromLog, e, by, true); known {
		m.nameHeld(now, e, by)
		return
	}
	_, x, o := m.node.ObserveLogged(now, e)
	m.counts.addXid(g, x)
	m.reportXid(now, xidReport{g: g, x: x, e: e, o: o, by: by, logged: true})
	m.follow(x)
}

// source is where an Xid was seen.
type source int

const (
	fromDriver source = iota
	fromLog
)

// sighting is an Xid that one source has reported, and the other has not yet.
type sighting struct {
	source source
	gpu    nvml.UUID
	xid    uint64
	gi, ci int
}

type seen struct {
	times int
	last  time.Time
	by    culprit
}

// match is the sighting that an Xid was paired with.
type match struct {
	gi, ci int
	by     culprit
}

// sightings are Xids that await the other source, so that each counts once. What one source leaves out counts by the other.
type sightings map[sighting]seen

// pair finds the sighting of the same Xid by the other source, and takes it away. If there is none, and both sources are there, this one waits for the other.
func (s sightings) pair(now time.Time, from source, e nvml.Event, by culprit, both bool) (match, bool) {
	other := fromLog
	if from == fromLog {
		other = fromDriver
	}
	for k, was := range s {
		sameInstance := k.gi == e.GI || k.gi == nvml.WholeGPU || e.GI == nvml.WholeGPU // the library may know of no instances
		if k.source != other || k.gpu != e.GPU || k.xid != e.Xid || !sameInstance {
			continue
		}
		if was.times--; was.times > 0 {
			s[k] = was
		} else {
			delete(s, k)
		}
		if now.Sub(was.last) < pairWindow {
			return match{k.gi, k.ci, was.by}, true
		}
	}
	if len(s) >= mostSightings {
		maps.DeleteFunc(s, func(_ sighting, was seen) bool { return now.Sub(was.last) >= pairWindow })
	}
	if both && len(s) < mostSightings {
		k := sighting{from, e.GPU, e.Xid, e.GI, e.CI}
		s[k] = seen{times: s[k].times + 1, last: now, by: by}
	}
	return match{}, false
}

// heldXid is a program's error whose Event waits.
type heldXid struct {
	xidReport
	until time.Time
}

// hold keeps back the Event of a program's error until the kernel's log may have named the process. It returns false if the log cannot. It holds also where
// a pass has seen a single pod on the GPU: another may have begun since.
func (m *Monitor) hold(now time.Time, r xidReport) bool {
	if !m.readsLog || !r.own() || r.o == nil || len(m.held) >= mostHeld {
		return false
	}
	m.held = append(m.held, heldXid{r, now.Add(logLag)})
	m.signal(m.holds)
	return true
}

// nameHeld reports what was held, now that the kernel's log has it, and notes whose error it was.
func (m *Monitor) nameHeld(now time.Time, e nvml.Event, by culprit) {
	at := slices.IndexFunc(m.held, func(h heldXid) bool {
		return h.e.GPU == e.GPU && h.e.Xid == e.Xid && (h.e.GI == e.GI || h.e.GI == nvml.WholeGPU || e.GI == nvml.WholeGPU)
	})
	if at < 0 {
		return
	}
	r := m.held[at].xidReport
	m.held = slices.Delete(m.held, at, at+1)
	r.by = by
	m.noteProgramError(now, r)
	m.reportXid(now, r)
}

// reportHeld reports the errors that the kernel's log has not named in time, until ctx ends.
func (m *Monitor) reportHeld(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.holds:
		}
		select {
		case <-ctx.Done():
			return
		case <-m.Clock.After(logLag):
		}
		m.mu.Lock()
		now := m.Clock.Now()
		m.held = slices.DeleteFunc(m.held, func(h heldXid) bool {
			due := !now.Before(h.until)
			if due {
				m.reportXid(now, h.xidReport)
			}
			return due
		})
		if len(m.held) > 0 {
			m.signal(m.holds)
		}
		m.mu.Unlock()
	}
}
