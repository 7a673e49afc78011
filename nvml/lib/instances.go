package lib

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
)

// Create implements nvml.Driver.
func (d *Driver) Create(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	op := fmt.Sprintf("creating %v", p)
	return d.call(ctx, op, gpu, func(_ context.Context, s *session) error {
		dev, m, err := s.capableModel(op, gpu)
		if err != nil {
			return err
		}
		at := slices.IndexFunc(m.profiles, func(o profile) bool { return o.Name == p.Profile })
		if at < 0 {
			return newError(op, gpu, nvml.ErrNotSupported, "the GPU offers no %s", p.Profile)
		}
		standing, err := s.instances(dev, m)
		if err != nil {
			return err
		}
		var made instance
		for _, i := range standing {
			switch {
			case !i.Overlaps(p.Span):
			case i.Placed == p && !i.HalfMade():
				return nil
			case i.Profile == p.Profile && i.Span == p.Span && i.HalfMade():
				made = i
			default:
				return newError(op, gpu, nvml.ErrNoRoom, "%v is there", i.Placed)
			}
		}
		if made.handle == nil {
			if made, err = s.createInstance(op, dev, &m.profiles[at], p); err != nil {
				return err
			}
		}
		return s.divide(op, dev, made, p)
	})
}

// Destroy implements nvml.Driver.
func (d *Driver) Destroy(ctx context.Context, gpu nvml.UUID, p nvml.Placed) error {
	op := fmt.Sprintf("destroying %v", p)
	return d.call(ctx, op, gpu, func(_ context.Context, s *session) error {
		dev, m, err := s.capableModel(op, gpu)
		if err != nil {
			return err
		}
		if mode, err := s.mode(dev); err != nil || !mode.current {
			return err // with the mode off, there are no instances
		}
		standing, err := s.instances(dev, m)
		if err != nil {
			return err
		}
		if _, err := s.attribute(dev, standing); err != nil {
			return err
		}
		// The division does not matter: an earlier attempt may have left the instance with fewer parts.
		at := slices.IndexFunc(standing, func(i instance) bool { return i.Profile == p.Profile && i.Span == p.Span })
		if at < 0 {
			return nil
		}
		i := standing[at]
		if len(i.Processes) > 0 {
			return newError(op, gpu, nvml.ErrInUse, "%s", pids(i.Processes))
		}
		return s.destroy(op, dev, i)
	})
}

// CreatePart implements nvml.Driver.
func (d *Driver) CreatePart(ctx context.Context, gpu nvml.UUID, p nvml.Placed, want nvml.Part) error {
	op := fmt.Sprintf("creating %v in %s@%d", want, p.Profile, p.Start)
	return d.onInstance(ctx, op, gpu, p, func(s *session, dev device, i *instance) error {
		for _, c := range i.compute {
			switch {
			case c.part() == want:
				return nil
			case c.part().Overlaps(want.Span):
				return newError(op, gpu, nvml.ErrNoRoom, "%v is there", c.part())
			}
		}
		info, err := i.profile.computeInfo(op, dev, want.Name)
		if err != nil {
			return err
		}
		if !s.placesCompute() {
			return newError(op, gpu, nvml.ErrNotSupported, "the driver accepts no place for a compute instance")
		}
		at := nv.ComputeInstancePlacement{Start: uint32(want.Start), Size: uint32(want.Size)} //nolint:gosec // a compute slice
		_, err = s.createPart(op, dev, i, part{info: info, at: &at})
		return err
	})
}

// DestroyPart implements nvml.Driver.
func (d *Driver) DestroyPart(ctx context.Context, gpu nvml.UUID, p nvml.Placed, gone nvml.Part) error {
	op := fmt.Sprintf("destroying %v in %s@%d", gone, p.Profile, p.Start)
	err := d.onInstance(ctx, op, gpu, p, func(s *session, dev device, i *instance) error {
		at := slices.IndexFunc(i.compute, func(c compute) bool { return c.part() == gone })
		if at < 0 {
			return nil
		}
		one := []instance{*i}
		if _, err := s.attribute(dev, one); err != nil {
			return err
		}
		if on := one[0].ProcessesOn(one[0].Devices[at]); len(on) > 0 {
			return newError(op, gpu, nvml.ErrInUse, "%s", pids(on))
		}
		delete(s.stood, slot{gpu, i.id})
		return check(op, gpu, i.compute[at].handle.Destroy())
	})
	if errors.Is(err, nvml.ErrNotFound) {
		return nil
	}
	return err
}

