package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/drain/fence"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/drain/host"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// freeFor is how long a look at the process table that found nothing counts. A change of eight GPUs takes some fifty steps,
	// and a table with 200,000 open files takes two seconds to read. The driver refuses in any case what is in use.
	freeFor = 5 * time.Second
	// systemdRetry is the pause before asking a systemd again that has not answered.
	systemdRetry = 5 * time.Minute
)

// clients are the processes that keep GPUs open, and what is known of them.
type clients struct {
	processes holders.Processes
	foundFree map[string]time.Time // the last scan that found no process on the device; valid for freeFor
	unowned   throttledNames       // processes of no pod that hold what is to go
}

func (c *clients) forget(time.Time) {
	clear(c.foundFree)
	c.unowned = throttledNames{}
}

// steps plans the way to the targets, once it is known who holds what goes.
func (a *Agent) steps(ctx context.Context, seen *observed, want desired, targets plan.Targets) ([]plan.Step, error) {
	a.observeTaken(ctx, seen, want, targets)
	return plan.Make(a.planned(*seen, want), want.desired(targets))
}

// desired is all that the planner goes by.
func (w desired) desired(targets plan.Targets) plan.Desired {
	out := plan.Desired{GPUs: targets, Config: w.plugin.configText(), Later: w.pluginLater}
	if w.plugin != nil {
		out.Sharing = plannedSharing(w.plugin.sharing, w.plugin.strategy)
	}
	return out
}

// observeTaken completes the look by who is concerned by what goes.
func (a *Agent) observeTaken(ctx context.Context, seen *observed, want desired, targets plan.Targets) {
	taken := plan.Takes(a.planned(*seen, want), want.desired(targets))
	a.observeHolders(ctx, seen, taken)
	a.observeUnits(ctx, seen, taken)
}

// observeHolders adds to the look who holds what goes by processes and open files, whatever kubelet says. A table that cannot
// be read is no error here: what cannot be looked at counts as busy, and is waited for.
func (a *Agent) observeHolders(ctx context.Context, seen *observed, taken []plan.Taken) {
	now := a.clock.Now()
	sought := seen.sought(taken)
	isFree := func(d holders.Sought) bool { return now.Sub(a.clients.foundFree[d.Device]) < freeFor }
	if !slices.ContainsFunc(sought, func(d holders.Sought) bool { return len(d.Reported) > 0 || !isFree(d) }) {
		return
	}
	call, cancel := context.WithTimeout(ctx, a.settings.Timeouts.DriverCall)
	defer cancel()
	seen.holders.processes, seen.holders.err = a.clients.processes.Holders(call, sought)
	clear(a.clients.foundFree)
	for _, d := range sought {
		if seen.holders.err == nil && !slices.ContainsFunc(seen.holders.processes, func(c holders.Client) bool { return slices.Contains(c.Devices, d.Device) }) {
			a.clients.foundFree[d.Device] = now
		}
	}
	seen.holders.pods = holders.GPUPods(seen.pods, seen.kubelet.assigned, seen.holders.processes)
}

