package agent

import (
	"encoding/json"
	"fmt"

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

// Status is the annotation in which tools find what the condition says to people. Of it the agent reads back Failed and
// NoReset alone.
type Status struct {
	Desired string        `json:"desired,omitempty"` // name of the config that is asked for
	Phase   Phase         `json:"phase"`
	Reason  config.Reason `json:"reason"`
	GPUs    []StatusGPU   `json:"gpus,omitempty"`
	Failed  *Failure      `json:"failed,omitempty"`  // a wish that is not tried again until it is withdrawn
	NoReset *noReset      `json:"noReset,omitempty"` // GPUs that are not reset here: their mode changes at a reboot
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

// parseStatus reads our own last words. An unreadable one is as good as none: all but those two are observed.
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

// patch is the merge patch that writes the status alone.
func (s Status) patch() ([]byte, error) {
	text, err := s.encode()
	if err != nil {
		return nil, err
	}
	return metadataPatch(nil, map[string]string{config.AnnotationStatus: text})
}

// metadataPatch is a merge patch that sets labels and annotations and leaves all others alone.
func metadataPatch(labels, annotations map[string]string) ([]byte, error) {
	metadata := map[string]any{}
	if len(labels) > 0 {
		metadata["labels"] = labels
	}
	if len(annotations) > 0 {
		metadata["annotations"] = annotations
	}
	return json.Marshal(map[string]any{"metadata": metadata})
}
