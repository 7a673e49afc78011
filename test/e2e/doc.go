// Package e2e is for tests that need a real node: kubelet, containerd, NVIDIA's own device plugin and pods that really run, on
// the simulated GPUs. They need root, have a machine of package machine to themselves, and are run by `make e2e`.
package e2e
