package drain

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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

	"github.com/gpuslice/gpuslice/drain/openfiles"
	"github.com/gpuslice/gpuslice/nvml/aside"
)

// Client is a process that holds a GPU or a part of one: it computes on it, or has its device file open, which is enough
// to keep the GPU from being reset.
type Client struct {
	PID     int
	Command string // its program's name, of which the kernel keeps 15 bytes; what is not printable is shown as "?"
	Owner
	Devices []string // which of what was sought it holds, sorted
	Sources []Source // how it was found, at least one; NVML comes first
	Self    bool     // the agent's own process, whose handles the agent closes by itself

	// Sibling says that it is another process of the agent's own pod, as one that kubectl exec starts there. It ends by
	// itself, and the agent does not send itself away for it.
	Sibling bool
	// Unlisted says that NVML reports the process while the process table does not show it: it has just ended, or runs
	// in a PID namespace that the table is not of.
	Unlisted bool
}

// Source is how a client or a pod was found, in words. A process is found by "NVML", or by "device file /dev/nvidia3" as
// the process itself names it; how a pod was found is with Pod.
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

// Sought is a device whose holders are looked for.
type Sought struct {
	Device   string // UUID of a GPU or of a MIG device, as kubelet knows it
	Reported []int  // pids that NVML reports on it
	// Minor is the N of the device file /dev/nvidiaN of a GPU that goes as a whole: whoever has it open holds the GPU.
	// AnyGPU stands for one that is not known, NoFiles for a device that open files say nothing about.
	Minor int
}

// Values of Sought.Minor that are no minor number.
const (
	// AnyGPU is of a GPU whose minor number the driver does not say: an open device file of any GPU counts.
	AnyGPU = -1
	// NoFiles is of one instance of several: its clients have the same /dev/nvidiaN open as those of the others.
	NoFiles = -2
)

// Processes finds who holds GPUs in the host's process table. What it does not find is with openfiles; NVML may report such a
// process.
type Processes struct {
	Root string // where procfs of the host's PID namespace is mounted; /proc if empty
	// Lanes keep looks that hang from piling up. Without them each look is on its own.
	Lanes *Lanes
	// Signal takes the place of the system's, for a table that is not of this machine's processes.
	Signal func(pid int, signal unix.Signal) error
}

// Lanes are where looks at the process table run, beside whoever asks for them.
type Lanes struct {
	table aside.Lane
	files aside.Lane // of processes, as they see them
	boot  aside.Lane // the file that names it
}

func (p Processes) lanes() *Lanes { return cmp.Or(p.Lanes, &Lanes{}) }

// Holders lists the processes that hold what is sought, by pid: those that NVML has reported, and all that have a device
// file open which counts. It takes one look at the process table for all devices, and where no files count, looks at the
// reported processes alone.
//
// What cannot be looked at may hold any of them, so it is an error, which names it; the holders that were found all the
// same come with it. A process that ends meanwhile is none. Once ctx ends, Holders returns its error and no holders, also where
// the look hangs: it is then left behind, and until it ends there is no other. aside.Hangs tells that error from others.
func (p Processes) Holders(ctx context.Context, sought []Sought) ([]Client, error) {
	clients, err := aside.Do(ctx, &p.lanes().table, "looking at the process table", func(ctx context.Context, at aside.At) ([]Client, error) {
		return p.holders(ctx, at, sought)
	})
	if err != nil {
		return clients, fmt.Errorf("looking for processes that hold %s: %w", names(sought), err)
	}
	return clients, nil
}

func (p Processes) holders(ctx context.Context, at aside.At, sought []Sought) ([]Client, error) {
	self, err := p.self()
	if err != nil {
		return nil, err
	}
	s := search{Processes: p, files: map[int][]string{}, found: map[int]*Client{}}
	for _, d := range sought {
		for _, pid := range d.Reported {
			s.note(pid, SourceNVML, d.Device)
		}
		if d.Minor != NoFiles {
			s.files[d.Minor] = append(s.files[d.Minor], d.Device)
		}
	}
	if len(s.files) > 0 {
		look := openfiles.Look{Root: s.root(), At: at, Found: s.open, Failed: s.unread.add}
		if err := look.Run(ctx); err != nil {
			return nil, err
		}
	}
	return s.identifyAll(ctx, self)
}

