package lib

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	nvdev "github.com/NVIDIA/go-nvlib/pkg/nvlib/device"
	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
)

// model has the properties and profiles of a GPU. None of them changes while the GPU is in the machine.
type model struct {
	uuid      nvml.UUID
	minor     int // -1 if the driver does not say
	pci       string
	id        uint32
	subsystem uint32
	name      string
	memory    uint64 // bytes
	profiles  []profile
	counted   bool // the GPU itself has said how many instances of each profile it holds

	capability     nvml.ComputeCapability
	virtualization nvml.Virtualization
}

// profile is a GPU instance profile with the library's own ids for it.
type profile struct {
	nvml.Profile
	info    nv.GpuInstanceProfileInfo
	compute []nv.ComputeInstanceProfileInfo // as an instance of it answered; nil before there was one
}

// model reads the model of a GPU, once.
func (s *session) model(index int, d device) (*model, error) {
	if known := s.known[index]; known != nil && known.uuid == d.uuid {
		return known, nil
	}
	m := &model{uuid: d.uuid}
	var ret nv.Return
	if m.name, ret = d.GetName(); ret != nv.SUCCESS {
		return nil, check("reading the name", d.uuid, ret)
	}
	pci, ret := d.GetPciInfo()
	err := check("reading the PCI address", d.uuid, ret)
	if err != nil {
		return nil, err
	}
	m.pci = address(pci)
	m.id, m.subsystem = pci.PciDeviceId, pci.PciSubSystemId
	if m.minor, err = s.minor(d); err != nil {
		return nil, err
	}
	all, err := s.memory(d, "the memory size", d.uuid)
	if err != nil {
		return nil, err
	}
	m.memory = all.total
	if err := s.readKind(d, m); err != nil {
		return nil, err
	}
	if m.profiles, err = s.profiles(d, m.memory); err != nil {
		return nil, err
	}
	s.known[index] = m
	return m, nil
}

// minor is the N of /dev/nvidiaN, or -1 where there is none, as without NVIDIA's kernel module for device files.
func (s *session) minor(d device) (int, error) {
	if !s.has("nvmlDeviceGetMinorNumber") {
		return -1, nil
	}
	n, ret := d.GetMinorNumber()
	err := check("reading the minor number", d.uuid, ret)
	if isUnsupported(err) {
		return -1, nil
	}
	return n, err
}

// memoryInfo is in bytes.
type memoryInfo struct{ total, used uint64 }

// memory reads the memory of a GPU or a MIG device. The first version of the function counts the driver's reserve as used.
func (s *session) memory(d nv.Device, what string, gpu nvml.UUID) (memoryInfo, error) {
	if s.has("nvmlDeviceGetMemoryInfo_v2") {
		if info, ret := d.GetMemoryInfo_v2(); ret == nv.SUCCESS {
			return memoryInfo{info.Total, info.Used}, nil
		}
	}
	info, ret := d.GetMemoryInfo()
	return memoryInfo{info.Total, info.Used}, check("reading "+what, gpu, ret)
}

// usedMiB returns the memory in use on a GPU or a MIG device, or -1 if the driver does not report it. It does not if the processor and the GPU share
// memory, or if this process may not see all instances.
func (s *session) usedMiB(d nv.Device, gpu nvml.UUID) (int, error) {
	info, err := s.memory(d, "the memory in use", gpu)
	if isUnsupported(err) || errors.Is(err, nvml.ErrPermission) {
		return -1, nil
	}
	return int(info.used / mebibyte), err //nolint:gosec // a GPU's memory in MiB fits
}

// virtualizations are the modes as the library numbers them.
var virtualizations = map[nv.GpuVirtualizationMode]nvml.Virtualization{
	nv.GPU_VIRTUALIZATION_MODE_NONE:        nvml.NotVirtualized,
	nv.GPU_VIRTUALIZATION_MODE_PASSTHROUGH: nvml.PassedThrough,
	nv.GPU_VIRTUALIZATION_MODE_VGPU:        nvml.VirtualGPU,
	nv.GPU_VIRTUALIZATION_MODE_HOST_VGPU:   nvml.HostOfVirtualGPUs,
	nv.GPU_VIRTUALIZATION_MODE_HOST_VSGA:   nvml.HostOfSharedGPUs,
}

// readKind reads the compute capability of the GPU, and how it is virtualized. It is no error if the driver does not report it.
func (s *session) readKind(d device, m *model) error {
	if s.has("nvmlDeviceGetCudaComputeCapability") {
		var minor int
		major, ret := askTwice(func() (major int, ret nv.Return) {
			major, minor, ret = d.GetCudaComputeCapability()
			return major, ret
		})
		switch {
		case ret == nv.SUCCESS:
			m.capability = nvml.ComputeCapability{Major: major, Minor: minor}
		case !isNotProvided(ret):
			return check("reading the compute capability", d.uuid, ret)
		}
	}
	if s.has("nvmlDeviceGetVirtualizationMode") {
		how, ret := askTwice(d.GetVirtualizationMode)
		switch {
		case ret == nv.SUCCESS:
			m.virtualization = virtualizations[how]
		case !isNotProvided(ret):
			return check("reading the virtualization mode", d.uuid, ret)
		}
	}
	return nil
}

