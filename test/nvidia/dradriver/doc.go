// Package dradriver builds the released DRA driver for GPUs v0.5.0 of NVIDIA for tests: gpu-kubelet-plugin, the
// driver's part on each node. go.mod names it as a tool.
//
// It is a separate module so that the requirements of NVIDIA's programs never decide the versions that this project is
// built with.
package dradriver
