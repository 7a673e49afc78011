package holders

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders/openfiles"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Sought is a device; the caller wants its holders.
type Sought struct {
	Device   string // UUID of a GPU or of a MIG device, as kubelet knows it
	Reported []int  // pids that NVML reports on it
	// Minor is the N of the device file /dev/nvidiaN of a GPU that goes as a whole: a process that has it open holds the GPU.
	// AnyGPU is for an unknown N, NoFiles for a device that no open file shows.
	Minor int
}

// Values of Sought.Minor that are no minor number.
const (
	// AnyGPU is for a GPU if the driver does not report its minor number: an open device file of any GPU counts.
	AnyGPU = -1
	// NoFiles is of one instance of several: its clients have the same /dev/nvidiaN open as those of the others.
	NoFiles = -2
)

// Processes finds holders of GPUs in the host's process table. Package openfiles lists the holders that it cannot find; NVML may report
// those.
type Processes struct {
	Root string // mount point of procfs of the host's PID namespace; /proc if empty
	// Lanes keep readings that hang from piling up. Without them each observation is on its own.
	Lanes *Lanes
	// Signal replaces the system's, for a table that is not of this machine's processes.
	Signal func(pid int, signal unix.Signal) error
}

// Lanes run the readings of the process table, each kind in a goroutine of its own.
type Lanes struct {
	table   aside.Lane
	files   aside.Lane // of processes, as they see them
	sockets aside.Lane
}

func (p Processes) lanes() *Lanes { return cmp.Or(p.Lanes, &Lanes{}) }

// Holders lists the processes that hold a sought device, by pid: those that NVML has reported, and those that have one of the
// devices' files open. It reads the process table once for all devices; if no files count, it reads the reported
// processes alone.
//
// A process that Holders cannot read may hold any of the devices. The error names the process, and comes with the holders that were found. A process
// that ends in the meantime is none. Once ctx ends, Holders returns its error without holders, also while the observation hangs. It abandons the
// observation, and begins no other until that one ends. aside.Hangs distinguishes that error from others.
func (p Processes) Holders(ctx context.Context, sought []Sought) ([]Client, error) {
	clients, err := aside.Do(ctx, &p.lanes().table, "looking at the process table", func(ctx context.Context, at aside.At) ([]Client, error) {
		return p.holders(ctx, at, sought)
	})
	if err != nil {
		return clients, fmt.Errorf("looking for processes that hold %s: %w", names(sought), err)
	}
	return clients, nil
}

func (p Processes) holders(ctx context.Context, at aside.At, sought []Sought) ([]Client, error) {
	self, err := p.self()
	if err != nil {
		return nil, err
	}
	s := search{Processes: p, files: map[int][]string{}, found: map[int]*Client{}}
	for _, d := range sought {
		for _, pid := range d.Reported {
			s.note(pid, SourceNVML, d.Device)
		}
		if d.Minor != NoFiles {
			s.files[d.Minor] = append(s.files[d.Minor], d.Device)
		}
	}
	if len(s.files) > 0 {
		scan := openfiles.Scan{Root: s.root(), At: at, Found: s.open, Failed: s.unread.add}
		if err := scan.Run(ctx); err != nil {
			return nil, err
		}
	}
	return s.identifyAll(ctx, self)
}

// search is one reading of the process table.
type search struct {
	Processes
	files  map[int][]string // by the minor number of a GPU: the devices that a process holds which has its device file open
	found  map[int]*Client  // by pid
	unread unreadable
}

// mostSources bounds the names of device files in a message about a process, which may have one device open under many names.
const mostSources = 8

// note adds a process's source, and the devices that the process holds by it.
func (s *search) note(pid int, source Source, devices ...string) {
	c := s.found[pid]
	if c == nil {
		c = &Client{PID: pid}
		s.found[pid] = c
	}
	if len(c.Sources) < mostSources && !slices.Contains(c.Sources, source) {
		c.Sources = append(c.Sources, source)
	}
	for _, d := range devices {
		if !slices.Contains(c.Devices, d) {
			c.Devices = append(c.Devices, d)
		}
	}
}

