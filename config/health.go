package config

import (
	"fmt"
	"slices"
	"strconv"
)

// Health says by what ConditionGPUUnhealthy goes, and what the agent does about a GPU besides telling of it: by default nothing.
type Health struct {
	// The Xids, NVIDIA's error numbers, that the condition treats otherwise than the agent's own table does.

	CriticalXids    []int // the condition tells of the first one
	ApplicationXids []int // errors of programs, which leave the GPU healthy; none is in CriticalXids
	KernelLog       KernelLog

	Taint HealthTaint
	Reset HealthReset
}

// KernelLog says whether the kernel's log is read for Xids.
type KernelLog string

// The choices.
const (
	// KernelLogAuto reads it where that is possible.
	KernelLogAuto  KernelLog = "auto"
	KernelLogNever KernelLog = "never"
)

// HealthReset says which GPUs the agent resets that are not well.
type HealthReset string

// The values. A reset has to be what the GPU's driver recommends, or what its errors need.
const (
	HealthResetNever    HealthReset = "never"
	HealthResetCritical HealthReset = "critical" // those that cannot be used or trusted
	HealthResetDegraded HealthReset = "degraded" // and those that work, and repair themselves at a reset
)

// HealthTaint is the effect of TaintGPUUnhealthy, which the node has while one of its GPUs cannot be used or trusted.
type HealthTaint string

// The effects.
const (
	HealthTaintNone             HealthTaint = "none" // the node gets no taint
	HealthTaintNoSchedule       HealthTaint = "NoSchedule"
	HealthTaintPreferNoSchedule HealthTaint = "PreferNoSchedule"
)

// maxXid is NVIDIA's number for an error that it does not know, above all others.
const maxXid = 999

func (c *checks) health(in healthInputs) Health {
	h := Health{
		CriticalXids: c.xids("health.criticalXids", in.CriticalXids), ApplicationXids: c.xids("health.applicationXids", in.ApplicationXids),
		KernelLog: KernelLog(c.oneOf("health.kernelLog", in.KernelLog, string(KernelLogAuto), string(KernelLogNever))),
		Taint: HealthTaint(c.oneOf("health.taint", in.Taint,
			string(HealthTaintNone), string(HealthTaintNoSchedule), string(HealthTaintPreferNoSchedule))),
		Reset: HealthReset(c.oneOf("health.reset", in.Reset,
			string(HealthResetNever), string(HealthResetCritical), string(HealthResetDegraded))),
	}
	for i, n := range h.ApplicationXids {
		if slices.Contains(h.CriticalXids, n) {
			c.refuse(fmt.Sprintf("health.applicationXids[%d]", i), strconv.Itoa(n), "must not be one of health.criticalXids")
		}
	}
	return h
}

func (c *checks) xids(field string, in list) []int {
	c.elements(field, in, func(text string) []string {
		if n, err := strconv.Atoi(text); err != nil || n < 1 || n > maxXid || strconv.Itoa(n) != text {
			return []string{fmt.Sprintf("must be the number of an Xid, from 1 to %d", maxXid)}
		}
		return nil
	})
	var out []int
	for _, text := range in {
		if n, err := strconv.Atoi(string(text)); err == nil {
			out = append(out, n)
		}
	}
	return out
}