// onInstance works on the existing instance at p, however it is divided.
func (d *Driver) onInstance(ctx context.Context, op string, gpu nvml.UUID, p nvml.Placed, work func(*session, device, *instance) error) error {
	return d.call(ctx, op, gpu, func(_ context.Context, s *session) error {
		dev, m, err := s.capableModel(op, gpu)
		if err != nil {
			return err
		}
		standing, err := s.instances(dev, m)
		if err != nil {
			return err
		}
		at := slices.IndexFunc(standing, func(i instance) bool { return i.Profile == p.Profile && i.Span == p.Span })
		if at < 0 {
			return newError(op, gpu, nvml.ErrNotFound, "no %s is there", p.Profile)
		}
		return work(s, dev, &standing[at])
	})
}

// capableModel finds a GPU that can do MIG, and its model.
func (s *session) capableModel(op string, gpu nvml.UUID) (device, *model, error) {
	dev, _, err := s.capable(op, gpu)
	if err != nil {
		return device{}, nil, err
	}
	index, ret := dev.GetIndex()
	if err := check("reading the index", gpu, ret); err != nil {
		return device{}, nil, err
	}
	m, err := s.model(index, dev)
	return dev, m, err
}

// createInstance makes a GPU instance without compute instances.
func (s *session) createInstance(op string, d device, p *profile, at nvml.Placed) (instance, error) {
	place := nv.GpuInstancePlacement{Start: uint32(at.Start), Size: uint32(at.Size)} //nolint:gosec // a memory slice
	handle, ret := d.CreateGpuInstanceWithPlacement(&p.info, &place)
	if err := check(op, d.uuid, ret); err != nil {
		return instance{}, err
	}
	made := instance{handle: handle, profile: p}
	made.Placed = nvml.Placed{Profile: p.Name, Span: at.Span}
	return made, nil
}

// divide makes the compute instances of a GPU instance that has none, or removes the GPU instance.
func (s *session) divide(op string, d device, i instance, p nvml.Placed) error {
	err := s.askCompute(d, &i)
	if err == nil {
		err = s.createCompute(op, d, &i, p)
	}
	if err == nil {
		return nil
	}
	return withUndoError(err, s.undivide(d, i))
}

// undivide removes a GPU instance with all compute instances in it, also those of calls that have failed and yet made them.
func (s *session) undivide(d device, i instance) error {
	op := fmt.Sprintf("removing the half-made %v", i.Placed)
	i.compute = nil
	if err := s.readCompute(d, &i); err != nil {
		return err
	}
	for _, c := range i.compute {
		if err := check(op, d.uuid, c.handle.Destroy()); err != nil {
			return err
		}
	}
	return check(op, d.uuid, i.handle.Destroy())
}

// withUndoError adds the error of cleaning up to the first error. Callers decide by the first alone: if an instance could not be removed
// again since it is in use, the operation itself did not fail by that.
func withUndoError(err, then error) error {
	if then == nil {
		return err
	}
	return fmt.Errorf("%w; then %v", err, then) //nolint:errorlint // see above
}

// createCompute makes the compute instances that p names, and notes them in i.
func (s *session) createCompute(op string, d device, i *instance, p nvml.Placed) error {
	parts, err := s.arrange(op, d, i, p)
	if err != nil {
		return err
	}
	for _, want := range parts {
		c, err := s.createPart(op, d, i, want)
		if err != nil {
			return err
		}
		i.compute = append(i.compute, c)
	}
	return nil
}

// part is a wanted compute instance.
type part struct {
	info nv.ComputeInstanceProfileInfo
	at   *nv.ComputeInstancePlacement // nil for any place that the driver chooses
}

