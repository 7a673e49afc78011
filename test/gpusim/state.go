package gpusim

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"
)

// state is everything about a node. A state that has been stored is never changed: writers work on a clone.
type state struct {
	Format  int                      `json:"format"`
	Driver  string                   `json:"driver"`
	CUDA    int                      `json:"cuda"`
	BootID  string                   `json:"bootID"`
	Seed    int64                    `json:"seed"`
	Counter uint64                   `json:"counter"` // makes each identity new
	GPUs    []*gpu                   `json:"gpus"`
	Faults  map[string][]Fault       `json:"faults,omitempty"`
	Delays  map[string]time.Duration `json:"delays,omitempty"`
	Calls   map[string]int           `json:"calls,omitempty"`
	Events  []Event                  `json:"events,omitempty"` // the newest ones
	Loads   int                      `json:"loads,omitempty"`  // how often the driver was loaded again
	Host    string                   `json:"host,omitempty"`   // where RenderHost has put the node's parts of /proc
}

// stateFormat is raised when an older program could not read the file.
const stateFormat = 1

type gpu struct {
	Model       string         `json:"model"`
	UUID        string         `json:"uuid"`
	Serial      string         `json:"serial"`
	Bus         int            `json:"bus"`            // PCI bus number; domain and function are 0
	Slot        int            `json:"slot,omitempty"` // PCI device number
	NUMA        int            `json:"numa"`
	Passthrough bool           `json:"passthrough,omitempty"`
	Virtual     string         `json:"virtual,omitempty"` // as GPUSpec.Virtual
	Counts      map[string]int `json:"counts,omitempty"`  // as GPUSpec.Counts
	Persistence bool           `json:"persistence,omitempty"`
	Daemon      bool           `json:"daemon,omitempty"` // the persistence daemon turns it on whenever the driver starts
	ComputeMode uint32         `json:"computeMode,omitempty"`

	Current   bool        `json:"current,omitempty"` // MIG mode
	Pending   bool        `json:"pending,omitempty"` // MIG mode after the next reset
	Instances []*instance `json:"instances,omitempty"`
	Processes []*process  `json:"processes,omitempty"`
	Health    Health      `json:"health,omitzero"`
}

// instance is a GPU instance.
type instance struct {
	Serial  uint64     `json:"serial"` // never used twice, unlike the id
	ID      int        `json:"id"`
	Profile int        `json:"profile"` // id
	Start   int        `json:"start"`
	Compute []*compute `json:"compute,omitempty"`
}

// compute is a compute instance, and the MIG device that it makes.
type compute struct {
	Serial  uint64 `json:"serial"`
	ID      int    `json:"id"`
	Profile int    `json:"profile"` // id, which is also its kind
	Start   int    `json:"start"`   // compute slice within the GPU instance
	UUID    string `json:"uuid"`
	Slot    int    `json:"slot"` // index of the MIG device on its GPU
}

type process struct {
	PID     int    `json:"pid"`
	Name    string `json:"name"`
	UsedMiB int    `json:"usedMiB,omitempty"`
	Busy    int    `json:"busy,omitempty"`    // percentage of the time for which it computes
	MIG     string `json:"mig,omitempty"`     // UUID of its MIG device; empty for the GPU as a whole
	Hidden  bool   `json:"hidden,omitempty"`  // an NVML client without a CUDA context
	MPS     bool   `json:"mps,omitempty"`     // its context is in the server of MPS
	Started uint64 `json:"started,omitempty"` // start time of a real process, 0 for an imagined one
}

func (g *gpu) model() *model { return models[g.Model] }

// hasMIG reports whether MIG mode exists for the caller. For a vGPU, the host decides how it is cut.
func (g *gpu) hasMIG() bool { return g.model().Slices > 0 && g.Virtual != virtualGPU }

// address is the PCI address as sysfs writes it.
func (g *gpu) address() string { return fmt.Sprintf("0000:%02x:%02x.0", g.Bus, g.Slot) }

func (g *gpu) profileOf(i *instance) *profile { return g.model().profile(i.Profile) }

func (g *gpu) instance(serial uint64) *instance {
	for _, i := range g.Instances {
		if i.Serial == serial {
			return i
		}
	}
	return nil
}

// device finds a MIG device by its UUID.
func (g *gpu) device(uuid string) (*instance, *compute) {
	for _, i := range g.Instances {
		for _, c := range i.Compute {
			if c.UUID == uuid {
				return i, c
			}
		}
	}
	return nil, nil
}

// processes are those that still run, of those that keep asks for.
func (g *gpu) processes(keep func(*process) bool) []*process {
	var out []*process
	for _, p := range g.Processes {
		if keep(p) && p.alive() {
			out = append(out, p)
		}
	}
	return out
}

// held reports whether anything keeps the GPU from being reset. In persistence mode, the driver itself does.
func (g *gpu) held() bool {
	return g.Persistence || len(g.processes(func(*process) bool { return true })) > 0
}

