package holders

import (
	"cmp"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpuslice/gpuslice/nvml"
)

// Pod is a pod of this node that has a GPU or a part of one, or may have one.
type Pod struct {
	Namespace, Name string
	UID             types.UID
	Labels          map[string]string
	Annotations     map[string]string
	Conditions      []corev1.PodCondition

	Sources      []Source         // signs that it was found by, at least one if GPUPods has picked it
	Devices      []string         // GPU- and MIG- UUIDs that kubelet gave it or its processes hold, sorted; without the numbers of replicas
	DevicesKnown bool             // Devices is complete; otherwise the pod counts as holding any device
	Requests     map[string]int64 // GPU resources that it requests, as the scheduler counts them

	Controller   string        // the controller that brings it back, "ReplicaSet/api"; empty if none does
	Critical     bool          // the cluster or the node depends on it
	Ready        bool          // it passes its probes: disruption budgets count it as healthy
	Grace        time.Duration // time that it has to end
	EmptyDirs    []string      // its volumes on the node's disk, which are lost with it
	Claims       []string      // the persistent volume claims that it uses
	DeviceClaims []string      // its resource claims of GPUs, those by admin access aside, as far as they have names yet
	UnreadClaims []string      // those of DeviceClaims that could not be read, and whose devices kubelet does not name either
	Tolerations  []corev1.Toleration
	Running      []string // containers that run, as kubelet says
	Started      bool     // a container has started, whether it runs or has ended

	Daemon      bool      // of a DaemonSet
	Mirror      bool      // the image of a static pod; its manifest is a file on the node
	Terminating bool      // kubelet is ending it
	GraceEnds   time.Time // when the grace of a terminating pod is over
	Finalizers  []string  // keep a terminating pod, even when its containers have ended
	// Unlisted says that it runs, and that the API server lists it no more, or not yet. It has a name without a UID if
	// kubelet lists it, and a UID without a name if only a process shows it.
	Unlisted bool
}

// How GPUPods finds a pod, besides its processes: "NVML pid 4711 python", "device file /dev/nvidia3 of pid 99 dcgm-exporter".
const (
	SourceSpec    Source = "pod spec"
	SourceClaim   Source = "claim"
	SourceKubelet Source = "kubelet"
	// SourceContainer is a variable or a mount by which a container names a device for NVIDIA's container runtime, past kubelet.
	SourceContainer Source = "named by a container"
)

// String returns the pod's namespace and name, with a slash between.
func (p Pod) String() string {
	if p.Name == "" {
		return "pod with UID " + string(p.UID)
	}
	return p.Namespace + "/" + p.Name
}

