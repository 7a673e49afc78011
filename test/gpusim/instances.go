package gpusim

import (
	"slices"

	"github.com/gpuslice/gpuslice/nvml"
)

// GPUInstanceProfile describes one kind of GPU instance.
type GPUInstanceProfile struct {
	ID       int
	Name     string // "1g.10gb", without the "MIG " that NVML puts before it
	Slices   int
	Count    int
	SMs      int
	MemoryMB int
	Engines  nvml.Engines
	Graphics bool
}

// GPUInstanceProfile describes the profile of a kind, NVML_GPU_INSTANCE_PROFILE_…. It answers with MIG mode off too.
func (l *Library) GPUInstanceProfile(d Device, kind int) (out GPUInstanceProfile, r Return) {
	r = l.onGPU(GetGpuInstanceProfileInfo, d, func(g *gpu) Return {
		if kind < 0 || kind >= knownKinds {
			return InvalidArgument
		}
		p := g.model().profileOfKind(kind)
		if p == nil || !g.hasMIG() {
			return NotSupported
		}
		out = g.about(p)
		return Success
	})
	return out, r
}

// GPUInstanceProfileByID describes the profile with an id.
func (l *Library) GPUInstanceProfileByID(d Device, id int) (out GPUInstanceProfile, r Return) {
	r = l.onProfile(GetGpuInstanceProfileInfo, d, id, func(g *gpu, p *profile) Return {
		out = g.about(p)
		return Success
	})
	return out, r
}

func (g *gpu) about(p *profile) GPUInstanceProfile {
	count, wrong := g.Counts[p.Name]
	if !wrong {
		count = p.Count
	}
	return GPUInstanceProfile{
		ID: p.ID, Name: p.Name, Slices: p.Slices, Count: count, SMs: p.SMs, MemoryMB: p.MemoryMB, Engines: p.Engines,
		Graphics: p.Kind == kind1Graphics || p.Kind == kind2Graphics || p.Kind == kind4Graphics,
	}
}

func (l *Library) onProfile(function string, d Device, id int, work func(*gpu, *profile) Return) Return {
	return l.onGPU(function, d, func(g *gpu) Return {
		if !g.hasMIG() {
			return NotSupported
		}
		p := g.model().profile(id)
		if p == nil {
			return InvalidArgument
		}
		return work(g, p)
	})
}

// Placements are all places where instances of a profile may stand, taken or not.
func (l *Library) Placements(d Device, id int) (out []nvml.Span, r Return) {
	r = l.onProfile(GetGpuInstancePossiblePlacements, d, id, func(_ *gpu, p *profile) Return {
		for _, s := range p.Starts {
			out = append(out, nvml.Span{Start: s, Size: p.Size})
		}
		return Success
	})
	return out, r
}

// Capacity is how many more instances of a profile fit.
func (l *Library) Capacity(d Device, id int) (n int, r Return) {
	r = l.onProfile(GetGpuInstanceRemainingCapacity, d, id, func(g *gpu, p *profile) Return {
		n = g.capacity(p)
		return Success
	})
	return n, r
}

// GPUInstances are the instances of one profile.
func (l *Library) GPUInstances(d Device, id int) (out []GPUInstance, r Return) {
	r = l.onProfile(GetGpuInstances, d, id, func(g *gpu, _ *profile) Return {
		for _, i := range g.Instances {
			if i.Profile == id {
				out = append(out, GPUInstance{d.gpu, i.Serial})
			}
		}
		return Success
	})
	return out, r
}

// GPUInstanceByID finds an instance by its id.
func (l *Library) GPUInstanceByID(d Device, id int) (out GPUInstance, r Return) {
	r = l.onGPU(GetGpuInstanceById, d, func(g *gpu) Return {
		for _, i := range g.Instances {
			if i.ID == id {
				out = GPUInstance{d.gpu, i.Serial}
				return Success
			}
		}
		return NotFound
	})
	return out, r
}

// CreateGPUInstance makes an instance of the profile with an id, where the driver thinks best. It is
// InsufficientResources if there is no room, and NotSupported with MIG mode off.
func (l *Library) CreateGPUInstance(d Device, id int) (GPUInstance, Return) {
	return l.create(CreateGpuInstance, d, id, func(g *gpu, p *profile) (int, Return) {
		start, ok := g.choose(p)
		if !ok {
			return 0, InsufficientResources
		}
		return start, Success
	})
}

// CreateGPUInstanceAt makes it at a place. A place that the profile does not have is InvalidArgument.
func (l *Library) CreateGPUInstanceAt(d Device, id int, at nvml.Span) (GPUInstance, Return) {
	return l.create(CreateGpuInstanceWithPlacement, d, id, func(g *gpu, p *profile) (int, Return) {
		switch {
		case at.Size != p.Size || !slices.Contains(p.Starts, at.Start):
			return 0, InvalidArgument
		case !g.room(p, at.Start):
			return 0, InsufficientResources
		}
		return at.Start, Success
	})
}

