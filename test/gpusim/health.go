package gpusim

import (
	"fmt"
	"strconv"
	"strings"
)

// Health is what a GPU reports about its own state. The zero value is a GPU that is well.
type Health struct {
	Lost   bool `json:"lost,omitempty"`   // fallen off the bus: nearly every call answers GPUIsLost
	Absent bool `json:"absent,omitempty"` // the driver did not find it when it was loaded: it is not counted

	// Dead GPUs do not come back with a reboot: the driver does not find them then.
	Dead bool `json:"dead,omitempty"`

	RecoveryAction int `json:"recoveryAction,omitempty"` // NVML_GPU_RECOVERY_ACTION_…; 0 none, 1 reset, 2 reboot, 4 drain and reset

	// UncorrectableECC counts since ever, and Volatile since the driver was loaded or the GPU reset.
	UncorrectableECC uint64   `json:"uncorrectableECC,omitempty"`
	CorrectableECC   uint64   `json:"correctableECC,omitempty"`
	Volatile         Volatile `json:"volatile,omitzero"`

	RemappedRows            int  `json:"remappedRows,omitempty"`            // because of uncorrectable errors
	RemappedRowsCorrectable int  `json:"remappedRowsCorrectable,omitempty"` // because of correctable ones
	RemapPending            bool `json:"remapPending,omitempty"`
	RemapFailed             bool `json:"remapFailed,omitempty"`
	SparelessBanks          int  `json:"sparelessBanks,omitempty"` // banks of memory without a spare row

	RepairPending   bool `json:"repairPending,omitempty"` // of a channel
	Unrepairable    bool `json:"unrepairable,omitempty"`
	SRAMThreshold   bool `json:"sramThreshold,omitempty"`
	RetiredPages    int  `json:"retiredPages,omitempty"` // Turing and earlier
	RetiringPages   bool `json:"retiringPages,omitempty"`
	ECCModeChanging bool `json:"eccModeChanging,omitempty"` // it is turned off at the next reset
	ECCOff          bool `json:"eccOff,omitempty"`

	Fabric FabricHealth `json:"fabric,omitzero"`
}

// Volatile counts memory errors since the driver was loaded or the GPU reset.
type Volatile struct {
	Correctable   uint64 `json:"correctable,omitempty"`
	Uncorrectable uint64 `json:"uncorrectable,omitempty"`
}

// FabricHealth is how a GPU stands to its NVSwitch fabric, in NVML's numbers.
type FabricHealth struct {
	State  int    `json:"state,omitempty"`  // 0 none, 1 not started, 2 in progress, 3 completed
	Status Return `json:"status,omitempty"` // of the probe, if it is completed
	Mask   uint32 `json:"mask,omitempty"`   // NVML_GPU_FABRIC_HEALTH_MASK_…
}

// NVML_GPU_RECOVERY_ACTION_…
const (
	recoverByReset         = 1
	recoverByReboot        = 2
	recoverByDrainingP2P   = 3
	recoverByDrainAndReset = 4
)

// reset is the health after a reset, which completes all pending changes.
func (h Health) reset() Health {
	if h.RemapPending {
		h.RemapPending = false
		h.RemappedRows++
	}
	h.RepairPending, h.Volatile = false, Volatile{}
	if h.RetiringPages {
		h.RetiringPages = false
		h.RetiredPages++
	}
	if h.ECCModeChanging {
		h.ECCModeChanging, h.ECCOff = false, !h.ECCOff
	}
	switch h.RecoveryAction {
	case recoverByReset, recoverByDrainingP2P, recoverByDrainAndReset:
		h.RecoveryAction = 0
	}
	return h
}

// reloaded is the health after the driver was loaded again, as after a reboot: a lost GPU is found again, unless it is dead.
func (h Health) reloaded() Health {
	h = h.reset()
	h.RecoveryAction, h.Lost, h.Absent = 0, false, h.Dead
	return h
}

func (h Health) describe() string {
	var out string
	for _, f := range []struct {
		is   bool
		name string
	}{
		{h.Lost, "lost"},
		{h.Absent, "absent"},
		{h.RecoveryAction != 0, fmt.Sprintf("recovery-action=%d", h.RecoveryAction)},
		{h.RemapPending, "remap-pending"},
		{h.RemapFailed, "remap-failed"},
		{h.RepairPending, "repair-pending"},
		{h.Unrepairable, "unrepairable"},
		{h.SRAMThreshold, "sram-threshold"},
		{h.RetiringPages, "retiring-pages"},
		{h.ECCModeChanging, "ecc-mode-changing"},
		{h.ECCOff, "ecc=off"},
		{h.Fabric.State == 3 && h.Fabric.Status != Success, "fabric-failed"},
	} {
		if f.is {
			out += " " + f.name
		}
	}
	return out
}

