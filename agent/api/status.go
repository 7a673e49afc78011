package api

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Phase is what users see of the loop. The agent derives it from the first pending step, and never reads it back.
type Phase string

// The phases.
const (
	PhaseIdle        Phase = "Idle"
	PhaseWaiting     Phase = "Waiting"
	PhaseDraining    Phase = "Draining"
	PhaseApplying    Phase = "Applying"
	PhaseVerifying   Phase = "Verifying"
	PhaseRollingBack Phase = "RollingBack"
	PhaseStalled     Phase = "Stalled"
)

// Owner is who advertises the GPUs of a node.
type Owner string

// The owners.
const (
	OwnerNone        Owner = ""             // no one, as far as the agent sees
	OwnerPlugin      Owner = "plugin"       // a device plugin
	OwnerDRAStatic   Owner = "DRA static"   // NVIDIA's DRA driver, with the layout of when it starts
	OwnerDRADynamic  Owner = "DRA dynamic"  // NVIDIA's DRA driver, which cuts them itself (DynamicMIG)
	OwnerDRAStarting Owner = "DRA starting" // NVIDIA's DRA driver is on the node and advertises nothing yet, or no longer does
	OwnerBoth        Owner = "both"         // several programs, or a DRA driver other than NVIDIA's
)

// Status is the annotation that has the condition in a form for tools. Other programs can write it too, so the agent writes it, and never
// reads it: what it has learnt in earlier changes is in the host's record.
type Status struct {
	Desired  string        `json:"desired,omitempty"` // name of the desired config
	Label    string        `json:"label,omitempty"`   // the label that requests it
	Phase    Phase         `json:"phase"`
	Reason   config.Reason `json:"reason"`
	GPUs     []StatusGPU   `json:"gpus,omitempty"`
	Capacity string        `json:"capacity,omitempty"` // what kubelet advertises: "nvidia.com/gpu 24 = 8 x 3 time-slicing"
	Owner    Owner         `json:"owner,omitempty"`    // who advertises the GPUs; empty if a device plugin does, or nothing
	Left     int           `json:"left,omitempty"`     // steps that are left to the desired config
	Since    time.Time     `json:"since,omitzero"`     // when Reason began, for the desired config
	Blockers []string      `json:"blockers,omitempty"` // what is in the way, one by one
	// ByDefault: no label requests the config of the device plugin in Desired, but the settings do.
	ByDefault bool `json:"byDefault,omitempty"`
	// Heartbeat is the longest time between two writes of an agent that has nothing new to report, if it is not
	// config.DefaultNodeHeartbeat.
	Heartbeat Duration  `json:"heartbeat,omitempty"`
	Failed    *Failure  `json:"failed,omitempty"` // a change that the agent does not try again until a user has withdrawn it
	Asked     *AskedFor `json:"asked,omitempty"`  // since when a label requests the desired config
	Next      time.Time `json:"next,omitzero"`    // when the change begins that waits for its window
	Until     time.Time `json:"until,omitzero"`   // when the agent stops to wait; zero if it waits without a deadline
	Then      string    `json:"then,omitempty"`   // what it does then: "the change is given up and undone"

	// From the watch of the GPUs' health.

	Boot    string `json:"boot,omitempty"`    // of the host
	Watched bool   `json:"watched,omitempty"` // the agent gets the driver's events
	// From the check of the rights of the agent's account.

	PodAccess config.PodAccess `json:"podAccess,omitempty"` // what confines the agent to the pods of its node; empty if not known

	// FullMemory are the UUIDs of shared GPUs, or of the first MIG devices of shared instances, with nearly full memory.
	FullMemory []string `json:"fullMemory,omitempty"`

	// StaleResources are resources of former configs, which kubelet keeps on the node at 0. They are there once the node is as desired.
	StaleResources []string `json:"staleResources,omitempty"`

	// Models are the kinds of GPUs, each once. GPUs that are lost are in none, and neither are vGPUs.
	Models []Model `json:"models,omitempty"`
	// Held are the pods that have GPUs or parts of them; nil if the annotation has no room for them.
	Held []Held `json:"held,omitzero"`
}

// Model is one kind of GPU, with the instances that the driver offers on it; a GPU that cannot be cut has none.
type Model struct {
	Name     string    `json:"name"` // "NVIDIA H100 80GB HBM3"
	GPUs     []int     `json:"gpus"` // by their index on the node
	Profiles []Profile `json:"profiles"`
}

// Profile is one kind of GPU instance of a model.
type Profile struct {
	Name    string       `json:"name"`   // "1g.10gb+me"
	Slices  int          `json:"slices"` // compute slices
	Size    int          `json:"size"`   // memory slices
	At      []int        `json:"at"`     // first memory slices that an instance may have
	Max     int          `json:"max"`    // instances of it on an empty GPU
	Engines nvml.Engines `json:"engines,omitzero"`
}

// Held is a pod that has GPUs or parts of them. It is named by its UID, which says nothing to those who may not list pods.
type Held struct {
	Pod types.UID `json:"pod"`
	// On are the GPUs that it has as a whole, "3", and the instances, "3/4": by the GPU's index and the first memory slice. It is empty if the agent does not
	// know them: the pod may have any.
	On []string `json:"on,omitempty"`
}

