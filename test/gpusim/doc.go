// Package gpusim simulates the NVIDIA GPUs of one node, as strict as the hardware: placement, overlap and capacity, busy
// instances, MIG mode that stays pending until a reset, what a reboot loses, half-made instances, NVML's own result
// codes, latencies, and faults on demand.
//
// A Node lives in a directory: its state is in two files, written in turn under a lock, so that any number of processes see
// the same GPUs. Library is NVML over that state, function by function and code by code; every rule is there and only
// there. Two things stand on it: Node.Driver, the test double for the agent, and the shared library libnvidia-ml.so.1
// in the folder beside this one, which NVIDIA's own programs load.
//
// The package needs no cgo and must not know go-nvml, Kubernetes or the agent.
package gpusim
