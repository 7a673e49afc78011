package lib

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// health has what reading health needs in addition to the driver's own calls.
type health struct{ lookout }

var _ nvml.HealthReader = (*Driver)(nil)

// Health implements nvml.HealthReader. It has a lane of its own, but for opening the library where that is not open.
func (d *Driver) Health(ctx context.Context, thorough bool) ([]nvml.Health, error) {
	return beside(ctx, d, &d.health.lookout, "reading the health of the GPUs", func(ctx context.Context, at aside.At) ([]nvml.Health, error) {
		return d.health.read(ctx, thorough, at)
	})
}

// read reads all GPUs.
func (h *health) read(ctx context.Context, thorough bool, at aside.At) ([]nvml.Health, error) {
	n, err := h.count()
	if err != nil {
		return nil, err
	}
	var out []nvml.Health
	for i := range n {
		if ctx.Err() != nil { // the caller has given up
			return nil, ctx.Err()
		}
		at(fmt.Sprintf("GPU %d", i))
		g, err := h.gpu(i, thorough)
		if errors.Is(err, nvml.ErrLost) {
			was := h.known[i]
			g, err = nvml.Health{Index: i, UUID: was.uuid, PCI: was.pci, Lost: true}, nil
		}
		if err != nil {
			return nil, err
		}
		out = append(out, g)
	}
	return out, nil
}

// gpu reads one GPU. The error is ErrLost if any of its answers is, or says that there is no driver. Other values that the driver does not report
// stay unknown.
func (h *health) gpu(index int, thorough bool) (nvml.Health, error) {
	s := h.session
	d, err := s.deviceAt(index)
	if err != nil {
		return nvml.Health{}, err
	}
	g := nvml.Health{Index: index, UUID: d.uuid}
	if was := h.known[index]; was.uuid == d.uuid {
		g.PCI = was.pci
	} else {
		pci, ret := d.GetPciInfo()
		if err := check("reading the PCI address", d.uuid, ret); err != nil {
			return nvml.Health{}, err
		}
		g.PCI = address(pci)
		h.known[index] = facing{d.uuid, g.PCI}
	}
	r := reader{session: s, device: d}
	r.fields(&g)
	current, pending, ret := d.GetEccMode()
	g.ECCMode = reading(&r, modeOf(current == nv.FEATURE_ENABLED, pending == nv.FEATURE_ENABLED), ret)
	if s.has("nvmlDeviceGetMigMode") {
		current, pending, ret := d.GetMigMode()
		g.MIGMode = reading(&r, modeOf(current == 1, pending == 1), ret)
	}
	if thorough {
		r.thorough(&g)
	}
	return g, r.err
}

func modeOf(current, pending bool) nvml.Mode { return nvml.Mode{Current: current, Pending: pending} }

// reader reads one GPU, and remembers that it is lost or that the driver is gone.
type reader struct {
	session *session
	device  device
	err     error
}

// reading is a value as the library has given it.
func reading[T any](r *reader, v T, ret nv.Return) nvml.Reading[T] {
	if ret == nv.SUCCESS {
		return nvml.Answered(v)
	}
	if err := check("reading the health", r.device.uuid, ret); errors.Is(err, nvml.ErrLost) || errors.Is(err, nvml.ErrNoDriver) {
		r.err = cmp.Or(r.err, err)
	}
	return nvml.Reading[T]{Code: name(ret)}
}

// fields reads by one call what the library gives as fields. Each has a result of its own.
func (r *reader) fields(g *nvml.Health) {
	flag := func(to *nvml.Reading[bool]) func(uint64, nv.Return) {
		return func(v uint64, ret nv.Return) { *to = reading(r, v != 0, ret) }
	}
	number := func(to *nvml.Reading[uint64]) func(uint64, nv.Return) {
		return func(v uint64, ret nv.Return) { *to = reading(r, v, ret) }
	}
	action := func(v uint64, ret nv.Return) {
		g.Action = reading(r, nvml.RecoveryAction(min(v, math.MaxInt32)), ret)
	}
	wanted := []struct {
		field uint32
		put   func(uint64, nv.Return)
	}{
		{nv.FI_DEV_ECC_SBE_VOL_TOTAL, number(&g.ECC.CorrectedVolatile)},
		{nv.FI_DEV_ECC_DBE_VOL_TOTAL, number(&g.ECC.UncorrectedVolatile)},
		{nv.FI_DEV_ECC_SBE_AGG_TOTAL, number(&g.ECC.CorrectedAggregate)},
		{nv.FI_DEV_ECC_DBE_AGG_TOTAL, number(&g.ECC.UncorrectedAggregate)},
		{nv.FI_DEV_RETIRED_SBE, number(&g.Pages.Corrected)},
		{nv.FI_DEV_RETIRED_DBE, number(&g.Pages.Uncorrected)},
		{nv.FI_DEV_RETIRED_PENDING, flag(&g.Pages.Pending)},
		{nv.FI_DEV_REMAPPED_COR, number(&g.Rows.Corrected)},
		{nv.FI_DEV_REMAPPED_UNC, number(&g.Rows.Uncorrected)},
		{nv.FI_DEV_REMAPPED_PENDING, flag(&g.Rows.Pending)},
		{nv.FI_DEV_REMAPPED_FAILURE, flag(&g.Rows.Failed)},
		{nv.FI_DEV_RESET_STATUS, flag(&g.NeedsReset)},
		{nv.FI_DEV_DRAIN_AND_RESET_STATUS, flag(&g.NeedsDrain)},
		{nv.FI_DEV_GET_GPU_RECOVERY_ACTION, action},
	}
	values := make([]nv.FieldValue, len(wanted))
	for i, w := range wanted {
		values[i].FieldId = w.field
	}
	ret := nv.ERROR_FUNCTION_NOT_FOUND
	if r.session.has("nvmlDeviceGetFieldValues") {
		ret = r.device.GetFieldValues(values)
	}
	for i, w := range wanted {
		if ret != nv.SUCCESS {
			w.put(0, ret)
			continue
		}
		w.put(number64(values[i]), nv.Return(values[i].NvmlReturn)) //nolint:gosec // a result code
	}
}

