package verdict

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

// Interval is the time between two readings of the driver.
const Interval = 2 * time.Second

// Times and counts of findings.
const (
	// settleTime is how long after an Xid, or a memory error, the driver may take to recommend an action for it.
	settleTime = 30 * time.Second
	// goodReadings in a row without its symptom end a finding: a single one may fall between two changes of the driver.
	goodReadings = 2
	// afterChange is how long the consequences of a change by the agent are no findings.
	afterChange = 30 * time.Second
	// flapWindow, flapRises and flapHold: findings of a GPU that becomes unhealthy for the third time in an hour stay for ten minutes after their last sign.
	flapWindow, flapRises, flapHold = time.Hour, 3, 10 * time.Minute
	// repeatedPods pods with Xids of their own on one GPU within repeatedWindow make the GPU suspect.
	repeatedPods, repeatedWindow = 3, time.Hour
	// consequence is how long after another Xid of the GPU a 45 counts as its consequence.
	consequence = 10 * time.Second
	// mostXids bounds the Xids that are remembered for one GPU.
	mostXids = 32
)

// GPU is what is known of one GPU.
type GPU struct {
	uuid  nvml.UUID // empty if it has never answered
	pci   string
	index int

	reading       nvml.Health // the last; fields that only a thorough reading has are from the last thorough one
	hasReading    bool        // since the process began
	lost          bool
	missing       bool
	onBus         bool   // while it is missing
	missingDetail string // how many GPUs the bus and the driver have, for people
	beforeAmpere  bool   // NVIDIA has another catalog of Xids for it

	findings []Finding // the worst first
	xids     map[xidKey]*Occurrence

	// Values that the driver may not report while there are instances.

	rowPending, rowFailed bool
	lastRows              *Rows

	sramExceeded, memoryUnrepairable bool // a thorough reading has said so, and nothing mends it

	eccErrorAt     time.Time // an uncorrectable memory error after which the driver may still recommend an action; zero if there is none
	awaitsMIGMode  bool      // the agent has set another MIG mode in this boot, which waits for a reset
	podErrors      map[types.UID]time.Time
	rises          []time.Time // when it became unhealthy, the last flapRises
	flappingUntil  time.Time
	lastXidAt      time.Time // other than 45
	lastTroubleAt  time.Time // of a finding, an Xid or a memory error, for programs that consider the GPU unhealthy since then
	resets         []reset   // by the agent, the last mostResets
	agentsChanges  int       // calls of the agent that change the GPU and have not returned
	agentChangedAt time.Time // when the last of them returned
}

// xidKey distinguishes Xids.
type xidKey struct {
	xid    uint64
	gi, ci int
}

// Occurrence is what is remembered of an Xid on a GPU or on one of its instances.
type Occurrence struct {
	count       int
	first, last time.Time
	unsettled   bool // nothing has shown yet that it is over

	eventAt    time.Time // of the last Event about it
	unreported int       // times since that Event
}

// Rows are counts of replaced rows of memory.
type Rows struct {
	Corrected, Uncorrected uint64 // by the kind of error that was the cause
	readAt                 time.Time
}

func newGPU(uuid nvml.UUID, pci string, index int) *GPU {
	return &GPU{uuid: uuid, pci: pci, index: index, xids: map[xidKey]*Occurrence{}, podErrors: map[types.UID]time.Time{}}
}

// addXid notes an Xid, and returns its Occurrence; nil if the Xid follows from another, or is one too many.
func (g *GPU) addXid(now time.Time, x Xid, gi, ci int) *Occurrence {
	if x.Number == channelsRemoved && !g.lastXidAt.IsZero() && now.Sub(g.lastXidAt) < consequence {
		return nil
	}
	if x.Number != channelsRemoved {
		g.lastXidAt = now
	}
	g.lastTroubleAt = now
	key := xidKey{x.Number, gi, ci}
	o := g.xids[key]
	if o == nil && len(g.xids) >= mostXids && !g.forgetOldestXid() {
		key.gi, key.ci = nvml.WholeGPU, nvml.WholeGPU
		if o = g.xids[key]; o == nil && len(g.xids) >= 2*mostXids {
			return nil
		}
	}
	if o == nil {
		o = &Occurrence{first: now}
		g.xids[key] = o
	}
	o.count++
	o.last = now
	return o
}

