package verdict

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// patience is how long the driver may be silent before that is reported. A read takes milliseconds.
	patience = 4 * time.Second
	// silentTooLong is how long it may be silent before that is a fault.
	silentTooLong = time.Minute
	// hangTime is how long a silence of the driver counts as the consequence of an Xid that makes drivers hang.
	hangTime = 10 * time.Minute
	// mostGPUs bounds what is remembered: NVIDIA's largest systems of one operating system image have 16, and some may have been replaced.
	mostGPUs = 64
)

// Node is what is known of all GPUs of a node. It is not safe for use by several goroutines at once.
type Node struct {
	xids xids
	gpus []*GPU // by index

	answered       bool      // the driver has answered at least once since the process began
	silentSince    time.Time // zero if the driver has answered
	silenceErr     error
	driverUnloaded bool      // when the driver was last asked
	hangXidAt      time.Time // the last Xid after which drivers hang

	onBus    []nvml.BusGPU
	busKnown bool
	noEvents bool
}

// New returns a node without a reading of its GPUs.
func New(s config.Health) *Node { return &Node{xids: xids{s}, noEvents: true} }

// GPUs are all that are known, by index.
func (n *Node) GPUs() []*GPU { return n.gpus }

// DriverAnswers reports whether the driver answered the last reading.
func (n *Node) DriverAnswers() bool { return n.answered && n.silentSince.IsZero() }

// Observed reports whether the driver has answered at least once since the process began.
func (n *Node) Observed() bool { return n.answered }

// HasEvents reports whether the driver sends its events.
func (n *Node) HasEvents() bool { return !n.noEvents }

// SetEvents records whether it does.
func (n *Node) SetEvents(sent bool) { n.noEvents = !sent }

// ObserveEvent records one driver event. It returns the event's GPU, or nil, and for an Xid what is known about it; the Occurrence is nil if
// the Xid follows from another, or is one too many.
func (n *Node) ObserveEvent(now time.Time, e nvml.Event) (*GPU, Xid, *Occurrence) {
	n.noEvents = e.Kind == nvml.EventSilence || n.noEvents && e.Kind != nvml.EventWatching
	g := n.GPU(e.GPU)
	if g == nil && e.GPU != "" && len(n.gpus) < mostGPUs {
		g = newGPU(e.GPU, "", -1)
		n.gpus = append(n.gpus, g)
	}
	if g == nil {
		return nil, Xid{}, nil
	}
	if e.Kind != nvml.EventXid {
		g.addEvent(now, e.Kind)
		g.updateFindings(now, n.xids, false)
		return g, Xid{}, nil
	}
	if slices.Contains(hangs, e.Xid) {
		n.hangXidAt = now
	}
	x := n.xids.of(e.Xid, g.beforeAmpere)
	o := g.addXid(now, x, e.GI, e.CI)
	g.confirmXid(x, o)
	g.updateFindings(now, n.xids, false)
	return g, x, o
}

// ObserveLogged records an Xid that the kernel's log has and the driver's events lack so far. The Xid is remembered, explains the GPU's state,
// and makes no finding. ObserveLogged returns what ObserveEvent does.
func (n *Node) ObserveLogged(now time.Time, e nvml.Event) (*GPU, Xid, *Occurrence) {
	g := n.GPU(e.GPU)
	if g == nil {
		return nil, Xid{}, nil
	}
	if slices.Contains(hangs, e.Xid) {
		n.hangXidAt = now // a silent driver is the state that it explains
	}
	x := n.xids.of(e.Xid, g.beforeAmpere)
	return g, x, g.addXid(now, x, e.GI, e.CI)
}

// ConfirmLogged records that the driver's events report an Xid, too, that ObserveLogged has recorded and counted.
func (n *Node) ConfirmLogged(now time.Time, e nvml.Event) (*GPU, Xid) {
	n.noEvents = false
	g := n.GPU(e.GPU)
	if g == nil {
		return nil, Xid{}
	}
	x := n.xids.of(e.Xid, g.beforeAmpere)
	o := g.xids[xidKey{e.Xid, e.GI, e.CI}]
	if o == nil { // of another instance by the log, or one too many to remember
		o = g.addXid(now, x, e.GI, e.CI)
	}
	g.confirmXid(x, o)
	g.updateFindings(now, n.xids, false)
	return g, x
}

