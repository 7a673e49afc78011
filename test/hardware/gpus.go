package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"k8s.io/utils/clock"

	"github.com/gpuslice/gpuslice/agent/monitor/health/kernellog"
	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/agent/report/preview"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// callTime bounds a call of the driver, or a program that asks it. A cold GPU takes seconds.
const callTime = time.Minute

// queried are the fields of each GPU to query from nvidia-smi.
var queried = []string{
	"index", "uuid", "name", "pci.bus_id", "memory.total", "mig.mode.current", "mig.mode.pending", "persistence_mode", "compute_mode", "compute_cap",
}

// compare compares the snapshot with what nvidia-smi says.
func (t *trial) compare(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	began := time.Now()
	gpus, err := t.driver.Snapshot(ctx)
	if err != nil {
		return "", err
	}
	first := time.Since(began)
	if len(gpus) == 0 {
		return "", errors.New("the driver has no GPU")
	}
	t.before = gpus
	began = time.Now()
	if gpus, err = t.driver.Snapshot(ctx); err != nil {
		return "", err
	}
	again := time.Since(began)
	said, err := t.query(ctx, "--query-gpu="+strings.Join(queried, ","))
	if err != nil {
		return "", err
	}
	var reported [][]string
	for i, g := range gpus {
		f := fields(g)
		if at := slices.Index(queried, "compute_mode"); g.ComputeMode == "" && i < len(said) && len(said[i]) == len(f) {
			f[at] = said[i][at] // with MIG mode on a GPU has none of its own, which nvidia-smi may put otherwise
		}
		reported = append(reported, f)
	}
	if diff := gocmp.Diff(said, reported); diff != "" {
		return "", fmt.Errorf("nvidia-smi and the driver (-nvidia-smi +driver):\n%s", diff)
	}
	return fmt.Sprintf("%s, %s, %d MiB; %d fields of each; read in %s, then in %s", counted(len(gpus), "GPU"), gpus[0].Model, gpus[0].MemoryMiB,
		len(queried), short(first), short(again)), nil
}

// query has nvidia-smi print a table, and reads it.
func (t *trial) query(ctx context.Context, what string) ([][]string, error) {
	c := t.program(ctx, t.smi, what, "--format=csv,noheader,nounits")
	var out, complained bytes.Buffer
	c.Stdout, c.Stderr = &out, &complained
	if err := c.Run(); err != nil {
		// It may complain in either place.
		return nil, fmt.Errorf("running nvidia-smi %s: %w; it wrote: %s", what, err, written(complained.String()+"\n"+out.String()))
	}
	r := csv.NewReader(strings.NewReader(out.String()))
	r.TrimLeadingSpace = true
	rows, err := r.ReadAll()
	if err != nil {
		return nil, fmt.Errorf("reading what nvidia-smi %s prints: %w; it wrote: %s", what, err, written(out.String()))
	}
	return rows, nil
}

// written is what a program wrote, for a row of the table.
func written(text string) string {
	return cmp.Or(sanitize.Message(text, sanitize.Longest), "nothing")
}

// fields are those that were queried, as nvidia-smi writes them.
func fields(g nvml.GPU) []string {
	word := map[bool]string{false: "Disabled", true: "Enabled"}
	current, pending := word[g.Enabled], word[g.Pending]
	if !g.Capable {
		current, pending = "[N/A]", "[N/A]"
	}
	modes := map[nvml.ComputeMode]string{
		nvml.ComputeDefault: "Default", nvml.ComputeExclusiveProcess: "Exclusive_Process", nvml.ComputeProhibited: "Prohibited",
	}
	return []string{
		strconv.Itoa(g.Index), string(g.UUID), g.Model, "0000" + strings.ToUpper(g.PCI), strconv.Itoa(g.MemoryMiB), current, pending,
		word[g.Persistent], modes[g.ComputeMode], g.ComputeCapability.String(),
	}
}

// plans plans each config that the agent generates for these GPUs, and sees that each GPU would be cut as the config has it.
func (t *trial) plans() (string, error) {
	began := time.Now()
	generated := catalog.Generate(t.before)
	offline := preview.Offline{GPUs: t.before, Catalog: catalog.Merge(generated, nil)}
	var errs []error
	steps := 0
	for _, name := range slices.Sorted(maps.Keys(generated)) {
		r, err := offline.Plan(config.LabelMIGConfig, name)
		var none *catalog.NoCapableGPUError
		switch {
		case errors.As(err, &none) && !slices.ContainsFunc(t.before, func(g nvml.GPU) bool { return g.Capable }):
			continue // which is all that there is to say of it here
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
			continue
		}
		steps += len(r.Steps)
		requests, err := offline.Catalog.Requests(name, t.before)
		errs = append(errs, err)
		for _, g := range r.After {
			request, asked := requests[g.UUID]
			if got := cutInto(g); asked && (g.Enabled != request.MIG || !maps.Equal(got, request.Devices)) {
				errs = append(errs, fmt.Errorf("%s: GPU %d would be cut into %v, not into %v", name, g.Index, got, request.Devices))
			}
		}
	}
	return fmt.Sprintf("%s, %s in all, in %s", counted(len(generated), "config"), counted(steps, "step"), short(time.Since(began))), errors.Join(errs...)
}