// confirmXid records that the driver itself reports an Xid. A critical one counts until the state shows that it is over.
func (g *GPU) confirmXid(x Xid, o *Occurrence) {
	if o == nil {
		return
	}
	o.unsettled = o.unsettled || x.Critical
	g.noteRowXid(x.Number)
}

// noteRowXid notes what an Xid says about rows of memory, if their state cannot be read.
func (g *GPU) noteRowXid(xid uint64) {
	switch xid {
	case 63:
		g.rowPending = g.rowPending || !g.reading.Rows.Pending.Known && !g.beforeAmpere
	case 64:
		g.rowFailed = g.rowFailed || !g.reading.Rows.Failed.Known && !g.beforeAmpere
	}
}

// forgetOldestXid forgets the oldest settled Xid, and reports whether there was one.
func (g *GPU) forgetOldestXid() bool {
	var oldest xidKey
	var found *Occurrence
	for key, o := range g.xids {
		if !o.unsettled && (found == nil || o.last.Before(found.last)) {
			oldest, found = key, o
		}
	}
	delete(g.xids, oldest)
	return found != nil
}

// addEvent notes an event that is no Xid.
func (g *GPU) addEvent(now time.Time, kind nvml.EventKind) {
	switch kind {
	case nvml.EventECC, nvml.EventFatalPoison:
		g.eccErrorAt, g.lastTroubleAt = now, now
	case nvml.EventRetired:
		g.noteRowXid(63)
	case nvml.EventRetireFailed:
		g.noteRowXid(64)
	case nvml.EventXid, nvml.EventPoison, nvml.EventUnavailable, nvml.EventAction, nvml.EventSilence, nvml.EventWatching:
	}
}

// addReading records a reading. Reloaded says that the driver was unloaded at some time since the last one.
func (g *GPU) addReading(now time.Time, h nvml.Health, thorough, reloaded bool) {
	before, had := g.reading, g.hasReading
	reloaded = reloaded || g.lost || g.missing // only a reset, a reboot or a reload brings one back
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
	g.reading, g.hasReading = h, true
	if reloaded || had && wasReset(before, h) {
		g.NoteReset()
	}
	g.rememberReading(now, h)
	g.settleECCError(now, before, had)
	g.settleXids(now)
}

// rememberReading keeps the values of a reading that a later one may not have.
func (g *GPU) rememberReading(now time.Time, h nvml.Health) {
	if h.Rows.Pending.Known {
		g.rowPending = h.Rows.Pending.Value
	}
	if h.Rows.Failed.Known {
		g.rowFailed = h.Rows.Failed.Value
	}
	if h.Rows.Corrected.Known && h.Rows.Uncorrected.Known {
		g.lastRows = &Rows{h.Rows.Corrected.Value, h.Rows.Uncorrected.Value, now}
	}
	g.sramExceeded = g.sramExceeded || nvml.IsSet(h.SRAMThreshold)
	g.memoryUnrepairable = g.memoryUnrepairable || nvml.IsSet(h.Unrepairable)
	if m := h.MIGMode; m.Known && m.Value.Current == m.Value.Pending {
		g.awaitsMIGMode = false
	}
}

// wasReset reports whether a reset, whoever did it, lies between two readings.
func wasReset(before, now nvml.Health) bool {
	recommended := before.Action.Known && before.Action.Value != nvml.RecoverNothing && now.Action.Known && now.Action.Value == nvml.RecoverNothing
	return recommended || gone(before.Rows.Pending, now.Rows.Pending) || gone(before.RepairPending, now.RepairPending) ||
		fell(before.ECC.UncorrectedVolatile, now.ECC.UncorrectedVolatile) || fell(before.ECC.CorrectedVolatile, now.ECC.CorrectedVolatile)
}

