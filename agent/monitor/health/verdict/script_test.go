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

func (s *script) line(line string) {
	s.t.Helper()
	if after, ok := strings.CutPrefix(line, "+"); ok {
		d, err := time.ParseDuration(after)
		if err != nil {
			s.t.Fatal(err)
		}
		s.now = s.now.Add(d)
		return
	}
	command, want, _ := strings.Cut(line, ":")
	words := strings.Fields(command)
	check := func(got string) {
		s.t.Helper()
		if want = strings.TrimSpace(want); got != want {
			s.t.Errorf("%s: after %s, %s: %q, want %q", s.name, s.now.Sub(began), command, got, want)
		}
	}
	switch verb := words[0]; verb {
	case "=":
		want = strings.TrimPrefix(line, "=")
		command = "verdict"
		check(s.verdict())
	case "read", "quick":
		s.n.ObserveGPUs(s.now, readings(s.t, strings.TrimPrefix(line, verb)), verb == "read")
	case "error":
		s.n.ObserveError(s.now, map[string]error{
			"unresponsive": nvml.ErrUnresponsive, "nodriver": nvml.ErrNoDriver, "replaced": nvml.ErrReplaced, "odd": errors.New("odd"),
		}[words[1]])
	case "bus":
		s.bus(words[1:])
	case "restart":
		s.restart(words[1])
	case "ack":
		s.n.Acknowledge(s.now)
	case "toreset", "recovered", "xids", "relevant":
		check(s.answer(verb, words[1]))
	case "xid", "logged", "confirm", "event":
		s.event(verb, words[1:])
	default:
		s.gpu(verb, words[1:])
	}
}

// answer is what the node says of a GPU, or of all of them for a setting.
func (s *script) answer(verb, of string) string {
	var out []string
	switch g := s.n.GPU(nvml.UUID("GPU-" + of)); verb {
	case "toreset":
		for uuid := range s.n.ToReset(s.now, config.HealthReset(of)) {
			out = append(out, strings.TrimPrefix(string(uuid), "GPU-"))
		}
		slices.Sort(out)
	case "recovered":
		_, is := g.RecoveredFrom(s.now)
		out = append(out, strconv.FormatBool(is))
	default:
		all := s.n.Xids(g)
		if verb == "relevant" {
			all = s.n.RelevantXids(g)
		}
		for _, r := range all {
			out = append(out, fmt.Sprintf("%dx%d", r.Xid.Number, r.Count))
		}
	}
	return strings.Join(out, " ")
}

func (s *script) event(verb string, words []string) {
	e := nvml.Event{Kind: nvml.EventXid, GPU: nvml.UUID("GPU-" + words[0]), GI: nvml.WholeGPU, CI: nvml.WholeGPU}
	if verb == "event" {
		e.Kind = map[string]nvml.EventKind{
			"ecc": nvml.EventECC, "poison": nvml.EventFatalPoison, "retired": nvml.EventRetired, "retire-failed": nvml.EventRetireFailed,
		}[words[1]]
	} else {
		e.Xid = uint64(number(s.t, words[1]))
	}
	for _, w := range words[2:] {
		if gi, ok := strings.CutPrefix(w, "gi="); ok {
			e.GI, e.CI = number(s.t, gi), 0
		}
	}
	switch verb {
	case "logged":
		s.n.ObserveLogged(s.now, e)
	case "confirm":
		s.n.ConfirmLogged(s.now, e)
	default:
		s.n.ObserveEvent(s.now, e)
	}
}

func (s *script) gpu(verb string, words []string) {
	s.t.Helper()
	g := s.n.GPU(nvml.UUID("GPU-" + words[0]))
	switch verb {
	case "program":
		g.NoteProgramError(s.now, types.UID(words[1]))
	case "change":
		g.BeginChange()
	case "changed":
		g.EndChange(s.now)
	case "mig":
		g.AwaitMIGMode()
	case "arch":
		g.NoteArchitecture(nvml.ComputeCapability{Major: number(s.t, words[1])})
	case "reset":
		g.BeginReset(s.now)
	case "cancel":
		g.CancelReset()
	case "done":
		g.EndReset(s.now)
	default:
		s.t.Fatalf("%s: no command %s", s.name, verb)
	}
}

func (s *script) bus(words []string) {
	var all []nvml.BusGPU
	for _, w := range words {
		index, driver, _ := strings.Cut(w, "/")
		all = append(all, nvml.BusGPU{PCI: well(number(s.t, index)).PCI, Driver: driver})
	}
	s.n.ObserveBus(all, true)
}

func (s *script) restart(boot string) {
	s.t.Helper()
	data, err := json.Marshal(s.n.Record("boot-1", ""))
	if err != nil {
		s.t.Fatal(err)
	}
	r, err := verdict.ParseRecord(data)
	if err != nil {
		s.t.Fatal(err)
	}
	s.n = verdict.New(s.s)
	s.n.Recall(r, boot)
}

// verdict is "healthy", "no GPU", "not known", or what is wrong, as "0 RowRemapPending/ResetGPU; 1 XidCritical/RebootNode[1 2] critical".
func (s *script) verdict() string {
	v, known := s.n.Judge(s.now)
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