// GPU returns the GPU with that UUID; nil if there is none.
func (n *Node) GPU(uuid nvml.UUID) *GPU {
	at := slices.IndexFunc(n.gpus, func(g *GPU) bool { return g.uuid == uuid && uuid != "" })
	if at < 0 {
		return nil
	}
	return n.gpus[at]
}

// GPUAt returns the GPU at an address of the PCI bus; nil if there is none.
func (n *Node) GPUAt(pci string) *GPU {
	at := slices.IndexFunc(n.gpus, func(g *GPU) bool { return g.pci == pci && pci != "" })
	if at < 0 {
		return nil
	}
	return n.gpus[at]
}

// ObserveBus records the GPUs on the PCI bus.
func (n *Node) ObserveBus(onBus []nvml.BusGPU, known bool) { n.onBus, n.busKnown = onBus, known }

// ObserveGPUs records the driver's report on all GPUs. A reading that is not thorough lacks the values that take the driver long.
func (n *Node) ObserveGPUs(now time.Time, all []nvml.Health, thorough bool) {
	reloaded := n.driverUnloaded
	n.answered, n.silentSince, n.silenceErr, n.driverUnloaded = true, time.Time{}, nil, false
	reported := map[*GPU]bool{}
	for _, h := range all {
		if g := n.gpuOf(h, all); g != nil {
			reported[g] = true
			g.addReading(now, h, thorough, reloaded)
		}
	}
	n.markMissing(reported)
	for _, g := range n.gpus {
		g.updateFindings(now, n.xids, true)
	}
}

// gpuOf finds the GPU that a reading is about, or adds it. One that is lost may have no UUID.
func (n *Node) gpuOf(h nvml.Health, all []nvml.Health) *GPU {
	if g := n.GPU(h.UUID); g != nil {
		return g
	}
	if h.UUID == "" {
		for _, g := range n.gpus {
			elsewhere := slices.ContainsFunc(all, func(o nvml.Health) bool { return o.UUID == g.uuid && g.uuid != "" })
			if g.index == h.Index && !elsewhere {
				return g
			}
		}
	}
	if len(n.gpus) >= mostGPUs {
		return nil
	}
	g := newGPU(h.UUID, h.PCI, h.Index)
	n.gpus = append(n.gpus, g)
	return g
}

// markMissing marks the GPUs that the driver does not report: those that it has reported before, and those on the bus. It drops a GPU if
// another has taken its place, or a virtual machine has it.
func (n *Node) markMissing(reported map[*GPU]bool) {
	taken := map[string]bool{}
	nameless := false // a reported GPU has no known address: it may be any of those on the bus
	for g := range reported {
		taken[g.pci] = g.pci != ""
		nameless = nameless || g.pci == ""
	}
	n.gpus = slices.DeleteFunc(n.gpus, func(g *GPU) bool {
		at := n.busGPU(g.pci)
		return !reported[g] && (taken[g.pci] || g.pci == "" && g.uuid == "" || at != nil && lentToVM(*at))
	})
	if !nameless {
		n.addFromBus()
	}
	for _, g := range n.gpus {
		g.missing = !reported[g]
		if g.missing {
			g.lost, g.onBus = false, !n.busKnown || n.busGPU(g.pci) != nil
			g.missingDetail = n.missingDetail(g, len(reported))
		}
	}
	slices.SortStableFunc(n.gpus, func(a, b *GPU) int { return cmp.Compare(a.listPosition(), b.listPosition()) })
}

// missingDetail says for a missing GPU how many there are, and how many answer.
func (n *Node) missingDetail(g *GPU, answer int) string {
	switch {
	case !n.busKnown:
		return fmt.Sprintf("; %d answer", answer)
	case g.onBus:
		return fmt.Sprintf("; %d are on the PCI bus, and %d answer", len(n.onBus), answer)
	default:
		return fmt.Sprintf(", nor is it on the PCI bus any more; %d are, and %d answer", len(n.onBus), answer)
	}
}

// listPosition is the GPU's place in lists: those without an index come last.
func (g *GPU) listPosition() int {
	if g.index < 0 {
		return mostGPUs
	}
	return g.index
}

