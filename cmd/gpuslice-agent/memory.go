package main

import (
	"fmt"
	"math"
	"os"
	"runtime/debug"
	"strconv"
)

// collectAt is by how many per cent the heap grows until garbage is collected. Go's default of 100 doubles the heap; an idle agent has so little
// garbage, some 100 KiB a second, that to collect it sooner takes a thousandth of a processor.
const collectAt = 25

// leastMemory is the smallest limit that an agent runs in: an idle one of a full node has some 16 MiB, and reads more in a change. A heap that
// is bounded to less than it holds has Go collect garbage without end.
const leastMemory = 32 << 20

// boundMemory has Go collect garbage early, and gives its heap three quarters of the limit: the bytes that the container may take, as the downward API
// writes them; empty for no limit. The rest is for NVIDIA's library: Go does not count its memory. GOGC and GOMEMLIMIT win where a user has set
// them.
func boundMemory(limit string) error {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(collectAt)
	}
	if limit == "" || os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	bytes, err := strconv.ParseInt(limit, 10, 64)
	if err != nil || bytes < leastMemory {
		return fmt.Errorf("reading --memory-limit (GPUSLICE_MEMORY_LIMIT) %.40q: it must be a number of bytes from %d (32 MiB, the least for an agent) to %d",
			limit, leastMemory, int64(math.MaxInt64))
	}
	debug.SetMemoryLimit(bytes / 4 * 3)
	return nil
}
