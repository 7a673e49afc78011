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

// boundMemory has Go collect garbage early, and gives its heap three quarters of the limit: the bytes that the container may take, as the downward API
// writes them; empty for no limit. The rest is for NVIDIA's library, whose memory Go does not count. GOGC and GOMEMLIMIT win where a user has set
// them.
func boundMemory(limit string) error {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(collectAt)
	}
	if limit == "" || os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	bytes, err := strconv.ParseInt(limit, 10, 64)
	if err != nil || bytes <= 0 {
		return fmt.Errorf("reading --memory-limit %.40q: it must be a number of bytes above 0, up to %d", limit, int64(math.MaxInt64))
	}
	debug.SetMemoryLimit(bytes / 4 * 3)
	return nil
}
