package plan

import (
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// Sharing is how the device plugin multiplies what it offers. Its zero value shares nothing.
type Sharing struct {
	MPS      bool           // processes share a GPU by the daemon of MPS; otherwise by time-slicing
	Replicas map[string]int // how often the plugin offers each device of a resource, at least 2
	Rename   bool           // the plugin offers shared resources under a name of their own
	MIG      string         // the plugin's MIG strategy: none, single, mixed; empty if that is not known
}

// Plugin is how the device plugin's config compares with the desired one.
type Plugin struct {
	Now         *Sharing // the sharing in its config; nil if that cannot be known
	Set         bool     // its config is the desired one, to the letter
	Reloaded    bool     // every pod that reads the config has read it as it is now
	NeedsReload bool     // pods read another config only after a signal of the agent
	Journaled   bool     // the journal holds the former config
	// Early: it has read of MPS before MPS's control daemon was ready, and offers nothing until it reads its config again.
	Early bool
	// Foretold: the plan is about a config that another program gives it as soon as that is asked for.
	Foretold bool
}

// Replica is one device as kubelet has given it to a pod.
type Replica struct {
	Resource string // "nvidia.com/gpu", "nvidia.com/mig-1g.10gb.shared"
	ID       string // "GPU-…", "MIG-…::2"
}

// MIGDeviceID is the prefix of the ids of MIG devices.
const MIGDeviceID = "MIG-"

// MIG strategies by which the device plugin offers MIG devices: as if they were GPUs, or by their profiles.
const (
	migSingle = "single"
	migMixed  = "mixed"
)

// offers reports whether kubelet would still give out the replica. Kubelet compares names: a device id that the plugin offers no more, or
// under another resource, stays with its pod, but kubelet counts it neither as given out nor as present when it restarts.
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

// presents reports whether the plugin offers the device by this resource name under the MIG strategy.
func (s Sharing) presents(resource, id string) bool {
	switch {
	case s.MIG == "" || !strings.HasPrefix(id, MIGDeviceID):
		return true
	case resource == nvml.ResourceGPU:
		return s.MIG == migSingle
	default:
		return s.MIG == migMixed
	}
}

// offered returns the name under which the plugin offers a resource, and how often it offers each of its devices.
func (s Sharing) offered(resource string) (name string, replicas int) {
	n := max(s.Replicas[resource], 1)
	if n > 1 && s.Rename {
		resource += nvml.SharedSuffix
	}
	return resource, n
}

// shrinks reports whether the plugin offers anything now that it does not offer after the change, held or not. If the present config is
// not known, it may.
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

// renamesMIG reports whether the plugin will offer present MIG devices by other names.
func (seen Observed) renamesMIG(now *Sharing, then Sharing) bool {
	return now != nil && now.MIG != "" && then.MIG != "" && now.MIG != then.MIG &&
		slices.ContainsFunc(seen.GPUs, func(gpu nvml.GPU) bool { return len(gpu.Instances) > 0 })
}

// sharingChange is what has to be done for another config of the device plugin, and what that takes away.
type sharingChange struct {
	is        bool
	writes    bool // the agent has to write the config
	shrinks   bool // something goes that the plugin offers now
	exclusive bool // MPS begins, ends or changes: processes that compute on a GPU cannot stay
	modes     []nvml.GPU
}

// sharing compares the plugin's config with the desired one.
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

// leftExclusive returns the GPUs that the MPS daemon has left in exclusive-process mode, which it resets only if it is not killed. If no
// sharing is desired, and the agent has not ended MPS, an administrator may have set that mode: then it returns none.
func (seen Observed) leftExclusive(want Desired) []nvml.GPU {
	if want.Sharing.MPS || seen.Undo && seen.Journal.MPS || len(want.Sharing.Replicas) == 0 && !seen.Journal.MPS && !usesMPS(seen.Plugin.Now) {
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

// displaced returns the pods that have a device which the plugin will offer no more, or which it offers no more already.
func (seen Observed) displaced(want Desired, c sharingChange) []Pod {
	if !c.writes {
		return seen.withdrawn(want)
	}
	return slices.DeleteFunc(slices.Clone(seen.Pods), func(p Pod) bool { return !c.exclusive && p.Known && !seen.loses(p, *want.Sharing) })
}

// takes reports whether there is something to do for the sharing: for the plugin's config, or since pods have what it does not offer.
func (seen Observed) takes(want Desired, c sharingChange) bool {
	return c.is || len(seen.displaced(want, c)) > 0
}

// loses reports whether the pod has a device that the plugin does not offer by the sharing.
func (seen Observed) loses(p Pod, s Sharing) bool {
	return slices.ContainsFunc(p.Replicas, func(r Replica) bool {
		return !s.offers(r) || seen.isCut(r) && (s.MIG == migSingle || s.MIG == migMixed)
	})
}

// isCut reports whether the replica is one of a GPU in MIG mode. The plugin offers such a GPU as a whole under the MIG strategy none alone.
func (seen Observed) isCut(r Replica) bool {
	device, _, _ := strings.Cut(r.ID, nvml.ReplicaSeparator)
	return slices.ContainsFunc(seen.GPUs, func(gpu nvml.GPU) bool { return gpu.Enabled && string(gpu.UUID) == device })
}

// withdrawn returns the pods that have what kubelet gives out to others: another program, as the plugin's config manager, has given the plugin its config
// before they could leave, or NVIDIA's DRA driver has started again since. Where nothing is asked of the node they stay. Those that end
// anyway are no reason to begin a change.
func (seen Observed) withdrawn(want Desired) []Pod {
	if want.Sharing == nil && len(want.GPUs) == 0 {
		return nil
	}
	out := slices.DeleteFunc(slices.Clone(seen.Pods), func(p Pod) bool {
		return !p.Withdrawn && !(seen.Plugin.Foretold && want.Sharing != nil && seen.loses(p, *want.Sharing))
	})
	if !seen.Journal.Pending && !slices.ContainsFunc(out, func(p Pod) bool { return !p.Ending }) {
		return nil
	}
	return out
}

// endMPS lists the steps before the agent can cut GPUs that pods have shared by MPS: the daemon of MPS computes on them until the plugin's
// config does not ask for MPS any more, and leaves them in exclusive-process mode if it is killed. Without MPS these steps come last.
func endMPS(seen *Observed, want Desired, c sharingChange) []Step {
	if want.Sharing == nil || want.Sharing.MPS || !usesMPS(seen.Plugin.Now) && len(c.modes) == 0 {
		return nil
	}
	steps := append(write(seen, want), stepsAfterConfig(*seen, want)...)
	seen.GPUs = Result(seen.GPUs, steps)
	seen.Plugin.Reloaded, seen.Plugin.Early = true, false
	return steps
}

// write lists the step that writes the config, if it differs from the desired one, and changes the observation accordingly.
func write(seen *Observed, want Desired) []Step {
	if want.Sharing == nil || seen.Plugin.Set {
		return nil
	}
	seen.Journal.MPS = seen.Journal.MPS || usesMPS(seen.Plugin.Now)
	seen.Plugin.Set, seen.Plugin.Now, seen.Plugin.Reloaded = true, want.Sharing, !seen.Plugin.NeedsReload
	seen.Plugin.Early = false
	return []Step{{Kind: WriteSharing, Config: want.Config}}
}

// stepsAfterConfig lists the steps that follow when the config is written.
func stepsAfterConfig(seen Observed, want Desired) []Step {
	if want.Sharing == nil {
		return nil
	}
	var steps []Step
	if seen.Journal.Pending && !seen.Plugin.Reloaded || seen.Plugin.Early && want.Sharing.MPS {
		steps = append(steps, Step{Kind: ReloadPlugin})
	}
	if !seen.Journal.Pending {
		return steps
	}
	for _, gpu := range seen.leftExclusive(want) {
		steps = append(steps, Step{Kind: SetComputeMode, GPU: gpu.UUID, Index: gpu.Index})
	}
	return steps
}
