package health

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// How long things hold.
const (
	// settleTime is how long after an Xid, or an error of memory, the driver may take to recommend an action for it.
	settleTime = 30 * time.Second
	// goodLooks are those in a row that must not find something any more until it is over: one may fall between two changes of the driver.
	goodLooks = 2
	// afterChange is how long after a change of ours what follows from it is no finding.
	afterChange = 30 * time.Second
	// flapWindow, flapRises and flapHold: what is found for the third time in an hour stays for ten minutes after it was last seen.
	flapWindow, flapRises, flapHold = time.Hour, 3, 10 * time.Minute
	// repeatedPods pods with Xids of their own on one GPU within repeatedWindow are more than their own mistakes.
	repeatedPods, repeatedWindow = 3, time.Hour
	// consequence is how long after another Xid of the GPU a 45 follows from that.
	consequence = 10 * time.Second
	// mostXids bounds what is remembered of one GPU.
	mostXids = 32
)

// gpu is what is known of one GPU. It decides, and calls nothing.
type gpu struct {
	uuid  nvml.UUID // empty of one that has never answered
	pci   string
	index int

	reading nvml.Health // the last, with what only a thorough look tells from the last of these
	read    bool        // there was one since the process began
	lost    bool
	missing bool
	onBus   bool   // a missing one is there
	where   string // and what that means, for people
	old     bool   // from before Ampere, of which NVIDIA has another catalog

	findings []finding
	xids     map[xidKey]*occurrence

	// What the driver may not tell while there are instances.

	pending, failed bool // of a row
	rows            *rowsRead

	sram, unrepairable bool // told by a thorough look, and never mended

	erredAt time.Time // an uncorrectable memory error that is not settled
	asked   bool      // the agent has asked for another MIG mode in this boot, and knows what to wait for

	apps      map[types.UID]time.Time // pods with Xids of their own
	rises     []time.Time
	flapUntil time.Time
	lastXid   time.Time // other than 45

	changing int // calls of ours that are under way
	quiet    time.Time
}

// xidKey tells Xids apart.
type xidKey struct {
	xid    uint64
	gi, ci int
}

// occurrence is an Xid that a GPU has reported.
type occurrence struct {
	count       int
	first, last time.Time
	holds       bool // nothing has shown yet that nothing is left of it

	told   time.Time // by an Event
	untold int       // times since
}

// rowsRead is when rows could last be read.
type rowsRead struct {
	corrected, uncorrected uint64
	at                     time.Time
}

func newGPU(uuid nvml.UUID, pci string, index int) *gpu {
	return &gpu{uuid: uuid, pci: pci, index: index, xids: map[xidKey]*occurrence{}, apps: map[types.UID]time.Time{}}
}

// xid notes an Xid, and gives what is remembered of it. It is nil for what follows from another one, and for one too many.
func (g *gpu) xid(now time.Time, x Xid, gi, ci int) *occurrence {
	if x.Number == channelsRemoved && !g.lastXid.IsZero() && now.Sub(g.lastXid) < consequence {
		return nil
	}
	if x.Number != channelsRemoved {
		g.lastXid = now
	}
	key := xidKey{x.Number, gi, ci}
	o := g.xids[key]
	if o == nil && len(g.xids) >= mostXids && !g.dropOldest() {
		key.gi, key.ci = nvml.WholeGPU, nvml.WholeGPU
		if o = g.xids[key]; o == nil && len(g.xids) >= 2*mostXids {
			return nil
		}
	}
	if o == nil {
		o = &occurrence{first: now}
		g.xids[key] = o
	}
	o.count++
	o.last = now
	o.holds = o.holds || x.Critical
	g.mark(x.Number)
	return o
}

// mark notes what an Xid says of memory whose state cannot be read.
func (g *gpu) mark(xid uint64) {
	switch xid {
	case 63:
		g.pending = g.pending || !g.reading.Rows.Pending.Known && !g.old
	case 64:
		g.failed = g.failed || !g.reading.Rows.Failed.Known && !g.old
	}
}

// dropOldest forgets an Xid that does not matter any more.
func (g *gpu) dropOldest() bool {
	var oldest xidKey
	var found *occurrence
	for key, o := range g.xids {
		if !o.holds && (found == nil || o.last.Before(found.last)) {
			oldest, found = key, o
		}
	}
	delete(g.xids, oldest)
	return found != nil
}

