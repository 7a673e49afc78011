package api

import (
	"reflect"
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// Answer is the value of config.AnnotationPlan: the effect of a label, or the node's state, as the user has requested by
// config.AnnotationPreview.
type Answer struct {
	For      string    `json:"for"`         // the request
	At       time.Time `json:"at,omitzero"` // when the agent first said this: it updates the plan as long as the request stands
	Steps    []string  `json:"steps,omitempty"`
	More     int       `json:"more,omitempty"` // steps beyond those that are listed
	Pods     []string  `json:"pods,omitempty"` // pods that have to leave, each by namespace and name
	MorePods int       `json:"morePods,omitempty"`
	Reboot   bool      `json:"reboot,omitempty"` // the change needs a reboot of the node, or continues after one
	Runs     string    `json:"runs,omitempty"`   // when the change would begin
	// HeldUp is why the agent would not begin the change now, by the gates that it asks before it begins one.
	HeldUp   string        `json:"heldUp,omitempty"`
	Reason   config.Reason `json:"reason,omitempty"`   // of HeldUp or Refused, as in the node's condition
	Lost     []string      `json:"lost,omitempty"`     // what is lost for good with the pods that leave: "pod team/a, which no controller recreates"
	MoreLost int           `json:"moreLost,omitempty"` // how many losses there are beyond those that are listed
	Asked    []string      `json:"asked,omitempty"`    // pods that are asked behind the cordon: "slurm/slurmd-3: asked behind the cordon, up to 8h (drain.gradualFor)"
	Notes    []string      `json:"notes,omitempty"`    // what else a user should know: pods that find no device after the change, a cordon that stays
	Unsure   string        `json:"unsure,omitempty"`   // why it is not known whether the change ends: a GPU that it touches is not well, or pods may stay
	GPUs     []Recut       `json:"gpus,omitempty"`     // before and after the change; missing if the annotation has no room
	Offers   string        `json:"offers,omitempty"`   // what the node offers after it, as Status.Capacity; empty if that is not known
	Takes    Duration      `json:"takes,omitempty"`    // the longest of the node's last changes, or if there is none, the maintenance file's estimate
	Measured bool          `json:"measured,omitempty"` // Takes was measured on this node
	Patience Duration      `json:"patience,omitempty"` // how long the agent waits for the pods before it gives the change up; 0 if it does not
	Refused  string        `json:"refused,omitempty"`  // why the change is impossible, or the agent cannot plan it; the rest but Reason is empty then
	// Diagnosis is the answer to config.RequestDiagnosis.
	Diagnosis *Diagnosis `json:"diagnosis,omitempty"`
	// Uses are the answer to config.RequestTop, most memory first.
	Uses     []Use `json:"uses,omitempty"`
	MoreUses int   `json:"moreUses,omitempty"` // how many uses there are beyond those that are listed
}

// Recut are GPUs that are alike before a change and after it.
type Recut struct {
	GPUs   []int  `json:"gpus"` // by index
	Model  string `json:"model,omitempty"`
	Slices int    `json:"slices,omitempty"` // memory slices that instances may take; 0 if the GPUs cannot do MIG
	Before Layout `json:"before"`
	After  Layout `json:"after"`
	// AtReboot: the GPUs change at the node's next reboot, and the change goes on after it.
	AtReboot bool `json:"atReboot,omitempty"`
}

// Recuts are GPUs before and after a change, those that are alike together. AtReboot are those that wait for the node's next reboot.
func Recuts(before, after, atReboot []nvml.GPU) (out []Recut) {
	for i, g := range before {
		one := Recut{
			Model: g.Model, Slices: g.MemorySlices(), Before: layout(g), After: layout(after[i]),
			AtReboot: slices.ContainsFunc(atReboot, func(at nvml.GPU) bool { return at.UUID == g.UUID }),
		}
		same := slices.IndexFunc(out, func(other Recut) bool {
			other.GPUs = nil
			return reflect.DeepEqual(other, one)
		})
		if same < 0 {
			same, out = len(out), append(out, one)
		}
		out[same].GPUs = append(out[same].GPUs, g.Index)
	}
	return out
}

func layout(g nvml.GPU) Layout {
	out := Layout{MIG: g.Enabled, Lost: g.Lost}
	for _, p := range g.Geometry() {
		out.Instances = append(out.Instances, Place{Is: p.String(), At: p.Start, Size: p.Size})
	}
	return out
}

// Layout is how a GPU is cut.
type Layout struct {
	MIG       bool    `json:"mig"`
	Lost      bool    `json:"lost,omitempty"` // it has fallen off the bus: neither is known
	Instances []Place `json:"instances,omitempty"`
}

// Place is a GPU instance at its place.
type Place struct {
	Is   string `json:"is"`   // "3g.40gb@4"
	At   int    `json:"at"`   // its first memory slice
	Size int    `json:"size"` // memory slices
}

// Use is how much one pod uses of a GPU, or of one instance.
type Use struct {
	Namespace string    `json:"namespace"`
	Pod       string    `json:"pod"`
	GPU       int       `json:"gpu"` // index
	UUID      nvml.UUID `json:"uuid"`
	Instance  string    `json:"instance,omitempty"` // profile and place, as StatusInstance.Is; empty for a GPU without instances
	Pods      int       `json:"pods"`               // how many pods have the GPU or instance, this one included
	MemoryMiB int       `json:"memoryMiB"`          // memory of this pod's processes there
	UsedMiB   int       `json:"usedMiB"`            // memory of all processes there
	TotalMiB  int       `json:"totalMiB"`
	// Busy is how much of the last minutes the pod's processes computed there, in percent; nil if the agent cannot measure it, and
	// Unknown says why. That is not 0: such a pod may be as busy as any.
	Busy    *float64 `json:"busy,omitempty"`
	Unknown string   `json:"unknown,omitempty"`
	// Since is when the agent first saw that the pod has the GPU or instance; at the earliest, when the agent started.
	Since time.Time `json:"since,omitzero"`
}
