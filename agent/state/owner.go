package state

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"github.com/gpuslice/gpuslice/agent/api"
	"github.com/gpuslice/gpuslice/agent/state/capacity"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/drain/holders"
	"github.com/gpuslice/gpuslice/nvml"
)

// Owner is who gives out the node's GPUs, and so who may cut them.
type Owner struct {
	Kind   api.Owner
	Plugin string // what offers GPUs to kubelet as the device plugin does; empty if nothing does
	Driver string // what publishes GPUs, or is about to, as NVIDIA's DRA driver does; empty if nothing does
	// Evidence is by what the agent knows that the driver cuts GPUs itself, what both give out, or why the driver offers none yet.
	Evidence string
	// Claimants names pods that have GPUs by claims although neither a pod of the driver nor a ResourceSlice is on the node: which GPUs, nothing says.
	Claimants string
	// Of api.OwnerDRAStarting alone.

	Since time.Time     // since when the driver is on the node and offers nothing
	Left  time.Duration // how long the agent goes on to wait for it
}

// ByClaims reports whether NVIDIA's DRA driver gives out the GPUs, or is about to, and nothing offers them to kubelet as a device plugin does.
func (o Owner) ByClaims() bool { return o.OfDRA() != api.OwnerNone && o.Plugin == "" }

// OfDRA returns the kind if NVIDIA's DRA driver has a part in it; otherwise none.
func (o Owner) OfDRA() api.Owner {
	if o.Kind == api.OwnerPlugin {
		return api.OwnerNone
	}
	return o.Kind
}

// Advice says what a user can do about a driver that offers nothing.
func (o Owner) Advice() string {
	if o.Claimants != "" {
		return "start NVIDIA's DRA driver on this node again, or end the pods that have claims: " + o.Claimants
	}
	return "see the log of " + o.Driver
}

// MayCut reports whether the agent may change the GPUs, and verify by what the device plugin or NVIDIA's DRA driver offers then that it has.
func (o Owner) MayCut() bool {
	return o.Kind == api.OwnerNone || o.Kind == api.OwnerPlugin || o.Kind == api.OwnerDRAStatic
}

// OwnerOf says whose the node's GPUs are: by what kubelet offers, by the ResourceSlices of NVIDIA's DRA driver, by the driver's pod, and by pods that
// have GPUs by claims: these keep them when the driver is gone.
func OwnerOf(s *Observed) Owner {
	drivers, holding := driverPods(s.Pods), sanitize.Names(s.DRA.Claimed().Claimants(s.Pods, s.Kubelet.Assigned))
	o := Owner{Plugin: s.offersByPlugin(), Driver: driverText(s, drivers, holding)}
	changing := s.Journal != nil && s.Journal.ByClaims // a change that starts the driver again itself
	switch {
	case changing:
		o.Driver = cmp.Or(o.Driver, "NVIDIA's DRA driver")
	case len(drivers) == 0 && len(s.DRA.Slices) == 0:
		o.Claimants = holding
	}
	o.Kind, o.Evidence = s.ownerKind(o, drivers, changing, holding)
	return o
}

// ownerKind returns the kind of the owner and by what it shows, for the pods of the driver, and those that have GPUs by claims.
func (s *Observed) ownerKind(o Owner, drivers []*corev1.Pod, changing bool, holding string) (kind api.Owner, evidence string) {
	dynamic, common := s.dynamicMIG(drivers), s.givenOutTwice()
	byClaims := len(s.DRA.Slices) > 0 || changing || holding != ""
	trace := byClaims || len(drivers) > 0
	switch {
	case byClaims && (common != "" || o.Plugin != ""):
		return api.OwnerBoth, common
	case dynamic != "":
		return api.OwnerDRADynamic, dynamic
	case changing:
		return api.OwnerDRAStatic, ""
	case !trace && o.Plugin != "":
		return api.OwnerPlugin, ""
	case !trace:
		return api.OwnerNone, ""
	case len(drivers) == 0 || len(s.DRA.Slices) == 0 || !s.DRA.Complete:
		return api.OwnerDRAStarting, s.whyNothingOffered(drivers)
	default:
		return api.OwnerDRAStatic, ""
	}
}