func (s *session) createPart(op string, d device, i *instance, want part) (compute, error) {
	var handle nv.ComputeInstance
	var ret nv.Return
	if want.at != nil {
		handle, ret = i.handle.CreateComputeInstanceWithPlacement(&want.info, want.at)
	} else {
		handle, ret = i.handle.CreateComputeInstance(&want.info)
	}
	return compute{handle: handle, slices: int(want.info.SliceCount), kind: want.info.Id}, check(op, d.uuid, ret)
}

// arrange finds the compute instances to make for p, and their places. The driver places each one as if it were the last, so
// that parts which fit together could block one another; arrange places them as nvml.Solve places GPU instances.
func (s *session) arrange(op string, d device, i *instance, p nvml.Placed) ([]part, error) {
	if p.Compute == "" {
		info, err := i.profile.computeInfo(op, d, fmt.Sprintf("%dc", i.profile.Slices))
		return []part{{info: info}}, err
	}
	wanted := strings.Split(p.Compute, "+")
	var parts []part
	room := nvml.GPU{Model: i.profile.Name}
	count := map[string]int{}
	infos := map[string]nv.ComputeInstanceProfileInfo{}
	for _, c := range wanted {
		info, err := i.profile.computeInfo(op, d, c)
		if err != nil {
			return nil, err
		}
		parts = append(parts, part{info: info})
		count[c]++
		infos[c] = info
	}
	for _, c := range i.profile.Compute {
		if len(c.Placements) == 0 {
			slices.Reverse(parts) // the largest first, which have the fewest places
			return parts, nil
		}
		room.Profiles = append(room.Profiles, nvml.Profile{Name: c.Name, Slices: c.Slices, Max: c.Max, Placements: c.Placements})
	}
	solution, err := nvml.Solve(room, count)
	if err != nil {
		return nil, newError(op, d.uuid, nvml.ErrNoRoom, "%v", err)
	}
	parts = nil
	for _, c := range solution.Target {
		at := nv.ComputeInstancePlacement{Start: uint32(c.Start), Size: uint32(c.Size)} //nolint:gosec // a compute slice
		parts = append(parts, part{info: infos[c.Profile], at: &at})
	}
	return parts, nil
}

// computeInfo finds a kind of compute instance by its name.
func (p *profile) computeInfo(op string, d device, name string) (nv.ComputeInstanceProfileInfo, error) {
	for _, info := range p.compute {
		if fmt.Sprintf("%dc", info.SliceCount) == name {
			return info, nil
		}
	}
	return nv.ComputeInstanceProfileInfo{}, newError(op, d.uuid, nvml.ErrNotSupported, "%s cannot be divided into %s", p.Name, name)
}

// destroy removes an instance with its compute instances. If the instance cannot go, destroy makes the removed compute instances again; those that it
// cannot recreate are missing in the next Snapshot, and a later Destroy takes the rest.
func (s *session) destroy(op string, d device, i instance) error {
	delete(s.stood, slot{d.uuid, i.id})
	for n, c := range i.compute {
		if ret := c.handle.Destroy(); ret != nv.SUCCESS {
			return withUndoError(check(op, d.uuid, ret), s.recreateCompute(d, &i, i.compute[:n]))
		}
	}
	if ret := i.handle.Destroy(); ret != nv.SUCCESS {
		return withUndoError(check(op, d.uuid, ret), s.recreateCompute(d, &i, i.compute))
	}
	return nil
}

// recreateCompute makes compute instances that were removed from an instance, at the places where they were.
func (s *session) recreateCompute(d device, i *instance, gone []compute) error {
	var errs []error
	for _, c := range gone {
		at := slices.IndexFunc(i.profile.compute, func(o nv.ComputeInstanceProfileInfo) bool { return o.Id == c.kind })
		want := part{info: i.profile.compute[at]}
		if s.placesCompute() {
			want.at = &nv.ComputeInstancePlacement{Start: c.start, Size: uint32(c.slices)} //nolint:gosec // at most 8
		}
		_, err := s.createPart(fmt.Sprintf("restoring %v", i.Placed), d, i, want)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func pids(processes []nvml.Process) string {
	var out []string
	for _, p := range processes {
		out = append(out, fmt.Sprint(p.PID))
	}
	if len(out) == 1 {
		return "process " + out[0]
	}
	return "processes " + strings.Join(out, ", ")
}
