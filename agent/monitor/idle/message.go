package idle

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/gpuslice/gpuslice/agent/monitor"
	"github.com/gpuslice/gpuslice/nvml"
)

// nameOf returns the device's name in Events.
func nameOf(d monitor.Device) string {
	if d.IsWhole() {
		return fmt.Sprintf("GPU %d", d.Index)
	}
	return fmt.Sprintf("GPU %d %s", d.Index, d.Placed.Profile)
}

// message says for how long the pod has had the device, and how much it used it.
func (m *Monitor) message(now time.Time, k key, h *history, percent float64, seen *pass, usages []nvml.Usage) string {
	had, least, of := now.Sub(h.since), "", ""
	if !h.exactly {
		least = "at least "
	}
	if had >= m.Settings.After+m.Settings.After/4 {
		of = " of the last " + span(m.Settings.After)
	}
	text := fmt.Sprintf("%s has had %s for %s%s and used it for %s%s", h.pod, h.name, least, span(had), rounded(percent), of)
	at := slices.IndexFunc(seen.devices, func(d monitor.Device) bool { return d.ID == k.device })
	if at < 0 {
		return text
	}
	d := seen.devices[at]
	i := slices.IndexFunc(usages, func(u nvml.Usage) bool { return u.UUID == d.GPU })
	if i < 0 {
		return text
	}
	switch mib, processes := memoryOn(d, usages[i]); {
	case processes == 0:
		text += "; no process is on it"
	case len(d.Holders(seen.holders)) > 1:
		text += fmt.Sprintf("; %d of %d MiB in use by %s of all the pods that share it", mib, d.TotalMiB, counted(processes))
	default:
		text += fmt.Sprintf("; %d of %d MiB in use by %s", mib, d.TotalMiB, counted(processes))
	}
	return text + " (" + k.device + ")"
}

func counted(processes int) string {
	if processes == 1 {
		return "a process"
	}
	return fmt.Sprintf("%d processes", processes)
}

// rounded formats a percentage so that 0 % means none at all.
func rounded(percent float64) string {
	switch {
	case percent == 0:
		return "0 %"
	case percent < 1:
		return "less than 1 %"
	default:
		return fmt.Sprintf("%.0f %%", math.Floor(percent))
	}
}

// span formats a time in its largest unit with a count of two or more, without the rest: "6 h", "90 min".
func span(d time.Duration) string {
	const day = 24 * time.Hour
	for _, unit := range []struct {
		is   time.Duration
		name string
	}{{day, "days"}, {time.Hour, "h"}, {time.Minute, "min"}} {
		if d >= 2*unit.is {
			return fmt.Sprintf("%d %s", d/unit.is, unit.name)
		}
	}
	return fmt.Sprintf("%d s", d/time.Second)
}