// Generations of the driver, by the version that brought something.
const (
	withGIOfEvents   = 450
	withGPM          = 520
	withSRAMStatus   = 535
	withMemoryEvents = 560
	withResetStatus  = 550
	withAction       = 565
	withRepairStatus = 580
	withUnrepairable = 590
)

// generation is the driver's first number: 580 for 580.159.04.
func (s *state) generation() int {
	first, _, _ := strings.Cut(s.Driver, ".")
	n, err := strconv.Atoi(first)
	if err != nil {
		return 0
	}
	return n
}

// eventTypes are the bits that the GPU's driver knows.
func (s *state) eventTypes(g *gpu) uint64 {
	const sinceMemory, sinceAction = EventStorm | EventRetired | EventRetireFailed | EventPoison | EventFatalPoison, EventUnavailable | EventAction
	types := g.model().EventTypes
	if s.generation() < withMemoryEvents {
		types &^= sinceMemory
	}
	if s.generation() < withAction {
		types &^= sinceAction
	}
	return types
}

// EventTypes are the bits that the GPU's driver knows. An unknown one keeps all others from being registered.
func (l *Library) EventTypes(d Device) (types uint64, r Return) {
	r = l.onDeviceOf(GetStatic, d, func(s *state, g *gpu, _ *instance, _ *compute) Return {
		types = s.eventTypes(g)
		return Success
	})
	return types, r
}

// remapsRows reports whether the GPU has spare rows: Ampere and later. Earlier ones retire pages.
func (g *gpu) remapsRows() bool { return g.model().Arch >= ampere }

// Health of a GPU, as far as no function says otherwise; a lost one answers GPUIsLost.
func (l *Library) Health(d Device) (h Health, r Return) {
	return l.healthIf(d, func(*state, *gpu) Return { return Success })
}

// RowRemapping of a GPU: NotSupported on those without spare rows, and while there are instances.
func (l *Library) RowRemapping(d Device) (h Health, r Return) {
	return l.healthIf(d, func(_ *state, g *gpu) Return { return g.reportsRows() })
}

func (g *gpu) reportsRows() Return {
	if !g.remapsRows() || len(g.Instances) > 0 {
		return NotSupported
	}
	return Success
}

// RemapBanks is RowRemapping as a histogram. It is not known whether it exists with instances, so here it does not.
func (l *Library) RemapBanks(d Device) (h Health, r Return) { return l.RowRemapping(d) }

// SRAMStatus of a GPU: FunctionNotFound before driver 535, NotSupported before Ampere.
func (l *Library) SRAMStatus(d Device) (h Health, r Return) {
	return l.healthIf(d, func(s *state, g *gpu) Return { return s.has(g, withSRAMStatus, ampere) })
}

// RepairStatus of a GPU: FunctionNotFound before driver 580, NotSupported before Ampere.
func (l *Library) RepairStatus(d Device) (h Health, r Return) {
	return l.healthIf(d, func(s *state, g *gpu) Return { return s.has(g, withRepairStatus, ampere) })
}

// UnrepairableMemory of a GPU: FunctionNotFound before driver 590, NotSupported before Hopper.
func (l *Library) UnrepairableMemory(d Device) (h Health, r Return) {
	return l.healthIf(d, func(s *state, g *gpu) Return { return s.has(g, withUnrepairable, hopper) })
}

func (s *state) has(g *gpu, since int, arch uint32) Return {
	switch {
	case s.generation() < since:
		return FunctionNotFound
	case g.model().Arch < arch:
		return NotSupported
	}
	return Success
}

func (l *Library) healthIf(d Device, reports func(*state, *gpu) Return) (h Health, r Return) {
	r = l.onDeviceOf(GetHealth, d, func(s *state, g *gpu, _ *instance, c *compute) Return {
		if c != nil {
			return NotSupported
		}
		h = g.Health
		return reports(s, g)
	})
	return h, r
}

// Field is a value of nvmlDeviceGetFieldValues, with its own result.
type Field struct {
	Wide   bool // it is an unsigned long long, and else an unsigned int
	Value  uint64
	Return Return
}

// Fields are the values of NVML_FI_… ids. Each has its result: NotSupported if the GPU does not have it,
// InvalidArgument if the driver does not know it.
func (l *Library) Fields(d Device, ids []uint32) (out []Field, r Return) {
	r = l.onDeviceOf(GetFieldValues, d, func(s *state, g *gpu, _ *instance, c *compute) Return {
		for _, id := range ids {
			out = append(out, s.field(g, id, c != nil))
		}
		return Success
	})
	return out, r
}

