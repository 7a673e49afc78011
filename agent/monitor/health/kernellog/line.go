package kernellog

import (
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// Xid is one of NVIDIA's error numbers, as the driver has written it into the kernel's log.
type Xid struct {
	PCI    string // bus address of the GPU, "0000:17:00.0"
	GI, CI int    // numbers of the GPU instance and the compute instance, or nvml.WholeGPU
	Number uint64
	// PID is the process that made the error, in the host's PID namespace; 0 if the driver does not say. The process may have ended.
	PID int
}

const (
	maxPID      = 1<<23 - 1 // the kernel assigns none above 1<<22
	maxNumber   = 1 << 16   // NVIDIA's numbers have three digits
	maxInstance = 1 << 10   // a GPU has fewer than 32
)

// facilityOfKernel marks the kernel's own records. The kernel gives another facility to everything that programs write to /dev/kmsg.
const facilityOfKernel = 0

// parseRecord parses a record of /dev/kmsg:
//
//	<priority>,<sequence number>,<microseconds>,<flags>[,…];<text>
//	 <key>=<value> of a device, on lines of their own
//
// It returns false for anything else. The kernel escapes line feeds in a text, so that it is one line.
func parseRecord(record string) (priority, sequence uint64, text string, ok bool) {
	head, text, ok := strings.Cut(record, ";")
	if !ok {
		return 0, 0, "", false
	}
	text, _, _ = strings.Cut(text, "\n")
	first, rest, _ := strings.Cut(head, ",")
	second, _, _ := strings.Cut(rest, ",")
	priority, err := strconv.ParseUint(first, 10, 32)
	if err != nil {
		return 0, 0, "", false
	}
	sequence, err = strconv.ParseUint(second, 10, 64)
	return priority, sequence, text, err == nil
}

// ofKernel reports whether the kernel itself, or a driver in it, has written a record of that priority.
func ofKernel(priority uint64) bool { return priority>>3 == facilityOfKernel }

// parseXid reads a text of the driver, as NVIDIA's open modules write it (krcReportXid in kernel_rc.c):
//
//	NVRM: Xid (PCI:0000:17:00 GPU-I:05 GPU-CI:00): 31, pid=481, name=python3, …
//
// It reads nothing from the name on: a process chooses its own name. The text has to begin with the words "NVRM: Xid": other drivers begin
// with a program's name, as when it has crashed, and such a name could imitate them.
func parseXid(text string) (Xid, bool) {
	rest, ok := strings.CutPrefix(text, "NVRM: Xid (PCI:")
	if !ok {
		return Xid{}, false
	}
	where, rest, ok := strings.Cut(rest, "): ")
	if !ok {
		return Xid{}, false
	}
	x := Xid{GI: nvml.WholeGPU, CI: nvml.WholeGPU}
	if !x.readPlace(where) {
		return Xid{}, false
	}
	number, rest, _ := strings.Cut(rest, ", ")
	n, ok := decimal(number, maxNumber)
	if !ok {
		return Xid{}, false
	}
	x.Number = uint64(n) //nolint:gosec // decimal gives none below 0
	if process, names := strings.CutPrefix(rest, "pid="); names {
		pid, _, _ := strings.Cut(process, ",")
		x.PID, _ = decimal(pid, maxPID) // the driver writes '<unknown>' for a process that it does not know
	}
	return x, true
}

// readPlace reads "0000:17:00", and "0000:17:00 GPU-I:05 GPU-CI:00" with instances.
func (x *Xid) readPlace(where string) bool {
	parts := strings.Split(where, " ")
	if !isAddress(parts[0]) || len(parts) > 3 {
		return false
	}
	x.PCI = parts[0] + ".0"
	for i, into := range []struct {
		prefix string
		number *int
	}{{"GPU-I:", &x.GI}, {"GPU-CI:", &x.CI}} {
		if i+1 >= len(parts) {
			break
		}
		text, ok := strings.CutPrefix(parts[i+1], into.prefix)
		if !ok {
			return false
		}
		if *into.number, ok = decimal(text, maxInstance); !ok {
			return false
		}
	}
	return true
}

// isAddress reports whether the text is a domain, a bus and a device: "0000:17:00". Some machines have domains of more digits.
func isAddress(text string) bool {
	parts := strings.Split(text, ":")
	if len(parts) != 3 || len(parts[0]) < 4 || len(parts[0]) > 8 || len(parts[1]) != 2 || len(parts[2]) != 2 {
		return false
	}
	return strings.Trim(strings.Join(parts, ""), "0123456789abcdef") == ""
}

// decimal reads a number of at most most, of digits alone.
func decimal(text string, most int) (int, bool) {
	if len(text) == 0 || len(text) > 7 || strings.Trim(text, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.Atoi(text)
	if err != nil || n > most {
		return 0, false
	}
	return n, true
}
