package drain

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Client is a process that holds a GPU: it computes on it, or has its device file open, which is enough to keep the
// GPU from being reset.
type Client struct {
	PID     int
	Command string // its program's name, of which the kernel keeps 15 bytes; what is not printable is shown as "?"
	Owner
	Sources []Source // how it was found, at least one
	Self    bool     // the agent's own process, whose handles the agent closes by itself

	// Unlisted says that NVML reports the process while the process table does not show it: it has just ended, or runs
	// in a PID namespace that the table is not of.
	Unlisted bool
}

// Source is how a client was found, in words: "NVML", or "device file /dev/nvidia3" as the process itself names it.
type Source string

// SourceNVML is the source of processes that NVML reports.
const SourceNVML Source = "NVML"

// Owner is what a process belongs to. A process of a container has no Unit, even where the container is a unit's; one
// that is started outside of both has none of them.
type Owner struct {
	PodUID    types.UID // of a static pod this is the hash of its manifest, which the API server shows as an annotation
	Container string    // the container runtime's id, 64 digits
	Unit      string    // the unit of the host's systemd: nvidia-persistenced.service, session-3.scope
}

// Processes finds the clients of a GPU in the host's process table.
//
// It does not find a file that a process has mapped and then closed, or that is on its way through a socket, nor one that
// is open as /dev/dri/* alone, as a desktop's. NVML may report such a process.
type Processes struct {
	Root    string // where procfs of the host's PID namespace is mounted; /proc if empty
	Devices string // the folder of device files, as processes name it; /dev if empty
}

// Clients lists the processes that hold the GPU, by pid: those that NVML has reported for it and its instances, and all
// that have a device file of it open. The minor is the N of the GPU's device file /dev/nvidiaN. Where it is negative,
// because the driver does not say, an open device file of any GPU counts.
//
// What cannot be looked at may hold the GPU, so it is an error, which names it; the clients that were found all the
// same come with it. A process that ends meanwhile is none. Once ctx ends, Clients returns its error and no clients.
func (p Processes) Clients(ctx context.Context, minor int, reported []int) ([]Client, error) {
	self, err := p.self()
	if err != nil {
		return nil, err
	}
	var unread unreadable
	sources, err := p.holding(ctx, minor, &unread)
	if err != nil {
		return nil, fmt.Errorf("looking for processes that hold %s: %w", gpuName(minor), err)
	}
	for _, pid := range reported {
		if !slices.Contains(sources[pid], SourceNVML) {
			sources[pid] = slices.Insert(sources[pid], 0, SourceNVML)
		}
	}
	var clients []Client
	for _, pid := range slices.Sorted(maps.Keys(sources)) {
		c := Client{PID: pid, Sources: sources[pid], Self: pid == self}
		switch err := p.identify(&c); {
		case err == nil:
		case !gone(err):
			unread.add(err)
		case c.Sources[0] == SourceNVML:
			// It may just have ended; then NVML's next report is without it. Until then NVML's word stands.
			c.Unlisted = true
		default:
			continue
		}
		clients = append(clients, c)
	}
	if err := unread.err(); err != nil {
		return clients, fmt.Errorf("looking for processes that hold %s: %w", gpuName(minor), err)
	}
	return clients, nil
}

// self is the agent's own pid in the PID namespace that the table is of, which need not be the agent's.
//
// It is also the proof that the table is one of processes, and of more than the agent's own: in a folder where the host's
// procfs was never mounted, or in a PID namespace of the agent's own, every GPU would look free.
func (p Processes) self() (int, error) {
	link := filepath.Join(p.root(), "self")
	target, err := os.Readlink(link)
	if err != nil {
		return 0, fmt.Errorf("looking for the agent itself in the process table: %w; "+
			"the pod needs hostPID: true, or the host's /proc mounted where the agent looks for it", err)
	}
	pid, err := strconv.Atoi(target)
	if err != nil {
		return 0, fmt.Errorf("looking for the agent itself in the process table: %s leads to %q, which is no pid", link, target)
	}
	if pid == 1 {
		return 0, fmt.Errorf("looking for the agent itself in the process table: it is process 1 of %s, which is thus not the host's "+
			"and does not show who holds a GPU; the pod needs hostPID: true", p.root())
	}
	return pid, nil
}

