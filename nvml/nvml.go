// Package nvml is the domain of the agent: GPUs that can be cut into instances, the profiles that the hardware offers, the instances that
// exist, and requests for others. It has values, the Driver interface and the placement solver.
//
// It knows no library: the Driver over NVIDIA's library is nvml/lib, and everything here builds without cgo.
package nvml

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// UUID identifies a physical GPU for its whole life, as NVIDIA's library writes it: "GPU-" and a UUID.
type UUID string

// Span is a run of slices: memory slices of a GPU, or compute slices of one of its instances.
type Span struct {
	Start int // first slice, from 0
	Size  int // number of slices
}

// End is the first slice behind the span.
func (s Span) End() int { return s.Start + s.Size }

// Overlaps reports whether the two spans share a slice.
func (s Span) Overlaps(t Span) bool { return s.Start < t.End() && t.Start < s.End() }

// Profile is one kind of GPU instance that a GPU offers. All of it is read from the hardware.
type Profile struct {
	Name       string           // as NVIDIA's tools write it: "1g.10gb", "1g.10gb+me"
	Slices     int              // compute slices, the 3 of "3g.40gb"
	MemoryMiB  int              // memory of one instance
	Max        int              // how many instances of it an empty GPU holds
	Placements []Span           // where an instance may stand, in ascending order
	Engines    Engines          // engines of one instance; a GPU has only a few
	Compute    []ComputeProfile // compute instances that an instance of it can be divided into, smallest first
}

// Engines counts the fixed-function engines of an instance, or of a whole GPU.
type Engines struct {
	Copy, Decoder, Encoder, JPEG, OFA int
}

// ComputeProfile is one kind of compute instance within a GPU instance.
type ComputeProfile struct {
	Name   string // "1c", "2c", …
	Slices int    // compute slices of one
	Max    int    // how many fit into one GPU instance
	// Placements are where one may stand within a GPU instance, in ascending order. There are none where the driver does not
	// report or take places, or has no instance yet that it could be asked about.
	Placements []Span
}

// Part is one compute instance at its place within a GPU instance. The part of an undivided instance fills it.
type Part struct {
	Name string // name of the compute instance profile: "1c"
	Span        // compute slices of the GPU instance
}

// String writes the part as plans and logs show it: "1c@2".
func (p Part) String() string { return fmt.Sprintf("%s@%d", p.Name, p.Start) }

// ComparePart orders parts by place.
func ComparePart(a, b Part) int {
	return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Size, b.Size), cmp.Compare(a.Name, b.Name))
}

// Placed is one GPU instance at its place, wanted or existing. It carries no identity, since
// the driver hands out instance ids again after each change. Values of Placed can be compared and used as map keys.
type Placed struct {
	Profile string // name of the GPU instance profile
	Span
	// Compute names the compute instances inside, ascending and joined by "+" ("1c+2c"), without their places.
	// Empty is the ordinary case: one compute instance that fills the GPU instance.
	Compute string
}

// String writes the instance for plans and logs: "3g.40gb@4", "3g.40gb(1c+2c)@0".
func (p Placed) String() string {
	if p.Compute == "" {
		return fmt.Sprintf("%s@%d", p.Profile, p.Start)
	}
	return fmt.Sprintf("%s(%s)@%d", p.Profile, p.Compute, p.Start)
}

// Devices are the names of the MIG devices that the instance makes available, one for each compute instance:
// "3g.40gb", or "1c.3g.40gb" and "2c.3g.40gb" for one that is divided.
func (p Placed) Devices() []string {
	if p.Compute == "" {
		return []string{p.Profile}
	}
	parts := strings.Split(p.Compute, "+")
	for i, c := range parts {
		parts[i] = c + "." + p.Profile
	}
	return parts
}

// Geometry is how one GPU is cut: its instances in ascending order of their place.
type Geometry []Placed

// String joins the instances by spaces; an uncut GPU is "-".
func (g Geometry) String() string {
	if len(g) == 0 {
		return "-"
	}
	parts := make([]string, len(g))
	for i, p := range g {
		parts[i] = p.String()
	}
	return strings.Join(parts, " ")
}

// Sort puts the geometry into its canonical order.
func (g Geometry) Sort() {
	slices.SortFunc(g, ComparePlaced)
}

// ComparePlaced orders instances by place, then by name, so that every listing of them is the same.
func ComparePlaced(a, b Placed) int {
	return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Size, b.Size), cmp.Compare(a.Profile, b.Profile),
		cmp.Compare(a.Compute, b.Compute))
}