// offersByPlugin names what offers GPUs to kubelet, or is about to; empty if nothing does.
func (s *Observed) offersByPlugin() string {
	offered := ""
	if s.OffersGPUs() {
		offered = "what offers " + sanitize.Listed(slices.Sorted(maps.Keys(capacity.Offered(s.Kubelet.Offered)))) + " to kubelet"
	}
	if len(s.DevicePlugin.Pods) == 0 {
		return offered
	}
	return "NVIDIA's device plugin (" + podText(&s.DevicePlugin.Pods[0]) + ")"
}

// driverText names NVIDIA's DRA driver; empty if there is no sign of it.
func driverText(s *Observed, drivers []*corev1.Pod, holding string) string {
	switch {
	case len(drivers) > 0:
		return "NVIDIA's DRA driver (" + podText(drivers[0]) + ")"
	case len(s.DRA.Slices) > 0:
		return "NVIDIA's DRA driver (ResourceSlice " + s.DRA.Slices[0].Name + ")"
	case holding != "":
		return "NVIDIA's DRA driver (claims of " + holding + ")"
	default:
		return ""
	}
}

func podText(p *corev1.Pod) string { return "pod " + p.Namespace + "/" + p.Name }

// What a pod of NVIDIA's DRA driver has, however its chart is called and labelled.
const (
	driverContainer = "gpus"
	driverCommand   = "gpu-kubelet-plugin"
	driverRegistry  = "plugins_registry"
)

// driverPods returns the pods of NVIDIA's DRA driver for GPUs that have not ended, those that are about to end last.
func driverPods(pods []corev1.Pod) []*corev1.Pod {
	var out, ending []*corev1.Pod
	for i := range pods {
		switch p := &pods[i]; {
		case Ended(p) || gpuDriver(p) == nil:
		case p.DeletionTimestamp != nil:
			ending = append(ending, p)
		default:
			out = append(out, p)
		}
	}
	return append(out, ending...)
}

// gpuDriver returns the container by which the pod is NVIDIA's DRA driver for GPUs; nil if it is not. Its labels do not count: they depend on the name of
// the chart, and any user may set them.
func gpuDriver(pod *corev1.Pod) *corev1.Container {
	if !registers(pod) {
		return nil
	}
	for i := range pod.Spec.Containers {
		if c := &pod.Spec.Containers[i]; c.Name == driverContainer && startsDriver(c) {
			return c
		}
	}
	return nil
}

// NamesDriver reports whether the pod says that it starts NVIDIA's DRA driver for GPUs. Any pod may say so: it costs the API server a watch, and decides
// nothing.
func NamesDriver(pod corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool { return startsDriver(&c) })
}

// startsDriver reports whether the container's command names the driver's program.
func startsDriver(c *corev1.Container) bool {
	return slices.ContainsFunc(wordsOf(c), func(word string) bool { return path.Base(word) == driverCommand })
}

// registers reports whether the pod is of a DaemonSet, and has the folder in which DRA drivers register with kubelet.
func registers(pod *corev1.Pod) bool {
	_, of := holders.DaemonSetOf(pod)
	return of && slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.HostPath != nil && path.Base(v.HostPath.Path) == driverRegistry
	})
}

// wordsOf are the words of a container's command, which may be a script for a shell.
func wordsOf(c *corev1.Container) []string {
	var out []string
	for _, text := range slices.Concat(c.Command, c.Args) {
		for word := range strings.FieldsSeq(text) {
			out = append(out, strings.Trim(word, `"';`))
		}
	}
	return out
}

