package nvml

import (
	"context"
	"fmt"
)

// HealthReader reads the health of the node's GPUs. It changes nothing, and works in parallel to a Driver on the same GPUs: a call that hangs here
// holds up none there.
type HealthReader interface {
	// Health reports every GPU that the driver counts, in PCI order, those that are lost too. It reads values that take more than some
	// microseconds, or that the driver may not give at all, only if thorough.
	//
	// It returns when ctx ends, at the latest. It then abandons the call into the driver, and Health is ErrUnresponsive until that call returns. With
	// no driver loaded it is ErrNoDriver.
	Health(ctx context.Context, thorough bool) ([]Health, error)
	// Events delivers news until ctx ends, then closes the channel.
	Events(ctx context.Context) (<-chan Event, error)
}

// Bus lists the GPUs that the machine has, whether a driver answers for them or not.
type Bus interface {
	// GPUs lists NVIDIA's GPUs on the PCI bus in order of address.
	GPUs(ctx context.Context) ([]BusGPU, error)
}

// BusGPU is a GPU as the PCI bus shows it.
type BusGPU struct {
	PCI    string // address, "0000:17:00.0"
	Driver string // kernel driver that has it: "nvidia", or "vfio-pci" for one that is lent to a virtual machine; empty for none
}

// Reading is a value that a caller has asked the driver for. A value that the driver does not report is not known: callers must not take
// it for a zero.
type Reading[T any] struct {
	Value T
	Known bool
	Code  string // the library's error, if it is not known: "ERROR_NOT_SUPPORTED"; empty if no caller has asked
}

// Answered is a value that the driver has reported.
func Answered[T any](v T) Reading[T] { return Reading[T]{Value: v, Known: true} }

// IsSet reports whether a flag is known, and set.
func IsSet(flag Reading[bool]) bool { return flag.Known && flag.Value }

// Health has the values of a GPU's health report.
type Health struct {
	UUID  UUID // empty of one that has never answered
	Index int
	PCI   string // bus address, "0000:17:00.0"; empty of one that has never answered

	// Lost means that the GPU has fallen off the bus: nothing else is known.
	Lost bool

	// Action is the driver's recommendation. Drivers before R565 do not report it, but some have NeedsReset and NeedsDrain.
	Action     Reading[RecoveryAction]
	NeedsReset Reading[bool]
	NeedsDrain Reading[bool] // and a reset then

	ECC   ECC
	Rows  Rows
	Pages Pages

	ECCMode, MIGMode Reading[Mode]

	// From here on only a thorough reading has them.

	Banks         Reading[Banks]
	RepairPending Reading[bool] // a channel or a TPC is repaired at the next reset
	Unrepairable  Reading[bool] // there is no repair left
	SRAMThreshold Reading[bool] // SRAM has had more errors than NVIDIA lets pass; reported to root alone
	Fabric        Reading[Fabric]
}

// ECC counts memory errors. Volatile counts begin again with each load of the driver and each reset; aggregate ones never do.
type ECC struct {
	CorrectedVolatile, UncorrectedVolatile   Reading[uint64]
	CorrectedAggregate, UncorrectedAggregate Reading[uint64]
}

// Rows are rows of memory that are replaced by spare ones (Ampere and later). With MIG instances the driver may not report them.
type Rows struct {
	Corrected, Uncorrected Reading[uint64] // replaced so far, by the kind of error that was the cause
	Pending                Reading[bool]   // one more is at the next reset
	Failed                 Reading[bool]   // one could not be
}

// Pages are pages of memory that the driver uses no more (Turing and earlier).
type Pages struct {
	Corrected, Uncorrected Reading[uint64] // so far, by the kind of error that was the cause
	Pending                Reading[bool]   // some are dropped at the next load of the driver
}

// Banks counts banks of memory by how many spare rows they have left.
type Banks struct{ Max, High, Partial, Low, None int }

// Mode is one that changes at a reset: its present value, and that after the next reset.
type Mode struct{ Current, Pending bool }

// Fabric is the state of a GPU in its NVSwitch fabric.
type Fabric struct {
	State   FabricState
	Failed  bool // it has joined, and that failed
	Healthy bool // the driver reports no fault of it
}

// FabricState is how far a GPU has come in joining its fabric. The values are NVML's.
type FabricState int

// The states.
const (
	FabricNone       FabricState = iota // there is none
	FabricNotStarted                    // nvidia-fabricmanager has not begun
	FabricInProgress
	FabricCompleted
)

// RecoveryAction is the driver's recommendation for a GPU. The values are NVML's; a newer driver may give others than these.
type RecoveryAction int

// The actions.
const (
	RecoverNothing RecoveryAction = iota
	RecoverByReset
	RecoverByReboot        // of the operating system
	RecoverByDrainingP2P   // let work end, start none
	RecoverByDrainAndReset // the same, and a reset then
	RecoverIMEX            // restart the multi-node NVLink domain; R595
	RecoverByBusReset      // of the PCIe bus; R615
	RecoverByMachineReboot // of the machine and not only its operating system; R615
	knownActions
)

// String says it in NVIDIA's words.
func (a RecoveryAction) String() string {
	names := [knownActions]string{
		"none", "GPU reset", "node reboot", "drain P2P", "drain and reset", "recover IMEX domain", "bus reset", "system reboot",
	}
	if a >= 0 && a < knownActions {
		return names[a]
	}
	return fmt.Sprintf("action %d, which this agent does not know", int(a))
}

// Known reports whether it is one of the actions above.
func (a RecoveryAction) Known() bool { return a >= 0 && a < knownActions }