// cutInto counts a GPU's devices by their names.
func cutInto(g nvml.GPU) map[string]int {
	out := map[string]int{}
	for _, p := range g.Geometry() {
		for _, d := range p.Devices() {
			out[d]++
		}
	}
	return out
}

// refusals asks for what no GPU here can be.
func (t *trial) refusals() (string, error) {
	custom := map[string]catalog.MIGConfig{}
	at := slices.IndexFunc(t.before, func(g nvml.GPU) bool { return g.Capable && !g.Lost })
	if at >= 0 {
		g := t.before[at]
		ask := func(name string, devices map[string]int) {
			custom[name] = catalog.MIGConfig{{Indices: []int{g.Index}, MIG: true, Devices: devices}}
		}
		smallest := slices.MinFunc(g.Profiles, func(a, b nvml.Profile) int { return a.MemoryMiB*8 + a.Slices - b.MemoryMiB*8 - b.Slices })
		for _, p := range g.Profiles {
			ask("one more "+p.Name, map[string]int{p.Name: p.Max + 1})
			if p.Name != smallest.Name && p.Placements[0].Size == g.MemorySlices() {
				ask(p.Name+" and another", map[string]int{p.Name: 1, smallest.Name: 1})
			}
		}
		ask("no such profile", map[string]int{"9g.999gb": 1})
	}
	offline := preview.Offline{GPUs: t.before, Catalog: catalog.Merge(catalog.Generate(t.before), custom)}
	saw := ""
	var errs []error
	names := slices.Sorted(maps.Keys(custom))
	for _, name := range append(names, "no-such-config") {
		_, err := offline.Plan(config.LabelMIGConfig, name)
		var impossible *nvml.Impossible
		var unknown *catalog.UnknownConfigError
		switch {
		case errors.As(err, &impossible):
			if saw == "" {
				saw = fmt.Sprintf(", as %v: %s", custom[name][0].Devices, impossible.Reason)
			}
		case errors.As(err, &unknown) && name == "no-such-config":
		default:
			errs = append(errs, fmt.Errorf("%s: %w", name, cmpOr(err, errPlanned)))
		}
	}
	return counted(len(names)+1, "config") + saw, errors.Join(errs...)
}

var errPlanned = errors.New("it was planned")

func cmpOr(err, otherwise error) error {
	if err == nil {
		return otherwise
	}
	return err
}

// lightReads is how often health is read to measure what that costs.
const lightReads = 50

// health reads the health of all GPUs, and says how long that takes.
func (t *trial) health(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	began := time.Now()
	all, err := t.driver.Health(ctx, true)
	if err != nil {
		return "", err
	}
	thorough := time.Since(began)
	began = time.Now()
	for range lightReads {
		if _, err := t.driver.Health(ctx, false); err != nil {
			return "", err
		}
	}
	light := time.Since(began) / lightReads
	if len(all) != len(t.before) {
		return "", fmt.Errorf("health is reported of %d GPUs, and there are %d", len(all), len(t.before))
	}
	var said []string
	for _, h := range all {
		said = append(said, fmt.Sprintf("GPU %d: %s", h.Index, state(h)))
		if h.Lost {
			return "", errors.New(said[len(said)-1])
		}
	}
	return fmt.Sprintf("%s; %s a look, %s for a thorough one", strings.Join(said, ", "), short(light), short(thorough)), nil
}

// state says of a GPU what people ask first.
func state(h nvml.Health) string {
	if h.Lost {
		return "fallen off the bus"
	}
	action := "not reported (" + h.Action.Code + ")"
	if h.Action.Known {
		action = h.Action.Value.String()
	}
	rows := "not reported (" + h.Rows.Uncorrected.Code + ")"
	if h.Rows.Uncorrected.Known {
		rows = fmt.Sprint(h.Rows.Uncorrected.Value)
	}
	return fmt.Sprintf("recovery action %s, rows remapped %s", action, rows)
}

