package health

import (
	"context"

	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/agent/state/hostfile"
)

// recordName is the record's file. Only root of this host can write it, whereas other programs can write the node object.
const recordName = "health.json"

// Store keeps the record. *hostfile.File does.
type Store interface {
	// Read returns the data that was last written, or nil if there is none.
	Read(ctx context.Context) ([]byte, error)
	Write(ctx context.Context, data []byte) error
}

// In returns the Store below a directory of the host, next to the host's record.
func In(stateDir string) *hostfile.File {
	return hostfile.In(stateDir, recordName, verdict.LongestRecord)
}
