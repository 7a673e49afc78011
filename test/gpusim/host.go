package gpusim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// RenderHost writes into dir what the node shows of its GPUs outside NVML: parts of /proc and /sys, as NVIDIA's
// programs read them. Mount the parts over the real ones in the programs' own mount namespace.
//
// The capabilities of instances appear and disappear with the instances. The list of their minor numbers does not
// change: as on hardware, it names all possible ones.
func (n *Node) RenderHost(dir string) error {
	dir, err := filepath.Abs(dir)
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		return fmt.Errorf("rendering the host: %w", err)
	}
	var st *state
	if err := n.update("rendering the host", func(s *state) error {
		s.Host, st = "", s // all capabilities are new to the directory
		return nil
	}); err != nil {
		return err
	}
	if err := n.update("rendering the host", func(s *state) error {
		s.Host, st = dir, s
		return nil
	}); err != nil {
		return err
	}
	r := renderer{dir: dir}
	r.proc(st)
	for i, g := range st.GPUs {
		r.gpu(i, g, st.Driver)
	}
	if r.err != nil {
		return fmt.Errorf("rendering the host: %w", r.err)
	}
	return nil
}

// RenderDriver writes the installed driver into dir, like its package does on the node: library under NVML's names,
// tool under the names of the driver's programs, and the device files. If this process may make device files, they are
// copies of /dev/null, else empty files. For a program that checks them, a sandbox then has to show /dev/null in their
// place.
func (n *Node) RenderDriver(dir, library, tool string) error {
	st, err := n.library.store.load()
	if err != nil {
		return fmt.Errorf("rendering the driver: %w", err)
	}
	r := renderer{dir: dir}
	for _, name := range []string{"libnvidia-ml.so.1", "libnvidia-ml.so." + st.Driver} {
		r.link(filepath.Join("usr/lib64", name), library)
	}
	r.write("usr/lib64/libcuda.so."+st.Driver, "") // by whose name NVIDIA's programs find the folder of the libraries, and the version
	for _, name := range []string{"nvidia-smi", "nvidia-cuda-mps-control"} {
		r.link(filepath.Join("usr/bin", name), tool)
	}
	for _, name := range []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"} {
		r.device(filepath.Join("dev", name))
	}
	for i := range st.GPUs {
		r.device(fmt.Sprintf("dev/nvidia%d", i))
	}
	if r.err != nil {
		return fmt.Errorf("rendering the driver: %w", r.err)
	}
	return nil
}

// renderer writes files and keeps the first error.
type renderer struct {
	dir string
	err error
}

func (r *renderer) write(name, text string) {
	if r.err != nil {
		return
	}
	name = filepath.Join(r.dir, name)
	if r.err = os.MkdirAll(filepath.Dir(name), 0o755); r.err == nil {
		r.err = os.WriteFile(name, []byte(text), 0o644)
	}
}

func (r *renderer) link(name, to string) {
	if r.err != nil {
		return
	}
	name = filepath.Join(r.dir, name)
	if r.err = os.MkdirAll(filepath.Dir(name), 0o755); r.err != nil {
		return
	}
	if err := os.RemoveAll(name); err != nil {
		r.err = err
		return
	}
	r.err = os.Symlink(to, name)
}

// device makes a device file with the numbers of /dev/null.
func (r *renderer) device(name string) {
	r.write(name, "")
	if r.err != nil {
		return
	}
	const majorMemory, minorNull = 1, 3
	name = filepath.Join(r.dir, name)
	made := name + ".new"
	err := unix.Mknod(made, unix.S_IFCHR|0o666, int(unix.Mkdev(majorMemory, minorNull)))
	switch {
	case errors.Is(err, unix.EPERM): // the empty file stays
	case err != nil:
		r.err = fmt.Errorf("making device file %s: %w", name, err)
	default:
		r.err = os.Rename(made, name)
	}
}

// Major numbers of the driver's device files. Those of the capabilities and of UVM differ from boot to boot on hardware.
const (
	majorGPU  = 195
	majorCaps = 235
	majorUVM  = 236
)

