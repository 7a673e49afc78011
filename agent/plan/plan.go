// Package plan lists the steps from what was observed to what is desired. Package agent/decide finds what is desired,
// and whether a step may run now.
//
// It is pure: it depends on its arguments alone, without a Kubernetes client, NVIDIA's library, a clock or files. The agent performs the first step
// of a plan, observes again, and plans again. So a plan must be the same whether this process has done the earlier steps or a killed one has.
package plan

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// Observed is what one observation of the node has found.
type Observed struct {
	GPUs     []nvml.GPU
	Pods     []Pod // pods of the node that hold a GPU or a part of one, or may do so
	Operands []Operand
	Pauses   []Pause // operands that a label of the node deploys, in the order in which they are paused
	Clients  []Pod   // pods without a GPU of their own that keep the library open, and stay away behind the fence
	Units    []Unit  // units of the host that keep GPUs open, in the order in which they are stopped
	Plugin   Plugin  // the device plugin's config
	Journal  Journal
	Orphaned bool // a change has left something on the node, and there is no journal
	// Closable has the devices of each GPU that the agent can close to claims, as NVIDIA's DRA driver names them. It is empty where the agent only
	// fences nodes.
	Closable map[nvml.UUID][]string
	Closed   []string // devices that are closed to claims for the change
	Fenced   bool     // the agent's taint keeps new pods away
	Cordoned bool     // a cordon keeps new pods away, but for those that tolerate it
	Breached bool     // another user or tool has lifted the agent's cordon, and the settings have the agent put it back
	Startup  bool     // the taint of a node that has just been registered keeps pods away until the capacity is verified
	Returned bool     // something has put that taint back, so the agent leaves it for some time
	Undo     bool     // the plan is an undo
	ByClaims bool     // NVIDIA's DRA driver advertises the GPUs, to operands too
	Reboots  Reboots
	CDI      []string // CDI specs that describe other GPU instances than there are
	Keys     bool     // labels or taints of the node differ from those of the profile
	Sick     Sick
	Slot     Slot
	Capacity Capacity
}

// Sick are the GPUs that need a reset because they are not well, whatever the request.
type Sick map[nvml.UUID]bool

// Slot is the node's permission to be unavailable. Its pool has a limited number of slots.
type Slot struct {
	Needed bool // a step that removes something needs a slot
	Spared bool // but only if pods have to leave: the change restores what the node had before and has lost
	Drains bool // but only if pods have to leave: the pool's limit is for those changes alone
	Has    bool // the node has a slot
}

// Journal is what the planner needs to know of the node's journal.
type Journal struct {
	Pending    bool               // there is a journal
	Cordoned   bool               // the change has fenced the node, and not released it
	Closes     bool               // the change closes devices to claims before it fences the node
	Other      bool               // it is for another target than the planned one, or for that one before a user edited it
	Cuts       map[nvml.UUID]bool // GPUs with their former layout in the journal
	Persistent map[nvml.UUID]bool // GPUs among them that were in persistence mode
	Verified   bool               // the capacity agreed with the hardware when the change began, and must do so again
	Paused     map[string]bool    // labels of operands with their former value in the journal
	Stopped    map[string]bool    // units that ran before the change
	MPS        bool               // the plugin's config shared GPUs by MPS before the change
}

// Pod is a pod that may have to leave.
type Pod struct {
	Namespace, Name, UID string
	Devices              []string  // UUIDs of the GPUs and MIG devices that kubelet has allocated to it
	Replicas             []Replica // the same devices, as kubelet names them
	Known                bool      // both are certain; otherwise the pod counts as holding every device
	Withdrawn            bool      // kubelet allocates the pod's devices to others, by another id
	Ending               bool      // its containers are being stopped
	Claims               []string  // its resource claims of GPUs
	Driver               bool      // it is NVIDIA's DRA driver
	Client               bool      // it is no operand, and keeps the driver's library open
	PassesCordon         bool      // a pod in its place would tolerate a cordon, as those of DaemonSets do, and not the fence's taint
	Replaced             bool      // a pod in its place would need claims of its own, which get none of its devices while these are closed
}

