package gpusim

import (
	"slices"

	"github.com/gpuslice/gpuslice/nvml"
)

// Name is the product's name; a MIG device has its profile's name after it.
func (l *Library) Name(d Device) (name string, r Return) {
	r = l.onDevice(GetName, d, func(g *gpu, i *instance, c *compute) Return {
		name = g.model().Name
		if c != nil {
			p := g.profileOf(i)
			k, _ := g.model().computeProfile(p, c.Profile)
			name += " MIG " + computeName(p, k)
		}
		return Success
	})
	return name, r
}

// UUID is the identity of the GPU or the MIG device.
func (l *Library) UUID(d Device) (uuid string, r Return) {
	r = l.onDevice(GetUUID, d, func(g *gpu, _ *instance, c *compute) Return {
		uuid = g.UUID
		if c != nil {
			uuid = c.UUID
		}
		return Success
	})
	return uuid, r
}

// Index is the number that the handle is found by again: among the node's GPUs, or among the GPU's MIG devices.
func (l *Library) Index(d Device) (index int, r Return) {
	r = l.onDeviceOf(GetIndex, d, func(s *state, _ *gpu, _ *instance, c *compute) Return {
		index = slices.Index(s.counted(), d.gpu)
		if c != nil {
			index = c.Slot
		}
		return Success
	})
	return index, r
}

// Minor is the number of the GPU's device file.
func (l *Library) Minor(d Device) (minor int, r Return) {
	r = l.onGPU(GetMinorNumber, d, func(*gpu) Return {
		minor = d.gpu
		return Success
	})
	return minor, r
}

// Serial is the board's serial number.
func (l *Library) Serial(d Device) (serial string, r Return) {
	r = l.onGPU(GetSerial, d, func(g *gpu) Return {
		serial = g.Serial
		return Success
	})
	return serial, r
}

// PCI says where and what a GPU is on the bus.
type PCI struct {
	Bus, Slot   int // bus and device number
	DeviceID    uint32
	SubsystemID uint32
	Class       uint32
	Address     string // "0000:17:00.0"
}

// PCI of a GPU. A MIG device has none of its own.
func (l *Library) PCI(d Device) (pci PCI, r Return) {
	r = l.onGPU(GetPciInfo, d, func(g *gpu) Return {
		m := g.model()
		pci = PCI{Bus: g.Bus, Slot: g.Slot, DeviceID: m.DeviceID, SubsystemID: m.SubsystemID, Class: m.Class, Address: g.address()}
		return Success
	})
	return pci, r
}

// Memory in bytes. Total is the sum of the others.
type Memory struct{ Total, Reserved, Used, Free uint64 }

// reservedMemory is what the driver keeps for itself on a GPU, in bytes, as measured on an H200.
const reservedMemory = 644_939_776

// Memory of a GPU or a MIG device.
func (l *Library) Memory(d Device) (m Memory, r Return) {
	r = l.onDevice(GetMemoryInfo, d, func(g *gpu, i *instance, c *compute) Return {
		if c != nil {
			m.Total = uint64(g.profileOf(i).MemoryMB) << 20
			for _, other := range i.Compute { // compute instances share the memory of their GPU instance
				m.Used += used(g.processes(on(other)))
			}
		} else {
			m.Total, m.Reserved = g.model().Memory, reservedMemory
			m.Used = used(g.processes(func(*process) bool { return true }))
		}
		m.Used = min(m.Used, m.Total-m.Reserved)
		m.Free = m.Total - m.Reserved - m.Used
		return Success
	})
	return m, r
}

func used(ps []*process) uint64 {
	var sum uint64
	for _, p := range ps {
		sum += uint64(p.UsedMiB) << 20
	}
	return sum
}

// Static is what never changes about a GPU.
type Static struct {
	Arch               uint32
	Brand              uint32
	Major, Minor       int // CUDA compute capability
	Cores              int
	ECC                bool
	VirtualizationMode uint32
	NUMA               int
}