// sought is what to look for. Whoever has a GPU's device file open holds it as a whole, and may be on another instance of it
// than one that goes.
func (s observed) sought(taken []plan.Taken) []holders.Sought {
	var out []holders.Sought
	for _, t := range taken {
		gpu, ok := s.gpu(t.GPU)
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

// observeUnits looks which of the host's units run that may have to stop, or be started again.
func (a *Agent) observeUnits(ctx context.Context, seen *observed, taken []plan.Taken) {
	var stopped []string
	if seen.journal != nil {
		stopped = a.named(seen, seen.journal.Stopped)
	}
	seen.units = nil
	if len(taken) == 0 && len(stopped) == 0 {
		return
	}
	states, err := a.unitStates(ctx, stopped)
	for _, name := range a.settings.Units {
		state, exists := states[name]
		if !exists && (err == nil || !slices.Contains(stopped, name)) {
			if slices.Contains(stopped, name) {
				seen.drop(name, notStartable)
			}
			continue
		}
		seen.units = append(seen.units, plan.Unit{
			Name: name, Active: runs(state), Ending: state == "deactivating", Starting: state == "activating", Holds: seen.computes(name),
		})
	}
}

// notStartable is why a unit is left alone that was stopped, and that systemd does not list as one that it could start.
const notStartable = "the host has no such unit that it may start: it is masked or was removed"

// unitStates asks systemd for the units of the settings, and never for others. One that has not answered is not asked again for a while, unless something is owed to it.
func (a *Agent) unitStates(ctx context.Context, stopped []string) (map[string]string, error) {
	if len(stopped) == 0 && a.clock.Now().Before(a.systemd.next) {
		return nil, nil
	}
	call, cancel := context.WithTimeout(ctx, hostTimeout)
	defer cancel()
	states, err := a.systemd.units.States(call, a.settings.Units)
	switch {
	case err == nil, errors.Is(err, host.ErrNoSystemd):
	default:
		a.systemd.next = a.clock.Now().Add(systemdRetry)
		a.log.Warn("systemd does not answer: the host's units are left alone", zap.Duration("again", systemdRetry), zap.Error(err))
	}
	return states, err
}

// runs reports whether a unit in the state has processes, or may have.
func runs(state string) bool { return state != "" && state != "inactive" && state != "failed" }

// computes reports whether a process of the unit computes on what goes.
func (s observed) computes(unit string) bool {
	return slices.ContainsFunc(s.holders.processes, func(c holders.Client) bool {
		return c.Unit == unit && slices.Contains(c.Sources, holders.SourceNVML)
	})
}

func union(a, b []string) []string {
	out := slices.Clone(a)
	for _, s := range b {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// unownedProcesses names the processes that compute on what goes, while no pod has it that could be evicted and no unit that could
// be stopped. People have to end them. One that the process table does not show has mostly just ended.
func (a *Agent) unownedProcesses(seen observed) []string {
	held := map[string]bool{}
	for _, p := range seen.holders.pods {
		for _, d := range p.Devices {
			held[d] = true
		}
	}
	strange := holders.Unowned(seen.holders.processes, seen.pods)
	strange = slices.DeleteFunc(strange, func(c holders.Client) bool {
		return c.Self || c.Unlisted || !slices.Contains(c.Sources, holders.SourceNVML) || slices.Contains(a.settings.Units, c.Unit) ||
			!slices.ContainsFunc(c.Devices, func(d string) bool { return !held[d] })
	})
	return holders.NameClients(strange, seen.pods)
}

// mustLeave are the holders that are evicted. Excluded are operands, which have an order of their own, clients of the library that have no more
// than a file open, and pods of DaemonSets that tolerate the fence: evicting those would only restart them.
func (s observed) mustLeave() []holders.Pod {
	apart := map[string]bool{}
	for _, o := range s.devicePlugin.pods {
		apart[string(o.UID)] = true
	}
	for _, o := range s.pauses {
		for _, p := range o.Pods {
			apart[string(p.UID)] = true
		}
	}
	clients := map[string]bool{}
	for _, p := range s.holders.ofLibrary {
		clients[string(p.UID)] = true
	}
	return slices.DeleteFunc(slices.Clone(s.holders.pods), func(p holders.Pod) bool {
		return p.UID != "" && apart[string(p.UID)] || byFilesAlone(p) && (clients[string(p.UID)] || p.Daemon && s.returns(p))
	})
}

// returns reports whether the fence does not keep the pod away.
func (s observed) returns(p holders.Pod) bool {
	return slices.ContainsFunc(s.pods, func(pod corev1.Pod) bool {
		return pod.UID == p.UID && holders.Tolerates(pod.Spec.Tolerations, fenceTaint())
	})
}

// claimDriverLabels are those of the kubelet plugin of NVIDIA's DRA driver, by either name that the driver has had.
var claimDriverLabels = []string{"nvidia-dra-driver-gpu-component", "dra-driver-nvidia-gpu-component"}

func drivesClaims(labels map[string]string) bool {
	return slices.ContainsFunc(claimDriverLabels, func(l string) bool { return labels[l] == "kubelet-plugin" })
}

// keepsClaims reports whether the operand is that driver, or has it in its care. The label alone is anybody's.
func keepsClaims(o fence.Operand) bool {
	return slices.ContainsFunc(o.Pods, func(p holders.Pod) bool { return p.Daemon && drivesClaims(p.Labels) })
}

// claimDriver reports whether NVIDIA's DRA driver runs on the node.
func (s observed) claimDriver() bool {
	return slices.ContainsFunc(s.pods, func(p corev1.Pod) bool {
		_, of := holders.DaemonSetOf(&p)
		return of && p.Status.Phase == corev1.PodRunning && drivesClaims(p.Labels)
	})
}

func byFilesAlone(p holders.Pod) bool {
	return !slices.ContainsFunc(p.Sources, func(s holders.Source) bool { return !strings.HasPrefix(string(s), "device file ") })
}

// observeClients picks the pods that keep the library open without having a GPU, by the selectors of the settings. One that the fence
// does not keep away cannot be sent away.
func (a *Agent) observeClients(seen *observed) {
	for i := range seen.pods {
		pod := &seen.pods[i]
		if ended(pod) || !matches(pod, a.settings.Drain.Clients) {
			continue
		}
		if !holders.Tolerates(pod.Spec.Tolerations, fenceTaint()) {
			seen.holders.ofLibrary = append(seen.holders.ofLibrary, holders.Describe(pod))
		}
	}
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// holdersUnknown says why what is to go cannot be known to be free; nil if it can.
func (s observed) holdersUnknown() error {
	switch {
	case s.kubelet.err != nil:
		return fmt.Errorf("until kubelet says which pod has which device: %w", s.kubelet.err)
	case s.holders.err != nil:
		return fmt.Errorf("until the host's processes show who holds a GPU: %w", s.holders.err)
	default:
		return nil
	}
}