func (l *Library) create(function string, d Device, id int, place func(*gpu, *profile) (int, Return)) (out GPUInstance, r Return) {
	r = l.writeGPU(function, d, func(s *state, g *gpu, _ *Fault) Return {
		if !g.Current {
			return NotSupported
		}
		p := g.model().profile(id)
		if p == nil {
			return InvalidArgument
		}
		start, r := place(g, p)
		if r != Success {
			return r
		}
		i := &instance{Serial: s.next(), ID: g.model().instanceID(p.Size, start), Profile: p.ID, Start: start}
		g.Instances = append(g.Instances, i)
		slices.SortFunc(g.Instances, func(a, b *instance) int { return a.Start - b.Start })
		out = GPUInstance{d.gpu, i.Serial}
		return Success
	})
	return out, r
}

// GPUInstanceFacts describe a GPU instance that exists.
type GPUInstanceFacts struct {
	Device  Device
	ID      int
	Profile int
	At      nvml.Span
}

// DescribeGPUInstance says what and where an instance is. It is NotFound for a destroyed instance.
func (l *Library) DescribeGPUInstance(h GPUInstance) (f GPUInstanceFacts, r Return) {
	r = l.onInstance(GpuInstanceGetInfo, h, func(g *gpu, i *instance) Return {
		f = GPUInstanceFacts{
			Device: Device{gpu: h.gpu}, ID: i.ID, Profile: i.Profile,
			At: nvml.Span{Start: i.Start, Size: g.profileOf(i).Size},
		}
		return Success
	})
	return f, r
}

func (l *Library) onInstance(function string, h GPUInstance, work func(*gpu, *instance) Return) Return {
	return l.read(function, h.gpu, func(s *state) Return {
		g, i, r := s.instanceOf(h)
		if r != Success {
			return r
		}
		return work(g, i)
	})
}

func (s *state) instanceOf(h GPUInstance) (*gpu, *instance, Return) {
	g, r := s.gpuAt(h.gpu)
	if r != Success {
		return nil, nil, r
	}
	i := g.instance(h.serial)
	if i == nil {
		return nil, nil, NotFound
	}
	return g, i, Success
}

// DestroyGPUInstance removes an instance. It is InUse while compute instances stand in it.
func (l *Library) DestroyGPUInstance(h GPUInstance) Return {
	return l.write(GpuInstanceDestroy, h.gpu, func(s *state) Return {
		g, i, r := s.instanceOf(h)
		switch {
		case r != Success:
			return r
		case len(i.Compute) > 0:
			return InUse
		}
		g.Instances = slices.DeleteFunc(g.Instances, func(o *instance) bool { return o == i })
		return Success
	})
}

// ComputeInstanceProfile describes one kind of compute instance within a GPU instance.
type ComputeInstanceProfile struct {
	ID      int
	Name    string // "3g.40gb", "1c.3g.40gb"
	Slices  int
	Count   int
	SMs     int
	Engines nvml.Engines
}

// ComputeInstanceProfile describes the profile of a kind, NVML_COMPUTE_INSTANCE_PROFILE_…. Its engines are always
// shared: any other engine profile is InvalidArgument.
func (l *Library) ComputeInstanceProfile(h GPUInstance, kind, engineProfile int) (out ComputeInstanceProfile, r Return) {
	r = l.onInstance(GetComputeInstanceProfileInfo, h, func(g *gpu, i *instance) Return {
		if kind < 0 || kind >= computeKinds || engineProfile != 0 {
			return InvalidArgument
		}
		p := g.profileOf(i)
		c, ok := g.model().computeProfile(p, kind)
		if !ok {
			return NotSupported
		}
		out = ComputeInstanceProfile{
			ID: c.ID, Name: computeName(p, c), Slices: c.Slices, Count: len(c.Starts), SMs: c.SMs, Engines: p.Engines,
		}
		return Success
	})
	return out, r
}

func (l *Library) onComputeProfile(function string, h GPUInstance, id int, work func(*gpu, *instance, computeProfile) Return) Return {
	return l.onInstance(function, h, func(g *gpu, i *instance) Return {
		c, ok := g.model().computeProfile(g.profileOf(i), id)
		if !ok {
			return InvalidArgument
		}
		return work(g, i, c)
	})
}

// ComputePlacements are all places where compute instances of a profile may stand, taken or not.
func (l *Library) ComputePlacements(h GPUInstance, id int) (out []nvml.Span, r Return) {
	r = l.onComputeProfile(GetComputeInstancePlacements, h, id, func(_ *gpu, _ *instance, c computeProfile) Return {
		for _, s := range c.Starts {
			out = append(out, nvml.Span{Start: s, Size: c.Slices})
		}
		return Success
	})
	return out, r
}

// ComputeCapacity is how many more compute instances of a profile fit.
func (l *Library) ComputeCapacity(h GPUInstance, id int) (n int, r Return) {
	r = l.onComputeProfile(GetComputeInstanceRemaining, h, id, func(g *gpu, i *instance, c computeProfile) Return {
		n = len(g.computeStarts(i, c))
		return Success
	})
	return n, r
}

