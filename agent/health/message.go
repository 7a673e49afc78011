package health

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpuslice/gpuslice/agent/legible"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// mostTold is how many GPUs a message tells of; a condition has 1,024 characters.
	mostTold = 2
	// mostPods is how many pods of a GPU it names.
	mostPods = 4
	// mostXidsTold is how many Xids of a GPU it names.
	mostXidsTold = 3
)

// message puts a verdict into words.
func (m *Monitor) message(v verdict, now time.Time) string {
	var parts []string
	for _, g := range v.bad[:min(len(v.bad), mostTold)] {
		parts = append(parts, m.describe(g, now))
	}
	if more := len(v.bad) - mostTold; more > 0 {
		parts = append(parts, fmt.Sprintf("And %d more.", more))
	}
	text := strings.Join(parts, " ")
	unknown := v.unknown
	if unknown != "" {
		unknown = strings.ToUpper(unknown[:1]) + legible.Cut(unknown[1:], 300) + "."
	}
	switch {
	case v.reason == config.ReasonDriverUnresponsive && v.action == ActionRebootNode:
		text = strings.TrimSpace(unknown + " Next: nothing brings it back by itself; reboot the node. Action: RebootNode. " + text)
	case unknown != "":
		text = strings.TrimSpace(text + " " + unknown)
	case v.reason == config.ReasonNoGPU:
		text = "neither NVIDIA's driver nor the PCI bus has a GPU"
	case v.reason == config.ReasonGPUsHealthy:
		text = m.healthy()
	}
	return text
}

// healthy says of how many GPUs nothing is known that is wrong, and what of them cannot be known.
func (m *Monitor) healthy() string {
	text := fmt.Sprintf("nothing is wrong with %s", counted(len(m.node.gpus), "GPU"))
	noECC := 0
	for _, g := range m.node.gpus {
		if mode := g.reading.ECCMode; mode.Known && !mode.Value.Current {
			noECC++
		}
	}
	if noECC > 0 {
		text += fmt.Sprintf("; with ECC off, %d of them cannot tell errors of memory", noECC)
	}
	if m.node.blind {
		text += "; errors that show in no state are not seen, since the driver does not hand out its events"
	}
	return text
}

// describe says what is wrong with a GPU, who has it, and what is to be done.
func (m *Monitor) describe(g *gpu, now time.Time) string {
	f := worst(g.findings)
	r := reasons[rank(f.reason)]
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s%s since %s", g.name(), r.phrase, f.detail, moment(f.since))
	if xids := m.afterXids(g); xids != "" {
		b.WriteString(", after " + xids)
	}
	b.WriteString(".")
	for _, other := range g.findings {
		if other.reason != f.reason {
			fmt.Fprintf(&b, " It %s%s.", reasons[rank(other.reason)].phrase, other.detail)
		}
	}
	if g.flapping(now) && len(g.rises) >= flapRises {
		fmt.Fprintf(&b, " This comes and goes: flapping, so that it is told until %s.", moment(g.flapUntil))
	}
	b.WriteString(m.affected(g, f))
	next := r.next
	if f.action == ActionContactSupport && f.reason == config.ReasonResetRequired {
		next = "ask NVIDIA's support what this action means, or run a newer agent"
	}
	fmt.Fprintf(&b, " Next: %s. Action: %s.", next, f.action)
	return b.String()
}

// afterXids names the last Xids of the GPU that matter.
func (m *Monitor) afterXids(g *gpu) string {
	keys := g.recent(m.node.xids)
	var out []string
	for _, key := range keys[max(0, len(keys)-mostXidsTold):] {
		o := g.xids[key]
		times := ""
		if o.count == 2 {
			times = ", twice"
		} else if o.count > 2 {
			times = ", more than twice" // how often changes by itself; the metrics have it
		}
		out = append(out, fmt.Sprintf("Xid %d (%s%s)%s at %s", key.xid, m.node.xids.of(key.xid, g.old).Meaning, times, m.onInstance(g, key), moment(o.first)))
	}
	return strings.Join(out, ", ")
}

func (m *Monitor) onInstance(g *gpu, key xidKey) string {
	if key.gi == nvml.WholeGPU {
		return ""
	}
	return " on " + m.instanceName(g, key.gi)
}

// instanceName is the instance as people know it: "1g.10gb@2".
func (m *Monitor) instanceName(g *gpu, gi int) string {
	if i, found := m.instance(g.uuid, gi); found {
		return i.String()
	}
	return fmt.Sprintf("GPU instance %d", gi)
}

// affected says which instances and pods have what is wrong.
func (m *Monitor) affected(g *gpu, f finding) string {
	var on []string
	for _, gi := range f.instances {
		on = append(on, m.instanceName(g, gi))
	}
	var pods []string
	for _, p := range m.podsOn(g.uuid, f.instances) {
		if !slices.Contains(pods, p.pod.String()) {
			pods = append(pods, p.pod.String())
		}
	}
	text := ""
	switch all := len(m.instances(g.uuid)); {
	case len(on) > 0:
		text = " Only " + strings.Join(on, ", ") + " is affected"
	case all > 0:
		text = fmt.Sprintf(" All %s are affected", counted(all, "instance"))
	case len(pods) > 0:
		text = " It is held"
	default:
		return ""
	}
	switch more := len(pods) - mostPods; {
	case len(pods) == 0:
		return text + "."
	case more > 0:
		return fmt.Sprintf("%s: %s and %d more.", text, strings.Join(pods[:mostPods], ", "), more)
	default:
		return text + ": " + strings.Join(pods, ", ") + "."
	}
}
