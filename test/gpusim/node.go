package gpusim

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Node is one node's GPUs, in a directory. Any number of Nodes, in any number of processes, may be open on one
// directory. Its methods are events from outside the node; programs act on the node through Library.
type Node struct {
	library Library
}

// Create creates a node in dir, replacing any that is there, and opens it. A test in a bubble of testing/synctest
// creates or opens its Node inside, and closes it inside.
func Create(dir string, spec Spec) (*Node, error) {
	if err := spec.check(); err != nil {
		return nil, fmt.Errorf("creating node in %s: %w", dir, err)
	}
	s, err := openStore(dir, newState(spec))
	if err != nil {
		return nil, fmt.Errorf("creating node in %s: %w", dir, err)
	}
	return &Node{library: Library{store: s}}, nil
}

// Open opens the node that is in dir.
func Open(dir string) (*Node, error) {
	s, err := openStore(dir, nil)
	if err != nil {
		return nil, fmt.Errorf("opening node in %s: %w", dir, err)
	}
	return &Node{library: Library{store: s}}, nil
}

// Dir is the directory of the node.
func (n *Node) Dir() string { return n.library.store.dir }

// Close lets go of the node; calls that hang return. The directory stays.
func (n *Node) Close() error { return n.library.Close() }

// Library gives NVML over the node, not initialized yet.
func (n *Node) Library() *Library { return &Library{store: n.library.store} }

