package config

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/gpuslice/gpuslice/config/check"
)

// Health says when a GPU counts as unhealthy, and what the agent does then.
type Health struct {
	// Xids after which a GPU cannot be trusted, in addition to the agent's own table.
	CriticalXids []int `json:"criticalXids" called:"the number of an Xid," within:"1,999"` // NVIDIA has 999 for an error that it does not know, above all others
	// Xids that are programs' own errors, even if the agent's table says otherwise.
	ApplicationXids []int `json:"applicationXids" called:"the number of an Xid," within:"1,999"` // none is in CriticalXids
	// Whether the agent reads the kernel's log, /dev/kmsg, for Xids: where possible, or never.
	KernelLog KernelLog `json:"kernelLog"`
	// Effect of the taint gpuslice.io/gpu-unhealthy on the node while one of its GPUs cannot be used or trusted.
	Taint HealthTaint `json:"taint"`
	// Effect of the same taint on such a GPU's devices, by DeviceTaintRules, on nodes of NVIDIA's DRA driver, whatever taint the node has.
	DeviceTaint DeviceTaint `json:"deviceTaint"`
	// Which unhealthy GPUs the agent resets, in a window and after their pods have left.
	Reset HealthReset `json:"reset"`
}

// Check refuses an Xid that is in both lists.
func (h *Health) Check(c *check.Mistakes, at string, _ check.Written) {
	for i, n := range h.ApplicationXids {
		if n > 0 && slices.Contains(h.CriticalXids, n) {
			c.Refuse(fmt.Sprintf("%s.applicationXids[%d]", at, i), strconv.Itoa(n), "must not be one of health.criticalXids")
		}
	}
}

// KernelLog says whether the kernel's log is read for Xids.
type KernelLog string

// The choices.
const (
	// KernelLogAuto reads it where that is possible.
	KernelLogAuto  KernelLog = "auto"
	KernelLogNever KernelLog = "never"
)

// Values lists the choices.
func (KernelLog) Values() []string { return check.Words(KernelLogAuto, KernelLogNever) }

// HealthReset says which unhealthy GPUs the agent resets.
type HealthReset string

// The values. A reset has to be what the GPU's driver recommends, or what its errors need.
const (
	HealthResetNever    HealthReset = "never"
	HealthResetCritical HealthReset = "critical" // those that cannot be used or trusted
	HealthResetDegraded HealthReset = "degraded" // and those that work, and repair themselves at a reset
)

// Values lists them.
func (HealthReset) Values() []string {
	return check.Words(HealthResetNever, HealthResetCritical, HealthResetDegraded)
}

// DeviceTaint is the effect of TaintGPUUnhealthy on devices that claims request.
type DeviceTaint string

// The effects. NoExecute is missing: the API server would delete pods for it, whatever their disruption budgets.
const (
	DeviceTaintNone       DeviceTaint = "none" // devices get no taint
	DeviceTaintNoSchedule DeviceTaint = "NoSchedule"
)

// Values lists the effects.
func (DeviceTaint) Values() []string { return check.Words(DeviceTaintNone, DeviceTaintNoSchedule) }

// HealthTaint is the effect of TaintGPUUnhealthy on the node.
type HealthTaint string

// The effects.
const (
	HealthTaintNone             HealthTaint = "none" // the node gets no taint
	HealthTaintNoSchedule       HealthTaint = "NoSchedule"
	HealthTaintPreferNoSchedule HealthTaint = "PreferNoSchedule"
)

// Values lists the effects.
func (HealthTaint) Values() []string {
	return check.Words(HealthTaintNone, HealthTaintNoSchedule, HealthTaintPreferNoSchedule)
}