// search is one look at the process table.
type search struct {
	Processes
	files  map[int][]string // the devices that whoever has the file of a GPU open holds, by its minor number
	found  map[int]*Client  // by pid
	unread unreadable
}

// note adds what a process was found by, and the devices that it thus holds.
func (s *search) note(pid int, source Source, devices ...string) {
	c := s.found[pid]
	if c == nil {
		c = &Client{PID: pid}
		s.found[pid] = c
	}
	if !slices.Contains(c.Sources, source) {
		c.Sources = append(c.Sources, source)
	}
	for _, d := range devices {
		if !slices.Contains(c.Devices, d) {
			c.Devices = append(c.Devices, d)
		}
	}
}

// identifyAll is what was found, with what the process table knows of it.
func (s *search) identifyAll(ctx context.Context, self int) ([]Client, error) {
	agent := Client{PID: self}
	if err := s.identify(&agent); err != nil {
		s.unread.add(err)
	}
	var clients []Client
	for _, pid := range slices.Sorted(maps.Keys(s.found)) {
		c := *s.found[pid]
		slices.Sort(c.Devices)
		slices.Sort(c.Sources)
		switch err := s.identify(&c); {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err == nil:
		case !openfiles.Gone(err):
			s.unread.add(err)
		case c.Sources[0] == SourceNVML:
			// It may just have ended; then NVML's next report is without it. Until then NVML's word stands.
			c.Unlisted = true
		default:
			continue
		}
		c.Self = pid == self
		c.Sibling = !c.Self && c.ofSamePod(agent.Owner)
		clients = append(clients, c)
	}
	return clients, s.unread.err()
}

