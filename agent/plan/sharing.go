package plan

import (
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// Sharing is how the device plugin multiplies what it offers. Its zero value shares nothing.
type Sharing struct {
	MPS      bool           // by a daemon that no process computes without; otherwise by time-slicing
	Replicas map[string]int // how often each device of a resource is offered, at least 2
	Rename   bool           // shared resources are offered under a name of their own
	MIG      string         // how MIG devices are offered: none, single, mixed; empty if that is not known
}

// Plugin is how the device plugin's config compares with what is wanted of it.
type Plugin struct {
	Now   *Sharing // what its config says; nil if that cannot be known
	Set   bool     // its config is, to the letter, what is wanted
	Told  bool     // all who read the config have read it as it is now
	Tells bool     // who reads the config has to be told of another one
	Noted bool     // the journal holds what config it had before
}

// Replica is one device as kubelet has given it to a pod.
type Replica struct {
	Resource string // "nvidia.com/gpu", "nvidia.com/mig-1g.10gb.shared"
	ID       string // "GPU-…", "MIG-…::2"
}

// migID begins the ids of MIG devices.
const migID = "MIG-"

// MIG strategies of the device plugin by which MIG devices are offered: as if they were GPUs, or by their profiles.
const (
	migSingle = "single"
	migMixed  = "mixed"
)

// offers reports whether kubelet would still give out the replica. Kubelet goes by names: a device id that is offered no more, or
// under another resource, stays with its pod, but counts neither as given out nor as there when the pod's node is restarted.
func (s Sharing) offers(r Replica) bool {
	resource := strings.TrimSuffix(r.Resource, nvml.SharedSuffix)
	name, n := s.offered(resource)
	_, number, shared := strings.Cut(r.ID, nvml.ReplicaSeparator)
	if name != r.Resource || shared != (n > 1) {
		return false
	}
	i, err := strconv.Atoi(number)
	return (!shared || err == nil && i < n) && s.presents(resource, r.ID)
}

// presents reports whether the device is offered by this name under the MIG strategy.
func (s Sharing) presents(resource, id string) bool {
	switch {
	case s.MIG == "" || !strings.HasPrefix(id, migID):
		return true
	case resource == nvml.ResourceGPU:
		return s.MIG == migSingle
	default:
		return s.MIG == migMixed
	}
}

// offered is the name under which a resource is offered, and how often each of its devices.
func (s Sharing) offered(resource string) (name string, replicas int) {
	n := max(s.Replicas[resource], 1)
	if n > 1 && s.Rename {
		resource += nvml.SharedSuffix
	}
	return resource, n
}

// shrinks reports whether anything goes that is offered now and not after, whoever has it. What is not known may go.
func shrinks(now *Sharing, then Sharing) bool {
	if now == nil {
		return true
	}
	goes := func(resource string) bool {
		before, n := now.offered(resource)
		after, m := then.offered(resource)
		return before != after || m < n || n == 1 && m > 1
	}
	for resource := range now.Replicas {
		if goes(resource) {
			return true
		}
	}
	for resource := range then.Replicas {
		if goes(resource) {
			return true
		}
	}
	return false
}

// renamesMIG reports whether MIG devices that stand will be offered by other names.
func (seen Observed) renamesMIG(now *Sharing, then Sharing) bool {
	return now != nil && now.MIG != "" && then.MIG != "" && now.MIG != then.MIG &&
		slices.ContainsFunc(seen.GPUs, func(gpu nvml.GPU) bool { return len(gpu.Instances) > 0 })
}

// sharingChange is what another config of the device plugin takes.
type sharingChange struct {
	is        bool
	writes    bool // the config is not as wanted
	shrinks   bool // something that is offered now goes
	exclusive bool // MPS begins, ends or changes: what computes on a GPU cannot stay
	modes     []nvml.GPU
}

// sharing compares the plugin's config with what is wanted of it.
func (seen Observed) sharing(want Desired) sharingChange {
	if want.Sharing == nil {
		return sharingChange{}
	}
	c := sharingChange{writes: !seen.Plugin.Set, modes: seen.leftExclusive(want)}
	c.is = c.writes || len(c.modes) > 0
	if c.writes {
		now := seen.Plugin.Now
		c.exclusive = want.Sharing.MPS || now != nil && now.MPS
		c.shrinks = c.exclusive || shrinks(now, *want.Sharing) || seen.renamesMIG(now, *want.Sharing)
	}
	return c
}

// leftExclusive are the GPUs that MPS was used on and that nothing else can share: its daemon gives them back only if it ends in peace.
// Where nothing is to be shared, and we have not ended MPS, the mode may be an administrator's wish.
func (seen Observed) leftExclusive(want Desired) []nvml.GPU {
	if want.Sharing == nil || want.Sharing.MPS || seen.Undo && seen.Journal.MPS || len(want.Sharing.Replicas) == 0 && !seen.Journal.MPS && !usesMPS(seen.Plugin.Now) {
		return nil
	}
	var out []nvml.GPU
	for _, gpu := range seen.GPUs {
		if gpu.ComputeMode == nvml.ComputeExclusiveProcess && !gpu.Lost {
			out = append(out, gpu)
		}
	}
	return out
}

func usesMPS(s *Sharing) bool { return s != nil && s.MPS }

// displaced are the pods that have what is offered no more.
func (seen Observed) displaced(want Desired, c sharingChange) []Pod {
	if !c.writes {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(seen.Pods), func(p Pod) bool {
		return !c.exclusive && p.Known && !slices.ContainsFunc(p.Replicas, func(r Replica) bool { return !want.Sharing.offers(r) })
	})
}

// endMPS lists what has to happen before GPUs that were shared by MPS can be cut: its daemon computes on them until it is told that
// it is not wanted any more, and leaves them in a mode of its own unless it ends in peace. Elsewhere that may come last.
func endMPS(seen *Observed, want Desired, c sharingChange) []Step {
	if want.Sharing == nil || want.Sharing.MPS || !usesMPS(seen.Plugin.Now) && len(c.modes) == 0 {
		return nil
	}
	steps := append(write(seen, want), stepsAfterConfig(*seen, want)...)
	seen.GPUs = Result(seen.GPUs, steps)
	seen.Plugin.Told = true
	return steps
}

// write sets the config, as far as it is not yet what is wanted, and notes in the look what follows from that.
func write(seen *Observed, want Desired) []Step {
	if want.Sharing == nil || seen.Plugin.Set {
		return nil
	}
	seen.Journal.MPS = seen.Journal.MPS || usesMPS(seen.Plugin.Now)
	seen.Plugin.Set, seen.Plugin.Now, seen.Plugin.Told = true, want.Sharing, !seen.Plugin.Tells
	return []Step{{Kind: WriteSharing, Config: want.Config}}
}

// stepsAfterConfig lists what follows a config that is set.
func stepsAfterConfig(seen Observed, want Desired) []Step {
	if want.Sharing == nil || !seen.Journal.Owed {
		return nil
	}
	var steps []Step
	if !seen.Plugin.Told {
		steps = append(steps, Step{Kind: ReloadPlugin})
	}
	for _, gpu := range seen.leftExclusive(want) {
		steps = append(steps, Step{Kind: SetComputeMode, GPU: gpu.UUID, Index: gpu.Index})
	}
	return steps
}
