package maintenance

import (
	"fmt"
	"time"

	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/config/window"
)

// WindowFields says when changes may disturb nodes: every week, with days, or once.
type WindowFields struct{ window.Window }

// Check checks the fields that a window needs with days and without.
func (w *WindowFields) Check(c *check.Mistakes, at string, in check.Written) {
	if w.Zone == nil {
		w.Zone = time.UTC // the agent's own would differ between nodes
	}
	refuseEndBeforeStart(c, at+".notAfter", in.Text("notAfter"), "notBefore", w.NotBefore, w.NotAfter)
	if !in.Has("days") && (in.Text("notBefore") == "" || in.Text("notAfter") == "") {
		c.Add(&check.InvalidError{Field: at, Want: `must have "days", "start" and "duration", or "notBefore" and "notAfter" to be open once`})
	}
	for _, field := range []struct{ name, form string }{{"start", "a time of day in quotes, from \"00:00\" to \"23:59\""}, {"duration", "a duration with its unit, like \"90s\" or \"1h30m\""}} {
		switch text := in.Text(field.name); {
		case text == "" && in.Has("days"):
			c.Add(&check.InvalidError{Field: check.Within(at, field.name), Want: "is needed with days: write " + field.form})
		case text != "" && !in.Has("days"):
			c.Refuse(check.Within(at, field.name), text, `needs "days": without them a window is open once, from notBefore to notAfter`)
		}
	}
}

// FreezeFields is a time when no window is open.
type FreezeFields struct{ window.Freeze }

// Check refuses a freeze that ends before it begins.
func (f *FreezeFields) Check(c *check.Mistakes, at string, in check.Written) {
	refuseEndBeforeStart(c, at+".to", in.Text("to"), "from", f.From, f.To)
}

// refuseEndBeforeStart refuses an end that is not after its start.
func refuseEndBeforeStart(c *check.Mistakes, field, text, start string, from, to time.Time) {
	if !from.IsZero() && !to.IsZero() && !from.Before(to) {
		c.Refuse(field, text, fmt.Sprintf("must be after %s, which is %s", start, from.Format(time.RFC3339)))
	}
}

// WindowsOf returns the windows that the fields describe.
func WindowsOf(fields []WindowFields) (out []window.Window) {
	for _, f := range fields {
		out = append(out, f.Window)
	}
	return out
}

func freezesOf(fields []FreezeFields) (out []window.Freeze) {
	for _, f := range fields {
		out = append(out, f.Freeze)
	}
	return out
}
