// Package plan decides: it compares what was observed with what is desired and lists the steps between them.
//
// It is pure. It knows no Kubernetes client, no NVIDIA library, no clock and no file; whatever it decides by is in its
// arguments. The agent performs the first step of a plan, observes afresh, and plans again, so a plan must be the same
// whether the steps before it were done by this process or by one that was killed.
package plan

import (
	"fmt"
	"slices"

	"github.com/gpuslice/gpuslice/nvml"
)

// Observed is what one look at the node found.
type Observed struct {
	GPUs     []nvml.GPU
	Pods     []Pod // pods of the node that hold a GPU or a part of one, or may do so
	Operands []Operand
	Journal  Journal
	Fenced   bool // our taint keeps new pods away
	Startup  bool // the taint of a node that has just been registered keeps pods away until the capacity is proven
	Undo     bool // what is planned is the way back
	Reboots  Reboots
	CDI      []string // CDI specs that describe other GPU instances than there are
	Capacity Capacity
}

// Journal is what the planner needs to know of what is owed to the node.
type Journal struct {
	Owed       bool               // there is a journal
	Cordoned   bool               // the change has fenced the node, and not given it back
	Other      bool               // it is about another target than the one that is planned
	Cuts       map[nvml.UUID]bool // GPUs whose former cut it holds
	Persistent map[nvml.UUID]bool // those of them that were in persistence mode
	Proven     bool               // the capacity agreed with the hardware when the change began, and must do so again
}

// Pod is a pod that may have to leave.
type Pod struct {
	Namespace, Name, UID string
	Devices              []string // UUIDs of the GPUs and MIG devices that it was given
	Known                bool     // Devices are certain; otherwise the pod counts as holding everything
}

// Operand is a device plugin pod of the node.
type Operand struct {
	Pod
	Stale   bool // the journal says that it read the layout of the GPUs before the change
	Returns bool // it tolerates the fence, so that evicting it does not keep it away
}

// Capacity is how far the node's capacity agrees with the hardware.
type Capacity struct {
	Agreed int // looks in a row at which hardware, kubelet and node agreed
}

// Proof is the number of looks in a row at which everything must agree before a change counts as done: devices have
// been seen to vanish again right after a plugin's first registration.
const Proof = 2

// Target is what one GPU shall become.
type Target struct {
	nvml.Wish
	// Exact, if set, is the geometry with its places, as an undo wants it; Wish.Devices is then not used.
	Exact nvml.Geometry
	Undo  bool // Exact is meant, also when it is empty
}

// Desired is what the named GPUs shall become. GPUs that are not named are left alone.
type Desired map[nvml.UUID]Target

// Refused says that a wish cannot be fulfilled on a GPU. Nothing has been disturbed.
type Refused struct {
	Index int
	GPU   nvml.UUID
	Err   error
}

// Error names the GPU and the reason. A lost GPU that this driver has never seen well has no UUID.
func (r *Refused) Error() string {
	if r.GPU == "" {
		return fmt.Sprintf("GPU %d: %v", r.Index, r.Err)
	}
	return fmt.Sprintf("GPU %d (%s): %v", r.Index, r.GPU, r.Err)
}

// Unwrap gives the reason, usually an *nvml.Impossible.
func (r *Refused) Unwrap() error { return r.Err }

// Make lists the steps from what was observed to what is desired. No steps means that the node is as desired, that
// this is proven, and that nothing is owed to it. A wish that cannot be fulfilled is a *Refused error.
func Make(seen Observed, want Desired) ([]Step, error) {
	var changes []change
	for _, gpu := range seen.GPUs {
		target, named := want[gpu.UUID]
		if !named {
			continue
		}
		c, err := seen.changeOf(gpu, target)
		if err != nil {
			return nil, &Refused{Index: gpu.Index, GPU: gpu.UUID, Err: err}
		}
		if len(c.steps) > 0 || c.waits {
			changes = append(changes, c)
		}
	}
	// Where nothing is asked for, nothing is written: what stands in a spec or a file is as others left it.
	if len(want) == 0 && !seen.Journal.Owed {
		seen.CDI = nil
	}
	parks := len(OnAtReboot(seen, want)) > 0
	switch {
	case len(changes) > 0:
		return slices.Concat(prepare(seen, changes), hardware(seen, changes), giveBack(foreseen(seen, changes), parks)), nil
	case parks && seen.Journal.Owed && !seen.Journal.Cordoned:
		return askForReboot(seen), nil // parked
	case seen.Startup && len(want) > 0 && !seen.Journal.Owed:
		seen.Journal.Owed, seen.Fenced = true, true
		return append([]Step{{Kind: Fence}}, giveBack(seen, parks)...), nil
	default:
		return giveBack(seen, parks), nil
	}
}