// profiles reads the profiles of a GPU, which the driver reports whether or not MIG mode is on.
func (s *session) profiles(d device, memory uint64) ([]profile, error) {
	if !s.has("nvmlDeviceGetGpuInstanceProfileInfo") {
		return nil, nil
	}
	var out []profile
	for kind := range nv.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := askTwice(func() (nv.GpuInstanceProfileInfo, nv.Return) { return d.GetGpuInstanceProfileInfo(kind) })
		if isAbsent(ret) {
			continue
		}
		if err := check(fmt.Sprintf("reading profile %d", kind), d.uuid, ret); err != nil {
			return nil, err
		}
		if info.InstanceCount == 0 || slices.ContainsFunc(out, func(p profile) bool { return p.info.Id == info.Id }) {
			continue
		}
		p := profile{info: info, Profile: nvml.Profile{
			Slices:    int(info.SliceCount),
			MemoryMiB: int(info.MemorySizeMB), //nolint:gosec // a GPU's memory in MiB fits
			Max:       int(info.InstanceCount),
			Engines: nvml.Engines{
				Copy: int(info.CopyEngineCount), Decoder: int(info.DecoderCount), Encoder: int(info.EncoderCount),
				JPEG: int(info.JpegCount), OFA: int(info.OfaCount),
			},
			Compute: deriveCompute(int(info.SliceCount)),
		}}
		var err error
		if p.Name, err = s.profileName(d, kind, info, memory); err != nil {
			return nil, err
		}
		if p.Placements, err = placements(d, info, p.Name); err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// profileName gives the driver's own name of a profile. If the driver does not report one, it derives the name as NVIDIA's tools do.
func (s *session) profileName(d device, kind int, info nv.GpuInstanceProfileInfo, memory uint64) (string, error) {
	if s.has("nvmlDeviceGetGpuInstanceProfileInfoV") {
		if v, ret := d.GetGpuInstanceProfileInfoV(kind).V2(); ret == nv.SUCCESS {
			if n := strings.TrimPrefix(text(v.Name[:]), "MIG "); n != "" {
				return n, nil
			}
		}
	}
	n, err := deriveName(kind, info, memory)
	if err != nil {
		return "", newError("naming a profile", d.uuid, nvml.ErrNotSupported, "%v", err)
	}
	return n, nil
}

// deriveName gives the name that NVIDIA's tools derive from a profile's kind and its share of the GPU's memory in bytes.
func deriveName(kind int, info nv.GpuInstanceProfileInfo, memory uint64) (string, error) {
	whole, err := computeKind(int(info.SliceCount))
	if err != nil {
		return "", err
	}
	p, err := nvdev.New(nil).NewMigProfile(kind, whole, nv.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, info.MemorySizeMB, memory)
	if err != nil {
		return "", err
	}
	return p.String(), nil
}

func placements(d device, info nv.GpuInstanceProfileInfo, profile string) ([]nvml.Span, error) {
	list, ret := d.GetGpuInstancePossiblePlacements(&info)
	if err := check("reading the placements of "+profile, d.uuid, ret); err != nil {
		return nil, err
	}
	var out []nvml.Span
	for _, p := range list {
		out = append(out, nvml.Span{Start: int(p.Start), Size: int(p.Size)})
	}
	slices.SortFunc(out, func(a, b nvml.Span) int { return cmp.Compare(a.Start, b.Start) })
	return out, nil
}

// deriveCompute gives the compute instances that an instance of so many slices can be divided into. The hardware reports them only for an
// existing instance; until there is one, deriveCompute gives those that all GPUs so far have in common.
func deriveCompute(slices int) []nvml.ComputeProfile {
	var out []nvml.ComputeProfile
	for _, n := range []int{1, 2, 3, 4, slices} {
		if n > slices || n == 3 && slices == 4 || len(out) > 0 && out[len(out)-1].Slices >= n {
			continue
		}
		out = append(out, computeProfile(n, slices/n))
	}
	return out
}

func computeProfile(slices, most int) nvml.ComputeProfile {
	return nvml.ComputeProfile{Name: fmt.Sprintf("%dc", slices), Slices: slices, Max: most}
}

// computeKind is the library's kind of compute instance of so many slices.
func computeKind(slices int) (int, error) {
	switch slices {
	case 1:
		return nv.COMPUTE_INSTANCE_PROFILE_1_SLICE, nil
	case 2:
		return nv.COMPUTE_INSTANCE_PROFILE_2_SLICE, nil
	case 3:
		return nv.COMPUTE_INSTANCE_PROFILE_3_SLICE, nil
	case 4:
		return nv.COMPUTE_INSTANCE_PROFILE_4_SLICE, nil
	case 6:
		return nv.COMPUTE_INSTANCE_PROFILE_6_SLICE, nil
	case 7:
		return nv.COMPUTE_INSTANCE_PROFILE_7_SLICE, nil
	case 8:
		return nv.COMPUTE_INSTANCE_PROFILE_8_SLICE, nil
	default:
		return 0, fmt.Errorf("there is no compute instance of %d slices", slices)
	}
}

// text reads a C string.
func text(chars []int8) string {
	var b strings.Builder
	for _, c := range chars {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c)) //nolint:gosec // a char is a byte
	}
	return b.String()
}

// address gives the PCI address of a GPU as sysfs has it. A GPU is function 0 of its device.
func address(pci nv.PciInfo) string {
	return fmt.Sprintf("%04x:%02x:%02x.0", pci.Domain, pci.Bus, pci.Device)
}
