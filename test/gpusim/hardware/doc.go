// Package hardware has only tests. They load the simulator's shared library with go-nvml, as any program on a node
// loads NVIDIA's, and compare the simulated GPUs with the answers of real ones.
package hardware
