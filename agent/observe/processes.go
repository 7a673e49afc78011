package observe

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/agent/monotonic"
	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state"
	"github.com/gpuslice/gpuslice/agent/state/outcome"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Processes finds the processes of the host that hold a GPU or a part of one, and the pods that keep NVIDIA's library open.
type Processes struct {
	Processes holders.Processes
	Settings  config.Settings
	Clock     *monotonic.Clock

	foundFree map[string]time.Time // the last scan that found no process on the device; valid for freeFor
	unowned   throttledNames       // processes that belong to no pod and hold a device that goes
	unlisted  unlisted
}

// Forget drops what was computed from earlier times of the clock.
func (p *Processes) Forget(time.Time) {
	clear(p.foundFree)
	p.unowned, p.unlisted = throttledNames{}, unlisted{}
}

// HeldBy adds the GPU's holders to an error. If it finds none, the error is a NoHolderError: users search longest for a client that no list shows.
func (p *Processes) HeldBy(ctx context.Context, seen *state.Observed, step plan.Step, held error) error {
	gpu, ok := seen.GPU(step.GPU)
	if !ok {
		return held
	}
	reported := reportedOn(gpu, step)
	search, cancel := context.WithTimeout(ctx, p.Settings.Timeouts.DriverCall) // the table may have any number of processes
	defer cancel()
	clients, err := p.Processes.Holders(search, []holders.Sought{{Device: string(gpu.UUID), Reported: reported, Minor: gpu.Minor}})
	clients = slices.DeleteFunc(clients, func(c holders.Client) bool {
		return c.Self || step.Kind == plan.Destroy && len(reported) > 0 && !slices.Contains(reported, c.PID)
	})
	names := holders.NameClients(clients, seen.Pods)
	said := map[string]bool{"": true}
	for i, c := range clients {
		if remedy := c.Remedy(); !said[remedy] {
			names[i] += " (" + remedy + ")"
			said[remedy] = true
		}
	}
	switch {
	case err != nil && len(names) == 0:
		return fmt.Errorf("%w; cannot tell who holds it: %w", held, err)
	case err != nil:
		return fmt.Errorf("%w; held by %s, and perhaps by others: %w", held, strings.Join(names, ", "), err)
	case len(names) == 0:
		return &outcome.NoHolderError{Err: fmt.Errorf("%w; no process of this node has GPU %d open, so a part of the driver holds it", held, gpu.Index)}
	default:
		return fmt.Errorf("%w; held by %s", held, strings.Join(names, ", "))
	}
}

// reportedOn lists the processes in the step's way, as the driver reports them. A process on another instance or part does not hold the one that the
// step destroys.
func reportedOn(gpu nvml.GPU, step plan.Step) []int {
	found := nvml.PIDs(gpu.Processes)
	for _, i := range gpu.Instances {
		if step.Kind == plan.Destroy && (i.Profile != step.Instance.Profile || i.Span != step.Instance.Span) {
			continue
		}
		found = append(found, nvml.PIDs(blockingProcesses(i, step))...)
	}
	return found
}

// blockingProcesses returns the processes of an instance that are in the step's way.
func blockingProcesses(i nvml.Instance, step plan.Step) []nvml.Process {
	if at := slices.IndexFunc(i.Devices, func(d nvml.Device) bool { return d.Part == step.Part }); step.OnPart() && at >= 0 {
		return i.ProcessesOn(i.Devices[at])
	}
	return i.Processes
}

// freeFor is how long a scan of the process table that has found nothing counts. A change of eight GPUs takes some fifty steps,
// and a table with 200,000 open files takes two seconds to read. The driver refuses in any case to change a device in use.
const freeFor = 5 * time.Second

// Observe adds the processes that hold a device which goes, by the driver and by open files, whatever kubelet says. If it cannot read the process
// table, it returns no error: the devices count as busy, and the agent waits.
func (p *Processes) Observe(ctx context.Context, seen *state.Observed, taken []plan.Taken) {
	now := p.Clock.Now()
	sought := soughtDevices(seen, taken)
	isFree := func(d holders.Sought) bool { return now.Sub(p.foundFree[d.Device]) < freeFor }
	if !slices.ContainsFunc(sought, func(d holders.Sought) bool { return len(d.Reported) > 0 || !isFree(d) }) {
		p.unlisted.note(nil, now)
		return
	}
	call, cancel := context.WithTimeout(ctx, p.Settings.Timeouts.DriverCall)
	defer cancel()
	seen.Holders.Processes, seen.Holders.Err = p.Processes.Holders(call, sought)
	p.unlisted.note(seen.Holders.Processes, now)
	p.foundFree = map[string]time.Time{}
	for _, d := range sought {
		if seen.Holders.Err == nil && !slices.ContainsFunc(seen.Holders.Processes, func(c holders.Client) bool { return slices.Contains(c.Devices, d.Device) }) {
			p.foundFree[d.Device] = now
		}
	}
	seen.Holders.Pods = holders.GPUPods(seen.Pods, seen.Kubelet.Assigned, seen.Holders.Processes, seen.DRA.Claimed(), seen.GPUs)
}