// Operand is a pod that advertises the node's GPUs: of the device plugin, or of NVIDIA's DRA driver.
type Operand struct {
	Pod
	Stale   bool // the journal says that it read the layout of the GPUs before the change
	Returns bool // it tolerates the fence, so that evicting it does not keep it away
	Stays   bool // it does not keep the library open, so that the driver resets GPUs while it runs
	ByLabel bool // it is one of Pauses
	// Outdated: it does not advertise the current GPUs. It has run since before a GPU recovered, or has long advertised devices that are gone.
	Outdated bool
	// Early: it was there when the last call on a GPU ended, and may have started within the call. The journal need not have it.
	Early bool
	// Late: it has run for half of the wait for capacity, and kubelet does not have its devices.
	Late bool
}

// Pause is an operand that runs if a label of the node says so, and ends when the label says otherwise. Operands that
// a user or another tool has paused or switched off are not among them.
type Pause struct {
	Label  string
	Plugin bool  // it is the device plugin
	Paused bool  // the agent has paused it; otherwise it is meant to run
	Pods   []Pod // its pods on the node
}

// Unit is a systemd unit of the host that runs, or that ran before the change by the journal.
type Unit struct {
	Name     string
	Active   bool
	Ending   bool // it is active and about to stop
	Starting bool // it is about to be active, or systemd restarts it again and again
	Holds    bool // one of its processes computes on a device that the plan removes
}

// Capacity is how far the node's capacity agrees with the hardware.
type Capacity struct {
	Agreed int // observations in a row in which hardware, kubelet and node agreed
}

// VerifiedAfter is how many observations in a row must agree before a change counts as done: devices may vanish again right after a plugin's first
// registration.
const VerifiedAfter = 2

// Target is what one GPU shall become.
type Target struct {
	nvml.Request
	// Exact, if set, is the geometry with its places, for an undo or after a reboot; Request.Devices is then not used.
	Exact nvml.Geometry
	Undo  bool // Exact counts even if it is empty
	// ModeOnly: the instances are the business of another program, which makes and destroys them. The plan changes the MIG mode alone, and that only where
	// it takes a reset: otherwise that program turns it on and off itself.
	ModeOnly bool
}

// Desired is what a node shall become.
type Desired struct {
	GPUs    Targets
	Sharing *Sharing // nil leaves the device plugin's config unchanged
	Config  string   // name of the plugin's config, for users to read
	Later   bool     // the agent can give the device plugin a config only once it runs
}

// Targets are what the named GPUs shall become. The plan does not change other GPUs.
type Targets map[nvml.UUID]Target

// Refused says that a GPU cannot become what is desired. The plan has disturbed nothing.
type Refused struct {
	Index int
	GPU   nvml.UUID
	Err   error
}

// Error names the GPU and the reason, after what would be possible.
func (r *Refused) Error() string {
	if impossible, is := errors.AsType[*nvml.Impossible](r.Err); is && len(impossible.Possible) > 0 {
		return fmt.Sprintf("request %s on GPU %d: %s", strings.Join(impossible.Possible, ", or "), r.Index, impossible.Reason)
	}
	return fmt.Sprintf("GPU %d: %v", r.Index, r.Err)
}

// Unwrap gives the reason, usually an *nvml.Impossible.
func (r *Refused) Unwrap() error { return r.Err }

// Refuse returns why there is no plan: a *Refused if a GPU cannot become what is desired. It reads three parts of Observed: GPUs, Sick and Reboots.
func Refuse(seen Observed, want Desired) error {
	_, err := seen.changes(want)
	return err
}

