package lib

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
)

const mebibyte = 1 << 20

// Snapshot implements nvml.Driver.
func (d *Driver) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	var out []nvml.GPU
	d.released.Store(false)
	err := d.call(ctx, "reading the GPUs", "", func(ctx context.Context, s *session) (err error) {
		out, err = s.snapshot(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (s *session) snapshot(ctx context.Context) ([]nvml.GPU, error) {
	n, ret := s.lib.DeviceGetCount()
	if err := check("counting GPUs", "", ret); err != nil {
		return nil, err
	}
	var out []nvml.GPU
	lost := 0
	for i := range n {
		if ctx.Err() != nil { // the caller has given up
			return nil, ctx.Err()
		}
		g, err := s.gpu(i)
		if errors.Is(err, nvml.ErrLost) {
			g, err = s.known.gpu(i), nil
			g.Lost = true
			lost++
		}
		if err != nil {
			return nil, err
		}
		out = append(out, g)
	}
	s.useless = lost > 0 && lost == n
	return out, nil
}

// gpu reads one GPU.
func (s *session) gpu(index int) (nvml.GPU, error) {
	d, err := s.deviceAt(index)
	if err != nil {
		return nvml.GPU{}, err
	}
	m, err := s.model(index, d)
	if err != nil {
		return nvml.GPU{}, err
	}
	mode, err := s.mode(d)
	if err != nil {
		return nvml.GPU{}, err
	}
	var standing []instance
	if mode.current {
		if standing, err = s.instances(d, m); err != nil {
			return nvml.GPU{}, err
		}
		if len(standing) == 0 {
			s.count(d, m)
		}
	} else {
		s.stands(d.uuid, nil)
	}
	rest, err := s.attribute(d, standing)
	if err != nil {
		return nvml.GPU{}, err
	}
	persistent, err := s.persistent(d)
	if err != nil && !isUnsupported(err) {
		return nvml.GPU{}, err
	}
	compute, err := s.computeMode(d, mode)
	if err != nil {
		return nvml.GPU{}, err
	}
	used, err := s.usedMiB(d.Device, d.uuid)
	if err != nil {
		return nvml.GPU{}, err
	}
	g := s.known.gpu(index) // after the instances were read, which completes the profiles
	g.Capable, g.Enabled, g.Pending, g.Processes = mode.capable, mode.current, mode.pending, rest
	g.Persistent, g.ComputeMode, g.UsedMiB = persistent, compute, used
	for _, i := range standing {
		g.Instances = append(g.Instances, i.Instance)
	}
	return g, nil
}

// count asks an empty GPU, once, how many instances of each profile it holds. The profiles are wrong about that on some GPUs.
func (s *session) count(d device, m *model) {
	if m.counted || !s.has("nvmlDeviceGetGpuInstanceRemainingCapacity") {
		return
	}
	m.counted = true
	for n := range m.profiles {
		p := &m.profiles[n]
		free, ret := askTwice(func() (int, nv.Return) { return d.GetGpuInstanceRemainingCapacity(&p.info) })
		switch {
		case ret == nv.SUCCESS && free > 0:
			p.Max = free
		case ret != nv.SUCCESS && !isNotProvided(ret):
			m.counted = false // the next observation asks again
		}
	}
}

// gpu gives the known properties of a GPU without a call.
func (m modelCache) gpu(index int) nvml.GPU {
	known := m[index]
	if known == nil {
		return nvml.GPU{Index: index, Minor: -1, UsedMiB: -1}
	}
	g := nvml.GPU{
		UUID: known.uuid, Index: index, Minor: known.minor, PCI: known.pci, DeviceID: known.id, SubsystemID: known.subsystem, Model: known.name,
		MemoryMiB: int(known.memory / mebibyte), //nolint:gosec // a GPU's memory in MiB fits
		UsedMiB:   -1,
		Capable:   len(known.profiles) > 0,

		ComputeCapability: known.capability, Virtualization: known.virtualization,
	}
	for _, p := range known.profiles {
		p.Placements, p.Compute = slices.Clone(p.Placements), slices.Clone(p.Compute)
		g.Profiles = append(g.Profiles, p.Profile)
	}
	return g
}

// instance is an existing GPU instance, with its handles.
type instance struct {
	nvml.Instance
	handle  nv.GpuInstance
	id      uint32
	profile *profile
	compute []compute // in the order of Devices
}

// compute is an existing compute instance.
type compute struct {
	handle nv.ComputeInstance
	device nv.Device // the MIG device that it makes
	uuid   string
	slices int
	start  uint32 // compute slice within the GPU instance
	kind   uint32 // id of its profile
	id     uint32
}

// part gives the compute instance as package nvml has it.
func (c compute) part() nvml.Part {
	return nvml.Part{Name: fmt.Sprintf("%dc", c.slices), Span: nvml.Span{Start: int(c.start), Size: c.slices}}
}

// instances finds the instances of a GPU, in order of place. It walks GPU instances rather than MIG devices: a half-made
// instance has no device.
func (s *session) instances(d device, m *model) ([]instance, error) {
	var out []instance
	for n := range m.profiles {
		p := &m.profiles[n]
		// The library writes as many handles as there are, so that a count it gives too small would be fatal.
		info := p.info
		info.InstanceCount = max(info.InstanceCount, 16)
		handles, ret := d.GetGpuInstances(&info)
		if err := check("listing the instances of "+p.Name, d.uuid, ret); err != nil {
			return nil, err
		}
		for _, h := range handles {
			i, err := s.instance(d, p, h)
			if err != nil {
				return nil, err
			}
			out = append(out, i)
		}
	}
	slices.SortFunc(out, func(a, b instance) int { return nvml.ComparePlaced(a.Placed, b.Placed) })
	s.stands(d.uuid, out)
	return out, nil
}

// instance reads one GPU instance with its compute instances.
func (s *session) instance(d device, p *profile, handle nv.GpuInstance) (instance, error) {
	info, ret := handle.GetInfo()
	if err := check("reading an instance of "+p.Name, d.uuid, ret); err != nil {
		return instance{}, err
	}
	i := instance{handle: handle, id: info.Id, profile: p}
	i.ID = int(info.Id)
	i.Profile = p.Name
	i.Span = nvml.Span{Start: int(info.Placement.Start), Size: int(info.Placement.Size)}
	if err := s.askCompute(d, &i); err != nil {
		return instance{}, err
	}
	if err := s.readCompute(d, &i); err != nil {
		return instance{}, err
	}
	i.describe()
	i.UsedMiB = -1
	if len(i.compute) > 0 { // each of them reports all
		var err error
		if i.UsedMiB, err = s.usedMiB(i.compute[0].device, d.uuid); err != nil {
			return instance{}, err
		}
	}
	return i, nil
}

// askCompute asks an instance, once, how instances of its profile can be divided.
func (s *session) askCompute(d device, i *instance) error {
	p := i.profile
	if p.compute != nil {
		return nil
	}
	var offered []nvml.ComputeProfile
	var all []nv.ComputeInstanceProfileInfo
	for kind := range nv.COMPUTE_INSTANCE_PROFILE_COUNT {
		info, ret := askTwice(func() (nv.ComputeInstanceProfileInfo, nv.Return) {
			return i.handle.GetComputeInstanceProfileInfo(kind, nv.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
		})
		if isAbsent(ret) {
			continue
		}
		if err := check(fmt.Sprintf("reading compute profile %d of %s", kind, p.Name), d.uuid, ret); err != nil {
			return err
		}
		all = append(all, info)
		// The kinds from here on are variants of those before, which have no names of their own in configurations.
		if kind < nv.COMPUTE_INSTANCE_PROFILE_1_SLICE_REV1 && info.InstanceCount > 0 {
			c := computeProfile(int(info.SliceCount), int(info.InstanceCount))
			var err error
			if c.Placements, err = s.computePlacements(d, i, info, c.Name); err != nil {
				return err
			}
			offered = append(offered, c)
		}
	}
	slices.SortFunc(offered, func(a, b nvml.ComputeProfile) int { return cmp.Compare(a.Slices, b.Slices) })
	p.compute, p.Compute = all, offered
	return nil
}

// placesCompute reports whether the driver reports and takes places of compute instances. Older ones do not.
func (s *session) placesCompute() bool {
	return s.has("nvmlGpuInstanceGetComputeInstancePossiblePlacements") && s.has("nvmlGpuInstanceCreateComputeInstanceWithPlacement")
}

// computePlacements lists the possible places of compute instances of a profile in the instance, taken or not. It is no error if the
// driver does not report them.
func (s *session) computePlacements(d device, i *instance, info nv.ComputeInstanceProfileInfo, name string) ([]nvml.Span, error) {
	if !s.placesCompute() {
		return nil, nil
	}
	places, ret := askTwice(func() ([]nv.ComputeInstancePlacement, nv.Return) {
		return i.handle.GetComputeInstancePossiblePlacements(&info)
	})
	if isNotProvided(ret) {
		return nil, nil
	}
	if err := check("reading the placements of "+name+"."+i.profile.Name, d.uuid, ret); err != nil {
		return nil, err
	}
	var out []nvml.Span
	for _, at := range places {
		out = append(out, nvml.Span{Start: int(at.Start), Size: int(at.Size)})
	}
	slices.SortFunc(out, func(a, b nvml.Span) int { return cmp.Compare(a.Start, b.Start) })
	return out, nil
}

// readCompute finds the compute instances of a GPU instance.
func (s *session) readCompute(d device, i *instance) error {
	for _, info := range i.profile.compute {
		roomy := info
		roomy.InstanceCount = max(info.InstanceCount, 16)
		handles, ret := i.handle.GetComputeInstances(&roomy)
		if err := check(fmt.Sprintf("listing the compute instances of %v", i.Placed), d.uuid, ret); err != nil {
			return err
		}
		for _, h := range handles {
			c, known := s.stillThere(d, i, h, info.Id)
			if !known {
				var err error
				if c, err = readDevice(d, i, h); err != nil {
					return err
				}
				c.slices, c.kind = int(info.SliceCount), info.Id
			}
			i.compute = append(i.compute, c)
		}
	}
	slices.SortFunc(i.compute, func(a, b compute) int {
		return cmp.Or(cmp.Compare(a.slices, b.slices), cmp.Compare(a.start, b.start))
	})
	return nil
}

// readDevice reads a compute instance and the MIG device that it makes. On a large node each device may take a tenth of a second, and to find one by
// its index takes seconds.
func readDevice(d device, i *instance, h nv.ComputeInstance) (compute, error) {
	about, ret := h.GetInfo()
	if err := check(fmt.Sprintf("reading a compute instance of %v", i.Placed), d.uuid, ret); err != nil {
		return compute{}, err
	}
	uuid, ret := about.Device.GetUUID()
	if err := check(fmt.Sprintf("reading the UUID of a device of %v", i.Placed), d.uuid, ret); err != nil {
		return compute{}, err
	}
	return compute{handle: h, device: about.Device, uuid: uuid, start: about.Placement.Start, id: about.Id}, nil
}

// stillThere returns a compute instance as the last reading had it, without readDevice. Another program may have destroyed the instance since, and the
// next one may have its ids, its place, and the library's handles. So the MIG device has to answer by the same UUID.
func (s *session) stillThere(d device, i *instance, h nv.ComputeInstance, kind uint32) (compute, bool) {
	was, known := s.stood[slot{d.uuid, i.id}]
	if !known || was.handle != i.handle || was.Profile != i.Profile || was.Span != i.Span {
		return compute{}, false
	}
	at := slices.IndexFunc(was.compute, func(c compute) bool { return c.handle == h && c.kind == kind })
	if at < 0 || was.compute[at].slices != i.profile.Slices { // a part may have moved within its GPU instance, and have the UUID that it had
		return compute{}, false
	}
	uuid, ret := was.compute[at].device.GetUUID()
	return was.compute[at], ret == nv.SUCCESS && uuid == was.compute[at].uuid
}

// describe fills in the division of an instance and its devices, as package nvml has them.
func (i *instance) describe() {
	i.Compute = layout(i.compute, i.profile.Slices)
	i.Devices = nil
	for n, c := range i.compute {
		i.Devices = append(i.Devices, nvml.Device{UUID: c.uuid, Profile: i.Placed.Devices()[n], Part: c.part()})
	}
}

// layout names compute instances as nvml.Placed does.
func layout(parts []compute, whole int) string {
	if len(parts) == 1 && parts[0].slices == whole {
		return ""
	}
	out := ""
	for n, c := range parts {
		if n > 0 {
			out += "+"
		}
		out += fmt.Sprintf("%dc", c.slices)
	}
	return out
}

// attribute finds the processes of a GPU, gives those that are on an instance to it, and to the device of it that they are on, and
// returns the others.
func (s *session) attribute(d device, standing []instance) ([]nvml.Process, error) {
	found, err := s.processes(d.Device, d.uuid, "the GPU")
	if err != nil {
		return nil, err
	}
	var rest []nvml.Process
	for _, p := range found {
		at := slices.IndexFunc(standing, func(i instance) bool { return i.id == p.GpuInstanceId })
		if at < 0 {
			rest = merge(rest, p)
			continue
		}
		i := &standing[at]
		i.Processes = merge(i.Processes, p)
		if on := slices.IndexFunc(i.compute, func(c compute) bool { return c.id == p.ComputeInstanceId }); on >= 0 {
			i.Devices[on].Processes = merge(i.Devices[on].Processes, p)
		}
	}
	for n := range standing {
		i := &standing[n]
		for on, c := range i.compute {
			found, err := s.processes(c.device, d.uuid, i.String())
			if err != nil {
				return nil, err
			}
			for _, p := range found {
				i.Processes = merge(i.Processes, p)
				i.Devices[on].Processes = merge(i.Devices[on].Processes, p)
			}
		}
	}
	return rest, nil
}

// processes lists those on a GPU or a MIG device, of each kind. It is an error if the driver does not say: the GPU must not count
// as idle then.
func (s *session) processes(d nv.Device, gpu nvml.UUID, on string) ([]nv.ProcessInfo, error) {
	queries := []func() ([]nv.ProcessInfo, nv.Return){d.GetComputeRunningProcesses, d.GetGraphicsRunningProcesses}
	if s.has("nvmlDeviceGetMPSComputeRunningProcesses_v3") {
		queries = append(queries, d.GetMPSComputeRunningProcesses)
	}
	var out []nv.ProcessInfo
	for _, query := range queries {
		found, ret := query()
		err := check("listing the processes on "+on, gpu, ret)
		if isUnsupported(err) { // this kind of process cannot be there
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, found...)
	}
	return out, nil
}

// merge adds a process to a list in order of process id, once.
func merge(list []nvml.Process, found nv.ProcessInfo) []nvml.Process {
	p := nvml.Process{PID: int(found.Pid)}
	if found.UsedGpuMemory != math.MaxUint64 { // the library's value for unknown
		p.UsedMiB = int(found.UsedGpuMemory / mebibyte) //nolint:gosec // a GPU's memory in MiB fits
	}
	at, there := slices.BinarySearchFunc(list, p, func(a, b nvml.Process) int { return cmp.Compare(a.PID, b.PID) })
	if there {
		list[at].UsedMiB = max(list[at].UsedMiB, p.UsedMiB)
		return list
	}
	return slices.Insert(list, at, p)
}