func gone(before, now nvml.Reading[bool]) bool { return nvml.IsSet(before) && now.Known && !now.Value }

func fell(before, now nvml.Reading[uint64]) bool {
	return before.Known && now.Known && now.Value < before.Value
}

// NoteReset drops what a reset mends.
func (g *GPU) NoteReset() {
	g.rowPending, g.eccErrorAt = false, time.Time{}
	for _, o := range g.xids {
		o.unsettled = false
	}
}

// settleECCError notes an uncorrectable memory error, and drops one that is over.
func (g *GPU) settleECCError(now time.Time, before nvml.Health, had bool) {
	errors, action := g.reading.ECC.UncorrectedVolatile, g.reading.Action
	grown := had && fell(errors, before.ECC.UncorrectedVolatile)
	unreported := !action.Known && !g.beforeAmpere && errors.Known && errors.Value > 0 && g.eccErrorAt.IsZero()
	if grown || unreported {
		g.eccErrorAt = now
	}
	over := !action.Known && errors.Known && errors.Value == 0
	if action.Known { // the recommended action replaces the finding, or none is due
		over = action.Value != nvml.RecoverNothing || now.Sub(g.eccErrorAt) >= settleTime
	}
	if over {
		g.eccErrorAt = time.Time{}
	}
}

// settleXids settles the Xids that are over.
func (g *GPU) settleXids(now time.Time) {
	action := g.reading.Action
	for key, o := range g.xids {
		switch {
		case key.xid == 64 && g.rowFailed: // the state says so, and does not heal
			o.unsettled = false
		case !action.Known: // only a reset, a reboot or a person ends it
		case action.Value != nvml.RecoverNothing: // the recommended action replaces it, and ends when it is done
			o.unsettled = false
		case table[key.xid].Settled && now.Sub(o.last) >= settleTime:
			o.unsettled = false
		}
	}
}

// acknowledge settles the Xids that a person has acknowledged, those up to that time, and returns their numbers.
func (g *GPU) acknowledge(until time.Time) (xids []uint64) {
	for key, o := range g.xids {
		if o.unsettled && !o.last.After(until) {
			o.unsettled = false
			xids = append(xids, key.xid)
		}
	}
	slices.Sort(xids)
	return slices.Compact(xids)
}

// changedByAgent reports whether a change by the agent explains what looks wrong.
func (g *GPU) changedByAgent(now time.Time) bool {
	return g.agentsChanges > 0 || !g.agentChangedAt.IsZero() && now.Before(g.agentChangedAt.Add(afterChange))
}

// BeginChange notes that the agent calls into the driver to change the GPU, until EndChange.
func (g *GPU) BeginChange() { g.agentsChanges++ }

// EndChange notes that this call has returned.
func (g *GPU) EndChange(now time.Time) {
	g.agentsChanges--
	g.agentChangedAt = now
}

// AwaitMIGMode notes that the agent sets another MIG mode: a pending mode is then no finding.
func (g *GPU) AwaitMIGMode() { g.awaitsMIGMode = true }

// NoteArchitecture records the GPU's architecture, which decides between NVIDIA's two catalogs of Xids.
func (g *GPU) NoteArchitecture(c nvml.ComputeCapability) {
	if c.Major > 0 {
		g.beforeAmpere = !c.AtLeast(8, 0)
	}
}

