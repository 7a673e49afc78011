package openfiles

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// answer says whether this machine alone answers for the files of a mount.
type answer int

const (
	unknown answer = iota // no process has shown the mount
	local                 // this machine alone
	foreign               // perhaps a server, or a program
)

// mounts says which file systems are this machine's own, by their mounts. The kernel numbers mounts across all processes, and each process
// shows those that it can reach.
type mounts struct {
	known map[int]answer
	host  map[string]bool // numbers of the file systems that the host itself has mounted, "8:1"
	asked map[int]bool    // processes with mounts that were read
}

// memoryTypes are the file systems of device files. They are in memory, without a server: the one of the kernel's own devices, and the one that
// container runtimes make device files on.
var memoryTypes = map[string]bool{"devtmpfs": true, "tmpfs": true}

// diskTypes are file systems on a disk, which answer a stat of an open file without reading the disk. A container with
// CAP_MKNOD, which some runtimes give to each, can make a device file there. They count only if the host has mounted them:
// in a user namespace any program can put an overlay on a file system of a server.
var diskTypes = map[string]bool{
	"overlay": true, "ext2": true, "ext3": true, "ext4": true, "xfs": true,
	"btrfs": true, "f2fs": true, "ramfs": true, "rootfs": true,
}

// readHost reads the mounts of the host.
func (m *mounts) readHost(ctx context.Context, root string) error {
	m.known, m.host, m.asked = map[int]answer{}, map[string]bool{}, map[int]bool{1: true}
	const first = "1" // its process of this number
	err := eachMount(filepath.Join(root, first, "mountinfo"), func(mount mountPoint) bool {
		m.host[mount.device] = true
		m.note(mount)
		return ctx.Err() == nil
	})
	return errors.Join(err, ctx.Err())
}

func (m *mounts) note(mount mountPoint) {
	m.known[mount.id] = foreign
	if memoryTypes[mount.kind] || diskTypes[mount.kind] && m.host[mount.device] {
		m.known[mount.id] = local
	}
}

// of returns the answer for a mount that a process has a file of. A process that has ended shows no mounts.
func (m *mounts) of(mount int, root string, pid int) answer {
	if a := m.known[mount]; a != unknown || m.asked[pid] {
		return a
	}
	m.asked[pid] = true
	// Not the mounts of its namespace that another process has shown: each shows those below its own root alone.
	_ = eachMount(filepath.Join(root, strconv.Itoa(pid), "mountinfo"), func(mount mountPoint) bool {
		m.note(mount)
		return true
	})
	return m.known[mount]
}

// mountPoint is a line of /proc/PID/mountinfo.
type mountPoint struct {
	id     int
	device string // number of the file system, "8:1"
	kind   string // type of the file system
}

// eachMount reads the lines one by one, since a process may have 100,000 mounts, and as long as next returns true.
func eachMount(path string, next func(mountPoint) bool) error {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewReaderSize(f, 64<<10) // paths have up to 4096 bytes each, and are escaped
	for {
		line, err := lines.ReadSlice('\n')
		if mount, ok := parseMount(line); ok && !next(mount) {
			return nil
		}
		switch {
		case err == nil, errors.Is(err, bufio.ErrBufferFull): // the rest of it begins no line that can be parsed as a mount
		case errors.Is(err, io.EOF):
			return nil
		default:
			return err
		}
	}
}

// parseMount reads "36 35 98:0 /root /mnt rw,noatime master:1 - ext4 /dev/sda1 rw". Blanks in paths are escaped.
func parseMount(line []byte) (mountPoint, bool) {
	before, after, ok := bytes.Cut(line, []byte(" - "))
	fields := bytes.Fields(before)
	kind, _, _ := strings.Cut(string(after), " ")
	if !ok || len(fields) < 6 || kind == "" {
		return mountPoint{}, false
	}
	id, err := strconv.Atoi(string(fields[0]))
	return mountPoint{id: id, device: string(fields[2]), kind: kind}, err == nil
}