// Make lists the steps from what was observed to what is desired. No steps means that the node is as desired, that this is verified, and that the
// agent has nothing to restore. It returns the same error as Refuse.
func Make(seen Observed, want Desired) ([]Step, error) {
	changes, err := seen.changes(want)
	if err != nil {
		return nil, err
	}
	// Without a request, the agent does not change other programs' CDI specs.
	if len(want.GPUs) == 0 && !seen.Journal.Pending {
		seen.CDI = nil
	}
	sharing := seen.sharing(want)
	parks := len(OnAtReboot(seen, want)) > 0
	switch {
	case len(changes) > 0 || seen.takes(want, sharing):
		return carryOut(seen, want, changes, sharing, parks), nil
	case parks && seen.parked():
		return append(askForReboot(seen), seen.Slot.release()...), nil
	case seen.Startup && (len(want.GPUs) > 0 || want.Sharing != nil || want.Later) && !seen.Journal.Pending:
		return open(seen, want, parks), nil
	case seen.Orphaned && !seen.Journal.Pending:
		seen.Journal.Pending = true
		return append([]Step{{Kind: Adopt}}, giveBack(seen, want, parks)...), nil
	default:
		return append(restartOutdated(&seen), giveBack(seen, want, parks)...), nil
	}
}

// open lists the steps that remove the startup taint when the GPUs and the config are as desired already. If kubelet has the capacity behind that
// taint, no fence has to replace the taint.
func open(seen Observed, want Desired, parks bool) []Step {
	if steps := openUnfenced(seen, want, parks); steps != nil {
		return steps
	}
	seen.Journal.Pending, seen.Fenced = true, !seen.ByClaims
	return append([]Step{{Kind: Fence, CordonOnly: seen.ByClaims}}, giveBack(seen, want, parks)...)
}

// openUnfenced returns nil if the node needs a fence.
func openUnfenced(seen Observed, want Desired, parks bool) []Step {
	outdated := slices.ContainsFunc(seen.Operands, func(o Operand) bool { return o.Outdated })
	if seen.Fenced || seen.Orphaned || want.Later || parks || outdated {
		return nil
	}
	var before, after []Step
	if seen.Capacity.Agreed < VerifiedAfter {
		before = append(before, Step{Kind: VerifyCapacity})
	}
	for _, s := range giveBack(seen, want, parks) {
		switch {
		case s.Kind == PublishNodeKeys:
			before = append(before, s)
		case s.Kind == ResumeOperands && s.Label == "" || s.Kind == ReleaseSlot:
			after = append(after, s)
		default: // as to verify a capacity that was not seen yet
			return nil
		}
	}
	return append(before, after...)
}

// NeedFresh reports whether the first of the steps needs an observation that reads the API server: the watches may be out of date. So does an empty
// plan: it ends the change, and the answer to the last write may have been wrong. Forward says that the change has touched a GPU or the device
// plugin's config, and is not an undo. Before that its window may close, and a watch that is behind may itself be the cause of an undo: both need a
// fresh observation. So does the last step on a GPU: no later observation of the change notes in the journal which device plugin has started since.
func NeedFresh(steps []Step, forward bool) bool {
	if len(steps) == 0 {
		return true
	}
	has := steps[0].Traits()
	if has.OnlyAdds {
		return !forward || !slices.ContainsFunc(steps[1:], func(s Step) bool { return s.Traits().TouchesGPU() })
	}
	return !has.OnlyObserves && !has.Restores
}

// restartOutdated lists the restart of device plugins that do not advertise the current GPUs. In the middle of a change the agent restarts each
// plugin anyway, by the journal.
func restartOutdated(seen *Observed) []Step {
	var pods []Pod
	for _, o := range seen.Operands {
		if o.Outdated {
			pods = append(pods, o.Pod)
		}
	}
	if len(pods) == 0 || seen.Journal.Pending {
		return nil
	}
	seen.Capacity.Agreed = 0
	return []Step{{Kind: RestartPlugin, Pods: pods}}
}

