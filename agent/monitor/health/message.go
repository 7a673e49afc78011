package health

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/sanitize"
	"github.com/gpuslice/gpuslice/nvml"
)

// mostXidsNamed is how many Xids of a GPU a message names.
const mostXidsNamed = 3

// longestRefused bounds why the agent resets nothing: the message says first what is wrong with the GPUs.
const longestRefused = 250

// detail is how much a message says.
type detail struct {
	gpus, pods, others int // GPUs; for each, pods by name, and findings after the worst
}

// details are tried in this order: a condition has 1,024 characters, and the names of four pods alone may take more. Every message says what
// to do, and how many more GPUs are unhealthy.
var details = []detail{{2, 4, 16}, {2, 2, 2}, {1, 4, 16}, {1, 2, 2}, {1, 1, 2}, {1, 0, 0}}

// message puts a verdict into words.
func (m *Monitor) message(v verdict.Verdict, now time.Time) string {
	for _, d := range details[:len(details)-1] {
		if text := m.reportVerdict(v, now, d); utf8.RuneCountInString(text) <= sanitize.Longest {
			return text
		}
	}
	return m.reportVerdict(v, now, details[len(details)-1])
}

func (m *Monitor) reportVerdict(v verdict.Verdict, now time.Time, d detail) string {
	var parts []string
	for _, g := range v.Unhealthy[:min(len(v.Unhealthy), d.gpus)] {
		parts = append(parts, m.describe(g, now, d))
	}
	if more := len(v.Unhealthy) - d.gpus; more > 0 {
		parts = append(parts, fmt.Sprintf("And %d more.", more))
	}
	text := strings.Join(parts, " ")
	unknown := v.Unknown
	if unknown != "" {
		unknown = strings.ToUpper(unknown[:1]) + sanitize.Cut(unknown[1:], 300) + "."
	}
	switch {
	case v.Hangs:
		text = strings.TrimSpace(unknown + " Next: reboot the node; it does not recover by itself. Action: RebootNode. " + text)
	case unknown != "":
		text = strings.TrimSpace(text + " " + unknown)
	case v.NoGPU:
		text = "neither NVIDIA's driver nor the PCI bus has a GPU"
	case v.Status == corev1.ConditionFalse:
		text = m.healthy()
	}
	return text + m.remedied(v)
}

// remedied says what the agent does about a verdict in addition to reporting it, or why it does not do what the settings request.
func (m *Monitor) remedied(v verdict.Verdict) string {
	taints := m.Settings.Taint == config.HealthTaintNoSchedule || m.Settings.Taint == config.HealthTaintPreferNoSchedule
	critical, _ := v.Critical()
	if v.Status != corev1.ConditionTrue {
		return ""
	}
	text := ""
	if taints && critical {
		text = " Taint " + config.TaintGPUUnhealthy + " keeps new pods away."
	}
	refused := m.refused
	if m.nvsentinel != "" {
		refused = fmt.Sprintf("NVSentinel manages this node (%s)", m.nvsentinel)
	}
	if m.Settings.Reset != "" && m.Settings.Reset != config.HealthResetNever && refused != "" {
		text += fmt.Sprintf(" The agent resets nothing: %s.", sanitize.Cut(refused, longestRefused))
	}
	return text
}

// healthy says how many GPUs have no known problem, and which problems the agent cannot see.
func (m *Monitor) healthy() string {
	text := fmt.Sprintf("nothing is wrong with %s", sanitize.Counted(len(m.node.GPUs()), "GPU"))
	noECC := 0
	for _, g := range m.node.GPUs() {
		if reading, _ := g.Reading(); reading.ECCMode.Known && !reading.ECCMode.Value.Current {
			noECC++
		}
	}
	if noECC > 0 {
		text += fmt.Sprintf("; with ECC off, %d of them cannot report memory errors", noECC)
	}
	if !m.node.HasEvents() {
		text += "; the driver sends no events: the agent misses errors that no GPU's state shows"
	}
	return text
}