// GPUPods picks the pods that have a GPU or may have one, sorted by namespace and name. Pods are all pods of the node,
// whatever their phase; clients are the processes that hold the sought GPUs. It picks a pod that
//   - requests a resource of GPUs in any container, be it an init, sidecar or ephemeral one;
//   - has resource claims of GPUs, also one that the scheduler made for an extended resource, or one that kubelet has prepared
//     and the pod does not name. Its devices are known if the claim could be read and is reserved for the pod, or if the pod has started and kubelet
//     names them, and if each of them is offered by NVIDIA's DRA driver. A claim that could not be read counts unless kubelet says that all that
//     it has prepared is of other drivers. Claims of a pod that Awaits one without a device do not count, unless they are reserved for it. Neither do
//     devices by admin access;
//   - was given an nvidia.com/ device by kubelet. If the API server does not list it, as after a forced deletion, it is
//     picked all the same: its containers may still run;
//   - names one of the node's GPUs or MIG devices in a variable or a mount of a container, once any container has started; see Pod.name;
//   - has a client, listed or not. It needs no request for that: NVIDIA_VISIBLE_DEVICES=all or a mounted /dev is enough.
//
// The GPUs are the node's, as the driver reports them.
//
// A pod that has succeeded or failed holds only its clients' devices: its containers have ended before kubelet says so, while kubelet may still list
// its devices.
//
// A pod's devices are also unknown if kubelet did not answer (assigned is nil), or if it lists a device that is not named by UUID. The same holds if
// it lists no device of a requested resource, as between binding and admission.
func GPUPods(pods []corev1.Pod, assigned Assignments, clients []Client, claimed Claimed, gpus []nvml.GPU) []Pod {
	var out []Pod
	names := namesOf(gpus)
	using := byOwner(clients, pods)
	listed := map[types.NamespacedName]bool{}
	for i := range pods {
		pod := &pods[i]
		name := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
		listed[name] = true
		p := Describe(pod)
		p.DevicesKnown = true
		if pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed {
			devices, claims := partClaims(assigned[name])
			p.assign(devices, func(resource string) bool { return byClaim(pod, resource) })
			p.claim(claimsOf(pod), claims, claimed, claimed.Awaits(pod, assigned))
			p.name(&pod.Spec, names)
		}
		p.use(using.listed[i])
		if len(p.Sources) > 0 {
			out = append(out, p)
		}
	}
	for name, devices := range assigned {
		if !listed[name] {
			p := Pod{Namespace: name.Namespace, Name: name.Name, Terminating: true, Unlisted: true, DevicesKnown: true}
			devices, claims := partClaims(devices)
			p.assign(devices, nil)
			p.claim(nil, claims, claimed, false)
			if len(p.Sources) > 0 {
				out = append(out, p)
			}
		}
	}
	for uid, clients := range using.unlisted {
		p := Pod{UID: uid, Terminating: true, Unlisted: true, DevicesKnown: true}
		p.use(clients)
		out = append(out, p)
	}
	slices.SortFunc(out, func(a, b Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	return out
}

// Drainable picks the pods that have to leave before a reboot of the node. It leaves out pods that have ended, pods of DaemonSets, which return to
// any node that is up, and static pods, which no API request can move.
func Drainable(pods []corev1.Pod) []Pod {
	var out []Pod
	for i := range pods {
		p := Describe(&pods[i])
		ended := pods[i].Status.Phase == corev1.PodSucceeded || pods[i].Status.Phase == corev1.PodFailed
		if !ended && !p.Daemon && !p.Mirror {
			out = append(out, p)
		}
	}
	return out
}

// assign notes the resources that the pod requests and the devices that kubelet has given it, and whether these are all. What it has by a claim is not
// among them.
func (p *Pod) assign(devices map[string][]string, byClaim func(resource string) bool) {
	if len(p.Requests) > 0 {
		p.Sources = append(p.Sources, SourceSpec)
	}
	if len(devices) > 0 {
		p.Sources = append(p.Sources, SourceKubelet)
	}
	for resource := range p.Requests {
		if len(devices[resource]) == 0 && !byClaim(resource) {
			p.DevicesKnown = false
		}
	}
	for resource, ids := range devices {
		for _, id := range ids {
			uuid, _, _ := strings.Cut(id, nvml.ReplicaSeparator)
			switch {
			case isUUID(uuid):
				p.Devices = append(p.Devices, uuid)
			case nvml.GPUResource(resource):
				p.DevicesKnown = false
			}
		}
	}
	slices.Sort(p.Devices)
	p.Devices = slices.Compact(p.Devices)
}

func isUUID(text string) bool {
	return strings.HasPrefix(text, "GPU-") || strings.HasPrefix(text, "MIG-")
}

// use notes the devices that processes of the pod hold.
func (p *Pod) use(clients []Client) {
	for _, c := range clients {
		p.Devices = append(p.Devices, c.Devices...)
		for _, s := range c.Sources {
			if s == SourceNVML {
				p.Sources = append(p.Sources, s+" "+Source(c.process()))
				continue
			}
			p.Sources = append(p.Sources, s+" of "+Source(c.process()))
		}
	}
	slices.Sort(p.Devices)
	p.Devices = slices.Compact(p.Devices)
}

// Tolerates reports whether any of the tolerations is for the taint, by the scheduler's rules.
func Tolerates(tolerations []corev1.Toleration, taint corev1.Taint) bool {
	return slices.ContainsFunc(tolerations, func(t corev1.Toleration) bool { return t.ToleratesTaint(klog.Logger{}, &taint, true) })
}