// Instance is a GPU instance that exists.
type Instance struct {
	Placed
	ID        int       // the driver's number of it, as in an Event; another instance gets it later
	Devices   []Device  // its MIG devices, one for each compute instance; none if the instance is only half made
	Processes []Process // processes with a context on it, on whatever part
	UsedMiB   int       // memory in use, which its devices share; -1 if the driver does not say
}

// HalfMade reports whether the GPU instance has no compute instance, as a failed creation leaves it. No program can
// use it, and no device plugin shows it.
func (i Instance) HalfMade() bool { return len(i.Devices) == 0 }

// Divided gives the instance of a profile with these devices, and named after them.
func (i Instance) Divided(p Profile, devices []Device) Instance {
	i.Devices = slices.SortedFunc(slices.Values(devices), func(a, b Device) int {
		return cmp.Or(cmp.Compare(a.Part.Size, b.Part.Size), cmp.Compare(a.Part.Start, b.Part.Start))
	})
	i.Compute = ""
	var names []string
	for _, d := range i.Devices {
		names = append(names, d.Part.Name)
	}
	if len(i.Devices) != 1 || i.Devices[0].Part.Size != p.Slices {
		i.Compute = strings.Join(names, "+")
	}
	for n, name := range i.Placed.Devices() {
		if n < len(i.Devices) {
			i.Devices[n].Profile = name
		}
	}
	return i
}

// ProcessesOn lists the processes on one of the instance's devices, and those that the driver reports no device for.
func (i Instance) ProcessesOn(d Device) []Process {
	var out []Process
	for _, p := range i.Processes {
		elsewhere := slices.ContainsFunc(i.Devices, func(o Device) bool { return o.UUID != d.UUID && o.has(p.PID) })
		if d.has(p.PID) || !elsewhere {
			out = append(out, p)
		}
	}
	return out
}

// Device is a MIG device, which kubelet gives to pods, under the identity that kubelet and the device plugin use.
type Device struct {
	UUID      string    // "MIG-" and a UUID
	Profile   string    // "1g.10gb", "1c.3g.40gb"
	Part      Part      // the compute instance that it is
	Processes []Process // those of the instance's processes that the driver shows on this device
	Held      bool      // kubelet has given it to a pod, with a process on it or without. The agent sets it, no driver does
}

func (d Device) has(pid int) bool {
	return slices.ContainsFunc(d.Processes, func(p Process) bool { return p.PID == pid })
}

// Process is a process that NVIDIA's library reports on a GPU or an instance.
type Process struct {
	PID     int
	UsedMiB int // memory it holds on the GPU; 0 if the library does not say
}

// PIDs lists those of the processes.
func PIDs(processes []Process) []int {
	var out []int
	for _, p := range processes {
		out = append(out, p.PID)
	}
	return out
}

// GPU has the state of a GPU from one observation of it.
type GPU struct {
	UUID     UUID
	Index    int    // its position among the node's GPUs in PCI order, which config files mean by "devices: [0]"
	Minor    int    // the N of its device file /dev/nvidiaN, which need not be Index; -1 if the driver does not say
	PCI      string // bus address, "0000:17:00.0"
	DeviceID uint32 // PCI device id over vendor id, 0x233010DE for an H100 80GB
	// SubsystemID distinguishes the boards of one kind: PCI subsystem device id over its vendor id, 0x16C110DE.
	SubsystemID uint32

	Model     string // "NVIDIA H100 80GB HBM3"
	MemoryMiB int
	UsedMiB   int // memory in use, on instances too, without what the driver reserves; -1 if it does not say

	ComputeCapability ComputeCapability
	Virtualization    Virtualization

	// Lost means that the GPU has fallen off the bus: the other fields are from before, or empty. Its instances are not
	// known, and every change to it is ErrLost.
	Lost bool

	Capable bool // it can be cut into instances
	Enabled bool // MIG mode is on now
	Pending bool // MIG mode after the next reset; differs from Enabled while a reset must be restored

	Persistent bool // persistence mode is on; false too where the driver does not say

	// ComputeMode is how many processes may have a context on the GPU. With MIG mode on it is the default or unknown.
	ComputeMode ComputeMode

	Profiles  []Profile  // that it offers, whether or not MIG mode is on
	Instances []Instance // that exist, in ascending order of place
	Processes []Process  // processes on the GPU as a whole
}

// ComputeCapability is CUDA's version of a GPU's features: 9.0 for an H100. The zero value means that the driver does not
// say.
type ComputeCapability struct{ Major, Minor int }