func (r *renderer) proc(st *state) {
	r.write("proc/modules", "nvidia_uvm 2101248 0 - Live 0x0000000000000000 (O)\n"+
		"nvidia 14376960 2 nvidia_uvm, Live 0x0000000000000000 (O)\n")
	r.write("proc/devices", fmt.Sprintf("Character devices:\n  1 mem\n%d nvidia\n%d nvidiactl\n%d nvidia-caps\n%d nvidia-uvm\n\nBlock devices:\n",
		majorGPU, majorGPU, majorCaps, majorUVM))
	r.write("proc/sys/kernel/random/boot_id", st.BootID+"\n")
	r.write("proc/driver/nvidia/version", fmt.Sprintf(
		"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build  (gpusim)\nGCC version:  gcc version 12.2.0\n", st.Driver))
	r.write("proc/driver/nvidia/params", fmt.Sprintf("ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: %d\n", 0o666))
	r.write("proc/driver/nvidia/capabilities/mig/config", capability(1, 0o400))
	r.write("proc/driver/nvidia/capabilities/mig/monitor", capability(2, 0o444))
	r.write("proc/driver/nvidia-caps/mig-minors", migMinors())
}

// capabilities are the minor numbers of the instances' device files, by their folders in /proc/driver/nvidia/capabilities.
func (s *state) capabilities() map[string]int {
	out := map[string]int{}
	if s.Host == "" {
		return out
	}
	for g, gpu := range s.GPUs {
		for _, i := range gpu.Instances {
			at, minor := fmt.Sprintf("gpu%d/mig/gi%d", g, i.ID), 3+135*g+9*i.ID
			out[at] = minor
			for _, c := range i.Compute {
				out[fmt.Sprintf("%s/ci%d", at, c.ID)] = minor + 1 + c.ID
			}
		}
	}
	return out
}

// OpenTo are the UUIDs of the devices that a process may open if this directory is its /dev. For a GPU in MIG mode
// these are the MIG devices with device files of both instances, else the GPU itself.
func (n *Node) OpenTo(dev string) (uuids []string) {
	st, err := n.library.store.load()
	if err != nil {
		return nil
	}
	has := func(format string, minor int) bool {
		_, err := os.Stat(filepath.Join(dev, fmt.Sprintf(format, minor)))
		return err == nil
	}
	minors := st.capabilities()
	for g, gpu := range st.GPUs {
		switch {
		case !has("nvidia%d", g):
		case !gpu.Current:
			uuids = append(uuids, gpu.UUID)
		default:
			for _, i := range gpu.Instances {
				at := fmt.Sprintf("gpu%d/mig/gi%d", g, i.ID)
				for _, c := range i.Compute {
					if has("nvidia-caps/nvidia-cap%d", minors[at]) && has("nvidia-caps/nvidia-cap%d", minors[fmt.Sprintf("%s/ci%d", at, c.ID)]) {
						uuids = append(uuids, c.UUID)
					}
				}
			}
		}
	}
	return uuids
}

// listCapabilities updates the files of the host from the old state to the new one. A host that its test has removed
// has none.
func (s *state) listCapabilities(before *state) error {
	if _, err := os.Stat(s.Host); err != nil {
		return nil //nolint:nilerr // not rendered, or gone
	}
	base := filepath.Join(s.Host, "proc/driver/nvidia/capabilities")
	was, is := before.capabilities(), s.capabilities()
	for at := range was {
		if _, stands := is[at]; stands {
			continue
		}
		if err := os.RemoveAll(filepath.Join(base, at)); err != nil {
			return fmt.Errorf("listing capabilities: %w", err)
		}
	}
	r := renderer{dir: base}
	for at, minor := range is {
		if _, stood := was[at]; !stood {
			r.write(filepath.Join(at, "access"), capability(minor, 0o444))
		}
	}
	return r.err
}

func capability(minor, mode int) string {
	return fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: %d\nDeviceFileModify: 1\n", minor, mode)
}