// symptoms returns everything that is known to be wrong with the GPU. A new signal of the driver is a line here and a reason in reasons.
func (g *GPU) symptoms(now time.Time, t xids) []Finding {
	var out []Finding
	add := func(is bool, f Finding) {
		if is {
			f.Action = cmp.Or(f.Action, reasons[rank(f.Reason)].action)
			out = append(out, f)
		}
	}
	add(g.lost && !g.changedByAgent(now), Finding{Reason: config.ReasonGPULost})
	add(g.missing && !g.changedByAgent(now), Finding{Reason: config.ReasonGPUMissing, Detail: g.missingDetail})
	add(g.rowFailed, Finding{Reason: config.ReasonRowRemapFailed})
	add(g.sramExceeded, Finding{Reason: config.ReasonSRAMThresholdExceeded})
	add(g.memoryUnrepairable, Finding{Reason: config.ReasonMemoryUnrepairable})
	held, found := g.unsettledXids(t)
	add(found, held)
	repeated, found := g.repeatedPodErrors(now)
	add(found, repeated)
	if g.lost || g.missing || !g.hasReading { // nothing else is known of it now
		return out
	}
	due, found := g.recommended()
	add(found, due)
	h := g.reading
	add(g.rowPending, Finding{Reason: config.ReasonRowRemapPending})
	add(nvml.IsSet(h.RepairPending), Finding{Reason: config.ReasonRepairPending})
	add(nvml.IsSet(h.Pages.Pending), Finding{Reason: config.ReasonPageRetirementPending})
	add(!g.eccErrorAt.IsZero(), Finding{Reason: config.ReasonUncorrectableECC, settles: h.Action.Known})
	var modes []string // in one finding: each reason occurs once
	if modePending(h.ECCMode) {
		modes = append(modes, "ECC")
	}
	if modePending(h.MIGMode) && !g.awaitsMIGMode && !g.changedByAgent(now) {
		modes = append(modes, "MIG")
	}
	add(len(modes) > 0, Finding{Reason: config.ReasonModePending, Detail: ": " + strings.Join(modes, ", ")})
	add(h.Fabric.Known && fabricUnhealthy(h.Fabric.Value), Finding{Reason: config.ReasonFabricUnhealthy})
	return out
}

// fabricUnhealthy reports whether a GPU that has joined its fabric is not well connected to it.
func fabricUnhealthy(f nvml.Fabric) bool {
	return f.State == nvml.FabricCompleted && (f.Failed || !f.Healthy)
}

func modePending(m nvml.Reading[nvml.Mode]) bool {
	return m.Known && m.Value.Current != m.Value.Pending
}

// recommended returns the finding for the action that the driver recommends, or for the flags of a driver that recommends none.
func (g *GPU) recommended() (Finding, bool) {
	h := g.reading
	switch {
	case h.Action.Known && h.Action.Value == nvml.RecoverNothing:
		return Finding{}, false
	case h.Action.Known:
		detail := fmt.Sprintf(": recovery action %d (%v)", int(h.Action.Value), h.Action.Value)
		if known, ok := recoveries[h.Action.Value]; ok {
			return Finding{Reason: known.reason, Action: known.action, Detail: detail}, true
		}
		return Finding{Reason: config.ReasonResetRequired, Action: ActionContactSupport, Detail: detail}, true
	case nvml.IsSet(h.NeedsDrain):
		return Finding{Reason: config.ReasonDrainRequired, Detail: ": the driver recommends a drain and a reset"}, true
	case nvml.IsSet(h.NeedsReset):
		return Finding{Reason: config.ReasonResetRequired, Detail: ": the driver says so"}, true
	default:
		return Finding{}, false
	}
}

// unsettledXids returns the finding of the unsettled Xids.
func (g *GPU) unsettledXids(t xids) (Finding, bool) {
	f := Finding{Reason: config.ReasonXidCritical, settles: true}
	whole, order := false, []Action{ActionResetGPU, ActionRunDiagnostics, ActionCheckMechanicals, ActionRebootNode, ActionContactSupport}
	for key, o := range g.xids {
		if !o.unsettled {
			continue
		}
		f.settles = f.settles && table[key.xid].Settled && g.reading.Action.Known
		x := t.of(key.xid, g.beforeAmpere)
		action := x.Action
		if action == ActionNone {
			action = ActionRunDiagnostics
		}
		if slices.Index(order, action) > slices.Index(order, f.Action) {
			f.Action = action
		}
		if key.gi == nvml.WholeGPU {
			whole = true
		} else if !slices.Contains(f.Instances, key.gi) {
			f.Instances = append(f.Instances, key.gi)
		}
	}
	slices.Sort(f.Instances)
	if whole {
		f.Instances = nil
	}
	return f, f.Action != ""
}

