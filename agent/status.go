package agent

import (
	"encoding/json"
	"fmt"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/nvml"
)

func statusGPUs(gpus []nvml.GPU) []api.StatusGPU {
	var out []api.StatusGPU
	for _, gpu := range gpus {
		s := api.StatusGPU{Index: gpu.Index, UUID: gpu.UUID, MIG: gpu.Enabled}
		if geometry := gpu.Geometry(); len(geometry) > 0 {
			s.Geometry = geometry.String()
		}
		out = append(out, s)
	}
	return out
}

// parseStatus reads our own last words, or those of anybody else. An unreadable one is as good as none.
func parseStatus(annotation string) api.Status {
	var s api.Status
	if err := json.Unmarshal([]byte(annotation), &s); err != nil {
		return api.Status{}
	}
	return s
}

func encodeStatus(s api.Status) (string, error) {
	b, err := json.Marshal(s)
	if err != nil {
		return "", fmt.Errorf("encoding the status: %w", err)
	}
	return string(b), nil
}
