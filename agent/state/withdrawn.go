package state

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/plan"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config/catalog"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Withdrawn is a pod that holds devices which kubelet gives out to others by now: the device plugin was given another config before the agent could
// have the pod leave, as by its config manager. Kubelet compares nothing but the names of devices. Or its claims have devices that NVIDIA's DRA driver
// does not offer any more.
type Withdrawn struct {
	Pod      holders.Pod
	Replicas []plan.Replica // the devices as kubelet has given them to the pod
	As       string         // how kubelet gives out the first of them now: "nvidia.com/gpu x 4"
	Gone     []string       // the devices that the driver does not offer: "gpu-0 by claim team-gpu-x7k2p"
}

// WithdrawnFrom returns the pods that hold what kubelet gives out to others. Stands is what the device plugin offers by its config, as far as that is
// known: what a pod has by that is not withdrawn, although a plugin that is about to read its config may offer something else for a moment.
func (s *Observed) WithdrawnFrom(stands capacity.Resources, want Desired) []Withdrawn {
	if s.Owner.ByClaims() {
		return s.gone()
	}
	given := capacity.GivenBy(s.GPUs, s.Kubelet.Offered)
	var out []Withdrawn
	for _, pod := range s.Holders.Pods {
		if !slices.Contains(pod.Sources, holders.SourceKubelet) {
			continue // it has ended, and kubelet may list it still
		}
		w := Withdrawn{Pod: pod}
		for _, r := range s.replicasOf(pod) {
			as := given.Again(r.Resource, r.ID)
			if slices.Contains(stands[r.Resource], r.ID) {
				as = s.replacedMPS(pod, r, want)
			}
			if as != "" {
				w.Replicas, w.As = append(w.Replicas, r), cmp.Or(w.As, as)
			}
		}
		if len(w.Replicas) > 0 {
			out = append(out, w)
		}
	}
	return out
}

// replacedMPS says how kubelet gives the replica out by now if a change that is not verified yet shares it by MPS, and the pod has had it since before:
// such a pod is no client of MPS. Until the control daemon of MPS is there, the device plugin gives out nothing by it. It is empty otherwise.
func (s *Observed) replacedMPS(pod holders.Pod, r plan.Replica, want Desired) string {
	verified := s.Record.Learnt.Verified
	if want.Plugin == nil || want.Plugin.Sharing.Strategy != catalog.SharingMPS || verified == "" || verified == want.Fingerprint {
		return ""
	}
	if !strings.Contains(r.ID, nvml.ReplicaSeparator) || !s.startedBeforeMPS(pod) {
		return ""
	}
	return r.Resource + " by MPS"
}

// startedBeforeMPS reports whether containers of the pod run since before the control daemon of MPS has come to the node.
func (s *Observed) startedBeforeMPS(pod holders.Pod) bool {
	i := slices.IndexFunc(s.Pods, func(p corev1.Pod) bool { return p.UID == pod.UID })
	if i < 0 || len(s.DevicePlugin.MPSDaemons) == 0 {
		return false
	}
	return slices.ContainsFunc(s.Pods[i].Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
		return c.State.Running != nil && !slices.ContainsFunc(s.DevicePlugin.MPSDaemons, func(daemon corev1.Pod) bool {
			return daemon.CreationTimestamp.Before(&c.State.Running.StartedAt) // in whole seconds; the daemon takes longer until the plugin gives out anything by it
		})
	})
}

// replicasOf returns the devices that kubelet has given to the pod.
func (s *Observed) replicasOf(pod holders.Pod) []plan.Replica {
	return Replicas(s.Kubelet.Assigned[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}])
}

// HoldsWithdrawn reports whether the pod holds a device that kubelet gives out to others.
func (s *Observed) HoldsWithdrawn(pod holders.Pod) bool { return isAmong(s.Capacity.Withdrawn, pod) }

func isAmong(withdrawn []Withdrawn, pod holders.Pod) bool {
	return slices.ContainsFunc(withdrawn, func(w Withdrawn) bool { return w.Pod.UID == pod.UID && w.Pod.String() == pod.String() })
}

// WithdrawnTexts says which pods hold what kubelet gives out to others, pod by pod.
func (s *Observed) WithdrawnTexts() []string { return s.withdrawnTexts(s.Capacity.Withdrawn) }

func (s *Observed) withdrawnTexts(withdrawn []Withdrawn) []string {
	var out []string
	for _, w := range withdrawn {
		text := fmt.Sprintf("pod %s holds %s, which kubelet gives out as %s by now", w.Pod, s.replicaNames(w.Replicas), w.As)
		if len(w.Gone) > 0 {
			text = fmt.Sprintf("pod %s has %s, which NVIDIA's DRA driver offers no more", w.Pod, sanitize.Names(w.Gone))
		}
		if others := s.givenAgain(withdrawn, w); len(others) > 0 {
			text += ": " + others[0] + " has it, too"
		}
		if w.Pod.Terminating {
			text += "; it is ending"
		}
		out = append(out, text)
	}
	return out
}

// longestID bounds the id of a device in a message. A MIG device of an older driver has 90 characters.
const longestID = 110

func (s *Observed) replicaNames(replicas []plan.Replica) string {
	var names []string
	for _, r := range replicas {
		device := capacity.DeviceOf(r.ID)
		text := sanitize.Cut(s.DeviceName(device), longestID) + " (" + r.Resource
		if n := strings.TrimPrefix(r.ID, device+nvml.ReplicaSeparator); n != r.ID {
			text += ", replica " + sanitize.Cut(n, longestID)
		}
		names = append(names, text+")")
	}
	return sanitize.Names(names)
}

// givenAgain names the other pods that have one of these devices, by what kubelet gives out now.
func (s *Observed) givenAgain(withdrawn []Withdrawn, w Withdrawn) []string {
	var out []string
	for _, pod := range s.Holders.Pods {
		if !isAmong(withdrawn, pod) && slices.ContainsFunc(s.replicasOf(pod), func(has plan.Replica) bool {
			return slices.Contains(s.Kubelet.Offered[has.Resource], has.ID) &&
				slices.ContainsFunc(w.Replicas, func(r plan.Replica) bool { return capacity.DeviceOf(r.ID) == capacity.DeviceOf(has.ID) })
		}) {
			out = append(out, pod.String())
		}
	}
	return out
}

// DeviceName names a GPU by its index, or an instance by its GPU, profile and place.
func (s *Observed) DeviceName(uuid string) string {
	for _, gpu := range s.GPUs {
		if string(gpu.UUID) == uuid {
			return fmt.Sprintf("GPU %d", gpu.Index)
		}
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				switch {
				case d.UUID != uuid:
				case i.Compute == "":
					return fmt.Sprintf("GPU %d %s", gpu.Index, i.Placed)
				default:
					return fmt.Sprintf("GPU %d %s in %s", gpu.Index, d.Part, i.Placed)
				}
			}
		}
	}
	if s.GPUs == nil {
		return uuid
	}
	return uuid + ", which is gone"
}
