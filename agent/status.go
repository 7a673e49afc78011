package agent

import (
	"encoding/json"

	"github.com/gpuslice/gpuslice/agent/api"
)

// parseStatus reads our own last words, or those of anybody else. An unreadable one is as good as none.
func parseStatus(annotation string) api.Status {
	var s api.Status
	if err := json.Unmarshal([]byte(annotation), &s); err != nil {
		return api.Status{}
	}
	return s
}
