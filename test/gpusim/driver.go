package gpusim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gpuslice/gpuslice/nvml"
)

// Driver returns the node's GPUs as the agent sees them, without go-nvml and without cgo. It stands for a process that
// loads the library now. After an Upgrade each of its calls is nvml.ErrReplaced, and only a new Driver works.
func (n *Node) Driver() nvml.Driver { return n.driver() }

// Outside is Driver for whoever prepares a node or observes it from outside: its calls take no time, do not fail by a
// fault, and are not counted.
func (n *Node) Outside() nvml.Driver {
	d := n.driver()
	d.library.outside = true
	return d
}

// Health returns what the node's GPUs report about themselves, as Driver does.
func (n *Node) Health() nvml.HealthReader { return n.driver() }

func (n *Node) driver() *driver {
	l := n.Library()
	l.version, l.pollEvery = n.DriverVersion(), eventIntervalInside
	return &driver{library: l, known: map[int]nvml.GPU{}}
}

// driver makes Library calls where the agent's real driver makes go-nvml calls. So a fault or a delay of a function
// affects both in the same way.
type driver struct {
	library *Library
	known   map[int]nvml.GPU // by index, the constant facts: all that is left to say of a lost GPU

	mu    sync.Mutex
	stuck chan struct{} // closed when the call that outlived its context has come back; nil if there was none
}

// do completes one call, or abandons it when ctx ends first. Then this call is ErrUnresponsive, and so are all calls
// until it returns.
func (d *driver) do(ctx context.Context, op string, gpu nvml.UUID, call func() error) error {
	unresponsive := &nvml.Error{Op: op, GPU: gpu, Err: nvml.ErrUnresponsive}
	d.mu.Lock()
	if d.stuck != nil {
		select {
		case <-d.stuck:
			d.stuck = nil
		default:
			d.mu.Unlock()
			return unresponsive
		}
	}
	d.mu.Unlock()

	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = d.inside(op, gpu, call)
	}()
	select {
	case <-done:
		return err
	case <-ctx.Done():
		d.mu.Lock()
		defer d.mu.Unlock()
		d.stuck = done
		return unresponsive
	}
}

// inside runs one call with the library initialized.
func (d *driver) inside(op string, gpu nvml.UUID, call func() error) error {
	r := d.library.Init()
	err := failure(op, gpu, r)
	if err == nil {
		err = call()
		d.library.Shutdown() // it fails only by a fault, and the call is done anyway
	}
	if st, loadErr := d.library.store.load(); loadErr == nil && !d.library.fits(st) && errors.Is(err, nvml.ErrNoDriver) {
		return &nvml.Error{Op: op, GPU: gpu, Code: LibRMVersionMismatch.String(), Err: nvml.ErrReplaced}
	}
	return err
}

func failure(op string, gpu nvml.UUID, r Return) error {
	if r == Success {
		return nil
	}
	cause := map[Return]error{
		InUse: nvml.ErrInUse, NotSupported: nvml.ErrNotSupported, NotFound: nvml.ErrNotFound, NoPermission: nvml.ErrPermission,
		InsufficientResources: nvml.ErrNoRoom, ResetRequired: nvml.ErrResetRequired, GPUIsLost: nvml.ErrLost,
		DriverNotLoaded: nvml.ErrNoDriver, LibraryNotFound: nvml.ErrNoDriver, LibRMVersionMismatch: nvml.ErrNoDriver,
	}
	return &nvml.Error{Op: op, GPU: gpu, Code: r.String(), Err: cause[r]}
}