// on selects the processes that hold a MIG device.
func on(c *compute) func(*process) bool {
	return func(p *process) bool { return p.MIG == c.UUID }
}

func (g *gpu) busy(c *compute) bool { return len(g.processes(on(c))) > 0 }

// alive reports whether the process runs. Imagined ones run until they are released.
func (p *process) alive() bool { return p.Started == 0 || startTime(p.PID) == p.Started }

// procVariable names the /proc in which the driver sees processes, if it is not the program's own: in a container with
// a PID namespace. A driver is in no such namespace.
const procVariable = "GPUSIM_PROC"

// Proc is the driver's view of processes: a directory like /proc.
func Proc() string { return cmp.Or(os.Getenv(procVariable), "/proc") }

// startTime distinguishes one process from a later one with the same number; 0 if there is none. See proc_pid_stat(5).
func startTime(pid int) uint64 {
	stat, err := os.ReadFile(filepath.Join(Proc(), strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0
	}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	const state, starttime = 3, 22
	if len(fields) <= starttime-state {
		return 0
	}
	n, err := strconv.ParseUint(string(fields[starttime-state]), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

func (s *state) clone() *state {
	c := *s
	c.GPUs = make([]*gpu, len(s.GPUs))
	for i, g := range s.GPUs {
		c.GPUs[i] = g.clone()
	}
	c.Faults = maps.Clone(s.Faults)
	for name, f := range c.Faults {
		c.Faults[name] = slices.Clone(f)
	}
	c.Delays = maps.Clone(s.Delays)
	c.Calls = maps.Clone(s.Calls)
	c.Events = slices.Clone(s.Events)
	return &c
}

func (g *gpu) clone() *gpu {
	c := *g
	c.Instances = make([]*instance, len(g.Instances))
	for i, old := range g.Instances {
		n := *old
		n.Compute = make([]*compute, len(old.Compute))
		for k, oc := range old.Compute {
			nc := *oc
			n.Compute[k] = &nc
		}
		c.Instances[i] = &n
	}
	c.Processes = make([]*process, len(g.Processes))
	for i, p := range g.Processes {
		n := *p
		c.Processes[i] = &n
	}
	return &c
}

// next is a number that was never used before on this node.
func (s *state) next() uint64 {
	s.Counter++
	return s.Counter
}

// identity derives a UUID from the seed and a number, so that the same walk gives the same identities.
func identity(seed int64, kind string, n uint64) string {
	b := binary.BigEndian.AppendUint64(nil, uint64(seed))
	b = binary.BigEndian.AppendUint64(b, n)
	return uuid.NewSHA1(uuid.NameSpaceOID, append(b, kind...)).String()
}

// newState is a node that has just booted for the first time.
func newState(spec Spec) *state {
	s := &state{
		Format: stateFormat, Driver: spec.DriverVersion, CUDA: spec.CUDA, Seed: spec.Seed,
		Delays: spec.delays(), Calls: map[string]int{},
	}
	if s.Driver == "" {
		s.Driver = "580.159.04"
	}
	if s.CUDA == 0 {
		s.CUDA = 13000
	}
	s.BootID = identity(s.Seed, "boot", s.next())
	virtual := !slices.ContainsFunc(spec.GPUs, func(gs GPUSpec) bool { return !gs.Passthrough })
	for _, gs := range spec.GPUs {
		for range max(1, gs.Count) {
			n := len(s.GPUs)
			bus, slot := 0x07+n*0x0e, 0
			if virtual { // a virtual machine has its devices side by side on one bus
				bus, slot = 0, 0x05+n
			}
			s.GPUs = append(s.GPUs, &gpu{
				Model:       gs.Model,
				UUID:        "GPU-" + identity(spec.Seed, "gpu", uint64(n)),
				Serial:      fmt.Sprintf("16529230%05d", n+1),
				Bus:         bus,
				Slot:        slot,
				Passthrough: gs.Passthrough,
				Virtual:     gs.Virtual,
				Counts:      gs.Counts,
				Persistence: gs.Persistence,
				Daemon:      gs.Persistence,
				Current:     gs.MIG,
				Pending:     gs.MIG,
			})
		}
	}
	for i, g := range s.GPUs {
		g.NUMA = i * 2 / len(s.GPUs) // two sockets
	}
	return s
}

// forget drops what a restart of the driver loses: geometry and processes always, MIG mode unless the GPU itself keeps
// it, persistence mode unless a daemon sets it again.
func (s *state) forget() {
	s.Loads++
	for _, g := range s.GPUs {
		g.Instances, g.Processes = nil, nil
		if !g.model().resetsForMode() {
			g.Pending = false
		}
		g.Current = g.Pending
		g.Health = g.Health.reloaded()
		g.ComputeMode = 0
		g.Persistence = g.Daemon
	}
}