// repeatedPodErrors returns the finding that programs of several pods have had errors.
func (g *GPU) repeatedPodErrors(now time.Time) (Finding, bool) {
	maps.DeleteFunc(g.podErrors, func(_ types.UID, at time.Time) bool { return now.Sub(at) >= repeatedWindow })
	return Finding{Reason: config.ReasonRepeatedXid, Detail: fmt.Sprintf(": %d pods", len(g.podErrors))}, len(g.podErrors) >= repeatedPods
}

// NoteProgramError notes that a pod's program has had an Xid of its own. It remembers few more pods than make a finding, since pods come and
// go.
func (g *GPU) NoteProgramError(now time.Time, pod types.UID) {
	if _, known := g.podErrors[pod]; known || len(g.podErrors) < 4*repeatedPods {
		g.podErrors[pod] = now
	}
}

// updateFindings updates the findings by the symptoms: it adds a new one at once, and drops one after goodReadings without its symptom. The
// caller sets byReading after a reading.
func (g *GPU) updateFindings(now time.Time, t xids, byReading bool) {
	found := g.symptoms(now, t)
	was := len(g.findings)
	var next []Finding
	for _, f := range g.findings {
		at := slices.IndexFunc(found, func(s Finding) bool { return s.Reason == f.Reason })
		if at >= 0 {
			found[at].Since = f.Since
			continue
		}
		if byReading && now.Sub(f.lastWithout) >= Interval/2 {
			f.readingsWithout++
			f.lastWithout = now
		}
		if f.readingsWithout < goodReadings || now.Before(g.flappingUntil) && !replaced(f, found) {
			next = append(next, f)
		}
	}
	for _, f := range found {
		if f.Since.IsZero() {
			f.Since = now
		}
		next = append(next, f)
	}
	sortFindings(next)
	g.findings = next
	g.noteRise(now, was == 0 && len(next) > 0, len(found) > 0)
}

// noteRise notes when something was wrong with the GPU, and whether the GPU flaps.
func (g *GPU) noteRise(now time.Time, began, found bool) {
	if len(g.findings) > 0 {
		g.lastTroubleAt = now
	}
	if began {
		g.rises = slices.DeleteFunc(append(g.rises, now), func(at time.Time) bool { return now.Sub(at) >= flapWindow })
		g.rises = g.rises[max(0, len(g.rises)-flapRises):]
	}
	if found && len(g.rises) >= flapRises && now.Sub(g.rises[0]) < flapWindow {
		g.flappingUntil = now.Add(flapHold)
	}
}

// replaced reports whether an equally bad or a critical finding has replaced f. A GPU that has fallen off the bus, and that the driver does
// not find again, is missing and no longer lost, however often it has flapped.
func replaced(f Finding, found []Finding) bool {
	return slices.ContainsFunc(found, func(now Finding) bool { return now.Severity() == f.Severity() || now.Severity() == Critical })
}

// calmTime is how long a GPU has to be well before it counts as recovered: a driver may report several errors one after the other.
const calmTime = 5 * time.Second

// RecoveredFrom returns when a GPU that is well last had a problem, zero if it had none in this boot; false if it is not well.
func (g *GPU) RecoveredFrom(now time.Time) (time.Time, bool) {
	return g.lastTroubleAt, g.hasReading && !g.lost && !g.missing && len(g.findings) == 0 && now.Sub(g.lastTroubleAt) >= calmTime
}

// FlappingUntil returns until when findings stay because the GPU flaps; false if it does not.
func (g *GPU) FlappingUntil(now time.Time) (time.Time, bool) {
	return g.flappingUntil, now.Before(g.flappingUntil) && len(g.rises) >= flapRises
}