// event notes news that are no Xid.
func (g *gpu) event(now time.Time, kind nvml.EventKind) {
	switch kind {
	case nvml.EventECC, nvml.EventFatalPoison:
		g.erredAt = now
	case nvml.EventRetired:
		g.mark(63)
	case nvml.EventRetireFailed:
		g.mark(64)
	case nvml.EventXid, nvml.EventPoison, nvml.EventUnavailable, nvml.EventAction, nvml.EventSilence, nvml.EventWatching:
	}
}

// look takes over a reading. Reloaded says that the driver was away since the last one.
func (g *gpu) look(now time.Time, h nvml.Health, thorough, reloaded bool) {
	before, had := g.reading, g.read
	reloaded = reloaded || g.lost || g.missing // nothing but a reset, a reboot or a reload brings one back
	g.lost, g.missing, g.index = h.Lost, false, h.Index
	if h.PCI != "" {
		g.pci = h.PCI
	}
	if h.Lost {
		return
	}
	if !thorough {
		h.Banks, h.RepairPending, h.Unrepairable, h.SRAMThreshold, h.Fabric =
			before.Banks, before.RepairPending, before.Unrepairable, before.SRAMThreshold, before.Fabric
	}
	g.reading, g.read = h, true
	if reloaded || had && wasReset(before, h) {
		g.afterReset()
	}
	g.remember(now, h)
	g.settleErrors(now, before, had)
	g.settleXids(now)
}

// remember takes over of a reading what a later one may not tell.
func (g *gpu) remember(now time.Time, h nvml.Health) {
	if h.Rows.Pending.Known {
		g.pending = h.Rows.Pending.Value
	}
	if h.Rows.Failed.Known {
		g.failed = h.Rows.Failed.Value
	}
	if h.Rows.Corrected.Known && h.Rows.Uncorrected.Known {
		g.rows = &rowsRead{h.Rows.Corrected.Value, h.Rows.Uncorrected.Value, now}
	}
	g.sram = g.sram || nvml.Is(h.SRAMThreshold)
	g.unrepairable = g.unrepairable || nvml.Is(h.Unrepairable)
	if m := h.MIGMode; m.Known && m.Value.Current == m.Value.Pending {
		g.asked = false
	}
}

// wasReset reports whether a reset, whoever did it, lies between two readings.
func wasReset(before, now nvml.Health) bool {
	recommended := before.Action.Known && before.Action.Value != nvml.RecoverNothing && now.Action.Known && now.Action.Value == nvml.RecoverNothing
	return recommended || gone(before.Rows.Pending, now.Rows.Pending) || gone(before.RepairPending, now.RepairPending) ||
		fell(before.ECC.UncorrectedVolatile, now.ECC.UncorrectedVolatile) || fell(before.ECC.CorrectedVolatile, now.ECC.CorrectedVolatile)
}

func gone(before, now nvml.Reading[bool]) bool { return nvml.Is(before) && now.Known && !now.Value }

func fell(before, now nvml.Reading[uint64]) bool {
	return before.Known && now.Known && now.Value < before.Value
}

// afterReset drops what a reset mends.
func (g *gpu) afterReset() {
	g.pending, g.erredAt = false, time.Time{}
	for _, o := range g.xids {
		o.holds = false
	}
}

// settleErrors finds out whether something is left of an uncorrectable memory error.
func (g *gpu) settleErrors(now time.Time, before nvml.Health, had bool) {
	errors, action := g.reading.ECC.UncorrectedVolatile, g.reading.Action
	grown := had && fell(errors, before.ECC.UncorrectedVolatile)
	untold := !action.Known && !g.old && errors.Known && errors.Value > 0 && g.erredAt.IsZero()
	if grown || untold {
		g.erredAt = now
	}
	over := !action.Known && errors.Known && errors.Value == 0
	if action.Known { // it tells, or there is none
		over = action.Value != nvml.RecoverNothing || now.Sub(g.erredAt) >= settleTime
	}
	if over {
		g.erredAt = time.Time{}
	}
}

