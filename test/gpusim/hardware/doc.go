// Package hardware has only tests: they load the simulator's shared library with go-nvml, as any program on a node loads
// NVIDIA's, and hold the simulated GPUs to what real ones have answered.
package hardware