// describe says what is wrong with a GPU, which pods have it, and what to do.
func (m *Monitor) describe(g *verdict.GPU, now time.Time, d detail) string {
	f := g.Findings()[0]
	var b strings.Builder
	b.WriteString(m.evidence(g, f) + ".")
	others := g.Findings()[1:]
	for _, other := range others[:min(len(others), d.others)] {
		fmt.Fprintf(&b, " It %s.", other.Phrase())
	}
	if more := len(others) - d.others; more > 0 {
		fmt.Fprintf(&b, " It has %s more.", sanitize.Counted(more, "problem"))
	}
	if until, flapping := g.FlappingUntil(now); flapping {
		fmt.Fprintf(&b, " Flapping; reported until %s.", verdict.Moment(until))
	}
	b.WriteString(m.affected(g, f, d.pods))
	if why := m.notClosed[g.UUID()]; why != "" {
		fmt.Fprintf(&b, " It is not closed to claims: %s.", sanitize.Cut(why, 200))
	}
	fmt.Fprintf(&b, " Next: %s. Action: %s.", m.next(g, f, now), f.Action)
	return b.String()
}

// evidence says what is wrong with a GPU, and after which Xids.
func (m *Monitor) evidence(g *verdict.GPU, f verdict.Finding) string {
	text := fmt.Sprintf("%s %s since %s", g.Name(), f.Phrase(), verdict.Moment(f.Since))
	if xids := m.afterXids(g); xids != "" {
		text += ", after " + xids
	}
	return text
}

// next says who does what about a GPU.
func (m *Monitor) next(g *verdict.GPU, f verdict.Finding, now time.Time) string {
	if m.nvsentinel != "" || m.refused != "" || !g.ResetHelps(m.Settings.Reset) {
		return f.Advice()
	}
	if at, inVain := g.ResetInVain(); inVain {
		return fmt.Sprintf("end its pods, then reboot the node, or have it inspected; the agent reset it, or gave up, at %s, and does not try again", verdict.Moment(at))
	}
	if g.ResetTooOften(now) {
		return "end its pods, then reboot the node, or have it inspected; the agent has reached its daily limit of resets"
	}
	return "the agent resets it as soon as it may and its pods have left; see condition GPUPartitionReady"
}

// afterXids names the last Xids of the GPU that matter.
func (m *Monitor) afterXids(g *verdict.GPU) string {
	xids := m.node.RelevantXids(g)
	var out []string
	for _, x := range xids[max(0, len(xids)-mostXidsNamed):] {
		times := ""
		if x.Count == 2 {
			times = ", twice"
		} else if x.Count > 2 {
			times = ", more than twice" // how often changes by itself; the metrics have it
		}
		out = append(out, fmt.Sprintf("Xid %d (%s%s)%s at %s", x.Xid.Number, x.Xid.Meaning, times, m.onInstance(g, x.GI), verdict.Moment(x.First)))
	}
	return strings.Join(out, ", ")
}

func (m *Monitor) onInstance(g *verdict.GPU, gi int) string {
	if gi == nvml.WholeGPU {
		return ""
	}
	return " on " + m.instanceName(g, gi)
}

// instanceName is the instance as people know it: "1g.10gb@2".
func (m *Monitor) instanceName(g *verdict.GPU, gi int) string {
	if i, found := m.instance(g.UUID(), gi); found {
		return i.String()
	}
	return fmt.Sprintf("GPU instance %d", gi)
}

// affected says which instances and pods the finding affects, the first pods by name.
func (m *Monitor) affected(g *verdict.GPU, f verdict.Finding, named int) string {
	var on []string
	for _, gi := range f.Instances {
		on = append(on, m.instanceName(g, gi))
	}
	var pods []string
	for _, p := range m.podsOn(g.UUID(), f.Instances) {
		if !slices.Contains(pods, p.pod.String()) {
			pods = append(pods, p.pod.String())
		}
	}
	text := ""
	switch all := len(m.instances(g.UUID())); {
	case len(on) > 0:
		text = " Only " + strings.Join(on, ", ") + " is affected"
	case all > 0:
		text = fmt.Sprintf(" All %s are affected", sanitize.Counted(all, "instance"))
	case len(pods) > 0:
		text = " Held by"
	default:
		return ""
	}
	switch more := len(pods) - named; {
	case len(pods) == 0:
		return text + "."
	case named == 0:
		return fmt.Sprintf("%s: %s.", text, sanitize.Counted(len(pods), "pod"))
	case more > 0:
		return fmt.Sprintf("%s: %s and %d more.", text, strings.Join(pods[:named], ", "), more)
	default:
		return text + ": " + strings.Join(pods, ", ") + "."
	}
}