// addFromBus adds the GPUs of the bus that nothing else has shown yet.
func (n *Node) addFromBus() {
	for _, b := range n.onBus {
		known := slices.ContainsFunc(n.gpus, func(g *GPU) bool { return g.pci == b.PCI })
		if !known && !lentToVM(b) && len(n.gpus) < mostGPUs {
			n.gpus = append(n.gpus, newGPU("", b.PCI, -1))
		}
	}
}

// busGPU returns the bus's GPU at an address; nil if there is none.
func (n *Node) busGPU(pci string) *nvml.BusGPU {
	at := slices.IndexFunc(n.onBus, func(b nvml.BusGPU) bool { return b.PCI == pci })
	if at < 0 {
		return nil
	}
	return &n.onBus[at]
}

// lentToVM reports whether another driver than NVIDIA's has the GPU, as for a virtual machine.
func lentToVM(b nvml.BusGPU) bool { return b.Driver != "" && b.Driver != "nvidia" }

// ObserveError notes that the driver has not answered.
func (n *Node) ObserveError(now time.Time, err error) {
	n.silenceErr = err
	n.driverUnloaded = n.driverUnloaded || errors.Is(err, nvml.ErrNoDriver) || errors.Is(err, nvml.ErrReplaced)
	if n.silentSince.IsZero() {
		n.silentSince = now
	}
}

// Acknowledge drops the missing GPUs and unsettled Xids that a person has acknowledged, those up to that time. It names them for a message.
func (n *Node) Acknowledge(until time.Time) (dropped []string) {
	n.gpus = slices.DeleteFunc(n.gpus, func(g *GPU) bool {
		since := time.Time{}
		if at := slices.IndexFunc(g.findings, func(f Finding) bool { return f.Reason == config.ReasonGPUMissing }); at >= 0 {
			since = g.findings[at].Since
		}
		gone := g.missing && !g.onBus && !since.IsZero() && !since.After(until)
		if gone {
			dropped = append(dropped, "missing "+g.Name())
		}
		return gone
	})
	for _, g := range n.gpus {
		for _, xid := range g.acknowledge(until) {
			dropped = append(dropped, fmt.Sprintf("Xid %d of %s", xid, g.Name()))
		}
	}
	return dropped
}

// Verdict is what is to be reported of all GPUs.
type Verdict struct {
	Status    corev1.ConditionStatus
	Reason    config.Reason
	Action    Action
	Unhealthy []*GPU // the worst first
	// Unknown says why the GPUs cannot be read now, so that only earlier findings are known; empty if they can.
	Unknown string
	NoGPU   bool // neither the driver nor the bus has one
	Hangs   bool // the driver does not answer, and only a reboot brings it back
}

// changedByAgent reports whether a change by the agent explains a silence.
func (n *Node) changedByAgent(now time.Time) bool {
	return slices.ContainsFunc(n.gpus, func(g *GPU) bool { return g.changedByAgent(now) })
}

// Judge returns the verdict; false while too little is known for one.
func (n *Node) Judge(now time.Time) (Verdict, bool) {
	v := Verdict{Status: corev1.ConditionFalse, Reason: config.ReasonGPUsHealthy, Action: ActionNone}
	for _, g := range n.gpus {
		if len(g.findings) > 0 {
			v.Unhealthy = append(v.Unhealthy, g)
		}
	}
	slices.SortStableFunc(v.Unhealthy, func(a, b *GPU) int {
		return cmp.Compare(rank(a.findings[0].Reason), rank(b.findings[0].Reason))
	})
	if len(v.Unhealthy) > 0 {
		f := v.Unhealthy[0].findings[0]
		v.Status, v.Reason, v.Action = corev1.ConditionTrue, f.Reason, f.Action
	}
	if n.silentSince.IsZero() {
		if n.answered && len(n.gpus) == 0 {
			v.Reason, v.NoGPU = config.ReasonNoGPU, true
		}
		return v, n.answered
	}
	return n.judgeSilence(now, v)
}