// AtLeast reports whether it is that version or a later one.
func (c ComputeCapability) AtLeast(major, minor int) bool {
	return c.Major > major || c.Major == major && c.Minor >= minor
}

// String is the version as CUDA writes it: "9.0".
func (c ComputeCapability) String() string { return fmt.Sprintf("%d.%d", c.Major, c.Minor) }

// ComputeMode says how many processes may have a CUDA context on a GPU. Empty means that the driver does not say.
type ComputeMode string

// The compute modes.
const (
	ComputeDefault          ComputeMode = "default"           // any number
	ComputeExclusiveProcess ComputeMode = "exclusive-process" // one, as the server of MPS is, which has the others as its clients
	ComputeProhibited       ComputeMode = "prohibited"        // none
)

// Virtualization says which part of a GPU this operating system has. Empty means that the driver does not say.
type Virtualization string

// The kinds of a GPU's virtualization, as NVIDIA's library distinguishes them.
const (
	NotVirtualized    Virtualization = "none"        // bare metal
	PassedThrough     Virtualization = "passthrough" // all of it is handed to this virtual machine
	VirtualGPU        Virtualization = "vgpu"        // this is a virtual machine, and has a vGPU: a share that its host has cut
	HostOfVirtualGPUs Virtualization = "host-vgpu"   // this host cuts it into vGPUs for its virtual machines
	HostOfSharedGPUs  Virtualization = "host-vsga"   // this host draws for its virtual machines, which have no GPU of their own
)

// SwitchesAlone reports whether MIG mode goes on and off without a reset of the GPU, as on Hopper and later. A program that makes instances on such a GPU can
// turn the mode on first.
func (g GPU) SwitchesAlone() bool { return g.ComputeCapability.AtLeast(hopper, 0) }

// hopper is the major compute capability of the first GPUs whose MIG mode changes without a reset.
const hopper = 9

// Geometry gives the present geometry of the GPU.
func (g GPU) Geometry() Geometry {
	var out Geometry
	for _, i := range g.Instances {
		out = append(out, i.Placed)
	}
	out.Sort()
	return out
}

// MemorySlices is the number of memory slices that the GPU's profiles address, 0 if it offers none.
func (g GPU) MemorySlices() int { return memorySlices(g.Profiles) }

func memorySlices(profiles []Profile) int {
	n := 0
	for _, p := range profiles {
		for _, at := range p.Placements {
			n = max(n, at.End())
		}
	}
	return n
}

// Profile finds a profile of the GPU by its name.
func (g GPU) Profile(name string) (Profile, bool) {
	for _, p := range g.Profiles {
		if p.Name == name {
			return p, true
		}
	}
	return Profile{}, false
}

// Named returns the instance by this driver's name for its compute slices, attribute and place: another driver version may use another name. It
// returns p unchanged if the driver knows the name, or has no such profile.
func (g GPU) Named(p Placed) Placed {
	if _, known := g.Profile(p.Profile); known {
		return p
	}
	size, attribute := kindOf(p.Profile)
	for _, other := range g.Profiles {
		if s, a := kindOf(other.Name); s == size && a == attribute && slices.Contains(other.Placements, p.Span) {
			p.Profile = other.Name
			return p
		}
	}
	return p
}

// kindOf returns the parts of a profile's name other than its memory: "1g" and "+me" of "1g.10gb+me".
func kindOf(profile string) (size, attribute string) {
	size, memory, _ := strings.Cut(profile, ".")
	if at := strings.IndexAny(memory, "+-"); at >= 0 {
		attribute = memory[at:]
	}
	return size, attribute
}

// Request is the wanted state of one GPU, in the form of config files: by count, without places.
type Request struct {
	MIG     bool           // MIG mode on
	Devices map[string]int // count by name of the MIG device: "1g.10gb", "1c.3g.40gb"
}

// With returns the GPU once it has the devices of w, which have neither places nor UUIDs yet. A GPU that cannot be divided stays unchanged.
func (g GPU) With(w Request) GPU {
	if !g.Capable {
		return g
	}
	g.Enabled, g.Instances = w.MIG, nil
	for _, name := range slices.Sorted(maps.Keys(w.Devices)) {
		for range w.Devices[name] {
			g.Instances = append(g.Instances, Instance{Devices: []Device{{Profile: name}}})
		}
	}
	return g
}

