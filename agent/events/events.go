// Package events has a constructor for each Event that the agent sends: its type, its reason, and its text where that is fixed.
package events

import (
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
)

// Event is one that users see by kubectl describe and kubectl events.
type Event struct {
	Type    string // corev1.EventTypeNormal or corev1.EventTypeWarning
	Reason  config.Reason
	Message string // Recorder bounds it
}

// Recorder sends Events about the agent's node, and about pods there.
type Recorder struct{ To record.EventRecorder }

// Node sends an Event about the node of this name. Its UID is the name: kubectl describe finds a node's Events so.
func (r Recorder) Node(name string, e Event) {
	r.send(&corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: name, UID: types.UID(name)}, e)
}

// OfNode returns what sends Events about the node of this name.
func (r Recorder) OfNode(name string) func(Event) {
	return func(e Event) { r.Node(name, e) }
}

// Pod sends an Event about a pod.
func (r Recorder) Pod(pod types.NamespacedName, uid types.UID, e Event) {
	r.send(&corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name, UID: uid}, e)
}

func (r Recorder) send(about *corev1.ObjectReference, e Event) {
	r.To.Event(about, e.Type, string(e.Reason), sanitize.Message(e.Message, sanitize.Longest))
}

func normal(reason config.Reason, format string, args ...any) Event {
	return Event{corev1.EventTypeNormal, reason, fmt.Sprintf(format, args...)}
}

func warning(reason config.Reason, format string, args ...any) Event {
	return Event{corev1.EventTypeWarning, reason, fmt.Sprintf(format, args...)}
}

// Of a change.

// Reported is for news in the node's condition.
func Reported(kind string, reason config.Reason, message string) Event {
	return Event{kind, reason, message}
}

// Ignored is for a label, an annotation or a file that does not count.
func Ignored(reason config.Reason, text string) Event { return warning(reason, "%s", text) }

// Fenced is for a node that is fenced for a change to target with so many steps. It leaves another user's cordon. Foreign says what another program has
// done, if the change undoes that; it is empty for a change that a user has requested.
func Fenced(target string, steps int, foreign string) Event {
	if foreign != "" {
		return normal(config.ReasonFencing, "fenced to restore %s: %s: %s", target, foreign, sanitize.Counted(steps, "step"))
	}
	return normal(config.ReasonFencing, "fenced for the change to %s: %s", target, sanitize.Counted(steps, "step"))
}

// ClosedDevices is for devices that DeviceTaintRules close for a change.
func ClosedDevices(devices []string, target string, steps int) Event {
	return normal(config.ReasonFencing, "closed %s to claims for the change to %s: %s", strings.Join(devices, ", "), target, sanitize.Counted(steps, "step"))
}

// Evicting is for the node of a pod that leaves for a change; did is what happens to the pod.
func Evicting(did, pod, target string) Event {
	return normal(config.ReasonEvicting, "%s pod %s for the change to %s", did, pod, target)
}

// EvictingThis is the same for the pod.
func EvictingThis(did, node, target string) Event {
	return normal(config.ReasonEvicting, "%s this pod for the change of node %s to %s", did, node, target)
}

// Released is for a node that the agent has released after a change.
func Released(took time.Duration, capacity string) Event {
	return normal(config.ReasonReleased, "released the node after %s, %s", took.Round(time.Second), capacity)
}

// GivenUp is for a change that has failed, and that the agent undoes.
func GivenUp(target string, reason config.Reason, why string) Event {
	return warning(reason, "%s: %s; undoing the change", target, why)
}

// FoundWithoutJournal is for what an agent has left on a node without a journal.
func FoundWithoutJournal(left string) Event {
	return warning(config.ReasonRecovering, "restoring leftovers without a journal: %s", left)
}

// WindowOverrun is for a change that goes on beyond its window.
func WindowOverrun(target, text string) Event {
	return warning(config.ReasonWindowOverrun, "%s: %s", target, text)
}