// ComputeInstances are the compute instances of one profile.
func (l *Library) ComputeInstances(h GPUInstance, id int) (out []ComputeInstance, r Return) {
	r = l.onComputeProfile(GetComputeInstances, h, id, func(_ *gpu, i *instance, _ computeProfile) Return {
		for _, c := range i.Compute {
			if c.Profile == id {
				out = append(out, ComputeInstance{h.gpu, c.Serial})
			}
		}
		return Success
	})
	return out, r
}

// ComputeInstanceByID finds a compute instance by its id.
func (l *Library) ComputeInstanceByID(h GPUInstance, id int) (out ComputeInstance, r Return) {
	r = l.onInstance(GetComputeInstanceById, h, func(_ *gpu, i *instance) Return {
		for _, c := range i.Compute {
			if c.ID == id {
				out = ComputeInstance{h.gpu, c.Serial}
				return Success
			}
		}
		return NotFound
	})
	return out, r
}

// CreateComputeInstance makes a compute instance at the lowest place that is free.
func (l *Library) CreateComputeInstance(h GPUInstance, id int) (ComputeInstance, Return) {
	return l.createCompute(CreateComputeInstance, h, id, func(free []int, _ computeProfile) (int, Return) {
		if len(free) == 0 {
			return 0, InsufficientResources
		}
		return free[0], Success
	})
}

// CreateComputeInstanceAt makes it at a place. A place that the profile does not have is InvalidArgument.
func (l *Library) CreateComputeInstanceAt(h GPUInstance, id int, at nvml.Span) (ComputeInstance, Return) {
	return l.createCompute(CreateComputeInstanceWithPlacement, h, id, func(free []int, c computeProfile) (int, Return) {
		switch {
		case at.Size != c.Slices || !slices.Contains(c.Starts, at.Start):
			return 0, InvalidArgument
		case !slices.Contains(free, at.Start):
			return 0, InsufficientResources
		}
		return at.Start, Success
	})
}

func (l *Library) createCompute(function string, h GPUInstance, id int, place func([]int, computeProfile) (int, Return)) (out ComputeInstance, r Return) {
	r = l.write(function, h.gpu, func(s *state) Return {
		g, i, r := s.instanceOf(h)
		if r != Success {
			return r
		}
		k, ok := g.model().computeProfile(g.profileOf(i), id)
		if !ok {
			return InvalidArgument
		}
		start, r := place(g.computeStarts(i, k), k)
		if r != Success {
			return r
		}
		var ids []int
		for _, c := range i.Compute {
			ids = append(ids, c.ID)
		}
		n := s.next()
		i.Compute = append(i.Compute, &compute{
			Serial: n, ID: lowestFree(ids), Profile: k.ID, Start: start, Slot: g.freeSlot(),
			UUID: "MIG-" + identity(s.Seed, "mig", n),
		})
		slices.SortFunc(i.Compute, func(a, b *compute) int { return a.Start - b.Start })
		out = ComputeInstance{h.gpu, n}
		return Success
	})
	return out, r
}

// ComputeInstanceFacts describe a compute instance that exists.
type ComputeInstanceFacts struct {
	Device      Device // the MIG device
	Parent      Device // the GPU
	GPUInstance GPUInstance
	ID          int
	Profile     int
	At          nvml.Span
}

// DescribeComputeInstance says what and where a compute instance is. It is NotFound for a destroyed one.
func (l *Library) DescribeComputeInstance(h ComputeInstance) (f ComputeInstanceFacts, r Return) {
	r = l.read(ComputeInstanceGetInfo, h.gpu, func(s *state) Return {
		_, i, c, r := s.computeOf(h)
		if r != Success {
			return r
		}
		f = ComputeInstanceFacts{
			Device: Device{gpu: h.gpu, mig: c.UUID}, Parent: Device{gpu: h.gpu}, GPUInstance: GPUInstance{h.gpu, i.Serial},
			ID: c.ID, Profile: c.Profile, At: nvml.Span{Start: c.Start, Size: computeSlices[c.Profile]},
		}
		return Success
	})
	return f, r
}

func (s *state) computeOf(h ComputeInstance) (*gpu, *instance, *compute, Return) {
	g, r := s.gpuAt(h.gpu)
	if r != Success {
		return nil, nil, nil, r
	}
	for _, i := range g.Instances {
		for _, c := range i.Compute {
			if c.Serial == h.serial {
				return g, i, c, Success
			}
		}
	}
	return nil, nil, nil, NotFound
}

// DestroyComputeInstance removes a compute instance. It is InUse while a process is on it.
func (l *Library) DestroyComputeInstance(h ComputeInstance) Return {
	return l.write(ComputeInstanceDestroy, h.gpu, func(s *state) Return {
		g, i, c, r := s.computeOf(h)
		switch {
		case r != Success:
			return r
		case g.busy(c):
			return InUse
		}
		i.Compute = slices.DeleteFunc(i.Compute, func(o *compute) bool { return o == c })
		return Success
	})
}
