package holders

import (
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Client is a process that holds a GPU or a part of one: it computes on it, or has its device file open. Either prevents a reset of the GPU.
type Client struct {
	PID     int
	Command string // the first 15 bytes of its program's name, which the kernel keeps, with "?" for unprintable characters
	Owner
	Devices []string // those of the sought devices that it holds, sorted
	Sources []Source // signs that it was found by, at least one; NVML comes first
	Self    bool     // the agent's own process; the agent closes its handles by itself

	// Sibling says that it is another process of the agent's own pod, for example one that kubectl exec starts there. It ends by itself, and the
	// agent does not evict itself for it.
	Sibling bool
	// Unlisted says that NVML reports the process while the process table does not show it: it has just ended, or runs
	// in a PID namespace that the table is not of.
	Unlisted bool
}

// Source is the sign that a client or a pod was found by, in words. For a process it is "NVML", or "device file /dev/nvidia3" in the process's own
// spelling. Pod has the sources of pods.
type Source string

// SourceNVML is the source of processes that NVML reports.
const SourceNVML Source = "NVML"

// openFilePrefix begins the sources of processes that have a device file open.
const openFilePrefix = "device file "

func openFile(path string) Source { return Source(openFilePrefix + path) }

// IsOpenFile reports whether the sign is an open device file.
func (s Source) IsOpenFile() bool { return strings.HasPrefix(string(s), openFilePrefix) }

// configHash is the annotation of a mirror pod that holds the UID which the static pod has on the node. The
// API server gave the mirror pod another one.
const configHash = "kubernetes.io/config.hash"

// NameClients gives each client a name for messages: its pod's name if it belongs to one of the node's pods, else the systemd unit, the container or
// the UID.
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

// owners finds pods, as places in a list, by the owner that the process table has for a process.
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
		// If two pods claim the hash, a process with it counts as unowned, and never belongs to the pod with the false claim.
		if key, ok := staticKey(pod); ok && static[key] == 1 {
			if _, taken := out[key]; !taken {
				out[key] = i
			}
		}
		// If kubelet makes no cgroups of pods (cgroupsPerQOS: false), and in the reader's own pod, only the
		// container shows the pod.
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

// staticKey returns the key of a static pod's processes, which kubelet writes into the mirror pod. On any other pod the annotation means nothing: the
// pod's creator wrote it.
func staticKey(pod *corev1.Pod) (string, bool) {
	hash := pod.Annotations[configHash]
	return uidKey(types.UID(hash)), hash != "" && isMirror(pod)
}

// uidKey returns the same key for a UID from the API server and from the process table. A custom UID may have underscores of its own, which cannot be
// distinguished from dashes in the name of a slice.
func uidKey(uid types.UID) string { return "pod " + strings.ReplaceAll(string(uid), "_", "-") }

// find returns the place of the pod that a process with this owner belongs to. The pod's UID counts more than the container's id.
func (o owners) find(of Owner) (place int, ok bool) {
	key := "container " + of.Container
	if of.PodUID != "" {
		key = uidKey(of.PodUID)
	}
	place, ok = o[key]
	return place, ok
}

// Unowned picks the clients that are of no pod of the node, so that no eviction ends them: host units, containers
// outside of Kubernetes, and processes of unknown owner. Other processes of the agent's own pod are
// among them, the agent is not. GPUPods has the pods of all others.
func Unowned(clients []Client, pods []corev1.Pod) []Client {
	return byOwner(clients, pods).unowned
}

// PodsOf returns the pods of the clients, by pid. Clients outside of these pods are not in it.
func PodsOf(clients []Client, pods []corev1.Pod) map[int]*corev1.Pod {
	index, out := ownersOf(pods), map[int]*corev1.Pod{}
	for _, c := range clients {
		if i, ok := index.find(c.Owner); ok {
			out[c.PID] = &pods[i]
		}
	}
	return out
}

// clientsByOwner are clients by the pods that they are of. The agent itself is in none of them.
type clientsByOwner struct {
	listed   map[int][]Client       // by the place of their pod
	unlisted map[types.UID][]Client // of pods that the API server does not list, by the UID that the process table has
	unowned  []Client
}

func byOwner(clients []Client, pods []corev1.Pod) clientsByOwner {
	out := clientsByOwner{listed: map[int][]Client{}, unlisted: map[types.UID][]Client{}}
	index := ownersOf(pods)
	for _, c := range clients {
		switch i, ok := index.find(c.Owner); {
		case c.Self:
		case c.Sibling:
			out.unowned = append(out.unowned, c)
		case ok:
			out.listed[i] = append(out.listed[i], c)
		case c.PodUID != "":
			out.unlisted[c.PodUID] = append(out.unlisted[c.PodUID], c)
		default:
			out.unowned = append(out.unowned, c)
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

// shortID is the number of digits of a container's id that tools such as crictl print and take.
const shortID = 12

func (c Client) process() string {
	return strings.TrimSpace("pid " + strconv.Itoa(c.PID) + " " + c.Command)
}

// remedies are for programs known to hold GPUs without computing on them. The names are the
// first 15 bytes, as the kernel keeps them, or the beginning of those.
var remedies = []struct{ command, remedy string }{
	{"nvidia-persiste", "keeps the driver's state of every GPU loaded: stop nvidia-persistenced.service for the change"},
	{"nv-fabricmanage", "runs NVLink and NVSwitch: stop nvidia-fabricmanager.service for the change, and start it again afterwards, or no GPU computes"},
	{"nv-hostengine", "monitors every GPU for DCGM: stop nvidia-dcgm.service for the change, or its pod by the label nvidia.com/gpu.deploy.dcgm"},
	{"dcgm-exporter", "reads metrics of every GPU: stop its pod for the change, by the label nvidia.com/gpu.deploy.dcgm-exporter where NVIDIA's operator runs it"},
	{"nvsm", "monitors a DGX: stop nvsm.service for the change"},
	{"nvidia-smi", "ends by itself after a query: end it if it runs in a loop (-l, dmon, pmon)"},
	{"nvidia-device-p", "advertises the GPUs to kubelet: stop its pod for the change, by the label nvidia.com/gpu.deploy.device-plugin where NVIDIA's operator runs it"},
	{"gpu-feature-dis", "labels the node with its GPUs: stop its pod for the change, by the label nvidia.com/gpu.deploy.gpu-feature-discovery where NVIDIA's operator runs it"},
	{"nvidia-cuda-mps", "shares the GPU between processes (MPS): end its clients, then stop it"},
	{"nvidia-mig-mana", "divides GPUs too: the node needs one MIG manager, so turn NVIDIA's off"},
}

// Remedy says why a program that is known to hold GPUs without computing on them does so, and how to end that. It is
// empty for all others: they end with their pod or unit.
func (c Client) Remedy() string {
	for _, known := range remedies {
		if strings.HasPrefix(c.Command, known.command) {
			return known.remedy
		}
	}
	return ""
}
