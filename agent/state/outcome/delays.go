package outcome

import "time"

// Delays between observations. Watches wake the loop earlier; these are for what cannot be watched.
const (
	// DriverRetry is the pause before asking an absent or silent driver again: a driver upgrade takes minutes.
	DriverRetry = 5 * time.Second
	// EvictionRetry is the longest pause between two observations of pods that are leaving.
	EvictionRetry = 5 * time.Second
	// InUseRetry is the pause before the agent retries a step on a GPU that a process still holds.
	InUseRetry = 2 * time.Second
	// NoHolderRetry replaces InUseRetry for NoHolderNews, if no process holds the GPU. A driver holds an instance for some tenths of a second after its last
	// process has ended: artecs-group/FAR_MIG_scheduler loops over that on an A30.
	NoHolderRetry = 250 * time.Millisecond
	// NoHolderNews is how long that lasts before the agent reports that the GPU is in use.
	NoHolderNews = 2 * time.Second
	// InUseNews is the least time between two reports of the processes that hold a GPU: each is a write to the node.
	InUseNews = time.Minute
	// APIRetry is the longest pause after an observation that the API server did not answer: it may answer again at any moment. decide.Retries has longer
	// pauses after passes with failed requests.
	APIRetry = 10 * time.Second
	// ConflictRetry is the pause after another program wrote the node at the same moment.
	ConflictRetry = 100 * time.Millisecond
)

// HostTimeout bounds one request to the host's logind, which answers in milliseconds if it answers.
const HostTimeout = 5 * time.Second
