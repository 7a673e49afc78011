package kernellog_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpuslice/gpuslice/agent/monitor/health/kernellog"
)

// Lines as drivers write them: the first one was seen on an H200 with driver 580, the others have the forms of NVIDIA's open modules.
var lines = []struct {
	text string
	xid  kernellog.Xid
}{
	{
		"NVRM: Xid (PCI:0000:00:06): 31, pid=481, name=fault, channel 0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 faulted @ 0x0_00001000. " +
			"Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
		kernellog.Xid{PCI: "0000:00:06.0", GI: -1, CI: -1, Number: 31, PID: 481},
	},
	{"NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, pid=7194, name=python3, Contained: SM", kernellog.Xid{PCI: "0000:01:00.0", GI: 5, CI: 0, Number: 94, PID: 7194}},
	{"NVRM: Xid (PCI:0000:01:00 GPU-I:13): 45, pid=7194, name=python3, Ch 00000003", kernellog.Xid{PCI: "0000:01:00.0", GI: 13, CI: -1, Number: 45, PID: 7194}},
	{"NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", kernellog.Xid{PCI: "0000:3b:00.0", GI: -1, CI: -1, Number: 79}},
	{"NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", kernellog.Xid{PCI: "0000:3b:00.0", GI: -1, CI: -1, Number: 79}},
	{"NVRM: Xid (PCI:0000:3b:00): 79, pid=1122, GPU has fallen off the bus.", kernellog.Xid{PCI: "0000:3b:00.0", GI: -1, CI: -1, Number: 79, PID: 1122}},
	{"NVRM: Xid (PCI:10002:00:00): 119, Timeout after 45s of waiting for RPC response from GPU0 GSP!", kernellog.Xid{PCI: "10002:00:00.0", GI: -1, CI: -1, Number: 119}},
	{"NVRM: Xid (PCI:0000:ca:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", kernellog.Xid{PCI: "0000:ca:00.0", GI: -1, CI: -1, Number: 154}},
	{"NVRM: Xid (PCI:0000:ca:00): 31, pid=99999999, name=x, y", kernellog.Xid{PCI: "0000:ca:00.0", GI: -1, CI: -1, Number: 31}},
	// What the process calls itself is not read.
	{"NVRM: Xid (PCI:0000:ca:00): 31, pid=7, name=, pid=1, name=x, y", kernellog.Xid{PCI: "0000:ca:00.0", GI: -1, CI: -1, Number: 31, PID: 7}},
	{"NVRM: Xid (PCI:0000:ca:00): 13, name=pid=1, y", kernellog.Xid{PCI: "0000:ca:00.0", GI: -1, CI: -1, Number: 13}},
}

// None of these is one of the driver's. The first is of a program that has named itself so, in the 15 bytes that it has, and crashed.
var strangers = []string{
	"NVRM: Xid (PCI:[4711]: segfault at 0 ip 0000000000000000 sp 00007ffc4a7d0a10 error 14",
	"python3[12]: NVRM: Xid (PCI:0000:ca:00): 79, GPU has fallen off the bus.",
	" NVRM: Xid (PCI:0000:ca:00): 79, x",
	"NVRM: Xid (PCI:0000:ca:00)): 79, x",
	"NVRM: Xid (PCI:0000:ca:00): -79, x",
	"NVRM: Xid (PCI:0000:ca:00): 79000, x, y",
	"NVRM: Xid (PCI:0000:ca:00): 18446744073709551616, x",
	"NVRM: Xid (PCI:0000:ca:00):79, x",
	"NVRM: Xid (PCI:0000:CA:00): 79, x",
	"NVRM: Xid (PCI:0000:ca:00 GPU-I:x): 79, x",
	"NVRM: Xid (PCI:0000:ca:00 GPU-CI:01): 79, x",
	"NVRM: Xid (PCI:0000:ca:00 GPU-I:01 GPU-CI:01 GPU-X:01): 79, x",
	"NVRM: Xid (PCI:0000:ca:00.0): 79, x",
	"NVRM: Xid (PCI:ca:00): 79, x",
	"NVRM: Xid (PCI:",
	"NVRM: GPU at PCI:0000:ca:00: GPU-5d1c",
	"",
}

func TestAnXidIsReadFromEachFormOfItsLine(t *testing.T) {
	t.Parallel()
	for _, row := range lines {
		got, ok := kernellog.ParseXid(row.text)
		if diff := cmp.Diff(row.xid, got); !ok || diff != "" {
			t.Errorf("%s (is one: %t; -want +got):\n%s", row.text, ok, diff)
		}
	}
	for _, text := range strangers {
		if got, ok := kernellog.ParseXid(text); ok {
			t.Errorf("%q counts as %+v", text, got)
		}
	}
}

func TestARecordIsTakenApart(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		record             string
		priority, sequence uint64
		text               string
	}{
		{"3,339,5140900,-;NVRM: x\n SUBSYSTEM=pci\n DEVICE=+pci:0000:17:00.0\n", 3, 339, "NVRM: x"},
		{"12,340,5140900,c,caller=T1;a; b\n", 12, 340, "a; b"},
		{"0,0,0,-;", 0, 0, ""},
	} {
		priority, sequence, text, ok := kernellog.ParseRecord(row.record)
		if !ok || priority != row.priority || sequence != row.sequence || text != row.text {
			t.Errorf("%q is taken apart to %d, %d, %q, %t", row.record, priority, sequence, text, ok)
		}
	}
	for _, record := range []string{"", ";", "3;x", "x,1,1,-;x", "3,x,1,-;x", "-3,1,1,-;x", "3,1,1,-", "3,99999999999999999999,1,-;x"} {
		if _, _, _, ok := kernellog.ParseRecord(record); ok {
			t.Errorf("%q is a record", record)
		}
	}
}

// Whatever the text is: what is read lies within its bounds, and an Xid that is written again from what was read is the same.
func FuzzParseXid(f *testing.F) {
	for _, row := range lines {
		f.Add("3,1,1,-;" + row.text + "\n")
	}
	for _, text := range strangers {
		f.Add("3,1,1,-;" + text + "\n")
	}
	f.Fuzz(func(t *testing.T, record string) {
		_, _, text, ok := kernellog.ParseRecord(record)
		if !ok || strings.Contains(text, "\n") {
			return
		}
		x, ok := kernellog.ParseXid(text)
		if !ok {
			return
		}
		if !withinBounds(x) {
			t.Fatalf("%q gives %+v", record, x)
		}
		again := written(x)
		if same, ok := kernellog.ParseXid(again); !ok || same != x {
			t.Fatalf("%q gives %+v, and %q gives %+v", record, x, again, same)
		}
	})
}

func withinBounds(x kernellog.Xid) bool {
	within := func(n, least, limit int) bool { return n >= least && n < limit }
	return within(x.PID, 0, 1<<23) && x.Number <= 1<<16 && within(x.GI, -1, 1<<10+1) && within(x.CI, -1, 1<<10+1) && len(x.PCI) <= len("00000000:00:00.0")
}

// written is the Xid as the driver writes it.
func written(x kernellog.Xid) string {
	text := "NVRM: Xid (PCI:" + strings.TrimSuffix(x.PCI, ".0")
	if x.GI >= 0 {
		text += fmt.Sprintf(" GPU-I:%02d", x.GI)
	}
	if x.CI >= 0 {
		text += fmt.Sprintf(" GPU-CI:%02d", x.CI)
	}
	return text + fmt.Sprintf("): %d, pid=%d, name=x, y", x.Number, x.PID)
}