// migMinors is the list of minor numbers under /dev/nvidia-caps. It is the same on every node: seen on a real H200.
func migMinors() string {
	const gpus, gis, cis = 32, 15, 8
	var b strings.Builder
	b.WriteString("config 1\nmonitor 2\n")
	minor := 3
	for g := range gpus {
		for gi := range gis {
			fmt.Fprintf(&b, "gpu%d/gi%d/access %d\n", g, gi, minor)
			minor++
			for ci := range cis {
				fmt.Fprintf(&b, "gpu%d/gi%d/ci%d/access %d\n", g, gi, ci, minor)
				minor++
			}
		}
	}
	return b.String()
}

func (r *renderer) gpu(index int, g *gpu, driver string) {
	m := g.model()
	r.write(fmt.Sprintf("proc/driver/nvidia/gpus/%s/information", g.address()), fmt.Sprintf(
		"Model: \t\t %s\nIRQ:   \t\t 0\nGPU UUID: \t %s\nBus Type: \t PCIe\nBus Location: \t %s\nDevice Minor: \t %d\nGPU Firmware: \t %s\n",
		m.Name, g.UUID, g.address(), index, driver))

	// As on hardware, the bus lists links into the tree of devices. There, a GPU is below the root of its socket.
	device := filepath.Join(fmt.Sprintf("devices/pci0000:%02x", 0x40*g.NUMA), g.address())
	r.link(filepath.Join("sys/bus/pci/devices", g.address()), filepath.Join("../../..", device))
	sys := filepath.Join("sys", device)
	for name, text := range map[string]string{
		"vendor":           hex(m.DeviceID&0xffff, 4),
		"device":           hex(m.DeviceID>>16, 4),
		"subsystem_vendor": hex(m.SubsystemID&0xffff, 4),
		"subsystem_device": hex(m.SubsystemID>>16, 4),
		"class":            hex(m.Class, 6),
		"revision":         hex(0xa1, 2),
		"numa_node":        strconv.Itoa(g.NUMA),
		"resource":         resources(index),
		"enable":           "1",
		"reset":            "",
		"reset_method":     "flr",
		"local_cpulist":    "0-1",
		"max_link_width":   "16",
	} {
		r.write(filepath.Join(sys, name), text+"\n")
	}
	r.write(filepath.Join(sys, "config"), configSpace(m))
	r.write("sys/bus/pci/drivers/nvidia/module/version", driver+"\n")
	r.link(filepath.Join(sys, "driver"), "../../../bus/pci/drivers/nvidia")
}

func hex(n uint32, digits int) string { return fmt.Sprintf("0x%0*x", digits, n) }

// resources are the memory regions of a GPU: registers of 16 MiB first, then two more, then nothing.
func resources(index int) string {
	base := uint64(0x3800_0000_0000) + uint64(index)<<40
	lines := make([]string, 13)
	for i := range lines {
		lines[i] = "0x0000000000000000 0x0000000000000000 0x0000000000000000"
	}
	lines[0] = fmt.Sprintf("0x%016x 0x%016x 0x%016x", 0xa000_0000+(index<<24), 0xa0ff_ffff+(index<<24), 0x40200)
	lines[1] = fmt.Sprintf("0x%016x 0x%016x 0x%016x", base, base+(1<<37)-1, 0x14220c)
	lines[3] = fmt.Sprintf("0x%016x 0x%016x 0x%016x", base+(1<<38), base+(1<<38)+(1<<25)-1, 0x14220c)
	return strings.Join(lines, "\n")
}

// configSpace is the PCI configuration of a GPU: its ids, and the PCI Express capability alone.
func configSpace(m *model) string {
	const (
		statusCapabilities = 0x10
		firstCapability    = 0x40
		express            = 0x10
	)
	b := make([]byte, 4096)
	binary.LittleEndian.PutUint16(b[0x00:], uint16(m.DeviceID&0xffff))
	binary.LittleEndian.PutUint16(b[0x02:], uint16(m.DeviceID>>16))
	b[0x06] = statusCapabilities
	binary.LittleEndian.PutUint32(b[0x08:], m.Class<<8|0xa1)
	binary.LittleEndian.PutUint16(b[0x2c:], uint16(m.SubsystemID&0xffff))
	binary.LittleEndian.PutUint16(b[0x2e:], uint16(m.SubsystemID>>16))
	b[0x34] = firstCapability
	b[firstCapability] = express
	return string(b)
}
