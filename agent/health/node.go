package health

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/nvml"
)

const (
	// patience is how long the driver may be silent until that is told. A read takes milliseconds.
	patience = 4 * time.Second
	// silentTooLong is how long it may be until that is a fault.
	silentTooLong = time.Minute
	// hangTime is how long after an Xid by which drivers hang a silence follows from it.
	hangTime = 10 * time.Minute
	// mostGPUs bounds what is remembered: NVIDIA's largest systems of one operating system image have 16, and some may have been replaced.
	mostGPUs = 64
)

// node is what is known of all GPUs. It decides, and calls nothing.
type node struct {
	xids xids
	gpus []*gpu

	looked bool // the driver has told at least once since the process began
	began  time.Time
	silent time.Time // since when the driver has not answered; zero if it has
	why    error     // why it did not
	away   bool      // no driver was loaded when it was last asked
	hung   time.Time // last Xid by which drivers hang

	onBus    []nvml.BusGPU
	busKnown bool
	blind    bool // no events come
}

// news takes over what the driver has reported, and gives the GPU that it is about, which may be none, and what is known of the Xid.
func (n *node) news(now time.Time, e nvml.Event) (*gpu, Xid, *occurrence) {
	n.blind = e.Kind == nvml.EventSilence || n.blind && e.Kind != nvml.EventWatching
	g := n.byUUID(e.GPU)
	if g == nil && e.GPU != "" && len(n.gpus) < mostGPUs {
		g = newGPU(e.GPU, "", -1)
		n.gpus = append(n.gpus, g)
	}
	if g == nil {
		return nil, Xid{}, nil
	}
	if e.Kind != nvml.EventXid {
		g.event(now, e.Kind)
		g.settle(now, n.xids, false)
		return g, Xid{}, nil
	}
	if slices.Contains(hangs, e.Xid) {
		n.hung = now
	}
	x := n.xids.of(e.Xid, g.old)
	o := g.xid(now, x, e.GI, e.CI)
	g.settle(now, n.xids, false)
	return g, x, o
}

func (n *node) byUUID(uuid nvml.UUID) *gpu {
	at := slices.IndexFunc(n.gpus, func(g *gpu) bool { return g.uuid == uuid && uuid != "" })
	if at < 0 {
		return nil
	}
	return n.gpus[at]
}

// bus takes over what is on the PCI bus.
func (n *node) bus(onBus []nvml.BusGPU, known bool) { n.onBus, n.busKnown = onBus, known }

// look takes over what the driver tells of all GPUs.
func (n *node) look(now time.Time, all []nvml.Health, thorough bool) {
	reloaded := n.away
	n.looked, n.silent, n.why, n.away = true, time.Time{}, nil, false
	told := map[*gpu]bool{}
	for _, h := range all {
		if g := n.whose(h, all); g != nil {
			told[g] = true
			g.look(now, h, thorough, reloaded)
		}
	}
	n.absent(told)
	for _, g := range n.gpus {
		g.settle(now, n.xids, true)
	}
}

// whose finds the GPU that a reading is about, or makes it. One that is lost may not tell which it is.
func (n *node) whose(h nvml.Health, all []nvml.Health) *gpu {
	if g := n.byUUID(h.UUID); g != nil {
		return g
	}
	if h.UUID == "" {
		for _, g := range n.gpus {
			elsewhere := slices.ContainsFunc(all, func(o nvml.Health) bool { return o.UUID == g.uuid && g.uuid != "" })
			if g.index == h.Index && !elsewhere {
				return g
			}
		}
	}
	if len(n.gpus) >= mostGPUs {
		return nil
	}
	g := newGPU(h.UUID, h.PCI, h.Index)
	n.gpus = append(n.gpus, g)
	return g
}

