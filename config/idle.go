package config

import (
	"cmp"
	"fmt"
	"time"

	"github.com/gpuslice/gpuslice/config/check"
)

// Idle says when a pod gets an Event because it does not use its GPU or instance.
type Idle struct {
	// Time between two polls of how busy the GPUs are; 0s for none.
	Every time.Duration `json:"every" within:"0s,5m"`
	// How long a pod must have had the GPU without using it.
	After time.Duration `json:"after" within:"10s,720h"`
	// Per cent of that time: a pod that used less gets the Event; 0 for none.
	Below int `json:"below" called:"per cent, a whole number" within:"0,100"`
	// How to measure an instance that has a process: sample samples its counters where the GPU has any (Hopper and later), skip leaves its use unknown.
	Instances IdleInstances `json:"instances"`
}

// Check refuses polls that are too many or too few.
func (i *Idle) Check(c *check.Mistakes, at string, in check.Written) {
	const least = time.Second // one observation is to be over before the next
	text := cmp.Or(in.Text("every"), check.WithoutZeroParts(i.Every))
	switch {
	case i.Every > 0 && i.Every < least:
		c.Refuse(at+".every", text, fmt.Sprintf("must be 0s, or at least %s", least))
	case i.After > 0 && i.Every > i.After/2:
		c.Refuse(at+".every", text, fmt.Sprintf("must be at most half of idle.after, which is %s", check.WithoutZeroParts(i.After)))
	}
}

// IdleInstances says how the agent measures an instance that has a process. An instance without a process is idle in any case.
type IdleInstances string

// The ways.
const (
	// IdleInstancesSkip leaves it unknown.
	IdleInstancesSkip IdleInstances = "skip"
	// IdleInstancesSample samples the GPU's counters, which takes Hopper or later.
	IdleInstancesSample IdleInstances = "sample"
)

// Values lists the ways.
func (IdleInstances) Values() []string { return check.Words(IdleInstancesSkip, IdleInstancesSample) }

// The defaults of Idle.
const (
	// DefaultIdleEvery: over hours, a sample each ten seconds misses no work that matters, and an observation takes the driver milliseconds.
	DefaultIdleEvery = 10 * time.Second
	// DefaultIdleAfter: a person who goes to lunch or to a meeting is back.
	DefaultIdleAfter = 6 * time.Hour
	// DefaultIdleBelow: a program that only keeps its context computes nothing at all.
	DefaultIdleBelow = 1
)
