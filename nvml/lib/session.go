package lib

import (
	"fmt"
	"maps"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
)

// session is the library while it is initialised. Handles live as long as it does.
type session struct {
	lib     nv.Interface
	opened  *opened
	devices map[nvml.UUID]device
	lacks   map[string]bool // functions, by whether the library lacks them
	known   modelCache
	stood   map[slot]instance // the instances of the last reading
	useless bool              // the library says that all GPUs are lost; after a reload of the driver only a new session finds them
}

// device is a GPU as the library knows it.
type device struct {
	nv.Device
	uuid nvml.UUID
}

// slot is where an instance is, by the id that the next one has there as well.
type slot struct {
	gpu nvml.UUID
	gi  uint32
}

// stands replaces what is remembered of the GPU's instances.
func (s *session) stands(gpu nvml.UUID, now []instance) {
	maps.DeleteFunc(s.stood, func(at slot, _ instance) bool { return at.gpu == gpu })
	if s.stood == nil {
		s.stood = map[slot]instance{}
	}
	for _, i := range now {
		s.stood[slot{gpu, i.id}] = i
	}
}

// modelCache has the models of the GPUs, by position: it spares some hundred calls with every reading, and has the model of a
// lost GPU.
type modelCache map[int]*model

// close ends the session.
func (s *session) close() { s.opened.leave() }

// has reports whether the library has a function. go-nvml resolves functions when they are called, and a missing one aborts the process. Check newer
// functions first, and those that drivers before MIG lack.
func (s *session) has(function string) bool {
	lacks, asked := s.lacks[function]
	if !asked {
		lacks = s.lib.Extensions().LookupSymbol(function) != nil
		if s.lacks == nil {
			s.lacks = map[string]bool{}
		}
		s.lacks[function] = lacks
	}
	return !lacks
}

// device finds a GPU. It does not look it up by UUID in the library, since that can take seconds on a full node.
func (s *session) device(op string, uuid nvml.UUID) (device, error) {
	if d, ok := s.devices[uuid]; ok {
		return d, nil
	}
	n, ret := s.lib.DeviceGetCount()
	if err := check("counting GPUs", "", ret); err != nil {
		return device{}, err
	}
	for i := range n {
		d, err := s.deviceAt(i)
		if err == nil && d.uuid == uuid {
			return d, nil
		}
		if known := s.known[i]; err != nil && known != nil && known.uuid == uuid {
			return device{}, err
		}
	}
	return device{}, newError(op, uuid, nvml.ErrNotFound, "none of the node's %d GPUs has this UUID", n)
}

// deviceAt gives the GPU at a position in PCI order.
func (s *session) deviceAt(index int) (device, error) {
	op := fmt.Sprintf("getting GPU %d", index)
	handle, ret := s.lib.DeviceGetHandleByIndex(index)
	if err := check(op, s.known.uuid(index), ret); err != nil {
		return device{}, err
	}
	uuid, ret := handle.GetUUID()
	if err := check("reading the UUID of GPU "+fmt.Sprint(index), s.known.uuid(index), ret); err != nil {
		return device{}, err
	}
	d := device{Device: handle, uuid: nvml.UUID(uuid)}
	if s.devices == nil {
		s.devices = map[nvml.UUID]device{}
	}
	s.devices[d.uuid] = d
	return d, nil
}

func (m modelCache) uuid(index int) nvml.UUID {
	if known := m[index]; known != nil {
		return known.uuid
	}
	return ""
}
