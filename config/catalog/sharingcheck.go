package catalog

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gpuslice/gpuslice/config"
	"github.com/gpuslice/gpuslice/config/check"
	"github.com/gpuslice/gpuslice/nvml"
)

// The most clients that an MPS server accepts, and so the most replicas of a GPU.
const (
	maxMPSClients    = 48
	maxMPSClientsOld = 16 // before compute capability 7.5
)

// CheckSharing checks whether NVIDIA's device plugin can share a node's resources like this. The plugin itself exits on some mistakes, and silently
// ignores the others. The error joins one *SharingError for each mistake, which names the GPU or the resource.
//
// The gpus have their geometry after the cut. offered names the unshared resources that the plugin makes of them under the strategy.
func CheckSharing(gpus []nvml.GPU, strategy config.MIGStrategy, s Sharing, offered []string) error {
	if s.Strategy == SharingNone || len(s.Replicas) == 0 {
		return nil
	}
	c := sharingCheck{gpus: slices.DeleteFunc(slices.Clone(gpus), func(g nvml.GPU) bool { return g.Lost }), strategy: strategy, Sharing: s}
	c.refuseVirtualGPUs()
	if s.Strategy == SharingMPS {
		c.refuseForMPS()
	}
	c.refuseCutGPUsAsWhole()
	c.refuseMissingResources(offered)
	c.refuseTooManyReplicas()
	return errors.Join(c.errs...)
}

type sharingCheck struct {
	Sharing
	gpus     []nvml.GPU
	strategy config.MIGStrategy
	errs     []error
}

func (c *sharingCheck) refuse(reason config.Reason, subject, format string, args ...any) {
	c.errs = check.AddMistake(c.errs, &SharingError{Subject: subject, Problem: fmt.Sprintf(format, args...), reason: reason})
}

// refuseVirtualGPUs refuses to share vGPUs, and GPUs that the node lends to virtual machines.
func (c *sharingCheck) refuseVirtualGPUs() {
	for _, g := range c.gpus {
		switch g.Virtualization {
		case nvml.VirtualGPU:
			c.refuse(config.ReasonVirtualGPU, nameOf(g),
				"is a vGPU, for one workload at a time: it cannot be shared by %s; request no sharing on this node", c.Strategy)
		case nvml.HostOfVirtualGPUs, nvml.HostOfSharedGPUs:
			c.refuse(config.ReasonVirtualGPU, nameOf(g), "is lent to virtual machines by this host: no container computes on it; request no sharing on this node")
		case nvml.NotVirtualized, nvml.PassedThrough:
		}
	}
}

// refuseForMPS refuses the strategy mixed, GPUs in MIG mode, and more replicas than an MPS server has clients.
func (c *sharingCheck) refuseForMPS() {
	if c.strategy == config.MIGStrategyMixed {
		c.refuse(config.ReasonImpossibleSharing, "MPS", "does not go with the MIG strategy mixed: the device plugin exits; "+
			"set the strategy to none or single, or share by time-slicing")
	}
	for _, g := range c.gpus {
		if g.Enabled {
			c.refuse(config.ReasonImpossibleSharing, nameOf(g), "is in MIG mode, and MPS does not share MIG devices: share by time-slicing, or turn MIG mode off")
			continue
		}
		most := maxMPSClientsOld
		if g.ComputeCapability.AtLeast(7, 5) {
			most = maxMPSClients
		}
		if n := c.Replicas[nvml.ResourceGPU]; n > most {
			c.refuse(config.ReasonImpossibleSharing, nameOf(g),
				"cannot be shared by %d replicas through MPS, which has at most %d clients on a %s: use %d or fewer", n, most, g.Model, most)
		}
	}
}

// refuseCutGPUsAsWhole refuses to share GPUs in MIG mode as whole ones: the plugin advertises them, and no program runs on them.
func (c *sharingCheck) refuseCutGPUsAsWhole() {
	if c.strategy != config.MIGStrategyNone || c.Replicas[nvml.ResourceGPU] == 0 {
		return
	}
	for _, g := range c.gpus {
		if g.Enabled {
			c.refuse(config.ReasonImpossibleSharing, nameOf(g), "is in MIG mode, and under the MIG strategy none it would be shared as a whole GPU that "+
				"nothing can run on: set the strategy to single or mixed, or turn MIG mode off")
		}
	}
}

// refuseMissingResources refuses resources that the node will not have: the plugin ignores them, and the node stays unshared.
func (c *sharingCheck) refuseMissingResources(offered []string) {
	for _, name := range c.Resources() {
		if slices.Contains(offered, name) {
			continue
		}
		has := "no GPU resource"
		if len(offered) > 0 {
			has = strings.Join(slices.Sorted(slices.Values(offered)), ", ")
		}
		c.refuse(config.ReasonImpossibleSharing, name, "is to be shared, but the node will not have it: under the MIG strategy %s it will have %s: "+
			"share that, or request a key without sharing by label, or both by a profile", c.strategy, has)
	}
}

// refuseTooManyReplicas refuses more replicas of a resource than kubelet can take.
func (c *sharingCheck) refuseTooManyReplicas() {
	for _, name := range c.Resources() {
		devices := 0
		for _, g := range c.gpus {
			devices += devicesOf(g, name, c.strategy)
		}
		if n := c.Replicas[name]; n*devices > maxReplicas {
			c.refuse(config.ReasonImpossibleSharing, name, "cannot have %d replicas of each of %d devices: %s; use %d or fewer",
				n, devices, tooManyIDs, maxReplicas/devices)
		}
	}
}

// devicesOf counts the GPU's devices that the plugin advertises by the name.
func devicesOf(g nvml.GPU, name string, strategy config.MIGStrategy) int {
	if !g.Enabled || strategy == config.MIGStrategyNone {
		if name == nvml.ResourceGPU {
			return 1
		}
		return 0
	}
	n := 0
	for _, i := range g.Instances {
		for _, d := range i.Devices {
			if strategy == config.MIGStrategySingle && name == nvml.ResourceGPU || name == nvml.ResourceMIGPrefix+strings.ReplaceAll(d.Profile, "+", ".") {
				n++
			}
		}
	}
	return n
}

// SharingError is one reason why the device plugin cannot share a node's resources as requested.
type SharingError struct {
	Subject string // the GPU, the resource, or MPS
	Problem string // the predicate of the message, with a remedy

	reason config.Reason
}

// Error joins the subject and the problem.
func (e *SharingError) Error() string { return e.Subject + " " + e.Problem }

// Reason is ReasonVirtualGPU or ReasonImpossibleSharing.
func (e *SharingError) Reason() config.Reason { return e.reason }
