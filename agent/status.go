package agent

import (
	"encoding/json"
	"fmt"
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
	NoReset *noReset  `json:"noReset,omitempty"` // GPUs that are not reset here: their mode changes at a reboot
	Next    time.Time `json:"next,omitzero"`     // when the change begins that waits for its window
	Asked   *askedFor `json:"asked,omitempty"`   // since when
	Proven  string    `json:"proven,omitempty"`  // the wish that the node was last seen to fulfil
	Cut     string    `json:"cut,omitempty"`     // boot in which it had MIG instances, then
	Took    []took    `json:"took,omitempty"`    // the last changes, by which the next is estimated
}

// askedFor is since when a wish is asked for. The older one of two nodes goes first.
type askedFor struct {
	Wish  string    `json:"wish"` // its fingerprint
	Since time.Time `json:"since"`
}

// StatusGPU is how one GPU is cut.
type StatusGPU struct {
	Index    int       `json:"index"`
	UUID     nvml.UUID `json:"uuid"`
	MIG      bool      `json:"mig"`
	Geometry string    `json:"geometry,omitempty"` // "1g.10gb@0 1g.10gb@1 3g.40gb@4"
}

func statusGPUs(gpus []nvml.GPU) []StatusGPU {
	var out []StatusGPU
	for _, gpu := range gpus {
		s := StatusGPU{Index: gpu.Index, UUID: gpu.UUID, MIG: gpu.Enabled}
		if geometry := gpu.Geometry(); len(geometry) > 0 {
			s.Geometry = geometry.String()
		}
		out = append(out, s)
	}
	return out
}

// parseStatus reads our own last words, or those of anybody else. An unreadable one is as good as none.
func parseStatus(annotation string) Status {
	var s Status
	if err := json.Unmarshal([]byte(annotation), &s); err != nil {
		return Status{}
	}
	return s
}

func (s Status) encode() (string, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("encoding the status: %w", err)
	}
	return string(b), nil
}

// metadataPatch is a merge patch that sets labels and annotations, takes away those that are nil, and leaves all
// others alone.
func metadataPatch(labels, annotations map[string]*string) ([]byte, error) {
	metadata := map[string]any{}
	if len(labels) > 0 {
		metadata["labels"] = labels
	}
	if len(annotations) > 0 {
		metadata["annotations"] = annotations
	}
	return json.Marshal(map[string]any{"metadata": metadata})
}