// StartupTaintsReturn is for startup taints that another program puts back.
func StartupTaintsReturn(taints string, times int, by, advice string) Event {
	return warning(config.ReasonStepHadNoEffect, "removed %s %d times: %s; %s", taints, times, by, advice)
}

// Of reboots and driver upgrades.

// AskedForReboot is for a reboot that the agent has requested by a sentinel file.
func AskedForReboot(sentinel string) Event {
	return normal(config.ReasonNeedsReboot, "requested a reboot by %s", sentinel)
}

// Rebooting is for a node that the agent reboots.
func Rebooting(target string) Event {
	return normal(config.ReasonNeedsReboot, "rebooting the node for %s: MIG mode is pending", target)
}

// ReleasedUntilReboot is for a node that is released while a change waits for its reboot.
func ReleasedUntilReboot(target string) Event {
	return normal(config.ReasonNeedsReboot, "released the node until its reboot for %s", target)
}

// ReleasedForUpgrade is for a node that is released during an upgrade of the driver, which the label shows.
func ReleasedForUpgrade(label string) Event {
	return normal(config.ReasonDriverNotLoaded, "released the node while the driver is being upgraded (%s); the change continues after that", label)
}

// Of the device plugin and the DRA driver.

// RestartingPlugin is for a pod of the device plugin or the DRA driver: the next one reads the current GPUs when it starts.
func RestartingPlugin(offerer, pod string) Event {
	return normal(config.ReasonPluginRestarted, "restarting %s, pod %s: it does not advertise the current GPUs", offerer, pod)
}

// MendedKey is for the agent's key of the device plugin's configs, which another program has changed and the agent has rewritten.
func MendedKey(news string) Event { return warning(config.ReasonConfiguringPlugin, "%s", news) }

// KeyNotMended is for the same key if the agent cannot rewrite it.
func KeyNotMended(news string) Event { return warning(config.ReasonNoHandover, "%s", news) }

// RemovedStaleResources is for resources of former configs that the agent has removed from the node.
func RemovedStaleResources(names []string) Event {
	return normal(config.ReasonStaleResourcesRemoved, "removed resources of former configs from the node, as staleResources: remove says: %s", strings.Join(names, ", "))
}

// DevicesNotClosed is for devices that the settings have the agent close to claims, and that are open. Missing says that the agent has no right to the
// rules, or that the API server serves none.
func DevicesNotClosed(err error, missing bool) Event {
	const asked = "cannot close devices to claims, as health.deviceTaint or drain.fence asks: %v"
	if missing {
		return warning(config.ReasonMissingRight, asked+"; this needs Kubernetes 1.37 and deploy/components/device-taint-rules", err)
	}
	return warning(config.ReasonStepFailed, asked+"; the agent tries again", err)
}

// DevicesLeftClosed is for rules of agents that the agent cannot delete. Missing says that it has no right to.
func DevicesLeftClosed(err error, missing bool) Event {
	if missing {
		return warning(config.ReasonMissingRight, "devices stay closed to claims: %v", err)
	}
	return warning(config.ReasonStepFailed, "devices stay closed to claims: %v; the agent tries again", err)
}

// UnreadClaims is for claims that the agent may not read.
func UnreadClaims(err error) Event {
	return warning(config.ReasonMissingRight, "%v", err)
}

// Of the host.

// UnitNotStarted is for a unit of the host that the agent has stopped, and does not start.
func UnitNotStarted(text string) Event { return warning(config.ReasonUnitFailed, "%s", text) }

// UnitFailed is for a unit of the host that has failed since the agent started it again.
func UnitFailed(unit, state string) Event {
	return warning(config.ReasonUnitFailed, "%s of this host was stopped for a change, was started again, and has been %s since; see systemctl status %s", unit, state, unit)
}