// carryOut lists all steps of a change.
func carryOut(seen Observed, want Desired, changes []change, sharing sharingChange, parks bool) []Step {
	d := disruptionOf(seen, want, changes, sharing)
	steps := prepare(seen, changes, d)
	seen.Slot.Has = seen.Slot.Has || d.needsSlot(seen)
	seen.Fenced = seen.Fenced && !d.readmits(seen) || d.fences(seen) && d.taints(seen)
	seen.Journal.Pending = true
	if len(changes) > 0 {
		steps = append(steps, endMPS(&seen, want, sharing)...)
	}
	steps = append(steps, hardware(seen, changes)...)
	return append(steps, giveBack(foreseen(seen, changes, d), want, parks)...)
}

// parked reports whether the agent has released the node until its reboot. A change without a fence has no cordon either; until it is parked, its
// journal holds the operands and units that it has paused and stopped.
func (seen Observed) parked() bool {
	j := seen.Journal
	return j.Pending && !j.Cordoned && !j.Closes && len(j.Paused) == 0 && len(j.Stopped) == 0
}

// Taken is what a change removes from one GPU.
type Taken struct {
	GPU     nvml.UUID
	Devices []string // UUIDs as kubelet knows them
	Whole   bool     // the GPU's mode changes, so all of it goes
	Compute bool     // no device goes, but processes that compute on the GPU cannot stay
}

// Takes lists what the plan removes, GPU by GPU; nothing if the desired state is impossible. The caller has to observe the holders of these devices
// before the plan counts.
func Takes(seen Observed, want Desired) []Taken {
	changes, err := seen.changes(want)
	if err != nil {
		return nil
	}
	var out []Taken
	for _, c := range changes {
		if c.takesAway {
			out = append(out, Taken{GPU: c.gpu, Devices: c.taken, Whole: c.changesMode})
		}
	}
	if seen.sharing(want).exclusive {
		for _, gpu := range seen.GPUs {
			if !slices.ContainsFunc(out, func(t Taken) bool { return t.GPU == gpu.UUID }) && !gpu.Lost {
				out = append(out, Taken{GPU: gpu.UUID, Devices: []string{string(gpu.UUID)}, Compute: true})
			}
		}
	}
	return out
}

// changes compares the named GPUs with their targets.
func (seen Observed) changes(want Desired) ([]change, error) {
	var out []change
	for _, gpu := range seen.GPUs {
		target, named := want.GPUs[gpu.UUID]
		sick := seen.Sick[gpu.UUID] && !gpu.Lost
		if !named && !sick {
			continue
		}
		if !named {
			target = currentTarget(gpu)
		}
		compare := seen.changeOf
		if sick {
			compare = seen.healed
		}
		c, err := compare(gpu, target)
		if err != nil {
			return nil, &Refused{Index: gpu.Index, GPU: gpu.UUID, Err: err}
		}
		if len(c.steps) > 0 || c.waits {
			out = append(out, c)
		}
	}
	return out, nil
}

// prepare lists the steps before the hardware is touched.
func prepare(seen Observed, changes []change, d disruption) []Step {
	var steps []Step
	if d.needsSlot(seen) {
		steps = append(steps, Step{Kind: AcquireSlot})
	}
	if len(d.closes) > 0 {
		steps = append(steps, closeFirst(seen, changes, &d)...)
	}
	switch {
	case d.readmits(seen):
		steps = append(steps, Step{Kind: ResumeOperands, ByClaims: true})
	case d.fences(seen):
		steps = append(steps, Step{Kind: Fence, CordonOnly: !d.taints(seen)})
	case incomplete(seen, changes, d):
		steps = append(steps, Step{Kind: Record})
	}
	if len(d.holders) > 0 {
		steps = append(steps, Step{Kind: Evict, Pods: d.holders})
	}
	if d.takesAway {
		steps = append(steps, pause(seen)...)
	}
	// The plugin and other clients keep the library open, and the driver resets no GPU that a client has open.
	away := [][]Pod{slices.Concat(pausable(seen.Operands), seen.Clients)}
	if seen.ByClaims { // a client with claims ends only while the driver of its claims runs
		away = [][]Pod{seen.Clients, pausable(seen.Operands)}
	}
	for _, pods := range away {
		if d.changesMode && len(pods) > 0 {
			steps = append(steps, Step{Kind: PauseOperands, Pods: pods})
		}
	}
	for _, u := range d.stops {
		steps = append(steps, Step{Kind: StopUnits, Unit: u})
	}
	return steps
}