// prepare lists what must happen before the hardware is touched.
func prepare(seen Observed, changes []change) []Step {
	var steps []Step
	taken := map[string]bool{}
	takesAway, changesMode := false, false
	for _, c := range changes {
		takesAway = takesAway || c.takesAway
		changesMode = changesMode || c.changesMode
		for _, d := range c.taken {
			taken[d] = true
		}
	}
	// What stands idle may be given to a pod at any moment, so the fence goes up for whatever is taken away, held or not.
	switch {
	// On a node that has just been registered it goes up for everything: behind it the startup taint can go, which would
	// else keep away the device plugin that has to prove the capacity.
	case (takesAway || seen.Startup) && !(seen.Journal.Owed && seen.Fenced):
		steps = append(steps, Step{Kind: Fence})
	case incomplete(seen, changes):
		steps = append(steps, Step{Kind: Record})
	}
	if holders := holding(seen.Pods, taken); takesAway && len(holders) > 0 {
		steps = append(steps, Step{Kind: Evict, Pods: holders})
	}
	// The plugin keeps the library open, which is a client that stands in the way of a reset.
	if pausable := pausable(seen.Operands); changesMode && len(pausable) > 0 {
		steps = append(steps, Step{Kind: PauseOperands, Pods: pausable})
	}
	return steps
}

// incomplete reports whether the journal lacks something that the changes will owe: whatever is about to change must be
// in it before the hardware is touched, and so must each plugin that has seen the hardware as it was.
func incomplete(seen Observed, changes []change) bool {
	if !seen.Journal.Owed || seen.Journal.Other {
		return true
	}
	for _, c := range changes {
		if !seen.Journal.Cuts[c.gpu] || c.endsPersistence() && !seen.Journal.Persistent[c.gpu] {
			return true
		}
	}
	for _, o := range seen.Operands {
		if !o.Stale {
			return true
		}
	}
	return false
}

// hardware lists the changes of the GPUs. If any waits for a reboot, all that can be done before is done before, so that
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

// foreseen is what will be seen after the hardware's change.
func foreseen(seen Observed, changes []change) Observed {
	seen.Journal.Owed = true
	seen.Fenced = seen.Fenced || seen.Startup
	changesMode := false
	seen.GPUs = Result(seen.GPUs, hardware(seen, changes))
	for _, c := range changes {
		seen.Fenced = seen.Fenced || c.takesAway
		changesMode = changesMode || c.changesMode
	}
	operands := seen.Operands
	seen.Operands = nil
	for _, o := range operands {
		if changesMode && !o.Returns {
			continue // paused before the change, and new after it
		}
		o.Stale = true
		seen.Operands = append(seen.Operands, o)
	}
	seen.Capacity.Agreed = 0
	return seen
}

// giveBack lists what is left once the hardware is as desired, or as near to it as it comes before a reboot.
func giveBack(seen Observed, parks bool) []Step {
	steps := persist(seen)
	if len(seen.CDI) > 0 {
		steps = append(steps, Step{Kind: RegenerateCDI, Files: seen.CDI})
	}
	if seen.Fenced || seen.Startup {
		steps = append(steps, Step{Kind: ResumeOperands})
	}
	var stale []Pod
	for _, o := range seen.Operands {
		if o.Stale {
			stale = append(stale, o.Pod)
		}
	}
	if seen.Journal.Owed && len(stale) > 0 {
		steps = append(steps, Step{Kind: RestartOperands, Pods: stale})
	}
	if seen.Capacity.Agreed < needed(seen) {
		steps = append(steps, Step{Kind: VerifyCapacity})
	}
	switch {
	case seen.Journal.Owed && parks:
		steps = append(append(steps, Step{Kind: Park}), askForReboot(seen)...)
	case seen.Journal.Owed:
		steps = append(steps, Step{Kind: Release})
	}
	return steps
}

// persist turns persistence mode on again where the journal says that it was on.
func persist(seen Observed) []Step {
	var steps []Step
	for _, gpu := range seen.GPUs {
		if seen.Journal.Persistent[gpu.UUID] && !gpu.Persistent && !gpu.Lost {
			steps = append(steps, Step{Kind: SetPersistence, GPU: gpu.UUID, Index: gpu.Index, On: true})
		}
	}
	return steps
}

// needed is the number of agreeing looks that prove the capacity. A node to which nothing is owed was proven before;
// there, one look tells whether it still holds.
func needed(seen Observed) int {
	switch {
	case !seen.Journal.Owed:
		return 1
	case seen.Undo && !seen.Journal.Proven:
		return 0 // what was not there before cannot be given back
	default:
		return Proof
	}
}

func holding(pods []Pod, taken map[string]bool) []Pod {
	var out []Pod
	for _, p := range pods {
		if p.holds(taken) {
			out = append(out, p)
		}
	}
	return out
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

func pausable(operands []Operand) []Pod {
	var out []Pod
	for _, o := range operands {
		if !o.Returns {
			out = append(out, o.Pod)
		}
	}
	return out
}