// Snapshot implements nvml.Driver.
func (d *driver) Snapshot(ctx context.Context) ([]nvml.GPU, error) {
	const op = "reading GPUs"
	var out []nvml.GPU
	err := d.do(ctx, op, "", func() error {
		n, r := d.library.DeviceCount()
		if r != Success {
			return failure(op, "", r)
		}
		for i := range n {
			g, r := d.snapshot(i)
			if r == GPUIsLost {
				g, r = d.lost(i), Success
			}
			if r != Success {
				return failure(fmt.Sprintf("reading GPU %d", i), g.UUID, r)
			}
			out = append(out, g)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func (d *driver) lost(index int) nvml.GPU {
	g, seen := d.known[index]
	if !seen {
		g.Minor = -1
	}
	g.Index, g.Lost, g.UsedMiB = index, true, -1
	return g
}

func (d *driver) snapshot(index int) (nvml.GPU, Return) {
	l := d.library
	g := nvml.GPU{Index: index}
	h, r := l.DeviceByIndex(index)
	if r != Success {
		return g, r
	}
	uuid, r1 := l.UUID(h)
	name, r2 := l.Name(h)
	pci, r3 := l.PCI(h)
	memory, r4 := l.Memory(h)
	if r := cmp.Or(r1, r2, r3, r4); r != Success {
		return g, r
	}
	g.UUID, g.Model, g.PCI, g.MemoryMiB = nvml.UUID(uuid), name, pci.Address, int(memory.Total>>20)
	g.DeviceID, g.SubsystemID = pci.DeviceID, pci.SubsystemID
	if g.Minor, r = l.Minor(h); r == NotSupported {
		g.Minor = -1
	} else if r != Success {
		return g, r
	}
	if g.Persistent, r = l.Persistence(h); r != Success && r != NotSupported {
		return g, r
	}
	if r = d.kind(h, &g); r != Success {
		return g, r
	}
	g.UsedMiB = int(memory.Used >> 20)
	g.Enabled, g.Pending, r = l.modeTwice(h)
	if r == Success {
		g.Capable = true
		if g.Profiles, r = d.profiles(h); r != Success {
			return g, r
		}
		if g.Instances, r = d.instances(h); r != Success {
			return g, r
		}
	} else if r != NotSupported {
		return g, r
	}
	if g.ComputeMode, r = d.computeMode(h, g.Enabled); r != Success {
		return g, r
	}
	d.known[index] = nvml.GPU{
		UUID: g.UUID, Minor: g.Minor, PCI: g.PCI, DeviceID: g.DeviceID, SubsystemID: g.SubsystemID, Model: g.Model, MemoryMiB: g.MemoryMiB, Capable: g.Capable,
		Profiles: slices.Clone(g.Profiles), ComputeCapability: g.ComputeCapability, Virtualization: g.Virtualization,
	}
	ps, r := l.Processes(h)
	for _, p := range ps {
		if p.GI == NoInstance {
			g.Processes = append(g.Processes, describeProcess(p))
		}
	}
	return g, r
}

// kind adds what the GPU can do, and what part of it the node has. It is no error if the GPU does not answer.
func (d *driver) kind(h Device, g *nvml.GPU) Return {
	facts, r := d.library.Static(h)
	if r == NotSupported {
		return Success
	}
	if r == Success {
		g.ComputeCapability = nvml.ComputeCapability{Major: facts.Major, Minor: facts.Minor}
		g.Virtualization = virtualizations[facts.VirtualizationMode]
	}
	return r
}

func describeProcess(p Process) nvml.Process {
	return nvml.Process{PID: p.PID, UsedMiB: int(p.Used >> 20)}
}

func (d *driver) profiles(h Device) ([]nvml.Profile, Return) {
	var out []nvml.Profile
	for kind := range knownKinds {
		p, r := d.library.GPUInstanceProfile(h, kind)
		if r == NotSupported {
			continue
		}
		if r != Success {
			return nil, r
		}
		places, r := d.library.Placements(h, p.ID)
		if r != Success {
			return nil, r
		}
		out = append(out, nvml.Profile{
			Name: p.Name, Slices: p.Slices, MemoryMiB: p.MemoryMB, Max: p.Count, Placements: places, Engines: p.Engines,
			Compute: d.computeProfiles(h, p.ID),
		})
	}
	return out, Success
}

// computeProfiles needs an instance on hardware; the simulator knows the profiles without one.
func (d *driver) computeProfiles(h Device, id int) []nvml.ComputeProfile {
	st, err := d.library.store.load()
	if err != nil {
		return nil
	}
	var out []nvml.ComputeProfile
	m := st.GPUs[h.gpu].model()
	for _, c := range m.computeProfiles(m.profile(id)) {
		k := nvml.ComputeProfile{Name: fmt.Sprintf("%dc", c.Slices), Slices: c.Slices, Max: len(c.Starts)}
		for _, s := range c.Starts {
			k.Placements = append(k.Placements, nvml.Span{Start: s, Size: c.Slices})
		}
		out = append(out, k)
	}
	return out
}

// standing is an instance with the handles that destroy it.
type standing struct {
	nvml.Instance
	handle  GPUInstance
	compute []standingCompute
}

type standingCompute struct {
	handle  ComputeInstance
	profile int // id
}

func (d *driver) instances(h Device) ([]nvml.Instance, Return) {
	all, r := d.standing(h)
	var out []nvml.Instance
	for _, s := range all {
		out = append(out, s.Instance)
	}
	return out, r
}

func (d *driver) standing(h Device) ([]standing, Return) {
	l := d.library
	var out []standing
	for kind := range knownKinds {
		p, r := l.GPUInstanceProfile(h, kind)
		if r == NotSupported {
			continue
		}
		if r != Success {
			return nil, r
		}
		handles, r := l.GPUInstances(h, p.ID)
		if r != Success {
			return nil, r
		}
		for _, gi := range handles {
			s, r := d.stands(gi, p)
			if r != Success {
				return nil, r
			}
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b standing) int { return nvml.ComparePlaced(a.Placed, b.Placed) })
	return out, Success
}

func (d *driver) stands(gi GPUInstance, p GPUInstanceProfile) (standing, Return) {
	l := d.library
	s := standing{handle: gi}
	facts, r := l.DescribeGPUInstance(gi)
	if r != Success {
		return s, r
	}
	s.Placed, s.ID, s.UsedMiB = nvml.Placed{Profile: p.Name, Span: facts.At}, facts.ID, -1
	var parts []string
	full := false
	for kind := range computeKinds {
		cp, r := l.ComputeInstanceProfile(gi, kind, 0)
		if r == NotSupported {
			continue
		}
		if r != Success {
			return s, r
		}
		cis, r := l.ComputeInstances(gi, cp.ID)
		if r != Success {
			return s, r
		}
		for _, ci := range cis {
			dev, r := l.DescribeComputeInstance(ci)
			if r != Success {
				return s, r
			}
			uuid, r1 := l.UUID(dev.Device)
			ps, r2 := l.Processes(dev.Device)
			memory, r3 := l.Memory(dev.Device)
			if r := cmp.Or(r1, r2, r3); r != Success {
				return s, r
			}
			s.UsedMiB = int(memory.Used >> 20)
			s.compute = append(s.compute, standingCompute{ci, cp.ID})
			part := nvml.Part{Name: fmt.Sprintf("%dc", cp.Slices), Span: dev.At}
			device := nvml.Device{UUID: uuid, Profile: cp.Name, Part: part}
			for _, p := range ps {
				device.Processes = append(device.Processes, describeProcess(p))
			}
			s.Devices = append(s.Devices, device)
			s.Processes = append(s.Processes, device.Processes...)
			parts = append(parts, fmt.Sprintf("%dc", cp.Slices))
			full = full || cp.Slices == p.Slices
		}
	}
	if !full {
		s.Compute = strings.Join(parts, "+") // kinds ascend, and so do the parts
	}
	return s, Success
}

// device finds a GPU for op.
func (d *driver) device(op string, gpu nvml.UUID) (Device, error) {
	h, r := d.library.DeviceByUUID(string(gpu))
	return h, failure(op, gpu, r)
}

// Release implements nvml.Driver. This driver holds nothing between two calls.
func (d *driver) Release(context.Context) error { return nil }

// SetMode implements nvml.Driver.
func (d *driver) SetMode(ctx context.Context, gpu nvml.UUID, on bool) error {
	op := map[bool]string{true: "turning MIG mode on", false: "turning MIG mode off"}[on]
	return d.do(ctx, op, gpu, func() error {
		h, err := d.device(op, gpu)
		if err != nil {
			return err
		}
		_, r := d.library.SetMIGMode(h, on) // what the activation says, Snapshot shows as a pending mode
		return failure(op, gpu, r)
	})
}

// Create implements nvml.Driver.
func (d *driver) Create(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	op := "creating " + p.String()
	return d.do(ctx, op, gpu, func() error {
		h, err := d.device(op, gpu)
		if err != nil {
			return err
		}
		return failure(op, gpu, d.create(h, p))
	})
}

func (d *driver) create(h Device, p nvml.Placed) Return {
	all, r := d.standing(h)
	if r != Success {
		return r
	}
	for _, s := range all {
		switch {
		case s.Profile != p.Profile || s.Span != p.Span:
		case s.HalfMade():
			return d.furnishOrRemove(h, s.handle, p)
		case s.Compute == p.Compute:
			return Success
		default:
			return InsufficientResources // its compute slices are taken in another way
		}
	}
	id, r := d.profileID(h, p.Profile)
	if r != Success {
		return r
	}
	gi, r := d.library.CreateGPUInstanceAt(h, id, p.Span)
	if r != Success {
		return r
	}
	return d.furnishOrRemove(h, gi, p)
}

// furnishOrRemove completes a GPU instance, or removes it with everything inside. Snapshot shows any remains.
func (d *driver) furnishOrRemove(h Device, gi GPUInstance, p nvml.Placed) Return {
	failed := d.furnish(gi, p)
	if failed == Success {
		return Success
	}
	all, r := d.standing(h)
	if r != Success {
		return failed
	}
	for _, s := range all {
		if s.handle != gi {
			continue
		}
		for _, ci := range s.compute {
			d.library.DestroyComputeInstance(ci.handle)
		}
		d.library.DestroyGPUInstance(gi)
	}
	return failed
}

func (d *driver) profileID(h Device, name string) (int, Return) {
	for kind := range knownKinds {
		p, r := d.library.GPUInstanceProfile(h, kind)
		switch {
		case r == NotSupported:
		case r != Success:
			return 0, r
		case p.Name == name:
			return p.ID, Success
		}
	}
	return 0, InvalidArgument
}

// furnish creates the compute instances of p. It chooses the places in a divided instance: without one, the driver
// places each as if it were the last. Parts of 2, 2 and 3 slices fit into 7 only with the largest behind.
func (d *driver) furnish(gi GPUInstance, p nvml.Placed) Return {
	room, ids, r := d.room(gi)
	if r != Success {
		return r
	}
	if p.Compute == "" {
		largest := room.Profiles[len(room.Profiles)-1]
		_, r := d.library.CreateComputeInstance(gi, ids[largest.Name])
		return r
	}
	count := map[string]int{}
	for part := range strings.SplitSeq(p.Compute, "+") {
		if _, ok := ids[part]; !ok {
			return InvalidArgument
		}
		count[part]++
	}
	solution, err := nvml.Solve(room, count)
	if err != nil {
		return InsufficientResources
	}
	for _, c := range solution.Target {
		if _, r := d.library.CreateComputeInstanceAt(gi, ids[c.Profile], c.Span); r != Success {
			return r
		}
	}
	return Success
}

// room describes a GPU instance as if it were a GPU, with its compute instance profiles, smallest first, and their ids.
func (d *driver) room(gi GPUInstance) (room nvml.GPU, ids map[string]int, r Return) {
	ids = map[string]int{}
	for kind := range computeKinds {
		cp, r := d.library.ComputeInstanceProfile(gi, kind, 0)
		if r == NotSupported {
			continue
		}
		if r != Success {
			return room, nil, r
		}
		places, r := d.library.ComputePlacements(gi, cp.ID)
		if r != Success {
			return room, nil, r
		}
		name := fmt.Sprintf("%dc", cp.Slices)
		room.Profiles = append(room.Profiles, nvml.Profile{Name: name, Slices: cp.Slices, Max: cp.Count, Placements: places})
		ids[name] = cp.ID
	}
	return room, ids, Success
}

// Destroy implements nvml.Driver.
func (d *driver) Destroy(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	op := "destroying " + p.String()
	return d.do(ctx, op, gpu, func() error {
		h, err := d.device(op, gpu)
		if err != nil {
			return err
		}
		return failure(op, gpu, d.destroy(h, p))
	})
}

func (d *driver) destroy(h Device, p nvml.Placed) Return {
	all, r := d.standing(h)
	if r != Success {
		return r
	}
	for _, s := range all {
		if s.Profile != p.Profile || s.Span != p.Span {
			continue
		}
		if len(s.Processes) > 0 {
			return InUse
		}
		for n, ci := range s.compute {
			if r := d.library.DestroyComputeInstance(ci.handle); r != Success && r != NotFound {
				d.standAgain(s, s.compute[:n])
				return r
			}
		}
		if r := d.library.DestroyGPUInstance(s.handle); r != Success && r != NotFound {
			d.standAgain(s, s.compute)
			return r
		}
	}
	return Success
}

// CreatePart implements nvml.Driver.
func (d *driver) CreatePart(ctx context.Context, gpu nvml.UUID, p nvml.Placed, part nvml.Part) error {
	return d.onPart(ctx, fmt.Sprintf("creating %v in %s@%d", part, p.Profile, p.Start), gpu, p, func(s standing) Return {
		if slices.ContainsFunc(s.Devices, func(o nvml.Device) bool { return o.Part == part }) {
			return Success
		}
		_, ids, r := d.room(s.handle)
		if r != Success {
			return r
		}
		id, ok := ids[part.Name]
		if !ok {
			return InvalidArgument
		}
		_, r = d.library.CreateComputeInstanceAt(s.handle, id, part.Span)
		return r
	})
}

// DestroyPart implements nvml.Driver.
func (d *driver) DestroyPart(ctx context.Context, gpu nvml.UUID, p nvml.Placed, part nvml.Part) error {
	err := d.onPart(ctx, fmt.Sprintf("destroying %v in %s@%d", part, p.Profile, p.Start), gpu, p, func(s standing) Return {
		at := slices.IndexFunc(s.Devices, func(o nvml.Device) bool { return o.Part == part })
		if at < 0 {
			return Success
		}
		return d.library.DestroyComputeInstance(s.compute[at].handle)
	})
	if errors.Is(err, nvml.ErrNotFound) {
		return nil
	}
	return err
}

// onPart works on the instance at p, however it is divided.
func (d *driver) onPart(ctx context.Context, op string, gpu nvml.UUID, p nvml.Placed, work func(standing) Return) error {
	return d.do(ctx, op, gpu, func() error {
		h, err := d.device(op, gpu)
		if err != nil {
			return err
		}
		all, r := d.standing(h)
		if r != Success {
			return failure(op, gpu, r)
		}
		at := slices.IndexFunc(all, func(s standing) bool { return s.Profile == p.Profile && s.Span == p.Span })
		if at < 0 {
			return failure(op, gpu, NotFound)
		}
		return failure(op, gpu, work(all[at]))
	})
}

// standAgain recreates the lost parts of an instance that could not be destroyed. Snapshot shows any that cannot be
// recreated.
func (d *driver) standAgain(s standing, gone []standingCompute) {
	for _, ci := range gone {
		d.library.CreateComputeInstance(s.handle, ci.profile)
	}
}

// Reset implements nvml.Driver.
func (d *driver) Reset(ctx context.Context, gpu nvml.UUID) error {
	const op = "resetting"
	return d.do(ctx, op, gpu, func() error {
		h, err := d.device(op, gpu)
		if err != nil {
			return err
		}
		return failure(op, gpu, d.library.Reset(h))
	})
}

// SetPersistence implements nvml.Driver.
func (d *driver) SetPersistence(ctx context.Context, gpu nvml.UUID, on bool) error {
	op := map[bool]string{true: "turning persistence mode on", false: "turning persistence mode off"}[on]
	return d.do(ctx, op, gpu, func() error {
		h, err := d.device(op, gpu)
		if err != nil {
			return err
		}
		before, r := d.library.Persistence(h)
		if r != Success || before == on {
			return failure(op, gpu, r)
		}
		return failure(op, gpu, d.library.SetPersistence(h, on))
	})
}

// computeModes are the compute modes by NVML's numbers.
var computeModes = map[uint32]nvml.ComputeMode{
	0: nvml.ComputeDefault, computeProhibited: nvml.ComputeProhibited, computeExclusiveProcess: nvml.ComputeExclusiveProcess,
}

// virtualizations are the virtualization modes by NVML's numbers.
var virtualizations = map[uint32]nvml.Virtualization{
	0: nvml.NotVirtualized, 1: nvml.PassedThrough, 2: nvml.VirtualGPU, 3: nvml.HostOfVirtualGPUs, 4: nvml.HostOfSharedGPUs,
}

// computeMode is empty where the driver does not report it, which it does not of a GPU in MIG mode.
func (d *driver) computeMode(h Device, mig bool) (nvml.ComputeMode, Return) {
	if mig {
		return "", Success
	}
	number, r := d.library.ComputeMode(h)
	if r == NotSupported {
		return "", Success
	}
	return computeModes[number], r
}

// modeTwice reads again a MIG mode that seems not to exist, as nvml/lib does: the agent would never restore a mode that
// it once overlooked.
func (l *Library) modeTwice(h Device) (current, pending bool, r Return) {
	if current, pending, r = l.MIGMode(h); r == NotSupported || r == InvalidArgument {
		return l.MIGMode(h)
	}
	return current, pending, r
}

// SetComputeMode implements nvml.Driver.
func (d *driver) SetComputeMode(ctx context.Context, gpu nvml.UUID, mode nvml.ComputeMode) error {
	op := "setting the compute mode to " + string(mode)
	return d.do(ctx, op, gpu, func() error {
		h, err := d.device(op, gpu)
		if err != nil {
			return err
		}
		mig, _, r := d.library.modeTwice(h)
		if r != Success && r != NotSupported {
			return failure(op, gpu, r)
		}
		before, r := d.computeMode(h, mig)
		if r != Success || before == mode || mig && mode == nvml.ComputeDefault {
			return failure(op, gpu, r)
		}
		for number, name := range computeModes {
			if name == mode {
				return failure(op, gpu, d.library.SetComputeMode(h, number))
			}
		}
		return failure(op, gpu, NotSupported)
	})
}

// eventPatience is how long one wait for events takes.
const eventPatience = time.Second

// Events implements nvml.Driver.
func (d *driver) Events(ctx context.Context) (<-chan nvml.Event, error) {
	const op = "listening for events"
	set, err := d.register(ctx, op)
	if err != nil {
		return nil, err
	}
	out := make(chan nvml.Event)
	go func() {
		defer close(out)
		hand := func(e nvml.Event) {
			select {
			case out <- e:
			case <-ctx.Done():
			}
		}
		for ctx.Err() == nil {
			e, r := set.wait(ctx, eventPatience)
			if r == Timeout {
				continue
			}
			if r == Success {
				hand(d.news(e))
				continue
			}
			if r == GPUIsLost {
				hand(nvml.Event{Kind: nvml.EventUnavailable, GI: nvml.WholeGPU, CI: nvml.WholeGPU})
			}
			hand(nvml.Event{Kind: nvml.EventSilence, GI: nvml.WholeGPU, CI: nvml.WholeGPU})
			if set = d.again(ctx, op); set != nil {
				hand(nvml.Event{Kind: nvml.EventWatching, GI: nvml.WholeGPU, CI: nvml.WholeGPU})
			}
		}
	}()
	return out, nil
}

// again registers again until it succeeds; if ctx ends, it returns nil.
func (d *driver) again(ctx context.Context, op string) *EventSet {
	for {
		t := time.NewTimer(eventPatience)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-t.C:
		}
		if set, err := d.register(ctx, op); err == nil {
			return set
		}
	}
}

// register makes a set of what all GPUs report, except lost ones.
func (d *driver) register(ctx context.Context, op string) (*EventSet, error) {
	l := &Library{store: d.library.store, version: d.library.version, pollEvery: d.library.pollEvery} // it stays initialized, beside the calls of this driver
	var set *EventSet
	err := d.do(ctx, op, "", func() error {
		if r := l.Init(); r != Success {
			return failure(op, "", r)
		}
		var r Return
		if set, r = l.NewEventSet(); r != Success {
			return failure(op, "", r)
		}
		n, r := l.DeviceCount()
		for i := 0; i < n && r == Success; i++ {
			if r = registerAt(l, i, set); r == GPUIsLost {
				r = Success // the others still have news
			}
		}
		return failure(op, "", r)
	})
	if err != nil {
		return nil, err // and set is still the call's that was abandoned
	}
	return set, nil
}

// listened are the events that are news, by their bit.
var listened = map[uint64]nvml.EventKind{
	EventXid: nvml.EventXid, EventDoubleBitECC: nvml.EventECC, EventRetired: nvml.EventRetired, EventRetireFailed: nvml.EventRetireFailed,
	EventPoison: nvml.EventPoison, EventFatalPoison: nvml.EventFatalPoison, EventUnavailable: nvml.EventUnavailable, EventAction: nvml.EventAction,
}

func registerAt(l *Library, index int, set *EventSet) Return {
	h, r := l.DeviceByIndex(index)
	if r != Success {
		return r
	}
	types, r := l.EventTypes(h)
	if r != Success {
		return r
	}
	var want uint64
	for bit := range listened {
		want |= bit & types
	}
	return l.Register(h, want, set)
}

func (d *driver) news(e Event) nvml.Event {
	news := nvml.Event{Kind: listened[e.Type], GI: e.GI, CI: e.CI}
	if e.Type == EventXid {
		news.Xid = e.Data
	}
	if st, err := d.library.store.load(); err == nil {
		news.GPU = nvml.UUID(st.GPUs[e.GPU].UUID)
	}
	return news
}
