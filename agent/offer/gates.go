package offer

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config/sanitize"
)

// The feature gates of NVIDIA's DRA driver.
const (
	envGates  = "FEATURE_GATES"
	flagGates = "feature-gates"

	gateDynamicMIG  = "DynamicMIG"
	gateHealthCheck = "NVMLDeviceHealthCheck"
	gateAllAlpha    = "AllAlpha"
)

// turnedOn names the feature gates of the container that turn the gate on, or that may, as far as the agent can read them; empty if none do.
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
			return envGates + ", which this agent cannot read,"
		case turnsOn(e.Value, gate):
			return envGates + "=" + sanitize.Cut(e.Value, longestOfPod)
		}
		said = true
	}
	mayHave := func(e corev1.EnvFromSource) bool { return strings.HasPrefix(envGates, e.Prefix) }
	if !said && slices.ContainsFunc(c.EnvFrom, mayHave) {
		return "envFrom, which this agent cannot read,"
	}
	return ""
}

// turnedOnByCommand names the gates, of a flag or of a variable that a script sets, that turn the gate on. Said reports whether the command sets any: those of
// the environment do not count then. A script may set a gate in any of its lines, so one line that turns it on is enough.
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
	// gateValues finds the gates that matter to the agent.
	gateValues = regexp.MustCompile(`\b(` + gateDynamicMIG + "|" + gateHealthCheck + "|" + gateAllAlpha + `)=["']?(\w{1,10})`)
	// unreadGates finds gates that a shell or kubelet replaces a part of.
	unreadGates = regexp.MustCompile("(-" + flagGates + "|" + envGates + ")[\\s=+]+[^\\s;]*[$`]")
)

// longestOfPod bounds each text of a pod in a message: who may create a pod writes them.
const longestOfPod = 100

// holdsSession reports whether the pod of NVIDIA's DRA driver keeps the library open, or may do so, for as long as it runs: a driver that watches the health
// of GPUs does, and one that cuts them itself.
func holdsSession(pod *corev1.Pod) bool {
	c := gpuDriver(pod)
	return c == nil || turnedOn(c, gateHealthCheck) != "" || turnedOn(c, gateDynamicMIG) != ""
}

// turnsOn reports whether these feature gates turn the gate on, or may: a variable in them can have any value. Kubernetes takes the last value of each gate,
// and AllAlpha for gates without a value.
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
