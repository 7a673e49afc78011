// Package gpusim simulates the NVIDIA GPUs of one node, as strictly as the hardware. It simulates placement, overlap,
// capacity, busy and half-made instances. MIG mode stays pending until a reset, and a reboot loses the same state.
// Calls have NVML's own result codes and latencies, and faults on demand.
//
// A Node lives in a directory. Its state is in two files, written in turn under a lock, so that any number of processes
// see the same GPUs. Library is NVML over that state, function by function and code by code; it alone has all the
// rules. Two things use it: Node.Driver, the test double for the agent, and the shared library libnvidia-ml.so.1 in the
// folder next to this one, which NVIDIA's own programs load.
//
// The package needs no cgo and must not know go-nvml, Kubernetes or the agent.
package gpusim
