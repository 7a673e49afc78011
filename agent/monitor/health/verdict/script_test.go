package verdict_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpuslice/gpuslice/agent/monitor/health/verdict"
	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

// script plays what the driver, its events and the bus report of a node, one observation a line. A line that begins with = says what the
// verdict then is; one with # is a comment.
//
//	+2s                          time passes
//	read 0 row-pending, 1 lost   a reading of all GPUs; "read" alone has none
//	quick 0                      one that is not thorough
//	xid 0 62 gi=1                an event; also logged and confirm, of the kernel's log
//	event 0 ecc                  ecc, poison, retired, retire-failed
//	error unresponsive           the driver does not answer
//	bus 0 1 2/vfio-pci           what is on the PCI bus
//	program 0 pod-a              a pod's program has had an error
//	change 0, changed 0          a call of the agent that changes a GPU begins, and ends
//	mig 0, arch 0 7              another MIG mode is asked for; the compute capability
//	reset 0, cancel 0, done 0    the agent resets a GPU, cancels that, or has done it
//	restart boot-1               a next process goes on from the record, in this boot
//	ack                          a person has looked until now
//	xids 0: 62x1 13x2            what is remembered, the unsettled ones first
//	relevant 0: 62               what matters, the newest last
//	toreset critical: 0          the GPUs that the agent is to reset
//	recovered 0: true            nothing is wrong with it, and was not for a while
type script struct {
	t    *testing.T
	n    *verdict.Node
	s    config.Health
	now  time.Time
	name string
}

func play(t *testing.T, name string, s config.Health, text string) {
	t.Helper()
	p := &script{t: t, n: verdict.New(s), s: s, now: began, name: name}
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			p.line(line)
		}
	}
}

func (p *script) line(line string) {
	p.t.Helper()
	if after, ok := strings.CutPrefix(line, "+"); ok {
		d, err := time.ParseDuration(after)
		if err != nil {
			p.t.Fatal(err)
		}
		p.now = p.now.Add(d)
		return
	}
	command, want, _ := strings.Cut(line, ":")
	words := strings.Fields(command)
	check := func(got string) {
		p.t.Helper()
		if want = strings.TrimSpace(want); got != want {
			p.t.Errorf("%s: after %s, %s: %q, want %q", p.name, p.now.Sub(began), command, got, want)
		}
	}
	switch verb := words[0]; verb {
	case "=":
		want = strings.TrimPrefix(line, "=")
		command = "verdict"
		check(p.verdict())
	case "read", "quick":
		p.n.ObserveGPUs(p.now, readings(p.t, strings.TrimPrefix(line, verb)), verb == "read")
	case "error":
		p.n.ObserveError(p.now, map[string]error{
			"unresponsive": nvml.ErrUnresponsive, "nodriver": nvml.ErrNoDriver, "replaced": nvml.ErrReplaced, "odd": errors.New("odd"),
		}[words[1]])
	case "bus":
		p.bus(words[1:])
	case "restart":
		p.restart(words[1])
	case "ack":
		p.n.Acknowledge(p.now)
	case "toreset", "recovered", "xids", "relevant":
		check(p.answer(verb, words[1]))
	case "xid", "logged", "confirm", "event":
		p.event(verb, words[1:])
	default:
		p.gpu(verb, words[1:])
	}
}

// answer is what the node says of a GPU, or of all of them for a setting.
func (p *script) answer(verb, of string) string {
	var out []string
	switch g := p.n.GPU(nvml.UUID("GPU-" + of)); verb {
	case "toreset":
		for uuid := range p.n.ToReset(p.now, config.HealthReset(of)) {
			out = append(out, strings.TrimPrefix(string(uuid), "GPU-"))
		}
		slices.Sort(out)
	case "recovered":
		_, is := g.RecoveredFrom(p.now)
		out = append(out, strconv.FormatBool(is))
	default:
		all := p.n.Xids(g)
		if verb == "relevant" {
			all = p.n.RelevantXids(g)
		}
		for _, r := range all {
			out = append(out, fmt.Sprintf("%dx%d", r.Xid.Number, r.Count))
		}
	}
	return strings.Join(out, " ")
}

func (p *script) event(verb string, words []string) {
	e := nvml.Event{Kind: nvml.EventXid, GPU: nvml.UUID("GPU-" + words[0]), GI: nvml.WholeGPU, CI: nvml.WholeGPU}
	if verb == "event" {
		e.Kind = map[string]nvml.EventKind{
			"ecc": nvml.EventECC, "poison": nvml.EventFatalPoison, "retired": nvml.EventRetired, "retire-failed": nvml.EventRetireFailed,
		}[words[1]]
	} else {
		e.Xid = uint64(number(p.t, words[1]))
	}
	for _, w := range words[2:] {
		if gi, ok := strings.CutPrefix(w, "gi="); ok {
			e.GI, e.CI = number(p.t, gi), 0
		}
	}
	switch verb {
	case "logged":
		p.n.ObserveLogged(p.now, e)
	case "confirm":
		p.n.ConfirmLogged(p.now, e)
	default:
		p.n.ObserveEvent(p.now, e)
	}
}

func (p *script) gpu(verb string, words []string) {
	p.t.Helper()
	g := p.n.GPU(nvml.UUID("GPU-" + words[0]))
	switch verb {
	case "program":
		g.NoteProgramError(p.now, types.UID(words[1]))
	case "change":
		g.BeginChange()
	case "changed":
		g.EndChange(p.now)
	case "mig":
		g.AwaitMIGMode()
	case "arch":
		g.NoteArchitecture(nvml.ComputeCapability{Major: number(p.t, words[1])})
	case "reset":
		g.BeginReset(p.now)
	case "cancel":
		g.CancelReset()
	case "done":
		g.EndReset(p.now)
	default:
		p.t.Fatalf("%s: no command %s", p.name, verb)
	}
}