// number64 is the value of a field, whatever whole number it is. A negative one is no count, and 0.
func number64(f nv.FieldValue) uint64 {
	v := binary.NativeEndian.Uint64(f.Value[:])
	switch nv.ValueType(f.ValueType) { //nolint:gosec // few
	case nv.VALUE_TYPE_UNSIGNED_INT:
		return uint64(uint32(v)) //nolint:gosec // the field has no more
	case nv.VALUE_TYPE_SIGNED_INT:
		return uint64(max(int32(v), 0)) //nolint:gosec // the field has no more
	case nv.VALUE_TYPE_SIGNED_LONG_LONG:
		return uint64(max(int64(v), 0)) //nolint:gosec // not negative
	default:
		return v
	}
}

// thorough reads what older drivers, other GPUs or other users do not have.
func (r *reader) thorough(g *nvml.Health) {
	if r.session.has("nvmlDeviceGetRowRemapperHistogram") {
		b, ret := r.device.GetRowRemapperHistogram()
		g.Banks = reading(r, nvml.Banks{Max: int(b.Max), High: int(b.High), Partial: int(b.Partial), Low: int(b.Low), None: int(b.None)}, ret)
	}
	if r.session.has("nvmlDeviceGetSramEccErrorStatus") {
		status, ret := r.device.GetSramEccErrorStatus()
		g.SRAMThreshold = reading(r, status.BThresholdExceeded != 0, ret)
	}
	if r.session.has("nvmlDeviceGetRepairStatus") {
		status, ret := r.device.GetRepairStatus()
		g.RepairPending = reading(r, status.BChannelRepairPending != 0 || status.BTpcRepairPending != 0, ret)
	}
	if r.session.has("nvmlDeviceGetUnrepairableMemoryFlag_v1") {
		status, ret := r.device.GetUnrepairableMemoryFlag_v1()
		g.Unrepairable = reading(r, status.BUnrepairableMemory != 0, ret)
	}
	if r.session.has("nvmlDeviceGetGpuFabricInfoV") {
		info, ret := r.device.GetGpuFabricInfoV().V2()
		g.Fabric = reading(r, fabricOf(info), ret)
	}
}

// Fields of the mask of a fabric's health, by NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_… and _WIDTH_…: each says 0 if it is not supported, and
// the value below if it is bad. A route that is being recovered is one.
var fabricFaults = []struct{ shift, mask, bad uint32 }{
	{nv.GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW, nv.GPU_FABRIC_HEALTH_MASK_WIDTH_DEGRADED_BW, nv.GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE},
	{nv.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY, nv.GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_RECOVERY, nv.GPU_FABRIC_HEALTH_MASK_ROUTE_RECOVERY_TRUE},
	{nv.GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY, nv.GPU_FABRIC_HEALTH_MASK_WIDTH_ROUTE_UNHEALTHY, nv.GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE},
	{
		nv.GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY, nv.GPU_FABRIC_HEALTH_MASK_WIDTH_ACCESS_TIMEOUT_RECOVERY,
		nv.GPU_FABRIC_HEALTH_MASK_ACCESS_TIMEOUT_RECOVERY_TRUE,
	},
}

func fabricOf(info nv.GpuFabricInfo_v2) nvml.Fabric {
	f := nvml.Fabric{State: nvml.FabricState(info.State)}
	f.Failed = f.State == nvml.FabricCompleted && nv.Return(info.Status) != nv.SUCCESS //nolint:gosec // a result code
	f.Healthy = !slices.ContainsFunc(fabricFaults, func(x struct{ shift, mask, bad uint32 }) bool {
		return info.HealthMask>>x.shift&x.mask == x.bad
	})
	return f
}
