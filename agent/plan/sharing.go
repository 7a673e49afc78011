package plan

import (
	"slices"
	"strconv"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// Sharing is how the device plugin multiplies what it advertises. Its zero value shares nothing.
type Sharing struct {
	MPS      bool           // processes share a GPU by the daemon of MPS; otherwise by time-slicing
	Replicas map[string]int // how often the plugin advertises each device of a resource, at least 2
	Rename   bool           // the plugin advertises shared resources under their own name
	MIG      string         // the plugin's MIG strategy: none, single, mixed; empty if that is not known
}

// Plugin is how the device plugin's config compares with the desired one.
type Plugin struct {
	Now         *Sharing // the sharing in its config; nil if that cannot be known
	Set         bool     // its config is the desired one, to the letter
	Reloaded    bool     // every pod that reads the config has read the present one
	NeedsReload bool     // pods read a new config only after the agent signals them
	Journaled   bool     // the journal holds the former config
	// Early: it read of MPS before MPS's control daemon was ready, and advertises nothing until it reads its config again.
	Early bool
	// Foretold: the plan is for a config that another program gives the plugin as soon as a label requests it.
	Foretold bool
}

// Replica is one device as kubelet has allocated it to a pod.
type Replica struct {
	Resource string // "nvidia.com/gpu", "nvidia.com/mig-1g.10gb.shared"
	ID       string // "GPU-…", "MIG-…::2"
}

// MIGDeviceID is the prefix of the ids of MIG devices.
const MIGDeviceID = "MIG-"

// MIG strategies of the device plugin: it advertises MIG devices as GPUs (single), or by their profiles (mixed).
const (
	migSingle = "single"
	migMixed  = "mixed"
)

// offers reports whether kubelet would still allocate the replica. Kubelet compares names. A pod keeps a device id that the plugin no longer
// advertises, or advertises under another resource. When kubelet restarts, it counts such an id neither as allocated nor as present.
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

// presents reports whether the plugin advertises the device under this resource name, by the MIG strategy.
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

// offered returns the plugin's name of a resource, and how often the plugin advertises each of its devices.
func (s Sharing) offered(resource string) (name string, replicas int) {
	n := max(s.Replicas[resource], 1)
	if n > 1 && s.Rename {
		resource += nvml.SharedSuffix
	}
	return resource, n
}

// shrinks reports whether the plugin advertises anything now that it does not advertise after the change, held or not; if the present config is
// unknown, it may.
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

// renamesMIG reports whether the plugin will advertise present MIG devices by other names.
func (seen Observed) renamesMIG(now *Sharing, then Sharing) bool {
	return now != nil && now.MIG != "" && then.MIG != "" && now.MIG != then.MIG &&
		slices.ContainsFunc(seen.GPUs, func(gpu nvml.GPU) bool { return len(gpu.Instances) > 0 })
}

// sharingChange is what a new config of the device plugin needs, and what it removes.
type sharingChange struct {
	is        bool
	writes    bool // the agent has to write the config
	shrinks   bool // something goes that the plugin advertises now
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

// displaced returns the pods with a device that the plugin no longer advertises, or will not advertise after the change.
func (seen Observed) displaced(want Desired, c sharingChange) []Pod {
	if !c.writes {
		return seen.withdrawn(want)
	}
	return slices.DeleteFunc(slices.Clone(seen.Pods), func(p Pod) bool { return !c.exclusive && p.Known && !seen.loses(p, *want.Sharing) })
}

// takes reports whether the sharing needs a change: of the plugin's config, or since pods have devices that the plugin does not advertise.
func (seen Observed) takes(want Desired, c sharingChange) bool {
	return c.is || len(seen.displaced(want, c)) > 0
}

// loses reports whether the pod has a device that the plugin does not advertise by the sharing.
func (seen Observed) loses(p Pod, s Sharing) bool {
	return slices.ContainsFunc(p.Replicas, func(r Replica) bool {
		return !s.offers(r) || seen.isCut(r) && (s.MIG == migSingle || s.MIG == migMixed)
	})
}

// isCut reports whether the replica is one of a GPU in MIG mode. The plugin advertises such a GPU as a whole only under MIG strategy none.
func (seen Observed) isCut(r Replica) bool {
	device, _, _ := strings.Cut(r.ID, nvml.ReplicaSeparator)
	return slices.ContainsFunc(seen.GPUs, func(gpu nvml.GPU) bool { return gpu.Enabled && string(gpu.UUID) == device })
}

// withdrawn returns the pods with devices that kubelet allocates to others. Another program, such as the plugin's config manager, has given the
// plugin its config before they could leave, or NVIDIA's DRA driver has restarted since. Without a request they stay. Pods that are ending anyway are
// no reason to begin a change.
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

// endMPS lists the steps before the agent can cut GPUs that pods have shared by MPS. MPS's daemon computes on them as long as the plugin's config
// asks for MPS; if it is killed, it leaves them in exclusive-process mode. Without MPS these steps come last.
func endMPS(seen *Observed, want Desired, c sharingChange) []Step {
	if want.Sharing == nil || want.Sharing.MPS || !usesMPS(seen.Plugin.Now) && len(c.modes) == 0 {
		return nil
	}
	steps := slices.Concat(write(seen, want), reload(*seen, want), freeOfMPS(*seen, want))
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

// reload lists the step that makes the device plugin read the config, if it has read a former one.
func reload(seen Observed, want Desired) []Step {
	if want.Sharing == nil || !(seen.Journal.Pending && !seen.Plugin.Reloaded || seen.Plugin.Early && want.Sharing.MPS) {
		return nil
	}
	return []Step{{Kind: ReloadPlugin}}
}

// freeOfMPS lists the steps that end the compute mode of MPS on GPUs that it has left.
func freeOfMPS(seen Observed, want Desired) []Step {
	if want.Sharing == nil || !seen.Journal.Pending {
		return nil
	}
	var steps []Step
	for _, gpu := range seen.leftExclusive(want) {
		steps = append(steps, Step{Kind: SetComputeMode, GPU: gpu.UUID, Index: gpu.Index})
	}
	return steps
}
