package cut

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Machine is where the users of GPUs are found that the driver does not report.
type Machine struct {
	Processes string // mount point of procfs
	Kubelet   string // socket of kubelet's PodResources API
}

// Vacant returns the chosen GPUs, if nothing uses them and all that they are can be restored. Otherwise the error has each reason, with its GPU and
// what to do. What cannot be read counts as a use.
func (m Machine) Vacant(ctx context.Context, all []nvml.GPU, chosen []nvml.UUID) ([]nvml.GPU, error) {
	var gpus []nvml.GPU
	var errs []error
	for n, uuid := range chosen {
		if slices.Contains(chosen[:n], uuid) {
			errs = append(errs, fmt.Errorf("%s is named twice: name each GPU once", sanitize.Name(string(uuid))))
			continue
		}
		at := slices.IndexFunc(all, func(g nvml.GPU) bool { return g.UUID == uuid })
		if at < 0 {
			errs = append(errs, fmt.Errorf("this machine has no %s: name one of %s", sanitize.Name(string(uuid)), names(all)))
			continue
		}
		g := all[at]
		gpus = append(gpus, g)
		errs = append(errs, unfit(g))
		if g.Model != gpus[0].Model {
			errs = append(errs, fmt.Errorf("GPU %d is %s, and GPU %d is %s: cut one model at a time", g.Index, g.Model, gpus[0].Index, gpus[0].Model))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return gpus, m.Unused(ctx, all, gpus)
}

// Unused returns each use of these GPUs, with what to do; nil if nothing uses them. What cannot be read counts as a use.
func (m Machine) Unused(ctx context.Context, all, gpus []nvml.GPU) error {
	errs := []error{m.programs(), m.open(ctx, gpus), m.kubelet(ctx, all, gpus)}
	for _, g := range gpus {
		if on := processesOn(g); len(on) > 0 {
			errs = append(errs, fmt.Errorf("GPU %d (%s) is used by process %d: end it, or try another time", g.Index, g.UUID, on[0].PID))
		}
	}
	return errors.Join(errs...)
}

// processesOn returns all processes that the driver reports on the GPU.
func processesOn(g nvml.GPU) []nvml.Process {
	out := slices.Clone(g.Processes)
	for _, i := range g.Instances {
		out = append(out, i.Processes...)
	}
	return out
}

func names(all []nvml.GPU) string {
	var out []string
	for _, g := range all {
		out = append(out, string(g.UUID))
	}
	return strings.Join(out, ", ")
}

// unfit is why the GPU by itself cannot be cut and restored; nil if it can.
func unfit(g nvml.GPU) error {
	because := func(format string, args ...any) error {
		return fmt.Errorf("GPU %d (%s) %s", g.Index, g.UUID, fmt.Sprintf(format, args...))
	}
	switch {
	case g.Lost:
		return because("has fallen off the bus: reset it, or reboot")
	case g.Virtualization != nvml.NotVirtualized && g.Virtualization != nvml.PassedThrough && g.Virtualization != "":
		return because("is shared with virtual machines (%s), and their host divides it: run this on a machine that has the GPU to itself", g.Virtualization)
	case !g.Capable:
		return because("has no MIG mode: name another")
	case !slices.ContainsFunc(g.Profiles, func(p nvml.Profile) bool { return fit(p) > 0 }):
		return because("has no place for an instance of any profile: name another, or update NVIDIA's driver")
	case g.Pending != g.Enabled:
		return because("has a change of MIG mode pending: reset it or reboot first (nvidia-smi --gpu-reset -i %s)", g.UUID)
	}
	if at := slices.IndexFunc(g.Instances, nvml.Instance.HalfMade); at >= 0 {
		return because("has %v without a compute instance, which is not restored: destroy it, or complete it (nvidia-smi mig)", g.Instances[at].Placed)
	}
	return nil
}

// dividers are programs that advertise the GPUs of a machine or divide them, by the first 15 bytes of their names, as the kernel keeps them.
var dividers = []string{"nvidia-device-p", "gpu-kubelet-plu", "gpuslice-agent", "nvidia-mig-mana", "nvidia-mig-part"}

// programs returns an error for each program of dividers that runs.
func (m Machine) programs() error {
	entries, err := os.ReadDir(m.Processes)
	if err != nil {
		return fmt.Errorf("looking for programs that advertise or divide GPUs: %w", err)
	}
	self, err := os.Readlink(filepath.Join(m.Processes, "self"))
	if err != nil {
		return fmt.Errorf("looking for programs that advertise or divide GPUs: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if e.Name() == self || strings.Trim(e.Name(), "0123456789") != "" {
			continue
		}
		command, err := os.ReadFile(filepath.Join(m.Processes, e.Name(), "comm"))
		if err != nil {
			continue // it has ended
		}
		if name := strings.TrimSpace(string(command)); slices.Contains(dividers, name) {
			errs = append(errs, fmt.Errorf("process %s, %s, advertises or divides the GPUs of this machine: stop it, or its pod, until this run has ended", e.Name(), name))
		}
	}
	return errors.Join(errs...)
}

// persistenced is NVIDIA's daemon for persistence mode, which does not compute. Turning the mode off has it close the GPU.
const persistenced = "nvidia-persiste"

// open returns an error for each process that has a device file of one of the GPUs open.
func (m Machine) open(ctx context.Context, gpus []nvml.GPU) error {
	var sought []holders.Sought
	index := map[string]int{}
	for _, g := range gpus {
		sought = append(sought, holders.Sought{Device: string(g.UUID), Minor: g.Minor})
		index[string(g.UUID)] = g.Index
	}
	clients, err := holders.Processes{Root: m.Processes}.Holders(ctx, sought)
	if err != nil {
		return fmt.Errorf("a process that this program cannot see may use a GPU; run it as root, outside of containers: %w", err)
	}
	var errs []error
	for _, c := range clients {
		if c.Self || c.Command == persistenced {
			continue
		}
		what := "end it, or try another time"
		if r := c.Remedy(); r != "" {
			what = "it " + r
		}
		errs = append(errs, fmt.Errorf("GPU %d (%s) is open in %v: %s", index[c.Devices[0]], c.Devices[0], c, what))
	}
	return errors.Join(errs...)
}

// kubelet returns an error for each GPU that kubelet advertises, or that a pod has. Where kubelet's socket is not there, no kubelet runs.
func (m Machine) kubelet(ctx context.Context, all, gpus []nvml.GPU) error {
	if _, err := os.Stat(m.Kubelet); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	kubelet := holders.DialKubelet(m.Kubelet)
	defer kubelet.Close()
	assigned, err := kubelet.Assignments(ctx)
	if err != nil {
		return fmt.Errorf("kubelet may have given a GPU to a pod; stop it, or let it answer: %w", err)
	}
	advertised, err := kubelet.Allocatable(ctx)
	if err != nil {
		return fmt.Errorf("kubelet may advertise a GPU; stop it, or let it answer: %w", err)
	}
	var errs []error
	for _, g := range gpus {
		for _, pod := range slices.SortedFunc(maps.Keys(assigned), func(a, b types.NamespacedName) int { return strings.Compare(a.String(), b.String()) }) {
			if of(assigned[pod], all, g) {
				errs = append(errs, fmt.Errorf("GPU %d (%s) is given to pod %s: delete it, or try another time", g.Index, g.UUID, sanitize.Name(pod.String())))
			}
		}
		if of(advertised, all, g) {
			errs = append(errs, fmt.Errorf("GPU %d (%s) is advertised by kubelet: stop the device plugin, and wait until the node has no nvidia.com resource", g.Index, g.UUID))
		}
	}
	return errors.Join(errs...)
}

// of reports whether one of the devices is the GPU's, or may be.
func of(devices map[string][]string, all []nvml.GPU, g nvml.GPU) bool {
	for _, ids := range devices {
		if slices.ContainsFunc(ids, func(id string) bool {
			uuid, _, _ := strings.Cut(id, "::") // a share of it
			owner := slices.IndexFunc(all, func(o nvml.GPU) bool { return has(o, uuid) })
			claimed, _, isClaim := strings.Cut(id, "/")
			switch {
			case owner >= 0:
				return all[owner].UUID == g.UUID
			case isClaim:
				return claimed == holders.ClaimDriver // which names the device by its own rule
			default:
				return true
			}
		}) {
			return true
		}
	}
	return false
}

// has reports whether a UUID is of the GPU or of a MIG device of it.
func has(g nvml.GPU, uuid string) bool {
	return string(g.UUID) == uuid || slices.ContainsFunc(g.Instances, func(i nvml.Instance) bool {
		return slices.ContainsFunc(i.Devices, func(d nvml.Device) bool { return d.UUID == uuid })
	})
}