// Users returns the processes that NVML reports on any device. It leaves out those that the process table does not show.
func (p *Processes) Users(ctx context.Context, seen *state.Observed) []holders.Client {
	var sought []holders.Sought
	add := func(device string, on []nvml.Process) {
		if len(on) > 0 {
			sought = append(sought, holders.Sought{Device: device, Minor: holders.NoFiles, Reported: nvml.PIDs(on)})
		}
	}
	for _, gpu := range seen.GPUs {
		add(string(gpu.UUID), gpu.Processes)
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				add(d.UUID, i.ProcessesOn(d))
			}
		}
	}
	if len(sought) == 0 {
		return nil
	}
	call, cancel := context.WithTimeout(ctx, p.Settings.Timeouts.DriverCall)
	defer cancel()
	found, _ := p.Processes.Holders(call, sought) // a plan that needs the process table reports why it cannot be read
	return found
}

// soughtDevices returns the devices that need a search for holders. It searches open device files only for a GPU that goes as a whole: such a process
// may use another instance than one that goes.
func soughtDevices(seen *state.Observed, taken []plan.Taken) []holders.Sought {
	var out []holders.Sought
	for _, t := range taken {
		gpu, ok := seen.GPU(t.GPU)
		if !ok {
			continue
		}
		if t.Whole {
			out = append(out, holders.Sought{Device: string(gpu.UUID), Minor: gpu.Minor, Reported: nvml.PIDs(gpu.Processes)})
		}
		if t.Compute {
			out = append(out, holders.Sought{Device: string(gpu.UUID), Minor: holders.NoFiles, Reported: nvml.PIDs(gpu.Processes)})
		}
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				if slices.Contains(t.Devices, d.UUID) {
					out = append(out, holders.Sought{Device: d.UUID, Minor: holders.NoFiles, Reported: nvml.PIDs(i.ProcessesOn(d))})
				}
			}
		}
	}
	return out
}

// Unowned names the processes that compute on a device which goes, with the device, and that the steps neither evict with a pod nor stop with a unit. A
// user has to end them. A process without a unit or a container may be of a pod that has the device, and then leaves with it.
func (p *Processes) Unowned(seen *state.Observed, steps []plan.Step) []string {
	held, stops, now := map[string]bool{}, map[string]bool{}, p.Clock.Now()
	for _, pod := range seen.Holders.Pods {
		for _, d := range pod.Devices {
			held[d] = true
		}
	}
	for _, s := range steps {
		stops[s.Unit] = s.Kind == plan.StopUnits
	}
	strange := holders.Unowned(seen.Holders.Processes, seen.Pods)
	strange = slices.DeleteFunc(strange, func(c holders.Client) bool {
		return c.Self || c.Unlisted && !p.unlisted.mayStay(c.PID, now) || !slices.Contains(c.Sources, holders.SourceNVML) || stops[c.Unit] ||
			c.Unit == "" && c.Container == "" && !slices.ContainsFunc(c.Devices, func(d string) bool { return !held[d] })
	})
	if len(strange) == 0 {
		p.unowned = throttledNames{}
		return nil
	}
	names := holders.NameClients(strange, seen.Pods)
	for i, c := range strange {
		var devices []string
		for _, d := range c.Devices {
			devices = append(devices, seen.DeviceName(d))
		}
		names[i] = sanitize.Names(devices) + " by " + names[i]
	}
	return p.unowned.of(names, now)
}

// justEnded is how long NVML may report a process that has ended.
const justEnded = 5 * time.Second

// unlisted are the processes that NVML reports and the process table does not show.
type unlisted struct {
	since time.Time         // when the agent first saw one, without a pause
	pids  map[int]time.Time // when it first saw each
}

func (u *unlisted) note(clients []holders.Client, now time.Time) {
	before := *u
	*u = unlisted{pids: map[int]time.Time{}}
	for _, c := range clients {
		if !c.Unlisted {
			continue
		}
		u.since, u.pids[c.PID] = before.since, now
		if at, known := before.pids[c.PID]; known {
			u.pids[c.PID] = at
		}
		if u.since.IsZero() {
			u.since = now
		}
	}
}

// mayStay reports whether the process may be there for longer than one that has just ended. If some end all the time, only those that stay count: a tenant's
// programs may start and end as often as they like.
func (u *unlisted) mayStay(pid int, now time.Time) bool {
	return now.Sub(u.since) < justEnded || now.Sub(u.pids[pid]) >= justEnded
}

// ObserveClients finds the pods that keep the library open without having a GPU, by the selectors of the settings, and those that have GPUs by admin
// access alone. Pods that tolerate the fence do not count: the agent cannot keep them away.
func (p *Processes) ObserveClients(seen *state.Observed) {
	claimed := seen.DRA.Claimed()
	for i := range seen.Pods {
		pod := &seen.Pods[i]
		if state.Ended(pod) || !state.Selected(pod, p.Settings.Drain.Clients) && !claimed.AsAdmin(pod) {
			continue
		}
		if !holders.Tolerates(pod.Spec.Tolerations, state.FenceTaint()) {
			seen.Holders.OfLibrary = append(seen.Holders.OfLibrary, holders.Describe(pod))
		}
	}
}

// throttledNames are names that the agent has reported, and when.
type throttledNames struct {
	names []string
	at    time.Time
}

// of returns the names, or for a while the former ones: a process that restarts again and again has another pid each time.
func (t *throttledNames) of(names []string, now time.Time) []string {
	if len(t.names) == 0 || now.Sub(t.at) >= outcome.InUseNews {
		t.names, t.at = names, now
	}
	return t.names
}
