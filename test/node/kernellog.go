package node

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// kernelLog stands for the node's /dev/kmsg: a pipe that keeps records apart, as the kernel does.
type kernelLog struct {
	path string

	mu       sync.Mutex
	pipe     *os.File
	sequence int
}

func openKernelLog(dir string) (*kernelLog, error) {
	l := &kernelLog{path: filepath.Join(dir, "kmsg")}
	err := unix.Mkfifo(l.path, 0o600)
	if err == nil {
		l.pipe, err = os.OpenFile(l.path, os.O_RDWR|unix.O_NONBLOCK, 0)
	}
	if err == nil {
		_, err = unix.FcntlInt(l.pipe.Fd(), unix.F_SETFL, unix.O_DIRECT|unix.O_NONBLOCK)
	}
	if err != nil {
		return nil, fmt.Errorf("making the kernel's log: %w", err)
	}
	return l, nil
}

// KernelLog is the path of what stands for the node's /dev/kmsg.
func (n *Node) KernelLog() string { return n.kernelLog.path }

// Printk writes a line into the kernel's log, as a driver in the kernel does if facility is 0, and programs with any other.
func (n *Node) Printk(facility int, text string) error {
	l := n.kernelLog
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sequence++
	const level = 3 // error
	if _, err := fmt.Fprintf(l.pipe, "%d,%d,%d,-;%s\n", facility<<3|level, l.sequence, l.sequence, text); err != nil {
		return fmt.Errorf("writing the kernel's log: %w", err)
	}
	return nil
}