// identifyAll gives the processes that were found, with their names and owners from the process table.
func (s *search) identifyAll(ctx context.Context, self int) ([]Client, error) {
	agent := Client{PID: self}
	if err := s.identify(&agent); err != nil {
		s.unread.add(err)
	}
	var clients []Client
	for _, pid := range slices.Sorted(maps.Keys(s.found)) {
		c := *s.found[pid]
		slices.Sort(c.Devices)
		slices.Sort(c.Sources)
		switch err := s.identify(&c); {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err == nil:
		case !openfiles.Gone(err):
			s.unread.add(err)
		case c.Sources[0] == SourceNVML:
			// It may just have ended; then NVML's next report is without it. Until then NVML's report counts.
			c.Unlisted = true
		default:
			continue
		}
		c.Self = pid == self
		c.Sibling = !c.Self && c.ofSamePod(agent.Owner)
		clients = append(clients, c)
	}
	return clients, s.unread.err()
}

// self gives the agent's own pid in the PID namespace of the table, which need not be the agent's.
//
// It also verifies that the table is one of processes, and not only of the agent's own. In a folder without the host's procfs, or in the agent's own
// PID namespace, every GPU would look free.
func (p Processes) self() (int, error) {
	link := filepath.Join(p.root(), "self")
	target, err := os.Readlink(link)
	if err != nil {
		return 0, fmt.Errorf("looking for the agent itself in the process table: %w; "+
			"the pod needs hostPID: true, or the host's /proc mounted where the agent looks for it", err)
	}
	pid, err := strconv.Atoi(target)
	if err != nil {
		return 0, fmt.Errorf("looking for the agent itself in the process table: %s leads to %q, which is no pid", link, target)
	}
	if pid == 1 {
		return 0, fmt.Errorf("looking for the agent itself in the process table: it is process 1 of %s, so this is not the host's "+
			"and does not show who holds a GPU; the pod needs hostPID: true", p.root())
	}
	return pid, nil
}

// open notes an open file, if it is one that counts.
func (s *search) open(pid int, file openfiles.File) {
	for _, devices := range [][]string{s.files[file.GPU], s.files[AnyGPU]} {
		if len(devices) > 0 {
			s.note(pid, openFile(file.Path), devices...)
		}
	}
}

// identify adds the client's name and owner from the process table. openfiles.Gone matches its error if there is no such process now.
func (p Processes) identify(c *Client) error {
	process := filepath.Join(p.root(), strconv.Itoa(c.PID))
	// Not its command line: to read the memory of a process may take for ever when it hangs in the driver.
	command, err := openfiles.Read(filepath.Join(process, "comm"))
	if err != nil {
		return err
	}
	c.Command = sanitize.Name(strings.TrimSuffix(command, "\n"))
	cgroups, err := openfiles.Read(filepath.Join(process, "cgroup"))
	if openfiles.Gone(err) { // a kernel without cgroups has no such file; nor has a process that has ended since
		_, err = os.Stat(filepath.Join(process, "comm"))
	}
	if err != nil {
		return err
	}
	c.Owner = ParseCgroup(cgroups)
	return nil
}

func (p Processes) root() string { return cmp.Or(p.Root, "/proc") }

// unreadable counts the processes that could not be read. The kernel refuses an agent without the right to look nearly every process, so
// that the first error and a count say as much as all errors.
type unreadable struct {
	first error
	more  int
}

func (u *unreadable) add(err error) {
	if u.first == nil {
		u.first = err
		return
	}
	u.more++
}

func (u *unreadable) err() error {
	err := u.first
	if u.more > 0 {
		err = fmt.Errorf("%w (and %d more)", err, u.more)
	}
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w; the agent can read all processes only as root with CAP_SYS_PTRACE, as in a privileged container, "+
			"and if no policy of a security module (SELinux, AppArmor) or of /proc (hidepid) denies it: the host's audit log names the one that does", err)
	}
	return err
}

// names lists the sought devices.
func names(sought []Sought) string {
	var out []string
	for _, d := range sought {
		name := d.Device
		if d.Minor >= 0 {
			name = "/dev/nvidia" + strconv.Itoa(d.Minor)
		}
		out = append(out, name)
	}
	if len(out) > 2 {
		out = append(out[:1], fmt.Sprintf("%d more devices", len(out)-1))
	}
	return strings.Join(out, " or ")
}