// UnitAbandoned is for a unit of the host that does not start again.
func UnitAbandoned(unit string, err error) Event {
	return warning(config.ReasonUnitFailed, "%s of this host was stopped for the change and does not start again: %v; start it by hand", unit, err)
}

// PersistenceLost is for a GPU that was in persistence mode before the change.
func PersistenceLost(index int, reason config.Reason, why error) Event {
	return warning(reason, "persistence mode of GPU %d was on before the change and cannot be turned on again: %v; the GPU works without it; turn it on by hand", index, why)
}

// Of health, memory and idle GPUs.

// GPUUnhealthy is for a GPU that is not well, by the condition's reason and message.
func GPUUnhealthy(reason, message string) Event {
	return warning(config.ReasonGPUUnhealthy, "%s: %s", reason, message)
}

// GPUHealthy is for GPUs that are well again.
func GPUHealthy(message string) Event { return normal(config.ReasonGPUHealthy, "%s", message) }

// UnhealthyTaintRefused is for the taint of an unhealthy node that the agent may not write.
func UnhealthyTaintRefused(err error) Event {
	return warning(config.ReasonMissingRight, "cannot write taint %s: %v; install this version's admission policies: kubectl apply -k deploy/policies",
		config.TaintGPUUnhealthy, err)
}

// UnhealthyDevices is for devices of GPUs that are not well, which claims do not get.
func UnhealthyDevices(devices []string) Event {
	return warning(config.ReasonGPUUnhealthy, "closed devices of GPUs that cannot be used or trusted to claims, by DeviceTaintRules: %s", strings.Join(devices, ", "))
}

// HealthNotWatched is for a driver that sends no events.
func HealthNotWatched(err error) Event {
	return warning(config.ReasonHealthNotWatched, "the agent sees only errors that a GPU's state shows: %v", err)
}

// HealthAcknowledged is for errors that a user has acknowledged.
func HealthAcknowledged(by, until, what string) Event {
	return normal(config.ReasonHealthAcknowledged, "%s has acknowledged by annotation %s what GPUs reported until %s: %s", by, config.AnnotationHealthAck, until, what)
}

// XidOfProcess is for an Xid of a program in no pod.
func XidOfProcess(xid uint64, meaning string, pid int, where, again string) Event {
	return warning(config.ReasonXidError, "Xid %d (%s): process %d, in no pod, made an error on %s and was stopped%s", xid, meaning, pid, where, again)
}

// Xid is for an Xid of the hardware.
func Xid(xid uint64, meaning, where, source, again string) Event {
	return warning(config.ReasonXidError, "Xid %d (%s) on %s%s%s", xid, meaning, where, source, again)
}

// XidOfPod is for a pod that an Xid concerns.
func XidOfPod(reason config.Reason, text string) Event { return warning(reason, "%s", text) }

// RecoveryActionChanged is for a GPU when its driver recommends another action. It is no warning if well is true: the driver recommends none.
func RecoveryActionChanged(well bool, gpu, action string, number int, before string) Event {
	e := warning(config.ReasonRecoveryActionChanged, "the driver recommends for %s: %s (recovery action %d); before: %s", gpu, action, number, before)
	if well {
		e.Type = corev1.EventTypeNormal
	}
	return e
}

// RowsRemapped is for rows of memory that a GPU has replaced.
func RowsRemapped(gpu string, rows, total int) Event {
	return normal(config.ReasonRowRemapped, "%s has replaced %s of memory, %d in all", gpu, sanitize.Counted(rows, "row"), total)
}

// MemoryNearlyFull is for a pod when the memory of its GPU is nearly full, and no pod there has grown more.
func MemoryNearlyFull(mib int, usage string) Event {
	return warning(config.ReasonGPUMemoryNearlyFull, "this pod has grown most, by %d MiB: %s", mib, usage)
}

// Idle is for a pod that leaves its GPU idle.
func Idle(text string) Event { return warning(config.ReasonGPUIdle, "%s", text) }