// Static of a GPU; a MIG device has its GPU's.
func (l *Library) Static(d Device) (f Static, r Return) {
	r = l.onDevice(GetStatic, d, func(g *gpu, _ *instance, _ *compute) Return {
		m := g.model()
		f = Static{
			Arch: m.Arch, Brand: m.Brand, Major: m.Compute[0], Minor: m.Compute[1], Cores: m.CUDACores, ECC: true, NUMA: g.NUMA,
		}
		f.VirtualizationMode = virtualizationModes[g.Virtual]
		if g.Passthrough {
			f.VirtualizationMode = 1
		}
		return Success
	})
	return f, r
}

// Persistence reports whether the driver keeps the GPU initialized without a client. The driver then holds the GPU
// itself: no reset succeeds.
func (l *Library) Persistence(d Device) (on bool, r Return) {
	r = l.onGPU(GetPersistenceMode, d, func(g *gpu) Return {
		on = g.Persistence
		return Success
	})
	return on, r
}

// SetPersistence sets it.
func (l *Library) SetPersistence(d Device, on bool) Return {
	return l.writeGPU(SetPersistenceMode, d, func(_ *state, g *gpu, _ *Fault) Return {
		g.Persistence = on
		return Success
	})
}

// NVML_COMPUTEMODE_…: 0 is the default, and 1 was exclusive to one thread, which drivers have no more.
const (
	computeProhibited       = 2
	computeExclusiveProcess = 3
)

// ComputeMode is how many processes may have a context on the GPU.
func (l *Library) ComputeMode(d Device) (mode uint32, r Return) {
	r = l.onDevice(GetComputeMode, d, func(g *gpu, _ *instance, _ *compute) Return {
		mode = g.ComputeMode
		return Success
	})
	return mode, r
}

// SetComputeMode sets it. A GPU in MIG mode has only the default, as nvidia-smi says. A vGPU has only the default too,
// because its host shares it; that was not measured.
func (l *Library) SetComputeMode(d Device, mode uint32) Return {
	return l.writeGPU(SetComputeMode, d, func(_ *state, g *gpu, _ *Fault) Return {
		switch {
		case mode == 1 || mode > computeExclusiveProcess:
			return InvalidArgument
		case (g.Current || g.Virtual == virtualGPU) && mode != 0:
			return NotSupported
		}
		g.ComputeMode = mode
		return Success
	})
}

// Process is a process with a CUDA context.
type Process struct {
	PID    int
	Used   uint64 // bytes
	GI, CI int    // ids of its instances; NoInstance for both on a GPU as a whole
	MPS    bool   // it is a client of MPS
}

// NoInstance stands for "not on an instance".
const NoInstance = -1

// Processes on a MIG device, or on a GPU with all its MIG devices.
func (l *Library) Processes(d Device) (out []Process, r Return) {
	r = l.onDevice(GetRunningProcesses, d, func(g *gpu, _ *instance, c *compute) Return {
		for _, p := range g.processes(func(p *process) bool { return !p.Hidden && (c == nil || p.MIG == c.UUID) }) {
			at := Process{PID: p.PID, Used: used([]*process{p}), GI: NoInstance, CI: NoInstance, MPS: p.MPS}
			if i, c := g.device(p.MIG); c != nil {
				at.GI, at.CI = i.ID, c.ID
			}
			out = append(out, at)
		}
		return Success
	})
	return out, r
}

// ProcessName is the name of a process on any GPU.
func (l *Library) ProcessName(pid int) (name string, r Return) {
	r = l.read(GetRunningProcesses, noGPU, func(s *state) Return {
		for _, g := range s.GPUs {
			for _, p := range g.processes(func(p *process) bool { return p.PID == pid }) {
				name = p.Name
				return Success
			}
		}
		return NotFound
	})
	return name, r
}

// MIGMode is the mode now and after the next reset.
func (l *Library) MIGMode(d Device) (current, pending bool, r Return) {
	r = l.onGPU(GetMigMode, d, func(g *gpu) Return {
		if !g.hasMIG() {
			return NotSupported
		}
		current, pending = g.Current, g.Pending
		return Success
	})
	return current, pending, r
}

