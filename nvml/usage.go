package nvml

import "context"

// UsageReader reads how much of the node's GPUs processes use. It changes nothing, and works in parallel to a Driver on the same GPUs: a call that
// hangs here holds up none there.
type UsageReader interface {
	// Usage reports every GPU that the driver counts, in PCI order, those that are lost too.
	//
	// It samples the instances that the caller names, by the driver's numbers of them, as far as a process is on one. That takes a fifth of a second,
	// while the driver keeps a sample of each; Usage keeps nothing of an instance when it returns.
	//
	// It returns when ctx ends, at the latest. It then abandons the call into the driver, and Usage is ErrUnresponsive until that call returns. With
	// no driver loaded it is ErrNoDriver.
	Usage(ctx context.Context, sampled map[UUID][]int) ([]Usage, error)
}

// Usage is what processes use of a GPU.
type Usage struct {
	UUID  UUID // empty of one that has never answered
	Index int

	// Lost means that the GPU has fallen off the bus: nothing else is known.
	Lost bool
	// Enabled means that MIG mode is on. Then the driver does not report how busy a process is.
	Enabled bool

	// Processes are those with a context on the GPU or on an instance of it, in order of their ids. Not known means that there may be any.
	Processes Reading[[]ProcessUsage]
	// Instances has the use of the sampled instances, by the driver's numbers: the percentage of the time that anything computed there, or of the
	// multiprocessors that did. An instance without a process is at 0 %. There are none unless MIG mode is on.
	Instances map[int]Reading[float64]
}

// ProcessUsage is what a process uses of a GPU, or of an instance of one.
type ProcessUsage struct {
	PID     int
	GI      int // the driver's number of the GPU instance that it is on, or WholeGPU
	UsedMiB int // memory that it holds there; 0 if the driver does not say
	// Busy is the percentage of the time since the last observation that the busiest kind of engine has worked for the process. Kinds are computing,
	// copying memory, encoding and decoding.
	Busy Reading[float64]
}