// PhaseBeside returns the phase of a node for the reason in its condition. A pass that cannot see all of the node writes the condition alone,
// so the status keeps the phase of an earlier pass. The agent then waits until it can see the node, or stalls over something unreadable.
func (s Status) PhaseBeside(reason config.Reason) Phase {
	switch {
	case s.Phase == "" || s.Reason == reason:
		return s.Phase
	case reason == config.ReasonJournalUnreadable:
		return PhaseStalled
	case slices.Contains([]config.Reason{
		config.ReasonDriverNotLoaded, config.ReasonDriverUnresponsive, config.ReasonRetrying, config.ReasonHostRecordUnavailable,
	}, reason):
		return PhaseWaiting
	default: // the status is about to follow the condition
		return s.Phase
	}
}

// AskedFor says since when a label requests a config. In a pool, the node with the oldest request goes first.
type AskedFor struct {
	Fingerprint string    `json:"fingerprint"` // the config's fingerprint; the annotation gpuslice.io/force may name the change by it
	Since       time.Time `json:"since"`
}

// StatusGPU is the mode and the instances of one GPU.
type StatusGPU struct {
	Index    int       `json:"index"`
	UUID     nvml.UUID `json:"uuid"`
	MIG      bool      `json:"mig"`
	Geometry string    `json:"geometry,omitempty"` // "1g.10gb@0 1g.10gb@1 3g.40gb@4"
	Slices   int       `json:"slices,omitempty"`   // memory slices that instances may take; 0 if the GPU cannot do MIG
	// Instances are those of Geometry with their numbers and sizes, in its order. They are missing if the annotation has no room.
	Instances []StatusInstance `json:"instances,omitempty"`

	// Fits is the largest profile that one more instance can have, or FitsNone. Only a diagnosis has it, of GPUs in MIG mode that NVIDIA's DRA driver cuts
	// itself.
	Fits string `json:"fits,omitempty"`

	Health *GPUHealth `json:"health,omitempty"` // nil if the GPU is well
	// Lost: the GPU has fallen off the bus, so that neither its mode nor its instances are known.
	Lost bool `json:"lost,omitempty"`
	// Missing: the driver does not report the GPU, so that nothing else is known of it. Index is the last, -1 if the agent has never seen it;
	// then UUID is empty, too.
	Missing bool   `json:"missing,omitempty"`
	PCI     string `json:"pci,omitempty"` // address on the PCI bus of one that is missing
}

// FitsNone is StatusGPU.Fits of a GPU that has no place for any instance.
const FitsNone = "none"

// StatusInstance is one GPU instance.
type StatusInstance struct {
	Is   string `json:"is"`   // profile and place, as in StatusGPU.Geometry: "3g.40gb@4"
	At   int    `json:"at"`   // its first memory slice
	Size int    `json:"size"` // memory slices
	ID   int    `json:"id"`   // the driver's number of the instance
	// Left: no claim has it, although NVIDIA's DRA driver makes the instances for claims. Only a diagnosis says so, if all claims are known.
	Left bool `json:"left,omitempty"`
}

// GPUHealth is what is wrong with a GPU, and what its driver has reported.
type GPUHealth struct {
	Reason    config.Reason `json:"reason,omitempty"`   // the worst finding; empty if nothing is wrong
	Severity  string        `json:"severity,omitempty"` // "critical", "degraded"
	Action    string        `json:"action,omitempty"`   // "ResetGPU", …
	Since     time.Time     `json:"since,omitzero"`
	Recovery  int           `json:"recovery,omitempty"`  // action that the driver recommends, by NVML's number
	Instances []string      `json:"instances,omitempty"` // instances that Reason is about: "1g.10gb@2"; none is the whole GPU
	Xids      []XidSeen     `json:"xids,omitempty"`
	Remap     *Remap        `json:"remap,omitempty"`
}

// XidSeen is an error number that the driver has reported of a GPU. The metrics count how often.
type XidSeen struct {
	Number uint64    `json:"n"`
	First  time.Time `json:"first"`
	Last   time.Time `json:"last"` // to the minute, and not before First
	GI     int       `json:"gi"`   // GPU instance and compute instance, -1 for the whole GPU
	CI     int       `json:"ci"`
}

// Remap is the state of the GPU's memory rows, when the agent could last read it.
type Remap struct {
	Corrected   uint64 `json:"corrected"`
	Uncorrected uint64 `json:"uncorrected"`
	Pending     bool   `json:"pending,omitempty"`
	Failed      bool   `json:"failed,omitempty"`
}

// Failure is a change that has failed. The agent keeps it on the node, so that after a restart it does not disturb the
// node again for a change that has failed there before.
type Failure struct {
	Fingerprint string        `json:"fingerprint"` // fingerprint of the desired config; the agent tries another one again
	Reason      config.Reason `json:"reason"`
	Message     string        `json:"message"`
	Later       bool          `json:"later,omitempty"` // the change is postponed: the agent begins it again when it may
	// Cancelled: a user has cancelled the change, by lifting the cordon.
	Cancelled bool `json:"cancelled,omitempty"`
}

// Error is the message.
func (f *Failure) Error() string { return f.Message }

// DesiredSeparator separates, in Status.Desired, the names of a MIG config and of a config of the device plugin, if the node requests both:
// "all-1g.10gb + slices". No value of a label can contain it.
const DesiredSeparator = " + "
