package report

import (
	"time"

	"go.uber.org/zap"

	"github.com/gpuslice/gpuslice/agent/decide"
	"github.com/gpuslice/gpuslice/agent/events"
	"github.com/gpuslice/gpuslice/agent/report/metrics"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/config"
)

// overrun returns how far a change that has touched its GPUs has run beyond its window.
func (w *Writer) overrun(seen *state.Observed, want state.Desired) time.Duration {
	j := seen.Journal
	if j == nil || !j.KeepsPodsAway() || j.Forced || len(j.Startup()) > 0 || want.Undo || seen.Pool.Err != nil || seen.Restores(want) || !seen.HardwareOrPluginTouched() {
		return 0
	}
	now := w.Wall.Now()
	schedule := decide.Schedule(seen, want)
	if schedule.Contains(now) {
		return 0
	}
	since := j.Started
	if last, ok := schedule.Prev(now); ok {
		since = decide.Latest(last.End, since)
	}
	return now.Sub(since)
}

// ReportWindows sets the metrics of the node's windows, and reports a change that continues beyond its window, once for each change.
func (w *Writer) ReportWindows(seen *state.Observed, want state.Desired, planned time.Time) {
	if !seen.Complete {
		return
	}
	now, schedule := w.Wall.Now(), decide.Schedule(seen, want)
	over := w.overrun(seen, want)
	window := metrics.Window{Known: true, Open: seen.Pool.Err == nil && schedule.Contains(now), Next: planned, Overrun: over}
	if next, ok := schedule.Next(now, 0); ok && planned.IsZero() && seen.Pool.Err == nil {
		window.Next = next.Start
	}
	w.Metrics.Windowed(window)
	if over > 0 && w.overran != seen.Operation() {
		w.overran = seen.Operation()
		w.Log.Warn("window overrun", zap.Duration("by", over), zap.String("operation", w.overran))
		w.Events.Node(w.Node, events.WindowOverrun(want.Name, textOverrun))
	}
}

const textOverrun = "the window has closed, but the change continues, since it has touched a GPU"

// Overrun says, for the end of the message, that the change continues beyond its window; empty if it does not.
func (w *Writer) Overrun(seen *state.Observed, want state.Desired) string {
	if !seen.Complete || w.overrun(seen, want) <= 0 {
		return ""
	}
	return "; " + string(config.ReasonWindowOverrun) + ": " + textOverrun
}