// judgeSilence decides what can be said while the driver returns an error.
func (n *Node) judgeSilence(now time.Time, v Verdict) (Verdict, bool) {
	lasted := now.Sub(n.silentSince)
	switch {
	case errors.Is(n.silenceErr, nvml.ErrNoDriver) || errors.Is(n.silenceErr, nvml.ErrReplaced):
		if n.busKnown && len(n.onBus) == 0 && len(v.Unhealthy) == 0 {
			v.Reason, v.NoGPU = config.ReasonNoGPU, true
			return v, true
		}
		why := fmt.Sprintf("NVIDIA's driver is not loaded: %v", n.silenceErr)
		if len(n.onBus) > 0 {
			why = fmt.Sprintf("the PCI bus has %s, but no driver answers for them: %v", sanitize.Counted(len(n.onBus), "GPU"), n.silenceErr)
		}
		return v.orUnknown(config.ReasonDriverNotLoaded, why), lasted >= patience
	case errors.Is(n.silenceErr, nvml.ErrUnresponsive):
		return n.judgeHang(now, lasted, v)
	default:
		return v.orUnknown(config.ReasonHealthUnknown, fmt.Sprintf("cannot observe the GPUs: %v", n.silenceErr)), lasted >= patience
	}
}

// judgeHang decides what can be said while the driver does not answer.
func (n *Node) judgeHang(now time.Time, lasted time.Duration, v Verdict) (Verdict, bool) {
	why := fmt.Sprintf("the driver has not answered since %s: %v", Moment(n.silentSince), n.silenceErr)
	expected := !n.hangXidAt.IsZero() && now.Sub(n.hangXidAt) < hangTime
	switch {
	case n.changedByAgent(now) && lasted < silentTooLong: // a change by the agent takes the driver's locks
		return v, n.answered
	case !expected && lasted < silentTooLong:
		// Cold GPUs take their time when the driver is first asked.
		return v.orUnknown(config.ReasonDriverUnresponsive, why), lasted >= patience && (n.answered || lasted >= settleTime)
	}
	v.Unknown = why
	if len(v.Unhealthy) == 0 || rank(v.Reason) >= rank(config.ReasonXidCritical) {
		v.Status, v.Reason, v.Action, v.Hangs = corev1.ConditionTrue, config.ReasonDriverUnresponsive, ActionRebootNode, true
	}
	return v, lasted >= patience/2
}

// orUnknown returns the verdict while nothing can be read: Unknown, unless something was found before.
func (v Verdict) orUnknown(reason config.Reason, why string) Verdict {
	v.Unknown = why
	if len(v.Unhealthy) == 0 {
		v.Status, v.Reason = corev1.ConditionUnknown, reason
	}
	return v
}

// Critical reports whether a GPU cannot be used or trusted. While the driver does not answer, that is known only from an earlier finding, or
// if the driver hangs for good.
func (v Verdict) Critical() (critical, known bool) {
	gpus, known := v.CriticalGPUs(nil)
	return len(gpus) > 0, known
}

// CriticalGPUs returns the GPUs that cannot be used or trusted: all of the node's if the driver hangs. The empty UUID stands for GPUs without
// one.
func (v Verdict) CriticalGPUs(all []*GPU) (gpus map[nvml.UUID]bool, known bool) {
	gpus = map[nvml.UUID]bool{}
	if v.Hangs {
		gpus[""] = true
		for _, g := range all {
			gpus[g.uuid] = true
		}
	}
	for _, g := range v.Unhealthy {
		if g.findings[0].Severity() == Critical {
			gpus[g.uuid] = true
		}
	}
	return gpus, len(gpus) > 0 || v.Unknown == ""
}

// Key is the content of a verdict without values that change by themselves. A verdict with another key has to be written.
func (v Verdict) Key() string {
	var parts []string
	for _, g := range v.Unhealthy {
		var found []string
		for _, f := range g.findings {
			found = append(found, fmt.Sprintf("%s%v", f.Reason, f.Instances))
		}
		parts = append(parts, g.Name()+":"+strings.Join(found, ","))
	}
	return fmt.Sprintf("%s %s %s %t", v.Status, v.Reason, strings.Join(parts, " "), v.Unknown != "")
}

// Moment formats a time for messages.
func Moment(t time.Time) string { return t.UTC().Format("15:04:05Z") }