// closeFirst lists the steps that close the devices that go and evict their known holders, before the node is fenced. Behind the fence only pods with
// unknown devices then have to leave: they may be on the GPUs that stay open.
func closeFirst(seen Observed, changes []change, d *disruption) []Step {
	var steps []Step
	switch {
	case slices.ContainsFunc(d.closes, func(device string) bool { return !slices.Contains(seen.Closed, device) }):
		steps = append(steps, Step{Kind: Close, Devices: d.closes})
	case incomplete(seen, changes, *d):
		steps = append(steps, Step{Kind: Record})
	}
	var known, unknown []Pod
	for _, p := range d.holders {
		if p.Known {
			known = append(known, p)
		} else {
			unknown = append(unknown, p)
		}
	}
	d.holders = unknown
	return append(steps, Step{Kind: Evict, Pods: known})
}

// disruption is what the changes take from pods and from the host.
type disruption struct {
	takesAway, changesMode, heals bool
	touches                       bool // a GPU changes
	sharing                       sharingChange
	holders                       []Pod    // pods that have to leave
	stops                         []string // units that have to stop
	closes                        []string // devices that are closed to claims while the pods leave, before the node is fenced; none if it is fenced first
}

func disruptionOf(seen Observed, want Desired, changes []change, sharing sharingChange) disruption {
	d := disruption{sharing: sharing, touches: len(changes) > 0}
	taken := map[string]bool{}
	resets := false
	for _, c := range changes {
		d.takesAway = d.takesAway || c.takesAway
		d.changesMode = d.changesMode || c.changesMode
		resets = resets || c.resets()
		d.heals = d.heals || Has(c.steps, Heal)
		for _, device := range c.taken {
			taken[device] = true
		}
	}
	displaced := seen.displaced(want, sharing)
	for _, p := range seen.Pods {
		if d.takesAway && p.holds(taken) || slices.ContainsFunc(displaced, func(q Pod) bool { return p.same(q) }) {
			d.holders = append(d.holders, p)
		}
	}
	d.stops = unitsInTheWay(seen.Units, resets, d.takesAway)
	d.closes = d.closable(seen, changes)
	return d
}

// closable returns the devices of the GPUs that lose something, if closing these is enough while their pods leave: claims still get the node's other
// GPUs. It is not enough where all GPUs lose something, nor for a pod with a successor that would get the same devices. While no pod has to leave,
// there is nothing to wait for, and so no GPU that stays open for it.
func (d disruption) closable(seen Observed, changes []change) []string {
	if !d.fences(seen) || seen.Fenced || seen.Journal.Cordoned || seen.Startup || seen.Undo || d.sharing.is {
		return nil
	}
	known := slices.DeleteFunc(slices.Clone(d.holders), func(p Pod) bool { return !p.Known })
	if len(known) == 0 || slices.ContainsFunc(known, func(p Pod) bool { return !p.Replaced }) {
		return nil
	}
	var out []string
	stay := len(seen.Closable)
	for _, c := range changes {
		if !c.takesAway {
			continue
		}
		if len(seen.Closable[c.gpu]) == 0 {
			return nil
		}
		stay--
		out = append(out, seen.Closable[c.gpu]...)
	}
	if stay == 0 {
		return nil
	}
	slices.Sort(out)
	return out
}

// unitsInTheWay returns the running units that have to stop: the driver resets a GPU only if no process has it open, and destroys an instance only if
// no process computes on it.
func unitsInTheWay(units []Unit, resets, takesAway bool) []string {
	var out []string
	for _, u := range units {
		if u.Active && (resets || u.Holds && takesAway) {
			out = append(out, u.Name)
		}
	}
	return out
}

