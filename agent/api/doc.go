// Package api is what other programs read of an agent: the status annotation, the answer to what a label would do, and
// the diagnosis. It is JSON data only, so that kubectl-gpuslice links nothing of the daemon.
package api
