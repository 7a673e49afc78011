package holders

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/nvml"
)

// How a container has NVIDIA's container runtime give it devices, past kubelet: by a variable, or by mounts below a folder.
const (
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	deviceMounts   = "/var/run/nvidia-container-devices/"
)

// shortestUUID is the length of "GPU-" and the first digits of a UUID. The runtime takes any beginning of one, and its documents abbreviate to these.
const shortestUUID = len("GPU-12345678")

// byIndex is an index of a GPU, or of a GPU and a MIG device on it.
var byIndex = regexp.MustCompile(`^([0-9]{1,3})(?::[0-9]{1,3})?$`)

// deviceNames finds the devices of a node by what containers call them.
type deviceNames struct {
	gpus    []nvml.GPU
	byStart map[string][]string // UUIDs of GPUs and MIG devices, by their first characters in lower case
}

func namesOf(gpus []nvml.GPU) deviceNames {
	n := deviceNames{gpus: gpus, byStart: map[string][]string{}}
	add := func(uuid string) {
		if len(uuid) >= shortestUUID {
			start := strings.ToLower(uuid[:shortestUUID])
			n.byStart[start] = append(n.byStart[start], uuid)
		}
	}
	for _, gpu := range gpus {
		add(string(gpu.UUID))
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				add(d.UUID)
			}
		}
	}
	return n
}

// uuid returns the devices whose UUID begins with the text. A MIG device that is named by its GPU and the driver's numbers, "MIG-GPU-…/1/0", stands for its GPU
// where the driver itself names it otherwise.
func (n deviceNames) uuid(text string) []string {
	if len(text) < shortestUUID {
		return nil
	}
	var out []string
	for _, uuid := range n.byStart[strings.ToLower(text[:shortestUUID])] {
		if len(text) <= len(uuid) && strings.EqualFold(uuid[:len(text)], text) {
			out = append(out, uuid)
		}
	}
	const ofGPU = len("MIG-")
	if len(out) == 0 && strings.EqualFold(text[:ofGPU], "MIG-") {
		gpu, _, _ := strings.Cut(text[ofGPU:], "/")
		return n.uuid(gpu)
	}
	return out
}

// visible returns the devices that the runtime gives for a text: by UUID, by index, or by PCI address. A MIG device by its index stands for its GPU.
func (n deviceNames) visible(text string) []string {
	index := -1
	if is := byIndex.FindStringSubmatch(text); is != nil {
		index, _ = strconv.Atoi(is[1]) // it has three digits at most
	}
	for _, gpu := range n.gpus {
		if gpu.Index == index || strings.Contains(text, ".") && strings.EqualFold(strings.TrimLeft(text, "0"), strings.TrimLeft(gpu.PCI, "0")) {
			return []string{string(gpu.UUID)}
		}
	}
	return n.uuid(text)
}

// name notes the devices that the pod's containers name by themselves. A variable whose value only kubelet sees may name any device. "all" does not count:
// programs that monitor GPUs name no other way. Nor does a pod that has never started: anyone could bind one to the node.
func (p *Pod) name(spec *corev1.PodSpec, names deviceNames) {
	if !p.Started {
		return
	}
	found, known := namedBy(spec, names)
	if len(found) == 0 && known {
		return
	}
	p.Sources = append(p.Sources, SourceContainer)
	p.DevicesKnown = p.DevicesKnown && known
	p.Devices = append(p.Devices, found...)
	slices.Sort(p.Devices)
	p.Devices = slices.Compact(p.Devices)
}

func namedBy(spec *corev1.PodSpec, names deviceNames) (devices []string, known bool) {
	known = true
	in := func(env []corev1.EnvVar, mounts []corev1.VolumeMount) {
		for _, e := range env {
			find := names.uuid // by whatever variable: others may refer to it, and CUDA counts only what the container has
			if e.Name == visibleDevices {
				find, known = names.visible, known && e.ValueFrom == nil && !strings.Contains(e.Value, "$(")
			}
			for text := range strings.SplitSeq(e.Value, ",") {
				devices = append(devices, find(withoutKind(text, "="))...)
			}
		}
		for _, m := range mounts {
			if text, is := strings.CutPrefix(m.MountPath, deviceMounts); is {
				devices = append(devices, names.visible(withoutKind(text, "/gpu/"))...)
			}
		}
	}
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		in(c.Env, c.VolumeMounts)
	}
	for _, c := range spec.EphemeralContainers {
		in(c.Env, c.VolumeMounts)
	}
	return devices, known
}

// withoutKind returns the name of a device without the kind that CDI has before it, as in "nvidia.com/gpu=GPU-…".
func withoutKind(text, separator string) string {
	kind, name, is := strings.Cut(text, separator)
	if !is {
		name = kind
	}
	return strings.TrimSpace(name)
}

// CompareNaming orders the variables of a container: first those that may name devices for it.
func CompareNaming(a, b corev1.EnvVar) int {
	rank := func(e corev1.EnvVar) int {
		switch value := strings.ToUpper(e.Value); {
		case e.Name == visibleDevices:
			return 0
		case strings.Contains(value, "GPU-"), strings.Contains(value, "MIG-"):
			return 1
		default:
			return 2
		}
	}
	return cmp.Compare(rank(a), rank(b))
}