// fences reports whether the change needs the fence. Kubelet may allocate an idle device to a pod at any moment, so a change that removes any device
// needs the fence, held or not. It needs the fence even if a label stops the device plugin: once the plugin is back, kubelet allocates what the
// plugin advertises, before the agent has verified that. On a node that has just been registered every change needs the fence. The startup taint
// keeps the device plugin away, the agent needs the plugin to verify the capacity, and the fence replaces that taint.
func (d disruption) fences(seen Observed) bool {
	behind := seen.Fenced || seen.Journal.Cordoned && seen.Cordoned && !d.taints(seen)
	if seen.Journal.Pending && behind && !seen.Breached {
		return false
	}
	return seen.Startup || d.sharing.shrinks || d.takesAway || len(d.holders) > 0 || seen.ByClaims && seen.Journal.Cordoned && d.touches
}

// taints reports whether the fence needs its taint, which keeps away even pods that tolerate a cordon, as those of DaemonSets do. A device plugin has to stay
// away while its GPUs change. NVIDIA's DRA driver has to be able to start at any time: kubelet ends no pod with claims without it. So with that driver the
// fence has the taint only to keep away successors of pods that leave, or what keeps the library open.
func (d disruption) taints(seen Observed) bool {
	if !seen.ByClaims {
		return true
	}
	passes := func(p Pod) bool { return p.PassesCordon }
	return !seen.lacksDriver() && (slices.ContainsFunc(d.holders, passes) ||
		d.changesMode && (slices.ContainsFunc(seen.Clients, passes) || len(pausable(seen.Operands)) > 0))
}

// readmits reports whether the taint has to go in the middle of a change, since NVIDIA's DRA driver is not there. The exception is a driver that the agent
// itself keeps away while a mode changes, once no pod has to leave any more.
func (d disruption) readmits(seen Observed) bool {
	if !seen.Journal.Pending || !seen.Fenced || !seen.ByClaims || !seen.lacksDriver() {
		return false
	}
	leaves := len(d.holders)+len(seen.Clients) > 0 || d.takesAway && len(pause(seen)) > 0
	return leaves || !d.changesMode
}

// lacksDriver reports whether no pod of NVIDIA's DRA driver is on the node, or one that is ending.
func (seen Observed) lacksDriver() bool {
	return !slices.ContainsFunc(seen.Operands, func(o Operand) bool { return !o.Ending })
}

// needsSlot reports whether the change makes the node unavailable, and needs a slot of the pool for that. A node that has just been
// registered needs none: the pool did not have it before.
func (d disruption) needsSlot(seen Observed) bool {
	if !seen.Slot.Needed || seen.Slot.Drains && len(d.holders) == 0 || (seen.Startup || seen.Slot.Spared) && len(d.holders) == 0 && !d.heals {
		return false
	}
	return d.takesAway || d.sharing.shrinks || len(d.holders) > 0
}

// pause lists the operands that are still there.
func pause(seen Observed) []Step {
	var steps []Step
	for _, p := range seen.Pauses {
		if !p.Paused || len(p.Pods) > 0 {
			steps = append(steps, Step{Kind: PauseOperands, Label: p.Label, Pods: p.Pods})
		}
	}
	return steps
}

// incomplete reports whether the journal lacks something that the agent will have to restore. Before the agent touches the hardware, the journal must
// hold each GPU and label that will change, each plugin that has seen the former hardware, and each unit that will stop.
func incomplete(seen Observed, changes []change, d disruption) bool {
	if !seen.Journal.Pending || seen.Journal.Other || d.sharing.writes && !seen.Plugin.Journaled {
		return true
	}
	for _, c := range changes {
		if len(c.steps)+len(c.later) > 0 && !seen.Journal.Cuts[c.gpu] || c.endsPersistence() && !seen.Journal.Persistent[c.gpu] {
			return true
		}
	}
	return len(changes) > 0 && slices.ContainsFunc(seen.Operands, func(o Operand) bool { return !o.Stale }) ||
		slices.ContainsFunc(seen.Pauses, func(p Pause) bool { return d.takesAway && !p.Paused && !seen.Journal.Paused[p.Label] }) ||
		slices.ContainsFunc(d.stops, func(name string) bool { return !seen.Journal.Stopped[name] })
}