// absent finds the GPUs that the driver does not tell of: those that it once has told of, and those that the bus has. One whose place
// another has taken, or that is lent to a virtual machine, is gone for good.
func (n *node) absent(told map[*gpu]bool) {
	taken := map[string]bool{}
	nameless := false // one that is told of has no place that is known: it may be any of the bus
	for g := range told {
		taken[g.pci] = g.pci != ""
		nameless = nameless || g.pci == ""
	}
	n.gpus = slices.DeleteFunc(n.gpus, func(g *gpu) bool {
		at := n.place(g.pci)
		return !told[g] && (taken[g.pci] || g.pci == "" && g.uuid == "" || at != nil && lent(*at))
	})
	if !nameless {
		n.addFromBus()
	}
	for _, g := range n.gpus {
		g.missing = !told[g]
		if g.missing {
			g.lost, g.onBus = false, !n.busKnown || n.place(g.pci) != nil
			g.where = n.counted(g, len(told))
		}
	}
	slices.SortStableFunc(n.gpus, func(a, b *gpu) int { return cmp.Compare(a.order(), b.order()) })
}

// counted says of a missing GPU how many there are, and how many answer.
func (n *node) counted(g *gpu, answer int) string {
	switch {
	case !n.busKnown:
		return fmt.Sprintf("; %d answer", answer)
	case g.onBus:
		return fmt.Sprintf("; %d are on the PCI bus, and %d answer", len(n.onBus), answer)
	default:
		return fmt.Sprintf(", nor is it on the PCI bus any more; %d are, and %d answer", len(n.onBus), answer)
	}
}

// order is the GPU's place in lists: those without an index come last.
func (g *gpu) order() int {
	if g.index < 0 {
		return mostGPUs
	}
	return g.index
}

// addFromBus adds what the bus has and nobody has told of yet.
func (n *node) addFromBus() {
	for _, b := range n.onBus {
		known := slices.ContainsFunc(n.gpus, func(g *gpu) bool { return g.pci == b.PCI })
		if !known && !lent(b) && len(n.gpus) < mostGPUs {
			n.gpus = append(n.gpus, newGPU("", b.PCI, -1))
		}
	}
}

// place is what the bus has at an address; nil for nothing.
func (n *node) place(pci string) *nvml.BusGPU {
	at := slices.IndexFunc(n.onBus, func(b nvml.BusGPU) bool { return b.PCI == pci })
	if at < 0 {
		return nil
	}
	return &n.onBus[at]
}

// lent reports whether a GPU is in the hands of another driver than NVIDIA's, as one that a virtual machine has.
func lent(b nvml.BusGPU) bool { return b.Driver != "" && b.Driver != "nvidia" }

// unseen notes that the driver has told nothing.
func (n *node) unseen(now time.Time, err error) {
	n.why = err
	n.away = n.away || errors.Is(err, nvml.ErrNoDriver) || errors.Is(err, nvml.ErrReplaced)
	if n.silent.IsZero() {
		n.silent = now
	}
}

// acknowledge drops GPUs that are gone and what Xids have left, as of the time until which a person has looked.
func (n *node) acknowledge(until time.Time) {
	n.gpus = slices.DeleteFunc(n.gpus, func(g *gpu) bool {
		since := time.Time{}
		if at := slices.IndexFunc(g.findings, func(f finding) bool { return f.reason == config.ReasonGPUMissing }); at >= 0 {
			since = g.findings[at].since
		}
		return g.missing && !g.onBus && !since.IsZero() && !since.After(until)
	})
	for _, g := range n.gpus {
		g.acknowledge(until)
	}
}

// verdict is what is to be told of all GPUs.
type verdict struct {
	status corev1.ConditionStatus
	reason config.Reason
	action Action
	bad    []*gpu // the worst first
	// unknown is why nothing is known now, besides what was found before; empty if all is known.
	unknown string
}

// busy reports whether a change of ours explains a silence.
func (n *node) busy(now time.Time) bool {
	return slices.ContainsFunc(n.gpus, func(g *gpu) bool { return g.busy(now) })
}

