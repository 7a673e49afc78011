package lib

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	nv "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/gpuslice/gpuslice/nvml"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

const (
	// sampleGap is the time between the two samples of an instance. Less than 100 ms, says nvml.h, and the counters need not have moved.
	sampleGap = 200 * time.Millisecond
	// mostSampled bounds the instances that are sampled in one observation. The largest node has 16 GPUs of 7 instances.
	mostSampled = 256
)

// usage has what reading the use needs in addition to the driver's own calls.
type usage struct {
	lookout
	reads map[nvml.UUID]read // only for who is in the lane
}

// read is one read of the samples that the driver keeps of processes.
type read struct {
	at   time.Time // by the host's clock, which the driver's times are from, too
	last uint64    // time of the newest sample, in microseconds
}

var _ nvml.UsageReader = (*Driver)(nil)

// Usage implements nvml.UsageReader. It has a lane of its own, but for opening the library where that is not open.
func (d *Driver) Usage(ctx context.Context, sampled map[nvml.UUID][]int) ([]nvml.Usage, error) {
	return beside(ctx, d, &d.usage.lookout, "reading what processes use of the GPUs", func(ctx context.Context, at aside.At) ([]nvml.Usage, error) {
		return d.usage.read(ctx, sampled, at)
	})
}

// read reads all GPUs.
func (u *usage) read(ctx context.Context, sampled map[nvml.UUID][]int, at aside.At) ([]nvml.Usage, error) {
	n, err := u.count()
	if err != nil {
		return nil, err
	}
	if u.reads == nil {
		u.reads = map[nvml.UUID]read{}
	}
	out := make([]nvml.Usage, n)
	var measured []*measurement
	defer func() {
		for _, m := range measured {
			m.free()
		}
	}()
	for i := range out {
		if ctx.Err() != nil { // the caller has given up
			return nil, ctx.Err()
		}
		at(fmt.Sprintf("GPU %d", i))
		r := reader{session: u.session}
		out[i], err = u.gpu(i, &r)
		if err == nil && r.err == nil {
			measured = append(measured, r.begin(&out[i], sampled[out[i].UUID], mostSampled-len(measured))...)
		}
		if err = cmp.Or(err, r.err); errors.Is(err, nvml.ErrLost) {
			out[i], err = nvml.Usage{UUID: u.known[i].uuid, Index: i, Lost: true}, nil
		}
		if err != nil {
			return nil, err
		}
	}
	if len(measured) == 0 {
		return out, nil
	}
	at("the wait between two samples")
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(sampleGap):
	}
	for _, m := range measured {
		if m.of.Lost {
			continue
		}
		at(fmt.Sprintf("instance %d of GPU %d", m.gi, m.of.Index))
		m.of.Instances[m.gi] = m.end()
	}
	return out, nil
}

// gpu reads one GPU. The error is ErrLost, or says that there is no driver. Other values that the driver does not report stay unknown.
func (u *usage) gpu(index int, r *reader) (nvml.Usage, error) {
	s := u.session
	d, err := s.deviceAt(index)
	if err != nil {
		return nvml.Usage{}, err
	}
	r.device, u.known[index] = d, facing{uuid: d.uuid}
	out := nvml.Usage{UUID: d.uuid, Index: index}
	if s.has("nvmlDeviceGetMigMode") {
		current, _, ret := d.GetMigMode()
		out.Enabled = reading(r, current == nv.DEVICE_MIG_ENABLE, ret).Value
	}
	found, err := s.processes(d.Device, d.uuid, "the GPU")
	switch {
	case errors.Is(err, nvml.ErrLost) || errors.Is(err, nvml.ErrNoDriver):
		return out, err
	case err != nil:
		var e *nvml.Error
		errors.As(err, &e)
		out.Processes = nvml.Reading[[]nvml.ProcessUsage]{Code: e.Code}
	default:
		out.Processes = nvml.Answered(u.processes(r, found))
	}
	return out, nil
}

// processes are those with a context, with how busy each was since the last read.
func (u *usage) processes(r *reader, found []nv.ProcessInfo) []nvml.ProcessUsage {
	busy, ret := u.busy(r)
	var out []nvml.ProcessUsage
	for _, p := range found {
		one := nvml.ProcessUsage{PID: int(p.Pid), GI: instanceOf(p.GpuInstanceId), Busy: reading(r, busy[p.Pid], ret)}
		if p.UsedGpuMemory != math.MaxUint64 { // the library's value for unknown
			one.UsedMiB = int(p.UsedGpuMemory / mebibyte) //nolint:gosec // a GPU's memory in MiB fits
		}
		same := func(a nvml.ProcessUsage) bool { return a.PID == one.PID && a.GI == one.GI }
		if at := slices.IndexFunc(out, same); at >= 0 { // one that computes and draws is listed twice
			out[at].UsedMiB = max(out[at].UsedMiB, one.UsedMiB)
			continue
		}
		out = append(out, one)
	}
	slices.SortFunc(out, func(a, b nvml.ProcessUsage) int { return cmp.Or(cmp.Compare(a.PID, b.PID), cmp.Compare(a.GI, b.GI)) })
	return out
}