// dynamicMIG says by what NVIDIA's DRA driver shows that it cuts GPUs itself; empty if it does not. An A100 with MIG mode off shows no counters in that mode,
// so that its slices alone do not show the other.
func (s *Observed) dynamicMIG(drivers []*corev1.Pod) string {
	for _, slice := range s.DRA.Slices {
		if len(slice.Spec.SharedCounters) > 0 {
			return "sharedCounters in ResourceSlice " + slice.Name
		}
		for _, d := range slice.Spec.Devices {
			if len(d.ConsumesCounters) > 0 {
				return "consumesCounters in ResourceSlice " + slice.Name
			}
		}
	}
	for _, p := range drivers {
		if by := turnedOn(gpuDriver(p), gateDynamicMIG); by != "" {
			return fmt.Sprintf("%s of container %s of %s", by, driverContainer, podText(p))
		}
	}
	return ""
}

// The feature gates of NVIDIA's DRA driver.
const (
	envGates  = "FEATURE_GATES"
	flagGates = "feature-gates"

	gateDynamicMIG  = "DynamicMIG"
	gateHealthCheck = "NVMLDeviceHealthCheck"
	gateAllAlpha    = "AllAlpha"
)

// turnedOn says which feature gates of the container turn the gate on, or may do so for all that the agent can read; empty if none do.
func turnedOn(c *corev1.Container, gate string) string {
	by, said := turnedOnByCommand(c, gate)
	if by != "" {
		return by
	}
	for _, e := range c.Env {
		switch {
		case e.Name != envGates:
			continue
		case e.ValueFrom != nil:
			return envGates + ", whose value this agent cannot read,"
		case turnsOn(e.Value, gate):
			return envGates + "=" + sanitize.Cut(e.Value, longestOfPod)
		}
		said = true
	}
	mayHave := func(e corev1.EnvFromSource) bool { return strings.HasPrefix(envGates, e.Prefix) }
	if !said && slices.ContainsFunc(c.EnvFrom, mayHave) {
		return "envFrom, whose values this agent cannot read,"
	}
	return ""
}

// turnedOnByCommand says which gates of a flag, or of a variable that a script sets, turn the gate on. Said means that one has gates, so that those of the
// environment do not count. A script may set a gate in any of its lines, so what turns the gate on in one of them counts.
func turnedOnByCommand(c *corev1.Container, gate string) (by string, said bool) {
	text := strings.Join(slices.Concat(c.Command, c.Args), "\n")
	if !strings.Contains(text, "-"+flagGates) && !strings.Contains(text, envGates) {
		return "", false
	}
	if unread := unreadGates.FindString(text); unread != "" {
		return sanitize.Cut(unread, longestOfPod), true
	}
	all, off := "", false
	for _, one := range gateValues.FindAllStringSubmatch(text, -1) {
		is, err := strconv.ParseBool(one[2])
		switch is = is && err == nil; {
		case is && one[1] == gate:
			return one[0], true
		case is && one[1] == gateAllAlpha:
			all = one[0]
		case one[1] == gate:
			off = true
		}
	}
	if off {
		all = ""
	}
	return all, true
}

var (
	// gateValues finds the gates that the agent asks for.
	gateValues = regexp.MustCompile(`\b(` + gateDynamicMIG + "|" + gateHealthCheck + "|" + gateAllAlpha + `)=["']?(\w{1,10})`)
	// unreadGates finds gates of which a shell or kubelet replaces a part.
	unreadGates = regexp.MustCompile("(-" + flagGates + "|" + envGates + ")[\\s=+]+[^\\s;]*[$`]")
)

// longestOfPod bounds each text of a pod in a message: who may create a pod writes them.
const longestOfPod = 100

// holdsSession reports whether the pod of NVIDIA's DRA driver keeps the library open for as long as it runs, or may do so: it watches the health of GPUs then.
func holdsSession(pod *corev1.Pod) bool {
	c := gpuDriver(pod)
	return c == nil || turnedOn(c, gateHealthCheck) != ""
}

