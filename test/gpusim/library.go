package gpusim

import (
	"cmp"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Library is NVML over a simulated node. Its methods answer like the functions of nvml.h, with the same result codes in
// the same situations. Values that a method returns with the code mean something only with Success.
//
// It is safe for concurrent use, and keeps nothing between calls but whether it is initialized. A Library of
// OpenLibrary belongs to one version of the driver: all its calls are LibRMVersionMismatch while the node has another.
type Library struct {
	store     *store
	refs      atomic.Int64
	version   string        // of the driver that it is a part of; an empty one fits them all
	outside   bool          // calls take no time, do not fail, and are not counted
	pollEvery time.Duration // how often a wait for events looks for those that other processes have caused; 0 for eventInterval
}

// Device is a handle: a GPU, or a MIG device on one. The zero value is the node's first GPU.
type Device struct {
	gpu int
	mig string // UUID; empty for a GPU
}

// GPUInstance is a handle, good until the instance is destroyed.
type GPUInstance struct {
	gpu    int
	serial uint64
}

// ComputeInstance is a handle, good until the instance is destroyed.
type ComputeInstance struct {
	gpu    int
	serial uint64
}

// Slot is where a GPU instance, a compute instance or a MIG device is, by the ids that the next one has there as well.
type Slot struct {
	gpu, gi, ci int
	mig         bool
}

// SlotOf is the slot of a handle; it returns false for the handle of something else, or of what is gone.
func (l *Library) SlotOf(handle any) (Slot, bool) {
	if l.store == nil {
		return Slot{}, false
	}
	st, err := l.store.load()
	if err != nil {
		return Slot{}, false
	}
	switch h := handle.(type) {
	case GPUInstance:
		_, i, r := st.instanceOf(h)
		if r == Success {
			return Slot{gpu: h.gpu, gi: i.ID, ci: NoInstance}, true
		}
	case ComputeInstance:
		_, i, c, r := st.computeOf(h)
		if r == Success {
			return Slot{gpu: h.gpu, gi: i.ID, ci: c.ID}, true
		}
	case Device:
		g, r := st.gpuAt(h.gpu)
		if r != Success || h.mig == "" {
			return Slot{}, false
		}
		if i, c := g.device(h.mig); c != nil {
			return Slot{gpu: h.gpu, gi: i.ID, ci: c.ID, mig: true}, true
		}
	}
	return Slot{}, false
}

// noGPU stands for the node as a whole.
const noGPU = -1

// OpenLibrary returns NVML over the node in dir, as a part of this version of the driver; empty is the node's current
// one. A missing node is DriverNotLoaded.
func OpenLibrary(dir, version string) (*Library, Return) {
	s, err := openStore(dir, nil)
	if err != nil {
		return nil, storeReturn(err)
	}
	st, err := s.load()
	if err != nil {
		return nil, storeReturn(errors.Join(err, s.close()))
	}
	return &Library{store: s, version: cmp.Or(version, st.Driver)}, Success
}

// Version is the version of the library's driver; empty for one that fits all.
func (l *Library) Version() string { return l.version }

// fits reports whether the library can talk to the driver that the node has.
func (l *Library) fits(s *state) bool { return l.version == "" || l.version == s.Driver }

// Close lets go of the node. Calls that wait return.
func (l *Library) Close() error { return l.store.close() }

func storeReturn(err error) Return {
	switch {
	case err == nil:
		return Success
	case errors.Is(err, fs.ErrNotExist):
		return DriverNotLoaded
	case errors.Is(err, fs.ErrPermission):
		return NoPermission
	default:
		return Unknown
	}
}

// befall applies the delay and the fault of a call. It returns the fault that decides the call's result, if any.
func (l *Library) befall(function string, gpu int) (Fault, bool) {
	st, err := l.store.load()
	if err != nil {
		return Fault{Return: storeReturn(err)}, true
	}
	if !l.fits(st) {
		return Fault{Return: LibRMVersionMismatch}, true
	}
	if l.outside {
		return Fault{}, false
	}
	if d := st.Delays[function]; d > 0 {
		l.store.wait(d)
	}
	if len(st.Faults[function]) == 0 {
		return Fault{}, false
	}
	uuid := ""
	if gpu >= 0 && gpu < len(st.GPUs) {
		uuid = st.GPUs[gpu].UUID
	}
	var hit Fault
	var struck bool
	if err := l.store.update(func(s *state) bool {
		hit, struck = s.strike(function, uuid)
		return true
	}); err != nil {
		return Fault{Return: storeReturn(err)}, true
	}
	if struck && hit.Hang {
		l.store.hang(function, uuid)
		return Fault{}, false
	}
	return hit, struck
}

// read runs a function that changes nothing.
func (l *Library) read(function string, gpu int, work func(*state) Return) Return {
	if l.refs.Load() <= 0 {
		return Uninitialized
	}
	if !l.outside {
		l.store.reads.add(function)
	}
	fault, struck := l.befall(function, gpu)
	if struck && !fault.Done {
		return fault.Return
	}
	st, err := l.store.load()
	if err != nil {
		return storeReturn(err)
	}
	r := work(st)
	if struck {
		return fault.Return
	}
	return r
}

// write runs a function that changes the GPUs, and counts it. Work changes something only if it returns Success.
func (l *Library) write(function string, gpu int, work func(*state) Return) Return {
	return l.writeUnder(function, gpu, func(s *state, _ *Fault) Return { return work(s) })
}

// writeUnder is write for work that handles a fault itself; it gets nil if there is none.
func (l *Library) writeUnder(function string, gpu int, work func(*state, *Fault) Return) Return {
	if l.refs.Load() <= 0 {
		return Uninitialized
	}
	fault, struck := l.befall(function, gpu)
	var r Return
	err := l.store.update(func(s *state) bool {
		if s.Calls == nil {
			s.Calls = map[string]int{}
		}
		if !l.outside {
			s.Calls[function]++
		}
		switch {
		case !struck:
			r = work(s, nil)
		case fault.Done:
			work(s, nil)
			r = fault.Return
		case fault.Return == Success:
			r = work(s, &fault)
		default:
			r = fault.Return
		}
		return true
	})
	if err != nil {
		return storeReturn(err)
	}
	return r
}

// gpuAt finds the GPU of a handle. A GPU that is lost answers nothing.
func (s *state) gpuAt(n int) (*gpu, Return) {
	if n < 0 || n >= len(s.GPUs) {
		return nil, InvalidArgument
	}
	switch h := s.GPUs[n].Health; {
	case h.Absent:
		return nil, NotFound
	case h.Lost:
		return nil, GPUIsLost
	}
	return s.GPUs[n], Success
}

// counted are the GPUs that the driver found when it was loaded, in the driver's order.
func (s *state) counted() []int {
	var out []int
	for n, g := range s.GPUs {
		if !g.Health.Absent {
			out = append(out, n)
		}
	}
	return out
}

// onGPU reads something that only a GPU has, and no MIG device.
func (l *Library) onGPU(function string, d Device, work func(g *gpu) Return) Return {
	return l.read(function, d.gpu, func(s *state) Return {
		g, r := s.gpuAt(d.gpu)
		switch {
		case r != Success:
			return r
		case d.mig != "":
			return InvalidArgument
		}
		return work(g)
	})
}

// onDevice reads something that GPUs and MIG devices have; i and c are nil for a GPU.
func (l *Library) onDevice(function string, d Device, work func(g *gpu, i *instance, c *compute) Return) Return {
	return l.onDeviceOf(function, d, func(_ *state, g *gpu, i *instance, c *compute) Return { return work(g, i, c) })
}

// onDeviceOf is onDevice for what takes more of the node than the device.
func (l *Library) onDeviceOf(function string, d Device, work func(s *state, g *gpu, i *instance, c *compute) Return) Return {
	return l.read(function, d.gpu, func(s *state) Return {
		g, r := s.gpuAt(d.gpu)
		switch {
		case r != Success:
			return r
		case d.mig == "":
			return work(s, g, nil, nil)
		}
		i, c := g.device(d.mig)
		if c == nil {
			return NotFound
		}
		return work(s, g, i, c)
	})
}

// Init opens the library for use. It counts: each Init needs its Shutdown.
func (l *Library) Init() Return {
	l.refs.Add(1)
	r := l.read(Init, noGPU, func(*state) Return { return Success })
	if r != Success {
		l.refs.Add(-1)
	}
	return r
}

// Shutdown undoes one Init.
func (l *Library) Shutdown() Return {
	r := l.read(Shutdown, noGPU, func(*state) Return { return Success })
	if r == Success {
		l.refs.Add(-1)
	}
	return r
}

// Versions are those of the driver, of NVML, and of CUDA times 1000.
func (l *Library) Versions() (driver, nvml string, cuda int, r Return) {
	r = l.read(GetDriverVersion, noGPU, func(s *state) Return {
		driver, cuda = s.Driver, s.CUDA
		nvml = "13." + s.Driver
		return Success
	})
	return driver, nvml, cuda, r
}

// DeviceCount is the number of GPUs.
func (l *Library) DeviceCount() (n int, r Return) {
	r = l.read(GetCount, noGPU, func(s *state) Return {
		n = len(s.counted())
		return Success
	})
	return n, r
}

// DeviceByIndex finds a GPU by its place in PCI order.
func (l *Library) DeviceByIndex(index int) (d Device, r Return) {
	at := index
	if st, err := l.store.load(); err == nil && index >= 0 && index < len(st.counted()) {
		at = st.counted()[index]
	}
	r = l.read(GetHandleByIndex, at, func(s *state) Return {
		if index < 0 || index >= len(s.counted()) {
			return InvalidArgument
		}
		d = Device{gpu: s.counted()[index]}
		_, r := s.gpuAt(d.gpu)
		return r
	})
	return d, r
}

// DeviceByUUID finds a GPU or a MIG device. For a MIG device it goes through all of the node.
func (l *Library) DeviceByUUID(uuid string) (d Device, r Return) {
	if strings.HasPrefix(uuid, "MIG-") {
		if r := l.walk(); r != Success {
			return d, r
		}
	}
	r = l.read(GetHandleByUUID, noGPU, func(s *state) Return {
		for n, g := range s.GPUs {
			if g.UUID == uuid {
				d = Device{gpu: n}
				_, r := s.gpuAt(n)
				return r
			}
			if _, c := g.device(uuid); c != nil {
				d = Device{gpu: n, mig: uuid}
				_, r := s.gpuAt(n)
				return r
			}
		}
		return NotFound
	})
	return d, r
}

// walk takes the handle of each MIG device of the node.
func (l *Library) walk() Return {
	st, err := l.store.load()
	if err != nil {
		return storeReturn(err)
	}
	for n, g := range st.GPUs {
		for _, i := range g.Instances {
			for range i.Compute {
				if r := l.read(WalkMIGDevice, n, func(*state) Return { return Success }); r != Success {
					return r
				}
			}
		}
	}
	return Success
}

// DeviceByPCI finds a GPU by its bus and device number; domain and function are 0 on a simulated node.
func (l *Library) DeviceByPCI(bus, slot int) (Device, Return) {
	return l.find(GetHandleByPciBusId, func(g *gpu) bool { return g.Bus == bus && g.Slot == slot })
}

// DeviceBySerial finds a GPU by its board's serial number.
func (l *Library) DeviceBySerial(serial string) (Device, Return) {
	return l.find(GetHandleBySerial, func(g *gpu) bool { return g.Serial == serial })
}

func (l *Library) find(function string, is func(*gpu) bool) (d Device, r Return) {
	r = l.read(function, noGPU, func(s *state) Return {
		n := slices.IndexFunc(s.GPUs, is)
		if n < 0 {
			return NotFound
		}
		d = Device{gpu: n}
		_, r := s.gpuAt(n)
		return r
	})
	return d, r
}

// IsMIG distinguishes a MIG device from a GPU.
func (d Device) IsMIG() bool { return d.mig != "" }

// Parent is the GPU that a MIG device is on. Other handles are NotFound, or InvalidArgument for a GPU.
func (l *Library) Parent(d Device) (parent Device, r Return) {
	r = l.onDevice(GetInstanceIds, d, func(_ *gpu, _ *instance, c *compute) Return {
		if c == nil {
			return InvalidArgument
		}
		parent = Device{gpu: d.gpu}
		return Success
	})
	return parent, r
}

// InstanceIDs are the ids of a MIG device's GPU instance and compute instance.
func (l *Library) InstanceIDs(d Device) (gi, ci int, r Return) {
	r = l.onDevice(GetInstanceIds, d, func(_ *gpu, i *instance, c *compute) Return {
		if c == nil {
			return InvalidArgument
		}
		gi, ci = i.ID, c.ID
		return Success
	})
	return gi, ci, r
}

// Initialized reports whether there has been an Init without its Shutdown.
func (l *Library) Initialized() bool { return l.refs.Load() > 0 }

// Present reports whether the node is still in its directory.
func (l *Library) Present() bool { return l.store.present() }