// hardware lists the changes of the GPUs. If any waits for a reboot, all steps that need none come before it, so that
// one reboot is enough.
func hardware(seen Observed, changes []change) []Step {
	var steps, later []Step
	waits := false
	for _, c := range changes {
		steps = append(steps, c.steps...)
		later = append(later, c.later...)
		waits = waits || c.waits
	}
	if !waits {
		return steps
	}
	return slices.Concat(steps, reboot(seen), later)
}

// foreseen returns what the agent will observe after the hardware's change.
func foreseen(seen Observed, changes []change, d disruption) Observed {
	seen.GPUs = Result(seen.GPUs, hardware(seen, changes))
	seen.Journal.Paused, seen.Journal.Stopped = maps.Clone(seen.Journal.Paused), maps.Clone(seen.Journal.Stopped)
	operands := seen.Operands
	seen.Operands = nil
	for _, o := range operands {
		if d.changesMode && o.pausable() || d.takesAway && o.ByLabel {
			continue // the agent pauses it before the change, and a new pod starts after it
		}
		o.Stale = o.Stale || len(changes) > 0
		seen.Operands = append(seen.Operands, o)
	}
	if d.takesAway {
		seen.Pauses = slices.Clone(seen.Pauses)
		for i := range seen.Pauses {
			seen.Pauses[i].Paused, seen.Pauses[i].Pods = true, nil
			recordTaken(&seen.Journal.Paused, seen.Pauses[i].Label)
		}
	}
	seen.Units = slices.Clone(seen.Units)
	for i := range seen.Units {
		if slices.Contains(d.stops, seen.Units[i].Name) {
			seen.Units[i].Active, seen.Units[i].Starting = false, false
			recordTaken(&seen.Journal.Stopped, seen.Units[i].Name)
		}
	}
	seen.Capacity.Agreed = 0
	return seen
}

// reopen lists the steps that lift the taint, restart what has read the former GPUs, and have the plugin read its config.
func reopen(seen Observed, want Desired, restart []Step) []Step {
	switch read := reload(seen, want); {
	case seen.ByClaims: // the driver comes back only without the taint
		return slices.Concat(readmit(seen), restart, read)
	case seen.Journal.MPS || want.Sharing != nil && want.Sharing.MPS: // its control daemon has to come before the plugin reads the config
		return slices.Concat(restart, readmit(seen), resumeByLabel(seen), read)
	default: // before the taint goes: a pod that tolerates the cordon would get a device of the old plugin, or of the old config, that is gone
		return slices.Concat(restart, read, readmit(seen), resumeByLabel(seen))
	}
}

// giveBack lists the steps that are left once the hardware is as desired, or as near to that as it gets before a reboot.
func giveBack(seen Observed, want Desired, parks bool) []Step {
	steps := append(persist(seen), write(&seen, want)...)
	if len(seen.CDI) > 0 {
		steps = append(steps, Step{Kind: RegenerateCDI, Files: seen.CDI})
	}
	steps = append(steps, startUnits(seen)...)
	var restart []Step
	stale, late := toRestart(seen.Operands)
	if seen.Journal.Pending && len(stale) > 0 {
		restart = []Step{{Kind: RestartOperands, Pods: stale}}
	}
	steps = append(steps, reopen(seen, want, restart)...)
	steps = append(steps, freeOfMPS(seen, want)...)
	if seen.Capacity.Agreed < needed(seen) {
		if seen.Journal.Pending && len(late) > 0 {
			steps = append(steps, Step{Kind: RestartLatePlugin, Pods: late})
		}
		steps = append(steps, Step{Kind: VerifyCapacity})
	}
	if seen.ByClaims { // before, the scheduler would allocate devices to their claims that are gone
		steps = append(steps, resumeByLabel(seen)...)
	}
	if seen.Keys {
		steps = append(steps, Step{Kind: PublishNodeKeys})
	}
	switch {
	case seen.Journal.Pending && parks:
		steps = append(append(steps, Step{Kind: Park}), askForReboot(seen)...)
	case seen.Journal.Pending:
		steps = append(steps, Step{Kind: Release})
	}
	return append(steps, seen.Slot.release()...)
}