// fault has a process of this program make an error, and sees that the driver reports it, and nothing else.
func (t *trial) fault(ctx context.Context) (string, error) {
	gpu, err := t.free()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	events, err := t.driver.Events(ctx)
	if err != nil {
		return "", err
	}
	logged, unreadable := kernellog.New(t.kernelLog, clock.RealClock{}, t.log).Xids(ctx)
	c := t.program(ctx, t.self, "work", errs)
	c.Env = append(c.Env, "NVIDIA_VISIBLE_DEVICES="+string(gpu.UUID))
	said := &strings.Builder{}
	c.Stdout, c.Stderr = said, said
	if err := c.Start(); err != nil {
		return "", err
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	if err := t.await(ctx, events, ended, gpu.UUID, said); err != nil {
		return "", err
	}
	x, err := meaning(mmuFault)
	if err != nil {
		return "", err
	}
	h, err := t.healthOf(ctx, gpu.UUID)
	if err != nil {
		return "", err
	}
	if h.Lost || h.Action.Known && h.Action.Value != nvml.RecoverNothing {
		return "", fmt.Errorf("after the fault: %s", state(h))
	}
	saw := fmt.Sprintf("Xid %d, %s; %s", mmuFault, x.Meaning, state(h))
	if unreadable != nil {
		return saw + "; the kernel's log cannot be read here", nil
	}
	return saw + "; the kernel's log " + names(ctx, logged, c.Process.Pid), nil
}

// mmuFault is the Xid of a kernel that uses an invalid address. channelsRemoved is the Xid of the driver's response.
const mmuFault, channelsRemoved = 31, 45

// await waits until the driver has reported the fault and the process has ended.
func (t *trial) await(ctx context.Context, events <-chan nvml.Event, ended <-chan error, gpu nvml.UUID, said fmt.Stringer) error {
	for reported, over := false, false; !reported || !over; {
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for Xid %d: %w; the program said: %s", mmuFault, context.Cause(ctx), said)
		case err := <-ended:
			if err != nil {
				return fmt.Errorf("the program ended with %w: %s", err, said)
			}
			over, ended = true, nil
		case e, open := <-events:
			switch {
			case !open:
				return errors.New("the driver reports no more events")
			case e.GPU == gpu && e.Kind == nvml.EventXid && e.Xid == mmuFault:
				reported = true
			case e.Kind == nvml.EventSilence || e.Kind == nvml.EventWatching:
			case e.Kind == nvml.EventXid && e.Xid == channelsRemoved: // which may follow
			default:
				return fmt.Errorf("the driver reported %+v", e)
			}
		}
	}
	return nil
}

// names says whether the kernel's log names the process.
func names(ctx context.Context, logged <-chan kernellog.Xid, pid int) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for {
		select {
		case <-ctx.Done():
			return "does not name the process"
		case x, open := <-logged:
			if !open {
				return "cannot be read any more"
			}
			if x.Number == mmuFault && x.PID == pid {
				return "names the process"
			}
		}
	}
}

// meaning is what the agent knows of an Xid that is an application's own fault.
func meaning(number uint64) (verdict.Xid, error) {
	all := verdict.Xids()
	at := slices.IndexFunc(all, func(x verdict.Xid) bool { return x.Number == number })
	if at < 0 || all[at].Class != verdict.ClassApplication || all[at].Critical {
		return verdict.Xid{}, fmt.Errorf("the agent does not take Xid %d for an application's fault", number)
	}
	return all[at], nil
}

func (t *trial) healthOf(ctx context.Context, gpu nvml.UUID) (nvml.Health, error) {
	all, err := t.driver.Health(ctx, false)
	if err != nil {
		return nvml.Health{}, err
	}
	at := slices.IndexFunc(all, func(h nvml.Health) bool { return h.UUID == gpu })
	if at < 0 {
		return nvml.Health{}, fmt.Errorf("health is not reported of %s", gpu)
	}
	return all[at], nil
}

// free is a GPU that programs can use as a whole, on a machine where no one else uses one.
func (t *trial) free() (nvml.GPU, error) {
	if len(t.before) == 0 {
		return nvml.GPU{}, notHere(unmet)
	}
	for _, g := range t.before {
		switch {
		case g.Lost:
			return nvml.GPU{}, notHere("GPU %d is lost", g.Index)
		case g.Enabled || g.Pending:
			return nvml.GPU{}, notHere("MIG mode of GPU %d is on, and is not changed here", g.Index)
		case g.ComputeMode != nvml.ComputeDefault:
			return nvml.GPU{}, notHere("GPU %d has compute mode %s, which is not changed here", g.Index, g.ComputeMode)
		case len(g.Processes) > 0:
			return nvml.GPU{}, notHere("process %d uses GPU %d: end it, or try another time", g.Processes[0].PID, g.Index)
		}
	}
	return t.before[0], nil
}

// short is a duration for people.
func short(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond:
		return d.Round(10 * time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	default:
		return d.Round(100 * time.Millisecond).String()
	}
}