// holding is how each process holds the GPU by its open files. What could not be read is added to unread.
func (p Processes) holding(ctx context.Context, minor int, unread *unreadable) (map[int][]Source, error) {
	pids, err := numbers(p.root())
	if err != nil {
		return nil, err
	}
	out := map[int][]Source{}
	for _, pid := range pids {
		found, err := p.devices(ctx, filepath.Join(p.root(), strconv.Itoa(pid)), minor)
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil && !gone(err) {
			unread.add(err)
		}
		if len(found) > 0 {
			out[pid] = found
		}
	}
	return out, nil
}

// devices is what the process has open of the GPU, each file once. Process is its folder in the process table.
func (p Processes) devices(ctx context.Context, process string, minor int) ([]Source, error) {
	var found []Source
	files, err := p.openFiles(ctx, process, minor, &found)
	if err != nil || files > 0 {
		return found, err
	}
	// A process without any open file is mostly one of the kernel's. But it may also be one whose first thread has
	// ended while others go on: Linux then shows no files of the process, and all of them in its threads.
	threads, err := numbers(filepath.Join(process, "task"))
	if err != nil {
		return nil, err
	}
	for _, tid := range threads {
		if _, err := p.openFiles(ctx, filepath.Join(process, "task", strconv.Itoa(tid)), minor, &found); err != nil && !gone(err) {
			return found, err
		}
	}
	return found, nil
}

// openFiles counts the open files of a process or thread, and adds those of the GPU to found.
func (p Processes) openFiles(ctx context.Context, process string, minor int, found *[]Source) (int, error) {
	folder := filepath.Join(process, "fd")
	d, err := os.Open(folder)
	if err != nil {
		return 0, err
	}
	defer d.Close()
	target := make([]byte, unix.PathMax)
	for files := 0; ; {
		names, err := d.Readdirnames(512) // a process may have a million, and ctx may end meanwhile
		for _, name := range names {
			// As os.Readlink, in half its time, which is nearly all that Clients takes.
			n, err := unix.Readlinkat(int(d.Fd()), name, target)
			switch {
			case errors.Is(err, unix.ENAMETOOLONG):
				// Linux does not show paths of more than a page. It is no device file; if it were an error, any pod
				// could keep the GPUs of its node as they are by opening one.
				continue
			case err != nil && !gone(err):
				return files, &fs.PathError{Op: "readlink", Path: folder + "/" + name, Err: err}
			case err != nil || !bytes.Contains(target[:n], []byte("nvidia")): // most are sockets, pipes and libraries
				continue
			}
			source := Source("device file " + string(target[:n]))
			if p.ofGPU(folder+"/"+name, string(target[:n]), minor) && !slices.Contains(*found, source) {
				*found = append(*found, source)
			}
		}
		files += len(names)
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err = errors.Join(err, ctx.Err()); err != nil {
			return files, err
		}
	}
}

// nvidiaMajor is the major number of /dev/nvidiaN, the same on every machine (NV_MAJOR_DEVICE_NUMBER of NVIDIA's open
// kernel modules). That of /dev/nvidia-caps differs.
const nvidiaMajor = 195

// The minor numbers of /dev/nvidia-caps begin with MIG's config and monitor, which are of no GPU in particular, and go
// on with 15 GPU instances for each GPU, each of itself and 8 compute instances. The GPU is named by its own minor number.
const (
	firstCapability   = 3
	capabilitiesOfGPU = 15 * (1 + 8)
)

