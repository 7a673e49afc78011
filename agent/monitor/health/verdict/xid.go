package verdict

import (
	"maps"
	"slices"

	"github.com/gpuslice/gpuslice/config"
)

// Class says who caused an Xid, and what it means for the GPU.
type Class string

// The classes.
const (
	// ClassApplication is a program's own mistake. It makes no GPU unusable.
	ClassApplication Class = "application"
	// ClassReset is an error that requires a reset of the GPU.
	ClassReset Class = "reset"
	// ClassReboot is an error that requires a reboot of the machine.
	ClassReboot Class = "reboot"
	// ClassHardware is an error of the hardware: check the mechanics, or ask NVIDIA's support.
	ClassHardware Class = "hardware"
	// ClassState is a change of the GPU's state, to be read from the GPU.
	ClassState Class = "state"
	// ClassInfo is a note.
	ClassInfo Class = "info"
	// ClassUnknown is an error without a bucket in NVIDIA's catalog, or newer than this table.
	ClassUnknown Class = "unknown"
)

// Xid is what is known of one of NVIDIA's error numbers.
type Xid struct {
	Number  uint64
	Meaning string
	Class   Class
	// Critical means that the condition reports the Xid on sight, until the state shows that it is over.
	Critical bool
	// Settled means that a driver with recovery actions recommends one soon after the Xid. If it recommends none, and all else reads well
	// for half a minute, the Xid is over.
	Settled bool
	Action  Action // the immediate action by NVIDIA's catalog
}

// channelsRemoved is the Xid that follows from others: the channels of a program that was stopped are removed.
const channelsRemoved = 45

// table is the part of NVIDIA's catalog for GPUs from Ampere on that is used here. docs.nvidia.com/deploy/xid-errors.
var table = catalog()

func catalog() map[uint64]Xid {
	out := map[uint64]Xid{}
	add := func(class Class, action Action, meaning string, numbers ...uint64) {
		for _, n := range numbers {
			out[n] = Xid{Number: n, Meaning: meaning, Class: class, Action: action}
		}
	}
	const app, reset, boot, hw, info = ClassApplication, ClassReset, ClassReboot, ClassHardware, ClassInfo
	add(app, ActionNone, "graphics engine exception", 13)
	add(app, ActionNone, "memory access that is not allowed (MMU fault)", 31)
	add(app, ActionNone, "video decoder exception", 68)
	add(app, ActionNone, "a channel was stopped", 43)
	add(app, ActionNone, "channels were removed", channelsRemoved)
	add(app, ActionNone, "bad command or timeout of a channel", 8, 11, 25, 32, 60, 69, 80)
	add(app, ActionNone, "copy, video or optical flow engine exception",
		39, 40, 41, 70, 71, 72, 75, 76, 77, 82, 83, 84, 85, 86, 88, 89, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 126, 127, 128, 129, 130, 131, 132, 133,
		134, 135, 139)
	add(info, ActionNone, "note of the driver", 37, 38, 44, 66, 67, 78, 92, 93, 106, 107, 121, 137, 141, 152, 153, 159, 160, 161)
	add(reset, ActionResetGPU, "GPU stopped processing", 46)
	add(reset, ActionResetGPU, "PMU halted", 62)
	add(reset, ActionResetGPU, "security fault", 110)
	add(reset, ActionResetGPU, "memory error that escaped ECC", 140)
	add(reset, ActionResetGPU, "GPU could not be initialised", 143)
	add(reset, ActionResetGPU, "fatal timeout", 158)
	add(reset, ActionResetGPU, "GSP timeout", 119)
	add(reset, ActionResetGPU, "GSP error", 120)
	add(reset, ActionResetGPU, "link training failed", 136)
	add(reset, ActionResetGPU, "NVLink software error", 155)
	add(reset, ActionResetGPU, "NVLink resource retired", 156)
	add(reset, ActionResetGPU, "uncorrectable memory error", 48)
	add(info, ActionNone, "uncorrectable error of DRAM, in detail", 171)
	add(info, ActionNone, "uncorrectable error of SRAM, in detail", 172)
	add(reset, ActionResetGPU, "uncontained memory error", 95)
	add(reset, ActionResetGPU, "context switch timeout", 109)
	add(app, ActionNone, "contained memory error", 94)
	add(info, ActionNone, "a row of memory is to be replaced, or a page was retired", 63)
	add(hw, ActionCheckMechanicals, "power cable", 54)
	add(hw, ActionContactSupport, "a row of memory cannot be replaced", 64)
	add(hw, ActionRunDiagnostics, "NVLink error", 74)
	add(boot, ActionRebootNode, "GPU has fallen off the bus", 79)
	add(boot, ActionRebootNode, "key rotation", 151)
	add(hw, ActionContactSupport, "NVENC3 error", 142)
	add(hw, ActionContactSupport, "nothing is left to retire", 157)
	add(ClassUnknown, ActionNone, "NVLink 5 error", 144, 145, 146, 147, 148, 149, 150)
	add(ClassState, ActionNone, "recovery action changed", 154)
	add(ClassUnknown, ActionNone, "not in a bucket of NVIDIA's catalog", 162, 163, 164, 165, 166, 167, 168, 169, 170, 173, 175, 176, 87, 122, 123, 124, 125, 999)
	for _, n := range []uint64{46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158} {
		x := out[n]
		x.Critical = true
		out[n] = x
	}
	for _, n := range []uint64{48, 95, 109, 119, 120, 143} {
		x := out[n]
		x.Settled = true
		out[n] = x
	}
	return out
}

// criticalBeforeAmpere are the critical Xids of GPUs before Ampere, which have another catalog: only those that both catalogs call critical.
var criticalBeforeAmpere = []uint64{48, 62, 64, 79}

// hangs are the Xids that make a driver silent for long.
var hangs = []uint64{79, 119, 120}

// InTable reports whether the table has the number.
func InTable(number uint64) bool {
	_, has := table[number]
	return has
}

// Xids returns the table, in order of number.
func Xids() []Xid {
	return slices.SortedFunc(maps.Values(table), func(a, b Xid) int { return int(a.Number) - int(b.Number) }) //nolint:gosec // three digits
}

// xids is the table as the settings have it.
type xids struct{ settings config.Health }

// of returns what is known about the number; old means a GPU from before Ampere.
func (x xids) of(n uint64, old bool) Xid {
	xid, known := table[n]
	if !known {
		xid = Xid{Number: n, Meaning: "not in NVIDIA's catalog", Class: ClassUnknown}
	}
	if old && xid.Critical && !slices.Contains(criticalBeforeAmpere, n) {
		xid.Critical = false
	}
	switch number := int(n); { //nolint:gosec // the settings have three digits at most
	case slices.Contains(x.settings.ApplicationXids, number):
		xid.Class, xid.Critical, xid.Action = ClassApplication, false, ActionNone
	case slices.Contains(x.settings.CriticalXids, number) && !xid.Critical:
		xid.Critical = true
		if xid.Class == ClassApplication || xid.Class == ClassInfo {
			xid.Class = ClassUnknown
		}
	}
	return xid
}
