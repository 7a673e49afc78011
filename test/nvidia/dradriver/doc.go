// Package dradriver builds NVIDIA's DRA driver for GPUs v0.5.0 as it is released, for tests: gpu-kubelet-plugin, the driver's part on each
// node, which go.mod names as a tool.
//
// It is a module of its own so that what NVIDIA's programs require never decides the versions that this project is
// built with.
package dradriver