// ofGPU reports whether an open file is one of the GPU. The link is where the process table shows the file, the target
// what it shows of it: the path as of the process that has the file open, with " (deleted)" where the file has been
// removed since, as when a driver's container was replaced.
//
// The other files of NVIDIA's driver are none of a GPU in particular: nvidiactl and nvidia-uvm, which every client has
// open besides, nvidia-modeset, and those of NVSwitch.
func (p Processes) ofGPU(link, target string, minor int) bool {
	folder, name := filepath.Split(strings.TrimSuffix(target, " (deleted)"))
	devices := cmp.Or(p.Devices, "/dev")
	if number, ok := strings.CutPrefix(name, "nvidia-cap"); ok && strings.HasSuffix(folder, devices+"/nvidia-caps/") {
		n, err := strconv.Atoi(number)
		return err == nil && n >= firstCapability && (minor < 0 || (n-firstCapability)/capabilitiesOfGPU == minor)
	}
	// The folder may be below another one: to the host, the driver's files in a container that was not given a root of
	// its own are those in /run/nvidia/driver/dev.
	number, ok := strings.CutPrefix(name, "nvidia")
	n, err := strconv.Atoi(number)
	if !ok || err != nil || n < 0 || !strings.HasSuffix(folder, devices+"/") {
		return false
	}
	// A container may be given a GPU's file by another name, as by --device /dev/nvidia2:/dev/nvidia0. The device number
	// tells, where there is one. Only device files are asked for it: any other might be on a server that does not answer.
	var file unix.Stat_t
	if unix.Stat(link, &file) == nil && file.Mode&unix.S_IFMT == unix.S_IFCHR && unix.Major(file.Rdev) == nvidiaMajor {
		n = int(unix.Minor(file.Rdev))
	}
	return minor < 0 || n == minor
}

// identify adds what the process table knows of the client. Its error is for gone if there is no such process now.
func (p Processes) identify(c *Client) error {
	process := filepath.Join(p.root(), strconv.Itoa(c.PID))
	// Not its command line: to read the memory of a process may take for ever when it hangs in the driver.
	command, err := os.ReadFile(filepath.Join(process, "comm"))
	if err != nil {
		return err
	}
	c.Command = printable(strings.TrimSuffix(string(command), "\n"))
	cgroups, err := os.ReadFile(filepath.Join(process, "cgroup"))
	if err != nil && !gone(err) { // a kernel without cgroups has no such file
		return err
	}
	c.Owner = ParseCgroup(string(cgroups))
	return nil
}

func (p Processes) root() string { return cmp.Or(p.Root, "/proc") }

// numbers lists the entries of a folder of procfs that are named by a number: processes, or threads.
func numbers(folder string) ([]int, error) {
	d, err := os.Open(folder)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var out []int
	for _, name := range names {
		if n, err := strconv.Atoi(name); err == nil {
			out = append(out, n)
		}
	}
	return out, nil
}

// gone reports whether the error of reading from procfs means that the process, or its file, is not there any more.
func gone(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) }

// unreadable gathers what could not be read. An agent without the right to look is refused for nearly every process, so
// that the first one and a count say as much as all.
type unreadable struct {
	first error
	more  int
}

func (u *unreadable) add(err error) {
	if u.first == nil {
		u.first = err
		return
	}
	u.more++
}

func (u *unreadable) err() error {
	err := u.first
	if u.more > 0 {
		err = fmt.Errorf("%w (and %d more)", err, u.more)
	}
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w; the agent may look at all processes only as root with CAP_SYS_PTRACE, as in a privileged container", err)
	}
	return err
}

func gpuName(minor int) string {
	if minor < 0 {
		return "any GPU (the minor number of this one is not known)"
	}
	return "/dev/nvidia" + strconv.Itoa(minor)
}

// printable is a name that a process has given itself, fit for logs and for the API server, which takes only UTF-8.
func printable(name string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, name)
}

var (
	// A pod's cgroup by kubelet's systemd driver: kubepods.slice, kubepods-burstable.slice or kubepods-besteffort.slice
	// above it is repeated in its name, and a prefix where kubelet's cgroupRoot sets one, as kind does. The dashes of the
	// UID are underscores there.
	podSlice = regexp.MustCompile(`^(?:.+-)?kubepods(?:-burstable|-besteffort)?-pod([^-:]+)\.slice(?::|$)`)
	// A pod's cgroup by kubelet's cgroupfs driver, where it can be told by itself: a UID, or a static pod's hash. This is
	// needed in a cgroup namespace, where nothing above it is seen. "podman" is no pod.
	podFolder = regexp.MustCompile(`^pod([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})$`)
	// A container's cgroup, by whichever runtime: <id>, cri-containerd-<id>.scope, crio-<id>.scope, docker-<id>.scope,
	// libpod-<id>.scope; <slice>:cri-containerd:<id> where kubelet and containerd do not agree on the driver.
	containerID = regexp.MustCompile(`(?:^|[-:])([0-9a-f]{64})(?:\.scope)?$`)
	// The kinds of units that can have processes of their own.
	unitName = regexp.MustCompile(`\.(?:service|scope|socket|mount|swap)$`)
)