// turnsOn reports whether these feature gates turn the gate on, or may: a variable in them can have any value. As Kubernetes reads gates, the
// last value of each counts, and AllAlpha counts for those without a value.
func turnsOn(gates, gate string) bool {
	if strings.Contains(gates, "$") {
		return true
	}
	on := map[string]bool{}
	for one := range strings.SplitSeq(gates, ",") {
		name, value, _ := strings.Cut(strings.Trim(strings.TrimSpace(one), `"'`), "=")
		is, err := strconv.ParseBool(strings.Trim(strings.TrimSpace(value), `"'`))
		on[strings.TrimSpace(name)] = is && err == nil
	}
	is, named := on[gate]
	return named && is || !named && on[gateAllAlpha]
}

// givenOutTwice names a GPU of which kubelet has a device, or a part of it, and NVIDIA's DRA driver too; empty if there is none.
func (s *Observed) givenOutTwice() string {
	parent := map[string]string{} // of MIG devices
	for _, gpu := range s.GPUs {
		for _, i := range gpu.Instances {
			for _, d := range i.Devices {
				parent[d.UUID] = string(gpu.UUID)
			}
		}
	}
	claimed := map[string]bool{}
	for _, slice := range s.DRA.Slices {
		for _, d := range slice.Spec.Devices {
			for _, name := range []string{"uuid", "parentUUID"} {
				if uuid := d.Attributes[resourcev1.QualifiedName(name)].StringValue; uuid != nil {
					claimed[*uuid], claimed[parent[*uuid]] = true, true
				}
			}
		}
	}
	delete(claimed, "")
	for _, resource := range slices.Sorted(maps.Keys(s.Kubelet.Offered)) {
		for _, id := range s.Kubelet.Offered[resource] {
			device, _, _ := strings.Cut(id, nvml.ReplicaSeparator)
			if claimed[device] || claimed[parent[device]] {
				return s.DeviceName(device)
			}
		}
	}
	return ""
}

// whyNothingOffered says why NVIDIA's DRA driver, which is on the node, offers no GPU, as far as that shows.
func (s *Observed) whyNothingOffered(drivers []*corev1.Pod) string {
	if s.DRA.Err != nil {
		return "its ResourceSlices cannot be read: " + sanitize.Cut(s.DRA.Err.Error(), longestOfPod)
	}
	state := "no pod of it is on the node"
	if len(drivers) > 0 {
		state = lastState(drivers[0])
	}
	switch {
	case len(s.DRA.Slices) == 0:
		return "it has no ResourceSlice for the node, and " + state
	case !s.DRA.Complete:
		return "its ResourceSlices for the node are not complete, and " + state
	}
	return state
}

// lastState describes a pod by the first of its containers that does not run, or that has ended before.
func lastState(pod *corev1.Pod) string {
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		name := "its container " + sanitize.Cut(c.Name, longestOfPod)
		before := ""
		if t := c.LastTerminationState.Terminated; t != nil {
			before = ", and has ended before: " + ended(t)
		}
		switch t := c.State.Terminated; {
		case c.State.Waiting != nil:
			return fmt.Sprintf("%s waits (%s)%s", name, sanitize.Cut(c.State.Waiting.Reason, longestOfPod), before)
		case t != nil && t.ExitCode != 0:
			return name + " has ended: " + ended(t)
		case before != "":
			return name + " runs" + before
		}
	}
	if len(pod.Status.ContainerStatuses) == 0 {
		return "its pod is " + sanitize.Cut(string(pod.Status.Phase), longestOfPod)
	}
	return "its containers run"
}

func ended(t *corev1.ContainerStateTerminated) string {
	return fmt.Sprintf("exit code %d (%s)", t.ExitCode, sanitize.Cut(t.Reason, longestOfPod))
}