// settleXids finds out whether something is left of the Xids.
func (g *gpu) settleXids(now time.Time) {
	action := g.reading.Action
	for key, o := range g.xids {
		switch {
		case key.xid == 64 && g.failed: // the state tells, and does not heal
			o.holds = false
		case !action.Known: // only a reset, a reboot or a person ends it
		case action.Value != nvml.RecoverNothing: // the action has taken over, and ends when it is done
			o.holds = false
		case table[key.xid].Settled && now.Sub(o.last) >= settleTime:
			o.holds = false
		}
	}
}

// acknowledge drops what a person has looked at, as of that time.
func (g *gpu) acknowledge(until time.Time) {
	for _, o := range g.xids {
		o.holds = o.holds && o.last.After(until)
	}
}

// busy reports whether a change of ours explains what looks wrong.
func (g *gpu) busy(now time.Time) bool { return g.changing > 0 || now.Before(g.quiet) }

// symptoms are what is wrong with the GPU by all that is known.
func (g *gpu) symptoms(now time.Time, t xids) []finding {
	var out []finding
	add := func(is bool, f finding) {
		if is {
			f.action = cmp.Or(f.action, reasons[rank(f.reason)].action)
			out = append(out, f)
		}
	}
	add(g.lost && !g.busy(now), finding{reason: config.ReasonGPULost})
	add(g.missing && !g.busy(now), finding{reason: config.ReasonGPUMissing, detail: g.where})
	add(g.failed, finding{reason: config.ReasonRowRemapFailed})
	add(g.sram, finding{reason: config.ReasonSRAMThresholdExceeded})
	add(g.unrepairable, finding{reason: config.ReasonMemoryUnrepairable})
	held, found := g.held(t)
	add(found, held)
	repeated, found := g.repeated(now)
	add(found, repeated)
	if g.lost || g.missing || !g.read { // nothing else is known of it now
		return out
	}
	due, found := g.recovery()
	add(found, due)
	h := g.reading
	add(g.pending, finding{reason: config.ReasonRowRemapPending})
	add(nvml.Is(h.RepairPending), finding{reason: config.ReasonRepairPending})
	add(nvml.Is(h.Pages.Pending), finding{reason: config.ReasonPageRetirementPending})
	add(!g.erredAt.IsZero(), finding{reason: config.ReasonUncorrectableECC})
	add(differs(h.ECCMode), finding{reason: config.ReasonModePending, detail: ": ECC"})
	add(differs(h.MIGMode) && !g.asked && !g.busy(now), finding{reason: config.ReasonModePending, detail: ": MIG"})
	add(h.Fabric.Known && severed(h.Fabric.Value), finding{reason: config.ReasonFabricUnhealthy})
	return out
}

// severed reports whether a GPU that has joined its fabric is not well connected to it.
func severed(f nvml.Fabric) bool { return f.State == nvml.FabricCompleted && (f.Failed || !f.Healthy) }

func differs(m nvml.Reading[nvml.Mode]) bool { return m.Known && m.Value.Current != m.Value.Pending }

// recovery is what follows from the action that the driver recommends, or, with drivers that recommend none, from their flags.
func (g *gpu) recovery() (finding, bool) {
	h := g.reading
	switch {
	case h.Action.Known && h.Action.Value == nvml.RecoverNothing:
		return finding{}, false
	case h.Action.Known:
		detail := fmt.Sprintf(": recovery action %d (%v)", int(h.Action.Value), h.Action.Value)
		if known, ok := recoveries[h.Action.Value]; ok {
			return finding{reason: known.reason, action: known.action, detail: detail}, true
		}
		return finding{reason: config.ReasonResetRequired, action: ActionContactSupport, detail: detail}, true
	case nvml.Is(h.NeedsDrain):
		return finding{reason: config.ReasonDrainRequired, detail: ": the driver recommends a drain and a reset"}, true
	case nvml.Is(h.NeedsReset):
		return finding{reason: config.ReasonResetRequired, detail: ": the driver says so"}, true
	default:
		return finding{}, false
	}
}

