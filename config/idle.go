package config

import (
	"fmt"
	"time"
)

// Idle says when a pod that has a GPU, or an instance of one, and does not use it is told so.
type Idle struct {
	Every     time.Duration // time between two looks at how busy the GPUs are; 0 for none
	After     time.Duration // how long a pod must have had the GPU and not used it
	Below     int           // percent of that time: a pod that used less is told; 0 for nobody
	Instances IdleInstances
}

// IdleInstances says how the agent finds out how busy an instance is on which there is a process. One without a process is idle in any case.
type IdleInstances string

// The ways.
const (
	// IdleInstancesSkip leaves it unknown.
	IdleInstancesSkip IdleInstances = "skip"
	// IdleInstancesSample samples the GPU's counters, which takes Hopper or later.
	IdleInstancesSample IdleInstances = "sample"
)

// The defaults of Idle.
const (
	// DefaultIdleEvery: over hours, samples of each ten seconds miss no work that matters, and a look takes the driver milliseconds.
	DefaultIdleEvery = 10 * time.Second
	// DefaultIdleAfter: a person who goes to lunch or to a meeting is back.
	DefaultIdleAfter = 6 * time.Hour
	// DefaultIdleBelow: a program that only keeps its context computes nothing at all.
	DefaultIdleBelow = 1
)

func (c *checks) idle(in idleInputs) Idle {
	i := Idle{
		Every:     c.duration("idle.every", in.Every, 0, 5*time.Minute),
		After:     c.duration("idle.after", in.After, 10*time.Second, 30*24*time.Hour),
		Below:     c.percent("idle.below", in.Below),
		Instances: IdleInstances(c.oneOf("idle.instances", in.Instances, string(IdleInstancesSkip), string(IdleInstancesSample))),
	}
	const least = time.Second // one look is to be over before the next
	switch {
	case i.Every > 0 && i.Every < least:
		c.refuse("idle.every", string(in.Every), fmt.Sprintf("must be 0s, or at least %s", least))
	case i.After > 0 && i.Every > i.After/2:
		c.refuse("idle.every", string(in.Every), fmt.Sprintf("must be at most half of idle.after, which is %s", withoutZeroParts(i.After)))
	}
	return i
}
