package main

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/gpuslice/gpuslice/test/gpusim"
)

// query has the fields that nvidia-smi prints, and their format.
type query struct {
	gpus, apps []string
	format     string
}

var errFormat = errors.New(`--format must be "csv,noheader,nounits": nothing else is simulated`)

// of is what nvidia-smi says of fields of a GPU, by their names.
var of = map[string]func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return){
	"index": func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return) {
		n, r := l.Index(d)
		return fmt.Sprint(n), r
	},
	"uuid": func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return) { return l.UUID(d) },
	"name": func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return) { return l.Name(d) },
	"pci.bus_id": func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return) {
		pci, r := l.PCI(d)
		return "0000" + strings.ToUpper(pci.Address), r
	},
	"memory.total": func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return) {
		m, r := l.Memory(d)
		return fmt.Sprint(m.Total >> 20), r
	},
	"mig.mode.current": func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return) {
		current, _, r := l.MIGMode(d)
		return enabled[current], r
	},
	"mig.mode.pending": func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return) {
		_, pending, r := l.MIGMode(d)
		return enabled[pending], r
	},
	"persistence_mode": func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return) {
		on, r := l.Persistence(d)
		return enabled[on], r
	},
	"compute_mode": func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return) {
		mode, r := l.ComputeMode(d)
		name := gpusim.ComputeModes[mode]
		return name[:1] + strings.ReplaceAll(strings.ToLower(name[1:]), "_p", "_P"), r
	},
	"compute_cap": func(l *gpusim.Library, d gpusim.Device) (string, gpusim.Return) {
		f, r := l.Static(d)
		return fmt.Sprintf("%d.%d", f.Major, f.Minor), r
	},
}

var enabled = map[bool]string{false: "Disabled", true: "Enabled"}

// print prints the requested fields of a GPU.
func (q query) print(w io.Writer, l *gpusim.Library, d gpusim.Device) error {
	if q.format != "csv,noheader,nounits" {
		return errFormat
	}
	if len(q.gpus) > 0 {
		var line []string
		for _, field := range q.gpus {
			text, err := ask(l, d, field)
			if err != nil {
				return err
			}
			line = append(line, text)
		}
		_, err := fmt.Fprintln(w, strings.Join(line, ", "))
		return err
	}
	processes, r := l.Processes(d)
	if r != gpusim.Success {
		return fmt.Errorf("reading the processes: %s", r.Text())
	}
	for _, p := range processes {
		var line []string
		for _, field := range q.apps {
			switch field {
			case "gpu_uuid":
				uuid, err := ask(l, d, "uuid")
				if err != nil {
					return err
				}
				line = append(line, uuid)
			case "pid":
				line = append(line, fmt.Sprint(p.PID))
			default:
				return fmt.Errorf("field %q is not simulated", field)
			}
		}
		if _, err := fmt.Fprintln(w, strings.Join(line, ", ")); err != nil {
			return err
		}
	}
	return nil
}

func ask(l *gpusim.Library, d gpusim.Device, field string) (string, error) {
	read, known := of[field]
	if !known {
		return "", fmt.Errorf("field %q is not simulated", field)
	}
	text, r := read(l, d)
	if r == gpusim.NotSupported {
		return "[N/A]", nil
	}
	if r != gpusim.Success {
		return "", fmt.Errorf("reading %s: %s", field, r.Text())
	}
	return text, nil
}