// Event is news from the driver. It carries no state: it only says that the agent should observe again, and why.
type Event struct {
	GPU  UUID // empty if it is not known, or about all
	Kind EventKind
	Xid  uint64 // NVIDIA's error number, for EventXid

	// GI and CI are the numbers of the GPU instance and the compute instance that it is about, or WholeGPU: Instance.ID.
	GI, CI int
}

// WholeGPU stands for an instance in an Event that is about no single one.
const WholeGPU = -1

// EventKind is what an Event is about.
type EventKind string

// The kinds of events that a Driver reports.
const (
	EventXid          EventKind = "xid"
	EventECC          EventKind = "ecc"           // an uncorrectable memory error
	EventRetired      EventKind = "retired"       // memory is replaced, or no more used, after the next reset
	EventRetireFailed EventKind = "retire-failed" // it could not be
	EventPoison       EventKind = "poison"        // a memory error was contained
	EventFatalPoison  EventKind = "fatal-poison"  // a memory error was not contained
	EventUnavailable  EventKind = "unavailable"   // the GPU does not answer
	EventAction       EventKind = "action"        // another recovery action is recommended

	// EventSilence says that no news come until an EventWatching does. The driver never reports events in between.
	EventSilence  EventKind = "silence"
	EventWatching EventKind = "watching"
)

// Driver is everything the agent may do to this node's GPUs. The caller serialises calls, except to Events, which it may call at any time.
//
// Every method returns when ctx ends, at the latest. It then abandons the call into the driver, and returns ErrUnresponsive. So do all further calls
// until the driver answers again. Errors are *Error and match one of the Err… values where the cause is one that callers decide by.
type Driver interface {
	// Snapshot reports every GPU of the node in PCI order, those that are lost too. It changes nothing.
	// With no driver loaded it returns ErrNoDriver, which may pass: the next call tries again from the start.
	Snapshot(ctx context.Context) ([]GPU, error)
	// SetMode requests MIG mode on or off. A nil error may leave the change pending until a reset: Snapshot shows it.
	SetMode(ctx context.Context, gpu UUID, on bool) error
	// Create makes the GPU instance p and its compute instances at their place. It is no error if they exist
	// already. If a compute instance cannot be made, Create removes the GPU instance again.
	Create(ctx context.Context, gpu UUID, p Placed) error
	// Destroy removes the GPU instance p and its compute instances. An absent one is not an error; one with a running
	// process is ErrInUse, and stays as before.
	Destroy(ctx context.Context, gpu UUID, p Placed) error
	// CreatePart makes one compute instance, at its place in the GPU instance at p, however that is divided. It is no error if
	// the compute instance exists already; if other parts are in its place it is ErrNoRoom, and without the GPU
	// instance ErrNotFound. CreatePart touches nothing else of the GPU instance.
	CreatePart(ctx context.Context, gpu UUID, p Placed, part Part) error
	// DestroyPart removes one compute instance. The GPU instance and its other parts do not change. An absent one is not an error; one with a running
	// process is ErrInUse, and stays as before.
	DestroyPart(ctx context.Context, gpu UUID, p Placed, part Part) error
	// Reset resets the GPU: it makes a pending mode change current, and destroys every instance. A GPU with a client is ErrInUse;
	// if the GPU cannot be reset at all, as in many virtual machines, it is ErrNotSupported.
	Reset(ctx context.Context, gpu UUID) error
	// SetPersistence turns persistence mode on or off. It is no error if the mode is so already; a driver that does
	// not have the mode is ErrNotSupported.
	//
	// The driver, or NVIDIA's persistence daemon, holds a GPU in persistence mode as any client does, so that a reset of it is ErrInUse. Turning the
	// mode off on that one GPU allows the reset. It does not survive a reboot, unless the daemon sets it again.
	SetPersistence(ctx context.Context, gpu UUID, on bool) error
	// SetComputeMode sets how many processes may have a context on the GPU. It is no error if the mode is so already. It applies to processes that
	// start later: running ones continue. It does not survive a reboot or a reset.
	//
	// With MIG mode on a GPU has the default, and any other is ErrNotSupported (nvidia-smi: "Setting compute mode to EXCLUSIVE_PROCESS is not
	// supported on a MIG-enabled device"). On a vGPU all are.
	SetComputeMode(ctx context.Context, gpu UUID, mode ComputeMode) error
	// Release closes the driver, so that it can be unloaded: the kernel keeps one that a process has open. The next
	// Snapshot opens it again, and after it so does the wait for events.
	Release(ctx context.Context) error
	// Events delivers news until ctx ends, then closes the channel.
	Events(ctx context.Context) (<-chan Event, error)
}