// update changes the state, or keeps it if change fails.
func (n *Node) update(doing string, change func(*state) error) error {
	var failed error
	err := n.library.store.update(func(s *state) bool {
		failed = change(s)
		return failed == nil
	})
	if err = errors.Join(failed, err); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

// Hold puts a process on a device, a GPU- or MIG- UUID, where it uses memory in MiB. The process need not exist: it
// stays until it is released. A GPU in MIG mode accepts processes only on its MIG devices.
func (n *Node) Hold(device string, pid int, name string, usedMiB int) error {
	return n.hold(device, process{PID: pid, Name: name, UsedMiB: usedMiB})
}

// HoldReal is Hold for a process of this machine: it holds the device no longer than it runs.
func (n *Node) HoldReal(device string, pid int, name string, usedMiB int) error {
	return n.holdReal(device, process{PID: pid, Name: name, UsedMiB: usedMiB})
}

// HoldHidden puts a client of the driver without a CUDA context on a device, like a monitoring agent. No list of
// processes shows it. But it keeps the GPU from being reset, and its MIG device from being destroyed.
func (n *Node) HoldHidden(device string, pid int, name string) error {
	return n.hold(device, process{PID: pid, Name: name, Hidden: true})
}

// HoldHiddenReal is HoldHidden for a process of this machine.
func (n *Node) HoldHiddenReal(device string, pid int, name string) error {
	return n.holdReal(device, process{PID: pid, Name: name, Hidden: true})
}

// HoldAsMPSClient is Hold for a process that computes in the server of MPS. A compute mode does not count it.
func (n *Node) HoldAsMPSClient(device string, pid int, name string, usedMiB int) error {
	return n.hold(device, process{PID: pid, Name: name, UsedMiB: usedMiB, MPS: true})
}

func (n *Node) holdReal(device string, p process) error {
	if p.Started = startTime(p.PID); p.Started == 0 {
		return fmt.Errorf("holding %s: process %d does not run", device, p.PID)
	}
	return n.hold(device, p)
}

func (n *Node) hold(device string, p process) error {
	return n.update("holding "+device, func(s *state) error {
		if p.PID <= 0 || p.UsedMiB < 0 {
			return fmt.Errorf("pid is %d and used memory %d MiB: neither may be negative, nor the pid 0", p.PID, p.UsedMiB)
		}
		for _, g := range s.GPUs {
			_, c := g.device(device)
			switch {
			case c != nil:
				p.MIG = device
			case g.UUID != device:
				continue
			case g.Current && !p.Hidden:
				return errors.New("the GPU is in MIG mode: hold one of its MIG devices")
			case !g.admits(&p):
				return errors.New("all CUDA-capable devices are busy or unavailable: the compute mode of the GPU lets no other process in")
			}
			g.Processes = append(g.Processes, &p)
			return nil
		}
		return errors.New("no such device: use the UUID of a GPU or of a MIG device that exists")
	})
}

// Use lets a process use so much memory, in MiB, on each device that it holds.
func (n *Node) Use(pid, usedMiB int) error {
	return n.update(fmt.Sprintf("changing the memory of process %d", pid), func(s *state) error {
		found := false
		for _, g := range s.GPUs {
			for _, p := range g.Processes {
				if p.PID == pid && !p.Hidden {
					p.UsedMiB, found = usedMiB, true
				}
			}
		}
		if !found || usedMiB < 0 {
			return errors.New("it computes on no device, or the memory is negative")
		}
		return nil
	})
}

// admits reports whether the compute mode lets a process have a context on the GPU.
func (g *gpu) admits(p *process) bool {
	switch {
	case p.Hidden || p.MPS && g.ComputeMode != computeProhibited:
		return true
	case g.ComputeMode == computeExclusiveProcess:
		return len(g.processes(func(o *process) bool { return !o.Hidden && !o.MPS && o.PID != p.PID })) == 0
	default:
		return g.ComputeMode != computeProhibited
	}
}

// ComputeMode is the mode of the device's GPU, as nvidia-smi writes it: "DEFAULT". The device is a GPU- or MIG- UUID.
func (n *Node) ComputeMode(device string) (string, error) {
	index, ok := n.GPUOf(device)
	if !ok {
		return "", fmt.Errorf("reading the compute mode of %s: no GPU has it", device)
	}
	st, err := n.library.store.load()
	if err != nil {
		return "", fmt.Errorf("reading the compute mode of %s: %w", device, err)
	}
	return ComputeModes[st.GPUs[index].ComputeMode], nil
}

// ComputeModes are the compute modes as nvidia-smi writes them, by NVML's numbers.
var ComputeModes = map[uint32]string{0: "DEFAULT", computeProhibited: "PROHIBITED", computeExclusiveProcess: "EXCLUSIVE_PROCESS"}

// Release takes a process off all devices.
func (n *Node) Release(pid int) error {
	return n.update(fmt.Sprintf("releasing process %d", pid), func(s *state) error {
		found := false
		for _, g := range s.GPUs {
			g.Processes = slices.DeleteFunc(g.Processes, func(p *process) bool {
				found = found || p.PID == pid
				return p.PID == pid
			})
		}
		if !found {
			return errors.New("it holds no device")
		}
		return nil
	})
}

// Fail makes a function fail as the fault says, after the faults it already has. The zero Fault removes all faults of
// the function, and hanging calls continue.
func (n *Node) Fail(function string, f Fault) error {
	return n.update("setting a fault", func(s *state) error {
		if err := checkFunction(function); err != nil {
			return err
		}
		if f == (Fault{}) {
			delete(s.Faults, function)
			return nil
		}
		if s.Faults == nil {
			s.Faults = map[string][]Fault{}
		}
		s.Faults[function] = append(s.Faults[function], f)
		return nil
	})
}

// Faults are those that are still to befall calls, by function, with as many calls to go as are left.
func (n *Node) Faults() map[string][]Fault {
	st, err := n.library.store.load()
	if err != nil {
		return nil
	}
	return st.clone().Faults
}

// Delay makes each call of a function take d before it does anything; 0 removes the delay.
func (n *Node) Delay(function string, d time.Duration) error {
	return n.update("setting a delay", func(s *state) error {
		if err := checkFunction(function); err != nil {
			return err
		}
		if s.Delays == nil {
			s.Delays = map[string]time.Duration{}
		}
		s.Delays[function] = d
		if d <= 0 {
			delete(s.Delays, function)
		}
		return nil
	})
}

// Reset resets a GPU as nvidia-smi does, see Library.Reset.
func (n *Node) Reset(gpuIndex int) error {
	l := n.Library()
	if r := l.Init(); r != Success {
		return fmt.Errorf("resetting GPU %d: %s", gpuIndex, r.Text())
	}
	if r := l.Reset(Device{gpu: gpuIndex}); r != Success {
		return fmt.Errorf("resetting GPU %d: %s", gpuIndex, r.Text())
	}
	return nil
}

// Reboot restarts the node under a new boot id. All processes and instances are gone, and a pending mode is current.
// MIG mode is off on GPUs that do not keep it.
func (n *Node) Reboot() error {
	return n.update("rebooting", func(s *state) error {
		s.BootID = identity(s.Seed, "boot", s.next())
		s.forget()
		return nil
	})
}

// Reload unloads the driver and loads it again, which loses what a reboot loses. It is refused while a process holds
// a GPU.
func (n *Node) Reload() error {
	return n.update("reloading the driver", (*state).reload)
}

func (s *state) reload() error {
	for i, g := range s.GPUs {
		if ps := g.processes(func(*process) bool { return true }); len(ps) > 0 {
			return fmt.Errorf("process %d holds GPU %d: release it first", ps[0].PID, i)
		}
	}
	s.forget()
	return nil
}

// driverVersion is how NVIDIA numbers its drivers.
var driverVersion = regexp.MustCompile(`^\d+\.\d+(\.\d+)?$`)

// Upgrade replaces the driver by another version. It loses the same state as Reload, and is refused when Reload is. A
// library that a process had already loaded answers LibRMVersionMismatch until the version is back. Call RenderHost
// again to show the new version in its files.
func (n *Node) Upgrade(version string) error {
	return n.update("replacing the driver", func(s *state) error {
		if !driverVersion.MatchString(version) {
			return fmt.Errorf("version is %q: use one such as \"580.159.04\"", version)
		}
		s.Driver = version
		return s.reload()
	})
}

// DriverVersion is the version of the loaded driver.
func (n *Node) DriverVersion() string {
	st, err := n.library.store.load()
	if err != nil {
		return ""
	}
	return st.Driver
}

// Calls counts the calls of functions that change something, by function, whether they succeeded or not.
func (n *Node) Calls() map[string]int {
	st, err := n.library.store.load()
	if err != nil {
		return nil
	}
	return maps.Clone(st.Calls)
}

// Reads counts the calls of functions that change nothing, by function, whether they succeeded or not.
func (n *Node) Reads() map[string]int { return n.library.store.reads.counts() }

// Delays are how long each call of a function takes before it does anything, for functions with a delay.
func (n *Node) Delays() map[string]time.Duration {
	st, err := n.library.store.load()
	if err != nil {
		return nil
	}
	return maps.Clone(st.Delays)
}

// ForgetCalls sets all counts to 0.
func (n *Node) ForgetCalls() error {
	n.library.store.reads.forget()
	return n.update("forgetting calls", func(s *state) error {
		s.Calls = nil
		return nil
	})
}

// BootID is new after each Reboot.
func (n *Node) BootID() string {
	st, err := n.library.store.load()
	if err != nil {
		return ""
	}
	return st.BootID
}

func noSuchGPU(index int, s *state) error {
	return fmt.Errorf("there is no GPU %d: use 0 to %d", index, len(s.GPUs)-1)
}

// UUIDs are the GPUs of the node, in order.
func (n *Node) UUIDs() []string {
	st, err := n.library.store.load()
	if err != nil {
		return nil
	}
	var out []string
	for _, g := range st.GPUs {
		out = append(out, g.UUID)
	}
	return out
}

// GPUOf gives the index of the GPU that has the device, a GPU- or MIG- UUID. It is also the GPU's minor number.
func (n *Node) GPUOf(device string) (index int, ok bool) {
	st, err := n.library.store.load()
	if err != nil {
		return 0, false
	}
	index = slices.IndexFunc(st.GPUs, func(g *gpu) bool {
		_, c := g.device(device)
		return g.UUID == device || c != nil
	})
	return index, index >= 0
}

// MIGDevice gives the UUID of a MIG device by the place of its GPU instance, for tests that hold it. It is the first
// one if the instance is divided, and empty if there is none.
func (n *Node) MIGDevice(gpuIndex, start int) string {
	st, err := n.library.store.load()
	if err != nil || gpuIndex < 0 || gpuIndex >= len(st.GPUs) {
		return ""
	}
	for _, i := range st.GPUs[gpuIndex].Instances {
		if i.Start == start && len(i.Compute) > 0 {
			return i.Compute[0].UUID
		}
	}
	return ""
}

// String shows the GPUs as text that is the same whenever they are, for tests to compare: no UUIDs, nothing that
// differs from one creation to the next.
func (n *Node) String() string {
	st, err := n.library.store.load()
	if err != nil {
		return err.Error() + "\n"
	}
	var b strings.Builder
	for i, g := range st.GPUs {
		fmt.Fprintf(&b, "gpu %d %s%s%s\n", i, g.Model, g.describeMode(), g.Health.describe())
		writeProcesses(&b, "  ", g.processes(func(p *process) bool { return p.MIG == "" }))
		for _, i := range g.Instances {
			fmt.Fprintf(&b, "  %s\n", g.describe(i))
			for _, c := range i.Compute {
				writeProcesses(&b, "    ", g.processes(on(c)))
			}
		}
	}
	return b.String()
}

func (g *gpu) describeMode() string {
	word := map[bool]string{true: "on", false: "off"}
	var out string
	if g.hasMIG() {
		out += " mig=" + word[g.Current]
		if g.Current != g.Pending {
			out += " pending=" + word[g.Pending]
		}
	}
	if g.Virtual != "" {
		out += " virtual=" + g.Virtual
	}
	if g.Persistence {
		out += " persistence=on"
	}
	if g.ComputeMode != 0 {
		out += fmt.Sprintf(" compute-mode=%d", g.ComputeMode)
	}
	return out
}

// describe writes an instance as nvml.Placed does: its compute instances only if they are not a single full one.
func (g *gpu) describe(i *instance) string {
	p := g.profileOf(i)
	if len(i.Compute) == 0 {
		return fmt.Sprintf("%s@%d half-made", p.Name, i.Start)
	}
	var parts []string
	for _, c := range i.Compute {
		parts = append(parts, fmt.Sprintf("%dc", computeSlices[c.Profile]))
	}
	if len(parts) == 1 && computeSlices[i.Compute[0].Profile] == p.Slices {
		return fmt.Sprintf("%s@%d", p.Name, i.Start)
	}
	slices.Sort(parts)
	return fmt.Sprintf("%s(%s)@%d", p.Name, strings.Join(parts, "+"), i.Start)
}

func writeProcesses(b *strings.Builder, indent string, ps []*process) {
	slices.SortStableFunc(ps, func(a, b *process) int { return a.PID - b.PID })
	for _, p := range ps {
		if p.Hidden {
			fmt.Fprintf(b, "%sclient %d %s\n", indent, p.PID, p.Name)
			continue
		}
		kind := "process"
		if p.MPS {
			kind = "MPS client"
		}
		busy := ""
		if p.Busy > 0 {
			busy = fmt.Sprintf(" %d%%", p.Busy)
		}
		fmt.Fprintf(b, "%s%s %d %s %d MiB%s\n", indent, kind, p.PID, p.Name, p.UsedMiB, busy)
	}
}
