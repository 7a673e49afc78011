package config

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/nvml"
)

// How many clients a server of MPS has at most, and so how often a GPU can be shared: NVIDIA's daemon for it refuses more.
const (
	mostMPSClients    = 48
	mostMPSClientsOld = 16 // before compute capability 7.5
)

// CheckSharing finds out whether NVIDIA's device plugin can share a node's resources so. The plugin itself ends on some of
// what cannot be, and passes over the rest in silence. The error names the GPU or the resource, and joins all that is wrong:
// each is a *SharingError.
//
// The GPUs are as they will be when they have been cut, and offered are the names of the resources that the plugin makes of
// them under the strategy, unshared.
func CheckSharing(gpus []nvml.GPU, strategy MIGStrategy, s Sharing, offered []string) error {
	if s.Strategy == SharingNone || len(s.Replicas) == 0 {
		return nil
	}
	c := sharingCheck{gpus: slices.DeleteFunc(slices.Clone(gpus), func(g nvml.GPU) bool { return g.Lost }), strategy: strategy, Sharing: s}
	c.virtual()
	if s.Strategy == SharingMPS {
		c.mps()
	}
	c.uncut()
	c.present(offered)
	return errors.Join(c.errs...)
}

type sharingCheck struct {
	Sharing
	gpus     []nvml.GPU
	strategy MIGStrategy
	errs     []error
}

func (c *sharingCheck) refuse(reason Reason, subject, format string, args ...any) {
	c.errs = AddMistake(c.errs, &SharingError{Subject: subject, Problem: fmt.Sprintf(format, args...), reason: reason})
}

// virtual refuses GPUs that are not this node's to share.
func (c *sharingCheck) virtual() {
	for _, g := range c.gpus {
		switch g.Virtualization {
		case nvml.VirtualGPU:
			c.refuse(ReasonVirtualGPU, nameOf(g), "is a vGPU, which one workload has at a time: it cannot be shared by %s; ask for no sharing on this node", c.Strategy)
		case nvml.HostOfVirtualGPUs, nvml.HostOfSharedGPUs:
			c.refuse(ReasonVirtualGPU, nameOf(g), "is lent to virtual machines by this host: no container computes on it; ask for no sharing on this node")
		case nvml.NotVirtualized, nvml.PassedThrough:
		}
	}
}

// mps refuses what the daemon and the plugin do not do under MPS.
func (c *sharingCheck) mps() {
	if c.strategy == MIGStrategyMixed {
		c.refuse(ReasonImpossibleSharing, "MPS", "does not go with the MIG strategy mixed: the device plugin ends; "+
			"set the strategy to none or single, or share by time-slicing")
	}
	for _, g := range c.gpus {
		if g.Enabled {
			c.refuse(ReasonImpossibleSharing, nameOf(g), "is in MIG mode, and MPS does not share MIG devices: share by time-slicing, or turn MIG mode off")
			continue
		}
		most := mostMPSClientsOld
		if g.ComputeCapability.AtLeast(7, 5) {
			most = mostMPSClients
		}
		if n := c.Replicas[nvml.ResourceGPU]; n > most {
			c.refuse(ReasonImpossibleSharing, nameOf(g), "cannot be shared by %d replicas through MPS, which has at most %d clients on a %s: use %d or fewer", n, most, g.Model, most)
		}
	}
}

// uncut refuses to share GPUs in MIG mode as if they were whole: the plugin offers them, and no program runs on them.
func (c *sharingCheck) uncut() {
	if c.strategy != MIGStrategyNone || c.Replicas[nvml.ResourceGPU] == 0 {
		return
	}
	for _, g := range c.gpus {
		if g.Enabled {
			c.refuse(ReasonImpossibleSharing, nameOf(g), "is in MIG mode, and under the MIG strategy none it would be shared as a whole GPU that "+
				"nothing can run on: set the strategy to single or mixed, or turn MIG mode off")
		}
	}
}

// present refuses resources that the node will not have: the plugin passes over them, and the node stays unshared.
func (c *sharingCheck) present(offered []string) {
	for _, name := range c.Resources() {
		if slices.Contains(offered, name) {
			continue
		}
		has := "no GPU resource"
		if len(offered) > 0 {
			has = strings.Join(slices.Sorted(slices.Values(offered)), ", ")
		}
		c.refuse(ReasonImpossibleSharing, name, "is to be shared, and the node will not have it: under the MIG strategy %s it will have %s", c.strategy, has)
	}
}

// SharingError is one thing about a way of sharing that cannot be.
type SharingError struct {
	Subject string // the GPU, the resource, or MPS
	Problem string // to be read behind the subject, with what to do

	reason Reason
}

// Error says what cannot be, and what to do.
func (e *SharingError) Error() string { return e.Subject + " " + e.Problem }

// Reason is ReasonVirtualGPU or ReasonImpossibleSharing.
func (e *SharingError) Reason() Reason { return e.reason }