// UUID returns the GPU's UUID; empty if it has never answered.
func (g *GPU) UUID() nvml.UUID { return g.uuid }

// Missing reports whether the driver does not list the GPU, and returns its last index; -1 if it had none.
func (g *GPU) Missing() (index int, is bool) { return g.index, g.missing }

// PCI is the GPU's address on the PCI bus; empty if it is not known.
func (g *GPU) PCI() string { return g.pci }

// Reading is the driver's last reading of the GPU, and whether there is one since the process began.
func (g *GPU) Reading() (nvml.Health, bool) { return g.reading, g.hasReading }

// Findings are what is wrong with the GPU, the worst first.
func (g *GPU) Findings() []Finding { return g.findings }

// RowPending reports whether a bad row of memory is replaced at the next reset.
func (g *GPU) RowPending() bool { return g.rowPending }

// RowFailed reports whether a bad row of memory could not be replaced.
func (g *GPU) RowFailed() bool { return g.rowFailed }

// Rows returns how many rows were replaced, by the last reading that had them; nil if none had.
func (g *GPU) Rows() *Rows { return g.lastRows }

// Name returns the GPU's name in messages.
func (g *GPU) Name() string {
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

// Reported is an Xid that a GPU has reported, once or more often.
type Reported struct {
	Xid         Xid
	GI, CI      int // nvml.WholeGPU if it is not an instance's
	Count       int
	First, Last time.Time

	unsettled bool
}

// reported returns all remembered Xids of the GPU, in no order.
func (g *GPU) reported(t xids) []Reported {
	out := make([]Reported, 0, len(g.xids))
	for key, o := range g.xids {
		out = append(out, Reported{t.of(key.xid, g.beforeAmpere), key.gi, key.ci, o.count, o.first, o.last, o.unsettled})
	}
	return out
}

// Xids returns the remembered Xids of the GPU: the unsettled ones first, then the newest.
func (n *Node) Xids(g *GPU) []Reported {
	out := g.reported(n.xids)
	slices.SortFunc(out, func(a, b Reported) int {
		if a.unsettled != b.unsettled {
			return map[bool]int{true: -1, false: 1}[a.unsettled]
		}
		return cmp.Or(b.Last.Compare(a.Last), cmp.Compare(a.Xid.Number, b.Xid.Number), cmp.Compare(a.GI, b.GI))
	})
	return out
}

// RelevantXids returns the Xids that explain the GPU's findings, the newest last: the critical ones, or else those from when the findings
// began.
func (n *Node) RelevantXids(g *GPU) []Reported {
	var critical, began []Reported
	for _, r := range g.reported(n.xids) {
		switch {
		case r.unsettled || r.Xid.Critical:
			critical = append(critical, r)
		case r.Xid.Class == ClassInfo || r.Xid.Class == ClassState || len(g.findings) == 0:
		case r.Last.After(g.findings[0].Since.Add(-time.Minute)):
			began = append(began, r)
		}
	}
	if len(critical) == 0 {
		critical = began
	}
	slices.SortFunc(critical, func(a, b Reported) int {
		return cmp.Or(a.Last.Compare(b.Last), cmp.Compare(a.Xid.Number, b.Xid.Number), cmp.Compare(a.GI, b.GI), cmp.Compare(a.CI, b.CI))
	})
	return critical
}

// EventDue reports whether the last Event about the Xid is at least pause ago.
func (o *Occurrence) EventDue(now time.Time, pause time.Duration) bool {
	return o.eventAt.IsZero() || now.Sub(o.eventAt) >= pause
}

// CountUnreported counts an Xid that no Event reports.
func (o *Occurrence) CountUnreported() { o.unreported++ }

// NoteEvent notes that an Event reports the Xid, and returns how many times no Event has reported it, and since when.
func (o *Occurrence) NoteEvent(now time.Time) (unreported int, since time.Time) {
	unreported, since = o.unreported, o.eventAt
	if since.IsZero() {
		since = o.first
	}
	o.eventAt, o.unreported = now, 0
	return unreported, since
}