// busy returns the percentage of the time since the last read that each process has kept the GPU busy. Those that have not are not in it.
func (u *usage) busy(r *reader) (busy map[uint32]float64, ret nv.Return) {
	if !r.session.has("nvmlDeviceGetProcessUtilization") {
		return nil, nv.ERROR_FUNCTION_NOT_FOUND
	}
	was, now := u.reads[r.device.uuid], time.Now().Round(0)
	if now.Before(was.at) { // the clock was set back: all samples would be older than the last one
		was.last = 0
	}
	samples, ret := utilization(r.device, was.last)
	was.at = now
	busy = map[uint32]float64{}
	for _, s := range samples {
		if s.Pid == 0 { // room that the driver has not used
			continue
		}
		was.last = max(was.last, s.TimeStamp)
		busiest := max(s.SmUtil, s.MemUtil, s.EncUtil, s.DecUtil)
		busy[s.Pid] = max(busy[s.Pid], min(float64(busiest), 100))
	}
	u.reads[r.device.uuid] = was
	return busy, ret
}

// utilization lists the samples of processes that are newer than since. A missing sample is not an error.
func utilization(d device, since uint64) (samples []nv.ProcessUtilizationSample, ret nv.Return) {
	defer func() {
		// go-nvml asks for the number of samples and then for the samples. If there are more by then, it slices beyond what it has made.
		if recover() != nil {
			samples, ret = nil, nv.ERROR_INSUFFICIENT_SIZE
		}
	}()
	samples, ret = d.GetProcessUtilization(since)
	switch {
	case ret == nv.ERROR_NOT_FOUND, ret == nv.ERROR_INSUFFICIENT_SIZE && len(samples) == 0:
		return nil, nv.SUCCESS
	case ret != nv.SUCCESS:
		return nil, ret
	}
	return samples, ret
}

// measurement samples one instance twice.
type measurement struct {
	reader  *reader
	of      *nvml.Usage
	gi      int
	samples []nv.GpmSample // that are to be freed
}

// begin takes the first sample of each instance that has a process. It returns those that have none, and those that cannot be sampled.
func (r *reader) begin(of *nvml.Usage, instances []int, most int) []*measurement {
	if !of.Enabled || !of.Processes.Known || len(instances) == 0 {
		return nil
	}
	of.Instances = map[int]nvml.Reading[float64]{}
	var out []*measurement
	for _, gi := range instances {
		if !slices.ContainsFunc(of.Processes.Value, func(p nvml.ProcessUsage) bool { return p.GI == gi }) {
			of.Instances[gi] = nvml.Answered(0.0)
			continue
		}
		if len(out) >= most {
			of.Instances[gi] = nvml.Reading[float64]{}
			continue
		}
		m := &measurement{reader: r, of: of, gi: gi}
		ret := r.sampleable()
		if ret == nv.SUCCESS {
			ret = m.sample()
		}
		if ret != nv.SUCCESS {
			m.free()
			of.Instances[gi] = reading(r, 0.0, ret)
			continue
		}
		out = append(out, m)
	}
	return out
}

// sampleable reports by SUCCESS that the GPU's counters can be sampled: Hopper and later.
func (r *reader) sampleable() nv.Return {
	for _, function := range []string{
		"nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet", "nvmlGpmSampleFree",
	} {
		if !r.session.has(function) {
			return nv.ERROR_FUNCTION_NOT_FOUND
		}
	}
	support, ret := r.device.GpmQueryDeviceSupport()
	if ret == nv.SUCCESS && support.IsSupportedDevice == 0 {
		return nv.ERROR_NOT_SUPPORTED
	}
	return ret
}

// sample takes one sample.
func (m *measurement) sample() nv.Return {
	s, ret := m.reader.session.lib.GpmSampleAlloc()
	if ret != nv.SUCCESS {
		return ret
	}
	m.samples = append(m.samples, s)
	return s.MigGet(m.reader.device.Device, m.gi)
}

// end takes the second sample, frees both, and returns the instance's busy percentage of the time between them.
func (m *measurement) end() nvml.Reading[float64] {
	defer m.free()
	if ret := m.sample(); ret != nv.SUCCESS {
		return reading(m.reader, 0.0, ret)
	}
	asked := nv.GpmMetricsGetType{NumMetrics: 2, Sample1: m.samples[0], Sample2: m.samples[1]}
	asked.Metrics[0].MetricId, asked.Metrics[1].MetricId = uint32(nv.GPM_METRIC_GRAPHICS_UTIL), uint32(nv.GPM_METRIC_SM_UTIL)
	if ret := m.reader.session.lib.GpmMetricsGet(&asked); ret != nv.SUCCESS {
		return reading(m.reader, 0.0, ret)
	}
	var out nvml.Reading[float64]
	for _, metric := range asked.Metrics[:2] {
		ret := nv.Return(metric.NvmlReturn) //nolint:gosec // the library's codes are small
		if ret == nv.SUCCESS && math.IsNaN(metric.Value) {
			ret = nv.ERROR_NO_DATA
		}
		if one := reading(m.reader, min(max(metric.Value, 0), 100), ret); !out.Known || one.Value > out.Value {
			out = one
		}
	}
	return out
}

// free releases the samples: it is untested whether an instance can be destroyed while a program keeps one.
func (m *measurement) free() {
	for _, s := range m.samples {
		_ = s.Free() // it fails only for an invalid sample
	}
	m.samples = nil
}