// SetMIGMode requests MIG mode on or off. Hopper and later change it at once, or refuse while a CUDA process is there.
// Ampere accepts the request and says by activation whether the mode changed: InUse while anything holds the GPU,
// persistence mode included, and ResetRequired where it cannot be reset from here.
func (l *Library) SetMIGMode(d Device, on bool) (activation, r Return) {
	r = l.writeGPU(SetMigMode, d, func(_ *state, g *gpu, f *Fault) Return {
		if !g.hasMIG() {
			return NotSupported
		}
		if f != nil { // a fault with Success says by its activation that the change is only noted
			activation = f.Activation
			if g.model().resetsForMode() {
				g.Pending = on
			}
			return Success
		}
		var r Return
		activation, r = g.setMode(on)
		return r
	})
	return activation, r
}

func (g *gpu) setMode(on bool) (activation, r Return) {
	if g.Current == on {
		g.Pending = on // takes a pending change back
		return Success, Success
	}
	if !g.model().resetsForMode() {
		// A client without a context does not matter, unless it has a MIG device open; nor does persistence mode.
		clients := g.processes(func(*process) bool { return true })
		if slices.ContainsFunc(clients, func(p *process) bool { return !p.Hidden || p.MIG != "" }) {
			return InUse, InUse
		}
	} else {
		g.Pending = on
		switch {
		case g.Passthrough:
			return ResetRequired, Success
		case g.held():
			return InUse, Success
		}
	}
	g.Current, g.Pending, g.Instances = on, on, nil
	g.ComputeMode = 0
	return Success, Success
}

// MaxMIGDevices is how many MIG devices the GPU can have in its current mode: 0 with MIG mode off.
func (l *Library) MaxMIGDevices(d Device) (n int, r Return) {
	r = l.onGPU(GetMaxMigDeviceCount, d, func(g *gpu) Return {
		if g.Current {
			n = g.model().slotCount()
		}
		return Success
	})
	return n, r
}

// MIGDevice finds a MIG device by its index on the GPU. Indices may have gaps.
func (l *Library) MIGDevice(d Device, index int) (mig Device, r Return) {
	r = l.onGPU(GetMigDeviceHandleByIndex, d, func(g *gpu) Return {
		if index < 0 {
			return InvalidArgument
		}
		for _, i := range g.Instances {
			for _, c := range i.Compute {
				if c.Slot == index {
					mig = Device{gpu: d.gpu, mig: c.UUID}
					return Success
				}
			}
		}
		return NotFound
	})
	return mig, r
}

// Attributes say what a MIG device is made of.
type Attributes struct {
	SMs           int
	Engines       nvml.Engines
	Slices        int // of the GPU instance
	ComputeSlices int
	MemoryMB      int
}

// Attributes of a MIG device. A GPU has none: NotSupported.
func (l *Library) Attributes(d Device) (a Attributes, r Return) {
	r = l.onDevice(GetAttributes, d, func(g *gpu, i *instance, c *compute) Return {
		if c == nil {
			return NotSupported
		}
		p := g.profileOf(i)
		k, _ := g.model().computeProfile(p, c.Profile)
		a = Attributes{SMs: k.SMs, Engines: p.Engines, Slices: p.Slices, ComputeSlices: k.Slices, MemoryMB: p.MemoryMB}
		return Success
	})
	return a, r
}

// writeGPU changes something of a GPU.
func (l *Library) writeGPU(function string, d Device, work func(*state, *gpu, *Fault) Return) Return {
	return l.writeUnder(function, d.gpu, func(s *state, f *Fault) Return {
		g, r := s.gpuAt(d.gpu)
		switch {
		case r != Success:
			return r
		case d.mig != "":
			return InvalidArgument
		}
		return work(s, g, f)
	})
}

// Reset resets a GPU like nvidia-smi: the pending mode becomes current, and every instance is gone. It is InUse while
// anything holds the GPU, persistence mode included, and NotSupported where the GPU is handed through to a virtual
// machine.
func (l *Library) Reset(d Device) Return {
	return l.writeUnder(Reset, d.gpu, func(s *state, _ *Fault) Return {
		if d.gpu < 0 || d.gpu >= len(s.GPUs) || d.mig != "" {
			return InvalidArgument
		}
		g := s.GPUs[d.gpu]
		switch {
		case g.Passthrough || g.Virtual == virtualGPU:
			return NotSupported
		case g.Health.Lost:
			return GPUIsLost
		case g.held():
			return InUse
		}
		g.Current, g.Instances = g.Pending, nil
		g.ComputeMode = 0
		g.Health = g.Health.reset()
		return Success
	})
}
