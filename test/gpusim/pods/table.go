package pods

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/google/renameio/v2"
	corev1 "k8s.io/api/core/v1"
)

// Table is the simulated process table of a node's host: a folder that shows processes like /proc. It has what readers
// need to see who has which device file open, and to find a program among its pod's. The agent's own process is in it
// from the start, and so is the id of the host's boot. A real process of this machine is in it under its real pid: a
// signal to that pid reaches it.
//
// Each process is there as a whole or not at all. Any number of programs may change the table and read it.
type Table struct{ dir string }

// Process is one process of a Table.
type Process struct {
	PID     int
	Command string   // the kernel shows 15 bytes of it
	Args    []string // its command line; Command alone if empty
	Cgroup  string   // its path: OfPod, OfUnit, or "/" for a process of neither
	Files   []string // the paths of what it has open besides the first three
}

// agentPID is the agent's in each table. It is not 1: pid 1 would mean that the agent has its own PID namespace.
const agentPID = 2

// MakeTable makes a table of a host in that boot in dir, or opens the one that is there.
func MakeTable(dir, boot string) (*Table, error) {
	t := &Table{dir: dir}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("making a process table: %w", err)
	}
	if err := os.Symlink(strconv.Itoa(agentPID), filepath.Join(dir, "self")); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("making a process table: %w", err)
	}
	if err := t.kernelSays(boot); err != nil {
		return nil, fmt.Errorf("making a process table: %w", err)
	}
	return t, t.Add(Process{PID: agentPID, Command: "gpuslice-agent", Cgroup: "/"})
}

// kernelSays is what the kernel says of the boot.
func (t *Table) kernelSays(boot string) error {
	random := filepath.Join(t.dir, "sys", "kernel", "random")
	if err := os.MkdirAll(random, 0o755); err != nil {
		return err
	}
	return renameio.WriteFile(filepath.Join(random, "boot_id"), []byte(boot+"\n"), 0o644)
}

// Dir is where the table is, for a program that is to read it instead of /proc.
func (t *Table) Dir() string { return t.dir }

// Add shows a process, instead of the one that has its pid.
func (t *Table) Add(p Process) error {
	if err := t.add(p); err != nil {
		return fmt.Errorf("adding process %d to the table: %w", p.PID, err)
	}
	return nil
}

func (t *Table) add(p Process) error {
	// Readers of the table see a process only under a number.
	aside, err := os.MkdirTemp(t.dir, "new-")
	if err != nil {
		return err
	}
	args := p.Args
	if len(args) == 0 {
		args = []string{p.Command}
	}
	comm := p.Command[:min(len(p.Command), 15)]
	for name, text := range map[string]string{
		"comm":    comm + "\n",
		"cgroup":  "0::" + p.Cgroup + "\n",
		"cmdline": strings.Join(args, "\x00") + "\x00",
		"stat":    stat(p.PID, comm, startTime(p.PID)),
	} {
		if err := os.WriteFile(filepath.Join(aside, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	if err := os.Mkdir(filepath.Join(aside, "fd"), 0o755); err != nil {
		return err
	}
	for n, target := range append([]string{"/dev/null", "pipe:[1]", "pipe:[2]"}, p.Files...) {
		if err := os.Symlink(target, filepath.Join(aside, "fd", strconv.Itoa(n))); err != nil {
			return err
		}
	}
	// The machine decides which files a real process sees.
	if err := os.Symlink(filepath.Join("/proc", strconv.Itoa(p.PID), "root"), filepath.Join(aside, "root")); err != nil {
		return err
	}
	if err := t.remove(strconv.Itoa(p.PID)); err != nil {
		return err
	}
	return os.Rename(aside, filepath.Join(t.dir, strconv.Itoa(p.PID)))
}

// startTime is when a real process started, in the kernel's ticks since the machine's start. All simulated processes
// started at the same time as the machine.
func startTime(pid int) string {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return "1"
	}
	_, rest, _ := strings.Cut(string(text), ") ") // what is before may have blanks in it
	fields := strings.Fields(rest)
	if len(fields) < statFields-2 {
		return "1"
	}
	return fields[statStart-2]
}

// Of /proc/PID/stat, which has the pid and the command first.
const (
	statFields = 52
	statStart  = 21
)

// stat says of a process that it sleeps, and when it has started.
func stat(pid int, comm, started string) string {
	fields := make([]string, statFields)
	for i := range fields {
		fields[i] = "0"
	}
	fields[0], fields[1], fields[2], fields[3] = strconv.Itoa(pid), "("+comm+")", "S", "1"
	fields[statStart] = started
	return strings.Join(fields, " ") + "\n"
}

// Remove removes a process from the table. It need not be there.
func (t *Table) Remove(pid int) error {
	if err := t.remove(strconv.Itoa(pid)); err != nil {
		return fmt.Errorf("taking process %d out of the table: %w", pid, err)
	}
	return nil
}

func (t *Table) remove(pid string) error {
	aside, err := os.MkdirTemp(t.dir, "old-")
	if err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(t.dir, pid), filepath.Join(aside, pid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.RemoveAll(aside)
}

// Reboot removes all processes from the table except the agent's, and gives the boot another id.
func (t *Table) Reboot(boot string) error {
	if err := t.kernelSays(boot); err != nil {
		return fmt.Errorf("booting the host of a process table: %w", err)
	}
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return fmt.Errorf("emptying the process table: %w", err)
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil && pid != agentPID {
			if err := t.Remove(pid); err != nil {
				return err
			}
		}
	}
	return nil
}

// OfPod is the cgroup of a container of the pod, as containerd makes it under kubelet's systemd driver. The container's id
// is made up.
func OfPod(pod *corev1.Pod) string {
	uid := string(pod.UID)
	if hash := pod.Annotations["kubernetes.io/config.hash"]; hash != "" {
		uid = hash // a static pod's on the node, which the API server's is not
	}
	slice := "kubepods"
	parents := "/kubepods.slice/"
	if class := pod.Status.QOSClass; class != "" && class != corev1.PodQOSGuaranteed {
		slice += "-" + strings.ToLower(string(class))
		parents += slice + ".slice/"
	}
	id := sha256.Sum256([]byte(uid))
	return parents + slice + "-pod" + strings.ReplaceAll(uid, "-", "_") + ".slice/cri-containerd-" + hex.EncodeToString(id[:]) + ".scope"
}

// OfUnit is the cgroup of a service of the host's systemd.
func OfUnit(unit string) string { return "/system.slice/" + unit }