// held is what Xids say of which nothing has shown that it is over.
func (g *gpu) held(t xids) (finding, bool) {
	f := finding{reason: config.ReasonXidCritical}
	whole, order := false, []Action{ActionResetGPU, ActionRunDiagnostics, ActionCheckMechanicals, ActionRebootNode, ActionContactSupport}
	for key, o := range g.xids {
		if !o.holds {
			continue
		}
		x := t.of(key.xid, g.old)
		action := x.Action
		if action == ActionNone {
			action = ActionRunDiagnostics
		}
		if slices.Index(order, action) > slices.Index(order, f.action) {
			f.action = action
		}
		if key.gi == nvml.WholeGPU {
			whole = true
		} else if !slices.Contains(f.instances, key.gi) {
			f.instances = append(f.instances, key.gi)
		}
	}
	slices.Sort(f.instances)
	if whole {
		f.instances = nil
	}
	return f, f.action != ""
}

// repeated is that programs of several pods have had errors.
func (g *gpu) repeated(now time.Time) (finding, bool) {
	maps.DeleteFunc(g.apps, func(_ types.UID, at time.Time) bool { return now.Sub(at) >= repeatedWindow })
	return finding{reason: config.ReasonRepeatedXid, detail: fmt.Sprintf(": %d pods", len(g.apps))}, len(g.apps) >= repeatedPods
}

// erred notes that a pod's program has had an Xid of its own. Pods come and go: no more are remembered than make a finding, and some.
func (g *gpu) erred(now time.Time, pod types.UID) {
	if _, known := g.apps[pod]; known || len(g.apps) < 4*repeatedPods {
		g.apps[pod] = now
	}
}

// settle has the findings follow the symptoms: at once upwards, and after good looks downwards. Looked says that this is one.
func (g *gpu) settle(now time.Time, t xids, looked bool) {
	found := g.symptoms(now, t)
	was := len(g.findings)
	var next []finding
	for _, f := range g.findings {
		at := slices.IndexFunc(found, func(s finding) bool { return s.reason == f.reason })
		if at >= 0 {
			found[at].since = f.since
			continue
		}
		if looked && now.Sub(f.goodAt) >= interval/2 {
			f.good++
			f.goodAt = now
		}
		if f.good < goodLooks || now.Before(g.flapUntil) {
			next = append(next, f)
		}
	}
	for _, f := range found {
		if f.since.IsZero() {
			f.since = now
		}
		next = append(next, f)
	}
	slices.SortFunc(next, func(a, b finding) int { return cmp.Compare(rank(a.reason), rank(b.reason)) })
	g.findings = next
	if was == 0 && len(next) > 0 {
		g.rises = slices.DeleteFunc(append(g.rises, now), func(at time.Time) bool { return now.Sub(at) >= flapWindow })
		g.rises = g.rises[max(0, len(g.rises)-flapRises):]
	}
	if len(found) > 0 && len(g.rises) >= flapRises && now.Sub(g.rises[0]) < flapWindow {
		g.flapUntil = now.Add(flapHold)
	}
}

// flapping reports whether findings stay because they have come and gone too often.
func (g *gpu) flapping(now time.Time) bool { return now.Before(g.flapUntil) }

// name is how people find the GPU.
func (g *gpu) name() string {
	var known []string
	for _, text := range []string{string(g.uuid), g.pci} {
		if text != "" {
			known = append(known, text)
		}
	}
	if g.index < 0 {
		return "a GPU (" + strings.Join(known, ", ") + ")"
	}
	if len(known) == 0 {
		return fmt.Sprintf("GPU %d", g.index)
	}
	return fmt.Sprintf("GPU %d (%s)", g.index, strings.Join(known, ", "))
}

// recent are the Xids that matter for what is wrong now, the newest last: critical ones, or else those from which it began.
func (g *gpu) recent(t xids) []xidKey {
	var critical, began []xidKey
	for key, o := range g.xids {
		x := t.of(key.xid, g.old)
		switch {
		case o.holds || x.Critical:
			critical = append(critical, key)
		case x.Class == ClassInfo || x.Class == ClassState || len(g.findings) == 0:
		case o.last.After(g.findings[0].since.Add(-time.Minute)):
			began = append(began, key)
		}
	}
	if len(critical) == 0 {
		critical = began
	}
	slices.SortFunc(critical, func(a, b xidKey) int {
		return cmp.Or(g.xids[a].last.Compare(g.xids[b].last), cmp.Compare(a.xid, b.xid), cmp.Compare(a.gi, b.gi), cmp.Compare(a.ci, b.ci))
	})
	return critical
}