// ParseCgroup tells from the text of /proc/PID/cgroup what the process belongs to. It reads cgroup v1, v2 and both at
// once, and ignores what it does not understand. Of containers in containers the outer one counts, which kubelet knows.
//
// The paths may be relative to a cgroup namespace of the reader's own. Then a process in the reader's own pod, and
// outside of its container, has no PodUID.
func ParseCgroup(text string) Owner {
	var out Owner
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3) // hierarchy, controllers, path
		if len(fields) < 3 {
			continue
		}
		// With v1, some hierarchies do not have the process in a cgroup of its own: a pod's line may stand beside one
		// that names containerd's unit, and a unit's beside one without any.
		if of := pathOwner(fields[2]); of.known() > out.known() {
			out = of
		}
	}
	return out
}

// known orders owners by how much they say.
func (o Owner) known() int {
	switch {
	case o.PodUID != "" && o.Container != "":
		return 4
	case o.PodUID != "":
		return 3
	case o.Container != "":
		return 2
	case o.Unit != "":
		return 1
	default:
		return 0
	}
}

func pathOwner(path string) Owner {
	// The kernel appends this when the cgroup was removed below a process that is about to end.
	parts := strings.Split(strings.TrimSuffix(path, " (deleted)"), "/")
	var o Owner
	for i, part := range parts {
		if uid := podUID(parts[:i], part); uid != "" {
			o.PodUID = uid
			parts = parts[i:]
			break
		}
	}
	for _, part := range parts {
		if m := containerID.FindStringSubmatch(part); m != nil {
			o.Container = m[1]
			break
		}
	}
	if o.PodUID == "" && o.Container == "" {
		o.Unit = hostUnit(parts)
	}
	return o
}

// podUID is the UID that the part of a path is named by, if it is a pod's. Above are the parts before it.
func podUID(above []string, part string) types.UID {
	if m := podSlice.FindStringSubmatch(part); m != nil {
		return types.UID(strings.ReplaceAll(m[1], "_", "-"))
	}
	if m := podFolder.FindStringSubmatch(part); m != nil {
		return types.UID(m[1])
	}
	// A static pod's manifest may set any UID.
	if len(above) > 0 && slices.Contains([]string{"kubepods", "burstable", "besteffort"}, above[len(above)-1]) {
		uid, _ := strings.CutPrefix(part, "pod")
		if uid != part {
			return types.UID(uid)
		}
	}
	return ""
}

// hostUnit is what systemd itself takes for the unit: the first part below the slices. What is below a unit is its own
// affair, such as the units of a user's own systemd below user@1000.service, or of a container below docker.service.
func hostUnit(parts []string) string {
	for _, part := range parts {
		if part == "" || part == ".." || strings.HasSuffix(part, ".slice") {
			continue
		}
		if !unitName.MatchString(part) {
			return ""
		}
		return strings.TrimPrefix(part, "_") // which systemd puts before names that the kernel might take for its own
	}
	return ""
}

// configHash is the annotation of a mirror pod by which kubelet tells the UID that the static pod has on the node. The
// API server gave the mirror pod another one.
const configHash = "kubernetes.io/config.hash"