// toRestart returns the operands that read the GPUs before their last change, and those with late devices.
func toRestart(operands []Operand) (stale, late []Pod) {
	for _, o := range operands {
		if o.Stale || o.Early {
			stale = append(stale, o.Pod)
		}
		if o.Late {
			late = append(late, o.Pod)
		}
	}
	return stale, late
}

func (s Slot) release() []Step {
	if !s.Has {
		return nil
	}
	return []Step{{Kind: ReleaseSlot}}
}

// startUnits starts the units again that the change has stopped, in reverse order.
func startUnits(seen Observed) []Step {
	var steps []Step
	for _, u := range slices.Backward(seen.Units) {
		if (!u.Active || u.Ending || u.Starting) && seen.Journal.Stopped[u.Name] {
			steps = append(steps, Step{Kind: StartUnits, Unit: u.Name})
		}
	}
	return steps
}

// readmit lets pods of DaemonSets come back.
func readmit(seen Observed) []Step {
	// In the middle of a change the agent goes on although the taint is back: the device plugin may be there already.
	if seen.Fenced || seen.Startup && !(seen.Returned && seen.Journal.Pending) {
		return []Step{{Kind: ResumeOperands, ByClaims: seen.ByClaims}}
	}
	return nil
}

// resumeByLabel restores the operands that the change has paused by their labels, in reverse order.
func resumeByLabel(seen Observed) []Step {
	var steps []Step
	for _, p := range slices.Backward(seen.Pauses) {
		if p.Paused && (seen.Journal.Paused[p.Label] || seen.Orphaned) {
			steps = append(steps, Step{Kind: ResumeOperands, Label: p.Label})
		}
	}
	return steps
}

// persist turns persistence mode on again for GPUs that had it on by the journal.
func persist(seen Observed) []Step {
	var steps []Step
	for _, gpu := range seen.GPUs {
		if seen.Journal.Persistent[gpu.UUID] && !gpu.Persistent && !gpu.Lost {
			steps = append(steps, Step{Kind: RestorePersistence, GPU: gpu.UUID, Index: gpu.Index})
		}
	}
	return steps
}

// needed returns how many agreeing observations verify the capacity. Without a journal, the agent has verified the node earlier, and one observation
// shows whether that still holds.
func needed(seen Observed) int {
	switch {
	case !seen.Journal.Pending:
		return 1
	case seen.Undo && !seen.Journal.Verified:
		return 0 // capacity that did not agree before the change need not agree after its undo
	default:
		return VerifiedAfter
	}
}

func (p Pod) same(q Pod) bool {
	return p.UID == q.UID && p.Namespace == q.Namespace && p.Name == q.Name
}

func (p Pod) holds(taken map[string]bool) bool {
	if !p.Known {
		return true
	}
	for _, d := range p.Devices {
		if taken[d] {
			return true
		}
	}
	return false
}

func recordTaken(what *map[string]bool, name string) {
	if *what == nil {
		*what = map[string]bool{}
	}
	(*what)[name] = true
}

// pausable reports whether the operand has to leave before a GPU is reset, and stays away once the agent evicts it.
func (o Operand) pausable() bool { return !o.Returns && !o.Stays && !o.ByLabel }

func pausable(operands []Operand) []Pod {
	var out []Pod
	for _, o := range operands {
		if o.pausable() {
			out = append(out, o.Pod)
		}
	}
	return out
}
