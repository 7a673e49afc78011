package fencing

import (
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/agent/state/journal"
)

// mostTook is how many changes count for the estimate.
const mostTook = 5

// Timing has the moments of the change under way, as far as this process has seen it.
type Timing struct {
	touchedAt  time.Time // when it first touched a GPU
	verifiedAt time.Time // when the agent first saw it done
}

// Forget drops both: the change is over, another begins, or the clock was set.
func (t *Timing) Forget(time.Time) { *t = Timing{} }

// NoteTouched notes that the change touches its first GPU now. Later calls do nothing.
func (t *Timing) NoteTouched(now time.Time) {
	if t.touchedAt.IsZero() {
		t.touchedAt = now
	}
}

// NoteVerified notes that the change is done now. Later calls do nothing: the time of other tools on the node after that does not count.
func (t *Timing) NoteVerified(now time.Time) {
	if t.verifiedAt.IsZero() {
		t.verifiedAt = now
	}
}

// With adds the change, from its start until now, to those before it. If another process touched the GPUs first, the change does not count: its time
// is unknown.
func (t *Timing) With(before []journal.Took, started time.Time) []journal.Took {
	if t.touchedAt.IsZero() {
		return before
	}
	took := journal.Took{Whole: seconds(t.verifiedAt.Sub(started)), Rest: seconds(t.verifiedAt.Sub(t.touchedAt))}
	all := append(slices.Clone(before), took)
	return all[max(0, len(all)-mostTook):]
}

// seconds rounds up.
func seconds(d time.Duration) int { return int((d + time.Second - 1) / time.Second) }
