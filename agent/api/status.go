package api

import (
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Phase is what people see of the loop. It is derived from the first pending step, and never read back.
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

// Status is the annotation in which tools find what the condition says to people. Others can write it too, so nothing is decided by it:
// what the agent has learnt in earlier changes is in the host's record. Of the annotation it reads back Since alone, to go on telling it.
type Status struct {
	Desired  string        `json:"desired,omitempty"` // name of the config that is asked for
	Label    string        `json:"label,omitempty"`   // by which it is asked for
	Phase    Phase         `json:"phase"`
	Reason   config.Reason `json:"reason"`
	GPUs     []StatusGPU   `json:"gpus,omitempty"`
	Capacity string        `json:"capacity,omitempty"` // what kubelet gives out: "nvidia.com/gpu 24 = 8 x 3 time-slicing"
	Left     int           `json:"left,omitempty"`     // steps to what is asked for
	Since    time.Time     `json:"since,omitzero"`     // when Reason began, for what is asked for
	Blockers []string      `json:"blockers,omitempty"` // what is in the way, one by one
	// As the host's record has them.

	Failed  *Failure  `json:"failed,omitempty"`  // a wish that is not tried again until it is withdrawn
	NoReset *NoReset  `json:"noReset,omitempty"` // GPUs that are not reset here: their mode changes at a reboot
	Next    time.Time `json:"next,omitzero"`     // when the change begins that waits for its window
	Asked   *AskedFor `json:"asked,omitempty"`   // since when
	Proven  string    `json:"proven,omitempty"`  // the wish that the node was last seen to fulfil
	Cut     string    `json:"cut,omitempty"`     // boot in which it had MIG instances, then
	Took    []Took    `json:"took,omitempty"`    // the last changes, by which the next is estimated
	// As the watch of the GPUs' health has them.

	Boot    string `json:"boot,omitempty"`    // of the host
	Watched bool   `json:"watched,omitempty"` // the driver hands out its events
}

// AskedFor is since when a wish is asked for. The older one of two nodes goes first.
type AskedFor struct {
	Wish  string    `json:"wish"` // its fingerprint
	Since time.Time `json:"since"`
}

// StatusGPU is how one GPU is cut.
type StatusGPU struct {
	Index    int       `json:"index"`
	UUID     nvml.UUID `json:"uuid"`
	MIG      bool      `json:"mig"`
	Geometry string    `json:"geometry,omitempty"` // "1g.10gb@0 1g.10gb@1 3g.40gb@4"
	Slices   int       `json:"slices,omitempty"`   // memory slices that instances may take; 0 where MIG is not possible
	// Instances are those of Geometry with their numbers and sizes, in its order. Where there is no room for them, they are missing.
	Instances []StatusInstance `json:"instances,omitempty"`

	Health *GPUHealth `json:"health,omitempty"` // nil of one that is well
}

// StatusInstance is one GPU instance.
type StatusInstance struct {
	Is   string `json:"is"`   // profile and place, as in StatusGPU.Geometry: "3g.40gb@4"
	At   int    `json:"at"`   // its first memory slice
	Size int    `json:"size"` // memory slices
	ID   int    `json:"id"`   // the driver's number of it
}

// GPUHealth is what is wrong with a GPU, and what its driver has reported.
type GPUHealth struct {
	Reason    config.Reason `json:"reason,omitempty"`   // the worst; empty if nothing is wrong
	Severity  string        `json:"severity,omitempty"` // "critical", "degraded"
	Action    string        `json:"action,omitempty"`   // "ResetGPU", …
	Since     time.Time     `json:"since,omitzero"`
	Recovery  int           `json:"recovery,omitempty"`  // action that the driver recommends, by NVML's number
	Instances []string      `json:"instances,omitempty"` // that it is about: "1g.10gb@2"; none is the whole GPU
	Xids      []XidSeen     `json:"xids,omitempty"`
	Remap     *Remap        `json:"remap,omitempty"`
}

// XidSeen is an error number that the driver has reported of a GPU. How often is in the metrics.
type XidSeen struct {
	Number uint64    `json:"n"`
	First  time.Time `json:"first"`
	Last   time.Time `json:"last"` // to the minute
	GI     int       `json:"gi"`   // GPU instance and compute instance, -1 for the whole GPU
	CI     int       `json:"ci"`
}

// Remap is what is known of rows of memory, when they could last be read.
type Remap struct {
	Corrected   uint64 `json:"corrected"`
	Uncorrected uint64 `json:"uncorrected"`
	Pending     bool   `json:"pending,omitempty"`
	Failed      bool   `json:"failed,omitempty"`
}

// Failure is a change that could not be done. It is kept on the node so that a restarted agent does not disturb the
// node again for what has failed there before.
type Failure struct {
	Wish    string        `json:"wish"` // fingerprint of what was asked for; another wish is tried anew
	Reason  config.Reason `json:"reason"`
	Message string        `json:"message"`
	Later   bool          `json:"later,omitempty"` // it is put off: tried again when it may be
	// Cancelled: people have called it off, by lifting the cordon.
	Cancelled bool `json:"cancelled,omitempty"`
}

// Error is the message.
func (f *Failure) Error() string { return f.Message }

// DesiredSeparator stands in Status.Desired between the name of a MIG config and that of a config of the device plugin, where the node
// asks for both: "all-1g.10gb + slices". No label can have it.
const DesiredSeparator = " + "

// NoReset names the GPUs that the driver has refused to reset during one boot of the node.
type NoReset struct {
	Boot string      `json:"boot"`
	GPUs []nvml.UUID `json:"gpus"`
}

// Took is how long a change took, in seconds.
type Took struct {
	Whole int `json:"whole"` // from the fence on
	Rest  int `json:"rest"`  // from the first touch of a GPU on
}