// judge decides. It is false as long as too little is known to say anything.
func (n *node) judge(now time.Time) (verdict, bool) {
	v := verdict{status: corev1.ConditionFalse, reason: config.ReasonGPUsHealthy, action: ActionNone}
	for _, g := range n.gpus {
		if len(g.findings) > 0 {
			v.bad = append(v.bad, g)
		}
	}
	slices.SortStableFunc(v.bad, func(a, b *gpu) int {
		return cmp.Compare(rank(worst(a.findings).reason), rank(worst(b.findings).reason))
	})
	if len(v.bad) > 0 {
		f := worst(v.bad[0].findings)
		v.status, v.reason, v.action = corev1.ConditionTrue, f.reason, f.action
	}
	if n.silent.IsZero() {
		if len(v.bad) == 0 && n.looked && len(n.gpus) == 0 {
			v.reason = config.ReasonNoGPU
		}
		return v, n.looked
	}
	return n.judgeSilence(now, v)
}

// judgeSilence decides what a driver that does not tell leaves to say.
func (n *node) judgeSilence(now time.Time, v verdict) (verdict, bool) {
	lasted := now.Sub(n.silent)
	switch {
	case errors.Is(n.why, nvml.ErrNoDriver) || errors.Is(n.why, nvml.ErrReplaced):
		if n.busKnown && len(n.onBus) == 0 && len(v.bad) == 0 {
			v.reason = config.ReasonNoGPU
			return v, true
		}
		why := fmt.Sprintf("NVIDIA's driver is not loaded: %v", n.why)
		if len(n.onBus) > 0 {
			why = fmt.Sprintf("the PCI bus has %s, and no driver that answers for them: %v", counted(len(n.onBus), "GPU"), n.why)
		}
		return v.unsure(config.ReasonDriverNotLoaded, why), lasted >= patience
	case errors.Is(n.why, nvml.ErrUnresponsive):
		return n.judgeHang(now, lasted, v)
	default:
		return v.unsure(config.ReasonHealthUnknown, fmt.Sprintf("the GPUs cannot be looked at: %v", n.why)), lasted >= patience
	}
}

// judgeHang decides what a driver that does not answer leaves to say.
func (n *node) judgeHang(now time.Time, lasted time.Duration, v verdict) (verdict, bool) {
	why := fmt.Sprintf("the driver does not answer since %s: %v", moment(n.silent), n.why)
	expected := !n.hung.IsZero() && now.Sub(n.hung) < hangTime
	switch {
	case n.busy(now) && lasted < silentTooLong: // a change of ours takes the driver's locks
		return v, n.looked
	case !expected && lasted < silentTooLong:
		// Cold GPUs take their time when the driver is first asked.
		return v.unsure(config.ReasonDriverUnresponsive, why), lasted >= patience && (n.looked || lasted >= settleTime)
	}
	v.unknown = why
	if len(v.bad) == 0 || rank(v.reason) >= rank(config.ReasonXidCritical) {
		v.status, v.reason, v.action = corev1.ConditionTrue, config.ReasonDriverUnresponsive, ActionRebootNode
	}
	return v, lasted >= patience/2
}

// unsure is the verdict where nothing is known now: Unknown, unless something was found before.
func (v verdict) unsure(reason config.Reason, why string) verdict {
	v.unknown = why
	if len(v.bad) == 0 {
		v.status, v.reason = corev1.ConditionUnknown, reason
	}
	return v
}

// gist is what a verdict says, without what changes by itself: another one is worth a write.
func (v verdict) gist() string {
	var parts []string
	for _, g := range v.bad {
		var found []string
		for _, f := range g.findings {
			found = append(found, fmt.Sprintf("%s%v", f.reason, f.instances))
		}
		parts = append(parts, g.name()+":"+strings.Join(found, ","))
	}
	return fmt.Sprintf("%s %s %s %t", v.status, v.reason, strings.Join(parts, " "), v.unknown != "")
}

func moment(t time.Time) string { return t.UTC().Format("15:04:05Z") }

func counted(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