// NameClients says of each client what people call it: its pod by name if it is one of the pods, which are those of the
// node, and otherwise the systemd unit, the container or the UID.
//
//	pid 4711 python of pod team-a/trainer-0
//	pid 812 nvidia-persiste of nvidia-persistenced.service
//	pid 99 dcgm-exporter (container 3f2a9c51d0e7)
func NameClients(clients []Client, pods []corev1.Pod) []string {
	// A custom UID may have underscores of its own, which cannot be told from dashes in the name of a slice.
	key := func(uid types.UID) string { return "pod " + strings.ReplaceAll(string(uid), "_", "-") }
	names := map[string]string{}
	for i := range pods {
		pod := &pods[i]
		name := pod.Namespace + "/" + pod.Name
		names[key(pod.UID)] = name
		if hash := pod.Annotations[configHash]; hash != "" {
			names[key(types.UID(hash))] = name
		}
		// Where kubelet makes no cgroups of pods (cgroupsPerQOS: false), and in the reader's own pod, only the
		// containers tell.
		for _, list := range [][]corev1.ContainerStatus{
			pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses, pod.Status.EphemeralContainerStatuses,
		} {
			for _, c := range list {
				if _, id, ok := strings.Cut(c.ContainerID, "://"); ok {
					names["container "+id] = name
				}
			}
		}
	}
	var out []string
	for _, c := range clients {
		name := names["container "+c.Container]
		if c.PodUID != "" {
			name = names[key(c.PodUID)]
		}
		if name == "" || c.Self {
			out = append(out, c.String())
			continue
		}
		out = append(out, c.process()+" of pod "+name)
	}
	return out
}

// String names the client as far as that can be done without knowing the pods; see NameClients.
func (c Client) String() string {
	switch {
	case c.Unlisted:
		return c.process() + " (reported by NVML, not in the process table)"
	case c.Self:
		return c.process() + " (the agent itself)"
	case c.PodUID != "":
		return c.process() + " (pod with UID " + string(c.PodUID) + ")"
	case c.Container != "":
		return c.process() + " (container " + c.Container[:min(len(c.Container), shortID)] + ")"
	case c.Unit != "":
		return c.process() + " of " + c.Unit
	default:
		return c.process()
	}
}

// shortID is how many digits of a container's id people read and tools such as crictl take.
const shortID = 12

func (c Client) process() string {
	return strings.TrimSpace("pid " + strconv.Itoa(c.PID) + " " + c.Command)
}

// remedies are the programs known to hold GPUs without computing on them, and what to do about each. The names are the
// first 15 bytes, as the kernel keeps them, or the beginning of those.
var remedies = []struct{ command, remedy string }{
	{"nvidia-persiste", "keeps the driver's state of every GPU loaded: stop nvidia-persistenced.service for the change"},
	{"nv-fabricmanage", "runs NVLink and NVSwitch: stop nvidia-fabricmanager.service for the change, and start it again afterwards, or no GPU computes"},
	{"nv-hostengine", "monitors every GPU for DCGM: stop nvidia-dcgm.service for the change, or its pod by the label nvidia.com/gpu.deploy.dcgm"},
	{"dcgm-exporter", "reads metrics of every GPU: stop its pod for the change, by the label nvidia.com/gpu.deploy.dcgm-exporter where NVIDIA's operator runs it"},
	{"nvsm", "monitors a DGX: stop nvsm.service for the change"},
	{"Xorg", "shows a desktop on the GPU: stop it by systemctl isolate multi-user.target"},
	{"Xwayland", "shows a desktop on the GPU: stop it by systemctl isolate multi-user.target"},
	{"gdm", "shows a desktop on the GPU: stop it by systemctl isolate multi-user.target"},
	{"gnome-shell", "shows a desktop on the GPU: stop it by systemctl isolate multi-user.target"},
	{"nvidia-smi", "ends by itself after a query: end it if it was told to go on (-l, dmon, pmon)"},
	{"nvtop", "watches every GPU for a person: ask them to end it"},
	{"nvidia-device-p", "offers the GPUs to kubelet: stop its pod for the change, by the label nvidia.com/gpu.deploy.device-plugin where NVIDIA's operator runs it"},
	{"gpu-feature-dis", "labels the node with its GPUs: stop its pod for the change, by the label nvidia.com/gpu.deploy.gpu-feature-discovery where NVIDIA's operator runs it"},
	{"nvidia-cuda-mps", "shares the GPU between processes (MPS): end its clients, then stop it"},
	{"nvidia-mig-mana", "divides GPUs too: the node needs one MIG manager, so turn NVIDIA's off"},
}

// Remedy says what to do about a program that is known to hold GPUs without computing on them, and why it does. It is
// empty for all others: they go when their pod or unit does.
func (c Client) Remedy() string {
	for _, known := range remedies {
		if strings.HasPrefix(c.Command, known.command) {
			return known.remedy
		}
	}
	return ""
}
