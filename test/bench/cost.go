package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// cost is what a program took of the machine.
type cost struct {
	memory int           // KiB, the most that were resident at any moment since it was started
	cpu    time.Duration // of a processor, also of programs that it has run
}

// since is the cost that was added in between. There is no way to know when the memory was used.
func (c cost) since(before cost) cost {
	c.cpu -= before.cpu
	return c
}

// tick is the kernel's unit of processor time in /proc, which is the same for all programs of a machine.
const tick = time.Second / 100

// costOf is what a process has taken so far.
func costOf(pid int) (c cost, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return c, fmt.Errorf("looking what process %d has taken: %w", pid, err)
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return c, fmt.Errorf("looking what process %d has taken: %w", pid, err)
	}
	if c.memory, err = peak(string(status)); err != nil {
		return c, fmt.Errorf("looking what memory process %d has taken: %w", pid, err)
	}
	if c.cpu, err = processorTime(stat); err != nil {
		return c, fmt.Errorf("looking what processor time process %d has taken: %w", pid, err)
	}
	return c, nil
}

// peak reads "VmHWM:     61234 kB", which a process that has ended no longer has.
func peak(status string) (int, error) {
	_, rest, found := strings.Cut(status, "\nVmHWM:")
	if !found {
		return 0, fmt.Errorf("it has ended")
	}
	value, _, _ := strings.Cut(strings.TrimSpace(rest), " kB\n")
	return strconv.Atoi(value)
}

// processorTime adds up utime, stime, cutime and cstime, fields 14 to 17. The second field is the program's name in
// parentheses. The name may hold any characters.
func processorTime(stat []byte) (time.Duration, error) {
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	const first, after = 14 - 3, 17 - 3 + 1
	if len(fields) < after {
		return 0, fmt.Errorf("%q has too few fields", stat)
	}
	sum := 0
	for _, field := range fields[first:after] {
		n, err := strconv.Atoi(field)
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return time.Duration(sum) * tick, nil
}