// ofSamePod tells as much as can be told without the pods. The agent's own pod has no UID where cgroups are seen from the
// agent's namespace of them, and it has but one container.
func (o Owner) ofSamePod(as Owner) bool {
	if o.PodUID != "" && as.PodUID != "" {
		return o.PodUID == as.PodUID
	}
	return o.Container != "" && o.Container == as.Container
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

// open notes an open file, if it is one that counts.
func (s *search) open(pid int, file openfiles.File) {
	for _, devices := range [][]string{s.files[file.GPU], s.files[AnyGPU]} {
		if len(devices) > 0 {
			s.note(pid, Source("device file "+file.Path), devices...)
		}
	}
}

// identify adds what the process table knows of the client. Its error is for gone if there is no such process now.
func (p Processes) identify(c *Client) error {
	process := filepath.Join(p.root(), strconv.Itoa(c.PID))
	// Not its command line: to read the memory of a process may take for ever when it hangs in the driver.
	command, err := openfiles.Read(filepath.Join(process, "comm"))
	if err != nil {
		return err
	}
	c.Command = printable(strings.TrimSuffix(command, "\n"))
	cgroups, err := openfiles.Read(filepath.Join(process, "cgroup"))
	if openfiles.Gone(err) { // a kernel without cgroups has no such file; nor has a process that has ended since
		_, err = os.Stat(filepath.Join(process, "comm"))
	}
	if err != nil {
		return err
	}
	c.Owner = ParseCgroup(cgroups)
	return nil
}

func (p Processes) root() string { return cmp.Or(p.Root, "/proc") }

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

// names says what is sought.
func names(sought []Sought) string {
	var out []string
	for _, d := range sought {
		name := d.Device
		if d.Minor >= 0 {
			name = "/dev/nvidia" + strconv.Itoa(d.Minor)
		}
		out = append(out, name)
	}
	if len(out) > 2 {
		out = append(out[:1], fmt.Sprintf("%d more devices", len(out)-1))
	}
	return strings.Join(out, " or ")
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
	index := ownersOf(pods)
	var out []string
	for _, c := range clients {
		i, ok := index.find(c.Owner)
		if !ok || c.Self {
			out = append(out, c.String())
			continue
		}
		out = append(out, c.process()+" of pod "+pods[i].Namespace+"/"+pods[i].Name)
	}
	return out
}

// owners finds pods by what the process table tells of a process: their places in a list.
type owners map[string]int

func ownersOf(pods []corev1.Pod) owners {
	out := owners{}
	for i := range pods {
		out[uidKey(pods[i].UID)] = i
	}
	static := map[string]int{} // how many pods say that they are of the hash
	for i := range pods {
		if key, ok := staticKey(&pods[i]); ok {
			static[key]++
		}
	}
	for i := range pods {
		pod := &pods[i]
		// A process is of nobody rather than of a pod that takes another's place.
		if key, ok := staticKey(pod); ok && static[key] == 1 {
			if _, taken := out[key]; !taken {
				out[key] = i
			}
		}
		// Where kubelet makes no cgroups of pods (cgroupsPerQOS: false), and in the reader's own pod, only the
		// containers tell.
		for _, list := range [][]corev1.ContainerStatus{
			pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses, pod.Status.EphemeralContainerStatuses,
		} {
			for _, c := range list {
				if _, id, ok := strings.Cut(c.ContainerID, "://"); ok {
					out["container "+id] = i
				}
			}
		}
	}
	return out
}

// staticKey is the key of a static pod's processes, by what kubelet writes into its image. On any other pod the annotation is only
// somebody's word.
func staticKey(pod *corev1.Pod) (string, bool) {
	hash := pod.Annotations[configHash]
	return uidKey(types.UID(hash)), hash != "" && isMirror(pod)
}

// uidKey is the same for a UID from the API server and from the process table. A custom UID may have underscores of its
// own, which cannot be told from dashes in the name of a slice.
func uidKey(uid types.UID) string { return "pod " + strings.ReplaceAll(string(uid), "_", "-") }

// find is the place of the pod that a process with the owner is of. The pod's own word counts more than the container's.
func (o owners) find(of Owner) (place int, ok bool) {
	key := "container " + of.Container
	if of.PodUID != "" {
		key = uidKey(of.PodUID)
	}
	place, ok = o[key]
	return place, ok
}

// Strangers picks the clients that are of no pod of the node, which are thus not to be evicted: host units, containers
// outside of Kubernetes, and processes of which nothing is known. What the agent's own pod runs besides the agent is
// among them, the agent is not. GPUPods has the pods of all others.
func Strangers(clients []Client, pods []corev1.Pod) []Client {
	return sorted(clients, pods).strangers
}

// PodsOf gives the pods of the clients, by pid. Clients that are of none of the pods are not in it.
func PodsOf(clients []Client, pods []corev1.Pod) map[int]*corev1.Pod {
	index, out := ownersOf(pods), map[int]*corev1.Pod{}
	for _, c := range clients {
		if i, ok := index.find(c.Owner); ok {
			out[c.PID] = &pods[i]
		}
	}
	return out
}

// sortedClients are clients by the pods that they are of. The agent itself is in none of them.
type sortedClients struct {
	listed    map[int][]Client       // by the place of their pod
	unlisted  map[types.UID][]Client // of pods that the API server does not list, by the UID that the process table tells
	strangers []Client
}

func sorted(clients []Client, pods []corev1.Pod) sortedClients {
	out := sortedClients{listed: map[int][]Client{}, unlisted: map[types.UID][]Client{}}
	index := ownersOf(pods)
	for _, c := range clients {
		switch i, ok := index.find(c.Owner); {
		case c.Self:
		case c.Sibling:
			out.strangers = append(out.strangers, c)
		case ok:
			out.listed[i] = append(out.listed[i], c)
		case c.PodUID != "":
			out.unlisted[c.PodUID] = append(out.unlisted[c.PodUID], c)
		default:
			out.strangers = append(out.strangers, c)
		}
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