// fields are what GPUs report by NVML_FI_… ids.
var fields = map[uint32]struct {
	since   int  // driver
	wide    bool // it is an unsigned long long, as measured
	reports func(*gpu) Return
	value   func(Health) uint64
}{
	3:   {0, true, always, func(h Health) uint64 { return h.Volatile.Correctable }},
	4:   {0, true, always, func(h Health) uint64 { return h.Volatile.Uncorrectable }},
	5:   {0, true, always, func(h Health) uint64 { return h.CorrectableECC }},
	6:   {0, true, always, func(h Health) uint64 { return h.UncorrectableECC }},
	29:  {0, true, (*gpu).reportsPages, func(Health) uint64 { return 0 }},
	30:  {0, true, (*gpu).reportsPages, func(h Health) uint64 { return uint64(h.RetiredPages) }},
	31:  {0, true, (*gpu).reportsPages, func(h Health) uint64 { return number(h.RetiringPages) }},
	142: {0, true, (*gpu).reportsRows, func(h Health) uint64 { return uint64(h.RemappedRowsCorrectable) }},
	143: {0, true, (*gpu).reportsRows, func(h Health) uint64 { return uint64(h.RemappedRows) }},
	144: {0, true, (*gpu).reportsRows, func(h Health) uint64 { return number(h.RemapPending) }},
	145: {0, true, (*gpu).reportsRows, func(h Health) uint64 { return number(h.RemapFailed) }},
	226: {withResetStatus, false, always, func(h Health) uint64 { return number(h.RecoveryAction == recoverByReset) }},
	227: {withResetStatus, false, always, func(h Health) uint64 { return number(h.RecoveryAction == recoverByDrainAndReset) }},
	230: {withAction, false, always, func(h Health) uint64 { return uint64(h.RecoveryAction) }},
	231: {0, false, never, nil},
	232: {0, false, never, nil},
	301: {withRepairStatus, true, (*gpu).reportsRows, func(Health) uint64 { return 0 }},
	302: {withRepairStatus, true, (*gpu).reportsRows, func(Health) uint64 { return 0 }},
}

func always(*gpu) Return { return Success }

func never(*gpu) Return { return NotSupported }

// reportsPages: GPUs with spare rows retire no pages.
func (g *gpu) reportsPages() Return {
	if g.remapsRows() {
		return NotSupported
	}
	return Success
}

func number(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}

func (s *state) field(g *gpu, id uint32, mig bool) Field {
	f, known := fields[id]
	switch {
	case mig:
		return Field{Return: NotSupported}
	case !known || s.generation() < f.since:
		return Field{Return: InvalidArgument}
	}
	out := Field{Wide: f.wide, Return: f.reports(g)}
	if out.Return == Success {
		out.Value = f.value(g.Health)
	}
	return out
}

// Xid reports an error of the driver about a GPU to all who listen.
func (n *Node) Xid(gpuIndex int, xid uint64) error { return n.XidOn(gpuIndex, NoInstance, xid) }

// XidOn is Xid about the GPU instance that stands at a place, or NoInstance.
func (n *Node) XidOn(gpuIndex, start int, xid uint64) error {
	return n.onGPU("reporting an event", gpuIndex, func(s *state, g *gpu) error {
		at, err := g.instanceAt(start)
		if err != nil {
			return err
		}
		s.emit(gpuIndex, EventXid, xid, at)
		return nil
	})
}

// instanceAt finds what stands at a place; nil for NoInstance.
func (g *gpu) instanceAt(start int) (*instance, error) {
	if start == NoInstance {
		return nil, nil
	}
	for _, i := range g.Instances {
		if i.Start == start {
			return i, nil
		}
	}
	return nil, fmt.Errorf("no instance stands at %d", start)
}

// ECC counts an uncorrectable memory error of a GPU and reports it to all who listen.
func (n *Node) ECC(gpuIndex int) error {
	return n.onGPU("reporting an event", gpuIndex, func(s *state, g *gpu) error {
		g.Health.UncorrectableECC++
		g.Health.Volatile.Uncorrectable++
		s.emit(gpuIndex, EventDoubleBitECC, 0, nil)
		return nil
	})
}

// SetHealth decides what a GPU reports about itself.
func (n *Node) SetHealth(gpuIndex int, h Health) error {
	return n.onGPU("setting health", gpuIndex, func(_ *state, g *gpu) error {
		g.Health = h
		return nil
	})
}

func (n *Node) onGPU(doing string, gpuIndex int, change func(*state, *gpu) error) error {
	return n.update(doing, func(s *state) error {
		if gpuIndex < 0 || gpuIndex >= len(s.GPUs) {
			return noSuchGPU(gpuIndex, s)
		}
		return change(s, s.GPUs[gpuIndex])
	})
}

// banksOfMemory is how many banks a GPU has, as measured on an H200.
const banksOfMemory = 3072

// FullBanks counts those with all their spare rows.
func (h Health) FullBanks() int { return banksOfMemory - h.SparelessBanks }

// ECCMode is the mode now and after the next reset.
func (l *Library) ECCMode(d Device) (current, pending bool, r Return) {
	h, r := l.Health(d)
	return !h.ECCOff, h.ECCOff == h.ECCModeChanging, r
}
