package health

import (
	"context"

	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/agent/state/hostfile"
)

// recordName is the record's file. Only root of this host can write it: what the node object says could have been written by others.
const recordName = "health.json"

// Store keeps the record. *hostfile.File does.
type Store interface {
	// Read gives what was last written, or nil if nothing was.
	Read(ctx context.Context) ([]byte, error)
	Write(ctx context.Context, data []byte) error
}

// In is the Store below a directory of the host, beside the host's record.
func In(stateDir string) *hostfile.File {
	return hostfile.In(stateDir, recordName, verdict.LongestRecord)
}