func (p *script) bus(words []string) {
	var all []nvml.BusGPU
	for _, w := range words {
		index, driver, _ := strings.Cut(w, "/")
		all = append(all, nvml.BusGPU{PCI: well(number(p.t, index)).PCI, Driver: driver})
	}
	p.n.ObserveBus(all, true)
}

func (p *script) restart(boot string) {
	p.t.Helper()
	data, err := json.Marshal(p.n.Record("boot-1", ""))
	if err != nil {
		p.t.Fatal(err)
	}
	r, err := verdict.ParseRecord(data)
	if err != nil {
		p.t.Fatal(err)
	}
	p.n = verdict.New(p.s)
	p.n.Recall(r, boot)
}

// verdict is "healthy", "no GPU", "not known", or what is wrong, as "0 RowRemapPending/ResetGPU; 1 XidCritical/RebootNode[1 2] critical".
func (p *script) verdict() string {
	v, known := p.n.Judge(p.now)
	if !known {
		return "not known"
	}
	var out []string
	for _, g := range v.Unhealthy {
		name := strings.TrimPrefix(string(g.UUID()), "GPU-")
		if name == "" {
			name = g.PCI()
		}
		for _, f := range g.Findings() {
			name += fmt.Sprintf(" %s/%s", f.Reason, f.Action)
			if f.Instances != nil {
				name += fmt.Sprint(f.Instances)
			}
		}
		out = append(out, name)
	}
	text := strings.Join(out, "; ")
	switch {
	case v.NoGPU:
		text = "no GPU"
	case v.Unknown != "" && v.Status == corev1.ConditionUnknown:
		text = "unknown: " + string(v.Reason)
	case v.Hangs:
		text += " hangs/" + string(v.Action)
	case v.Unknown != "":
		text += " and not known now"
	case len(out) == 0:
		text = "healthy"
	}
	if critical, _ := v.Critical(); critical {
		text += " critical"
	}
	return strings.TrimSpace(text)
}

// readings reads "0 row-pending, 1 lost".
func readings(t *testing.T, text string) []nvml.Health {
	t.Helper()
	var all []nvml.Health
	for one := range strings.SplitSeq(text, ",") {
		words := strings.Fields(one)
		if len(words) == 0 {
			continue
		}
		h := well(number(t, words[0]))
		for _, w := range words[1:] {
			reading(t, &h, w)
		}
		all = append(all, h)
	}
	return all
}

func reading(t *testing.T, h *nvml.Health, word string) {
	t.Helper()
	name, value, has := strings.Cut(word, "=")
	n := 0
	if has {
		n = number(t, value)
	}
	sets := map[string]func(){
		"lost":         func() { h.Lost = true },
		"nameless":     func() { h.UUID = "" },
		"placeless":    func() { h.PCI = "" },
		"index":        func() { h.Index = n },
		"uuid":         func() { h.UUID = nvml.UUID(fmt.Sprintf("GPU-%d", n)) },
		"row-pending":  func() { h.Rows.Pending = nvml.Answered(true) },
		"row-ok":       func() { h.Rows.Pending = nvml.Answered(false) },
		"row-failed":   func() { h.Rows.Failed = nvml.Answered(true) },
		"row-fine":     func() { h.Rows.Failed = nvml.Answered(false) },
		"action":       func() { h.Action = nvml.Answered(nvml.RecoveryAction(n)) },
		"no-action":    func() { h.Action = nvml.Reading[nvml.RecoveryAction]{} },
		"errors":       func() { h.ECC.UncorrectedVolatile = nvml.Answered(uint64(n)) },
		"corrected":    func() { h.ECC.CorrectedVolatile = nvml.Answered(uint64(n)) },
		"repair":       func() { h.RepairPending = nvml.Answered(true) },
		"repaired":     func() { h.RepairPending = nvml.Answered(false) },
		"unrepairable": func() { h.Unrepairable = nvml.Answered(true) },
		"sram":         func() { h.SRAMThreshold = nvml.Answered(true) },
		"pages":        func() { h.Pages.Pending = nvml.Answered(true) },
		"needs-reset":  func() { h.NeedsReset = nvml.Answered(true) },
		"needs-drain":  func() { h.NeedsDrain = nvml.Answered(true) },
		"ecc-mode":     func() { h.ECCMode = nvml.Answered(nvml.Mode{Pending: true}) },
		"mig-mode":     func() { h.MIGMode = nvml.Answered(nvml.Mode{Pending: true}) },
		"mig-on":       func() { h.MIGMode = nvml.Answered(nvml.Mode{Current: true, Pending: true}) },
		"fabric":       func() { h.Fabric = nvml.Answered(nvml.Fabric{State: nvml.FabricState(n), Healthy: true}) },
		"fabric-ill":   func() { h.Fabric = nvml.Answered(nvml.Fabric{State: nvml.FabricState(n)}) },
		"fabric-fails": func() { h.Fabric = nvml.Answered(nvml.Fabric{State: nvml.FabricState(n), Failed: true, Healthy: true}) },
	}
	set, known := sets[name]
	if !known {
		t.Fatalf("no reading %q", word)
	}
	set()
}

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}
