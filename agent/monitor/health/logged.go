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

// KernelLog reads Xids from the log of the node's kernel. *kernellog.Log is one.
type KernelLog interface {
	// Xids sends each Xid that the driver writes from now on, until ctx ends or the log becomes unreadable, then closes the channel.
	Xids(ctx context.Context) (<-chan kernellog.Xid, error)
}

// Processes are the host's processes.
type Processes interface {
	// Holders finds the processes that have a device, and those that are reported to have it.
	Holders(ctx context.Context, sought []holders.Sought) ([]holders.Client, error)
}

const (
	// logLag is how long the Event of a program's error waits for the kernel's log to name the process. The driver writes the log first.
	logLag = time.Second
	// mostHeld Events wait; the others are sent without the process.
	mostHeld = 64
	// pairWindow is how far apart the driver's event and the line of the log about one Xid may arrive.
	pairWindow = 10 * time.Second
	// mostSightings bounds the Xids that wait for the other reporter.
	mostSightings = 256
	// lookupTime bounds the search for one process, and mostLookups the searches within a second.
	lookupTime, mostLookups = time.Second, 50
)

// xidSource is the process that made an error, and its pod.
type xidSource struct {
	known  bool
	ofPod  bool
	pod    holder    // if ofPod
	unseen types.UID // of a pod that no pass had seen when the error was made
	pid    int
}

// readKernelLog records the Xids of the kernel's log until ctx ends.
func (m *Monitor) readKernelLog(ctx context.Context) {
	lookups := lookupBudget{}
	for known := false; ctx.Err() == nil; {
		xids, err := m.KernelLog.Xids(ctx)
		m.setReadsLog(err == nil)
		if err == nil {
			for x := range xids {
				m.takeLogged(x, m.xidSource(ctx, x.PID, &lookups))
			}
			m.setReadsLog(false)
		} else if !known {
			m.Log.Info("reading GPU errors from the driver's library alone, without the processes that made them", zap.Error(err))
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

// xidSource finds the pod of a process. A process that has ended is unknown.
func (m *Monitor) xidSource(ctx context.Context, pid int, budget *lookupBudget) xidSource {
	if pid == 0 || m.Processes == nil || !budget.allows(m.Clock.Now()) {
		return xidSource{}
	}
	m.mu.Lock()
	pods := m.lastPass.pods
	m.mu.Unlock()
	call, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	clients, err := m.Processes.Holders(call, []holders.Sought{{Device: "a GPU", Reported: []int{pid}, Minor: holders.NoFiles}})
	if err != nil || len(clients) != 1 || clients[0].Unlisted {
		return xidSource{}
	}
	c := clients[0]
	switch pod := holders.PodsOf(clients, pods)[pid]; {
	case pod != nil && m.ComputesForOthers != nil && m.ComputesForOthers(pod): // the server's client is unknown
		return xidSource{}
	case pod != nil:
		return xidSource{known: true, ofPod: true, pod: holderOf(pod), pid: pid}
	case c.PodUID != "": // no pass has seen that pod on the GPU
		return xidSource{known: true, unseen: c.PodUID, pid: pid}
	default: // the pod of a container is unknown
		return xidSource{known: c.Container == "", pid: pid}
	}
}

// takeLogged records an Xid of the kernel's log.
//
// The log is evidence only: it explains what happened to a GPU that is unhealthy by its state, and names the pod of a program's error. It
// makes no GPU unhealthy: only the driver's library does, by an event or a reading.
func (m *Monitor) takeLogged(l kernellog.Xid, by xidSource) {
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

// reporter is who has reported an Xid: the driver's events, or the kernel's log.
type reporter int

const (
	fromDriver reporter = iota
	fromLog
)

// sighting is an Xid that one reporter has reported, and the other has not yet.
type sighting struct {
	reporter reporter
	gpu      nvml.UUID
	xid      uint64
	gi, ci   int
}

type seen struct {
	times int
	last  time.Time
	by    xidSource
}

// match is the sighting that an Xid was paired with.
type match struct {
	gi, ci int
	by     xidSource
}

// sightings are Xids that await the other reporter, so that each counts once. An Xid that only one reports counts, too.
type sightings map[sighting]seen

// pair finds the other reporter's sighting of the same Xid, and removes it. If there is none, and both reporters are available, this sighting
// waits for the other.
func (s sightings) pair(now time.Time, from reporter, e nvml.Event, by xidSource, both bool) (match, bool) {
	other := fromLog
	if from == fromLog {
		other = fromDriver
	}
	for k, was := range s {
		sameInstance := k.gi == e.GI || k.gi == nvml.WholeGPU || e.GI == nvml.WholeGPU // the library may know of no instances
		if k.reporter != other || k.gpu != e.GPU || k.xid != e.Xid || !sameInstance {
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

// heldXid is a program's error with an Event that waits.
type heldXid struct {
	xidReport
	until time.Time
}

// hold keeps back the Event of a program's error until the kernel's log may have named the process. It returns false if the log cannot. It
// holds even if a pass has seen only one pod on the GPU: another may have started since.
func (m *Monitor) hold(now time.Time, r xidReport) bool {
	if !m.readsLog || !r.own() || r.o == nil || len(m.held) >= mostHeld {
		return false
	}
	m.held = append(m.held, heldXid{r, now.Add(logLag)})
	m.signal(m.holds)
	return true
}

// nameHeld reports the held error, now that the kernel's log has named its process, and notes its pod.
func (m *Monitor) nameHeld(now time.Time, e nvml.Event, by xidSource) {
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
